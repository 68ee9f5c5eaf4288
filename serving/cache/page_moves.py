"""What is to be copied between pages of the device, and to and from the host, before the next step."""

from collections.abc import Callable
from dataclasses import dataclass, field

from .prefix_tree import Copy


@dataclass
class Moves:
    """Done in this order: out of the device, within it, back into it. Pages are those of a cache group."""

    out: list[tuple[int, Copy]] = field(default_factory=list)  # (page, where to)
    within: list[tuple[int, int, int]] = field(default_factory=list)  # (group, from page, to page), one after another
    back: dict[tuple[int, int], Copy] = field(default_factory=dict)  # by (group, page): where from

    def numbered(self, number: Callable[[int, int], int]) -> "Moves":
        """With other numbers: `number(group, page)`."""
        return Moves(
            [(number(copy.group, page), copy) for page, copy in self.out],
            [(group, number(group, origin), number(group, target)) for group, origin, target in self.within],
            {(group, number(group, page)): copy for (group, page), copy in self.back.items()},
        )

    def __bool__(self) -> bool:
        return bool(self.out or self.within or self.back)
