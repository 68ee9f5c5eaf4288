"""Shapes of the models whose steps are compiled; weights and tokenizers play no part."""

from typing import Any

from quire.scripts.gpu import shapes as checked
from quire.scripts.plan.ahead import MODELS

QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "intermediate_size": 5120, "norm_topk_prob": True, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0, "hidden_act": "silu", "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "full_attention_interval": 4, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_12B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "intermediate_size": 15360, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_local_base_freq": 10000,
    "sliding_window": 1024, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE4_SMALL = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 100352,
    "hidden_size": 4096, "num_hidden_layers": 40, "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "attention_multiplier": 0.0078125, "num_local_experts": 72,
    "num_experts_per_tok": 10, "intermediate_size": 768, "shared_intermediate_size": 1536, "hidden_act": "silu",
    "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_d_conv": 4, "mamba_conv_bias": True, "mamba_proj_bias": False, "position_embedding_type": "nope",
    "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = checked.SHAPES | {
    "gemma-3-12b": GEMMA3_12B, "deepseek-v3": MODELS["deepseek-v3"], "qwen3-next-80b-a3b": QWEN3_NEXT_80B,
    "granite-4.0-h-small": GRANITE4_SMALL,
}  # fmt: skip
# What drafts in the step for llama-3-8b, with two layers or one, by its method.
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {
        "hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "vocab_size": 128256, "draft_vocab_size": 32000,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]},  # there are no others where layers are cut
    },
    "draft_model": checked.LLAMA_8B | {
        "hidden_size": 2048, "num_hidden_layers": 2, "head_dim": 64, "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
