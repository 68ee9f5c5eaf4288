"""The gated delta rule and the short convolution against loops in float64, and their bits however
rows are cut.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops import delta_net, native
from quire.ops.short_conv import short_conv
from quire.ops.state_rows import StateRows
from quire.tests.support.cases import cases

SLOTS = 6
# the other is in test_delta_net_mosaic
BY_NAME = pytest.mark.parametrize("name", ["native", "xla"])
# Key heads, value heads, key size, value size: columns in whole blocks, in single vectors, and left
# over.
SHAPES = [(2, 4, 16, 32), (1, 3, 8, 48), (2, 2, 5, 7), (4, 8, 128, 128)]


def implementation(name: str) -> str:
    if name == "native" and not native.serves():
        pytest.skip("no compiler")
    return name


def naive_delta(q, k, v, decay, beta, memory, corrects=True):
    """One sequence, token after token, in float64."""
    q, k, v, decay, beta, memory = (x.astype(np.float64) for x in (q, k, v, decay, beta, memory))
    shared = v.shape[1] // q.shape[1]
    out = np.zeros(v.shape)
    for t in range(len(v)):
        for n in range(v.shape[1]):
            key = k[t, n // shared]
            query = q[t, n // shared]
            memory[n] *= decay[t, n][..., None]
            memory[n] += np.outer(key, beta[t, n] * (v[t, n] - corrects * (key @ memory[n])))
            out[t, n] = query @ memory[n]
    return out, memory


def naive_conv(x, weight, tail):
    """One sequence; `tail` is [W - 1, C]."""
    both = np.concatenate([tail, x]).astype(np.float64)
    W = weight.shape[-1]
    return np.stack(
        [sum(both[t + w] * weight[:, w] for w in range(W)) for t in range(len(x))]
    ), both


def drawn(rng, shape, T, by_key=False):
    K, N, H, V = shape
    q, k = (rng.standard_normal((T, K, H)).astype(np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((T, N, V)).astype(np.float32)
    decay = rng.uniform(0.5, 1, (T, N, H) if by_key else (T, N)).astype(np.float32)
    beta = rng.uniform(0, 1, (T, N)).astype(np.float32)
    return q, k, v, decay, beta


def rows_of(counts, slots, begins, kept, T) -> StateRows:
    """Sequences of so many rows; padding sequences come after them."""
    spare = SLOTS - len(counts)
    starts = np.concatenate([[0], np.cumsum(counts), [sum(counts)] * spare]).astype(np.int32)
    assert starts[-1] <= T
    return StateRows(
        jnp.array(starts),
        jnp.array([*slots, *[SLOTS] * spare], jnp.int32),
        jnp.array([*begins, *[False] * spare]),
        jnp.array([*kept, *[0] * spare], jnp.int32),
    )


@pytest.mark.random
@BY_NAME
@pytest.mark.parametrize(
    ("shape", "corrects", "by_key"),
    [
        *((shape, True, False) for shape in SHAPES),
        (SHAPES[0], False, False),
        (SHAPES[1], True, True),
        (SHAPES[2], True, True),
    ],
    ids=str,
)
def test_against_float64(name, shape, corrects, by_key):
    rng = np.random.default_rng(5)
    name = implementation(name)
    run = jax.jit(delta_net.delta_rule, static_argnames=("implementation", "corrects"))
    K, N, H, V = shape
    for _ in range(cases(20, least=2)):
        counts = rng.integers(1, 9, rng.integers(1, SLOTS + 1))
        slots = rng.permutation(SLOTS)[: len(counts)]
        T = 48
        begins = rng.random(len(counts)) < 0.5
        kept = [int(rng.integers(0, count + 1)) for count in counts]
        arrays = drawn(rng, shape, T, by_key)
        held = rng.standard_normal((SLOTS, N, H, V)).astype(np.float32)
        held[slots[begins]] = np.nan  # what another left is not looked at
        out, memory = run(
            *arrays, held, rows_of(counts, slots, begins, kept, T), corrects, implementation=name
        )
        starts = np.concatenate([[0], np.cumsum(counts)])
        for b, slot in enumerate(slots):
            part = slice(starts[b], starts[b + 1])
            before = np.zeros((N, H, V)) if begins[b] else held[slot]
            expected, _ = naive_delta(*(x[part] for x in arrays), before, corrects)
            np.testing.assert_allclose(out[part], expected, rtol=0, atol=2e-5)
            part = slice(starts[b], starts[b] + kept[b])
            _, expected = naive_delta(*(x[part] for x in arrays), before, corrects)
            np.testing.assert_allclose(memory[slot], expected, rtol=0, atol=2e-5)
        others = np.setdiff1d(np.arange(SLOTS), slots)
        np.testing.assert_array_equal(memory[others], held[others])
        np.testing.assert_array_equal(out[starts[-1] :], 0)


@pytest.mark.random
def test_convolution_against_float64():
    rng = np.random.default_rng(6)
    run = jax.jit(short_conv)
    for _ in range(cases(40, least=4)):
        C, W = rng.choice([(5, 2), (12, 4), (1, 3)])
        counts = rng.integers(1, 9, rng.integers(1, SLOTS + 1))
        slots = rng.permutation(SLOTS)[: len(counts)]
        T = 48
        begins = rng.random(len(counts)) < 0.5
        kept = [int(rng.integers(0, count + 1)) for count in counts]
        x = rng.standard_normal((T, C)).astype(np.float32)
        weight = rng.standard_normal((C, W))
        held = rng.standard_normal((SLOTS, W - 1, C)).astype(np.float32)
        held[slots[begins]] = np.nan
        out, tails = run(
            x, weight.astype(np.float32), held, rows_of(counts, slots, begins, kept, T)
        )
        starts = np.concatenate([[0], np.cumsum(counts)])
        for b, slot in enumerate(slots):
            before = np.zeros((W - 1, C)) if begins[b] else held[slot]
            expected, both = naive_conv(x[starts[b] : starts[b + 1]], weight, before)
            np.testing.assert_allclose(out[starts[b] : starts[b + 1]], expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(
                tails[slot], both[kept[b] : kept[b] + W - 1], rtol=0, atol=1e-6
            )
        others = np.setdiff1d(np.arange(SLOTS), slots)
        np.testing.assert_array_equal(tails[others], held[others])


@pytest.mark.random
@BY_NAME
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.slow
def test_bits_are_those_of_any_cut(name, by_key):
    """A sequence by itself at once; and in pieces, each with others beside it and rows that are
    computed in vain.
    """
    rng = np.random.default_rng(7)
    name = implementation(name)
    rule = jax.jit(delta_net.delta_rule, static_argnames="implementation")
    conv = jax.jit(short_conv)
    length = 40
    for shape in SHAPES[:3]:
        K, N, H, V = shape
        own = drawn(rng, shape, length, by_key)
        weight = rng.standard_normal((N * V, 4)).astype(np.float32)
        alone = rows_of([length], [0], [True], [length], length)
        whole, _ = rule(*own, np.zeros((SLOTS, N, H, V), np.float32), alone, implementation=name)
        blurred, _ = conv(
            own[2].reshape(length, -1), weight, np.zeros((SLOTS, 3, N * V), np.float32), alone
        )
        for _ in range(cases(10, least=2)):
            at = 0
            slot = int(rng.integers(SLOTS))
            memory = rng.standard_normal((SLOTS, N, H, V)).astype(np.float32)
            tails = rng.standard_normal((SLOTS, 3, N * V)).astype(np.float32)
            while at < length:
                kept = int(min(rng.choice([1, 1, 2, 7, 16]), length - at))
                count = min(kept + int(rng.integers(0, 3)), length - at)
                before, after = (int(rng.integers(1, 6)) for _ in range(2))
                pieces = drawn(rng, shape, 30 if before + count + after < 30 else 64, by_key)
                for piece, mine in zip(pieces, own, strict=True):
                    piece[before : before + count] = mine[at : at + count]
                others = [other for other in range(SLOTS) if other != slot]
                rows = rows_of(
                    [before, count, after], [others[0], slot, others[1]], [True, at == 0, False],
                    [before, kept, after], len(pieces[0]),
                )  # fmt: skip
                out, memory = rule(*pieces, memory, rows, implementation=name)
                smooth, tails = conv(pieces[2].reshape(len(pieces[2]), -1), weight, tails, rows)
                np.testing.assert_array_equal(out[before : before + count], whole[at : at + count])
                np.testing.assert_array_equal(
                    smooth[before : before + count], blurred[at : at + count]
                )
                at += kept
