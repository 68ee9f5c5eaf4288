"""Arithmetic of sampling: fixed-order sums, top-k/top-p thresholds, inverse CDF, generator."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.sampling import xla


def test_top_k_and_top_p_thresholds_match_a_sort():
    rng = np.random.default_rng(3)
    R = 6
    V = 5000
    logits_RV = rng.normal(0, 2, (R, V)).astype(np.float32)
    logits_RV[1] = np.round(logits_RV[1], 1)
    logits_RV[2, 100:] = -np.inf
    top_RC = jax.lax.top_k(logits_RV, 64)[0]
    sorted_RV = np.sort(logits_RV, axis=1)[:, ::-1]
    top_k_floor = jax.jit(xla.top_k_floor)
    for k in (1, 64, 65, 99, 3000, V - 1):
        floor_R = top_k_floor(logits_RV, top_RC, jnp.full(R, k))
        np.testing.assert_array_equal(floor_R, sorted_RV[:, k - 1])
    weights_RV = np.exp(logits_RV - sorted_RV[:, :1])
    top_p_floor = jax.jit(
        partial(xla.top_p_floor, weigh=lambda logits_RN: jnp.exp(logits_RN - sorted_RV[:, :1]))
    )
    for p in (0.01, 0.2, 0.5, 0.9, 0.99):
        floor_R = np.asarray(top_p_floor(logits_RV, top_RC, jnp.full(R, p, jnp.float32)))
        for logits_V, weights_V, floor in zip(
            logits_RV, weights_RV.astype(np.float64), floor_R, strict=True
        ):
            required_mass = p * weights_V.sum()
            assert weights_V[logits_V >= floor].sum() >= required_mass * (1 - 1e-6)
            assert weights_V[logits_V > floor].sum() < required_mass * (1 + 1e-6)
            assert floor in logits_V


def test_bisection_of_one_row_does_not_change_other_rows():
    """Top-p lies exactly at a cumulative sum, where the order of summation decides."""
    logits_RV = np.random.default_rng(8).normal(0, 4, (500, 300)).astype(np.float32)
    logits_RV[0] = 0  # flat: must be bisected
    top_RC = jax.lax.top_k(logits_RV, 64)[0]
    cumulative_RC = xla.running_sums(jnp.exp(top_RC))
    p_R = cumulative_RC[:, 9] / xla.total(jnp.exp(logits_RV))
    top_p_floor = jax.jit(partial(xla.top_p_floor, weigh=jnp.exp))
    together_R = top_p_floor(logits_RV, top_RC, p_R.at[0].set(0.9))
    alone_R = top_p_floor(logits_RV, top_RC, p_R.at[0].set(1.0))
    np.testing.assert_array_equal(together_R[1:], alone_R[1:])


def test_bisection_orders_zeros_infinities_and_subnormals():
    rng = np.random.default_rng(4)
    special_values = np.array(
        [-np.inf, -3.4e38, -1.0, -1e-45, 0.0, 1e-45, 1e-30, 1.0, 3.4e38, np.inf], np.float32
    )
    logits_RV = np.stack(
        [
            rng.permutation(
                np.concatenate(
                    [special_values, -special_values, rng.normal(size=7).astype(np.float32)]
                )
            )
        ]
        * 27
    )
    k_R = np.arange(1, 28)
    floor_R = jax.jit(xla.bisect, static_argnums=1)(logits_RV, 1, k_R)
    np.testing.assert_array_equal(floor_R, np.sort(logits_RV[0])[::-1])


def tree_order(leaves):
    """The order in which `descend` visits the leaves."""
    if leaves == 1:
        return [0]
    n = -(-leaves // xla.FAN_OUT)
    return [
        i * n + node for node in tree_order(n) for i in range(xla.FAN_OUT) if i * n + node < leaves
    ]


@pytest.mark.parametrize("V", [1, 2, 63, 64, 65, 4097, 9000])
@pytest.mark.slow
def test_descend_inverts_the_cumulative_distribution(V):
    """Integer weights make every sum exact."""
    rng = np.random.default_rng(V)
    weights_RV = (rng.integers(1, 5, (16, V)) * (rng.random((16, V)) < 0.3)).astype(np.float32)
    weights_RV[:, rng.integers(V)] += 1
    weights_RV = jnp.asarray(weights_RV)
    total_R, levels = xla.fold(weights_RV, jnp.add, 0)
    order = np.array(tree_order(V))
    cumulative_RV = np.asarray(weights_RV)[:, order].cumsum(1)
    np.testing.assert_array_equal(total_R, cumulative_RV[:, -1])
    inverse = jax.jit(
        lambda levels, target_R: xla.descend(
            levels,
            lambda ids: jnp.take_along_axis(weights_RV, ids, 1, mode="fill", fill_value=0),
            target_R,
        )
    )
    # rounding may give 1, which selects the last leaf of nonzero weight
    for share in [*rng.random(10), 0.0, 1.0]:
        target_R = np.minimum(
            np.floor(share * np.asarray(total_R)), np.asarray(total_R) - (share < 1)
        )
        leaf_R = inverse(levels, target_R)
        last_R = [np.flatnonzero(weights_V[order])[-1] for weights_V in np.asarray(weights_RV)]
        expected_R = [
            order[min(np.searchsorted(cumulative_V, target, side="right"), last)]
            for cumulative_V, target, last in zip(cumulative_RV, target_R, last_R, strict=True)
        ]
        np.testing.assert_array_equal(leaf_R, expected_R)


def test_tokens_of_zero_probability_are_never_sampled():
    """With the largest and smallest uniform numbers and weights of very different sizes."""
    rng = np.random.default_rng(5)
    logits_RV = np.where(
        rng.random((64, 3000)) < 0.9, -np.inf, rng.normal(0, 8, (64, 3000))
    ).astype(np.float32)

    @jax.jit
    def draw(logits_RV, u):
        def weigh(ids):
            return jnp.exp(jnp.take_along_axis(logits_RV, ids, 1, mode="fill", fill_value=-jnp.inf))

        total_R, levels = xla.fold(jnp.exp(logits_RV), jnp.add, 0)
        return xla.descend(levels, weigh, total_R * u)

    for u in (0.0, 1 - 2.0**-24, 1.0, 1.0001):
        leaf_R = np.asarray(draw(logits_RV, u))
        assert np.isfinite(np.take_along_axis(logits_RV, leaf_R[:, None], 1)).all()


def test_total_is_accurate():
    values_RV = np.random.default_rng(6).random((3, 100_000)).astype(np.float32)
    np.testing.assert_allclose(
        xla.total(jnp.asarray(values_RV)), values_RV.astype(np.float64).sum(1), rtol=1e-6
    )


def threefry2x32(key, counter):
    """Threefry-2x32 with 20 rounds, from the paper."""
    mask = 2**32 - 1
    ks = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x0 = (counter[0] + ks[0]) & mask
    x1 = (counter[1] + ks[1]) & mask
    for i in range(20):
        rotation = [13, 15, 26, 6, 17, 29, 16, 24][i % 8]
        x0 = (x0 + x1) & mask
        x1 = ((x1 << rotation | x1 >> (32 - rotation)) & mask) ^ x0
        if i % 4 == 3:
            x0 = (x0 + ks[(i // 4 + 1) % 3]) & mask
            x1 = (x1 + ks[(i // 4 + 2) % 3] + i // 4 + 1) & mask
    return x0, x1


def test_uniform_numbers_match_threefry():
    assert threefry2x32((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)  # Random123's own test vector
    rng = np.random.default_rng(7)
    seeds_R2 = rng.integers(0, 2**32, (20, 2), np.uint32)
    positions_R = np.arange(20, dtype=np.int32) * 1000
    expected_R = [
        (threefry2x32(seed, (0, position))[0] >> 8) / 2**24
        for seed, position in zip(seeds_R2.tolist(), positions_R.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(
        xla.uniform(jnp.asarray(seeds_R2), jnp.asarray(positions_R)), expected_R
    )
