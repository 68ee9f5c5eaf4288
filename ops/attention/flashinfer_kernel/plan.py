"""What FlashInfer's paged kernel is told about a step: who computes what, made on the device from
the step's arrays.

FlashInfer's own planner runs on the host and knows a step's lengths. Here sizes are bounds that a
compiled step has, as when FlashInfer is used within CUDA graphs, and all that changes is arrays. C:
work items, a tile of a sequence's rows and a part of its keys each.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PART = 128  # keys, at least, of a part of a context
EACH = 2  # items that a processor computes at once


class Plan(NamedTuple):
    """The arrays that the kernel reads beside queries and pages, all of int32."""

    words: Any  # the lists of `PlanShape.places`
    starts_B1: Any  # the first row of each sequence
    first_page_B1: Any  # of each sequence, in `pages`
    pages: Any  # [B * M]: each sequence's pages, one sequence after the other
    last_page_B: Any  # positions that the last page of each sequence has


@dataclass(frozen=True)
class PlanShape:
    """What a step is compiled for."""

    rows: int
    sequences: int
    heads: int
    kv_heads: int
    width: int
    page: int
    table: int  # pages of a sequence, at most
    window: int | None
    processors: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def tile(self) -> int:
        """Pairs of a row and a head that an item computes, by FlashInfer's rule for the average
        sequence.
        """
        pairs = self.rows * self.group // self.sequences
        if pairs <= 16:
            return 16
        return 64 if pairs <= 64 or self.width >= 256 else 128

    @property
    def tiles(self) -> int:
        """The most tiles that a step can have: a sequence's last one may be filled in part."""
        gap = self.tile - math.gcd(self.group, self.tile)
        return (self.rows * self.group + min(self.sequences, self.rows) * gap) // self.tile

    @property
    def items(self) -> int:
        """Room for all tiles, and for as many parts besides as processors can compute at once."""
        return self.tiles + max(1, EACH * self.processors // self.kv_heads)

    @property
    def parts(self) -> int:
        """The most results of a row and a part of its keys."""
        return self.items * self.tile // self.group

    @property
    def unit(self) -> int:
        """Keys: a part of a context has a multiple of them."""
        return max(PART // self.page, 1) * self.page

    @property
    def window_left(self) -> int:
        """Keys that a row sees before its own; -1: all."""
        return -1 if self.window is None else self.window - 1

    @property
    def places(self) -> dict[str, int]:
        """Where each list begins in the words of a plan, and where the last ends; at multiples of
        16 bytes.
        """
        sizes = {
            "sequence": self.items,
            "tile": self.items,
            "part": self.items,
            "first_result": self.sequences + 1,
            "keys_a_part": 1,
            "rows": 1,
            "results_before": self.rows + 1,
            "counts": -(-self.items // 4),
            "end": 0,
        }
        places = {}
        at = 0
        for name, size in sizes.items():
            places[name], at = at, at + -(-size // 4) * 4
        return places

    @property
    def scratch(self) -> int:
        """float32 numbers of room for parts' results, of two bytes a number, and their sums."""
        return self.scores + self.parts * self.heads

    @property
    def scores(self) -> int:
        """Where in the scratch the logarithms of sums begin."""
        return -(-self.parts * self.heads * self.width // 8) * 4

    @property
    def info(self) -> np.ndarray:
        """FlashInfer's PrefillPlanInfo: places in bytes, and that a step is made for a CUDA graph
        and for parts.
        """
        at = {name: 4 * place for name, place in self.places.items()}
        lists = [
            at[name]
            for name in (
                "sequence",
                "tile",
                "part",
                "results_before",
                "first_result",
                "keys_a_part",
            )
        ]
        graph = 1
        split = 1
        return np.array(
            [
                self.items,
                self.rows,
                at["rows"],
                self.tile,
                *lists,
                0,
                4 * self.scores,
                at["counts"],
                graph,
                split,
            ],
            np.int64,
        )


def make_plan(shape: PlanShape, rows) -> Plan:
    """The plan of a step, from the arrays that describe it."""
    B = shape.sequences
    T = shape.rows
    P = shape.page
    starts_B1 = rows.starts_B1
    rows_B = starts_B1[1:] - starts_B1[:-1]
    there_B = rows_B > 0
    newest_B = rows.positions_T[jnp.clip(starts_B1[1:] - 1, 0, T - 1)]
    length_B = jnp.where(there_B, newest_B + 1, 0)
    tiles_B = -(-rows_B * shape.group // shape.tile)
    # As the kernel counts: the keys of a window and of a tile's rows, counted as if each pair were
    # one.
    seen_B = (
        length_B if shape.window is None else jnp.minimum(length_B, shape.window_left + shape.tile)
    )
    units_B = -(-seen_B // shape.unit)
    spare = shape.items - jnp.sum(tiles_B)
    # The parts of all tiles are at most sum(tiles * (units / part + 1)), which then fit into the
    # items.
    part = jnp.maximum(-(-jnp.sum(tiles_B * units_B) // spare), 1)
    parts_B = jnp.where(there_B, -(-units_B // part), 0)

    end_B = jnp.cumsum(tiles_B * parts_B)
    item_C = jnp.arange(shape.items)
    seq_C = jnp.minimum(jnp.searchsorted(end_B, item_C, side="right", method="compare_all"), B - 1)
    inside_C = item_C - (end_B - tiles_B * parts_B)[seq_C]
    each_C = jnp.maximum(parts_B[seq_C], 1)

    first_result_B1 = after(jnp.cumsum(rows_B * parts_B))
    row_T = jnp.arange(T + 1)
    seq_T = jnp.minimum(
        jnp.searchsorted(starts_B1[1:], row_T, side="right", method="compare_all"), B - 1
    )
    owned_T = row_T < starts_B1[-1]
    before_T = first_result_B1[seq_T] + (row_T - starts_B1[seq_T]) * parts_B[seq_T]

    lists = {
        "sequence": seq_C,
        "tile": inside_C // each_C,
        "part": inside_C % each_C,
        "first_result": first_result_B1,
        "keys_a_part": part[None] * shape.unit,
        "rows": starts_B1[-1:],
        "results_before": jnp.where(owned_T, before_T, first_result_B1[-1]),
        "counts": as_words(item_C < end_B[-1]),
    }
    places = shape.places
    ends = [*places.values()][1:]
    padded = [
        jnp.pad(found.astype(jnp.int32), (0, end - places[name] - found.shape[0]))
        for (name, found), end in zip(lists.items(), ends, strict=True)
    ]
    pages_B = -(-length_B // P)
    return Plan(
        jnp.concatenate(padded),
        starts_B1,
        *one_after_the_other(rows.tables_BM, pages_B),
        length_B - (pages_B - 1) * P,
    )


def after(ends_B):
    """Where each begins, and where the last ends."""
    return jnp.concatenate([jnp.zeros(1, ends_B.dtype), ends_B]).astype(jnp.int32)


def as_words(flags_C):
    """Flags of a byte each, four to a word."""
    bytes_C = jnp.pad(flags_C.astype(jnp.uint8), (0, -flags_C.shape[0] % 4))
    return jax.lax.bitcast_convert_type(bytes_C.reshape(-1, 4), jnp.int32)


def one_after_the_other(tables_BM, pages_B):
    """(where each sequence's pages begin, all pages): without the room that tables have at
    their ends.
    """
    B, M = tables_BM.shape
    first_B1 = after(jnp.cumsum(pages_B))
    page_M = jnp.arange(M)
    # What is not a sequence's goes to places past the end, of which no two are equal, and is
    # dropped.
    past_BM = B * M + jnp.arange(B * M).reshape(B, M)
    place_BM = jnp.where(page_M < pages_B[:, None], first_B1[:-1, None] + page_M, past_BM)
    flat = jnp.zeros(B * M, jnp.int32).at[place_BM.reshape(-1)]
    return first_B1, flat.set(tables_BM.reshape(-1), mode="drop", unique_indices=True)
