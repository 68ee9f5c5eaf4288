"""INT8: 8-bit integers with a scale per output.

With `dynamic`, activations are rounded to int8 too, with a scale per row.

A checkpoint has `weight` int8 [out, in] with `weight_scale` [out] or [out, 1]; or `weight_packed`
[out, in / 4] with `weight_shape`, where four integers plus 128 share a word.
"""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..linear.cpu import LANES, PackedWeight, has_kernel, has_product, keeps_floats
from ..linear.cpu_layout import tile
from ..linear.weight import GpuMatrix, Weight, check_subscripts
from .compressed import (
    FormatError,
    Layout,
    Rounded,
    Scheme,
    join_words,
    multiply,
    split,
    split_words,
    words,
)
from .grouped import CODES
from .grouped import spec as grouped

LIMIT = 127
GROUPS = ("16", "32", "64", "128")

CHOICES = (
    "int8, int8-weights (activations stay as they are), int8-weights-128 (a group of 16, 32, "
    "64 or 128)"
)
HEAD = "int8-weights"
SPLITS = True
METHOD = None
MULTIPLE = 1
WHOLE = {"type": "int", "symmetric": True, "dynamic": False, "num_bits": 8, "strategy": "channel"}
STORED = {
    "int8": Scheme(WHOLE, WHOLE | {"strategy": "token", "dynamic": True}, ("int-quantized",)),
    # vLLM supports weights without rounded activations in packed form only.
    "int8-weights": Scheme(WHOLE, None, ("pack-quantized", "int-quantized")),
}


