"""bitsandbytes checkpoints as transformers saves them: 4-bit blocks (nf4, fp4) or int8 by output.

4 bits: a matrix is one row of codes, two in a byte with the first in the high half; `blocksize`
codes share a scale. Other values are JSON in a byte tensor. With double quantisation the scales are
codes.

    weight                                  uint8 [out * in / 2, 1], or a wider type
    weight.absmax                           float32 [blocks], or uint8
    weight.quant_map                        float32 [16]: what codes stand for
    weight.quant_map                        float32 [16]: codebook
    weight.quant_state.bitsandbytes__nf4    JSON: quant_type, blocksize, dtype, shape,
                                            nested_blocksize, nested_offset

8 bits: `weight` int8 [out, in] and `SCB` float32 [out], the absolute maximum of each output:
weight = code * SCB / 127. Activations are not quantised here; bitsandbytes quantises their inliers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....ops.quant import Rounded, four_bits
from ....ops.quant.compressed import Layout
from ....ops.quant.grouped import CODES, Grouped, nearest
from ....ops.quant.nf4 import GROUP
from ...config import ModelError
from ...stored_format import StoredFormat, StoredGroup
from ..safetensors import Tensor
from .keys import CONFIG_KEY, checked_entries, checked_patterns, unsupported_value
from .matrix import LargestValue, Matrix, MatrixTensors, check, pop_tensors, quantize_dense

KINDS = ("nf4", "fp4")
KEYS = {
    "quant_method": ("bitsandbytes",),
    "load_in_4bit": (True, False),
    "load_in_8bit": (True, False),
    "_load_in_4bit": (True, False),
    "_load_in_8bit": (True, False),
    "bnb_4bit_quant_type": KINDS,
    "bnb_4bit_use_double_quant": ...,
    "bnb_4bit_compute_dtype": ...,
    "bnb_4bit_quant_storage": ...,
    "llm_int8_threshold": ...,
    "llm_int8_skip_modules": ...,
    "llm_int8_enable_fp32_cpu_offload": ...,
    "llm_int8_has_fp16_weight": (False,),
}
SCALES = ".weight.absmax"
NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
NESTED_BLOCK = 256  # scales that share a second-level scale, as written
JSON = 192  # bytes of the JSON, as written
LARGEST = 1 << 16  # limit of a block's size; bitsandbytes has at most 4,096
STORAGE = ("uint8", "int8", "bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class State:
    """The quantisation state in a 4-bit matrix's JSON."""

    shape: tuple[int, int]
    block: int
    nested: int | None  # scales that share a second-level scale; None: scales are not quantised
    offset: float


