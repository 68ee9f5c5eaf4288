"""Work partition of GPU attention: complete, balanced, and split only at the ends of spans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention import KVPages, QueryRows
from quire.ops.attention.hopper_kernel import task
from quire.ops.attention.hopper_kernel.paged import (
    TASK_OVERHEAD,
    make_kernel_shape,
    plan,
    span_blocks,
)
from quire.ops.attention.hopper_kernel.task import CutContext, KernelShape, Share, saved_rows
from quire.tests.support.attention_plan import contexts_of, tasks_of
from quire.tests.support.cases import cases

MODELS = {  # query heads, KV heads, width, values within keys, window
    "Llama-3-8B": (32, 8, 128, None, None),
    "Llama-3-8B of eight": (4, 1, 128, None, None),
    "MHA": (32, 32, 128, None, None),
    "Gemma-3": (16, 8, 256, None, 1024),
    "gpt-oss": (64, 8, 64, None, 128),
    "a wide group": (28, 4, 128, None, 4096),
    "DeepSeek-V3": (128, 1, 576, 512, None),
    "DeepSeek-V3 of eight": (16, 1, 576, 512, None),
}


def shape_for(kind: str, T: int, B: int, longest: int) -> KernelShape:
    N, K, H, values, window = MODELS[kind]
    page = jax.ShapeDtypeStruct((9, 16, K, H), jnp.bfloat16)
    numbers = jax.ShapeDtypeStruct((B, -(-longest // 16)), jnp.int32)
    return make_kernel_shape(
        jax.ShapeDtypeStruct((T, N, H), jnp.bfloat16),
        KVPages(page) if values else KVPages(page, page),
        QueryRows(None, None, numbers, None),
        window=window,
        scale=1.0,
        soft_cap=None,
        values=values,
        sinks=False,
        processors=132,
    )


def query_rows(shape: KernelShape, B: int, sequences: list[tuple[int, int]]) -> QueryRows:
    """Rows of sequences given as (context length, number of rows); padding holds garbage."""
    positions = np.full(shape.rows, 12345)
    starts = np.zeros(B + 1, int)
    for b, (start, count) in enumerate(sequences):
        starts[b + 1] = starts[b] + count
        positions[starts[b] : starts[b + 1]] = start + np.arange(count)
    starts[len(sequences) + 1 :] = starts[len(sequences)]
    return QueryRows(jnp.asarray(positions, jnp.int32), jnp.asarray(starts, jnp.int32), None, None)


def visible_blocks(shape: KernelShape, position: int) -> set[int]:
    first = 0 if shape.window is None else max(0, position - shape.window + 1)
    return set(range(first // shape.block, position // shape.block + 1))


def check_plan(shape: KernelShape, B: int, sequences: list[tuple[int, int]]):
    """Check the invariants of a plan; return the work items of each processor."""
    partition = plan(shape, query_rows(shape, B, sequences))
    work_items = tasks_of(shape, partition)
    positions = np.concatenate([start + np.arange(count) for start, count in sequences])
    seq_T = np.repeat(np.arange(len(sequences)), [count for _, count in sequences])
    items_by_tile: dict[tuple[int, int], list] = {}
    contexts = [item for items in contexts_of(shape, partition) for item in items]
    context_of = dict(
        zip((id(item) for items in work_items for item in items), contexts, strict=True)
    )
    for item in (item for items in work_items for item in items):
        assert (item.seq, item.position) == (seq_T[item.row], positions[item.row])
        assert 1 <= item.count <= shape.positions * shape.tiles and item.row + item.count <= len(
            positions
        )
        assert seq_T[item.row + item.count - 1] == item.seq
        last = item.position + item.count - 1
        assert item.span == span_blocks(shape, jnp.asarray(last)), (
            "all rows of a tile have the same spans"
        )
        items_by_tile.setdefault((item.row, item.head_tile), []).append(item)
    rows = sorted(
        (row, of[0].count) for (row, part_id), of in items_by_tile.items() if part_id == 0
    )
    assert [row for row, _ in rows] == np.cumsum([0, *[count for _, count in rows]])[:-1].tolist()
    assert (
        sum(count for _, count in rows) == len(positions)
        and len(items_by_tile) == len(rows) * shape.head_tiles
    )
    share_RF = [Share(*map(int, x)) for x in np.asarray(partition.shares_RF)]
    tile_of = {int(x[0]): n for n, x in enumerate(np.asarray(partition.tiles_CF)) if x[1] > 0}
    merges = {
        share.unit: share for n, share in enumerate(share_RF) if share.spans and share.first == n
    }
    assert len(merges) == len({share.unit for share in share_RF if share.spans})
    place_uses = np.zeros(shape.places, int)
    for (row, part_id), pieces in items_by_tile.items():
        item = pieces[0]
        expected_blocks = set.union(
            *(visible_blocks(shape, item.position + n) for n in (0, item.count - 1))
        )
        expected_blocks = set(range(min(expected_blocks), max(expected_blocks) + 1))
        actual_blocks = [b for piece in pieces for b in range(piece.first, piece.last + 1)]
        assert sorted(actual_blocks) == sorted(expected_blocks), "each block must be covered once"
        unit = tile_of[row] * shape.head_tiles + part_id
        if len(pieces) == 1:
            assert item.place == -1 and unit not in merges
            continue
        stride = int(saved_rows(shape, np.int32(item.count)))
        assert shape.cut and (not shape.latent or item.count == 1)
        places = {}
        for piece in pieces:
            assert piece.first == min(expected_blocks) or piece.first % item.span == 0
            assert piece.last == max(expected_blocks) or (piece.last + 1) % item.span == 0
            for n, span in enumerate(range(piece.first // item.span, piece.last // item.span + 1)):
                places[span] = piece.place + n * stride
        share = merges.pop(unit)
        assert {context_of[id(piece)] for piece in pieces} == {
            CutContext(share.place, len(places), share.first)
        }
        assert sorted(places) == list(range(min(places), max(places) + 1))
        assert all(
            place == share.place + (span - min(places)) * stride for span, place in places.items()
        )
        assert len(places) <= shape.spans
        for place in places.values():
            place_uses[place : place + stride] += 1
            assert place >= 0 and place + stride <= shape.places
    assert not merges and place_uses.max(initial=0) <= 1, "each saved span must have its own place"
    return work_items


def total_blocks(items) -> int:
    return sum(item.last - item.first + 1 + TASK_OVERHEAD for item in items)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.slow
def test_plan_covers_every_block_once(kind):
    rng = np.random.default_rng(sorted(MODELS).index(kind))
    for n in range(cases(24, least=2)):
        longest = int(rng.choice([1024, 8192, 40960, 131072]))
        B = int(rng.choice([1, 4, 32]))
        T = B if n % 2 else B + int(rng.choice([1, 60, 700]))
        shape = shape_for(kind, T, B, longest)
        sequences = []
        remaining = T
        for b in range(int(rng.integers(1, B + 1))):
            count = (
                1
                if T == B or rng.random() < 0.5
                else int(rng.integers(1, max(2, remaining - (B - b) + 1)))
            )
            count = max(1, min(count, remaining, longest))
            if remaining < count:
                break
            start = int(rng.integers(0, longest - count + 1) * rng.choice([1, 0.1]))
            edge = (
                shape.stretch * int(rng.integers(1, 4)) - count // 2
            )  # crosses the end of a stretch
            start = edge if rng.random() < 0.3 and 0 <= edge <= longest - count else start
            sequences.append((start, count))
            remaining -= count
        check_plan(shape, B, sequences)


@pytest.mark.parametrize(
    ("kind", "B", "T", "length", "min_busy"),
    [
        ("Llama-3-8B", 1, 1, 1024, 32),
        ("Llama-3-8B", 1, 1, 4096, 128),
        ("Llama-3-8B", 1, 1, 131072, 132),
        ("Llama-3-8B", 64, 64, 1024, 132),
        ("Llama-3-8B", 34, 34, 8192, 132),
        ("Llama-3-8B", 256, 256, 1024, 132),
        ("DeepSeek-V3", 1, 1, 4096, 16),
        ("DeepSeek-V3", 64, 64, 8192, 128),
        ("DeepSeek-V3", 1, 1, 131072, 128),
    ],
)
@pytest.mark.slow
def test_decode_work_is_balanced_over_processors(kind, B, T, length, min_busy):
    shape = shape_for(kind, T, B, length)
    work_items = check_plan(shape, B, [(length - 1, 1)] * B)
    loads = [total_blocks(items) for items in work_items]
    assert sum(x > 0 for x in loads) >= min_busy
    span = int(span_blocks(shape, jnp.asarray(length - 1)))
    assert max(loads) <= max(
        sum(loads) / 132 * 9 / 8 + 1, sum(loads) / 132 + span + 2 * TASK_OVERHEAD
    )


@pytest.mark.slow
def test_long_decode_beside_a_prompt_is_split():
    """Otherwise one processor would dominate the step's time."""
    shape = shape_for("Llama-3-8B", 2048, 64, 131072)
    work_items = check_plan(shape, 64, [(131000, 1), (0, 2000)])
    loads = [total_blocks(items) for items in work_items]
    assert max(loads) < 1.6 * sum(loads) / 132
    assert max(loads) < 131000 / 64 / 8


