"""INT4: 4-bit integers, two per byte, with a scale and optionally a zero point per group of inputs.

Checkpoints and `Int4` store unsigned values: the integer plus 8. In a checkpoint eight neighbouring
inputs share a word, the first in the lowest bits. Integers of three and two bits (`int3.py`,
`int2.py`) are stored plus 4 and 2, ten and sixteen per word, and in four bits in memory.

    weight_packed      int32 [out, in / 8]
    weight_shape       out, in
    weight_zero_point  int32 [out / 8, groups]   packed down the outputs
    weight_scale       [out, groups]
"""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..linear.cpu import LANES, PackedWeight, has_product, row_options
from ..linear.cpu_layout import by_block, tile_nibbles
from ..linear.weight import GpuMatrix, Weight
from . import four_bits
from .compressed import (
    FormatError,
    Layout,
    Rounded,
    Scheme,
    decoded_product,
    join_codes,
    split,
    split_words,
    words,
)
from .grouped import kernel, tile_codes
from .grouped import spec as grouped

GROUPS = ("32", "64", "128")
MIDDLE = 8  # the zero point of groups without one

CHOICES = "int4 with a group of 32, 64 or 128 and perhaps zero points, such as int4-128-zero"
HEAD = "int8-weights"  # four bits are too few for a vocabulary
SPLITS = False  # groups lie along the axis that would be split
METHOD = None
MULTIPLE = 1
WHOLE = {"type": "int", "symmetric": True, "dynamic": False, "num_bits": 4, "strategy": "group"}


def schemes(bits: int) -> dict[str, Scheme]:
    """The compressed-tensors description of all formats with this number of bits, by name."""
    return {
        f"int{bits}-{group}{'' if symmetric else '-zero'}": Scheme(
            WHOLE | {"num_bits": bits, "symmetric": symmetric, "group_size": int(group)},
            None,
            ("pack-quantized",),
        )
        for group in GROUPS
        for symmetric in (True, False)
    }


STORED = schemes(4)


