"""The page pool of one cache group: who owns each page, and which are free."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class PagePool:
    """The pages of the layers that share one attention window (None: they see everything).

    A page is owned (by one sequence, or by several with the same prefix), cached for what it holds, or blank.
    """

    num_pages: int
    page_size: int
    window: int | None
    owners: list[int] = field(init=False)  # how many sequences own each page
    blank: list[int] = field(init=False)
    cached: dict[int, None] = field(init=False)  # without an owner, the one released longest ago first

    def __post_init__(self):
        self.owners = [0] * self.num_pages
        self.blank = list(range(self.num_pages - 1, 0, -1))  # page 0 is a dummy that padding rows write to
        self.cached = {}

    @property
    def free(self) -> int:
        """Pages without an owner: blank ones, and cached ones that can be evicted."""
        return len(self.blank) + len(self.cached)

    def share(self, page: int) -> None:
        """Add an owner."""
        self.owners[page] += 1
        self.cached.pop(page, None)

    def release(self, page: int, cache: bool) -> bool:
        """Remove an owner; a page without any is cached or blank. Whether it is free now."""
        self.owners[page] -= 1
        if self.owners[page]:
            return False
        if cache:
            self.cached[page] = None
        else:
            self.blank.append(page)
        return True

    def uncache(self, page: int) -> None:
        """What the page holds is not wanted any more."""
        if page in self.cached:
            del self.cached[page]
            self.blank.append(page)

    def first_seen(self, position: int) -> int:
        """The first logical page that a token at `position` attends to."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    def most_pages(self, num_tokens: int, chunk: int) -> int:
        """The most pages that a sequence of `num_tokens` ever owns, computed `chunk` tokens at a time."""
        whole = -(-num_tokens // self.page_size)
        if self.window is None:
            return whole
        return min(whole, (self.window - 1 + chunk) // self.page_size + 2)

    def check(self, owned: dict[int, int], indexed: set[int], name: str) -> None:
        """Prove that every page is owned by those who have it, cached for what it holds, or blank: one of these."""
        assert [owned.get(page, 0) for page in range(self.num_pages)] == self.owners, f"{name}: owners are miscounted"
        every = [*owned, *self.cached, *self.blank]
        assert len(set(every)) == len(every), f"{name}: a page is owned or free twice"
        assert set(every) == set(range(1, self.num_pages)), f"{name}: a page is neither owned nor free"
        assert self.cached.keys() <= indexed, f"{name}: a page is cached that nobody can find"
        assert not indexed & set(self.blank), f"{name}: a blank page can be found"


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, by bisection."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
