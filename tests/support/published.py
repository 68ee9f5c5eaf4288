"""config.json as it is published with real models, and what is known of them."""

from typing import Any, NamedTuple

GLOBAL = None


class Published(NamedTuple):
    """A config.json, the parameters its model is known to have, and each layer's window."""

    config: dict[str, Any]
    parameters: float
    windows: list[int | None]


def kinds(layers: int, every: int, window: int) -> list[int | None]:
    """Each `every`-th layer global, the rest behind a window."""
    return [window if (i + 1) % every else GLOBAL for i in range(layers)]


LONG_FACTORS = {
    "long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0 + i / 100 for i in range(48)],
}  # fmt: skip

PUBLISHED = {
    "Llama-2-7b": Published(
        {
            "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
        6.738e9,
        [GLOBAL] * 32,
    ),
    "Llama-3.1-8B": Published(
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
            "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
        },
        8.030e9,
        [GLOBAL] * 32,
    ),
    "Llama-3.2-1B": Published(
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
        },
        1.236e9,
        [GLOBAL] * 16,
    ),
    "Mistral-7B-v0.1": Published(
        {
            "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
        7.242e9,
        [4096] * 32,
    ),
    "Mistral-7B-v0.3": Published(
        {
            "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.42.0.dev0", "use_cache": True, "vocab_size": 32768,
        },
        7.248e9,
        [GLOBAL] * 32,
    ),
    "Mistral-Nemo-12B": Published(
        {
            "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True,
            "vocab_size": 131072,
        },
        12.248e9,
        [GLOBAL] * 40,
    ),
    "Qwen2.5-7B": Published(
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
            "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
            "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
            "use_sliding_window": False, "vocab_size": 152064,
        },
        7.616e9,
        [GLOBAL] * 28,
    ),
    "Qwen3-8B": Published(
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
            "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        8.191e9,
        [GLOBAL] * 36,
    ),
    "gemma-2-9b": Published(
        {
            "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
            "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
            "sliding_window_size": 4096, "torch_dtype": "float32", "transformers_version": "4.42.0.dev0",
            "use_cache": True, "vocab_size": 256000,
        },
        9.242e9,
        [4096, GLOBAL] * 21,
    ),
    "gemma-3-1b": Published(
        {
            "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
            "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
            "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
            "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
            "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True,
            "vocab_size": 262144,
        },
        0.99989e9,
        kinds(26, 6, 512),
    ),
    "gemma-3-4b": Published(
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
            "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
            "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
            "vision_config": {
                "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
                "patch_size": 14, "vision_use_head": False,
            },
        },
        3.880e9,  # 4.30e9 less the vision tower's 417e6 and the projector's 3e6
        kinds(34, 6, 1024),
    ),
    "gemma-3-27b": Published(
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
            "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
            "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
            "text_config": {
                "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
                "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
        },
        27.01e9,
        kinds(62, 6, 1024),
    ),
    "Phi-3-mini-4k": Published(
        {
            "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
            "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.X"},
            "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
            "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096,
            "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.2",
            "use_cache": True, "attention_bias": False, "vocab_size": 32064,
        },
        3.821e9,
        [2047] * 32,
    ),
    "Phi-3-mini-128k": Published(
        {
            "_name_or_path": "Phi-3-mini-128k-instruct", "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.X"},
            "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
            "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
            "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05, "rope_scaling": LONG_FACTORS | {"type": "longrope"}, "rope_theta": 10000.0,
            "sliding_window": 262144, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 32064,
        },
        3.821e9,
        [GLOBAL] * 32,
    ),
    "phi-4": Published(
        {
            "_name_or_path": "", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100257,
            "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17920,
            "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40,
            "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
            "pad_token_id": 100257, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None,
            "rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.47.0", "use_cache": True, "vocab_size": 100352,
        },
        14.66e9,
        [GLOBAL] * 40,
    ),
    "Phi-4-mini": Published(
        {
            "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.X"},
            "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1,
            "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
            "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
            "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": LONG_FACTORS | {"type": "longrope"},
            "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": True, "vocab_size": 200064,
        },
        3.836e9,
        [GLOBAL] * 32,
    ),
    "OLMo-2-7B": Published(
        {
            "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
            "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "use_cache": True,
            "vocab_size": 100352,
        },
        7.299e9,
        [GLOBAL] * 32,
    ),
    "OLMo-3-7B": Published(
        {
            "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": None, "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 11008,
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
            "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "rope_type": "yarn",
            },
            "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.57.0", "use_cache": True, "vocab_size": 100278,
        },
        7.298e9,
        kinds(32, 4, 4096),
    ),
    "granite-3.3-8b": Published(
        {
            "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attention_multiplier": 0.0078125, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12800,
            "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000.0,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.49.0",
            "use_cache": True, "vocab_size": 49159,
        },
        8.171e9,
        [GLOBAL] * 40,
    ),
    "SmolLM3-3B": Published(
        {
            "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0",
            "use_cache": False, "use_sliding_window": False, "vocab_size": 128256,
        },
        3.075e9,
        [GLOBAL] * 36,
    ),
    "GLM-4-9B-0414": Published(
        {
            "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768,
            "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
            "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0",
            "use_cache": True, "vocab_size": 151552,
        },
        9.400e9,
        [GLOBAL] * 40,
    ),
    "Seed-OSS-36B": Published(
        {
            "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
            "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648,
            "max_position_embeddings": 524288, "mlp_bias": False, "model_type": "seed_oss",
            "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 1,
            "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.55.0", "use_cache": True, "vocab_size": 155136,
        },
        36.15e9,
        [GLOBAL] * 64,
    ),
    "EXAONE-4.0-32B": Published(
        {
            "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 361,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "intermediate_size": 27392, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16,
            "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40,
            "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 0, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0",
            "use_cache": True, "vocab_size": 102400,
        },
        32.00e9,
        kinds(64, 4, 4096),
    ),
    "Mistral-Small-3.1-24B": Published(
        {
            "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
            "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
            "text_config": {
                "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
                "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
                "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
                "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None,
                "use_cache": True, "vocab_size": 131072,
            },
            "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
            "vision_config": {
                "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "gelu", "hidden_size": 1024,
                "image_size": 1540, "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral",
                "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14,
                "rope_theta": 10000.0,
            },
            "vision_feature_layer": -1,
        },
        23.572e9,
        [GLOBAL] * 40,
    ),
    "Ministral-3-3B": Published(
        {
            "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
            "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
            "spatial_merge_size": 2, "tie_word_embeddings": True,
            "text_config": {
                "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
                "initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 262144,
                "model_type": "ministral3", "num_attention_heads": 32, "num_hidden_layers": 26,
                "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
                "rope_parameters": {
                    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                    "rope_type": "yarn", "type": "yarn",
                },
                "sliding_window": None, "use_cache": True, "vocab_size": 131072,
            },
            "transformers_version": "5.0.0.dev0",
            "vision_config": {"hidden_size": 1024, "model_type": "pixtral", "num_hidden_layers": 24},
            "vision_feature_layer": -1,
        },
        3.429e9,
        [GLOBAL] * 26,
    ),
    "c4ai-command-r-v01": Published(
        {
            "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 8192,
            "initializer_range": 0.02, "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625,
            "max_position_embeddings": 8192, "model_max_length": 131072, "model_type": "cohere",
            "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 64, "pad_token_id": 0,
            "pretraining_tp": 1, "rope_theta": 8000000.0, "torch_dtype": "float16",
            "transformers_version": "4.38.2", "use_cache": True, "vocab_size": 256000,
        },
        34.98e9,
        [GLOBAL] * 40,
    ),
    "c4ai-command-r7b": Published(
        {
            "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192,
            "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
            "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
            "sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "bfloat16",
            "transformers_version": "4.48.0.dev0", "use_cache": True, "use_embedding_sharing": True,
            "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False,
            "vocab_size": 256000,
        },
        8.028e9,
        kinds(32, 4, 4096),
    ),
    "ERNIE-4.5-0.3B": Published(
        {
            "architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072,
            "model_type": "ernie4_5", "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2,
            "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "use_bias": False, "use_cache": False, "vocab_size": 103424,
        },
        0.3607e9,
        [GLOBAL] * 18,
    ),
    "Hunyuan-7B": Published(
        {
            "add_classification_head": False, "architectures": ["HunYuanDenseV1ForCausalLM"],
            "attention_bias": False, "attention_dropout": 0.0, "attention_head_dim": 128, "bos_token_id": 127958,
            "cla_share_factor": 2, "class_num": 0, "dense_list": [4096, 0], "eod_token_id": 127967,
            "eos_token_id": 127960, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "im_end_id": 6,
            "im_newline_id": 12, "im_start_id": 5, "initializer_range": 0.02, "intermediate_size": 14336,
            "mask_init_id": 13, "max_position_embeddings": 32768, "mlp_bias": False, "model_type": "hunyuan_v1_dense",
            "norm_type": "rms", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "org_vocab_size": 128167, "pad_id": 127961, "pad_token_id": 127961, "pool_type": "last",
            "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "type": "dynamic",
            },
            "rope_theta": 10000.0, "sep_token_id": 127962, "text_end_id": 8, "text_start_id": 7,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.41.2",
            "use_cache": True, "use_cla": False, "use_qk_norm": True, "use_rotary_pos_emb": True,
            "vocab_size": 128167,
        },
        7.505e9,
        [GLOBAL] * 32,
    ),
}  # fmt: skip

