"""Tiny models of the families whose layers keep a state of fixed size."""

from .variant import SIZES, Variant

DELTA = {
    "hidden_act": "silu", "head_dim": 32, "attention_bias": False, "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_NEXT = SIZES | DELTA | {
    "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "rope_theta": 10000.0,
    "rope_scaling": None, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 8,
    "num_experts_per_tok": 3, "shared_expert_intermediate_size": 48, "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
QWEN3_5 = SIZES | DELTA | {
    "model_type": "qwen3_5_text", "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mlp_only_layers": [],
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25, "rope_theta": 10000.0,
        "rope_type": "default",
    },
}  # fmt: skip
QWEN3_5 = {key: value for key, value in QWEN3_5.items() if key != "torch_dtype"} | {"dtype": "bfloat16"}
QWEN3_5_MOE = {key: value for key, value in QWEN3_5.items() if key != "intermediate_size"} | {
    "model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48, "router_aux_loss_coef": 0.001,
}  # fmt: skip
LFM2 = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"} | {
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5, "rope_theta": 1000000.0,
    "conv_L_cache": 3, "conv_bias": False, "conv_dim": 64, "conv_dim_out": 64, "conv_use_xavier_init": True,
    "block_auto_adjust_ff_dim": True, "block_dim": 64, "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.5,
    "block_mlp_init_scale": 1.0, "block_multiple_of": 16, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
    "block_use_swiglu": True, "block_use_xavier_init": True, "num_heads": 4, "num_hidden_layers": 5,
    "full_attn_idxs": [2, 4], "theta": 1000000.0, "use_pos_enc": True, "tie_embedding": True,
}  # fmt: skip
LFM2_MOE = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"} | {
    "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"], "norm_eps": 1e-5, "conv_L_cache": 3,
    "conv_bias": False, "moe_intermediate_size": 32, "norm_topk_prob": True, "num_dense_layers": 2, "num_experts": 8,
    "num_experts_per_tok": 3, "num_hidden_layers": 4, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0,
    "use_expert_bias": True, "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "output_router_logits": False,
}  # fmt: skip
NEMOTRON_H = {key: value for key, value in SIZES.items() if key not in ("rms_norm_eps", "num_hidden_layers")} | {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "chunk_size": 16,
    "conv_kernel": 4, "expand": 2, "head_dim": 32, "hybrid_override_pattern": "MM-*-M-", "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 8, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "n_groups": 2, "residual_in_fp32": False, "ssm_state_size": 24,
    "tie_word_embeddings": False, "time_step_max": 0.1, "time_step_min": 0.001, "use_bias": False,
    "use_conv_bias": True, "use_mamba_kernels": True, "rescale_prenorm_residual": True,
}  # fmt: skip
NEMOTRON_3 = NEMOTRON_H | {
    "hybrid_override_pattern": "ME*EM", "mamba_num_heads": 6, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "topk_group": 1,
}  # fmt: skip
MAMBA2 = {
    "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 16,
    "conv_kernel": 4, "eos_token_id": 0, "expand": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64,
    "initializer_range": 0.1, "layer_norm_epsilon": 1e-5, "n_groups": 2, "norm_before_gate": True, "num_heads": 8,
    "num_hidden_layers": 4, "pad_token_id": 0, "rescale_prenorm_residual": False, "residual_in_fp32": True,
    "rms_norm": True, "state_size": 24, "tie_word_embeddings": False, "time_step_floor": 1e-4,
    "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 4,
    "torch_dtype": "float32", "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 160,
}  # fmt: skip
KIMI_LINEAR = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"} | {
    "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "hidden_act": "silu", "head_dim": 24,
    "pad_token_id": 0,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "mla_use_nope": True, "model_max_length": 512, "moe_intermediate_size": 32, "moe_layer_freq": 1,
    "linear_attn_config": {
        "full_attn_layers": [3], "head_dim": 16, "kda_layers": [1, 2, 4], "num_heads": 4, "short_conv_kernel_size": 4,
    },
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 8,
    "num_experts_per_token": 3, "num_hidden_layers": 4, "num_key_value_heads": 4, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True,
}  # fmt: skip
OLMO_HYBRID = SIZES | {key: value for key, value in DELTA.items() if key != "head_dim"} | {
    "model_type": "olmo_hybrid", "architectures": ["OlmoHybridForCausalLM"], "pad_token_id": 0,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"}, "linear_allow_neg_eigval": True,
    "linear_a_log_min": 0.0, "linear_a_log_max": 16.0, "linear_dt_min": 0.001, "linear_dt_max": 0.1,
    "linear_dt_init_floor": 0.0001, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3, "linear_num_key_heads": 4,
    # As many numbers of keys as of values: transformers saves three convolutions as thirds of one.
    "linear_key_head_dim": 24, "linear_value_head_dim": 24,
}  # fmt: skip
FALCON_H1 = SIZES | {
    "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "hidden_act": "silu", "attention_bias": False,
    "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.8, "attn_layer_indices": None, "head_dim": 16,
    "embedding_multiplier": 1.5, "key_multiplier": 0.7, "lm_head_multiplier": 0.6, "mamba_chunk_size": 64,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 12, "mamba_d_ssm": 96, "mamba_d_state": 24,
    "mamba_expand": 2, "mamba_n_groups": 2, "mamba_n_heads": 8, "mamba_norm_before_gate": False,
    "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "mlp_bias": False,
    "mlp_expansion_factor": 8, "mlp_multipliers": [0.8, 0.7], "num_logits_to_keep": 1, "projectors_bias": False,
    "rope_scaling": None, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 0.8, 1.1, 0.7, 0.6], "tie_word_embeddings": False,
}  # fmt: skip
GRANITE_HYBRID = SIZES | {
    "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_act": "silu",
    "attention_bias": False, "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 0.5,
    "residual_multiplier": 0.6, "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_hidden_layers": 4,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_state": 24,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False, "num_experts_per_tok": 0,
    "num_local_experts": 0, "normalization_function": "rmsnorm", "output_router_logits": False,
    "position_embedding_type": "nope", "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
    "shared_intermediate_size": 96, "tie_word_embeddings": True, "init_method": "mup",
}  # fmt: skip

