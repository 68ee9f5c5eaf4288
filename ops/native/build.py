"""Compiles the kernels with the system's compiler, once for each machine, into a private folder.

Each variant is a library of its own, so that a start waits for what its model calls and for nothing
else. The folder's name is a hash of everything that the result depends on, so that an old library
is never taken for a new one; two processes that build at once write the same bytes, and the later
rename wins.
"""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax

from ..cache_folder import home, publish, remove_stale_parts
from .kernel_names import CODE_KERNELS

SOURCES = Path(__file__).parent
SHIPPED = "built"  # the folder in a wheel that has libraries
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
# of a source that is compiled for several types: it, and one of them
SEVERAL: dict[str, tuple[str, ...]] = {
    "dense_f32": ("dense.cc", "-DFORMAT=F32"),
    "dense_bf16": ("dense.cc", "-DFORMAT=Bf16"),
    "fp8": ("grouped.cc", "-DFORMAT=Fp8", "-DCODES=dtype::U8"),
    "int8_groups": ("grouped.cc", "-DFORMAT=Int8Groups", "-DCODES=dtype::U8"),
    "int8_weights": ("int8_weights.cc",),
    "int4": ("int4.cc", "-DFORMAT=Int4"),
    "int4_a8": ("int4.cc", "-DFORMAT=Int4Bytes"),
    "mxfp4": ("mxfp4.cc", "-DFORMAT=Mxfp4"),
    "mxfp4_a8": ("mxfp4.cc", "-DFORMAT=Mxfp4Bytes"),
    "float4": ("grouped.cc", "-DFORMAT=Float4", "-DCODES=dtype::U32"),
    "nf4": ("grouped.cc", "-DFORMAT=Nf4", "-DCODES=dtype::U32"),
    "fp4": ("grouped.cc", "-DFORMAT=Fp4", "-DCODES=dtype::U32"),
    "float4_a8": ("grouped.cc", "-DFORMAT=Float4Bytes", "-DCODES=dtype::U32"),
    "iq4": ("grouped.cc", "-DFORMAT=Iq4", "-DCODES=dtype::U32"),
    "iq4_a8": ("grouped.cc", "-DFORMAT=Iq4Bytes", "-DCODES=dtype::U32"),
    "uint4": ("grouped.cc", "-DFORMAT=Uint4", "-DCODES=dtype::U32"),
    "uint4_a8": ("grouped.cc", "-DFORMAT=Uint4Bytes", "-DCODES=dtype::U32"),
    "uint4_levels": ("levels.cc", "-DFORMAT=Four"),
    "uint4_levels_a8": ("levels.cc", "-DFORMAT=FourBytes"),
    "uint6_levels": ("levels.cc", "-DFORMAT=Six"),
    "iq4_levels": ("levels.cc", "-DFORMAT=Steps"),
    "iq4_levels_a8": ("levels.cc", "-DFORMAT=StepsBytes"),
    "attention_f32": ("attention.cc", "-DPAGE=float", "-DROW=float"),
    "attention_bf16": ("attention.cc", "-DPAGE=uint16_t", "-DROW=uint16_t"),
    "attention_bf16_f32": ("attention.cc", "-DPAGE=uint16_t", "-DROW=float"),
    "attention_int8_bf16": ("attention.cc", "-DPAGE=int8_t", "-DROW=uint16_t"),
    "attention_int8_f32": ("attention.cc", "-DPAGE=int8_t", "-DROW=float"),
    "attention_int4_bf16": ("attention.cc", "-DPAGE=attention::Pair", "-DROW=uint16_t"),
    "attention_int4_f32": ("attention.cc", "-DPAGE=attention::Pair", "-DROW=float"),
}
# Products of float32 rows that keep all their bits.
SEVERAL |= {f"{name}_f32": (*SEVERAL[name], "-DQUIRE_FLOAT_ROWS") for name in CODE_KERNELS}
SHARED = {source for source, *_ in SEVERAL.values()}
# Any other source is one kernel, and has its name.
VARIANTS = {
    path.stem: (path.name,) for path in sorted(SOURCES.glob("*.cc")) if path.name not in SHARED
} | SEVERAL


