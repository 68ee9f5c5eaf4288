"""GGUF files: what they say and the tensors that they hold, checked before any of it is used."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import POINTER, ModelError, refuse_pointer
from .blocks import TYPES
from .header import Header
from .tensor import BlockTensor

MAGIC = b"GGUF"
VERSIONS = (2, 3)
FIXED = 24  # bytes before the first key: magic, version, and the numbers of tensors and keys
AXES = 4  # the most that a tensor has
ALIGNMENT = 32  # where the file says nothing
ENTRY = 24  # bytes that the shortest entry of a tensor takes
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GgufFile:
    """What a file holds, or all the parts of one that is split."""

    metadata: dict[str, Any]  # of a split file that of its first part; arrays of numbers are numpy's, others lists
    tensors: dict[str, BlockTensor]


def read_file(path: Path) -> GgufFile:
    """A GGUF file. Of one that is split any part may be named, and all are read."""
    given = read_part(path)
    count = given.metadata.get("split.count", 0)  # 0 as well in one that was merged
    number, named = place(path)
    if not is_count(count) or (count < 2 and named > 1):
        raise ModelError(f"{path}: split.count = {shown(count)}; by its name it is part {number} of {named}")
    if count < 2:
        return given
    check_part(path, given, number, named)
    parts = {number: given}
    for other in range(1, count + 1):
        if other not in parts:
            parts[other] = read_part(sibling(path, other))
            check_part(sibling(path, other), parts[other], other, count)
    return joined(path, [parts[part] for part in range(1, count + 1)])


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def shown(value: Any) -> str:
    """A value in an error's text, in few words."""
    return f"{value!r:.200}" if isinstance(value, str | int | float | None) else f"an array of {len(value)}"


def place(path: Path) -> tuple[int, int]:
    """Which part of how many a file is by its name: model-00002-of-00003.gguf; (1, 1) where it does not say."""
    match = PART.fullmatch(path.name)
    return (int(match[2]), int(match[3])) if match else (1, 1)


def sibling(path: Path, number: int) -> Path:
    """Another part of the same file."""
    stem, _, count = PART.fullmatch(path.name).groups()
    return path.with_name(f"{stem}-{number:05}-of-{count}.gguf")


def check_part(path: Path, part: GgufFile, number: int, count: int) -> None:
    """Refuse a part that says of itself another place than its name does."""
    for key, right in (("split.count", count), ("split.no", number - 1)):  # split.no counts from 0
        said = part.metadata.get(key)
        if not is_count(said) or said != right:
            raise ModelError(
                f"{path}: {key} = {shown(said)}, but by its name it is part {number} of {count}; "
                "a split file's parts are named NAME-00001-of-00003.gguf and so on"
            )


def joined(path: Path, parts: list[GgufFile]) -> GgufFile:
    """All parts as one; `path` is that of any."""
    tensors: dict[str, BlockTensor] = {}
    for part in parts:
        if twice := tensors.keys() & part.tensors.keys():
            name = min(twice)
            raise ModelError(
                f"tensor {name!r:.200} is in both {tensors[name].file} and {part.tensors[name].file}; it must be in one"
            )
        tensors |= part.tensors
    for number, part in enumerate(parts, 1):
        said = part.metadata.get("split.tensors.count")
        if not is_count(said) or said != len(tensors):
            raise ModelError(
                f"{sibling(path, number)}: split.tensors.count = {shown(said)}, but its {len(parts)} parts hold "
                f"{len(tensors)} tensors"
            )
    return GgufFile(parts[0].metadata, tensors)


