"""The Hopper kernel that rounds rows to int8 or float8. Each program computes one row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gpu.tile import Tiles
from ..residual.hopper_kernel import load_row, quantise
from ..residual.shape import LINE, ResidualShape


def code_rows(x_RK, codes: str, interpret: Any = None):
    """(quantised values in x's dtype, scale of each row)."""
    R, K = x_RK.shape
    shape = ResidualShape(K // LINE, 0.0, codes)
    tiles = Tiles(interpret is not None)
    x_RLC = x_RK.reshape(R, shape.lines, LINE)

    def body(x, codes_out, scales_out) -> None:
        def run(smem_row, copy_barrier) -> None:
            row = lax.axis_index("row")
            lines = pl.ds(0, shape.lines)
            plgpu.copy_gmem_to_smem(x.at[row], smem_row.at[lines], copy_barrier)
            plgpu.barrier_wait(copy_barrier)
            x_LC = load_row(shape, tiles, smem_row)
            codes_LC, scale = quantise(codes, tiles, x_LC)
            smem_row[...] = codes_LC.astype(smem_row.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem_row.at[lines], codes_out.at[row])
            scales_out[row] = scale
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(run, plgpu.SMEM((shape.padded, LINE), x_RK.dtype), plgpu.Barrier())

    outputs: Any = pl.kernel(
        body,
        (jax.ShapeDtypeStruct(x_RLC.shape, x_RK.dtype), jax.ShapeDtypeStruct((R,), jnp.float32)),
        mesh=plgpu.Mesh(grid=(R,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="round_rows",
    )(x_RLC)
    codes_RLC, scale_R = outputs
    return codes_RLC.reshape(R, K), scale_R