@dataclass(frozen=True)
class Isa:
    """A set of instructions: what the compiler is told and what the processor must have."""

    flags: tuple[str, ...]
    needs: frozenset[str]


def _isa(flags: str, needs: str) -> Isa:
    return Isa(tuple(flags.split()), frozenset(needs.split()))


V3 = "avx2 fma f16c bmi2"
V4 = f"{V3} avx512f avx512bw avx512dq avx512vl avx512cd"
# of ARMv8.2 what the compiler may use unasked, and products of bytes
V8_2 = "atomics asimdrdm asimddp"
ISAS = {  # by kind of machine, the best first; a name means the same on all
    "x86_64": {
        "amx": _isa(
            "-march=x86-64-v4 -mavx512bf16 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8",
            f"{V4} avx512_bf16 avx512_vnni amx_tile amx_bf16 amx_int8",
        ),
        "avx512_bf16": _isa(
            "-march=x86-64-v4 -mavx512bf16 -mavx512vnni", f"{V4} avx512_bf16 avx512_vnni"
        ),
        "avx512": _isa("-march=x86-64-v4", V4),
        "avx2": _isa("-march=x86-64-v3", V3),
        "baseline": _isa("-march=x86-64", ""),
        # for tests where AMX is missing
        "amx-emulated": _isa("-march=x86-64-v3 -DQUIRE_EMULATE_AMX", V3),
    },
    "aarch64": {
        "bf16": _isa("-march=armv8.2-a+dotprod+i8mm+bf16", f"{V8_2} i8mm bf16"),
        "dotprod": _isa("-march=armv8.2-a+dotprod", V8_2),
        "neon": _isa("-march=armv8-a", ""),
    },
    "arm64": {"arm": _isa("-mcpu=native", "")},
}


@cache
def cpu_info(*names: str) -> tuple[str, ...]:
    """What Linux says about the processor under these names; each distinct answer once."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return ()
    lines = (line.partition(":") for line in info.read_text().splitlines())
    return tuple(dict.fromkeys(rest.strip() for name, _, rest in lines if name.strip() in names))


def named(isa: str) -> Isa:
    """An instruction set of any kind of machine: a compiler that $CXX names may be for another one
    than this.
    """
    return next(kind[isa] for kind in ISAS.values() if isa in kind)


def cpu_flags() -> frozenset[str]:
    """What the processor says that it can do."""
    return frozenset(" ".join(cpu_info("flags", "Features")[:1]).split())


def isas() -> dict[str, Isa]:
    """The instruction sets of this kind of machine that its processor has, the best first."""
    known = ISAS.get(platform.machine(), {})
    return {name: isa for name, isa in known.items() if isa.needs <= cpu_flags()}


def choices(wish: str = "") -> list[str]:
    """The names of the instruction sets to try: all, the best first, or the one wished for."""
    able = list(isas())
    if wish and wish not in able:
        raise NotImplementedError(
            f"this processor has no {wish!r}; it can be {', '.join(able) or 'none'}"
        )
    if not able:
        raise NotImplementedError(f"there are no kernels for {platform.machine()}")
    return [wish] if wish else able


def compiler() -> list[str]:
    """The C++ compiler, with the arguments that $CXX may hold."""
    for command in (os.environ.get("CXX", "").split(), ["g++"], ["clang++"], ["c++"]):
        if command and shutil.which(command[0]):
            return command
    raise NotImplementedError(
        "there is no C++ compiler: install g++ or clang++, or name one in CXX"
    )


def cache_folder() -> Path:
    """Where libraries are kept: in a private folder, since they are run."""
    return home("native")


def library(isa: str, variant: str) -> Path:
    """A variant for an instruction set: one that lies ready, from the cache, or built now."""
    if path := ready(isa, variant):
        return path
    command = compiler()
    return built(command, isa, variant, private(cache_folder()) / key(command, isa))


def ready(isa: str, variant: str) -> Path | None:
    """A variant as `quire build-kernels` left it in QUIRE_KERNELS, or as a wheel for this platform
    has it.
    """
    chosen = os.environ.get("QUIRE_KERNELS")
    for folder in ([Path(chosen)] if chosen else []) + [SOURCES / SHIPPED]:
        path = prebuilt(folder, isa) / f"{variant}.so"
        if path.exists():
            return path
    return None


def is_built(isa: str, variant: str) -> bool:
    """Whether `library` would find it and compile nothing."""
    if ready(isa, variant):
        return True
    return (cache_folder() / key(compiler(), isa) / f"{variant}.so").exists()


def prebuilt(folder: Path, isa: str) -> Path:
    """Where libraries that were built ahead lie; not by compiler, since this machine may have
    another one, or none.
    """
    return folder / "-".join(part for part in (isa, source_hash(), processor(isa)) if part)


def processor(isa: str) -> str:
    """A hash of what `native` among the flags means on this machine; empty where the flags say
    it all.
    """
    if not any("native" in flag for flag in named(isa).flags):
        return ""
    about = cpu_info("flags", "Features", "CPU implementer", "CPU variant", "CPU part") or (
        platform.processor(),
    )
    return digest("\n".join(sorted(about)))


def built(command: list[str], isa: str, variant: str, place: Path) -> Path:
    """A variant's library in this folder, compiled if it is not there."""
    path = private(place) / f"{variant}.so"
    if not path.exists():
        compile_into(path, command, isa, variant)
    return path


