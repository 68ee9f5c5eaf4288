"""Sampling for GPUs, in plain XLA: one straight line of kernels, whatever the rows ask for.

A branch or a sort waits there for the host or breaks the CUDA graph, so nothing is skipped and
nothing is sorted. The thresholds of top-k and top-p are settled digit by digit in the ordered bit
patterns of float32, by sums of whole numbers, which have no order: so the kept tokens are those of
`xla`, and a row's bits depend on that row alone.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...sharding.device_axes import UNSPLIT, Axis
from . import MAX_LOGPROBS, Sampled, SamplingInputs, SlotState
from .xla import argmax, checked, draw, mask, ordered, penalise, score, top, unordered, where_wanted

BITS = 3  # of a threshold that one pass over the vocabulary settles
WIDTH = 128  # parts of the vocabulary that are added up side by side
FEW = 64  # log-probabilities to list without a sort; more have to be asked for at the start


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def sample(
    logits_RV: Array,
    state: SlotState,
    inputs: SamplingInputs,
    plain: bool = False,
    axis: Axis = UNSPLIT,
    listed: int = MAX_LOGPROBS,
) -> Sampled:
    """See `quire.ops.sampling.sample`."""
    if not on_gpu():
        raise NotImplementedError(
            "it is for GPUs: elsewhere it is faster to skip what no row asks for"
        )
    raw_RV = logits_RV.astype(jnp.float32)
    scored_R = inputs.targets_R >= 0
    draws_R = ~scored_R & (inputs.temperature_R > 0)
    # A row without masks and penalties does not change.
    logits_RV = (
        raw_RV if plain else penalise(mask(raw_RV, state, inputs, axis), state, inputs, axis)
    )
    greedy_R, best_R = argmax(logits_RV, axis)
    drawn_R = draw(logits_RV, best_R, draws_R, inputs, None if plain else cut, axis)
    tokens_R = checked(jnp.where(draws_R, drawn_R, greedy_R), best_R, raw_RV, inputs, axis)
    ok_R = tokens_R >= 0
    scores = [None] * 5  # a launch would write the zeros of each
    if not plain:
        wanted_RL = state.wanted_BL[inputs.slots_R]
        scores = score(raw_RV, tokens_R, wanted_RL, partial(top, count=listed, best=best_few), axis)
        scores = where_wanted(ok_R & inputs.wants_logprobs_R, scores)
    return Sampled(tokens_R, *scores, ok_R=ok_R)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""


@jax.named_scope("cut")
def cut(
    logits_RV: Array, floor_R: Array, top_k_R: Array, top_p_R: Array, weigh: Callable, axis: Axis
) -> Array:
    """See `xla.cut`."""
    keys_RWn = grouped(ordered(logits_RV), 0)
    need = [jnp.maximum(top_k_R, 0).astype(jnp.uint32)]
    top_k_floor_R = unordered(highest(keys_RWn, [jnp.ones_like(keys_RWn)], need, axis))
    floor_R = jnp.maximum(floor_R, jnp.where(top_k_R > 0, top_k_floor_R, -jnp.inf))
    bits = 32 - (logits_RV.shape[1] * axis.size).bit_length()  # so many tokens stay below 2**32
    shares = whole_numbers(grouped(weigh(logits_RV, floor_R), 0), bits)
    (low_R, high_R), *_ = add_up([shares], axis)
    total_R = high_R.astype(jnp.float32) * 2.0**-bits + low_R.astype(jnp.float32) * 2.0 ** (
        -bits - 32
    )
    low_R, high_R = whole_numbers(top_p_R * total_R, bits)
    # not 0, of which there is enough anywhere
    need = [jnp.maximum(low_R, (high_R == 0).astype(jnp.uint32)), high_R]
    top_p_floor_R = unordered(highest(keys_RWn, shares, need, axis))
    return jnp.maximum(floor_R, jnp.where(top_p_R < 1, top_p_floor_R, -jnp.inf))


def grouped(values_RV: Array, padding: float) -> Array:
    """The tokens in `WIDTH` parts of n neighbours."""
    R, V = values_RV.shape
    n = -(-V // WIDTH)
    padded_RV = jnp.pad(values_RV, ((0, 0), (0, n * WIDTH - V)), constant_values=padding)
    return padded_RV.reshape(R, WIDTH, n)


def whole_numbers(shares: Array, bits: int) -> list[Array]:
    """Binary fractions of `bits` + 32 places; the lower 32 come first."""
    shares = shares * 2.0**bits
    high = jnp.floor(shares)
    return [((shares - high) * 2.0**32).astype(jnp.uint32), high.astype(jnp.uint32)]


def highest(keys_RWn: Array, parts: list[Array], need: list[Array], axis: Axis) -> Array:
    """The highest key of each row such that the tokens at or above it add up to the need.

    A token's `parts` are a number of 32 bits, or the lower 32 bits of one and the higher; so are
    those of the need.
    """
    key_R = jnp.zeros(keys_RWn.shape[0], jnp.uint32)
    last = 32
    while last:
        first = last
        last = max(0, last - BITS)
        trials = [key_R | jnp.uint32(digit << last) for digit in range(1, 1 << (first - last))]
        above = [keys_RWn >= trial_R[:, None, None] for trial_R in trials]
        sums = add_up(
            [[jnp.where(above_RWn, part_RWn, 0) for part_RWn in parts] for above_RWn in above], axis
        )
        # Where there is enough above a key, there is above each lower one.
        key_R |= sum(at_least(total, need).astype(jnp.uint32) for total in sums) << last
    return jnp.maximum(key_R, ordered(jnp.float32(-jnp.inf)))  # lower ones are of NaN


def at_least(numbers: list[Array], others: list[Array]) -> Array:
    found = jnp.bool_(True)
    for mine, theirs in zip(numbers, others, strict=True):
        found = (mine > theirs) | ((mine == theirs) & found)
    return found


def add_up(terms: list[list[Array]], axis: Axis) -> list[list[Array]]:
    """The sum of each row, of several terms at once: one kernel reads the tokens, and one adds its
    sums.
    """
    leaves, tree = jax.tree.flatten(terms)
    zeros = [np.uint32(0)] * len(leaves)

    def add(ours: list[Array], theirs: list[Array]) -> list[Array]:
        sums = []
        for mine, other in zip(tree.unflatten(ours), tree.unflatten(theirs), strict=True):
            total = [a + b for a, b in zip(mine, other, strict=True)]
            if len(total) > 1:
                # what did not fit into the lower part
                total[1] += (total[0] < mine[0]).astype(jnp.uint32)
            sums += total
        return sums

    leaves = lax.reduce(lax.reduce(leaves, zeros, add, (2,)), zeros, add, (1,))
    if axis.size > 1:
        leaves = lax.reduce([axis.gather(leaf_R) for leaf_R in leaves], zeros, add, (0,))
    return tree.unflatten(leaves)


def best_few(values_RN: Array, K: int) -> tuple[Array, Array]:
    """As `lax.top_k`: the best K of each row and where they are; of equals the first.

    The best K tokens lie in the K groups whose best tokens are the best, since each such group has
    one at least as good as any token of another group.
    """
    R, N = values_RN.shape
    if K > FEW:
        return lax.top_k(values_RN, K)
    at_RN = jnp.broadcast_to(jnp.arange(N), (R, N))
    if N <= K * WIDTH:
        return by_rank(values_RN, at_RN, K)
    values_RWn = grouped(values_RN, -jnp.inf)
    n = values_RWn.shape[2]
    at_Wn = jnp.arange(n * WIDTH).reshape(1, WIDTH, n)
    best_Rn = values_RWn.max(axis=1)
    first_Rn = jnp.where(values_RWn == best_Rn[:, None], at_Wn, n * WIDTH).min(axis=1)
    group_RK = by_rank(best_Rn, first_Rn, K)[1] % n
    members_RWK = jnp.take_along_axis(values_RWn, group_RK[:, None], axis=2)
    at_RWK = group_RK[:, None] + n * jnp.arange(WIDTH)[None, :, None]
    return by_rank(members_RWK.reshape(R, -1), at_RWK.reshape(R, -1), K)


def by_rank(values_RN: Array, at_RN: Array, K: int) -> tuple[Array, Array]:
    """The best K values and their places, each found by the number of those that are better."""
    mine = (values_RN[:, :, None], at_RN[:, :, None])
    others = (values_RN[:, None, :], at_RN[:, None, :])
    better_RNN = (others[0] > mine[0]) | ((others[0] == mine[0]) & (others[1] < mine[1]))
    chosen_RKN = better_RNN.sum(axis=2)[:, None] == jnp.arange(K)[None, :, None]
    return tuple(jnp.where(chosen_RKN, x_RN[:, None], 0).sum(axis=2) for x_RN in (values_RN, at_RN))  # type: ignore[return-value]