@dataclass(frozen=True)
class FourBits(Matrix):
    state: State

    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(codes in one row, scale of each block, codebook)."""
        count = math.prod(self.shape)
        data = np.ascontiguousarray(self.tensors[".weight"].read()).reshape(-1).view(np.uint8)
        codes = np.stack([data >> 4, data & 15], -1).reshape(-1)[:count]
        codebook = self.tensors[".weight.quant_map"].read()
        if not np.isfinite(codebook).all():
            raise ModelError(
                f"tensor {self.tensors['.weight.quant_map'].name!r} holds a value that is not "
                "finite"
            )
        return codes, self.finite(self.absmax()), codebook

    def absmax(self) -> np.ndarray:
        """The scale of each block."""
        scale = self.tensors[SCALES].read()
        if self.state.nested is None:
            return scale
        block_scales, codebook = (self.tensors[ending].read() for ending in NESTED)
        scales = codebook[scale] * block_scales.repeat(self.state.nested)[: len(scale)]
        return scales + np.float32(self.state.offset)

    def read(self) -> np.ndarray:
        codes, scale, codebook = self.unpacked()
        return (codebook[codes] * scale.repeat(self.state.block)[: len(codes)]).reshape(self.shape)

    def fields_for(self, node: Rounded) -> dict[str, np.ndarray]:
        codes, scale, codebook = self.unpacked()
        rows, columns = self.shape
        block = self.state.block
        if columns % block or block % GROUP:
            raise ModelError(
                f"tensor {self.name!r} has blocks of {block} in rows of {columns}; it must be "
                f"{GROUP}, or several such that fill a row"
            )
        kind = self.group.form
        assert isinstance(kind, str)
        table = CODES[kind].numbers
        if not np.allclose(codebook, table / table.max(), rtol=1e-6, atol=0):
            name = self.tensors[".weight.quant_map"].name
            raise ModelError(f"tensor {name!r} holds another codebook than that of {kind.upper()}")
        group_scales = (scale / table.max()).repeat(block // GROUP)
        return {"codes": codes.reshape(rows, columns), "scale": group_scales.reshape(rows, -1)}

    @property
    def scales(self) -> str:
        return self.tensors[SCALES].name


@dataclass(frozen=True)
class Bytes(Matrix):
    def fields(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            "codes": arrays[".weight"],
            "scale": arrays[".SCB"].reshape(-1, 1) / np.float32(127),
        }

    @property
    def scales(self) -> str:
        return self.tensors[".SCB"].name


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    settings = checked_entries(CONFIG_KEY, config, KEYS)
    is_4bit, is_8bit = (
        settings.get(f"load_in_{n}bit", settings.get(f"_load_in_{n}bit", False)) for n in (4, 8)
    )
    if is_4bit == is_8bit:
        raise unsupported_value(
            f"{CONFIG_KEY}.load_in_4bit", is_4bit, "true, or load_in_8bit, and one of them false"
        )
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    group = (
        StoredGroup("int8-weights", "bytes") if is_8bit else StoredGroup(kind, kind, multiple=GROUP)
    )
    skipped = checked_patterns(
        f"{CONFIG_KEY}.llm_int8_skip_modules", settings.get("llm_int8_skip_modules", [])
    )
    ignore = ("lm_head", "embed_tokens", *skipped)
    return StoredFormat("bitsandbytes", (group,), ignore, match_substrings=True, rounds_head=False)


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    gathered: dict[str, Any] = dict(tensors)
    (group,) = stored.groups
    marks, read = (
        ((".SCB", ".weight_format"), int8_matrix)
        if group.form == "bytes"
        else ((SCALES,), four_bit_matrix)
    )
    marked = {
        name.removesuffix(mark): mark for name in tensors for mark in marks if name.endswith(mark)
    }
    for stem, mark in marked.items():
        gathered[f"{stem}.weight"] = read(stem, mark, gathered, group)
    return gathered


def four_bit_matrix(stem: str, mark: str, gathered: dict[str, Any], group: StoredGroup) -> Matrix:
    """A 4-bit matrix, with the shapes and dtypes of its tensors checked."""
    ending = f".weight.quant_state.bitsandbytes__{group.form}"
    (described,) = pop_tensors(gathered, stem, mark, (ending,)).values()
    state = read_state(described)
    nested = () if state.nested is None else NESTED
    tensors = pop_tensors(gathered, stem, ending, (".weight", SCALES, ".weight.quant_map", *nested))
    count = math.prod(state.shape)
    blocks = -(-count // state.block)
    codes = tensors[".weight"]
    check(codes, STORAGE, codes.shape)
    if math.prod(codes.shape) * codes.dtype.itemsize != -(-count // 2):
        raise ModelError(
            f"tensor {codes.name!r} is {list(codes.shape)} of {codes.dtype.name}; it must be "
            f"{-(-count // 2)} bytes"
        )
    check(tensors[".weight.quant_map"], ("float32",), (16,))
    check(tensors[SCALES], ("float32",) if state.nested is None else ("uint8",), (blocks,))
    if state.nested is not None:
        check(tensors[NESTED[0]], ("float32",), (-(-blocks // state.nested),))
        check(tensors[NESTED[1]], ("float32",), (256,))
    return FourBits(f"{stem}.weight", state.shape, group, tensors, state)


def read_state(tensor: Tensor) -> State:
    """The JSON in a tensor of bytes."""
    if len(tensor.shape) != 1 or tensor.dtype.name != "uint8" or tensor.shape[0] > 1 << 12:
        raise ModelError(
            f"tensor {tensor.name!r} is {list(tensor.shape)} of {tensor.dtype.name}; it must "
            "be JSON"
        )
    try:
        state = json.loads(tensor.read().tobytes())
    except (ValueError, RecursionError):
        raise ModelError(f"tensor {tensor.name!r} holds no JSON") from None
    if not isinstance(state, dict):
        raise ModelError(f"tensor {tensor.name!r} holds no JSON object")

    def fail(key: str, right: str) -> ModelError:
        return ModelError(
            f"tensor {tensor.name!r} says {key} = {state.get(key)!r:.80}; it must be {right}"
        )

    shape = state.get("shape")
    block = state.get("blocksize")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(size) is int and size > 0 for size in shape)
    ):
        raise fail("shape", "two sizes")
    if type(block) is not int or not 0 < block <= LARGEST:
        raise fail("blocksize", f"a whole number up to {LARGEST}")
    if "nested_blocksize" not in state:
        return State((shape[0], shape[1]), block, None, 0.0)
    nested_block = state["nested_blocksize"]
    offset = state.get("nested_offset")
    if type(nested_block) is not int or not 0 < nested_block <= LARGEST:
        raise fail("nested_blocksize", f"a whole number up to {LARGEST}")
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not math.isfinite(offset):
        raise fail("nested_offset", "a finite number")
    return State((shape[0], shape[1]), block, nested_block, float(offset))


def int8_matrix(stem: str, mark: str, gathered: dict[str, Any], group: StoredGroup) -> Matrix:
    """An int8 matrix, with the shapes and dtypes of its tensors checked."""
    tensors = pop_tensors(gathered, stem, mark, (".weight", ".SCB"))
    layout = gathered.pop(f"{stem}.weight_format", None)
    if layout is not None and (math.prod(layout.shape) != 1 or layout.read().reshape(()) != 0):
        raise ModelError(
            f"tensor {layout.name!r} says that the weight lies in tiles; it must be 0, rows"
        )
    codes = tensors[".weight"]
    if len(codes.shape) != 2 or not all(codes.shape):
        raise ModelError(
            f"tensor {codes.name!r} is {list(codes.shape)} of {codes.dtype.name}; it must be a "
            "matrix"
        )
    rows, columns = codes.shape
    check(codes, ("int8",), (rows, columns))
    check(tensors[".SCB"], ("float32",), (rows,))
    return Bytes(f"{stem}.weight", (rows, columns), group, tensors)


WRITES = ("nf4",)


def quantization_config(name: str, ignore: Sequence[str]) -> dict[str, Any]:
    """The config that transformers' BitsAndBytesConfig writes, with double quantisation."""
    spared = [".experts" if module.startswith("re:") else module for module in ignore]
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_quant_type": name,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": spared,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
    }


