"""Model families, one file each, by the `model_type` of a checkpoint's config.json.

A family's module has `config(hf, max_len) -> ModelConfig` and `sources(config)`, a weight tree with a `Source` for each
leaf; and where its checkpoints need it `canonical(name)`, the one name of a tensor that goes by several, and
`ignored(name, config)`, whether a tensor is not loaded. `wrapper.py` opens models that also see or hear.
"""

FAMILIES = {
    "cohere": ".cohere",
    "cohere2": ".cohere",
    "deepseek_v2": ".deepseek",
    "deepseek_v3": ".deepseek",
    "deepseek_v32": ".deepseek_sparse",
    "ernie4_5": ".ernie4_5",
    "ernie4_5_moe": ".ernie4_5",
    "exaone4": ".exaone4",
    "gemma2": ".gemma2",
    "gemma3": ".wrapper",
    "gemma3_text": ".gemma3",
    "gemma4": ".wrapper",
    "gemma4_text": ".gemma4",
    "gemma4_unified": ".wrapper",
    "gemma4_unified_text": ".gemma4",
    "glm": ".glm4",
    "glm4": ".glm4",
    "glm4_moe": ".glm4_moe",
    "glm4_moe_lite": ".glm4_moe_lite",
    "glm_moe_dsa": ".deepseek_sparse",
    "gpt_oss": ".gpt_oss",
    "granite": ".granite",
    "granitemoehybrid": ".granite_hybrid",
    "hunyuan_v1_dense": ".hunyuan",
    "hunyuan_v1_moe": ".hunyuan",
    "kimi_k2": ".deepseek",
    "kimi_k25": ".wrapper",
    "lfm2": ".lfm2",
    "llama": ".llama",
    "llama4": ".wrapper",
    "llama4_text": ".llama4",
    "minimax_m2": ".minimax_m2",
    "ministral3": ".ministral3",
    "mistral": ".mistral",
    "mistral3": ".wrapper",
    "mistral4": ".mistral4",
    "mixtral": ".mixtral",
    "olmo2": ".olmo2",
    "olmo3": ".olmo3",
    "olmoe": ".olmoe",
    "phi3": ".phi3",
    "quill": ".quill",
    "qwen2": ".qwen2",
    "qwen2_moe": ".qwen2_moe",
    "qwen3": ".qwen3",
    "qwen3_5": ".wrapper",
    "qwen3_5_moe": ".wrapper",
    "qwen3_5_moe_text": ".qwen3_5",
    "qwen3_5_text": ".qwen3_5",
    "qwen3_moe": ".qwen3_moe",
    "qwen3_next": ".qwen3_next",
    "seed_oss": ".seed_oss",
    "smollm3": ".smollm3",
}

# Why there is no family for a model that people ask for.
UNSUPPORTED = {
    "bailing_moe": "transformers has no model to compare it with",
    "bailing_moe_v2": "transformers has no model to compare it with",
    "phimoe": "its norms and its head have biases, and it routes by a rule of its own",
}
