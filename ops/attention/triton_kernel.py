"""Paged attention by Triton: a program is some rows of a sequence with the query heads of one KV
head, and a part of their context.

In a step in which each sequence has one row, contexts are cut into spans that programs share, and a
second kernel joins what they found. Where sequences have several rows, a program reads all that its
rows see.
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

TILE = 64  # rows times query heads of a KV head, where sequences have several rows
LEAST = 16  # of these: the rows of the hardware's products
SHORTEST = 512  # positions of a span
MOST_SPANS = 32


class Shape(NamedTuple):
    """What the kernels are compiled for."""

    rows: int  # of a tile
    heads: int  # queries of a KV head
    width: int
    page: int
    span: int  # positions that a program reads at most; 0: all
    spans: int
    scale: float
    window: int | None
    soft_cap: float | None
    codes: str | None  # of the pages
    dtype: str

    @property
    def tile(self) -> int:
        """Rows times heads, filled up to a power of two."""
        return max(LEAST, pl.next_power_of_2(self.rows * self.heads))

    @property
    def block(self) -> int:
        """Positions that are multiplied at once; a wide one, or float8 on its way to numbers, needs
        more registers.
        """
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
    """Every row's result; zeros for rows that no sequence has."""
    T, N, H = q_TNH.shape
    _, S, K, _ = pages.k_PSKH.shape
    B, M = rows.tables_BM.shape
    heads = N // K
    decodes = T == B
    span = max(SHORTEST, pl.next_power_of_2(-(-M * S // MOST_SPANS))) if decodes else 0
    spans = -(-M * S // span) if span else 1
    codes = None if pages.k_scale_PKS is None else pages.k_PSKH.dtype.name
    shape = Shape(
        1 if decodes else max(1, TILE // heads),
        heads,
        H,
        S,
        span,
        spans,
        scale,
        window,
        soft_cap,
        codes,
        q_TNH.dtype.name,
    )
    first_CQ, seq_C, valid_CQ = tiles(rows.starts_B1, T, shape.rows)
    given = {
        "q": q_TNH,
        "k": in_bytes(pages.k_PSKH),
        "v": in_bytes(pages.v_PSKH),
        "k_scale": pages.k_scale_PKS,
        "v_scale": pages.v_scale_PKS,
        "positions": rows.positions_T,
        "tables": rows.tables_BM,
        "sinks": None if sinks_N is None else sinks_N.astype(jnp.float32),
        "first": first_CQ[:, 0],
        "seq": seq_C,
        "count": jnp.sum(valid_CQ, axis=1, dtype=jnp.int32),
    }
    given = {name: x for name, x in given.items() if x is not None}
    # a tile that is not full names rows past the last, and writes none
    room = T + shape.tile // heads
    each = jax.ShapeDtypeStruct((spans, room, N), jnp.float32)
    parts = jax.ShapeDtypeStruct((spans, room, N, H), jnp.float32), each, each
    whole = jax.ShapeDtypeStruct((room, N, H), q_TNH.dtype)
    found = pl.pallas_call(
        functools.partial(run, shape, tuple(given)),
        out_shape=parts if spans > 1 else whole,
        grid=(spans, K, len(seq_C)),
        compiler_params=plgpu.CompilerParams(num_warps=warps(shape), num_stages=2),
        interpret=interpret,
        name="attend",
    )(*given.values())
    if spans > 1:
        found = pl.pallas_call(
            functools.partial(join, shape),
            out_shape=jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype),
            grid=(T, N),
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
            interpret=interpret,
            name="join",
        )(*found, rows.positions_T)
    owned_T = jnp.arange(T) < rows.starts_B1[-1]
    return jnp.where(owned_T[:, None, None], found[:T], 0)


def warps(shape: Shape) -> int:
    """As many as have room in their registers for a tile's sums, and for codes as numbers
    beside them.
    """
    return 8 if shape.codes or shape.tile * shape.width >= TILE * 128 else 4


def in_bytes(pages_PSKH):
    """Codes as bytes: not every card has float8."""
    return (
        lax.bitcast_convert_type(pages_PSKH, jnp.int8)
        if pages_PSKH.dtype.itemsize == 1
        else pages_PSKH
    )


def run(shape: Shape, names: tuple[str, ...], *refs) -> None:
    given = dict(zip(names, refs, strict=False))
    outs = refs[len(names) :]
    part, head, tile = (pl.program_id(axis) for axis in range(3))
    count = given["count"][tile]
    first = given["first"][tile]
    seq = given["seq"][tile]

    @pl.when(count > 0)
    def _():
        oldest = given["positions"][first]
        newest = given["positions"][first + count - 1]
        begin = jnp.int32(0) if shape.window is None else jnp.maximum(oldest - shape.window + 1, 0)
        end = newest + 1
        leads = True
        if shape.spans > 1:
            leads = part == begin // shape.span
            begin = jnp.maximum(begin, part * shape.span)
            end = jnp.minimum(end, (part + 1) * shape.span)

        @pl.when(begin < end)
        def _():
            compute(shape, given, outs, part, head, seq, first, count, begin, end, leads)


def compute(shape: Shape, given, outs, part, head, seq, first, count, begin, end, leads) -> None:
    """What a tile's rows find between two positions. Sinks count in the part that `leads`."""
    at_R = jnp.arange(shape.tile)
    own_R = at_R < count * shape.heads
    row_R = first + at_R // shape.heads
    head_R = head * shape.heads + at_R % shape.heads
    position_R = plgpu.load(given["positions"].at[row_R], mask=own_R, other=0)
    column_H = jnp.arange(shape.width)
    there = row_R[:, None], head_R[:, None], column_H[None]
    q_RH = plgpu.load(given["q"].at[there], mask=own_R[:, None], other=0.0)

    def attend_block(block, carry):
        best_R, total_R, out_RH = carry
        position_J = block * shape.block + jnp.arange(shape.block)
        owned_J = (position_J >= begin) & (position_J < end)
        page_J = plgpu.load(
            given["tables"].at[seq, position_J // shape.page], mask=owned_J, other=0
        )
        offset_J = position_J % shape.page

        def read(name: str):
            """(numbers, what each position's are to be multiplied with); nothing of what no
            sequence owns.
            """
            at = page_J[:, None], offset_J[:, None], head, column_H[None]
            x_JH = plgpu.load(given[name].at[at], mask=owned_J[:, None], other=0)
            if shape.codes is None:
                return x_JH, None
            scale_J = plgpu.load(
                given[f"{name}_scale"].at[page_J, head, offset_J], mask=owned_J, other=0.0
            )
            numbers_JH = x_JH if shape.codes == "int8" else fp8.decode_e4m3(x_JH)
            return numbers_JH.astype(shape.dtype), scale_J

        key_JH, scale_J = read("k")
        score_RJ = plgpu.dot(q_RH, key_JH, trans_b=True) * shape.scale
        score_RJ = score_RJ if scale_J is None else score_RJ * scale_J[None]
        if shape.soft_cap is not None:
            score_RJ = shape.soft_cap * jnp.tanh(score_RJ / shape.soft_cap)
        seen_RJ = owned_J[None] & (position_J[None] <= position_R[:, None])
        if shape.window is not None:
            seen_RJ &= position_J[None] > position_R[:, None] - shape.window
        score_RJ = jnp.where(seen_RJ, score_RJ, -jnp.inf)
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
    if "sinks" in given:  # one more score in the softmax, without a value
        sink_R = plgpu.load(given["sinks"].at[head_R], mask=own_R, other=0.0)
        best_R = jnp.where(leads, sink_R, best_R)
        total_R = jnp.where(leads, 1.0, total_R)
    start = best_R, total_R, jnp.zeros((shape.tile, shape.width), jnp.float32)
    trips = begin // shape.block, pl.cdiv(end, shape.block)
    best_R, total_R, out_RH = lax.fori_loop(*trips, attend_block, start)
    if shape.spans > 1:
        out, totals, bests = outs
        plgpu.store(out.at[(part, *there)], out_RH, mask=own_R[:, None])
        plgpu.store(totals.at[part, row_R, head_R], total_R, mask=own_R)
        plgpu.store(bests.at[part, row_R, head_R], best_R, mask=own_R)
    else:
        out_RH = out_RH / jnp.where(total_R == 0, 1.0, total_R)[:, None]
        plgpu.store(outs[0].at[there], out_RH.astype(shape.dtype), mask=own_R[:, None])


def join(shape: Shape, out_ref, total_ref, best_ref, positions_ref, whole_ref) -> None:
    """One softmax of a row and head from those of its spans."""
    row, head = (pl.program_id(axis) for axis in range(2))
    position = positions_ref[row]
    first = 0 if shape.window is None else jnp.maximum(position - shape.window + 1, 0) // shape.span

    def add(part, carry):
        best, total, out_H = carry
        new = jnp.maximum(best, best_ref[part, row, head])
        finite = jnp.where(new == -jnp.inf, 0.0, new)
        shrink = jnp.exp(best - finite)
        weight = jnp.exp(best_ref[part, row, head] - finite)
        return (
            new,
            total * shrink + total_ref[part, row, head] * weight,
            out_H * shrink + out_ref[part, row, head, :] * weight,
        )

    start = jnp.float32(-jnp.inf), jnp.float32(0), jnp.zeros(shape.width, jnp.float32)
    _, total, out_H = lax.fori_loop(first, position // shape.span + 1, add, start)
    whole_ref[row, head, :] = (out_H / jnp.where(total == 0, 1.0, total)).astype(shape.dtype)
