"""Kernels for the CPU in C++, called through XLA's foreign function interface.

`QUIRE_NATIVE=off` turns them off, `QUIRE_NATIVE=avx2` (or another of `build.ISAS`) chooses an
instruction set. Each kernel is a library of its own, built and loaded when it is first called, or
ahead of that by `prepare`.
"""

import ctypes
import logging
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock

import jax

from . import build

lock = Lock()
# No more builds at once than cores, so that what was asked for first is ready first.
builders = ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix="quire-kernels")
begun: dict[tuple[str, str], Future[ctypes.CDLL]] = {}  # libraries by instruction set and name


def instruction_set() -> str:
    """The instruction set in use; `NotImplementedError` says why there is none."""
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"these kernels run on a CPU, not on {jax.default_backend()}")
    return chosen(os.environ.get("QUIRE_NATIVE", ""))


def target(name: str) -> str:
    """The name under which XLA knows a kernel, built now unless it has been; `NotImplementedError`
    says why not.
    """
    library(name)
    return known(instruction_set(), name)


def library(name: str) -> ctypes.CDLL:
    """A kernel's library."""
    try:
        return begin(instruction_set(), name).result()
    except NotImplementedError as reason:
        raise NotImplementedError(str(reason)) from None


def has(*names: str) -> bool:
    """Whether all these kernels can be called; if not, the log says why."""
    try:
        for build_under_way in [begin(instruction_set(), name) for name in names]:
            build_under_way.result()
    except NotImplementedError:
        return False
    return True


def outcomes() -> dict[str, bool]:
    """The kernels that were asked for until now, and whether they can be called."""
    return {name: has(name) for _, name in tuple(begun)}


def prepare(names: Iterable[str]) -> Future[bool]:
    """Begin to build kernels that will be called, while the start goes on; returns at once.

    The result, which is there once all have begun, says whether the compiler has to work for them:
    it takes a while.
    """
    if jax.default_backend() == "cpu":
        return builders.submit(begin_all, os.environ.get("QUIRE_NATIVE", ""), tuple(names))
    none: Future[bool] = Future()
    none.set_result(False)
    return none


def begin_all(wish: str, names: tuple[str, ...]) -> bool:
    try:
        isa = chosen(wish)
        ready = all(build.is_built(isa, name) for name in names)
        for name in names:
            begin(isa, name)
    except NotImplementedError:  # whoever calls a kernel that is missing logs it
        return False
    return not ready


def begin(isa: str, name: str) -> Future[ctypes.CDLL]:
    """The build of a library, begun now unless it has been."""
    with lock:
        if (isa, name) not in begun:
            begun[isa, name] = builders.submit(make, isa, name)
        return begun[isa, name]


def make(isa: str, name: str) -> ctypes.CDLL:
    try:
        library = load(build.library(isa, name))
    except NotImplementedError as reason:
        explain(str(reason))
        raise
    if hasattr(library, "quire_kernel"):
        jax.ffi.register_ffi_target(
            known(isa, name), jax.ffi.pycapsule(library.quire_kernel), platform="cpu"
        )
    return library


def known(isa: str, name: str) -> str:
    # With the sources' hash: a program from the compile cache never calls a kernel it was not made
    # for.
    return f"quire_{name}_{isa}_{build.source_hash()}"


def serves() -> bool:
    """Whether the kernels can be used; if not, the log says why, once."""
    try:
        instruction_set()
    except NotImplementedError as reason:
        explain(str(reason))
        return False
    return True


@cache
def explain(reason: str) -> None:
    if jax.default_backend() == "cpu" and os.environ.get("QUIRE_NATIVE") != "off":
        logging.getLogger("quire").warning(
            "native kernels are not in use, XLA's own serve instead: %s", reason
        )


def chosen(wish: str) -> str:
    """The instruction set that was asked for, or the best that works."""
    with lock:  # a second caller waits for the first one's answer
        found = choose(wish)
    if isinstance(found, NotImplementedError):
        raise NotImplementedError(str(found))
    return found


@cache
def choose(wish: str) -> str | NotImplementedError:
    """The same, or why there is none; cached either way."""
    try:
        if wish == "off":
            raise NotImplementedError("QUIRE_NATIVE is off")
        names = build.choices(wish)
        for isa in names:
            if load(build.library(isa, "probe")).quire_permitted():
                return isa
        raise NotImplementedError(f"the system does not lend the registers of {' or '.join(names)}")
    except NotImplementedError as reason:
        return reason


def load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotImplementedError(f"{path} cannot be loaded: {error}") from None
