"""Present a GGUF file as a model folder: config.json, tokenizer files, and links to the weights.

The folder is in the cache directory and is made again if the file changes; no weights are copied.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...ops import cache_folder
from ..errors import ModelError
from ..gguf.architectures import hf_config
from ..gguf.file import GgufFile, read_file
from ..gguf.file_type import file_format
from ..gguf.metadata import Metadata
from ..gguf.origin import Origin
from ..gguf.tensors import origins
from ..gguf.tokenizer import tokenizer_files

FILE_FORMAT = "gguf_file_format"  # the key of config.json with the name of the file's format
PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")  # the end of the name of a split file

# The format that holds each GGUF type's codes unchanged; other types are dequantised.
KEPT = {
    "Q1_0": "int4-128-least",
    "Q4_0": "int4-32",
    "Q4_1": "int4-32-least-half",
    "IQ4_NL": "iq4",
    "IQ4_XS": "iq4-levels",
    "MXFP4": "mxfp4",
    "Q8_0": "int8-weights-32",
    "Q5_0": "int5-32",
    "Q5_1": "int5-32-least",
    "Q2_K": "k4-16-least",
    "Q3_K": "k4-16",
    "Q4_K": "k4-32-least",
    "Q5_K": "k6-32-least",
    "Q6_K": "k6-16",
}


def make_folder(file: Path) -> Path:
    """Make the folder for a GGUF file, unless it is in the cache."""
    folder = home() / folder_name(file)
    if (folder / "config.json").exists():
        return folder
    texts, files = build_files(file)
    cache_folder.remove_stale_parts(folder.parent)
    try:
        with cache_folder.publish(folder) as temporary:
            temporary.mkdir()
            for name, text in texts.items():
                (temporary / name).write_text(text, "utf-8")
            for weights in files:
                (temporary / weights.name).symlink_to(weights.resolve())
    except OSError as error:
        if not (folder / "config.json").exists():  # otherwise another process has made it
            raise ModelError(
                f"{folder} cannot be made: {error.strerror}; XDG_CACHE_HOME names another place"
            ) from None
    return folder


def home() -> Path:
    return cache_folder.home("gguf")


def folder_name(file: Path) -> str:
    """A folder name that is unique to the file, its size, its time and this code."""
    try:
        status = file.stat()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    identity = f"{code_digest()} {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    return f"{file.stem[:80]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


@cache
def code_digest() -> str:
    """A digest of the code that makes folders; folders made by other versions are not used."""
    this_file = Path(__file__)
    files = [this_file, *sorted(this_file.parents[1].joinpath("gguf").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def build_files(file: Path) -> tuple[dict[str, str], list[Path]]:
    """The text files of the folder by name, and the files that hold the weights."""
    gguf = read_file(file)
    config, origin_by_tensor = describe(gguf)
    modules_by_format = group_modules(gguf, origin_by_tensor)
    if modules_by_format:
        config |= {"quantization_config": {"quant_method": "gguf", "modules": modules_by_format}}
    config |= {FILE_FORMAT: file_format(Metadata(gguf.metadata), gguf.tensors)}
    texts = tokenizer_files(gguf.metadata) | {"config.json": json.dumps(config, indent=1)}
    return texts, sorted({tensor.file for tensor in gguf.tensors.values()})


def describe(gguf: GgufFile) -> tuple[dict[str, Any], dict[str, Origin]]:
    """config.json, and the origin of each checkpoint tensor in the GGUF file."""
    shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
    config = hf_config(gguf.metadata, shapes, lambda name: gguf.tensors[name].read())
    return config, origins(gguf.metadata["general.architecture"], shapes, config)


def group_modules(gguf: GgufFile, origin_by_tensor: Mapping[str, Origin]) -> dict[str, list[str]]:
    """The modules whose matrices keep their GGUF codes, by format."""
    modules_by_format: dict[str, list[str]] = {}
    for name, origin in origin_by_tensor.items():
        kinds = {KEPT.get(gguf.tensors[origin_part.name].kind.name) for origin_part in origin.parts}
        kind = (
            kinds.pop()
            if len(kinds) == 1 and origin.transform is None and len(origin.shape) == 2
            else None
        )
        if kind is not None and name.endswith(".weight"):
            modules_by_format.setdefault(kind, []).append(name.removesuffix(".weight"))
    return modules_by_format


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file (or its first part) that a folder was made from; None for other folders."""
    if any(folder.glob("*.safetensors")):
        return None
    return min(folder.glob("*.gguf"), default=None)
