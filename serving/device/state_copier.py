"""Copies what layers keep of a sequence from its slot to a page, and from a page to a slot."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import jax
import numpy as np

from .state import State
from .step import load_states, save_states

AT_ONCE = 8  # copies a call


class StateCopier:
    """Has a compiled program for each of the two."""

    def __init__(self, max_seqs: int):
        self.max_seqs = max_seqs
        self.programs: dict[str, Any] = {}

    def lower(self, state: State) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """The programs, to be compiled; none where there are no snapshots."""
        if state.snapshots:
            numbers = np.zeros(AT_ONCE, np.int32)
            yield "save", save_states.lower(state.snapshots, state.kept, numbers, numbers)
            yield "load", load_states.lower(state.kept, state.snapshots, numbers, numbers, numbers)

    def move(self, state: State, saves: Seq[tuple[int, int]], loads: Seq[tuple[int, int, int]]) -> State:
        """The state after (slot, page) and then (page, slot, tokens) were copied."""
        for slots, pages in self.columns(saves, (0, 0)):  # the rest goes to page 0, which nobody reads
            state = state.replace(snapshots=self.programs["save"](state.snapshots, state.kept, slots, pages))
        for pages, slots, lengths in self.columns(loads, (0, self.max_seqs, 0)):
            state = state.replace(kept=self.programs["load"](state.kept, state.snapshots, pages, slots, lengths))
        return state

    def columns(self, rows: Seq[tuple[int, ...]], rest: tuple[int, ...]) -> Iterator[np.ndarray]:
        for start in range(0, len(rows), AT_ONCE):
            some = rows[start : start + AT_ONCE]
            yield np.array([*some, *[rest] * (AT_ONCE - len(some))], np.int32).T.copy()
