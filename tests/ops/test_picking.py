"""Sparse attention to each row's top positions, against a float64 loop over rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention import KVPages, QueryRows
from quire.ops.attention.backend import AttentionParams
from quire.ops.attention.picking import IndexQueries, sparse_attention
from quire.tests.support.cases import cases

S = 8
P = 40
M = 9
N = 3
A = 24
V = 16
HEADS = 16
DIM = 8
COUNT = 20


def random_step(rng, lengths, counts):
    """(page tables, keys of each sequence, queries of its last `counts` rows)."""
    free = iter(rng.permutation(np.arange(1, P)))
    tables = np.zeros((len(lengths), M), np.int32)
    for index, length in enumerate(lengths):
        tables[index, : -(-length // S)] = [next(free) for _ in range(-(-length // S))]
    keys = [rng.standard_normal((length, A + DIM)).astype(np.float32) for length in lengths]
    queries = [
        {
            "q": rng.standard_normal((count, N, A)).astype(np.float32),
            "own": rng.standard_normal((count, HEADS, DIM)).astype(np.float32),
            "weight": rng.standard_normal((count, HEADS)).astype(np.float32),
        }
        for count in counts
    ]
    return tables, keys, queries


def run_sequences(tables, keys, queries, order, dtype=np.float32, padding=3):
    """Run a step with the sequences in `order`; return their outputs, a list of [rows, N, V]."""
    page_rows = np.zeros((P * S, A + DIM), np.float32)
    positions = []
    slots = []
    new = []
    starts = [0]
    for index in order:
        length = len(keys[index])
        count = len(queries[index]["q"])
        position_ids = np.arange(length)
        slot = tables[index, position_ids // S] * S + position_ids % S
        page_rows[slot[: length - count]] = keys[index][: length - count]
        positions += position_ids[length - count :].tolist()
        slots += slot[length - count :].tolist()
        new.append(keys[index][length - count :])
        starts.append(starts[-1] + count)
    padding_slots = [0] * padding

    def rows(name):
        values = np.concatenate([queries[index][name] for index in order])
        return jnp.asarray(
            np.concatenate([values, np.ones((padding, *values.shape[1:]), np.float32)])
        )

    pages = KVPages(k_PSKH=jnp.asarray(page_rows.reshape(P, S, 1, -1)))
    if dtype == np.int8:
        scale = np.maximum(np.abs(page_rows).max(1), 1e-9) / 127
        codes = np.round(page_rows / scale[:, None]).astype(np.int8)
        scales = scale.reshape(P, 1, S).astype(np.float32)
        pages = KVPages(
            k_PSKH=jnp.asarray(codes.reshape(P, S, 1, -1)), k_scale_PKS=jnp.asarray(scales)
        )
    query_rows = QueryRows(
        jnp.asarray(positions + [-1] * padding),
        jnp.asarray(starts),
        jnp.asarray(tables[list(order)]),
        jnp.asarray(slots + padding_slots),
    )
    new_keys = jnp.asarray(np.concatenate([*new, np.zeros((padding, A + DIM), np.float32)]))[
        :, None
    ]
    picks = IndexQueries(rows("own"), rows("weight"), COUNT)
    out, pages, picked = jax.jit(sparse_attention, static_argnames="params")(
        rows("q"),
        new_keys,
        pages,
        query_rows,
        picks,
        None,
        params=AttentionParams(0.3, value_dim=V),
    )
    reused, *_ = jax.jit(sparse_attention, static_argnames="params")(
        rows("q"),
        None,
        pages,
        query_rows,
        IndexQueries(count=COUNT),
        picked,
        params=AttentionParams(0.3, value_dim=V),
    )
    assert np.array_equal(out[: starts[-1]], reused[: starts[-1]]), (
        "a layer that reuses another layer's picks"
    )
    return np.split(np.asarray(out)[: starts[-1]], starts[1:-1])


def reference_attention(keys, queries):
    keys, length = keys.astype(np.float64), len(keys)
    out = []
    for row in range(len(queries["q"])):
        visible = keys[: length - len(queries["q"]) + row + 1]
        score = queries["weight"][row] @ np.maximum(
            queries["own"][row].astype(np.float64) @ visible[:, A:].T, 0
        )
        best = visible[np.sort(np.argsort(-score)[:COUNT])]
        weight = np.exp(0.3 * queries["q"][row].astype(np.float64) @ best[:, :A].T)
        out.append(weight / weight.sum(1, keepdims=True) @ best[:, :V])
    return np.stack(out)


EDGES = [(COUNT, 1), (COUNT + 1, 1), (COUNT + 3, 8), (72, 1), (72, 30), (5, 5), (1, 1), (64, 17)]


@pytest.mark.parametrize("seed", range(cases(6)))
@pytest.mark.slow
def test_picking_attention_matches_float64(seed):
    """Contexts below and above the number of picks; chunked prefill beside decoding."""
    rng = np.random.default_rng(seed)
    edges = [EDGES[index] for index in rng.permutation(len(EDGES))[:5]]
    tables, keys, queries = random_step(rng, *zip(*edges, strict=True))
    for actual, sequence_keys, sequence_queries in zip(
        run_sequences(tables, keys, queries, range(5)), keys, queries, strict=True
    ):
        np.testing.assert_allclose(
            actual, reference_attention(sequence_keys, sequence_queries), rtol=2e-5, atol=2e-5
        )


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
@pytest.mark.slow
def test_picking_attention_is_batch_invariant(dtype):
    tables, keys, queries = random_step(np.random.default_rng(7), *zip(*EDGES[:6], strict=True))
    together = run_sequences(tables, keys, queries, range(6), dtype)
    for order in ([3], [4, 0], [5, 2, 1, 3]):
        for index, actual in zip(
            order,
            run_sequences(tables, keys, queries, order, dtype, padding=len(order)),
            strict=True,
        ):
            assert np.array_equal(actual, together[index])


def test_int8_pages_change_the_output_little():
    tables, keys, queries = random_step(np.random.default_rng(8), [60, 70], [1, 3])
    exact, rounded = (
        run_sequences(tables, keys, queries, [0, 1], dtype) for dtype in (np.float32, np.int8)
    )
    assert 0 < max(np.abs(a - b).max() for a, b in zip(exact, rounded, strict=True)) < 0.5
