"""Compilation of the kernels with the system's compiler, once per machine, into a private folder.

Each variant of a kernel is a separate library, so that a start waits only for the kernels of its
model. The folder's name is a hash of everything that the libraries depend on, so that outdated ones
are never used. If two processes build the same library, they write the same bytes, and the later
rename wins.
"""

import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

import jax

from ..cache_folder import home, publish, remove_stale_parts
from .kernel_names import CODE_KERNELS

SOURCES = Path(__file__).parent
SHIPPED = "built"  # the folder with the libraries of a wheel
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
# The system's headers that the sources include, for `precompiled_headers`.
HEADERS = SOURCES / "system.h"
headers_lock = Lock()  # so that they are precompiled once
# Variants of sources that are compiled for several types: the source, and the type's macros.
TYPED_VARIANTS: dict[str, tuple[str, ...]] = {
    "dense_f32": ("dense.cc", "-DFORMAT=F32"),
    "dense_bf16": ("dense.cc", "-DFORMAT=Bf16"),
    "fp8": ("grouped.cc", "-DFORMAT=Fp8", "-DCODES=dtype::U8"),
    "int8_groups": ("grouped.cc", "-DFORMAT=Int8Groups", "-DCODES=dtype::U8"),
    "int8_groups_a8": ("grouped.cc", "-DFORMAT=Int8GroupsA8", "-DCODES=dtype::U8"),
    "int8_weights": ("int8_weights.cc",),
    "int4": ("int4.cc", "-DFORMAT=Int4"),
    "int4_a8": ("int4.cc", "-DFORMAT=Int4A8"),
    "mxfp4": ("mxfp4.cc", "-DFORMAT=Mxfp4"),
    "mxfp4_a8": ("mxfp4.cc", "-DFORMAT=Mxfp4A8"),
    "float4": ("grouped.cc", "-DFORMAT=Float4", "-DCODES=dtype::U32"),
    "nf4": ("grouped.cc", "-DFORMAT=Nf4", "-DCODES=dtype::U32"),
    "fp4": ("grouped.cc", "-DFORMAT=Fp4", "-DCODES=dtype::U32"),
    "float4_a8": ("grouped.cc", "-DFORMAT=Float4A8", "-DCODES=dtype::U32"),
    "iq4": ("grouped.cc", "-DFORMAT=Iq4", "-DCODES=dtype::U32"),
    "iq4_a8": ("grouped.cc", "-DFORMAT=Iq4A8", "-DCODES=dtype::U32"),
    "uint4": ("grouped.cc", "-DFORMAT=Uint4", "-DCODES=dtype::U32"),
    "uint4_a8": ("grouped.cc", "-DFORMAT=Uint4A8", "-DCODES=dtype::U32"),
    "uint4_half": (
        "grouped.cc",
        "-DFORMAT=Int4",
        "-DCODES=dtype::U32",
        "-DSCALE_TYPE=Float16Scale",
    ),
    "uint4_half_a8": (
        "grouped.cc",
        "-DFORMAT=Int4A8",
        "-DCODES=dtype::U32",
        "-DSCALE_TYPE=Float16Scale",
    ),
    "uint5_half": (
        "grouped.cc",
        "-DFORMAT=Uint5Half",
        "-DCODES=dtype::U32",
        "-DSCALE_TYPE=Float16Scale",
    ),
    "uint5_half_a8": (
        "grouped.cc",
        "-DFORMAT=Uint5HalfA8",
        "-DCODES=dtype::U32",
        "-DSCALE_TYPE=Float16Scale",
    ),
    "uint4_levels": ("levels.cc", "-DFORMAT=Uint4TwoLevel"),
    "uint4_levels_a8": ("levels.cc", "-DFORMAT=Uint4TwoLevelA8"),
    "uint6_levels": ("levels.cc", "-DFORMAT=Uint6TwoLevel"),
    "uint6_levels_a8": ("levels.cc", "-DFORMAT=Uint6TwoLevelA8"),
    "iq4_levels": ("levels.cc", "-DFORMAT=Iq4TwoLevel"),
    "iq4_levels_a8": ("levels.cc", "-DFORMAT=Iq4TwoLevelA8"),
    "attention_f32": ("attention.cc", "-DPAGE=float", "-DROW=float"),
    "attention_bf16": ("attention.cc", "-DPAGE=uint16_t", "-DROW=uint16_t"),
    "attention_bf16_f32": ("attention.cc", "-DPAGE=uint16_t", "-DROW=float"),
    "attention_int8_bf16": ("attention.cc", "-DPAGE=int8_t", "-DROW=uint16_t"),
    "attention_int8_f32": ("attention.cc", "-DPAGE=int8_t", "-DROW=float"),
    "attention_int4_bf16": ("attention.cc", "-DPAGE=attention::Int4Pair", "-DROW=uint16_t"),
    "attention_int4_f32": ("attention.cc", "-DPAGE=attention::Int4Pair", "-DROW=float"),
}
# Products of float32 activations without rounding.
TYPED_VARIANTS |= {
    f"{name}_f32": (*TYPED_VARIANTS[name], "-DQUIRE_FLOAT_ROWS") for name in CODE_KERNELS
}
TYPED_SOURCES = {source for source, *_ in TYPED_VARIANTS.values()}
# Every other source is a variant of the same name.
VARIANTS = {
    path.stem: (path.name,)
    for path in sorted(SOURCES.glob("*.cc"))
    if path.name not in TYPED_SOURCES
} | TYPED_VARIANTS


