"""Which matrices of a quantised checkpoint are quantised, and how they are stored."""

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class StoredGroup:
    """Matrices stored in the same form. `targets` are names of modules; `Linear` stands for all."""

    quant: str | None  # the format kept in memory (`ops.quant.packed`); None: dequantised
    form: Hashable  # how files store them, as the module in `published` defines it
    targets: tuple[str, ...] = ("Linear",)
    multiple: int = 1  # matrices with other numbers of inputs are dequantised

    @cached_property
    def target_modules(self) -> "Modules":
        return Modules(self.targets)


@dataclass(frozen=True)
class StoredFormat:
    """How a quantised checkpoint stores its matrices: by the first group that contains a module."""

    method: str  # quant_method in quantization_config
    groups: tuple[StoredGroup, ...]
    ignore: tuple[str, ...] = ()  # modules that are not quantised
    match_substrings: bool = False  # whether names in `ignore` match parts of a module's name
    rounds_head: bool = True  # whether the head is quantised while loading

    @property
    def quant(self) -> str | None:
        """The first format kept in memory."""
        return next((group.quant for group in self.groups if group.quant is not None), None)

    @property
    def names_all_modules(self) -> bool:
        """Whether no group stands for all linear modules; a group may then name an embedding."""
        return not any("Linear" in group.targets for group in self.groups)

    @cached_property
    def ignored_modules(self) -> "Modules":
        return Modules(self.ignore, self.match_substrings)

    def group_of(self, module: str) -> StoredGroup | None:
        """The group of a linear module; None if it is not quantised."""
        if module in self.ignored_modules:
            return None
        return next(
            (
                group
                for group in self.groups
                if "Linear" in group.targets or module in group.target_modules
            ),
            None,
        )

    def renamed(self, canonical: Callable[[str], str]) -> "StoredFormat":
        """The same with a family's names of the modules; patterns stay, as most begin with `.*`."""

        def rename(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name if name.startswith("re:") else canonical(name) for name in names)

        groups = tuple(replace(group, targets=rename(group.targets)) for group in self.groups)
        return replace(self, groups=groups, ignore=rename(self.ignore))


class Modules:
    """A set of modules: by name, where `*` matches anything, or by a regular expression after
    `re:`.

    `match_substrings`: names also match neighbouring components of a longer name.
    """

    def __init__(self, names: tuple[str, ...], match_substrings: bool = False):
        self.names = frozenset(name for name in names if not name.startswith("re:"))
        self.patterns = [re.compile(name[3:]) for name in names if name.startswith("re:")]
        self.wild = [name.split("*") for name in self.names if "*" in name]
        self.substrings = (
            [f".{name.strip('.')}." for name in self.names] if match_substrings else []
        )

    def __contains__(self, module: str) -> bool:
        dotted = f".{module}."
        return (
            module in self.names
            or any(pattern.match(module) for pattern in self.patterns)
            or any(follow(module, *pieces) for pieces in self.wild)
            or any(substring in dotted for substring in self.substrings)
        )


def follow(name: str, first: str, *more_pieces: str) -> bool:
    """Whether a name consists of these pieces with anything between them."""
    *middle, last = more_pieces
    if not name.startswith(first) or not name.endswith(last) or len(name) < len(first) + len(last):
        return False
    at = len(first)
    end = len(name) - len(last)
    for piece in middle:
        at = name.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True
