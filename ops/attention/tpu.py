"""Paged attention on TPUs by JAX's Pallas kernel `ragged_paged_attention`.

Results are batch-invariant, but chunked prefill can change their last bits: for every row the
kernel visits all blocks up to the last row of the row's sequence in the step, and masked blocks
cause an additional multiplication and division. With a window its blocks begin at the first visible
position of the sequence's first row in the step.
"""

import jax
import jax.numpy as jnp

from .backend import AttentionBackend, AttentionParams, AttentionShape
from .xla import append

BLOCK = 512  # key positions of a block
ROWS = 32  # query rows of a block
HEADS = 64  # query heads of width 128 for which such blocks fit into a core's vector memory
TABLES = 512 * 1024  # limit for the bytes of the page tables: half of a core's scalar memory


def attend(q_TNH, k_TKH, v_TKH, pages, rows, params: AttentionParams, sinks_N=None):
    """See `quire.ops.attention.paged_attention`."""
    # imported on use, because it imports a compiler
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    shape = AttentionShape.of(q_TNH, pages, rows, params, sinks_N)
    if k_TKH is not None:
        pages = append(pages, k_TKH, v_TKH, rows.slots_T)
    # Block sizes depend on the model and the tables' width only, so that sums do not depend on T
    # and B.
    heads = min(shape.kv_heads, 8) * (shape.heads // shape.kv_heads) * (shape.head_dim // 128)
    queries = ROWS if heads <= HEADS else 1 << (ROWS * HEADS // heads).bit_length() - 1
    sequences = describe(rows, shape.page_size, params.window, max_visible_pages(params, shape))
    out_TNH = ragged_paged_attention(
        q_TNH,
        pages.kv_PSYH,
        *sequences,
        sm_scale=float(params.scale),
        sliding_window=params.window,
        soft_cap=params.soft_cap,
        num_kv_pages_per_block=pages_per_block(shape),
        num_queries_per_block=queries,
    )
    # the kernel leaves other rows undefined
    owned_T = jnp.arange(shape.tokens) < rows.starts_B1[-1]
    return jnp.where(owned_T[:, None, None], out_TNH, 0), pages


def limits(params: AttentionParams, shape: AttentionShape) -> str | None:
    """Why the kernel does not support a call; None if it does."""
    K = shape.kv_heads
    G = shape.heads // shape.kv_heads
    H = shape.head_dim
    if not has_tpu():
        return "there is no TPU"
    if shape.has_sinks or params.value_dim is not None:
        return "the kernel has neither sinks nor values that are a part of the keys"
    if shape.dtype != "bfloat16" or shape.layout != "paired" or shape.page_dtype != "bfloat16":
        return "queries and pages must be bfloat16, each head's value right after its key"
    # several heads need strides, which the compiler does not support in wider rows
    if H != 128 and (H % 128 or K > 1):
        return f"keys and values must be of a width of 128, or a multiple with one head, not {H}"
    if K not in (1, 2, 4) and (K % 8 or (K > 8 and G > 1 and G % 2)):
        return f"there must be 1, 2, 4 or 8 KV heads or eights with an even group, not {K} of {G}"
    if shape.page_size > BLOCK:
        return f"pages must have at most {BLOCK} positions, not {shape.page_size}"
    if (size := 4 * shape.sequences * max_visible_pages(params, shape)) > TABLES:
        return f"page tables take {size} bytes, and {TABLES} are there: longer pages make fewer"
    return None


BACKEND = AttentionBackend(attend, limits)


def pages_per_block(shape: AttentionShape) -> int:
    return min(shape.table_width, BLOCK // shape.page_size)


def max_visible_pages(params: AttentionParams, shape: AttentionShape) -> int:
    """Maximum number of pages of a sequence to which the tokens of a step can attend."""
    M = shape.table_width
    S = shape.page_size
    if params.window is None:
        return M
    return min(M, max(pages_per_block(shape), (params.window + shape.tokens - 2) // S + 2))


def varies() -> str:
    return (
        "attention by JAX's kernel for TPUs gives a row other last bits where its prompt is "
        "cut in other chunks"
    )


def has_tpu() -> bool:
    return jax.default_backend() == "tpu"


def describe(rows, S: int, window: int | None, num_pages: int):
    """Describe the sequences as the kernel expects them.

    At the end of each sequence the kernel starts to fetch the first block of the next sequence,
    which has to wait for it. So a sequence without rows gets a length of 1, and a step without rows
    gets one row; their results are dropped. Sequences after the last one with rows are not counted.

    Args:
        S: Positions of a page.
        num_pages: Width of the new page tables if there is a window.

    Returns:
        (lengths in the cache, page tables, starts, number of sequences).
    """
    starts_B1 = rows.starts_B1
    T = rows.positions_T.shape[0]
    M = rows.tables_BM.shape[1]
    total = starts_B1[-1]
    count_1 = jnp.maximum(1, jnp.sum(starts_B1[:-1] < total, keepdims=True, dtype=jnp.int32))
    has_rows_B = starts_B1[1:] > starts_B1[:-1]
    newest_B = jnp.where(has_rows_B, rows.positions_T[jnp.clip(starts_B1[1:] - 1, 0, T - 1)], 0)
    starts_B1 = starts_B1.at[1:].max(jnp.where(total == 0, 1, 0))
    if window is None:
        return newest_B + 1, rows.tables_BM, starts_B1, count_1
    # The kernel reads from the table's first page on, whatever the window, and a page that has left
    # the window may belong to another sequence: a NaN in it would pass the mask. So the new table
    # begins with the first visible page, and positions are counted from there; only their
    # differences matter.
    oldest_B = jnp.where(has_rows_B, rows.positions_T[jnp.clip(starts_B1[:-1], 0, T - 1)], 0)
    first_B = jnp.maximum(oldest_B - window + 1, 0) // S
    page_BM = jnp.minimum(first_B[:, None] + jnp.arange(num_pages), M - 1)
    return (
        newest_B + 1 - first_B * S,
        jnp.take_along_axis(rows.tables_BM, page_BM, axis=1),
        starts_B1,
        count_1,
    )
