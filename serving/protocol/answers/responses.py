"""OpenAI's /v1/responses: an answer to a body, or to a stream of events."""

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...parsing.pieces import Arguments, CallStart, Piece, Said, Thought
from .answer import ChatRequest, ChoicePart, FinishedChoice, Head, Logprobs, ResponsesRequest, Usage
from .shapes import chat_logprobs, count_of, typed_event

KINDS = {Said: ("message", "msg"), Thought: ("reasoning", "rs"), CallStart: ("function_call", "fc")}
EVENTS = {  # what the events of an item's text are called, and the field of the last one that holds all of it
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
OPEN = ("queued", "in_progress")  # of a response that is not over
CUSTOM = ("custom_tool_call", "ctc")
ECHOED = ("instructions", "max_output_tokens", "metadata", "user", "safety_identifier", "prompt_cache_key")


@dataclass
class OutputItem:
    """One of the things that an answer consists of: a message, thoughts, or the call of a function."""

    kind: str
    id: str
    call: CallStart | None
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def body(self, status: str) -> dict[str, Any]:
        found: dict[str, Any] = {"type": self.kind, "id": self.id, "status": status}
        if self.call is not None:
            return found | {"call_id": self.call.id, "name": self.call.name, EVENTS[self.kind][1]: self.text}
        content = [] if status == "in_progress" else [self.part()]
        return found | ({"role": "assistant"} if self.kind == "message" else {"summary": []}) | {"content": content}

    def part(self) -> dict[str, Any]:
        """The one part of the content of a message or of thoughts."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


def response(
    head: Head,
    request: ResponsesRequest,
    body: Any,
    answers: Sequence[FinishedChoice],
    usage: Usage,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """The body that answers a request: what a stream of one part comes to."""
    [answer] = answers
    stream = ResponsesStream(head, request, body)
    stream.part(whole(answer))
    status = status_of(answer.finish_reason)
    stream.close(status)
    found = stream.frame(status, usage)
    keep(found)
    return found


def whole(answer: FinishedChoice) -> ChoicePart:
    """An answer as one part, in the order in which models write."""
    pieces: list[Piece] = [Thought(answer.reasoning or ""), Said(answer.content or "")]
    for i, call in enumerate(answer.calls):
        pieces += [CallStart(i, call.id, call.name), Arguments(i, call.arguments)]
    return ChoicePart(
        0, pieces, answer.finish_reason, answer.stop_reason, answer.token_ids, answer.logprobs, raw=answer.raw
    )


def described(request: ChatRequest, token_ids: Sequence[int], logprobs: Logprobs) -> Iterator[dict[str, Any]]:
    """The log-probabilities of tokens; bytes that are not known are none here."""
    for entry in chat_logprobs(token_ids, logprobs, count_of(request.params)):
        best = [other | {"bytes": other["bytes"] or []} for other in entry["top_logprobs"]]
        yield entry | {"bytes": entry["bytes"] or [], "top_logprobs": best}


def raw_message(text: str, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"type": "raw_message_tokens", "message": text, "tokens": list(token_ids)}


def status_of(finish_reason: str | None) -> str:
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
    head: Head, request: ChatRequest, body: Any, answers: Sequence[FinishedChoice], usage: Usage
) -> dict[str, Any]:
    """What stands for a conversation: what users said, and all of it in short, packed as the client sends it back."""
    [answer] = answers
    said = [message["content"] for message in request.messages if message["role"] == "user"]
    output: list[dict[str, Any]] = [
        {"id": f"msg_{i}_{head.id}", "type": "message", "role": "user", "status": "completed",
         "content": [{"type": "input_text", "text": text}]} for i, text in enumerate(said)
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
    """One answer as events. An item is open from its first piece to the first that is another's.

    A message has the log-probabilities of all tokens since the message before it, also of those that are not its text.
    """

    def __init__(
        self,
        head: Head,
        request: ResponsesRequest,
        body: Any,
        keep: Callable[[dict[str, Any]], None] = lambda found: None,
    ):
        """`keep` gets the response when it is over."""
        self.head, self.request, self.asked, self.keep = head, request, body, keep
        self.number = 0  # of the next event
        self.output: list[dict[str, Any]] = []  # the items that are closed
        self.item: OutputItem | None = None  # the one that is open
        self.logprobs: list[dict[str, Any]] = []  # those that no message has yet
        self.finish_reason: str | None = None
        self.raw: list[str] = []  # what was written, before it was parsed
        self.token_ids: list[int] = []

    def queue(self) -> bytes:
        """What comes before the beginning of an answer in the background."""
        return self.state("response.created", "queued") + self.state("response.queued", "queued")

    def goes_on(self, head: Head) -> "ResponsesStream":
        """The same stream, now that the prompt of a queued answer is known."""
        self.head = replace(self.head, prompts=head.prompts)
        return self

    def begin(self, usage: Usage) -> bytes:
        begun = b"" if self.number else self.state("response.created", "in_progress")
        return begun + self.state("response.in_progress", "in_progress")

    def counted(self, usage: Usage) -> None:
        """Only the last event has the usage."""

    def part(self, part: ChoicePart) -> bytes:
        if part.logprobs is not None:
            self.logprobs += described(self.request, part.token_ids, part.logprobs)
        self.finish_reason = part.finish_reason
        if self.request.shows_raw:
            self.raw.append(part.raw)
            self.token_ids += part.token_ids
        return b"".join(self.piece(piece) for piece in part.pieces)

    def end(self, usage: Usage) -> bytes:
        status = status_of(self.finish_reason)
        return self.close(status) + self.state(f"response.{status}", status, usage)

    def fail(self, status: int, message: str, param: str | None = None) -> bytes:
        """The end of a stream that cannot go on; one that has not begun does so first."""
        code = {429: "rate_limit_exceeded"}.get(status, "server_error" if status >= 500 else "invalid_prompt")
        begun = b"" if self.number else self.state("response.created", "in_progress")
        error = {"code": code, "message": message, "param": param}
        return begun + self.close("incomplete") + self.state("response.failed", "failed", error=error)

    def piece(self, piece: Piece) -> bytes:
        if isinstance(piece, CallStart):
            return self.close("completed") + self.open(piece)
        if not piece.text:
            return b""
        if isinstance(piece, Arguments):
            assert self.item is not None and self.item.call is not None and self.item.call.index == piece.index
            return self.more(piece.text)
        if self.item is not None and self.item.kind == KINDS[type(piece)][0]:
            return self.more(piece.text)
        return self.close("completed") + self.open(piece) + self.more(piece.text)

    def open(self, piece: Piece) -> bytes:
        custom = isinstance(piece, CallStart) and piece.name in self.request.custom
        kind, short = CUSTOM if custom else KINDS[type(piece)]
        call = piece if isinstance(piece, CallStart) else None
        self.item = OutputItem(kind, f"{short}_{len(self.output)}_{self.head.id}", call)
        found = self.event("response.output_item.added", item=self.item.body("in_progress"))
        return found if call else found + self.place("response.content_part.added", part=self.item.part())

    def more(self, text: str) -> bytes:
        assert self.item is not None
        self.item.texts.append(text)
        own = {"logprobs": self.take_logprobs(self.item)} if self.item.kind == "message" else {}
        return self.place(f"{EVENTS[self.item.kind][0]}.delta", delta=text, **own)

    def take_logprobs(self, item: OutputItem) -> list[dict[str, Any]]:
        """The log-probabilities that wait for a message; from here on they are its own."""
        new, self.logprobs = self.logprobs, []
        item.logprobs += new
        return new

    def close(self, status: str) -> bytes:
        """The end of the item that is open, if one is."""
        item = self.item
        if item is None:
            return b""
        name, whole = EVENTS[item.kind]
        rest: dict[str, Any] = {whole: item.text}
        if item.kind == "function_call":
            rest["name"] = item.body(status)["name"]
        elif item.kind == "message":
            self.take_logprobs(item)
            rest["logprobs"] = item.logprobs
        found = self.place(f"{name}.done", **rest)
        if item.call is None:
            found += self.place("response.content_part.done", part=item.part())
        body = item.body(status)
        found += self.event("response.output_item.done", item=body)
        self.output.append(body)
        self.item = None
        return found

    def state(self, name: str, status: str, usage: Usage | None = None, error: dict[str, Any] | None = None) -> bytes:
        found = self.frame(status, usage, error)
        if status not in OPEN:
            self.keep(found)
        return self.numbered({"type": name, "response": found})

    def event(self, name: str, /, **fields: Any) -> bytes:
        """An event of the item that is open."""
        return self.numbered({"type": name, "output_index": len(self.output), **fields})

    def place(self, name: str, /, **fields: Any) -> bytes:
        """An event of the text in it."""
        assert self.item is not None
        at = {} if self.item.call is not None else {"content_index": 0}
        return self.event(name, item_id=self.item.id, **at, **fields)

    def numbered(self, body: dict[str, Any]) -> bytes:
        self.number += 1
        return typed_event({**body, "sequence_number": self.number - 1})

    def frame(self, status: str, usage: Usage | None = None, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response as it stands; what the request asked for is said again."""
        asked, params, told = self.asked, self.request.params, self.asked.get("text") or {}
        cut = status == "incomplete" and self.finish_reason == "length"
        return {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self.head.model,
            "output": self.output,
            "usage": None if usage is None else usage_body(usage),
            **{name: asked.get(name) for name in ECHOED},
            "background": self.request.background,
            "parallel_tool_calls": self.request.parallel_tool_calls,
            "previous_response_id": self.request.previous_response_id,
            "conversation": {"id": self.request.conversation} if self.request.conversation else None,
            "reasoning": {"effort": (asked.get("reasoning") or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": self.request.store,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **{name: value for name, value in told.items() if value is not None}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "auto" if self.request.drops_oldest else "disabled",
            **(self.raw_messages() if self.request.shows_raw and status not in OPEN else {}),
        }

    def raw_messages(self) -> dict[str, Any]:
        """What the model read and wrote, with template and tags, in vLLM's form."""
        read = [raw_message(prompt.text or "", prompt.token_ids) for prompt in self.head.prompts]
        return {"input_messages": read, "output_messages": [raw_message("".join(self.raw), self.token_ids)]}
