"""Model families, one file each, by the `model_type` of a checkpoint's config.json.

A family's module has `config(hf, max_len) -> ModelConfig` and `sources(config)`, a weight tree with a `Source` for each
leaf; and where its checkpoints need it `canonical(name)`, the one name of a tensor that goes by several, and
`ignored(name, config)`, whether a tensor is not loaded.
"""

FAMILIES = {
    "deepseek_v2": ".deepseek",
    "deepseek_v3": ".deepseek",
    "gemma2": ".gemma2",
    "gemma3": ".gemma3",
    "gemma3_text": ".gemma3",
    "gemma4": ".gemma4",
    "gemma4_text": ".gemma4",
    "gemma4_unified": ".gemma4",
    "gemma4_unified_text": ".gemma4",
    "gpt_oss": ".gpt_oss",
    "llama": ".llama",
    "mistral": ".mistral",
    "mixtral": ".mixtral",
    "olmo2": ".olmo2",
    "olmo3": ".olmo3",
    "phi3": ".phi3",
    "quill": ".quill",
    "qwen2": ".qwen2",
    "qwen3": ".qwen3",
    "qwen3_moe": ".qwen3_moe",
}
