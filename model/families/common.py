"""What the families share: layers by type, and the checkpoint names most of them use."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError, Moe
from ..weights import AttentionWeights, LayerWeights, MlpWeights, ModelWeights
from .config_keys import Keys


@dataclass(frozen=True)
class Part:
    """One tensor of a checkpoint, its shape there, and the place in a leaf that it fills once `turn`ed."""

    name: str
    shape: tuple[int, ...]
    turn: Callable[[np.ndarray], np.ndarray] = lambda x: x  # of a stack of experts: any number of them
    at: Any = ()  # an index of numpy's


@dataclass(frozen=True)
class Source:
    """Where a leaf of the weight tree comes from; a leaf of the tree that `sources(config)` returns."""

    parts: tuple[Part, ...]
    whole: tuple[Part, ...] = ()  # the same where a checkpoint holds a layer's experts in one tensor

    def found_in(self, names) -> tuple[Part, ...]:
        """The parts that a checkpoint with these tensors has."""
        return self.whole if self.whole and self.whole[0].name in names else self.parts


def copy(name: str, shape: tuple[int, ...]) -> Source:
    """A tensor taken as it is."""
    return Source((Part(name, shape),))


def scale(name: str, size: int, offset: float = 0.0) -> Source:
    """A norm's scale; Gemma stores it less one."""
    return Source((Part(name, (size,), lambda x: x.astype(np.float32) + offset),))


def linear(out: tuple[int, ...], into: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """A torch linear weight [out, in], turned to [*in, *out]."""
    return lambda x: x.T.reshape(*into, *out)


def attention_sources(a: Attention, D: int, prefix: str, fused: bool = False, norm_offset: float = 0.0):
    """The names of Llama and its many relatives; `fused`: one `qkv_proj` as Phi-3 has."""
    N, K, H = a.heads, a.kv_heads, a.head_dim
    parts = {"q": (0, N)}
    if a.kv_source is None:
        parts["k"] = (N, K)
        if not a.tied_kv:
            parts["v"] = (N + K, K)
    G = sum(count for _, count in parts.values())
    if fused:
        qkv = Source((Part(f"{prefix}.qkv_proj.weight", (G * H, D), linear((G, H), (D,))),))
    else:
        qkv = Source(
            tuple(
                Part(f"{prefix}.{x}_proj.weight", (n * H, D), linear((n, H), (D,)), np.s_[:, at : at + n])
                for x, (at, n) in parts.items()
            )
        )
    bias = Source(
        tuple(
            Part(f"{prefix}.{x}_proj.bias", (n * H,), lambda b, n=n: b.reshape(n, H), np.s_[at : at + n])
            for x, (at, n) in parts.items()
        )
    )
    q_size, k_size = (H, H) if a.qk_norm == "head" else (N * H, K * H)
    return AttentionWeights(
        qkv_DGH=qkv,
        out_NHD=Source((Part(f"{prefix}.o_proj.weight", (D, N * H), linear((D,), (N, H))),)),
        qkv_bias_GH=bias if a.bias else None,
        out_bias_D=copy(f"{prefix}.o_proj.bias", (D,)) if a.out_bias else None,
        q_norm=scale(f"{prefix}.q_norm.weight", q_size, norm_offset) if a.qk_norm else None,
        k_norm=scale(f"{prefix}.k_norm.weight", k_size, norm_offset) if a.qk_norm and a.kv_source is None else None,
        sinks_N=copy(f"{prefix}.sinks", (N,)) if a.sinks else None,
    )


def mlp_sources(F: int, D: int, prefix: str, fused: bool = False) -> MlpWeights:
    """gate_proj, up_proj, down_proj; `fused`: one gate_up_proj."""
    if fused:
        up = Source((Part(f"{prefix}.gate_up_proj.weight", (2 * F, D), linear((2, F), (D,))),))
    else:
        up = Source(
            tuple(
                Part(f"{prefix}.{x}_proj.weight", (F, D), linear((F,), (D,)), np.s_[:, at])
                for at, x in enumerate(("gate", "up"))
            )
        )
    return MlpWeights(up_DGF=up, down_FD=Source((Part(f"{prefix}.down_proj.weight", (D, F), linear((D,), (F,))),)))


def expert_sources(moe: Moe, D: int, prefix: str, names=("gate_proj", "up_proj", "down_proj")) -> dict[str, Source]:
    """The matrices of all experts: three tensors an expert, or two for all as `transformers` 5 holds them."""
    E, F = moe.experts, moe.dim
    *up, down = names
    return {
        "up_EDGF": Source(
            tuple(
                Part(f"{prefix}.{e}.{name}.weight", (F, D), linear((F,), (D,)), np.s_[e, :, at])
                for e in range(E)
                for at, name in enumerate(up)
            ),
            (Part(f"{prefix}.gate_up_proj", (E, 2 * F, D), lambda x: x.reshape(-1, 2, F, D).transpose(0, 3, 1, 2)),),
        ),
        "down_EFD": Source(
            tuple(Part(f"{prefix}.{e}.{down}.weight", (D, F), linear((D,), (F,)), np.s_[e]) for e in range(E)),
            (Part(f"{prefix}.down_proj", (E, D, F), lambda x: x.swapaxes(1, 2)),),
        ),
    }


def router_source(moe: Moe, D: int, name: str) -> Source:
    return Source((Part(name, (moe.experts, D), linear((moe.experts,), (D,))),))


LLAMA_NORMS = {"pre_attention_norm_D": "input_layernorm", "pre_mlp_norm_D": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "pre_attention_norm_D": "input_layernorm",
    "post_attention_norm_D": "post_attention_layernorm",
    "pre_mlp_norm_D": "pre_feedforward_layernorm",
    "post_mlp_norm_D": "post_feedforward_layernorm",
}
POST_NORMS = {
    "post_attention_norm_D": "post_attention_layernorm",
    "post_mlp_norm_D": "post_feedforward_layernorm",
}


def layer_sources(
    config: ModelConfig, index: int, prefix: str, norms=LLAMA_NORMS, norm_offset: float = 0.0, fused: bool = False
) -> LayerWeights:
    """A layer with the common names; families replace what is their own."""
    layer, D, here = config.layers[index], config.dim, f"{prefix}layers.{index}"
    own_norms: dict[str, Any] = {field: scale(f"{here}.{name}.weight", D, norm_offset) for field, name in norms.items()}
    assert isinstance(layer.attention, Attention)
    return LayerWeights(
        attention=attention_sources(layer.attention, D, f"{here}.self_attn", fused, norm_offset),
        mlp=layer.mlp and mlp_sources(layer.mlp.dim, D, f"{here}.mlp", fused),
        moe=None,
        **own_norms,
    )


def model_sources(
    config: ModelConfig, prefix: str = "model.", layer: Callable[..., LayerWeights] = layer_sources, **options
) -> ModelWeights:
    """The whole tree; `options` go to `layer(config, index, prefix, ...)`."""
    V, D = config.vocab_size, config.dim
    return ModelWeights(
        embed_VD=copy(f"{prefix}embed_tokens.weight", (V, D)),
        layers=tuple(layer(config, index, prefix, **options) for index in range(len(config.layers))),
        final_norm_D=scale(f"{prefix}norm.weight", D, options.get("norm_offset", 0.0)),
        head_VD=None if config.tied else copy("lm_head.weight", (V, D)),
    )


def layer_types(keys: Keys, count: int, default: list[str]) -> list[str]:
    """`layer_types` as newer configs spell out, else the family's default."""
    kinds = keys("layer_types", None) or default
    if len(kinds) != count:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {count} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"config.json: layer type {kind!r} is not supported; supported are full_attention and sliding_attention"
            )
    return kinds


