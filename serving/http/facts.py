"""What the log and a trace may know of a request: numbers and names."""

from typing import Any

from ..api.params import SamplingParams
from .answering import Answering


def tell(answering: Answering, facts: dict[str, Any]) -> None:
    """What the log and a trace may know of a request."""
    usage, first = answering.usage, answering.answers.requests[0]
    facts |= {
        "tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "finish_reason": ",".join(sorted(answering.choices.reasons)),
        "queued": None if first.first_scheduled is None else first.first_scheduled - first.arrival,
        "first_token": None if first.first_token is None else first.first_token - first.arrival,
    }


def span_facts(facts: dict[str, Any], asked: SamplingParams) -> dict[str, Any]:
    """The same facts by the names of a span's."""
    names = {"model": "model", "prompt_tokens": "prompt_tokens", "completion_tokens": "tokens",
             "time_in_queue": "queued", "time_to_first_token": "first_token"}  # fmt: skip
    found = {name: facts.get(own) for name, own in names.items()}
    reasons = [reason for reason in facts.get("finish_reason", "").split(",") if reason]
    wanted = {name: getattr(asked, name) for name in ("max_tokens", "temperature", "top_p", "n")}
    return found | wanted | {"finish_reasons": reasons or None}
