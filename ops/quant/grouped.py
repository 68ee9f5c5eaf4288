"""Codes that stand for numbers by a table; `group` neighbouring inputs of an output share a scale.

What several formats are, each of which has a file of its own that says how it is stored. A scale is
a float32, or has two levels: it is a whole number times a float16 that SUPER inputs share. Float32
holds such a product exactly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..linear.cpu import LANES, PackedWeight, has_product, row_options
from ..linear.cpu_layout import by_block, tile, tile_nibbles, tile_sixes
from ..linear.weight import Weight, check_subscripts
from . import four_bits
from .compressed import FormatError, Rounded, multiply, split

STEP = 64  # inputs that the kernels' rows are filled up to
SUPER = 256  # inputs that share the upper level of a scale
MOST = 127  # the largest whole number of the lower one


@dataclass(frozen=True)
class Code:
    """What codes stand for."""

    bits: int
    numbers: np.ndarray  # float32 [2 ** bits]; what stands for none is 0
    kernel: str  # for scales of one level
    init: str  # of random codes

    @property
    def drawn(self) -> float:
        """The limit of uniform numbers that are as large as those of random codes."""
        return 1.07 if self.init == "float8" else float(np.sqrt(3 * np.square(self.numbers).mean()))


def floats(dtype: Any, bits: int) -> np.ndarray:
    """The numbers of all codes of a type of ml_dtypes."""
    return np.nan_to_num(np.arange(1 << bits, dtype=np.uint8).view(dtype).astype(np.float32))


NF4 = [  # quantiles of the normal distribution, as bitsandbytes has them
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
]
# of bitsandbytes, in twelfths
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]
# of GGUF's IQ4_NL and IQ4_XS
IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
CODES = {
    "float8": Code(8, floats(ml_dtypes.float8_e4m3fn, 8), "fp8", "float8"),
    "float4": Code(4, floats(ml_dtypes.float4_e2m1fn, 4), "float4", "bytes"),
    "nf4": Code(4, np.array(NF4, np.float32), "nf4", "bytes"),
    "fp4": Code(4, np.array(FP4, np.float32), "fp4", "bytes"),
    "iq4": Code(4, np.array(IQ4, np.float32), "iq4", "bytes"),
    "uint4": Code(4, np.arange(16, dtype=np.float32), "uint4", "bytes"),
    "int4": Code(4, np.arange(-8, 8, dtype=np.float32), "uint4", "bytes"),
    "uint6": Code(6, np.arange(64, dtype=np.float32), "uint6", "sixes"),
    "int6": Code(6, np.arange(-32, 32, dtype=np.float32), "uint6", "sixes"),
    "int8": Code(
        8, np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32), "int8_groups", "bytes"
    ),
}
WHOLE = {"uint4", "int4", "uint6", "int6", "int8"}  # those of whole numbers one after another


def kernel(code: str, levels: bool) -> str:
    """The name of the native kernel."""
    return CODES[code].kernel + ("_levels" if levels else "")


@struct.dataclass
class Grouped(Rounded):
    """weight = number(code) * scale - least."""

    codes: Any  # uint8 [*into, *out]; of four bits [count(K), O] as in `four_bits.py`
    scale: Any  # float32 [ceil(K / group), *out]; in two levels int8
    least: Any  # the same, or None: 0
    # float16 [ceil(K / SUPER), *out], what the scale is multiplied with; None: it has one level
    super_scale: Any
    super_least: Any  # the same for what is subtracted
    code: str = struct.field(pytree_node=False)  # a name in CODES
    group: int = struct.field(pytree_node=False)

    @property
    def levels(self) -> bool:
        return self.super_scale is not None

    @property
    def kernel(self) -> str:
        return kernel(self.code, self.levels)

    def shared(self, field: str = "scale") -> int:
        return SUPER if field.startswith("super") else self.group

    @property
    def whole(self) -> int:
        """How many neighbouring inputs must lie on one device."""
        return SUPER if self.levels else self.group

    @property
    def bits(self) -> int:
        return CODES[self.code].bits

    @property
    def packed(self) -> bool:
        return self.bits == 4

    @property
    def is_whole(self) -> bool:
        return self.code in WHOLE

    @property
    def has_minimum(self) -> bool:
        return self.least is not None

    def can_hold(self, other: Rounded) -> bool:
        """A node of whole numbers holds those of several formats."""
        if self.kind == other.kind:
            return True
        fits = (other.levels and other.bits <= self.bits) if self.levels else self.code == "int8"
        groups_fit = other.is_whole and other.shared() % self.group == 0
        return fits and groups_fit and (self.has_minimum or not other.has_minimum)

    def whole_codes(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        return fields["codes"]

    def whole_inputs(self) -> int:
        return 1 if self.scale.axes[-len(self.out) - 1] in (None, "embed") else self.whole

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        axes = len(self.into)
        # of this device's part, where it is split
        into = self.into if self.packed else self.codes.shape[:axes]
        out = self.scale.shape[1:]
        check_subscripts(subscripts, x, into, out, self.inputs)
        lead = x.shape[: x.ndim - axes]
        K = math.prod(into)
        y = multiply(x.reshape(-1, K), self.dense(K)).reshape(*lead, *out)
        return (y if bias is None else y + bias).astype(dtype or x.dtype)

    def dense(self, K: int):
        """The weight as one float32 matrix [K, O]."""
        codes_KO = four_bits.split(self.codes, K) if self.packed else self.codes.reshape(K, -1)
        scale_GO, least_GO = (None if x is None else x.reshape(len(x), -1) for x in self.scales())
        return numbers(self.code, self.group, codes_KO, scale_GO, least_GO)

    def scales(self, index=slice(None)):
        """Scales and what is subtracted, of one level: float32 [groups, *out] of these outputs."""
        pairs = (self.scale, self.super_scale), (self.least, self.super_least)
        return (
            None
            if x is None
            else scaled(x[:, index], None if up is None else up[:, index], self.group)
            for x, up in pairs
        )

    @property
    def rows(self) -> int:
        return self.scale.shape[1]

    def __getitem__(self, index):
        """Rows of an embedding, float32."""
        K = math.prod(self.into)
        codes_KR = four_bits.split(self.codes[:, index], K) if self.packed else self.codes[:, index]
        return numbers(self.code, self.group, codes_KR, *self.scales(index)).T

    def for_kernels(self, rows: str) -> Weight:
        if not has_product(self.kernel, rows):
            return self
        K = math.prod(self.into)
        codes = np.asarray(self.codes)
        whole = max(STEP, self.whole)
        padded = -(-K // whole) * whole

        def blocks(field: str, other: str) -> np.ndarray:
            if (values := getattr(self, field)) is None:
                return np.zeros(0, getattr(self, other).dtype)
            flat = np.asarray(values).reshape(len(values), -1)
            return by_block(np.pad(flat, ((0, padded // self.shared(field) - len(flat)), (0, 0))))

        if self.packed:
            tiles = tile_nibbles(codes, K, padded)
        elif CODES[self.code].bits == 6:
            tiles = tile_sixes(codes.reshape(K, -1), padded)
        else:
            tiles = tile(np.pad(codes.reshape(K, -1), ((0, padded - K), (0, 0))), 2)
        fields: dict[str, Any] = {
            name: blocks(name, name.replace("least", "scale"))
            for name in SHARED
            if self.levels or "super" not in name
        }
        fields |= {"into": self.into, "out": self.out, "inputs": self.inputs}
        return TiledGroups(
            tiles, **fields, code=self.code, **row_options(self.kernel, self.group, rows)
        )

    def quantize(self, weight: np.ndarray) -> "Grouped":
        """Round to nearest: the largest value of each group at the largest number, or both ends at
        both ends.
        """
        K = math.prod(self.into)
        group = self.group
        code = CODES[self.code]
        wide_KO = weight.astype(np.float32).reshape(K, -1)
        grouped = np.pad(wide_KO, ((0, -K % group), (0, 0))).reshape(-1, group, wide_KO.shape[1])
        first = code.numbers.min()
        last = code.numbers.max()
        fields = {}
        if self.least is None:
            least = np.zeros((1, 1), np.float32)
            scale = self.leveled("scale", self.scaled(np.abs(grouped).max(1)), fields)
        else:
            low = np.minimum(grouped.min(1), 0)
            high = np.maximum(grouped.max(1), 0)
            scale = self.leveled("scale", (high - low) / (last - first), fields)
            least = self.leveled("least", first * scale - low, fields)
        above = grouped + least[:, None]
        exact = np.divide(
            above, scale[:, None], out=np.zeros_like(grouped), where=scale[:, None] > 0
        )
        codes = nearest(code.numbers, exact).reshape(-1, wide_KO.shape[1])[:K]
        return self.join(fields | {"codes": codes})

    def leveled(
        self, name: str, values_GO: np.ndarray, fields: dict[str, np.ndarray]
    ) -> np.ndarray:
        """What groups share, put into the fields as it is kept; and what it then is."""
        fields[name] = values_GO
        if not self.levels:
            return values_GO
        again = SUPER // self.group
        blocks = np.pad(values_GO, ((0, -len(values_GO) % again), (0, 0))).reshape(
            -1, again, values_GO.shape[1]
        )
        above = fields[f"super_{name}"] = (np.abs(blocks).max(1) / MOST).astype(np.float16)
        each = above.astype(np.float32).repeat(again, 0)[: len(values_GO)]
        whole = np.rint(np.divide(values_GO, each, out=np.zeros_like(values_GO), where=each > 0))
        fields[name] = np.clip(whole, -MOST, MOST).astype(np.int8)
        return fields[name] * each

    def scaled(self, most: np.ndarray) -> np.ndarray:
        """The scale of groups by the size of their largest value."""
        scale = most / CODES[self.code].numbers.max()
        if self.code == "int8":  # as every layout of bytes in groups holds it
            return scale.astype(np.float16).astype(np.float32)
        return scale

    def coded(self, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> "Grouped":
        assert self.code == "int8" and self.least is None
        return self.join({"codes": codes.astype(np.uint8) ^ 128, "scale": scale.astype(np.float32)})

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        def product(name: str) -> np.ndarray:
            return (
                fields[name] * fields[f"super_{name}"].astype(np.float32)
                if self.levels
                else fields[name]
            )

        found = CODES[self.code].numbers[fields["codes"]] * product("scale")
        return found if self.least is None else found - product("least")

    def join(self, fields: dict[str, np.ndarray]) -> "Grouped":
        codes = fields["codes"].reshape(len(fields["codes"]), -1)
        codes = four_bits.join(codes) if self.packed else codes.reshape(self.into + self.out)
        shared = {name: fields[name].reshape(-1, *self.out) for name in SHARED if name in fields}
        return self.replace(codes=codes, **shared)


SHARED = ("scale", "least", "super_scale", "super_least")  # what groups share


@struct.dataclass
class TiledGroups(PackedWeight):
    """For the kernels; see formats.h."""

    # uint8 [O / 16, K / 2, 16, 2]; uint32 [O / 16, K / 8, 16] of four bits, [O / 16, K / 16, 3, 16]
    # of six
    tiles: Any
    scale: Any  # float32 [O / 16, K / group, 16]; in two levels int8
    least: Any  # the same, or empty
    super_scale: Any = None  # float16 [O / 16, K / SUPER, 16]; None where scales have one level
    super_least: Any = None  # the same, or empty
    code: str = struct.field(pytree_node=False, kw_only=True)

    @property
    def kernel(self) -> str:
        return kernel(self.code, self.super_scale is not None)

    def __getitem__(self, index):
        """Rows of an embedding, float32."""
        K = math.prod(self.into)
        block, lane = (index // LANES, index % LANES)
        codes_KR = self.codes_of(block, lane).reshape(index.shape[0], -1).T
        group = len(codes_KR) // self.scale.shape[1]

        def rows(values, up):
            if not values.size:
                return None
            return scaled(
                values[block, :, lane].T, None if up is None else up[block, :, lane].T, group
            )

        scale_GR = rows(self.scale, self.super_scale)
        least_GR = rows(self.least, self.super_least)
        return numbers(self.code, group, codes_KR, scale_GR, least_GR)[:K].T

    def codes_of(self, block, lane):
        bits = CODES[self.code].bits
        low = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)
        if bits == 8:
            return self.tiles[block, :, lane]
        if bits == 4:  # k0 k2 k4 k6 in the low half of a word, and k1 k3 k5 k7 in its high half
            return self.tiles[block, :, lane, None] >> low & np.uint32(15)
        words = self.tiles[block, :, :, lane]
        pair = np.arange(16) // 2
        half = np.arange(16) % 2 * 16
        last = pair >= 6  # those whose two high bits lie apart
        low = words[:, :, np.where(last, pair - 6, pair // 2)] >> shifts(
            half, np.where(last, 12, pair % 2 * 6)
        )
        high = words[:, :, 2:] >> shifts(half, np.where(last, 2 * pair, 0))
        return jnp.where(
            last, low & np.uint32(15) | (high & np.uint32(3)) << 4, low & np.uint32(63)
        )


def shifts(*parts: np.ndarray) -> np.ndarray:
    return sum(parts).astype(np.uint32)


def scaled(values_GO, super_SO, group: int):
    """What groups share, in float32."""
    if super_SO is None:
        return values_GO
    above = jnp.repeat(super_SO.astype(jnp.float32), SUPER // group, axis=0)
    return values_GO.astype(jnp.float32) * above[: len(values_GO)]


def numbers(code: str, group: int, codes_KO, scale_GO, least_GO):
    """What codes mean, in float32."""

    def spread(values_GO):
        return jnp.repeat(values_GO, group, axis=0)[: len(codes_KO)]

    found = jnp.take(jnp.asarray(CODES[code].numbers), codes_KO.astype(jnp.int32), axis=0) * spread(
        scale_GO
    )
    return found if least_GO is None else found - spread(least_GO)


def nearest(numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The code of the number nearest to each value; of two as near, the even code."""
    # of codes for the same number the first: all mean one
    ordered, order = np.unique(numbers, return_index=True)
    above = np.clip(np.searchsorted(ordered, values), 1, len(ordered) - 1)
    low = ordered[above - 1]
    high = ordered[above]
    down = order[above - 1]
    up = order[above]
    middle = (low + high) / 2
    take_low = (values < middle) | ((values == middle) & (down % 2 == 0))
    return np.where(take_low, down, up).astype(np.uint8)


