"""Quantised checkpoints as they are published: for each quant_method a module that reads its config and its tensors.

Those in `LAYOUTS` write them too.
"""

import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from ....ops import quant
from ....ops.quant import Rounded
from ....ops.quant.compressed import Layout
from ...config import ModelError
from ...stored_format import StoredFormat, StoredGroup
from ..folder import read_json
from ..safetensors import Tensor
from . import compressed_tensors
from .keys import MEASURED
from .matrix import Largest, Matrix, Parts
from .modelopt import SIDE_FILE

METHODS = {
    "compressed-tensors": ".compressed_tensors",
    "quire": ".compressed_tensors",
    "awq": ".awq",
    "gptq": ".gptq",
    "fp8": ".fp8",
    "fbgemm_fp8": ".fp8",
    "gguf": ".gguf",
    "bitsandbytes": ".bitsandbytes",
    "auto-round": ".auto_round",
    "intel/auto-round": ".auto_round",
    "auto_round": ".auto_round",
    "hqq": ".hqq",
    "modelopt": ".modelopt",
    "modelopt_fp4": ".modelopt",
    "torchao": ".torchao",
}

LAYOUTS = ("compressed-tensors", "gptq", "awq", "fp8", "bitsandbytes")  # those of METHODS whose modules are a `Writer`
log = logging.getLogger("quire")


class Method(Protocol):
    """A module of this package."""

    def stored_format(self, config: Mapping[str, Any]) -> StoredFormat:
        """How the matrices are kept, as quantization_config says; what is not understood is an error."""
        ...

    def gather(self, tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
        """The tensors of a checkpoint with each quantised matrix as one, under the name that it would have dense."""
        ...


class Writer(Method, Protocol):
    """A module that writes such checkpoints too."""

    WRITES: Sequence[str]  # the formats whose codes it has a form for, by their names with all options

    def quantization_config(self, name: str, ignore: Sequence[str]) -> dict[str, Any]:
        """What `stored_format` reads: all linear modules in one format, but those that are to be ignored."""
        ...

    def layout(self, name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
        """The tensors of a matrix [out, in]; `name` is for the error where the format can keep none of this shape."""
        ...

    def round_matrix(self, value: np.ndarray, group: StoredGroup, largest: Largest) -> Parts:
        """The tensors of a dense matrix [out, in]."""
        ...


class CodesWriter(Writer, Protocol):
    """One that has formats of whole numbers, whose codes a method may choose."""

    def parts(self, node: Rounded, group: StoredGroup) -> Parts:
        """The tensors of a node with one axis in and one out."""
        ...


def described(folder: Path, hf: dict[str, Any]) -> dict[str, Any]:
    """config.json with what Model Optimizer says in a file of its own, where config.json does not say it."""
    file = folder / SIDE_FILE
    if "quantization_config" in hf or not file.exists():
        return hf
    return hf | {"quantization_config": {"quant_method": "modelopt"} | read_json(file)}


def split(hf: dict[str, Any]) -> tuple[dict[str, Any], StoredFormat | None]:
    """What a family reads of a config.json, and how the matrices are kept, where a module of this package knows."""
    config = hf.get("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        return hf, None
    rest = {name: value for name, value in hf.items() if name != "quantization_config"}
    return rest, module_of(method).stored_format(config)


def gather(tensors: dict[str, Tensor], stored: StoredFormat | None) -> dict[str, Tensor | Matrix]:
    """The tensors of a checkpoint, those of a quantised matrix as one."""
    if stored is None:
        return dict(tensors)
    if found := sorted({name.rpartition(".")[2] for name in tensors if name.endswith(MEASURED)}):
        unused = "%s of the checkpoint: not used, since each row and each cached position has a scale of its own"
        log.info(unused, ", ".join(found))
    return module_of(stored.method).gather(tensors, stored)


def module_of(method: str) -> Method:
    return cast(Method, importlib.import_module(METHODS[method], __name__))


def writer_of(layout: str) -> Writer:
    """The module that writes a layout."""
    if layout not in LAYOUTS:
        raise ModelError(f"layout is {layout!r}; it can be {', '.join(LAYOUTS)} or gguf")
    return cast(Writer, module_of(layout))


def writer_for(stored: StoredFormat) -> Writer:
    """The module that writes what is described so."""
    return cast(Writer, module_of(stored.method))


def described_as(layout: str, name: str, ignore: Sequence[str]) -> dict[str, Any]:
    """quantization_config of a checkpoint in a layout whose matrices are kept in a format."""
    writer = writer_of(layout)
    if (found := own_name(writer, name)) is None:
        others = [other for other in LAYOUTS if own_name(writer_of(other), name) is not None]
        remedy = f"which layout {' or '.join(others)} has" if others else "which can be used while loading"
        raise ModelError(
            f"layout is {layout!r}, which has {', '.join(writer.WRITES)}; quantization is {name!r}, {remedy}"
        )
    return writer.quantization_config(found, ignore)


def own_name(writer: Writer, name: str) -> str | None:
    """A format by the name that says all its options, where a writer has a form for it."""
    return next((own for own in writer.WRITES if quant.example(own) == quant.example(name)), None)


def mixed_as(modules: Mapping[str, Sequence[str]], ignore: Sequence[str]) -> dict[str, Any]:
    """The same where these modules are in a format each; compressed-tensors has a layout for it."""
    return compressed_tensors.mixed_config(modules, ignore)


def round_matrix(value: np.ndarray, stored: StoredFormat, group: StoredGroup, largest: Largest) -> Parts:
    """The tensors of a dense matrix [out, in]."""
    return writer_for(stored).round_matrix(value, group, largest)