class Int4(Rounded):
    """weight = (code - zero) * scale; the codes are packed as in `four_bits.py`."""

    nibbles: Any  # uint8 [four_bits.count(K), O]
    scale: Any  # float16 [K / group, O]
    zero: Any  # uint8 [K / group, O]; None: MIDDLE
    group: int = struct.field(pytree_node=False)
    bits: int = struct.field(pytree_node=False, default=4)  # of a code in checkpoints
    has_gpu_kernel = True

    @property
    def offset(self) -> int:
        """The difference of a code here and in checkpoints."""
        return MIDDLE - (1 << (self.bits - 1)) if self.zero is None else 0

    @property
    def is_integer(self) -> bool:
        return self.zero is None

    def integer_codes(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        return fields["nibbles"].astype(np.int8) - np.int8(MIDDLE)

    def inputs_per_value(self, field: str = "scale") -> int:
        return self.group

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        return decoded_product(self, self.dense(), subscripts, x, bias, dtype)

    def dense(self):
        """The weight as one float32 matrix [K, O]."""
        code_KO = four_bits.split(self.nibbles, math.prod(self.into)).astype(jnp.float32)
        zero = MIDDLE if self.zero is None else self.spread(self.zero)
        return (code_KO - zero) * self.spread(self.scale)

    @property
    def rows(self) -> int:
        return self.scale.shape[1]

    def __getitem__(self, index):
        """Rows of an embedding, in float32."""
        chosen = None if self.zero is None else self.zero[:, index]
        return (
            self.replace(nibbles=self.nibbles[:, index], scale=self.scale[:, index], zero=chosen)
            .dense()
            .T
        )

    def spread(self, values_GO):
        """Expand group parameters to all inputs."""
        return jnp.repeat(values_GO.astype(jnp.float32), self.group, axis=0)[: math.prod(self.into)]

    def for_kernels(self, rows: str) -> Weight:
        if not has_product("int4", rows):
            return self
        K = math.prod(self.into)
        O = math.prod(self.out)
        padded = np.asarray(self.scale).reshape(-1, O).shape[0] * self.group
        tiles = tile_nibbles(np.asarray(self.nibbles).reshape(-1, O), K, padded)
        scale = by_block(np.asarray(self.scale).reshape(-1, O))
        zero = (
            np.zeros(0, np.uint8)
            if self.zero is None
            else by_block(np.asarray(self.zero).reshape(-1, O))
        )
        sizes: dict[str, Any] = {"into": self.into, "out": self.out, "inputs": self.inputs}
        return TiledInt4(tiles, scale, zero, **sizes, **row_options("int4", rows))

    def gpu_matrix(self) -> GpuMatrix:
        """See `Weight.gpu_matrix`; the arrays have all axes of the outputs."""
        arrays = self.nibbles, self.scale, self.zero
        codes, scale, zero = (
            None if array is None else array.reshape(*array.shape[:-1], *self.out)
            for array in arrays
        )
        return GpuMatrix(codes, "int4", scale, self.group, zero=zero)

    def quantize(self, weight: np.ndarray) -> "Int4":
        """Round to nearest. The range of a group becomes 0 to 15, or without zero points the
        largest magnitude becomes -8.
        """
        K = math.prod(self.into)
        group = self.group
        last = (1 << self.bits) - 1
        middle = (last + 1) // 2
        weight_KO = weight.astype(np.float32).reshape(K, -1)
        O = weight_KO.shape[1]
        grouped = np.pad(weight_KO, ((0, -K % group), (0, 0))).reshape(-1, group, O)
        if self.zero is None:
            # Signed scales: the value of the largest magnitude becomes -8, so that all 16 codes are
            # used.
            top = np.take_along_axis(grouped, np.abs(grouped).argmax(1)[:, None], 1)[:, 0]
            scale = (top / -middle).astype(np.float16)
            zero = np.full_like(grouped[:, :1], middle)
        else:
            low = np.minimum(grouped.min(1), 0)
            high = np.maximum(grouped.max(1), 0)
            scale = ((high - low) / last).astype(np.float16)
            inverse = safe_inverse(scale.astype(np.float32))
            zero = np.clip(np.rint(-low * inverse), 0, last)[:, None]
        codes = np.rint(grouped * safe_inverse(scale.astype(np.float32))[:, None]) + zero
        codes = np.clip(codes, 0, last).astype(np.uint8).reshape(-1, O)[:K] + np.uint8(self.offset)
        zeros = None if self.zero is None else zero[:, 0].astype(np.uint8)
        return self.replace(nibbles=four_bits.join(codes), scale=scale, zero=zeros)

    def from_codes(self, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> "Int4":
        zeros = None if self.zero is None else zero.astype(np.uint8)
        nibbles = four_bits.join(codes.astype(np.uint8) + np.uint8(self.offset))
        return self.replace(nibbles=nibbles, scale=scale.astype(np.float16), zero=zeros)

    def layout(self, rows: int, columns: int, form: str) -> Layout:
        if columns % self.group:  # other readers interpret partial groups differently
            fitting = " or ".join(group for group in GROUPS if columns % int(group) == 0)
            remedy = f"it could be {fitting}" if fitting else "int8 has none"
            raise FormatError(
                f"has {columns} inputs, which do not divide by the group of {self.group}; {remedy}"
            )
        groups = columns // self.group
        scales = ((rows, groups), (rows,)) if groups == 1 else ((rows, groups),)
        packed_shape = -(-rows // (32 // self.bits)), groups
        zero = {} if self.zero is None else {".weight_zero_point": (("int32",), (packed_shape,))}
        return (
            words(rows, columns, self.bits)
            | zero
            | {".weight_scale": (("float16", "float32", "bfloat16"), scales)}
        )

    def fields(
        self, tensors: dict[str, np.ndarray], columns: int, form: str
    ) -> dict[str, np.ndarray]:
        codes = split_words(tensors[".weight_packed"], self.bits)[:, :columns] + np.uint8(
            self.offset
        )
        fields = {
            "nibbles": codes,
            "scale": tensors[".weight_scale"].astype(np.float32).reshape(len(codes), -1),
        }
        if self.zero is not None:
            fields["zero"] = split_words(tensors[".weight_zero_point"].T, self.bits)[
                :, : len(codes)
            ].T
        return fields

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        middle = MIDDLE if self.zero is None else fields["zero"].astype(np.float32)
        return (fields["nibbles"].astype(np.float32) - middle) * fields["scale"]

    def join(self, fields: dict[str, np.ndarray]) -> "Int4":
        flat = {name: value.reshape(len(value), -1) for name, value in fields.items()}
        return self.replace(**flat | {"nibbles": four_bits.join(flat["nibbles"])})

    def parts(self, form: str) -> dict[str, np.ndarray]:
        (columns,) = self.into
        (rows,) = self.out
        codes = four_bits.split(self.nibbles, columns).T - np.uint8(self.offset)
        tensors = {
            ".weight_packed": join_codes(codes, self.bits),
            ".weight_shape": np.array([rows, columns]),
            ".weight_scale": self.scale.T,
        }
        if self.zero is not None:
            tensors[".weight_zero_point"] = join_codes(self.zero, self.bits).T
        return tensors


class TiledInt4(PackedWeight):
    """Tiles for the native kernels, see formats.h in `ops/native`."""

    tiles: Any  # uint32 [O / 16, K / 8, 16]
    scale: Any  # float16 [O / 16, K / group, 16]
    zero: Any  # uint8, the same shape or empty
    kernel = "int4"

    def __getitem__(self, index):
        """Rows of an embedding, in float32."""
        block = index // LANES
        lane = index % LANES
        codes_RK = tile_codes(self.tiles, 4, block, lane).reshape(index.shape[0], -1)
        group = codes_RK.shape[1] // self.scale.shape[1]
        zero_RG = self.zero[block, :, lane] if self.zero.size else jnp.full((1, 1), MIDDLE)
        values_RGI = codes_RK.reshape(index.shape[0], -1, group).astype(jnp.float32)
        values_RGI -= zero_RG.astype(jnp.float32)[..., None]
        values_RGI *= self.scale[block, :, lane].astype(jnp.float32)[..., None]
        return values_RGI.reshape(index.shape[0], -1)[:, : math.prod(self.into)]


def kernels(*options: str) -> tuple[str, ...]:
    scale_dtype = jnp.float16 if "half" in options else jnp.float32
    return (kernel("uint4", scale_dtype) if "least" in options else "int4",)


def spec(dense: ArraySpec, *options: str) -> Any:
    """See `Format.spec`. Options: a group size, and `zero` (zero points) or `least` (a minimum is
    subtracted), and after it perhaps `half` (scales and minima are float16).
    """
    if options[1:] in {("least",), ("least", "half")} and options[0] in GROUPS:
        scale_dtype = jnp.float16 if "half" in options else jnp.float32
        return grouped(dense, "uint4", int(options[0]), least=True, scale_dtype=scale_dtype)
    return spec_with_bits(4, dense, *options)


def spec_with_bits(bits: int, dense: ArraySpec, *options: str) -> Int4:
    """The specs of a weight in integers with this number of bits."""
    sizes = [option for option in options if option in GROUPS]
    if len(sizes) > 1 or set(options) - {"zero", *GROUPS}:
        raise FormatError(
            f"int{bits} has no options {'-'.join(options)!r}; they can be {', '.join(GROUPS)} "
            "and zero"
        )
    group = int(sizes[0]) if sizes else 32
    into, out, ordered = split(dense)
    K = math.prod(into)
    O = math.prod(out)
    if K % 2:
        raise FormatError(f"{K} inputs cannot be kept two a byte")
    # The node has one input and one output axis; their sharding is that of the first dense axes.
    axes = (ordered[0], ordered[len(into)])
    shared = (-(-K // group), O)
    return Int4(
        nibbles=replace(
            dense,
            shape=(four_bits.count(K), O),
            axes=axes,
            dtype=jnp.uint8,
            init="bytes",
            inputs=(),
        ),
        scale=ArraySpec(shared, jnp.float16, (None, axes[1]), f"scale/{MIDDLE}", dense.fan_in),
        zero=ArraySpec(shared, jnp.uint8, (None, axes[1]), "zeros") if "zero" in options else None,
        into=into,
        out=out,
        inputs=dense.inputs,
        group=group,
        bits=bits,
    )


def safe_inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
