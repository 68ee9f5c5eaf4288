"""A Quire server's own metrics before and after a load: delays of its event loop, and its memory."""

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
class Inside:
    """The metrics at one moment."""

    late: Mapping[float, float]  # seconds -> timers that were at most so late
    memory: float | None
    drafts: Drafts | None  # of the model, where the server drafts

    def since(self, before: "Inside") -> dict[str, Any]:
        """What happened between two moments."""
        counts = {bound: count - before.late.get(bound, 0.0) for bound, count in sorted(self.late.items())}
        found: dict[str, Any] = {"memory_before": before.memory, "memory_after": self.memory}
        for share in (50, 99):
            most = max(counts.values(), default=0.0)
            bound = next((bound for bound, count in counts.items() if count >= most * share / 100), None)
            found[f"event_loop_delay_p{share}_ms"] = None if bound is None or not most else bound * 1000
        return found


def look(server: client.ServerAddress, model: str, timeout: float) -> Inside | None:
    """None where the server has no such metrics, or hides them."""
    try:
        text = asyncio.run(client.get(server, "/metrics", timeout))
    except (client.Failure, OSError, EOFError):
        return None
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    late = {float(sample.labels["le"]): sample.value for sample in samples if sample.name == LATE}
    memory = next((sample.value for sample in samples if sample.name == MEMORY), None)
    drafts = drafts_in([sample for sample in samples if sample.labels.get("model_name", model) == model])
    return Inside(late, memory, drafts) if late or drafts is not None else None


def drafts_in(samples: list[Any]) -> Drafts | None:
    """The counters of drafts, which have the same names in vLLM; None where there are none."""
    totals: dict[str, float] = {}
    for sample in samples:
        if sample.name.startswith(DRAFTS):
            key = sample.name.removeprefix(DRAFTS) + sample.labels.get("position", "")
            totals[key] = totals.get(key, 0) + sample.value
    place = "accepted_tokens_per_pos_total"
    accepted = sorted((int(key.removeprefix(place)), int(count)) for key, count in totals.items() if place in key)
    if not {"drafts_total", "draft_tokens_total"} <= totals.keys():
        return None
    return Drafts(int(totals["drafts_total"]), int(totals["draft_tokens_total"]), tuple(n for _, n in accepted))


def sentence(found: Mapping[str, Any]) -> str:
    """For people."""
    late = ", ".join(
        f"{found[f'event_loop_delay_p{share}_ms']:g} ms (P{share})"
        for share in (50, 99)
        if found[f"event_loop_delay_p{share}_ms"] is not None
    )
    text = f"in the server: its event loop was {f'late by at most {late}' if late else 'not timed in so short a run'}"
    if found["memory_before"] and found["memory_after"]:
        before, after = (found[name] / 2**20 for name in ("memory_before", "memory_after"))
        text += f"; {before:,.0f} MiB before, {after:,.0f} MiB after"
    return text
