"""Which matrices of a quantised checkpoint are codes, and how they lie in its files."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class StoredFormat:
    """How a quantised checkpoint keeps its matrices, and which: `targets` and `ignore` are names of modules.

    A name may be `re:` and a pattern; the target `Linear` stands for all modules.
    """

    quant: str  # the format, as `ops.quant.packed` names it
    form: str  # how its codes lie in files: the value of `format` in quantization_config
    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    @cached_property
    def sets(self) -> tuple[tuple[frozenset[str], list[re.Pattern]], ...]:
        """The names and patterns of the targets, and those of what is left as it is."""
        return tuple(
            (frozenset(names), [re.compile(name[3:]) for name in names if name.startswith("re:")])
            for names in (self.targets, self.ignore)
        )

    def covers(self, module: str) -> bool:
        """Whether the matrix of a linear module is kept as codes."""
        aimed, spared = (module in names or any(one.match(module) for one in those) for names, those in self.sets)
        return ("Linear" in self.targets or aimed) and not spared

    def renamed(self, canonical: Callable[[str], str]) -> "StoredFormat":
        """The same with a family's own names of the modules; patterns stay, most of them begin with `.*`."""
        targets, ignore = (
            tuple(name if name.startswith("re:") else canonical(name) for name in names)
            for names in (self.targets, self.ignore)
        )
        return replace(self, targets=targets, ignore=ignore)
