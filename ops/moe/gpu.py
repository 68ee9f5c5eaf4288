"""Experts on NVIDIA GPUs: two grouped products over blocks of tokens, each with one expert's
weights.
"""

import math
from typing import Any

import jax.numpy as jnp

from ..linear.gpu_kernel import prepare
from ..linear.gpu_kernel.shape import Operands, ProductShape
from . import Experts
from .routing import align
from .routing.blocks import max_blocks
from .xla import add_pairs


def mix_experts(x_TD, weights_TX, experts_TX, num_experts: int, expert, interpret: Any = None):
    """See `quire.ops.moe.xla.mix_experts`."""
    machine = prepare.choose_kernel(interpret)
    if not isinstance(expert, Experts):
        raise NotImplementedError("experts must be two products, and not a function")
    up = prepare.as_gpu_matrix(expert.up_EDGF)
    down = prepare.as_gpu_matrix(expert.down_EFD)
    E, _, projections, F = up.array.shape
    D = x_TD.shape[1]
    if projections != 2:
        raise NotImplementedError("experts must have a gate")
    activation = None if expert.clamp is not None else expert.activation
    prepare.check_supported(machine, x_TD, up, D, F, activation, grouped=True)
    prepare.check_supported(machine, x_TD, down, F, D, grouped=True)
    T, X = experts_TX.shape
    rows = machine.block_rows(-(-T * X // num_experts), up.codes or down.codes)
    blocks = align(experts_TX, weights_TX, num_experts, rows)
    token_P = jnp.minimum(blocks.pair_P // X, T - 1)
    is_pair_P1 = (blocks.pair_P < T * X)[:, None]
    x_PD = jnp.where(is_pair_P1, x_TD[token_P], 0)

    def multiply(x_PK, matrix, bias, scale_P, dtype, **activation_options):
        stack = matrix.array
        inputs = x_PK.shape[1]
        outputs = matrix.array.shape[-1]
        projections = math.prod(stack.shape[2:-1])
        x_PK, row_scale_P = prepare.prepare_rows(x_PK, matrix)
        bias = None if bias is None else bias.astype(jnp.float32).reshape(E, projections, outputs)
        shape = ProductShape(
            blocks=max_blocks(T * X, num_experts, rows),
            rows=rows,
            experts=E,
            inputs=inputs,
            outputs=outputs,
            projections=projections,
            processors=machine.processors,
            kernel=machine.kernel,
            out_dtype=dtype,
            bias=bias is not None,
            weighted=scale_P is not None,
            **matrix.options,
            **activation_options,
        )
        stack = stack.reshape(E, -1, projections, outputs)
        scales = matrix.scales(E, projections, outputs) | {"row_scale": row_scale_P}
        operands = Operands(x_PK, stack, bias, scale_P, blocks.experts_B, blocks.count_1, **scales)
        return prepare.run(shape, operands, interpret)

    activation = {"activation": expert.activation, "clamp": expert.clamp, "alpha": expert.alpha}
    inner_PF = multiply(x_PD, up, expert.up_bias_EGF, None, x_TD.dtype.name, **activation)
    out_PD = multiply(inner_PF, down, expert.down_bias_ED, blocks.weight_P, "float32")
    out_ZD = out_PD.at[blocks.place_Z].get(mode="fill", fill_value=0)
    return add_pairs(out_ZD, X).astype(x_TD.dtype)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
