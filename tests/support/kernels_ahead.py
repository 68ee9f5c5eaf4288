"""Compile kernels for a GPU without one; `make gpu-compiler` installs the compiler.

As a program it compiles the steps that `step_of` of a test file returns for each name.
"""

import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from quire.ops.gpu import graphs
from quire.tests.support.cases import FACTOR
from tools.gpu.program import read_thunks, spilled_bytes, thunks
from tools.gpu.target import APART, described, missing

LACKING = missing()
needs_compiler = pytest.mark.skipif(
    LACKING is not None and "QUIRE_NEEDS_GPU_COMPILER" not in os.environ,
    reason=f"no kernel is compiled for a GPU: {LACKING} (or make gpu-compiler)",
)


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: resources that ptxas reports."""

    registers: int  # per thread, before warpgroups reallocate theirs
    stored: int  # bytes of spill stores
    loaded: int  # bytes of spill loads
    shared: int  # bytes of shared memory
    log: str


@dataclass(frozen=True)
class CompiledStep:
    kernels: list[Compiled]  # Mosaic GPU kernels
    graphs: int
    outside: dict[str, int]  # kernels outside of graphs
    spilled: int  # bytes, over all kernels including XLA's and Triton's


def compile_some(
    tests: str, cases: Iterable[str], quick_names: Collection[str], card: str = "h200"
) -> dict[str, CompiledStep]:
    """Compile the step of each case in another process, so that this one does not load the plugin.

    With QUIRE_CASES below 1, only the cases of `quick_names`.
    """
    names = [name for name in cases if name in quick_names or FACTOR >= 1]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, __file__, tests, card, *names]
    completed = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=3000
    )
    assert not completed.returncode, completed.stderr[-3000:]
    steps = map(json.loads, completed.stdout.splitlines())
    return {
        name: CompiledStep([Compiled(**kernel) for kernel in kernels], *figures)
        for name, kernels, *figures in steps
    }


def parse_kernel_log(log: Path) -> Compiled:
    log_text = log.read_text()
    passes = log.with_suffix(".mlir-passes.log").read_text()
    stored, loaded = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log_text)[-1]
    registers = re.findall(r"Used (\d+) registers", log_text)[-1]
    shared = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)[-1]
    return Compiled(int(registers), int(stored), int(loaded), int(shared), log_text)


def main() -> None:
    import jax
    from jax.sharding import SingleDeviceSharding

    tests, card, *names = sys.argv[1:]
    # before Mosaic is imported, which searches sys.path for the launcher of its kernels
    sys.path.append(str(APART))
    step_of = runpy.run_path(tests)["step_of"]
    with described(card) as devices:
        sharding = SingleDeviceSharding(devices[0])
        for name in names:
            step, arguments = step_of(name)
            placed = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                arguments,
            )
            with tempfile.TemporaryDirectory() as logs:
                os.environ["MOSAIC_GPU_DUMP_TO"] = logs
                lowered = step.trace(*placed).lower(lowering_platforms=("cuda",))
                (dumped := Path(logs, "xla")).mkdir()
                lowered.compile((graphs.compiler_options() or {}) | {"xla_dump_to": str(dumped)})
                kernels = [parse_kernel_log(log) for log in sorted(Path(logs).glob("*.ptxas"))]
                recorded, _, outside, _ = read_thunks(thunks(dumped))
                figures = (
                    [asdict(kernel) for kernel in kernels],
                    recorded,
                    outside,
                    spilled_bytes(dumped, Path(logs)),
                )
            print(json.dumps([name, *figures]), flush=True)


if __name__ == "__main__":
    main()
