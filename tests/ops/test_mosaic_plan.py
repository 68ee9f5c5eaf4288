"""How the work of attention on a GPU is shared out: everything once, evenly, and cut only where
spans end.
"""

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

KINDS = {  # query heads, KV heads, width, values within keys, window
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
    N, K, H, values, window = KINDS[kind]
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


def rows_for(shape: KernelShape, B: int, sequences: list[tuple[int, int]]) -> QueryRows:
    """Rows of sequences, each of which has (rows before, rows); padding holds anything."""
    positions = np.full(shape.rows, 12345)
    starts = np.zeros(B + 1, int)
    for b, (start, count) in enumerate(sequences):
        starts[b + 1] = starts[b] + count
        positions[starts[b] : starts[b + 1]] = start + np.arange(count)
    starts[len(sequences) + 1 :] = starts[len(sequences)]
    return QueryRows(jnp.asarray(positions, jnp.int32), jnp.asarray(starts, jnp.int32), None, None)


def blocks_of(shape: KernelShape, position: int) -> set[int]:
    first = 0 if shape.window is None else max(0, position - shape.window + 1)
    return set(range(first // shape.block, position // shape.block + 1))


def examine(shape: KernelShape, B: int, sequences: list[tuple[int, int]]):
    """Holds for any rows. Returns the tasks of each processor."""
    shared = plan(shape, rows_for(shape, B, sequences))
    found = tasks_of(shape, shared)
    positions = np.concatenate([start + np.arange(count) for start, count in sequences])
    seq_T = np.repeat(np.arange(len(sequences)), [count for _, count in sequences])
    seen: dict[tuple[int, int], list] = {}
    contexts = [one for mine in contexts_of(shape, shared) for one in mine]
    context_of = dict(zip((id(one) for mine in found for one in mine), contexts, strict=True))
    for one in (one for mine in found for one in mine):
        assert (one.seq, one.position) == (seq_T[one.row], positions[one.row])
        assert 1 <= one.count <= shape.positions * shape.tiles and one.row + one.count <= len(
            positions
        )
        assert seq_T[one.row + one.count - 1] == one.seq
        last = one.position + one.count - 1
        assert one.span == span_blocks(shape, jnp.asarray(last)), (
            "all rows of a tile have the same spans"
        )
        seen.setdefault((one.row, one.head_tile), []).append(one)
    rows = sorted((row, of[0].count) for (row, part), of in seen.items() if part == 0)
    assert [row for row, _ in rows] == np.cumsum([0, *[count for _, count in rows]])[:-1].tolist()
    assert (
        sum(count for _, count in rows) == len(positions)
        and len(seen) == len(rows) * shape.head_tiles
    )
    share_RF = [Share(*map(int, x)) for x in np.asarray(shared.shares_RF)]
    tile_of = {int(x[0]): n for n, x in enumerate(np.asarray(shared.tiles_CF)) if x[1] > 0}
    merges = {
        share.unit: share for n, share in enumerate(share_RF) if share.spans and share.first == n
    }
    assert len(merges) == len({share.unit for share in share_RF if share.spans})
    taken = np.zeros(shape.places, int)
    for (row, part), pieces in seen.items():
        one = pieces[0]
        wanted = set.union(*(blocks_of(shape, one.position + n) for n in (0, one.count - 1)))
        wanted = set(range(min(wanted), max(wanted) + 1))
        got = [b for piece in pieces for b in range(piece.first, piece.last + 1)]
        assert sorted(got) == sorted(wanted), "each block once"
        unit = tile_of[row] * shape.head_tiles + part
        if len(pieces) == 1:
            assert one.place == -1 and unit not in merges
            continue
        stride = int(saved_rows(shape, np.int32(one.count)))
        assert shape.cut and (not shape.latent or one.count == 1)
        places = {}
        for piece in pieces:
            assert piece.first == min(wanted) or piece.first % one.span == 0
            assert piece.last == max(wanted) or (piece.last + 1) % one.span == 0
            for n, span in enumerate(range(piece.first // one.span, piece.last // one.span + 1)):
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
            taken[place : place + stride] += 1
            assert place >= 0 and place + stride <= shape.places
    assert not merges and taken.max(initial=0) <= 1, "each saved span has a place of its own"
    return found


def load(mine) -> int:
    return sum(one.last - one.first + 1 + TASK_OVERHEAD for one in mine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_everything_once(kind):
    rng = np.random.default_rng(sorted(KINDS).index(kind))
    for n in range(cases(24, least=2)):
        longest = int(rng.choice([1024, 8192, 40960, 131072]))
        B = int(rng.choice([1, 4, 32]))
        T = B if n % 2 else B + int(rng.choice([1, 60, 700]))
        shape = shape_for(kind, T, B, longest)
        sequences = []
        left = T
        for b in range(int(rng.integers(1, B + 1))):
            count = (
                1
                if T == B or rng.random() < 0.5
                else int(rng.integers(1, max(2, left - (B - b) + 1)))
            )
            count = max(1, min(count, left, longest))
            if left < count:
                break
            start = int(rng.integers(0, longest - count + 1) * rng.choice([1, 0.1]))
            edge = shape.stretch * int(rng.integers(1, 4)) - count // 2  # over the end of a stretch
            start = edge if rng.random() < 0.3 and 0 <= edge <= longest - count else start
            sequences.append((start, count))
            left -= count
        examine(shape, B, sequences)


@pytest.mark.parametrize(
    ("kind", "B", "T", "length", "busy"),
    [
        ("Llama-3-8B", 1, 1, 1024, 32), ("Llama-3-8B", 1, 1, 4096, 128), ("Llama-3-8B", 1, 1, 131072, 132),
        ("Llama-3-8B", 64, 64, 1024, 132), ("Llama-3-8B", 34, 34, 8192, 132), ("Llama-3-8B", 256, 256, 1024, 132),
        ("DeepSeek-V3", 1, 1, 4096, 16), ("DeepSeek-V3", 64, 64, 8192, 128), ("DeepSeek-V3", 1, 1, 131072, 128),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_processors_are_busy_and_evenly_so(kind, B, T, length, busy):
    shape = shape_for(kind, T, B, length)
    found = examine(shape, B, [(length - 1, 1)] * B)
    loads = [load(mine) for mine in found]
    assert sum(x > 0 for x in loads) >= busy
    span = int(span_blocks(shape, jnp.asarray(length - 1)))
    assert max(loads) <= max(
        sum(loads) / 132 * 9 / 8 + 1, sum(loads) / 132 + span + 2 * TASK_OVERHEAD
    )


@pytest.mark.slow
def test_a_long_sequence_beside_a_prompt_is_cut():
    """In a step that carries a prompt, too: one processor alone would take all the time of the
    step.
    """
    shape = shape_for("Llama-3-8B", 2048, 64, 131072)
    found = examine(shape, 64, [(131000, 1), (0, 2000)])
    loads = [load(mine) for mine in found]
    assert max(loads) < 1.6 * sum(loads) / 132
    assert max(loads) < 131000 / 64 / 8


def test_uneven_lengths_are_shared_evenly():
    rng = np.random.default_rng(3)
    lengths = [int(x) for x in rng.integers(100, 16000, 64)]
    shape = shape_for("Llama-3-8B", 64, 64, 16384)
    loads = [load(mine) for mine in examine(shape, 64, [(x - 1, 1) for x in lengths])]
    assert max(loads) <= sum(loads) / 132 + 4 + 4 * TASK_OVERHEAD


def test_spans_depend_on_the_position_alone():
    """They are as short as 64 of them allow, whatever the step and the longest context."""
    for kind in KINDS:
        shape = shape_for(kind, 4, 4, 1 << 20)
        position = jnp.asarray(np.random.default_rng(0).integers(0, 1 << 20, 2000))
        blocks = np.asarray(span_blocks(shape, position))
        stretch = np.asarray(position) // shape.stretch
        if shape.window is not None:
            stretch = np.minimum(stretch, (shape.window - 1) // shape.stretch)
        assert (blocks * task.SPANS >= (stretch + 1) * shape.span * task.SPANS).all()
        assert ((blocks == shape.span) | (blocks // 2 <= stretch * shape.span)).all()
        other = shape._replace(rows=700, max_keys=min(shape.max_keys, 1 << 18))
        inside = position < 1 << 18
        assert (np.asarray(span_blocks(other, position)) == blocks)[np.asarray(inside)].all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "B"), [(1, 1), (64, 64), (256, 256), (8192, 256)])
def test_scratch_is_bounded(kind, T, B):
    """However long contexts may be: it was 2.19 GB for 256 sequences of 131,072, and 2**31 numbers
    for MHA.
    """
    shape = shape_for(kind, T, B, 1 << 20)
    assert shape.places * shape.saved_width * 4 <= task.SCRATCH < 1 << 31
    assert T > 1 or shape.places * shape.saved_width * 4 < 20e6
