"""Attention over pages: partitions the work, runs it, and merges the spans of cut contexts."""

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
TASK_OVERHEAD = 2  # cost of the beginning and end of a task, in blocks
# contexts are cut only if without cuts the largest share would be above average by more than 1/8
UNEVEN = 8


def attend(q_TNH, pages, rows, sinks_N, *, processors: int, interpret: Any = None, **options):
    """Attend to pages that hold all rows' keys and values.

    Args:
        options: See `make_kernel_shape`.

    Returns:
        [T, N, values]; padding rows are zero.
    """
    shape = make_kernel_shape(
        q_TNH, pages, rows, sinks=sinks_N is not None, processors=processors, **options
    )
    work_plan = plan(shape, rows)
    arrivals = new_arrivals(processors) if rows.arrivals is None else rows.arrivals
    inputs = Inputs(
        q_TNH, as_bytes(pages.k_PSKH), as_bytes(pages.v_PSKH), pages.k_scale_PKS, pages.v_scale_PKS,
        None if sinks_N is None else sinks_N.astype(jnp.float32) * LOG2_E, rows.tables_BM,
        arrivals if shape.merges_in_kernel else None,
    )  # fmt: skip
    saved, out_TNH = run_tasks(shape, inputs, work_plan, interpret=interpret)
    if shape.cut and not shape.merges_in_kernel:
        out_TNH = merge_spans(shape, saved, out_TNH, inputs.sinks, work_plan, interpret=interpret)
    return out_TNH


def new_arrivals(processors: int):
    """Counters for `QueryRows.arrivals`, in global memory of the GPU."""
    return jax.new_ref(jnp.zeros(processors, jnp.int32), memory_space=plgpu.GMEM)


