"""The page table, on the host: which page of the device's cache holds which positions of which sequence."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .prefix import Node, PrefixTree
from .sequence import Sequence


@dataclass
class Group:
    """The pages of the layers that share one attention window (None: they see everything).

    A page is owned (by one sequence, or by several that begin alike), kept for the tokens that it holds, or blank.
    """

    num_pages: int
    window: int | None
    owners: list[int] = field(init=False)  # how many sequences have the page
    blank: list[int] = field(init=False)
    kept: dict[int, None] = field(init=False)  # nobody's, in the order in which they were left

    def __post_init__(self):
        self.owners = [0] * self.num_pages
        self.blank = list(range(self.num_pages - 1, 0, -1))  # page 0 is a dummy that padding rows write to
        self.kept = {}

    @property
    def free(self) -> int:
        """Pages that can be had."""
        return len(self.blank) + len(self.kept)


class PageTable:
    """Pages of every cache group, handed out as sequences grow and taken back when they end.

        positions      0 ........ 15 16 ....... 31 32 ....... 47 48 ...
        full group     [ page 7     ][ page 3     ][ page 9     ]
        window group   [ 0: gone    ][ page 5     ][ page 2     ]
                                     ^ the oldest position that the next row still sees

    A table only grows while its sequence runs; a page whose positions all fell out of the window is left and its entry
    becomes 0, so that logical page numbers never shift. Full pages are entered in a tree of what they hold as soon as
    their rows are planned: what reads them is no earlier on the device. Such a page is kept when its last owner leaves
    it, until it is the one left longest ago and a new one is wanted. A table leaves its last pages first, so that the
    end of a prompt goes before its beginning.
    """

    def __init__(
        self, num_pages: Iterable[int], page_size: int, windows: Iterable[int | None], keeps_prefixes: bool = True
    ):
        self.page_size, self.keeps_prefixes = page_size, keeps_prefixes
        self.groups = [Group(n, w) for n, w in zip(num_pages, windows, strict=True)]
        self.tree = PrefixTree(len(self.groups))
        self.left = 0  # pages that became free, ever: what does not fit now will not before this changes

    def match(self, seq: Sequence) -> list[Node]:
        """The longest beginning of a sequence whose pages are all there, but for its last token: its row is needed."""
        if not self.keeps_prefixes or not seq.shares_prefix:
            return []
        pages = (seq.num_tokens - 1) // self.page_size
        path = list(self.tree.walk(seq.salt, (self.key(seq, page) for page in range(pages))))
        while (gap := self.gap(path)) is not None:
            del path[gap:]
        return path

    def gap(self, path: list[Node]) -> int | None:
        """The last page that a row after the path would see in some group, and which is gone there."""
        gaps = []
        for index, group in enumerate(self.groups):
            first = self.first_seen(group, len(path) * self.page_size)
            gaps += [page for page in range(first, len(path)) if not path[page].pages[index]][-1:]
        return max(gaps, default=None)

    def adopt(self, seq: Sequence, path: list[Node]) -> None:
        """Begin a sequence with pages that hold its first tokens already."""
        seq.pages = [[] for _ in self.groups]
        for index, group in enumerate(self.groups):
            first = self.first_seen(group, len(path) * self.page_size)
            table = [0] * first + [node.pages[index] for node in path[first:]]
            for page in table[first:]:
                group.owners[page] += 1
                group.kept.pop(page, None)
            seq.pages[index] = table
        seq.num_computed = len(path) * self.page_size
        seq.node, seq.num_entered = (path[-1] if path else None), len(path)

    def enter(self, seq: Sequence, computed: int) -> None:
        """Put the full pages among the first rows, computed or planned, into the tree; their tokens must be known.

        Who finds them may run in the same step: it appends all keys and values before any row reads them.
        """
        full = min(computed, len(seq.tokens)) // self.page_size
        if not self.keeps_prefixes or full <= seq.num_entered:
            return
        if seq.node is None or not self.tree.attached(seq.node):
            seq.node, seq.num_entered = self.tree.root(seq.salt), 0
        for page in range(seq.num_entered, full):
            seq.node = self.tree.child(seq.node, self.key(seq, page))
            for index, table in enumerate(seq.pages):
                if table[page]:
                    self.tree.place(index, seq.node, table[page])
        seq.num_entered = full
        self.tree.prune(seq.node)  # pages of a window may all be gone

    def key(self, seq: Sequence, page: int) -> tuple[int, ...]:
        return tuple(seq.tokens[page * self.page_size : (page + 1) * self.page_size])

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give the sequence pages for its first `num_tokens` positions; False, and no change, if too few are free."""
        if not seq.pages:
            seq.pages = [[] for _ in self.groups]
        wanted = -(-num_tokens // self.page_size)
        firsts = [self.first_seen(group, seq.num_computed) for group in self.groups]
        starts = [max(len(table), first) for table, first in zip(seq.pages, firsts, strict=True)]
        if any(wanted - start > group.free for group, start in zip(self.groups, starts, strict=True)):
            return False
        for index, (table, start) in enumerate(zip(seq.pages, starts, strict=True)):
            table.extend([0] * (min(start, wanted) - len(table)))
            table.extend(self.new_page(index) for _ in range(wanted - start))
        return True

    def holds_next(self, seq: Sequence) -> bool:
        """Whether the next position lies inside of a page that the sequence has: then nothing is to be done for it."""
        page, offset = divmod(seq.num_computed, self.page_size)
        return bool(offset and seq.pages) and page < len(seq.pages[0])

    def new_page(self, index: int) -> int:
        group = self.groups[index]
        if group.blank:
            page = group.blank.pop()
        else:
            page = next(iter(group.kept))
            del group.kept[page]
            self.tree.forget(index, page)
        group.owners[page] = 1
        return page

    def slide(self, seq: Sequence) -> None:
        """Leave the pages that no row from `num_computed` on can see."""
        for index, (group, table) in enumerate(zip(self.groups, seq.pages, strict=False)):
            page = min(self.first_seen(group, seq.num_computed), len(table)) - 1
            while page >= 0 and table[page]:
                self.leave(index, table[page])
                table[page] = 0
                page -= 1

    def first_seen(self, group: Group, position: int) -> int:
        """The first logical page that a row at `position` sees."""
        return 0 if group.window is None else max(position - group.window + 1, 0) // self.page_size

    def release(self, seq: Sequence) -> None:
        """Leave every page, the last ones first."""
        for index, table in enumerate(seq.pages):
            for page in reversed(table):
                if page:
                    self.leave(index, page)
        seq.pages, seq.node, seq.num_entered = [], None, 0

    def leave(self, index: int, page: int) -> None:
        """One owner less; a page that nobody has is kept for what it holds, or blank."""
        group = self.groups[index]
        group.owners[page] -= 1
        if group.owners[page]:
            return
        self.left += 1
        if page in self.tree.where[index]:
            group.kept[page] = None
        else:
            group.blank.append(page)

    def disown(self, seq: Sequence) -> None:
        """Take a sequence's pages out of the tree: what they hold cannot be trusted."""
        for index, table in enumerate(seq.pages):
            for page in table:
                self.tree.forget(index, page)

    def forget(self) -> None:
        """Empty the tree: what is kept becomes blank, what runs goes on."""
        for index, group in enumerate(self.groups):
            for page in list(self.tree.where[index]):
                self.tree.forget(index, page)
            group.blank.extend(group.kept)
            group.kept.clear()

    def most_pages(self, group: Group, num_tokens: int, chunk: int) -> int:
        """The most pages of a group that a sequence of `num_tokens` ever holds, computed `chunk` rows at a time."""
        whole = -(-num_tokens // self.page_size)
        if group.window is None:
            return whole
        return min(whole, (group.window - 1 + chunk) // self.page_size + 2)

    def fits(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence of that length can run when it is alone."""
        return all(self.most_pages(group, num_tokens, chunk) < group.num_pages for group in self.groups)

    def admits(self, seq: Sequence, path: list[Node], running: Iterable[Sequence], chunk: int) -> bool:
        """Whether the sequence, begun with these pages, can catch up beside those that run.

        Each of these gets what its tokens still need.
        """
        running = list(running)
        for index, group in enumerate(self.groups):
            first = self.first_seen(group, len(path) * self.page_size)
            need = self.most_pages(group, seq.num_tokens, chunk)
            need -= sum(1 for node in path[first:] if group.owners[node.pages[index]])
            for other in running:
                if other.missing > 1:  # still catching up
                    held = sum(1 for page in other.pages[index] if page) if other.pages else 0
                    need += max(0, self.most_pages(group, other.num_tokens, chunk) - held)
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
            counted = [owned[page] for page in range(group.num_pages)]
            assert counted == group.owners, f"group {index}: owners are miscounted"
            every = [*owned, *group.kept, *group.blank]
            assert len(set(every)) == len(every), f"group {index}: a page is owned or free twice"
            assert set(every) == set(range(1, group.num_pages)), f"group {index}: a page is neither owned nor free"
            known = self.tree.where[index].keys()
            assert group.kept.keys() <= known, f"group {index}: a page is kept that nobody can find"
            assert not known & set(group.blank), f"group {index}: a blank page can be found"
        self.tree.check()


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, by bisection."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
