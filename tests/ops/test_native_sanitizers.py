"""The kernels under the compiler's sanitizers, over random cases without XLA: one program for each file of cases."""

import subprocess
from pathlib import Path

import jax
import pytest
from cases import cases

from quire.ops.native import build

RUNS = str(cases(3))  # random cases of each kind; a program by itself takes 20
CASES = sorted(Path(__file__).parent.glob("native_*_cases.cc"))

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_sanitized(cases, sanitizer, tmp_path):
    try:
        command, isa = build.compiler(), build.ISAS["x86_64"][build.choices()[0]]
    except (KeyError, NotImplementedError) as reason:
        pytest.skip(str(reason))
    program = tmp_path / "cases"
    flags = [*isa.flags, "-std=c++17", "-O1", "-g", "-pthread", "-Wno-psabi", f"-fsanitize={sanitizer}"]
    if "undefined" in sanitizer:
        flags.append("-fno-sanitize-recover=undefined")
    includes = ["-isystem", jax.ffi.include_dir(), "-I", str(build.SOURCES)]
    built = subprocess.run(
        [*command, *flags, *includes, str(cases), "-o", str(program)], capture_output=True, text=True, timeout=600
    )
    if "cannot find -l" in built.stderr:
        pytest.skip(f"the compiler has no runtime for -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    run = subprocess.run([str(program), RUNS], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
