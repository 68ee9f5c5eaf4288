"""The page table, on the host: which page of the device's cache holds which positions of which sequence."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .sequence import Sequence


@dataclass
class Group:
    """The pages of the layers that share one attention window (None: they see everything)."""

    num_pages: int
    window: int | None
    free: list[int] = field(init=False)

    def __post_init__(self):
        self.free = list(range(self.num_pages - 1, 0, -1))  # page 0 is a dummy that padding rows write to


class PageTable:
    """Pages of every cache group, handed out as sequences grow and taken back when they end.

        positions      0 ........ 15 16 ....... 31 32 ....... 47 48 ...
        full group     [ page 7     ][ page 3     ][ page 9     ]
        window group   [ 0: gone    ][ page 5     ][ page 2     ]
                                     ^ the oldest position that the next row still sees

    A table only grows while its sequence runs; a page whose positions all fell out of the window goes back to
    the free list and its entry becomes 0, so that logical page numbers never shift.
    """

    def __init__(self, num_pages: Iterable[int], page_size: int, windows: Iterable[int | None]):
        self.page_size = page_size
        self.groups = [Group(n, w) for n, w in zip(num_pages, windows, strict=True)]

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give the sequence pages for its first `num_tokens` positions; False, and no change, if too few are free."""
        if not seq.pages:
            seq.pages = [[] for _ in self.groups]
        wanted = -(-num_tokens // self.page_size)
        firsts = [self.first_seen(group, seq.num_computed) for group in self.groups]
        starts = [max(len(table), first) for table, first in zip(seq.pages, firsts, strict=True)]
        if any(wanted - start > len(group.free) for group, start in zip(self.groups, starts, strict=True)):
            return False
        for group, table, start in zip(self.groups, seq.pages, starts, strict=True):
            table.extend([0] * (min(start, wanted) - len(table)))
            table.extend(group.free.pop() for _ in range(wanted - start))
        return True

    def slide(self, seq: Sequence) -> None:
        """Take back the pages that no row from `num_computed` on can see."""
        for group, table in zip(self.groups, seq.pages, strict=False):
            page = min(self.first_seen(group, seq.num_computed), len(table)) - 1
            while page >= 0 and table[page]:
                group.free.append(table[page])
                table[page] = 0
                page -= 1

    def first_seen(self, group: Group, position: int) -> int:
        """The first logical page that a row at `position` sees."""
        return 0 if group.window is None else max(position - group.window + 1, 0) // self.page_size

    def release(self, seq: Sequence) -> None:
        """Take back every page, the last ones first."""
        for group, table in zip(self.groups, seq.pages, strict=False):
            group.free.extend(page for page in reversed(table) if page)
        seq.pages = []

    def most_pages(self, group: Group, num_tokens: int, chunk: int) -> int:
        """The most pages of a group that a sequence of `num_tokens` ever holds, computed `chunk` rows at a time."""
        whole = -(-num_tokens // self.page_size)
        if group.window is None:
            return whole
        return min(whole, (group.window - 1 + chunk) // self.page_size + 2)

    def fits(self, num_tokens: int, chunk: int) -> bool:
        """Whether a sequence of that length can run when it is alone."""
        return all(self.most_pages(group, num_tokens, chunk) < group.num_pages for group in self.groups)

    def admits(self, seq: Sequence, running: Iterable[Sequence], chunk: int) -> bool:
        """Whether the sequence can catch up beside those that run, when each gets what its tokens still need."""
        running = list(running)
        for index, group in enumerate(self.groups):
            need = self.most_pages(group, seq.num_tokens, chunk)
            for other in running:
                if other.missing > 1:  # still catching up
                    held = sum(1 for page in other.pages[index] if page) if other.pages else 0
                    need += max(0, self.most_pages(group, other.num_tokens, chunk) - held)
            if need > len(group.free):
                return False
        return True

    def used(self) -> float:
        """The share of pages in use, of the fullest group."""
        return max(1 - len(group.free) / max(group.num_pages - 1, 1) for group in self.groups)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Prove that every page is free or owned, once."""
        tables = [seq.pages for seq in sequences if seq.pages]
        for index, group in enumerate(self.groups):
            owned = [page for table in tables for page in table[index] if page]
            both = owned + group.free
            assert len(set(both)) == len(both), f"group {index}: a page is owned or free twice"
            assert set(both) == set(range(1, group.num_pages)), f"group {index}: a page is neither owned nor free"


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, by bisection."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
