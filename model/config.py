"""What a model computes, layer by layer: frozen, hashable, and free of any checkpoint's key names."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from .classes import Classes
from .errors import ModelError as ModelError
from .indexer import Indexer
from .recurrent import DeltaNet, KimiDelta, Mamba2, ShortConv
from .stored_format import StoredFormat

# The dtypes that keys and values can be kept in; None: the model's own.
CACHES = {"auto": None, "bfloat16": "bfloat16", "int8": "int8", "fp8": "float8_e4m3fn", "int4": "int4"}

ACTIVATIONS = ("auto", "int8")  # what rows become before products; auto: they stay as they are

FAR = 1 << 30  # more than any sequence has positions


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. Every scaling rule comes down to frequencies and one factor on cos and sin."""

    inv_freq: tuple[float, ...]  # one for each pair; 2 * len may be less than the head size (partial rotary)
    factor: float = 1.0


@dataclass(frozen=True)
class Temperature:
    """Queries grow with their position, so that attention over long contexts stays sharp.

    Those at position p are multiplied by 1 + scale * log(1 + floor((p + ahead) / floor)).
    """

    scale: float
    floor: float
    ahead: int = 0


@dataclass(frozen=True)
class Attention:
    """Softmax attention over the layer's own keys and values, or over those of layer `kv_source`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    window: int | None = None  # a row sees the last `window` positions, its own included
    chunked: bool = False  # of those, the ones since the last multiple of `window` alone
    soft_cap: float | None = None
    qk_norm: str | None = None  # "all": over all heads; "head": over each; "turned": over each, after the rotation;
    # "plain": over each, without a scale
    v_norm: bool = False  # RMS norm of the values, without a scale
    bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    tied_kv: bool = False  # the values are the keys' projection
    kv_source: int | None = None
    temperature: Temperature | None = None
    out_gate: bool = False  # each head's result is multiplied by the sigmoid of one more product with the row
    both_ways: bool = False  # a row sees as much after itself as before: all of its sequence is in one step

    kind = "attention"  # the name in MIXERS
    kept: ClassVar[dict[str, tuple[int, ...]]] = {}  # it has no state

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        """What a token leaves in the layer's pages: the heads of each array and their width."""
        return () if self.both_ways else ((self.kv_heads, self.head_dim),) * 2

    @property
    def ahead(self) -> int:
        """How many positions after its own a row sees."""
        return (self.window or FAR) - 1 if self.both_ways else 0

    @property
    def widths(self) -> tuple[int, int]:
        """How wide a head's query is, and what it takes from each position."""
        return self.head_dim, self.head_dim

    @property
    def work(self) -> int:
        """Numbers that a row is multiplied with for each position that it sees."""
        return self.heads * 2 * self.head_dim

    def split(self, tensor: int) -> "Attention":
        """One device's part where so many split the heads."""
        return replace(self, heads=self.heads // tensor, kv_heads=max(1, self.kv_heads // tensor))


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's MLA: the cache holds one latent and one rotary key for each token, shared by all heads."""

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
    interleaved: bool = True  # the checkpoint keeps rotary pairs side by side; loading moves them half the width apart
    temperature: Temperature | None = None
    indexer: Indexer | None = None  # where contexts may be longer than what it picks

    kind = "latent"
    kept: ClassVar[dict[str, tuple[int, ...]]] = {}
    window, chunked, both_ways, kv_source, kv_heads = None, False, False, None, 1

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        """What a token leaves in the layer's pages."""
        return ((1, self.kv_rank + self.rope_dim + (self.indexer.dim if self.indexer else 0)),)

    @property
    def widths(self) -> tuple[int, int]:
        """How wide a head's query is, with the latent's size, and what it takes from each position."""
        return self.kv_rank + self.rope_dim, self.kv_rank

    @property
    def work(self) -> int:
        """Numbers that a row is multiplied with for each position: scores with latents, then a sum of latents."""
        return self.heads * (2 * self.kv_rank + self.rope_dim)

    def split(self, tensor: int) -> "LatentAttention":
        """One device's part where so many split the heads."""
        return replace(self, heads=self.heads // tensor)


@dataclass(frozen=True)
class SideBySide:
    """Attention and Mamba 2 over the same rows: it has pages and a state. What they give is added, times `scales`."""

    attention: Attention
    mamba: Mamba2
    scales: tuple[float, float] = (1.0, 1.0)

    kind = "side_by_side"

    def __getattr__(self, name: str):
        """What it does not say itself is its attention's."""
        if name.startswith("__") or name == "attention":
            raise AttributeError(name)
        return getattr(self.attention, name)

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The arrays that a sequence keeps, whatever its length, in float32."""
        return self.mamba.kept

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """What a row brings to its state, in arrays of these shapes."""
        return self.mamba.inputs

    def divides(self, tensor: int) -> bool:
        """Whether so many devices can split it."""
        return self.mamba.divides(tensor)

    def split(self, tensor: int) -> "SideBySide":
        """One device's part where so many split the heads."""
        return replace(self, attention=self.attention.split(tensor), mamba=self.mamba.split(tensor))


Mixer = Attention | LatentAttention | DeltaNet | KimiDelta | Mamba2 | ShortConv | SideBySide


@dataclass(frozen=True)
class Mlp:
    """A feed-forward block: activation(gate) * up, or without a gate activation(up), then down."""

    dim: int
    activation: str = "silu"
    bias: bool = False
    gated: bool = True
    gate: bool = False  # what it gives is multiplied by the sigmoid of one more product with each row
    multipliers: tuple[float, float] | None = None  # of the gate before its activation, and of the result


@dataclass(frozen=True)
class Moe:
    """Routed experts: each row goes to the `top_k` with the best scores, and their outputs are added by weight."""

    experts: int
    top_k: int
    dim: int
    activation: str = "silu"
    score: str = "softmax"  # of the router's logits: over all, "softmax_top" over the chosen, "sigmoid", or "mixer"
    jitter: float = 0.0  # of "mixer": how near an expert comes to the best, see `ops.moe.routing`
    normalize: bool = True  # the chosen weights are divided by their sum
    scaling: float = 1.0
    groups: int = 1  # experts are chosen from the best `top_groups` of so many groups
    top_groups: int = 1
    group_score: str = "max"  # "max", or "top2": the sum of the two best
    router_float32: bool = False  # the router is kept in float32, whatever the dtype
    router_bias: bool = False  # added to the router's logits
    choice_bias: bool = False  # added to the scores for the choice, not to the weights
    bias: bool = False
    gated: bool = True  # as of `Mlp`
    clamp: float | None = None  # gpt-oss's form of the activation, see `ops.activation.glu`
    alpha: float = 1.0
    own_norms: bool = False  # Gemma 4: router and experts read the residual through norms of their own
    weigh_rows: bool = False  # Llama 4: the one chosen expert's weight multiplies its input, not its output
    quant: str | None = None  # the format of the expert weights
    spare: int = 0  # slots for second and further copies of experts

    @property
    def slots(self) -> int:
        """Slots for an expert's weights: one for each, and the spare ones."""
        return self.experts + self.spare


@dataclass(frozen=True)
class Layer:
    """One block: attention or another mixer, then `mlp` and `moe` side by side (their outputs add), or neither."""

    attention: Mixer
    mlp: Mlp | None = None
    moe: Moe | None = None
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False  # the feed-forward block reads what attention reads, and both are added to the rows at once
    sum_norm: bool = False  # of what a block gives and the rows before it, in place of norms that each have their own
    reads_rows: bool = False  # attention reads the rows as they are, whatever `pre_norm` says

    @property
    def feeds_forward(self) -> bool:
        return self.mlp is not None or self.moe is not None


@dataclass(frozen=True)
class Dense:
    """A product of an encoder's pooled vector; `name` is that of its tensors."""

    name: str
    into: int
    dim: int
    activation: str | None = None
    bias: bool = False
    norm: str | None = None  # the name of the tensors of a norm after it


@dataclass(frozen=True)
class ModelConfig:
    """The whole decoder. `family` names the module of `families` that made it and knows its checkpoints."""

    family: str
    vocab_size: int
    dim: int
    layers: tuple[Layer, ...]
    max_len: int
    norm_eps: float = 1e-6
    dtype: str = "bfloat16"
    tied: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what a block gives, before it is added to the rows
    logit_scale: float = 1.0
    final_soft_cap: float | None = None
    norm: str = "rms"  # or "layer", which takes the mean off; or "layer_bias", which then adds one number to each
    embed_norm: bool = False
    final_norm: bool = True
    head_bias: bool = False  # one number is added to each logit
    positions: int = 0  # rows of a table of positions that is added to the embeddings; 0: there is none
    types: int = 0  # rows of a table of kinds of tokens; 0: there is none
    pairs: bool = False  # the second text of a pair has a kind of its own
    centred: bool = False  # norms take the mean off first: the rows are kept at mean zero, where RMS norms do the same
    per_layer_dim: int = 0  # Gemma 4: the width of a further embedding for each layer; 0: none
    per_layer_vocab: int = 0
    layer_scale: bool = False
    writes: bool = True  # False: it gives hidden states or classes alone, and no logits are computed
    classes: Classes | None = None
    pooling: str = ""  # of an encoder, whose step gives one vector for each sequence: "mean", "cls" or "last"
    head: tuple[Dense, ...] = ()  # what is made of that vector, before the classes if there are any
    quant: str | None = None  # the format that the matrices are kept in, as `ops.quant.packed` names it
    activation_dtype: str = "auto"  # one of ACTIVATIONS
    kv_cache_dtype: str = "auto"  # one of CACHES
    kv_cache_skips: tuple[int, ...] = ()  # layers that own a cache and keep it in the model's dtype nonetheless
    stored: StoredFormat | None = field(default=None, repr=False)  # where the checkpoint is quantised already
    file_format: str | None = field(default=None, repr=False, compare=False)  # a GGUF file's name for its types

    @property
    def weights_format(self) -> str:
        """What people call the format of the weights."""
        return self.file_format or self.quant or self.dtype

    @property
    def rows(self) -> str:
        """The type of rows that meet the weights, as `Weight.for_kernels` has it."""
        if self.activation_dtype == "auto":
            return self.dtype
        return self.activation_dtype + ("_float32" if self.dtype == "float32" else "")

    @property
    def kv_dtype(self) -> str:
        """The dtype of keys and values in the cache, of all layers but those that are skipped."""
        return CACHES[self.kv_cache_dtype] or self.dtype

    def layer_kv_dtype(self, index: int) -> str:
        """That of the cache that a layer reads."""
        return self.dtype if self.kv_owner[index] in self.kv_cache_skips else self.kv_dtype

    def __post_init__(self):
        for index, layer in enumerate(self.layers):
            check_layer(self, index, layer)
            check_four_bits(self, index)

    @property
    def encodes(self) -> bool:
        """Whether rows see those after them, so that a step must have all of a sequence."""
        return any(layer.attention.both_ways for layer in self.layers)

    @property
    def width(self) -> int:
        """Numbers of the vector that it makes of a text."""
        return self.head[-1].dim if self.head else self.dim

    @cached_property
    def kv_owner(self) -> tuple[int, ...]:
        """The layer whose cache each layer reads: its own, or that of its `kv_source`."""
        return tuple(
            index if layer.attention.kv_source is None else layer.attention.kv_source
            for index, layer in enumerate(self.layers)
        )

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that own a cache, in order."""
        own = (index for index, owner in enumerate(self.kv_owner) if index == owner)
        return tuple(index for index in own if self.layers[index].attention.cached)

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep a state of fixed size for each sequence, in order."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.attention.kept)

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts, in order."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.moe is not None)

    @property
    def experts(self) -> int:
        """The largest number of experts of a layer; 0 where there are none."""
        return max((layer.moe.experts for layer in self.layers if layer.moe is not None), default=0)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers that own a cache, full attention (None) first: each is a cache group."""
        seen = {self.layers[index].attention.window for index in self.kv_layers}
        return tuple(sorted(seen, key=lambda window: (window is not None, window or 0)))

    def group(self, layer: int) -> int:
        """The cache group that a layer reads."""
        return self.windows.index(self.layers[self.kv_owner[layer]].attention.window)


def check_layer(config: ModelConfig, index: int, layer: Layer) -> None:
    """Refuse a layer whose numbers cannot work together."""
    if layer.moe is not None:
        check_moe(index, layer.moe)
    attention = layer.attention
    if not attention.cached and not attention.both_ways:
        return
    if attention.heads % attention.kv_heads:
        raise ModelError(
            f"layer {index}: {attention.heads} query heads do not divide into {attention.kv_heads} key-value heads"
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
        raise ModelError(f"layer {index}: kv_source is {source}, which keeps no keys and values of its own")
    if owner.cached != attention.cached:
        raise ModelError(f"layer {index}: its heads differ in number or size from those of kv_source {source}")
    if owner.window is not None and (attention.window is None or attention.window > owner.window):
        raise ModelError(
            f"layer {index}: its window is wider than that of kv_source {source}, whose pages are given back"
        )


def check_four_bits(config: ModelConfig, index: int) -> None:
    """Refuse to keep in four bits what has no such codes."""
    attention = config.layers[index].attention
    if index not in config.kv_layers or config.layer_kv_dtype(index) != "int4":
        return
    remedy = "it can be int8, or kv_cache_dtype_skip_layers can name the layer"
    if len(attention.cached) != 2:
        raise ModelError(
            f"kv_cache_dtype is 'int4', and layer {index} has latent attention, whose values are a part of the keys; "
            f"{remedy}"
        )
    if width := next((width for _, width in attention.cached if width % 2), None):
        raise ModelError(
            f"kv_cache_dtype is 'int4', and layer {index} has heads of an odd width, {width}, where codes lie two a "
            f"byte; {remedy}"
        )


def skipped_layers(config: ModelConfig, names: Sequence[str]) -> tuple[int, ...]:
    """The layers that `kv_cache_dtype_skip_layers` names: by number, or all that have a window."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ModelError(f"kv_cache_dtype_skip_layers is {names!r:.80}; it must be a list, as in ['0', '1']")
    found: set[int] = set()
    for name in (part.strip() for text in names for part in str(text).split(",")):
        if name == "sliding_window":
            found.update(i for i in config.kv_layers if config.layers[i].attention.window is not None)
        elif name.isdecimal() and int(name) in config.kv_layers:
            found.add(int(name))
        else:
            own = ", ".join(map(str, config.kv_layers)) or "none of this model's"
            raise ModelError(
                f"kv_cache_dtype_skip_layers names {name!r}; it can be 'sliding_window' and the layers that have a "
                f"cache of their own, {own}"
            )
    return tuple(sorted(found))


def check_moe(index: int, moe: Moe) -> None:
    """Refuse numbers of experts and groups that cannot work together."""
    if moe.groups < 1 or moe.experts % moe.groups:
        raise ModelError(f"layer {index}: {moe.experts} experts do not divide into {moe.groups} groups")
    size = moe.experts // moe.groups
    if not 1 <= moe.top_groups <= moe.groups:
        raise ModelError(f"layer {index}: {moe.top_groups} groups are to be kept of {moe.groups}")
    if moe.weigh_rows and moe.top_k != 1:
        raise ModelError(f"layer {index}: {moe.top_k} experts a token; where weights multiply inputs it can only be 1")
    if not 1 <= moe.top_k <= size * moe.top_groups:
        raise ModelError(f"layer {index}: {moe.top_k} experts a token cannot be chosen from {size * moe.top_groups}")
    if moe.group_score == "top2" and moe.groups > moe.top_groups and size < 2:
        raise ModelError(f"layer {index}: a group's score is that of its two best experts, but groups have {size}")
