"""The product kernel for NVIDIA GPUs other than Hopper, in Triton.

A program computes 64 outputs of one block of rows. As in `hopper.py`, weights are the left operand,
so that blocks of every size use the same instructions, and one program sums all inputs of an output
in a fixed order. Codes are decoded in registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ...activation import combine
from ...quant import fp8
from ...quant.four_bits import BLOCK
from ...quant.int4 import MIDDLE
from .shape import BLOCKS, FEATURES, Operands, ProductShape

HALF = BLOCK // 2  # inputs of a step
PIECE = 32  # inputs that are decoded at once; groups have at least as many


def multiply(shape: ProductShape, operands: Operands, *, interpret: Any = None):
    """Compute the product: [blocks * rows, outputs]. Blocks not in use have undefined results."""
    names = [name for name, x in operands._asdict().items() if x is not None]
    tiles = shape.outputs // FEATURES
    # consecutive programs use the same part of the weight while it is in the GPU's cache
    dense = shape.experts == 1
    return pl.pallas_call(
        functools.partial(run, shape, names, dense, interpret is not None),
        out_shape=jax.ShapeDtypeStruct((shape.blocks * shape.rows, shape.outputs), shape.out_dtype),
        grid=(shape.blocks, tiles) if dense else (tiles, shape.blocks),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps(shape), num_stages=stages(shape)),
        interpret=interpret is not None,
        name="product",
    )(*(x for x in operands if x is not None))


def num_warps(shape: ProductShape) -> int:
    return 8 if shape.rows > 64 else 4


def stages(shape: ProductShape) -> int:
    """Pipeline stages: as many as fit into 99 KiB of shared memory, the smallest of any GPU."""
    return 4 if shape.rows <= 64 else 3


def run(shape: ProductShape, names, dense: bool, interpreted: bool, *refs) -> None:
    operands = Operands(
        **{**dict.fromkeys(Operands._fields), **dict(zip(names, refs, strict=False))}
    )
    block, tile = (pl.program_id(axis) for axis in ((0, 1) if dense else (1, 0)))

    @pl.when(block < operands.count[0])
    def _():
        compute(
            shape,
            operands,
            refs[-1],
            block * shape.rows,
            operands.experts[block],
            tile * FEATURES,
            interpreted,
        )


def compute(
    shape: ProductShape, operands: Operands, out, row, expert, feature, interpreted: bool
) -> None:
    rows = pl.ds(row, shape.rows)
    features = pl.ds(feature, FEATURES)
    load_weights = load_packed_weights if shape.packed else load_step_weights

    def add(k, sums):
        for start, weights in load_weights(shape, operands, expert, features, k):
            x_RK = operands.x[rows, pl.ds(start, len(weights[0]))]
            sums = [
                add_product(total, w_KF, x_RK, interpreted)
                for total, w_KF in zip(sums, weights, strict=True)
            ]
        return sums

    zeros = [jnp.zeros((FEATURES, shape.rows), jnp.float32)] * shape.projections
    steps = -(-shape.inputs // (BLOCK if shape.packed else HALF))
    outputs = []
    for projection, y_FR in enumerate(lax.fori_loop(0, steps, add, zeros)):
        if operands.output_scale is not None:
            y_FR = y_FR * operands.output_scale[expert, projection, features][:, None]
        if operands.row_scale is not None:
            y_FR = y_FR * operands.row_scale[rows][None]
        if operands.bias is not None:
            y_FR = y_FR + operands.bias[expert, projection, features][:, None]
        outputs.append(y_FR)
    y_FR = (
        outputs[0]
        if shape.projections == 1
        else combine(outputs[0], outputs[1], shape.activation or "", shape.clamp, shape.alpha)
    )
    if operands.scale is not None:
        y_FR = y_FR * operands.scale[rows][None]
    out[rows, features] = y_FR.astype(shape.out_dtype).T


def add_product(total_FR, w_KF, x_RK, interpreted: bool):
    if not interpreted:
        return total_FR + plgpu.dot(w_KF, x_RK, trans_a=True, trans_b=True)
    # In the interpreter the order of a sum could depend on the sizes, so they are always the same.
    x_NK = jnp.pad(x_RK, ((0, BLOCKS[-1] - len(x_RK)), (0, 0)))
    return total_FR + jnp.dot(w_KF.T, x_NK.T, preferred_element_type=jnp.float32)[:, : len(x_RK)]


def load_step_weights(shape: ProductShape, operands: Operands, expert, features, k):
    """[(first input, weights of each projection)] of step `k`, of unquantised or 8-bit weights."""
    start = k * HALF
    dtype = operands.x.dtype
    codes = [
        operands.weight[expert, pl.ds(start, HALF), projection, features]
        for projection in range(shape.projections)
    ]
    decode = fp8.decode_e4m3 if shape.codes == "float8" else lambda codes_KF: codes_KF
    return [(start, [decode(codes_KF).astype(dtype) for codes_KF in codes])]


def load_packed_weights(shape: ProductShape, operands: Operands, expert, features, k):
    """Yield (first input, weights of each projection) for pieces of block `k` of four-bit weights.

    The last block ends with the last input; inputs that it repeats have weights of zero.
    """
    first = jnp.minimum(k * BLOCK, shape.inputs - BLOCK)
    num_repeated = k * BLOCK - first
    for offset in range(0, HALF, PIECE):
        stored = pl.ds(k * HALF + offset, PIECE)
        packed = [
            operands.weight[expert, stored, projection, features].astype(jnp.int32)
            for projection in range(shape.projections)
        ]
        for half in range(2):
            start = first + half * HALF + offset
            group = start // shape.group
            weights = []
            for projection, codes_KF in enumerate(packed):
                code_KF = codes_KF >> 4 * half & 15
                scale_F = operands.group_scale[expert, group, projection, features]
                if shape.codes == "float4":
                    w_KF = float4(code_KF)
                    scale_F = lax.bitcast_convert_type(scale_F.astype(jnp.int32) << 23, jnp.float32)
                elif shape.zeros:
                    zero_F = operands.group_zero[expert, group, projection, features]
                    w_KF = (code_KF - zero_F.astype(jnp.int32)[None]).astype(jnp.float32)
                else:
                    w_KF = (code_KF - MIDDLE).astype(jnp.float32)
                scale_F = scale_F.astype(jnp.float32)
                if shape.inputs % BLOCK and not half:
                    scale_F = jnp.where(num_repeated > 0, 0, scale_F)
                weights.append((w_KF * scale_F[None]).astype(operands.x.dtype))
            yield start, weights


def float4(code_KF):
    """Decode E2M1 codes with integer arithmetic: twice a magnitude is an integer."""
    size_KF = code_KF & 7
    twice_KF = jnp.where(
        size_KF < 2, size_KF, ((size_KF & 1) + 2) << jnp.maximum((size_KF >> 1) - 1, 0)
    )
    return jnp.where(code_KF < 8, twice_KF, -twice_KF).astype(jnp.float32) * 0.5
