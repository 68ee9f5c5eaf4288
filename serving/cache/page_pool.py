"""The pages of one cache group: who has each, and which can be had."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Group:
    """The pages of the layers that share one attention window (None: they see everything).

    A page is owned (by one sequence, or by several that begin alike), kept for the tokens that it holds, or blank.
    """

    num_pages: int
    page_size: int
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

    def share(self, page: int) -> None:
        """One owner more."""
        self.owners[page] += 1
        self.kept.pop(page, None)

    def leave(self, page: int, keep: bool) -> bool:
        """One owner less; a page that nobody has is kept for what it holds, or blank. Whether it is free now."""
        self.owners[page] -= 1
        if self.owners[page]:
            return False
        if keep:
            self.kept[page] = None
        else:
            self.blank.append(page)
        return True

    def empty(self, page: int) -> None:
        """Keep the page no longer."""
        if page in self.kept:
            del self.kept[page]
            self.blank.append(page)

    def first_seen(self, position: int) -> int:
        """The first logical page that a row at `position` sees."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    def most_pages(self, num_tokens: int, chunk: int) -> int:
        """The most pages that a sequence of `num_tokens` ever holds, computed `chunk` rows at a time."""
        whole = -(-num_tokens // self.page_size)
        if self.window is None:
            return whole
        return min(whole, (self.window - 1 + chunk) // self.page_size + 2)

    def check(self, owned: dict[int, int], known: set[int], name: str) -> None:
        """Prove that every page is owned by those who have it, kept for what it holds, or blank: one of these."""
        assert [owned.get(page, 0) for page in range(self.num_pages)] == self.owners, f"{name}: owners are miscounted"
        every = [*owned, *self.kept, *self.blank]
        assert len(set(every)) == len(every), f"{name}: a page is owned or free twice"
        assert set(every) == set(range(1, self.num_pages)), f"{name}: a page is neither owned nor free"
        assert self.kept.keys() <= known, f"{name}: a page is kept that nobody can find"
        assert not known & set(self.blank), f"{name}: a blank page can be found"


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, by bisection."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
