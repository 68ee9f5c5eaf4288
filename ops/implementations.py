"""An op's implementations: tried in the order of its table, or the one that is named.

Each says by `varies()` why a row's bits may depend on its company where this process computes;
None: they do not.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TypeVar

import jax
from jax.extend import core

Result = TypeVar("Result")


class NoImplementation(ExceptionGroup, NotImplementedError):
    """All declined; each of `exceptions` is one implementation's reason."""


def choose(
    table: Mapping[str, str],
    package: str,
    call: Callable[[ModuleType], Result],
    implementation: str | None = None,
) -> Result:
    """`call(module)` of the first implementation that does not decline, or of the one named by
    `implementation`.

    `table` maps names to modules of `package`. One declines by raising NotImplementedError with the
    reason.
    """
    if implementation is not None and implementation not in table:
        raise ValueError(f"implementation is {implementation!r}; it can be {', '.join(table)}")
    reasons = []
    for name in table if implementation is None else (implementation,):
        try:
            module = importlib.import_module(table[name], package)
            with jax.named_scope(module.__name__):  # so that a program tells what it is made of
                return call(module)
        except NotImplementedError as reason:
            # Not the error itself: its traceback would keep the tracers of every frame below alive.
            reasons.append(NotImplementedError(f"{name}: {reason}"))
    raise NoImplementation(
        "no implementation serves this case: " + "; ".join(map(str, reasons)), reasons
    )


def variance(jaxpr: core.Jaxpr) -> frozenset[str]:
    """Why a row's bits may depend on its company in a traced program, as each implementation in it
    says.
    """
    own = f"{__name__.partition('.')[0]}."
    scopes = {
        scope for stack in name_stacks(jaxpr) for scope in stack.split("/") if scope.startswith(own)
    }
    return frozenset(
        reason for scope in scopes if (reason := sys.modules[scope].varies()) is not None
    )


def name_stacks(jaxpr: core.Jaxpr) -> set[str]:
    """The named scopes of all operations, those of functions within it too."""
    own = {str(equation.source_info.name_stack) for equation in jaxpr.eqns}
    return own.union(*map(name_stacks, core.subjaxprs(jaxpr)))
