"""`quire bench step`: profile a decode step by part of the model and kind of operation."""

import re
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from ...serving.api.sizes import amount
from .. import options as o
from ..loading import load as load_model
from ..tables import table
from . import load as load
from . import report as reports
from .engine import LoadRun, Roof, TimedStep, engine_roof, read_bandwidth, watch

KERNELS = {
    "linear": "products",
    "heads": "heads (norms, rotation)",
    "residual": "residual and norm",
}
WRAPPERS = re.compile(  # scopes that do not name a part of the model
    r"jit\(.*\)|pjit|while|body|cond|closed_call|layer\d+|branch_\d+_fun|"
)
OPERATION = re.compile(r'%([\w.-]+) = .*? ([a-z][\w-]*)\(.*?op_name="([^"]*)"')
CONTROL_FLOW = {"while", "conditional", "call"}  # skipped: contain the time of nested operations
EXECUTION = "ThunkExecutor::Execute"
SPARE = 48  # decode steps besides the measured ones: before the first and in flight after the last


@dataclass
class OperationGroup:
    """All operations of one kind in one part of the model; counts and times are per step."""

    scope: str  # part of the model
    kind: str  # kind of operation
    launches: float = 0
    seconds: float = 0


@dataclass(frozen=True)
class TraceSummary:
    """Summary of an XLA trace of steps."""

    groups: list[OperationGroup]  # in the order of their first operation
    program: float  # seconds per step in which a program runs
    steps: int  # number of steps in the trace


@reports.takes_report(excluded=("plot", "result_filename"))
@o.takes_engine()
def main(
    model: o.Model = None,
    batch_size: Annotated[
        int, o.size_option("Number of sequences that decode together.", load.DATA, "N")
    ] = 1,
    input_len: Annotated[
        int, o.size_option("Prompt length of each sequence.", load.DATA, "TOKENS")
    ] = 128,
    num_steps: Annotated[
        int, o.size_option("Number of decode steps to measure.", load.DATA, "N")
    ] = 128,
    seed: load.Seed = 0,
    *,
    engine: dict[str, Any],
    report: reports.ResultFiles,
) -> None:
    """Profile decode steps on a CPU. Prints a step's time by part of the model (matrix products,
    attention and so on), and the time of the host.
    """
    load.above_zero(batch_size=batch_size, input_len=input_len, num_steps=num_steps)
    import jax

    # Operations are classified by metadata, which is not part of the compilation cache's key by
    # default: a cached program from an older version would have outdated scope names.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    with load_model(model, **{"max_num_seqs": batch_size, **engine}) as llm:
        runner = llm.engine.runner
        if jax.default_backend() != "cpu" or runner.mesh is not None:
            raise o.UsageError(
                "quire bench step reads XLA's trace of one CPU, not of a GPU, a TPU or a mesh"
            )
        if input_len + num_steps + SPARE > llm.engine.max_len:
            raise o.UsageError(
                f"{input_len} prompt tokens, {num_steps} steps and {SPARE} before and after do not "
                f"fit into the {llm.engine.max_len} of --max-model-len: ask for fewer"
            )
        dataset = load.dataset(
            "random", random_input_len=input_len, random_output_len=llm.engine.max_len - input_len
        )
        samples = dataset.samples(
            batch_size, llm.engine.tokenizer, str(seed), llm.engine.config.vocab_size
        )
        decode(llm, samples, num_steps)  # warm up
        run = decode(llm, samples, num_steps)
        bandwidth = read_bandwidth()
        roof = engine_roof(llm, run, bandwidth)
        assert roof is not None
        with tempfile.TemporaryDirectory() as folder:
            traced_run = decode(llm, samples, num_steps, folder)
            (file,) = Path(folder).rglob("*.xplane.pb")
            programs = [program.as_text() for program in compiled(runner)]
            traced = read(jax.profiler.ProfileData.from_file(str(file)), programs)
        step_seconds = traced_run.seconds / sum(step.plan.steps for step in traced_run.steps)
    name = model or "quill"
    report.write(
        result(name, roof, step_seconds, traced),
        text(name, batch_size, input_len, roof, step_seconds, traced),
    )


def compiled(runner: Any) -> list[Any]:
    """All compiled step programs of the runner."""
    steps = [*runner.compiled.values(), *runner.plain.values(), *runner.without_drafter.values()]
    return [*steps, *([runner.fused_steps] if runner.fused_steps is not None else [])]


