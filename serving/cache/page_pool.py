"""The page pool of a cache group: reference counts and free pages."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class PagePool:
    """The pages of the layers that share an attention window (None: unlimited).

    A page is either allocated (to one sequence, or to several with the same prefix), cached for its
    content, or free.
    """

    num_pages: int
    page_size: int
    window: int | None
    ref_counts: list[int] = field(init=False)  # number of sequences that use each page
    free_pages: list[int] = field(init=False)
    # Unreferenced pages with content, least recently released first.
    cached: dict[int, None] = field(init=False)

    def __post_init__(self):
        self.ref_counts = [0] * self.num_pages
        # Page 0 is a dummy that padding rows write to.
        self.free_pages = list(range(self.num_pages - 1, 0, -1))
        self.cached = {}

    @property
    def num_free(self) -> int:
        """Number of unreferenced pages: free ones, and cached ones that can be evicted."""
        return len(self.free_pages) + len(self.cached)

    def acquire(self, page: int) -> None:
        """Add a reference to a page."""
        self.ref_counts[page] += 1
        self.cached.pop(page, None)

    def release(self, page: int, cache: bool) -> bool:
        """Remove a reference; an unreferenced page becomes cached or free. Return whether it is
        unreferenced.
        """
        self.ref_counts[page] -= 1
        if self.ref_counts[page]:
            return False
        if cache:
            self.cached[page] = None
        else:
            self.free_pages.append(page)
        return True

    def uncache(self, page: int) -> None:
        """Free a cached page, whose content is not needed any more."""
        if page in self.cached:
            del self.cached[page]
            self.free_pages.append(page)

    def first_visible_page(self, position: int) -> int:
        """Return the first logical page to which a token at `position` attends."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.page_size

    def max_pages(self, num_tokens: int, chunk: int) -> int:
        """Return the maximum pages of a sequence of `num_tokens`, computed `chunk` tokens at a
        time.
        """
        all_pages = -(-num_tokens // self.page_size)
        if self.window is None:
            return all_pages
        return min(all_pages, (self.window - 1 + chunk) // self.page_size + 2)

    def check(self, expected_counts: dict[int, int], indexed: set[int], name: str) -> None:
        """Assert that every page is exactly one of: referenced as counted, cached with its content,
        or free.
        """
        actual = [expected_counts.get(page, 0) for page in range(self.num_pages)]
        assert actual == self.ref_counts, f"{name}: references are miscounted"
        pages = [*expected_counts, *self.cached, *self.free_pages]
        assert len(set(pages)) == len(pages), f"{name}: a page is allocated or free twice"
        assert set(pages) == set(range(1, self.num_pages)), (
            f"{name}: a page is neither allocated nor free"
        )
        assert self.cached.keys() <= indexed, f"{name}: a cached page is not in the prefix tree"
        assert not indexed & set(self.free_pages), f"{name}: a free page is in the prefix tree"


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` that fits, by bisection."""
    low = 0
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
