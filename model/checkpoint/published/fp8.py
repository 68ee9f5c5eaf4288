"""FP8 checkpoints: E4M3 values with a scale for a matrix, an output, or a block of 128 by 128.

quant_method is `fp8`, as DeepSeek and Qwen write it, or `fbgemm_fp8`. Static activation scales are
not used: dynamic scales for each token are more accurate.

    weight            float8_e4m3fn [out, in]
    weight_scale      scalar, [out], [out, 1] or [out / 128, in / 128]; in blocks: weight_scale_inv
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....ops.quant.compressed import Layout
from ....ops.quant.fp8 import E4M3, LIMIT, check_finite
from ...config import ModelError
from ...stored_format import StoredFormat, StoredGroup
from ..safetensors import Tensor
from .keys import CONFIG_KEY, STATIC_SCALES, checked_entries, checked_patterns
from .matrix import LargestValue, Matrix, MatrixTensors, check

SIDE = 128  # side of a block
KEYS = {
    "quant_method": ("fp8", "fbgemm_fp8"),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "scale_fmt": ("ue8m0", "float"),
    "activation_scheme": ("dynamic", "static"),
    "weight_block_size": ([SIDE, SIDE],),
    "modules_to_not_convert": ...,
    "ignored_layers": ...,
    "activation_scale_ub": ...,
    "dequantize": (False,),
    "kv_cache_scheme": ...,
    "kv_cache_quant_method": ...,
}
SCALES = (".weight_scale_inv", ".weight_scale")
FLOATS = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


@dataclass(frozen=True)
class Fp8Matrix(Matrix):
    def fields(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        codes, scale = arrays.values()
        rows, columns = self.shape
        return {
            "codes": check_finite(codes),
            "scale": broadcast_scales(scale.astype(np.float32), rows, columns),
        }


def broadcast_scales(scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Broadcast the scales of a matrix, output or block to [rows, groups]."""
    if scale.ndim == 2 and scale.shape[0] == -(-rows // SIDE) != rows:
        return scale.repeat(SIDE, 0)[:rows]
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(1, 1), (rows, 1))
    return scale.reshape(rows, -1)


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    settings = checked_entries(CONFIG_KEY, config, KEYS)
    ignore = settings.get("modules_to_not_convert", []), settings.get("ignored_layers", [])
    ignored_names = [
        name
        for key, names in zip(("modules_to_not_convert", "ignored_layers"), ignore, strict=True)
        for name in checked_patterns(f"{CONFIG_KEY}.{key}", names)
    ]
    blocks = "weight_block_size" in settings
    group = StoredGroup("fp8-weights-128" if blocks else "fp8", "blocks" if blocks else "outputs")
    return StoredFormat(
        settings["quant_method"],
        (group,),
        ("lm_head", "embed_tokens", *ignored_names),
        match_substrings=True,
        rounds_head=False,
    )


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    gathered: dict[str, Any] = {
        name: tensor for name, tensor in tensors.items() if not name.endswith(STATIC_SCALES)
    }
    for scales in [name for name in gathered if name.endswith(SCALES)]:
        stem, _, ending = scales.rpartition(".")
        if f"{stem}.weight" not in gathered:
            raise ModelError(
                f"the checkpoint lacks the tensor {stem + '.weight'!r}, which {scales!r} needs"
            )
        matrix_tensors = {
            ".weight": gathered.pop(f"{stem}.weight"),
            f".{ending}": gathered.pop(scales),
        }
        gathered[f"{stem}.weight"] = matrix(stem, matrix_tensors, stored.groups[0])
    return gathered


def matrix(stem: str, tensors: dict[str, Tensor], group: StoredGroup) -> Matrix:
    """One matrix, with the shapes and dtypes of its tensors check_finite."""
    codes, scale = tensors.values()
    if len(codes.shape) != 2 or not all(codes.shape):
        raise ModelError(
            f"tensor {codes.name!r} is {list(codes.shape)} of {codes.dtype.name}; it must be a "
            "matrix"
        )
    rows, columns = codes.shape
    check(codes, ("float8_e4m3fn",), (rows, columns))
    blocks = -(-rows // SIDE), -(-columns // SIDE)
    if group.form == "blocks" and scale.shape == blocks:
        return Fp8Matrix(f"{stem}.weight", (rows, columns), group, tensors)
    check(
        scale,
        FLOATS,
        *([blocks] if group.form == "blocks" else [(), (1,), (1, 1), (rows,), (rows, 1)]),
    )
    return Fp8Matrix(f"{stem}.weight", (rows, columns), group, tensors)


WRITES = ("fp8-weights-128",)


def quantization_config(name: str, ignore: Sequence[str]) -> dict[str, Any]:
    """The config of DeepSeek and Qwen, which ignores modules by name."""
    spared = [".experts" if module.startswith("re:") else module for module in ignore]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SIDE, SIDE],
        "modules_to_not_convert": spared,
    }


def layout(name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
    rows, columns = shape
    blocks = -(-rows // SIDE), -(-columns // SIDE)
    return {
        ".weight": (("float8_e4m3fn",), ((rows, columns),)),
        ".weight_scale_inv": (("float32",), (blocks,)),
    }


def round_matrix(value: np.ndarray, group: StoredGroup, largest: LargestValue) -> MatrixTensors:
    """Map each block's maximum to 448 and round to nearest."""
    rows, columns = value.shape
    padded = np.pad(value.astype(np.float32), ((0, -rows % SIDE), (0, -columns % SIDE)))
    blocks = padded.reshape(padded.shape[0] // SIDE, SIDE, -1, SIDE)
    scale = np.abs(blocks).max((1, 3)) / np.float32(LIMIT)
    block_scale = scale[:, None, :, None]
    exact = np.divide(blocks, block_scale, out=np.zeros_like(blocks), where=block_scale > 0)
    codes = np.clip(exact, -LIMIT, LIMIT).astype(E4M3).reshape(padded.shape)[:rows, :columns]
    return {".weight": codes, ".weight_scale_inv": scale}