STATE_VARIANTS = [
    Variant("granite-hybrid", GRANITE_HYBRID),
    Variant(
        "granite-hybrid-moe",
        GRANITE_HYBRID
        | {
            "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "mamba_n_groups": 2,
            "mamba_proj_bias": True, "mamba_conv_bias": False, "position_embedding_type": "rope",
        },
    ),
    Variant("lfm2-moe", LFM2_MOE),
    Variant("nemotron-h", NEMOTRON_H),
    Variant("nemotron-3", NEMOTRON_3),
    Variant("mamba2", MAMBA2, 256),
    Variant("qwen3-next", QWEN3_NEXT),
    Variant(
        "qwen3-next-dense",
        QWEN3_NEXT
        | {
            "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_conv_kernel_dim": 3, "mlp_only_layers": [1],
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    Variant("lfm2", LFM2),
    Variant("lfm2-plain", LFM2 | {"conv_bias": True, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4}),
    Variant("olmo-hybrid", OLMO_HYBRID),
    Variant("kimi-linear", KIMI_LINEAR),
    Variant("falcon-h1", FALCON_H1),
    Variant("falcon-h1-normed", FALCON_H1 | {"mamba_rms_norm": True, "num_hidden_layers": 2}),
    Variant("qwen3-5", QWEN3_5 | {"architectures": ["Qwen3_5ForCausalLM"]}),
    Variant(
        "qwen3-5-moe",
        {
            "model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "text_config": QWEN3_5_MOE,
            "vision_config": {
                "model_type": "qwen3_5_moe_vision", "depth": 1, "hidden_size": 16, "intermediate_size": 16,
                "num_heads": 1, "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
            },
            "image_token_id": 161, "video_token_id": 162, "vision_start_token_id": 163, "vision_end_token_id": 164,
            "tie_word_embeddings": False,
        },
    ),
]  # fmt: skip
