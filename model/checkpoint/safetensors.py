"""The tensors of a model folder: safetensors headers, checked before any entry is used, and the bytes."""

import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ...ops.cache_folder import publish
from ...sharding.spec import empty
from ..config import ModelError
from ..errors import POINTER, refuse_pointer
from .folder import read_json, refuse_other_weights

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
METADATA = "__metadata__"
MAX_HEADER = 100 << 20
STRIP = 16  # rows of a transposed copy at a time: more of them fall out of the cache before their lines are full


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies on disk."""

    name: str  # as the file has it
    file: Path
    dtype: Any
    shape: tuple[int, ...]
    start: int
    content: bytes | None = field(default=None, repr=False, compare=False)  # of the whole file, if it was read before

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def read(self) -> np.ndarray:
        """The tensor, read rather than mapped: mapped pages would take memory a second time while the model loads."""
        if self.content is not None:
            return np.frombuffer(self.content, self.dtype, math.prod(self.shape), self.start).reshape(self.shape)
        out = empty(self.shape, self.dtype)
        try:
            with open(self.file, "rb", buffering=0) as file:
                file.seek(self.start)
                rest = memoryview(out.reshape(-1).view(np.uint8))
                while rest and (count := file.readinto(rest)):
                    rest = rest[count:]
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read: {error.strerror}") from None
        if rest:
            raise ModelError(f"{self.file} is truncated: {len(rest)} bytes are missing")
        return out

    def cut(self, index: int) -> "Tensor":
        """One element of its first axis; the axis stays, with size 1."""
        nbytes = math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize
        return replace(self, shape=(1, *self.shape[1:]), start=self.start + index * nbytes)

    def mapped(self) -> np.ndarray:
        """The tensor, mapped: only the pages that are touched are read, for a process that needs a part of it."""
        try:
            return np.asarray(np.memmap(self.file, self.dtype, "r", self.start, self.shape))
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read: {error.strerror}") from None


def fill(out: np.ndarray, value: np.ndarray) -> None:
    """`out[...] = value`, some twenty times as fast where one is laid out as the other's transpose."""
    if out.shape != value.shape or value.ndim < 2:
        out[...] = value
        return
    order = np.argsort([-stride for stride in value.strides], kind="stable")
    out, value = out.transpose(order), value.transpose(order)
    axis = int(np.argmin(out.strides))  # neighbours along it share a cache line of `out`
    for index in np.ndindex(value.shape[:axis]):
        for at in range(0, value.shape[axis], STRIP):
            out[index][at : at + STRIP] = value[index][at : at + STRIP].astype(out.dtype, copy=False)


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from the headers alone: those of its index, its one file, or all its files."""
    if (folder / INDEX).exists():
        return indexed_tensors(folder)
    names = [SINGLE] if (folder / SINGLE).exists() else sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        refuse_other_weights(folder, [path.name for path in folder.iterdir()])
        raise ModelError(f"{folder} holds no *.safetensors; weights are read from safetensors alone")
    tensors: dict[str, Tensor] = {}
    for name in names:
        header = read_header(folder / name)
        if twice := tensors.keys() & header.keys():
            first = sorted(twice)[0]
            raise ModelError(f"tensor {first!r} is in both {tensors[first].file} and {folder / name}; keep one of them")
        tensors |= header
    return tensors


def indexed_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors that the index lists, each from the file that it names."""
    index, where = folder / INDEX, read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise ModelError(f"{index} must hold a weight_map from tensor names to files")
    for file in where.values():
        if not file.endswith(".safetensors") or "/" in file or "\\" in file:
            raise ModelError(f"{index} names {file!r}; it must be a *.safetensors file in the same folder")
    headers = {file: read_header(folder / file) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in headers[file]:
            raise ModelError(f"{index} says that {file} holds the tensor {name!r}; it does not")
    return {name: headers[file][name] for name, file in where.items()}


def read_header(path: Path, content: bytes | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, each entry checked against the file's size.

    `content` is what the file held when it was read before: then neither the header nor a tensor is read from the file.
    """
    table, data, size = read_table(path, content)
    tensors = {name: read_entry(path, name, entry, data, size) for name, entry in table.items() if name != METADATA}
    return {name: replace(tensor, content=content) for name, tensor in tensors.items()}


def read_metadata(path: Path) -> dict[str, Any]:
    """What else the header of a safetensors file says, by name."""
    found = read_table(path)[0].get(METADATA)
    return found if isinstance(found, dict) else {}


def read_table(path: Path, content: bytes | None = None) -> tuple[dict[str, Any], int, int]:
    """The header of a safetensors file, where the tensors' bytes begin, and the file's size."""
    try:
        size = os.path.getsize(path) if content is None else len(content)
        with open(path, "rb") if content is None else io.BytesIO(content) as file:
            refuse_pointer(path, file.read(POINTER))
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise ModelError(f"{path} is truncated or not a safetensors file: its header would need {length} bytes")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; the model's download may be incomplete") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path} has a damaged header: it is no table")
    return header, 8 + length, size


def read_entry(path: Path, name: str, entry: Any, data: int, size: int) -> Tensor:
    """One line of the table; `data` is where the tensors' bytes begin."""
    try:
        dtype, shape, (start, end) = np.dtype(DTYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{path}: the entry of tensor {name!r} is not understood: {entry!r:.200}") from None
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ModelError(f"{path}: the entry of tensor {name!r} is not understood: {entry!r:.200}")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ModelError(f"{path}: tensor {name!r} has {end - start} bytes, which is not what {entry!r:.200} takes")
    if data + end > size:
        raise ModelError(f"{path} is truncated: tensor {name!r} ends at byte {data + end} of {size}")
    return Tensor(name, path, dtype, tuple(shape), data + start)


def write_tensors(path: Path, layout: Mapping[str, tuple[Any, tuple[int, ...]]], values: Iterable[np.ndarray]) -> None:
    """A safetensors file; `layout` gives dtypes and shapes, `values` the tensors in that order, one at a time."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": names[np.dtype(dtype)], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, (dtype, shape)), value in zip(layout.items(), values, strict=True):
            assert (value.dtype, value.shape) == (np.dtype(dtype), shape), name
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8))


def write_whole(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file, which is there once it is complete."""
    with publish(path) as part:
        write_tensors(part, {name: (x.dtype, x.shape) for name, x in tensors.items()}, tensors.values())
