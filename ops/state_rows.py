"""The tokens of a step by sequence, for layers that keep a recurrent state for each sequence."""

from typing import Any

import jax.numpy as jnp

from ..sharding import struct


def sequence_for_row(starts_B1, token_N):
    """The index of each token's sequence; the number of sequences for padding tokens."""
    return (starts_B1[None, 1:] <= token_N[:, None]).sum(axis=1, dtype=jnp.int32)


class StateRows(struct.PyTreeNode):
    """The sequences of a step: their tokens and the slots of their recurrent states.

    States are arrays whose first axis is the slot; a sequence continues from the state in its slot.
    """

    starts_B1: Any  # sequence b has tokens starts[b] to starts[b + 1]; padding tokens come last
    slots_B: Any  # the number of slots where there is no sequence
    is_first_step_B: Any  # bool: the sequence begins here; its slot holds another one's state
    # The state after this many of the sequence's tokens is stored. Later tokens may be rejected
    # drafts.
    num_kept_B: Any

    @classmethod
    def of(cls, starts_B1, positions_T, slots_T, num_slots: int) -> "StateRows":
        """The sequences of a step all of whose tokens are kept.

        Args:
            starts_B1: see the field.
            positions_T: the position of each token in its sequence.
            slots_T: the slot of each token's sequence.
            num_slots: the number of slots.
        """
        counts_B = starts_B1[1:] - starts_B1[:-1]
        first_row_B = jnp.minimum(starts_B1[:-1], positions_T.shape[0] - 1)
        slots_B = jnp.where(counts_B > 0, slots_T[first_row_B], num_slots)
        return cls(starts_B1, slots_B, (positions_T[first_row_B] == 0) & (counts_B > 0), counts_B)

    def states(self, state_slots):
        """The states before this step, by sequence; zeros for sequences that begin in it."""
        states = state_slots[jnp.minimum(self.slots_B, state_slots.shape[0] - 1)]
        return jnp.where(self.is_first_step_B.reshape(-1, *[1] * (state_slots.ndim - 1)), 0, states)

    def sequences(self, T: int):
        """(the index of each token's sequence, the token's index among that sequence's tokens)."""
        token_T = jnp.arange(T)
        last_sequence = self.slots_B.shape[0] - 1
        seq_T = jnp.minimum(sequence_for_row(self.starts_B1, token_T), last_sequence)
        return seq_T, token_T - self.starts_B1[seq_T]