def private(folder: Path) -> Path:
    """The folder, made if it is missing; an error if anybody else could write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except OSError as error:
        raise NotImplementedError(
            f"{folder} cannot be made: {error.strerror}; XDG_CACHE_HOME names another place"
        ) from None
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotImplementedError(
            f"{folder} can be written to by others; make it yours alone (chmod 700)"
        )
    return folder


def sources() -> list[Path]:
    return sorted([*SOURCES.glob("*.cc"), *SOURCES.glob("*.h")])


@cache
def source_hash() -> str:
    """A hash of the sources, what they are compiled for, and the interface that they are bound
    by.
    """
    found = hashlib.sha256(repr((FLAGS, VARIANTS)).encode())
    for path in [*sources(), Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"]:
        found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def key(command: list[str], isa: str) -> str:
    """What the libraries of a folder depend on: sources, compiler, flags and, where these say
    `native`, the machine.
    """
    about = [source_hash(), " ".join(command), version(*command), *named(isa).flags, processor(isa)]
    return f"{isa}-{digest(chr(10).join(about))}"


@cache
def version(*command: str) -> str:
    try:
        return subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotImplementedError(f"{command[0]} does not tell its version: {error}") from None


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compile_into(path: Path, command: list[str], isa: str, variant: str) -> None:
    """Compile a variant; the library appears whole or not at all."""
    source, *defines = VARIANTS[variant]
    flags = [*FLAGS, *named(isa).flags, *defines, "-isystem", jax.ffi.include_dir()]
    try:
        remove_stale_parts(path.parent)
        with publish(path) as part:
            run([*command, *flags, "-shared", str(SOURCES / source), "-o", str(part)], variant)
    except OSError as error:
        raise NotImplementedError(f"{path} cannot be written: {error.strerror}") from None


def run(command: list[str], variant: str) -> None:
    failed = f"{command[0]} could not compile the kernel {variant}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotImplementedError(f"{failed}: {error}") from None
    if done.returncode:
        first = next(
            (line for line in done.stderr.splitlines() if "error" in line),
            done.stderr.strip()[:300],
        )
        raise NotImplementedError(f"{failed}: {first}")
