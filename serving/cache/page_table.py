"""The page table, on the host: which page of the device's cache holds which positions of which sequence."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from ..request.sequence import Sequence
from .host_cache import Tiers
from .page_moves import Moves
from .page_pool import Group
from .prefix_tree import NOTHING, Found, Node, PrefixTree, common

LOOKS = 64  # pages that are compared for one which begins like what a sequence lacks


class PageTable:
    """Pages of every cache group, handed out as sequences grow and taken back when they end.

        positions      0 ........ 15 16 ....... 31 32 ....... 47 48 ...
        full group     [ page 7     ][ page 3     ][ page 9     ]
        window group   [ 0: gone    ][ page 5     ][ page 2     ]
                                     ^ the oldest position that the next row still sees

    A table only grows while its sequence runs; a page that fell out of the window is left and its entry becomes 0, so
    that page numbers never shift. Full pages are entered in a tree of what they hold as soon as their rows are planned:
    what reads them is no earlier on the device. A sequence that ends enters its last page too. Such pages are kept when
    their last owner leaves them, until they are those left longest ago and new ones are wanted. A table leaves its last
    pages first, so that the end of a prompt goes before its beginning.

    A sequence shares the full pages of its beginning. Where it parts from another inside of a page it gets a copy of
    that one (copy-on-write, where the write is known beforehand). With `tiers`, what has no room is copied to the host
    and can come back. `take_moves` tells what is to be copied before the next step.
    """

    def __init__(
        self,
        num_pages: Iterable[int],
        page_size: int,
        windows: Iterable[int | None],
        keeps_prefixes: bool = True,
        tiers: Tiers | None = None,
        replica: int = 0,
    ):
        self.page_size, self.keeps_prefixes, self.tiers, self.replica = page_size, keeps_prefixes, tiers, replica
        self.tables = [self]
        self.groups = [Group(n, page_size, w) for n, w in zip(num_pages, windows, strict=True)]
        self.tree = PrefixTree(len(self.groups))
        self.left = 0  # pages that became free, ever: what does not fit now will not before this changes
        self.moves = Moves()
        self.fresh: set[tuple[int, int]] = set()  # (group, page) whose content comes with the next step only

    def match(self, seq: Sequence) -> Found:
        """The longest beginning of a sequence that is there, but for its last token: its row is needed."""
        if not self.keeps_prefixes or not seq.shares_prefix:
            return NOTHING
        path = self.unbroken(list(self.tree.walk(seq.salt, self.keys(seq, seq.num_tokens - 1))), Node.holds)
        return Found(path, *self.alike(seq, path))

    def unbroken(self, path: list[Node], holds: Callable[[Node, int], bool]) -> list[Node]:
        """As much of the path as leaves no gap in what the row after it sees, in any group."""
        while path:
            gaps = []
            for index, group in enumerate(self.groups):
                first = group.first_seen(len(path) * self.page_size)
                gaps += [page for page in range(first, len(path)) if not holds(path[page], index)][-1:]
            if not gaps:
                break
            del path[max(gaps) :]
        return path

    def alike(self, seq: Sequence, path: list[Node]) -> tuple[Node | None, int]:
        """The page after the path that has most of the next tokens in common with the sequence, and how many."""
        start = len(path) * self.page_size
        wanted = seq.tokens[start : min(start + self.page_size, seq.num_tokens - 1)]
        node = path[-1] if path else self.tree.roots.get(seq.salt)
        best, most = None, 0
        for child in islice(reversed(node.children.values() if node else ()), LOOKS):
            rows = common(child.key, wanted)
            if rows > most and all(page and (index, page) not in self.fresh for index, page in enumerate(child.pages)):
                best, most = child, rows
        return best, most

    def adopt(self, seq: Sequence, found: Found) -> None:
        """Begin a sequence with pages that hold its first tokens already, or will when the copies are made."""
        path, source, rows = found
        seq.pages = [[] for _ in self.groups]
        for index, group in enumerate(self.groups):
            first = group.first_seen(len(path) * self.page_size)
            for page in filter(None, [node.pages[index] for node in path[first:]]):
                group.share(page)
            origin = source.pages[index] if source else 0
            seq.pages[index] = [0] * first + [node.pages[index] or self.restore(node, index) for node in path[first:]]
            if origin:
                page = self.new_page(index)
                self.moves.within.append((index, origin, page))
                self.fresh.add((index, page))
                seq.pages[index].append(page)
        seq.num_computed = len(path) * self.page_size + rows
        seq.node, seq.num_entered = (path[-1] if path else None), len(path)

    def restore(self, node: Node, index: int) -> int:
        """A page that gets back what the host has of it before the next step."""
        page = self.new_page(index)
        self.tree.place(index, node, page)
        self.fresh.add((index, page))
        self.moves.back[index, page] = self.tiers.use(node.copies[index])
        return page

    def keys(self, seq: Sequence, num_tokens: int) -> Iterator[tuple[int, ...]]:
        """Of the full pages of its first tokens."""
        return (self.key(seq, page) for page in range(num_tokens // self.page_size))

    def enter(self, seq: Sequence, computed: int) -> None:
        """Put the full pages among the first rows, computed or planned, into the tree; their tokens must be known.

        Who finds them may run in the same step: it appends all keys and values before any row reads them.
        """
        full = min(computed, len(seq.tokens)) // self.page_size
        if not self.keeps_prefixes or not seq.trusted or full <= seq.num_entered:
            return
        if seq.node is None or not self.tree.attached(seq.node):
            seq.node, seq.num_entered = self.tree.root(seq.salt), 0
        for page in range(seq.num_entered, full):
            seq.node = self.tree.child(seq.node, self.key(seq, page))
            self.place(seq, page, seq.node)
            if (page + 1) * self.page_size > seq.num_computed:
                self.fresh.update((index, table[page]) for index, table in enumerate(seq.pages))
        seq.num_entered = full
        self.tree.prune(seq.node)  # pages of a window may all be gone

    def enter_last(self, seq: Sequence) -> None:
        """A sequence leaves: put all that it has computed into the tree, its last page as far as it goes."""
        computed = min(seq.num_computed, len(seq.tokens))
        self.enter(seq, computed)
        page, rows = divmod(computed, self.page_size)
        if not self.keeps_prefixes or not seq.trusted or not rows:
            return
        parent = seq.node if page else self.tree.root(seq.salt)
        if self.tree.attached(parent):
            node = self.tree.child(parent, self.key(seq, page)[:rows])
            self.place(seq, page, node)
            self.tree.prune(node)

    def place(self, seq: Sequence, page: int, node: Node) -> None:
        """The sequence's page is where the node's tokens are found, if none is yet."""
        for index, table in enumerate(seq.pages):
            if table[page]:
                self.tree.place(index, node, table[page])

    def key(self, seq: Sequence, page: int) -> tuple[int, ...]:
        return tuple(seq.tokens[page * self.page_size : (page + 1) * self.page_size])

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give the sequence pages for its first `num_tokens` positions; False, and no change, if too few are free."""
        if not seq.pages:
            seq.pages = [[] for _ in self.groups]
        wanted = -(-num_tokens // self.page_size)
        firsts = [group.first_seen(seq.num_computed) for group in self.groups]
        starts = [max(len(table), first) for table, first in zip(seq.pages, firsts, strict=True)]
        if any(wanted - start > group.free for group, start in zip(self.groups, starts, strict=True)):
            return False
        for index, (table, start) in enumerate(zip(seq.pages, starts, strict=True)):
            table.extend([0] * (min(start, wanted) - len(table)))
            table.extend(self.new_page(index) for _ in range(wanted - start))
        return True

    def new_page(self, index: int) -> int:
        group = self.groups[index]
        if group.blank:
            page = group.blank.pop()
        else:
            page = next(iter(group.kept))
            del group.kept[page]
            self.spill(index, page)
            self.tree.forget(index, page)
        group.owners[page] = 1
        return page

    def spill(self, index: int, page: int) -> None:
        """The page is to hold something else: what it holds goes to the host, if there is room."""
        node, coming = self.tree.where[index][page], self.moves.back.pop((index, page), None)
        if self.tiers is None or len(node.key) < self.page_size:
            return
        if coming is not None:  # it never came
            self.tiers.keep(coming)
        elif (copy := self.tiers.spill(node, index)) is not None:
            self.moves.out.append((page, copy))

    def slide(self, seq: Sequence) -> None:
        """Leave the pages that no row from `num_computed` on can see."""
        for index, (group, table) in enumerate(zip(self.groups, seq.pages, strict=False)):
            page = min(group.first_seen(seq.num_computed), len(table)) - 1
            while page >= 0 and table[page]:
                self.leave(index, table[page])
                table[page] = 0
                page -= 1

    def release(self, seq: Sequence) -> None:
        """Leave every page, the last ones first."""
        if seq.pages:
            self.enter_last(seq)
        for index, table in enumerate(seq.pages):
            for page in reversed(table):
                if page:
                    self.leave(index, page)
        seq.pages, seq.node, seq.num_entered = [], None, 0

    def leave(self, index: int, page: int) -> None:
        self.left += self.groups[index].leave(page, keep=page in self.tree.where[index])

    def disown(self, seq: Sequence) -> None:
        """Take what a sequence has computed out of the tree and everywhere behind it: it cannot be trusted.

        By its tokens and not by its pages: it may have given way in the meantime and left them to be kept.
        """
        seq.trusted = False
        root, path = self.tree.roots.get(seq.salt), list(self.tree.walk(seq.salt, self.keys(seq, len(seq.tokens))))
        above = path if root is None else [root, *path]
        parts = [child for node in above for child in node.children.values() if len(child.key) < self.page_size]
        for node in path + parts:
            for index, page in enumerate(node.pages):
                self.remove(index, page)
            if self.tiers is not None:
                self.tiers.distrust(node)
            self.tree.prune(node)

    def remove(self, index: int, page: int) -> None:
        """The page's content is not to be found any more."""
        self.tree.forget(index, page)
        self.groups[index].empty(page)

    def lose(self) -> None:
        """The device's pages are gone, and nothing runs: what was kept is blank, and only copies are left."""
        self.remove_all()
        self.moves = Moves()
        if self.tiers is not None:
            self.tree.prune_all(self.tiers.lose())

    def forget(self) -> None:
        """Empty the tree, and what is behind it; what runs goes on."""
        self.remove_all()
        if self.tiers is not None:
            self.tree.prune_all(self.tiers.clear())

    def remove_all(self) -> None:
        for index, page in [(index, page) for index, known in enumerate(self.tree.where) for page in known]:
            self.remove(index, page)

    def take_moves(self) -> Moves:
        """What is to be copied before the next step; the host keeps no more than it has room for."""
        if self.tiers is not None:
            self.tree.prune_all(self.tiers.trim())
        moves, self.moves = self.moves, Moves()
        self.fresh.clear()
        return moves.numbered(self.number) if self.replica else moves

    def number(self, index: int, page: int) -> int:
        """The device's number of a page: it has those of all replicas, one after the other."""
        return self.replica * self.groups[index].num_pages + page

    def wait(self, seconds: float) -> None:
        """For what is being read from disk, if anything is."""
        if self.tiers is not None:
            self.tiers.wait(seconds)

    def fits(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence of that length can run when it is alone."""
        return all(group.most_pages(num_tokens, chunk) < group.num_pages for group in self.groups)

    def admits(self, seq: Sequence, path: list[Node], running: Iterable[Sequence], chunk: int) -> bool:
        """Whether the sequence, begun with these pages, can catch up beside those that run.

        Each of these gets what its tokens still need.
        """
        running = list(running)
        for index, group in enumerate(self.groups):
            first = group.first_seen(len(path) * self.page_size)
            need = group.most_pages(seq.num_tokens, chunk)
            need -= sum(1 for node in path[first:] if group.owners[node.pages[index]])
            for other in running:
                if other.missing > 1:  # still catching up
                    held = sum(1 for page in other.pages[index] if page) if other.pages else 0
                    need += max(0, group.most_pages(other.num_tokens, chunk) - held)
            if need > group.free:
                return False
        return True

    def used(self) -> float:
        """The share of pages in use, of the fullest group."""
        return max(1 - group.free / max(group.num_pages - 1, 1) for group in self.groups)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Prove that every page is owned by those who have it, kept for what it holds, or blank: one of these."""
        tables = [seq.pages for seq in sequences if seq.pages]
        for index, group in enumerate(self.groups):
            owned = Counter(page for table in tables for page in table[index] if page)
            group.check(owned, set(self.tree.where[index]), f"group {index}")
        self.tree.check()
        if self.tiers is not None:
            self.tiers.check()
