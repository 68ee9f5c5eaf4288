"""Attention to the positions that each row picks, against a row-by-row computation in float64."""

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


def step(rng, lengths, counts):
    """Sequences so long after a step in which so many of their rows are computed: (all rows,
    tables).
    """
    free = iter(rng.permutation(np.arange(1, P)))
    tables = np.zeros((len(lengths), M), np.int32)
    for index, length in enumerate(lengths):
        tables[index, : -(-length // S)] = [next(free) for _ in range(-(-length // S))]
    keys = [rng.standard_normal((length, A + DIM)).astype(np.float32) for length in lengths]
    asked = [
        {
            "q": rng.standard_normal((count, N, A)).astype(np.float32),
            "own": rng.standard_normal((count, HEADS, DIM)).astype(np.float32),
            "weight": rng.standard_normal((count, HEADS)).astype(np.float32),
        }
        for count in counts
    ]
    return tables, keys, asked


def run(tables, keys, asked, order, dtype=np.float32, padding=3):
    """What some of the sequences get, in a step of these alone: a list of [rows, N, V]."""
    held = np.zeros((P * S, A + DIM), np.float32)
    positions = []
    slots = []
    new = []
    starts = [0]
    for index in order:
        length = len(keys[index])
        count = len(asked[index]["q"])
        at = np.arange(length)
        slot = tables[index, at // S] * S + at % S
        held[slot[: length - count]] = keys[index][: length - count]
        positions += at[length - count :].tolist()
        slots += slot[length - count :].tolist()
        new.append(keys[index][length - count :])
        starts.append(starts[-1] + count)
    spare = [0] * padding

    def rows(name):
        found = np.concatenate([asked[index][name] for index in order])
        return jnp.asarray(
            np.concatenate([found, np.ones((padding, *found.shape[1:]), np.float32)])
        )

    pages = KVPages(k_PSKH=jnp.asarray(held.reshape(P, S, 1, -1)))
    if dtype == np.int8:
        most = np.maximum(np.abs(held).max(1), 1e-9) / 127
        codes = np.round(held / most[:, None]).astype(np.int8)
        scales = most.reshape(P, 1, S).astype(np.float32)
        pages = KVPages(
            k_PSKH=jnp.asarray(codes.reshape(P, S, 1, -1)), k_scale_PKS=jnp.asarray(scales)
        )
    given = QueryRows(
        jnp.asarray(positions + [-1] * padding),
        jnp.asarray(starts),
        jnp.asarray(tables[list(order)]),
        jnp.asarray(slots + spare),
    )
    fresh = jnp.asarray(np.concatenate([*new, np.zeros((padding, A + DIM), np.float32)]))[:, None]
    picks = IndexQueries(rows("own"), rows("weight"), COUNT)
    out, pages, picked = jax.jit(sparse_attention, static_argnames="params")(
        rows("q"), fresh, pages, given, picks, None, params=AttentionParams(0.3, value_dim=V)
    )
    again, *_ = jax.jit(sparse_attention, static_argnames="params")(
        rows("q"),
        None,
        pages,
        given,
        IndexQueries(count=COUNT),
        picked,
        params=AttentionParams(0.3, value_dim=V),
    )
    assert np.array_equal(out[: starts[-1]], again[: starts[-1]]), (
        "a layer that reads what another has picked"
    )
    return np.split(np.asarray(out)[: starts[-1]], starts[1:-1])


def naive(keys, asked):
    keys, length = keys.astype(np.float64), len(keys)
    out = []
    for row in range(len(asked["q"])):
        seen = keys[: length - len(asked["q"]) + row + 1]
        score = asked["weight"][row] @ np.maximum(
            asked["own"][row].astype(np.float64) @ seen[:, A:].T, 0
        )
        best = seen[np.sort(np.argsort(-score)[:COUNT])]
        weight = np.exp(0.3 * asked["q"][row].astype(np.float64) @ best[:, :A].T)
        out.append(weight / weight.sum(1, keepdims=True) @ best[:, :V])
    return np.stack(out)


EDGES = [(COUNT, 1), (COUNT + 1, 1), (COUNT + 3, 8), (72, 1), (72, 30), (5, 5), (1, 1), (64, 17)]


@pytest.mark.parametrize("seed", range(cases(6)))
@pytest.mark.slow
def test_against_float64(seed):
    """Rows on both sides of where picking begins, prompts in chunks beside single rows."""
    rng = np.random.default_rng(seed)
    chosen = [EDGES[index] for index in rng.permutation(len(EDGES))[:5]]
    tables, keys, asked = step(rng, *zip(*chosen, strict=True))
    for got, own, of in zip(run(tables, keys, asked, range(5)), keys, asked, strict=True):
        np.testing.assert_allclose(got, naive(own, of), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.int8])
@pytest.mark.slow
def test_the_same_bits_alone_and_in_company(dtype):
    tables, keys, asked = step(np.random.default_rng(7), *zip(*EDGES[:6], strict=True))
    together = run(tables, keys, asked, range(6), dtype)
    for order in ([3], [4, 0], [5, 2, 1, 3]):
        for index, got in zip(
            order, run(tables, keys, asked, order, dtype, padding=len(order)), strict=True
        ):
            assert np.array_equal(got, together[index])


def test_pages_of_eight_bits_are_nearly_the_same():
    tables, keys, asked = step(np.random.default_rng(8), [60, 70], [1, 3])
    exact, rounded = (run(tables, keys, asked, [0, 1], dtype) for dtype in (np.float32, np.int8))
    assert 0 < max(np.abs(a - b).max() for a, b in zip(exact, rounded, strict=True)) < 0.5
