"""The interface of formats that weights are quantised to, and of their compressed-tensors form."""

import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..linear.weight import Weight, check_subscripts
from ..precision import precision


class FormatError(ValueError):
    """A shape, an option or a stored value is invalid for a format."""


@dataclass(frozen=True)
class Scheme:
    """The description of a format in the quantization_config of compressed-tensors."""

    weights: dict[str, Any]
    activations: dict[str, Any] | None  # None: activations are not quantised
    forms: tuple[str, ...]  # values of `format`; Quire writes the first
    # quant_method; "quire" for formats that compressed-tensors does not have
    method: str = "compressed-tensors"


# The tensors of a matrix by the end of their names: possible dtypes and shapes. Quire writes the
# first.
Layout = dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]


class Rounded(Weight, kw_only=True):
    """A weight in a format that Quire can quantise to. A node of `ArraySpec`s describes the format,
    a node of arrays holds a weight.

    Checkpoints store matrices as [out, in]. The *fields* of a stored matrix have the names of the
    node's arrays and the shape [out, in], or fewer columns if neighbouring inputs share a value.
    """

    # sizes of the axes that products sum over, and of the other axes
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)
    inputs: tuple[int, ...] = struct.field(pytree_node=False)  # axes of `into` in the dense weight
    lists = ()  # fields whose values belong to an output, and not to neighbouring inputs
    # whether the quantised values are the integers of `integer_codes`
    is_integer = False
    has_minimum = False  # whether a minimum is subtracted after scaling
    levels = False  # whether scales have two levels
    bits = 8  # of a quantised value

    @property
    def kind(self) -> Any:
        """The format with its options, but without the sizes."""
        return jax.tree.structure(self.replace(into=(), out=(), inputs=()))

    def inputs_per_value(self, field: str = "scale") -> int:
        """The number of neighbouring inputs that share a value of a field."""
        return math.prod(self.into)

    def can_hold(self, source: "Rounded") -> bool:
        """Whether a node of this format can hold the quantised values of `source` exactly."""
        return self.kind == source.kind

    def integer_codes(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        """The quantised values [out, in] of a matrix's fields as 8-bit integers."""
        raise NotImplementedError

    def inputs_per_shard(self) -> int:
        """The number of neighbouring inputs that must be on the same device; 1 unless the inputs
        are split and have groups.
        """
        return 1

    def quantize(self, weight: np.ndarray) -> Any:
        """Quantise a weight [*into, *out] to the format of these specs."""
        raise NotImplementedError

    def from_codes(self, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Any:
        """A node of these specs from unsigned quantised values [K, O] and group parameters
        [groups, O], for integer formats.

        A weight is (code - zero) * scale.
        """
        raise NotImplementedError

    def layout(self, rows: int, columns: int, form: str) -> Layout:
        """The tensors of a matrix [rows, columns] in a checkpoint; FormatError if the format does
        not support these sizes.
        """
        raise NotImplementedError

    def fields(
        self, tensors: dict[str, np.ndarray], columns: int, form: str
    ) -> dict[str, np.ndarray]:
        """The fields of a matrix from its stored tensors."""
        raise NotImplementedError

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        """Dequantise a matrix from its fields, each expanded to [out, in], to float32."""
        raise NotImplementedError

    def join(self, fields: dict[str, np.ndarray]) -> Any:
        """A node of these specs from transposed fields: [groups of inputs, *out]."""
        raise NotImplementedError

    def parts(self, form: str) -> dict[str, np.ndarray]:
        """The tensors to store a matrix as; its node must have one input and one output axis."""
        raise NotImplementedError


def decoded_product(node: Rounded, w_KO, subscripts: str, x, bias, dtype):
    """The product of x with a node's dequantised matrix."""
    check_subscripts(subscripts, x, node.into, node.out, node.inputs)
    lead = x.shape[: x.ndim - len(node.into)]
    y = multiply(x.reshape(-1, math.prod(node.into)), w_KO).reshape(*lead, *node.out)
    return (y if bias is None else y + bias).astype(dtype or x.dtype)


def multiply(x_RK, w_KO):
    """The float32 product of activations and a matrix, in bfloat16 unless x is float32."""
    if x_RK.dtype == jnp.float32:
        w_KO = w_KO.astype(jnp.float32)
        return jnp.dot(x_RK, w_KO, precision=precision(x_RK), preferred_element_type=jnp.float32)
    return jnp.dot(
        x_RK.astype(jnp.bfloat16), w_KO.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    )


@cache
def log_widened(name: str, dtype: str) -> None:
    logging.getLogger("quire").info(
        "weights in %s are widened to %s: no kernel here takes their codes", name, dtype
    )


class StoredTensor(NamedTuple):
    """A stored tensor of a stack: the end of its name, its shape in the file, and a function that
    converts it to an array of the node.
    """

    ending: str
    shape: tuple[int, ...]
    turn: Any


def split(dense: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """(sizes of the axes that products sum over, sizes of the other axes, logical axes of both)."""
    out_axes = [axis for axis in range(len(dense.shape)) if axis not in dense.inputs]
    axes = tuple(dense.axes[axis] for axis in (*dense.inputs, *out_axes))
    return (
        tuple(dense.shape[axis] for axis in dense.inputs),
        tuple(dense.shape[axis] for axis in out_axes),
        axes,
    )


def split_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack values from int32 words to one byte each. The first value is in the lowest bits, and
    no value crosses a word boundary.
    """
    data = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return data
    if bits == 4:
        return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)
    shifts = np.arange(0, 33 - bits, bits, dtype=np.uint32)
    codes = data.view("<u4")[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(data), -1)


def join_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack rows of values, one byte each, into int32 words."""
    codes_per_word = 32 // bits
    grouped = (
        np.pad(codes, ((0, 0), (0, -codes.shape[1] % codes_per_word)))
        .reshape(len(codes), -1, codes_per_word)
        .astype(np.uint32)
    )
    shifts = np.arange(0, codes_per_word * bits, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(grouped << shifts, axis=2).astype("<u4").view("<i4")


def join_words(data: np.ndarray) -> np.ndarray:
    """View rows of bytes as int32 words; a row's last word is padded with zeros."""
    return np.ascontiguousarray(np.pad(data, ((0, 0), (0, -data.shape[1] % 4)))).view("<i4")


def words(rows: int, columns: int, bits: int) -> Layout:
    """The layout of values that are packed into int32 words."""
    return {
        ".weight_packed": (("int32",), ((rows, -(-columns // (32 // bits))),)),
        ".weight_shape": (("int64", "int32"), ((2,),)),
    }
