"""What the disk holds of a prompt's beginning comes to the host before the request gets its slot; and the way back."""

import logging
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from ..request.sequence import Sequence
from .host_cache import Tiers
from .page_moves import Moves
from .page_table import PageTable
from .prefix_tree import Copy, Node

log = logging.getLogger("quire")


def ready(pages: PageTable, seq: Sequence) -> bool:
    """Whether all that is wanted from the disk is in host memory; the first call begins to read it."""
    tiers = pages.tiers
    if tiers is None or tiers.disk is None or seq.fetch is True:
        return True
    if seq.fetch is None:
        wanted = wanted_files(pages, seq) if pages.keeps_prefixes and seq.shares_prefix else []
        seq.fetch = tiers.load(wanted) if wanted else True
    elif seq.fetch.done():
        if (error := seq.fetch.exception()) is not None:
            log.warning("KV pages could not be read from disk, and are computed again: %s", error)
        else:
            attach(pages, seq.salt, seq.tokens, seq.fetch.result(), saved=True)
        seq.fetch = True
    return seq.fetch is True


def wanted_files(pages: PageTable, seq: Sequence) -> list[tuple[int, int, Node]]:
    """(page number, cache group, node) of the files that make more of the sequence's beginning known."""

    def somewhere(node: Node, group: int) -> bool:
        return node.holds(group) or pages.tiers.on_disk(node, group)

    node = pages.tree.roots.get(seq.salt) or pages.tree.node(seq.salt, None)
    path: list[Node] = []
    for key in pages.keys(seq, seq.num_tokens - 1):
        node = node.children.get(key) or pages.tree.node(key, node)
        if not any(somewhere(node, group) for group in range(len(pages.groups))):
            break
        path.append(node)
    pages.unbroken(path, somewhere)
    firsts = [group.first_seen(len(path) * pages.page_size) for group in pages.groups]
    return [
        (number, group, path[number])
        for group, first in enumerate(firsts)
        for number in range(first, len(path))
        if not path[number].holds(group)
    ]


def attach(
    pages: PageTable, salt: Hashable, tokens: Seq[int], found: list[tuple[int, int, Any]], saved: bool = False
) -> None:
    """Put what came into the tree, the first page last: the end of a prompt is to go before its beginning."""
    node, path = pages.tree.root(salt), []
    full = max((number + 1 for number, *_ in found), default=0)
    for key in keys(tokens, full, pages.page_size):
        node = pages.tree.child(node, key)
        path.append(node)
    for number, group, data in sorted(found, key=lambda page: -page[0]):
        pages.tiers.keep(Copy(path[number], group, data, saved))
    pages.tree.prune(node)


def keys(tokens: Seq[int], count: int, page_size: int) -> list[tuple[int, ...]]:
    """Of so many full pages."""
    return [tuple(tokens[at * page_size : (at + 1) * page_size]) for at in range(count)]


def saving(tables: Seq[PageTable]) -> Iterator[Moves]:
    """Nothing runs any more: what is to be copied to the host so that the disk gets all that is kept."""
    for pages in tables:
        if pages.tiers is not None and pages.tiers.disk is not None:
            yield from saving_of(pages, pages.tiers)


def saving_of(pages: PageTable, tiers: Tiers) -> Iterator[Moves]:
    for index, group in enumerate(pages.groups):
        for page in list(group.kept):
            pages.spill(index, page)
            if tiers.total > tiers.capacity:
                yield pages.take_moves()
                pages.tree.prune_all(tiers.trim(patiently=True))
    yield pages.take_moves()
    tiers.close()
