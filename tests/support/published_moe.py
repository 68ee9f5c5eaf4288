"""config.json as it is published with models that have experts, and what is known of them."""

from quire.tests.support.published import GLOBAL, Published, kinds

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
AUTO_MAP = {"AutoConfig": "configuration_deepseek.DeepseekConfig", "AutoModelForCausalLM": "modeling_deepseek.X"}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_key_value_heads": 8, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": AUTO_MAP, "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001,
    "first_k_dense_replace": 1, "hidden_act": "silu", "initializer_range": 0.02, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_layer_freq": 1, "n_shared_experts": 2,
    "norm_topk_prob": False, "num_experts_per_tok": 6, "pretraining_tp": 1, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
GEMMA4_ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
GEMMA4_TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 2,
    "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
    "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0, "initializer_range": 0.02, "max_position_embeddings": 262144,
    "model_type": "gemma4_text", "moe_intermediate_size": None, "num_experts": None, "num_kv_shared_layers": 0,
    "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_parameters": GEMMA4_ROPES, "sliding_window": 1024,
    "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": "vision", "use_cache": True,
    "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
}  # fmt: skip


def spelled(windows: list[int | None]) -> list[str]:
    return ["full_attention" if window is GLOBAL else "sliding_attention" for window in windows]


def gemma4(windows: list[int | None], **text) -> dict:
    """The text model's keys in those of the whole, which also sees and hears."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "audio_token_id": 258881,
        "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_id": 258883,
        "eoa_token_index": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880,
        "initializer_range": 0.02, "model_type": "gemma4", "tie_word_embeddings": True,
        "text_config": GEMMA4_TEXT | {"layer_types": spelled(windows), "num_hidden_layers": len(windows)} | text,
        "transformers_version": "5.5.0.dev0", "video_token_id": 258884,
        "vision_config": {"hidden_size": 768, "model_type": "gemma4_vision", "num_hidden_layers": 16},
        "vision_soft_tokens_per_image": 280,
    }  # fmt: skip


def llama4(experts: int, every: int, rope_scaling: dict | None) -> dict:
    """The text model's keys in those of the whole, which also sees."""
    return {
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
        "image_token_index": 200092, "model_type": "llama4",
        "text_config": {
            "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1,
            "attn_temperature_tuning": True, "bos_token_id": 200000, "cache_implementation": "hybrid",
            "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192, "for_llm_compressor": False,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
            "interleave_moe_layer_step": every, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "max_position_embeddings": 10485760 if every == 1 else 1048576, "model_type": "llama4_text",
            "no_rope_layers": [1, 1, 1, 0] * 12 if every == 1 else [],
            "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "num_local_experts": experts, "output_router_logits": False, "pad_token_id": 200018,
            "rms_norm_eps": 1e-05, "rope_scaling": rope_scaling, "rope_theta": 500000.0,
            "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16", "use_cache": True,
            "use_qk_norm": every == 1, "vocab_size": 202048,
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0.dev0",
        "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model", "num_hidden_layers": 34},
    }  # fmt: skip


KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
LFM2_LAYERS = ["full_attention" if index in (2, 6, 10, 14, 18, 21) else "conv" for index in range(24)]

