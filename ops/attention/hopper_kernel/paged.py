"""Attention over pages: shares out the work, runs it, and merges the spans of contexts that
were cut.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.tile import LOG2_E
from ..xla import tiles
from .merge import merge_spans
from .ragged import run_tasks
from .task import ROWS, Inputs, KernelShape, Plan, Share, saved_rows

BLOCK = 64  # keys of a block
A_TASK = 2  # blocks that could be computed while a task begins and ends
# shares of whole tasks are taken if the largest is no more than an eighth above the even one
UNEVEN = 8


def attend(q_TNH, pages, rows, sinks_N, *, processors: int, interpret: Any = None, **options):
    """[T, N, values]; padding rows are zero. For the options see `shape_of`."""
    shape = shape_of(
        q_TNH, pages, rows, sinks=sinks_N is not None, processors=processors, **options
    )
    shared = plan(shape, rows)
    arrivals = new_arrivals(processors) if rows.arrivals is None else rows.arrivals
    inputs = Inputs(
        q_TNH, as_bytes(pages.k_PSKH), as_bytes(pages.v_PSKH), pages.k_scale_PKS, pages.v_scale_PKS,
        None if sinks_N is None else sinks_N.astype(jnp.float32) * LOG2_E, rows.tables_BM,
        arrivals if shape.merges else None,
    )  # fmt: skip
    saved, out_TNH = run_tasks(shape, inputs, shared, interpret=interpret)
    if shape.cut and not shape.merges:
        out_TNH = merge_spans(shape, saved, out_TNH, inputs.sinks, shared, interpret=interpret)
    return out_TNH


def new_arrivals(processors: int):
    """A reference to zeros, for all the layers of a step."""
    return jax.new_ref(jnp.zeros(processors, jnp.int32), memory_space=plgpu.GMEM)


def shape_of(
    q_TNH,
    pages,
    rows,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    values: int | None,
    sinks: bool,
    processors: int,
) -> KernelShape:
    """What the kernels are compiled for, from the shapes of their arrays; `values`: of values
    within keys (MLA).
    """
    T, N, H = q_TNH.shape
    _, S, K, _ = pages.k_PSKH.shape
    B, M = rows.tables_BM.shape
    latent = pages.v_PSKH is None
    codes = None if pages.k_scale_PKS is None else str(pages.k_PSKH.dtype)
    decodes = T == B  # mostly one row a sequence, and one row a tile
    return KernelShape(
        rows=T,
        positions=1 if decodes else ROWS // min(N // K, ROWS),
        heads=N,
        kv_heads=K,
        width=H,
        values=values or H,
        latent=latent,
        page=S,
        block=BLOCK,
        codes=codes,
        processors=processors,
        warpgroups=2 if latent or not (decodes or codes or H > 128) else 1,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        reach=min(M * S, window or M * S),
    )


def as_bytes(pages):
    """Codes of eight bits as int8, which kernels can copy."""
    return (
        jax.lax.bitcast_convert_type(pages, jnp.int8)
        if pages is not None and pages.dtype.itemsize == 1
        else pages
    )


def plan(shape: KernelShape, rows) -> Plan:
    """Tiles, and an even share of their blocks for each processor.

    C tiles, R shares and one more.
    """
    T = shape.rows
    J = shape.block
    starts, each = stretches(shape, rows)
    row_CQ, piece_C, valid_CQ = tiles(starts, T, shape.positions * shape.tiles)
    row_C = row_CQ[:, 0]
    count_C = jnp.sum(valid_CQ, axis=1, dtype=jnp.int32)
    position_C = rows.positions_T[jnp.minimum(row_C, T - 1)]
    last_C = (position_C + count_C - 1) // J
    oldest_C = (
        jnp.zeros_like(position_C)
        if shape.window is None
        else jnp.maximum(position_C - shape.window + 1, 0)
    )
    first_C = oldest_C // J
    span_C = span_blocks(shape, position_C)
    there_C = count_C > 0
    fields = row_C, count_C, piece_C // each, position_C, first_C, last_C, span_C
    tiles_CF = jnp.stack(fields, axis=1).astype(jnp.int32)
    cost_C = jnp.where(there_C, last_C - first_C + 1 + A_TASK, 0)
    shares_RF = shares(shape, tiles_CF, cost_C, jnp.sum(there_C, dtype=jnp.int32))
    return Plan(tiles_CF, shares_RF, rows.starts_B1[-1:])


def stretches(shape: KernelShape, rows):
    """(starts of pieces of sequences, pieces of each): where spans may become longer, a tile
    ends.
    """
    each = -(-shape.rows // shape.stretch) + 1 if shape.reach > shape.stretch else 1
    start_B = rows.starts_B1[:-1]
    end_B = rows.starts_B1[1:]
    left_B = shape.stretch - rows.positions_T[jnp.minimum(start_B, shape.rows - 1)] % shape.stretch
    more = [jnp.minimum(start_B + left_B + n * shape.stretch, end_B) for n in range(each - 1)]
    starts = jnp.stack([start_B, *more], axis=1).reshape(-1)
    return jnp.concatenate([starts, rows.starts_B1[-1:]]), each


def span_blocks(shape: KernelShape, position_C):
    """Blocks of the spans of a tile: from how many keys its rows see, and from nothing else."""
    stretch_C = position_C // shape.stretch
    if shape.window is not None:
        stretch_C = jnp.minimum(stretch_C, (shape.window - 1) // shape.stretch)
    blocks_C = jnp.full_like(position_C, shape.span)
    most = -(-shape.reach // shape.stretch)
    for doubling in range((most - 1).bit_length()):
        blocks_C = jnp.where(stretch_C >= 1 << doubling, 2 * blocks_C, blocks_C)
    return blocks_C


def shares(shape: KernelShape, tiles_CF, cost_C, count):
    """A `Share` for the beginning of each processor's share, and for the end of all: [processors +
    1, fields].
    """
    R = shape.processors
    parts = shape.parts
    end_C = jnp.cumsum(cost_C) * parts
    total = end_C[-1]
    begin_R = jnp.arange(R)
    begin_R = begin_R * (total // R) + begin_R * (total % R) // R
    tile_R = jnp.minimum(
        jnp.searchsorted(end_C, begin_R, side="right", method="compare_all"), cost_C.shape[0] - 1
    )
    _, positions_R, _, _, first_R, last_R, span_R = tiles_CF[tile_R].T
    cost_R = jnp.maximum(cost_C[tile_R], 1)
    before_R = end_C[tile_R] - cost_R * parts
    part_R = (begin_R - before_R) // cost_R
    inside_R = (begin_R - before_R) % cost_R
    unit_R = tile_R * parts + part_R
    later_R = 2 * inside_R >= cost_R
    # what comes before, if the nearest whole task begins the share
    whole_R = before_R + (part_R + later_R) * cost_R
    uneven = jnp.max(jnp.append(whole_R[1:], total) - whole_R) > total // R + total // (R * UNEVEN)
    first_span_R = first_R // span_R
    last_span_R = last_R // span_R
    spans_R = last_span_R - first_span_R + 1
    before_R = jnp.clip((first_R + inside_R + span_R // 2) // span_R - first_span_R, 0, spans_R)
    # a first span that a window begins may be less than half of one
    before_R = jnp.where(inside_R == 0, 0, before_R)
    inner_R = (before_R > 0) & (before_R < spans_R)
    cut_R = inner_R & uneven & shape.cut
    if shape.latent:
        # those of several positions would write the rows that do not count, too
        cut_R &= positions_R == 1
    same_R = jnp.append(False, cut_R[:-1] & (unit_R[:-1] == unit_R[1:])) & cut_R
    rows_R = spans_R * saved_rows(shape, positions_R)
    place_R = jnp.cumsum(jnp.where(cut_R & ~same_R, rows_R, 0)) - rows_R
    cut_R &= place_R + rows_R <= shape.places
    later_R = jnp.where(uneven & ~inner_R, before_R == spans_R, later_R & ~cut_R)
    first_R = jax.lax.cummax(jnp.where(cut_R & ~same_R, jnp.arange(R), 0))
    found = Share(
        unit_R + later_R, *(jnp.where(cut_R, x_R, 0) for x_R in (before_R, place_R, first_R))
    )
    end = Share(count * parts, *[jnp.int32(0)] * 3)
    return jnp.stack([jnp.append(*x) for x in zip(found, end, strict=True)], axis=1).astype(
        jnp.int32
    )
