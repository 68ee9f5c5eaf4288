"""Copies KV pages within the device, and between device and host memory."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..cache.page_moves import PageMoves
from ..cache.prefix_tree import HostCopy, SentPage
from .pipeline import Pipeline
from .programs import Call
from .state import stored_page_bytes
from .updates import copy_pages, read_pages, write_pages

AT_ONCE = 16  # pages a call; the dummy page fills the rest

# by layer: `KVPages`, or the arrays of a snapshot; whatever it is, a page of it is a row of bytes
Held = Any


@dataclass(frozen=True)
class Offload:
    """Pages that are being copied to host memory, by pipeline stage."""

    stages: list[jax.Array]  # [N, bytes of a page]
    copies: list[HostCopy]

    def arrive(self) -> None:
        """Wait for the pages and store their bytes in the host copies."""
        rows = zip(*map(np.asarray, self.stages), strict=True)
        for copy, page_parts in zip(self.copies, rows, strict=False):
            copy.data = np.concatenate(page_parts)  # no view: the others' bytes go when theirs do


class PageCopier:
    """One compiled program for each kind of copy, cache group and stage."""

    def __init__(self, pipeline: Pipeline, to_host: bool, groups: int):
        self.to_host, windows = to_host, len(pipeline.config.windows)
        owners_by_group = [pipeline.page_owners(group) for group in range(groups)]
        # a snapshot is large
        self.at_once = [AT_ONCE if group < windows else 1 for group in range(groups)]
        self.owners = [
            [stage_layers for stage_layers in layers if stage_layers] for layers in owners_by_group
        ]  # by group, by stage
        self.programs: dict[tuple[str, int, int], Any] = {}

    def calls(self, pages: dict[int, Held]) -> Iterator[tuple[tuple[str, int, int], Call]]:
        """The programs to compile."""
        for group, stages in enumerate(self.owners):
            numbers = self.numbers_of(group, [])
            for stage, stage_layers in enumerate(stages):
                layers = [pages[index] for index in stage_layers]
                yield ("copy", group, stage), Call(copy_pages, (layers, numbers, numbers))
                if self.to_host:
                    bytes_NX = np.zeros((len(numbers), stored_page_bytes(layers)), np.uint8)
                    yield ("offload", group, stage), Call(read_pages, (layers, numbers))
                    yield ("restore", group, stage), Call(write_pages, (layers, numbers, bytes_NX))

    def move(
        self, pages: dict[int, Held], moves: PageMoves
    ) -> tuple[dict[int, Held], list[Offload]]:
        """Start the copies; returns the pages and what is being copied to host memory."""
        offloads = []
        for group, stages in enumerate(self.owners):
            layers = [[pages[index] for index in stage_layers] for stage_layers in stages]
            at_once = self.at_once[group]

            def run(kind: str, *operands, group=group, layers=layers) -> list[Any]:
                """In each stage: its program, its layers, and what is given for all, or for
                each.
                """
                return [
                    self.programs[kind, group, stage](
                        stage_arrays, *(x[stage] if isinstance(x, list) else x for x in operands)
                    )
                    for stage, stage_arrays in enumerate(layers)
                ]

            for chunk in parts(
                [(page, copy) for page, copy in moves.offloads if copy.group == group], at_once
            ):
                read = run("offload", self.numbers_of(group, [page for page, _ in chunk]))
                for bytes_NX in read:
                    bytes_NX.copy_to_host_async()
                offloads.append(Offload(read, [copy for _, copy in chunk]))
            for chunk in parts([move[1:] for move in moves.copies if move[0] == group], at_once):
                origins, targets = (
                    self.numbers_of(group, pages) for pages in zip(*chunk, strict=True)
                )
                layers[:] = run("copy", origins, targets)
            restores = [
                (page, copy)
                for (stage_layers, page), copy in moves.restores.items()
                if stage_layers == group
            ]
            on_host = [
                (page, copy) for page, copy in restores if not isinstance(copy.data, SentPage)
            ]
            for chunk in parts(on_host, at_once):
                stage_ends = np.cumsum([stored_page_bytes(stage_layers) for stage_layers in layers])
                bytes_NX = np.zeros((at_once, stage_ends[-1]), np.uint8)
                for row, (_, copy) in zip(bytes_NX, chunk, strict=False):
                    row[:] = np.frombuffer(copy.content, np.uint8)
                targets = self.numbers_of(group, [page for page, _ in chunk])
                layers[:] = run("restore", targets, np.split(bytes_NX, stage_ends[:-1], axis=1))
            sent = [(page, copy.data) for page, copy in restores if isinstance(copy.data, SentPage)]
            for block_NX, targets in blocks(sent):
                layers[:] = run("restore", targets, block_NX)
            for stage_layers, stage_arrays in zip(stages, layers, strict=True):
                pages = {**pages, **dict(zip(stage_layers, stage_arrays, strict=True))}
        return pages, offloads

    def numbers_of(self, group: int, pages: Seq[int]) -> np.ndarray:
        return np.array([*pages, *[0] * (self.at_once[group] - len(pages))], np.int32)

    def read(self, pages: dict[int, Held], group: int, numbers: Seq[int]) -> Any:
        """Read up to `at_once` pages, a row of bytes each; with several stages, on the host."""
        read = [
            self.programs["offload", group, stage](
                [pages[index] for index in stage_layers], self.numbers_of(group, numbers)
            )
            for stage, stage_layers in enumerate(self.owners[group])
        ]
        return (
            read[0]
            if len(read) == 1
            else np.concatenate([np.asarray(bytes_NX) for bytes_NX in read], axis=1)
        )

    def place(self, group: int, block_NX: Any) -> Any:
        """Put rows of another engine where this engine's devices can copy them into pages."""
        if len(self.owners[group]) > 1:
            return np.asarray(block_NX)
        (_, _, sharding), _ = self.programs["restore", group, 0].input_shardings
        return jax.device_put(block_NX, sharding)


def parts(moves: Seq[Any], at_once: int) -> Iterator[Seq[Any]]:
    return (moves[start : start + at_once] for start in range(0, len(moves), at_once))


def blocks(rows: Seq[tuple[int, SentPage]]) -> Iterator[tuple[Any, np.ndarray]]:
    """(block on the device, target page of each of its rows); unused rows go to the dummy page."""
    targets_by_block: dict[int, tuple[Any, np.ndarray]] = {}
    for page, row in rows:
        _, targets = targets_by_block.setdefault(
            id(row.block_NX), (row.block_NX, np.zeros(len(row.block_NX), np.int32))
        )
        targets[row.row] = page
    return iter(targets_by_block.values())
