"""Gemma 3: Gemma 2 with head norms in place of soft caps; local and global layers differ in their rope."""

from dataclasses import replace

from ..config import Attention, ModelConfig, ModelError
from .common import Keys, layer_types
from .gemma2 import sources, windowed

MISSING = {  # what a config.json without these keys means: the larger models leave most of them out
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}  # fmt: skip
IMAGE_KEYS = ("mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")


def text_config(hf: dict, *other_keys: str) -> dict:
    """The language model's part of a config with other modalities, which are not supported."""
    outer = Keys(hf)
    outer.ignore("vision_config", *other_keys)
    text = outer("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"config.json: text_config = {text!r}; it must be an object")
    shared = {key: hf[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if hf.get(key) is not None}
    outer.ignore("tie_word_embeddings")
    outer.done()
    return {key: value for key, value in text.items() if key not in ("dtype", "torch_dtype") or not shared} | shared


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    inside = None
    if hf["model_type"] == "gemma3":
        hf, inside = text_config(hf, *IMAGE_KEYS) | {"model_type": "gemma3_text"}, "text_config"
    keys = Keys(MISSING | hf, inside)
    keys.refuse("use_bidirectional_attention", False)
    keys.refuse("attn_logit_softcapping")
    longest, heads = keys.count("max_position_embeddings", 131072), keys.heads(256)
    heads["scale"], bias = keys.positive("query_pre_attn_scalar", 256) ** -0.5, keys("attention_bias", False)
    H, served = heads["head_dim"], max_len or longest
    local = keys("rope_local_base_freq", 10000.0)
    full = Attention(
        **heads, rope=keys.rope(H, served, "full_attention", 1e6), qk_norm="head", bias=bias, out_bias=bias
    )
    sliding = replace(full, rope=keys.rope(H, served, "sliding_attention", local, plain=True))
    L, every = keys.count("num_hidden_layers"), keys.count("sliding_window_pattern", 6)
    kinds = layer_types(keys, L, ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(L)])
    return windowed(keys, "gemma3", kinds, full, sliding, longest)


def canonical(name: str) -> str:
    """A tensor's name as in text-only checkpoints; those with vision nest it in one of two ways."""
    for nested, plain in (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ):
        if name.startswith(nested):
            return plain + name.removeprefix(nested)
    return name


def ignored(name: str, config: ModelConfig) -> bool:
    """The tensors for images."""
    return name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))


__all__ = ["canonical", "config", "ignored", "sources"]
