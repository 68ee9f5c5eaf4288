"""The Triton kernels of paged attention.

A program computes a tile: some rows of a sequence with the query heads of one KV head. In decode
steps, in which each sequence has one row, contexts are split into spans, one for each program
(split-K), and a second kernel merges the results of the spans. If sequences have several rows, a
program reads the whole context of its rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..quant import fp8
from . import KVPages, QueryRows
from .xla import tiles

TILE = 64  # rows times query heads of a KV head, if sequences have several rows
MIN_TILE = 16  # the smallest tile: rows of the hardware's products
MIN_SPAN = 512  # positions of the shortest span
MAX_SPANS = 32


class TritonShape(NamedTuple):
    """The static parameters for which the kernels are compiled."""

    rows: int  # of a tile
    heads: int  # query heads of a KV head
    width: int  # of a head
    page: int  # positions of a page
    span: int  # maximum number of positions that a program reads; 0: no limit
    spans: int  # number of spans of a context
    scale: float
    window: int | None
    soft_cap: float | None
    codes: str | None  # dtype of quantised pages
    dtype: str  # of the queries

    @property
    def tile(self) -> int:
        """Rows times heads, rounded up to a power of two."""
        return max(MIN_TILE, pl.next_power_of_2(self.rows * self.heads))

    @property
    def block(self) -> int:
        """Positions that are multiplied at once: fewer for wide heads and float8, for registers."""
        return 32 if self.width > 128 or self.codes == "float8_e4m3fn" else 64


def attend(
    q_TNH,
    pages: KVPages,
    rows: QueryRows,
    *,
    scale,
    window,
    soft_cap,
    sinks_N,
    interpret: bool = False,
):
    """Attend to pages that hold all rows' keys and values; results of padding rows are zero."""
    T, N, H = q_TNH.shape
    _, S, K, _ = pages.k_PSKH.shape
    B, M = rows.tables_BM.shape
    heads = N // K
    is_decode = T == B
    span_length = max(MIN_SPAN, pl.next_power_of_2(-(-M * S // MAX_SPANS))) if is_decode else 0
    num_spans = -(-M * S // span_length) if span_length else 1
    codes = None if pages.k_scale_PKS is None else pages.k_PSKH.dtype.name
    shape = TritonShape(
        1 if is_decode else max(1, TILE // heads),
        heads,
        H,
        S,
        span_length,
        num_spans,
        scale,
        window,
        soft_cap,
        codes,
        q_TNH.dtype.name,
    )
    row_CQ, seq_C, valid_CQ = tiles(rows.starts_B1, T, shape.rows)
    operands = {
        "q": q_TNH,
        "k": as_bytes(pages.k_PSKH),
        "v": as_bytes(pages.v_PSKH),
        "k_scale": pages.k_scale_PKS,
        "v_scale": pages.v_scale_PKS,
        "positions": rows.positions_T,
        "tables": rows.tables_BM,
        "sinks": None if sinks_N is None else sinks_N.astype(jnp.float32),
        "first": row_CQ[:, 0],
        "seq": seq_C,
        "count": jnp.sum(valid_CQ, axis=1, dtype=jnp.int32),
    }
    operands = {name: x for name, x in operands.items() if x is not None}
    # a partial tile has row numbers past the end, which it does not write
    padded_rows = T + shape.tile // heads
    stat_shape = jax.ShapeDtypeStruct((num_spans, padded_rows, N), jnp.float32)
    span_shapes = (
        jax.ShapeDtypeStruct((num_spans, padded_rows, N, H), jnp.float32),
        stat_shape,
        stat_shape,
    )
    out_shape = jax.ShapeDtypeStruct((padded_rows, N, H), q_TNH.dtype)
    results = pl.pallas_call(
        functools.partial(run, shape, tuple(operands)),
        out_shape=span_shapes if num_spans > 1 else out_shape,
        grid=(num_spans, K, len(seq_C)),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps(shape), num_stages=2),
        interpret=interpret,
        name="attend",
    )(*operands.values())
    if num_spans > 1:
        results = pl.pallas_call(
            functools.partial(join, shape),
            out_shape=jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype),
            grid=(T, N),
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
            name="join",
        )(*results, rows.positions_T)
    is_owned_T = jnp.arange(T) < rows.starts_B1[-1]
    return jnp.where(is_owned_T[:, None, None], results[:T], 0)


def num_warps(shape: TritonShape) -> int:
    """Warps of a program: enough for a tile's sums in registers, and for decoded codes."""
    return 8 if shape.codes or shape.tile * shape.width >= TILE * 128 else 4


def as_bytes(pages_PSKH):
    """View 8-bit codes as int8, since not every GPU has float8."""
    return (
        lax.bitcast_convert_type(pages_PSKH, jnp.int8)
        if pages_PSKH.dtype.itemsize == 1
        else pages_PSKH
    )


def run(shape: TritonShape, names: tuple[str, ...], *refs) -> None:
    inputs = dict(zip(names, refs, strict=False))
    outs = refs[len(names) :]
    span, head, tile = (pl.program_id(axis) for axis in range(3))
    num_rows = inputs["count"][tile]
    first_row = inputs["first"][tile]
    seq = inputs["seq"][tile]

    @pl.when(num_rows > 0)
    def _():
        oldest = inputs["positions"][first_row]
        newest = inputs["positions"][first_row + num_rows - 1]
        begin = jnp.int32(0) if shape.window is None else jnp.maximum(oldest - shape.window + 1, 0)
        end = newest + 1
        is_first_span = True
        if shape.spans > 1:
            is_first_span = span == begin // shape.span
            begin = jnp.maximum(begin, span * shape.span)
            end = jnp.minimum(end, (span + 1) * shape.span)

        @pl.when(begin < end)
        def _():
            compute(
                shape, inputs, outs, span, head, seq, first_row, num_rows, begin, end, is_first_span
            )


def compute(
    shape: TritonShape,
    inputs,
    outs,
    span,
    head,
    seq,
    first_row,
    num_rows,
    begin,
    end,
    is_first_span,
) -> None:
    """Attend with a tile's rows to the positions from `begin` to `end`.

    Sinks are added in the first span only.
    """
    index_R = jnp.arange(shape.tile)
    valid_R = index_R < num_rows * shape.heads
    row_R = first_row + index_R // shape.heads
    head_R = head * shape.heads + index_R % shape.heads
    position_R = plgpu.load(inputs["positions"].at[row_R], mask=valid_R, other=0)
    column_H = jnp.arange(shape.width)
    q_index = row_R[:, None], head_R[:, None], column_H[None]
    q_RH = plgpu.load(inputs["q"].at[q_index], mask=valid_R[:, None], other=0.0)

    def attend_block(block, carry):
        best_R, total_R, out_RH = carry
        position_J = block * shape.block + jnp.arange(shape.block)
        owned_J = (position_J >= begin) & (position_J < end)
        page_J = plgpu.load(
            inputs["tables"].at[seq, position_J // shape.page], mask=owned_J, other=0
        )
        offset_J = position_J % shape.page

        def read(name: str):
            """Read a block of keys or values: (values, scale of each position or None).

            Positions outside of the span read as zeros.
            """
            index = page_J[:, None], offset_J[:, None], head, column_H[None]
            x_JH = plgpu.load(inputs[name].at[index], mask=owned_J[:, None], other=0)
            if shape.codes is None:
                return x_JH, None
            scale_J = plgpu.load(
                inputs[f"{name}_scale"].at[page_J, head, offset_J], mask=owned_J, other=0.0
            )
            values_JH = x_JH if shape.codes == "int8" else fp8.decode_e4m3(x_JH)
            return values_JH.astype(shape.dtype), scale_J

        key_JH, scale_J = read("k")
        score_RJ = plgpu.dot(q_RH, key_JH, trans_b=True) * shape.scale
        score_RJ = score_RJ if scale_J is None else score_RJ * scale_J[None]
        if shape.soft_cap is not None:
            score_RJ = shape.soft_cap * jnp.tanh(score_RJ / shape.soft_cap)
        visible_RJ = owned_J[None] & (position_J[None] <= position_R[:, None])
        if shape.window is not None:
            visible_RJ &= position_J[None] > position_R[:, None] - shape.window
        score_RJ = jnp.where(visible_RJ, score_RJ, -jnp.inf)
        new_R = jnp.maximum(best_R, jnp.max(score_RJ, 1))
        finite_R = jnp.where(new_R == -jnp.inf, 0.0, new_R)
        shrink_R = jnp.exp(best_R - finite_R)
        weight_RJ = jnp.exp(score_RJ - finite_R[:, None])
        value_JH, scale_J = read("v")
        total_R = total_R * shrink_R + jnp.sum(weight_RJ, 1)
        weight_RJ = weight_RJ if scale_J is None else weight_RJ * scale_J[None]
        return (
            new_R,
            total_R,
            out_RH * shrink_R[:, None] + plgpu.dot(weight_RJ.astype(shape.dtype), value_JH),
        )

    best_R = jnp.full(shape.tile, -jnp.inf)
    total_R = jnp.zeros(shape.tile)
    if "sinks" in inputs:  # one more score in the softmax, without a value
        sink_R = plgpu.load(inputs["sinks"].at[head_R], mask=valid_R, other=0.0)
        best_R = jnp.where(is_first_span, sink_R, best_R)
        total_R = jnp.where(is_first_span, 1.0, total_R)
    start = best_R, total_R, jnp.zeros((shape.tile, shape.width), jnp.float32)
    blocks = begin // shape.block, pl.cdiv(end, shape.block)
    best_R, total_R, out_RH = lax.fori_loop(*blocks, attend_block, start)
    if shape.spans > 1:
        out, totals, bests = outs
        plgpu.store(out.at[(span, *q_index)], out_RH, mask=valid_R[:, None])
        plgpu.store(totals.at[span, row_R, head_R], total_R, mask=valid_R)
        plgpu.store(bests.at[span, row_R, head_R], best_R, mask=valid_R)
    else:
        out_RH = out_RH / jnp.where(total_R == 0, 1.0, total_R)[:, None]
        plgpu.store(outs[0].at[q_index], out_RH.astype(shape.dtype), mask=valid_R[:, None])


def join(shape: TritonShape, out_ref, total_ref, best_ref, positions_ref, joined_ref) -> None:
    """Merge the softmaxes of the spans of a row and head."""
    row, head = (pl.program_id(axis) for axis in range(2))
    position = positions_ref[row]
    first_span = (
        0 if shape.window is None else jnp.maximum(position - shape.window + 1, 0) // shape.span
    )

    def add(span, carry):
        best, total, out_H = carry
        new = jnp.maximum(best, best_ref[span, row, head])
        finite = jnp.where(new == -jnp.inf, 0.0, new)
        shrink = jnp.exp(best - finite)
        weight = jnp.exp(best_ref[span, row, head] - finite)
        return (
            new,
            total * shrink + total_ref[span, row, head] * weight,
            out_H * shrink + out_ref[span, row, head, :] * weight,
        )

    start = jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros(shape.width, jnp.float32)
    _, total, out_H = lax.fori_loop(first_span, position // shape.span + 1, add, start)
    joined_ref[row, head, :] = (out_H / jnp.where(total == 0, 1.0, total)).astype(shape.dtype)
