"""Pages that one engine has computed, for another that goes on from there; each side in its engine's thread."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...model.config import ModelError
from ..cache.host_cache import HostCache
from ..cache.page_table import PageTable
from ..cache.prefix_tree import Node, SentPage
from ..device.page_copier import parts
from ..engine.engine import Engine


@dataclass(frozen=True)
class Handover:
    """A prompt's full pages. Of each cache group those that are still seen after the last of them."""

    identity: bytes  # of all that their bytes depend on beside the tokens
    salt: str | None
    tokens: list[int]  # that they hold
    groups: list[list[tuple[Any, int]]]  # blocks of pages, on a device or on the host, and how many rows are pages

    def moved(self, move: Callable[[int, Any], Any]) -> "Handover":
        """With `move(group, block)` in place of each block."""
        return replace(
            self, groups=[[(move(group, block), n) for block, n in own] for group, own in enumerate(self.groups)]
        )

    def on_host(self) -> "Handover":
        """In the host's memory, to be sent anywhere."""
        return self.moved(lambda group, block: np.asarray(block))


def known(engine: Engine, tokens: Seq[int], salt: str | None) -> tuple[PageTable, list[Node]]:
    """The computed pages of a prompt's prefix, without the last token, and the page table that has most of them."""
    paths = [(table, table.prefix(salt, tokens, len(tokens) - 1)) for table in engine.tables]
    return max(paths, key=lambda pair: len(pair[1]))


def lacking(engine: Engine, tokens: Seq[int], salt: str | None) -> int:
    """How many tokens of a prompt an engine would have to compute now."""
    pages, path = known(engine, tokens, salt)
    return len(tokens) - len(path) * pages.page_size


def give(engine: Engine, tokens: Seq[int], salt: str | None) -> Handover:
    """What the engine has of a prompt; nothing waits for the device that is still at it."""
    pages, path = known(engine, tokens, salt)
    length = len(path) * pages.page_size
    groups = []
    for index, first in enumerate(pages.first_wanted(len(path))):
        some_at_once = parts(path[first:], engine.runner.page_copier.at_once[index])
        groups.append([(block_of(engine, pages, index, some), len(some)) for some in some_at_once])
    return Handover(host_cache_of(pages).identity, salt, list(tokens[:length]), groups)


def block_of(engine: Engine, pages: PageTable, group: int, nodes: Seq[Node]) -> Any:
    """The pages of these nodes, read on the device; of those that only the host has, from there."""
    numbers = [pages.device_page(node, group) for node in nodes]
    block_NX = engine.runner.read_pages(group, numbers)
    if all(numbers):
        return block_NX
    block_NX = np.array(block_NX)
    for row, number, node in zip(block_NX, numbers, nodes, strict=False):
        if not number:
            row[:] = np.frombuffer(node.copies[group].content, np.uint8)
    return block_NX


def take(engine: Engine, handover: Handover) -> None:
    """Keep the pages where those are that the device had no room for: whoever asks for the prompt finds them.

    Of several replicas the one with the most room for them gets them.
    """
    pages = max(engine.tables, key=lambda table: sum(pool.free for pool in table.pools))
    check_alike(handover.identity, host_cache_of(pages).identity)
    count = len(handover.tokens) // pages.page_size
    sent = [
        (number, group, data)
        for group, blocks in enumerate(handover.groups)
        for number, data in numbered(blocks, count)
    ]
    pages.add_missing(handover.salt, handover.tokens, sent)


def numbered(blocks: Seq[tuple[Any, int]], count: int) -> Iterator[tuple[int, Any]]:
    """Each page with its number; the last one is the last of the tokens'."""
    number = count - sum(rows for _, rows in blocks)
    for block_NX, rows in blocks:
        for at in range(rows):
            host = isinstance(block_NX, np.ndarray)
            yield number, block_NX[at].copy() if host else SentPage(block_NX, at)  # a view would keep all of them
            number += 1


def host_cache_of(pages: PageTable) -> HostCache:
    if pages.host_cache is None:
        raise ModelError("kv_cache_host_bytes is 0; an engine that hands pages over, or takes them, needs some")
    return pages.host_cache


def check_alike(one: bytes, other: bytes) -> None:
    """Pages of another kind would be read as what they are not."""
    if one != other:
        raise ModelError(
            "the engines that read and that write differ in the model, in block_size, kv_cache_dtype, quantization or "
            "the number of devices, or in the kind of device: start both with the same options on the same machines"
        )
