"""Sampling of tokens from logits. It is batch-invariant: a row's result depends on that row alone.

The order is vLLM's: biases and bans, penalties, then argmax, or temperature, min-p, top-k, top-p
and a random choice. Each of the last three filters keeps the tokens whose logit reaches a
threshold. The largest of the thresholds is the row's floor. All tokens that tie with it are kept.

A sequence with draft tokens has a row for each of them and one more. The token sampled at a row
assumes that all drafts before it are correct. `accepted_drafts` tells which are.

Additional dimension letters: R sampled rows, B slots, J rows per slot, X bans, K top
log-probabilities, L token ids whose log-probabilities are requested, C candidates, W fan-out.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from ...sharding import struct
from ...sharding.device_axes import UNSPLIT, Axis
from ...sharding.struct import Leaf
from ..implementations import choose
from ..native.blank import blank

# Tried in order; one that does not support a case raises NotImplementedError with its reasons.
IMPLEMENTATIONS = {"native": ".cpu", "branchless": ".branchless", "xla": ".xla"}
MAX_LOGPROBS = 20
MAX_BANS = 64
MAX_WANTED = 128
# Reported in place of a token:
BROKEN = -1  # the raw logits are NaN, +inf or all -inf
BANNED = -2  # no token is allowed


class SlotState(struct.PyTreeNode):
    """State of sampling on the device between steps, with a slot for each running sequence."""

    bias_BJV: Leaf  # float32, added to the logits; -inf where a token is not allowed
    stop_BV: Leaf  # bool, the tokens that end the request
    output_counts_BV: Leaf  # int32, how often each token was generated
    prompt_BV: Leaf  # bool, the tokens that occur in the prompt
    # int32, tokens whose log-probabilities are requested; entries after them are undefined
    logprob_token_ids_BL: Leaf


class SamplingInputs(struct.PyTreeNode):
    """The sampling parameters of each row."""

    slots_R: Leaf  # int32, the slot in SlotState
    bias_rows_R: Leaf  # int32, the index among the slot's biases
    drafted_RJ: Leaf  # int32, the drafts before this row, counted by the penalties; -1 = none
    positions_R: Leaf  # int32, position of the sampled token, from 0
    seeds_R2: Leaf  # uint32
    temperature_R: Leaf  # float32, 0 = greedy
    top_k_R: Leaf  # int32, 0 or less = off
    top_p_R: Leaf  # float32, 1 = off
    min_p_R: Leaf  # float32, 0 = off
    repetition_penalty_R: Leaf  # float32, 1 = off
    presence_penalty_R: Leaf  # float32, 0 = off
    frequency_penalty_R: Leaf  # float32, 0 = off
    ban_stop_R: Leaf  # bool, ban the slot's stop tokens (min_tokens is not reached)
    ban_RX: Leaf  # int32 token ids, -1 = none
    targets_R: Leaf  # int32, a given token to score; -1 = sample a token
    biased_R: Leaf  # bool, whether the slot has a nonzero bias
    wants_logprobs_R: Leaf  # bool


class Sampled(struct.PyTreeNode):
    """The sampled tokens and log-probabilities.

    Log-probabilities are zero if a row does not return them or has no token. With
    `temperature_only` they and the ranks may be None.
    """

    tokens_R: Leaf  # int32; `BROKEN` or `BANNED` if there is no token
    logprobs_R: Leaf  # float32, log-softmax of the logits before any processing
    ranks_R: Leaf  # int32, 1 = best; tokens that tie share the better rank
    top_ids_RK: Leaf  # int32, the most likely tokens; K = min(listed, V)
    top_logprobs_RK: Leaf  # float32
    token_id_logprobs_RL: Leaf  # float32, for the slot's logprob_token_ids
    ok_R: Leaf  # bool, whether there is a token
    drafts_BK: Leaf = None  # int32, the next draft tokens of each sequence, with a drafter


def sample(
    logits_RV: Array,
    state: SlotState,
    inputs: SamplingInputs,
    temperature_only: bool = False,
    axis: Axis = UNSPLIT,
    listed: int = MAX_LOGPROBS,
    implementation: str | None = None,
) -> Sampled:
    """Sample a token, or score a given one, for each row.

    Args:
        logits_RV: the logits. If the vocabulary is split over `axis`, each device has the logits
            and the state of its own tokens.
        state: the state of the slots.
        inputs: the sampling parameters of the rows.
        temperature_only: promises that no row uses parameters other than temperature and min-p, or
            returns log-probabilities. The tokens are the same, with less work.
        axis: the devices that the vocabulary is split over.
        listed: the number of top log-probabilities, K.
        implementation: the name in IMPLEMENTATIONS of the only one to try.
    """
    arguments = logits_RV, state, inputs, temperature_only, axis, listed
    return choose(
        IMPLEMENTATIONS, __name__, lambda module: module.sample(*arguments), implementation
    )


def empty_state(num_slots: int, vocab: int, num_rows: int = 1) -> SlotState:
    """The initial state; `num_rows` is the largest number of rows of a slot in a step."""
    return SlotState(
        bias_BJV=blank((num_slots, num_rows, vocab)),
        stop_BV=blank((num_slots, vocab), bool),
        output_counts_BV=blank((num_slots, vocab), jnp.int32),
        prompt_BV=blank((num_slots, vocab), bool),
        logprob_token_ids_BL=blank((num_slots, MAX_WANTED), jnp.int32),
    )


def replace_row(state: SlotState, slot: Array, row: SlotState) -> SlotState:
    """Replace the state of a slot by `row`, whose arrays have no B and J axes."""
    return SlotState(
        set_bias(state.bias_BJV, slot, 0, row.bias_BJV),
        *(
            field_BV.at[slot].set(new_row_V)
            for field_BV, new_row_V in zip(
                jax.tree.leaves(state)[1:], jax.tree.leaves(row)[1:], strict=True
            )
        ),
    )


def set_bias(bias_BJV: Array, slot: Array, bias_row: Array | int, bias_V: Array) -> Array:
    """Replace one of a slot's biases."""
    return bias_BJV.at[slot, bias_row].set(bias_V)


