"""What the kernels do with tiles: one body for the device and for the interpreter on a CPU.

The interpreter knows neither layouts nor products with an operand in registers or transposed, so it gets plain ones;
what it reads of shared memory it reads at the same place, so that it finds the same races.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2_E = 1.4426950408889634


class Tiles:
    """Products, constants and indices of tiles of 64 rows."""

    def __init__(self, interpreted: bool):
        self.interpreted = interpreted

    def load(self, ref, swizzled: bool = False):
        """A tile in registers, as products take it; from plain memory its threads wait for each other."""
        return ref[...] if self.interpreted else plgpu.load(ref, (), layout=plgpu.Layout.WGMMA, optimized=swizzled)

    def load_rows(self, ref):
        """One number for each row."""
        return (
            ref[...] if self.interpreted else plgpu.load(ref, (), layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        )

    def full(self, shape, value):
        """A float32 tile, or one number for each of its rows."""
        found = jnp.full(shape, value, jnp.float32)
        if self.interpreted:
            return found
        return plgpu.layout_cast(found, plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1))

    def index(self, shape, axis: int):
        if self.interpreted:
            return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def scores(self, q_MH, k_JH_ref):
        """q @ k.T, of a tile in registers and one in shared memory."""
        if self.interpreted:
            return jnp.dot(q_MH.astype(jnp.float32), k_JH_ref[...].astype(jnp.float32).T)

        def multiply(sum_ref):
            plgpu.wgmma(sum_ref, q_MH, plgpu.transpose_ref(k_JH_ref, (1, 0)))
            return sum_ref[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((q_MH.shape[0], k_JH_ref.shape[0]), jnp.float32))

    def add_product(self, sum_MH, p_MJ, v_JH_ref):
        """sum + p @ v."""
        if self.interpreted:
            return sum_MH + jnp.dot(p_MJ.astype(jnp.float32), v_JH_ref[...].astype(jnp.float32))

        def multiply(sum_ref):
            plgpu.wgmma(sum_ref, p_MJ, v_JH_ref)

        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(sum_MH))


def along_rows(x_M, shape):
    """One number for each row, as a tile."""
    return jax.lax.broadcast_in_dim(x_M, shape, [0])