def spec(
    dense: ArraySpec,
    code: str,
    group: int,
    kind: type[Grouped] = Grouped,
    least: bool = False,
    levels: bool = False,
) -> Grouped:
    """The specs of an array kept so.

    One that is split by its inputs has whole groups in each part, or is refused.
    """
    into, out, axes = split(dense)
    K = math.prod(into)
    O = math.prod(out)
    shape = into + out
    by_input = axes[: len(into)]
    by_output = axes[len(into) :]
    if CODES[code].bits == 4:
        if K % 2:
            raise FormatError(f"{K} inputs cannot be kept two a byte")
        shape = (four_bits.count(K), O)
        axes = (by_input[0], by_output[0])

    def shared(size: int, dtype: Any, init: str) -> ArraySpec:
        return ArraySpec(
            (-(-K // size), *out), dtype, (by_input[0], *by_output), init, dense.fan_in
        )

    drawn = f"scale/{CODES[code].drawn:g}"
    scale = shared(group, jnp.int8, "ones") if levels else shared(group, jnp.float32, drawn)
    above = shared(SUPER, jnp.float16, drawn) if levels else None
    return kind(
        codes=replace(
            dense, shape=shape, axes=axes, dtype=jnp.uint8, init=CODES[code].init, inputs=()
        ),
        scale=scale,
        least=scale if least else None,
        super_scale=above,
        super_least=above if least else None,
        code=code,
        group=group,
        into=into,
        out=out,
        inputs=dense.inputs,
    )


def by_table(
    name: str, code: str, group: int, leveled: bool = False
) -> tuple[Callable[..., tuple[str, ...]], Callable[..., Grouped]]:
    """`kernels` and `spec` of a format that is codes of a table in groups of one size.

    It has no options, or `levels`: scales in two levels.
    """

    def kernels(*options: str) -> tuple[str, ...]:
        return (kernel(code, "levels" in options),)

    def specs(dense: ArraySpec, *options: str) -> Grouped:
        if options and not (leveled and options == ("levels",)):
            raise FormatError(
                f"{name} has no option "
                f"{'-'.join(options)!r}{'; it can be levels' if leveled else ''}"
            )
        return spec(dense, code, group, levels=bool(options))

    return kernels, specs


def by_count(name: str, bits: int) -> tuple[Callable[..., tuple[str, ...]], Callable[..., Grouped]]:
    """The same of a format that is whole numbers of so many bits, with scales in two levels.

    The options are a group's size, 16 or 32, and perhaps `least`: a number taken off.
    """

    def kernels(*options: str) -> tuple[str, ...]:
        return (kernel(f"uint{bits}", True),)

    def specs(dense: ArraySpec, *options: str) -> Grouped:
        if options not in {("16",), ("32",), ("16", "least"), ("32", "least")}:
            raise FormatError(
                f"{name} has no options {'-'.join(options)!r}; they can be 16 or 32, and after "
                "it least"
            )
        least = "least" in options
        return spec(
            dense,
            f"uint{bits}" if least else f"int{bits}",
            int(options[0]),
            least=least,
            levels=True,
        )

    return kernels, specs
