"""Which rows of a step belong to which sequence, where a layer keeps a state of fixed size for
each.
"""

from typing import Any

import jax.numpy as jnp

from ..sharding import struct


def sequence_of(starts_B1, row_N):
    """The sequence of each of these rows; one past the last of padding."""
    return (starts_B1[None, 1:] <= row_N[:, None]).sum(axis=1, dtype=jnp.int32)


@struct.dataclass
class StateRows:
    """States are arrays whose first axis counts slots; a sequence goes on from what its slot
    holds.
    """

    # sequence b has the rows starts[b] .. starts[b + 1]; padding rows come after the last
    starts_B1: Any
    slots_B: Any  # one past the last where there is no sequence
    # bool: its first row here is its first of all, and what the slot holds is another's
    begins_B: Any
    # after so many of its rows the state is kept; those after them may be computed in vain
    kept_B: Any

    @classmethod
    def of(cls, starts_B1, positions_T, owners_T, num_slots: int) -> "StateRows":
        """Where all rows count: `owners_T` is the slot of each row's sequence."""
        counts_B = starts_B1[1:] - starts_B1[:-1]
        first_B = jnp.minimum(starts_B1[:-1], positions_T.shape[0] - 1)
        slots_B = jnp.where(counts_B > 0, owners_T[first_B], num_slots)
        return cls(starts_B1, slots_B, (positions_T[first_B] == 0) & (counts_B > 0), counts_B)

    def states(self, held):
        """The states that the sequences go on from, by sequence."""
        found = held[jnp.minimum(self.slots_B, held.shape[0] - 1)]
        return jnp.where(self.begins_B.reshape(-1, *[1] * (held.ndim - 1)), 0, found)

    def sequences(self, T: int):
        """(the sequence of each row, its place among that one's rows)."""
        row_T = jnp.arange(T)
        last = self.slots_B.shape[0] - 1
        seq_T = jnp.minimum(sequence_of(self.starts_B1, row_T), last)
        return seq_T, row_T - self.starts_B1[seq_T]
