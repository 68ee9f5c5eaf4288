"""Mixers that keep a state of fixed size of each sequence: what they compute, see `model.mixers`."""

from dataclasses import dataclass, replace

from .errors import ModelError


class Recurrent:
    """A mixer that keeps a state of fixed size of each sequence, and no pages: what attention may have, it has not."""

    cached = ()
    rope = None
    temperature = None
    chunked = False
    both_ways = False
    window = None
    kv_source = None


@dataclass(frozen=True)
class DeltaNet(Recurrent):
    """The gated delta rule: each value head keeps a matrix that maps keys to values, and corrects it by each token.

    Queries, keys and values pass a short causal convolution before. Several value heads may share a key head.
    """

    heads: int  # of values
    key_heads: int
    key_dim: int
    value_dim: int
    width: int  # tokens that the convolution sees
    activation: str = "silu"
    overshoots: bool = False  # an error may be corrected up to twice
    norm_eps: float | None = None  # of the results' norm, where it is not the model's

    kind = "delta_net"

    def __post_init__(self):
        if self.heads % self.key_heads:
            raise ModelError(f"{self.heads} value heads do not divide into {self.key_heads} key heads")

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The arrays that a sequence keeps, whatever its length, in float32."""
        keys, values = self.sizes
        return {"tail": (self.width - 1, 2 * keys + values), "memory": (self.heads, self.key_dim, self.value_dim)}

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """What a row brings to it, in arrays of these shapes."""
        keys, values = self.sizes
        return (2 * keys + values,), (2, self.heads)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of all keys of a token, and of all its values."""
        return self.key_heads * self.key_dim, self.heads * self.value_dim

    @property
    def work(self) -> int:
        """Numbers that a row is multiplied with: its memory decays, is read, corrected, and read again."""
        return self.heads * 4 * self.key_dim * self.value_dim

    def divides(self, tensor: int) -> bool:
        """Whether so many devices can split it."""
        return self.heads % tensor == 0 and self.key_heads % tensor == 0

    def split(self, tensor: int) -> "DeltaNet":
        """One device's part where so many split the heads."""
        return replace(self, heads=self.heads // tensor, key_heads=self.key_heads // tensor)


@dataclass(frozen=True)
class KimiDelta(Recurrent):
    """The delta rule with a decay for each number of a key (Kimi Delta Attention): as many key heads as value heads.

    Decays and gates of the results come through products of a small rank each.
    """

    heads: int
    dim: int  # of keys and of values
    width: int  # tokens that the convolution sees
    rank: int
    activation: str = "silu"

    kind = "kimi_delta"

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The arrays that a sequence keeps, whatever its length, in float32."""
        return {"tail": (self.width - 1, 3 * self.size), "memory": (self.heads, self.dim, self.dim)}

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """What a row brings to it, in arrays of these shapes."""
        return (3 * self.size,), (self.heads, self.dim), (self.heads,)

    @property
    def size(self) -> int:
        """Numbers of all keys of a token."""
        return self.heads * self.dim

    @property
    def work(self) -> int:
        """Numbers that a row is multiplied with: its memory decays, is read, corrected, and read again."""
        return self.heads * 4 * self.dim * self.dim

    def divides(self, tensor: int) -> bool:
        """Whether so many devices can split it."""
        return self.heads % tensor == 0

    def split(self, tensor: int) -> "KimiDelta":
        """One device's part where so many split the heads."""
        return replace(self, heads=self.heads // tensor)


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """Each head keeps a matrix from keys to values, which fades and takes in each token. Groups of heads share keys."""

    heads: int
    groups: int
    key_dim: int  # the size of a state, in Mamba's words
    value_dim: int
    width: int  # tokens that the convolution sees
    conv_bias: bool = True
    bias: bool = False
    activation: str = "silu"
    least_step: float = 0.0  # a token counts this much at least
    normed: bool = True  # the gated results pass a norm over each group
    multipliers: tuple[float, ...] | None = None  # of gates, values, keys, queries and steps, behind their product
    spread: bool = False  # the one group's results, and so their norm, are of several devices

    kind = "mamba2"

    def __post_init__(self):
        if self.heads % self.groups:
            raise ModelError(f"{self.heads} heads do not divide into {self.groups} groups")

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The arrays that a sequence keeps, whatever its length, in float32."""
        return {"tail": (self.width - 1, self.sizes[1]), "memory": (self.heads, self.key_dim, self.value_dim)}

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """What a row brings to it, in arrays of these shapes."""
        return (self.sizes[1],), (self.heads,)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of all values of a token, and of what is convolved: values, keys, queries."""
        values = self.heads * self.value_dim
        return values, values + 2 * self.groups * self.key_dim

    @property
    def work(self) -> int:
        """Numbers that a row is multiplied with: its memory fades, takes in the token, and is read."""
        return self.heads * 3 * self.key_dim * self.value_dim

    def divides(self, tensor: int) -> bool:
        """Whether so many devices can split it: each has groups of its own, or all have the only one's keys."""
        return self.heads % tensor == 0 and (self.groups == 1 or self.groups % tensor == 0)

    def split(self, tensor: int) -> "Mamba2":
        """One device's part where so many split the heads."""
        groups, spread = max(1, self.groups // tensor), self.groups == 1 < tensor
        return replace(self, heads=self.heads // tensor, groups=groups, spread=spread)


@dataclass(frozen=True)
class ShortConv(Recurrent):
    """A causal convolution over the last `width` tokens, one for each channel, with gates before and behind it."""

    channels: int
    width: int
    bias: bool = False

    kind = "short_conv"

    @property
    def kept(self) -> dict[str, tuple[int, ...]]:
        """The arrays that a sequence keeps, whatever its length, in float32."""
        return {"tail": (self.width - 1, self.channels)}

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """What a row brings to it, in arrays of these shapes."""
        return ((self.channels,),)

    @property
    def work(self) -> int:
        """Numbers that a row is multiplied with."""
        return self.channels * self.width

    def divides(self, tensor: int) -> bool:
        """Whether so many devices can split it."""
        return self.channels % tensor == 0

    def split(self, tensor: int) -> "ShortConv":
        """One device's part where so many split the channels."""
        return replace(self, channels=self.channels // tensor)