PUBLISHED_MOE = {
    "Qwen3-Next-80B-A3B": Published(
        {
            "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
            "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
            "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
            "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
            "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0",
            "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        },
        79.674e9,
        [GLOBAL] * 48,
    ),
    "LFM2-8B-A1B": Published(
        {
            "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
            "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7168,
            "layer_types": LFM2_LAYERS, "max_position_embeddings": 128000, "model_type": "lfm2_moe",
            "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32,
            "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0,
            "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True,
            "use_expert_bias": True, "vocab_size": 65536,
        },
        8.34e9,
        [GLOBAL] * 24,
    ),
    "Kimi-Linear-48B-A3B": Published(
        {
            "architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584, "dtype": "bfloat16",
            "eos_token_id": 163586, "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu",
            "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216, "kv_lora_rank": 512,
            "linear_attn_config": {
                "full_attn_layers": KIMI_FULL, "head_dim": 128,
                "kda_layers": [index for index in range(1, 28) if index not in KIMI_FULL], "num_heads": 32,
                "short_conv_kernel_size": 4,
            },
            "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear",
            "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1,
            "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32,
            "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839, "q_lora_rank": None,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
            "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
            "transformers_version": "4.56.2", "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128,
            "vocab_size": 163840,
        },
        49.12e9,
        [GLOBAL] * 27,
    ),
    "Mixtral-8x7B": Published(
        {
            "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True,
            "vocab_size": 32000,
        },
        46.703e9,
        [GLOBAL] * 32,
    ),
    "Qwen3-30B-A3B": Published(
        {
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
            "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
            "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
            "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        },
        30.532e9,
        [GLOBAL] * 48,
    ),
    "gpt-oss-20b": Published(
        GPT_OSS
        | {
            "layer_types": ["sliding_attention", "full_attention"] * 12, "num_hidden_layers": 24,
            "num_local_experts": 32,
        },
        20.915e9,
        [128, GLOBAL] * 12,
    ),
    "gpt-oss-120b": Published(
        GPT_OSS
        | {
            "layer_types": ["sliding_attention", "full_attention"] * 18, "num_hidden_layers": 36,
            "num_local_experts": 128,
        },
        116.83e9,
        [128, GLOBAL] * 18,
    ),
    "DeepSeek-V2-Lite": Published(
        DEEPSEEK_V2
        | {
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
            "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
            "q_lora_rank": None, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
            "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
        },
        15.706e9,
        [GLOBAL] * 27,
    ),
    "DeepSeek-V2": Published(
        DEEPSEEK_V2
        | {
            "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
            "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60,
            "num_key_value_heads": 128, "q_lora_rank": 1536,
            "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "routed_scaling_factor": 16.0,
            "topk_group": 3, "topk_method": "group_limited_greedy",
        },
        235.74e9,
        [GLOBAL] * 60,
    ),
    "DeepSeek-V3": Published(
        {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": AUTO_MAP, "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
            "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
            "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
            "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
            "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "quantization_config": {
                "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            "rms_norm_eps": 1e-06, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
            "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
            "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
        },
        671.03e9,  # without the layer that predicts a second token
        [GLOBAL] * 61,
    ),
    "gemma-4-E2B": Published(
        gemma4(
            kinds(35, 5, 512), hidden_size=1536, intermediate_size=6144, num_attention_heads=8,
            num_key_value_heads=1, num_global_key_value_heads=None, hidden_size_per_layer_input=256,
            num_kv_shared_layers=20, use_double_wide_mlp=True, attention_k_eq_v=False, sliding_window=512,
            max_position_embeddings=131072, use_bidirectional_attention=None,
        ),
        4.65e9,  # 5.1e9 less what sees and hears
        kinds(35, 5, 512),
    ),
    "gemma-4-26B-A4B": Published(
        gemma4(
            kinds(30, 6, 1024), hidden_size=2816, intermediate_size=2112, moe_intermediate_size=704,
            num_experts=128, top_k_experts=8, enable_moe_block=True, num_attention_heads=16, num_key_value_heads=8,
            num_global_key_value_heads=2,
        ),
        25.23e9,
        kinds(30, 6, 1024),
    ),
    "gemma-4-31B": Published(
        gemma4(
            kinds(60, 6, 1024), hidden_size=5376, intermediate_size=21504, num_attention_heads=32,
            num_key_value_heads=16, num_global_key_value_heads=4,
        ),
        30.7e9,
        kinds(60, 6, 1024),
    ),
    "Qwen1.5-MoE-A2.7B": Published(
        {
            "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192,
            "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408,
            "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": False,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": True,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        14.316e9,
        [GLOBAL] * 24,
    ),
    "OLMoE-1B-7B": Published(
        {
            "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "clip_qkv": None, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
            "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
            "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
            "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
            "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.46.0.dev0", "use_cache": True, "vocab_size": 50304,
        },
        6.919e9,
        [GLOBAL] * 16,
    ),
    "GLM-4.5-Air": Published(
        {
            "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944,
            "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1,
            "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
            "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
        },
        106.85e9,  # without the layer that predicts a second token
        [GLOBAL] * 46,
    ),
    "GLM-4.7-Flash": Published(
        {
            "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10240,
            "kv_lora_rank": 512, "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
            "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47,
            "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "pad_token_id": 154820,
            "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
            "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
            "transformers_version": "5.0.0rc0", "v_head_dim": 256, "vocab_size": 154880,
        },
        29.94e9,  # without the layer that predicts a second token
        [GLOBAL] * 47,
    ),
    "MiniMax-M2": Published(
        {
            "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 62,
            "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"}, "bos_token_id": None,
            "eos_token_id": None, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
            "initializer_range": 0.02, "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0,
            "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 196608,
            "max_model_len": 196608, "mlp_intermediate_size": 8192, "model_type": "minimax_m2",
            "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
            "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
            "output_router_logits": False, "qk_norm_type": "per_layer",
            "quantization_config": {
                "activation_scheme": "dynamic", "fmt": "float8_e4m3fn",
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"], "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
            "shared_moe_mode": "sigmoid", "sliding_window": None, "swa_rope_theta": -1.0,
            "tie_word_embeddings": False, "transformers_version": "4.46.1", "use_cache": True, "use_mtp": True,
            "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
        },
        228.69e9,
        [GLOBAL] * 62,
    ),
    "ERNIE-4.5-21B-A3B": Published(
        {
            "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
            "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk",
            "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1,
            "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
            "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
            "num_nextn_predict_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": None,
            "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False,
            "use_cache": False, "vocab_size": 103424,
        },
        21.83e9,
        [GLOBAL] * 28,
    ),
    "Hunyuan-A13B": Published(
        {
            "add_classification_head": False, "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": False,
            "attention_dropout": 0.1, "attention_head_dim": 128, "bos_token_id": 1, "cla_share_factor": 2,
            "class_num": 0, "dense_list": [4096, 0], "eod_token_id": 127967, "eos_token_id": 127960,
            "group_limited_greedy": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "im_end_id": 6, "im_newline_id": 12, "im_start_id": 5, "initializer_range": 0.02,
            "intermediate_size": 3072, "kv_lora_rank": None, "mask_init_id": 13, "max_position_embeddings": 32768,
            "mlp_bias": False, "model_type": "hunyuan_v1_moe", "moe_drop_tokens": False,
            "moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0,
            "moe_random_routing_dropped_token": False, "moe_topk": [8] * 32, "n_group": False,
            "norm_topk_prob": True, "norm_type": "rms", "num_attention_heads": 32, "num_experts": 64,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "num_shared_expert": [1] * 32,
            "org_vocab_size": 128167, "pad_id": 127961, "pad_token_id": 127961, "pool_type": "last",
            "position_embedding_xdrope": False, "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": None,
            "qk_rope_head_dim": None, "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "type": "dynamic",
            },
            "rope_theta": 10000.0, "routed_scaling_factor": False, "sep_token_id": 127962, "text_end_id": 8,
            "text_start_id": 7, "tie_word_embeddings": True, "topk_group": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.41.2", "use_cache": True, "use_cla": False, "use_mixed_mlp_moe": True,
            "use_qk_norm": True, "use_rotary_pos_emb": True, "v_head_dim": None, "vocab_size": 128167,
        },
        80.39e9,
        [GLOBAL] * 32,
    ),
    "Llama-4-Scout": Published(
        llama4(16, 1, {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        }) | {"tie_word_embeddings": False},
        107.77e9,  # 108.6e9 less what sees
        kinds(48, 4, 8192),
    ),
    "Llama-4-Maverick": Published(llama4(128, 2, None), 400.71e9, kinds(48, 4, 8192)),
    "Kimi-K2": Published(
        {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": AUTO_MAP, "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585,
            "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
            "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
            "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
            "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "quantization_config": {
                "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
            },
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096, "type": "yarn",
            },
            "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
            "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
            "transformers_version": "4.48.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
        },
        1026.4e9,
        [GLOBAL] * 61,
    ),
}  # fmt: skip

