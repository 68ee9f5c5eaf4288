"""Request times in a benchmark, and the metrics computed from them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}  # key in results -> label


@dataclass(frozen=True)
class RequestTimes:
    """The times of one request at the client, in seconds of one clock. `times` has an entry per
    stream event, with one or several tokens.

    sent ──── ttft ────> times[0] ─ gap ─> times[1] ─ gap ─> ... times[-1]
    └────────────────────────── e2el ──────────────────────────────┘
    """

    sent: float
    times: Sequence[float] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    ended: float | None = None  # end of the stream, if the answer is empty

    @property
    def ttft(self) -> float | None:
        """Time to first token; None if the answer is empty."""
        return self.times[0] - self.sent if self.times else None

    @property
    def e2el(self) -> float | None:
        """End-to-end latency; None if the request failed before its first token."""
        end = self.times[-1] if self.times else self.ended
        return None if end is None else end - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        has_rate = self.times and self.output_tokens > 1
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if has_rate else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [time - previous for previous, time in zip(self.times, self.times[1:], strict=False)]

    def meets(self, limits: dict[str, float]) -> bool:
        """Whether all limits (metric -> milliseconds) are met; a metric without a value (TPOT of a
        single token) meets its limit.
        """
        return all(
            (getattr(self, metric) or 0.0) * 1000 <= limit for metric, limit in limits.items()
        )


@dataclass(frozen=True)
class Summary:
    """Statistics of a distribution."""

    mean: float
    std: float
    median: float
    p90: float
    p99: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of a sorted sample, interpolated linearly."""
    place = (len(ordered) - 1) * percent / 100
    lower = math.floor(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (place - lower)


def summarise(values: Iterable[float]) -> Summary | None:
    """Statistics of the values; None if there are none."""
    ordered = sorted(values)
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
    return Summary(mean, std, *(percentile(ordered, percent) for percent in (50, 90, 99)))


def milliseconds(answers: Iterable[RequestTimes]) -> dict[str, list[float]]:
    """The values of every metric over the successful requests."""
    good = [answer for answer in answers if answer.error is None]
    seconds = {
        "ttft": [answer.ttft for answer in good if answer.ttft is not None],
        "tpot": [answer.tpot for answer in good if answer.tpot is not None],
        "itl": [gap for answer in good for gap in answer.gaps],
        "e2el": [answer.e2el for answer in good if answer.e2el is not None],
    }
    return {metric: [value * 1000 for value in values] for metric, values in seconds.items()}


def totals(answers: Sequence[RequestTimes], duration: float) -> dict[str, float]:
    """Counts and rates of a run, by the keys of vLLM's benchmark results."""
    good = [answer for answer in answers if answer.error is None]
    read = sum(answer.prompt_tokens for answer in good)
    written = sum(answer.output_tokens for answer in good)
    duration = max(duration, 1e-9)
    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(good) / duration,
        "output_throughput": written / duration,
        "total_token_throughput": (read + written) / duration,
    }


def goodput(answers: Sequence[RequestTimes], duration: float, limits: dict[str, float]) -> float:
    """Requests per second that meet all limits."""
    return sum(answer.error is None and answer.meets(limits) for answer in answers) / max(
        duration, 1e-9
    )


def flat(values: dict[str, list[float]]) -> dict[str, float]:
    """Summaries by the keys of vLLM's benchmark results: mean_ttft_ms, p99_itl_ms, ..."""
    return {
        f"{figure}_{metric}_ms": value
        for metric, metric_values in values.items()
        if (summary := summarise(metric_values)) is not None
        for figure, value in asdict(summary).items()
    }
