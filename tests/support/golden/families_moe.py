"""Tiny models of the families with experts; those of the dense ones are in `families.py`."""

from .variant import SIZES, Variant

MIXTRAL = SIZES | {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "rope_theta": 1000000.0,
    "num_experts_per_tok": 2, "num_local_experts": 4, "output_router_logits": False, "router_aux_loss_coef": 0.02,
    "sliding_window": 24, "tie_word_embeddings": False,
}  # fmt: skip
PHIMOE = SIZES | {
    "model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
    "num_experts_per_tok": 2, "num_local_experts": 6, "attention_bias": True, "lm_head_bias": True,
    "router_jitter_noise": 0.3, "input_jitter_noise": 0.01, "output_router_logits": False, "router_aux_loss_coef": 0.0,
    "sliding_window": None, "tie_word_embeddings": False,
}  # fmt: skip
FACTORS = [1.0 + i / 4 for i in range(8)]  # the same for both lengths: transformers never takes those of the longer
PHIMOE_LONG = {
    "num_hidden_layers": 2, "max_position_embeddings": 256, "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope", "long_factor": FACTORS, "short_factor": FACTORS,
        "long_mscale": 1.24, "short_mscale": 1.24, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
QWEN3_MOE = SIZES | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "silu", "rope_theta": 1000000.0,
    "head_dim": 32, "attention_bias": False, "decoder_sparse_step": 1, "max_window_layers": 3, "mlp_only_layers": [],
    "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 3,
    "output_router_logits": False, "rope_scaling": None, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = SIZES | {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_act": "silu", "rope_theta": 150000.0,
    "num_hidden_layers": 4, "head_dim": 16, "attention_bias": True, "num_local_experts": 6, "num_experts_per_tok": 3,
    "experts_per_token": 3, "swiglu_limit": 2.0, "sliding_window": 16, "initial_context_length": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "output_router_logits": False,
    "router_aux_loss_coef": 0.9, "tie_word_embeddings": False, "max_position_embeddings": 256,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
DEEPSEEK = SIZES | {
    "hidden_act": "silu", "rope_theta": 10000.0, "num_key_value_heads": 4, "attention_bias": False, "ep_size": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 32, "pretraining_tp": 1, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_V2 = DEEPSEEK | {
    "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "aux_loss_alpha": 0.001, "seq_aux": True,
    "n_shared_experts": 2, "norm_topk_prob": False, "scoring_func": "softmax",
}  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK | {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "n_shared_experts": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5, "q_lora_rank": 48,
}  # fmt: skip
GEMMA4 = {key: value for key, value in SIZES.items() if key != "torch_dtype"} | {
    "model_type": "gemma4_text", "dtype": "bfloat16", "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32,
    "attention_bias": False, "attention_k_eq_v": False, "enable_moe_block": False, "final_logit_softcapping": 8.0,
    "hidden_activation": "gelu_pytorch_tanh", "num_experts": None, "top_k_experts": None,
    "moe_intermediate_size": None, "num_global_key_value_heads": None, "sliding_window": 20,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True, "use_bidirectional_attention": None,
}  # fmt: skip
# So many heads that hardly a score is zero, where all products are below: of equal scores either side may pick any.
INDEXER = {"index_head_dim": 32, "index_n_heads": 16, "index_topk": 24}
QWEN2_MOE = SIZES | {
    "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "hidden_act": "silu", "rope_theta": 1000000.0,
    "decoder_sparse_step": 1, "max_window_layers": 3, "mlp_only_layers": [], "moe_intermediate_size": 32,
    "norm_topk_prob": False, "num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 48, "sliding_window": 24,
    "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
OLMOE = SIZES | {
    "model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
    "attention_bias": False, "clip_qkv": None, "intermediate_size": 32, "norm_topk_prob": False, "num_experts": 8,
    "num_experts_per_tok": 3, "output_router_logits": False, "rope_scaling": None, "router_aux_loss_coef": 0.01,
    "num_key_value_heads": 4, "pad_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
SIGMOID = {
    "attention_bias": True, "first_k_dense_replace": 1, "hidden_act": "silu", "moe_intermediate_size": 32, "n_group": 1,
    "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 3, "pad_token_id": 3,
    "num_nextn_predict_layers": 1, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False, "topk_group": 1,
}  # fmt: skip
GLM4_MOE = SIZES | SIGMOID | {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "head_dim": 32, "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
}  # fmt: skip
GLM4_MOE_LITE = SIZES | SIGMOID | {
    "model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False,
    "kv_lora_rank": 32, "num_key_value_heads": 4, "partial_rotary_factor": 1.0, "q_lora_rank": 48,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 32, "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.8,
}  # fmt: skip
MISTRAL4 = SIZES | {
    "model_type": "mistral4", "attention_bias": False, "first_k_dense_replace": 0, "hidden_act": "silu",
    "kv_lora_rank": 32, "moe_intermediate_size": 32, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 3, "num_key_value_heads": 4, "q_lora_rank": 48,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 20, "rope_interleave": True,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.4, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0, "rope_type": "yarn",
        "type": "yarn", "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
MINIMAX_M2 = SIZES | {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 1, 1],
    "head_dim": 32, "hidden_act": "silu", "intermediate_size": 32, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0, "mtp_transformer_layers": 1,
    "num_experts_per_tok": 3, "num_local_experts": 8, "num_mtp_modules": 3, "output_router_logits": False,
    "qk_norm_type": "per_layer", "rope_theta": 5000000, "rotary_dim": 16, "router_aux_loss_coef": 0.001,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "use_mtp": True,
    "use_qk_norm": True, "use_routing_bias": True, "tie_word_embeddings": False,
}  # fmt: skip
ERNIE_MOE = SIZES | {
    "model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_act": "silu",
    "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 32, "moe_k": 3,
    "moe_layer_end_index": 3, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 8,
    "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_hidden_layers": 4, "num_nextn_predict_layers": 1,
    "pad_token_id": 0, "rope_theta": 500000, "use_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
HUNYUAN_MOE = SIZES | {
    "model_type": "hunyuan_v1_moe", "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": False,
    "attention_head_dim": 32, "head_dim": 32, "hidden_act": "silu", "mlp_bias": False,
    "moe_intermediate_size": [96] * 3,
    "moe_topk": [3] * 3, "num_experts": 8, "num_shared_expert": [1] * 3, "pad_token_id": 3, "rope_theta": 10000.0,
    "use_cla": False, "use_mixed_mlp_moe": True, "use_qk_norm": True, "tie_word_embeddings": True,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
}  # fmt: skip
LLAMA4 = SIZES | {
    "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 32, "attn_scale": 0.1,
    "attn_temperature_tuning": True, "floor_scale": 8, "for_llm_compressor": False, "head_dim": 32,
    "hidden_act": "silu", "interleave_moe_layer_step": 2, "intermediate_size": 48, "intermediate_size_mlp": 96,
    "no_rope_layers": [1, 1, 1, 0], "num_experts_per_tok": 1, "num_hidden_layers": 4, "num_local_experts": 8,
    "output_router_logits": False, "pad_token_id": 3, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0, "use_qk_norm": True, "tie_word_embeddings": False,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64,
        "rope_type": "llama3",
    },
}  # fmt: skip
LLAMA4_VISION = {
    "model_type": "llama4_vision_model", "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projector_input_dim": 16, "projector_output_dim": 16,
    "vision_output_dim": 16,
}  # fmt: skip
KIMI_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14,
    "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip

GRANITE_MOE = SIZES | {
    "model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"], "hidden_act": "silu", "rope_theta": 10000.0,
    "rope_scaling": None, "attention_bias": False, "attention_multiplier": 0.2, "embedding_multiplier": 2.0,
    "intermediate_size": 32, "logits_scaling": 1.6, "num_experts_per_tok": 3, "num_local_experts": 8,
    "output_router_logits": False, "residual_multiplier": 0.6, "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": True,
}  # fmt: skip
GRANITE_MOE_SHARED = GRANITE_MOE | {
    "model_type": "granitemoeshared", "architectures": ["GraniteMoeSharedForCausalLM"], "shared_intermediate_size": 48,
}  # fmt: skip

MOE_VARIANTS = [
    Variant("granite-moe", GRANITE_MOE),
    Variant("granite-moe-shared", GRANITE_MOE_SHARED),
    Variant("mixtral", MIXTRAL),
    Variant("phimoe", PHIMOE),
    Variant("phimoe-longrope", PHIMOE | PHIMOE_LONG, 256),
    Variant("qwen3-moe", QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 6, "mlp_only_layers": [3]}),
    Variant(
        "qwen3-moe-bias",
        QWEN3_MOE | {"norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": True},
    ),
    Variant(
        "gpt-oss",
        GPT_OSS
        | {
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            }
        },
    ),
    Variant("gpt-oss-wide", GPT_OSS),
    Variant(
        "deepseek-v2-lite",
        DEEPSEEK_V2
        | {
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
            "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    Variant(
        "deepseek-v2",
        DEEPSEEK_V2
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 48,
            "routed_scaling_factor": 4.0,
            "attention_bias": True,
        },
    ),
    Variant(
        "deepseek-v3",
        DEEPSEEK_V3
        | {"n_group": 4, "topk_group": 2, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    Variant(
        "deepseek-v3-small",
        DEEPSEEK_V3
        | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 0},
    ),
    Variant(
        "gemma4-shared",
        {
            "model_type": "gemma4",
            "architectures": ["Gemma4ForConditionalGeneration"],
            "dtype": "bfloat16",
            "text_config": GEMMA4
            | {
                "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 160, "num_key_value_heads": 1,
                "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
            },
            "vision_config": {
                "model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "position_embedding_size": 8,
            },
            # Outside the vocabulary, so that no prompt holds one: where an image stands the text model sees padding.
            "audio_config": None, "audio_token_id": 165, "boa_token_id": 166, "boi_token_id": 167,
            "eoa_token_index": 168, "eoi_token_id": 169, "image_token_id": 164, "video_token_id": 163,
            "vision_soft_tokens_per_image": 4, "initializer_range": 0.02, "tie_word_embeddings": True,
        },
    ),
    Variant(
        "gemma4-moe",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
        },
    ),
    Variant(
        "deepseek-v32",
        DEEPSEEK_V3
        | INDEXER
        | {
            "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "n_group": 4, "topk_group": 2,
            "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    Variant(
        "glm-moe-dsa",
        GLM4_MOE_LITE
        | INDEXER
        | {
            "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], "rope_interleave": True,
            "indexer_rope_interleave": True, "num_hidden_layers": 4, "scoring_func": "sigmoid", "index_topk_freq": 2,
            "moe_layer_freq": 1, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        },
    ),
    Variant("qwen2-moe", QWEN2_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    Variant(
        "qwen2-moe-window",
        QWEN2_MOE | {"use_sliding_window": True, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    Variant("olmoe", OLMOE),
    Variant("glm4-moe", GLM4_MOE),
    Variant("glm4-moe-lite", GLM4_MOE_LITE),
    Variant("mistral4", MISTRAL4),
    Variant("minimax-m2", MINIMAX_M2),
    Variant("ernie4-5-moe", ERNIE_MOE),
    Variant("hunyuan-moe", HUNYUAN_MOE),
    Variant("llama4-text", LLAMA4),
    Variant(
        "llama4",
        {
            "model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 170,
            "eoi_token_index": 171, "image_token_index": 172, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "text_config": LLAMA4 | {"interleave_moe_layer_step": 1, "use_qk_norm": False},
            "vision_config": LLAMA4_VISION,
        },
        renames=(("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    ),
    Variant(
        "kimi-k25",
        {
            "model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "ignore_index": -100,
            "media_placeholder_token_id": 170, "image_token_id": 170, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "text_config": DEEPSEEK_V3 | {
                "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.8,
                "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            }, "vision_config": KIMI_VISION,
        },
        renames=(("language_model.model.blocks.", "language_model.model.layers."),),
    ),
]  # fmt: skip
