"""The same product on NVIDIA GPUs of other generations: a program is one block of rows and 64
outputs.

Triton compiles it for each card. As in `hopper.py`, weights are the left operand, so that blocks of
every size are multiplied by the same instructions, and one program sums all inputs of an output in
one order. Codes become numbers in registers.
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
PIECE = 32  # inputs that are decoded at once: groups are of as many or more


def multiply(shape: ProductShape, operands: Operands, *, interpret: Any = None):
    """[blocks * rows, outputs]; blocks that there are not hold anything."""
    names = [name for name, x in operands._asdict().items() if x is not None]
    tiles = shape.outputs // FEATURES
    # row after row meets the same part of the weight while that is in the card's cache
    dense = shape.experts == 1
    return pl.pallas_call(
        functools.partial(run, shape, names, dense, interpret is not None),
        out_shape=jax.ShapeDtypeStruct((shape.blocks * shape.rows, shape.outputs), shape.out_dtype),
        grid=(shape.blocks, tiles) if dense else (tiles, shape.blocks),
        compiler_params=plgpu.CompilerParams(num_warps=warps(shape), num_stages=stages(shape)),
        interpret=interpret is not None,
        name="product",
    )(*(x for x in operands if x is not None))


def warps(shape: ProductShape) -> int:
    return 8 if shape.rows > 64 else 4


def stages(shape: ProductShape) -> int:
    """Steps that are copied ahead: 99 KiB of shared memory are what the smallest cards have for a
    program.
    """
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
    numbers = of_four_bits if shape.packed else of_a_step

    def add(k, sums):
        for start, weights in numbers(shape, operands, expert, features, k):
            x_RK = operands.x[rows, pl.ds(start, len(weights[0]))]
            sums = [
                add_product(total, w_KF, x_RK, interpreted)
                for total, w_KF in zip(sums, weights, strict=True)
            ]
        return sums

    nothing = [jnp.zeros((FEATURES, shape.rows), jnp.float32)] * shape.parts
    steps = -(-shape.inputs // (BLOCK if shape.packed else HALF))
    parts = []
    for part, y_FR in enumerate(lax.fori_loop(0, steps, add, nothing)):
        if operands.output_scale is not None:
            y_FR = y_FR * operands.output_scale[expert, part, features][:, None]
        if operands.row_scale is not None:
            y_FR = y_FR * operands.row_scale[rows][None]
        if operands.bias is not None:
            y_FR = y_FR + operands.bias[expert, part, features][:, None]
        parts.append(y_FR)
    y_FR = (
        parts[0]
        if shape.parts == 1
        else combine(*parts, shape.activation or "", shape.clamp, shape.alpha)
    )
    if operands.scale is not None:
        y_FR = y_FR * operands.scale[rows][None]
    out[rows, features] = y_FR.astype(shape.out_dtype).T


def add_product(total_FR, w_KF, x_RK, interpreted: bool):
    if not interpreted:
        return total_FR + plgpu.dot(w_KF, x_RK, trans_a=True, trans_b=True)
    # A product's order could depend on its sizes there.
    x_NK = jnp.pad(x_RK, ((0, BLOCKS[-1] - len(x_RK)), (0, 0)))
    return total_FR + jnp.dot(w_KF.T, x_NK.T, preferred_element_type=jnp.float32)[:, : len(x_RK)]


def of_a_step(shape: ProductShape, operands: Operands, expert, features, k):
    """(the first input, the weights of each part) of a step."""
    start = k * HALF
    dtype = operands.x.dtype
    codes = [
        operands.weight[expert, pl.ds(start, HALF), part, features] for part in range(shape.parts)
    ]
    decode = fp8.decode_e4m3 if shape.codes == "float8" else lambda codes_KF: codes_KF
    return [(start, [decode(codes_KF).astype(dtype) for codes_KF in codes])]


def of_four_bits(shape: ProductShape, operands: Operands, expert, features, k):
    """(the first input, the weights of each part), of the groups of a block. The last block ends
    with the last input: what it holds once more counts as zero."""
    first = jnp.minimum(k * BLOCK, shape.inputs - BLOCK)
    again = k * BLOCK - first
    for at in range(0, HALF, PIECE):
        stored = pl.ds(k * HALF + at, PIECE)
        packed = [
            operands.weight[expert, stored, part, features].astype(jnp.int32)
            for part in range(shape.parts)
        ]
        for half in range(2):
            start = first + half * HALF + at
            group = start // shape.group
            weights = []
            for part, codes_KF in enumerate(packed):
                code_KF = codes_KF >> 4 * half & 15
                scale_F = operands.group_scale[expert, group, part, features]
                if shape.codes == "float4":
                    w_KF = float4(code_KF)
                    scale_F = lax.bitcast_convert_type(scale_F.astype(jnp.int32) << 23, jnp.float32)
                elif shape.zeros:
                    zero_F = operands.group_zero[expert, group, part, features]
                    w_KF = (code_KF - zero_F.astype(jnp.int32)[None]).astype(jnp.float32)
                else:
                    w_KF = (code_KF - MIDDLE).astype(jnp.float32)
                scale_F = scale_F.astype(jnp.float32)
                if shape.inputs % BLOCK and not half:
                    scale_F = jnp.where(again > 0, 0, scale_F)
                weights.append((w_KF * scale_F[None]).astype(operands.x.dtype))
            yield start, weights


def float4(code_KF):
    """E2M1 by its bits: twice the size is a whole number."""
    size_KF = code_KF & 7
    twice_KF = jnp.where(
        size_KF < 2, size_KF, ((size_KF & 1) + 2) << jnp.maximum((size_KF >> 1) - 1, 0)
    )
    return jnp.where(code_KF < 8, twice_KF, -twice_KF).astype(jnp.float32) * 0.5
