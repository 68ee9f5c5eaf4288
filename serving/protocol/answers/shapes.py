"""Bodies that OpenAI's endpoints share: errors, usage, log-probabilities, events."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...api.outputs import Logprob
from ...api.params import SamplingParams
from .answer import Delivery, Logprobs, ResponseHead, Usage

LEAST_LOGPROB = -9999.0  # JSON has no infinity
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
DONE = b"data: [DONE]\n\n"


def error(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The body of an error."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(body: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(body)


def typed_event(body: Mapping[str, Any]) -> bytes:
    """A server-sent event named like the body's `type`."""
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), msgspec.json.encode(body))


def usage_body(usage: Usage) -> dict[str, Any]:
    body = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


def metrics_body(delivery: Delivery, usage: Usage) -> dict[str, Any]:
    """The times of an answer in vLLM's form, if the server reports them."""
    if not delivery.metrics or usage.waiting is None:
        return {}
    times = {
        "queue_time_ms": usage.waiting * 1000,
        "time_to_first_token_ms": usage.reading * 1000,
        "generation_time_ms": usage.writing * 1000,
        "tokens_per_second": usage.completion_tokens / max(usage.reading + usage.writing, 1e-9),
    }
    if usage.completion_tokens > 1:
        times["mean_itl_ms"] = usage.writing * 1000 / (usage.completion_tokens - 1)
    return {"metrics": times}


def head_fields(head: ResponseHead, kind: str) -> dict[str, Any]:
    """The common fields of every response and every chunk."""
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
    }


class ChunkStream:
    """Encodes answers as events: chunks, then the usage, then the end."""

    def __init__(self, head: ResponseHead, kind: str, delivery: Delivery):
        self.frame = head_fields(head, kind)
        self.delivery = delivery
        self.usage: Usage | None = None  # so far

    def chunk(self, chunk_fields: dict[str, Any], usage: Usage | None = None) -> bytes:
        body = self.frame | chunk_fields
        if self.delivery.include_usage or self.delivery.continuous_usage:
            shown_usage = self.usage if self.delivery.continuous_usage and usage is None else usage
            body["usage"] = None if shown_usage is None else usage_body(shown_usage)
        return event(body)

    def begin(self, usage: Usage) -> bytes:
        self.set_usage(usage)
        return b""

    def set_usage(self, usage: Usage) -> None:
        """Set the usage so far, for the next chunks."""
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


def finite_logprob(entry: Logprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def max_alternatives(params: SamplingParams) -> int | None:
    """The number of alternatives to return for each token; None: all that are known."""
    return None if params.logprob_token_ids or params.logprobs == -1 else params.logprobs or 0


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Logprobs, count: int | None, as_ids: bool = False
) -> Iterator[dict[str, Any]]:
    """The log-probabilities of each token and of the `count` likeliest ones (None: all)."""

    def describe_logprobs(token: int, entry: Logprob) -> dict[str, Any]:
        text = token_text(token, entry)
        # The bytes of an incomplete character cannot be recovered from the text.
        has_whole_characters = entry.decoded_token is not None and "\ufffd" not in text
        return {
            "token": token_name(token) if as_ids else text,
            "logprob": finite_logprob(entry),
            "bytes": list(text.encode()) if has_whole_characters else None,
        }

    for token, entries in zip(token_ids, logprobs, strict=True):
        best = sorted(entries.items(), key=lambda item: -item[1].logprob)[:count]
        yield {
            **describe_logprobs(token, entries[token]),
            "top_logprobs": [describe_logprobs(*item) for item in best],
        }


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Mapping[int, Logprob] | None],
    offset: int = 0,
    first_text: str = "",
    as_ids: bool = False,
) -> tuple[dict[str, Any], int]:
    """Log-probabilities as parallel lists, and the offset of the text after the tokens.

    The token itself is always among the alternatives. A prompt's first token has no
    log-probabilities (its entry is None); its text is `first_text`.
    """
    tokens = []
    token_logprobs = []
    top_logprobs = []
    offsets = []

    def name(token: int, entry: Logprob) -> str:
        return token_name(token) if as_ids else token_text(token, entry)

    for token, entries in zip(token_ids, logprobs, strict=True):
        text = first_text if entries is None else token_text(token, entries[token])
        tokens.append(token_name(token) if as_ids else text)
        token_logprobs.append(None if entries is None else finite_logprob(entries[token]))
        # The likeliest comes last, so that it wins over others with the same text.
        ranked = sorted((entries or {}).items(), key=lambda item: item[1].logprob)
        top_logprobs.append(
            None if entries is None else {name(*item): finite_logprob(item[1]) for item in ranked}
        )
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": token_logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }, offset


def prompt_logprobs(
    logprobs: Sequence[Mapping[int, Logprob] | None],
) -> list[dict[str, dict[str, Any]] | None]:
    return [
        None
        if entries is None
        else {
            str(token): {
                "logprob": finite_logprob(entry),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in entries.items()
        }
        for entries in logprobs
    ]
