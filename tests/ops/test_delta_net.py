"""The gated delta rule and the short convolution against float64 loops; chunk invariance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops import delta_net, native
from quire.ops.short_conv import short_conv
from quire.ops.state_rows import StateRows
from quire.tests.support.cases import cases

SLOTS = 6
# test_delta_net_mosaic.py tests the Mosaic GPU kernel
FOR_EACH_IMPLEMENTATION = pytest.mark.parametrize("name", ["native", "xla"])
# Key heads, value heads, key size, value size: columns in whole blocks, single vectors and a tail.
SHAPES = [(2, 4, 16, 32), (1, 3, 8, 48), (2, 2, 5, 7), (4, 8, 128, 128)]


def implementation(name: str) -> str:
    if name == "native" and not native.serves():
        pytest.skip("no compiler")
    return name


def naive_delta(q, k, v, decay, beta, memory, corrects=True):
    """Gated delta rule of one sequence, token by token, in float64."""
    q, k, v, decay, beta, memory = (x.astype(np.float64) for x in (q, k, v, decay, beta, memory))
    heads_per_key = v.shape[1] // q.shape[1]
    out = np.zeros(v.shape)
    for t in range(len(v)):
        for n in range(v.shape[1]):
            key = k[t, n // heads_per_key]
            query = q[t, n // heads_per_key]
            memory[n] *= decay[t, n][..., None]
            memory[n] += np.outer(key, beta[t, n] * (v[t, n] - corrects * (key @ memory[n])))
            out[t, n] = query @ memory[n]
    return out, memory


def naive_conv(x, weight, tail):
    """(outputs, padded inputs) of one sequence; `tail` is [W - 1, C]."""
    padded = np.concatenate([tail, x]).astype(np.float64)
    W = weight.shape[-1]
    return np.stack(
        [sum(padded[t + w] * weight[:, w] for w in range(W)) for t in range(len(x))]
    ), padded


def random_inputs(rng, shape, T, by_key=False):
    K, N, H, V = shape
    q, k = (rng.standard_normal((T, K, H)).astype(np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((T, N, V)).astype(np.float32)
    decay = rng.uniform(0.5, 1, (T, N, H) if by_key else (T, N)).astype(np.float32)
    beta = rng.uniform(0, 1, (T, N)).astype(np.float32)
    return q, k, v, decay, beta


def make_state_rows(counts, slots, is_first_step, num_kept, T) -> StateRows:
    """StateRows of sequences with `counts` rows each, followed by padding sequences."""
    num_padding = SLOTS - len(counts)
    starts = np.concatenate([[0], np.cumsum(counts), [sum(counts)] * num_padding]).astype(np.int32)
    assert starts[-1] <= T
    return StateRows(
        jnp.array(starts),
        jnp.array([*slots, *[SLOTS] * num_padding], jnp.int32),
        jnp.array([*is_first_step, *[False] * num_padding]),
        jnp.array([*num_kept, *[0] * num_padding], jnp.int32),
    )


@pytest.mark.random
@FOR_EACH_IMPLEMENTATION
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
def test_delta_rule_matches_float64(name, shape, corrects, by_key):
    rng = np.random.default_rng(5)
    name = implementation(name)
    run = jax.jit(delta_net.delta_rule, static_argnames=("implementation", "corrects"))
    K, N, H, V = shape
    for _ in range(cases(20, least=2)):
        counts = rng.integers(1, 9, rng.integers(1, SLOTS + 1))
        slots = rng.permutation(SLOTS)[: len(counts)]
        T = 48
        is_first_step = rng.random(len(counts)) < 0.5
        num_kept = [int(rng.integers(0, count + 1)) for count in counts]
        arrays = random_inputs(rng, shape, T, by_key)
        old_memory = rng.standard_normal((SLOTS, N, H, V)).astype(np.float32)
        old_memory[slots[is_first_step]] = np.nan  # the slot's old state must not be read
        out, memory = run(
            *arrays,
            old_memory,
            make_state_rows(counts, slots, is_first_step, num_kept, T),
            corrects,
            implementation=name,
        )
        starts = np.concatenate([[0], np.cumsum(counts)])
        for b, slot in enumerate(slots):
            rows = slice(starts[b], starts[b + 1])
            initial = np.zeros((N, H, V)) if is_first_step[b] else old_memory[slot]
            expected, _ = naive_delta(*(x[rows] for x in arrays), initial, corrects)
            np.testing.assert_allclose(out[rows], expected, rtol=0, atol=2e-5)
            rows = slice(starts[b], starts[b] + num_kept[b])
            _, expected = naive_delta(*(x[rows] for x in arrays), initial, corrects)
            np.testing.assert_allclose(memory[slot], expected, rtol=0, atol=2e-5)
        other_slots = np.setdiff1d(np.arange(SLOTS), slots)
        np.testing.assert_array_equal(memory[other_slots], old_memory[other_slots])
        np.testing.assert_array_equal(out[starts[-1] :], 0)


@pytest.mark.random
def test_convolution_matches_float64():
    rng = np.random.default_rng(6)
    run = jax.jit(short_conv)
    for _ in range(cases(40, least=4)):
        C, W = rng.choice([(5, 2), (12, 4), (1, 3)])
        counts = rng.integers(1, 9, rng.integers(1, SLOTS + 1))
        slots = rng.permutation(SLOTS)[: len(counts)]
        T = 48
        is_first_step = rng.random(len(counts)) < 0.5
        num_kept = [int(rng.integers(0, count + 1)) for count in counts]
        x = rng.standard_normal((T, C)).astype(np.float32)
        weight = rng.standard_normal((C, W))
        old_tails = rng.standard_normal((SLOTS, W - 1, C)).astype(np.float32)
        old_tails[slots[is_first_step]] = np.nan
        out, tails = run(
            x,
            weight.astype(np.float32),
            old_tails,
            make_state_rows(counts, slots, is_first_step, num_kept, T),
        )
        starts = np.concatenate([[0], np.cumsum(counts)])
        for b, slot in enumerate(slots):
            initial = np.zeros((W - 1, C)) if is_first_step[b] else old_tails[slot]
            expected, padded = naive_conv(x[starts[b] : starts[b + 1]], weight, initial)
            np.testing.assert_allclose(out[starts[b] : starts[b + 1]], expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(
                tails[slot], padded[num_kept[b] : num_kept[b] + W - 1], rtol=0, atol=1e-6
            )
        other_slots = np.setdiff1d(np.arange(SLOTS), slots)
        np.testing.assert_array_equal(tails[other_slots], old_tails[other_slots])


@pytest.mark.random
@FOR_EACH_IMPLEMENTATION
@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.slow
def test_results_do_not_depend_on_chunks_or_batch(name, by_key):
    """One sequence alone in one step, and in chunks with other sequences and discarded rows."""
    rng = np.random.default_rng(7)
    name = implementation(name)
    rule = jax.jit(delta_net.delta_rule, static_argnames="implementation")
    conv = jax.jit(short_conv)
    length = 40
    for shape in SHAPES[:3]:
        K, N, H, V = shape
        inputs = random_inputs(rng, shape, length, by_key)
        weight = rng.standard_normal((N * V, 4)).astype(np.float32)
        alone = make_state_rows([length], [0], [True], [length], length)
        expected_out, _ = rule(
            *inputs, np.zeros((SLOTS, N, H, V), np.float32), alone, implementation=name
        )
        expected_conv, _ = conv(
            inputs[2].reshape(length, -1), weight, np.zeros((SLOTS, 3, N * V), np.float32), alone
        )
        for _ in range(cases(10, least=2)):
            position = 0
            slot = int(rng.integers(SLOTS))
            memory = rng.standard_normal((SLOTS, N, H, V)).astype(np.float32)
            tails = rng.standard_normal((SLOTS, 3, N * V)).astype(np.float32)
            while position < length:
                num_kept = int(min(rng.choice([1, 1, 2, 7, 16]), length - position))
                count = min(num_kept + int(rng.integers(0, 3)), length - position)
                num_before, num_after = (int(rng.integers(1, 6)) for _ in range(2))
                batch = random_inputs(
                    rng, shape, 30 if num_before + count + num_after < 30 else 64, by_key
                )
                for batch_array, array in zip(batch, inputs, strict=True):
                    batch_array[num_before : num_before + count] = array[
                        position : position + count
                    ]
                other_slots = [candidate for candidate in range(SLOTS) if candidate != slot]
                rows = make_state_rows(
                    [num_before, count, num_after],
                    [other_slots[0], slot, other_slots[1]],
                    [True, position == 0, False],
                    [num_before, num_kept, num_after],
                    len(batch[0]),
                )
                out, memory = rule(*batch, memory, rows, implementation=name)
                conv_out, tails = conv(batch[2].reshape(len(batch[2]), -1), weight, tails, rows)
                np.testing.assert_array_equal(
                    out[num_before : num_before + count], expected_out[position : position + count]
                )
                np.testing.assert_array_equal(
                    conv_out[num_before : num_before + count],
                    expected_conv[position : position + count],
                )
                position += num_kept
