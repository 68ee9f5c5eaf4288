"""Published quantised checkpoints: a module for each quant_method reads its config and tensors.

The modules in `LAYOUTS` can write checkpoints too.
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
from .keys import STATIC_SCALES
from .matrix import LargestValue, Matrix, MatrixTensors
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

LAYOUTS = ("compressed-tensors", "gptq", "awq", "fp8", "bitsandbytes")  # methods with a `Writer`
log = logging.getLogger("quire")


class Method(Protocol):
    """The interface of a module that reads one method's checkpoints."""

    def stored_format(self, config: Mapping[str, Any]) -> StoredFormat:
        """Parse quantization_config; anything unsupported is an error."""
        ...

    def gather(
        self, tensors: dict[str, Tensor], stored: StoredFormat
    ) -> dict[str, Tensor | Matrix]:
        """Replace the tensors of each quantised matrix by one `Matrix` under its dense name."""
        ...


class Writer(Method, Protocol):
    """The interface of a module that also writes checkpoints."""

    WRITES: Sequence[str]  # the formats it can write, by full name

    def quantization_config(self, name: str, ignore: Sequence[str]) -> dict[str, Any]:
        """The config for all linear modules in one format, except those to ignore."""
        ...

    def layout(self, name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
        """The tensors of a matrix [out, in]; reject shapes that cannot be stored."""
        ...

    def round_matrix(
        self, value: np.ndarray, group: StoredGroup, largest: LargestValue
    ) -> MatrixTensors:
        """Quantise a dense matrix [out, in] into the layout's tensors."""
        ...


class CodesWriter(Writer, Protocol):
    """A writer of integer formats, whose codes a calibration method may choose."""

    def parts(self, node: Rounded, group: StoredGroup) -> MatrixTensors:
        """The tensors of a node with one input and one output axis."""
        ...


def add_side_config(folder: Path, hf: dict[str, Any]) -> dict[str, Any]:
    """Add Model Optimizer's side file to a config.json without quantization_config."""
    file = folder / SIDE_FILE
    if "quantization_config" in hf or not file.exists():
        return hf
    return hf | {"quantization_config": {"quant_method": "modelopt"} | read_json(file)}


def split_quantization(hf: dict[str, Any]) -> tuple[dict[str, Any], StoredFormat | None]:
    """config.json without quantization_config, and the parsed format if the method is supported."""
    config = hf.get("quantization_config")
    if not isinstance(config, dict):
        return hf, None
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        return hf, None
    remaining = {name: value for name, value in hf.items() if name != "quantization_config"}
    return remaining, method_module(method).stored_format(config)


def gather(tensors: dict[str, Tensor], stored: StoredFormat | None) -> dict[str, Tensor | Matrix]:
    """The tensors of a checkpoint, with each quantised matrix as one `Matrix`."""
    if stored is None:
        return dict(tensors)
    if endings := sorted(
        {name.rpartition(".")[2] for name in tensors if name.endswith(STATIC_SCALES)}
    ):
        unused = (
            "%s of the checkpoint: not used, since scales of activations and the KV cache are "
            "dynamic"
        )
        log.info(unused, ", ".join(endings))
    return method_module(stored.method).gather(tensors, stored)


def method_module(method: str) -> Method:
    return cast(Method, importlib.import_module(METHODS[method], __name__))


def writer_for_layout(layout: str) -> Writer:
    """The module that writes a layout."""
    if layout not in LAYOUTS:
        raise ModelError(f"layout is {layout!r}; it can be {', '.join(LAYOUTS)} or gguf")
    return cast(Writer, method_module(layout))


def writer_for_format(stored: StoredFormat) -> Writer:
    """The module that writes a stored format."""
    return cast(Writer, method_module(stored.method))


def make_quantization_config(layout: str, name: str, ignore: Sequence[str]) -> dict[str, Any]:
    """The quantization_config of a checkpoint in one layout and format."""
    writer = writer_for_layout(layout)
    if (full_name := supported_name(writer, name)) is None:
        layouts = [
            candidate
            for candidate in LAYOUTS
            if supported_name(writer_for_layout(candidate), name) is not None
        ]
        remedy = (
            f"which layout {' or '.join(layouts)} has"
            if layouts
            else "which can be used while loading"
        )
        raise ModelError(
            f"layout is {layout!r}, which has {', '.join(writer.WRITES)}; quantization is "
            f"{name!r}, {remedy}"
        )
    return writer.quantization_config(full_name, ignore)


def supported_name(writer: Writer, name: str) -> str | None:
    """A format's full name, if the writer supports it."""
    return next(
        (
            candidate
            for candidate in writer.WRITES
            if quant.example(candidate) == quant.example(name)
        ),
        None,
    )


def make_mixed_config(
    modules: Mapping[str, Sequence[str]], ignore: Sequence[str]
) -> dict[str, Any]:
    """A quantization_config with several formats, which only compressed-tensors supports."""
    return compressed_tensors.mixed_config(modules, ignore)


def round_matrix(
    value: np.ndarray, stored: StoredFormat, group: StoredGroup, largest: LargestValue
) -> MatrixTensors:
    """Quantise a dense matrix [out, in] into the layout's tensors."""
    return writer_for_format(stored).round_matrix(value, group, largest)
