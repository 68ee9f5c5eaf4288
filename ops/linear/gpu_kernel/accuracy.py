"""Trials of the kernel for a kind of product: random inputs, and the result in float64."""

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
# what E2M1 codes stand for
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


EIGHT_BITS = {  # random codes
    "int8": lambda rng, axes: rng.integers(-127, 128, axes, np.int8),
    "float8": lambda rng, axes: (rng.standard_normal(axes, np.float32) * 30).astype(
        ml_dtypes.float8_e4m3fn
    ),
}


@dataclass(frozen=True)
class ProductCase:
    """A kind of product in blocks of every size, which must all give the same bits."""

    kind: dict
    inputs: int = 2048
    outputs: int = 1024
    experts: int = 24
    allowed: float = LARGEST_ERROR
    interpret: Any = None
    name: str = "blocks of every size"

    @property
    def sizes(self) -> list[int]:
        return [
            rows for rows in BLOCKS if rows in block_sizes(self.kind["kernel"], self.kind["codes"])
        ]

    def build(self, seed: int):
        kind, rng, experts = (
            self.kind,
            np.random.default_rng(seed),
            self.experts if self.kind["grouped"] else 1,
        )
        pairs = BLOCKS[-1] * (3 if experts == 1 else experts + 2)

        def array(*axes: int, dtype=jnp.bfloat16, scale: float = 1.0):
            return jnp.asarray(rng.standard_normal(axes, np.float32) * scale, dtype)

        x = array(pairs, self.inputs)
        each = (self.inputs, kind["parts"], self.outputs)
        weight = array(
            experts,
            *((self.outputs, self.inputs) if kind["turned"] else each),
            scale=self.inputs**-0.5,
        )
        output_scale = row_scale = group_scale = group_zero = None
        numbers = np.asarray(weight, np.float64)
        small = self.inputs**-0.5
        if kind["summands"] > 1:
            wide = array(experts, *each, dtype=jnp.float32, scale=small)
            weight = jax.vmap(summands)(wide)
            numbers = np.asarray(wide, np.float64)
        if kind["codes"] in FOUR_BITS:
            code = rng.integers(0, 16, (experts, *each), np.uint8)
            weight = jnp.asarray(np.stack([four_bits.join(one) for one in code]))
            groups = experts, self.inputs // kind["group"], *each[1:]
            if kind["codes"] == "float4":
                group_scale = jnp.asarray(
                    rng.integers(-3, 2, groups) + round(127 + np.log2(small)), jnp.uint8
                )
            else:
                group_scale = jnp.asarray(rng.uniform(0.5, 2, groups) / 8 * small, jnp.float16)
            if kind["zeros"]:
                group_zero = jnp.asarray(rng.integers(0, 16, groups), jnp.uint8)
            numbers = decoded(kind["codes"], code.astype(int), np.asarray(group_scale), group_zero)
        elif kind["codes"]:
            numbers = EIGHT_BITS[kind["codes"]](rng, weight.shape)
            weight = jnp.asarray(numbers.view(np.int8))
            most = np.abs(numbers.astype(np.float64)).max()
            output_scale = jnp.asarray(
                rng.uniform(0.5, 2, (experts, *each[1:])) / most * small, jnp.float32
            )
            numbers = numbers.astype(np.float64) * np.asarray(output_scale, np.float64)[:, None]
        if kind["rounded"]:
            x = jnp.asarray(EIGHT_BITS[kind["codes"]](rng, x.shape), jnp.bfloat16)
            row_scale = jnp.asarray(rng.uniform(0.5, 2, pairs) / 127, jnp.float32)
        bias = array(experts, *each[1:], dtype=jnp.float32) if kind["bias"] else None
        scale = array(pairs, dtype=jnp.float32) if kind["weighed"] else None
        whose = np.sort(
            np.r_[np.arange(experts), rng.integers(0, experts, pairs // BLOCKS[-1] - experts)]
        )
        given = []
        for rows in self.sizes:
            spare = 3 * rows  # of blocks that there are not
            given.append(
                Operands(
                    jnp.pad(x, ((0, spare), (0, 0)), constant_values=jnp.nan),
                    weight,
                    bias,
                    None if scale is None else jnp.pad(scale, (0, spare), constant_values=jnp.nan),
                    jnp.asarray(np.pad(np.repeat(whose, BLOCKS[-1] // rows), (0, 3)), jnp.int32),
                    jnp.full(1, pairs // rows, jnp.int32),
                    output_scale,
                    None
                    if row_scale is None
                    else jnp.pad(row_scale, (0, spare), constant_values=jnp.nan),
                    group_scale,
                    group_zero,
                )
            )
        exact = np.asarray(x, np.float64) * (
            1 if row_scale is None else np.asarray(row_scale, np.float64)[:, None]
        )
        return (), given, reference(kind, whose, exact, numbers, bias, scale)

    def run(self, held, given):
        """NaN where a size has other bits."""
        processors = 3 if self.interpret is not None else device.num_processors()
        outs = []
        for rows, operands in zip(self.sizes, given, strict=True):
            there = len(operands.x) - 3 * rows
            shape = ProductShape(
                blocks=there // rows + 3,
                rows=rows,
                experts=len(operands.weight),
                inputs=self.inputs,
                outputs=self.outputs,
                processors=processors,
                **{k: v for k, v in self.kind.items() if k != "grouped"},
            )
            outs.append(multiply(shape, operands, self.interpret)[:there])
        same = jnp.all(jnp.stack([out == outs[0] for out in outs]), 0)
        return jnp.where(same, outs[0], jnp.nan), held


def cases(kind: dict) -> list[Case]:
    """What the process that tries runs; steps of four bits may end with half of one."""
    halves = kind["group"] and FEATURES % kind["group"] == 0
    if kind["summands"] > 1:
        exact = ProductCase(kind, outputs=128, allowed=LARGEST_ERROR_EXACT)
        return [exact, InLayers(exact)]
    half = [ProductCase(kind, 2048 + FEATURES, name="half a step")] * bool(halves)
    return [ProductCase(kind), *half, InLayers(ProductCase(kind))]


def decoded(codes: str, code, scale, zero=None) -> np.ndarray:
    """The numbers of codes of four bits [experts, inputs, ...], rounded to bfloat16 as products see
    them.
    """
    if codes == "float4":
        numbers = FLOAT4[code]
        scale = 2.0 ** (scale.astype(np.float64) - 127)
    else:
        numbers = code - (
            8
            if zero is None
            else np.repeat(zero, code.shape[1] // zero.shape[1], 1).astype(np.float32)
        )
    wide = numbers * np.repeat(scale.astype(np.float32), code.shape[1] // scale.shape[1], 1)
    return np.asarray(jnp.asarray(wide, jnp.bfloat16), np.float64)


def reference(kind: dict, whose, x, weight, bias, scale) -> np.ndarray:
    """The result in float64, on the host, from the same inputs."""
    x, weight, bias, scale = (
        None if y is None else np.asarray(y, np.float64) for y in (x, weight, bias, scale)
    )
    out = []
    for block, e in enumerate(whose):
        rows = slice(block * BLOCKS[-1], (block + 1) * BLOCKS[-1])
        matrix = weight[e].T if kind["turned"] else weight[e].reshape(x.shape[1], -1)
        y = (x[rows] @ matrix).reshape(BLOCKS[-1], kind["parts"], -1)
        y = y if bias is None else y + bias[e]
        y = y[:, 0] if kind["parts"] == 1 else combined(kind, y[:, 0], y[:, 1])
        out.append(y if scale is None else y * scale[rows, None])
    return np.concatenate(out)


def combined(kind: dict, gate, up) -> np.ndarray:
    if kind["clamp"] is not None:
        gate = np.minimum(gate, kind["clamp"])
        up = np.clip(up, -kind["clamp"], kind["clamp"])
        return gate / (1 + np.exp(-kind["alpha"] * gate)) * (up + 1)
    if kind["activation"] == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if kind["activation"] == "relu":
        return np.maximum(gate, 0) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
