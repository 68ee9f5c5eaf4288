"""Server metrics before and after a load: event loop delays, memory and draft tokens."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import client as client
from .drafts import Drafts

LATE = "quire:event_loop_delay_seconds_bucket"
MEMORY = "process_resident_memory_bytes"
DRAFTS = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class ServerStats:
    """The metrics at one moment."""

    # Histogram: upper bound in seconds -> number of event loop timers delayed by at most that.
    delays: Mapping[float, float]
    memory: float | None  # resident bytes
    drafts: Drafts | None  # None without speculative decoding

    def since(self, earlier: "ServerStats") -> dict[str, Any]:
        """The changes since an earlier moment."""
        counts = {
            bound: count - earlier.delays.get(bound, 0.0)
            for bound, count in sorted(self.delays.items())
        }
        changes: dict[str, Any] = {"memory_before": earlier.memory, "memory_after": self.memory}
        for share in (50, 99):
            total = max(counts.values(), default=0.0)
            bound = next(
                (bound for bound, count in counts.items() if count >= total * share / 100), None
            )
            changes[f"event_loop_delay_p{share}_ms"] = (
                None if bound is None or not total else bound * 1000
            )
        return changes


def read_stats(server: client.ServerAddress, model: str, timeout: float) -> ServerStats | None:
    """Read /metrics; None if the server has no such metrics or denies access."""
    try:
        text = asyncio.run(client.get(server, "/metrics", timeout))
    except (client.Failure, OSError, EOFError):
        return None
    from prometheus_client.parser import text_string_to_metric_families

    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    delays = {float(sample.labels["le"]): sample.value for sample in samples if sample.name == LATE}
    memory = next((sample.value for sample in samples if sample.name == MEMORY), None)
    drafts = parse_drafts(
        [sample for sample in samples if sample.labels.get("model_name", model) == model]
    )
    return ServerStats(delays, memory, drafts) if delays or drafts is not None else None


def parse_drafts(samples: list[Any]) -> Drafts | None:
    """Parse the draft token counters, which have vLLM's names; None if there are none."""
    totals: dict[str, float] = {}
    for sample in samples:
        if sample.name.startswith(DRAFTS):
            key = sample.name.removeprefix(DRAFTS) + sample.labels.get("position", "")
            totals[key] = totals.get(key, 0) + sample.value
    place = "accepted_tokens_per_pos_total"
    accepted = sorted(
        (int(key.removeprefix(place)), int(count)) for key, count in totals.items() if place in key
    )
    if not {"drafts_total", "draft_tokens_total"} <= totals.keys():
        return None
    return Drafts(
        int(totals["drafts_total"]),
        int(totals["draft_tokens_total"]),
        tuple(n for _, n in accepted),
    )


def sentence(stats: Mapping[str, Any]) -> str:
    """The changes in event loop delay and memory as a sentence."""
    delay_text = ", ".join(
        f"{stats[f'event_loop_delay_p{share}_ms']:g} ms (P{share})"
        for share in (50, 99)
        if stats[f"event_loop_delay_p{share}_ms"] is not None
    )
    delays = f"late by at most {delay_text}" if delay_text else "not timed in so short a run"
    text = f"in the server: its event loop was {delays}"
    if stats["memory_before"] and stats["memory_after"]:
        memory_before, memory_after = (
            stats[name] / 2**20 for name in ("memory_before", "memory_after")
        )
        text += f"; {memory_before:,.0f} MiB before, {memory_after:,.0f} MiB after"
    return text
