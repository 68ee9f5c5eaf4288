"""The page table on the host: which page of the device's cache holds which positions of a
sequence.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import islice, takewhile
from typing import Any

from ..request.sequence import Sequence
from .host_cache import HostCache
from .page_moves import PageMoves
from .page_pool import PagePool
from .prefix_tree import NO_MATCH, HostCopy, Node, PrefixMatch, PrefixTree, common_prefix_length
from .snapshots import Snapshots

log = logging.getLogger("quire")

SNAPSHOT_DISTANCE = 512  # tokens
MAX_COMPARED = 64  # children of a node that are compared with a sequence's next tokens


class PageTable:
    """One replica's pages of every cache group: allocated to sequences as they grow, released at
    their end.

        positions      0 ........ 15 16 ....... 31 32 ....... 47 48 ...
        full group     [ page 7     ][ page 3     ][ page 9     ]
        window group   [ 0: gone    ][ page 5     ][ page 2     ]
                                     ^ the oldest position that the next token still attends to

    A sequence's table only grows while it runs. A page that leaves the window is released and its
    entry becomes 0, so that page numbers never shift. Full pages enter the prefix tree as soon as a
    step that fills them is planned, because a step that reads them runs no earlier on the device. A
    sequence that ends adds its last page too. Pages in the tree stay cached when their last
    reference is released, and the least recently released is evicted when a page is needed. A
    sequence releases its last pages first, so the end of a prompt is evicted before its start.

    A sequence shares the full pages of its prefix. Where it diverges from another within a page, it
    gets a copy of that page (copy-on-write, with the write known beforehand). With a `host_cache`,
    evicted pages are offloaded to the host and can be restored, and pages on disk are prefetched.
    `take_moves` returns the copies to be made before the next step.
    """

    def __init__(
        self,
        num_pages: Iterable[int],
        page_size: int,
        windows: Iterable[int | None],
        keeps_prefixes: bool = True,
        host_cache: HostCache | None = None,
        replica: int = 0,
        snapshot_distance: int = SNAPSHOT_DISTANCE,
    ):
        self.page_size = page_size
        self.keeps_prefixes = keeps_prefixes
        self.replica = replica
        num_pages = tuple(num_pages)
        windows = tuple(windows)
        self.pools = [PagePool(n, page_size, w) for n, w in zip(num_pages, windows, strict=False)]
        self.snapshots = None
        self.all_pools = list(self.pools)
        if len(num_pages) > len(windows):
            self.all_pools.append(PagePool(num_pages[-1], page_size, None))
            self.snapshots = Snapshots(self.all_pools[-1], len(self.pools), snapshot_distance)
        self.tree = PrefixTree(len(self.all_pools), page_size)
        self.host_cache = host_cache
        # The tree node of each sequence's last full page.
        self.last_nodes: dict[Sequence, Node] = {}
        self.moves = PageMoves()
        # (group, page) whose content arrives with the next step.
        self.pending_writes: set[tuple[int, int]] = set()
        # Pages that ever became unreferenced: a failed allocation can succeed only after this
        # changes.
        self.num_freed = 0

    def match(self, seq: Sequence) -> PrefixMatch:
        """Return the longest computed prefix of a sequence, without its last token, whose logits
        are needed.
        """
        if not self.keeps_prefixes or not seq.shares_prefix:
            return NO_MATCH
        path = self.prefix(seq.cache.salt, seq.keys, seq.num_tokens - 1)
        if self.snapshots is not None:
            return PrefixMatch(path)  # states exist for whole pages only
        return PrefixMatch(path, *self.longest_partial(seq, path))

    def prefix(self, salt: Hashable, tokens: Seq[int], num_tokens: int) -> list[Node]:
        """Return the available full pages among the first tokens, without a gap."""
        return self.trim_gaps(list(self.tree.walk(salt, tokens, num_tokens)), Node.is_available)

    def trim_gaps(self, path: list[Node], is_available: Callable[[Node, int], bool]) -> list[Node]:
        """Shorten the path until, in every group, all pages that the next token attends to are
        available.
        """
        while path:
            if self.snapshots is not None and not (
                is_available(path[-1], self.snapshots.group) and self.snapshots.has_room(path[-1])
            ):
                path.pop()
                continue
            gaps = []
            for index, pool in enumerate(self.pools):
                first = pool.first_visible_page(len(path) * self.page_size)
                gaps += [
                    page for page in range(first, len(path)) if not is_available(path[page], index)
                ][-1:]
            if not gaps:
                break
            del path[max(gaps) :]
        return path

    def first_required(self, count: int) -> list[int]:
        """Return, for each cache group, the first of `count` full pages that is needed to continue
        after them.
        """
        firsts = [pool.first_visible_page(count * self.page_size) for pool in self.pools]
        return firsts if self.snapshots is None else [*firsts, max(count - 1, 0)]

    def longest_partial(self, seq: Sequence, path: list[Node]) -> tuple[Node | None, int]:
        """Return the next page that has most tokens in common with the sequence, and their
        number.
        """
        start = len(path) * self.page_size
        next_tokens = seq.keys[start : min(start + self.page_size, seq.num_tokens - 1)]
        node = path[-1] if path else self.tree.roots.get(seq.cache.salt)
        best = None
        longest = 0
        for child in islice(reversed(node.children.values() if node else ()), MAX_COMPARED):
            count = common_prefix_length(child.key, next_tokens)
            if count > longest and all(
                page and (index, page) not in self.pending_writes
                for index, page in enumerate(child.pages)
            ):
                best = child
                longest = count
        return best, longest

    def begin(self, seq: Sequence, match: PrefixMatch) -> None:
        """Start a sequence with pages that hold its first tokens, or will when the planned copies
        are made.
        """
        path, source, num_partial = match
        pages: list[list[int]] = [[] for _ in self.pools]
        for index, pool in enumerate(self.pools):
            first = pool.first_visible_page(len(path) * self.page_size)
            for page in filter(None, [node.pages[index] for node in path[first:]]):
                pool.acquire(page)
            origin = source.pages[index] if source else 0
            pages[index] = [0] * first + [
                node.pages[index] or self.restore(node, index) for node in path[first:]
            ]
            if origin:
                page = self.new_page(index)
                self.moves.copies.append((index, origin, page))
                self.pending_writes.add((index, page))
                pages[index].append(page)
        seq.num_computed = len(path) * self.page_size + num_partial
        unfollowed = next((page for page, node in enumerate(path) if not node.has_draft_kv), None)
        if unfollowed is None:
            seq.draft.num_prefilled = (
                seq.num_computed if source and source.has_draft_kv else len(path) * self.page_size
            )
        else:
            seq.draft.num_prefilled = unfollowed * self.page_size
        seq.cache.pages = pages
        seq.cache.num_indexed = len(path)
        if path:
            self.last_nodes[seq] = path[-1]
            if self.snapshots is not None:
                self.load_states(self.snapshots, seq, path[-1])

    def load_states(self, snapshots: Snapshots, seq: Sequence, node: Node) -> None:
        """Let the sequence continue from the node's snapshot."""
        page = node.pages[snapshots.group]
        if page:
            snapshots.pool.acquire(page)
        else:
            page = self.restore(node, snapshots.group)
        snapshots.loads.append((seq, page, seq.num_computed))

    def tokens_to_snapshot(self, seq: Sequence, start: int, count: int) -> int:
        """Return how many of `count` tokens to compute at once, so that the states can be saved
        there.
        """
        if self.snapshots is None or not seq.shares_prefix:
            return count
        return self.snapshots.tokens_to_snapshot(seq, start, count)

    def keep_states(self, seq: Sequence) -> None:
        """Save a sequence's recurrent states before its next step, if a snapshot is due."""
        if self.snapshots is None or not self.snapshots.should_save(seq):
            return
        node = self.last_nodes.get(seq) if self.pools else self.tree.path(seq)
        if (
            node is not None
            and not node.pages[self.snapshots.group]
            and self.tree.is_attached(node)
        ):
            page = self.new_page(self.snapshots.group)
            self.tree.place(self.snapshots.group, node, page)
            self.snapshots.saves.append((self.replica, seq.slot, page))

    def restore(self, node: Node, index: int) -> int:
        """Return a page that receives the node's content from the host before the next step."""
        assert self.host_cache is not None
        page = self.new_page(index)
        self.tree.place(index, node, page)
        self.pending_writes.add((index, page))
        self.moves.restores[index, page] = self.host_cache.touch(node.copies[index])
        return page

    def insert(self, seq: Sequence, computed: int) -> None:
        """Put the full pages among the first tokens, computed or planned, into the tree; the tokens
        are known.

        A sequence that matches them may run in the same step, which appends all keys and values
        before any token attends to them.
        """
        cache = seq.cache
        full = min(computed, len(seq.tokens)) // self.page_size
        if not self.keeps_prefixes or not cache.trusted or full <= cache.num_indexed:
            return
        if not self.pools:  # snapshots add nodes themselves
            cache.num_indexed = full
            return
        node = self.last_nodes.get(seq)
        if node is None or not self.tree.is_attached(node):
            node = self.tree.root(cache.salt)
            cache.num_indexed = 0
        for page in range(cache.num_indexed, full):
            node = self.tree.child(node, self.tree.key(seq.keys, page))
            self.place(seq, page, node)
            if (page + 1) * self.page_size > seq.num_computed:
                self.pending_writes.update(
                    (index, table[page]) for index, table in enumerate(cache.pages)
                )
        self.last_nodes[seq] = node
        cache.num_indexed = full
        if seq.draft.num_prefilled >= full * self.page_size:
            for ancestor in takewhile(
                lambda ancestor: not ancestor.has_draft_kv, self.tree.ancestors(node)
            ):
                ancestor.has_draft_kv = True
        self.tree.prune(node)  # all pages may have left the window

    def insert_last(self, seq: Sequence) -> None:
        """Put everything that a leaving sequence has computed into the tree, including its partial
        last page.
        """
        computed = min(seq.num_computed, len(seq.tokens))
        self.insert(seq, computed)
        page, count = divmod(computed, self.page_size)
        if not self.keeps_prefixes or not seq.cache.trusted or not count:
            return
        parent = self.last_nodes.get(seq) if page else self.tree.root(seq.cache.salt)
        if parent is not None and self.tree.is_attached(parent):
            node = self.tree.child(parent, self.tree.key(seq.keys, page)[:count])
            self.place(seq, page, node)
            node.has_draft_kv = seq.draft.num_prefilled >= computed
            self.tree.prune(node)

    def place(self, seq: Sequence, page: int, node: Node) -> None:
        """Record the sequence's page for the node, unless the node has one already."""
        for index, table in enumerate(seq.cache.pages):
            if table[page]:
                self.tree.place(index, node, table[page])

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate pages for the first `num_tokens` positions; False, without changes, if too few
        are free.
        """
        cache = seq.cache
        if not cache.pages:
            cache.pages = [[] for _ in self.pools]
        num_pages = -(-num_tokens // self.page_size)
        firsts = [pool.first_visible_page(seq.sure) for pool in self.pools]
        starts = [max(len(table), first) for table, first in zip(cache.pages, firsts, strict=True)]
        if any(
            num_pages - start > pool.num_free
            for pool, start in zip(self.pools, starts, strict=True)
        ):
            return False
        for index, (table, start) in enumerate(zip(cache.pages, starts, strict=True)):
            table.extend([0] * (min(start, num_pages) - len(table)))
            table.extend(self.new_page(index) for _ in range(num_pages - start))
        return True

    def new_page(self, index: int) -> int:
        """Return a free page, or evict the least recently released one."""
        pool = self.all_pools[index]
        if pool.free_pages:
            page = pool.free_pages.pop()
        else:
            page = next(iter(pool.cached))
            del pool.cached[page]
            self.offload(index, page)
            self.tree.forget(index, page)
        pool.ref_counts[page] = 1
        return page

    def offload(self, index: int, page: int) -> None:
        """Copy a cached page to the host, if there is space."""
        node = self.tree.node_by_page[index][page]
        restored_from = self.moves.restores.pop((index, page), None)
        if self.host_cache is None or len(node.key) < self.page_size:
            return
        if restored_from is not None:  # the host still has it
            self.host_cache.add(restored_from)
        elif (copy := self.host_cache.offload(node, index)) is not None:
            self.moves.offloads.append((page, copy))

    def slide(self, seq: Sequence) -> None:
        """Release the pages that no remaining token attends to."""
        for index, (pool, table) in enumerate(zip(self.pools, seq.cache.pages, strict=False)):
            page = min(pool.first_visible_page(seq.sure), len(table)) - 1
            while page >= 0 and table[page]:
                self.release_page(index, table[page])
                table[page] = 0
                page -= 1

    def release(self, seq: Sequence) -> None:
        """Release every page of a sequence, from last to first."""
        cache = seq.cache
        if cache.pages:
            self.insert_last(seq)
        for index, table in enumerate(cache.pages):
            for page in reversed(table):
                if page:
                    self.release_page(index, page)
        cache.pages = []
        cache.num_indexed = 0
        self.last_nodes.pop(seq, None)

    def release_page(self, index: int, page: int) -> None:
        self.num_freed += self.pools[index].release(
            page, cache=page in self.tree.node_by_page[index]
        )

    def invalidate(self, seq: Sequence) -> None:
        """Remove everything that a sequence has computed from the tree and the host cache: it is
        untrusted.

        The nodes are found by tokens, not by pages, because the sequence may have been preempted
        since while its pages stayed cached.
        """
        cache = seq.cache
        cache.trusted = False
        root = self.tree.roots.get(cache.salt)
        path = list(self.tree.walk(cache.salt, seq.keys, len(seq.tokens)))
        parents = path if root is None else [root, *path]
        partial = [
            child
            for node in parents
            for child in node.children.values()
            if len(child.key) < self.page_size
        ]
        for node in path + partial:
            for index, page in enumerate(node.pages):
                self.forget_page(index, page)
            if self.host_cache is not None:
                self.host_cache.invalidate(node)
            self.tree.prune(node)

    def forget_page(self, index: int, page: int) -> None:
        """Remove a page from the tree and free it if it is cached."""
        self.tree.forget(index, page)
        self.all_pools[index].uncache(page)

    def forget_device(self) -> None:
        """Reset after the device has lost its pages while nothing runs; the host's copies stay."""
        if self.snapshots is not None:
            self.snapshots.free(self.tree)
        self.forget_pages()
        self.moves = PageMoves()
        if self.host_cache is not None:
            self.tree.prune_all(self.host_cache.drop_unfilled())

    def replace_weights(self, identity: bytes, stamp: bytes) -> None:
        """Forget the pages of the old weights, while nothing runs."""
        self.forget_device()
        if self.host_cache is not None:
            self.tree.prune_all(self.host_cache.replace_weights(identity, stamp))

    def clear(self) -> None:
        """Empty the prefix tree, the host cache and the disk; running sequences continue."""
        self.forget_pages()
        if self.host_cache is not None:
            self.tree.prune_all(self.host_cache.clear())

    def forget_pages(self) -> None:
        for index, page in [
            (index, page) for index, nodes in enumerate(self.tree.node_by_page) for page in nodes
        ]:
            self.forget_page(index, page)

    def take_moves(self) -> PageMoves:
        """Return the copies to be made before the next step, with the device's page numbers."""
        if self.host_cache is not None:
            self.tree.prune_all(self.host_cache.trim())
        if self.snapshots is not None:
            self.snapshots.flush(self.moves)
            self.num_freed += self.snapshots.free(self.tree)
        moves = self.moves
        self.moves = PageMoves()
        self.pending_writes.clear()
        return moves.renumbered(self.device_number) if self.replica else moves

    def device_number(self, index: int, page: int) -> int:
        """Return the device's number of a page: replicas' pages follow each other."""
        return self.replica * self.all_pools[index].num_pages + page

    def prefetched(self, seq: Sequence) -> bool:
        """Return whether the wanted prefix pages on disk are in host memory; the first call starts
        reading.
        """
        cache = seq.cache
        host_cache = self.host_cache
        if host_cache is None or host_cache.disk is None or cache.prefetched:
            return True
        if cache.load is None:
            files = self.missing_files(seq) if self.keeps_prefixes and seq.shares_prefix else []
            cache.load = host_cache.load(files) if files else None
            cache.prefetched = not files
        elif cache.load.done():
            if (error := cache.load.exception()) is not None:
                log.warning(
                    "KV pages could not be read from disk, and are computed again: %s", error
                )
            else:
                self.add_copies(cache.salt, seq.keys, cache.load.result(), saved=True)
            cache.load = None
            cache.prefetched = True
        return cache.prefetched

    def missing_files(self, seq: Sequence) -> list[tuple[int, int, Node]]:
        """Return (page number, cache group, node) of the files that extend the sequence's known
        prefix.
        """

        host_cache = self.host_cache
        assert host_cache is not None

        def anywhere(node: Node, group: int) -> bool:
            return node.is_available(group) or host_cache.is_on_disk(node, group)

        node = self.tree.roots.get(seq.cache.salt) or self.tree.new_node(seq.cache.salt, None)
        path: list[Node] = []
        for key in self.tree.keys(seq.keys, seq.num_tokens - 1):
            node = node.children.get(key) or self.tree.new_node(key, node)
            if self.pools and not any(anywhere(node, group) for group in range(len(self.pools))):
                break
            path.append(node)
        self.trim_gaps(path, anywhere)
        return [
            (number, group, path[number])
            for group, first in enumerate(self.first_required(len(path)))
            for number in range(first, len(path))
            if not path[number].is_available(group)
        ]

    def add_copies(
        self,
        salt: Hashable,
        tokens: Seq[int],
        pages: list[tuple[int, int, Any]],
        saved: bool = False,
    ) -> None:
        """Put (page number, cache group, bytes) tuples of a prompt into the host cache.

        From the last page to the first, because the end of a prompt should be evicted before its
        start.
        """
        assert self.host_cache is not None
        node = self.tree.root(salt)
        full = max((number + 1 for number, *_ in pages), default=0)
        path = [
            node := self.tree.child(node, key)
            for key in self.tree.keys(tokens, full * self.page_size)
        ]
        for number, group, data in sorted(pages, key=lambda page: -page[0]):
            self.host_cache.add(HostCopy(path[number], group, data, saved))
        self.tree.prune(node)

    def add_missing(
        self, salt: Hashable, tokens: Seq[int], pages: Iterable[tuple[int, int, Any]]
    ) -> None:
        """Like `add_copies`, without the pages whose content is available already."""
        nodes = list(self.tree.walk(salt, tokens, len(tokens)))
        self.add_copies(
            salt,
            tokens,
            [p for p in pages if p[0] >= len(nodes) or not nodes[p[0]].is_available(p[1])],
        )

    def device_page(self, node: Node, index: int) -> int:
        """Return the device's number of the page with the node's content; 0 if only the host has
        it.
        """
        page = node.pages[index]
        return (
            0
            if not page or (index, page) in self.moves.restores
            else self.device_number(index, page)
        )

    def save(self) -> Iterator[PageMoves]:
        """Yield the copies to the host that bring every cached page to disk, when nothing runs any
        more.
        """
        host_cache = self.host_cache
        if host_cache is None or host_cache.disk is None:
            return
        for index, pool in enumerate(self.all_pools):
            for page in list(pool.cached):
                self.offload(index, page)
                if host_cache.total > host_cache.capacity:
                    yield self.take_moves()
                    self.tree.prune_all(host_cache.trim(patiently=True))
        yield self.take_moves()
        host_cache.close()

    def wait(self, seconds: float) -> None:
        """Wait until a pending read from disk ends, if there is one."""
        if self.host_cache is not None:
            self.host_cache.wait(seconds)

    def fits(self, num_tokens: int, chunk: int) -> bool:
        """Return whether a sequence of that length can run alone."""
        return all(pool.max_pages(num_tokens, chunk) < pool.num_pages for pool in self.pools)

    def admits(
        self, seq: Sequence, path: list[Node], running: Iterable[Sequence], chunk: int
    ) -> bool:
        """Return whether the sequence, started with these pages, can prefill beside the running
        ones.

        Pages that the prefill of running sequences still needs are set aside.
        """
        prefilling = [running_seq for running_seq in running if running_seq.missing > 1]
        for index, pool in enumerate(self.pools):
            first = pool.first_visible_page(len(path) * self.page_size)
            need = pool.max_pages(seq.num_tokens, chunk)
            need -= sum(1 for node in path[first:] if pool.ref_counts[node.pages[index]])
            for running_seq in prefilling:
                pages = running_seq.cache.pages
                num_held = sum(1 for page in pages[index] if page) if pages else 0
                need += max(0, pool.max_pages(running_seq.num_tokens, chunk) - num_held)
            if need > pool.num_free:
                return False
        return True

    def used(self) -> float:
        """Return the share of pages in use, of the fullest pool."""
        return max(
            (1 - pool.num_free / max(pool.num_pages - 1, 1) for pool in self.pools), default=0.0
        )

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that every page is exactly one of: referenced as counted, cached with its content,
        or free.
        """
        tables = [seq.cache.pages for seq in sequences if seq.cache.pages]
        for index, pool in enumerate(self.pools):
            owned = Counter(page for table in tables for page in table[index] if page)
            pool.check(owned, set(self.tree.node_by_page[index]), f"group {index}")
        if self.snapshots is not None:
            indexed = set(self.tree.node_by_page[self.snapshots.group])
            self.snapshots.pool.check(Counter(self.snapshots.held_pages), indexed, "snapshots")
        self.tree.check()
        if self.host_cache is not None:
            self.host_cache.check()
