"""Many streams through the engine, and the device time that the host costs."""

import random
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ...serving.cache.page_table import PageTable
from ...serving.device.step_shape import choose
from ...serving.engine.engine import Engine
from ...serving.engine.runner import Runner
from ...serving.llm import LLM
from ..bench.engine import LoadRun, serve
from ..bench.load import Sample
from ..bench.metrics import flat, milliseconds, totals
from .common import PAGE, CheckSizes, PartReport, make_runner, timed

# decode steps after the last prompt that do not count: in them the host catches up with the device
SETTLED = 3


class Recorded:
    """Wraps the compiled steps of a runner and records what is sent to them, in order."""

    def __init__(self, runner: Runner):
        self.sent: list[tuple[Callable, np.ndarray]] = []
        runner.compiled = {size: self.of(step) for size, step in runner.compiled.items()}
        runner.plain = {size: self.of(step) for size, step in runner.plain.items()}

    def of(self, step: Callable) -> Callable:
        def launch(weights, state, buffer):
            self.sent.append((step, buffer))
            return step(weights, state, buffer)

        return launch


def run(report: PartReport, scale: CheckSizes, seed: int, attention: str) -> None:
    """Answer all requests, then launch the same decode steps again with nothing between them."""
    name = scale.kernel if attention == "kernel" else attention
    started = time.perf_counter()
    max_len = scale.prompt + scale.answer
    streams = scale.streams
    runner = make_runner(
        scale,
        max_len,
        lambda sizes: [choose(sizes, streams, streams, streams, True), max(sizes)],
        name,
        seed,
    )
    table = PageTable(runner.num_pages, PAGE, runner.config.windows)
    llm = LLM(engine=Engine(runner, None, [table], max_len))
    took = time.perf_counter() - started
    report(
        f"attention: {name}; weights made and steps compiled in {took:.0f} s",
        attention=name,
        ready=took,
    )
    samples = requests(scale, seed)
    serve(llm, [Sample(sample.prompt, 4) for sample in samples[:streams]], streams, 0.0)
    recorded = Recorded(runner)
    found = serve(llm, samples, streams, 0.0)
    whole = totals(found.answers, found.seconds)
    times = flat(milliseconds(found.answers))
    report(
        f"{streams} streams, {scale.requests} requests of {scale.prompt} and {scale.answer} "
        f"tokens: {whole['output_throughput']:.0f} output tokens/s; first token "
        f"{times['median_ttft_ms']:.0f} ms (P99 {times['p99_ttft_ms']:.0f}), between tokens "
        f"{times['median_itl_ms']:.2f} ms (P99 {times['p99_itl_ms']:.2f})",
        throughput=whole,
        latency=times,
    )
    host_share(report, runner, found, recorded)


def requests(scale: CheckSizes, seed: int) -> list[Sample]:
    """Random prompts, which share no prefix."""
    rng = random.Random(seed)
    vocab = scale.hf["vocab_size"]
    return [
        Sample([rng.randrange(vocab) for _ in range(scale.prompt)], scale.answer)
        for _ in range(scale.requests)
    ]


def host_share(report: PartReport, runner: Runner, found: LoadRun, recorded: Recorded) -> None:
    """The share of a decode step's time in which the device is idle.

    It is the time of the engine's loop for the longest series of decode steps of all streams, less
    the time of the device for the same steps on the same arrays when it waits for nothing.
    """
    if len(found.steps) != len(recorded.sent):
        raise RuntimeError(
            f"{len(recorded.sent)} steps were launched and {len(found.steps)} came back"
        )
    most = max(len(step.plan.items) for step in found.steps)
    series = longest([step.plan.decodes and len(step.plan.items) == most for step in found.steps])[
        SETTLED:
    ]
    if not series:
        raise RuntimeError("there is no series of decode steps that would be long enough")
    engine = sum(found.steps[index].seconds for index in series) / len(series)
    sent = [
        (step, jax.device_put(buffer))
        for step, buffer in (recorded.sent[index] for index in series)
    ]
    jax.block_until_ready([buffer for _, buffer in sent])

    def again() -> Any:
        sampled = None
        for step, buffer in sent:
            sampled, _, runner.state = step(runner.weights, runner.state, buffer)
        return sampled

    device = float(np.median([timed(again) for _ in range(4)][1:])) / len(series)
    share = 1 - device / engine
    report(
        f"{len(series)} decode steps of {most}: {engine * 1e3:.3f} ms each in the engine, "
        f"{device * 1e3:.3f} back to back, so the host is visible in {share:.1%}; to reach: under "
        "3 %",
        host={
            "steps": len(series),
            "sequences": most,
            "engine": engine,
            "device": device,
            "share": share,
        },
    )


def longest(flags: list[bool]) -> range:
    """The longest stretch of consecutive truths."""
    best = range(0)
    start = 0
    for index, flag in enumerate([*flags, False]):
        if not flag:
            best = max(best, range(start, index), key=len)
            start = index + 1
    return best
