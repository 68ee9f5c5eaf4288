"""Forms of compressed-tensors that no format defines; each is loaded into a format with its codes.

NVFP4     weight_packed uint8 [out, in / 2], weight_scale float8_e4m3fn [out, in / 16],
          weight_global_scale:
          weight = code * weight_scale / weight_global_scale
MXFP4     weight_packed uint8 [out, in / 2], weight_scale uint8 [out, in / 32]: exponent + 127
int8      in groups as int4, four codes plus 128 in a word
int4      with one scale for each output
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
FLOAT8 = 448  # the largest value of E4M3
FLOAT4 = 6  # the largest value of E2M1
Parts = dict[str, np.ndarray]


@dataclass(frozen=True)
class CompressedForm:
    """A form's config, tensor layout, and conversion to and from its format's fields."""

    quant: str
    scheme: Scheme
    layout: Callable[[int, int], Layout]
    fields: Callable[[Parts, int], Parts]
    node_tensors: Callable[[Any], Parts] | None = None  # None: the form is not written
    # Tensors of a matrix [out, in], given its maximum.
    rounded: Callable[[np.ndarray, float], Parts] | None = None

    @property
    def written(self) -> bool:
        return self.node_tensors is not None or self.rounded is not None


def nvfp4() -> CompressedForm:
    def layout(rows: int, columns: int) -> Layout:
        return packed_pairs_layout(rows, columns, 16) | {
            ".weight_scale": (("float8_e4m3fn",), ((rows, columns // 16),)),
            ".weight_global_scale": (("float32",), ((1,), ())),
        }

    def fields(arrays: Parts, columns: int) -> Parts:
        global_scale = arrays[".weight_global_scale"].reshape(())
        return {
            "codes": split_pairs(arrays[".weight_packed"]),
            "scale": divide_scales(arrays[".weight_scale"], global_scale),
        }

    def rounded(value: np.ndarray, largest: float) -> Parts:
        """Map the maximum to the largest scale, and each group's maximum to the largest code."""
        global_scale = np.float32(min(FLOAT8 * FLOAT4 / largest, 1e38) if largest > 0 else 1)
        grouped = value.reshape(len(value), -1, 16)
        scale = np.minimum(np.abs(grouped).max(2) / FLOAT4 * global_scale, FLOAT8).astype(
            ml_dtypes.float8_e4m3fn
        )
        group_scale = divide_scales(scale, global_scale)[..., None]
        exact = np.divide(grouped, group_scale, out=np.zeros_like(grouped), where=group_scale > 0)
        codes = nearest(CODES["float4"].numbers, exact).reshape(value.shape)
        return {
            ".weight_packed": join_pairs(codes),
            ".weight_scale": scale,
            ".weight_global_scale": global_scale.reshape(1),
        }

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return CompressedForm(
        "nvfp4", Scheme(weights, None, ("nvfp4-pack-quantized",)), layout, fields, rounded=rounded
    )


def mxfp4() -> CompressedForm:
    def layout(rows: int, columns: int) -> Layout:
        return packed_pairs_layout(rows, columns, 32) | {
            ".weight_scale": (("uint8", "float8_e8m0fnu"), ((rows, columns // 32),))
        }

    def fields(arrays: Parts, columns: int) -> Parts:
        return {
            "codes": split_pairs(arrays[".weight_packed"]),
            "scale": powers_of_two(arrays[".weight_scale"].view(np.uint8)),
        }

    def parts(node: Any) -> Parts:
        exponents = np.frexp(node.scale.T)[1] + 126
        return {
            ".weight_packed": join_pairs(four_bits.split(node.codes, *node.into).T),
            ".weight_scale": exponents.astype(np.uint8),
        }

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    return CompressedForm(
        "mxfp4", Scheme(weights, None, ("mxfp4-pack-quantized",)), layout, fields, parts
    )


def int8_in_groups(group: int) -> CompressedForm:
    def layout(rows: int, columns: int) -> Layout:
        check_divisible(columns, group)
        return words(rows, columns, 8) | {".weight_scale": (FLOATS, ((rows, columns // group),))}

    def fields(arrays: Parts, columns: int) -> Parts:
        codes = split_words(arrays[".weight_packed"], 8)[:, :columns] ^ 128
        return {"codes": codes, "scale": arrays[".weight_scale"].astype(np.float32)}

    def parts(node: Any) -> Parts:
        codes = node.codes.T
        scale = node.scale.T.astype(np.float16)
        return {
            ".weight_packed": join_words(codes ^ 128),
            ".weight_shape": np.array(codes.shape),
            ".weight_scale": scale,
        }

    weights = int8.WHOLE | {"strategy": "group", "group_size": group}
    return CompressedForm(
        f"int8-weights-{group}", Scheme(weights, None, ("pack-quantized",)), layout, fields, parts
    )


def int4_by_output(symmetric: bool) -> CompressedForm:
    name = "int4-128" if symmetric else "int4-128-zero"
    group = 128

    def layout(rows: int, columns: int) -> Layout:
        zero = {} if symmetric else {".weight_zero_point": (("int32",), ((-(-rows // 8), 1),))}
        return words(rows, columns, 4) | zero | {".weight_scale": (FLOATS, ((rows, 1), (rows,)))}

    def fields(arrays: Parts, columns: int) -> Parts:
        format_fields = quant.example(name).fields(arrays, columns, "pack-quantized")
        repeats = -(-columns // group)
        return {
            field: value if field == "nibbles" else value.repeat(repeats, 1)
            for field, value in format_fields.items()
        }

    weights = int4.WHOLE | {"strategy": "channel", "symmetric": symmetric}
    return CompressedForm(name, Scheme(weights, None, ("pack-quantized",)), layout, fields)


def packed_pairs_layout(rows: int, columns: int, group: int) -> Layout:
    """The tensor of 4-bit codes, two in a byte."""
    check_divisible(columns, group)
    return {".weight_packed": (("uint8",), ((rows, columns // 2),))}


def check_divisible(columns: int, group: int) -> None:
    if columns % group:
        raise FormatError(f"has {columns} inputs, which do not divide by the group of {group}")


def split_pairs(data: np.ndarray) -> np.ndarray:
    """Unpack codes [rows, columns] from bytes [rows, columns / 2], the even one in the low half."""
    return np.stack([data & 15, data >> 4], -1).reshape(len(data), -1)


def join_pairs(codes: np.ndarray) -> np.ndarray:
    """The inverse of `split_pairs`."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def divide_scales(scales: np.ndarray, global_scale: np.ndarray | np.float32) -> np.ndarray:
    """Scales divided by the global scale of their matrix, in float32."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # callers check for NaN
        return scales.astype(np.float32) / global_scale.astype(np.float32)


def powers_of_two(exponents: np.ndarray) -> np.ndarray:
    """Powers of two in float32, from exponents biased by 127."""
    if (exponents == 255).any():
        raise FormatError("holds a scale of 255, which is NaN")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)


FORMS: dict[str, CompressedForm] = {
    "nvfp4": nvfp4(),
    "mxfp4": mxfp4(),
    **{f"int8-weights-{group}": int8_in_groups(group) for group in (16, 32, 64, 128)},
    "int4-outputs": int4_by_output(True),
    "int4-outputs-zero": int4_by_output(False),
}
