"""Sampling: from logits to tokens, each row's result a function of that row alone.

The order is vLLM's: biases and bans, penalties, then argmax, or temperature, min-p, top-k, top-p
and a draw. The last three filters each keep the tokens whose logit reaches a threshold, so together
they are one number a row: its floor. Tokens that tie with the floor are all kept.

A sequence with drafts (tokens that may come next) has a row for each of them and one more. What is
drawn at such a row is what would be drawn there if the drafts before it were known to be right:
`accepted` says which are.

Letters beside the package's: R sampled rows, B slots, J rows that a slot may have, X bans, K listed
log-probabilities, L tokens whose log-probabilities are wanted by name, C candidates, W fan-out.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...sharding import struct
from ...sharding.device_axes import UNSPLIT, Axis
from ..implementations import choose
from ..native.blank import blank

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with the
# reason.
IMPLEMENTATIONS = {"native": ".cpu", "branchless": ".branchless", "xla": ".xla"}
MAX_LOGPROBS = 20
MAX_BANS = 64
MAX_WANTED = 128
# In place of the token of a row that is not ok: its raw logits are NaN, +inf or all -inf; or no
# token is allowed.
BROKEN = -1
BANNED = -2


@struct.dataclass
class SlotState:
    """What sampling keeps on the device between steps: one row for each running sequence."""

    bias_BJV: Array  # float32, added to the logits; -inf where a token is not allowed
    stop_BV: Array  # bool, the tokens that would end the request
    output_counts_BV: Array  # int32, times each token was generated
    prompt_BV: Array  # bool, the tokens that occur in the prompt
    # int32, tokens whose log-probabilities are wanted; what is behind them has no meaning
    wanted_BL: Array


@struct.dataclass
class SamplingInputs:
    """How to sample each row."""

    slots_R: Array  # int32, the row of SlotState
    bias_rows_R: Array  # int32, which of the slot's biases
    drafted_RJ: Array  # int32, the drafts before this row, which the penalties count; -1 = none
    positions_R: Array  # int32, of the token being drawn, counted from 0
    seeds_R2: Array  # uint32
    temperature_R: Array  # float32, 0 = greedy
    top_k_R: Array  # int32, 0 or less = off
    top_p_R: Array  # float32, 1 = off
    min_p_R: Array  # float32, 0 = off
    repetition_penalty_R: Array  # float32, 1 = off
    presence_penalty_R: Array  # float32, 0 = off
    frequency_penalty_R: Array  # float32, 0 = off
    ban_stop_R: Array  # bool, ban the slot's stop tokens (min_tokens is not reached)
    ban_RX: Array  # int32 token ids, -1 = none
    targets_R: Array  # int32, -1 = choose a token, else score this one
    biased_R: Array  # bool, the slot has a bias worth reading
    wants_logprobs_R: Array  # bool


@struct.dataclass
class Sampled:
    """The tokens, and their log-probabilities by the raw logits, which are zeros in a row that is
    not ok.

    What has a log-probability's rows may be None where all is `plain`, since nobody wants any.
    """

    tokens_R: Array  # int32; `BROKEN` or `BANNED` in a row that is not ok
    logprobs_R: Any  # float32, log-softmax of the logits before any processing
    ranks_R: Any  # int32, 1 = best; tokens that tie share the better rank
    top_ids_RK: Any  # int32, K = min(listed, V)
    top_logprobs_RK: Any  # float32
    wanted_logprobs_RL: Any  # float32, of the slot's wanted tokens
    ok_R: Array  # bool, whether there is a token
    # int32, what may come next of each sequence of the step, where something drafts there
    drafts_BK: Any = None


def sample(
    logits_RV: Array,
    state: SlotState,
    inputs: SamplingInputs,
    plain: bool = False,
    axis: Axis = UNSPLIT,
    listed: int = MAX_LOGPROBS,
    implementation: str | None = None,
) -> Sampled:
    """Choose, or score, one token a row. Each device of `axis` has the logits and the state of its
    own tokens.

    `plain` promises that all rows are drawn or greedy with no parameters but temperature and min-p,
    and want no log-probabilities. The tokens are the same, without the work and the branches that
    others need. `listed` is the K of what is sampled. `implementation` forces one of
    IMPLEMENTATIONS.
    """
    arguments = logits_RV, state, inputs, plain, axis, listed
    return choose(
        IMPLEMENTATIONS, __name__, lambda module: module.sample(*arguments), implementation
    )


def empty_state(num_slots: int, vocab: int, num_rows: int = 1) -> SlotState:
    """The state where no slot is in use; `num_rows` are those that a slot may have in a step."""
    others = [blank((num_slots, vocab), dtype) for dtype in (bool, jnp.int32, bool)]
    return SlotState(
        blank((num_slots, num_rows, vocab)), *others, blank((num_slots, MAX_WANTED), jnp.int32)
    )


def replace_row(state: SlotState, slot: Array, row: SlotState) -> SlotState:
    """The state with one slot's row, which has neither B nor J axis, replaced."""
    return SlotState(
        set_bias(state.bias_BJV, slot, 0, row.bias_BJV),
        *(
            all_BV.at[slot].set(own_V)
            for all_BV, own_V in zip(
                jax.tree.leaves(state)[1:], jax.tree.leaves(row)[1:], strict=True
            )
        ),
    )


