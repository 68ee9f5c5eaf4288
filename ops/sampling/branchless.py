"""Sampling for GPUs by XLA, without branches and sorts.

On GPUs a branch or a sort waits for the host or breaks the CUDA graph. So all work is done for all
rows. The thresholds of top-k and top-p are found by a radix search over the bits of ordered float32
keys. It compares sums of integers, whose order does not matter: the kept tokens are those of `xla`,
and the result is batch-invariant.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...sharding.device_axes import UNSPLIT, Axis
from . import MAX_LOGPROBS, Sampled, SamplingInputs, SlotState
from .xla import (
    argmax,
    draw,
    mask,
    mask_scores,
    ordered,
    penalise,
    replace_invalid,
    score,
    top,
    unordered,
)

BITS = 3  # bits of the threshold that one pass over the vocabulary determines
WIDTH = 128  # partial sums over the vocabulary
FEW = 64  # largest number of top log-probabilities that needs no sort


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def sample(
    logits_RV: Array,
    state: SlotState,
    inputs: SamplingInputs,
    temperature_only: bool = False,
    axis: Axis = UNSPLIT,
    listed: int = MAX_LOGPROBS,
) -> Sampled:
    """See `quire.ops.sampling.sample`."""
    if not on_gpu():
        raise NotImplementedError(
            "it is for GPUs: elsewhere it is faster to skip what no row asks for"
        )
    raw_RV = logits_RV.astype(jnp.float32)
    is_scored_R = inputs.targets_R >= 0
    is_random_R = ~is_scored_R & (inputs.temperature_R > 0)
    # (these do not change rows without masks and penalties)
    logits_RV = (
        raw_RV
        if temperature_only
        else penalise(mask(raw_RV, state, inputs, axis), state, inputs, axis)
    )
    greedy_R, best_R = argmax(logits_RV, axis)
    random_R = draw(
        logits_RV, best_R, is_random_R, inputs, None if temperature_only else raise_floor, axis
    )
    tokens_R = replace_invalid(
        jnp.where(is_random_R, random_R, greedy_R), best_R, raw_RV, inputs, axis
    )
    ok_R = tokens_R >= 0
    scores = [None] * 5  # arrays of zeros would cost a kernel launch each
    if not temperature_only:
        logprob_ids_RL = state.logprob_token_ids_BL[inputs.slots_R]
        scores = score(
            raw_RV, tokens_R, logprob_ids_RL, partial(top, count=listed, top_k=best_few), axis
        )
        scores = mask_scores(ok_R & inputs.wants_logprobs_R, scores)
    return Sampled(tokens_R, *scores, ok_R=ok_R)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""


@jax.named_scope("cut")
def raise_floor(
    logits_RV: Array, floor_R: Array, top_k_R: Array, top_p_R: Array, weigh: Callable, axis: Axis
) -> Array:
    """See `xla.raise_floor`."""
    keys_RWn = split_groups(ordered(logits_RV), 0)
    required = [jnp.maximum(top_k_R, 0).astype(jnp.uint32)]
    top_k_floor_R = unordered(highest_key(keys_RWn, [jnp.ones_like(keys_RWn)], required, axis))
    floor_R = jnp.maximum(floor_R, jnp.where(top_k_R > 0, top_k_floor_R, -jnp.inf))
    bits = 32 - (logits_RV.shape[1] * axis.size).bit_length()  # their sum stays below 2**32
    weights_fixed = to_fixed_point(split_groups(weigh(logits_RV, floor_R), 0), bits)
    (low_R, high_R), *_ = sum_rows([weights_fixed], axis)
    total_R = high_R.astype(jnp.float32) * 2.0**-bits + low_R.astype(jnp.float32) * 2.0 ** (
        -bits - 32
    )
    low_R, high_R = to_fixed_point(top_p_R * total_R, bits)
    # at least 1, since any threshold would reach 0
    required = [jnp.maximum(low_R, (high_R == 0).astype(jnp.uint32)), high_R]
    top_p_floor_R = unordered(highest_key(keys_RWn, weights_fixed, required, axis))
    return jnp.maximum(floor_R, jnp.where(top_p_R < 1, top_p_floor_R, -jnp.inf))


def split_groups(values_RV: Array, padding: float) -> Array:
    """Pad and reshape the vocabulary to [R, WIDTH, n]."""
    R, V = values_RV.shape
    n = -(-V // WIDTH)
    padded_RV = jnp.pad(values_RV, ((0, 0), (0, n * WIDTH - V)), constant_values=padding)
    return padded_RV.reshape(R, WIDTH, n)


def to_fixed_point(shares: Array, bits: int) -> list[Array]:
    """Convert to fixed point with `bits` + 32 fractional bits: [lower 32 bits, higher bits]."""
    shares = shares * 2.0**bits
    high = jnp.floor(shares)
    return [((shares - high) * 2.0**32).astype(jnp.uint32), high.astype(jnp.uint32)]


def highest_key(keys_RWn: Array, weights: list[Array], required: list[Array], axis: Axis) -> Array:
    """The highest key of each row such that the weights of the tokens at or above it reach a sum.

    Args:
        keys_RWn: the tokens' keys, see `xla.ordered`.
        weights: the tokens' weights as integers: one array, or the lower 32 bits and the higher.
        required: the required sum of each row, in the same form.
        axis: the devices that the vocabulary is split over.
    """
    key_R = jnp.zeros(keys_RWn.shape[0], jnp.uint32)
    last = 32
    while last:
        first = last
        last = max(0, last - BITS)
        candidates = [key_R | jnp.uint32(digit << last) for digit in range(1, 1 << (first - last))]
        is_above = [keys_RWn >= trial_R[:, None, None] for trial_R in candidates]
        sums = sum_rows(
            [[jnp.where(above_RWn, part_RWn, 0) for part_RWn in weights] for above_RWn in is_above],
            axis,
        )
        # The sums fall with the candidates, so the number that suffices is the digit.
        key_R |= sum(at_least(total, required).astype(jnp.uint32) for total in sums) << last
    return jnp.maximum(key_R, ordered(jnp.float32(-jnp.inf)))  # lower keys are NaN


def at_least(sums: list[Array], required: list[Array]) -> Array:
    is_enough = jnp.bool_(True)
    for word, required_word in zip(sums, required, strict=True):
        is_enough = (word > required_word) | ((word == required_word) & is_enough)
    return is_enough


def sum_rows(terms: list[list[Array]], axis: Axis) -> list[list[Array]]:
    """Sum several integers over the rows at once, in two kernels. Each is one array, or the lower
    and the higher 32 bits.
    """
    leaves, tree = jax.tree.flatten(terms)
    zeros = [np.uint32(0)] * len(leaves)

    def add(left: list[Array], right: list[Array]) -> list[Array]:
        sums = []
        for left_term, right_term in zip(tree.unflatten(left), tree.unflatten(right), strict=True):
            total = [a + b for a, b in zip(left_term, right_term, strict=True)]
            if len(total) > 1:
                # the carry of the lower words
                total[1] += (total[0] < left_term[0]).astype(jnp.uint32)
            sums += total
        return sums

    leaves = lax.reduce(lax.reduce(leaves, zeros, add, (2,)), zeros, add, (1,))
    if axis.size > 1:
        leaves = lax.reduce([axis.gather(leaf_R) for leaf_R in leaves], zeros, add, (0,))
    return tree.unflatten(leaves)


def best_few(values_RN: Array, K: int) -> tuple[Array, Array]:
    """`lax.top_k` without a sort for small K: (values, indices), the first of equal values.

    The K best tokens are in the K groups with the best maxima: each of these groups has a token at
    least as good as any token of another group.
    """
    R, N = values_RN.shape
    if K > FEW:
        return lax.top_k(values_RN, K)
    index_RN = jnp.broadcast_to(jnp.arange(N), (R, N))
    if N <= K * WIDTH:
        return top_by_rank(values_RN, index_RN, K)
    values_RWn = split_groups(values_RN, -jnp.inf)
    n = values_RWn.shape[2]
    index_Wn = jnp.arange(n * WIDTH).reshape(1, WIDTH, n)
    best_Rn = values_RWn.max(axis=1)
    first_Rn = jnp.where(values_RWn == best_Rn[:, None], index_Wn, n * WIDTH).min(axis=1)
    group_RK = top_by_rank(best_Rn, first_Rn, K)[1] % n
    members_RWK = jnp.take_along_axis(values_RWn, group_RK[:, None], axis=2)
    index_RWK = group_RK[:, None] + n * jnp.arange(WIDTH)[None, :, None]
    return top_by_rank(members_RWK.reshape(R, -1), index_RWK.reshape(R, -1), K)


def top_by_rank(values_RN: Array, index_RN: Array, K: int) -> tuple[Array, Array]:
    """The best K (values, indices), found by counting the better values of each."""
    key = (values_RN[:, :, None], index_RN[:, :, None])
    other_keys = (values_RN[:, None, :], index_RN[:, None, :])
    better_RNN = (other_keys[0] > key[0]) | ((other_keys[0] == key[0]) & (other_keys[1] < key[1]))
    chosen_RKN = better_RNN.sum(axis=2)[:, None] == jnp.arange(K)[None, :, None]
    values_RK, index_RK = (
        jnp.where(chosen_RKN, x_RN[:, None], 0).sum(axis=2) for x_RN in (values_RN, index_RN)
    )
    return values_RK, index_RK
