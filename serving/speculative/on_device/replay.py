"""Rows of a sequence's last step that are computed again before its own: the drafts that were
right.

What a layer keeps cannot be taken back, so a step leaves it as it is before the first draft, and
beside it what the drafts' rows brought. The next step begins with those of them that were right: by
a recurrence, so to the same bits.

    last step     [ known ][ draft draft draft ]          kept here ^ before the drafts, with the
    rows of all three this step              [ draft draft ][ known ][ draft draft draft ]
    two were right, and come again
"""

from typing import Any

import jax
import jax.numpy as jnp

from ....ops.state_rows import StateRows, sequence_for_row
from ....sharding import struct
from ...device.batch import Batch


class Replay(struct.PyTreeNode):
    """Letters beside the package's: U rows with those that are computed again, J drafts that a
    sequence may have.
    """

    rows: StateRows  # of U rows
    ends_B: Any  # positions that the states hold after this step
    again_U: Any  # bool: a row of the last step,
    slot_U: Any  # of this slot,
    place_U: Any  # and so many after the first; of others the row of this step
    at_T: Any  # where this step's rows are among all
    drafts_B: Any  # the first of each sequence's rows whose state is not kept

    @classmethod
    def of(cls, batch: Batch, positions_T, lengths_B, max_drafts: int) -> "Replay":
        """Which draft tokens of the last step each sequence recomputes; `lengths_B` are the
        positions that the slots' states cover.
        """
        step_rows = StateRows.of(batch.starts_B1, positions_T, batch.owners_T, lengths_B.shape[0])
        T = positions_T.shape[0]
        B = step_rows.slots_B.shape[0]
        counts_B = step_rows.num_kept_B
        seq_R = sequence_for_row(batch.starts_B1, batch.sample_rows_R)
        drafts_B = jnp.zeros(B, jnp.int32).at[seq_R].max(batch.depths_R, mode="drop")
        first_B = positions_T[jnp.minimum(batch.starts_B1[:-1], T - 1)]
        state_length_B = lengths_B[jnp.minimum(step_rows.slots_B, lengths_B.shape[0] - 1)]
        num_replayed_B = jnp.where(
            (counts_B > 0) & ~step_rows.is_first_step_B,
            jnp.clip(first_B - state_length_B, 0, max_drafts),
            0,
        )
        starts_B1 = batch.starts_B1 + jnp.concatenate(
            [jnp.zeros(1, jnp.int32), jnp.cumsum(num_replayed_B)]
        )
        rows = StateRows(
            starts_B1,
            step_rows.slots_B,
            step_rows.is_first_step_B,
            num_replayed_B + counts_B - drafts_B,
        )
        seq_U, place_U = rows.sequences(T + B * max_drafts)
        again_U = place_U < num_replayed_B[seq_U]
        row_U = batch.starts_B1[seq_U] + place_U - num_replayed_B[seq_U]
        seq_T, place_T = step_rows.sequences(T)
        return cls(
            rows,
            first_B + counts_B - drafts_B,
            again_U,
            jnp.minimum(step_rows.slots_B[seq_U], lengths_B.shape[0] - 1),
            jnp.where(again_U, jnp.minimum(place_U, max_drafts - 1), jnp.clip(row_U, 0, T - 1)),
            starts_B1[seq_T] + num_replayed_B[seq_T] + place_T,
            batch.starts_B1[:-1] + counts_B - drafts_B,
        )

    def whole(self, x_TX, draft_rows_BJX):
        """The inputs of replayed and new tokens, sequence by sequence."""
        J = draft_rows_BJX.shape[1]
        old_UX = draft_rows_BJX[self.slot_U, jnp.minimum(self.place_U, J - 1)].astype(x_TX.dtype)
        new_UX = x_TX[jnp.minimum(self.place_U, x_TX.shape[0] - 1)]
        return jnp.where(self.again_U.reshape(-1, *[1] * (x_TX.ndim - 1)), old_UX, new_UX)

    def keep(self, x_TX, draft_rows_BJX):
        """Store the inputs of this step's draft tokens."""
        row_BJ = self.drafts_B[:, None] + jnp.arange(draft_rows_BJX.shape[1])
        new_BJX = x_TX[jnp.minimum(row_BJ, x_TX.shape[0] - 1)].astype(draft_rows_BJX.dtype)
        return draft_rows_BJX.at[self.rows.slots_B].set(new_BJX, mode="drop")

    def recur(self, index: int, inputs, run, state):
        """`LayerHooks.recur` of a step with draft tokens."""
        layer_state = state.recurrent[index]
        out_UX, new_state = run(
            jax.tree.map(self.whole, inputs, layer_state["drafted"]), layer_state, self.rows
        )
        updated = {
            **layer_state,
            **new_state,
            "drafted": jax.tree.map(self.keep, inputs, layer_state["drafted"]),
        }
        if "length" in layer_state:
            updated["length"] = (
                layer_state["length"].at[self.rows.slots_B].set(self.ends_B, mode="drop")
            )
        return out_UX[self.at_T], state.replace(recurrent={**state.recurrent, index: updated})
