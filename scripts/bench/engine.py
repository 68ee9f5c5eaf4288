"""The engine under a benchmark's load: token and step times, and the bytes that a decode step
reads.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import options as o
from .drafts import Drafts, count_drafts
from .load import Sample
from .metrics import RequestTimes


@dataclass(frozen=True)
class TimedStep:
    """One step of the engine: its plan, and the time since the previous step's results."""

    seconds: float
    plan: Any
    tokens: int  # generated


@dataclass(frozen=True)
class LoadRun:
    """The times of requests and of engine steps."""

    answers: list[RequestTimes]
    steps: list[TimedStep]
    seconds: float
    drafts: Drafts | None = None  # None without speculative decoding


def serve(
    llm,
    samples: Sequence[Sample],
    concurrency: int,
    temperature: float,
    clock: Callable[[], float] = time.perf_counter,
    advance: Callable[[int, int], None] = lambda requests, tokens: None,
    in_batches: bool = False,
    adapters: Sequence[Any] = (None,),
) -> LoadRun:
    """Answer all requests in full length, with at most `concurrency` of them in the engine.

    The prefix cache is emptied first, so that repetitions have equal costs.

    Args:
        in_batches: add requests only when all current ones are answered, as without continuous
            batching.
        adapters: requests take them in turn.
    """
    from ...serving.api.params import SamplingParams

    llm.reset_prefix_cache()

    engine = llm.engine
    steps = []
    watcher = watch()
    engine.observers.append(watcher)
    waiting = deque(enumerate(samples))
    live = {}
    answers_by_index = {}
    drafts_before = count_drafts(llm)
    try:
        begin = last = clock()
        while waiting or live:
            room = 0 if in_batches and live else concurrency - len(live)
            for _ in range(min(room, len(waiting))):
                index, sample = waiting.popleft()
                params = SamplingParams(
                    temperature=temperature,
                    max_tokens=sample.output_len,
                    ignore_eos=True,
                    seed=index,
                )
                sent = clock()
                request = llm.add(sample.prompt, params, adapter=adapters[index % len(adapters)])
                live[request] = (index, sent, [])
                if (seq := request.sequences[0]).max_tokens < sample.output_len:
                    raise o.UsageError(
                        f"{seq.num_prompt} prompt and {sample.output_len} output tokens do not fit "
                        f"into the {engine.max_len} of --max-model-len: ask for fewer"
                    )
            changed = engine.step()
            now = clock()
            if watcher.result is not None:
                steps.append(TimedStep(now - last, watcher.result.plan, watcher.tokens()))
            last = now
            for request in changed:
                index, sent, times = live[request]
                seq = request.sequences[0]
                if seq.num_output:  # one event, however many tokens the step generated
                    times.append(now)
                if request.finished:
                    if seq.finish_reason == "error":
                        raise o.UsageError(
                            "a step failed, so there is nothing to report; the log above says why"
                        )
                    answers_by_index[index] = RequestTimes(
                        sent, times, seq.num_prompt, seq.num_output
                    )
                    del live[request]
                    advance(1, seq.num_output)
        seconds = clock() - begin
        drafts_after = count_drafts(llm)
        answers = [answers_by_index[index] for index in range(len(samples))]
        return LoadRun(
            answers,
            steps,
            seconds,
            drafts_after and drafts_before and drafts_after.since(drafts_before),
        )
    finally:  # also after Ctrl-C: restore the engine
        llm.abort([*live])
        engine.observers.remove(watcher)


def watch() -> Any:
    """An observer that keeps the result of the last call of `Engine.step`, if it had one."""
    from ...serving.engine.step_record import Observer, StepRecord
    from ...serving.engine.step_result import StepResult

    class Watcher(Observer):
        result: StepResult | None = None

        def observe(self, record: StepRecord) -> None:
            self.result = record.result

        def tokens(self) -> int:
            """The number of tokens that the step generated."""
            outputs = self.result.outputs if self.result else []
            items = [output.item for output in outputs if output.item.num_samples]
            return sum(max(0, len(item.seq.tokens) - item.num_known) for item in items)

    return Watcher()


@dataclass(frozen=True)
class Roof:
    """The minimum time of a decode step: reading weights and KV cache at this machine's
    bandwidth.
    """

    steps: int  # decode-only steps
    sequences: float  # per step, on average
    tokens: float  # per step; with drafts more than sequences
    weight_bytes: float
    cache_bytes: float
    step_seconds: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        return (self.weight_bytes + self.cache_bytes) / self.bandwidth

    @property
    def share(self) -> float:
        """The fraction of the bandwidth that the steps used; 1 is the roof."""
        return self.seconds / self.step_seconds


def roof(
    steps: Sequence[TimedStep],
    weight_bytes: int,
    cache_bytes: Callable[[int], int],
    bandwidth: float,
) -> Roof | None:
    """The mean decode step against its roof; None if every step also read prompts.

    `cache_bytes` maps a length to the bytes that a sequence reads: a step that computes position p
    reads up to p.
    """
    decodes = [step for step in steps if step.plan.decodes]
    if not decodes:
        return None
    bytes_by_length: dict[int, int] = {}
    read_bytes = sequences = 0
    for step in decodes:
        sequences += len(step.plan.items) * step.plan.steps
        for item in step.plan.items:
            for length in range(
                item.start + item.num_tokens, item.start + item.num_tokens + step.plan.steps
            ):
                if length not in bytes_by_length:
                    bytes_by_length[length] = cache_bytes(length)
                read_bytes += bytes_by_length[length]
    count = sum(step.plan.steps for step in decodes)
    seconds = sum(step.seconds for step in decodes)
    tokens = sum(step.tokens for step in decodes)
    return Roof(
        count,
        sequences / count,
        tokens / count,
        weight_bytes,
        read_bytes / count,
        seconds / count,
        bandwidth,
    )


def engine_roof(llm, run: LoadRun, bandwidth: float) -> Roof | None:
    """The roof of a run of this engine."""
    from ...model.planning.cost import kv_read_bytes, read_weight_bytes

    config = llm.engine.runner.config
    weights = llm.engine.runner.weights
    read = read_weight_bytes(config, weights)
    return roof(run.steps, read, lambda length: kv_read_bytes(config, length), bandwidth)


def decode_milliseconds(run: LoadRun) -> list[float]:
    decodes = [step for step in run.steps if step.plan.decodes]
    return [
        step.seconds / step.plan.steps * 1000 for step in decodes for _ in range(step.plan.steps)
    ]


def read_bandwidth() -> float:
    """Bytes per second that the model's device reads."""
    import jax

    from .bandwidth import read_bandwidth

    return read_bandwidth() if jax.default_backend() == "cpu" else device_bandwidth(1 << 30)


def device_bandwidth(size: int, passes: int = 8) -> float:
    """Bytes per second that an accelerator reads: the best of a few sums over an array beyond any
    cache.
    """
    import jax
    import jax.numpy as jnp

    total = jax.jit(jnp.sum)
    array = jnp.ones(size // 4, jnp.uint32)
    total(array).block_until_ready()
    best = float("inf")
    for _ in range(passes):
        started = time.perf_counter()
        total(array).block_until_ready()
        best = min(best, time.perf_counter() - started)
    return array.nbytes / best
