"""A step's program as XLA compiles it for a card: its launches, its CUDA graphs, its memory, and
what it moves.
"""

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
# a warning says it again
SPILLS = re.compile(r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Program:
    """What is known of a compiled step."""

    graphs: int
    # kernels, copies and collectives, each once: what is in a loop is launched at every turn
    launches: int
    # what no graph holds: kernels, and whatever makes the host wait, by its name
    outside: dict[str, int]
    sorts: int  # on a card XLA may take CUB's instead, which is in no graph
    temporaries: int
    work: Work
    spilled: int | None = None  # bytes, of all kernels together; None: nobody asked


def compile_program(
    lowered: jax.stages.Lowered,
    shares: PartOf,
    turns: TurnsOf,
    spills: bool = False,
) -> Program:
    """Compile a step as it is served, and read what XLA says of it.

    `shares` and `turns`: see `Module.work`.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (kernels := folder / "mosaic").mkdir()
        asked = graphs.compiler_options() or {}
        # No card is here on which XLA could try which of its kernels are faster.
        asked |= {"xla_dump_to": str(folder), "xla_gpu_autotune_level": "0"}
        with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_TO": str(kernels)} if spills else {}):
            compiled = lowered.compile(asked)
        found = read_thunks(thunks(folder))
        work = Module(compiled.as_text() or "").work(shares, turns)
        spilled = spilled_bytes(folder, kernels) if spills else None
        return Program(*found, memory_of(compiled).temporaries, work, spilled)


def thunks(folder: Path) -> str:
    """What the program launches, in order; without graphs XLA writes one of these files only."""
    for name in ("thunk_sequence_after_thunk_passes", "thunk_sequence"):
        for path in folder.glob(f"*.{name}.txt"):
            return path.read_text()
    raise FileNotFoundError("XLA wrote no sequence of launches")


def read_thunks(text: str) -> tuple[int, int, dict[str, int], int]:
    """(graphs, launches, what is outside of graphs, sorts wherever they are)."""
    graphs = 0
    launches = 0
    outside = Counter()
    sorts = 0
    graph = None
    for line in text.splitlines():
        found = THUNK.match(line)
        if found is None:
            continue
        depth = len(found[1])
        kind = found[2]
        name = found[3]
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
    """Bytes that ptxas spills in all kernels, of stores and loads together."""
    assembler = ptxas()
    assert assembler is not None

    def assembled(path: Path) -> str:
        if (target := re.search(r"^\.target (\w+)", path.read_text(), re.M)) is None:
            return ""  # XLA has no kernels of its own here
        command = [assembler, "-v", f"-arch={target[1]}", path, "-o", path.with_suffix(".cubin")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    with ThreadPoolExecutor(2) as threads:
        said = [*threads.map(assembled, sorted(folder.glob("*.ptx")))]
    said += [path.read_text() for path in kernels.glob("*.ptxas")]
    return sum(
        int(stored) + int(loaded) for text in said for stored, loaded in SPILLS.findall(text)
    )
