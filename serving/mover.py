"""Copies pages within the device, and between it and the host."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..model.config import ModelConfig
from ..ops.attention import KVPages
from .moves import Moves
from .prefix import Copy
from .step import copy_pages, page_bytes, read_pages, write_pages

AT_ONCE = 16  # pages a call; where there are fewer, the dummy page fills up


@dataclass(frozen=True)
class Leaving:
    """Pages under way to the host."""

    bytes_NX: jax.Array
    copies: list[Copy]

    def arrive(self) -> None:
        """Wait for them, and give each copy its own."""
        for copy, row in zip(self.copies, np.asarray(self.bytes_NX), strict=False):
            copy.data = row.copy()  # the others' bytes go when theirs do


class Mover:
    """The programs that copy pages of each cache group, compiled before the first request."""

    def __init__(self, config: ModelConfig, page_size: int, to_host: bool):
        groups = range(len(config.windows))
        self.owners = [[index for index in config.kv_layers if config.group(index) == group] for group in groups]
        self.page_bytes = [page_bytes(config, group, page_size) for group in groups]
        self.to_host = to_host
        self.programs: dict[tuple[str, int], Any] = {}

    def lower(self, pages: dict[int, KVPages]) -> Iterator[tuple[tuple[str, int], jax.stages.Lowered]]:
        """What is to be compiled."""
        numbers = np.zeros(AT_ONCE, np.int32)
        for group, owners in enumerate(self.owners):
            layers = [pages[index] for index in owners]
            yield ("within", group), copy_pages.lower(layers, numbers, numbers)
            if self.to_host:
                bytes_NX = np.zeros((AT_ONCE, self.page_bytes[group]), np.uint8)
                yield ("out", group), read_pages.lower(layers, numbers)
                yield ("back", group), write_pages.lower(layers, numbers, bytes_NX)

    def move(self, pages: dict[int, KVPages], moves: Moves) -> tuple[dict[int, KVPages], list[Leaving]]:
        """(the pages, what is under way to the host)."""
        leaving = []
        for group, owners in enumerate(self.owners):
            layers = [pages[index] for index in owners]
            for some in parts([(page, copy) for page, copy in moves.out if copy.group == group]):
                bytes_NX = self.programs["out", group](layers, numbers_of([page for page, _ in some]))
                bytes_NX.copy_to_host_async()
                leaving.append(Leaving(bytes_NX, [copy for _, copy in some]))
            for some in parts([move[1:] for move in moves.within if move[0] == group]):
                origins, targets = (numbers_of(pages) for pages in zip(*some, strict=True))
                layers = self.programs["within", group](layers, origins, targets)
            for some in parts([(page, copy) for (own, page), copy in moves.back.items() if own == group]):
                bytes_NX = np.zeros((AT_ONCE, self.page_bytes[group]), np.uint8)
                for row, (_, copy) in zip(bytes_NX, some, strict=False):
                    row[:] = np.frombuffer(copy.data, np.uint8)
                layers = self.programs["back", group](layers, numbers_of([page for page, _ in some]), bytes_NX)
            pages = {**pages, **dict(zip(owners, layers, strict=True))}
        return pages, leaving


def parts(moves: Seq[Any]) -> Iterator[Seq[Any]]:
    return (moves[start : start + AT_ONCE] for start in range(0, len(moves), AT_ONCE))


def numbers_of(pages: Seq[int]) -> np.ndarray:
    return np.array([*pages, *[0] * (AT_ONCE - len(pages))], np.int32)
