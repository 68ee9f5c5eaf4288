"""The kernel that makes codes of rows: one program a row, of which each thread has some numbers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gpu.tile import Tiles
from ..residual.hopper_kernel import code, numbers
from ..residual.shape import LINE, RowShape


def code_rows(x_RK, codes: str, interpret: Any = None):
    """(codes, scale of each row)."""
    R, K = x_RK.shape
    shape = RowShape(K // LINE, 0.0, codes)
    tiles = Tiles(interpret is not None)
    x_RLC = x_RK.reshape(R, shape.lines, LINE)

    def body(x, coded, scales) -> None:
        def run(own, here) -> None:
            row = lax.axis_index("row")
            some = pl.ds(0, shape.lines)
            plgpu.copy_gmem_to_smem(x.at[row], own.at[some], here)
            plgpu.barrier_wait(here)
            x_LC = numbers(shape, tiles, own)
            codes_LC, scale = code(codes, tiles, x_LC)
            own[...] = codes_LC.astype(own.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own.at[some], coded.at[row])
            scales[row] = scale
            plgpu.wait_smem_to_gmem(0)

        pl.run_scoped(run, plgpu.SMEM((shape.padded, LINE), x_RK.dtype), plgpu.Barrier())

    found: Any = pl.kernel(
        body,
        (jax.ShapeDtypeStruct(x_RLC.shape, x_RK.dtype), jax.ShapeDtypeStruct((R,), jnp.float32)),
        mesh=plgpu.Mesh(grid=(R,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="round_rows",
    )(x_RLC)
    codes_RLC, scale_R = found
    return codes_RLC.reshape(R, K), scale_R
