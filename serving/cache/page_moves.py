"""The page copies that must be made before the next step: within the device, and to and from the host."""

from collections.abc import Callable
from dataclasses import dataclass, field

from .prefix_tree import HostCopy


@dataclass
class PageMoves:
    """Made in this order: pages are offloaded, copied, then restored. Page numbers are those of a cache group."""

    offloads: list[tuple[int, HostCopy]] = field(default_factory=list)  # (page, where to)
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # (group, from page, to page), one after another
    restores: dict[tuple[int, int], HostCopy] = field(default_factory=dict)  # by (group, page): where from

    # Of snapshots, after all of these. Their numbers and those of slots are a replica's.
    saves: list[tuple[int, int, int]] = field(default_factory=list)  # (replica, slot, page)
    loads: list[tuple[int, int, int, int]] = field(default_factory=list)  # (replica, page, slot, tokens), last

    def numbered(self, number: Callable[[int, int], int]) -> "PageMoves":
        """The same with other page numbers: `number(group, page)`."""
        return PageMoves(
            [(number(copy.group, page), copy) for page, copy in self.offloads],
            [(group, number(group, source), number(group, target)) for group, source, target in self.copies],
            {(group, number(group, page)): copy for (group, page), copy in self.restores.items()},
            self.saves,
            self.loads,
        )

    def add(self, other: "PageMoves") -> None:
        """Those of another replica."""
        self.offloads += other.offloads
        self.copies += other.copies
        self.restores |= other.restores
        self.saves += other.saves
        self.loads += other.loads

    def __bool__(self) -> bool:
        return bool(self.offloads or self.copies or self.restores or self.saves or self.loads)
