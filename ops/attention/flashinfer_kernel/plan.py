"""Plans FlashInfer's paged kernel on the device: assigns the work of a step to work items.

FlashInfer's own planner runs on the host and knows the lengths of the sequences. Here, as in
FlashInfer's mode for CUDA graphs, sizes are upper bounds for a compiled step, and everything that
changes from step to step is in arrays. Names of lists are FlashInfer's.

Dimensions: C work items, each a tile of a sequence's rows and a chunk of its keys.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MIN_CHUNK = 128  # keys of the smallest chunk of a context
ITEMS_PER_PROCESSOR = 2  # work items that a processor runs at once


class Plan(NamedTuple):
    """The int32 arrays that the kernel reads beside queries and pages."""

    words: Any  # the lists named in `PlanShape.offsets`, concatenated
    starts_B1: Any  # first row of each sequence
    first_page_B1: Any  # index in `pages` of the first page of each sequence
    pages: Any  # [B * M]: page numbers of all sequences, concatenated
    last_page_B: Any  # number of positions in the last page of each sequence


@dataclass(frozen=True)
class PlanShape:
    """The sizes for which a step is compiled, and the bounds that follow from them."""

    rows: int
    sequences: int
    heads: int
    kv_heads: int
    width: int  # of a head
    page: int  # positions of a page
    table: int  # maximum number of pages of a sequence
    window: int | None
    processors: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def tile(self) -> int:
        """Pairs of row and head of a tile, by FlashInfer's rule for sequences of average length."""
        pairs = self.rows * self.group // self.sequences
        if pairs <= 16:
            return 16
        return 64 if pairs <= 64 or self.width >= 256 else 128

    @property
    def tiles(self) -> int:
        """Maximum number of tiles in a step; the last tile of a sequence may be partly filled."""
        max_padding = self.tile - math.gcd(self.group, self.tile)
        return (self.rows * self.group + min(self.sequences, self.rows) * max_padding) // self.tile

    @property
    def items(self) -> int:
        """Maximum number of work items: all tiles, and additional chunks for idle processors."""
        return self.tiles + max(1, ITEMS_PER_PROCESSOR * self.processors // self.kv_heads)

    @property
    def partial_results(self) -> int:
        """Maximum number of partial results, one for each row and chunk."""
        return self.items * self.tile // self.group

    @property
    def chunk_unit(self) -> int:
        """The size of a chunk is a multiple of this number of keys."""
        return max(MIN_CHUNK // self.page, 1) * self.page

    @property
    def window_left(self) -> int:
        """Keys before its own to which a row attends; -1: all."""
        return -1 if self.window is None else self.window - 1

    @property
    def offsets(self) -> dict[str, int]:
        """Offset of each list in `Plan.words`, aligned to 16 bytes; "end" is the total size."""
        sizes = {
            "request_indices": self.items,
            "qo_tile_indices": self.items,
            "kv_tile_indices": self.items,
            "o_indptr": self.sequences + 1,
            "kv_chunk_size": 1,
            "total_num_rows": 1,
            "merge_indptr": self.rows + 1,
            "block_valid_mask": -(-self.items // 4),
            "end": 0,
        }
        offsets = {}
        offset = 0
        for name, size in sizes.items():
            offsets[name] = offset
            offset += -(-size // 4) * 4
        return offsets

    @property
    def scratch(self) -> int:
        """Size of the scratch in float32: partial results (2 bytes a number) and their log-sums."""
        return self.scores + self.partial_results * self.heads

    @property
    def scores(self) -> int:
        """Offset of the log-sum-exps in the scratch, in float32 numbers."""
        return -(-self.partial_results * self.heads * self.width // 8) * 4

    @property
    def info(self) -> np.ndarray:
        """FlashInfer's PrefillPlanInfo with byte offsets, for CUDA graphs and split contexts."""
        byte_offset = {name: 4 * offset for name, offset in self.offsets.items()}
        lists = [
            byte_offset[name]
            for name in (
                "request_indices",
                "qo_tile_indices",
                "kv_tile_indices",
                "merge_indptr",
                "o_indptr",
                "kv_chunk_size",
            )
        ]
        enable_cuda_graph = 1
        split_kv = 1
        return np.array(
            [
                self.items,
                self.rows,
                byte_offset["total_num_rows"],
                self.tile,
                *lists,
                0,
                4 * self.scores,
                byte_offset["block_valid_mask"],
                enable_cuda_graph,
                split_kv,
            ],
            np.int64,
        )


def make_plan(shape: PlanShape, rows) -> Plan:
    """Make the plan of a step."""
    B = shape.sequences
    T = shape.rows
    P = shape.page
    starts_B1 = rows.starts_B1
    rows_B = starts_B1[1:] - starts_B1[:-1]
    has_rows_B = rows_B > 0
    newest_B = rows.positions_T[jnp.clip(starts_B1[1:] - 1, 0, T - 1)]
    length_B = jnp.where(has_rows_B, newest_B + 1, 0)
    tiles_B = -(-rows_B * shape.group // shape.tile)
    # As in the kernel: the keys of the window plus one key for each pair of row and head of a tile.
    visible_B = (
        length_B if shape.window is None else jnp.minimum(length_B, shape.window_left + shape.tile)
    )
    units_B = -(-visible_B // shape.chunk_unit)
    spare_items = shape.items - jnp.sum(tiles_B)
    # All chunks are at most sum(tiles * (units / chunk_units + 1)), so they fit into the items.
    chunk_units = jnp.maximum(-(-jnp.sum(tiles_B * units_B) // spare_items), 1)
    chunks_B = jnp.where(has_rows_B, -(-units_B // chunk_units), 0)

    end_B = jnp.cumsum(tiles_B * chunks_B)
    item_C = jnp.arange(shape.items)
    seq_C = jnp.minimum(jnp.searchsorted(end_B, item_C, side="right", method="compare_all"), B - 1)
    index_C = item_C - (end_B - tiles_B * chunks_B)[seq_C]
    chunks_C = jnp.maximum(chunks_B[seq_C], 1)

    first_result_B1 = prepend_zero(jnp.cumsum(rows_B * chunks_B))
    row_T = jnp.arange(T + 1)
    seq_T = jnp.minimum(
        jnp.searchsorted(starts_B1[1:], row_T, side="right", method="compare_all"), B - 1
    )
    is_owned_T = row_T < starts_B1[-1]
    result_T = first_result_B1[seq_T] + (row_T - starts_B1[seq_T]) * chunks_B[seq_T]

    lists = {
        "request_indices": seq_C,
        "qo_tile_indices": index_C // chunks_C,
        "kv_tile_indices": index_C % chunks_C,
        "o_indptr": first_result_B1,
        "kv_chunk_size": chunk_units[None] * shape.chunk_unit,
        "total_num_rows": starts_B1[-1:],
        "merge_indptr": jnp.where(is_owned_T, result_T, first_result_B1[-1]),
        "block_valid_mask": as_words(item_C < end_B[-1]),
    }
    offsets = shape.offsets
    list_ends = [*offsets.values()][1:]
    padded_lists = [
        jnp.pad(values.astype(jnp.int32), (0, end - offsets[name] - values.shape[0]))
        for (name, values), end in zip(lists.items(), list_ends, strict=True)
    ]
    pages_B = -(-length_B // P)
    return Plan(
        jnp.concatenate(padded_lists),
        starts_B1,
        *concatenate_tables(rows.tables_BM, pages_B),
        length_B - (pages_B - 1) * P,
    )


def prepend_zero(cumulative_B):
    """A cumulative sum with a leading zero: where each sequence begins, and where the last ends."""
    return jnp.concatenate([jnp.zeros(1, cumulative_B.dtype), cumulative_B]).astype(jnp.int32)


def as_words(flags_C):
    """View flags as int32 words of four bytes, one byte for each flag."""
    bytes_C = jnp.pad(flags_C.astype(jnp.uint8), (0, -flags_C.shape[0] % 4))
    return jax.lax.bitcast_convert_type(bytes_C.reshape(-1, 4), jnp.int32)


def concatenate_tables(tables_BM, pages_B):
    """Concatenate the used parts of the page tables.

    Returns:
        (first_page_B1, pages): where each sequence begins, and the page numbers [B * M].
    """
    B, M = tables_BM.shape
    first_B1 = prepend_zero(jnp.cumsum(pages_B))
    page_M = jnp.arange(M)
    # Unused entries go to unique places past the end, where they are dropped.
    past_BM = B * M + jnp.arange(B * M).reshape(B, M)
    place_BM = jnp.where(page_M < pages_B[:, None], first_B1[:-1, None] + page_M, past_BM)
    flat = jnp.zeros(B * M, jnp.int32).at[place_BM.reshape(-1)]
    return first_B1, flat.set(tables_BM.reshape(-1), mode="drop", unique_indices=True)
