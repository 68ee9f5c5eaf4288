"""Checkpoints of bitsandbytes as transformers saves them: four bits by a table in blocks, or signed bytes by output.

Four bits: a matrix is one row of codes, two a byte, the first in the high half; `blocksize` of them share a scale. What
is not a tensor is JSON in a tensor of bytes. With double quantisation the scales are codes too.

    weight                                  uint8 [out * in / 2, 1], or as many bytes of a wider type
    weight.absmax                           float32 [blocks], or uint8
    weight.quant_map                        float32 [16]: what codes stand for
    weight.nested_absmax, .nested_quant_map  float32 [blocks / nested_blocksize], [256]
    weight.quant_state.bitsandbytes__nf4    JSON: quant_type, blocksize, dtype, shape, nested_blocksize, nested_offset

Eight bits: `weight` int8 [out, in] and `SCB` float32 [out], the largest of each output: weight = code * SCB / 127.
Rows stay as they are, where bitsandbytes rounds them all but for their outliers.
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
from .keys import HERE, known, patterns, refusal
from .matrix import Largest, Matrix, Parts, check, rounded, take

KINDS = ("nf4", "fp4")
KEYS = {
    "quant_method": ("bitsandbytes",), "load_in_4bit": (True, False), "load_in_8bit": (True, False),
    "_load_in_4bit": (True, False), "_load_in_8bit": (True, False), "bnb_4bit_quant_type": KINDS,
    "bnb_4bit_use_double_quant": ..., "bnb_4bit_compute_dtype": ..., "bnb_4bit_quant_storage": ...,
    "llm_int8_threshold": ..., "llm_int8_skip_modules": ..., "llm_int8_enable_fp32_cpu_offload": ...,
    "llm_int8_has_fp16_weight": (False,),
}  # fmt: skip
SCALES = ".weight.absmax"
NESTED = (".weight.nested_absmax", ".weight.nested_quant_map")
NESTED_BLOCK, JSON = 256, 192  # scales that share one, and bytes of the JSON, of what is written
LARGEST = 1 << 16  # numbers of a block; it has 4,096 at most
STORAGE = ("uint8", "int8", "bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class State:
    """What the JSON of a matrix of four bits says."""

    shape: tuple[int, int]
    block: int
    nested: int | None  # scales that share one, where they are codes
    offset: float


@dataclass(frozen=True)
class FourBits(Matrix):
    state: State

    def unpacked(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The codes in one row, the scale of each block, and what codes stand for."""
        count = math.prod(self.shape)
        data = np.ascontiguousarray(self.tensors[".weight"].read()).reshape(-1).view(np.uint8)
        codes = np.stack([data >> 4, data & 15], -1).reshape(-1)[:count]
        numbers = self.tensors[".weight.quant_map"].read()
        if not np.isfinite(numbers).all():
            raise ModelError(f"tensor {self.tensors['.weight.quant_map'].name!r} holds what is no finite number")
        return codes, self.finite(self.absmax()), numbers

    def absmax(self) -> np.ndarray:
        """The scale of each block."""
        scale = self.tensors[SCALES].read()
        if self.state.nested is None:
            return scale
        above, numbers = (self.tensors[ending].read() for ending in NESTED)
        wide = numbers[scale] * above.repeat(self.state.nested)[: len(scale)]
        return wide + np.float32(self.state.offset)

    def read(self) -> np.ndarray:
        codes, scale, numbers = self.unpacked()
        return (numbers[codes] * scale.repeat(self.state.block)[: len(codes)]).reshape(self.shape)

    def fields_for(self, node: Rounded) -> dict[str, np.ndarray]:
        codes, scale, numbers = self.unpacked()
        (rows, columns), block = self.shape, self.state.block
        if columns % block or block % GROUP:
            raise ModelError(
                f"tensor {self.name!r} has blocks of {block} in rows of {columns}; it must be {GROUP}, or several such "
                "that fill a row"
            )
        kind = self.group.form
        table = CODES[kind].numbers
        if not np.allclose(numbers, table / table.max(), rtol=1e-6, atol=0):
            name = self.tensors[".weight.quant_map"].name
            raise ModelError(f"tensor {name!r} holds other numbers than those of {kind.upper()}")
        each = (scale / table.max()).repeat(block // GROUP)
        return {"codes": codes.reshape(rows, columns), "scale": each.reshape(rows, -1)}

    @property
    def scales(self) -> str:
        return self.tensors[SCALES].name


@dataclass(frozen=True)
class Bytes(Matrix):
    def fields(self, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"codes": parts[".weight"], "scale": parts[".SCB"].reshape(-1, 1) / np.float32(127)}

    @property
    def scales(self) -> str:
        return self.tensors[".SCB"].name


def stored_format(config: Mapping[str, Any]) -> StoredFormat:
    said = known(HERE, config, KEYS)
    four, eight = (said.get(f"load_in_{n}bit", said.get(f"_load_in_{n}bit", False)) for n in (4, 8))
    if four == eight:
        raise refusal(f"{HERE}.load_in_4bit", four, "true, or load_in_8bit, and one of them false")
    kind = said.get("bnb_4bit_quant_type", "fp4")
    group = StoredGroup("int8-weights", "bytes") if eight else StoredGroup(kind, kind, multiple=GROUP)
    skipped = patterns(f"{HERE}.llm_int8_skip_modules", said.get("llm_int8_skip_modules", []))
    ignore = ("lm_head", "embed_tokens", *skipped)
    return StoredFormat("bitsandbytes", (group,), ignore, parts=True, rounds_head=False)


def gather(tensors: dict[str, Tensor], stored: StoredFormat) -> dict[str, Tensor | Matrix]:
    found: dict[str, Any] = dict(tensors)
    (group,) = stored.groups
    marks, read = ((".SCB", ".weight_format"), whole_bytes) if group.form == "bytes" else ((SCALES,), four_bits_of)
    marked = {name.removesuffix(mark): mark for name in tensors for mark in marks if name.endswith(mark)}
    for stem, mark in marked.items():
        found[f"{stem}.weight"] = read(stem, mark, found, group)
    return found


def four_bits_of(stem: str, mark: str, found: dict[str, Any], group: StoredGroup) -> Matrix:
    """A matrix of four bits, the shapes and dtypes of its tensors checked."""
    ending = f".weight.quant_state.bitsandbytes__{group.form}"
    (described,) = take(found, stem, mark, (ending,)).values()
    state = read_state(described)
    nested = () if state.nested is None else NESTED
    tensors = take(found, stem, ending, (".weight", SCALES, ".weight.quant_map", *nested))
    count = math.prod(state.shape)
    blocks = -(-count // state.block)
    codes = tensors[".weight"]
    check(codes, STORAGE, codes.shape)
    if math.prod(codes.shape) * codes.dtype.itemsize != -(-count // 2):
        raise ModelError(
            f"tensor {codes.name!r} is {list(codes.shape)} of {codes.dtype.name}; it must be {-(-count // 2)} bytes"
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
        raise ModelError(f"tensor {tensor.name!r} is {list(tensor.shape)} of {tensor.dtype.name}; it must be JSON")
    try:
        said = json.loads(tensor.read().tobytes())
    except (ValueError, RecursionError):
        raise ModelError(f"tensor {tensor.name!r} holds no JSON") from None
    if not isinstance(said, dict):
        raise ModelError(f"tensor {tensor.name!r} holds no JSON object")

    def fail(key: str, right: str) -> ModelError:
        return ModelError(f"tensor {tensor.name!r} says {key} = {said.get(key)!r:.80}; it must be {right}")

    shape, block = said.get("shape"), said.get("blocksize")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise fail("shape", "two sizes")
    if type(block) is not int or not 0 < block <= LARGEST:
        raise fail("blocksize", f"a whole number up to {LARGEST}")
    if "nested_blocksize" not in said:
        return State((shape[0], shape[1]), block, None, 0.0)
    nested, offset = said["nested_blocksize"], said.get("nested_offset")
    if type(nested) is not int or not 0 < nested <= LARGEST:
        raise fail("nested_blocksize", f"a whole number up to {LARGEST}")
    if type(offset) not in (int, float) or not math.isfinite(offset):
        raise fail("nested_offset", "a finite number")
    return State((shape[0], shape[1]), block, nested, float(offset))


def whole_bytes(stem: str, mark: str, found: dict[str, Any], group: StoredGroup) -> Matrix:
    """A matrix of eight bits, the shapes and dtypes of its tensors checked."""
    tensors = take(found, stem, mark, (".weight", ".SCB"))
    layout = found.pop(f"{stem}.weight_format", None)
    if layout is not None and (math.prod(layout.shape) != 1 or layout.read().reshape(()) != 0):
        raise ModelError(f"tensor {layout.name!r} says that the weight lies in tiles; it must be 0, rows")
    codes = tensors[".weight"]
    if len(codes.shape) != 2 or not all(codes.shape):
        raise ModelError(f"tensor {codes.name!r} is {list(codes.shape)} of {codes.dtype.name}; it must be a matrix")
    rows, columns = codes.shape
    check(codes, ("int8",), (rows, columns))
    check(tensors[".SCB"], ("float32",), (rows,))
    return Bytes(f"{stem}.weight", (rows, columns), group, tensors)


WRITES = ("nf4",)


def quantization_config(name: str, ignore: Sequence[str]) -> dict[str, Any]:
    """As transformers' BitsAndBytesConfig has it, with double quantisation."""
    spared = [".experts" if module.startswith("re:") else module for module in ignore]
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True,
        "_load_in_8bit": False, "bnb_4bit_quant_type": name, "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": spared, "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
    }  # fmt: skip


def layout(name: str, group: StoredGroup, shape: tuple[int, ...]) -> Layout:
    rows, columns = shape
    if columns % GROUP:
        raise ModelError(f"tensor {name!r} has {columns} inputs, which do not divide by the block of {GROUP}")
    blocks = rows * columns // GROUP
    return {
        ".weight": (("uint8",), ((rows * columns // 2, 1),)),
        SCALES: (("uint8",), ((blocks,),)),
        ".weight.quant_map": (("float32",), ((16,),)),
        NESTED[0]: (("float32",), ((-(-blocks // NESTED_BLOCK),),)),
        NESTED[1]: (("float32",), ((256,),)),
        f".weight.quant_state.bitsandbytes__{group.form}": (("uint8",), ((JSON,),)),
    }


def round_matrix(value: np.ndarray, group: StoredGroup, largest: Largest) -> Parts:
    """Codes by the exact scales; then the scales, less their mean, become codes of eight bits themselves."""
    node = rounded(value, group)
    assert isinstance(node, Grouped)
    codes = four_bits.split(node.codes, value.shape[1]).T.reshape(-1)
    scale = np.ascontiguousarray(node.scale.T).reshape(-1)
    offset, numbers = scale.mean(dtype=np.float32), dynamic_map()
    rest = np.pad(scale - offset, (0, -len(scale) % NESTED_BLOCK)).reshape(-1, NESTED_BLOCK)
    above = np.abs(rest).max(1)
    exact = np.divide(rest, above[:, None], out=np.zeros_like(rest), where=above[:, None] > 0)
    said = {
        "quant_type": group.form, "blocksize": GROUP, "dtype": value.dtype.name, "shape": value.shape,
        "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(offset),
    }  # fmt: skip
    text = json.dumps(said)
    assert len(text) <= JSON, text
    return {
        ".weight": (codes[::2] << 4 | codes[1::2])[:, None],
        SCALES: nearest(numbers, exact).reshape(-1)[: len(scale)],
        ".weight.quant_map": CODES[group.form].numbers,
        NESTED[0]: above,
        NESTED[1]: numbers,
        f".weight.quant_state.bitsandbytes__{group.form}": np.frombuffer(text.encode().ljust(JSON), np.uint8),
    }


def dynamic_map() -> np.ndarray:
    """The numbers that bitsandbytes' codes of eight bits stand for (arXiv 1511.04561).

    In each power of ten from 1e-6 up to 1 twice as many as in the one below, in the middle of even steps; 0, and 1. The
    steps are counted from both ends, as torch does it, each sum rounded once: so the last bits are theirs.
    """
    found, first, last = [0.0, 1.0], np.float32(0.1), np.float32(1)
    for power in range(7):
        count = 1 << power
        step, at = np.float64((last - first) / np.float32(count)), np.arange(count + 1)
        ends = np.where(at < (count + 1) // 2, first + step * at, last - step * (count - at)).astype(np.float32)
        means = (ends[:-1] + ends[1:]) / np.float32(2) * np.float32(10.0 ** (power - 6))
        found += [*means, *-means]
    return np.sort(np.array(found, np.float32))
