"""Rounded matrices in the compressed-tensors form, which vLLM's tools write and Quire too: codes as they lie in a file.

    name.weight             int8 [out, in]; or, where codes share words:
    name.weight_packed      int32 [out, in / 8]         eight codes of four bits, the first lowest; or four of eight
    name.weight_shape       out, in
    name.weight_zero_point  int32 [out / 8, groups]     zeros of four bits, packed down the outputs
    name.weight_scale       [out, groups]

In a word a code is stored plus 8, or plus 128, so that it is never negative; four bits are then an `Int4`'s own code.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ops import quant
from ...ops.quant.int4 import MIDDLE, Int4
from ...ops.quant.int8 import Int8
from ...ops.quant.stack import Stack
from ...sharding.spec import ArraySpec, empty
from ..config import ModelError
from .quantization_config import Stored
from .safetensors import Tensor, fill

SCALES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Packed:
    """A matrix of a checkpoint in its parts; to a reader that wants it dense it is like any other tensor."""

    name: str
    form: Stored
    shape: tuple[int, ...]
    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    def read(self) -> np.ndarray:
        """The matrix in float32."""
        codes, scale, zero = self.arrays()
        middle = 0 if self.form.bits == 8 else MIDDLE if zero is None else self.spread(zero).astype(np.float32)
        return (codes.astype(np.float32) - middle) * self.spread(scale)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Codes [out, in], one byte each, as the nodes count them; scales in float32 and zeros, [out, groups]."""
        rows, columns = self.shape
        codes, scale = self.codes.read(), self.scale.read().astype(np.float32).reshape(rows, -1)
        if not np.isfinite(scale).all():
            raise ModelError(f"tensor {self.scale.name!r} holds a scale that is no finite number")
        if self.form.words:
            codes = split_words(codes, self.form.bits)[:, :columns]
            codes = codes if self.form.bits == 4 else (codes ^ 128).view(np.int8)
        zero = None if self.zero is None else split_words(self.zero.read().T, 4)[:, :rows].T
        return codes, scale, zero

    def spread(self, shared: np.ndarray) -> np.ndarray:
        """What a group of inputs shares, for each of them: [out, in]."""
        if self.form.group is None:
            return np.broadcast_to(shared, self.shape)
        return shared.repeat(self.form.group, axis=1)


