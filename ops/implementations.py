"""An op's implementations: tried in the order of its table, or the one that is named."""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TypeVar

Result = TypeVar("Result")


class NoImplementation(ExceptionGroup, NotImplementedError):
    """All declined; each of `exceptions` is one implementation's reason."""


def choose(
    table: Mapping[str, str], package: str, call: Callable[[ModuleType], Result], implementation: str | None = None
) -> Result:
    """`call(module)` of the first implementation that does not decline, or of the one named by `implementation`.

    `table` maps names to modules of `package`. One declines by raising NotImplementedError with the reason.
    """
    if implementation is not None and implementation not in table:
        raise ValueError(f"implementation is {implementation!r}; it can be {', '.join(table)}")
    reasons = []
    for name in table if implementation is None else (implementation,):
        try:
            return call(importlib.import_module(table[name], package))
        except NotImplementedError as reason:
            # Not the error itself: its traceback would keep the tracers of every frame below alive.
            reasons.append(NotImplementedError(f"{name}: {reason}"))
    raise NoImplementation("no implementation serves this case: " + "; ".join(map(str, reasons)), reasons)
