"""The kernels under the compiler's sanitizers, over random cases without XLA."""

import subprocess
from pathlib import Path

import jax
import pytest

from quire.ops.native import build
from quire.tests.support.cases import cases

RUNS = str(cases(3))  # random cases of each kind; the programs' default is 20
CASES = sorted(Path(__file__).parent.glob("native_*_cases.cc"))

pytestmark = pytest.mark.slow


def sanitizer_isas(cases: Path) -> list[str]:
    """The best instruction set without AMX assembly, which sanitizers cannot see; emulated AMX."""
    able = list(build.isas())
    emulated = ["amx-emulated"] if "amx-emulated" in able and "linear" in cases.stem else []
    return [name for name in able if "amx" not in name][:1] + emulated


BUILDS = [
    pytest.param(
        sanitizer,
        path,
        isa,
        id=f"{path.stem}-{isa}-{sanitizer}",
        marks=pytest.mark.nightly if sanitizer == "thread" or isa == "amx-emulated" else (),
    )
    for path in CASES
    for isa in sanitizer_isas(path)
    for sanitizer in ("address,undefined", "thread")
]


@pytest.mark.parametrize(("sanitizer", "cases", "isa"), BUILDS)
def test_kernel_cases_pass_under_sanitizers(sanitizer, cases, isa, tmp_path):
    try:
        command = build.compiler()
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    program = tmp_path / "cases"
    flags = [
        *build.isas()[isa].flags,
        "-std=c++17",
        # With -O1, compilation takes three times as long, and with the variables of -g twice as long.
        "-O0",
        "-g1",
        "-pthread",
        "-Wno-psabi",
        f"-fsanitize={sanitizer}",
    ]
    if "undefined" in sanitizer:
        flags.append("-fno-sanitize-recover=undefined")
    includes = ["-isystem", jax.ffi.include_dir(), "-I", str(build.SOURCES)]
    built = subprocess.run(
        [*command, *flags, *includes, str(cases), "-o", str(program)],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if "cannot find -l" in built.stderr:
        pytest.skip(f"the compiler has no runtime for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(program), RUNS], capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout + run.stderr
