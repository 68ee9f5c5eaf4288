"""Grouped quantisation with a codebook: `group` neighbouring inputs of an output share a scale.

Several formats are instances of it; their modules describe how they are stored. A scale is a
float32 or float16, or has two levels: an int8 times a float16 that SUPER inputs share. Float32
holds this product exactly.
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
from ..linear.cpu_layout import WORDS, by_block, tile, tile_bits, tile_nibbles
from ..linear.weight import Weight, check_subscripts
from . import four_bits
from .compressed import FormatError, Rounded, multiply, split

STEP = 64  # inputs are padded to a multiple of it for the native kernels
SUPER = 256  # inputs that share the upper level of a scale
MAX_LEVEL = 127  # the largest integer of the lower level


@dataclass(frozen=True)
class Code:
    """A codebook."""

    bits: int
    numbers: np.ndarray  # float32 [2 ** bits], the value of each code; 0 for NaN
    kernel: str  # the native kernel for scales of one level
    init: str  # `ArraySpec.init` of random codes

    @property
    def drawn(self) -> float:
        """The limit of a uniform distribution with the variance of random codes' values."""
        return 1.07 if self.init == "float8" else float(np.sqrt(3 * np.square(self.numbers).mean()))


def floats(dtype: Any, bits: int) -> np.ndarray:
    """The values of all bit patterns of an ml_dtypes dtype."""
    return np.nan_to_num(np.arange(1 << bits, dtype=np.uint8).view(dtype).astype(np.float32))


NF4 = [  # bitsandbytes' quantiles of the normal distribution
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
# bitsandbytes' FP4, times 12
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]
# GGUF's IQ4_NL and IQ4_XS
IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
CODES = {
    "float8": Code(8, floats(ml_dtypes.float8_e4m3fn, 8), "fp8", "float8"),
    "float4": Code(4, floats(ml_dtypes.float4_e2m1fn, 4), "float4", "bytes"),
    "nf4": Code(4, np.array(NF4, np.float32), "nf4", "bytes"),
    "fp4": Code(4, np.array(FP4, np.float32), "fp4", "bytes"),
    "iq4": Code(4, np.array(IQ4, np.float32), "iq4", "bytes"),
    "uint4": Code(4, np.arange(16, dtype=np.float32), "uint4", "bytes"),
    "int4": Code(4, np.arange(-8, 8, dtype=np.float32), "uint4", "bytes"),
    "uint5": Code(5, np.arange(32, dtype=np.float32), "uint5", "fives"),
    "int5": Code(5, np.arange(-16, 16, dtype=np.float32), "uint5", "fives"),
    "uint6": Code(6, np.arange(64, dtype=np.float32), "uint6", "sixes"),
    "int6": Code(6, np.arange(-32, 32, dtype=np.float32), "uint6", "sixes"),
    "int8": Code(
        8, np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32), "int8_groups", "bytes"
    ),
}
WHOLE = {"uint4", "int4", "uint5", "int5", "uint6", "int6", "int8"}  # consecutive integers


def kernel(code: str, scale_dtype: Any) -> str:
    """The name of the native kernel for scales in a dtype; int8 is the lower of two levels."""
    suffixes = {"float32": "", "float16": "_half", "int8": "_levels"}
    return CODES[code].kernel + suffixes[np.dtype(scale_dtype).name]


