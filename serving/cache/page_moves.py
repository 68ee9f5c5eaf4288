"""Page copies to be made before the next step: on the device, and to and from the host."""

from collections.abc import Callable
from dataclasses import dataclass, field

from .prefix_tree import HostCopy


@dataclass
class PageMoves:
    """Copies in order of execution: offloads, copies, restores. Pages count within a cache
    group.
    """

    offloads: list[tuple[int, HostCopy]] = field(default_factory=list)  # (page, target)
    # (group, source page, target page), in order.
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    # (group, page) -> source.
    restores: dict[tuple[int, int], HostCopy] = field(default_factory=dict)

    # Recurrent-state snapshots, after all others. Pages and slots count within a replica.
    saves: list[tuple[int, int, int]] = field(default_factory=list)  # (replica, slot, page)
    # (replica, page, slot, tokens), after the saves.
    loads: list[tuple[int, int, int, int]] = field(default_factory=list)

    def renumbered(self, device_number: Callable[[int, int], int]) -> "PageMoves":
        """Return the moves with page numbers mapped by `device_number(group, page)`."""
        return PageMoves(
            [(device_number(copy.group, page), copy) for page, copy in self.offloads],
            [
                (group, device_number(group, source), device_number(group, target))
                for group, source, target in self.copies
            ],
            {
                (group, device_number(group, page)): copy
                for (group, page), copy in self.restores.items()
            },
            self.saves,
            self.loads,
        )

    def add(self, moves: "PageMoves") -> None:
        """Add the moves of another replica."""
        self.offloads += moves.offloads
        self.copies += moves.copies
        self.restores |= moves.restores
        self.saves += moves.saves
        self.loads += moves.loads

    def __bool__(self) -> bool:
        return bool(self.offloads or self.copies or self.restores or self.saves or self.loads)
