"""Configurations of recurrent mixers, which keep a state of fixed size for each sequence; see
`model.mixers`.
"""

from dataclasses import dataclass, replace

from .errors import ModelError


class Recurrent:
    """A mixer with a state of fixed size and no KV pages: it has none of attention's options."""

    cached = ()
    rope = None
    temperature = None
    chunked = False
    both_ways = False
    window = None
    kv_source = None


@dataclass(frozen=True)
class DeltaNet(Recurrent):
    """The gated delta rule: each value head keeps a matrix from keys to values, and corrects it by
    each token.

    Queries, keys and values first pass a short causal convolution. Several value heads may share a
    key head.
    """

    heads: int  # value heads
    key_heads: int
    key_dim: int
    value_dim: int
    width: int  # tokens of the convolution
    activation: str = "silu"
    overshoots: bool = False  # beta may be up to 2
    norm_eps: float | None = None  # of the output norm, if not the model's

    kind = "delta_net"

    def __post_init__(self):
        if self.heads % self.key_heads:
            raise ModelError(
                f"{self.heads} value heads do not divide into {self.key_heads} key heads"
            )

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a sequence's state (float32), by name."""
        keys, values = self.sizes
        return {
            "tail": (self.width - 1, 2 * keys + values),
            "memory": (self.heads, self.key_dim, self.value_dim),
        }

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays by which a token updates the state."""
        keys, values = self.sizes
        return (2 * keys + values,), (2, self.heads)

    @property
    def sizes(self) -> tuple[int, int]:
        """Total sizes of a token's keys and of its values."""
        return self.key_heads * self.key_dim, self.heads * self.value_dim

    @property
    def work(self) -> int:
        """Multiply-adds for a token: the state decays, is read, corrected, and read again."""
        return self.heads * 4 * self.key_dim * self.value_dim

    def divides(self, tensor: int) -> bool:
        """Whether `tensor` devices can split it."""
        return self.heads % tensor == 0 and self.key_heads % tensor == 0

    def split(self, tensor: int) -> "DeltaNet":
        """The part of one of `tensor` devices, which split the heads."""
        return replace(self, heads=self.heads // tensor, key_heads=self.key_heads // tensor)


@dataclass(frozen=True)
class KimiDelta(Recurrent):
    """Kimi Delta Attention: the delta rule with a decay for each channel of a key, as many key
    heads as value heads.

    Decays and output gates come from low-rank projections.
    """

    heads: int
    dim: int  # of keys and values
    width: int  # tokens of the convolution
    rank: int
    activation: str = "silu"

    kind = "kimi_delta"

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a sequence's state (float32), by name."""
        return {"tail": (self.width - 1, 3 * self.size), "memory": (self.heads, self.dim, self.dim)}

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays by which a token updates the state."""
        return (3 * self.size,), (self.heads, self.dim), (self.heads,)

    @property
    def size(self) -> int:
        """Total size of a token's keys."""
        return self.heads * self.dim

    @property
    def work(self) -> int:
        """Multiply-adds for a token: the state decays, is read, corrected, and read again."""
        return self.heads * 4 * self.dim * self.dim

    def divides(self, tensor: int) -> bool:
        """Whether `tensor` devices can split it."""
        return self.heads % tensor == 0

    def split(self, tensor: int) -> "KimiDelta":
        """The part of one of `tensor` devices, which split the heads."""
        return replace(self, heads=self.heads // tensor)


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """Each head keeps a matrix from keys to values, which decays and adds each token. Groups of
    heads share keys.
    """

    heads: int
    groups: int
    key_dim: int  # state size, in Mamba's terms
    value_dim: int
    width: int  # tokens of the convolution
    conv_bias: bool = True
    bias: bool = False
    activation: str = "silu"
    least_step: float = 0.0  # minimum time step
    normed: bool = True  # a norm over each group of the gated outputs
    # Of projected gates, values, keys, queries, time steps.
    multipliers: tuple[float, ...] | None = None
    spread: bool = False  # several devices share the only group, and its norm

    kind = "mamba2"

    def __post_init__(self):
        if self.heads % self.groups:
            raise ModelError(f"{self.heads} heads do not divide into {self.groups} groups")

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a sequence's state (float32), by name."""
        return {
            "tail": (self.width - 1, self.sizes[1]),
            "memory": (self.heads, self.key_dim, self.value_dim),
        }

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays by which a token updates the state."""
        return (self.sizes[1],), (self.heads,)

    @property
    def sizes(self) -> tuple[int, int]:
        """Total sizes of a token's values, and of the convolved values, keys and queries."""
        values = self.heads * self.value_dim
        return values, values + 2 * self.groups * self.key_dim

    @property
    def work(self) -> int:
        """Multiply-adds for a token: the state decays, adds the token, and is read."""
        return self.heads * 3 * self.key_dim * self.value_dim

    def divides(self, tensor: int) -> bool:
        """Whether `tensor` devices can split it: each has groups of its own, or all share the only
        group's keys.
        """
        return self.heads % tensor == 0 and (self.groups == 1 or self.groups % tensor == 0)

    def split(self, tensor: int) -> "Mamba2":
        """The part of one of `tensor` devices, which split the heads."""
        groups, is_spread = max(1, self.groups // tensor), self.groups == 1 < tensor
        return replace(self, heads=self.heads // tensor, groups=groups, spread=is_spread)


@dataclass(frozen=True)
class ShortConv(Recurrent):
    """A causal convolution over the last `width` tokens, one for each channel, with two gates."""

    channels: int
    width: int
    bias: bool = False

    kind = "short_conv"

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a sequence's state (float32), by name."""
        return {"tail": (self.width - 1, self.channels)}

    @property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays by which a token updates the state."""
        return ((self.channels,),)

    @property
    def work(self) -> int:
        """Multiply-adds for a token."""
        return self.channels * self.width

    def divides(self, tensor: int) -> bool:
        """Whether `tensor` devices can split it."""
        return self.channels % tensor == 0

    def split(self, tensor: int) -> "ShortConv":
        """The part of one of `tensor` devices, which split the channels."""
        return replace(self, channels=self.channels // tensor)
