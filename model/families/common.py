"""Shared code of model families: checkpoint names of weights, layers by type, config keys."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...ops.norm import LayerNorm
from ..config import Attention, Layer, Mlp, ModelConfig, ModelError, Moe
from ..mixers.attention import AttentionWeights
from ..weights import LayerWeights, MlpWeights, ModelWeights, MoeWeights
from .config_keys import Keys

MROPE = ("mrope_section", "mrope_interleaved")  # keys of rotary parameters


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a checkpoint that fills a leaf of the weight tree, or a part of it."""

    name: str
    shape: tuple[int, ...]  # in the checkpoint
    # To the leaf's layout. Transforms of stacked experts accept any number of experts.
    transform: Callable[[np.ndarray], np.ndarray] = lambda x: x
    at: Any = ()  # NumPy index into the leaf


@dataclass(frozen=True)
class Source:
    """The tensors of a checkpoint that make up one leaf of the weight tree."""

    parts: tuple[SourceTensor, ...]
    # Alternatives: one tensor with all experts stacked, in each layout that checkpoints have.
    whole: tuple[SourceTensor, ...] = ()

    def found_in(self, tensors: Mapping[str, Any]) -> tuple[SourceTensor, ...]:
        """The tensors that fill the leaf in a checkpoint with these tensors."""
        if not self.whole or self.whole[0].name not in tensors:
            return self.parts
        if len(self.whole) == 1:
            return self.whole
        shape = tuple(tensors[self.whole[0].name].shape)
        return (next((part for part in self.whole if part.shape == shape), self.whole[0]),)


def tensor(
    name: str, shape: tuple[int, ...], transform: Callable[[np.ndarray], np.ndarray] = lambda x: x
) -> Source:
    """The source of a leaf that is a single tensor."""
    return Source((SourceTensor(name, shape, transform),))


def scale(name: str, size: int, offset: float = 0.0) -> Source:
    """The source of a norm's scale; Gemma's checkpoints store `scale - 1`, so `offset` is 1."""
    return tensor(name, (size,), lambda x: x.astype(np.float32) + offset)


def vector(name: str, size: int) -> Source:
    """The source of a bias in float32."""
    return tensor(name, (size,), lambda x: x.astype(np.float32))


def layer_norm(name: str, size: int) -> LayerNorm:
    """The sources of a layer norm with a bias."""
    return LayerNorm(scale(f"{name}.weight", size), vector(f"{name}.bias", size))


