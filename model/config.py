"""What a model computes, layer by layer: frozen, hashable, without checkpoint-specific names."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from .classes import Classes
from .errors import ModelError as ModelError
from .indexer import Indexer
from .recurrent import DeltaNet, KimiDelta, Mamba2, Recurrent, ShortConv
from .stored_format import StoredFormat

# The dtypes of the KV cache; None: the model's dtype.
CACHES = {
    "auto": None,
    "bfloat16": "bfloat16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "int4": "int4",
}

ACTIVATIONS = ("auto", "int8")  # activations are quantised to this; auto: not at all

FAR = 1 << 30  # more than the length of any sequence


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. Every scaling rule reduces to frequencies and one factor on cos and sin."""

    inv_freq: tuple[float, ...]  # for each pair; 2 * len may be less than the head size
    factor: float = 1.0
    # The position that turns each pair, where tokens have several: rows and columns of images.
    axes: tuple[int, ...] = ()  # empty: all pairs turn by the position in the sequence


@dataclass(frozen=True)
class Temperature:
    """Scaling of queries by position, which keeps attention over long contexts sharp.

    Queries at position p are multiplied by 1 + scale * log(1 + floor((p + ahead) / floor)).
    """

    scale: float
    floor: float
    ahead: int = 0


@dataclass(frozen=True)
class Attention:
    """Softmax attention over the layer's own keys and values, or those of layer `kv_source`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    window: int | None = None  # the last `window` positions are visible, including the token's own
    chunked: bool = False  # only those since the last multiple of `window`
    soft_cap: float | None = None
    # "all": over all heads; "head": over each head; "turned": over each head, after the rotary
    # embedding; "plain": over each head, without a scale.
    qk_norm: str | None = None
    v_norm: bool = False  # RMS norm of values, without a scale
    bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    tied_kv: bool = False  # values are the key projection
    kv_source: int | None = None
    temperature: Temperature | None = None
    out_gate: bool = False  # outputs are gated by a sigmoid of a projection
    both_ways: bool = False  # encoders: attention in both directions
    spans: bool = False  # the tokens of an image see all of it

    kind = "attention"  # key of MIXERS
    state_shapes: ClassVar[dict[str, tuple[int, ...]]] = {}  # shapes of recurrent states: none

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        """What a token writes to the layer's pages: the heads and width of each array."""
        return () if self.both_ways else ((self.kv_heads, self.head_dim),) * 2

    @property
    def ahead(self) -> int:
        """The number of later positions that a token attends to."""
        return (self.window or FAR) - 1 if self.both_ways else 0

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of a head's query and of its values."""
        return self.head_dim, self.head_dim

    @property
    def work(self) -> int:
        """Multiply-adds of a token for each position that it attends to."""
        return self.heads * 2 * self.head_dim

    def split(self, tensor: int) -> "Attention":
        """The part of one of `tensor` devices, which split the heads."""
        return replace(self, heads=self.heads // tensor, kv_heads=max(1, self.kv_heads // tensor))


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's MLA: the cache has one latent and one rotary key for each token, shared by all
    heads.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    rope: Rope | None
    bias: bool = False
    norm_eps: float = 1e-6
    # Rotary pairs are interleaved in the checkpoint; loading separates them.
    interleaved: bool = True
    temperature: Temperature | None = None
    indexer: Indexer | None = None  # None also if contexts are shorter than its selection

    kind = "latent"
    state_shapes: ClassVar[dict[str, tuple[int, ...]]] = {}
    window = None
    chunked = False
    both_ways = False
    kv_source = None
    kv_heads = 1

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        """What a token writes to the layer's pages: heads and width."""
        return ((1, self.kv_rank + self.rope_dim + (self.indexer.dim if self.indexer else 0)),)

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of a head's absorbed query and of the latent it sums."""
        return self.kv_rank + self.rope_dim, self.kv_rank

    @property
    def work(self) -> int:
        """Multiply-adds of a token for each position: scores with, then a sum of latents."""
        return self.heads * (2 * self.kv_rank + self.rope_dim)

    def split(self, tensor: int) -> "LatentAttention":
        """The part of one of `tensor` devices, which split the heads."""
        return replace(self, heads=self.heads // tensor)


@dataclass(frozen=True)
class SideBySide:
    """Attention and Mamba 2 on the same input, with KV pages and a state; outputs are added, times
    `scales`.
    """

    attention: Attention
    mamba: Mamba2
    scales: tuple[float, float] = (1.0, 1.0)

    kind = "side_by_side"

    def __getattr__(self, name: str):
        """Delegate other attributes to the attention."""
        if name.startswith("__") or name == "attention":
            raise AttributeError(name)
        return getattr(self.attention, name)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a sequence's state (float32), by name."""
        return self.mamba.state_shapes

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a token's inputs to the state."""
        return self.mamba.inputs

    def divides(self, tensor: int) -> bool:
        """Whether `tensor` devices can split it."""
        return self.mamba.divides(tensor)

    def split(self, tensor: int) -> "SideBySide":
        """The part of one of `tensor` devices, which split the heads."""
        return replace(self, attention=self.attention.split(tensor), mamba=self.mamba.split(tensor))


StatefulMixer = DeltaNet | KimiDelta | Mamba2 | ShortConv | SideBySide
Mixer = Attention | LatentAttention | StatefulMixer


@dataclass(frozen=True)
class Mlp:
    """A feed-forward block: activation(gate) * up, or without a gate activation(up), then down."""

    dim: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True
    gate: bool = False  # the output is gated by a sigmoid of a projection
    # Of the gate before its activation, and of the output.
    multipliers: tuple[float, float] | None = None


@dataclass(frozen=True)
class Moe:
    """Routed experts: each token goes to the `top_k` with the best scores; their outputs are summed
    by weight.
    """

    experts: int
    top_k: int
    dim: int
    activation: str = "silu"
    score: str = "softmax"  # or "softmax_top" (over the selected), "sigmoid", "mixer"
    jitter: float = 0.0  # of "mixer": threshold relative to the best, see `ops.moe.routing`
    normalize: bool = True  # divide the selected weights by their sum
    scaling: float = 1.0
    groups: int = 1  # experts are selected from the best `top_groups` groups
    top_groups: int = 1
    group_score: str = "max"  # "max", or "top2": the sum of the two best
    router_float32: bool = False  # router weights are float32
    router_bias: bool = False  # added to router logits
    choice_bias: bool = False  # added to scores for the selection, not to weights
    bias: bool = False
    gated: bool = True  # as in `Mlp`
    clamp: float | None = None  # gpt-oss's activation, see `ops.activation.glu`
    alpha: float = 1.0
    own_norms: bool = False  # Gemma 4: router and experts have pre-norms of their own
    weigh_rows: bool = False  # Llama 4: the weight multiplies the expert's input
    quant: str | None = None  # weight format of the experts
    spare: int = 0  # slots for redundant experts

    @property
    def slots(self) -> int:
        """Slots for experts' weights: one for each expert, and the redundant ones."""
        return self.experts + self.spare


@dataclass(frozen=True)
class Layer:
    """One block: a mixer, then `mlp` and `moe` side by side (outputs are added), or neither."""

    attention: Mixer
    mlp: Mlp | None = None
    moe: Moe | None = None
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False  # MLP and attention have the same input
    sum_norm: bool = False  # one norm of the sum of block output and residual
    reads_rows: bool = False  # attention has no pre-norm, regardless of `pre_norm`

    @property
    def feeds_forward(self) -> bool:
        return self.mlp is not None or self.moe is not None


@dataclass(frozen=True)
class Dense:
    """A dense layer after an encoder's pooling; `name` is that of its tensors."""

    name: str
    into: int
    dim: int
    activation: str | None = None
    bias: bool = False
    norm: str | None = None  # name of the tensors of a norm after it


@dataclass(frozen=True)
class ModelConfig:
    """The whole model. `family` is the module of `families` that created it and knows its
    checkpoints.
    """

    family: str
    vocab_size: int
    dim: int
    layers: tuple[Layer, ...]
    max_len: int
    norm_eps: float = 1e-6
    dtype: str = "bfloat16"
    tied: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of block outputs, before they are added to the residual
    logit_scale: float = 1.0
    final_soft_cap: float | None = None
    norm: str = "rms"  # or "layer" (subtracts the mean), "layer_bias" (and adds a bias)
    embed_norm: bool = False
    final_norm: bool = True
    head_bias: bool = False
    positions: int = 0  # rows of learned position embeddings; 0: none
    types: int = 0  # token types (segment embeddings); 0: none
    pairs: bool = False  # the second text of a pair has a token type of its own
    centred: bool = False  # norms subtract the mean: weights keep it at zero, so RMS norms suffice
    per_layer_dim: int = 0  # Gemma 4: width of per-layer embeddings; 0: none
    per_layer_vocab: int = 0
    media_token: int = 0  # the token whose per-layer embedding rows of images have
    layer_scale: bool = False
    writes: bool = True  # False: hidden states or classes only, no logits
    classes: Classes | None = None
    pooling: str = ""  # of an encoder: "mean", "cls" or "last"
    head: tuple[Dense, ...] = ()  # dense layers after pooling
    quant: str | None = None  # weight format, as `ops.quant.packed` names it
    activation_dtype: str = "auto"  # one of ACTIVATIONS
    kv_cache_dtype: str = "auto"  # one of CACHES
    kv_cache_skips: tuple[int, ...] = ()  # layers whose KV cache has the model's dtype
    stored: StoredFormat | None = field(default=None, repr=False)  # of a quantised checkpoint
    # Of a GGUF file, such as Q4_K_M.
    file_format: str | None = field(default=None, repr=False, compare=False)

    @property
    def weights_format(self) -> str:
        """The common name of the weight format."""
        return self.file_format or self.quant or self.dtype

    @property
    def rows(self) -> str:
        """The activation format for the weights' kernels, as `Weight.for_kernels` names it."""
        if self.activation_dtype == "auto":
            return self.dtype
        return self.activation_dtype + ("_float32" if self.dtype == "float32" else "")

    @property
    def kv_dtype(self) -> str:
        """The dtype of the KV cache in all layers but skipped ones."""
        return CACHES[self.kv_cache_dtype] or self.dtype

    def layer_kv_dtype(self, index: int) -> str:
        """The dtype of the KV cache that a layer reads."""
        return self.dtype if self.kv_owner[index] in self.kv_cache_skips else self.kv_dtype

    def __post_init__(self):
        for index, layer in enumerate(self.layers):
            check_layer(self, index, layer)
            check_four_bits(self, index)

    @property
    def encodes(self) -> bool:
        """Whether tokens attend to later ones, so that a step must contain whole sequences."""
        return any(layer.attention.both_ways for layer in self.layers)

    @property
    def width(self) -> int:
        """The size of a text's embedding."""
        return self.head[-1].dim if self.head else self.dim

    @cached_property
    def kv_owner(self) -> tuple[int, ...]:
        """For each layer, the layer whose KV cache it reads: itself or its `kv_source`."""
        return tuple(
            index if layer.attention.kv_source is None else layer.attention.kv_source
            for index, layer in enumerate(self.layers)
        )

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that own a KV cache, in order."""
        owners = (index for index, owner in enumerate(self.kv_owner) if index == owner)
        return tuple(index for index in owners if self.layers[index].attention.cached)

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """The recurrent layers, in order."""
        return tuple(
            index for index, layer in enumerate(self.layers) if layer.attention.state_shapes
        )

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts, in order."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.moe is not None)

    @property
    def experts(self) -> int:
        """The largest number of experts of a layer; 0 if there are none."""
        return max((layer.moe.experts for layer in self.layers if layer.moe is not None), default=0)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of layers that own a KV cache, full attention (None) first: one
        cache group each.
        """
        windows = {self.layers[index].attention.window for index in self.kv_layers}
        return tuple(sorted(windows, key=lambda window: (window is not None, window or 0)))

    def group(self, layer: int) -> int:
        """The cache group that a layer reads."""
        return self.windows.index(self.layers[self.kv_owner[layer]].attention.window)


def check_layer(config: ModelConfig, index: int, layer: Layer) -> None:
    """Raise for a layer whose settings are inconsistent."""
    if layer.moe is not None:
        check_moe(index, layer.moe)
    attention = layer.attention
    if isinstance(attention, Recurrent):
        return
    if attention.heads % attention.kv_heads:
        raise ModelError(
            f"layer {index}: {attention.heads} query heads do not divide into {attention.kv_heads} "
            "key-value heads"
        )
    if attention.window is not None and attention.window < 1:
        raise ModelError(f"layer {index}: window is {attention.window}; it must be at least 1")
    if attention.chunked and attention.window is None:
        raise ModelError(f"layer {index}: chunks need a window, which is their size")
    source = attention.kv_source
    if source is None:
        return
    if not 0 <= source < index:
        raise ModelError(f"layer {index}: kv_source is {source}; it must name an earlier layer")
    owner = config.layers[source].attention
    if len(owner.cached) != 2 or owner.kv_source is not None:
        raise ModelError(
            f"layer {index}: kv_source is {source}, which keeps no keys and values of its own"
        )
    if owner.cached != attention.cached:
        raise ModelError(
            f"layer {index}: its heads differ in number or size from those of kv_source {source}"
        )
    if owner.window is not None and (attention.window is None or attention.window > owner.window):
        raise ModelError(
            f"layer {index}: its window is wider than that of kv_source {source}, whose pages are "
            "released"
        )


def check_four_bits(config: ModelConfig, index: int) -> None:
    """Raise if the KV cache of a layer cannot be int4."""
    attention = config.layers[index].attention
    if index not in config.kv_layers or config.layer_kv_dtype(index) != "int4":
        return
    remedy = "it can be int8, or kv_cache_dtype_skip_layers can name the layer"
    if len(attention.cached) != 2:
        raise ModelError(
            f"kv_cache_dtype is 'int4', and layer {index} has latent attention, whose values are a "
            f"part of the keys; {remedy}"
        )
    if width := next((width for _, width in attention.cached if width % 2), None):
        raise ModelError(
            f"kv_cache_dtype is 'int4', and layer {index} has heads of an odd width, {width}, "
            f"where codes lie two a byte; {remedy}"
        )


def skipped_layers(config: ModelConfig, names: Sequence[str]) -> tuple[int, ...]:
    """The layers that `kv_cache_dtype_skip_layers` names: by number, or all with a window."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ModelError(
            f"kv_cache_dtype_skip_layers is {names!r:.80}; it must be a list, as in ['0', '1']"
        )
    layers: set[int] = set()
    for name in (item.strip() for text in names for item in str(text).split(",")):
        if name == "sliding_window":
            layers.update(
                i for i in config.kv_layers if config.layers[i].attention.window is not None
            )
        elif name.isdecimal() and int(name) in config.kv_layers:
            layers.add(int(name))
        else:
            owners = ", ".join(map(str, config.kv_layers)) or "none of this model's"
            raise ModelError(
                f"kv_cache_dtype_skip_layers names {name!r}; it can be 'sliding_window' and the "
                f"layers that have a cache of their own, {owners}"
            )
    return tuple(sorted(layers))


def check_moe(index: int, moe: Moe) -> None:
    """Raise for inconsistent numbers of experts and groups."""
    if moe.groups < 1 or moe.experts % moe.groups:
        raise ModelError(
            f"layer {index}: {moe.experts} experts do not divide into {moe.groups} groups"
        )
    size = moe.experts // moe.groups
    if not 1 <= moe.top_groups <= moe.groups:
        raise ModelError(
            f"layer {index}: {moe.top_groups} groups are to be selected of {moe.groups}"
        )
    if moe.weigh_rows and moe.top_k != 1:
        raise ModelError(
            f"layer {index}: {moe.top_k} experts a token; where weights multiply inputs it can "
            "only be 1"
        )
    if not 1 <= moe.top_k <= size * moe.top_groups:
        raise ModelError(
            f"layer {index}: {moe.top_k} experts a token cannot be chosen from "
            f"{size * moe.top_groups}"
        )
    if moe.group_score == "top2" and moe.groups > moe.top_groups and size < 2:
        raise ModelError(
            f"layer {index}: a group's score is that of its two best experts, but groups have "
            f"{size}"
        )