def decode(
    llm: Any, samples: Sequence[load.Sample], count: int, folder: str | None = None
) -> LoadRun:
    """Run at least `count` decode steps with all samples in the batch; with `folder`, write an XLA
    trace of them there.
    """
    import jax

    from ...serving.api.params import SamplingParams

    llm.reset_prefix_cache()
    engine = llm.engine
    watcher = watch()
    steps = []
    engine.observers.append(watcher)
    requests = []
    try:
        for sample in samples:
            params = SamplingParams(temperature=0, max_tokens=sample.output_len, ignore_eos=True)
            requests.append(llm.add(sample.prompt, params))
        while any(request.sequences[0].num_output < SPARE // 3 for request in requests):
            llm.step()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.block_until_ready(engine.runner.state)  # so that the trace has only complete steps
        with jax.profiler.trace(folder, profiler_options=options) if folder else nullcontext():
            begin = last = perf_counter()
            while sum(step.plan.steps for step in steps) < count and not any(
                request.finished for request in requests
            ):
                llm.step()
                if watcher.result is not None:
                    now = perf_counter()
                    steps.append(TimedStep(now - last, watcher.result.plan, watcher.tokens()))
                    last = now
            seconds = last - begin
            jax.block_until_ready(engine.runner.state)
    finally:
        llm.abort(requests)
        engine.observers.remove(watcher)
    return LoadRun([], steps, seconds)


def read(trace: Any, programs: Iterable[str]) -> TraceSummary:
    """Summarise a trace of steps; `programs` is the HLO text of the step programs."""
    operations = [{m[1]: (m[2], m[3]) for m in OPERATION.finditer(program)} for program in programs]
    events = defaultdict(list)
    executions = []
    for plane in trace.planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    events[stats["hlo_module"], stats["program_id"]].append(
                        (event, stats["hlo_op"])
                    )
                elif event.name.startswith(EXECUTION):
                    executions.append((event.start_ns, event.start_ns + event.duration_ns))
    groups_by_key: dict[tuple[str, str], OperationGroup] = {}
    steps = 0
    for module_events in events.values():
        names = Counter(name for _, name in module_events)
        operations_by_name = max(
            operations, key=lambda program: sum(name in program for name in names)
        )
        if not any("/logits/" in operations_by_name.get(name, ("", ""))[1] for name in names):
            continue  # not a step program, such as page copies
        steps += statistics.mode(names.values())
        for event, name in sorted(module_events, key=lambda entry: entry[0].start_ns):
            opcode, path = operations_by_name.get(name, (name.split(".")[0], ""))
            if opcode in CONTROL_FLOW:
                continue
            key = classify_operation(path)
            group = groups_by_key.setdefault(key, OperationGroup(*key))
            group.launches += 1
            group.seconds += event.duration_ns / 1e9
    if not steps:
        raise o.UsageError(
            "the trace has no operations of a step: this version of JAX does not name them"
        )
    for group in groups_by_key.values():
        group.launches = group.launches / steps
        group.seconds = group.seconds / steps
    program_seconds = union_length(executions) / 1e9 / steps
    return TraceSummary(list(groups_by_key.values()), program_seconds, steps)


def classify_operation(path: str) -> tuple[str, str]:
    """(part of the model, kind of operation) by an operation's scope path in the program."""
    scopes = [scope for scope in path.split("/")[:-1] if not WRAPPERS.fullmatch(scope)]
    kernels = [scope.split(".") for scope in scopes if scope.startswith("quire.ops.")]
    scopes = [scope for scope in scopes if not scope.startswith("quire.ops.")]
    kernel = kernels[0][2] if kernels else ""
    return scopes[0] if scopes else "step", KERNELS.get(kernel, kernel) or "XLA's operations"


def union_length(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals (start, end)."""
    total = 0.0
    end = float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def idle_seconds(step_seconds: float, traced: TraceSummary) -> dict[str, float]:
    """Seconds per step in which no operation runs, within and between programs."""
    inside = sum(group.seconds for group in traced.groups)
    return {
        "between operations": max(0.0, traced.program - inside),
        "between programs: launch, host": max(0.0, step_seconds - traced.program),
    }


def result(name: str, roof: Roof, step_seconds: float, traced: TraceSummary) -> dict[str, Any]:
    part_rows = [
        {
            "scope": group.scope,
            "kind": group.kind,
            "launches": group.launches,
            "ms": group.seconds * 1000,
        }
        for group in traced.groups
    ]
    return {
        "model": name,
        "step_ms": roof.step_seconds * 1000,
        "roof_ms": roof.seconds * 1000,
        "roof_share": roof.share,
        "traced": {"steps": traced.steps, "step_ms": step_seconds * 1000, "parts": part_rows}
        | {
            "rest_ms": {
                key: value * 1000 for key, value in idle_seconds(step_seconds, traced).items()
            }
        },
    }


def text(
    name: str, batch: int, length: int, roof: Roof, step_seconds: float, traced: TraceSummary
) -> str:
    rows = [
        (f"{group.scope}: {group.kind}", f"{group.launches:.0f}", group.seconds)
        for group in traced.groups
    ]
    rows += [(key, "", seconds) for key, seconds in idle_seconds(step_seconds, traced).items()]
    times = [
        (title, count, f"{seconds * 1000:,.3f}", f"{seconds / step_seconds:.1%}")
        for title, count, seconds in rows
    ]
    return (
        f"{name}: decode steps of {batch} {'sequence' if batch == 1 else 'sequences'} after "
        f"{length} tokens\n\n{roof.step_seconds * 1000:,.3f} ms a step; "
        f"{amount(roof.weight_bytes + roof.cache_bytes)} are read at {roof.bandwidth / 1e9:.1f} "
        f"GB/s in {roof.seconds * 1000:,.3f} ms ({roof.share:.0%})\n{step_seconds * 1000:,.3f} ms "
        f"a step while {traced.steps} were traced, of which:\n\n"
    ) + table(("part", "launches", "ms", "share"), times)
