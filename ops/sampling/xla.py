"""Sampling by XLA, for all devices.

The thresholds of top-k and top-p need no sort of the vocabulary. They are found among the best few
logits if these suffice (nearly always), and otherwise by bisecting the ordered bit patterns of
float32. The result is batch-invariant: floating-point sums have a fixed order (`fold`), and rows
whose best few logits suffice use them even if another row needs the bisection.

If the vocabulary is split over devices, no logits are gathered: the devices exchange a few numbers
per row and their best few logits.
"""

from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...sharding.device_axes import UNSPLIT, Axis
from . import (
    BANNED,
    BROKEN,
    MAX_LOGPROBS,
    Sampled,
    SamplingInputs,
    SlotState,
    has_penalties,
    local_token_ids,
)

CANDIDATES = 64  # lax.top_k takes 3 ms for 16 rows of 152k tokens, and a sort 530 ms
FAN_OUT = 64
SIGN = np.uint32(1 << 31)


def sample(
    logits_RV: Array,
    state: SlotState,
    inputs: SamplingInputs,
    temperature_only: bool = False,
    axis: Axis = UNSPLIT,
    listed: int = MAX_LOGPROBS,
) -> Sampled:
    """See `quire.ops.sampling.sample`. Work that no row needs is skipped."""
    raw_RV = logits_RV.astype(jnp.float32)
    is_scored_R = inputs.targets_R >= 0
    has_masks_R = inputs.biased_R | inputs.ban_stop_R | (inputs.ban_RX >= 0).any(axis=1)
    has_adjustments = (~is_scored_R & (has_masks_R | has_penalties(inputs))).any()
    is_random_R = ~is_scored_R & (inputs.temperature_R > 0)

    def choose():
        # (masks and penalties do not change rows without them)
        logits_RV = lax.cond(
            has_adjustments,
            lambda: penalise(mask(raw_RV, state, inputs, axis), state, inputs, axis),
            lambda: raw_RV,
        )
        greedy_R, best_R = argmax(logits_RV, axis)
        random_R = lax.cond(
            is_random_R.any(),
            lambda: draw(logits_RV, best_R, is_random_R, inputs, raise_floor, axis),
            lambda: greedy_R,
        )
        return jnp.where(is_random_R, random_R, greedy_R), best_R

    if temperature_only:
        greedy_R, best_R = argmax(raw_RV, axis)
        tokens_R = jnp.where(
            is_random_R, draw(raw_RV, best_R, is_random_R, inputs, None, axis), greedy_R
        )
    else:
        tokens_R, best_R = lax.cond(
            has_adjustments | is_random_R.any(), choose, lambda: argmax(raw_RV, axis)
        )
    tokens_R = replace_invalid(tokens_R, best_R, raw_RV, inputs, axis)
    ok_R = tokens_R >= 0

    returns_logprobs_R = ok_R & inputs.wants_logprobs_R
    compute_scores = partial(score, top_k=partial(top, count=listed), axis=axis)
    score_args = raw_RV, tokens_R, state.logprob_token_ids_BL[inputs.slots_R]
    zeros = [
        jnp.zeros(struct.shape, struct.dtype)
        for struct in jax.eval_shape(compute_scores, *score_args)
    ]
    scores = (
        zeros
        if temperature_only
        else lax.cond(
            returns_logprobs_R.any(), lambda: list(compute_scores(*score_args)), lambda: zeros
        )
    )
    return Sampled(tokens_R, *mask_scores(returns_logprobs_R, scores), ok_R=ok_R)


def replace_invalid(
    tokens_R: Array, best_R: Array, raw_RV: Array, inputs: SamplingInputs, axis: Axis
) -> Array:
    """Replace the tokens of rows that score a given token, and use BROKEN or BANNED for rows
    without a token.

    best_R: the largest logit after masks and penalties.
    """
    is_scored_R = inputs.targets_R >= 0
    failure_R = jnp.where(~is_scored_R & (best_R == -jnp.inf), BANNED, BROKEN)
    ok_R = is_scored_R | jnp.isfinite(best_R)
    tokens_R = jnp.where(ok_R, jnp.where(is_scored_R, inputs.targets_R, tokens_R), failure_R)
    return jnp.where(jnp.isfinite(row_max(raw_RV, axis)), tokens_R, BROKEN)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""


