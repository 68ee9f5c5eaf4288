"""A quantised matrix of a checkpoint, whatever the tensors are that it lies in, and weights made of its codes."""

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

Parts = dict[str, np.ndarray]  # the tensors of a matrix, by the endings of their names
Largest = Callable[[], float]  # reads the largest value of all matrices that make one weight with another


@dataclass(frozen=True)
class Matrix:
    """A matrix of a checkpoint in its tensors; to a reader that wants it dense it is like any other tensor."""

    name: str
    shape: tuple[int, int]
    group: StoredGroup
    tensors: Mapping[str, Tensor]  # by the endings of their names

    @property
    def format(self) -> Rounded | None:
        """The format that has its codes; None where it can only be widened."""
        return None if self.group.quant is None else quant.example(self.group.quant)

    def read(self) -> np.ndarray:
        """The matrix in float32."""
        node = self.format
        assert node is not None, "a matrix that no format has says itself what it means"
        return node.decode({name: self.spread(name, value, node) for name, value in self.fields_for(node).items()})

    def holds(self, node: Rounded) -> bool:
        """Whether a node can have its codes: of its own format, or of a wider one."""
        own = self.format
        return own is not None and node.can_hold(own)

    def fields_for(self, node: Rounded) -> dict[str, np.ndarray]:
        """Codes, scales and so on, as such a node has them: [out, in], or narrower where inputs share a value."""
        try:
            found = self.fields({ending: tensor.read() for ending, tensor in self.tensors.items()})
        except FormatError as error:
            raise ModelError(f"tensor {self.name!r} {error}") from None
        for name in found.keys() & {"scale", *node.lists}:
            self.finite(found[name])
        return self.widened(found, node)

    def widened(self, fields: dict[str, np.ndarray], node: Rounded) -> dict[str, np.ndarray]:
        """The fields of its own format as those of a node that holds them."""
        own = self.format
        assert own is not None
        if own.kind == node.kind:
            return fields
        again = own.shared() // node.shared()
        scale = fields["scale"].astype(np.float32).repeat(again, 1)
        least = fields["least"].repeat(again, 1) if "least" in fields else np.zeros_like(scale)
        found = {"codes": own.whole_codes(fields).view(np.uint8), "scale": scale}
        return found | ({"least": least} if node.has_minimum else {})

    def finite(self, scales: np.ndarray) -> np.ndarray:
        """The scales, if they are numbers."""
        if not np.isfinite(scales.astype(np.float32)).all():
            raise ModelError(f"tensor {self.scales!r} holds a scale that is no finite number")
        return scales

    def fields(self, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The fields from the tensors."""
        raise NotImplementedError

    @property
    def scales(self) -> str:
        """The name of the tensor that the scales come from."""
        each = {ending: tensor.name for ending, tensor in self.tensors.items()}
        return next((name for ending, name in each.items() if "scale" in ending), self.name)

    def spread(self, field: str, values: np.ndarray, node: Rounded) -> np.ndarray:
        """A field's values for each input that shares one: [out, in]; lists are filled up with zeros."""
        if field in node.lists:
            return np.pad(values, ((0, 0), (0, self.shape[1] - values.shape[1])))
        if values.shape[1] == 1:
            return np.broadcast_to(values, self.shape)
        if values.shape[1] == self.shape[1]:
            return values
        return values.repeat(node.shared(field), axis=1)[:, : self.shape[1]]


def specs_of(group: StoredGroup, rows: int, columns: int) -> Rounded:
    """The specs of a matrix [rows, columns] in a group's format."""
    return quant.packed(group.quant, ArraySpec((columns, rows), np.float32, (None, None), inputs=(0,)))


def rounded(value: np.ndarray, group: StoredGroup) -> Rounded:
    """A dense matrix [out, in] in a group's format; each output by itself, so that they may be fused later."""
    return specs_of(group, *value.shape).quantize(value.T)


def check(tensor: Tensor, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Refuse a tensor of another type or shape."""
    if tensor.shape not in shapes or tensor.dtype.name not in dtypes:
        raise ModelError(
            f"tensor {tensor.name!r} is {list(tensor.shape)} of {tensor.dtype.name}; it must be "
            f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(shapes))} of {' or '.join(dtypes)}"
        )


def take(tensors: dict[str, Any], stem: str, ending: str, endings: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of one matrix, taken out; `ending` is the one that it was known by."""
    for other in endings:
        if stem + other not in tensors:
            raise ModelError(f"the checkpoint lacks the tensor {stem + other!r}, which {stem + ending!r} needs")
    return {other: tensors.pop(stem + other) for other in endings}


def fits(node: Any, found: list[Any]) -> bool:
    """Whether these tensors hold a node's own codes."""
    each = node.each if isinstance(node, Stack) else node
    return all(isinstance(one, Matrix) and one.holds(each) for one in found)


def read_node(dense: ArraySpec, node: Rounded, parts, tensors: dict[str, Any]) -> Any:
    """A node from stored codes, not one of them changed.

    Every field, spread to the matrix's own shape, goes the way of the dense weight: through each part's `turn` and into
    its place `at`. Of what was spread, one row a group is taken; turns leave the inputs alone.
    """
    axes, columns = len(node.into), math.prod(node.into)
    fields: dict[str, np.ndarray] = {}
    for part in parts:
        source, at = tensors[part.name], part.at if isinstance(part.at, tuple) else (part.at,)
        assert all(index == slice(None) for index in at[:axes]), part.name
        for name, value in source.fields_for(node).items():
            if name not in fields:
                fields[name] = empty((value.shape[1], *node.out), getattr(node, name).dtype)
            out, step = fields[name], {columns: 1, 1: columns}.get(value.shape[1], node.shared(name))
            turned = np.moveaxis(part.turn(source.spread(name, value, node)), dense.inputs, range(axes))
            turned = turned.reshape(columns, *turned.shape[axes:])
            turned = turned[: value.shape[1]] if name in node.lists else turned[::step]
            fill(out[(slice(None), *at[axes:])], narrowed(turned, out.dtype, source.scales))
    return node.join(fields)


def narrowed(values: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """A field in a node's dtype.

    float16 holds every bfloat16 from 6e-5 to 65504 exactly. Below, its steps are 6e-8: a weight, at most 15 scales,
    moves by less than 5e-7, which is lost beside weights of any use. Of a float32 scale it keeps eleven bits, more than
    the bfloat16 that such a scale is multiplied in elsewhere.
    """
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype, copy=False)
    if narrow is not values and not np.isfinite(narrow).all():
        most, limit = np.abs(values).max(), np.finfo(narrow.dtype).max
        raise ModelError(f"tensor {name!r} holds a scale of {most:.6g}; it can be at most {limit:.6g}")
    return narrow
