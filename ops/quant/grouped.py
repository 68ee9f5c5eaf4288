"""Codes that stand for numbers by a table; `group` neighbouring inputs of an output share a scale.

What several formats are, each of which has a file of its own that says how it is stored.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct

from ...sharding.spec import ArraySpec
from ..native import has
from ..native.linear import LANES, Product
from ..native.pack import by_block, tile, tile_nibbles
from ..weight import Weight, check_subscripts
from . import four_bits
from .compressed import FormatError, Rounded, split

STEP = 64  # inputs that the kernels' rows are filled up to


@dataclass(frozen=True)
class Code:
    """What codes stand for."""

    bits: int
    numbers: np.ndarray  # float32 [2 ** bits]; what stands for none is 0
    kernel: str
    init: str  # of random codes

    @property
    def drawn(self) -> float:
        """The limit of uniform numbers that are as large as those of random codes."""
        return 1.07 if self.init == "float8" else float(np.sqrt(3 * np.square(self.numbers).mean()))


def floats(dtype: Any, bits: int) -> np.ndarray:
    """The numbers of all codes of a type of ml_dtypes."""
    return np.nan_to_num(np.arange(1 << bits, dtype=np.uint8).view(dtype).astype(np.float32))


NF4 = [  # quantiles of the normal distribution, as bitsandbytes has them
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]  # of bitsandbytes, in twelfths
IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]  # of GGUF's IQ4_NL and IQ4_XS
CODES = {
    "float8": Code(8, floats(ml_dtypes.float8_e4m3fn, 8), "fp8", "float8"),
    "float4": Code(4, floats(ml_dtypes.float4_e2m1fn, 4), "float4", "bytes"),
    "nf4": Code(4, np.array(NF4, np.float32), "nf4", "bytes"),
    "fp4": Code(4, np.array(FP4, np.float32), "fp4", "bytes"),
    "iq4": Code(4, np.array(IQ4, np.float32), "iq4", "bytes"),
    "uint4": Code(4, np.arange(16, dtype=np.float32), "uint4", "bytes"),
    "int8": Code(8, np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32), "int8_groups", "bytes"),
}


@struct.dataclass
class Grouped(Rounded):
    """weight = number(code) * scale - least."""

    codes: Any  # uint8 [*into, *out]; of four bits [count(K), O] as in `four_bits.py`
    scale: Any  # float32 [ceil(K / group), *out]
    least: Any  # the same, or None: 0
    code: str = struct.field(pytree_node=False)  # a name in CODES
    group: int = struct.field(pytree_node=False)

    @property
    def shared(self) -> int:
        return self.group

    @property
    def packed(self) -> bool:
        return CODES[self.code].bits == 4

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        axes = len(self.into)
        into = self.into if self.packed else self.codes.shape[:axes]  # of this device's part, where it is split
        out = self.scale.shape[1:]
        check_subscripts(subscripts, x, into, out, self.inputs)
        lead, K = x.shape[: x.ndim - axes], math.prod(into)
        x_RK, w_KO = x.reshape(-1, K).astype(jnp.bfloat16), self.dense(K).astype(jnp.bfloat16)
        y = jnp.dot(x_RK, w_KO, preferred_element_type=jnp.float32).reshape(*lead, *out)
        return (y if bias is None else y + bias).astype(dtype or x.dtype)

    def dense(self, K: int):
        """The weight as one float32 matrix [K, O]."""
        codes_KO = four_bits.split(self.codes, K) if self.packed else self.codes.reshape(K, -1)
        scale_GO, least_GO = (None if x is None else x.reshape(len(x), -1) for x in (self.scale, self.least))
        return numbers(self.code, self.group, codes_KO, scale_GO, least_GO)

    @property
    def rows(self) -> int:
        return self.scale.shape[1]

    def __getitem__(self, index):
        """Rows of an embedding, float32."""
        K = math.prod(self.into)
        codes_KR = four_bits.split(self.codes[:, index], K) if self.packed else self.codes[:, index]
        least_GR = None if self.least is None else self.least[:, index]
        return numbers(self.code, self.group, codes_KR, self.scale[:, index], least_GR).T

    def for_kernels(self, narrow: bool) -> Weight:
        if not has("pack", CODES[self.code].kernel):
            return self
        K, codes, whole = math.prod(self.into), np.asarray(self.codes), max(STEP, self.group)
        padded = -(-K // whole) * whole

        def blocks(values) -> np.ndarray:
            flat = np.asarray(values).reshape(len(values), -1)
            return by_block(np.pad(flat, ((0, padded // self.group - len(flat)), (0, 0))))

        if self.packed:
            tiles = tile_nibbles(codes, K, padded)
        else:
            tiles = tile(np.pad(codes.reshape(K, -1), ((0, padded - K), (0, 0))), 2)
        least = np.zeros(0, np.float32) if self.least is None else blocks(self.least)
        sizes = {"into": self.into, "out": self.out, "inputs": self.inputs}
        return TiledGroups(tiles, blocks(self.scale), least, code=self.code, **sizes)

    def quantize(self, weight: np.ndarray) -> "Grouped":
        """Round to nearest: the largest value of each group at the largest number, or both ends at both ends."""
        K, group, code = math.prod(self.into), self.group, CODES[self.code]
        wide_KO = weight.astype(np.float32).reshape(K, -1)
        grouped = np.pad(wide_KO, ((0, -K % group), (0, 0))).reshape(-1, group, wide_KO.shape[1])
        first, last, fields = code.numbers.min(), code.numbers.max(), {}
        if self.least is None:
            scale, least = np.abs(grouped).max(1) / last, np.zeros((1, 1), np.float32)
        else:
            low, high = np.minimum(grouped.min(1), 0), np.maximum(grouped.max(1), 0)
            scale = (high - low) / (last - first)
            least = fields["least"] = first * scale - low
        above = grouped + least[:, None]
        exact = np.divide(above, scale[:, None], out=np.zeros_like(grouped), where=scale[:, None] > 0)
        codes = nearest(code.numbers, exact).reshape(-1, wide_KO.shape[1])[:K]
        return self.join(fields | {"codes": codes, "scale": scale})

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        found = CODES[self.code].numbers[fields["codes"]] * fields["scale"]
        return found if self.least is None else found - fields["least"]

    def join(self, fields: dict[str, np.ndarray]) -> "Grouped":
        codes = fields["codes"].reshape(len(fields["codes"]), -1)
        codes = four_bits.join(codes) if self.packed else codes.reshape(self.into + self.out)
        shared = {name: fields[name].reshape(-1, *self.out) for name in ("scale", "least") if name in fields}
        return self.replace(codes=codes, **shared)


@struct.dataclass
class TiledGroups(Product):
    """For the kernels; see formats.h."""

    tiles: Any  # uint8 [O / 16, K / 2, 16, 2], or uint32 [O / 16, K / 8, 16] of four bits
    scale: Any  # float32 [O / 16, K / group, 16]
    least: Any  # the same, or empty
    code: str = struct.field(pytree_node=False)

    @property
    def kernel(self) -> str:
        return CODES[self.code].kernel

    def __getitem__(self, index):
        """Rows of an embedding, float32."""
        K, (block, lane) = math.prod(self.into), (index // LANES, index % LANES)
        tiles = self.tiles[block, :, lane]
        if CODES[self.code].bits == 4:  # k0 k2 k4 k6 in the low half of a word, and k1 k3 k5 k7 in its high half
            shifts = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)
            tiles = tiles[..., None] >> shifts & np.uint32(15)
        codes_KR = tiles.reshape(index.shape[0], -1).T
        least_GR = self.least[block, :, lane].T if self.least.size else None
        group = len(codes_KR) // self.scale.shape[1]
        return numbers(self.code, group, codes_KR, self.scale[block, :, lane].T, least_GR)[:K].T


def numbers(code: str, group: int, codes_KO, scale_GO, least_GO):
    """What codes mean, in float32."""

    def spread(values_GO):
        return jnp.repeat(values_GO, group, axis=0)[: len(codes_KO)]

    found = jnp.take(jnp.asarray(CODES[code].numbers), codes_KO.astype(jnp.int32), axis=0) * spread(scale_GO)
    return found if least_GO is None else found - spread(least_GO)


def nearest(numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The code of the number nearest to each value; of two as near, the even code."""
    ordered, order = np.unique(numbers, return_index=True)  # of codes for the same number the first: all mean one
    above = np.clip(np.searchsorted(ordered, values), 1, len(ordered) - 1)
    low, high = ordered[above - 1], ordered[above]
    down, up = order[above - 1], order[above]
    middle = (low + high) / 2
    take_low = (values < middle) | ((values == middle) & (down % 2 == 0))
    return np.where(take_low, down, up).astype(np.uint8)


