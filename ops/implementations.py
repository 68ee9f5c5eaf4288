"""Selection of an op's implementation: the first in its table that supports the case, or a named
one.

Every implementation module has a function `varies()`, which returns why the bits of a result may
depend on the rest of the batch on this process's devices, or None if it is batch-invariant.
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
    """No implementation supports the case; `exceptions` has each implementation's reason."""


def choose(
    table: Mapping[str, str],
    package: str,
    call: Callable[[ModuleType], Result],
    implementation: str | None = None,
) -> Result:
    """Call the first implementation that supports the case.

    Args:
        table: maps the names of implementations to modules of `package`, in order of preference.
        package: the package that relative module names refer to.
        call: calls the op in a module. It raises NotImplementedError with the reason if the
            module does not support the case.
        implementation: the name of the only implementation to try.
    """
    if implementation is not None and implementation not in table:
        raise ValueError(f"implementation is {implementation!r}; it can be {', '.join(table)}")
    reasons = []
    for name in table if implementation is None else (implementation,):
        try:
            module = importlib.import_module(table[name], package)
            with jax.named_scope(module.__name__):  # `variance` finds implementations by the scope
                return call(module)
        except NotImplementedError as reason:
            # Not the error itself: its traceback would keep the tracers of every frame below alive.
            reasons.append(NotImplementedError(f"{name}: {reason}"))
    raise NoImplementation(
        "no implementation serves this case: " + "; ".join(map(str, reasons)), reasons
    )


def variance(jaxpr: core.Jaxpr) -> frozenset[str]:
    """Why the results of a traced program may depend on the rest of the batch: the reasons given
    by the `varies()` of every implementation in it.
    """
    package_prefix = f"{__name__.partition('.')[0]}."
    scopes = {
        scope
        for stack in name_stacks(jaxpr)
        for scope in stack.split("/")
        if scope.startswith(package_prefix)
    }
    return frozenset(
        reason for scope in scopes if (reason := sys.modules[scope].varies()) is not None
    )


def name_stacks(jaxpr: core.Jaxpr) -> set[str]:
    """The named scopes of all operations, including those in nested functions."""
    stacks = {str(equation.source_info.name_stack) for equation in jaxpr.eqns}
    return stacks.union(*map(name_stacks, core.subjaxprs(jaxpr)))
