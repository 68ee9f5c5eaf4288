"""From arrays of a model to the kernel's operands: what it takes, and how rows are cut into
blocks.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...attention import triton
from ...gpu import TILE_SOURCE, device
from ...gpu.self_test import TRITON, SelfTestedKernel, require_pass
from ...quant import four_bits
from ...quant.four_bits import BLOCK
from ...rounding import round_rows
from ..weight import GpuMatrix, RoundedRows, Weight, plain
from .shape import FEATURES, FOUR_BITS, Operands, ProductShape, block_sizes

SOURCES = (
    *Path(__file__).parent.glob("*.py"),
    TILE_SOURCE,
    Path(__file__).parents[2] / "activation.py",
)
KERNEL = SelfTestedKernel(f"{__package__}.accuracy", "a product with weights", SOURCES)
TRITON_KERNEL = replace(KERNEL, compiler=TRITON)
SUMMANDS = 3  # of bfloat16, with eight bits each, that a float32 is cut into
ACTIVATIONS = "silu", "gelu_tanh", "relu"


class Machine(NamedTuple):
    """What computes the products here."""

    kernel: str  # as in `ProductShape`, and so is `processors`
    processors: int

    def block_rows(self, rows: int, codes: str | None) -> int:
        """The smallest block that holds these rows, or the largest.

        An output's bits are the same in all.
        """
        sizes = block_sizes(self.kernel, codes)
        return next((size for size in sizes if rows <= size), sizes[-1])


def machine(interpret: Any) -> Machine:
    """Hopper's own kernel, or for the other generations Triton's. `interpret`: parameters of Mosaic
    GPU's interpreter, or True for Pallas' own, which has Triton's kernel."""
    if interpret is not None:
        return Machine("triton" if interpret is True else "mosaic", 3)
    if device.is_hopper():
        return Machine("mosaic", device.num_processors())
    if (reason := device.no_ampere_reason()) is not None:
        raise NotImplementedError(reason)
    return Machine("triton", device.num_processors())


def require(
    here: Machine, x, matrix: GpuMatrix, inputs: int, outputs: int, activation: str | None = None,
    turned: bool = False, grouped: bool = False,
) -> None:  # fmt: skip
    """Declines what the kernel cannot serve, with all that stands against it."""
    reasons = []
    if here.kernel == "triton":
        if turned or matrix.summands > 1 or not (grouped or matrix.codes):
            reasons.append(
                "on this card the kernel is for experts and for codes: other products XLA "
                "does as well"
            )
        if triton.beyond_offsets(matrix.array):
            reasons.append(f"codes must not be {triton.BEYOND}")
        if matrix.group and matrix.group not in (32, 64, BLOCK):
            reasons.append(f"groups must be of 32, 64 or {BLOCK} inputs, not {matrix.group}")
    if x.dtype != jnp.bfloat16:
        reasons.append(f"rows must be bfloat16, not {x.dtype}")
    if matrix.codes is None and matrix.array.dtype != jnp.bfloat16:
        reasons.append(f"weights must be bfloat16 or codes, not {matrix.array.dtype}")
    if inputs % FEATURES or outputs % FEATURES:
        reasons.append(
            f"inputs and outputs must divide by {FEATURES}, and are {inputs} and {outputs}"
        )
    elif matrix.group and (inputs < BLOCK or inputs % matrix.group):
        reasons.append(
            f"inputs must be {BLOCK} or more and divide by the group of {matrix.group}, and "
            f"are {inputs}"
        )
    if matrix.zero is not None and inputs < 2 * matrix.group:
        reasons.append(
            f"inputs with zero points must be of two groups of {matrix.group} or more, and are "
            f"{inputs}"
        )
    if activation is not None and activation not in ACTIVATIONS:
        reasons.append(f"the activation must be one of {', '.join(ACTIVATIONS)}, not {activation}")
    if reasons:
        raise NotImplementedError("; ".join(reasons))


def run(shape: ProductShape, operands: Operands, interpret: Any):
    """The product, where the kernel has passed its trial for such products."""
    if interpret is None:
        require_trial(shape)
    return multiply(shape, operands, interpret)


def multiply(shape: ProductShape, operands: Operands, interpret: Any):
    """By the kernel of the shape, which is imported only now: it imports a compiler."""
    if shape.kernel == "triton":
        from . import triton as kernel
    else:
        from . import hopper as kernel
    return kernel.multiply(shape, operands, interpret=interpret)


def require_trial(shape: ProductShape) -> None:
    """Declines a kind of product that the kernel has not been seen to get right on this card."""
    kind = {
        "grouped": shape.experts > 1,
        "parts": shape.parts,
        "turned": shape.turned,
        "activation": shape.activation,
        "clamp": shape.clamp,
        "alpha": shape.alpha,
        "bias": shape.bias,
        "weighed": shape.weighed,
        "out_dtype": shape.out_dtype,
        "codes": shape.codes,
        "group": shape.group,
        "zeros": shape.zeros,
        "rounded": shape.rounded,
        "summands": shape.summands,
        "kernel": shape.kernel,
    }
    require_pass(TRITON_KERNEL if shape.kernel == "triton" else KERNEL, kind)