def set_bias(bias_BJV: Array, slot: Array, bias_row: Array | int, bias_V: Array) -> Array:
    """The biases with one of a slot's replaced."""
    return bias_BJV.at[slot, bias_row].set(bias_V)


def accepted(sampled: Sampled, drafts_R: Array, depths_R: Array) -> Array:
    """Which drafts are what was drawn in their place, and so are all those before them.

    drafts_R: what the row's token is compared with, -1 = nothing; depths_R: drafts before the row.
    A sequence's rows lie together.

        row          0       1       2       3            drafts      a  b  c draft        a       b
        c       - drawn        a       b       x                    accepted    a  b       and x is
        the next token
    """
    R = drafts_R.shape[0]
    wrong_R = (sampled.tokens_R != drafts_R) | ~sampled.ok_R
    so_far_R = jnp.cumsum(wrong_R)
    before_R = so_far_R - wrong_R
    return so_far_R == before_R[jnp.maximum(jnp.arange(R) - depths_R, 0)]


def count_tokens(
    state: SlotState,
    slots_T: Array,
    tokens_T: Array,
    is_prompt_T: Array,
    tracked_T: Array,
    axis: Axis = UNSPLIT,
) -> SlotState:
    """The state with the prompt tokens of the tracked rows marked and their output tokens
    counted.
    """
    B, V = state.prompt_BV.shape
    if axis.size > 1:
        tokens_T = own_tokens(tokens_T, V, axis)
    prompt_T = jnp.where(tracked_T & is_prompt_T, slots_T, B)  # slot B does not exist: dropped
    output_T = jnp.where(tracked_T & ~is_prompt_T, slots_T, B)
    return replace(
        state,
        prompt_BV=state.prompt_BV.at[prompt_T, tokens_T].set(True, mode="drop"),
        output_counts_BV=state.output_counts_BV.at[output_T, tokens_T].add(1, mode="drop"),
    )


def ends(accepted_R: Array, depths_R: Array) -> Array:
    """The rows that draw a sequence's next token: all drafts before are accepted, and the one after
    is not.
    """
    reached_R = (depths_R == 0) | jnp.pad(accepted_R[:-1], (1, 0))
    return reached_R & ~accepted_R


def count_accepted(
    state: SlotState,
    inputs: SamplingInputs,
    drafts_R: Array,
    accepted_R: Array,
    axis: Axis = UNSPLIT,
) -> SlotState:
    """The state with the accepted drafts counted, of slots that have penalties."""
    return count_tokens(
        state,
        inputs.slots_R,
        drafts_R,
        jnp.zeros_like(accepted_R),
        accepted_R & penalised(inputs),
        axis,
    )


def penalised(inputs: SamplingInputs) -> Array:
    """The rows whose logits depend on the tokens so far."""
    return (
        (inputs.presence_penalty_R != 0)
        | (inputs.frequency_penalty_R != 0)
        | (inputs.repetition_penalty_R != 1)
    )


def own_tokens(tokens, V: int, axis: Axis):
    """The index of each token among the V of this device; V for tokens of other devices."""
    at = tokens - axis.index() * V
    return jnp.where((at >= 0) & (at < V), at, V)