class Grouped(Rounded):
    """weight = number(code) * scale - least."""

    codes: Any  # uint8 [*into, *out]; with four bits [count(K), O] as in `four_bits.py`
    scale: Any  # float32 or float16 [ceil(K / group), *out]; int8 if it has two levels
    least: Any  # subtracted after scaling, like `scale`; None: nothing
    super_scale: Any  # float16 [ceil(K / SUPER), *out], the upper level; None: one level
    super_least: Any  # the upper level of `least`
    code: str = struct.field(pytree_node=False)  # the codebook, a name in CODES
    group: int = struct.field(pytree_node=False)

    @property
    def levels(self) -> bool:
        return self.super_scale is not None

    @property
    def kernel(self) -> str:
        return kernel(self.code, self.scale.dtype)

    def inputs_per_value(self, field: str = "scale") -> int:
        return SUPER if field.startswith("super") else self.group

    @property
    def block_inputs(self) -> int:
        """The number of neighbouring inputs that must be on the same device."""
        return SUPER if self.levels else self.group

    @property
    def bits(self) -> int:
        return CODES[self.code].bits

    @property
    def packed(self) -> bool:
        return self.bits == 4

    @property
    def is_integer(self) -> bool:
        return self.code in WHOLE

    @property
    def has_minimum(self) -> bool:
        return self.least is not None

    def can_hold(self, source: Rounded) -> bool:
        """Integer nodes can hold the values of several other integer formats."""
        if self.kind == source.kind:
            return True
        fits = (source.levels and source.bits <= self.bits) if self.levels else self.code == "int8"
        groups_fit = source.is_integer and source.inputs_per_value() % self.group == 0
        return fits and groups_fit and (self.has_minimum or not source.has_minimum)

    def integer_codes(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        return fields["codes"]

    def inputs_per_shard(self) -> int:
        return 1 if self.scale.axes[-len(self.out) - 1] in (None, "embed") else self.block_inputs

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        axes = len(self.into)
        # local to the device
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
        return dequantize(self.code, self.group, codes_KO, scale_GO, least_GO)

    def scales(self, index=slice(None)):
        """(scales, minima) with the levels multiplied: float32 [groups, *out] of these outputs."""
        pairs = (self.scale, self.super_scale), (self.least, self.super_least)
        return (
            None
            if x is None
            else combine_levels(x[:, index], None if up is None else up[:, index], self.group)
            for x, up in pairs
        )

    @property
    def rows(self) -> int:
        return self.scale.shape[1]

    def __getitem__(self, index):
        """Rows of an embedding, in float32."""
        K = math.prod(self.into)
        codes_KR = four_bits.split(self.codes[:, index], K) if self.packed else self.codes[:, index]
        return dequantize(self.code, self.group, codes_KR, *self.scales(index)).T

    def for_kernels(self, rows: str) -> Weight:
        if not has_product(self.kernel, rows):
            return self
        K = math.prod(self.into)
        codes = np.asarray(self.codes)
        multiple = max(STEP, self.block_inputs)
        padded = -(-K // multiple) * multiple

        def blocks(field: str, default: str) -> np.ndarray:
            if (values := getattr(self, field)) is None:
                return np.zeros(0, getattr(self, default).dtype)
            flat = np.asarray(values).reshape(len(values), -1)
            return by_block(
                np.pad(flat, ((0, padded // self.inputs_per_value(field) - len(flat)), (0, 0)))
            )

        if self.packed:
            tiles = tile_nibbles(codes, K, padded)
        elif self.bits in WORDS:
            tiles = tile_bits(codes.reshape(K, -1), self.bits, padded)
        else:
            tiles = tile(np.pad(codes.reshape(K, -1), ((0, padded - K), (0, 0))), 2)
        fields: dict[str, Any] = {
            name: blocks(name, name.replace("least", "scale"))
            for name in SHARED
            if self.levels or "super" not in name
        }
        fields |= {"into": self.into, "out": self.out, "inputs": self.inputs}
        return TiledGroups(tiles, **fields, code=self.code, **row_options(self.kernel, rows))

    def quantize(self, weight: np.ndarray) -> "Grouped":
        """Round to nearest. The largest magnitude of a group becomes the largest value of the
        codebook or, with a minimum, the group's range becomes the codebook's.
        """
        K = math.prod(self.into)
        group = self.group
        code = CODES[self.code]
        weight_KO = weight.astype(np.float32).reshape(K, -1)
        grouped = np.pad(weight_KO, ((0, -K % group), (0, 0))).reshape(
            -1, group, weight_KO.shape[1]
        )
        first = code.numbers.min()
        last = code.numbers.max()
        fields = {}
        if self.least is None:
            least = np.zeros((1, 1), np.float32)
            scale = self.round_to_levels("scale", self.group_scale(np.abs(grouped).max(1)), fields)
        else:
            low = np.minimum(grouped.min(1), 0)
            high = np.maximum(grouped.max(1), 0)
            scale = self.round_to_levels("scale", (high - low) / (last - first), fields)
            least = self.round_to_levels("least", first * scale - low, fields)
        shifted = grouped + least[:, None]
        scaled_weight = np.divide(
            shifted, scale[:, None], out=np.zeros_like(grouped), where=scale[:, None] > 0
        )
        codes = nearest(code.numbers, scaled_weight).reshape(-1, weight_KO.shape[1])[:K]
        return self.join(fields | {"codes": codes})

    def round_to_levels(
        self, name: str, values_GO: np.ndarray, fields: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Add group parameters to the fields, rounded as the format stores them, and return the
        rounded parameters.
        """
        if not self.levels:
            fields[name] = values_GO.astype(self.scale.dtype)
            return fields[name].astype(np.float32)
        groups_per_super = SUPER // self.group
        blocks = np.pad(values_GO, ((0, -len(values_GO) % groups_per_super), (0, 0))).reshape(
            -1, groups_per_super, values_GO.shape[1]
        )
        super_values = fields[f"super_{name}"] = (np.abs(blocks).max(1) / MAX_LEVEL).astype(
            np.float16
        )
        super_GO = super_values.astype(np.float32).repeat(groups_per_super, 0)[: len(values_GO)]
        quantised = np.rint(
            np.divide(values_GO, super_GO, out=np.zeros_like(values_GO), where=super_GO > 0)
        )
        fields[name] = np.clip(quantised, -MAX_LEVEL, MAX_LEVEL).astype(np.int8)
        return fields[name] * super_GO

    def group_scale(self, max_abs: np.ndarray) -> np.ndarray:
        """The scales of groups, from their largest magnitudes."""
        scale = max_abs / CODES[self.code].numbers.max()
        if self.code == "int8":  # all stored layouts of grouped int8 have float16 scales
            return scale.astype(np.float16).astype(np.float32)
        return scale

    def from_codes(self, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> "Grouped":
        assert self.code == "int8" and self.least is None
        return self.join({"codes": codes.astype(np.uint8) ^ 128, "scale": scale.astype(np.float32)})

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        def product(name: str) -> np.ndarray:
            return (
                fields[name] * fields[f"super_{name}"].astype(np.float32)
                if self.levels
                else fields[name]
            )

        weight = CODES[self.code].numbers[fields["codes"]] * product("scale")
        return weight if self.least is None else weight - product("least")

    def join(self, fields: dict[str, np.ndarray]) -> "Grouped":
        codes = fields["codes"].reshape(len(fields["codes"]), -1)
        codes = four_bits.join(codes) if self.packed else codes.reshape(self.into + self.out)
        shared = {name: fields[name].reshape(-1, *self.out) for name in SHARED if name in fields}
        return self.replace(codes=codes, **shared)


SHARED = ("scale", "least", "super_scale", "super_least")  # group parameters


class TiledGroups(PackedWeight):
    """Tiles for the native kernels, see formats.h in `ops/native`."""

    # 8 bits: uint8 [O / 16, K / 2, 16, 2]; 4 bits: uint32 [O / 16, K / 8, 16]; 5 bits:
    # uint32 [O / 16, K / 32, 5, 16]; 6 bits: uint32 [O / 16, K / 16, 3, 16]
    tiles: Any
    scale: Any  # float32 or float16 [O / 16, K / group, 16]; int8 if it has two levels
    least: Any  # like `scale`; empty if there is none
    super_scale: Any = None  # float16 [O / 16, K / SUPER, 16]; None: one level
    super_least: Any = None  # like `super_scale`; empty if there is none
    code: str = struct.field(pytree_node=False, kw_only=True)

    @property
    def kernel(self) -> str:
        return kernel(self.code, self.scale.dtype)

    def __getitem__(self, index):
        """Rows of an embedding, in float32."""
        K = math.prod(self.into)
        block = index // LANES
        lane = index % LANES
        codes_KR = tile_codes(self.tiles, CODES[self.code].bits, block, lane)
        codes_KR = codes_KR.reshape(index.shape[0], -1).T
        group = len(codes_KR) // self.scale.shape[1]

        def rows(values, super_values):
            if not values.size:
                return None
            return combine_levels(
                values[block, :, lane].T,
                None if super_values is None else super_values[block, :, lane].T,
                group,
            )

        scale_GR = rows(self.scale, self.super_scale)
        least_GR = rows(self.least, self.super_least)
        return dequantize(self.code, group, codes_KR, scale_GR, least_GR)[:K].T


def tile_codes(tiles, bits: int, block, lane):
    """The codes of rows [..., neighbouring inputs] from tiles, see `TiledGroups`."""
    low = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)
    if bits == 8:
        return tiles[block, :, lane]
    if bits == 4:  # inputs 0 2 4 6 are in the low half of a word, and 1 3 5 7 in the high half
        return tiles[block, :, lane, None] >> low & np.uint32(15)
    words = tiles[block, :, :, lane]
    if bits == 5:
        pair = np.arange(30) // 2
        first = words[:, :, pair // 3] >> add_shifts(np.arange(30) % 2 * 16, pair % 3 * 5)
        # The last two have a bit in every word.
        last = words[..., None] >> add_shifts(15, np.array([0, 16])) & np.uint32(1)
        last = (last << np.arange(5, dtype=np.uint32)[:, None]).sum(2, dtype=jnp.uint32)
        return jnp.concatenate([first & np.uint32(31), last], axis=2)
    pair = np.arange(16) // 2
    half = np.arange(16) % 2 * 16
    has_split_bits = pair >= 6  # their two high bits are in the third word
    low = words[:, :, np.where(has_split_bits, pair - 6, pair // 2)] >> add_shifts(
        half, np.where(has_split_bits, 12, pair % 2 * 6)
    )
    high = words[:, :, 2:] >> add_shifts(half, np.where(has_split_bits, 2 * pair, 0))
    return jnp.where(
        has_split_bits, low & np.uint32(15) | (high & np.uint32(3)) << 4, low & np.uint32(63)
    )


def add_shifts(*terms: Any) -> np.ndarray:
    return np.asarray(sum(terms), np.uint32)


def combine_levels(values_GO, super_SO, group: int):
    """Group parameters in float32, with the levels multiplied."""
    if super_SO is None:
        return values_GO.astype(jnp.float32)
    super_GO = jnp.repeat(super_SO.astype(jnp.float32), SUPER // group, axis=0)
    return values_GO.astype(jnp.float32) * super_GO[: len(values_GO)]


def dequantize(code: str, group: int, codes_KO, scale_GO, least_GO):
    """Dequantise codes to float32."""

    def spread(values_GO):
        return jnp.repeat(values_GO, group, axis=0)[: len(codes_KO)]

    values = jnp.take(
        jnp.asarray(CODES[code].numbers), codes_KO.astype(jnp.int32), axis=0
    ) * spread(scale_GO)
    return values if least_GO is None else values - spread(least_GO)


def nearest(numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The code of the nearest number for each value; the even code in a tie."""
    # (of several codes for the same number the first)
    ordered, order = np.unique(numbers, return_index=True)
    upper = np.clip(np.searchsorted(ordered, values), 1, len(ordered) - 1)
    low_number = ordered[upper - 1]
    high_number = ordered[upper]
    down = order[upper - 1]
    up = order[upper]
    middle = (low_number + high_number) / 2
    take_low = (values < middle) | ((values == middle) & (down % 2 == 0))
    return np.where(take_low, down, up).astype(np.uint8)


def spec(
    dense: ArraySpec,
    code: str,
    group: int,
    kind: type[Grouped] = Grouped,
    least: bool = False,
    scale_dtype: Any = jnp.float32,
) -> Grouped:
    """The specs of a weight in a grouped format.

    Args:
        dense: the spec of the weight.
        code: the codebook, a name in CODES.
        group: inputs of a group.
        kind: the class of the node.
        least: whether a minimum is subtracted.
        scale_dtype: the dtype of the scales; int8 is the lower of two levels.
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

    def group_spec(size: int, dtype: Any, init: str) -> ArraySpec:
        return ArraySpec(
            (-(-K // size), *out), dtype, (by_input[0], *by_output), init, dense.fan_in
        )

    scale_init = f"scale/{CODES[code].drawn:g}"
    levels = scale_dtype == jnp.int8
    scale = group_spec(group, scale_dtype, "ones" if levels else scale_init)
    super_scale = group_spec(SUPER, jnp.float16, scale_init) if levels else None
    return kind(
        codes=replace(
            dense, shape=shape, axes=axes, dtype=jnp.uint8, init=CODES[code].init, inputs=()
        ),
        scale=scale,
        least=scale if least else None,
        super_scale=super_scale,
        super_least=super_scale if least else None,
        code=code,
        group=group,
        into=into,
        out=out,
        inputs=dense.inputs,
    )


def by_table(
    name: str, code: str, group: int, leveled: bool = False
) -> tuple[Callable[..., tuple[str, ...]], Callable[..., Grouped]]:
    """The functions `kernels` and `spec` of a format with a codebook and a fixed group size.

    With `leveled`, the format has the option `levels`: scales in two levels.
    """

    def scale_dtype(options: tuple[str, ...]) -> Any:
        return jnp.int8 if "levels" in options else jnp.float32

    def kernels(*options: str) -> tuple[str, ...]:
        return (kernel(code, scale_dtype(options)),)

    def specs(dense: ArraySpec, *options: str) -> Grouped:
        if options and not (leveled and options == ("levels",)):
            raise FormatError(
                f"{name} has no option "
                f"{'-'.join(options)!r}{'; it can be levels' if leveled else ''}"
            )
        return spec(dense, code, group, scale_dtype=scale_dtype(options))

    return kernels, specs


def by_count(
    name: str, bits: int, groups: tuple[str, ...] = ("16", "32"), scale_dtype: Any = jnp.int8
) -> tuple[Callable[..., tuple[str, ...]], Callable[..., Grouped]]:
    """The functions `kernels` and `spec` of an integer format, by default with scales in two
    levels.

    Its options are one of the group sizes and optionally `least`: a minimum is subtracted.
    """

    def kernels(*options: str) -> tuple[str, ...]:
        return (kernel(f"uint{bits}", scale_dtype),)

    def specs(dense: ArraySpec, *options: str) -> Grouped:
        if options[:1] not in {(group,) for group in groups} or options[1:] not in {(), ("least",)}:
            raise FormatError(
                f"{name} has no options {'-'.join(options)!r}; they can be "
                f"{' or '.join(groups)}, and after it least"
            )
        least = "least" in options
        return spec(
            dense,
            f"uint{bits}" if least else f"int{bits}",
            int(options[0]),
            least=least,
            scale_dtype=scale_dtype,
        )

    return kernels, specs