def make_kernel_shape(
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
    """Make the static parameters of the kernel from the shapes of its arrays.

    Args:
        values: Width of the values, if they are part of the keys (MLA).
    """
    T, N, H = q_TNH.shape
    _, S, K, _ = pages.k_PSKH.shape
    B, M = rows.tables_BM.shape
    latent = pages.v_PSKH is None
    codes = None if pages.k_scale_PKS is None else str(pages.k_PSKH.dtype)
    is_decode = T == B  # most sequences have one row, and tiles have one row
    return KernelShape(
        rows=T,
        positions=1 if is_decode else ROWS // min(N // K, ROWS),
        heads=N,
        kv_heads=K,
        width=H,
        values=values or H,
        latent=latent,
        page=S,
        block=BLOCK,
        codes=codes,
        processors=processors,
        warpgroups=2 if latent or not (is_decode or codes or H > 128) else 1,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        max_keys=min(M * S, window or M * S),
    )


def as_bytes(pages):
    """View 8-bit codes as int8, which kernels can copy."""
    return (
        jax.lax.bitcast_convert_type(pages, jnp.int8)
        if pages is not None and pages.dtype.itemsize == 1
        else pages
    )


def plan(shape: KernelShape, rows) -> Plan:
    """Partition the work of a step: tiles, and an even share of their blocks for each processor.

    Dimensions: C tiles, R processors, F fields.
    """
    T = shape.rows
    J = shape.block
    piece_starts, pieces_per_sequence = split_at_stretches(shape, rows)
    row_CQ, piece_C, valid_CQ = tiles(piece_starts, T, shape.positions * shape.tiles)
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
    is_used_C = count_C > 0
    fields = row_C, count_C, piece_C // pieces_per_sequence, position_C, first_C, last_C, span_C
    tiles_CF = jnp.stack(fields, axis=1).astype(jnp.int32)
    cost_C = jnp.where(is_used_C, last_C - first_C + 1 + TASK_OVERHEAD, 0)
    shares_RF = make_shares(shape, tiles_CF, cost_C, jnp.sum(is_used_C, dtype=jnp.int32))
    return Plan(tiles_CF, shares_RF, rows.starts_B1[-1:])


def split_at_stretches(shape: KernelShape, rows):
    """Split sequences where spans may become longer, so that a tile has spans of one length.

    Returns:
        (starts of all pieces, number of pieces of each sequence).
    """
    pieces_per_sequence = (
        -(-shape.rows // shape.stretch) + 1 if shape.max_keys > shape.stretch else 1
    )
    start_B = rows.starts_B1[:-1]
    end_B = rows.starts_B1[1:]
    position_B = rows.positions_T[jnp.minimum(start_B, shape.rows - 1)]
    to_boundary_B = shape.stretch - position_B % shape.stretch
    cut_points = [
        jnp.minimum(start_B + to_boundary_B + n * shape.stretch, end_B)
        for n in range(pieces_per_sequence - 1)
    ]
    starts = jnp.stack([start_B, *cut_points], axis=1).reshape(-1)
    return jnp.concatenate([starts, rows.starts_B1[-1:]]), pieces_per_sequence


def span_blocks(shape: KernelShape, position_C):
    """Blocks of a span of each tile, which depend only on the number of keys of the tile's rows."""
    stretch_C = position_C // shape.stretch
    if shape.window is not None:
        stretch_C = jnp.minimum(stretch_C, (shape.window - 1) // shape.stretch)
    blocks_C = jnp.full_like(position_C, shape.span)
    max_stretches = -(-shape.max_keys // shape.stretch)
    for doubling in range((max_stretches - 1).bit_length()):
        blocks_C = jnp.where(stretch_C >= 1 << doubling, 2 * blocks_C, blocks_C)
    return blocks_C


def make_shares(shape: KernelShape, tiles_CF, cost_C, count):
    """Split the work into shares of about equal cost.

    A share begins with a whole task, or, if that would be too uneven, with a span.

    Returns:
        [R + 1, fields of `Share`]: the beginning of each share, and the end of the last.
    """
    R = shape.processors
    head_tiles = shape.head_tiles
    end_C = jnp.cumsum(cost_C) * head_tiles
    total = end_C[-1]
    begin_R = jnp.arange(R)
    begin_R = begin_R * (total // R) + begin_R * (total % R) // R
    tile_R = jnp.minimum(
        jnp.searchsorted(end_C, begin_R, side="right", method="compare_all"), cost_C.shape[0] - 1
    )
    _, positions_R, _, _, first_R, last_R, span_R = tiles_CF[tile_R].T
    cost_R = jnp.maximum(cost_C[tile_R], 1)
    tile_start_R = end_C[tile_R] - cost_R * head_tiles
    head_tile_R = (begin_R - tile_start_R) // cost_R
    offset_R = (begin_R - tile_start_R) % cost_R
    unit_R = tile_R * head_tiles + head_tile_R
    rounds_up_R = 2 * offset_R >= cost_R
    # cost before each share, if shares began with the nearest whole task
    rounded_start_R = tile_start_R + (head_tile_R + rounds_up_R) * cost_R
    largest_share = jnp.max(jnp.append(rounded_start_R[1:], total) - rounded_start_R)
    is_uneven = largest_share > total // R + total // (R * UNEVEN)
    first_span_R = first_R // span_R
    last_span_R = last_R // span_R
    spans_R = last_span_R - first_span_R + 1
    spans_before_R = jnp.clip(
        (first_R + offset_R + span_R // 2) // span_R - first_span_R, 0, spans_R
    )
    # the first span of a window may be shorter than half a span
    spans_before_R = jnp.where(offset_R == 0, 0, spans_before_R)
    is_inner_R = (spans_before_R > 0) & (spans_before_R < spans_R)
    is_cut_R = is_inner_R & is_uneven & shape.cut
    if shape.latent:
        # tasks of several positions would also save rows that are not valid
        is_cut_R &= positions_R == 1
    shares_unit_R = jnp.append(False, is_cut_R[:-1] & (unit_R[:-1] == unit_R[1:])) & is_cut_R
    rows_R = spans_R * saved_rows(shape, positions_R)
    place_R = jnp.cumsum(jnp.where(is_cut_R & ~shares_unit_R, rows_R, 0)) - rows_R
    is_cut_R &= place_R + rows_R <= shape.places
    rounds_up_R = jnp.where(
        is_uneven & ~is_inner_R, spans_before_R == spans_R, rounds_up_R & ~is_cut_R
    )
    first_share_R = jax.lax.cummax(jnp.where(is_cut_R & ~shares_unit_R, jnp.arange(R), 0))
    begin = Share(
        unit_R + rounds_up_R,
        *(jnp.where(is_cut_R, x_R, 0) for x_R in (spans_before_R, place_R, first_share_R)),
    )
    end = Share(count * head_tiles, *[jnp.int32(0)] * 3)
    return jnp.stack([jnp.append(*x) for x in zip(begin, end, strict=True)], axis=1).astype(
        jnp.int32
    )
