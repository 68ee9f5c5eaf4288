"""Prepares a model's arrays for the product kernels: support checks, blocks of rows, operands."""

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
SUMMANDS = 3  # bfloat16 numbers, with eight bits each, into which a float32 is split
ACTIVATIONS = "silu", "gelu_tanh", "relu"


class KernelChoice(NamedTuple):
    """The kernel for this process's GPU."""

    kernel: str  # as in `ProductShape`
    processors: int  # as in `ProductShape`

    def block_rows(self, rows: int, codes: str | None) -> int:
        """Rows of the smallest block that holds these rows, or of the largest block.

        The size of the blocks does not change a result's bits.
        """
        sizes = block_sizes(self.kernel, codes)
        return next((size for size in sizes if rows <= size), sizes[-1])


def choose_kernel(interpret: Any) -> KernelChoice:
    """Choose the Mosaic kernel on Hopper, the Triton kernel on other generations.

    Args:
        interpret: Parameters of Mosaic GPU's interpreter, or True for Pallas' own interpreter,
            which runs the Triton kernel; None for the GPU.
    """
    if interpret is not None:
        return KernelChoice("triton" if interpret is True else "mosaic", 3)
    if device.is_hopper():
        return KernelChoice("mosaic", device.num_processors())
    if (reason := device.no_ampere_reason()) is not None:
        raise NotImplementedError(reason)
    return KernelChoice("triton", device.num_processors())


def check_supported(
    choice: KernelChoice,
    x,
    matrix: GpuMatrix,
    inputs: int,
    outputs: int,
    activation: str | None = None,
    transposed: bool = False,
    grouped: bool = False,
) -> None:
    """Raise NotImplementedError with all reasons why the kernel does not support a product."""
    reasons = []
    if choice.kernel == "triton":
        if transposed or matrix.summands > 1 or not (grouped or matrix.codes):
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
    """Compute the product; NotImplementedError if the kernel failed its self-test for this kind."""
    if interpret is None:
        require_self_test(shape)
    return multiply(shape, operands, interpret)


def multiply(shape: ProductShape, operands: Operands, interpret: Any):
    """Compute the product by `shape.kernel`, imported on use because it imports a compiler."""
    if shape.kernel == "triton":
        from . import triton as kernel
    else:
        from . import hopper as kernel
    return kernel.multiply(shape, operands, interpret=interpret)


def require_self_test(shape: ProductShape) -> None:
    """Raise NotImplementedError unless the kernel passes its self-test for this kind of product."""
    kind = {
        "grouped": shape.experts > 1,
        "projections": shape.projections,
        "transposed": shape.transposed,
        "activation": shape.activation,
        "clamp": shape.clamp,
        "alpha": shape.alpha,
        "bias": shape.bias,
        "weighted": shape.weighted,
        "out_dtype": shape.out_dtype,
        "codes": shape.codes,
        "group": shape.group,
        "zeros": shape.zeros,
        "rounded": shape.rounded,
        "summands": shape.summands,
        "kernel": shape.kernel,
    }
    require_pass(TRITON_KERNEL if shape.kernel == "triton" else KERNEL, kind)


def as_gpu_matrix(weight) -> GpuMatrix:
    """The arrays of an array or node as the kernels read them."""
    return weight.gpu_matrix() if isinstance(weight, Weight) else GpuMatrix(weight)


def prepare_rows(x_PK, matrix: GpuMatrix):
    """The rows as the kernel takes them, and each row's scale if they are quantised.

    Quantised values are passed in bfloat16, which holds them exactly.
    """
    if not matrix.rounded:
        return plain(x_PK), None
    if isinstance(x_PK, RoundedRows) and x_PK.kind == matrix.codes:
        return x_PK.codes, x_PK.scale
    return round_rows(plain(x_PK), matrix.codes or "")


def summands(w_KO):
    """Split a float32 matrix into bfloat16 summands: [3 * K, O], the smallest summand first.

    Their sum has all bits of the matrix.
    """

    def cut(w_KO):  # bitwise, because XLA may remove a conversion that is followed by its inverse
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
    projections: int = 1,
    transposed: bool = False,
    activation: str | None = None,
    interpret: Any = None,
):
    """Multiply rows with one weight.

    Args:
        x_RK: Rows, or `RoundedRows`.
        matrix: The weight, [K, projections * outputs], or [outputs, K] if transposed.

    Returns:
        [R, outputs].
    """
    weight = matrix.array
    rows, inputs = plain(x_RK).shape
    stored = four_bits.count(inputs) if matrix.codes in FOUR_BITS else inputs * matrix.summands
    outputs = math.prod(weight.shape) // stored // projections
    choice = choose_kernel(interpret)
    check_supported(choice, plain(x_RK), matrix, inputs, outputs, activation, transposed)
    size = choice.block_rows(rows, matrix.codes)
    blocks = -(-rows // size)
    shape = ProductShape(
        blocks=blocks,
        rows=size,
        experts=1,
        inputs=inputs,
        outputs=outputs,
        projections=projections,
        processors=choice.processors,
        out_dtype=jnp.dtype(dtype).name,
        activation=activation,
        bias=bias is not None,
        transposed=transposed,
        kernel=choice.kernel,
        **matrix.options,
    )
    missing = blocks * size - rows
    x_PK = jax.tree.map(lambda x: jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))), x_RK)
    x_PK, row_scale_P = prepare_rows(x_PK, matrix)
    weight = weight.reshape(
        (1, outputs, inputs) if transposed else (1, stored, projections, outputs)
    )
    scales = matrix.scales(1, projections, outputs)
    bias = None if bias is None else bias.astype(jnp.float32).reshape(1, projections, outputs)
    experts = jnp.zeros(blocks, jnp.int32)
    count = jnp.full(1, blocks, jnp.int32)
    operands = Operands(x_PK, weight, bias, None, experts, count, row_scale=row_scale_P, **scales)
    return run(shape, operands, interpret)[:rows]


def multiply_heads(x_TNK, matrix: GpuMatrix, *, dtype, interpret: Any = None):
    """Multiply each head's rows with the head's weight, [N, outputs, K]; [T, N, outputs]."""
    T, N, inputs = x_TNK.shape
    outputs = matrix.array.shape[1]
    choice = choose_kernel(interpret)
    check_supported(choice, x_TNK, matrix, inputs, outputs, transposed=True, grouped=True)
    size = choice.block_rows(T, matrix.codes)
    blocks = -(-T // size)
    shape = ProductShape(
        blocks=N * blocks,
        rows=size,
        experts=N,
        inputs=inputs,
        outputs=outputs,
        projections=1,
        processors=choice.processors,
        out_dtype=jnp.dtype(dtype).name,
        transposed=True,
        kernel=choice.kernel,
        **matrix.options,
    )
    x_NPK = jnp.pad(jnp.swapaxes(x_TNK, 0, 1), ((0, 0), (0, blocks * size - T), (0, 0)))
    heads = jnp.repeat(jnp.arange(N, dtype=jnp.int32), blocks)
    count = jnp.full(1, N * blocks, jnp.int32)
    operands = Operands(x_NPK.reshape(-1, inputs), matrix.array, None, None, heads, count)
    y_NPO = run(shape, operands, interpret).reshape(N, blocks * size, outputs)
    return jnp.swapaxes(y_NPO[:, :T], 0, 1)
