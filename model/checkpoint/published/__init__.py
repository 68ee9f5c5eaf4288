"""Quantised checkpoints as they are published: for each quant_method a module that reads its config and its tensors."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from ...stored_format import StoredFormat
from ..folder import read_json
from ..safetensors import Tensor
from .matrix import Matrix
from .modelopt import SIDE_FILE

METHODS = {
    "compressed-tensors": ".compressed_tensors",
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
}


class Method(Protocol):
    """A module of this package."""

    def stored_format(self, config: Mapping[str, Any]) -> StoredFormat:
        """How the matrices are kept, as quantization_config says; what is not understood is an error."""
        ...

    def gather(self, tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
        """The tensors of a checkpoint with each quantised matrix as one, under the name that it would have dense."""
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
    return dict(tensors) if stored is None else module_of(stored.method).gather(tensors, stored)


def module_of(method: str) -> Method:
    return cast(Method, importlib.import_module(METHODS[method], __name__))
