"""Ollama's endpoints: response bodies and streams of JSON lines."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...parsing.pieces import Arguments, CallStart, ReasoningPiece, TextPiece
from .answer import (
    ChoicePart,
    FinishedChoice,
    Logprobs,
    OllamaRequest,
    ResponseHead,
    ToolCall,
    Usage,
)
from .messages import parse_arguments
from .shapes import chat_logprobs

SECOND = 1_000_000_000  # durations are whole nanoseconds


def error(message: str) -> dict[str, Any]:
    """The body of an error, or the last line of a stream that failed."""
    return {"error": message}


def response(
    head: ResponseHead,
    request: OllamaRequest,
    body: Any,
    answers: Sequence[FinishedChoice],
    usage: Usage,
) -> dict[str, Any]:
    """The body of a complete answer."""
    [answer] = answers
    calls = [call_body(i, call) for i, call in enumerate(answer.calls)]
    line_body = part_body(request, answer.content or "", answer.reasoning or "", calls)
    line_body |= scores(request, answer.token_ids, answer.logprobs)
    return (
        line_body
        | end_fields(request, answer.finish_reason, usage)
        | context_field(head, request, answer.token_ids)
    )


def loaded_body(request: OllamaRequest, reason: str) -> dict[str, Any]:
    """The body for a request that only loads or unloads a model."""
    return part_body(request, "", "", []) | {"done": True, "done_reason": reason}


def part_body(
    request: OllamaRequest, text: str, thought: str, calls: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """An unfinished body with a text, reasoning and calls."""
    line_body: dict[str, Any] = {"model": request.called, "created_at": iso_time(time.time())}
    extra_fields = ({"thinking": thought} if thought else {}) | (
        {"tool_calls": list(calls)} if calls else {}
    )
    if request.prompt is None:
        line_body["message"] = {"role": "assistant", "content": text} | extra_fields
    else:
        line_body |= {"response": text} | extra_fields
    return line_body | {"done": False}


def iso_time(seconds: float) -> str:
    """A time in RFC 3339's format."""
    return (
        datetime.fromtimestamp(seconds, UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z")
    )


def call_body(index: int, call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "function": {
            "index": index,
            "name": call.name,
            "arguments": parse_arguments(call.arguments),
        },
    }


def scores(
    request: OllamaRequest, token_ids: Sequence[int], logprobs: Logprobs | None
) -> dict[str, Any]:
    """The field with the log-probabilities, if they were requested."""
    if logprobs is None:
        return {}
    return {"logprobs": list(chat_logprobs(token_ids, logprobs, request.params.logprobs or 0))}


def end_fields(request: OllamaRequest, reason: str | None, usage: Usage) -> dict[str, Any]:
    """The finish reason, usage and times.

    The time outside of prefill and decoding counts as loading.
    """
    total = time.monotonic() - request.began
    loading = max(total - usage.reading - usage.writing, 0.0)
    return {
        "done": True,
        "done_reason": "stop" if reason == "tool_calls" else reason or "stop",
        "total_duration": int(total * SECOND),
        "load_duration": int(loading * SECOND),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(usage.reading * SECOND),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(usage.writing * SECOND),
    }


def context_field(
    head: ResponseHead, request: OllamaRequest, token_ids: Sequence[int]
) -> dict[str, Any]:
    """The tokens to continue from (`context`); absent without a chat template."""
    if request.prompt is None or request.raw or request.suffix:
        return {}
    return {"context": [*head.prompts[0].token_ids, *token_ids]}


def embed_response(
    model: str, began: float, vectors: Sequence[Sequence[float]], usage: Usage
) -> dict[str, Any]:
    return {
        "model": model,
        "embeddings": [list(vector) for vector in vectors],
        "total_duration": int((time.monotonic() - began) * SECOND),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
    }


def line(body: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(body) + b"\n"


class LineStream:
    """Encodes one answer as JSON lines; a call is sent when its arguments are complete."""

    def __init__(self, head: ResponseHead, request: OllamaRequest, body: Any):
        self.head = head
        self.request = request
        self.call: tuple[CallStart, list[str]] | None = None  # the unfinished call
        self.tokens: list[int] = []
        self.reason: str | None = None

    def begin(self, usage: Usage) -> bytes:
        return b""

    def set_usage(self, usage: Usage) -> None:
        """Do nothing: only the last line contains the usage."""

    def part(self, choice_part: ChoicePart) -> bytes:
        texts = {TextPiece: "", ReasoningPiece: ""}
        calls = []
        for piece in choice_part.pieces:
            if isinstance(piece, Arguments):
                assert self.call is not None
                self.call[1].append(piece.text)
                continue
            calls += self.close_call()
            if isinstance(piece, CallStart):
                self.call = (piece, [])
            else:
                texts[type(piece)] += piece.text
        if choice_part.finish_reason is not None:
            calls += self.close_call()
            self.reason = choice_part.finish_reason
        self.tokens += choice_part.token_ids
        score_fields = (
            scores(self.request, choice_part.token_ids, choice_part.logprobs)
            if choice_part.token_ids
            else {}
        )
        if not (any(texts.values()) or calls or score_fields):
            return b""
        return line(
            part_body(self.request, texts[TextPiece], texts[ReasoningPiece], calls) | score_fields
        )

    def close_call(self) -> list[dict[str, Any]]:
        """The body of the pending call, in a list that is empty if there is none."""
        if self.call is None:
            return []
        start, texts = self.call
        self.call = None
        return [call_body(start.index, ToolCall(start.id, start.name, "".join(texts)))]

    def end(self, usage: Usage) -> bytes:
        line_body = part_body(self.request, "", "", []) | end_fields(
            self.request, self.reason, usage
        )
        return line(line_body | context_field(self.head, self.request, self.tokens))

    def fail(self, status: int, message: str, param: str | None = None) -> bytes:
        return line(error(message))