def accepted_drafts(sampled: Sampled, drafts_R: Array, depths_R: Array) -> Array:
    """Whether each draft is accepted: it and all drafts before it equal the sampled tokens.

        row          0       1       2       3            drafts      a  b  c
        draft        a       b       c       -
        sampled      a       b       x                    accepted    a  b, and x is the next token

    Args:
        sampled: the tokens sampled at all rows.
        drafts_R: the draft that a row's sampled token is compared with; -1: none.
        depths_R: the number of drafts before the row. The rows of a sequence are adjacent.
    """
    R = drafts_R.shape[0]
    is_mismatch_R = (sampled.tokens_R != drafts_R) | ~sampled.ok_R
    mismatches_R = jnp.cumsum(is_mismatch_R)
    mismatches_before_R = mismatches_R - is_mismatch_R
    return mismatches_R == mismatches_before_R[jnp.maximum(jnp.arange(R) - depths_R, 0)]


def count_tokens(
    state: SlotState,
    slots_T: Array,
    tokens_T: Array,
    is_prompt_T: Array,
    tracked_T: Array,
    axis: Axis = UNSPLIT,
) -> SlotState:
    """Mark the prompt tokens and count the output tokens of rows in `tracked_T`, for penalties."""
    B, V = state.prompt_BV.shape
    if axis.size > 1:
        tokens_T = local_token_ids(tokens_T, V, axis)
    prompt_T = jnp.where(tracked_T & is_prompt_T, slots_T, B)  # slot B does not exist: dropped
    output_T = jnp.where(tracked_T & ~is_prompt_T, slots_T, B)
    return replace(
        state,
        prompt_BV=state.prompt_BV.at[prompt_T, tokens_T].set(True, mode="drop"),
        output_counts_BV=state.output_counts_BV.at[output_T, tokens_T].add(1, mode="drop"),
    )


def samples_next_token(accepted_R: Array, depths_R: Array) -> Array:
    """The rows whose sampled token is the sequence's next one: all drafts before them are accepted,
    and their own draft is not.
    """
    is_reached_R = (depths_R == 0) | jnp.pad(accepted_R[:-1], (1, 0))
    return is_reached_R & ~accepted_R


def count_accepted(
    state: SlotState,
    inputs: SamplingInputs,
    drafts_R: Array,
    accepted_R: Array,
    axis: Axis = UNSPLIT,
) -> SlotState:
    """Count the accepted drafts of slots that have penalties."""
    return count_tokens(
        state,
        inputs.slots_R,
        drafts_R,
        jnp.zeros_like(accepted_R),
        accepted_R & has_penalties(inputs),
        axis,
    )


def has_penalties(inputs: SamplingInputs) -> Array:
    """Whether each row's logits depend on the previous tokens."""
    return (
        (inputs.presence_penalty_R != 0)
        | (inputs.frequency_penalty_R != 0)
        | (inputs.repetition_penalty_R != 1)
    )


def local_token_ids(tokens, V: int, axis: Axis):
    """The indices of tokens among the V tokens of this device; V for tokens of other devices."""
    local_ids = tokens - axis.index() * V
    return jnp.where((local_ids >= 0) & (local_ids < V), local_ids, V)
