"""Weights as the kernels want them, kept on disk: a second start maps them, and neither rounds nor lays out any.

    | magic | length and digest of the table | table (JSON) | ... | array | ... | array |

Every array begins at a page. A file is named by a digest of all that its bytes depend on; it appears whole or not at
all, and two processes that write at once write the same. What was used least recently is deleted when there is no room.
Damage is noticed in the table and at both ends of each array, not amid them.
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
SAMPLE = 1 << 16  # bytes at each end of a checkpoint's file that tell it from another
LIMIT = 64 << 30  # bytes of all files together
SMALL = 32 << 20  # bytes that are loaded as fast

log = logging.getLogger("quire")


@dataclass(frozen=True)
class WeightCache:
    """One checkpoint's file, loaded with certain options."""

    path: Path

    @classmethod
    def of(cls, folder: Path, about: Any) -> "WeightCache | None":
        """That of a model folder; `about` are the options, in words. None where nothing can be kept."""
        try:
            return cls(native.build.private(home("weights")) / f"{key(folder, about)}{SUFFIX}")
        except (NotImplementedError, OSError) as error:
            log.warning("packed weights are not kept for the next start: %s", error)
            return None

    def read(self) -> list[Any] | None:
        """The leaves, mapped; None if there is no file, or it is damaged."""
        try:
            with open(self.path, "rb") as file:
                whole = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            table = read_table(whole)
            raw = np.frombuffer(whole, np.uint8)
            arrays = [array(raw, entry) for entry in table["arrays"]]
            leaves = [node_of(leaf, arrays) for leaf in table["leaves"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
            log.warning("%s is damaged and made again: %s", self.path, error)
            return None
        whole.madvise(mmap.MADV_WILLNEED)
        with suppress(OSError):
            os.utime(self.path)  # when it was last used
        return leaves

    def write_soon(self, leaves: list[Any]) -> None:
        """Write in a thread of its own, which a process that ends waits for; not what is small."""
        if nbytes(leaves) < SMALL:
            return
        threading.Thread(target=self.write, args=(leaves,), name="quire-weight-cache").start()

    def write(self, leaves: list[Any]) -> None:
        """Write the leaves, if there is room."""
        try:
            table, arrays = table_of(leaves)
            size = table["size"]
            if not make_room(self.path.parent, SUFFIX, size, LIMIT):
                log.info("packed weights are not kept for the next start: %d bytes have no room", size)
                return
            with publish(self.path) as part, open(part, "xb") as file:
                file.write(head_of(table))
                for entry, value in zip(table["arrays"], arrays, strict=True):
                    file.seek(entry["start"])
                    file.write(flat(value))
                file.truncate(size)
        except (OSError, TypeError) as error:
            log.warning("packed weights are not kept for the next start: %s", error)


def key(folder: Path, about: Any) -> str:
    """A digest of the checkpoint's files, the options, the kernels and the code that packs."""
    found = hashlib.blake2b(repr(about).encode(), digest_size=16)
    found.update(f"{native.instruction_set()} {native.build.source_hash()} {jax.__version__}".encode())
    found.update(code_state("ops", "model", "sharding").encode())
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        state = path.stat()
        found.update(f"{path.relative_to(folder)} {state.st_size} {state.st_mtime_ns}".encode())
        with path.open("rb") as file:
            found.update(file.read(SAMPLE))
            file.seek(max(file.tell(), state.st_size - SAMPLE))
            found.update(file.read())
    return found.hexdigest()


def table_of(leaves: list[Any]) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What the file says of the leaves, and the arrays in it."""
    arrays: list[np.ndarray] = []
    described = [described_as(leaf, arrays) for leaf in leaves]
    entries, at = [], 0
    for value in arrays:
        entries.append({"dtype": value.dtype.name, "shape": value.shape, "start": at, "ends": ends(flat(value))})
        at += -(-value.nbytes // PAGE) * PAGE
    begin = PAGE + -(-len(json.dumps([described, entries])) // PAGE) * 2 * PAGE  # the starts below are longer
    entries = [entry | {"start": entry["start"] + begin} for entry in entries]
    return {"size": begin + at, "leaves": described, "arrays": entries}, arrays


def head_of(table: dict[str, Any]) -> bytes:
    text = json.dumps(table).encode()
    return MAGIC + len(text).to_bytes(8, "little") + hashlib.sha256(text).digest() + text


def read_table(whole: mmap.mmap) -> dict[str, Any]:
    """The table of a file, if it is whole."""
    begin = len(MAGIC) + 8 + 32
    if whole[: len(MAGIC)] != MAGIC:
        raise ValueError("it does not begin as such a file does")
    text = whole[begin : begin + int.from_bytes(whole[len(MAGIC) : len(MAGIC) + 8], "little")]
    if hashlib.sha256(text).digest() != whole[begin - 32 : begin]:
        raise ValueError("its table has changed")
    table = json.loads(text)
    if len(whole) != table["size"]:
        raise ValueError(f"it has {len(whole)} bytes of {table['size']}")
    return table


def array(raw: np.ndarray, entry: dict[str, Any]) -> np.ndarray:
    """An array of the file, in place."""
    dtype, shape = np.dtype(jax.numpy.dtype(entry["dtype"])), tuple(entry["shape"])
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    own = raw[entry["start"] : entry["start"] + size]
    if ends(own) != entry["ends"]:
        raise ValueError("an array has changed")
    return own.view(dtype).reshape(shape)


def ends(raw: np.ndarray) -> str:
    return hashlib.blake2b(raw[:PAGE].tobytes() + raw[-PAGE:].tobytes(), digest_size=8).hexdigest()


def flat(value: np.ndarray) -> np.ndarray:
    """An array's bytes."""
    return value.reshape(-1).view(np.uint8)


def described_as(node: Any, arrays: list[np.ndarray]) -> Any:
    """A leaf, or a node that stands in place of one, as JSON says it; its arrays are added to those before."""
    if is_dataclass(node):
        inside = {field.name: described_as(getattr(node, field.name), arrays) for field in fields(node)}
        kind = type(node)
        return {"class": f"{kind.__module__.partition('.')[2]}:{kind.__name__}", "fields": inside}
    if isinstance(node, jax.Array | np.ndarray):
        arrays.append(np.asarray(node))
        return {"array": len(arrays) - 1}
    if isinstance(node, tuple):
        return {"tuple": [described_as(each, arrays) for each in node]}
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"{type(node).__name__} cannot be written")


def node_of(said: Any, arrays: list[np.ndarray]) -> Any:
    """The inverse, each array on the device."""
    if not isinstance(said, dict):
        return said
    if "array" in said:
        return jax.device_put(arrays[said["array"]])
    if "tuple" in said:
        return tuple(node_of(each, arrays) for each in said["tuple"])
    module, _, name = said["class"].partition(":")
    if not module.startswith("ops."):
        raise ValueError(f"it names {said['class']}, which is no weight")
    kind = getattr(importlib.import_module(f"{__name__.partition('.')[0]}.{module}"), name)
    return kind(**{field: node_of(value, arrays) for field, value in said["fields"].items()})
