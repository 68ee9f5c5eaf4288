"""Formats that weights are rounded to, and how a checkpoint of the compressed-tensors form
holds them.
"""

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
    """A shape, an option or a stored value that a format cannot have."""


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors' quantization_config describes a format."""

    weights: dict[str, Any]
    activations: dict[str, Any] | None  # None: rows stay as they are
    forms: tuple[str, ...]  # values of `format`; the first is the one that Quire writes
    # quant_method; "quire": said in the same words, of a format it does not have
    method: str = "compressed-tensors"


# Tensors of one matrix by what their names end in: the dtypes and shapes that they may have, the
# written one first.
Layout = dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]


@struct.dataclass(kw_only=True)
class Rounded(Weight):
    """A weight in a format that Quire rounds to. A node of `ArraySpec`s says how, one of arrays is
    such a weight.

    A checkpoint keeps matrices [out, in]. What was stored of one is known as its *fields*, by the
    names of the node's arrays: each [out, in], or narrower where neighbouring inputs share a value.
    """

    # sizes of the axes that products sum over
    into: tuple[int, ...] = struct.field(pytree_node=False)
    out: tuple[int, ...] = struct.field(pytree_node=False)  # and of the others
    # where the former stand in the dense weight
    inputs: tuple[int, ...] = struct.field(pytree_node=False)
    lists = ()  # fields whose numbers belong to an output, and not to neighbouring inputs
    # whether codes are whole numbers that `whole_codes` gives, times a scale, less perhaps a
    # minimum
    is_whole = False
    has_minimum = False  # whether a minimum is subtracted
    levels = False  # whether scales have two levels
    bits = 8  # of a code

    @property
    def kind(self) -> Any:
        """The format with its options, without its sizes."""
        return jax.tree.structure(self.replace(into=(), out=(), inputs=()))

    def shared(self, field: str = "scale") -> int:
        """How many neighbouring inputs share a value of a field that is narrower than the codes."""
        return math.prod(self.into)

    def can_hold(self, other: "Rounded") -> bool:
        """Whether such a node holds the codes of another exactly."""
        return self.kind == other.kind

    def whole_codes(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        """The whole numbers [out, in], of eight bits, that a matrix's fields hold."""
        raise NotImplementedError

    def whole_inputs(self) -> int:
        """How many neighbouring inputs must lie on one device, where the inputs are split by
        groups; else 1.
        """
        return 1

    def quantize(self, weight: np.ndarray) -> Any:
        """A weight [*into, *out] rounded to the format of these specs."""
        raise NotImplementedError

    def coded(self, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Any:
        """A node of these specs from codes [K, O], the least of them 0, and what groups share
        [groups, O].

        For formats of whole numbers: a weight is (code - zero) * scale.
        """
        raise NotImplementedError

    def layout(self, rows: int, columns: int, form: str) -> Layout:
        """The tensors of a matrix [rows, columns] in a checkpoint; FormatError where it can
        have none.
        """
        raise NotImplementedError

    def fields(
        self, parts: dict[str, np.ndarray], columns: int, form: str
    ) -> dict[str, np.ndarray]:
        """The fields of a matrix from its tensors."""
        raise NotImplementedError

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        """The matrix in float32 from its fields, each spread to [out, in]: what the format
        means.
        """
        raise NotImplementedError

    def join(self, fields: dict[str, np.ndarray]) -> Any:
        """A node of these specs, from fields turned to [inputs that share a value, *out]."""
        raise NotImplementedError

    def parts(self, form: str) -> dict[str, np.ndarray]:
        """The tensors that a rounded matrix, whose node has one axis in and one out, is stored
        as.
        """
        raise NotImplementedError


def decoded_product(node: Rounded, w_KO, subscripts: str, x, bias, dtype):
    """The product of rows with a node's decoded matrix."""
    check_subscripts(subscripts, x, node.into, node.out, node.inputs)
    lead = x.shape[: x.ndim - len(node.into)]
    y = multiply(x.reshape(-1, math.prod(node.into)), w_KO).reshape(*lead, *node.out)
    return (y if bias is None else y + bias).astype(dtype or x.dtype)


def multiply(x_RK, w_KO):
    """The product in float32 of rows and a matrix: both in bfloat16, or with all bits where rows
    are float32.
    """
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
    """A tensor of a stack: what its name ends in, its shape in the file, and how it becomes an
    array of the node.
    """

    ending: str
    shape: tuple[int, ...]
    turn: Any


def split(dense: ArraySpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]:
    """The sizes of the axes that are summed over, those of the others, and the logical axes of both
    in this order.
    """
    others = [axis for axis in range(len(dense.shape)) if axis not in dense.inputs]
    axes = tuple(dense.axes[axis] for axis in (*dense.inputs, *others))
    return (
        tuple(dense.shape[axis] for axis in dense.inputs),
        tuple(dense.shape[axis] for axis in others),
        axes,
    )


def split_words(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes in int32 words, the first in the lowest bits, a byte each; no code is cut by a
    word's end.
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
    """Rows of codes, a byte each, as int32 words."""
    each = 32 // bits
    grouped = (
        np.pad(codes, ((0, 0), (0, -codes.shape[1] % each)))
        .reshape(len(codes), -1, each)
        .astype(np.uint32)
    )
    shifts = np.arange(0, each * bits, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(grouped << shifts, axis=2).astype("<u4").view("<i4")


def join_words(data: np.ndarray) -> np.ndarray:
    """Rows of bytes as int32 words; a row's last word is filled with zeros."""
    return np.ascontiguousarray(np.pad(data, ((0, 0), (0, -data.shape[1] % 4)))).view("<i4")


def words(rows: int, columns: int, bits: int) -> Layout:
    """The tensors of codes that share words."""
    return {
        ".weight_packed": (("int32",), ((rows, -(-columns // (32 // bits))),)),
        ".weight_shape": (("int64", "int32"), ((2,),)),
    }
