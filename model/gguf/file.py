"""Reads GGUF files, including split ones: metadata and the table of tensors, checked before use."""

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
PROLOGUE_BYTES = 24  # magic, version, number of tensors, number of keys
MAX_AXES = 4
ALIGNMENT = 32  # without general.alignment
MIN_TENSOR_INFO_BYTES = 24
SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GgufFile:
    """The metadata and tensors of a GGUF file, or of all parts of a split file."""

    metadata: dict[str, Any]  # of the first part if the file is split
    tensors: dict[str, BlockTensor]


def read_file(path: Path) -> GgufFile:
    """Read a GGUF file. Any part of a split file may be given; all parts are read."""
    first_read = read_part(path)
    count = first_read.metadata.get("split.count", 0)  # 0 also in a file that was merged from parts
    number, num_named = split_position(path)
    if not is_count(count) or (count < 2 and num_named > 1):
        raise ModelError(
            f"{path}: split.count = {format_value(count)}; by its name it is part {number} of "
            f"{num_named}"
        )
    if count < 2:
        return first_read
    check_part(path, first_read, number, num_named)
    parts_by_number = {number: first_read}
    for part_number in range(1, count + 1):
        if part_number not in parts_by_number:
            parts_by_number[part_number] = read_part(part_path(path, part_number))
            check_part(
                part_path(path, part_number), parts_by_number[part_number], part_number, count
            )
    return join_parts(path, [parts_by_number[part_number] for part_number in range(1, count + 1)])


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def format_value(value: Any) -> str:
    """A short form of a value for an error message."""
    return (
        f"{value!r:.200}"
        if isinstance(value, str | int | float | None)
        else f"an array of {len(value)}"
    )