def read_part(path: Path) -> GgufFile:
    """One file, of which nothing but the metadata stays in memory."""
    try:
        with open(path, "rb") as file:
            begin = file.read(max(POINTER, FIXED))
        check_begin(path, begin)
        return read_header(Header(path, memoryview(np.memmap(path, np.uint8, "r"))))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; the model's download may be incomplete") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def check_begin(path: Path, begin: bytes) -> None:
    """Refuse what is no GGUF file, or one of another kind."""
    refuse_pointer(path, begin)
    if not begin:
        raise ModelError(f"{path} is empty; the model's download may be incomplete")
    if not begin.startswith(MAGIC[: len(begin)]):
        raise ModelError(f"{path} is no GGUF file: it begins with {begin[:4]!r} in place of {MAGIC!r}")
    if len(begin) < FIXED:
        raise ModelError(
            f"{path} is truncated: it has {len(begin)} bytes, and a GGUF file {FIXED} before its first key"
        )
    version = int.from_bytes(begin[4:8], "little")
    if (swapped := int.from_bytes(begin[4:8], "big")) < 1 << 16 <= version:
        raise ModelError(
            f"{path} is big endian (version {swapped}); only little endian files are read: gguf_convert_endian.py of "
            "llama.cpp writes one"
        )
    if version not in VERSIONS:
        raise ModelError(f"{path} has version {version} of the GGUF format; it must be 2 or 3")


def read_header(header: Header) -> GgufFile:
    """Metadata, then the table of tensors."""
    header.at = 8
    tensors, keys = header.number("<u8", "the number of tensors"), header.number("<u8", "the number of keys")
    metadata = header.metadata(keys)
    header.check(tensors, ENTRY, f"a table of {tensors} tensors")
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not is_count(alignment) or alignment.bit_count() != 1:
        raise ModelError(f"{header.path}: general.alignment = {shown(alignment)}; it must be a power of two")
    found: dict[str, BlockTensor] = {}
    for index in range(tensors):
        tensor = read_entry(header, index, alignment)
        if tensor.name in found:
            raise ModelError(f"{header.path} has the tensor {tensor.name!r:.200} twice; a name must be unique")
        found[tensor.name] = tensor
    return GgufFile(metadata, placed(header, found, -(-header.at // alignment) * alignment))


def read_entry(header: Header, index: int, alignment: int) -> BlockTensor:
    """One line of the table; the tensor's start is counted from where the tensors begin."""
    name = header.text(f"the name of tensor {index}")
    what = f"tensor {name!r:.200}"
    if (axes := header.number("<u4", what)) > AXES:
        raise ModelError(f"{header.path}: {what} has {axes} dimensions; {AXES} are the most")
    sizes = [header.number("<u8", what) for _ in range(axes)]
    kind, start = header.number("<u4", what), header.number("<u8", what)
    if 0 in sizes:
        raise ModelError(f"{header.path}: {what} has the dimensions {sizes}; each must be at least 1")
    if kind not in TYPES:
        known = ", ".join(f"{known.name} ({known.number})" for known in TYPES.values())
        raise ModelError(f"{header.path}: {what} has the type {kind}, which is not known; it must be one of {known}")
    if (sizes or [1])[0] % TYPES[kind].elements:
        raise ModelError(
            f"{header.path}: {what} of type {TYPES[kind].name} has rows of {(sizes or [1])[0]} elements; their number "
            f"must divide by {TYPES[kind].elements}"
        )
    if start % alignment:
        raise ModelError(
            f"{header.path}: {what} begins at byte {start}; that must divide by {alignment}, the alignment"
        )
    return BlockTensor(name, header.path, TYPES[kind], tuple(reversed(sizes)), start)


def placed(header: Header, tensors: dict[str, BlockTensor], data: int) -> dict[str, BlockTensor]:
    """The tensors with their starts counted from the file's; they must lie in it, and none over another."""
    found, end, before = {}, 0, ""
    for tensor in tensors.values():
        if data + tensor.start + tensor.nbytes > len(header.data):
            raise ModelError(
                f"{header.path} is truncated or damaged: tensor {tensor.name!r:.200} of type {tensor.kind.name} and "
                f"shape {tensor.shape} would end at byte {data + tensor.start + tensor.nbytes} of {len(header.data)}"
            )
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise ModelError(
                f"{header.path}: tensor {tensor.name!r:.200} begins at byte {data + tensor.start}, but {before!r:.200} "
                f"ends at byte {data + end}; tensors must not overlap"
            )
        end, before = tensor.start + tensor.nbytes, tensor.name
    for name, tensor in tensors.items():
        found[name] = BlockTensor(name, tensor.file, tensor.kind, tensor.shape, data + tensor.start)
    return found
