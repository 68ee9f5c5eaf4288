"""Kernels for the CPU in C++, called through XLA's foreign function interface.

`QUIRE_NATIVE=off` leaves them out, `QUIRE_NATIVE=avx2` (or another of `build.ISAS`) takes that instruction set.
"""

import ctypes
import logging
import os
from functools import cache

import jax

from . import build

TARGETS = ("quire_dense", "quire_int8", "quire_int4")


def target(name: str) -> str:
    """The name under which XLA knows a kernel; `NotImplementedError` says why there is none."""
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"these kernels run on a CPU, not on {jax.default_backend()}")
    return registered(os.environ.get("QUIRE_NATIVE", ""))[name]


def entry(name: str):
    """A function of the library that takes numpy's memory and not XLA's."""
    target(TARGETS[0])
    return getattr(library(os.environ.get("QUIRE_NATIVE", "")), name)


def isa() -> str:
    """The instruction set in use; `NotImplementedError` says why there is none."""
    target(TARGETS[0])
    return build.choose(os.environ.get("QUIRE_NATIVE", ""))


def serves() -> bool:
    """Whether the kernels can be used; if not, the log says why, once."""
    try:
        target(TARGETS[0])
    except NotImplementedError as reason:
        explain(str(reason))
        return False
    return True


@cache
def explain(reason: str) -> None:
    if jax.default_backend() == "cpu" and os.environ.get("QUIRE_NATIVE") != "off":
        logging.getLogger("quire").warning("native kernels are not in use, XLA's own serve instead: %s", reason)


@cache
def library(wish: str) -> ctypes.CDLL:
    """The compiled kernels, loaded."""
    if wish == "off":
        raise NotImplementedError("QUIRE_NATIVE=off")
    path = build.library(build.choose(wish))
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotImplementedError(f"{path} cannot be loaded: {error}") from None


@cache
def outcome(wish: str) -> dict[str, str] | NotImplementedError:
    """The registered kernels by name, or why there are none; either is found out once."""
    try:
        loaded = library(wish)
    except NotImplementedError as reason:
        return reason
    # The name carries the sources' hash: a program from the compile cache never calls a kernel it was not made for.
    names = {name: f"{name}_{build.choose(wish)}_{build.source_hash()}" for name in TARGETS}
    for name, known in names.items():
        jax.ffi.register_ffi_target(known, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    return names


def registered(wish: str) -> dict[str, str]:
    found = outcome(wish)
    if isinstance(found, NotImplementedError):
        raise found
    return found
