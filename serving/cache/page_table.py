"""The page table, on the host: which page of the device's cache holds which positions of which sequence."""

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
from .prefix_tree import NO_MATCH, HostCopy, Node, PrefixMatch, PrefixTree, common
from .snapshots import Snapshots

log = logging.getLogger("quire")

SNAPSHOT_DISTANCE = 512  # tokens
MAX_COMPARED = 64  # pages that are compared for one that begins like a sequence's next tokens


class PageTable:
    """One replica's pages of every cache group: given to sequences as they grow, and taken back when they end.

        positions      0 ........ 15 16 ....... 31 32 ....... 47 48 ...
        full group     [ page 7     ][ page 3     ][ page 9     ]
        window group   [ 0: gone    ][ page 5     ][ page 2     ]
                                     ^ the oldest position that the next token still attends to

    A sequence's table only grows while it runs; a page that fell out of the window is released and its entry becomes 0,
    so that page numbers never shift. Full pages are put into a tree of what they hold as soon as a step is planned that
    fills them: a step that reads them runs no earlier on the device. A sequence that ends puts its last page there
    too. Such pages stay cached when their last owner releases them, and the least recently released is evicted when a
    new one is wanted. A sequence releases its last pages first: the end of a prompt is evicted before its beginning.

    A sequence shares the full pages of its prefix. Where it parts from another inside of a page it gets a copy of that
    page (copy-on-write, where the write is known beforehand). With a `host_cache`, an evicted page is offloaded to the
    host and can be restored, and what the disk has is prefetched. `take_moves` says what must be copied before the next
    step.
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
        self.page_size, self.keeps_prefixes, self.replica = page_size, keeps_prefixes, replica
        num_pages, windows = tuple(num_pages), tuple(windows)
        self.pools = [PagePool(n, page_size, w) for n, w in zip(num_pages, windows, strict=False)]
        self.snapshots, self.every_pool = None, list(self.pools)
        if len(num_pages) > len(windows):
            self.every_pool.append(PagePool(num_pages[-1], page_size, None))
            self.snapshots = Snapshots(self.every_pool[-1], len(self.pools), snapshot_distance)
        self.tree = PrefixTree(len(self.every_pool), page_size)
        self.host_cache = host_cache
        self.last_nodes: dict[Sequence, Node] = {}  # where each sequence's last full page is in the tree
        self.moves = PageMoves()
        self.unwritten: set[tuple[int, int]] = set()  # (group, page) whose content comes with the next step only
        self.num_freed = 0  # pages that became free, ever: what does not fit now will not before this changes

    def match(self, seq: Sequence) -> PrefixMatch:
        """The longest computed prefix of a sequence, without its last token: that one's logits are needed."""
        if not self.keeps_prefixes or not seq.shares_prefix:
            return NO_MATCH
        path = self.prefix(seq.cache.salt, seq.tokens, seq.num_tokens - 1)
        if self.snapshots is not None:
            return PrefixMatch(path)  # a state is that of whole pages
        return PrefixMatch(path, *self.longest_partial(seq, path))

    def prefix(self, salt: Hashable, tokens: Seq[int], num_tokens: int) -> list[Node]:
        """The full pages among the first tokens whose content can be had, without a gap."""
        return self.unbroken(list(self.tree.walk(salt, tokens, num_tokens)), Node.holds)

    def unbroken(self, path: list[Node], holds: Callable[[Node, int], bool]) -> list[Node]:
        """As much of the path as leaves no gap in what the next token attends to, in any group."""
        while path:
            if self.snapshots is not None and not (
                holds(path[-1], self.snapshots.group) and self.snapshots.has_room(path[-1])
            ):
                path.pop()
                continue
            gaps = []
            for index, pool in enumerate(self.pools):
                first = pool.first_seen(len(path) * self.page_size)
                gaps += [page for page in range(first, len(path)) if not holds(path[page], index)][-1:]
            if not gaps:
                break
            del path[max(gaps) :]
        return path

    def first_wanted(self, count: int) -> list[int]:
        """Of each cache group, the first of so many full pages without which nothing can go on after them."""
        firsts = [pool.first_seen(count * self.page_size) for pool in self.pools]
        return firsts if self.snapshots is None else [*firsts, max(count - 1, 0)]

    def longest_partial(self, seq: Sequence, path: list[Node]) -> tuple[Node | None, int]:
        """The page after the path that has most of the next tokens in common with the sequence, and how many."""
        start = len(path) * self.page_size
        wanted = seq.tokens[start : min(start + self.page_size, seq.num_tokens - 1)]
        node = path[-1] if path else self.tree.roots.get(seq.cache.salt)
        best, most = None, 0
        for child in islice(reversed(node.children.values() if node else ()), MAX_COMPARED):
            count = common(child.key, wanted)
            if count > most and all(
                page and (index, page) not in self.unwritten for index, page in enumerate(child.pages)
            ):
                best, most = child, count
        return best, most

    def begin(self, seq: Sequence, match: PrefixMatch) -> None:
        """Begin a sequence with pages that hold its first tokens already, or will when the copies are made."""
        path, source, num_partial = match
        pages: list[list[int]] = [[] for _ in self.pools]
        for index, pool in enumerate(self.pools):
            first = pool.first_seen(len(path) * self.page_size)
            for page in filter(None, [node.pages[index] for node in path[first:]]):
                pool.share(page)
            origin = source.pages[index] if source else 0
            pages[index] = [0] * first + [node.pages[index] or self.restore(node, index) for node in path[first:]]
            if origin:
                page = self.new_page(index)
                self.moves.copies.append((index, origin, page))
                self.unwritten.add((index, page))
                pages[index].append(page)
        seq.num_computed = len(path) * self.page_size + num_partial
        unfollowed = next((page for page, node in enumerate(path) if not node.followed), None)
        if unfollowed is None:
            seq.followed = seq.num_computed if source and source.followed else len(path) * self.page_size
        else:
            seq.followed = unfollowed * self.page_size
        seq.cache.pages, seq.cache.num_indexed = pages, len(path)
        if path:
            self.last_nodes[seq] = path[-1]
            if self.snapshots is not None:
                self.load_states(seq, path[-1])

    def load_states(self, seq: Sequence, node: Node) -> None:
        """Let the sequence go on from the node's snapshot."""
        page = node.pages[self.snapshots.group]
        if page:
            self.snapshots.pool.share(page)
        else:
            page = self.restore(node, self.snapshots.group)
        self.snapshots.loads.append((seq, page, seq.num_computed))

    def stops(self, seq: Sequence, start: int, count: int) -> int:
        """How many of so many rows a sequence computes at once, so that its states can be kept where it stops."""
        return count if self.snapshots is None or not seq.shares_prefix else self.snapshots.stops(seq, start, count)

    def keep_states(self, seq: Sequence) -> None:
        """Keep what layers with a state hold of a sequence before its next step, if others may go on from there."""
        if self.snapshots is None or not self.snapshots.wanted(seq):
            return
        node = self.last_nodes.get(seq) if self.pools else self.tree.path(seq)
        if node is not None and not node.pages[self.snapshots.group] and self.tree.attached(node):
            page = self.new_page(self.snapshots.group)
            self.tree.place(self.snapshots.group, node, page)
            self.snapshots.saves.append((self.replica, seq.slot, page))

    def restore(self, node: Node, index: int) -> int:
        """A page that gets the node's content from the host before the next step."""
        page = self.new_page(index)
        self.tree.place(index, node, page)
        self.unwritten.add((index, page))
        self.moves.restores[index, page] = self.host_cache.touch(node.copies[index])
        return page

    def insert(self, seq: Sequence, computed: int) -> None:
        """Put the full pages among the first tokens, computed or planned, into the tree; these tokens must be known.

        Who finds them may run in the same step: it appends all keys and values before any token attends to them.
        """
        own, full = seq.cache, min(computed, len(seq.tokens)) // self.page_size
        if not self.keeps_prefixes or not own.trusted or full <= own.num_indexed:
            return
        if not self.pools:  # snapshots come with their nodes
            own.num_indexed = full
            return
        node = self.last_nodes.get(seq)
        if node is None or not self.tree.attached(node):
            node, own.num_indexed = self.tree.root(own.salt), 0
        for page in range(own.num_indexed, full):
            node = self.tree.child(node, self.tree.key(seq.tokens, page))
            self.place(seq, page, node)
            if (page + 1) * self.page_size > seq.num_computed:
                self.unwritten.update((index, table[page]) for index, table in enumerate(own.pages))
        self.last_nodes[seq], own.num_indexed = node, full
        if seq.followed >= full * self.page_size:
            for above in takewhile(lambda above: not above.followed, self.tree.upwards(node)):
                above.followed = True
        self.tree.prune(node)  # pages of a window may all be gone

    def insert_last(self, seq: Sequence) -> None:
        """A sequence leaves: put all that it has computed into the tree, its last page as far as it goes."""
        computed = min(seq.num_computed, len(seq.tokens))
        self.insert(seq, computed)
        page, count = divmod(computed, self.page_size)
        if not self.keeps_prefixes or not seq.cache.trusted or not count:
            return
        parent = self.last_nodes.get(seq) if page else self.tree.root(seq.cache.salt)
        if parent is not None and self.tree.attached(parent):
            node = self.tree.child(parent, self.tree.key(seq.tokens, page)[:count])
            self.place(seq, page, node)
            node.followed = seq.followed >= computed
            self.tree.prune(node)

    def place(self, seq: Sequence, page: int, node: Node) -> None:
        """The node's tokens are found in the sequence's page, unless they are found in one already."""
        for index, table in enumerate(seq.cache.pages):
            if table[page]:
                self.tree.place(index, node, table[page])

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give the sequence pages for its first `num_tokens` positions; False, and no change, if too few are free."""
        own = seq.cache
        if not own.pages:
            own.pages = [[] for _ in self.pools]
        wanted = -(-num_tokens // self.page_size)
        firsts = [pool.first_seen(seq.sure) for pool in self.pools]
        starts = [max(len(table), first) for table, first in zip(own.pages, firsts, strict=True)]
        if any(wanted - start > pool.free for pool, start in zip(self.pools, starts, strict=True)):
            return False
        for index, (table, start) in enumerate(zip(own.pages, starts, strict=True)):
            table.extend([0] * (min(start, wanted) - len(table)))
            table.extend(self.new_page(index) for _ in range(wanted - start))
        return True

    def new_page(self, index: int) -> int:
        """A blank page, or the least recently released one, which is evicted."""
        pool = self.every_pool[index]
        if pool.blank:
            page = pool.blank.pop()
        else:
            page = next(iter(pool.cached))
            del pool.cached[page]
            self.offload(index, page)
            self.tree.forget(index, page)
        pool.owners[page] = 1
        return page

    def offload(self, index: int, page: int) -> None:
        """Copy what a cached page holds to the host, if there is room."""
        node, restored_from = self.tree.node_of[index][page], self.moves.restores.pop((index, page), None)
        if self.host_cache is None or len(node.key) < self.page_size:
            return
        if restored_from is not None:  # the host still has it
            self.host_cache.add(restored_from)
        elif (copy := self.host_cache.offload(node, index)) is not None:
            self.moves.offloads.append((page, copy))

    def slide(self, seq: Sequence) -> None:
        """Release the pages that no token attends to which is still to be computed."""
        for index, (pool, table) in enumerate(zip(self.pools, seq.cache.pages, strict=False)):
            page = min(pool.first_seen(seq.sure), len(table)) - 1
            while page >= 0 and table[page]:
                self.release_page(index, table[page])
                table[page] = 0
                page -= 1

    def spare(self, seq: Sequence, count: int, width: int) -> None:
        """So many pages of each cache group for each of so many paths of drafts, as far as they are free."""
        own = seq.cache
        while len(own.spare) < count and all(pool.free >= width for pool in self.pools):
            own.spare.append([[self.new_page(index) for _ in range(width)] for index in range(len(self.pools))])

    def give_back(self, seq: Sequence) -> bool:
        """A sequence's paths need no pages any more, unless they are being verified; whether they had any."""
        if seq.cache.branched:
            return False
        spare, seq.cache.spare = seq.cache.spare, []
        for index, page in ((index, page) for path in spare for index, pages in enumerate(path) for page in pages):
            self.release_page(index, page)
        return bool(spare)

    def branch(self, seq: Sequence, num_tokens: int, paths: Iterable[int]) -> bool:
        """The pages of these paths go on where the first tokens end; False: not before the next step.

        The last of those is computed by each path itself.

        positions       0 ....... 15 16 ....... 31 32 ....... 47
        sequence        [ page 7    ][ page 3    ][ page 9    ]     a page in which tokens end is copied before
        path 1          [ page 7    ][ page 5    ][ page 8    ]     the next step, others are empty
        """
        page, filled = divmod(num_tokens, self.page_size)
        own = [(index, table[page]) for index, table in enumerate(seq.cache.pages)] if filled > 1 else []
        if any(each in self.unwritten for each in own):
            return False
        for path in paths:
            self.moves.copies += [(index, origin, seq.cache.spare[path - 1][index][0]) for index, origin in own]
        seq.cache.branched = True
        return True

    def take_path(self, seq: Sequence, num_tokens: int, path: int) -> None:
        """The paths went on after so many tokens, and this one was right: the sequence gets its pages for its own."""
        seq.cache.branched, first = False, num_tokens // self.page_size
        if not path:
            return
        for table, pages in zip(seq.cache.pages, seq.cache.spare[path - 1], strict=True):
            count = min(len(pages), len(table) - first)
            table[first : first + count], pages[:count] = pages[:count], table[first : first + count]

    def release(self, seq: Sequence) -> None:
        """Release every page of a sequence, the last ones first."""
        own = seq.cache
        own.branched = False
        self.give_back(seq)
        if own.pages:
            self.insert_last(seq)
        for index, table in enumerate(own.pages):
            for page in reversed(table):
                if page:
                    self.release_page(index, page)
        own.pages, own.num_indexed = [], 0
        self.last_nodes.pop(seq, None)

    def release_page(self, index: int, page: int) -> None:
        self.num_freed += self.pools[index].release(page, cache=page in self.tree.node_of[index])

    def invalidate(self, seq: Sequence) -> None:
        """Take what a sequence has computed out of the tree and the host cache: it cannot be trusted.

        By its tokens and not by its pages: it may have been preempted since, and its pages stayed cached.
        """
        own = seq.cache
        own.trusted = False
        root, path = self.tree.roots.get(own.salt), list(self.tree.walk(own.salt, seq.tokens, len(seq.tokens)))
        above = path if root is None else [root, *path]
        partial = [child for node in above for child in node.children.values() if len(child.key) < self.page_size]
        for node in path + partial:
            for index, page in enumerate(node.pages):
                self.forget_page(index, page)
            if self.host_cache is not None:
                self.host_cache.invalidate(node)
            self.tree.prune(node)

    def forget_page(self, index: int, page: int) -> None:
        """The page's content is not to be found any more."""
        self.tree.forget(index, page)
        self.every_pool[index].uncache(page)

    def forget_device(self) -> None:
        """The device's pages are lost, and nothing runs: cached pages are blank, and the host's copies are left."""
        if self.snapshots is not None:
            self.snapshots.free(self.tree)
        self.forget_pages()
        self.moves = PageMoves()
        if self.host_cache is not None:
            self.tree.prune_all(self.host_cache.drop_unfilled())

    def replace_weights(self, identity: bytes, stamp: bytes) -> None:
        """Other weights compute from now on, and nothing runs: no page of the old ones is found again."""
        self.forget_device()
        if self.host_cache is not None:
            self.tree.prune_all(self.host_cache.replace_weights(identity, stamp))

    def clear(self) -> None:
        """Empty the prefix tree, the host cache and the disk; what runs goes on."""
        self.forget_pages()
        if self.host_cache is not None:
            self.tree.prune_all(self.host_cache.clear())

    def forget_pages(self) -> None:
        for index, page in [(index, page) for index, nodes in enumerate(self.tree.node_of) for page in nodes]:
            self.forget_page(index, page)

    def take_moves(self) -> PageMoves:
        """What is to be copied before the next step, in the device's page numbers."""
        if self.host_cache is not None:
            self.tree.prune_all(self.host_cache.trim())
        if self.snapshots is not None:
            self.snapshots.flush(self.moves)
            self.num_freed += self.snapshots.free(self.tree)
        moves, self.moves = self.moves, PageMoves()
        self.unwritten.clear()
        return moves.numbered(self.device_number) if self.replica else moves

    def device_number(self, index: int, page: int) -> int:
        """The device's number of a page: it has those of all replicas, one replica after the other."""
        return self.replica * self.every_pool[index].num_pages + page

    def prefetched(self, seq: Sequence) -> bool:
        """Whether the host has what is wanted from disk of a sequence's prefix; the first call begins to read it."""
        own, host_cache = seq.cache, self.host_cache
        if host_cache is None or host_cache.disk is None or own.prefetched:
            return True
        if own.load is None:
            files = self.wanted_files(seq) if self.keeps_prefixes and seq.shares_prefix else []
            own.load = host_cache.load(files) if files else None
            own.prefetched = not files
        elif own.load.done():
            if (error := own.load.exception()) is not None:
                log.warning("KV pages could not be read from disk, and are computed again: %s", error)
            else:
                self.add_copies(own.salt, seq.tokens, own.load.result(), saved=True)
            own.load, own.prefetched = None, True
        return own.prefetched

    def wanted_files(self, seq: Sequence) -> list[tuple[int, int, Node]]:
        """(page number, cache group, node) of the files that make more of the sequence's prefix known."""

        def anywhere(node: Node, group: int) -> bool:
            return node.holds(group) or self.host_cache.on_disk(node, group)

        node = self.tree.roots.get(seq.cache.salt) or self.tree.new_node(seq.cache.salt, None)
        path: list[Node] = []
        for key in self.tree.keys(seq.tokens, seq.num_tokens - 1):
            node = node.children.get(key) or self.tree.new_node(key, node)
            if self.pools and not any(anywhere(node, group) for group in range(len(self.pools))):
                break
            path.append(node)
        self.unbroken(path, anywhere)
        return [
            (number, group, path[number])
            for group, first in enumerate(self.first_wanted(len(path)))
            for number in range(first, len(path))
            if not path[number].holds(group)
        ]

    def add_copies(
        self, salt: Hashable, tokens: Seq[int], pages: list[tuple[int, int, Any]], saved: bool = False
    ) -> None:
        """Put (page number, cache group, bytes) of a prompt into the host cache.

        The first page last: the end of a prompt is to be dropped before its beginning.
        """
        node = self.tree.root(salt)
        full = max((number + 1 for number, *_ in pages), default=0)
        path = [node := self.tree.child(node, key) for key in self.tree.keys(tokens, full * self.page_size)]
        for number, group, data in sorted(pages, key=lambda page: -page[0]):
            self.host_cache.add(HostCopy(path[number], group, data, saved))
        self.tree.prune(node)

    def add_missing(self, salt: Hashable, tokens: Seq[int], pages: Iterable[tuple[int, int, Any]]) -> None:
        """The same, without the pages whose content is there already."""
        nodes = list(self.tree.walk(salt, tokens, len(tokens)))
        self.add_copies(salt, tokens, [p for p in pages if p[0] >= len(nodes) or not nodes[p[0]].holds(p[1])])

    def device_page(self, node: Node, index: int) -> int:
        """The device's number of the page with the node's content; 0 where only the host has that."""
        page = node.pages[index]
        return 0 if not page or (index, page) in self.moves.restores else self.device_number(index, page)

    def save(self) -> Iterator[PageMoves]:
        """Nothing runs any more: what is to be copied to the host so that the disk gets every cached page."""
        host_cache = self.host_cache
        if host_cache is None or host_cache.disk is None:
            return
        for index, pool in enumerate(self.every_pool):
            for page in list(pool.cached):
                self.offload(index, page)
                if host_cache.total > host_cache.capacity:
                    yield self.take_moves()
                    self.tree.prune_all(host_cache.trim(patiently=True))
        yield self.take_moves()
        host_cache.close()

    def wait(self, seconds: float) -> None:
        """Wait for what is being read from disk, if anything is."""
        if self.host_cache is not None:
            self.host_cache.wait(seconds)

    def fits(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence of that length can run when it is alone."""
        return all(pool.most_pages(num_tokens, chunk) < pool.num_pages for pool in self.pools)

    def admits(self, seq: Sequence, path: list[Node], running: Iterable[Sequence], chunk: int) -> bool:
        """Whether the sequence, begun with these pages, can catch up beside those that run.

        Each of these gets what its tokens still need.
        """
        catching_up = [other for other in running if other.missing > 1]
        for index, pool in enumerate(self.pools):
            first = pool.first_seen(len(path) * self.page_size)
            need = pool.most_pages(seq.num_tokens, chunk)
            need -= sum(1 for node in path[first:] if pool.owners[node.pages[index]])
            for other in catching_up:
                pages = other.cache.pages
                held = sum(1 for page in pages[index] if page) if pages else 0
                need += max(0, pool.most_pages(other.num_tokens, chunk) - held)
            if need > pool.free:
                return False
        return True

    def used(self) -> float:
        """The share of pages in use, of the fullest pool."""
        return max((1 - pool.free / max(pool.num_pages - 1, 1) for pool in self.pools), default=0.0)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Prove that every page is owned by those who have it, cached for what it holds, or blank: one of these."""
        tables = [table for seq in sequences for table in (seq.cache.pages, *seq.cache.spare) if table]
        for index, pool in enumerate(self.pools):
            owned = Counter(page for table in tables for page in table[index] if page)
            pool.check(owned, set(self.tree.node_of[index]), f"group {index}")
        if self.snapshots is not None:
            found = set(self.tree.node_of[self.snapshots.group])
            self.snapshots.pool.check(Counter(self.snapshots.held), found, "snapshots")
        self.tree.check()
        if self.host_cache is not None:
            self.host_cache.check()
