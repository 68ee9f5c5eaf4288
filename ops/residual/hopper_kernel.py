"""The Hopper kernel that adds two rows and normalises the sum. Each program computes one row.

The sum is rounded to the dtype before it is normalised, as in the XLA implementation. If there is
nothing to add, the kernel computes only the norm.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..gpu.tile import Tiles
from ..linear.weight import RoundedRows
from ..norm import LayerNorm, scale_and_bias
from ..quant import fp8, int8
from . import Residual
from .shape import LINE, VECTOR, ResidualShape


class ResidualRefs(NamedTuple):
    """The kernel's references; None for those that a shape does not use. `smem_*` are in shared
    memory.
    """

    x: Any
    scale: Any
    normed: Any
    smem_x: Any
    smem_scale: Any
    copy_barrier: Any
    y: Any = None
    sum: Any = None
    smem_y: Any = None
    codes: Any = None
    code_scale: Any = None
    smem_codes: Any = None
    y_scale: Any = None
    smem_y_scale: Any = None
    bias: Any = None
    smem_bias: Any = None
    y_bias: Any = None
    smem_y_bias: Any = None


def sum_and_norm(
    rows: Residual, scale_D, eps: float, rounds: str | None = None, interpret: Any = None
):
    """(the sum, its norm); with `rounds` the norm is `RoundedRows`."""
    T, D = rows.x_TD.shape
    has_y = rows.y_TD is not None
    is_centred = (isinstance(weights, LayerNorm) for weights in (scale_D, rows.scale_D))
    shape = ResidualShape(D // LINE, eps, rounds, *is_centred)
    inputs = (
        {"x": rows.x_TD}
        | ({"y": rows.y_TD} if has_y else {})
        | norm_weights(scale_D)
        | norm_weights(rows.scale_D, "y_")
    )
    inputs = {
        name: array.reshape(*array.shape[:-1], shape.lines, LINE) for name, array in inputs.items()
    }
    scratch: dict[str, Any] = {
        f"smem_{name}": plgpu.SMEM((shape.padded, LINE), array.dtype)
        for name, array in inputs.items()
    }
    scratch["copy_barrier"] = plgpu.Barrier(num_arrivals=len(inputs))
    row = jax.ShapeDtypeStruct(inputs["x"].shape, rows.x_TD.dtype)
    results = {"sum": row, "normed": row} if has_y else {"normed": row}
    if rounds is not None:
        results |= {"codes": row, "code_scale": jax.ShapeDtypeStruct((T,), jnp.float32)}
        scratch["smem_codes"] = scratch["smem_x"]
    ref_names = [*inputs, *results]

    def body(*refs) -> None:
        named = dict(zip(ref_names, refs, strict=True))
        tiles = Tiles(interpret is not None)
        pl.run_scoped(
            lambda **shared: run(shape, tiles, ResidualRefs(**named, **shared)), **scratch
        )

    outputs: Any = pl.kernel(
        body,
        tuple(results.values()),
        mesh=plgpu.Mesh(grid=(T,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="sum_and_norm",
    )(*inputs.values())
    sum_TD, normed_TD, *quantised = [
        *([] if has_y else [rows.x_TD]),
        *(array.reshape(T, -1) for array in outputs),
    ]
    if rounds is None:
        return sum_TD, normed_TD
    return sum_TD, RoundedRows(normed_TD, quantised[0], quantised[1][:, 0], rounds)


def norm_weights(norm, prefix: str = "") -> dict[str, Any]:
    """The scale and the bias of a norm in float32, without missing ones."""
    named_weights = zip(("scale", "bias"), scale_and_bias(norm), strict=True)
    return {
        f"{prefix}{name}": array.astype(jnp.float32)
        for name, array in named_weights
        if array is not None
    }


def run(shape: ResidualShape, tiles: Tiles, refs: ResidualRefs) -> None:
    """The program for one row."""
    t = lax.axis_index("row")
    row = pl.ds(0, shape.lines)
    copies = [(refs.x.at[t], refs.smem_x), (refs.scale, refs.smem_scale)]
    if refs.y is not None:
        copies.append((refs.y.at[t], refs.smem_y))
    copies += [
        (refs.bias, refs.smem_bias),
        (refs.y_scale, refs.smem_y_scale),
        (refs.y_bias, refs.smem_y_bias),
    ]
    for source, destination in copies:
        if source is not None:
            plgpu.copy_gmem_to_smem(source, destination.at[row], refs.copy_barrier)
    plgpu.barrier_wait(refs.copy_barrier)
    load = functools.partial(load_row, shape, tiles)
    dtype = refs.smem_x.dtype
    smem_normed = refs.smem_x if refs.y is None else refs.smem_y
    x_f32_LC = load(refs.smem_x)
    if refs.y is not None:
        y_LC = load(refs.smem_y)
        if refs.smem_y_scale is not None:
            y_LC = scale_and_shift(
                normalise(shape, tiles, y_LC, shape.added_centred),
                load,
                refs.smem_y_scale,
                refs.smem_y_bias,
            )
            y_LC = y_LC.astype(dtype).astype(jnp.float32)
        sum_LC = (x_f32_LC + y_LC).astype(dtype)
        refs.smem_x[...] = sum_LC
        x_f32_LC = sum_LC.astype(jnp.float32)
    normed_LC = scale_and_shift(
        normalise(shape, tiles, x_f32_LC, shape.centred), load, refs.smem_scale, refs.smem_bias
    ).astype(dtype)
    smem_normed[...] = normed_LC
    if shape.rounds is not None:
        codes_LC, scale = quantise(shape.rounds, tiles, normed_LC.astype(jnp.float32))
        refs.smem_codes[...] = codes_LC.astype(dtype)
        refs.code_scale[t] = scale
    plgpu.commit_smem()
    if refs.y is not None:
        plgpu.copy_smem_to_gmem(refs.smem_x.at[row], refs.sum.at[t])
    plgpu.copy_smem_to_gmem(smem_normed.at[row], refs.normed.at[t])
    if shape.rounds is not None:
        plgpu.copy_smem_to_gmem(refs.smem_codes.at[row], refs.codes.at[t])
    plgpu.wait_smem_to_gmem(0)


def load_row(shape: ResidualShape, tiles: Tiles, ref):
    """Load a row as float32, with zeros for the padding."""
    return mask_padding(
        shape, tiles, tiles.load_as(ref, row_layout(shape), True).astype(jnp.float32)
    )


def row_layout(shape: ResidualShape):
    return plgpu.Layout.WG_STRIDED((shape.padded, LINE), vec_size=VECTOR)


def mask_padding(shape: ResidualShape, tiles: Tiles, x_LC):
    """Replace the padding after a row by zeros."""
    if shape.padded == shape.lines:
        return x_LC
    return jnp.where(tiles.index(x_LC.shape, 0, row_layout(shape)) < shape.lines, x_LC, 0.0)


def normalise(shape: ResidualShape, tiles: Tiles, x_LC, centred: bool):
    """Normalise a row to a mean square of 1 and, if `centred`, a mean of 0."""
    inverse_width = 1 / (shape.lines * LINE)
    if centred:
        x_LC = mask_padding(shape, tiles, x_LC - jnp.sum(x_LC) * inverse_width)
    return x_LC * lax.rsqrt(jnp.sum(x_LC * x_LC) * inverse_width + shape.eps)


def scale_and_shift(x_LC, load, scale, bias):
    """Apply the scale and the bias of a norm; None: no bias."""
    x_LC = x_LC * load(scale)
    return x_LC if bias is None else x_LC + load(bias)


def quantise(dtype: str, tiles: Tiles, x_LC):
    """Round a float32 row to int8 or float8: (rounded values as float32, scale)."""
    max_abs = jnp.max(jnp.abs(x_LC))
    limit = int8.LIMIT if dtype == "int8" else fp8.LIMIT
    inverse = jnp.where(max_abs > 0, limit / max_abs, 0.0)  # 0 for a row with NaN
    scaled_LC = jnp.where(jnp.abs(x_LC) < jnp.inf, x_LC, 0.0) * inverse
    if dtype == "int8":
        codes_LC = jnp.round(scaled_LC)
    else:
        bits_LC = lax.bitcast_convert_type(scaled_LC.astype(jnp.float8_e4m3fn), jnp.uint8).astype(
            jnp.int16
        )
        codes_LC = tiles.from_float8(bits_LC)
    return codes_LC, max_abs / limit + jnp.sum(x_LC * 0.0)  # NaN for a row that is not finite