def mask_scores(returns_logprobs_R: Array, scores: Iterable[Array]) -> list[Array]:
    """The scores of the rows that return them, and zeros for the others."""
    return [jnp.where(jnp.expand_dims(returns_logprobs_R, range(1, x.ndim)), x, 0) for x in scores]


@jax.named_scope("mask")
def mask(logits_RV: Array, state: SlotState, inputs: SamplingInputs, axis: Axis = UNSPLIT) -> Array:
    """Add biases, and set banned tokens to -inf."""
    R, V = logits_RV.shape
    bias_RV = jnp.where(
        inputs.biased_R[:, None], state.bias_BJV[inputs.slots_R, inputs.bias_rows_R], 0
    )
    banned_RV = inputs.ban_stop_R[:, None] & state.stop_BV[inputs.slots_R]
    logits_RV = jnp.where(banned_RV, -jnp.inf, logits_RV + bias_RV)
    ban_RX = local_token_ids(inputs.ban_RX, V, axis)  # a negative index would count from the end
    return logits_RV.at[jnp.arange(R)[:, None], ban_RX].set(-jnp.inf, mode="drop")


@jax.named_scope("penalise")
def penalise(
    logits_RV: Array, state: SlotState, inputs: SamplingInputs, axis: Axis = UNSPLIT
) -> Array:
    """Apply the penalties for repetition (prompt and output), frequency and presence (output)."""
    counts_RV = state.output_counts_BV[inputs.slots_R]
    R, J = inputs.drafted_RJ.shape
    if J > 1:  # else there are no drafts
        drafted_RJ = local_token_ids(inputs.drafted_RJ, counts_RV.shape[1], axis)
        counts_RV = counts_RV.at[jnp.arange(R)[:, None], drafted_RJ].add(1, mode="drop")
    occurred_RV = state.prompt_BV[inputs.slots_R] | (counts_RV > 0)
    repetition_R1 = inputs.repetition_penalty_R[:, None]
    repeated_RV = jnp.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = jnp.where(occurred_RV, repeated_RV, logits_RV)
    frequency_R1 = inputs.frequency_penalty_R[:, None]
    presence_R1 = inputs.presence_penalty_R[:, None]
    return logits_RV - frequency_R1 * counts_RV - presence_R1 * (counts_RV > 0)


def argmax(logits_RV: Array, axis: Axis) -> tuple[Array, Array]:
    """Each row's best token and its logit. (`jnp.argmax` takes 25 times as long on CPUs.)"""
    V = logits_RV.shape[1]
    best_R = logits_RV.max(axis=1)
    token_R = row_extreme(
        jnp.where(logits_RV == best_R[:, None], jnp.arange(V)[None], V), lax.min, V
    )
    if axis.size == 1:
        return token_R, best_R
    best_AR = axis.gather(best_R)
    token_AR = axis.gather(token_R + axis.index() * V)
    best_R = best_AR.max(axis=0)
    return jnp.where(best_AR == best_R, token_AR, axis.size * V).min(axis=0), best_R


def row_max(values_RV: Array, axis: Axis) -> Array:
    """The maximum of each row; NaN if a value is NaN."""
    max_R = row_extreme(values_RV, lax.max, -jnp.inf)
    return max_R if axis.size == 1 else row_extreme(axis.gather(max_R).T, lax.max, -jnp.inf)


def row_extreme(values_RN: Array, combine: Callable, neutral: float) -> Array:
    """The maximum or minimum of each row; NaN if a value is NaN.

    On CPUs `lax.reduce` is slower, and has been seen to lose a NaN.
    """
    if jax.default_backend() == "cpu":
        return fold(values_RN, combine, neutral)[0]
    return lax.reduce(values_RN, values_RN.dtype.type(neutral), combine, (1,))