# Models that differ from one of the above in a few keys: what differs, and the parameters or what the error says.
RELATIVES_MOE: dict[str, tuple[str, dict, float | str]] = {
    "DeepSeek-V3.2": (
        "DeepSeek-V3",
        {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "model_type": "deepseek_v32"},
        671.88e9,
    ),
    "Qwen2-57B-A14B": (
        "Qwen1.5-MoE-A2.7B",
        {
            "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
            "moe_intermediate_size": 2560, "num_attention_heads": 28, "num_experts": 64, "num_experts_per_tok": 8,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "shared_expert_intermediate_size": 20480,
        },
        57.41e9,
    ),
    "GLM-4.5": (
        "GLM-4.5-Air",
        {
            "first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288,
            "moe_intermediate_size": 1536, "n_routed_experts": 160, "num_hidden_layers": 92,
            "routed_scaling_factor": 2.5, "use_qk_norm": True,
        },
        352.8e9,  # without the layer that predicts a second token
    ),
    "ERNIE-4.5-300B-A47B": (
        "ERNIE-4.5-21B-A3B",
        {
            "hidden_size": 8192, "intermediate_size": 28672, "moe_intermediate_size": 3584, "moe_k": 8,
            "moe_layer_end_index": 53, "moe_layer_start_index": 3, "moe_num_shared_experts": 0,
            "num_attention_heads": 64, "num_hidden_layers": 54, "num_key_value_heads": 8,
        },
        299.4e9,
    ),
    "OLMoE that clips": ("OLMoE-1B-7B", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
    "MiniMax-M1's attention": ("MiniMax-M2", {"attn_type_list": [0] * 62}, "attn_type_list"),
    "Hunyuan-A13B without a dense block": ("Hunyuan-A13B", {"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe"),
    "Hunyuan-A13B with two": ("Hunyuan-A13B", {"num_shared_expert": [2] * 32}, "num_shared_expert = 2"),
    "Kimi-K2 of an odd router": ("Kimi-K2", {"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
}  # fmt: skip