def linear(out: tuple[int, ...], into: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """The transform of a torch linear weight [out, in] to [*in, *out]."""
    return lambda x: x.T.reshape(*into, *out)


def deinterleave_rotary(x: np.ndarray, first: int, last: int) -> np.ndarray:
    """Reorder interleaved rotary pairs in x[..., first:last] to split halves.

    The decoder's rotary embedding pairs the first half with the second. Attention scores do not
    change if queries and keys are reordered alike.
    """
    return np.concatenate(
        [x[..., :first], x[..., first:last:2], x[..., first + 1 : last : 2], x[..., last:]], axis=-1
    )


def move_gates_first(x: np.ndarray) -> np.ndarray:
    """Reorder [..., 2N, H] from (query, gate) of each head to all gates, then all queries."""
    *lead, N, H = x.shape
    return x.reshape(*lead, N // 2, 2, H).swapaxes(-3, -2)[..., ::-1, :, :].reshape(x.shape)


def attention_sources(
    a: Attention,
    D: int,
    prefix: str,
    fused: bool = False,
    norm_offset: float = 0.0,
    interleaved: bool = False,
) -> AttentionWeights:
    """The sources of attention weights with Llama's names.

    Args:
        a: The attention.
        D: The model's hidden size.
        prefix: Prefix of the tensors' names.
        fused: Queries, keys and values are one tensor, qkv_proj.
        norm_offset: See `scale`.
        interleaved: The rotary pairs are interleaved; see `deinterleave_rotary`.
    """
    has_scale = a.qk_norm not in (None, "plain")
    assert not (interleaved and (fused or has_scale)), (
        "interleaved pairs in fused weights or norms are not supported"
    )
    N = a.heads
    K = a.kv_heads
    H = a.head_dim
    Q = 2 * N if a.out_gate else N  # with an output gate, q_proj holds query and gate of each head
    head_ranges = {"q": (0, Q)}
    if a.kv_source is None:
        head_ranges["k"] = (Q, K)
        if not a.tied_kv:
            head_ranges["v"] = (Q + K, K)
    G = sum(count for _, count in head_ranges.values())
    rotary = 2 * len(a.rope.inv_freq) if interleaved and a.rope is not None else 0

    def heads(
        name: str, transform: Callable[[np.ndarray], np.ndarray]
    ) -> Callable[[np.ndarray], np.ndarray]:
        if name == "q" and a.out_gate:
            return lambda x: move_gates_first(transform(x))
        return (
            transform
            if name == "v" or not rotary
            else lambda x: deinterleave_rotary(transform(x), 0, rotary)
        )

    if fused:
        qkv = tensor(f"{prefix}.qkv_proj.weight", (G * H, D), linear((G, H), (D,)))
    else:
        qkv = Source(
            tuple(
                SourceTensor(
                    f"{prefix}.{projection}_proj.weight",
                    (n * H, D),
                    heads(projection, linear((n, H), (D,))),
                    np.s_[:, start : start + n],
                )
                for projection, (start, n) in head_ranges.items()
            )
        )
    bias = Source(
        tuple(
            SourceTensor(
                f"{prefix}.{projection}_proj.bias",
                (n * H,),
                heads(projection, lambda b, n=n: b.reshape(n, H)),
                np.s_[start : start + n],
            )
            for projection, (start, n) in head_ranges.items()
        )
    )
    q_size, k_size = (N * H, K * H) if a.qk_norm == "all" else (H, H)
    return AttentionWeights(
        qkv_DGH=qkv,
        out_NHD=tensor(f"{prefix}.o_proj.weight", (D, N * H), linear((D,), (N, H))),
        qkv_bias_GH=bias if a.bias else None,
        out_bias_D=tensor(f"{prefix}.o_proj.bias", (D,)) if a.out_bias else None,
        q_norm=scale(f"{prefix}.q_norm.weight", q_size, norm_offset) if has_scale else None,
        k_norm=scale(f"{prefix}.k_norm.weight", k_size, norm_offset)
        if has_scale and a.kv_source is None
        else None,
        sinks_N=tensor(f"{prefix}.sinks", (N,)) if a.sinks else None,
    )


def mlp_sources(mlp: Mlp, D: int, prefix: str, fused: bool = False) -> MlpWeights:
    """The sources of gate_proj, up_proj and down_proj; with `fused`, the first two are one tensor,
    gate_up_proj.
    """
    F = mlp.dim
    names = ("gate", "up") if mlp.gated else ("up",)
    assert not (fused and mlp.bias), "fused gate_up_proj with biases is not supported"
    if fused:
        up = tensor(f"{prefix}.gate_up_proj.weight", (2 * F, D), linear((2, F), (D,)))
    else:
        up = Source(
            tuple(
                SourceTensor(f"{prefix}.{x}_proj.weight", (F, D), linear((F,), (D,)), np.s_[:, at])
                for at, x in enumerate(names)
            )
        )
    biases = (SourceTensor(f"{prefix}.{x}_proj.bias", (F,), at=at) for at, x in enumerate(names))
    return MlpWeights(
        up_DGF=up,
        down_FD=tensor(f"{prefix}.down_proj.weight", (D, F), linear((D,), (F,))),
        up_bias_GF=Source(tuple(biases)) if mlp.bias else None,
        down_bias_D=tensor(f"{prefix}.down_proj.bias", (D,)) if mlp.bias else None,
    )


def expert_sources(
    moe: Moe, D: int, prefix: str, names=("gate_proj", "up_proj", "down_proj")
) -> dict[str, Source]:
    """The sources of the experts' matrices: three tensors per expert, or two tensors with all
    experts stacked (Transformers 5).
    """
    E = moe.experts
    F = moe.dim
    *up, down = names
    G = len(up)
    fused_up = "gate_up_proj" if len(up) == 2 else up[0]
    return {
        "up_EDGF": Source(
            tuple(
                SourceTensor(
                    f"{prefix}.{e}.{name}.weight", (F, D), linear((F,), (D,)), np.s_[e, :, at]
                )
                for e in range(E)
                for at, name in enumerate(up)
            ),
            (
                SourceTensor(
                    f"{prefix}.{fused_up}",
                    (E, G * F, D),
                    lambda x: x.reshape(-1, G, F, D).transpose(0, 3, 1, 2),
                ),
            ),
        ),
        "down_EFD": Source(
            tuple(
                SourceTensor(f"{prefix}.{e}.{down}.weight", (D, F), linear((D,), (F,)), np.s_[e])
                for e in range(E)
            ),
            (SourceTensor(f"{prefix}.down_proj", (E, D, F), lambda x: x.swapaxes(1, 2)),),
        ),
    }


def router_source(moe: Moe, D: int, name: str) -> Source:
    return tensor(name, (moe.experts, D), linear((moe.experts,), (D,)))


def moe_sources(
    moe: Moe,
    D: int,
    prefix: str,
    router: str = "gate.weight",
    choice_bias: str = "gate.e_score_correction_bias",
    experts=("gate_proj", "up_proj", "down_proj"),
) -> MoeWeights:
    """The sources of experts and router, with the names of most checkpoints."""
    E = moe.experts
    bias = Source((SourceTensor(f"{prefix}.{choice_bias}", (E,)),)) if moe.choice_bias else None
    return MoeWeights(
        router_DE=router_source(moe, D, f"{prefix}.{router}"),
        choice_bias_E=bias,
        **expert_sources(moe, D, f"{prefix}.experts", experts),
    )


# Field of LayerWeights -> name of the norm in a checkpoint.
LLAMA_NORMS = {
    "pre_attention_norm_D": "input_layernorm",
    "pre_mlp_norm_D": "post_attention_layernorm",
}
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
    config: ModelConfig,
    index: int,
    prefix: str,
    norms: dict[str, str] = LLAMA_NORMS,
    norm_offset: float = 0.0,
    fused: Collection[str] = (),
    interleaved: bool = False,
    state: Callable[[Any, int, str], Any] | None = None,
) -> LayerWeights:
    """The sources of a layer with the common names; families replace those that differ.

    Args:
        config: The model's config.
        index: Index of the layer.
        prefix: Prefix of the model's tensor names.
        norms: Field of LayerWeights -> name of the norm.
        norm_offset: See `scale`.
        fused: Projections that the checkpoint stores in one tensor: "qkv", "gate_up".
        interleaved: The rotary pairs are interleaved.
        state: Returns the sources of a recurrent mixer; called with (mixer, hidden size, layer
            prefix).
    """
    layer = config.layers[index]
    D = config.dim
    layer_prefix = f"{prefix}layers.{index}"
    norm_scales: dict[str, Any] = {
        field: scale(f"{layer_prefix}.{name}.weight", D, norm_offset)
        for field, name in norms.items()
    }
    if isinstance(layer.attention, Attention):
        fuse = "qkv" in fused
        mixer: Any = attention_sources(
            layer.attention, D, f"{layer_prefix}.self_attn", fuse, norm_offset, interleaved
        )
    else:
        assert state is not None
        mixer = state(layer.attention, D, layer_prefix)
    return LayerWeights(
        attention=mixer,
        mlp=layer.mlp and mlp_sources(layer.mlp, D, f"{layer_prefix}.mlp", "gate_up" in fused),
        moe=None,
        **norm_scales,
    )


def sparse_layer_sources(
    config: ModelConfig,
    index: int,
    prefix: str,
    shared: str = "shared_experts",
    names: Any = None,
    **options,
) -> LayerWeights:
    """The sources of a layer that may have experts.

    Args:
        config: The model's config.
        index: Index of the layer.
        prefix: Prefix of the model's tensor names.
        shared: Name of the shared experts' module.
        names: Keyword arguments of `moe_sources`.
        options: Keyword arguments of `layer_sources`.
    """
    weights = layer_sources(config, index, prefix, **options)
    layer = config.layers[index]
    mlp_prefix = f"{prefix}layers.{index}.mlp"
    if layer.moe is None:
        return weights
    shared_mlp = layer.mlp and mlp_sources(layer.mlp, config.dim, f"{mlp_prefix}.{shared}")
    return weights.replace(
        mlp=shared_mlp, moe=moe_sources(layer.moe, config.dim, mlp_prefix, **(names or {}))
    )


def model_sources(
    config: ModelConfig,
    prefix: str = "model.",
    layer: Callable[..., LayerWeights] = layer_sources,
    **options,
) -> ModelWeights:
    """The sources of the whole model; `options` are passed to `layer`."""
    V = config.vocab_size
    D = config.dim
    return ModelWeights(
        embed_VD=tensor(f"{prefix}embed_tokens.weight", (V, D)),
        layers=tuple(
            layer(config, index, prefix, **options) for index in range(len(config.layers))
        ),
        final_norm_D=scale(f"{prefix}norm.weight", D, options.get("norm_offset", 0.0)),
        head_VD=None if config.tied else tensor("lm_head.weight", (V, D)),
    )


def without_mrope(hf: dict) -> dict:
    """The config without the keys of MRoPE, which on text is RoPE."""
    return hf | {
        name: {key: value for key, value in hf[name].items() if key not in MROPE}
        for name in ("rope_parameters", "rope_scaling")
        if isinstance(hf.get(name), dict)
    }


def layer_types(keys: Keys, count: int, default: list[str]) -> list[str]:
    """The value of the key `layer_types`, or `default`."""
    kinds = keys("layer_types", None) or default
    if len(kinds) != count:
        raise ModelError(f"config.json: layer_types has {len(kinds)} entries for {count} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(
                f"config.json: layer type {kind!r} is not supported; supported are full_attention "
                "and sliding_attention"
            )
    return kinds


def layers_by_type(
    kinds: list[str],
    mlp: Mlp,
    full: Attention,
    sliding: Attention,
    window: int | None,
    max_len: int,
    **fields,
) -> tuple[Layer, ...]:
    """One layer for each entry of `kinds`; layers of kind "sliding_attention" get the window."""
    if "sliding_attention" in kinds and window is None:
        raise ModelError(
            "config.json: layer_types names sliding_attention, but no sliding_window is in use"
        )
    sliding = replace(sliding, window=effective_window(window, max_len))
    layers = {
        "full_attention": Layer(full, mlp, **fields),
        "sliding_attention": Layer(sliding, mlp, **fields),
    }
    return tuple(layers[kind] for kind in kinds)


def effective_window(window: int | None, max_len: int) -> int | None:
    """The window, or None if no sequence can be longer, so that the layer shares the KV cache group
    of full attention.
    """
    return None if window is None or window >= max_len else window


def model_config(
    keys: Keys, family: str, layers: tuple[Layer, ...], max_len: int, **fields
) -> ModelConfig:
    """Make the `ModelConfig` from the keys that all families share; `fields` take precedence.

    Raises ModelError if config.json has keys that were not read.
    """
    common = {
        "vocab_size": lambda: keys.count("vocab_size"),
        "dim": lambda: keys.count("hidden_size"),
        "norm_eps": lambda: keys.positive("rms_norm_eps", 1e-6),
        "tied": lambda: keys("tie_word_embeddings", False),
    }
    fields |= {name: read() for name, read in common.items() if name not in fields}
    config = ModelConfig(
        family=family, layers=layers, max_len=max_len, dtype=keys.dtype(), **fields
    )
    keys.done()
    return config
