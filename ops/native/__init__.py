"""Kernels for the CPU in C++, called through XLA's foreign function interface.

`QUIRE_NATIVE=off` leaves them out, `QUIRE_NATIVE=avx2` (or another of `build.ISAS`) takes that instruction set.
"""

import ctypes
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax

from . import build

WIDE = ("amx", "avx512_bf16", "avx512")
TARGETS = ("quire_attention", "quire_dense", "quire_int8", "quire_int4")


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels: the names under which XLA knows them, and the library itself."""

    isa: str
    library: ctypes.CDLL
    names: dict[str, str]


def kernels() -> Kernels:
    """The kernels in use; `NotImplementedError` says why there are none."""
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"these kernels run on a CPU, not on {jax.default_backend()}")
    found = loaded(os.environ.get("QUIRE_NATIVE", ""))
    if isinstance(found, NotImplementedError):
        raise found
    return found


def target(name: str) -> str:
    """The name under which XLA knows a kernel; `NotImplementedError` says why there is none."""
    return kernels().names[name]


def entry(name: str):
    """A function of the library that takes numpy's memory and not XLA's."""
    return getattr(kernels().library, name)


def serves() -> bool:
    """Whether the kernels can be used; if not, the log says why, once."""
    try:
        kernels()
    except NotImplementedError as reason:
        explain(str(reason))
        return False
    return True


def multiplies() -> bool:
    """Whether the weight products pay too: without AVX-512 GCC keeps sixteen lanes in memory, and XLA is faster."""
    return serves() and kernels().isa in WIDE


@cache
def explain(reason: str) -> None:
    if jax.default_backend() == "cpu" and os.environ.get("QUIRE_NATIVE") != "off":
        logging.getLogger("quire").warning("native kernels are not in use, XLA's own serve instead: %s", reason)


@cache
def loaded(wish: str) -> Kernels | NotImplementedError:
    """The kernels for the instruction set wished for, or the best that works; either answer is found out once."""
    try:
        if wish == "off":
            raise NotImplementedError("QUIRE_NATIVE is off")
        names = build.choices(wish)
        for isa in names:
            library = load(build.library(isa))
            if library.quire_permitted():
                return Kernels(isa, library, register(library, isa))
        raise NotImplementedError(f"the system does not lend the registers of {' or '.join(names)}")
    except NotImplementedError as reason:
        return reason


def load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotImplementedError(f"{path} cannot be loaded: {error}") from None


def register(library: ctypes.CDLL, isa: str) -> dict[str, str]:
    # The name carries the sources' hash: a program from the compile cache never calls a kernel it was not made for.
    names = {name: f"{name}_{isa}_{build.source_hash()}" for name in TARGETS}
    for name, known in names.items():
        jax.ffi.register_ffi_target(known, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return names