def spec(dense: ArraySpec, code: str, group: int, kind: type[Grouped] = Grouped, least: bool = False) -> Grouped:
    """The specs of an array kept so. One that is split by its inputs has whole groups in each part, or is refused."""
    into, out, axes = split(dense)
    K, O = math.prod(into), math.prod(out)
    shape = into + out
    by_input, by_output = axes[: len(into)], axes[len(into) :]
    if CODES[code].bits == 4:
        if K % 2:
            raise FormatError(f"{K} inputs cannot be kept two a byte")
        shape, axes = (four_bits.count(K), O), (by_input[0], by_output[0])
    shared = (-(-K // group), *out)
    scale = ArraySpec(shared, jnp.float32, (by_input[0], *by_output), f"scale/{CODES[code].drawn:g}", dense.fan_in)
    return kind(
        codes=replace(dense, shape=shape, axes=axes, dtype=jnp.uint8, init=CODES[code].init, inputs=()),
        scale=scale,
        least=scale if least else None,
        code=code,
        group=group,
        into=into,
        out=out,
        inputs=dense.inputs,
    )


def by_table(name: str, code: str, group: int) -> tuple[Callable[..., tuple[str, ...]], Callable[..., Grouped]]:
    """`kernels` and `spec` of a format that is codes of a table in groups of one size, and has no options."""

    def kernels(*options: str) -> tuple[str, ...]:
        return (CODES[code].kernel,)

    def specs(dense: ArraySpec, *options: str) -> Grouped:
        if options:
            raise FormatError(f"{name} has no option {'-'.join(options)!r}")
        return spec(dense, code, group)

    return kernels, specs
