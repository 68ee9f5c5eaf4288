"""Shapes that OpenAI's endpoints have in common: errors, usage, log-probabilities, events."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...api.outputs import Logprob
from ...api.params import SamplingParams
from .answer import Delivery, Head, Logprobs, Usage

LEAST_LOGPROB = -9999.0  # JSON has no infinity
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip
DONE = b"data: [DONE]\n\n"


def error(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an answer that is none."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(body)


def typed_event(body: Mapping[str, Any]) -> bytes:
    """A server-sent event that bears the name of its type."""
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), msgspec.json.encode(body))


def usage_body(usage: Usage) -> dict[str, Any]:
    found = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens:
        found["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return found


def metrics_body(delivery: Delivery, usage: Usage) -> dict[str, Any]:
    """How long an answer took, in vLLM's words, where that is told."""
    if not delivery.metrics or usage.waiting is None:
        return {}
    found = {
        "queue_time_ms": usage.waiting * 1000,
        "time_to_first_token_ms": usage.reading * 1000,
        "generation_time_ms": usage.writing * 1000,
        "tokens_per_second": usage.completion_tokens / max(usage.reading + usage.writing, 1e-9),
    }
    if usage.completion_tokens > 1:
        found["mean_itl_ms"] = usage.writing * 1000 / (usage.completion_tokens - 1)
    return {"metrics": found}


def head_fields(head: Head, kind: str) -> dict[str, Any]:
    """What every answer and every chunk begins with."""
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
    }


class ChunkStream:
    """Answers as events: chunks, then the usage, then the end."""

    def __init__(self, head: Head, kind: str, delivery: Delivery):
        self.frame, self.delivery = head_fields(head, kind), delivery
        self.usage: Usage | None = None  # so far

    def chunk(self, own: dict[str, Any], usage: Usage | None = None) -> bytes:
        found = self.frame | own
        if self.delivery.include_usage or self.delivery.continuous_usage:
            shown = self.usage if self.delivery.continuous_usage and usage is None else usage
            found["usage"] = None if shown is None else usage_body(shown)
        return event(found)

    def begin(self, usage: Usage) -> bytes:
        self.counted(usage)
        return b""

    def counted(self, usage: Usage) -> None:
        """What was used so far."""
        self.usage = usage

    def end(self, usage: Usage) -> bytes:
        last = {"choices": [], **metrics_body(self.delivery, usage)}
        return (self.chunk(last, usage) if self.delivery.include_usage else b"") + DONE

    def fail(self, status: int, message: str, param: str | None = None) -> bytes:
        return event(error(status, message, param)) + DONE


def token_text(token: int, entry: Logprob) -> str:
    return token_name(token) if entry.decoded_token is None else entry.decoded_token


def token_name(token: int) -> str:
    return f"token_id:{token}"


def finite(entry: Logprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def count_of(params: SamplingParams) -> int | None:
    """How many of those that are known in a token's place are told beside it; None: all."""
    return None if params.logprob_token_ids or params.logprobs == -1 else params.logprobs or 0


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Logprobs, count: int | None, as_ids: bool = False
) -> Iterator[dict[str, Any]]:
    """For each token of an answer itself and the likeliest in its place, so many of them or all that are known."""

    def described(token: int, entry: Logprob) -> dict[str, Any]:
        text = token_text(token, entry)
        # A part of a character has bytes that its text no longer shows.
        known = entry.decoded_token is not None and "\ufffd" not in text
        return {
            "token": token_name(token) if as_ids else text,
            "logprob": finite(entry),
            "bytes": list(text.encode()) if known else None,
        }

    for token, entries in zip(token_ids, logprobs, strict=True):
        best = sorted(entries.items(), key=lambda item: -item[1].logprob)[:count]
        yield {**described(token, entries[token]), "top_logprobs": [described(*item) for item in best]}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob] | None],
    at: int = 0,
    first: str = "",
    as_ids: bool = False,
) -> tuple[dict[str, Any], int]:
    """The same as parallel lists, and where the text after them begins.

    Here the token itself is among the likeliest, beyond their number if it must. A prompt's first token has none.
    """
    tokens, own, top, offsets = [], [], [], []

    def name(token: int, entry: Logprob) -> str:
        return token_name(token) if as_ids else token_text(token, entry)

    for token, entries in zip(token_ids, logprobs, strict=True):
        text = first if entries is None else token_text(token, entries[token])
        tokens.append(token_name(token) if as_ids else text)
        own.append(None if entries is None else finite(entries[token]))
        # Of several of one text the likeliest stays.
        ranked = sorted((entries or {}).items(), key=lambda item: item[1].logprob)
        top.append(None if entries is None else {name(*item): finite(item[1]) for item in ranked})
        offsets.append(at)
        at += len(text)
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}, at


def prompt_logprobs(logprobs: Sequence[Mapping[int, Logprob] | None]) -> list[dict[str, dict[str, Any]] | None]:
    return [
        None if entries is None else {
            str(token): {"logprob": finite(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in entries.items()
        }
        for entries in logprobs
    ]  # fmt: skip
