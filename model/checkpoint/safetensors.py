"""Read and write the tensors of safetensors files; headers are checked before any entry is used."""

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
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
METADATA = "__metadata__"
MAX_HEADER = 100 << 20
STRIP = 16  # rows of a transposed copy at a time: more would evict lines before they are full


@dataclass(frozen=True)
class Tensor:
    """The location of a tensor on disk."""

    name: str  # in the file
    file: Path
    dtype: Any
    shape: tuple[int, ...]
    start: int
    content: bytes | None = field(default=None, repr=False, compare=False)  # of the file, if read

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def read(self) -> np.ndarray:
        """Read the tensor. A mapping would hold its pages a second time during loading."""
        if self.content is not None:
            return np.frombuffer(
                self.content, self.dtype, math.prod(self.shape), self.start
            ).reshape(self.shape)
        out = empty(self.shape, self.dtype)
        try:
            with open(self.file, "rb", buffering=0) as file:
                file.seek(self.start)
                unread = out.reshape(-1).view(np.uint8).data
                while unread and (count := file.readinto(unread)):
                    unread = unread[count:]
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read: {error.strerror}") from None
        if unread:
            raise ModelError(f"{self.file} is truncated: {len(unread)} bytes are missing")
        return out

    def cut(self, index: int) -> "Tensor":
        """One element of the first axis, which stays with size 1."""
        nbytes = math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize
        return replace(self, shape=(1, *self.shape[1:]), start=self.start + index * nbytes)

    def mapped(self) -> np.ndarray:
        """Map the tensor: a process that needs a shard reads only the pages that it accesses."""
        try:
            return np.asarray(np.memmap(self.file, self.dtype, "r", self.start, self.shape))
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read: {error.strerror}") from None


def fill(out: np.ndarray, value: np.ndarray) -> None:
    """`out[...] = value`, about twenty times as fast if one has the other's transposed layout."""
    if out.shape != value.shape or value.ndim < 2:
        out[...] = value
        return
    order = np.argsort([-stride for stride in value.strides], kind="stable")
    out = out.transpose(order)
    value = value.transpose(order)
    axis = int(np.argmin(out.strides))  # neighbours along it share a cache line of `out`
    for index in np.ndindex(value.shape[:axis]):
        for at in range(0, value.shape[axis], STRIP):
            out[index][at : at + STRIP] = value[index][at : at + STRIP].astype(
                out.dtype, copy=False
            )


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """Find all tensors of a folder from headers: by its index, in its one file, or in all files."""
    if (folder / INDEX).exists():
        return indexed_tensors(folder)
    names = (
        [SINGLE]
        if (folder / SINGLE).exists()
        else sorted(path.name for path in folder.glob("*.safetensors"))
    )
    if not names:
        refuse_other_weights(folder, [path.name for path in folder.iterdir()])
        raise ModelError(
            f"{folder} holds no *.safetensors; weights are read from safetensors alone"
        )
    tensors: dict[str, Tensor] = {}
    for name in names:
        header = read_header(folder / name)
        if twice := tensors.keys() & header.keys():
            first = sorted(twice)[0]
            raise ModelError(
                f"tensor {first!r} is in both {tensors[first].file} and {folder / name}; keep "
                "one of them"
            )
        tensors |= header
    return tensors


def indexed_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors that the index lists, each from the file that it names."""
    index = folder / INDEX
    weight_map = read_json(folder / INDEX).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise ModelError(f"{index} must hold a weight_map from tensor names to files")
    for file in weight_map.values():
        if not file.endswith(".safetensors") or "/" in file or "\\" in file:
            raise ModelError(
                f"{index} names {file!r}; it must be a *.safetensors file in the same folder"
            )
    headers = {file: read_header(folder / file) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ModelError(f"{index} says that {file} holds the tensor {name!r}; it does not")
    return {name: headers[file][name] for name, file in weight_map.items()}


def read_header(path: Path, content: bytes | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, each entry checked against the file's size.

    If `content` (the bytes of the file) is given, the file is not read again.
    """
    table, data, size = read_table(path, content)
    tensors = {
        name: read_entry(path, name, entry, data, size)
        for name, entry in table.items()
        if name != METADATA
    }
    return {name: replace(tensor, content=content) for name, tensor in tensors.items()}


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata in the header of a safetensors file."""
    metadata = read_table(path)[0].get(METADATA)
    return metadata if isinstance(metadata, dict) else {}


def read_table(path: Path, content: bytes | None = None) -> tuple[dict[str, Any], int, int]:
    """(the header of a safetensors file, offset of the tensor data, size of the file)."""
    try:
        size = os.path.getsize(path) if content is None else len(content)
        with open(path, "rb") if content is None else io.BytesIO(content) as file:
            refuse_pointer(path, file.read(POINTER))
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise ModelError(
                    f"{path} is truncated or not a safetensors file: its header would need "
                    f"{length} bytes"
                )
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
    """Check one entry of the header; `data` is the offset of the tensor data."""
    try:
        dtype = np.dtype(DTYPES[entry["dtype"]])
        shape = entry["shape"]
        start, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ModelError(
            f"{path}: the entry of tensor {name!r} is not understood: {entry!r:.200}"
        ) from None
    if not isinstance(shape, list) or not all(
        type(n) is int and n >= 0 for n in (*shape, start, end)
    ):
        raise ModelError(f"{path}: the entry of tensor {name!r} is not understood: {entry!r:.200}")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ModelError(
            f"{path}: tensor {name!r} has {end - start} bytes, which is not what "
            f"{entry!r:.200} takes"
        )
    if data + end > size:
        raise ModelError(
            f"{path} is truncated: tensor {name!r} ends at byte {data + end} of {size}"
        )
    return Tensor(name, path, dtype, tuple(shape), data + start)


def write_tensors(
    path: Path, layout: Mapping[str, tuple[Any, tuple[int, ...]]], values: Iterable[np.ndarray]
) -> None:
    """Write a safetensors file: dtypes and shapes from `layout`, then each of `values` in order."""
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        start = end
        end = end + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {
            "dtype": names[np.dtype(dtype)],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the first tensor
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, (dtype, shape)), value in zip(layout.items(), values, strict=True):
            assert (value.dtype, value.shape) == (np.dtype(dtype), shape), name
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def publish_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file that appears once it is complete."""
    with publish(path) as temporary:
        write_tensors(
            temporary, {name: (x.dtype, x.shape) for name, x in tensors.items()}, tensors.values()
        )
