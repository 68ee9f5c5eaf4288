"""Transfer of computed KV pages between engines; each side runs in its engine's thread."""

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
    """The full pages of a prompt: in each cache group, those that later tokens attend to."""

    identity: bytes  # hash of everything except tokens that determines their bytes
    salt: str | None
    tokens: list[int]  # tokens of the pages
    # Per group: (block of pages, number of its rows that are pages).
    groups: list[list[tuple[Any, int]]]

    def map_blocks(self, move: Callable[[int, Any], Any]) -> "Handover":
        """Replace each block by `move(group, block)`."""
        return replace(
            self,
            groups=[
                [(move(group, block), n) for block, n in blocks]
                for group, blocks in enumerate(self.groups)
            ],
        )

    def on_host(self) -> "Handover":
        """Copy the blocks to host memory, from where they can be sent."""
        return self.map_blocks(lambda group, block: np.asarray(block))


def find_cached_prefix(
    engine: Engine, tokens: Seq[int], salt: str | None
) -> tuple[PageTable, list[Node]]:
    """Return the page table with the longest computed prefix of a prompt, and its nodes.

    The last token is left out, because its logits are needed.
    """
    paths = [(table, table.prefix(salt, tokens, len(tokens) - 1)) for table in engine.tables]
    return max(paths, key=lambda pair: len(pair[1]))


def count_missing_tokens(engine: Engine, tokens: Seq[int], salt: str | None) -> int:
    """Return how many tokens of a prompt the engine would have to compute now."""
    pages, path = find_cached_prefix(engine, tokens, salt)
    return len(tokens) - len(path) * pages.page_size


def export_pages(engine: Engine, tokens: Seq[int], salt: str | None) -> Handover:
    """Return the engine's pages of a prompt, without waiting for the device."""
    pages, path = find_cached_prefix(engine, tokens, salt)
    length = len(path) * pages.page_size
    groups = []
    for index, first in enumerate(pages.first_required(len(path))):
        chunks = parts(path[first:], engine.runner.page_copier.at_once[index])
        groups.append([(read_block(engine, pages, index, chunk), len(chunk)) for chunk in chunks])
    return Handover(require_host_cache(pages).identity, salt, list(tokens[:length]), groups)


def read_block(engine: Engine, pages: PageTable, group: int, nodes: Seq[Node]) -> Any:
    """Read the pages of these nodes on the device, or on the host where only it has them."""
    numbers = [pages.device_page(node, group) for node in nodes]
    block_NX = engine.runner.read_pages(group, numbers)
    if all(numbers):
        return block_NX
    block_NX = np.array(block_NX)
    for row, number, node in zip(block_NX, numbers, nodes, strict=False):
        if not number:
            row[:] = np.frombuffer(node.copies[group].content, np.uint8)
    return block_NX


def import_pages(engine: Engine, handover: Handover) -> None:
    """Put received pages into the host cache, where requests with the prompt find them.

    Of several data-parallel replicas the one with most free pages receives them.
    """
    pages = max(engine.tables, key=lambda table: sum(pool.num_free for pool in table.pools))
    check_same_identity(handover.identity, require_host_cache(pages).identity)
    count = len(handover.tokens) // pages.page_size
    sent = [
        (number, group, data)
        for group, blocks in enumerate(handover.groups)
        for number, data in number_pages(blocks, count)
    ]
    pages.add_missing(handover.salt, handover.tokens, sent)


def number_pages(blocks: Seq[tuple[Any, int]], count: int) -> Iterator[tuple[int, Any]]:
    """Yield each page with its number; the last page ends with the tokens."""
    number = count - sum(rows for _, rows in blocks)
    for block_NX, rows in blocks:
        for row in range(rows):
            is_on_host = isinstance(block_NX, np.ndarray)
            # A view would keep the whole block alive.
            yield number, block_NX[row].copy() if is_on_host else SentPage(block_NX, row)
            number += 1


def require_host_cache(pages: PageTable) -> HostCache:
    if pages.host_cache is None:
        raise ModelError(
            "kv_cache_host_bytes is 0; an engine that hands pages over, or takes them, needs some"
        )
    return pages.host_cache


def check_same_identity(sender: bytes, receiver: bytes) -> None:
    """Refuse pages of another kind, which would be misinterpreted."""
    if sender != receiver:
        raise ModelError(
            "the engines that read and that write differ in the model, in block_size, "
            "kv_cache_dtype, quantization or the number of devices, or in the kind of device: "
            "start both with the same options on the same machines"
        )
