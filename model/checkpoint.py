"""Weights from a safetensors folder, one tensor at a time; orbax checkpoints of Quire's own."""

import importlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..sharding.spec import ArraySpec
from .config import ModelConfig, ModelError
from .families import FAMILIES
from .weights import ModelWeights, abstract

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64,
    "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
MAX_HEADER = 100 << 20
FP8_BLOCK = 128  # side of the square that shares a scale; `Keys.quantization` admits no other


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies on disk."""

    file: Path
    dtype: Any
    shape: tuple[int, ...]
    start: int

    def read(self) -> np.ndarray:
        """The tensor, read and not mapped: mapped pages would count twice while the model is loading."""
        with open(self.file, "rb", buffering=0) as file:
            file.seek(self.start)
            flat = np.fromfile(file, self.dtype, math.prod(self.shape))
        return flat.reshape(self.shape)


def family_of(hf: dict) -> Any:
    """The module of the family that a config.json names."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(f"model type {kind!r} is not supported; supported are {', '.join(sorted(FAMILIES))}")
    return importlib.import_module(FAMILIES[kind], f"{__package__}.families")


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model folder holds config.json and *.safetensors") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def read_config(folder: Path, dtype: str = "auto", max_len: int | None = None) -> ModelConfig:
    """The `ModelConfig` of a folder; `dtype` overrides what the checkpoint says."""
    hf = read_json(folder / "config.json")
    try:
        config = family_of(hf).config(hf, max_len)
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{folder / 'config.json'} holds a value of the wrong kind: {error}") from error
    if dtype == "auto":
        # float16 overflows where bfloat16 does not; its weights fit float32 exactly, at twice the memory
        dtype = "bfloat16" if config.dtype == "float16" else config.dtype
    if dtype not in ("float32", "bfloat16"):
        raise ModelError(f"dtype is {dtype!r}; it can be auto, float32 or bfloat16")
    return replace(config, dtype=dtype)


def find_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, from their headers alone."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if any("/" in name or "\\" in name for name in names):
            raise ModelError(f"{index} names a file outside its folder")
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ModelError(f"{folder} holds no *.safetensors; other weight files are not read")
    tensors = {}
    for name in names:
        tensors |= read_header(folder / name)
    return tensors


def read_header(path: Path) -> dict[str, Tensor]:
    """The table of a safetensors file, each entry checked against the file's size."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise ModelError(f"{path} is truncated or not a safetensors file: its header would need {length} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} has a damaged header: {error}") from None
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(int(n) for n in entry["shape"])
            start, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ModelError(f"{path}: the entry of tensor {name!r} is not understood: {entry!r}") from None
        if min((*shape, start), default=0) < 0 or end - start != math.prod(shape) * dtype.itemsize:
            raise ModelError(f"{path}: tensor {name!r} claims {end - start} bytes for shape {list(shape)}")
        if 8 + length + end > size:
            raise ModelError(f"{path} is truncated: tensor {name!r} ends at byte {8 + length + end} of {size}")
        tensors[name] = Tensor(path, dtype, shape, 8 + length + start)
    return tensors


def load_weights(
    folder: Path, config: ModelConfig, put: Callable = jnp.asarray, progress: Callable[[int], None] = lambda n: None
) -> ModelWeights:
    """The weight tree of a folder. `put` places a finished leaf; `progress` is told of bytes as they are placed."""
    family = importlib.import_module(FAMILIES[config.family], f"{__package__}.families")
    tensors, specs, sources = find_tensors(folder), abstract(config), family.sources(config)
    if canonical := getattr(family, "canonical", None):
        tensors = {canonical(name): tensor for name, tensor in tensors.items()}
    used: set[str] = set()

    def load(spec: ArraySpec, source):
        leaf = np.empty(spec.shape, spec.dtype)
        for part in source.found_in(tensors):
            used.add(part.name)
            if part.name not in tensors:
                raise ModelError(f"{folder} lacks the tensor {part.name!r}")
            tensor = tensors[part.name]
            if tensor.shape != part.shape:
                raise ModelError(
                    f"tensor {part.name!r} has shape {list(tensor.shape)}; config.json wants {list(part.shape)}"
                )
            value = tensor.read()
            if (scales := f"{part.name}_scale_inv") in tensors:
                used.add(scales)
                value = scale_blocks(value, tensors[scales].read(), scales)
            leaf[part.at] = part.turn(value)
        progress(leaf.nbytes)
        return put(leaf)

    weights = jax.tree.map(load, specs, sources)
    ignored = getattr(family, "ignored", lambda name, config: False)
    extra = [n for n in tensors if n not in used and not n.endswith("rotary_emb.inv_freq") and not ignored(n, config)]
    if config.tied:
        extra = [name for name in extra if name != "lm_head.weight"]
    if extra:
        raise ModelError(f"{folder} holds the tensor {sorted(extra)[0]!r}, which {config.family} models do not have")
    return weights


def scale_blocks(value: np.ndarray, scale: np.ndarray, name: str) -> np.ndarray:
    """An 8-bit float matrix in float32, each block of 128 by 128 times its scale."""
    if value.ndim != 2 or scale.shape != tuple(-(-size // FP8_BLOCK) for size in value.shape):
        raise ModelError(f"tensor {name!r} has shape {list(scale.shape)}; it must hold one scale a block of 128 x 128")
    rows, columns = value.shape
    scale = scale.astype(np.float32).repeat(FP8_BLOCK, 0)[:rows].repeat(FP8_BLOCK, 1)[:, :columns]
    return value.astype(np.float32) * scale
