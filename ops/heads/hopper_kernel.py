"""The Hopper kernel that normalises and rotates heads and appends keys and values to the KV pages.

Each program computes one token. Its heads (queries, then keys, then values) lie in shared memory in
tiles of 64. The pages are updated in place. For padding tokens only the queries are written.
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

BLOCK = 64  # columns that are computed together; more would not fit into a thread's registers


class HeadsShape(NamedTuple):
    """The sizes and options that the kernel is compiled for."""

    queries: int
    keys: int
    width: int
    pairs: int  # rotated pairs of columns
    has_norm: bool
    eps: float
    page: int  # slots of a page
    codes: str | None  # the dtype of quantised pages

    @property
    def heads(self) -> int:
        return self.queries + 2 * self.keys

    @property
    def num_rotated(self) -> int:
        """Number of heads that are normalised and rotated."""
        return self.queries + self.keys

    @property
    def tiles(self) -> int:
        return -(-self.heads // ROWS)

    @property
    def blocks(self) -> list[list[Any]]:
        """Slices of columns that are computed together: two slices with the halves of rotated
        pairs, or one slice of columns that are not rotated.
        """
        paired = [(0, self.pairs), (self.pairs, self.pairs)]
        unrotated = [(2 * self.pairs, self.width - 2 * self.pairs)]
        return [
            [pl.ds(first + offset, min(BLOCK, size - offset)) for first, size in column_groups]
            for column_groups in (paired, unrotated)
            for offset in range(0, column_groups[0][1], BLOCK)
        ]


class HeadsRefs(NamedTuple):
    """The kernel's references; None for those that a shape does not use."""

    qkv: Any
    slots: Any
    count: Any  # number of tokens without padding
    q_out: Any
    k_pages: Any
    v_pages: Any
    rows: Any  # the token's heads, in shared memory
    copy_barrier: Any
    cos: Any = None
    sin: Any = None
    q_scale: Any = None
    k_scale: Any = None
    k_scales: Any = None  # in the pages
    v_scales: Any = None
    codes: Any = None  # the quantised heads, in shared memory
    scales: Any = None


