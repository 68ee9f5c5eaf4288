"""A GGUF file as a model folder: config.json and the tokenizer's files from what it says, and links to the weights.

It is made in the cache directory, anew where the file has changed; nothing of the weights is copied.
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
from ..gguf.architectures import config_of
from ..gguf.file import GgufFile, read_file
from ..gguf.file_type import file_format
from ..gguf.metadata import Metadata
from ..gguf.origin import Origin
from ..gguf.tensors import origins
from ..gguf.tokenizer import files_of

FILE_FORMAT = "gguf_file_format"  # the key of config.json for the name of the file's format
PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")  # the end of a part's name

# What each type's codes are kept as, none of them changed; the others are widened.
KEPT = {
    "Q1_0": "int4-128-least", "Q4_0": "int4-32", "Q4_1": "int4-32-least", "IQ4_NL": "iq4", "IQ4_XS": "iq4-levels",
    "MXFP4": "mxfp4",
    "Q8_0": "int8-weights-32", "Q5_0": "int8-weights-32", "Q5_1": "int8-weights-32-least", "Q2_K": "k4-16-least",
    "Q3_K": "k4-16", "Q4_K": "k4-32-least", "Q5_K": "k6-32-least", "Q6_K": "k6-16",
}  # fmt: skip


def folder_of(file: Path) -> Path:
    """The folder of a GGUF file."""
    folder = home() / name_of(file)
    if (folder / "config.json").exists():
        return folder
    texts, files = contents(file)
    cache_folder.remove_stale_parts(folder.parent)
    try:
        with cache_folder.publish(folder) as part:
            part.mkdir()
            for name, text in texts.items():
                (part / name).write_text(text, "utf-8")
            for weights in files:
                (part / weights.name).symlink_to(weights.resolve())
    except OSError as error:
        if not (folder / "config.json").exists():  # else another process was quicker
            raise ModelError(f"{folder} cannot be made: {error.strerror}; XDG_CACHE_HOME names another place") from None
    return folder


def home() -> Path:
    return cache_folder.home("gguf")


def name_of(file: Path) -> str:
    """A name that no other file has, nor this one when it has changed."""
    try:
        status = file.stat()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    of = f"{code()} {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    return f"{file.stem[:80]}-{hashlib.sha256(of.encode()).hexdigest()[:16]}"


@cache
def code() -> str:
    """A digest of what makes folders: those of another version are not used."""
    here = Path(__file__)
    files = [here, *sorted(here.parents[1].joinpath("gguf").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def contents(file: Path) -> tuple[dict[str, str], list[Path]]:
    """The texts of the folder by their names, and the files that the weights lie in."""
    gguf = read_file(file)
    config, where = described(gguf)
    kept = groups(gguf, where)
    if kept:
        config |= {"quantization_config": {"quant_method": "gguf", "modules": kept}}
    config |= {FILE_FORMAT: file_format(Metadata(gguf.metadata), gguf.tensors)}
    texts = files_of(gguf.metadata) | {"config.json": json.dumps(config, indent=1)}
    return texts, sorted({tensor.file for tensor in gguf.tensors.values()})


def described(gguf: GgufFile) -> tuple[dict[str, Any], dict[str, Origin]]:
    """The config.json, and where each tensor of the checkpoint comes from."""
    shapes = {name: tensor.shape for name, tensor in gguf.tensors.items()}
    config = config_of(gguf.metadata, shapes, lambda name: gguf.tensors[name].read())
    return config, origins(gguf.metadata["general.architecture"], shapes, config)


def groups(gguf: GgufFile, where: Mapping[str, Origin]) -> dict[str, list[str]]:
    """The modules whose matrices are kept in their own codes, by the format."""
    found: dict[str, list[str]] = {}
    for name, origin in where.items():
        kinds = {KEPT.get(gguf.tensors[part.name].kind.name) for part in origin.parts}
        kind = kinds.pop() if len(kinds) == 1 and origin.turn is None and len(origin.shape) == 2 else None
        if kind is not None and name.endswith(".weight"):
            found.setdefault(kind, []).append(name.removesuffix(".weight"))
    return found


def weights_of(folder: Path) -> Path | None:
    """The GGUF file that a folder was made of, or its first part; None of any other folder."""
    if any(folder.glob("*.safetensors")):
        return None
    return min(folder.glob("*.gguf"), default=None)
