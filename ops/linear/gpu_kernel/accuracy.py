"""Self-test cases of the product kernels: random inputs, and the float64 reference."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...gpu import device
from ...gpu.self_test import Case, InLayers
from ...quant import four_bits
from .prepare import multiply, summands
from .shape import BLOCKS, FEATURES, FOUR_BITS, Operands, ProductShape, block_sizes

LARGEST_ERROR = 6e-3  # allowed in bfloat16, against float64
LARGEST_ERROR_EXACT = 5e-5  # of a float32 weight in summands: TF32 would be off by 3e-4
# the values of the E2M1 codes
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


EIGHT_BITS = {  # generators of random 8-bit codes
    "int8": lambda rng, axes: rng.integers(-127, 128, axes, np.int8),
    "float8": lambda rng, axes: (rng.standard_normal(axes, np.float32) * 30).astype(
        ml_dtypes.float8_e4m3fn
    ),
}


@dataclass(frozen=True)
class ProductCase:
    """One kind of product, computed in blocks of every size, which must give the same bits."""

    kind: dict
    inputs: int = 2048
    outputs: int = 1024
    experts: int = 24
    allowed: float = LARGEST_ERROR
    interpret: Any = None
    name: str = "blocks of every size"

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows of a block that are tested."""
        return [
            rows for rows in BLOCKS if rows in block_sizes(self.kind["kernel"], self.kind["codes"])
        ]

    def build(self, seed: int):
        kind = self.kind
        rng = np.random.default_rng(seed)
        experts = self.experts if kind["grouped"] else 1
        pairs = BLOCKS[-1] * (3 if experts == 1 else experts + 2)

        def array(*axes: int, dtype=jnp.bfloat16, scale: float = 1.0):
            return jnp.asarray(rng.standard_normal(axes, np.float32) * scale, dtype)

        x = array(pairs, self.inputs)
        matrix_shape = (self.inputs, kind["projections"], self.outputs)
        weight = array(
            experts,
            *((self.outputs, self.inputs) if kind["transposed"] else matrix_shape),
            scale=self.inputs**-0.5,
        )
        output_scale = row_scale = group_scale = group_zero = None
        values = np.asarray(weight, np.float64)
        weight_std = self.inputs**-0.5
        if kind["summands"] > 1:
            weight_f32 = array(experts, *matrix_shape, dtype=jnp.float32, scale=weight_std)
            weight = jax.vmap(summands)(weight_f32)
            values = np.asarray(weight_f32, np.float64)
        if kind["codes"] in FOUR_BITS:
            codes = rng.integers(0, 16, (experts, *matrix_shape), np.uint8)
            weight = jnp.asarray(np.stack([four_bits.join(expert_codes) for expert_codes in codes]))
            group_shape = experts, self.inputs // kind["group"], *matrix_shape[1:]
            if kind["codes"] == "float4":
                group_scale = jnp.asarray(
                    rng.integers(-3, 2, group_shape) + round(127 + np.log2(weight_std)), jnp.uint8
                )
            else:
                group_scale = jnp.asarray(
                    rng.uniform(0.5, 2, group_shape) / 8 * weight_std, jnp.float16
                )
            if kind["zeros"]:
                group_zero = jnp.asarray(rng.integers(0, 16, group_shape), jnp.uint8)
            values = dequantise(
                kind["codes"], codes.astype(int), np.asarray(group_scale), group_zero
            )
        elif kind["codes"]:
            values = EIGHT_BITS[kind["codes"]](rng, weight.shape)
            weight = jnp.asarray(values.view(np.int8))
            largest = np.abs(values.astype(np.float64)).max()
            output_scale = jnp.asarray(
                rng.uniform(0.5, 2, (experts, *matrix_shape[1:])) / largest * weight_std,
                jnp.float32,
            )
            values = values.astype(np.float64) * np.asarray(output_scale, np.float64)[:, None]
        if kind["rounded"]:
            x = jnp.asarray(EIGHT_BITS[kind["codes"]](rng, x.shape), jnp.bfloat16)
            row_scale = jnp.asarray(rng.uniform(0.5, 2, pairs) / 127, jnp.float32)
        bias = array(experts, *matrix_shape[1:], dtype=jnp.float32) if kind["bias"] else None
        scale = array(pairs, dtype=jnp.float32) if kind["weighted"] else None
        expert_ids = np.sort(
            np.r_[np.arange(experts), rng.integers(0, experts, pairs // BLOCKS[-1] - experts)]
        )
        operands = []
        for rows in self.sizes:
            unused_rows = 3 * rows  # three blocks past the end, filled with NaN
            operands.append(
                Operands(
                    jnp.pad(x, ((0, unused_rows), (0, 0)), constant_values=jnp.nan),
                    weight,
                    bias,
                    None
                    if scale is None
                    else jnp.pad(scale, (0, unused_rows), constant_values=jnp.nan),
                    jnp.asarray(
                        np.pad(np.repeat(expert_ids, BLOCKS[-1] // rows), (0, 3)), jnp.int32
                    ),
                    jnp.full(1, pairs // rows, jnp.int32),
                    output_scale,
                    None
                    if row_scale is None
                    else jnp.pad(row_scale, (0, unused_rows), constant_values=jnp.nan),
                    group_scale,
                    group_zero,
                )
            )
        x_f64 = np.asarray(x, np.float64) * (
            1 if row_scale is None else np.asarray(row_scale, np.float64)[:, None]
        )
        return (), operands, reference(kind, expert_ids, x_f64, values, bias, scale)

    def run(self, donated, inputs):
        """Compute the product in blocks of every size; NaN where the results differ."""
        processors = 3 if self.interpret is not None else device.num_processors()
        outs = []
        for rows, operands in zip(self.sizes, inputs, strict=True):
            used_rows = len(operands.x) - 3 * rows
            shape = ProductShape(
                blocks=used_rows // rows + 3,
                rows=rows,
                experts=len(operands.weight),
                inputs=self.inputs,
                outputs=self.outputs,
                processors=processors,
                **{k: v for k, v in self.kind.items() if k != "grouped"},
            )
            outs.append(multiply(shape, operands, self.interpret)[:used_rows])
        is_same = jnp.all(jnp.stack([out == outs[0] for out in outs]), 0)
        return jnp.where(is_same, outs[0], jnp.nan), donated


def cases(kind: dict) -> list[Case]:
    """The self-test cases of a kind.

    With small groups of four-bit codes, the inputs may end with half a pipeline step.
    """
    has_half_steps = kind["group"] and FEATURES % kind["group"] == 0
    if kind["summands"] > 1:
        exact = ProductCase(kind, outputs=128, allowed=LARGEST_ERROR_EXACT)
        return [exact, InLayers(exact)]
    half = [ProductCase(kind, 2048 + FEATURES, name="half a step")] * bool(has_half_steps)
    return [ProductCase(kind), *half, InLayers(ProductCase(kind))]


def dequantise(codes: str, code, scale, zero=None) -> np.ndarray:
    """The values of four-bit codes [experts, inputs, ...], rounded to bfloat16 as in the kernel."""
    if codes == "float4":
        values = FLOAT4[code]
        scale = 2.0 ** (scale.astype(np.float64) - 127)
    else:
        values = code - (
            8
            if zero is None
            else np.repeat(zero, code.shape[1] // zero.shape[1], 1).astype(np.float32)
        )
    products = values * np.repeat(scale.astype(np.float32), code.shape[1] // scale.shape[1], 1)
    return np.asarray(jnp.asarray(products, jnp.bfloat16), np.float64)


def reference(kind: dict, expert_ids, x, weight, bias, scale) -> np.ndarray:
    """Compute the product in float64 on the host."""
    x = np.asarray(x, np.float64)
    weight = np.asarray(weight, np.float64)
    bias, scale = (None if y is None else np.asarray(y, np.float64) for y in (bias, scale))
    out = []
    for block, expert in enumerate(expert_ids):
        rows = slice(block * BLOCKS[-1], (block + 1) * BLOCKS[-1])
        matrix = weight[expert].T if kind["transposed"] else weight[expert].reshape(x.shape[1], -1)
        y = (x[rows] @ matrix).reshape(BLOCKS[-1], kind["projections"], -1)
        y = y if bias is None else y + bias[expert]
        y = y[:, 0] if kind["projections"] == 1 else apply_activation(kind, y[:, 0], y[:, 1])
        out.append(y if scale is None else y * scale[rows, None])
    return np.concatenate(out)


def apply_activation(kind: dict, gate, up) -> np.ndarray:
    """Apply the activation to gate and multiply by up."""
    if kind["clamp"] is not None:
        gate = np.minimum(gate, kind["clamp"])
        up = np.clip(up, -kind["clamp"], kind["clamp"])
        return gate / (1 + np.exp(-kind["alpha"] * gate)) * (up + 1)
    if kind["activation"] == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if kind["activation"] == "relu":
        return np.maximum(gate, 0) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
