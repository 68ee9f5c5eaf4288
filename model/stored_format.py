"""Which matrices of a quantised checkpoint are codes, and how they lie in its files."""

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class StoredGroup:
    """Matrices of a checkpoint that are kept alike. `targets` are names of modules; `Linear` stands for all."""

    quant: str | None  # the format that they stay in, as `ops.quant.packed` names it; None: they are widened
    form: Hashable  # how their codes lie in files, in the words of the module in `published` that reads them
    targets: tuple[str, ...] = ("Linear",)
    multiple: int = 1  # what a matrix's inputs must divide by, or it is widened

    @cached_property
    def aimed(self) -> "Modules":
        return Modules(self.targets)


@dataclass(frozen=True)
class StoredFormat:
    """How a quantised checkpoint keeps its matrices: the first group that has a module says how it is kept."""

    method: str  # quant_method in quantization_config
    groups: tuple[StoredGroup, ...]
    ignore: tuple[str, ...] = ()  # modules that are left as they are
    parts: bool = False  # whether names of `ignore` may be parts of a module's name
    rounds_head: bool = True  # whether the head is rounded, as it is beside weights that are rounded while loading

    @property
    def quant(self) -> str | None:
        """The first format that matrices are kept in."""
        return next((group.quant for group in self.groups if group.quant is not None), None)

    @cached_property
    def spared(self) -> "Modules":
        return Modules(self.ignore, self.parts)

    def group_of(self, module: str) -> StoredGroup | None:
        """The group of a linear module; None where its matrix is left as it is."""
        if module in self.spared:
            return None
        return next((group for group in self.groups if "Linear" in group.targets or module in group.aimed), None)

    def renamed(self, canonical: Callable[[str], str]) -> "StoredFormat":
        """The same with a family's own names of the modules; patterns stay, most of them begin with `.*`."""

        def rename(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name if name.startswith("re:") else canonical(name) for name in names)

        groups = tuple(replace(group, targets=rename(group.targets)) for group in self.groups)
        return replace(self, groups=groups, ignore=rename(self.ignore))


class Modules:
    """A set of modules: by name, in which `*` stands for anything, or by a pattern behind `re:`.

    `parts`: by some of a name's neighbouring parts too.
    """

    def __init__(self, names: tuple[str, ...], parts: bool = False):
        self.names = frozenset(name for name in names if not name.startswith("re:"))
        self.patterns = [re.compile(name[3:]) for name in names if name.startswith("re:")]
        self.wild = [name.split("*") for name in self.names if "*" in name]
        self.parts = [f".{name.strip('.')}." for name in self.names] if parts else []

    def __contains__(self, module: str) -> bool:
        whole = f".{module}."
        return (
            module in self.names
            or any(pattern.match(module) for pattern in self.patterns)
            or any(follow(module, *pieces) for pieces in self.wild)
            or any(part in whole for part in self.parts)
        )


def follow(name: str, first: str, *rest: str) -> bool:
    """Whether a name is these pieces with anything between them."""
    *between, last = rest
    if not name.startswith(first) or not name.endswith(last) or len(name) < len(first) + len(last):
        return False
    at, end = len(first), len(name) - len(last)
    for piece in between:
        at = name.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True