# Models that differ from one of the above in a few keys: what differs, and the parameters or what the error says.
RELATIVES: dict[str, tuple[str, dict[str, Any], float | str]] = {
    "granite-3.1-2b": (
        "granite-3.3-8b",
        {
            "attention_multiplier": 0.015625, "hidden_size": 2048, "intermediate_size": 8192, "logits_scaling": 8.0,
            "rope_theta": 5000000.0, "vocab_size": 49155,
        },
        2.5335e9,
    ),
    "GLM-4-32B-0414": (
        "GLM-4-9B-0414",
        {
            "attention_bias": False, "hidden_size": 6144, "intermediate_size": 23040, "num_attention_heads": 48,
            "num_hidden_layers": 61,
        },
        32.566e9,
    ),
    "glm-4-9b-chat-hf": ("GLM-4-9B-0414", {"model_type": "glm", "rms_norm_eps": 1.5625e-07}, 9.400e9),
    "EXAONE-4.0-1.2B": (
        "EXAONE-4.0-32B",
        {
            "head_dim": 64, "hidden_size": 2048, "intermediate_size": 4096, "layer_types": ["full_attention"] * 30,
            "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 30,
            "sliding_window": None, "sliding_window_pattern": None, "tie_word_embeddings": True,
        },
        1.279e9,
    ),
    "c4ai-command-r-plus": (
        "c4ai-command-r-v01",
        {
            "hidden_size": 12288, "intermediate_size": 33792, "num_attention_heads": 96, "num_hidden_layers": 64,
            "num_key_value_heads": 8, "use_qk_norm": True,
        },
        "use_qk_norm = True is not supported",
    ),
    "c4ai-command-a": (
        "c4ai-command-r7b",
        {
            "hidden_size": 12288, "intermediate_size": 36864, "max_position_embeddings": 131072,
            "num_attention_heads": 96, "num_hidden_layers": 64,
        },
        111.06e9,
    ),
    "Hunyuan-0.5B": (
        "Hunyuan-7B",
        {
            "hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16, "num_hidden_layers": 24,
            "vocab_size": 120818,
        },
        0.5391e9,
    ),
    "Seed-OSS without biases": ("Seed-OSS-36B", {"attention_bias": False}, 36.15e9),
    "Mistral-Small-3.1-24B in another's codes": (
        "Mistral-Small-3.1-24B",
        {"quantization_config": {"bits": 4, "quant_method": "aqlm"}},
        "quantization_config.quant_method = 'aqlm' is not supported",
    ),
}  # fmt: skip
