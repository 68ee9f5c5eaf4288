"""Anthropic's /v1/messages: an answer to a body, or to a stream of events."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ...parsing.pieces import Arguments, CallStart, Piece, Said, Thought
from .answer import ChatRequest, ChoicePart, FinishedChoice, Head, Usage
from .shapes import typed_event

ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
    529: "overloaded_error",
}  # fmt: skip
# An answer that was cut off by the server can be sent back to be gone on with, as a paused one.
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {Said: ("text_delta", "text"), Thought: ("thinking_delta", "thinking"),
          Arguments: ("input_json_delta", "partial_json")}  # fmt: skip


def error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an answer that is none; the message names the field, as there is no other place for it."""
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if param is not None and not message.startswith(f"{param}: "):
        message = f"{param}: {message}"
    found: dict[str, Any] = {"type": kind, "message": message}
    if param == "thread":  # the client's own loop asks for one, and goes on without where it hears this
        found["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": found}


def response(
    head: Head, request: ChatRequest, body: Any, answers: Sequence[FinishedChoice], usage: Usage
) -> dict[str, Any]:
    """The body that answers a request."""
    [answer] = answers
    content = [block(Thought(answer.reasoning))] if answer.reasoning else []
    content += [block(Said(answer.content))] if answer.content else []
    for i, call in enumerate(answer.calls):
        content.append(block(CallStart(i, call.id, call.name), arguments_of(call.arguments)))
    return message(head, content, usage) | stopped(answer.finish_reason, answer.stop_reason) | managed(head, request)


def managed(head: Head, request: ChatRequest) -> dict[str, Any]:
    """What was left out of the conversation, where that was asked for."""
    if not request.edits:
        return {}
    return {"context_management": {"applied_edits": [edit for prompt in head.prompts for edit in prompt.applied]}}


def message(head: Head, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """A message that has not stopped."""
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_body(usage),
    }


def block(piece: Piece, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content block that a piece is."""
    if isinstance(piece, CallStart):
        return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": arguments or {}}
    if isinstance(piece, Thought):
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    return {"type": "text", "text": piece.text, "citations": None}


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call; of one that was cut off nothing is known."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        found = None
    return found if isinstance(found, dict) else {}


def stopped(finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    """Why a message has stopped."""
    if finish_reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    return {"stop_reason": STOPS.get(finish_reason or "", "pause_turn"), "stop_sequence": None}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.stored_tokens,
        "cache_creation_input_tokens": usage.stored_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


class MessagesStream:
    """One answer as events. A block is open from its first piece to the first that is another's."""

    def __init__(self, head: Head, request: ChatRequest, body: Any):
        self.managed = managed(head, request)
        self.head = head
        self.index = 0  # of the block that is open, or of the next one
        self.piece: Piece | None = None  # the one that began the block that is open
        self.stop = stopped(None, None)

    def begin(self, usage: Usage) -> bytes:
        return typed_event({"type": "message_start", "message": message(self.head, [], usage)})

    def counted(self, usage: Usage) -> None:
        """Only the last events have the usage."""

    def part(self, part: ChoicePart) -> bytes:
        self.stop = stopped(part.finish_reason, part.stop_reason)
        return b"".join(self.add(piece) for piece in part.pieces)

    def end(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self.stop, "usage": usage_body(usage), **self.managed}
        return self.close() + typed_event(delta) + typed_event({"type": "message_stop"})

    def fail(self, status: int, message: str, param: str | None = None) -> bytes:
        return typed_event(error(status, message, param))

    def add(self, piece: Piece) -> bytes:
        if isinstance(piece, CallStart):
            return self.open(piece)
        if not piece.text:
            return b""
        begun = b""
        if isinstance(piece, Arguments):
            assert isinstance(self.piece, CallStart) and self.piece.index == piece.index
        elif type(piece) is not type(self.piece):
            begun = self.open(type(piece)(""))
        kind, name = DELTAS[type(piece)]
        return begun + self.event("content_block_delta", delta={"type": kind, name: piece.text})

    def open(self, piece: Piece) -> bytes:
        closed = self.close()
        self.piece = piece
        return closed + self.event("content_block_start", content_block=block(piece))

    def close(self) -> bytes:
        if self.piece is None:
            return b""
        found = self.event("content_block_stop")
        self.piece, self.index = None, self.index + 1
        return found

    def event(self, name: str, /, **fields: Any) -> bytes:
        """An event of the block that is open."""
        return typed_event({"type": name, "index": self.index, **fields})
