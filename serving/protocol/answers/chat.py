"""OpenAI's /v1/chat/completions: an answer to a body, or to a stream of events."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...parsing.pieces import Arguments, CallStart, Piece, Said, Thought
from .answer import ChatBatch, ChatRequest, ChoicePart, FinishedChoice, Head, Logprobs, Usage
from .shapes import ChunkStream, chat_logprobs, count_of, head_fields, metrics_body, prompt_logprobs, usage_body


def response(
    head: Head, request: ChatRequest, body: Any, answers: Sequence[FinishedChoice], usage: Usage
) -> dict[str, Any]:
    """The body that answers a request."""
    found = head_fields(head, "chat.completion")
    found |= {"choices": [choice(request, answer) for answer in answers], "usage": usage_body(usage)}
    found |= metrics_body(request.delivery, usage)
    found |= {"prompt_logprobs": None, "prompt_token_ids": None}  # clients look for them unasked
    for prompt in head.prompts:
        if prompt.logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(prompt.logprobs)
        if request.delivery.return_token_ids:
            found["prompt_token_ids"] = list(prompt.token_ids)
    return found


def batch_response(
    head: Head, request: ChatBatch, body: Any, answers: Sequence[FinishedChoice], usage: Usage
) -> dict[str, Any]:
    """The body that answers several conversations: the choices of the first, of the second, ..."""
    each, choices = request.each(), []
    for answer in answers:
        place = answer.index // request.params.n
        prompt, found = head.prompts[place], choice(each[place], answer)
        found["prompt_logprobs"] = None if prompt.logprobs is None else prompt_logprobs(prompt.logprobs)
        found["prompt_token_ids"] = list(prompt.token_ids) if request.delivery.return_token_ids else None
        choices.append(found)
    return head_fields(head, "chat.completion") | {"choices": choices, "usage": usage_body(usage)}


def choice(request: ChatRequest, answer: FinishedChoice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "reasoning": None}
    if echoed := echo_text(request):
        message["content"] = echoed + (answer.content or "")
    if answer.reasoning is not None and request.delivery.include_reasoning:
        message["reasoning"] = message["reasoning_content"] = answer.reasoning
    if answer.calls and request.old_calls:
        (call,) = answer.calls
        message["function_call"] = {"name": call.name, "arguments": call.arguments}
    elif answer.calls:
        message["tool_calls"] = [{"id": call.id, **called(request, call.name, call.arguments)} for call in answer.calls]
    found: dict[str, Any] = {
        "index": answer.index,
        "message": message,
        "logprobs": None,
        "finish_reason": ended(request, answer.finish_reason),
        "stop_reason": answer.stop_reason,
    }
    if answer.logprobs is not None:
        found["logprobs"] = {"content": described(request, answer.token_ids, answer.logprobs)}
    found["token_ids"] = list(answer.token_ids) if request.delivery.return_token_ids else None
    return found


def called(request: ChatRequest, name: str, text: str) -> dict[str, Any]:
    """A call of a function, or of a tool that takes a text."""
    kind, said = ("custom", "input") if name in request.custom else ("function", "arguments")
    return {"type": kind, kind: {"name": name, said: text}}


def ended(request: ChatRequest, reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" and request.old_calls else reason


def described(request: ChatRequest, token_ids: Sequence[int], logprobs: Logprobs) -> list[dict[str, Any]]:
    return list(chat_logprobs(token_ids, logprobs, count_of(request.params), request.delivery.tokens_as_ids))


def echo_text(request: ChatRequest) -> str:
    """What the answer goes on from, where it is to be said again."""
    last = request.messages[-1]
    return last["content"] if request.echo and last["role"] == "assistant" else ""


class ChatStream(ChunkStream):
    """One answer as events."""

    def __init__(self, head: Head, request: ChatRequest, body: Any):
        super().__init__(head, "chat.completion.chunk", request.delivery)
        self.request, self.prompts = request, head.prompts

    def begin(self, usage: Usage) -> bytes:
        """Who speaks: a chunk for every choice and in their order, for clients list them as they come."""
        self.usage = usage
        delta = {"role": "assistant", "content": echo_text(self.request)}
        return b"".join(self.choice(index, delta) for index in range(self.request.params.n))

    def part(self, part: ChoicePart) -> bytes:
        delta: dict[str, Any] = {}
        self.add(delta, part.pieces)
        more = self.scores(part)
        if part.finish_reason is None:
            news = delta or (part.token_ids and (more or self.delivery.continuous_usage))
            return self.choice(part.index, delta, more) if news else b""
        ends = {"finish_reason": ended(self.request, part.finish_reason), "stop_reason": part.stop_reason}
        if "tool_calls" in delta:  # clients do not end a call with the chunk that brings it: the end comes by itself
            return self.choice(part.index, delta, more) + self.choice(part.index, {}, ends)
        if delta and part.logprobs is not None and part.finish_reason == "stop" and part.stop_reason is None:
            # The end token has no text, and some clients make their text of the log-probabilities beside it.
            before, end = (self.scores(part, which) for which in (slice(-1), slice(-1, None)))
            return self.choice(part.index, delta, before) + self.choice(part.index, {"content": ""}, end | ends)
        return self.choice(part.index, delta, more | ends)

    def scores(self, part: ChoicePart, which: slice = slice(None)) -> dict[str, Any]:
        """What is said of the tokens beside their text, where it was asked for."""
        found: dict[str, Any] = {}
        if part.logprobs is not None:
            logprobs = described(self.request, part.token_ids[which], part.logprobs[which])
            found["logprobs"] = {"content": logprobs}
        if self.delivery.return_token_ids:
            found["token_ids"] = list(part.token_ids[which])
        if self.delivery.include_drafted:
            places = range(len(part.token_ids))[which]
            found["drafted"] = [place - places.start for place in part.drafted if place in places]
        return found

    def choice(self, index: int, delta: dict[str, Any], more: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        found: dict[str, Any] = {
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}]
        }
        if self.prompts and self.delivery.return_token_ids:  # in the first chunk
            found["prompt_token_ids"], self.prompts = list(self.prompts[0].token_ids), ()
        return self.chunk(found)

    def add(self, delta: dict[str, Any], pieces: Sequence[Piece]) -> None:
        """Pieces as the fields of a chunk: neighbours of a kind become one."""
        for piece in pieces:
            if isinstance(piece, Said):
                delta["content"] = delta.get("content", "") + piece.text
            elif isinstance(piece, Thought):
                if not self.delivery.include_reasoning:
                    continue
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + piece.text
            elif self.request.old_calls:
                add_old_call(delta.setdefault("function_call", {"arguments": ""}), piece)
            else:
                self.add_call(delta.setdefault("tool_calls", []), piece)

    def add_call(self, calls: list[dict[str, Any]], piece: CallStart | Arguments) -> None:
        if isinstance(piece, CallStart):
            calls.append({"index": piece.index, "id": piece.id, **called(self.request, piece.name, "")})
            return
        if not calls:  # it goes on from the chunk before
            calls.append({"index": piece.index, "function": {"arguments": ""}})
        call = calls[-1].get("function") or calls[-1]["custom"]  # which comes whole, in one chunk
        call["arguments" if "arguments" in call else "input"] += piece.text


def add_old_call(call: dict[str, Any], piece: CallStart | Arguments) -> None:
    if isinstance(piece, CallStart):
        call["name"] = piece.name
    else:
        call["arguments"] += piece.text
