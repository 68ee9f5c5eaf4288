"""An on-disk cache of packed weights: a second start maps them instead of quantising and packing.

    | magic | length and digest of the table | table (JSON) | ... | array | ... | array |

Arrays are aligned to pages. A file's name is a digest of everything that its bytes depend on, and
a file is published atomically: concurrent writers write the same bytes. The least recently used
files are deleted to make room. Digests cover the table and both ends of each array, not the middle.
"""

import hashlib
import importlib
import json
import logging
import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...ops import native
from ...ops.cache_folder import code_state, home, make_room, publish
from ...sharding.spec import nbytes

MAGIC = b"quirew01"
SUFFIX = ".weights"
PAGE = 4096
SAMPLE = 1 << 16  # bytes at each end of a checkpoint's file that are hashed
LIMIT = 64 << 30  # bytes of all files together
SMALL = 32 << 20  # bytes below which caching saves no time

log = logging.getLogger("quire")


@dataclass(frozen=True)
class WeightCache:
    """The cache file of a checkpoint that was loaded with certain options."""

    path: Path

    @classmethod
    def for_folder(cls, folder: Path, options: Any) -> "WeightCache | None":
        """The cache file for a model folder and loading options; None if no cache is available."""
        try:
            return cls(
                native.build.private(home("weights")) / f"{cache_key(folder, options)}{SUFFIX}"
            )
        except (NotImplementedError, OSError) as error:
            log.warning("packed weights are not kept for the next start: %s", error)
            return None

    def read(self) -> list[Any] | None:
        """Map the leaves; None if there is no file or it is damaged."""
        try:
            with open(self.path, "rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            table = read_table(mapping)
            raw = np.frombuffer(mapping, np.uint8)
            arrays = [map_array(raw, entry) for entry in table["arrays"]]
            leaves = [restore_node(leaf, arrays) for leaf in table["leaves"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
            log.warning("%s is damaged and made again: %s", self.path, error)
            return None
        mapping.madvise(mmap.MADV_WILLNEED)
        with suppress(OSError):
            os.utime(self.path)  # marks it as used for eviction
        return leaves

    def write_soon(self, leaves: list[Any]) -> None:
        """Write in a background thread, which the process joins at exit; skip small models."""
        if nbytes(leaves) < SMALL:
            return
        threading.Thread(target=self.write, args=(leaves,), name="quire-weight-cache").start()

    def write(self, leaves: list[Any]) -> None:
        """Write the leaves if there is room."""
        try:
            table, arrays = build_table(leaves)
            size = table["size"]
            if not make_room(self.path.parent, SUFFIX, size, LIMIT):
                log.info(
                    "packed weights are not kept for the next start: %d bytes have no room", size
                )
                return
            with publish(self.path) as temporary, open(temporary, "xb") as file:
                file.write(header_bytes(table))
                for entry, value in zip(table["arrays"], arrays, strict=True):
                    file.seek(entry["start"])
                    file.write(as_bytes(value).data)
                file.truncate(size)
        except (OSError, TypeError) as error:
            log.warning("packed weights are not kept for the next start: %s", error)


def cache_key(folder: Path, options: Any) -> str:
    """A digest of the checkpoint's files, the options, the kernels and the packing code."""
    hasher = hashlib.blake2b(repr(options).encode(), digest_size=16)
    hasher.update(
        f"{native.instruction_set()} {native.build.source_hash()} {jax.__version__}".encode()
    )
    hasher.update(code_state("ops", "model", "sharding").encode())
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        state = path.stat()
        hasher.update(f"{path.relative_to(folder)} {state.st_size} {state.st_mtime_ns}".encode())
        with path.open("rb") as file:
            hasher.update(file.read(SAMPLE))
            file.seek(max(file.tell(), state.st_size - SAMPLE))
            hasher.update(file.read())
    return hasher.hexdigest()


def build_table(leaves: list[Any]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The table of a file, and the arrays that it describes."""
    arrays: list[np.ndarray] = []
    described = [describe_node(leaf, arrays) for leaf in leaves]
    entries = []
    offset = 0
    for value in arrays:
        entries.append(
            {
                "dtype": value.dtype.name,
                "shape": value.shape,
                "start": offset,
                "ends": end_digest(as_bytes(value)),
            }
        )
        offset += -(-value.nbytes // PAGE) * PAGE
    # Offsets are added below and lengthen the table, hence twice its present size.
    begin = PAGE + -(-len(json.dumps([described, entries])) // PAGE) * 2 * PAGE
    entries = [entry | {"start": entry["start"] + begin} for entry in entries]
    return {"size": begin + offset, "leaves": described, "arrays": entries}, arrays


def header_bytes(table: dict[str, Any]) -> bytes:
    text = json.dumps(table).encode()
    return MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text


def read_table(mapping: mmap.mmap) -> dict[str, Any]:
    """Read the table of a file and check its digest and the file's size."""
    begin = len(MAGIC) + 8 + 32
    if mapping[: len(MAGIC)] != MAGIC:
        raise ValueError("it does not begin as such a file does")
    text = mapping[begin : begin + int.from_bytes(mapping[len(MAGIC) : len(MAGIC) + 8], "little")]
    if hashlib.sha256(text).digest() != mapping[begin - 32 : begin]:
        raise ValueError("its table has changed")
    table = json.loads(text)
    if len(mapping) != table["size"]:
        raise ValueError(f"it has {len(mapping)} bytes of {table['size']}")
    return table


def map_array(raw: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    """An array of the file, mapped in place."""
    dtype = np.dtype(jax.numpy.dtype(entry["dtype"]))
    shape = tuple(entry["shape"])
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    array_bytes = raw[entry["start"] : entry["start"] + size]
    if end_digest(array_bytes) != entry["ends"]:
        raise ValueError("an array has changed")
    return array_bytes.view(dtype).reshape(shape)


def end_digest(raw: np.ndarray) -> str:
    return hashlib.blake2b(raw[:PAGE].tobytes() + raw[-PAGE:].tobytes(), digest_size=8).hexdigest()


def as_bytes(value: np.ndarray) -> np.ndarray:
    """An array's bytes."""
    return value.reshape(-1).view(np.uint8)


def describe_node(node: Any, arrays: list[np.ndarray]) -> Any:
    """Describe a leaf or quantised node as JSON; its arrays are appended to `arrays`."""
    if is_dataclass(node):
        inside = {
            field.name: describe_node(getattr(node, field.name), arrays) for field in fields(node)
        }
        kind = type(node)
        return {"class": f"{kind.__module__.partition('.')[2]}:{kind.__name__}", "fields": inside}
    if isinstance(node, jax.Array | np.ndarray):
        arrays.append(np.asarray(node))
        return {"array": len(arrays) - 1}
    if isinstance(node, tuple):
        return {"tuple": [describe_node(item, arrays) for item in node]}
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"{type(node).__name__} cannot be written")


def restore_node(description: Any, arrays: list[np.ndarray]) -> Any:
    """The inverse of `describe_node`, with each array on the device."""
    if not isinstance(description, dict):
        return description
    if "array" in description:
        return jax.device_put(arrays[description["array"]])
    if "tuple" in description:
        return tuple(restore_node(item, arrays) for item in description["tuple"])
    module, _, name = description["class"].partition(":")
    if not module.startswith("ops."):
        raise ValueError(f"it names {description['class']}, which is no weight")
    kind = getattr(importlib.import_module(f"{__name__.partition('.')[0]}.{module}"), name)
    return kind(
        **{field: restore_node(value, arrays) for field, value in description["fields"].items()}
    )
