"""Serving many concurrent requests, and the share of decode time that the GPU is idle."""

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

# Decode steps to skip after the last prompt: the host is still catching up with the device.
SETTLED = 3


class StepRecorder:
    """Wraps the compiled steps of a runner and records each launched step with its input buffer."""

    def __init__(self, runner: Runner):
        self.sent: list[tuple[Callable, np.ndarray]] = []
        runner.compiled = {size: self.wrap(step) for size, step in runner.compiled.items()}
        runner.plain = {size: self.wrap(step) for size, step in runner.plain.items()}

    def wrap(self, step: Callable) -> Callable:
        def launch(weights, state, buffer):
            self.sent.append((step, buffer))
            return step(weights, state, buffer)

        return launch


def run(report: PartReport, scale: CheckSizes, seed: int, attention: str) -> None:
    """Serve all requests, then launch the same decode steps again back to back."""
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
    recorder = StepRecorder(runner)
    load_run = serve(llm, samples, streams, 0.0)
    throughput = totals(load_run.answers, load_run.seconds)
    times = flat(milliseconds(load_run.answers))
    report(
        f"{streams} streams, {scale.requests} requests of {scale.prompt} and {scale.answer} "
        f"tokens: {throughput['output_throughput']:.0f} output tokens/s; first token "
        f"{times['median_ttft_ms']:.0f} ms (P99 {times['p99_ttft_ms']:.0f}), between tokens "
        f"{times['median_itl_ms']:.2f} ms (P99 {times['p99_itl_ms']:.2f})",
        throughput=throughput,
        latency=times,
    )
    host_share(report, runner, load_run, recorder)


def requests(scale: CheckSizes, seed: int) -> list[Sample]:
    """Requests with random prompts, which share no prefix."""
    rng = random.Random(seed)
    vocab = scale.hf["vocab_size"]
    return [
        Sample([rng.randrange(vocab) for _ in range(scale.prompt)], scale.answer)
        for _ in range(scale.requests)
    ]


def host_share(
    report: PartReport, runner: Runner, load_run: LoadRun, recorder: StepRecorder
) -> None:
    """Report the share of a decode step's time in which the device is idle.

    Compares the engine's time for the longest series of full decode steps with the device's time
    for the same steps, launched back to back on the same arrays.
    """
    if len(load_run.steps) != len(recorder.sent):
        raise RuntimeError(
            f"{len(recorder.sent)} steps were launched and {len(load_run.steps)} came back"
        )
    max_seqs = max(len(step.plan.items) for step in load_run.steps)
    is_full_decode = [
        step.plan.decodes and len(step.plan.items) == max_seqs for step in load_run.steps
    ]
    series = longest(is_full_decode)[SETTLED:]
    if not series:
        raise RuntimeError("there is no series of decode steps that would be long enough")
    engine = sum(load_run.steps[index].seconds for index in series) / len(series)
    sent = [
        (step, jax.device_put(buffer))
        for step, buffer in (recorder.sent[index] for index in series)
    ]
    jax.block_until_ready([buffer for _, buffer in sent])

    def replay() -> Any:
        sampled = None
        for step, buffer in sent:
            sampled, _, runner.state = step(runner.weights, runner.state, buffer)
        return sampled

    device = float(np.median([timed(replay) for _ in range(4)][1:])) / len(series)
    share = 1 - device / engine
    report(
        f"{len(series)} decode steps of {max_seqs}: {engine * 1e3:.3f} ms each in the engine, "
        f"{device * 1e3:.3f} back to back, so the host is visible in {share:.1%}; to reach: under "
        "3 %",
        host={
            "steps": len(series),
            "sequences": max_seqs,
            "engine": engine,
            "device": device,
            "share": share,
        },
    )


def longest(flags: list[bool]) -> range:
    """The indices of the longest run of consecutive true values."""
    best = range(0)
    start = 0
    for index, flag in enumerate([*flags, False]):
        if not flag:
            best = max(best, range(start, index), key=len)
            start = index + 1
    return best