def rotate_and_append(qkv_TGH, heads: Heads, pages: KVPages, rows, interpret: Any = None):
    """Normalise and rotate heads, and append keys and values to the pages: (q_TNH, pages)."""
    T, _, H = qkv_TGH.shape
    inputs = {"qkv": qkv_TGH, "slots": rows.slots_T, "count": rows.starts_B1[-1:]}
    if heads.cos_sin is not None:
        inputs |= dict(zip(("cos", "sin"), heads.cos_sin, strict=True))
    if heads.norm is not None:
        inputs |= {
            "q_scale": heads.q_scale.astype(jnp.float32),
            "k_scale": heads.k_scale.astype(jnp.float32),
        }
    page_inputs = {"k_pages": as_bytes(pages.k_PSKH), "v_pages": as_bytes(pages.v_PSKH)}
    is_quantised = pages.k_scale_PKS is not None
    if is_quantised:
        page_inputs |= {"k_scales": pages.k_scale_PKS, "v_scales": pages.v_scale_PKS}
    shape = HeadsShape(
        heads.queries,
        heads.keys,
        H,
        inputs["cos"].shape[1] if "cos" in inputs else 0,
        heads.norm is not None,
        heads.eps,
        pages.k_PSKH.shape[1],
        str(pages.k_PSKH.dtype) if is_quantised else None,
    )
    padded_heads = shape.tiles * ROWS
    scratch = {
        "rows": plgpu.SMEM((padded_heads, H), qkv_TGH.dtype),
        "copy_barrier": plgpu.Barrier(),
    }
    if is_quantised:
        scratch |= {
            "codes": plgpu.SMEM((padded_heads, H), jnp.int8),
            "scales": plgpu.SMEM((padded_heads,), jnp.float32),
        }
    page_refs = {
        name: jax.new_ref(x, memory_space=plgpu.GMEM) for name, x in page_inputs.items()
    }  # the kernel changes these in place
    names = [*inputs, *page_refs, "q_out"]

    def body(*refs) -> None:
        named = dict(zip(names, refs, strict=True))
        tiles = Tiles(interpret is not None)
        pl.run_scoped(lambda **shared: run(shape, tiles, HeadsRefs(**named, **shared)), **scratch)

    q_TNH = pl.kernel(
        body,
        jax.ShapeDtypeStruct((T, heads.queries, H), qkv_TGH.dtype),
        mesh=plgpu.Mesh(grid=(T,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="heads",
    )(*inputs.values(), *page_refs.values())
    page_arrays = [jax.freeze(ref) for ref in page_refs.values()]
    k_PSKH, v_PSKH = (
        lax.bitcast_convert_type(x, pages.k_PSKH.dtype) if is_quantised else x
        for x in page_arrays[:2]
    )
    return q_TNH, KVPages(k_PSKH, v_PSKH, *page_arrays[2:])


def run(shape: HeadsShape, tiles: Tiles, refs: HeadsRefs) -> None:
    """The program for one token."""
    t = lax.axis_index("row")
    N = shape.queries
    K = shape.keys
    plgpu.copy_gmem_to_smem(refs.qkv.at[t], refs.rows.at[pl.ds(0, shape.heads)], refs.copy_barrier)
    plgpu.barrier_wait(refs.copy_barrier)
    for first in range(0, shape.heads, ROWS):
        norm_rotate_and_quantise(shape, tiles, refs, t, first)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(refs.rows.at[pl.ds(0, N)], refs.q_out.at[t])

    @pl.when(t < refs.count[0])
    def _():
        slot = refs.slots[t]
        page = lax.div(slot, jnp.int32(shape.page))
        offset = lax.rem(slot, jnp.int32(shape.page))
        head_rows = refs.rows if shape.codes is None else refs.codes
        for first, pages, scales in (
            (N, refs.k_pages, refs.k_scales),
            (N + K, refs.v_pages, refs.v_scales),
        ):
            plgpu.copy_smem_to_gmem(head_rows.at[pl.ds(first, K)], pages.at[page, offset])
            if scales is not None:
                for head in range(K):
                    scales[page, head, offset] = refs.scales[first + head]

    plgpu.wait_smem_to_gmem(0)


def norm_rotate_and_quantise(
    shape: HeadsShape, tiles: Tiles, refs: HeadsRefs, t, first: int
) -> None:
    """Normalise, rotate and quantise the tile of heads that begins at `first`, in shared memory."""
    head_tile = pl.ds(first, ROWS)
    is_changed = first < shape.num_rotated and (shape.has_norm or shape.pairs)
    is_quantised = shape.codes is not None and first + ROWS > shape.queries

    def load_blocks():
        """Load the tile block by block.

        The fence keeps the compiler from holding blocks of the previous pass in registers.
        """
        plgpu.commit_smem()
        for columns in shape.blocks:
            yield (
                columns,
                [tiles.load(refs.rows.at[head_tile, c]).astype(jnp.float32) for c in columns],
            )

    def for_first_heads(new, old, heads: int):
        """`new` for the token's first `heads` heads, and `old` for the others."""
        if heads >= first + ROWS:
            return new
        return jnp.where(tiles.index(new.shape, 0) < heads - first, new, old)

    def round_to_dtype(columns_f32):
        return columns_f32.astype(refs.rows.dtype).astype(jnp.float32)

    def normalise(block, c, inverse_M):
        q_scale, k_scale = (
            along_columns(tiles.load_columns(x.at[c]), block.shape)
            for x in (refs.q_scale, refs.k_scale)
        )
        return round_to_dtype(
            block
            * along_rows(inverse_M, block.shape)
            * for_first_heads(q_scale, k_scale, shape.queries)
        )

    inverse_M = None
    if is_changed and shape.has_norm:
        squares_M = sum(jnp.sum(x * x, axis=1) for _, blocks in load_blocks() for x in blocks)
        inverse_M = lax.rsqrt(squares_M * (1 / shape.width) + shape.eps)
    for columns, blocks in load_blocks() if is_changed else ():
        new_blocks = (
            blocks
            if inverse_M is None
            else [normalise(x, c, inverse_M) for x, c in zip(blocks, columns, strict=True)]
        )
        if len(new_blocks) == 2:
            first_half, second_half = new_blocks
            cos, sin = (
                along_columns(tiles.load_columns(x.at[t, columns[0]]), first_half.shape)
                for x in (refs.cos, refs.sin)
            )
            new_blocks = [
                first_half * cos - second_half * sin,
                second_half * cos + first_half * sin,
            ]
        for new, old, c in zip(new_blocks, blocks, columns, strict=True):
            tiles.store(
                refs.rows.at[head_tile, c],
                for_first_heads(new, old, shape.num_rotated).astype(refs.rows.dtype),
                False,
            )
    if is_quantised:
        max_code = 127.0 if shape.codes == "int8" else 448.0
        max_abs_M = functools.reduce(
            jnp.maximum,
            (jnp.max(jnp.abs(x), axis=1) for _, blocks in load_blocks() for x in blocks),
        )
        inverse_M = max_code / jnp.where(max_abs_M == 0, 1.0, max_abs_M)
        for columns, blocks in load_blocks():
            for x, c in zip(blocks, columns, strict=True):
                tiles.store(
                    refs.codes.at[head_tile, c],
                    quantise(shape.codes, x * along_rows(inverse_M, x.shape)),
                    False,
                )
        refs.scales[head_tile] = max_abs_M * jnp.float32(1 / max_code)


def quantise(dtype: str | None, values):
    """Round to int8 or float8; the result holds the bits as int8."""
    if dtype == "int8":
        return jnp.round(values).astype(jnp.int8)
    return lax.bitcast_convert_type(values.astype(dtype), jnp.int8)
