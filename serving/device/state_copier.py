"""Copies recurrent states between slots and snapshot pages."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from .pipeline import Pipeline
from .programs import Call
from .state import State
from .updates import load_states, save_states

AT_ONCE = 8  # copies a call


class StateCopier:
    """Two compiled programs, to save and to load, for each stage with recurrent layers."""

    def __init__(self, pipeline: Pipeline, max_seqs: int, num_pages: int, replicas: int = 1):
        self.max_seqs = max_seqs
        self.num_pages = num_pages
        self.replicas = replicas
        self.stages = [stage_layers for stage_layers in pipeline.state_layers() if stage_layers]
        self.programs: dict[tuple[str, int], Any] = {}

    def calls(self, state: State) -> Iterator[tuple[tuple[str, int], Call]]:
        """The programs to compile; none without snapshots."""
        if state.snapshots:
            numbers = np.zeros(AT_ONCE, np.int32)
            for stage, stage_layers in enumerate(self.stages):
                recurrent, snapshots = (
                    {index: snapshots[index] for index in stage_layers}
                    for snapshots in (state.recurrent, state.snapshots)
                )
                yield ("save", stage), Call(save_states, (snapshots, recurrent, numbers, numbers))
                yield (
                    ("load", stage),
                    Call(load_states, (recurrent, snapshots, numbers, numbers, numbers)),
                )

    def move(
        self, state: State, saves: Seq[tuple[int, int, int]], loads: Seq[tuple[int, int, int, int]]
    ) -> State:
        """Save (replica, slot, page), then load (replica, page, slot, tokens); returns the state.

        The device numbers slots and pages over all replicas.
        """
        recurrent = dict(state.recurrent)
        snapshots = dict(state.snapshots)
        writes = [
            (replica * self.max_seqs + slot, replica * self.num_pages + page)
            for replica, slot, page in saves
        ]
        reads = [
            (replica * self.num_pages + page, replica * self.max_seqs + slot, tokens)
            for replica, page, slot, tokens in loads
        ]
        for stage, stage_layers in enumerate(self.stages):
            # the rest goes to page 0, which nobody reads
            for slots, pages in columns(writes, (0, 0)):
                chunk = (
                    {index: held[index] for index in stage_layers}
                    for held in (snapshots, recurrent)
                )
                snapshots |= self.programs["save", stage](*chunk, slots, pages)
            for pages, slots, lengths in columns(reads, (0, self.replicas * self.max_seqs, 0)):
                chunk = (
                    {index: held[index] for index in stage_layers}
                    for held in (recurrent, snapshots)
                )
                recurrent |= self.programs["load", stage](*chunk, pages, slots, lengths)
        return state.replace(recurrent=recurrent, snapshots=snapshots)


def columns(rows: Seq[tuple[int, ...]], padding: tuple[int, ...]) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), AT_ONCE):
        chunk = rows[start : start + AT_ONCE]
        yield np.array([*chunk, *[padding] * (AT_ONCE - len(chunk))], np.int32).T.copy()
