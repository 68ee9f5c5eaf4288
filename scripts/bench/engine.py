"""Running a benchmark load on the engine: token times, step times, and the memory roofline of
decode steps.
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
    """One step of the engine."""

    seconds: float  # since the results of the previous step
    plan: Any  # its StepPlan
    tokens: int  # number of generated tokens


@dataclass(frozen=True)
class LoadRun:
    """The times of the requests and engine steps of one run."""

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
    """Serve all requests, ignoring EOS tokens, with at most `concurrency` of them in the engine.

    The prefix cache is reset first, so that repeated runs do the same work.

    Args:
        llm: The `LLM`.
        samples: The requests.
        concurrency: Maximum number of requests in the engine.
        temperature: Sampling temperature.
        clock: Returns the time in seconds.
        advance: Called with (finished requests, generated tokens) for progress display.
        in_batches: Add requests only when all current ones are finished (static batching).
        adapters: LoRA requests (or None), assigned to the requests in turn.
    """
    from ...serving.api.params import SamplingParams

    llm.reset_prefix_cache()

    engine = llm.engine
    steps = []
    watcher = watch()
    engine.observers.append(watcher)
    waiting = deque(enumerate(samples))
    active = {}
    answers_by_index = {}
    drafts_before = count_drafts(llm)
    try:
        begin = last = clock()
        while waiting or active:
            num_free = 0 if in_batches and active else concurrency - len(active)
            for _ in range(min(num_free, len(waiting))):
                index, sample = waiting.popleft()
                params = SamplingParams(
                    temperature=temperature,
                    max_tokens=sample.output_len,
                    ignore_eos=True,
                    seed=index,
                )
                sent = clock()
                request = llm.add(sample.prompt, params, adapter=adapters[index % len(adapters)])
                active[request] = (index, sent, [])
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
                index, sent, times = active[request]
                seq = request.sequences[0]
                if seq.num_output:  # one event per step, even if the step generated several tokens
                    times.append(now)
                if request.finished:
                    if seq.finish_reason == "error":
                        raise o.UsageError(
                            "a step failed, so there is nothing to report; the log above says why"
                        )
                    answers_by_index[index] = RequestTimes(
                        sent, times, seq.num_prompt, seq.num_output
                    )
                    del active[request]
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
    finally:  # also after Ctrl-C: leave the engine idle
        llm.abort([*active])
        engine.observers.remove(watcher)


def watch() -> Any:
    """An engine observer that keeps the result of the latest call of `Engine.step`, or None."""
    from ...serving.engine.step_record import Observer, StepRecord
    from ...serving.engine.step_result import StepResult

    class Watcher(Observer):
        result: StepResult | None = None

        def observe(self, record: StepRecord) -> None:
            self.result = record.result

        def tokens(self) -> int:
            """The number of tokens generated by the step."""
            outputs = self.result.outputs if self.result else []
            items = [output.item for output in outputs if output.item.num_samples]
            return sum(max(0, len(item.seq.tokens) - item.num_known) for item in items)

    return Watcher()


@dataclass(frozen=True)
class Roof:
    """The memory roofline of decode steps: the time to read weights and KV cache at the machine's
    memory bandwidth. All values are means over the decode-only steps.
    """

    steps: int  # number of decode-only steps
    sequences: float
    tokens: float  # generated tokens; with speculative decoding more than sequences
    weight_bytes: float
    cache_bytes: float
    step_seconds: float  # measured
    bandwidth: float  # bytes per second

    @property
    def seconds(self) -> float:
        """The minimum time of a step."""
        return (self.weight_bytes + self.cache_bytes) / self.bandwidth

    @property
    def share(self) -> float:
        """The fraction of the memory bandwidth that the steps used; 1 is the roofline."""
        return self.seconds / self.step_seconds


def roof(
    steps: Sequence[TimedStep],
    weight_bytes: int,
    cache_bytes: Callable[[int], int],
    bandwidth: float,
) -> Roof | None:
    """The roofline of the mean decode step; None if no step was decode-only.

    Args:
        steps: All steps of a run.
        weight_bytes: Bytes of weights that a step reads.
        cache_bytes: Maps a sequence's length to the bytes of KV cache that a step reads.
        bandwidth: Memory bandwidth in bytes per second.
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
    """The roofline of a run of this engine; None if no step was decode-only."""
    from ...model.planning.cost import kv_read_bytes, read_weight_bytes

    config = llm.engine.runner.config
    weights = llm.engine.runner.weights
    read = read_weight_bytes(config, weights)
    return roof(run.steps, read, lambda length: kv_read_bytes(config, length), bandwidth)


def decode_milliseconds(run: LoadRun) -> list[float]:
    """The time of each decode step; steps fused into one launch count as its mean."""
    decodes = [step for step in run.steps if step.plan.decodes]
    return [
        step.seconds / step.plan.steps * 1000 for step in decodes for _ in range(step.plan.steps)
    ]


def read_bandwidth() -> float:
    """The read bandwidth of the model's device in bytes per second."""
    import jax

    from .bandwidth import read_bandwidth

    return read_bandwidth() if jax.default_backend() == "cpu" else device_bandwidth(1 << 30)


def device_bandwidth(size: int, passes: int = 8) -> float:
    """Measure an accelerator's read bandwidth in bytes per second: the best of several sums over an
    array larger than the caches.
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