def matrix(weight) -> GpuMatrix:
    """What the kernel reads of an array, or of a node."""
    return weight.gpu_matrix() if isinstance(weight, Weight) else GpuMatrix(weight)


def meeting_rows(x_PK, matrix: GpuMatrix):
    """The rows as the kernel takes them, and the scale of each if they are rounded: bfloat16 holds
    codes exactly.
    """
    if not matrix.rounded:
        return plain(x_PK), None
    if isinstance(x_PK, RoundedRows) and x_PK.kind == matrix.codes:
        return x_PK.codes, x_PK.scale
    return round_rows(plain(x_PK), matrix.codes or "")


def summands(w_KO):
    """A float32 matrix as bfloat16 [3 * K, O]: three whose sum has all its bits, the smallest
    first.
    """

    def cut(w_KO):  # by its bits: of a conversion and its inverse XLA may make nothing
        bits_KO = jax.lax.bitcast_convert_type(w_KO, jnp.uint32) & jnp.uint32(0xFFFF0000)
        return jax.lax.bitcast_convert_type(bits_KO, jnp.float32)

    large_KO = cut(w_KO)
    middle_KO = cut(w_KO - large_KO)
    return jnp.concatenate([w_KO - large_KO - middle_KO, middle_KO, large_KO]).astype(jnp.bfloat16)


def dense(
    x_RK,
    matrix: GpuMatrix,
    bias=None,
    *,
    dtype,
    parts: int = 1,
    turned: bool = False,
    activation: str | None = None,
    interpret: Any = None,
):
    """[R, outputs] of rows and one weight: [K, parts * outputs], or turned [outputs, K]."""
    weight = matrix.array
    rows, inputs = plain(x_RK).shape
    stored = four_bits.count(inputs) if matrix.codes in FOUR_BITS else inputs * matrix.summands
    outputs = math.prod(weight.shape) // stored // parts
    here = machine(interpret)
    require(here, plain(x_RK), matrix, inputs, outputs, activation, turned)
    size = here.block_rows(rows, matrix.codes)
    blocks = -(-rows // size)
    shape = ProductShape(
        blocks=blocks, rows=size, experts=1, inputs=inputs, outputs=outputs, parts=parts,
        processors=here.processors, out_dtype=jnp.dtype(dtype).name, activation=activation,
        bias=bias is not None, turned=turned, kernel=here.kernel, **matrix.options,
    )  # fmt: skip
    missing = blocks * size - rows
    x_PK = jax.tree.map(lambda x: jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))), x_RK)
    x_PK, row_scale_P = meeting_rows(x_PK, matrix)
    weight = weight.reshape((1, outputs, inputs) if turned else (1, stored, parts, outputs))
    scales = matrix.scales(1, parts, outputs)
    bias = None if bias is None else bias.astype(jnp.float32).reshape(1, parts, outputs)
    experts = jnp.zeros(blocks, jnp.int32)
    count = jnp.full(1, blocks, jnp.int32)
    operands = Operands(x_PK, weight, bias, None, experts, count, row_scale=row_scale_P, **scales)
    return run(shape, operands, interpret)[:rows]


def each(x_TNK, matrix: GpuMatrix, *, dtype, interpret: Any = None):
    """[T, N, outputs] of rows with N heads and the weight of each, [N, outputs, K]."""
    T, N, inputs = x_TNK.shape
    outputs = matrix.array.shape[1]
    here = machine(interpret)
    require(here, x_TNK, matrix, inputs, outputs, turned=True, grouped=True)
    size = here.block_rows(T, matrix.codes)
    blocks = -(-T // size)
    shape = ProductShape(
        blocks=N * blocks,
        rows=size,
        experts=N,
        inputs=inputs,
        outputs=outputs,
        parts=1,
        processors=here.processors,
        out_dtype=jnp.dtype(dtype).name,
        turned=True,
        kernel=here.kernel,
        **matrix.options,
    )
    x_NPK = jnp.pad(jnp.swapaxes(x_TNK, 0, 1), ((0, 0), (0, blocks * size - T), (0, 0)))
    heads = jnp.repeat(jnp.arange(N, dtype=jnp.int32), blocks)
    count = jnp.full(1, N * blocks, jnp.int32)
    operands = Operands(x_NPK.reshape(-1, inputs), matrix.array, None, None, heads, count)
    y_NPO = run(shape, operands, interpret).reshape(N, blocks * size, outputs)
    return jnp.swapaxes(y_NPO[:, :T], 0, 1)
