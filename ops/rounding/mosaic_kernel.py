"""The kernel that makes codes of rows: one program a row, of which each thread has some numbers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..attention.mosaic.tile import Tiles
from ..quant.int8 import LIMIT
from ..residual.mosaic_kernel import numbers
from ..residual.shape import LINE, RowShape


def code_rows(x_RK, interpret: Any = None):
    """(codes, scale of each row)."""
    R, K = x_RK.shape
    shape, tiles = RowShape(K // LINE, 0.0), Tiles(interpret is not None)
    x_RLC = x_RK.reshape(R, shape.lines, LINE)

    def body(x, codes, scales) -> None:
        def run(own, here) -> None:
            row, some = lax.axis_index("row"), pl.ds(0, shape.lines)
            plgpu.copy_gmem_to_smem(x.at[row], own.at[some], here)
            plgpu.barrier_wait(here)
            x_LC = numbers(shape, tiles, own)
            most = jnp.max(jnp.abs(x_LC))
            inverse = jnp.where(most > 0, LIMIT / most, 0.0)  # of a row with NaN none: its codes are zeros
            codes_LC = jnp.round(jnp.where(jnp.abs(x_LC) < jnp.inf, x_LC, 0.0) * inverse)
            own[...] = codes_LC.astype(own.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own.at[some], codes.at[row])
            scales[row] = most / LIMIT + jnp.sum(x_LC * 0.0)  # NaN where the row is not finite
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
