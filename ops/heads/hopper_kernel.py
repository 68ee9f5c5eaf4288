"""The kernel that normalises and rotates a row's heads and appends its keys and values: one program
a row.

A row's heads, with those of keys and values after those of queries, lie in shared memory as tiles
of 64. Pages are changed in place. Padding rows write queries alone.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..attention import KVPages
from ..attention.hopper_kernel.paged import as_bytes
from ..attention.hopper_kernel.task import ROWS
from ..gpu.tile import Tiles, along_columns, along_rows
from . import Heads

BLOCK = 64  # columns of each half of the pairs; more of them do not fit into a thread's registers


class RowShape(NamedTuple):
    """The sizes and options that the kernel is compiled for."""

    queries: int
    keys: int
    width: int
    pairs: int  # that are rotated
    normed: bool
    eps: float
    page: int  # positions of a page
    codes: str | None  # the dtype of the pages where they hold eight bits

    @property
    def heads(self) -> int:
        return self.queries + 2 * self.keys

    @property
    def turned(self) -> int:
        """Heads that are normalised and rotated."""
        return self.queries + self.keys

    @property
    def tiles(self) -> int:
        return -(-self.heads // ROWS)

    @property
    def blocks(self) -> list[list[Any]]:
        """Columns that are turned together: those of both halves of some pairs, or some of the
        rest.
        """
        paired = [(0, self.pairs), (self.pairs, self.pairs)]
        rest = [(2 * self.pairs, self.width - 2 * self.pairs)]
        return [
            [pl.ds(first + at, min(BLOCK, number - at)) for first, number in parts]
            for parts in (paired, rest)
            for at in range(0, parts[0][1], BLOCK)
        ]


class Refs(NamedTuple):
    """References; None where a shape does not use one."""

    qkv: Any
    slots: Any
    count: Any  # of rows that are not padding
    q_out: Any
    k_pages: Any
    v_pages: Any
    rows: Any  # in shared memory, as what follows
    here: Any
    cos: Any = None
    sin: Any = None
    q_scale: Any = None
    k_scale: Any = None
    k_scales: Any = None  # in the pages, of their codes
    v_scales: Any = None
    codes: Any = None
    scales: Any = None


def turn_and_append(qkv_TGH, heads: Heads, pages: KVPages, rows, interpret: Any = None):
    """(q_TNH, pages)."""
    T, _, H = qkv_TGH.shape
    given = {"qkv": qkv_TGH, "slots": rows.slots_T, "count": rows.starts_B1[-1:]}
    if heads.cos_sin is not None:
        given |= dict(zip(("cos", "sin"), heads.cos_sin, strict=True))
    if heads.norm is not None:
        given |= {
            "q_scale": heads.q_scale.astype(jnp.float32),
            "k_scale": heads.k_scale.astype(jnp.float32),
        }
    changed = {"k_pages": as_bytes(pages.k_PSKH), "v_pages": as_bytes(pages.v_PSKH)}
    coded = pages.k_scale_PKS is not None
    if coded:
        changed |= {"k_scales": pages.k_scale_PKS, "v_scales": pages.v_scale_PKS}
    shape = RowShape(
        heads.queries,
        heads.keys,
        H,
        given["cos"].shape[1] if "cos" in given else 0,
        heads.norm is not None,
        heads.eps,
        pages.k_PSKH.shape[1],
        str(pages.k_PSKH.dtype) if coded else None,
    )
    lines = shape.tiles * ROWS
    scratch = {"rows": plgpu.SMEM((lines, H), qkv_TGH.dtype), "here": plgpu.Barrier()}
    if coded:
        scratch |= {
            "codes": plgpu.SMEM((lines, H), jnp.int8),
            "scales": plgpu.SMEM((lines,), jnp.float32),
        }
    held = {
        name: jax.new_ref(x, memory_space=plgpu.GMEM) for name, x in changed.items()
    }  # the kernel changes these in place
    names = [*given, *held, "q_out"]

    def body(*refs) -> None:
        named = dict(zip(names, refs, strict=True))
        tiles = Tiles(interpret is not None)
        pl.run_scoped(lambda **shared: run(shape, tiles, Refs(**named, **shared)), **scratch)

    q_TNH = pl.kernel(
        body,
        jax.ShapeDtypeStruct((T, heads.queries, H), qkv_TGH.dtype),
        mesh=plgpu.Mesh(grid=(T,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="heads",
    )(*given.values(), *held.values())
    after = [jax.freeze(ref) for ref in held.values()]
    k_PSKH, v_PSKH = (
        lax.bitcast_convert_type(x, pages.k_PSKH.dtype) if coded else x for x in after[:2]
    )
    return q_TNH, KVPages(k_PSKH, v_PSKH, *after[2:])


def run(shape: RowShape, tiles: Tiles, refs: Refs) -> None:
    """What is done with one row."""
    t = lax.axis_index("row")
    N = shape.queries
    K = shape.keys
    plgpu.copy_gmem_to_smem(refs.qkv.at[t], refs.rows.at[pl.ds(0, shape.heads)], refs.here)
    plgpu.barrier_wait(refs.here)
    for first in range(0, shape.heads, ROWS):
        turn(shape, tiles, refs, t, first)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.rows.at[pl.ds(0, N)], refs.q_out.at[t])

    @pl.when(t < refs.count[0])
    def _():
        slot = refs.slots[t]
        page, offset = lax.div(slot, jnp.int32(shape.page)), lax.rem(slot, jnp.int32(shape.page))
        held = refs.rows if shape.codes is None else refs.codes
        for first, pages, scales in (
            (N, refs.k_pages, refs.k_scales),
            (N + K, refs.v_pages, refs.v_scales),
        ):
            plgpu.copy_smem_to_gmem(held.at[pl.ds(first, K)], pages.at[page, offset])
            for head in range(K if scales is not None else 0):
                scales[page, head, offset] = refs.scales[first + head]

    plgpu.wait_smem_to_gmem(0)


def turn(shape: RowShape, tiles: Tiles, refs: Refs, t, first: int) -> None:
    """Normalise, rotate and code a tile of heads in shared memory, `first` and those after it."""
    some = pl.ds(first, ROWS)
    own = first < shape.turned and (shape.normed or shape.pairs)
    coded = shape.codes is not None and first + ROWS > shape.queries

    def read():
        """The tile block by block.

        Behind the fence none is still in registers from the pass before.
        """
        plgpu.commit_smem()
        for columns in shape.blocks:
            yield columns, [tiles.load(refs.rows.at[some, c]).astype(jnp.float32) for c in columns]

    def chosen(new, old, heads: int):
        """`new` for the first heads of the row, and `old` for the others."""
        if heads >= first + ROWS:
            return new
        return jnp.where(tiles.index(new.shape, 0) < heads - first, new, old)

    def rounded(part):
        return part.astype(refs.rows.dtype).astype(jnp.float32)

    def normed(part, c, inverse_M):
        by_q, by_k = (
            along_columns(tiles.load_columns(x.at[c]), part.shape)
            for x in (refs.q_scale, refs.k_scale)
        )
        return rounded(part * along_rows(inverse_M, part.shape) * chosen(by_q, by_k, shape.queries))

    inverse_M = None
    if own and shape.normed:
        squares_M = sum(jnp.sum(x * x, axis=1) for _, parts in read() for x in parts)
        inverse_M = lax.rsqrt(squares_M * (1 / shape.width) + shape.eps)
    for columns, parts in read() if own else ():
        found = (
            parts
            if inverse_M is None
            else [normed(x, c, inverse_M) for x, c in zip(parts, columns, strict=True)]
        )
        if len(found) == 2:
            a, b = found
            cos, sin = (
                along_columns(tiles.load_columns(x.at[t, columns[0]]), a.shape)
                for x in (refs.cos, refs.sin)
            )
            found = [a * cos - b * sin, b * cos + a * sin]
        for new, old, c in zip(found, parts, columns, strict=True):
            tiles.store(
                refs.rows.at[some, c], chosen(new, old, shape.turned).astype(refs.rows.dtype), False
            )
    if coded:
        largest = 127.0 if shape.codes == "int8" else 448.0
        most_M = functools.reduce(
            jnp.maximum, (jnp.max(jnp.abs(x), axis=1) for _, parts in read() for x in parts)
        )
        inverse_M = largest / jnp.where(most_M == 0, 1.0, most_M)
        for columns, parts in read():
            for x, c in zip(parts, columns, strict=True):
                tiles.store(
                    refs.codes.at[some, c],
                    code(shape.codes, x * along_rows(inverse_M, x.shape)),
                    False,
                )
        refs.scales[some] = most_M * jnp.float32(1 / largest)


def code(codes: str | None, numbers):
    """The nearest codes, as bytes."""
    if codes == "int8":
        return jnp.round(numbers).astype(jnp.int8)
    return lax.bitcast_convert_type(numbers.astype(codes), jnp.int8)
