"""Model families: one file each, found by the `model_type` of a checkpoint's config.json."""

FAMILIES = {
    "gemma2": ".gemma2",
    "gemma3": ".gemma3",
    "gemma3_text": ".gemma3",
    "llama": ".llama",
    "mistral": ".mistral",
    "olmo2": ".olmo2",
    "olmo3": ".olmo3",
    "phi3": ".phi3",
    "quill": ".quill",
    "qwen2": ".qwen2",
    "qwen3": ".qwen3",
}
