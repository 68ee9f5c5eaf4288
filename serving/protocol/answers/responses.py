"""OpenAI's /v1/responses: response bodies and event streams."""

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...api.content import joined_texts
from ...parsing.pieces import Arguments, CallStart, Piece, ReasoningPiece, TextPiece
from .answer import (
    ChatRequest,
    ChoicePart,
    FinishedChoice,
    Logprobs,
    ResponseHead,
    ResponsesRequest,
    Usage,
)
from .shapes import chat_logprobs, max_alternatives, typed_event

KINDS = {
    TextPiece: ("message", "msg"),
    ReasoningPiece: ("reasoning", "rs"),
    CallStart: ("function_call", "fc"),
}
# The prefix of an item's text events, and the field with the complete text in the last one.
EVENTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
OPEN = ("queued", "in_progress")  # statuses of an unfinished response
CUSTOM = ("custom_tool_call", "ctc")
ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "user",
    "safety_identifier",
    "prompt_cache_key",
)


@dataclass
class OutputItem:
    """An output item: a message, reasoning, or a tool call."""

    kind: str
    id: str
    call: CallStart | None
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def body(self, status: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"type": self.kind, "id": self.id, "status": status}
        if self.call is not None:
            return fields | {
                "call_id": self.call.id,
                "name": self.call.name,
                EVENTS[self.kind][1]: self.text,
            }
        content = [] if status == "in_progress" else [self.part()]
        return (
            fields
            | ({"role": "assistant"} if self.kind == "message" else {"summary": []})
            | {"content": content}
        )

    def part(self) -> dict[str, Any]:
        """The single content part of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": self.logprobs,
        }


def response(
    head: ResponseHead,
    request: ResponsesRequest,
    body: Any,
    answers: Sequence[FinishedChoice],
    usage: Usage,
    keep: Callable[[dict[str, Any]], None] = lambda response_body: None,
) -> dict[str, Any]:
    """The body of a complete answer, by way of a stream with one part; `keep` gets the body too."""
    [answer] = answers
    stream = ResponsesStream(head, request, body)
    stream.part(as_one_part(answer))
    status = response_status(answer.finish_reason)
    stream.close(status)
    response_body = stream.frame(status, usage)
    keep(response_body)
    return response_body


def as_one_part(answer: FinishedChoice) -> ChoicePart:
    """A complete answer as one part, with reasoning, text and calls in this order."""
    pieces: list[Piece] = [ReasoningPiece(answer.reasoning or ""), TextPiece(answer.content or "")]
    for i, call in enumerate(answer.calls):
        pieces += [CallStart(i, call.id, call.name), Arguments(i, call.arguments)]
    return ChoicePart(
        0,
        pieces,
        answer.finish_reason,
        answer.stop_reason,
        answer.token_ids,
        answer.logprobs,
        raw=answer.raw,
    )


def describe_logprobs(
    request: ChatRequest, token_ids: Sequence[int], logprobs: Logprobs
) -> Iterator[dict[str, Any]]:
    """The log-probabilities of tokens; unknown bytes become an empty list."""
    for entry in chat_logprobs(token_ids, logprobs, max_alternatives(request.params)):
        best = [
            alternative | {"bytes": alternative["bytes"] or []}
            for alternative in entry["top_logprobs"]
        ]
        yield entry | {"bytes": entry["bytes"] or [], "top_logprobs": best}


def raw_message(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}


def response_status(finish_reason: str | None) -> str:
    return "completed" if finish_reason in ("stop", "tool_calls") else "incomplete"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def compacted(
    head: ResponseHead,
    request: ChatRequest,
    body: Any,
    answers: Sequence[FinishedChoice],
    usage: Usage,
) -> dict[str, Any]:
    """The body of /v1/responses/compact: the user messages, and the summary in base64."""
    [answer] = answers
    user_texts = [
        joined_texts(message["content"])
        for message in request.messages
        if message["role"] == "user"
    ]
    output: list[dict[str, Any]] = [
        {"id": f"msg_{i}_{head.id}", "type": "message", "role": "user", "status": "completed",
         "content": [{"type": "input_text", "text": text}]} for i, text in enumerate(user_texts)
    ]  # fmt: skip
    packed = base64.b64encode((answer.content or "").encode()).decode()
    output.append({"id": f"cmp_{head.id}", "type": "compaction", "encrypted_content": packed})
    return {
        "id": head.id,
        "object": "response.compaction",
        "created_at": head.created,
        "output": output,
        "usage": usage_body(usage),
    }


class ResponsesStream:
    """Encodes one answer as events; consecutive pieces of one kind form an output item.

    A message has the log-probabilities of all tokens since the previous message, also of tokens
    outside of its text.
    """

    def __init__(
        self,
        head: ResponseHead,
        request: ResponsesRequest,
        body: Any,
        keep: Callable[[dict[str, Any]], None] = lambda response_body: None,
    ):
        """`keep` is called with the body of the finished response."""
        self.head = head
        self.request = request
        self.request_body = body
        self.keep = keep
        self.number = 0  # of the next event
        self.output: list[dict[str, Any]] = []  # the finished items
        self.item: OutputItem | None = None  # the open item
        self.logprobs: list[dict[str, Any]] = []  # that no message has yet
        self.finish_reason: str | None = None
        self.raw: list[str] = []  # the unparsed text
        self.token_ids: list[int] = []

    def queue(self) -> bytes:
        """The events of a background response that is queued."""
        return self.state("response.created", "queued") + self.state("response.queued", "queued")

    def with_prompts(self, head: ResponseHead) -> "ResponsesStream":
        """Set the prompts of a queued response, which are known only now, and return the stream."""
        self.head = replace(self.head, prompts=head.prompts)
        return self

    def begin(self, usage: Usage) -> bytes:
        created_event = b"" if self.number else self.state("response.created", "in_progress")
        return created_event + self.state("response.in_progress", "in_progress")

    def set_usage(self, usage: Usage) -> None:
        """Do nothing: only the last event contains the usage."""

    def part(self, choice_part: ChoicePart) -> bytes:
        if choice_part.logprobs is not None:
            self.logprobs += describe_logprobs(
                self.request, choice_part.token_ids, choice_part.logprobs
            )
        self.finish_reason = choice_part.finish_reason
        if self.request.shows_raw:
            self.raw.append(choice_part.raw)
            self.token_ids += choice_part.token_ids
        return b"".join(self.add(piece) for piece in choice_part.pieces)

    def end(self, usage: Usage) -> bytes:
        status = response_status(self.finish_reason)
        return self.close(status) + self.state(f"response.{status}", status, usage)

    def fail(self, status: int, message: str, param: str | None = None) -> bytes:
        """The last events of a stream that failed; one without events is created first."""
        code = {429: "rate_limit_exceeded"}.get(
            status, "server_error" if status >= 500 else "invalid_prompt"
        )
        created_event = b"" if self.number else self.state("response.created", "in_progress")
        error = {"code": code, "message": message, "param": param}
        return (
            created_event
            + self.close("incomplete")
            + self.state("response.failed", "failed", error=error)
        )

    def add(self, piece: Piece) -> bytes:
        if isinstance(piece, CallStart):
            return self.close("completed") + self.open(piece)
        if not piece.text:
            return b""
        if isinstance(piece, Arguments):
            assert (
                self.item is not None
                and self.item.call is not None
                and self.item.call.index == piece.index
            )
            return self.add_text(piece.text)
        if self.item is not None and self.item.kind == KINDS[type(piece)][0]:
            return self.add_text(piece.text)
        return self.close("completed") + self.open(piece) + self.add_text(piece.text)

    def open(self, piece: Piece) -> bytes:
        is_custom = isinstance(piece, CallStart) and piece.name in self.request.custom
        kind, id_prefix = CUSTOM if is_custom else KINDS[type(piece)]
        call = piece if isinstance(piece, CallStart) else None
        self.item = OutputItem(kind, f"{id_prefix}_{len(self.output)}_{self.head.id}", call)
        item_event = self.event("response.output_item.added", item=self.item.body("in_progress"))
        return (
            item_event
            if call
            else item_event + self.text_event("response.content_part.added", part=self.item.part())
        )

    def add_text(self, text: str) -> bytes:
        assert self.item is not None
        self.item.texts.append(text)
        logprob_fields = (
            {"logprobs": self.take_logprobs(self.item)} if self.item.kind == "message" else {}
        )
        return self.text_event(f"{EVENTS[self.item.kind][0]}.delta", delta=text, **logprob_fields)

    def take_logprobs(self, item: OutputItem) -> list[dict[str, Any]]:
        """Move the pending log-probabilities to a message, and return them."""
        new_logprobs = self.logprobs
        self.logprobs = []
        item.logprobs += new_logprobs
        return new_logprobs

    def close(self, status: str) -> bytes:
        """The events that finish the open item; none without one."""
        item = self.item
        if item is None:
            return b""
        name, text_field = EVENTS[item.kind]
        done_fields: dict[str, Any] = {text_field: item.text}
        if item.kind == "function_call":
            done_fields["name"] = item.body(status)["name"]
        elif item.kind == "message":
            self.take_logprobs(item)
            done_fields["logprobs"] = item.logprobs
        events = self.text_event(f"{name}.done", **done_fields)
        if item.call is None:
            events += self.text_event("response.content_part.done", part=item.part())
        body = item.body(status)
        events += self.event("response.output_item.done", item=body)
        self.output.append(body)
        self.item = None
        return events

    def state(
        self,
        name: str,
        status: str,
        usage: Usage | None = None,
        error: dict[str, Any] | None = None,
    ) -> bytes:
        response_body = self.frame(status, usage, error)
        if status not in OPEN:
            self.keep(response_body)
        return self.numbered_event({"type": name, "response": response_body})

    def event(self, name: str, /, **fields: Any) -> bytes:
        """An event of the open item."""
        return self.numbered_event({"type": name, "output_index": len(self.output), **fields})

    def text_event(self, name: str, /, **fields: Any) -> bytes:
        """An event of the open item's text."""
        assert self.item is not None
        position = {} if self.item.call is not None else {"content_index": 0}
        return self.event(name, item_id=self.item.id, **position, **fields)

    def numbered_event(self, body: dict[str, Any]) -> bytes:
        self.number += 1
        return typed_event({**body, "sequence_number": self.number - 1})

    def frame(
        self, status: str, usage: Usage | None = None, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The body of the response so far; it repeats options of the request."""
        request_body = self.request_body
        params = self.request.params
        text_options = self.request_body.get("text") or {}
        is_cut_off = status == "incomplete" and self.finish_reason == "length"
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
            "model": self.head.model,
            "output": self.output,
            "usage": None if usage is None else usage_body(usage),
            **{name: request_body.get(name) for name in ECHOED},
            "background": self.request.background,
            "parallel_tool_calls": self.request.parallel_tool_calls,
            "previous_response_id": self.request.previous_response_id,
            "conversation": {"id": self.request.conversation}
            if self.request.conversation
            else None,
            "reasoning": {
                "effort": (request_body.get("reasoning") or {}).get("effort"),
                "summary": None,
            },
            "service_tier": "default",
            "store": self.request.store,
            "temperature": params.temperature,
            "text": {
                "format": {"type": "text"},
                **{name: value for name, value in text_options.items() if value is not None},
            },
            "tool_choice": request_body.get("tool_choice") or "auto",
            "tools": request_body.get("tools") or [],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "auto" if self.request.drops_oldest else "disabled",
            **(self.raw_messages() if self.request.shows_raw and status not in OPEN else {}),
        }

    def raw_messages(self) -> dict[str, Any]:
        """The unparsed prompt and output of the model, in vLLM's form."""
        read = [raw_message(prompt.text or "", prompt.token_ids) for prompt in self.head.prompts]
        return {
            "input_messages": read,
            "output_messages": [raw_message("".join(self.raw), self.token_ids)],
        }
