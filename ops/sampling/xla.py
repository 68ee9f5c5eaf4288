"""Sampling in plain XLA, which serves everywhere.

The thresholds need no sort of the vocabulary: they come from the best few logits where these
suffice (nearly always), else from bisecting the ordered bit patterns of float32. A row's bits
depend neither on the other rows nor on their number: floating-point sums run in a written order
(`fold`), and a row whose best few logits suffice keeps that answer when another row needs the
bisection.

Where the vocabulary is split over the devices of an axis, no logits are gathered: the devices
exchange a few numbers a row and their best few logits.
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
    own_tokens,
    penalised,
)

CANDIDATES = 64  # lax.top_k of so few takes 3 ms for 16 rows of 152k, where a sort takes 530
FAN_OUT = 64
SIGN = np.uint32(1 << 31)


def sample(
    logits_RV: Array,
    state: SlotState,
    inputs: SamplingInputs,
    plain: bool = False,
    axis: Axis = UNSPLIT,
    listed: int = MAX_LOGPROBS,
) -> Sampled:
    """See `quire.ops.sampling.sample`. Work that no row wants is skipped."""
    raw_RV = logits_RV.astype(jnp.float32)
    scored_R = inputs.targets_R >= 0
    masked_R = inputs.biased_R | inputs.ban_stop_R | (inputs.ban_RX >= 0).any(axis=1)
    adjusts = (~scored_R & (masked_R | penalised(inputs))).any()
    draws_R = ~scored_R & (inputs.temperature_R > 0)

    def choose():
        # A row without masks and penalties does not change, so one branch serves all rows.
        logits_RV = lax.cond(
            adjusts,
            lambda: penalise(mask(raw_RV, state, inputs, axis), state, inputs, axis),
            lambda: raw_RV,
        )
        greedy_R, best_R = argmax(logits_RV, axis)
        drawn_R = lax.cond(
            draws_R.any(),
            lambda: draw(logits_RV, best_R, draws_R, inputs, cut, axis),
            lambda: greedy_R,
        )
        return jnp.where(draws_R, drawn_R, greedy_R), best_R

    if plain:
        greedy_R, best_R = argmax(raw_RV, axis)
        tokens_R = jnp.where(draws_R, draw(raw_RV, best_R, draws_R, inputs, None, axis), greedy_R)
    else:
        tokens_R, best_R = lax.cond(adjusts | draws_R.any(), choose, lambda: argmax(raw_RV, axis))
    tokens_R = checked(tokens_R, best_R, raw_RV, inputs, axis)
    ok_R = tokens_R >= 0

    wants_R = ok_R & inputs.wants_logprobs_R
    rate = partial(score, best=partial(top, count=listed), axis=axis)
    given = raw_RV, tokens_R, state.wanted_BL[inputs.slots_R]
    zeros = [jnp.zeros(like.shape, like.dtype) for like in jax.eval_shape(rate, *given)]
    scores = zeros if plain else lax.cond(wants_R.any(), lambda: list(rate(*given)), lambda: zeros)
    return Sampled(tokens_R, *where_wanted(wants_R, scores), ok_R=ok_R)


def checked(
    tokens_R: Array, best_R: Array, raw_RV: Array, inputs: SamplingInputs, axis: Axis
) -> Array:
    """The rows' tokens, those to be scored in their places, and what stands for a token where there
    is none.

    best_R: the largest logit after masks and penalties.
    """
    scored_R = inputs.targets_R >= 0
    failed_R = jnp.where(~scored_R & (best_R == -jnp.inf), BANNED, BROKEN)
    ok_R = scored_R | jnp.isfinite(best_R)
    tokens_R = jnp.where(ok_R, jnp.where(scored_R, inputs.targets_R, tokens_R), failed_R)
    return jnp.where(jnp.isfinite(most(raw_RV, axis)), tokens_R, BROKEN)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""


def where_wanted(wants_R: Array, scores: Iterable[Array]) -> list[Array]:
    """The scores of the rows that want them, and zeros."""
    return [jnp.where(jnp.expand_dims(wants_R, range(1, x.ndim)), x, 0) for x in scores]


@jax.named_scope("mask")
def mask(logits_RV: Array, state: SlotState, inputs: SamplingInputs, axis: Axis = UNSPLIT) -> Array:
    """Logits with the biases added and the bans applied."""
    R, V = logits_RV.shape
    bias_RV = jnp.where(
        inputs.biased_R[:, None], state.bias_BJV[inputs.slots_R, inputs.bias_rows_R], 0
    )
    banned_RV = inputs.ban_stop_R[:, None] & state.stop_BV[inputs.slots_R]
    logits_RV = jnp.where(banned_RV, -jnp.inf, logits_RV + bias_RV)
    ban_RX = own_tokens(inputs.ban_RX, V, axis)  # a negative index would count from the end
    return logits_RV.at[jnp.arange(R)[:, None], ban_RX].set(-jnp.inf, mode="drop")


@jax.named_scope("penalise")
def penalise(
    logits_RV: Array, state: SlotState, inputs: SamplingInputs, axis: Axis = UNSPLIT
) -> Array:
    """Logits after the penalties for repetition (prompt and output), frequency and presence
    (output).
    """
    counts_RV = state.output_counts_BV[inputs.slots_R]
    R, J = inputs.drafted_RJ.shape
    if J > 1:  # else there are no drafts
        drafted_RJ = own_tokens(inputs.drafted_RJ, counts_RV.shape[1], axis)
        counts_RV = counts_RV.at[jnp.arange(R)[:, None], drafted_RJ].add(1, mode="drop")
    seen_RV = state.prompt_BV[inputs.slots_R] | (counts_RV > 0)
    repetition_R1 = inputs.repetition_penalty_R[:, None]
    repeated_RV = jnp.where(logits_RV > 0, logits_RV / repetition_R1, logits_RV * repetition_R1)
    logits_RV = jnp.where(seen_RV, repeated_RV, logits_RV)
    frequency_R1 = inputs.frequency_penalty_R[:, None]
    presence_R1 = inputs.presence_penalty_R[:, None]
    return logits_RV - frequency_R1 * counts_RV - presence_R1 * (counts_RV > 0)


def argmax(logits_RV: Array, axis: Axis) -> tuple[Array, Array]:
    """Each row's best token and its logit; XLA's own argmax takes 25 times as long on the CPU."""
    V = logits_RV.shape[1]
    best_R = logits_RV.max(axis=1)
    token_R = extreme(jnp.where(logits_RV == best_R[:, None], jnp.arange(V)[None], V), lax.min, V)
    if axis.size == 1:
        return token_R, best_R
    best_AR = axis.gather(best_R)
    token_AR = axis.gather(token_R + axis.index() * V)
    best_R = best_AR.max(axis=0)
    return jnp.where(best_AR == best_R, token_AR, axis.size * V).min(axis=0), best_R


def most(values_RV: Array, axis: Axis) -> Array:
    """The largest of each row, NaN where there is one."""
    most_R = extreme(values_RV, lax.max, -jnp.inf)
    return most_R if axis.size == 1 else extreme(axis.gather(most_R).T, lax.max, -jnp.inf)


def extreme(values_RN: Array, combine: Callable, neutral: float) -> Array:
    """The largest or smallest of each row, NaN where there is one.

    No order changes it. On CPUs XLA's own reduction takes longer, and has been seen to lose a NaN.
    """
    if jax.default_backend() == "cpu":
        return fold(values_RN, combine, neutral)[0]
    return lax.reduce(values_RN, values_RN.dtype.type(neutral), combine, (1,))


def top(
    logits_RV: Array, count: int, axis: Axis, best: Callable = lax.top_k
) -> tuple[Array, Array]:
    """The best `count` logits of each row, and their tokens; `best` finds them."""
    V = logits_RV.shape[1]
    top_RC, tokens_RC = best(logits_RV, min(count, V))
    if axis.size == 1:
        return top_RC, tokens_RC
    found_RN, token_RN = (
        jnp.moveaxis(axis.gather(x), 0, 1).reshape(x.shape[0], -1)
        for x in (top_RC, tokens_RC + axis.index() * V)
    )
    top_RC, at_RC = best(found_RN, min(count, axis.size * V))
    return top_RC, jnp.take_along_axis(token_RN, at_RC, axis=1)


@jax.named_scope("draw")
def draw(
    logits_RV: Array,
    best_R: Array,
    draws_R: Array,
    inputs: SamplingInputs,
    cut: Callable[..., Array] | None,
    axis: Axis = UNSPLIT,
) -> Array:
    """A token a row, by the inverse distribution function of what min-p and, with a `cut`, top-k
    and top-p keep.

    The function runs over the tokens in the order of `fold`'s tree, not of their ids: any fixed
    order draws alike.
    """
    # Smaller numbers may be flushed to 0, and 0 / 0 is no weight.
    temperature_R = jnp.where(
        draws_R, jnp.maximum(inputs.temperature_R, jnp.finfo(jnp.float32).tiny), 1
    )
    top_k_R = jnp.where(
        draws_R & (inputs.top_k_R < axis.size * logits_RV.shape[1]), inputs.top_k_R, 0
    )
    top_p_R = jnp.where(draws_R, inputs.top_p_R, 1)

    def weigh(logits_RN: Array, floor_R: Array) -> Array:
        # of the best token: 1
        weights_RN = jnp.exp((logits_RN - best_R[:, None]) / temperature_R[:, None])
        return jnp.where(logits_RN >= floor_R[:, None], weights_RN, 0)

    floor_R = best_R + temperature_R * jnp.log(inputs.min_p_R)  # min-p 0 is a floor of -inf
    if cut is not None:
        floor_R = cut(logits_RV, floor_R, top_k_R, top_p_R, weigh, axis)
    floor_R = jnp.minimum(floor_R, best_R)

    def weigh_tokens(tokens_RW: Array) -> Array:
        return weigh(
            jnp.take_along_axis(logits_RV, tokens_RW, axis=1, mode="fill", fill_value=-jnp.inf),
            floor_R,
        )

    total_R, levels = fold(weigh(logits_RV, floor_R), jnp.add, 0)
    chance_R = uniform(inputs.seeds_R2, inputs.positions_R)
    if axis.size == 1:
        return descend(levels, weigh_tokens, chance_R * total_R)
    # The devices are one more level of the tree, above all others.
    total_RA = axis.gather(total_R).T
    sums_RA = running_sums(total_RA)
    begins_RA = jnp.pad(sums_RA[:, :-1], ((0, 0), (1, 0)))
    target_R = chance_R * sums_RA[:, -1]
    open_RA = (total_RA > 0) & (begins_RA <= target_R[:, None])
    at_R = jnp.where(open_RA, jnp.arange(axis.size), 0).max(axis=1)
    begin_R = jnp.where(open_RA, begins_RA, 0).max(axis=1)
    token_R = descend(levels, weigh_tokens, target_R - begin_R) + axis.index() * logits_RV.shape[1]
    return axis.sum(jnp.where(at_R == axis.index(), token_R, 0))


def cut(
    logits_RV: Array,
    floor_R: Array,
    top_k_R: Array,
    top_p_R: Array,
    weigh: Callable[..., Array],
    axis: Axis,
) -> Array:
    """The floor raised to what top-k and then top-p keep; `weigh(logits, floor)` are the tokens'
    shares.
    """

    def raised(floor_R: Array) -> Array:
        top_RC = top(logits_RV, CANDIDATES, axis)[0]
        floor_R = jnp.maximum(floor_R, top_k_floor(logits_RV, top_RC, top_k_R, axis))

        def nucleus() -> Array:
            return top_p_floor(
                logits_RV, top_RC, top_p_R, lambda logits_RN: weigh(logits_RN, floor_R), axis
            )

        return lax.cond(
            (top_p_R < 1).any(), lambda: jnp.maximum(floor_R, nucleus()), lambda: floor_R
        )

    return lax.cond(((top_k_R > 0) | (top_p_R < 1)).any(), raised, lambda floor_R: floor_R, floor_R)


def top_k_floor(logits_RV: Array, top_RC: Array, k_R: Array, axis: Axis = UNSPLIT) -> Array:
    """The k-th best logit of each row, -inf where k is off."""
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
    """The highest logit of each row such that the tokens at or above it have p of the mass, -inf
    where p is off.
    """
    need_R = p_R * total(weigh(logits_RV), axis)
    enough_RC = running_sums(weigh(top_RC)) >= need_R[:, None]
    floor_R = jnp.take_along_axis(top_RC, enough_RC.argmax(axis=1)[:, None], axis=1)[:, 0]
    hard_R = (p_R < 1) & ~enough_RC.any(axis=1)
    exact_R = lax.cond(
        hard_R.any(), lambda: bisect(logits_RV, weigh(logits_RV), need_R, axis), lambda: floor_R
    )
    return jnp.where(hard_R, exact_R, jnp.where(p_R < 1, floor_R, -jnp.inf))


def bisect(logits_RV: Array, weights_RV: Array | int, need_R: Array, axis: Axis = UNSPLIT) -> Array:
    """The highest logit of each row such that the weights of the tokens at or above it add up to
    the need.

    32 passes settle the 32 bits of the threshold's key.
    """
    keys_RV = ordered(logits_RV)

    def settle(i, key_R):
        trial_R = key_R | (SIGN >> i)
        enough_R = total(jnp.where(keys_RV >= trial_R[:, None], weights_RV, 0), axis) >= need_R
        return jnp.where(enough_R, trial_R, key_R)

    key_R = lax.fori_loop(
        jnp.uint32(0), jnp.uint32(32), settle, jnp.zeros(need_R.shape, jnp.uint32)
    )
    return unordered(key_R)


def ordered(values: Array) -> Array:
    """Keys in the order of the values: read as an unsigned integer, with the sign flipped if
    positive and all bits if negative, float32 keeps its order."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits < SIGN, bits | SIGN, ~bits)