def top(
    logits_RV: Array, count: int, axis: Axis, top_k: Callable = lax.top_k
) -> tuple[Array, Array]:
    """(logits, tokens) of the best `count` tokens of each row, found by `top_k`."""
    V = logits_RV.shape[1]
    top_RC, tokens_RC = top_k(logits_RV, min(count, V))
    if axis.size == 1:
        return top_RC, tokens_RC
    candidates_RN, token_RN = (
        jnp.moveaxis(axis.gather(x), 0, 1).reshape(x.shape[0], -1)
        for x in (top_RC, tokens_RC + axis.index() * V)
    )
    top_RC, at_RC = top_k(candidates_RN, min(count, axis.size * V))
    return top_RC, jnp.take_along_axis(token_RN, at_RC, axis=1)


@jax.named_scope("draw")
def draw(
    logits_RV: Array,
    best_R: Array,
    is_random_R: Array,
    inputs: SamplingInputs,
    raise_floor: Callable[..., Array] | None,
    axis: Axis = UNSPLIT,
) -> Array:
    """Sample a token for each row by inverting the cumulative distribution of the kept tokens.

    min-p and, by `raise_floor`, top-k and top-p determine the kept tokens. They are accumulated in
    the order of the tree of `fold`, which is fixed but not the order of their ids.
    """
    # Smaller temperatures could be flushed to zero, and weights could become 0 / 0.
    temperature_R = jnp.where(
        is_random_R, jnp.maximum(inputs.temperature_R, jnp.finfo(jnp.float32).tiny), 1
    )
    top_k_R = jnp.where(
        is_random_R & (inputs.top_k_R < axis.size * logits_RV.shape[1]), inputs.top_k_R, 0
    )
    top_p_R = jnp.where(is_random_R, inputs.top_p_R, 1)

    def weigh(logits_RN: Array, floor_R: Array) -> Array:
        # (the weight of the best token is 1)
        weights_RN = jnp.exp((logits_RN - best_R[:, None]) / temperature_R[:, None])
        return jnp.where(logits_RN >= floor_R[:, None], weights_RN, 0)

    floor_R = best_R + temperature_R * jnp.log(inputs.min_p_R)  # min-p 0 is a floor of -inf
    if raise_floor is not None:
        floor_R = raise_floor(logits_RV, floor_R, top_k_R, top_p_R, weigh, axis)
    floor_R = jnp.minimum(floor_R, best_R)

    def weigh_tokens(tokens_RW: Array) -> Array:
        return weigh(
            jnp.take_along_axis(logits_RV, tokens_RW, axis=1, mode="fill", fill_value=-jnp.inf),
            floor_R,
        )

    total_R, levels = fold(weigh(logits_RV, floor_R), jnp.add, 0)
    uniform_R = uniform(inputs.seeds_R2, inputs.positions_R)
    if axis.size == 1:
        return descend(levels, weigh_tokens, uniform_R * total_R)
    # The devices are the top level of the tree.
    total_RA = axis.gather(total_R).T
    sums_RA = running_sums(total_RA)
    start_RA = jnp.pad(sums_RA[:, :-1], ((0, 0), (1, 0)))
    target_R = uniform_R * sums_RA[:, -1]
    open_RA = (total_RA > 0) & (start_RA <= target_R[:, None])
    device_R = jnp.where(open_RA, jnp.arange(axis.size), 0).max(axis=1)
    start_R = jnp.where(open_RA, start_RA, 0).max(axis=1)
    token_R = descend(levels, weigh_tokens, target_R - start_R) + axis.index() * logits_RV.shape[1]
    return axis.sum(jnp.where(device_R == axis.index(), token_R, 0))


def raise_floor(
    logits_RV: Array,
    floor_R: Array,
    top_k_R: Array,
    top_p_R: Array,
    weigh: Callable[..., Array],
    axis: Axis,
) -> Array:
    """Raise the floor to the thresholds of top-k and then top-p.

    `weigh(logits, floor)` computes unnormalised probabilities of the tokens at or above the floor.
    """

    def apply_filters(floor_R: Array) -> Array:
        top_RC = top(logits_RV, CANDIDATES, axis)[0]
        floor_R = jnp.maximum(floor_R, top_k_floor(logits_RV, top_RC, top_k_R, axis))

        def nucleus() -> Array:
            return top_p_floor(
                logits_RV, top_RC, top_p_R, lambda logits_RN: weigh(logits_RN, floor_R), axis
            )

        return lax.cond(
            (top_p_R < 1).any(), lambda: jnp.maximum(floor_R, nucleus()), lambda: floor_R
        )

    return lax.cond(
        ((top_k_R > 0) | (top_p_R < 1)).any(), apply_filters, lambda floor_R: floor_R, floor_R
    )


