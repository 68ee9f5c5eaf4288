"""Quantised matrices of a checkpoint in the compressed-tensors form, which vLLM's tools write and Quire too.

A matrix [out, in] called `name.weight` lies in several tensors, `name.weight_scale` and others: each format says in
which.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ops import quant
from ...ops.quant import FormatError, Rounded
from ...ops.quant.compressed import Layout
from ...ops.quant.stack import Stack
from ...sharding.spec import ArraySpec, empty
from ..config import ModelError
from ..stored_format import StoredFormat
from .safetensors import Tensor, fill

WIDE = 1024  # inputs that divide by the group of any format


@dataclass(frozen=True)
class Matrix:
    """A matrix of a checkpoint in its tensors; to a reader that wants it dense it is like any other tensor."""

    name: str
    stored: StoredFormat
    shape: tuple[int, int]
    tensors: dict[str, Tensor]  # by the endings of their names

    @property
    def format(self) -> Rounded:
        return quant.example(self.stored.quant)

    def read(self) -> np.ndarray:
        """The matrix in float32."""
        return self.format.decode({name: self.spread(value) for name, value in self.fields().items()})

    def fields(self) -> dict[str, np.ndarray]:
        """Codes, scales and so on, as `Rounded` has them."""
        parts = {ending: tensor.read() for ending, tensor in self.tensors.items()}
        scale = self.tensors[".weight_scale"]
        if not np.isfinite(parts[".weight_scale"].astype(np.float32)).all():
            raise ModelError(f"tensor {scale.name!r} holds a scale that is no finite number")
        try:
            return self.format.fields(parts, self.shape[1], self.stored.form)
        except FormatError as error:
            raise ModelError(f"tensor {scale.name.removesuffix('_scale')!r} {error}") from None

    def spread(self, values: np.ndarray) -> np.ndarray:
        """What neighbouring inputs share, for each of them: [out, in]."""
        if values.shape[1] == 1:
            return np.broadcast_to(values, self.shape)
        return values.repeat(self.shape[1] // values.shape[1], axis=1)


def layout(name: str, stored: StoredFormat, shape: tuple[int, ...]) -> Layout:
    """The tensors of a matrix [out, in]; `name` is for the error where the format can keep none of this shape."""
    try:
        return quant.example(stored.quant).layout(*shape, stored.form)
    except FormatError as error:
        raise ModelError(f"tensor {name!r} {error}") from None


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    """The tensors of a checkpoint with each quantised matrix as one, under the name that it would have dense."""
    endings = layout("", stored, (1, WIDE))
    ending = next(ending for ending in endings if ending != ".weight")
    found: dict[str, Tensor | Matrix] = dict(tensors)
    for stem in [name.removesuffix(ending) for name in tensors if name.endswith(ending)]:
        for other in endings:
            if stem + other not in tensors:
                raise ModelError(f"the checkpoint lacks the tensor {stem + other!r}, which {stem + ending!r} needs")
            del found[stem + other]
        for other in (".weight", ".weight_g_idx", ".weight_zero_point"):
            if stem + other in found:
                raise ModelError(
                    f"the checkpoint holds the tensor {stem + other!r} beside {stem + ending!r}, which "
                    "quantization_config does not explain"
                )
        found[f"{stem}.weight"] = matrix(stem, {other: tensors[stem + other] for other in endings}, stored)
    return found


def matrix(stem: str, tensors: dict[str, Tensor], stored: StoredFormat) -> Matrix:
    """One matrix, the shapes and dtypes of its tensors checked."""
    codes = next(iter(tensors.values()))
    shape = codes.shape
    if stated := tensors.get(".weight_shape"):
        if stated.shape != (2,) or stated.dtype.name not in ("int64", "int32"):
            raise wrong(stated, "[2] of int64")
        shape = tuple(int(size) for size in stated.read())
        if min(shape) < 1:
            raise ModelError(f"tensor {stated.name!r} holds {list(shape)}; sizes are at least 1")
    if len(shape) != 2 or not all(shape):
        raise wrong(codes, "a matrix")
    for ending, (dtypes, shapes) in layout(codes.name, stored, shape).items():
        tensor = tensors[ending]
        if tensor.shape not in shapes or tensor.dtype.name not in dtypes:
            raise wrong(tensor, f"{list(shapes[0])} of {' or '.join(dtypes)}")
    return Matrix(f"{stem}.weight", stored, shape, tensors)


def wrong(tensor: Tensor, right: str) -> ModelError:
    return ModelError(f"tensor {tensor.name!r} is {list(tensor.shape)} of {tensor.dtype.name}; it must be {right}")


def round_matrix(value: np.ndarray, stored: StoredFormat) -> dict[str, np.ndarray]:
    """The tensors of a dense matrix [out, in]; each output is rounded by itself, so that they may be fused later."""
    rows, columns = value.shape
    specs = quant.packed(stored.quant, ArraySpec((columns, rows), value.dtype, (None, None), inputs=(0,)))
    return specs.quantize(value.T).parts(stored.form)


def fits(node: Any, found: list[Any]) -> bool:
    """Whether these tensors hold a node's own codes."""
    kind = type(node.each if isinstance(node, Stack) else node)
    return all(isinstance(tensor, Matrix) and type(tensor.format) is kind for tensor in found)


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
        for name, value in source.fields().items():
            if name not in fields:
                fields[name] = empty((value.shape[1], *node.out), getattr(node, name).dtype)
            out, step = fields[name], columns // value.shape[1]
            turned = np.moveaxis(part.turn(source.spread(value)), dense.inputs, range(axes))
            turned = turned.reshape(columns, *turned.shape[axes:])[::step]
            fill(out[(slice(None), *at[axes:])], narrowed(turned, out.dtype, source.tensors[".weight_scale"].name))
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