def unordered(keys: Array) -> Array:
    """The values that have these keys."""
    return lax.bitcast_convert_type(jnp.where(keys < SIGN, ~keys, keys ^ SIGN), jnp.float32)


def fold(values_RN: Array, combine: Callable, neutral: float) -> tuple[Array, list[Array]]:
    """Each row combined into one value, and the levels it went through: values, W of them combined,
    W of those.

        values   0 1 2 3 4 5      W = 3: node i of n has the children i, i + n and i + 2n,
        sums     0+2+4  1+3+5     so that whole slices are combined

    Every step is elementwise: no backend and no number of rows can change the order.
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
    """The sum of each row, the same bits on each device."""
    total_R = fold(values_RN, jnp.add, 0)[0]
    return total_R if axis.size == 1 else fold(axis.gather(total_R).T, jnp.add, 0)[0]


def running_sums(values_RN: Array) -> Array:
    """The sum of each row up to and including each value.

    It never falls, as all the sums share one tree.
    """
    R, N = values_RN.shape
    terms_RNN = jnp.where(jnp.tri(N, dtype=bool)[None], values_RN[:, None, :], 0)
    return total(terms_RNN.reshape(R * N, N)).reshape(R, N)


def descend(levels: list[Array], weigh_leaves: Callable[[Array], Array], target_R: Array) -> Array:
    """The leaf of each row in which the running sum passes the target, never one that weighs
    nothing.

    Of the children that weigh something, the last one that begins at or below the target is taken.
    The first of them begins at 0, so there is one wherever a node weighs something, whatever was
    rounded on the way.
    """
    node_R = jnp.zeros(target_R.shape, jnp.int32)
    for height, level_RWn in reversed(list(enumerate(levels))):
        R, W, n = level_RWn.shape
        children_RW = node_R[:, None] + n * jnp.arange(W)[None]
        if height > 0:
            weights_RW = jnp.take_along_axis(level_RWn.reshape(R, W * n), children_RW, axis=1)
        else:  # weighed again: to look up W leaves of V, all of them would have to go through memory
            weights_RW = weigh_leaves(children_RW)
        begins_RW = jnp.pad(running_sums(weights_RW)[:, :-1], ((0, 0), (1, 0)))
        open_RW = (weights_RW > 0) & (begins_RW <= target_R[:, None])
        node_R = jnp.where(open_RW, children_RW, 0).max(axis=1)
        target_R -= jnp.where(open_RW, begins_RW, 0).max(axis=1)
    return node_R


def uniform(seeds_R2: Array, positions_R: Array) -> Array:
    """A multiple of 2**-24 in [0, 1) a row, by threefry from seed and position alone: chances are
    true to 6e-8.
    """
    keys_R = jax.vmap(jax.random.fold_in)(
        jax.random.wrap_key_data(seeds_R2, impl="threefry2x32"), positions_R
    )
    return (jax.random.key_data(keys_R)[:, 0] >> 8).astype(jnp.float32) * 2**-24


@jax.named_scope("score")
def score(
    raw_RV: Array,
    tokens_R: Array,
    wanted_RL: Array,
    best: Callable[..., tuple[Array, Array]],
    axis: Axis = UNSPLIT,
) -> tuple[Array, ...]:
    """Log-probability and rank of each row's token, the tokens that `best` finds with theirs, and
    those of the wanted.

    Each of them is the difference of the same two numbers, so that a token's has the same bits in
    all places.
    """
    V = raw_RV.shape[1]
    named_RL = jnp.concatenate([tokens_R[:, None], wanted_RL], axis=1)
    if axis.size == 1:
        logits_RL = jnp.take_along_axis(raw_RV, named_RL, axis=1)
    else:
        at_RL = own_tokens(named_RL, V, axis)
        logits_RL = jnp.take_along_axis(raw_RV, jnp.minimum(at_RL, V - 1), axis=1)
        logits_RL = axis.sum(jnp.where(at_RL < V, logits_RL, 0))
    token_logits_R = logits_RL[:, 0]
    ranks_R = 1 + total((raw_RV > token_logits_R[:, None]).astype(jnp.int32), axis)
    top_logits_RK, top_ids_RK = best(raw_RV, axis=axis)
    best_R = raw_RV.max(axis=1)  # a slice of top_k would keep XLA from seeing that it need not sort
    best_R = axis.gather(best_R).max(axis=0)
    log_total_R = jnp.log(total(jnp.exp(raw_RV - best_R[:, None]), axis))
    top_logprobs_RK = top_logits_RK - best_R[:, None] - log_total_R[:, None]
    logprobs_RL = logits_RL - best_R[:, None] - log_total_R[:, None]
    return logprobs_RL[:, 0], ranks_R, top_ids_RK, top_logprobs_RK, logprobs_RL[:, 1:]