def layers_by_type(
    kinds: list[str], mlp: Mlp, full: Attention, sliding: Attention, window: int | None, longest: int, **fields
) -> tuple[Layer, ...]:
    """A layer a kind: `full` as it is, `sliding` behind the window, if that is shorter than the longest sequence."""
    if "sliding_attention" in kinds and window is None:
        raise ModelError("config.json: layer_types names sliding_attention, but no sliding_window is in use")
    sliding = replace(sliding, window=narrower(window, longest))
    layers = {"full_attention": Layer(full, mlp, **fields), "sliding_attention": Layer(sliding, mlp, **fields)}
    return tuple(layers[kind] for kind in kinds)


def narrower(window: int | None, longest: int) -> int | None:
    """A window that hides nothing from the longest sequence is none: those layers then share the full ones' pages."""
    return None if window is None or window >= longest else window


def decoder(keys: Keys, family: str, layers: tuple[Layer, ...], longest: int, **fields) -> ModelConfig:
    """The `ModelConfig` from the keys that all families share; `fields` replace what is a family's own."""
    common = {
        "vocab_size": lambda: keys.count("vocab_size"),
        "dim": lambda: keys.count("hidden_size"),
        "norm_eps": lambda: keys.positive("rms_norm_eps", 1e-6),
        "tied": lambda: keys("tie_word_embeddings", False),
    }
    fields |= {name: read() for name, read in common.items() if name not in fields}
    made = ModelConfig(family=family, layers=layers, max_len=longest, dtype=keys.dtype(), **fields)
    keys.done()
    return made
