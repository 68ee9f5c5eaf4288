"""The kernels on emulated ARM processors: random cases for each instruction set."""

import subprocess
from pathlib import Path

import jax
import pytest

from quire.ops.native import build
from quire.tests.support.arm_tools import COMPILER, EMULATOR, needed
from quire.tests.support.cases import cases

RUNS = str(cases(3))
CASES = sorted(Path(__file__).parent.glob("native_*_cases.cc"))
PROCESSORS = {"neon": "cortex-a57", "dotprod": "neoverse-n1", "bf16": "max"}
FEATURES = {  # names in /proc/cpuinfo
    "cortex-a57": "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid",
    "neoverse-n1": (
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm "
        "lrcpc dcpop asimddp"
    ),
    "neoverse-v1": (
        "fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm dcpop "
        "asimddp sve i8mm bf16"
    ),
}
LOAD = r"""
#include <dlfcn.h>
#include <cstdio>
int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    void* library = dlopen(names[i], RTLD_NOW);
    if (!library) return std::puts(dlerror()), 1;
    auto permitted = reinterpret_cast<int (*)()>(dlsym(library, "quire_permitted"));
    std::puts(permitted ? permitted() ? "permitted" : "refused" : dlsym(library, "quire_kernel") ? "kernel" : "other");
  }
}
"""


def run(*command: str | Path) -> str:
    process = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.parametrize(
    ("processor", "able"),
    [
        ("cortex-a57", ["neon"]),
        ("neoverse-n1", ["dotprod", "neon"]),
        ("neoverse-v1", ["bf16", "dotprod", "neon"]),
    ],
)
def test_instruction_set_follows_linux_cpu_features(processor, able, monkeypatch):
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(
        build, "cpu_info", lambda *names: (FEATURES[processor],) if "Features" in names else ()
    )
    assert build.choices() == able
    # a wheel's folders have names without the builder's processor
    assert not any(build.processor(isa) for isa in able)


@pytest.mark.nightly  # a compilation takes minutes
@pytest.mark.parametrize("isa", PROCESSORS)
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_kernel_cases_pass_in_the_emulator(isa, path, tmp_path):
    needed(COMPILER, EMULATOR)
    program = tmp_path / "cases"
    flags = [*build.FLAGS, *build.named(isa).flags, "-pthread", "-static"]
    includes = ["-isystem", jax.ffi.include_dir(), "-I", build.SOURCES]
    run(COMPILER, *flags, *includes, path, "-o", program)
    run(EMULATOR, "-cpu", PROCESSORS[isa], program, RUNS)


@pytest.mark.nightly
@pytest.mark.parametrize("isa", PROCESSORS)
def test_shipped_libraries_load(isa, tmp_path):
    """The shipped libraries load with all their system dependencies."""
    needed(COMPILER, EMULATOR)
    paths = [
        build.built([COMPILER], isa, name, tmp_path)
        for name in ("probe", "pack", "blank", "residual", "sampling")
    ]
    (tmp_path / "load.cc").write_text(LOAD)
    run(COMPILER, tmp_path / "load.cc", "-o", tmp_path / "load")
    root = Path("/usr/aarch64-linux-gnu")  # library folder of Debian's cross compiler
    output = run(
        EMULATOR,
        "-cpu",
        PROCESSORS[isa],
        *(["-L", root] if root.exists() else []),
        tmp_path / "load",
        *paths,
    )
    assert output.split() == ["permitted", "other", "kernel", "kernel", "kernel"]
