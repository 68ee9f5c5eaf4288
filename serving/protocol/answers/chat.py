"""OpenAI's /v1/chat/completions: response bodies and event streams."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...parsing.pieces import Arguments, CallStart, Piece, ReasoningPiece, TextPiece
from .answer import (
    ChatBatch,
    ChatRequest,
    ChoicePart,
    FinishedChoice,
    Logprobs,
    ResponseHead,
    Usage,
)
from .shapes import (
    ChunkStream,
    chat_logprobs,
    head_fields,
    max_alternatives,
    metrics_body,
    prompt_logprobs,
    usage_body,
)


def response(
    head: ResponseHead,
    request: ChatRequest,
    body: Any,
    answers: Sequence[FinishedChoice],
    usage: Usage,
) -> dict[str, Any]:
    """The body of a complete answer."""
    response_body = head_fields(head, "chat.completion")
    response_body |= {
        "choices": [choice(request, answer) for answer in answers],
        "usage": usage_body(usage),
    }
    response_body |= metrics_body(request.delivery, usage)
    # Clients of vLLM expect these fields.
    response_body |= {"prompt_logprobs": None, "prompt_token_ids": None}
    for prompt in head.prompts:
        if prompt.logprobs is not None:
            response_body["prompt_logprobs"] = prompt_logprobs(prompt.logprobs)
        if request.delivery.return_token_ids:
            response_body["prompt_token_ids"] = list(prompt.token_ids)
    return response_body


def batch_response(
    head: ResponseHead,
    request: ChatBatch,
    body: Any,
    answers: Sequence[FinishedChoice],
    usage: Usage,
) -> dict[str, Any]:
    """The body for several conversations, with their choices one after another."""
    requests = request.each()
    choices = []
    for answer in answers:
        conversation_index = answer.index // request.params.n
        prompt = head.prompts[conversation_index]
        choice_body = choice(requests[conversation_index], answer)
        choice_body["prompt_logprobs"] = (
            None if prompt.logprobs is None else prompt_logprobs(prompt.logprobs)
        )
        choice_body["prompt_token_ids"] = (
            list(prompt.token_ids) if request.delivery.return_token_ids else None
        )
        choices.append(choice_body)
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
        message["tool_calls"] = [
            {"id": call.id, **call_body(request, call.name, call.arguments)}
            for call in answer.calls
        ]
    body: dict[str, Any] = {
        "index": answer.index,
        "message": message,
        "logprobs": None,
        "finish_reason": shown_finish_reason(request, answer.finish_reason),
        "stop_reason": answer.stop_reason,
    }
    if answer.logprobs is not None:
        body["logprobs"] = {
            "content": describe_logprobs(request, answer.token_ids, answer.logprobs)
        }
    body["token_ids"] = list(answer.token_ids) if request.delivery.return_token_ids else None
    return body


def call_body(request: ChatRequest, name: str, text: str) -> dict[str, Any]:
    """A call of a function or of a custom tool."""
    kind, text_field = ("custom", "input") if name in request.custom else ("function", "arguments")
    return {"type": kind, kind: {"name": name, text_field: text}}


def shown_finish_reason(request: ChatRequest, reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" and request.old_calls else reason


def describe_logprobs(
    request: ChatRequest, token_ids: Sequence[int], logprobs: Logprobs
) -> list[dict[str, Any]]:
    return list(
        chat_logprobs(
            token_ids, logprobs, max_alternatives(request.params), request.delivery.tokens_as_ids
        )
    )


def echo_text(request: ChatRequest) -> str:
    """The assistant message that the answer continues, if it is to be echoed."""
    last = request.messages[-1]
    return last["content"] if request.echo and last["role"] == "assistant" else ""


class ChatStream(ChunkStream):
    """Encodes the answers of one prompt as chunks."""

    def __init__(self, head: ResponseHead, request: ChatRequest, body: Any):
        super().__init__(head, "chat.completion.chunk", request.delivery)
        self.request = request
        self.prompts = head.prompts

    def begin(self, usage: Usage) -> bytes:
        """A chunk with the role for every choice, in order: clients list choices as they arrive."""
        self.usage = usage
        delta = {"role": "assistant", "content": echo_text(self.request)}
        return b"".join(self.choice(index, delta) for index in range(self.request.params.n))

    def part(self, choice_part: ChoicePart) -> bytes:
        delta: dict[str, Any] = {}
        self.add(delta, choice_part.pieces)
        token_fields = self.scores(choice_part)
        if choice_part.finish_reason is None:
            has_content = delta or (
                choice_part.token_ids and (token_fields or self.delivery.continuous_usage)
            )
            return self.choice(choice_part.index, delta, token_fields) if has_content else b""
        end_fields = {
            "finish_reason": shown_finish_reason(self.request, choice_part.finish_reason),
            "stop_reason": choice_part.stop_reason,
        }
        if "tool_calls" in delta:  # clients expect the finish reason in a separate chunk
            return self.choice(choice_part.index, delta, token_fields) + self.choice(
                choice_part.index, {}, end_fields
            )
        if (
            delta
            and choice_part.logprobs is not None
            and choice_part.finish_reason == "stop"
            and choice_part.stop_reason is None
        ):
            # The end token has no text. Some clients build the text from the log-probabilities, so
            # those of the end token are sent separately, with empty content.
            text_scores, end_scores = (
                self.scores(choice_part, token_slice)
                for token_slice in (slice(-1), slice(-1, None))
            )
            return self.choice(choice_part.index, delta, text_scores) + self.choice(
                choice_part.index, {"content": ""}, end_scores | end_fields
            )
        return self.choice(choice_part.index, delta, token_fields | end_fields)

    def scores(self, choice_part: ChoicePart, token_slice: slice = slice(None)) -> dict[str, Any]:
        """The requested fields about tokens: log-probabilities, token ids and drafted positions."""
        scores: dict[str, Any] = {}
        if choice_part.logprobs is not None:
            logprobs = describe_logprobs(
                self.request, choice_part.token_ids[token_slice], choice_part.logprobs[token_slice]
            )
            scores["logprobs"] = {"content": logprobs}
        if self.delivery.return_token_ids:
            scores["token_ids"] = list(choice_part.token_ids[token_slice])
        if self.delivery.include_drafted:
            positions = range(len(choice_part.token_ids))[token_slice]
            scores["drafted"] = [
                position - positions.start
                for position in choice_part.drafted
                if position in positions
            ]
        return scores

    def choice(
        self,
        index: int,
        delta: dict[str, Any],
        extra_fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> bytes:
        chunk: dict[str, Any] = {
            "choices": [
                {
                    "index": index,
                    "delta": delta,
                    "logprobs": None,
                    "finish_reason": None,
                    **extra_fields,
                }
            ]
        }
        if self.prompts and self.delivery.return_token_ids:  # in the first chunk
            chunk["prompt_token_ids"] = list(self.prompts[0].token_ids)
            self.prompts = ()
        return self.chunk(chunk)

    def add(self, delta: dict[str, Any], pieces: Sequence[Piece]) -> None:
        """Add pieces to the fields of a chunk, joined by kind."""
        for piece in pieces:
            if isinstance(piece, TextPiece):
                delta["content"] = delta.get("content", "") + piece.text
            elif isinstance(piece, ReasoningPiece):
                if not self.delivery.include_reasoning:
                    continue
                delta["reasoning"] = delta["reasoning_content"] = (
                    delta.get("reasoning", "") + piece.text
                )
            elif self.request.old_calls:
                add_old_call(delta.setdefault("function_call", {"arguments": ""}), piece)
            else:
                self.add_call(delta.setdefault("tool_calls", []), piece)

    def add_call(self, calls: list[dict[str, Any]], piece: CallStart | Arguments) -> None:
        if isinstance(piece, CallStart):
            calls.append(
                {"index": piece.index, "id": piece.id, **call_body(self.request, piece.name, "")}
            )
            return
        if not calls:  # the call started in an earlier chunk
            calls.append({"index": piece.index, "function": {"arguments": ""}})
        # A custom call is always in one chunk.
        call = calls[-1].get("function") or calls[-1]["custom"]
        call["arguments" if "arguments" in call else "input"] += piece.text


def add_old_call(call: dict[str, Any], piece: CallStart | Arguments) -> None:
    if isinstance(piece, CallStart):
        call["name"] = piece.name
    else:
        call["arguments"] += piece.text
