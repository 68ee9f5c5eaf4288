"""Quantised matrices of a checkpoint, and weight nodes made from their codes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....ops import quant
from ....ops.quant import FormatError, Rounded
from ....ops.quant.stack import Stack
from ....sharding.spec import ArraySpec, empty
from ...config import ModelError
from ...stored_format import StoredGroup
from ..safetensors import Tensor, fill

MatrixTensors = dict[str, np.ndarray]  # the tensors of a matrix, by name ending
LargestValue = Callable[[], float]  # the maximum of all matrices of a fused weight


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix of a checkpoint. `read` dequantises it, as if it were a dense tensor."""

    name: str
    shape: tuple[int, int]
    group: StoredGroup
    tensors: Mapping[str, Tensor]  # by name ending

    @property
    def format(self) -> Rounded | None:
        """The format that holds its codes; None if it can only be dequantised."""
        return None if self.group.quant is None else quant.example(self.group.quant)

    def read(self) -> np.ndarray:
        """The matrix in float32."""
        node = self.format
        assert node is not None, "a matrix without a format must override `read`"
        return node.decode(
            {name: self.spread(name, value, node) for name, value in self.fields_for(node).items()}
        )

    def holds(self, node: Rounded) -> bool:
        """Whether a node can hold its codes exactly, in the same or a wider format."""
        stored_format = self.format
        return stored_format is not None and node.can_hold(stored_format)

    def fields_for(self, node: Rounded) -> dict[str, np.ndarray]:
        """The node's fields, such as codes: [out, in], or fewer columns if inputs share values."""
        try:
            fields = self.fields({ending: tensor.read() for ending, tensor in self.tensors.items()})
        except FormatError as error:
            raise ModelError(f"tensor {self.name!r} {error}") from None
        for name in fields.keys() & {"scale", *node.lists}:
            self.finite(fields[name])
        return self.widened(fields, node)

    def widened(self, fields: dict[str, np.ndarray], node: Rounded) -> dict[str, np.ndarray]:
        """Convert fields of its own format to those of a wider node."""
        stored_format = self.format
        assert stored_format is not None
        if stored_format.kind == node.kind:
            return fields
        repeats = stored_format.inputs_per_value() // node.inputs_per_value()
        scale = fields["scale"].astype(np.float32).repeat(repeats, 1)
        least = fields["least"].repeat(repeats, 1) if "least" in fields else np.zeros_like(scale)
        exact_fields = {"codes": stored_format.integer_codes(fields).view(np.uint8), "scale": scale}
        return exact_fields | ({"least": least} if node.has_minimum else {})

    def finite(self, scales: np.ndarray) -> np.ndarray:
        """Return the scales after checking that they are finite."""
        if not np.isfinite(scales.astype(np.float32)).all():
            raise ModelError(f"tensor {self.scales!r} holds a scale that is not finite")
        return scales

    def fields(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The fields of its own format, from the tensors."""
        raise NotImplementedError

    @property
    def scales(self) -> str:
        """The name of the tensor with the scales, for error messages."""
        names = {ending: tensor.name for ending, tensor in self.tensors.items()}
        return next((name for ending, name in names.items() if "scale" in ending), self.name)

    def spread(self, field: str, values: np.ndarray, node: Rounded) -> np.ndarray:
        """Broadcast a field to [out, in]; lists are padded with zeros."""
        if field in node.lists:
            return np.pad(values, ((0, 0), (0, self.shape[1] - values.shape[1])))
        if values.shape[1] == 1:
            return np.broadcast_to(values, self.shape)
        if values.shape[1] == self.shape[1]:
            return values
        return values.repeat(node.inputs_per_value(field), axis=1)[:, : self.shape[1]]


def node_specs(group: StoredGroup, rows: int, columns: int) -> Rounded:
    """The specs of a matrix [rows, columns] in a group's format."""
    return quant.packed(
        group.quant, ArraySpec((columns, rows), np.float32, (None, None), inputs=(0,))
    )


def quantize_dense(value: np.ndarray, group: StoredGroup) -> Rounded:
    """Quantise a dense matrix [out, in]; outputs are independent, so that matrices can be fused."""
    return node_specs(group, *value.shape).quantize(value.T)


def check(tensor: Tensor, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Reject a tensor of another dtype or shape."""
    if tensor.shape not in shapes or tensor.dtype.name not in dtypes:
        raise ModelError(
            f"tensor {tensor.name!r} is {list(tensor.shape)} of {tensor.dtype.name}; it must be "
            f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(shapes))} of "
            f"{' or '.join(dtypes)}"
        )


def pop_tensors(
    tensors: dict[str, Any], stem: str, ending: str, endings: tuple[str, ...]
) -> dict[str, Tensor]:
    """Pop the tensors of one matrix; `ending` is the one that it was found by."""
    for required in endings:
        if stem + required not in tensors:
            raise ModelError(
                f"the checkpoint lacks the tensor {stem + required!r}, which {stem + ending!r} "
                "needs"
            )
    return {required: tensors.pop(stem + required) for required in endings}


def can_hold_codes(node: Any, tensors: list[Any]) -> bool:
    """Whether a node can hold the stored codes of all these tensors."""
    element = node.each if isinstance(node, Stack) else node
    return all(isinstance(tensor, Matrix) and tensor.holds(element) for tensor in tensors)


def read_node(node: Rounded, sources, tensors: dict[str, Any]) -> Any:
    """Build a node from stored codes without requantising.

    Every field is broadcast to the matrix's shape and then treated like a dense weight: each
    source's `transform` is applied, and the result goes to its index `at`. One row of each group is
    kept of a broadcast field; turns do not permute inputs.
    """
    axes = len(node.into)
    columns = math.prod(node.into)
    fields: dict[str, np.ndarray] = {}
    for source in sources:
        matrix = tensors[source.name]
        at = source.at if isinstance(source.at, tuple) else (source.at,)
        assert all(index == slice(None) for index in at[:axes]), source.name
        for name, value in matrix.fields_for(node).items():
            if name not in fields:
                fields[name] = empty((value.shape[1], *node.out), getattr(node, name).dtype)
            out = fields[name]
            step = {columns: 1, 1: columns}.get(value.shape[1], node.inputs_per_value(name))
            values = np.moveaxis(
                source.transform(matrix.spread(name, value, node)), node.inputs, range(axes)
            )
            values = values.reshape(columns, *values.shape[axes:])
            values = values[: value.shape[1]] if name in node.lists else values[::step]
            fill(out[(slice(None), *at[axes:])], cast_field(values, out.dtype, matrix.scales))
    return node.join(fields)


def cast_field(values: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """Cast a field to a node's dtype.

    float16 holds every bfloat16 from 6e-5 to 65504 exactly. Below, its steps are 6e-8: a weight, at
    most 15 scales, changes by less than 5e-7, which is negligible. A float32 scale keeps eleven
    bits, more than in the bfloat16 products of other engines.
    """
    with np.errstate(over="ignore"):
        cast = values.astype(dtype, copy=False)
    if cast is not values and not np.isfinite(cast).all():
        largest = np.abs(values).max()
        limit = np.finfo(cast.dtype).max
        raise ModelError(
            f"tensor {name!r} holds a scale of {largest:.6g}; it can be at most {limit:.6g}"
        )
    return cast
