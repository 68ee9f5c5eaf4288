"""config.json as it is published: encoders, Mamba 2 and Phi-3.5-MoE, from memory but for the numbers of parameters."""

from quire.tests.support.published import GLOBAL, Published

BERT = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
}  # fmt: skip
XLM_ROBERTA = BERT | {
    "architectures": ["XLMRobertaModel"], "bos_token_id": 0, "classifier_dropout": None, "eos_token_id": 2,
    "hidden_size": 1024, "intermediate_size": 4096, "layer_norm_eps": 1e-05, "max_position_embeddings": 8194,
    "model_type": "xlm-roberta", "num_attention_heads": 16, "num_hidden_layers": 24, "output_past": True,
    "pad_token_id": 1, "torch_dtype": "float32", "type_vocab_size": 1, "vocab_size": 250002,
}  # fmt: skip
PUBLISHED_MORE = {
    "Mamba-Codestral-7B": Published(
        {
            "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4,
            "eos_token_id": 0, "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.1, "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "model_type": "mamba2",
            "n_groups": 8, "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64, "pad_token_id": 0,
            "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "state_size": 128,
            "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_init_scheme": "random",
            "time_step_limit": [0.0, {"__float__": "Infinity"}], "time_step_max": 0.1, "time_step_min": 0.001,
            "time_step_rank": 256, "time_step_scale": 1.0, "torch_dtype": "bfloat16",
            "transformers_version": "4.42.0.dev0", "use_bias": False, "use_cache": True, "use_conv_bias": True,
            "vocab_size": 32768,
        },
        7.285e9,
        [GLOBAL] * 64,
    ),
    "Phi-3.5-MoE": Published(
        {
            "architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 32000, "hidden_act": "silu", "hidden_dropout": 0.0,
            "hidden_size": 4096, "initializer_range": 0.02, "input_jitter_noise": 0.01, "intermediate_size": 6400,
            "lm_head_bias": True, "max_position_embeddings": 131072, "model_type": "phimoe",
            "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "num_local_experts": 16, "original_max_position_embeddings": 4096, "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [1.0 + i for i in range(64)], "long_mscale": 1.243163121016122,
                "original_max_position_embeddings": 4096, "short_factor": [1.0 + i / 100 for i in range(64)],
                "short_mscale": 1.243163121016122, "type": "longrope",
            },
            "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01,
            "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.43.3", "use_cache": True, "vocab_size": 32064,
        },
        41.87e9,
        [GLOBAL] * 32,
    ),
    "bert-base-uncased": Published(BERT, 108.89e6, [GLOBAL] * 12),
    "all-MiniLM-L6-v2": Published(
        BERT | {"architectures": ["BertModel"], "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6},
        22.565e6,
        [GLOBAL] * 6,
    ),
    "bge-m3": Published(XLM_ROBERTA, 566.7e6, [GLOBAL] * 24),
    "ModernBERT-base": Published(
        {
            "architectures": ["ModernBertForMaskedLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 50281, "classifier_activation": "gelu", "classifier_bias": False,
            "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 50281, "decoder_bias": True,
            "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282,
            "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
            "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0,
            "initializer_range": 0.02, "intermediate_size": 1152, "layer_norm_eps": 1e-05, "local_attention": 128,
            "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0,
            "model_type": "modernbert", "norm_bias": False, "norm_eps": 1e-05, "num_attention_heads": 12,
            "num_hidden_layers": 22, "pad_token_id": 50283, "position_embedding_type": "absolute",
            "reference_compile": True, "repad_logits_with_grad": False, "sep_token_id": 50282,
            "sparse_pred_ignore_index": -100, "sparse_prediction": False, "torch_dtype": "float32",
            "transformers_version": "4.47.0.dev0", "vocab_size": 50368,
        },
        149.0e6,
        [GLOBAL if i % 3 == 0 else 65 for i in range(22)],
    ),
    "embeddinggemma-300m": Published(
        {
            "_sliding_window_pattern": 6, "architectures": ["Gemma3TextModel"], "attention_bias": False,
            "attention_dropout": 0.0, "attn_logit_softcapping": None, "bos_token_id": 2, "dtype": "float32",
            "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "initializer_range": 0.02,
            "intermediate_size": 1152, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4,
            "max_position_embeddings": 2048, "model_type": "gemma3_text", "num_attention_heads": 3,
            "num_hidden_layers": 24, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
            "sliding_window": 512, "transformers_version": "4.57.0.dev0", "use_bidirectional_attention": True,
            "use_cache": True, "vocab_size": 262144,
        },
        302.86e6,
        [257, 257, 257, 257, 257, GLOBAL] * 4,
    ),
}  # fmt: skip