def layout(name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
    rows, columns = shape
    if columns % GROUP:
        raise ModelError(
            f"tensor {name!r} has {columns} inputs, which do not divide by the block of {GROUP}"
        )
    blocks = rows * columns // GROUP
    return {
        ".weight": (("uint8",), ((rows * columns // 2, 1),)),
        SCALES: (("uint8",), ((blocks,),)),
        ".weight.quant_map": (("float32",), ((16,),)),
        NESTED[0]: (("float32",), ((-(-blocks // NESTED_BLOCK),),)),
        NESTED[1]: (("float32",), ((256,),)),
        f".weight.quant_state.bitsandbytes__{group.form}": (("uint8",), ((JSON,),)),
    }


def round_matrix(value: np.ndarray, group: StoredGroup, largest: LargestValue) -> MatrixTensors:
    """Quantise with exact scales, then quantise the scales, less their mean, to 8 bits."""
    node = quantize_dense(value, group)
    kind = group.form
    assert isinstance(node, Grouped) and isinstance(kind, str)
    codes = four_bits.split(node.codes, value.shape[1]).T.reshape(-1)
    scale = np.ascontiguousarray(node.scale.T).reshape(-1)
    offset = scale.mean(dtype=np.float32)
    numbers = dynamic_map()
    centred_scales = np.pad(scale - offset, (0, -len(scale) % NESTED_BLOCK)).reshape(
        -1, NESTED_BLOCK
    )
    block_scales = np.abs(centred_scales).max(1)
    exact = np.divide(
        centred_scales,
        block_scales[:, None],
        out=np.zeros_like(centred_scales),
        where=block_scales[:, None] > 0,
    )
    state = {
        "quant_type": kind,
        "blocksize": GROUP,
        "dtype": value.dtype.name,
        "shape": value.shape,
        "nested_blocksize": NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": float(offset),
    }
    text = json.dumps(state)
    assert len(text) <= JSON, text
    return {
        ".weight": (codes[::2] << 4 | codes[1::2])[:, None],
        SCALES: nearest(numbers, exact).reshape(-1)[: len(scale)],
        ".weight.quant_map": CODES[kind].numbers,
        NESTED[0]: block_scales,
        NESTED[1]: numbers,
        f".weight.quant_state.bitsandbytes__{kind}": np.frombuffer(
            text.encode().ljust(JSON), np.uint8
        ),
    }


def dynamic_map() -> np.ndarray:
    """The 8-bit codebook of bitsandbytes (arXiv 1511.04561).

    Each decade from 1e-6 to 1 has twice as many values as the one below, at midpoints of even
    steps; 0 and 1 are added. Steps are counted from both ends, with one rounding each, as
    torch.linspace does: the last bits match.
    """
    values = [0.0, 1.0]
    first = np.float32(0.1)
    last = np.float32(1)
    for power in range(7):
        count = 1 << power
        step = np.float64((last - first) / np.float32(count))
        at = np.arange(count + 1)
        boundaries = np.where(
            at < (count + 1) // 2, first + step * at, last - step * (count - at)
        ).astype(np.float32)
        means = (boundaries[:-1] + boundaries[1:]) / np.float32(2) * np.float32(10.0 ** (power - 6))
        values += [*means, *-means]
    return np.sort(np.array(values, np.float32))
