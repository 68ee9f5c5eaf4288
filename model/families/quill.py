"""Quill: a small KV cache by one KV head, windows between global layers, and shared caches."""

from ..config import Attention, Layer, Mlp, ModelConfig, Rope
from .common import Keys, layer_types, model_sources
from .rope import build


def small_cache_config(
    vocab_size: int,
    dim: int,
    num_layers: int,
    heads: int,
    head_dim: int,
    ffn: int,
    window: int,
    kv_heads: int = 1,
    global_every: int = 4,
    share: int = 2,
    max_len: int = 2048,
    rope: Rope | None = None,
    dtype: str = "bfloat16",
    kinds: list[str] | None = None,
    kv_sources: list[int | None] | None = None,
) -> ModelConfig:
    """Make a config with a small KV cache.

    Each group of `share` consecutive layers shares one KV cache. Every `global_every`-th group has
    full attention, the others a sliding window. With 8 layers, share 2 and global_every 2: window,
    window*, global, global*, window, window*, global, global*. A star marks a layer that reads the
    KV cache of the layer before it.
    """
    if kinds is None:
        kinds = [
            "sliding_attention" if (i // share + 1) % global_every else "full_attention"
            for i in range(num_layers)
        ]
    if kv_sources is None:
        kv_sources = [None if i % share == 0 else i - i % share for i in range(num_layers)]
    rope = rope or build({"rope_theta": 10000.0}, head_dim, max_len)
    layers = tuple(
        Layer(
            Attention(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                rope=rope,
                window=window if kind == "sliding_attention" else None,
                qk_norm="head",
                kv_source=source,
            ),
            Mlp(ffn),
        )
        for kind, source in zip(kinds, kv_sources, strict=True)
    )
    return ModelConfig(
        family="quill",
        vocab_size=vocab_size,
        dim=dim,
        layers=layers,
        max_len=max_len,
        dtype=dtype,
        tied=True,
    )


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(hf)
    L = keys("num_hidden_layers")
    H = keys("head_dim")
    context_length = keys("max_position_embeddings")
    keys.refuse("tie_word_embeddings", True)
    keys.refuse("rms_norm_eps", 1e-6)
    keys.refuse("hidden_act", "silu")
    model = small_cache_config(
        vocab_size=keys("vocab_size"),
        dim=keys("hidden_size"),
        num_layers=L,
        heads=keys("num_attention_heads"),
        kv_heads=keys("num_key_value_heads"),
        head_dim=H,
        ffn=keys("intermediate_size"),
        window=keys("sliding_window"),
        kinds=layer_types(keys, L, ["full_attention"] * L),
        kv_sources=keys("kv_sources", [None] * L),
        rope=keys.rope(H, max_len or context_length),
        max_len=context_length,
        dtype=keys.dtype(),
    )
    keys.done()
    return model


def hf_config(config: ModelConfig, **extra) -> dict:
    """The config.json for `config`: `config(hf_config(c)) == c`."""
    attention = config.layers[0].attention
    mlp = config.layers[0].mlp
    windows = [layer.attention.window for layer in config.layers]
    assert isinstance(attention, Attention) and attention.rope is not None and mlp is not None
    rope = attention.rope.inv_freq
    return {
        "architectures": ["QuillForCausalLM"],
        "model_type": "quill",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "intermediate_size": mlp.dim,
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in windows
        ],
        "sliding_window": next((window for window in windows if window), config.max_len),
        "kv_sources": [layer.attention.kv_source for layer in config.layers],
        "rope_theta": round(rope[1] ** -len(rope), 3),
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_len,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "dtype": config.dtype,
        **extra,
    }


sources = model_sources