class Int8(Rounded):
    """weight = codes * scale; the first len(into) axes of the codes are summed over."""

    codes: Any  # int8 [*into, *out]
    scale: Any  # float32 [*out]
    dynamic: bool = struct.field(pytree_node=False)
    has_gpu_kernel = True

    @property
    def rounds(self) -> str | None:
        return "int8" if self.dynamic else None

    def einsum(self, subscripts: str, x, bias=None, dtype=None):
        axes = len(self.into)
        into = self.codes.shape[:axes]  # local to the device
        out = self.codes.shape[axes:]
        check_subscripts(subscripts, x, into, out, self.inputs)
        lead = x.shape[: x.ndim - axes]
        codes_KO = self.codes.reshape(-1, math.prod(out))
        scale_O = self.scale.reshape(-1)
        x_RK = x.reshape(-1, codes_KO.shape[0])
        if self.dynamic:
            rows_RK, row_scale_R1 = round_to_int8(x_RK)
            exact = jnp.dot(rows_RK, codes_KO, preferred_element_type=jnp.int32)
            y_RO = exact.astype(jnp.float32) * (scale_O * row_scale_R1)
        else:
            y_RO = multiply(x_RK, codes_KO) * scale_O
        y = y_RO.reshape(*lead, *out)
        return (y if bias is None else y + bias).astype(dtype or x.dtype)

    @property
    def rows(self) -> int:
        return self.codes.shape[1]

    def __getitem__(self, index):
        return self.codes[:, index].T.astype(jnp.float32) * self.scale[index][:, None]

    def for_kernels(self, rows: str) -> Weight:
        if not (has_kernel("int8") if self.dynamic else has_product("int8_weights", rows)):
            return self
        codes_KO = np.asarray(self.codes).reshape(math.prod(self.into), -1)
        tiles = tile(codes_KO, 4 if self.dynamic else 2)
        missing = tiles.shape[0] * LANES - codes_KO.shape[1]
        scale_O = np.pad(np.asarray(self.scale, np.float32).reshape(-1), (0, missing))
        sum_O = np.pad(codes_KO.sum(0, dtype=np.int32), (0, missing))
        sizes: dict[str, Any] = {"into": self.into, "out": self.out, "inputs": self.inputs}
        return TiledInt8(tiles, scale_O, sum_O, **sizes, float_rows=keeps_floats(rows))

    def gpu_matrix(self) -> GpuMatrix:
        return GpuMatrix(self.codes, "int8", self.scale, rounded=self.dynamic)

    def quantize(self, weight: np.ndarray) -> "Int8":
        """Round to nearest; the largest magnitude of each output becomes 127."""
        axes = tuple(range(len(self.into)))
        weight_f32 = weight.astype(np.float32)
        scale = np.abs(weight_f32).max(axis=axes) / LIMIT
        codes = np.rint(
            weight_f32 * np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        ).astype(np.int8)
        return self.replace(codes=codes, scale=scale)

    def from_codes(self, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> "Int8":
        signed = (codes.astype(np.uint8) ^ 128).view(np.int8)
        return self.replace(
            codes=signed.reshape(self.into + self.out), scale=scale.reshape(self.out)
        )

    def layout(self, rows: int, columns: int, form: str) -> Layout:
        codes = (
            words(rows, columns, 8)
            if form == "pack-quantized"
            else {".weight": (("int8",), ((rows, columns),))}
        )
        return codes | {".weight_scale": (("float32", "float16", "bfloat16"), ((rows, 1), (rows,)))}

    def fields(
        self, tensors: dict[str, np.ndarray], columns: int, form: str
    ) -> dict[str, np.ndarray]:
        scale = tensors[".weight_scale"].astype(np.float32).reshape(-1, 1)
        if form != "pack-quantized":
            return {"codes": tensors[".weight"], "scale": scale}
        codes = split_words(tensors[".weight_packed"], 8)[:, :columns]
        return {"codes": (codes ^ 128).view(np.int8), "scale": scale}

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        return fields["codes"].astype(np.float32) * fields["scale"]

    def join(self, fields: dict[str, np.ndarray]) -> "Int8":
        return self.replace(
            codes=fields["codes"].reshape(self.into + self.out), scale=fields["scale"][0]
        )

    def parts(self, form: str) -> dict[str, np.ndarray]:
        codes = np.ascontiguousarray(self.codes.T)
        scale = self.scale[:, None]
        if form != "pack-quantized":
            return {".weight": codes, ".weight_scale": scale}
        data = join_words(codes.view(np.uint8) ^ 128)
        return {
            ".weight_packed": data,
            ".weight_shape": np.array(codes.shape),
            ".weight_scale": scale,
        }


class TiledInt8(PackedWeight):
    """Tiles for the native kernels: in groups of four inputs for int8 activations, of two for float
    activations.
    """

    tiles: Any  # int8 [O / 16, K / group, 16, group]
    scale: Any  # float32 [O, padded]
    sum: Any  # int32 [O, padded]

    @property
    def kernel(self) -> str:
        return kernel(dynamic=self.tiles.shape[-1] == 4)

    def __getitem__(self, index):
        block = index // LANES
        lane = index % LANES
        rows = self.tiles[block, :, lane].reshape(index.shape[0], -1)[:, : math.prod(self.into)]
        return rows.astype(jnp.float32) * self.scale[index][:, None]


def kernel(dynamic: bool) -> str:
    return "int8" if dynamic else "int8_weights"


def kernels(*options: str) -> tuple[str, ...]:
    return (
        CODES["int8"].kernel
        if set(options) & {*GROUPS}
        else kernel(dynamic="weights" not in options),
    )


def round_to_int8(x_RK):
    """Round each row to int8: (values, scales), so that its largest magnitude is 127."""
    x_f32 = x_RK.astype(jnp.float32)
    max_abs = jnp.max(jnp.abs(x_f32), axis=-1, keepdims=True)
    poison = jnp.sum(x_f32 * 0, axis=-1, keepdims=True)  # NaN for a row that is not finite
    codes = jnp.round(x_f32 * jnp.where(max_abs > 0, LIMIT / max_abs, 0))
    return jnp.nan_to_num(codes).astype(jnp.int8), max_abs * np.float32(1 / LIMIT) + poison


def spec(dense: ArraySpec, *options: str) -> Any:
    """See `Format.spec`. Options: `weights` (activations are not rounded), with that a group size,
    and then `least` (a minimum is subtracted).
    """
    sizes = [option for option in options if option in GROUPS]
    allowed = {*sizes, "weights", "least"} if sizes and "weights" in options else {"weights"}
    if len(sizes) > 1 or set(options) - allowed:
        raise FormatError(
            f"int8 has no option {'-'.join(options)!r}; it can be weights, and with that a group "
            f"of {', '.join(GROUPS)}"
        )
    if sizes:
        return grouped(dense, "int8", int(sizes[0]), least="least" in options)
    into, out, axes = split(dense)
    codes = replace(dense, shape=into + out, axes=axes, dtype=jnp.int8, init="signed", inputs=())
    scale = ArraySpec(out, jnp.float32, axes[len(into) :], f"scale/{LIMIT}", dense.fan_in)
    return Int8(codes, scale, "weights" not in options, into=into, out=out, inputs=dense.inputs)