@dataclass(frozen=True)
class Isa:
    """An instruction set."""

    flags: tuple[str, ...]  # of the compiler
    required_flags: frozenset[str]  # of the processor, see `cpu_flags`


def _isa(flags: str, required_flags: str) -> Isa:
    return Isa(tuple(flags.split()), frozenset(required_flags.split()))


V3 = "avx2 fma f16c bmi2"
V4 = f"{V3} avx512f avx512bw avx512dq avx512vl avx512cd"
# what the compiler may use for ARMv8.2 without options, and int8 dot products
V8_2 = "atomics asimdrdm asimddp"
ISAS = {  # by machine, the best first; names are unique over all machines
    "x86_64": {
        "amx": _isa(
            "-march=x86-64-v4 -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8",
            f"{V4} avx512_vnni amx_tile amx_bf16 amx_int8",
        ),
        "avx512_bf16": _isa(
            "-march=x86-64-v4 -mavx512bf16 -mavx512vnni", f"{V4} avx512_bf16 avx512_vnni"
        ),
        "avx512_vnni": _isa("-march=x86-64-v4 -mavx512vnni", f"{V4} avx512_vnni"),
        "avx512": _isa("-march=x86-64-v4", V4),
        "avx2": _isa("-march=x86-64-v3", V3),
        "baseline": _isa("-march=x86-64", ""),
        # for tests on processors without AMX
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
    """The distinct values of these fields in /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return ()
    lines = (line.partition(":") for line in info.read_text().splitlines())
    return tuple(dict.fromkeys(value.strip() for name, _, value in lines if name.strip() in names))


def named(isa: str) -> Isa:
    """The instruction set with this name, of any machine: $CXX may be a cross compiler."""
    return next(kind[isa] for kind in ISAS.values() if isa in kind)


def cpu_flags() -> frozenset[str]:
    """The feature flags of the processor."""
    return frozenset(" ".join(cpu_info("flags", "Features")[:1]).split())


def isas() -> dict[str, Isa]:
    """The instruction sets that this machine's processor supports, the best first."""
    supported = {
        name: isa
        for name, isa in ISAS.get(platform.machine(), {}).items()
        if isa.required_flags <= cpu_flags()
    }
    if cpu_info("vendor_id") == ("GenuineIntel",) and "avx512_bf16" in supported:
        # Intel's cores do a bfloat16 dot product in the time of four float32 FMAs, half the
        # arithmetic. AMX is not affected.
        supported["avx512_bf16"] = supported.pop("avx512_bf16")
    return supported


def choices(requested: str = "") -> list[str]:
    """The names of the instruction sets to try: the requested one, or all supported ones, the best
    first.
    """
    supported = list(isas())
    if requested and requested not in supported:
        raise NotImplementedError(
            f"this processor has no {requested!r}; it can be {', '.join(supported) or 'none'}"
        )
    if not supported:
        raise NotImplementedError(f"there are no kernels for {platform.machine()}")
    return [requested] if requested else supported


def compiler() -> list[str]:
    """The command of the C++ compiler, with the arguments in $CXX."""
    for command in (os.environ.get("CXX", "").split(), ["g++"], ["clang++"], ["c++"]):
        if command and shutil.which(command[0]):
            return command
    raise NotImplementedError(
        "there is no C++ compiler: install g++ or clang++, or name one in CXX"
    )


def cache_folder() -> Path:
    """The cache folder of libraries. It must be private, since they are executed."""
    return home("native")


def library(isa: str, variant: str) -> Path:
    """The path of a variant's library: built ahead, from the cache, or compiled now."""
    if path := ready(isa, variant):
        return path
    command = compiler()
    return built(command, isa, variant, private(cache_folder()) / key(command, isa))


def ready(isa: str, variant: str) -> Path | None:
    """The path of a library that `quire build-kernels` wrote to QUIRE_KERNELS or that is in the
    installed wheel; None if there is none.
    """
    kernels_folder = os.environ.get("QUIRE_KERNELS")
    for folder in ([Path(kernels_folder)] if kernels_folder else []) + [SOURCES / SHIPPED]:
        path = prebuilt(folder, isa) / f"{variant}.so"
        if path.exists():
            return path
    return None


def is_built(isa: str, variant: str) -> bool:
    """Whether `library` would find the variant without compiling it."""
    if ready(isa, variant):
        return True
    return (cache_folder() / key(compiler(), isa) / f"{variant}.so").exists()


def prebuilt(folder: Path, isa: str) -> Path:
    """The subfolder of libraries that were built ahead.

    Its name does not depend on the compiler, since this machine may have another one or none.
    """
    return folder / "-".join(
        component for component in (isa, source_hash(), processor(isa)) if component
    )


def processor(isa: str) -> str:
    """A hash of this processor if the flags contain `native`; otherwise empty."""
    if not any("native" in flag for flag in named(isa).flags):
        return ""
    description = cpu_info("flags", "Features", "CPU implementer", "CPU variant", "CPU part") or (
        platform.processor(),
    )
    return digest("\n".join(sorted(description)))


def built(command: list[str], isa: str, variant: str, folder: Path) -> Path:
    """The path of a variant's library in this folder, where it is compiled if it is missing."""
    path = private(folder) / f"{variant}.so"
    if not path.exists():
        compile_into(path, command, isa, variant)
    return path


def private(folder: Path) -> Path:
    """Create the folder if it is missing; NotImplementedError if other users can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise NotImplementedError(
            f"{folder} cannot be made: {error.strerror}; XDG_CACHE_HOME names another place"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotImplementedError(
            f"{folder} can be written to by others; make it yours alone (chmod 700)"
        )
    return folder


def sources() -> list[Path]:
    return sorted([*SOURCES.glob("*.cc"), *SOURCES.glob("*.h")])


@cache
def source_hash() -> str:
    """A hash of the sources, the flags, the variants and XLA's FFI headers."""
    hasher = hashlib.sha256(repr((FLAGS, VARIANTS)).encode())
    for path in [*sources(), Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"]:
        hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()[:16]


def key(command: list[str], isa: str) -> str:
    """The name of the folder for libraries of an instruction set: a hash of the sources, the
    compiler, the flags and, if these contain `native`, the processor.
    """
    components = [
        source_hash(),
        " ".join(command),
        version(*command),
        *named(isa).flags,
        processor(isa),
    ]
    return f"{isa}-{digest(chr(10).join(components))}"


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
    """Compile a variant's library, atomically."""
    source, *defines = VARIANTS[variant]
    flags = [*FLAGS, *named(isa).flags]
    try:
        remove_stale_parts(path.parent)
        with headers_lock:
            headers = precompiled_headers(tuple(command), tuple(flags))
        if headers and not Path(headers[-1]).exists():  # temporary files were cleaned up
            headers = ()
        arguments = [*flags, *headers, *defines, "-isystem", jax.ffi.include_dir(), "-shared"]
        with publish(path) as temporary:
            run([*command, *arguments, str(SOURCES / source), "-o", str(temporary)], variant)
    except OSError as error:
        raise NotImplementedError(f"{path} cannot be written: {error.strerror}") from None


@cache
def precompiled_headers(command: tuple[str, ...], flags: tuple[str, ...]) -> tuple[str, ...]:
    """Options that include the system's headers, precompiled; none for compilers other than g++.

    They take about a second of each kernel's compilation. The file takes 60 MB, so it is removed
    when this process ends.
    """
    if "Free Software Foundation" not in version(*command):
        return ()
    try:
        folder = Path(precompiled_folder().name) / digest(repr((command, flags)))
        folder.mkdir()
        headers = str(shutil.copy(HEADERS, folder))
        arguments = [*flags, "-x", "c++-header", headers, "-o", f"{headers}.gch"]
        run([*command, *arguments], HEADERS.name)
    except (OSError, NotImplementedError):  # such as a full disk
        return ()
    return "-include", headers


@cache
def precompiled_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="quire-headers-", ignore_cleanup_errors=True)


def run(command: list[str], variant: str) -> None:
    failure = f"{command[0]} could not compile the kernel {variant}"
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotImplementedError(f"{failure}: {error}") from None
    if result.returncode:
        first_error = next(
            (line for line in result.stderr.splitlines() if "error" in line),
            result.stderr.strip()[:300],
        )
        raise NotImplementedError(f"{failure}: {first_error}")
