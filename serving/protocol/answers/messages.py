"""Anthropic's /v1/messages: response bodies and event streams."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ...parsing.pieces import Arguments, CallStart, Piece, ReasoningPiece, TextPiece
from .answer import ChatRequest, ChoicePart, FinishedChoice, ResponseHead, Usage
from .shapes import typed_event

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# Other reasons become `pause_turn`: the client can send the answer back to continue it.
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {TextPiece: ("text_delta", "text"), ReasoningPiece: ("thinking_delta", "thinking"),
          Arguments: ("input_json_delta", "partial_json")}  # fmt: skip


def error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error; the message names the field, since the body has no field for that."""
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    if param is not None and not message.startswith(f"{param}: "):
        message = f"{param}: {message}"
    body: dict[str, Any] = {"type": kind, "message": message}
    if param == "thread":  # on this code, Anthropic's client goes on without a thread
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": body}


def response(
    head: ResponseHead,
    request: ChatRequest,
    body: Any,
    answers: Sequence[FinishedChoice],
    usage: Usage,
) -> dict[str, Any]:
    """The body of a complete answer."""
    [answer] = answers
    content = [block(ReasoningPiece(answer.reasoning))] if answer.reasoning else []
    content += [block(TextPiece(answer.content))] if answer.content else []
    for i, call in enumerate(answer.calls):
        content.append(block(CallStart(i, call.id, call.name), parse_arguments(call.arguments)))
    return (
        message(head, content, usage)
        | stop_fields(answer.finish_reason, answer.stop_reason)
        | context_management(head, request)
    )


def context_management(head: ResponseHead, request: ChatRequest) -> dict[str, Any]:
    """The reports of edits of the conversation, if the request has edits."""
    if not request.edits:
        return {}
    return {
        "context_management": {
            "applied_edits": [edit for prompt in head.prompts for edit in prompt.applied]
        }
    }


def message(head: ResponseHead, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """The body of an unfinished message."""
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
    """The content block of a piece."""
    if isinstance(piece, CallStart):
        return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": arguments or {}}
    if isinstance(piece, ReasoningPiece):
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    return {"type": "text", "text": piece.text, "citations": None}


def parse_arguments(text: str) -> dict[str, Any]:
    """Parse a call's arguments; incomplete ones become an empty object."""
    try:
        arguments = msgspec.json.decode(text)
    except msgspec.DecodeError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {}


def stop_fields(finish_reason: str | None, stop_reason: int | str | None) -> dict[str, Any]:
    """The fields with the reason why a message ended."""
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
    """Encodes one answer as events; consecutive pieces of one kind form a content block."""

    def __init__(self, head: ResponseHead, request: ChatRequest, body: Any):
        self.managed = context_management(head, request)
        self.head = head
        self.index = 0  # of the open block, or of the next one
        self.piece: Piece | None = None  # the first piece of the open block
        self.stop = stop_fields(None, None)

    def begin(self, usage: Usage) -> bytes:
        return typed_event({"type": "message_start", "message": message(self.head, [], usage)})

    def set_usage(self, usage: Usage) -> None:
        """Do nothing: only the last events contain the usage."""

    def part(self, choice_part: ChoicePart) -> bytes:
        self.stop = stop_fields(choice_part.finish_reason, choice_part.stop_reason)
        return b"".join(self.add(piece) for piece in choice_part.pieces)

    def end(self, usage: Usage) -> bytes:
        delta = {
            "type": "message_delta",
            "delta": self.stop,
            "usage": usage_body(usage),
            **self.managed,
        }
        return self.close() + typed_event(delta) + typed_event({"type": "message_stop"})

    def fail(self, status: int, message: str, param: str | None = None) -> bytes:
        return typed_event(error(status, message, param))

    def add(self, piece: Piece) -> bytes:
        if isinstance(piece, CallStart):
            return self.open(piece)
        if not piece.text:
            return b""
        start_events = b""
        if isinstance(piece, Arguments):
            assert isinstance(self.piece, CallStart) and self.piece.index == piece.index
        elif type(piece) is not type(self.piece):
            start_events = self.open(type(piece)(""))
        kind, name = DELTAS[type(piece)]
        return start_events + self.event(
            "content_block_delta", delta={"type": kind, name: piece.text}
        )

    def open(self, piece: Piece) -> bytes:
        stop_events = self.close()
        self.piece = piece
        return stop_events + self.event("content_block_start", content_block=block(piece))

    def close(self) -> bytes:
        if self.piece is None:
            return b""
        stop_event = self.event("content_block_stop")
        self.piece = None
        self.index = self.index + 1
        return stop_event

    def event(self, name: str, /, **fields: Any) -> bytes:
        """An event of the open block."""
        return typed_event({"type": name, "index": self.index, **fields})
