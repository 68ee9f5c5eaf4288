"""Model families: one file each, found by the `model_type` of a checkpoint's config.json."""

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
