"""Tiny models of every family: config.json as it is published, only smaller, and what is asked of each."""

from .families_moe import MOE_VARIANTS
from .variant import SIZES, Variant

LLAMA = SIZES | {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
    "rope_scaling": None, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
}  # fmt: skip
MISTRAL = SIZES | {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
    "sliding_window": 24, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = SIZES | {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "rope_theta": 1000000.0,
    "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "use_mrope": False,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3 = SIZES | {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "rope_theta": 1000000.0,
    "head_dim": 32, "attention_bias": False, "max_window_layers": 3, "sliding_window": None,
    "use_sliding_window": False, "rope_scaling": None, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA2 = SIZES | {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 4, "head_dim": 32, "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0, "sliding_window": 20, "sliding_window_size": 20,
    "rope_theta": 10000.0, "attention_bias": False, "cache_implementation": "hybrid",
}  # fmt: skip
GEMMA3 = {key: value for key, value in SIZES.items() if key != "torch_dtype"} | {
    "model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 40, "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": 20, "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}  # fmt: skip
PHI3 = SIZES | {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
    "rope_scaling": None, "original_max_position_embeddings": 256, "sliding_window": None, "attention_bias": False,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
OLMO2 = SIZES | {
    "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_act": "silu", "rope_theta": 500000.0,
    "rope_scaling": None, "attention_bias": False, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
OLMO3_KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

VARIANTS = [
    Variant("llama", LLAMA | {"num_key_value_heads": 4}),
    Variant("llama-linear", LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    Variant(
        "llama-dynamic",
        LLAMA
        | {
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        },
    ),
    # Past the declared length transformers changes the base at every token, so that only whole sequences compare.
    Variant(
        "llama-dynamic-stretched",
        LLAMA | {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 3.0}},
        max_len=80,
        new_tokens=0,
    ),
    Variant(
        "llama-llama3",
        LLAMA
        | {
            "attention_bias": True,
            "rope_theta": 1000.0,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),  # fmt: skip
    Variant(
        "llama-yarn",
        LLAMA
        | {
            "head_dim": 32,
            "rope_theta": 100.0,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8},
        },
    ),
    Variant(
        "llama-longrope",
        LLAMA
        | {
            "rope_scaling": {
                "rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 8, "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 5.0, 7.0, 8.0],
            },
        },
        prompts=(80, 33),
    ),  # fmt: skip
    Variant("mistral", MISTRAL | {"head_dim": 32}),
    Variant("mistral-nemo", MISTRAL | {"head_dim": 24, "num_key_value_heads": 1, "sliding_window": None}),
    Variant("qwen2", QWEN2 | {"tie_word_embeddings": True}),
    Variant("qwen2-window", QWEN2 | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    Variant("qwen3", QWEN3 | {"tie_word_embeddings": True}),
    Variant(
        "qwen3-window",
        QWEN3
        | {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 13,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    Variant("gemma2", GEMMA2),
    Variant(
        "gemma3-text",
        GEMMA3
        | {
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    Variant(
        "gemma3-vision",
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": GEMMA3 | {"num_hidden_layers": 6, "sliding_window": 32},
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16,
                "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
                "vision_use_head": False,
            },
            "mm_tokens_per_image": 4, "boi_token_index": 155, "eoi_token_index": 156, "image_token_index": 157,
            "eos_token_id": [1, 106], "initializer_range": 0.02, "torch_dtype": "bfloat16",
        },
        renames=(("model.language_model.", "language_model.model."), ("model.", "")),
    ),  # fmt: skip
    Variant("phi3", PHI3 | {"num_key_value_heads": 4, "sliding_window": 21}),
    Variant(
        "phi3-short",
        PHI3
        | {
            "max_position_embeddings": 1024,
            "rope_scaling": {
                "type": "longrope", "short_factor": [1.0 + i / 4 for i in range(8)], "long_factor": [9.0] * 8,
            },
        },
        max_len=256,
    ),
    Variant(
        "phi4-long",
        PHI3
        | {
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 1.2, 1.7, 3.0, 6.0, 8.0],
            },
        },
        prompts=(80, 33),
    ),  # fmt: skip
    Variant("olmo2", OLMO2 | {"num_key_value_heads": 4}),
    Variant("olmo2-gqa", OLMO2 | {"attention_bias": True}),
    Variant(
        "olmo3",
        OLMO2
        | {
            "model_type": "olmo3",
            "architectures": ["Olmo3ForCausalLM"],
            "num_hidden_layers": 4,
            "sliding_window": 18,
            "layer_types": OLMO3_KINDS,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
                "beta_slow": 1.0, "attention_factor": 1.2079441541679836,
            },
        },
    ),  # fmt: skip
    *MOE_VARIANTS,
]  # fmt: skip

# One of each kind of layer.
KINDS = ["llama", "olmo2", "gemma3-text", "gemma4-shared", "gpt-oss", "deepseek-v3"]
