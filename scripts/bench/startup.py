"""`quire bench startup`: time from process start to the first token, with cold and warm caches.

The timed subprocess runs this module: `python -m quire.scripts.bench.startup OPTIONS`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from time import monotonic  # one clock for all processes
from typing import Annotated, Any

from .. import options as o
from ..tables import table
from . import load as load
from . import report as reports
from .metrics import flat

STAGES = {
    "python": "interpreter",
    "imports": "imports",
    "ready": "model ready",
    "token": "first token",
}
PROMPT = [0] * 16
CACHES = ("XDG_CACHE_HOME", "QUIRE_CACHE_DIR")  # variables: folders of compiled code


@reports.takes_report()
@o.takes_engine(excluded=("tokenizer",))
def main(
    model: o.Model = None,
    num_iters: Annotated[
        int, o.size_option("Number of cold starts, each followed by a warm start.", load.DATA, "N")
    ] = 3,
    *,
    engine: dict[str, Any],
    report: reports.ResultFiles,
) -> None:
    """Measure startup in new processes. Prints the seconds to each stage with empty (cold) and full
    (warm) caches.
    """
    load.above_zero(num_iters=num_iters)
    from ...model.checkpoint import hub

    source = {name: engine.pop(name, None) for name in ("revision", "download_dir")}
    # Downloads before the measurement.
    options = {"model": str(hub.resolve(model, **source).resolve()), **engine}
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(num_iters):
        with tempfile.TemporaryDirectory(prefix="quire-startup-") as folder:
            for state in starts:
                starts[state].append(start(options, Path(folder)))
    name = model or "quill"
    result: dict[str, Any] = {"model": name, "stages": list(STAGES), "starts_s": starts}
    for state, runs in starts.items():
        result[state] = flat({stage: [run[stage] * 1000 for run in runs] for stage in STAGES})
    means = {
        state: [fmean(run[stage] for run in runs) for stage in STAGES]
        for state, runs in starts.items()
    }
    report.write(
        result,
        text(name, num_iters, starts),
        lambda plot, figure: plot.stages(
            figure, means, list(STAGES.values()), f"{name}: process start to first token"
        ),
    )


def start(options: dict[str, Any], caches: Path) -> dict[str, float]:
    """Start a process whose caches are in the folder `caches`. Returns the seconds from its start
    to the end of each stage.
    """
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
    }
    environment |= {name: str(caches / name.lower()) for name in CACHES}
    command = [sys.executable, "-m", f"{__package__}.startup", json.dumps(options)]
    begin = monotonic()
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        raise o.UsageError(f"the model did not start: {lines[-1]}")
    stage_ends = json.loads(child.stdout.splitlines()[-1])
    return {stage: stage_ends[stage] - begin for stage in STAGES}


def probe(options: dict[str, Any]) -> dict[str, float]:
    """Run in the timed process; returns the clock time at which each stage ends."""
    stage_ends = {"python": monotonic()}
    import jax  # noqa: F401

    from ... import LLM, SamplingParams

    stage_ends["imports"] = monotonic()
    llm = LLM(**options)
    stage_ends["ready"] = monotonic()
    for _ in llm.stream(PROMPT, SamplingParams(max_tokens=1, temperature=0)):
        stage_ends.setdefault("token", monotonic())
    return stage_ends


def text(name: str, count: int, starts: dict[str, list[dict[str, float]]]) -> str:
    """A table with the mean seconds to the end of each stage, and the range of the total."""
    rows = [
        (
            state,
            *(f"{fmean(run[stage] for run in runs):.2f}" for stage in STAGES),
            f"{min(run['token'] for run in runs):.2f} to {max(run['token'] for run in runs):.2f}",
        )
        for state, runs in starts.items()
    ]
    head = ("seconds from process start", *STAGES.values(), "from .. to")
    heading = (
        f"{name}: starts with empty caches (cold), each followed by one with full caches "
        f"(warm), {count} of each"
    )
    return f"{heading}\n\n{table(head, rows)}"


if __name__ == "__main__":
    try:
        print(json.dumps(probe(json.loads(sys.argv[1]))))
    except (ValueError, KeyboardInterrupt) as error:  # the parent process shows only the last line
        sys.exit(str(error))
