"""Compiles kernels to what a card runs, without one: `make gpu-compiler` installs what does it.

Run as a program, it compiles what `step_of` of a file of tests gives for each name.
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
    """A kernel, and what ptxas says of it."""

    registers: int  # of a thread, before warpgroups trade theirs
    stored: int  # bytes that are spilled
    loaded: int
    shared: int  # bytes of shared memory
    log: str


@dataclass(frozen=True)
class CompiledStep:
    kernels: list[Compiled]  # of Mosaic GPU
    graphs: int
    outside: dict[str, int]  # of graphs
    spilled: int  # bytes, of all kernels, XLA's and Triton's too


def compile_some(
    tests: str, cases: Iterable[str], kept: Collection[str], card: str = "h200"
) -> dict[str, CompiledStep]:
    """The step of each case that is tried here: in a process of its own, since no other should meet
    the plugin.
    """
    names = [name for name in cases if name in kept or FACTOR >= 1]
    changed = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, __file__, tests, card, *names]
    done = subprocess.run(
        command, env=os.environ | changed, capture_output=True, text=True, timeout=3000
    )
    assert not done.returncode, done.stderr[-3000:]
    steps = map(json.loads, done.stdout.splitlines())
    return {
        name: CompiledStep([Compiled(**one) for one in kernels], *found)
        for name, kernels, *found in steps
    }


def kernel_of(log: Path) -> Compiled:
    said = log.read_text()
    passes = log.with_suffix(".mlir-passes.log").read_text()
    stored, loaded = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)[-1]
    registers = re.findall(r"Used (\d+) registers", said)[-1]
    shared = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)[-1]
    return Compiled(int(registers), int(stored), int(loaded), int(shared), said)


def main() -> None:
    import jax
    from jax.sharding import SingleDeviceSharding

    tests, card, *names = sys.argv[1:]
    # before Mosaic is imported, which looks there for what launches its kernels
    sys.path.append(str(APART))
    step_of = runpy.run_path(tests)["step_of"]
    with described(card) as devices:
        where = SingleDeviceSharding(devices[0])
        for name in names:
            step, arguments = step_of(name)
            placed = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), arguments
            )
            with tempfile.TemporaryDirectory() as logs:
                os.environ["MOSAIC_GPU_DUMP_TO"] = logs
                lowered = step.trace(*placed).lower(lowering_platforms=("cuda",))
                (dumped := Path(logs, "xla")).mkdir()
                lowered.compile((graphs.compiler_options() or {}) | {"xla_dump_to": str(dumped)})
                kernels = [kernel_of(log) for log in sorted(Path(logs).glob("*.ptxas"))]
                recorded, _, outside, _ = read_thunks(thunks(dumped))
                found = (
                    [asdict(kernel) for kernel in kernels],
                    recorded,
                    outside,
                    spilled_bytes(dumped, Path(logs)),
                )
            print(json.dumps([name, *found]), flush=True)


if __name__ == "__main__":
    main()
