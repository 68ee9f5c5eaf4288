"""Tiny models of every family: published config.json files with smaller sizes, and prompts."""

from .families_moe import MOE_VARIANTS
from .families_states import STATE_VARIANTS
from .variant import SIZES, Variant

LLAMA = SIZES | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "pretraining_tp": 1,
}
MISTRAL = SIZES | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "sliding_window": 24,
    "tie_word_embeddings": False,
}
QWEN2 = SIZES | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "use_mrope": False,
    "tie_word_embeddings": False,
}
QWEN3 = SIZES | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "head_dim": 32,
    "attention_bias": False,
    "max_window_layers": 3,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
GEMMA2 = SIZES | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0,
    "sliding_window": 20,
    "sliding_window_size": 20,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "cache_implementation": "hybrid",
}
GEMMA3 = {key: value for key, value in SIZES.items() if key != "torch_dtype"} | {
    "model_type": "gemma3_text",
    "head_dim": 32,
    "query_pre_attn_scalar": 40,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "sliding_window": 20,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
PHI3 = SIZES | {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "original_max_position_embeddings": 256,
    "sliding_window": None,
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
OLMO2 = SIZES | {
    "model_type": "olmo2",
    "architectures": ["Olmo2ForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
GRANITE = SIZES | {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.6,
    "residual_multiplier": 0.6,
}
SMOLLM3 = SIZES | {
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 5000000.0,
    "rope_scaling": None,
    "num_hidden_layers": 4,
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": 3,
    "layer_types": ["full_attention"] * 4,
    "max_window_layers": 28,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
GLM4 = SIZES | {
    "model_type": "glm4",
    "architectures": ["Glm4ForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "attention_bias": False,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
}
SEED_OSS = SIZES | {
    "model_type": "seed_oss",
    "architectures": ["SeedOssForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 10000000.0,
    "rope_scaling": {"rope_type": "default"},
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": 32,
    "mlp_bias": False,
    "pad_token_id": 3,
    "pretraining_tp": 1,
    "residual_dropout": 0.1,
    "tie_word_embeddings": False,
}
EXAONE4 = SIZES | {
    "model_type": "exaone4",
    "architectures": ["Exaone4ForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 1000000,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": 20,
    "sliding_window_pattern": "LLLG",
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
MINISTRAL3 = SIZES | {
    "model_type": "ministral3",
    "head_dim": 32,
    "hidden_act": "silu",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "head_dim": 8,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
    "hidden_act": "silu",
}
MISTRAL3 = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 170,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "vision_config": PIXTRAL,
    "vision_feature_layer": -1,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
COHERE = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"} | {
    "model_type": "cohere",
    "architectures": ["CohereForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 8000000.0,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.8,
    "pad_token_id": 0,
    "attention_bias": False,
    "use_qk_norm": False,
    "tie_word_embeddings": True,
}
ERNIE = SIZES | {
    "model_type": "ernie4_5",
    "architectures": ["Ernie4_5ForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "head_dim": 32,
    "pad_token_id": 0,
    "use_bias": False,
    "tie_word_embeddings": True,
}
HUNYUAN = SIZES | {
    "model_type": "hunyuan_v1_dense",
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "attention_bias": False,
    "head_dim": 32,
    "attention_head_dim": 32,
    "use_qk_norm": True,
    "use_cla": False,
    "pad_token_id": 3,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "type": "dynamic",
    },
}
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
    # Beyond the declared length transformers changes the RoPE base at every token, so that only
    # whole sequences compare.
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
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
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
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8,
            },
        },
    ),
    Variant(
        "llama-longrope",
        LLAMA
        | {
            "rope_scaling": {
                "rope_type": "longrope",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 5.0, 7.0, 8.0],
            },
        },
        prompts=(80, 33),
    ),  # fmt: skip
    Variant("mistral", MISTRAL | {"head_dim": 32}),
    Variant(
        "mistral-nemo", MISTRAL | {"head_dim": 24, "num_key_value_heads": 1, "sliding_window": None}
    ),
    Variant("qwen2", QWEN2 | {"tie_word_embeddings": True}),
    Variant(
        "qwen2-window",
        QWEN2 | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
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
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "mm_tokens_per_image": 4,
            "boi_token_index": 155,
            "eoi_token_index": 156,
            "image_token_index": 157,
            "eos_token_id": [1, 106],
            "initializer_range": 0.02,
            "torch_dtype": "bfloat16",
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
                "type": "longrope",
                "short_factor": [1.0 + i / 4 for i in range(8)],
                "long_factor": [9.0] * 8,
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
                "type": "longrope",
                "short_factor": [1.0] * 6,
                "long_factor": [1.0, 1.2, 1.7, 3.0, 6.0, 8.0],
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
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "attention_factor": 1.2079441541679836,
            },
        },
    ),  # fmt: skip
    Variant("llama-biases", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    Variant("granite", GRANITE),
    Variant("smollm3", SMOLLM3),
    Variant(
        "glm",
        GLM4 | {"model_type": "glm", "architectures": ["GlmForCausalLM"], "attention_bias": True},
    ),
    Variant("glm4", GLM4),
    Variant("seed-oss", SEED_OSS),
    Variant("exaone4", EXAONE4),
    Variant(
        "exaone4-small",
        EXAONE4
        | {
            "layer_types": ["full_attention"] * 4,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
        },
    ),
    Variant("ministral3", MINISTRAL3 | {"tie_word_embeddings": True}),
    Variant(
        "mistral3", MISTRAL3 | {"text_config": MISTRAL | {"sliding_window": None, "head_dim": 24}}
    ),
    Variant("mistral3-devstral", MISTRAL3 | {"text_config": MINISTRAL3}),
    Variant("cohere", COHERE),
    Variant(
        "cohere2",
        COHERE
        | {
            "model_type": "cohere2",
            "architectures": ["Cohere2ForCausalLM"],
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_switch": 4,
            "order_of_interleaved_layers": "local_attn_first",
            "rotary_pct": 1.0,
            "position_embedding_type": "rope_gptj",
            "rope_scaling": None,
            "sliding_window": 20,
            "sliding_window_pattern": 4,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": False,
            "cache_implementation": "hybrid",
        },
    ),
    Variant("ernie4-5", ERNIE),
    Variant("ernie4-5-biases", ERNIE | {"use_bias": True, "tie_word_embeddings": False}),
    Variant("hunyuan", HUNYUAN),
    *MOE_VARIANTS,
    *STATE_VARIANTS,
]

# One of each kind of layer.
KINDS = [
    "llama",
    "olmo2",
    "gemma3-text",
    "gemma4-shared",
    "gpt-oss",
    "deepseek-v3",
    "cohere2",
    "llama4-text",
    "qwen3-next",
]
