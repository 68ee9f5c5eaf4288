"""The kernel that adds two rows and normalises the sum: one program a row, of which each thread has
some numbers.

The sum is rounded before it is normalised, as XLA's way rounds it. Where there is nothing to add it
is a norm alone.
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
from .shape import LINE, VECTOR, RowShape


class Refs(NamedTuple):
    """References; None where a shape does not use one."""

    x: Any
    scale: Any
    normed: Any
    own_x: Any  # in shared memory, as what follows
    own_scale: Any
    here: Any
    y: Any = None
    sum: Any = None
    own_y: Any = None
    codes: Any = None
    code_scale: Any = None
    own_codes: Any = None
    y_scale: Any = None
    own_y_scale: Any = None
    bias: Any = None
    own_bias: Any = None
    y_bias: Any = None
    own_y_bias: Any = None


def sum_and_norm(
    rows: Residual, scale_D, eps: float, rounds: str | None = None, interpret: Any = None
):
    """(the sum, its norm), and the norm's codes if it `rounds`."""
    T, D = rows.x_TD.shape
    adds = rows.y_TD is not None
    centred = (isinstance(weights, LayerNorm) for weights in (scale_D, rows.scale_D))
    shape = RowShape(D // LINE, eps, rounds, *centred)
    given = (
        {"x": rows.x_TD}
        | ({"y": rows.y_TD} if adds else {})
        | weights_of(scale_D)
        | weights_of(rows.scale_D, "y_")
    )
    given = {
        name: array.reshape(*array.shape[:-1], shape.lines, LINE) for name, array in given.items()
    }
    scratch = {
        f"own_{name}": plgpu.SMEM((shape.padded, LINE), array.dtype)
        for name, array in given.items()
    }
    scratch["here"] = plgpu.Barrier(num_arrivals=len(given))
    row = jax.ShapeDtypeStruct(given["x"].shape, rows.x_TD.dtype)
    results = {"sum": row, "normed": row} if adds else {"normed": row}
    if rounds is not None:
        results |= {"codes": row, "code_scale": jax.ShapeDtypeStruct((T,), jnp.float32)}
        scratch["own_codes"] = scratch["own_x"]
    names = [*given, *results]

    def body(*refs) -> None:
        named = dict(zip(names, refs, strict=True))
        tiles = Tiles(interpret is not None)
        pl.run_scoped(lambda **shared: run(shape, tiles, Refs(**named, **shared)), **scratch)

    found: Any = pl.kernel(
        body,
        tuple(results.values()),
        mesh=plgpu.Mesh(grid=(T,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="sum_and_norm",
    )(*given.values())
    sum_TD, normed_TD, *coded = [
        *([] if adds else [rows.x_TD]),
        *(array.reshape(T, -1) for array in found),
    ]
    if rounds is None:
        return sum_TD, normed_TD
    return sum_TD, RoundedRows(normed_TD, coded[0], coded[1][:, 0], rounds)


def weights_of(norm, prefix: str = "") -> dict[str, Any]:
    """A norm's scale and bias in float32, those that there are."""
    found = zip(("scale", "bias"), scale_and_bias(norm), strict=True)
    return {
        f"{prefix}{name}": array.astype(jnp.float32) for name, array in found if array is not None
    }


def run(shape: RowShape, tiles: Tiles, refs: Refs) -> None:
    """What is done with one row."""
    t = lax.axis_index("row")
    row = pl.ds(0, shape.lines)
    copies = [(refs.x.at[t], refs.own_x), (refs.scale, refs.own_scale)]
    if refs.y is not None:
        copies.append((refs.y.at[t], refs.own_y))
    copies += [
        (refs.bias, refs.own_bias),
        (refs.y_scale, refs.own_y_scale),
        (refs.y_bias, refs.own_y_bias),
    ]
    for far, own in copies:
        if far is not None:
            plgpu.copy_gmem_to_smem(far, own.at[row], refs.here)
    plgpu.barrier_wait(refs.here)
    load = functools.partial(numbers, shape, tiles)
    dtype = refs.own_x.dtype
    own_normed = refs.own_x if refs.y is None else refs.own_y
    wide_LC = load(refs.own_x)
    if refs.y is not None:
        y_LC = load(refs.own_y)
        if refs.own_y_scale is not None:
            y_LC = weigh(
                normal(shape, tiles, y_LC, shape.added_centred),
                load,
                refs.own_y_scale,
                refs.own_y_bias,
            )
            y_LC = y_LC.astype(dtype).astype(jnp.float32)
        sum_LC = (wide_LC + y_LC).astype(dtype)
        refs.own_x[...] = sum_LC
        wide_LC = sum_LC.astype(jnp.float32)
    normed_LC = weigh(
        normal(shape, tiles, wide_LC, shape.centred), load, refs.own_scale, refs.own_bias
    ).astype(dtype)
    own_normed[...] = normed_LC
    if shape.rounds is not None:
        codes_LC, scale = code(shape.rounds, tiles, normed_LC.astype(jnp.float32))
        refs.own_codes[...] = codes_LC.astype(dtype)
        refs.code_scale[t] = scale
    plgpu.commit_smem()
    if refs.y is not None:
        plgpu.copy_smem_to_gmem(refs.own_x.at[row], refs.sum.at[t])
    plgpu.copy_smem_to_gmem(own_normed.at[row], refs.normed.at[t])
    if shape.rounds is not None:
        plgpu.copy_smem_to_gmem(refs.own_codes.at[row], refs.codes.at[t])
    plgpu.wait_smem_to_gmem(0)


def numbers(shape: RowShape, tiles: Tiles, ref):
    """A row in float32."""
    return without_padding(
        shape, tiles, tiles.load_as(ref, layout_of(shape), True).astype(jnp.float32)
    )


def layout_of(shape: RowShape):
    return plgpu.Layout.WG_STRIDED((shape.padded, LINE), vec_size=VECTOR)


def without_padding(shape: RowShape, tiles: Tiles, x_LC):
    """A row with zeros behind it."""
    if shape.padded == shape.lines:
        return x_LC
    return jnp.where(tiles.index(x_LC.shape, 0, layout_of(shape)) < shape.lines, x_LC, 0.0)


def normal(shape: RowShape, tiles: Tiles, x_LC, centred: bool):
    """A row whose mean square is one, and whose mean is zero if it is `centred`."""
    part = 1 / (shape.lines * LINE)
    if centred:
        x_LC = without_padding(shape, tiles, x_LC - jnp.sum(x_LC) * part)
    return x_LC * lax.rsqrt(jnp.sum(x_LC * x_LC) * part + shape.eps)


def weigh(x_LC, load, scale, bias):
    """A row times a norm's scale, and its bias if it has one."""
    x_LC = x_LC * load(scale)
    return x_LC if bias is None else x_LC + load(bias)


def code(codes: str, tiles: Tiles, x_LC):
    """(numbers that codes of eight bits stand for, scale) of a row in float32."""
    most = jnp.max(jnp.abs(x_LC))
    limit = int8.LIMIT if codes == "int8" else fp8.LIMIT
    inverse = jnp.where(most > 0, limit / most, 0.0)  # of a row with NaN none: its codes are zeros
    exact_LC = jnp.where(jnp.abs(x_LC) < jnp.inf, x_LC, 0.0) * inverse
    if codes == "int8":
        codes_LC = jnp.round(exact_LC)
    else:
        bits_LC = lax.bitcast_convert_type(exact_LC.astype(jnp.float8_e4m3fn), jnp.uint8).astype(
            jnp.int16
        )
        codes_LC = tiles.from_float8(bits_LC)
    return codes_LC, most / limit + jnp.sum(x_LC * 0.0)  # NaN where the row is not finite