def split_position(path: Path) -> tuple[int, int]:
    """The part number and the number of parts in a file's name, such as model-00002-of-00003.gguf;
    (1, 1) without.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    return (int(match[2]), int(match[3])) if match else (1, 1)


def part_path(path: Path, number: int) -> Path:
    """The path of part `number` of the split file that `path` is a part of."""
    match = SPLIT_NAME.fullmatch(path.name)
    assert match is not None
    return path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")


def check_part(path: Path, gguf: GgufFile, number: int, count: int) -> None:
    """Raise if the metadata of a part contradicts the part number in its name."""
    # Split.no counts from 0.
    for key, expected in (("split.count", count), ("split.no", number - 1)):
        stated = gguf.metadata.get(key)
        if not is_count(stated) or stated != expected:
            raise ModelError(
                f"{path}: {key} = {format_value(stated)}, but by its name it is part {number} of "
                f"{count}; a split file's parts are named NAME-00001-of-00003.gguf and so on"
            )


def join_parts(path: Path, files: list[GgufFile]) -> GgufFile:
    """Combine the parts of a split file; `path` is the path of any part."""
    tensors: dict[str, BlockTensor] = {}
    for gguf in files:
        if duplicates := tensors.keys() & gguf.tensors.keys():
            name = min(duplicates)
            raise ModelError(
                f"tensor {name!r:.200} is in both {tensors[name].file} and "
                f"{gguf.tensors[name].file}; it must be in one"
            )
        tensors |= gguf.tensors
    for number, gguf in enumerate(files, 1):
        stated = gguf.metadata.get("split.tensors.count")
        if not is_count(stated) or stated != len(tensors):
            raise ModelError(
                f"{part_path(path, number)}: split.tensors.count = {format_value(stated)}, "
                f"but its {len(files)} parts hold {len(tensors)} tensors"
            )
    return GgufFile(files[0].metadata, tensors)


def read_part(path: Path) -> GgufFile:
    """Read one file. Only its metadata stays in memory; tensors are read on demand."""
    try:
        with open(path, "rb") as file:
            begin = file.read(max(POINTER, PROLOGUE_BYTES))
        check_prologue(path, begin)
        return read_header(Header(path, np.memmap(path, np.uint8, "r").data))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; the model's download may be incomplete") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


def check_prologue(path: Path, begin: bytes) -> None:
    """Raise if the first bytes are not those of a little-endian GGUF file of a supported
    version.
    """
    refuse_pointer(path, begin)
    if not begin:
        raise ModelError(f"{path} is empty; the model's download may be incomplete")
    if not begin.startswith(MAGIC[: len(begin)]):
        raise ModelError(
            f"{path} is no GGUF file: it begins with {begin[:4]!r} instead of {MAGIC!r}"
        )
    if len(begin) < PROLOGUE_BYTES:
        raise ModelError(
            f"{path} is truncated: it has {len(begin)} bytes, and a GGUF file {PROLOGUE_BYTES} "
            "before its first key"
        )
    version = int.from_bytes(begin[4:8], "little")
    if (swapped := int.from_bytes(begin[4:8], "big")) < 1 << 16 <= version:
        raise ModelError(
            f"{path} is big endian (version {swapped}); only little endian files are read: "
            "gguf_convert_endian.py of llama.cpp writes one"
        )
    if version not in VERSIONS:
        raise ModelError(f"{path} has version {version} of the GGUF format; it must be 2 or 3")


def read_header(header: Header) -> GgufFile:
    """Read the metadata and the table of tensors."""
    header.offset = 8
    num_tensors = header.read_number("<u8", "the number of tensors")
    num_keys = header.read_number("<u8", "the number of keys")
    metadata = header.read_metadata(num_keys)
    header.check_size(num_tensors, MIN_TENSOR_INFO_BYTES, f"a table of {num_tensors} tensors")
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not is_count(alignment) or alignment.bit_count() != 1:
        raise ModelError(
            f"{header.path}: general.alignment = {format_value(alignment)}; it must be a power "
            "of two"
        )
    tensors_by_name: dict[str, BlockTensor] = {}
    for index in range(num_tensors):
        tensor = read_tensor_info(header, index, alignment)
        if tensor.name in tensors_by_name:
            raise ModelError(
                f"{header.path} has the tensor {tensor.name!r:.200} twice; a name must be unique"
            )
        tensors_by_name[tensor.name] = tensor
    return GgufFile(
        metadata,
        resolve_offsets(header, tensors_by_name, -(-header.offset // alignment) * alignment),
    )


def read_tensor_info(header: Header, index: int, alignment: int) -> BlockTensor:
    """Read one row of the table of tensors; `start` is relative to the start of the tensor data."""
    name = header.read_text(f"the name of tensor {index}")
    label = f"tensor {name!r:.200}"
    if (num_axes := header.read_number("<u4", label)) > MAX_AXES:
        raise ModelError(
            f"{header.path}: {label} has {num_axes} dimensions; it can have at most {MAX_AXES}"
        )
    sizes = [header.read_number("<u8", label) for _ in range(num_axes)]
    type_number = header.read_number("<u4", label)
    start = header.read_number("<u8", label)
    if 0 in sizes:
        raise ModelError(
            f"{header.path}: {label} has the dimensions {sizes}; each must be at least 1"
        )
    if type_number not in TYPES:
        block_type = ", ".join(
            f"{block_type.name} ({block_type.number})" for block_type in TYPES.values()
        )
        raise ModelError(
            f"{header.path}: {label} has the type {type_number}, which is not known; it must be "
            f"one of {block_type}"
        )
    kind = TYPES[type_number]
    row_size = (sizes or [1])[0]
    if row_size % kind.elements:
        raise ModelError(
            f"{header.path}: {label} of type {kind.name} has rows of {row_size} elements; "
            f"their number must divide by {kind.elements}"
        )
    if start % alignment:
        raise ModelError(
            f"{header.path}: {label} begins at byte {start}; that must divide by {alignment}, the "
            "alignment"
        )
    return BlockTensor(name, header.path, kind, tuple(reversed(sizes)), start)


def resolve_offsets(
    header: Header, tensors: dict[str, BlockTensor], data_start: int
) -> dict[str, BlockTensor]:
    """Make the tensors' offsets absolute, after checking that all lie in the file without
    overlap.
    """
    resolved = {}
    end = 0
    previous_name = ""
    for tensor in tensors.values():
        tensor_end = data_start + tensor.start + tensor.nbytes
        if tensor_end > len(header.data):
            raise ModelError(
                f"{header.path} is truncated or damaged: tensor {tensor.name!r:.200} of type "
                f"{tensor.kind.name} and shape {tensor.shape} would end at byte {tensor_end} of "
                f"{len(header.data)}"
            )
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.start < end:
            raise ModelError(
                f"{header.path}: tensor {tensor.name!r:.200} begins at byte "
                f"{data_start + tensor.start}, but {previous_name!r:.200} ends at byte "
                f"{data_start + end}; tensors must not overlap"
            )
        end = tensor.start + tensor.nbytes
        previous_name = tensor.name
    for name, tensor in tensors.items():
        resolved[name] = BlockTensor(
            name, tensor.file, tensor.kind, tensor.shape, data_start + tensor.start
        )
    return resolved
