"""C++ kernels for CPUs, called through XLA's foreign function interface.

`QUIRE_NATIVE=off` turns them off, and `QUIRE_NATIVE=avx2` (or another one of `build.ISAS`) chooses
an instruction set. Each kernel is a separate library. It is built and loaded when it is first
called, or earlier by `prepare`.
"""

import ctypes
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock

import jax

from . import build

lock = Lock()
# At most one build per core, so that builds finish in the order of the requests.
builders = ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix="quire-kernels")
library_builds: dict[tuple[str, str], Future[ctypes.CDLL]] = {}  # by instruction set and kernel


def instruction_set() -> str:
    """The instruction set in use; NotImplementedError with the reason if there is none."""
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"these kernels run on a CPU, not on {jax.default_backend()}")
    return resolve_isa(os.environ.get("QUIRE_NATIVE", ""))


def target(name: str) -> str:
    """The name of a kernel's FFI target, after its build; NotImplementedError if that failed."""
    library(name)
    return ffi_name(instruction_set(), name)


def library(name: str) -> ctypes.CDLL:
    """The library of a kernel, after its build; NotImplementedError if that failed."""
    try:
        return start_build(instruction_set(), name).result()
    except NotImplementedError as reason:
        raise NotImplementedError(str(reason)) from None


def has(*names: str) -> bool:
    """Whether all these kernels can be called; otherwise the reason is logged."""
    try:
        for build_future in [start_build(instruction_set(), name) for name in names]:
            build_future.result()
    except NotImplementedError:
        return False
    return True


def outcomes() -> dict[str, bool]:
    """The kernels that were requested so far, and whether they can be called."""
    return {name: has(name) for _, name in tuple(library_builds)}


def prepare(
    names: Iterable[str], progress: Callable[[int, int], object] = lambda built, total: None
) -> Future[bool]:
    """Start building kernels in the background.

    Args:
        names: the kernels, in the order of their builds.
        progress: called with the numbers of built and of all kernels, whenever one is built, if
            any has to be compiled. Called in a builder's thread.

    Returns:
        A future, done when all builds have started: whether any kernel has to be compiled, which
        takes a while.
    """
    if jax.default_backend() == "cpu":
        requested = os.environ.get("QUIRE_NATIVE", "")
        return builders.submit(start_builds, requested, tuple(names), progress)
    result: Future[bool] = Future()
    result.set_result(False)
    return result


def start_builds(
    requested: str, names: tuple[str, ...], progress: Callable[[int, int], object]
) -> bool:
    try:
        isa = resolve_isa(requested)
        if all(build.is_built(isa, name) for name in names):
            for name in names:
                start_build(isa, name)
            return False
        futures = [start_build(isa, name) for name in names]
    except NotImplementedError:  # logged when a missing kernel is called
        return False
    for future in futures:
        future.add_done_callback(
            lambda _: progress(sum(future.done() for future in futures), len(futures))
        )
    return True


def start_build(isa: str, name: str) -> Future[ctypes.CDLL]:
    """The build of a library, which is started if it was not yet."""
    with lock:
        if (isa, name) not in library_builds:
            library_builds[isa, name] = builders.submit(build_and_load, isa, name)
        return library_builds[isa, name]


def build_and_load(isa: str, name: str) -> ctypes.CDLL:
    try:
        library = load(build.library(isa, name))
    except NotImplementedError as reason:
        explain(str(reason))
        raise
    if hasattr(library, "quire_kernel"):
        jax.ffi.register_ffi_target(
            ffi_name(isa, name), jax.ffi.pycapsule(library.quire_kernel), platform="cpu"
        )
    return library


def ffi_name(isa: str, name: str) -> str:
    # With the hash of the sources, so that a program from the compile cache never calls another
    # version of a kernel.
    return f"quire_{name}_{isa}_{build.source_hash()}"


def serves() -> bool:
    """Whether the kernels can be used; otherwise the reason is logged once."""
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


def resolve_isa(requested: str) -> str:
    """The requested instruction set, or the best one that works if `requested` is empty."""
    with lock:  # so that only one caller probes the processor
        choice = choose(requested)
    if isinstance(choice, NotImplementedError):
        raise NotImplementedError(str(choice))
    return choice


@cache
def choose(requested: str) -> str | NotImplementedError:
    """`resolve_isa` with the error as a value, so that it is cached too."""
    try:
        if requested == "off":
            raise NotImplementedError("QUIRE_NATIVE is off")
        candidates = build.choices(requested)
        for isa in candidates:
            if load(build.library(isa, "probe")).quire_permitted():
                return isa
        raise NotImplementedError(
            f"the system does not lend the registers of {' or '.join(candidates)}"
        )
    except NotImplementedError as reason:
        return reason


def load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotImplementedError(f"{path} cannot be loaded: {error}") from None
