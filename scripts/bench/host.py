"""`quire bench host`: host overhead per step, measured with a device that takes no time."""

from statistics import median
from time import perf_counter
from typing import Annotated, Any

from .. import options as o
from ..tables import table
from . import load as load
from . import report as reports

STAGES = {"schedule": "schedule", "launch": "arrays", "collect": "results", "update": "take in"}
WARM_UP = 20  # steps


@reports.takes_report(excluded=("result_filename", "plot"))
def main(
    num_seqs: Annotated[
        int, o.size_option("Number of sequences that decode together.", load.DATA, "N")
    ] = 256,
    input_len: Annotated[
        list[int] | None,
        o.size_option(
            "Prompt length of each sequence; may be given several times.",
            load.DATA,
            "TOKENS",
            "100, 500, 850",
        ),
    ] = None,
    num_steps: Annotated[int, o.size_option("Number of steps to measure.", load.DATA, "N")] = 100,
    num_processes: Annotated[
        int,
        o.size_option(
            "Number of processes that receive each step, as in multi-host serving.", load.DATA, "N"
        ),
    ] = 1,
    *,
    report: reports.ResultFiles,
) -> None:
    """Measure host overhead with a simulated device. Prints the host's time per step to schedule
    it, build its arrays and process its results.
    """
    load.above_zero(
        num_seqs=num_seqs,
        num_steps=num_steps,
        input_len=min(input_len or [1]),
        num_processes=num_processes,
    )
    rows = []
    hosts = start_followers(num_processes - 1) if num_processes > 1 else None
    for length in input_len or [100, 500, 850]:
        laps = measure(num_seqs, length, num_steps, hosts)
        medians = {stage: median(laps[stage]) * 1e3 for stage in STAGES}
        rows.append({"input_len": length, **medians, "together": sum(medians.values())})
    heading = (
        f"{num_seqs} sequences of the bundled model that decode: milliseconds a step, medians "
        f"of {num_steps}"
    )
    if hosts is not None:
        heading += f"; {hosts.sent_last} bytes to each of {num_processes - 1} others in the last"
        hosts.close()
    cells = [
        (row["input_len"], *(f"{row[stage]:.3f}" for stage in (*STAGES, "together")))
        for row in rows
    ]
    text = f"{heading}\n\n{table(('tokens each', *STAGES.values(), 'together'), cells)}"
    report.write({"num_seqs": num_seqs, "rows": rows}, text)


def start_followers(count: int) -> Any:
    """Start `count` processes that receive every step and discard it; returns a Leader for them."""
    import socket
    import subprocess
    import sys

    from ...serving.multihost.connection import HostConnection
    from ...serving.multihost.leader import Leader

    lines = {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for index in range(count):
            port = listener.getsockname()[1]
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import listen; listen({port})"]
            )
            lines[index + 1] = HostConnection(listener.accept()[0])
    return Leader(lines)


def listen(port: int) -> None:
    """The main loop of a process from `start_followers`, until the leader ends it."""
    import os
    import socket

    from ...serving.multihost.connection import HostConnection
    from ...serving.multihost.leader import WatchedConnection

    connection = HostConnection(socket.create_connection(("127.0.0.1", port)))
    link = WatchedConnection(connection, "", lambda reason: os._exit(0))
    while link.inbox.get()[0] != "end":
        pass


def measure(
    num_seqs: int, length: int, num_steps: int, hosts: Any = None
) -> dict[str, list[float]]:
    """Measure the seconds of each stage of each step, once all sequences decode."""
    from ...serving.api.params import SamplingParams
    from ...serving.engine.step_record import Observer, StepRecord

    class Laps(Observer):
        """Records the stage times of each step."""

        def observe(self, record: StepRecord) -> None:
            step = record.launched
            result = record.result
            assert step is not None and result is not None, (
                "every call launches a step and collects one"
            )
            laps["schedule"].append(step.scheduled - step.began)
            laps["launch"].append(step.launched - step.scheduled)
            laps["collect"].append(result.collected - result.began)
            laps["update"].append(record.ended - result.collected)

    laps: dict[str, list[float]] = {stage: [] for stage in STAGES}
    engine = pretended_engine(num_seqs, length + WARM_UP + num_steps + 8)
    engine.clock = perf_counter
    engine.runner.leader = hosts
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for index in range(num_seqs):
        engine.add(str(index), [index % 500 + 3] * length, params)
    while any(seq.missing > 1 for seq in [*engine.scheduler.running, *engine.scheduler.waiting]):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    engine.observers.append(Laps())
    for _ in range(num_steps):
        engine.step()
    return laps


def pretended_engine(num_seqs: int, longest: int, num_rows: int = 2048, max_drafts: int = 0) -> Any:
    """An engine for the bundled model with a simulated device, whose results are available at once.

    Every sampled token is the same.
    """
    import numpy as np

    from ...model.checkpoint import hub, loader
    from ...model.text.tokenizer import Tokenizer
    from ...ops.sampling import MAX_LOGPROBS, MAX_WANTED, Sampled
    from ...serving.cache.page_table import PageTable
    from ...serving.device.step_shape import StepShape
    from ...serving.engine.engine import Engine
    from ...serving.engine.runner import Runner

    folder = hub.resolve(None)
    config = loader.read_config(folder, "auto", None)
    if longest > config.max_len:
        raise o.UsageError(
            f"sequences grow to {longest} tokens; the bundled model was made for {config.max_len}"
        )
    tokenizer = Tokenizer(folder)
    groups = len(config.windows)
    shape = StepShape.largest(num_seqs, num_rows, max(num_seqs, 16), max_drafts=max_drafts)
    runner = Runner(config, None, shape, (2,) * groups, 16, config.max_len)
    token = tokenizer.encode(" the", add_special_tokens=False)[0]

    def sampled_tokens(R: int) -> Sampled:
        zeros = np.zeros(R, np.float32)
        best = np.zeros((R, MAX_LOGPROBS), np.float32)
        ids = best.astype(np.int32)
        logprobs = np.zeros((R, MAX_WANTED), np.float32)
        return Sampled(
            np.full(R, token), zeros, np.ones(R, np.int32), ids, best, logprobs, np.ones(R, bool)
        )

    def compiled(size):
        sampled = sampled_tokens(size.samples)
        return lambda weights, state, buffer: (sampled, None, state)

    runner.compiled = {size: compiled(size) for size in runner.batch_builder.layouts}
    runner.page_copier.programs = {
        ("copy", group, 0): lambda layers, *pages: layers for group in range(groups)
    }
    pages = PageTable((num_seqs * (-(-longest // 16) + 1) + 1,) * groups, 16, config.windows)
    return Engine(runner, tokenizer, [pages], config.max_len)
