"""Pages that one engine has computed, for another that goes on from there; each side in its engine's thread."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...model.config import ModelError
from ..cache.host_cache import Tiers
from ..cache.page_table import PageTable
from ..cache.prefetch import attach, keys
from ..cache.prefix_tree import Node, Row
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
    """The pages of a prompt's beginning that an engine can give or use, but for the last token's; and who has them."""

    def path(pages: PageTable) -> list[Node]:
        found = pages.tree.walk(salt, keys(tokens, (len(tokens) - 1) // pages.page_size, pages.page_size))
        return pages.unbroken(list(found), Node.holds)

    return max(((pages, path(pages)) for pages in engine.pages.tables), key=lambda pair: len(pair[1]))


def lacking(engine: Engine, tokens: Seq[int], salt: str | None) -> int:
    """How many tokens of a prompt an engine would have to compute now."""
    pages, path = known(engine, tokens, salt)
    return len(tokens) - len(path) * pages.page_size


def give(engine: Engine, tokens: Seq[int], salt: str | None) -> Handover:
    """What the engine has of a prompt; nothing waits for the device that is still at it."""
    pages, path = known(engine, tokens, salt)
    length = len(path) * pages.page_size
    groups = []
    for index, group in enumerate(pages.groups):
        nodes = path[group.first_seen(length) :]
        groups.append([(block_of(engine, pages, index, some), len(some)) for some in parts(nodes)])
    return Handover(tiers_of(pages).identity, salt, list(tokens[:length]), groups)


def block_of(engine: Engine, pages: PageTable, group: int, nodes: Seq[Node]) -> Any:
    """The pages of these nodes, read on the device; of those that only the host has, from there."""
    there = [bool(node.pages[group]) and (group, node.pages[group]) not in pages.moves.back for node in nodes]
    numbers = [pages.number(group, node.pages[group]) if on else 0 for node, on in zip(nodes, there, strict=True)]
    block_NX = engine.read_pages(group, numbers)
    if all(there):
        return block_NX
    block_NX = np.array(block_NX)
    for row, on, node in zip(block_NX, there, nodes, strict=False):
        if not on:
            row[:] = np.frombuffer(node.copies[group].content, np.uint8)
    return block_NX


def take(engine: Engine, handover: Handover) -> None:
    """Keep the pages where those are that the device had no room for: whoever asks for the prompt finds them.

    Of several replicas the one with the most room for them gets them.
    """
    pages = max(engine.pages.tables, key=lambda table: sum(group.free for group in table.groups))
    check_alike(handover.identity, tiers_of(pages).identity)
    count = len(handover.tokens) // pages.page_size
    there = list(pages.tree.walk(handover.salt, keys(handover.tokens, count, pages.page_size)))
    found = [
        (number, group, data)
        for group, blocks in enumerate(handover.groups)
        for number, data in numbered(blocks, count)
        if number >= len(there) or not there[number].holds(group)
    ]
    attach(pages, handover.salt, handover.tokens, found)


def numbered(blocks: Seq[tuple[Any, int]], count: int) -> Iterator[tuple[int, Any]]:
    """Each page with its number; the last one is the last of the tokens'."""
    number = count - sum(rows for _, rows in blocks)
    for block_NX, rows in blocks:
        for at in range(rows):
            host = isinstance(block_NX, np.ndarray)
            yield number, block_NX[at].copy() if host else Row(block_NX, at)  # a view would keep all of them
            number += 1


def tiers_of(pages: PageTable) -> Tiers:
    if pages.tiers is None:
        raise ModelError("kv_cache_host_bytes is 0; an engine that hands pages over, or takes them, needs some")
    return pages.tiers


def check_alike(one: bytes, other: bytes) -> None:
    """Pages of another kind would be read as what they are not."""
    if one != other:
        raise ModelError(
            "the engines that read and that write differ in the model, in block_size, kv_cache_dtype, quantization or "
            "the number of devices, or in the kind of device: start both with the same options on the same machines"
        )