def split_words(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes in int32 words, a byte each."""
    data = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return data
    return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)


def words(data: np.ndarray) -> np.ndarray:
    """Rows of bytes as int32 words; a row's last word is filled with zeros."""
    return np.ascontiguousarray(np.pad(data, ((0, 0), (0, -data.shape[1] % 4)))).view("<i4")


def layout(form: Stored, shape: tuple[int, ...]) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """The parts of a matrix [out, in] as Quire writes them: dtype and shape."""
    rows, columns = shape
    groups = columns // (form.group or columns)
    parts: dict[str, tuple[Any, tuple[int, ...]]] = {".weight": (np.int8, shape)}
    if form.words:
        parts = {
            ".weight_packed": (np.int32, (rows, -(-columns // (32 // form.bits)))),
            ".weight_shape": (np.int64, (2,)),
        }
    if form.zero:
        parts[".weight_zero_point"] = (np.int32, (-(-rows // 8), groups))
    return parts | {".weight_scale": (np.float16 if form.bits == 4 else np.float32, (rows, groups))}


def gather(tensors: dict[str, Tensor], form: Stored) -> dict[str, Tensor | Packed]:
    """The tensors of a checkpoint with each rounded matrix as one, under the name that it would have dense."""
    ending = ".weight_packed" if form.words else ".weight_scale"
    found: dict[str, Tensor | Packed] = dict(tensors)
    for stem in [name.removesuffix(ending) for name in tensors if name.endswith(ending)]:
        parts = {suffix: tensors.get(stem + suffix) for suffix in layout(form, (1, form.group or 1))}
        for suffix, tensor in parts.items():
            if tensor is None:
                raise ModelError(f"the checkpoint lacks the tensor {stem + suffix!r}, which {stem + ending!r} needs")
            del found[stem + suffix]
        for suffix in (".weight", ".weight_g_idx", ".weight_zero_point"):
            if stem + suffix in found:
                raise ModelError(
                    f"the checkpoint holds the tensor {stem + suffix!r} beside {stem + ending!r}, which "
                    "quantization_config does not explain"
                )
        found[f"{stem}.weight"] = matrix(stem, parts, form)
    return found


def matrix(stem: str, parts: dict[str, Any], form: Stored) -> Packed:
    """One matrix, the shapes and dtypes of its parts checked."""
    codes, scale = parts[".weight_packed" if form.words else ".weight"], parts[".weight_scale"]
    shape = codes.shape
    if form.words:
        stated = parts[".weight_shape"]
        if stated.shape != (2,) or stated.dtype.name not in ("int64", "int32"):
            raise wrong(stated, "[2] of int64")
        shape = tuple(int(size) for size in stated.read())
        if min(shape) < 1:
            raise ModelError(f"tensor {stated.name!r} holds {list(shape)}; sizes are at least 1")
    if len(shape) != 2 or not all(shape):
        raise wrong(codes, "a matrix")
    check_groups(codes.name, shape[1], form)
    for suffix, (dtype, right) in layout(form, shape).items():
        tensor = parts[suffix]
        if tensor is scale:
            flat = right[:1] if right[1] == 1 else right  # a scale a row may lack the axis of the groups
            fine = tensor.shape in (right, flat) and tensor.dtype.name in SCALES
        else:
            fine = suffix == ".weight_shape" or (tensor.shape == right and tensor.dtype == dtype)
        if not fine:
            raise wrong(tensor, f"{list(right)} of {' or '.join(SCALES) if tensor is scale else np.dtype(dtype).name}")
    return Packed(f"{stem}.weight", form, shape, codes, scale, parts.get(".weight_zero_point"))


def check_groups(name: str, columns: int, form: Stored) -> None:
    """Refuse inputs that leave a part of a group over: no other reader takes them as Quire would."""
    if form.group is not None and columns % form.group:
        others = [str(group) for group in (32, 64, 128) if columns % group == 0]
        remedy = f"it could be {' or '.join(others)}" if others else "int8 has none"
        raise ModelError(
            f"tensor {name!r} has {columns} inputs, which do not divide by the group of {form.group}; {remedy}"
        )


def wrong(tensor: Tensor, right: str) -> ModelError:
    return ModelError(f"tensor {tensor.name!r} is {list(tensor.shape)} of {tensor.dtype.name}; it must be {right}")


def round_matrix(value: np.ndarray, form: Stored) -> dict[str, np.ndarray]:
    """The parts of a dense matrix [out, in]; each output is rounded by itself, so that they may be fused later."""
    rows, columns = value.shape
    spec = quant.packed(form.quant, ArraySpec((columns, rows), value.dtype, (None, None), inputs=(0,)))
    node = quant.quantize(value.T, spec)
    codes, scale = np.ascontiguousarray(node.codes.T), node.scale.reshape(-1, rows).T
    if not form.words:
        return {".weight": codes, ".weight_scale": scale}
    data = codes if form.bits == 4 else codes.view(np.uint8) ^ 128
    parts = {".weight_packed": words(data), ".weight_shape": np.array([rows, columns]), ".weight_scale": scale}
    if form.zero:
        pairs = np.pad(node.zero, ((0, 0), (0, rows % 2)))
        parts[".weight_zero_point"] = words(pairs[:, ::2] | pairs[:, 1::2] << 4).T
    return parts


def fits(node: Any, found: list[Any]) -> bool:
    """Whether these tensors hold a node's own codes."""
    bits = {Int8: 8, Int4: 4}.get(type(node.each if isinstance(node, Stack) else node), 0)
    return all(isinstance(tensor, Packed) and tensor.form.bits == bits for tensor in found)


def read_node(dense: ArraySpec, node: Any, parts, tensors: dict[str, Any]) -> Any:
    """A node from stored codes, not one of them changed.

    Codes, and scales and zeros spread out to the matrix's own shape, all go the way of the dense weight: through each
    part's `turn` and into its place `at`. Of what was spread, one row a group is taken; turns leave the inputs alone.
    """
    into, columns, rows = len(node.into), math.prod(node.into), math.prod(node.out)
    step = getattr(node, "group", columns)
    kept = {"codes": empty(node.into + node.out, np.uint8 if isinstance(node, Int4) else np.int8)}
    for name in ("scale", "zero"):
        if (spec := getattr(node, name, None)) is not None:
            kept[name] = empty((columns // step, *node.out), spec.dtype)
    for part in parts:
        tensor, at = tensors[part.name], part.at if isinstance(part.at, tuple) else (part.at,)
        assert all(index == slice(None) for index in at[:into]), part.name
        for (name, out), value in zip(kept.items(), tensor.arrays(), strict=False):
            turned = part.turn(value if name == "codes" else tensor.spread(value))
            turned = np.moveaxis(turned, dense.inputs, range(into))
            if name != "codes":
                turned = narrowed(turned.reshape(columns, *turned.shape[into:])[::step], out.dtype, tensor.scale.name)
            fill(out[at if name == "codes" else (slice(None), *at[into:])], turned)
    if isinstance(node, Int8):
        return node.replace(codes=kept["codes"], scale=kept["scale"][0])
    codes = kept["codes"].reshape(columns, rows)
    kept |= {"codes": codes[::2] | codes[1::2] << 4}
    return node.replace(**{name: value.reshape(-1, rows) for name, value in kept.items()})


def narrowed(values: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """Scales or zeros in a node's dtype.

    float16 holds every bfloat16 from 6e-5 to 65504 exactly. Below, its steps are 6e-8: a weight, at most 15 scales,
    moves by less than 5e-7, which is lost beside weights of any use. Of a float32 scale it keeps eleven bits, more than
    the bfloat16 that such a scale is multiplied in elsewhere.
    """
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    if narrow.dtype.kind == "f" and not np.isfinite(narrow).all():
        raise ModelError(f"tensor {name!r} holds a scale of {np.abs(values).max():.6g}; it can be at most 65504")
    return narrow
