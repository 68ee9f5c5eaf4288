"""Copies what layers keep of a sequence from its slot to a page, and from a page to a slot."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from .pipeline import Pipeline
from .programs import Call
from .state import State
from .step import load_states, save_states

AT_ONCE = 8  # copies a call


class StateCopier:
    """Has a compiled program for each of the two, of each stage with such layers."""

    def __init__(self, pipeline: Pipeline, max_seqs: int, num_pages: int, replicas: int = 1):
        self.max_seqs = max_seqs
        self.num_pages = num_pages
        self.replicas = replicas
        self.stages = [own for own in pipeline.state_layers() if own]
        self.programs: dict[tuple[str, int], Any] = {}

    def calls(self, state: State) -> Iterator[tuple[tuple[str, int], Call]]:
        """The programs to be made; none where there are no snapshots."""
        if state.snapshots:
            numbers = np.zeros(AT_ONCE, np.int32)
            for stage, own in enumerate(self.stages):
                kept, snapshots = (
                    {index: held[index] for index in own} for held in (state.kept, state.snapshots)
                )
                yield ("save", stage), Call(save_states, (snapshots, kept, numbers, numbers))
                yield (
                    ("load", stage),
                    Call(load_states, (kept, snapshots, numbers, numbers, numbers)),
                )

    def move(
        self, state: State, saves: Seq[tuple[int, int, int]], loads: Seq[tuple[int, int, int, int]]
    ) -> State:
        """The state after (replica, slot, page) and then (replica, page, slot, tokens) were copied.

        The device has the slots and pages of all replicas, one replica after the other.
        """
        kept = dict(state.kept)
        snapshots = dict(state.snapshots)
        writes = [
            (replica * self.max_seqs + slot, replica * self.num_pages + page)
            for replica, slot, page in saves
        ]
        reads = [
            (replica * self.num_pages + page, replica * self.max_seqs + slot, tokens)
            for replica, page, slot, tokens in loads
        ]
        for stage, own in enumerate(self.stages):
            # the rest goes to page 0, which nobody reads
            for slots, pages in columns(writes, (0, 0)):
                some = ({index: held[index] for index in own} for held in (snapshots, kept))
                snapshots |= self.programs["save", stage](*some, slots, pages)
            for pages, slots, lengths in columns(reads, (0, self.replicas * self.max_seqs, 0)):
                some = ({index: held[index] for index in own} for held in (kept, snapshots))
                kept |= self.programs["load", stage](*some, pages, slots, lengths)
        return state.replace(kept=kept, snapshots=snapshots)


def columns(rows: Seq[tuple[int, ...]], rest: tuple[int, ...]) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        yield np.array([*some, *[rest] * (AT_ONCE - len(some))], np.int32).T.copy()