def test_uneven_lengths_are_balanced():
    rng = np.random.default_rng(3)
    lengths = [int(x) for x in rng.integers(100, 16000, 64)]
    shape = shape_for("Llama-3-8B", 64, 64, 16384)
    loads = [total_blocks(items) for items in check_plan(shape, 64, [(x - 1, 1) for x in lengths])]
    assert max(loads) <= sum(loads) / 132 + 4 + 4 * TASK_OVERHEAD


def test_span_length_depends_on_the_position_only():
    """Spans are as short as 64 per context allow, for any step and maximum context."""
    for kind in MODELS:
        shape = shape_for(kind, 4, 4, 1 << 20)
        position = jnp.asarray(np.random.default_rng(0).integers(0, 1 << 20, 2000))
        blocks = np.asarray(span_blocks(shape, position))
        stretch = np.asarray(position) // shape.stretch
        if shape.window is not None:
            stretch = np.minimum(stretch, (shape.window - 1) // shape.stretch)
        assert (blocks * task.SPANS >= (stretch + 1) * shape.span * task.SPANS).all()
        assert ((blocks == shape.span) | (blocks // 2 <= stretch * shape.span)).all()
        other_shape = shape._replace(rows=700, max_keys=min(shape.max_keys, 1 << 18))
        is_inside = position < 1 << 18
        assert (np.asarray(span_blocks(other_shape, position)) == blocks)[
            np.asarray(is_inside)
        ].all()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("T", "B"), [(1, 1), (64, 64), (256, 256), (8192, 256)])
def test_scratch_memory_is_bounded(kind, T, B):
    """For any context length; it was once 2.19 GB for 256 sequences of 131,072 tokens."""
    shape = shape_for(kind, T, B, 1 << 20)
    assert shape.places * shape.saved_width * 4 <= task.SCRATCH < 1 << 31
    assert T > 1 or shape.places * shape.saved_width * 4 < 20e6
