"""Forms of compressed-tensors beside those that formats say themselves: each is kept in a format that has its codes.

NVFP4     weight_packed uint8 [out, in / 2], weight_scale float8_e4m3fn [out, in / 16], weight_global_scale:
          weight = code * weight_scale / weight_global_scale
MXFP4     weight_packed uint8 [out, in / 2], weight_scale uint8 [out, in / 32]: 127 + the exponent of two
int8      as int4 in groups, four codes plus 128 in a word
int4      with a scale an output
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ....ops import quant
from ....ops.quant import FormatError, Scheme, four_bits, int4, int8
from ....ops.quant.compressed import Layout, join_words, split_words, words
from ....ops.quant.grouped import CODES, nearest

FLOATS = ("float16", "bfloat16", "float32")
FLOAT8, FLOAT4 = 448, 6  # the largest of E4M3 and of E2M1
Parts = dict[str, np.ndarray]


@dataclass(frozen=True)
class Form:
    """How one of them is described, lies in files, and becomes the fields of the format that it is kept in."""

    quant: str
    scheme: Scheme
    layout: Callable[[int, int], Layout]
    fields: Callable[[Parts, int], Parts]
    parts: Callable[[Any], Parts] | None = None  # the tensors of a node, of those that are written
    rounded: Callable[[np.ndarray, float], Parts] | None = None  # or of a matrix [out, in] and the largest value

    @property
    def written(self) -> bool:
        return self.parts is not None or self.rounded is not None


def nvfp4() -> Form:
    def layout(rows: int, columns: int) -> Layout:
        return pairs(rows, columns, 16) | {
            ".weight_scale": (("float8_e4m3fn",), ((rows, columns // 16),)),
            ".weight_global_scale": (("float32",), ((1,), ())),
        }

    def fields(parts: Parts, columns: int) -> Parts:
        whole = parts[".weight_global_scale"].reshape(())
        return {"codes": split_pairs(parts[".weight_packed"]), "scale": shrunk(parts[".weight_scale"], whole)}

    def rounded(value: np.ndarray, largest: float) -> Parts:
        """The largest value of all at the largest scale, and that of a group at the largest code, both to nearest."""
        whole = np.float32(min(FLOAT8 * FLOAT4 / largest, 1e38) if largest > 0 else 1)
        grouped = value.reshape(len(value), -1, 16)
        scale = np.minimum(np.abs(grouped).max(2) / FLOAT4 * whole, FLOAT8).astype(ml_dtypes.float8_e4m3fn)
        each = shrunk(scale, whole)[..., None]
        exact = np.divide(grouped, each, out=np.zeros_like(grouped), where=each > 0)
        codes = nearest(CODES["float4"].numbers, exact).reshape(value.shape)
        return {".weight_packed": join_pairs(codes), ".weight_scale": scale, ".weight_global_scale": whole.reshape(1)}

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return Form("nvfp4", Scheme(weights, None, ("nvfp4-pack-quantized",)), layout, fields, rounded=rounded)


def mxfp4() -> Form:
    def layout(rows: int, columns: int) -> Layout:
        return pairs(rows, columns, 32) | {".weight_scale": (("uint8", "float8_e8m0fnu"), ((rows, columns // 32),))}

    def fields(parts: Parts, columns: int) -> Parts:
        return {"codes": split_pairs(parts[".weight_packed"]), "scale": powers(parts[".weight_scale"].view(np.uint8))}

    def parts(node: Any) -> Parts:
        exponents = np.frexp(node.scale.T)[1] + 126
        return {
            ".weight_packed": join_pairs(four_bits.split(node.codes, *node.into).T),
            ".weight_scale": exponents.astype(np.uint8),
        }

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return Form("mxfp4", Scheme(weights, None, ("mxfp4-pack-quantized",)), layout, fields, parts)


def bytes_in_groups(group: int) -> Form:
    def layout(rows: int, columns: int) -> Layout:
        shared(columns, group)
        return words(rows, columns, 8) | {".weight_scale": (FLOATS, ((rows, columns // group),))}

    def fields(parts: Parts, columns: int) -> Parts:
        codes = split_words(parts[".weight_packed"], 8)[:, :columns] ^ 128
        return {"codes": codes, "scale": parts[".weight_scale"].astype(np.float32)}

    def parts(node: Any) -> Parts:
        codes = node.codes.T
        scale = node.scale.T.astype(np.float16)
        return {
            ".weight_packed": join_words(codes ^ 128),
            ".weight_shape": np.array(codes.shape),
            ".weight_scale": scale,
        }

    weights = int8.WHOLE | {"strategy": "group", "group_size": group}
    return Form(f"int8-weights-{group}", Scheme(weights, None, ("pack-quantized",)), layout, fields, parts)


def fours_by_output(symmetric: bool) -> Form:
    name, group = "int4-128" if symmetric else "int4-128-zero", 128

    def layout(rows: int, columns: int) -> Layout:
        zero = {} if symmetric else {".weight_zero_point": (("int32",), ((-(-rows // 8), 1),))}
        return words(rows, columns, 4) | zero | {".weight_scale": (FLOATS, ((rows, 1), (rows,)))}

    def fields(parts: Parts, columns: int) -> Parts:
        found = quant.example(name).fields(parts, columns, "pack-quantized")
        again = -(-columns // group)
        return {field: value if field == "nibbles" else value.repeat(again, 1) for field, value in found.items()}

    weights = int4.WHOLE | {"strategy": "channel", "symmetric": symmetric}
    return Form(name, Scheme(weights, None, ("pack-quantized",)), layout, fields)


def pairs(rows: int, columns: int, group: int) -> Layout:
    """The tensor of codes of four bits, two a byte."""
    shared(columns, group)
    return {".weight_packed": (("uint8",), ((rows, columns // 2),))}


def shared(columns: int, group: int) -> None:
    if columns % group:
        raise FormatError(f"has {columns} inputs, which do not divide by the group of {group}")


def split_pairs(data: np.ndarray) -> np.ndarray:
    """The codes [rows, columns] of bytes [rows, columns / 2], the even one in the low half."""
    return np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)


def join_pairs(codes: np.ndarray) -> np.ndarray:
    """The bytes of `split_pairs`."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def shrunk(scales: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Scales in float32 that are to be divided by one for the whole matrix."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # what is no number is found by who asked
        return scales.astype(np.float32) / whole.astype(np.float32)


def powers(exponents: np.ndarray) -> np.ndarray:
    """The powers of two of exponents plus 127, in float32."""
    if (exponents == 255).any():
        raise FormatError("holds a scale of 255, which stands for no number")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)


FORMS: dict[str, Form] = {
    "nvfp4": nvfp4(),
    "mxfp4": mxfp4(),
    **{f"int8-weights-{group}": bytes_in_groups(group) for group in (16, 32, 64, 128)},
    "int4-outputs": fours_by_output(True),
    "int4-outputs-zero": fours_by_output(False),
}
