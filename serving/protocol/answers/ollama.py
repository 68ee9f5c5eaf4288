"""Ollama's endpoints: an answer to a body, or to a stream of lines of JSON."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...parsing.pieces import Arguments, CallStart, Said, Thought
from .answer import ChoicePart, FinishedChoice, Head, Logprobs, OllamaRequest, ToolCall, Usage
from .messages import arguments_of
from .shapes import chat_logprobs

SECOND = 1_000_000_000  # durations are whole nanoseconds


def error(message: str) -> dict[str, Any]:
    """The body of an answer that is none, or the last line of a stream."""
    return {"error": message}


def response(
    head: Head, request: OllamaRequest, body: Any, answers: Sequence[FinishedChoice], usage: Usage
) -> dict[str, Any]:
    """The body that answers a request."""
    [answer] = answers
    calls = [call_body(i, call) for i, call in enumerate(answer.calls)]
    found = part_body(request, answer.content or "", answer.reasoning or "", calls)
    found |= scores(request, answer.token_ids, answer.logprobs)
    return found | ended(request, answer.finish_reason, usage) | remembered(head, request, answer.token_ids)


def loaded(request: OllamaRequest, reason: str) -> dict[str, Any]:
    """The answer to a request that asks for nothing but the model."""
    return part_body(request, "", "", []) | {"done": True, "done_reason": reason}


def part_body(request: OllamaRequest, text: str, thought: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A text, with what was thought and called where there is any; it is not the last."""
    found: dict[str, Any] = {"model": request.called, "created_at": moment(time.time())}
    more = ({"thinking": thought} if thought else {}) | ({"tool_calls": list(calls)} if calls else {})
    if request.prompt is None:
        found["message"] = {"role": "assistant", "content": text} | more
    else:
        found |= {"response": text} | more
    return found | {"done": False}


def moment(seconds: float) -> str:
    """A time as RFC 3339 has it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def call_body(index: int, call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments_of(call.arguments)}}


def scores(request: OllamaRequest, token_ids: Sequence[int], logprobs: Logprobs | None) -> dict[str, Any]:
    """The log-probabilities, where they were asked for."""
    if logprobs is None:
        return {}
    return {"logprobs": list(chat_logprobs(token_ids, logprobs, request.params.logprobs or 0))}


def ended(request: OllamaRequest, reason: str | None, usage: Usage) -> dict[str, Any]:
    """Why an answer has ended, and what it took; all that is neither reading nor writing is loading and waiting."""
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


def remembered(head: Head, request: OllamaRequest, token_ids: Sequence[int]) -> dict[str, Any]:
    """`context`: the tokens of a prompt and its answer, to go on from; not where the template was left out."""
    if request.prompt is None or request.raw or request.suffix:
        return {}
    return {"context": [*head.prompts[0].token_ids, *token_ids]}


def embed_response(model: str, began: float, vectors: Sequence[Sequence[float]], usage: Usage) -> dict[str, Any]:
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
    """One answer as lines of JSON. A call comes whole, when its arguments have ended."""

    def __init__(self, head: Head, request: OllamaRequest, body: Any):
        self.head, self.request = head, request
        self.call: tuple[CallStart, list[str]] | None = None  # whose arguments are coming
        self.tokens: list[int] = []
        self.reason: str | None = None

    def begin(self, usage: Usage) -> bytes:
        return b""

    def counted(self, usage: Usage) -> None:
        """Only the last line has the usage."""

    def part(self, part: ChoicePart) -> bytes:
        texts, calls = {Said: "", Thought: ""}, []
        for piece in part.pieces:
            if isinstance(piece, Arguments):
                assert self.call is not None
                self.call[1].append(piece.text)
                continue
            calls += self.whole_call()
            if isinstance(piece, CallStart):
                self.call = (piece, [])
            else:
                texts[type(piece)] += piece.text
        if part.finish_reason is not None:
            calls += self.whole_call()
            self.reason = part.finish_reason
        self.tokens += part.token_ids
        more = scores(self.request, part.token_ids, part.logprobs) if part.token_ids else {}
        if not (any(texts.values()) or calls or more):
            return b""
        return line(part_body(self.request, texts[Said], texts[Thought], calls) | more)

    def whole_call(self) -> list[dict[str, Any]]:
        """The call whose arguments have ended, if there is one."""
        if self.call is None:
            return []
        (start, texts), self.call = self.call, None
        return [call_body(start.index, ToolCall(start.id, start.name, "".join(texts)))]

    def end(self, usage: Usage) -> bytes:
        found = part_body(self.request, "", "", []) | ended(self.request, self.reason, usage)
        return line(found | remembered(self.head, self.request, self.tokens))

    def fail(self, status: int, message: str, param: str | None = None) -> bytes:
        return line(error(message))