def top_k_floor(logits_RV: Array, top_RC: Array, k_R: Array, axis: Axis = UNSPLIT) -> Array:
    """The k-th best logit of each row; -inf if k is off."""
    hard_R = k_R > top_RC.shape[1]
    floor_R = jnp.take_along_axis(
        top_RC, jnp.clip(k_R - 1, 0, top_RC.shape[1] - 1)[:, None], axis=1
    )[:, 0]
    exact_R = lax.cond(hard_R.any(), lambda: bisect(logits_RV, 1, k_R, axis), lambda: floor_R)
    return jnp.where(hard_R, exact_R, jnp.where(k_R > 0, floor_R, -jnp.inf))


def top_p_floor(
    logits_RV: Array,
    top_RC: Array,
    p_R: Array,
    weigh: Callable[[Array], Array],
    axis: Axis = UNSPLIT,
) -> Array:
    """The highest logit of each row such that the tokens at or above it have at least the
    probability p; -inf if p is off.
    """
    required_R = p_R * total(weigh(logits_RV), axis)
    enough_RC = running_sums(weigh(top_RC)) >= required_R[:, None]
    floor_R = jnp.take_along_axis(top_RC, enough_RC.argmax(axis=1)[:, None], axis=1)[:, 0]
    hard_R = (p_R < 1) & ~enough_RC.any(axis=1)
    exact_R = lax.cond(
        hard_R.any(), lambda: bisect(logits_RV, weigh(logits_RV), required_R, axis), lambda: floor_R
    )
    return jnp.where(hard_R, exact_R, jnp.where(p_R < 1, floor_R, -jnp.inf))


def bisect(
    logits_RV: Array, weights_RV: Array | int, required_R: Array, axis: Axis = UNSPLIT
) -> Array:
    """The highest logit of each row such that the weights of the tokens at or above it sum to at
    least `required_R`.

    Each of 32 passes determines one bit of the threshold's key.
    """
    keys_RV = ordered(logits_RV)

    def settle(i, key_R):
        trial_R = key_R | (SIGN >> i)
        enough_R = total(jnp.where(keys_RV >= trial_R[:, None], weights_RV, 0), axis) >= required_R
        return jnp.where(enough_R, trial_R, key_R)

    key_R = lax.fori_loop(
        jnp.uint32(0), jnp.uint32(32), settle, jnp.zeros(required_R.shape, jnp.uint32)
    )
    return unordered(key_R)


