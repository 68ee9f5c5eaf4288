"""FP8: 8-bit floats (E4M3) with a scale per output. With `dynamic`, activations are rounded too.

A checkpoint has `weight` float8_e4m3fn [out, in] with `weight_scale` [out], [out, 1] or a single
scale. With the option `128` it has a scale per block of 128 x 128, which becomes a scale for every
128 inputs of each output here.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..linear.cpu import has_product, keeps_floats
from ..linear.cpu_layout import by_block, tile
from ..linear.weight import GpuMatrix, Weight, check_subscripts
from .compressed import FormatError, Layout, Rounded, Scheme, multiply, split
from .grouped import Grouped, TiledGroups
from .grouped import spec as grouped

E4M3 = ml_dtypes.float8_e4m3fn
LIMIT = 448  # the largest of these floats
SIDE = 128  # size of the blocks that share a scale

CHOICES = "fp8, fp8-weights (activations stay as they are)"
HEAD = "fp8-weights"
SPLITS = True
METHOD = None
MULTIPLE = 1
WHOLE = {"type": "float", "symmetric": True, "dynamic": False, "num_bits": 8, "strategy": "channel"}
STORED = {
    "fp8": Scheme(WHOLE, WHOLE | {"strategy": "token", "dynamic": True}, ("float-quantized",)),
    # llm-compressor's name for weights without rounded activations
    "fp8-weights": Scheme(WHOLE, None, ("naive-quantized", "float-quantized")),
    "fp8-weights-128": Scheme(
        WHOLE | {"strategy": "group", "group_size": SIDE}, None, ("float-quantized",)
    ),
}


class Fp8(Rounded):
    """weight = codes * scale; the first len(into) axes of the codes are summed over.

    The codes are stored as uint8: XLA on CPUs would convert whole stacks of float8_e4m3fn before
    slicing them.
    """

    codes: Any  # uint8 [*into, *out], the bits of float8_e4m3fn
    scale: Any  # float32 [*out]
    dynamic: bool = struct.field(pytree_node=False)
    has_gpu_kernel = True

    @property
    def rounds(self) -> str | None:
        return "float8" if self.dynamic else None

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
            x_RK, row_scale_R1 = round_to_float8(x_RK)
            scale_O = scale_O * row_scale_R1
        y_RO = multiply(x_RK, floats(codes_KO)) * scale_O
        y = y_RO.reshape(*lead, *out)
        return (y if bias is None else y + bias).astype(dtype or x.dtype)

    @property
    def rows(self) -> int:
        return self.codes.shape[1]

    def __getitem__(self, index):
        return floats(self.codes[:, index].T).astype(jnp.float32) * self.scale[index][:, None]

    def for_kernels(self, rows: str) -> Weight:
        if not has_product("fp8", rows):
            return self
        codes_KO = np.asarray(self.codes).reshape(math.prod(self.into), -1)
        scale = by_block(np.asarray(self.scale, np.float32).reshape(1, -1))
        kind = TiledFp8 if self.dynamic else TiledGroups
        return kind(
            tile(codes_KO, 2),
            scale,
            np.zeros(0, np.float32),
            code="float8",
            into=self.into,
            out=self.out,
            inputs=self.inputs,
            float_rows=keeps_floats(rows),
        )

    def gpu_matrix(self) -> GpuMatrix:
        signed = jax.lax.bitcast_convert_type(self.codes, jnp.int8)  # as `Tiles.decode` takes them
        return GpuMatrix(signed, "float8", self.scale, rounded=self.dynamic)

    def quantize(self, weight: np.ndarray) -> "Fp8":
        """Round to nearest; the largest magnitude of each output becomes 448."""
        weight_f32 = weight.astype(np.float32)
        scale = np.abs(weight_f32).max(axis=tuple(range(len(self.into)))) / np.float32(LIMIT)
        scaled_weight = np.divide(weight_f32, scale, out=np.zeros_like(weight_f32), where=scale > 0)
        return self.replace(
            codes=np.clip(scaled_weight, -LIMIT, LIMIT).astype(E4M3).view(np.uint8), scale=scale
        )

    def layout(self, rows: int, columns: int, form: str) -> Layout:
        return {
            ".weight": (("float8_e4m3fn",), ((rows, columns),)),
            ".weight_scale": (
                ("float32", "float16", "bfloat16"),
                ((rows, 1), (rows,), (1,), (), (1, 1)),
            ),
        }

    def fields(
        self, tensors: dict[str, np.ndarray], columns: int, form: str
    ) -> dict[str, np.ndarray]:
        codes = check_finite(tensors[".weight"])
        scale = tensors[".weight_scale"].astype(np.float32).reshape(-1, 1)
        return {"codes": codes, "scale": np.broadcast_to(scale, (len(codes), 1))}

    def decode(self, fields: dict[str, np.ndarray]) -> np.ndarray:
        return np.ascontiguousarray(fields["codes"]).view(E4M3).astype(np.float32) * fields["scale"]

    def join(self, fields: dict[str, np.ndarray]) -> "Fp8":
        return self.replace(
            codes=fields["codes"].reshape(self.into + self.out), scale=fields["scale"][0]
        )

    def parts(self, form: str) -> dict[str, np.ndarray]:
        return {
            ".weight": np.ascontiguousarray(self.codes.T).view(E4M3),
            ".weight_scale": self.scale[:, None],
        }


class Fp8Blocks(Grouped):
    """FP8 with a scale for every 128 inputs of each output."""

    def layout(self, rows: int, columns: int, form: str) -> Layout:
        blocks = -(-rows // SIDE), -(-columns // SIDE)
        return {
            ".weight": (("float8_e4m3fn",), ((rows, columns),)),
            ".weight_scale": (("float32", "float16", "bfloat16"), (blocks,)),
        }

    def fields(
        self, tensors: dict[str, np.ndarray], columns: int, form: str
    ) -> dict[str, np.ndarray]:
        codes = check_finite(tensors[".weight"])
        scale = tensors[".weight_scale"].astype(np.float32)
        return {"codes": codes, "scale": scale.repeat(SIDE, 0)[: len(codes)]}


class TiledFp8(TiledGroups):
    """Tiles for the native kernels with rounded activations, which bfloat16 holds exactly."""

    def prepare_rows(self, x) -> tuple[Any, Any]:
        codes, scale = round_to_float8(x)
        return codes.astype(jnp.bfloat16), scale

    def gated(self, subscripts: str, x, activation: str):
        return Weight.gated(self, subscripts, x, activation)


def check_finite(codes: np.ndarray) -> np.ndarray:
    """The bits as uint8; FormatError if there is a NaN."""
    codes = codes.view(np.uint8)
    if (codes & 0x7F == 0x7F).any():
        raise FormatError("holds a code that is no number")
    return codes


def floats(codes):
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)


def round_to_float8(x_RK):
    """Round each row to float8: (values, scales), so that its largest magnitude is 448."""
    x_f32 = x_RK.astype(jnp.float32)
    max_abs = jnp.max(jnp.abs(x_f32), axis=-1, keepdims=True)
    poison = jnp.sum(x_f32 * 0, axis=-1, keepdims=True)  # NaN for a row that is not finite
    codes = jnp.clip(x_f32 * jnp.where(max_abs > 0, LIMIT / max_abs, 0), -LIMIT, LIMIT)
    return jnp.nan_to_num(codes).astype(jnp.float8_e4m3fn), max_abs * np.float32(1 / LIMIT) + poison


def kernels(*options: str) -> tuple[str, ...]:
    return ("fp8",)


def spec(dense: ArraySpec, *options: str) -> Any:
    """See `Format.spec`. Options: `weights` (activations are not rounded), `128` (a scale for every
    128 inputs).
    """
    if set(options) - {"weights", str(SIDE)} or (str(SIDE) in options and "weights" not in options):
        raise FormatError(
            f"fp8 has no option {'-'.join(options)!r}; it can be weights or weights-{SIDE}"
        )
    if str(SIDE) in options:
        return grouped(dense, "float8", SIDE, Fp8Blocks)
    into, out, axes = split(dense)
    codes = replace(
        dense, shape=into + out, axes=axes, dtype=jnp.uint8, init="float8", inputs=()
    )  # fmt: skip
    scale = ArraySpec(out, jnp.float32, axes[len(into) :], "scale/1.07", dense.fan_in)
    return Fp8(codes, scale, "weights" not in options, into=into, out=out, inputs=dense.inputs)


def decode_e4m3(bits):
    """Convert the bits of E4M3 floats to float32, for kernels on GPUs without E4M3.

    The bits are shifted to those of a float16. Its exponent has one more bit and a bias that is
    larger by 8, hence the factor 2**8.
    """
    bits_i16 = bits.astype(jnp.int16)
    halves = jax.lax.bitcast_convert_type(
        (bits_i16 & 0x7F) << 7 | bits_i16 & jnp.int16(-0x8000), jnp.float16
    )
    return halves.astype(jnp.float32) * 256
