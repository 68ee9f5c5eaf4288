"""Compiles a step for a GPU with XLA and reads its launches, CUDA graphs, memory and traffic."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import jax

from quire.ops.gpu import graphs
from quire.serving.engine.cache_size import memory_of

from .hlo import Module, PartOf, TurnsOf, Work
from .target import ptxas

THUNK = re.compile(r"^( *)\d+: (k\w+) +(?:\[[^]]*\])? *(\w*)")
CONTROL = {
    "kCommandBuffer",
    "kWhile",
    "kConditional",
    "kSequential",
    "kAsyncStart",
    "kAsyncDone",
    "kPartitionId",
    "kReplicaId",
}
# The stack frame is part of the pattern because a warning repeats the numbers of spills.
SPILLS = re.compile(r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Program:
    """Figures of a compiled step."""

    graphs: int  # CUDA graphs
    # Kernels, copies and collectives in the program; those in loops count once.
    launches: int
    # Thunks outside of CUDA graphs, by kind: kernels, and anything that synchronises with the host.
    outside: dict[str, int]
    sorts: int  # XLA's; on a real GPU it may use CUB's sort, which runs outside of graphs
    temporaries: int  # bytes
    work: Work
    spilled: int | None = None  # bytes of registers spilled by all kernels; None: not measured


def compile_program(
    lowered: jax.stages.Lowered,
    shares: PartOf,
    turns: TurnsOf,
    spills: bool = False,
) -> Program:
    """Compile a step with the engine's compiler options and analyse XLA's dumps.

    `shares` and `turns` are explained at `Module.work`.
    """
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        (kernels := folder / "mosaic").mkdir()
        compiler_options: jax.stages.CompilerOptions = graphs.compiler_options() or {}
        # Without a GPU, XLA cannot autotune its kernels.
        compiler_options |= {"xla_dump_to": str(folder), "xla_gpu_autotune_level": "0"}
        with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_TO": str(kernels)} if spills else {}):
            compiled = lowered.compile(compiler_options)
        thunk_counts = read_thunks(thunks(folder))
        work = Module(compiled.as_text() or "").work(shares, turns)
        spilled = spilled_bytes(folder, kernels) if spills else None
        return Program(*thunk_counts, memory_of(compiled).temporaries, work, spilled)


def thunks(folder: Path) -> str:
    """The program's sequence of thunks (launches) in XLA's dump; the name depends on its passes."""
    for name in ("thunk_sequence_after_thunk_passes", "thunk_sequence"):
        for path in folder.glob(f"*.{name}.txt"):
            return path.read_text()
    raise FileNotFoundError("XLA wrote no sequence of launches")


def read_thunks(text: str) -> tuple[int, int, dict[str, int], int]:
    """Count (graphs, launches, thunks outside of graphs by kind, sorts) in a thunk sequence."""
    graphs = 0
    launches = 0
    outside = Counter()
    sorts = 0
    graph = None
    for line in text.splitlines():
        match = THUNK.match(line)
        if match is None:
            continue
        depth = len(match[1])
        kind = match[2]
        name = match[3]
        if graph is not None and depth <= graph:
            graph = None
        if kind == "kCommandBuffer":
            graphs = graphs + 1
            graph = depth
        launches += kind not in CONTROL
        sorts += name.startswith("sort")
        if graph is None:
            outside["sort" if name.startswith("sort") else kind] += 1
    return graphs, launches, dict(outside), sorts


def spilled_bytes(folder: Path, kernels: Path) -> int:
    """Bytes of registers spilled in all kernels, stores plus loads, by ptxas."""
    assembler = ptxas()
    assert assembler is not None

    def assembled(path: Path) -> str:
        if (target := re.search(r"^\.target (\w+)", path.read_text(), re.M)) is None:
            return ""  # a module without kernels by XLA
        command = [assembler, "-v", f"-arch={target[1]}", path, "-o", path.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    with ThreadPoolExecutor(2) as threads:
        logs = [*threads.map(assembled, sorted(folder.glob("*.ptx")))]
    logs += [path.read_text() for path in kernels.glob("*.ptxas")]
    return sum(
        int(stored) + int(loaded) for text in logs for stored, loaded in SPILLS.findall(text)
    )