def ordered(values: Array) -> Array:
    """Integer keys that have the order of the float32 values: the bits as an unsigned integer, with
    the sign bit flipped if the value is positive, and all bits if it is negative.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits < SIGN, bits | SIGN, ~bits)


def unordered(keys: Array) -> Array:
    """The inverse of `ordered`."""
    return lax.bitcast_convert_type(jnp.where(keys < SIGN, ~keys, keys ^ SIGN), jnp.float32)


def fold(values_RN: Array, combine: Callable, neutral: float) -> tuple[Array, list[Array]]:
    """Combine each row into one value, in a tree with W = FAN_OUT children per node.

        values   0 1 2 3 4 5      W = 3: node i of n has the children i, i + n and i + 2n,
        sums     0+2+4  1+3+5     so that whole slices are combined

    Every operation is elementwise, so the order depends neither on the backend nor on the number of
    rows.

    Returns:
        (the combined values, the levels of the tree from the leaves up).
    """
    levels = []
    while values_RN.shape[1] > 1:
        R, N = values_RN.shape
        n = -(-N // FAN_OUT)
        level_RWn = jnp.pad(
            values_RN, ((0, 0), (0, n * FAN_OUT - N)), constant_values=neutral
        ).reshape(R, FAN_OUT, n)
        levels.append(level_RWn)
        while (half := level_RWn.shape[1] // 2) > 0:
            level_RWn = combine(level_RWn[:, :half], level_RWn[:, half:])
        values_RN = level_RWn[:, 0]
    return values_RN[:, 0], levels


def total(values_RN: Array, axis: Axis = UNSPLIT) -> Array:
    """The sum of each row, with the same bits on all devices."""
    total_R = fold(values_RN, jnp.add, 0)[0]
    return total_R if axis.size == 1 else fold(axis.gather(total_R).T, jnp.add, 0)[0]


def running_sums(values_RN: Array) -> Array:
    """The inclusive prefix sums of each row.

    They never decrease, because all are summed in the same tree.
    """
    R, N = values_RN.shape
    terms_RNN = jnp.where(jnp.tri(N, dtype=bool)[None], values_RN[:, None, :], 0)
    return total(terms_RNN.reshape(R * N, N)).reshape(R, N)


def descend(levels: list[Array], weigh_leaves: Callable[[Array], Array], target_R: Array) -> Array:
    """The leaf of each row at which the cumulative weight passes the target. Its weight is not 0.

    At each level the last child is chosen that has weight and starts at or below the target. The
    first child with weight starts at 0, so a node with weight has such a child in spite of rounding
    errors.
    """
    node_R = jnp.zeros(target_R.shape, jnp.int32)
    for height, level_RWn in reversed(list(enumerate(levels))):
        R, W, n = level_RWn.shape
        children_RW = node_R[:, None] + n * jnp.arange(W)[None]
        if height > 0:
            weights_RW = jnp.take_along_axis(level_RWn.reshape(R, W * n), children_RW, axis=1)
        else:  # computed again, since the weights of all V leaves are not stored in memory
            weights_RW = weigh_leaves(children_RW)
        start_RW = jnp.pad(running_sums(weights_RW)[:, :-1], ((0, 0), (1, 0)))
        open_RW = (weights_RW > 0) & (start_RW <= target_R[:, None])
        node_R = jnp.where(open_RW, children_RW, 0).max(axis=1)
        target_R -= jnp.where(open_RW, start_RW, 0).max(axis=1)
    return node_R


def uniform(seeds_R2: Array, positions_R: Array) -> Array:
    """A random multiple of 2**-24 in [0, 1) for each row, from its seed and position (threefry)."""
    keys_R = jax.vmap(jax.random.fold_in)(
        jax.random.wrap_key_data(seeds_R2, impl="threefry2x32"), positions_R
    )
    return (jax.random.key_data(keys_R)[:, 0] >> 8).astype(jnp.float32) * 2**-24


@jax.named_scope("score")
def score(
    raw_RV: Array,
    tokens_R: Array,
    logprob_ids_RL: Array,
    top_k: Callable[..., tuple[Array, Array]],
    axis: Axis = UNSPLIT,
) -> tuple[Array, ...]:
    """Log-probabilities: (of each row's token, its rank, the top tokens, theirs, those of
    `logprob_ids_RL`).

    A token's log-probability has the same bits in all of them, because it is always the same
    difference.
    """
    V = raw_RV.shape[1]
    ids_RL = jnp.concatenate([tokens_R[:, None], logprob_ids_RL], axis=1)
    if axis.size == 1:
        logits_RL = jnp.take_along_axis(raw_RV, ids_RL, axis=1)
    else:
        local_ids_RL = local_token_ids(ids_RL, V, axis)
        logits_RL = jnp.take_along_axis(raw_RV, jnp.minimum(local_ids_RL, V - 1), axis=1)
        logits_RL = axis.sum(jnp.where(local_ids_RL < V, logits_RL, 0))
    token_logits_R = logits_RL[:, 0]
    ranks_R = 1 + total((raw_RV > token_logits_R[:, None]).astype(jnp.int32), axis)
    top_logits_RK, top_ids_RK = top_k(raw_RV, axis=axis)
    best_R = raw_RV.max(axis=1)  # (slicing the result of top_k would make XLA sort)
    best_R = axis.gather(best_R).max(axis=0)
    log_total_R = jnp.log(total(jnp.exp(raw_RV - best_R[:, None]), axis))
    top_logprobs_RK = top_logits_RK - best_R[:, None] - log_total_R[:, None]
    logprobs_RL = logits_RL - best_R[:, None] - log_total_R[:, None]
    return logprobs_RL[:, 0], ranks_R, top_ids_RK, top_logprobs_RK, logprobs_RL[:, 1:]
