"""From the engine's outputs to the choices of a request: their texts are parsed, their tokens counted."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ...api.errors import EngineError, RequestError
from ...api.outputs import NO_TOKEN_ALLOWED, CompletionOutput, Fresh, RequestOutput
from ...parsing.pieces import Arguments, CallStart, Piece, Said, Thought
from .answer import ChoicePart, FinishedChoice, ToolCall


class ChoiceState(NamedTuple):
    """The parser of one choice, and the tool calls it found so far."""

    parser: Any
    calls: list[int]  # of the tool calls so far


class Choices:
    """Parses the texts of all choices, which are numbered through all prompts."""

    def __init__(self, make_parser: Callable[[], Any], each: int, most_calls: int | None = None):
        self.make_parser, self.each, self.most_calls = make_parser, each, most_calls
        self.states: dict[int, ChoiceState] = {}
        self.written = 0  # tokens of all choices
        self.thought = 0  # tokens of reasoning among them
        self.reasons: set[str] = set()

    def part(self, prompt: int, fresh: Fresh) -> ChoicePart:
        """What one choice got since the part before."""
        index = prompt * self.each + fresh.index
        if index not in self.states:
            self.states[index] = ChoiceState(self.make_parser(), [])
        parser, calls = self.states[index]
        pieces, reason = list(parser.push(fresh.text)) if fresh.text else [], fresh.finish_reason
        if reason is not None:
            if fresh.stop_reason == NO_TOKEN_ALLOWED and reason == "error":
                raise RequestError(
                    "allowed_token_ids",
                    "leaves, with logit_bias, bad_words, min_tokens and structured_outputs, no token that may come "
                    "next; allow more",
                )
            if reason == "error":
                raise EngineError("the engine failed on this request; it can be sent again")
            pieces += parser.finish()
        if self.most_calls is not None:
            pieces = [
                piece
                for piece in pieces
                if not (isinstance(piece, CallStart | Arguments) and piece.index >= self.most_calls)
            ]
        calls += [piece.index for piece in pieces if isinstance(piece, CallStart)]
        self.written += len(fresh.token_ids)
        if thought := sum(len(piece.text) for piece in pieces if isinstance(piece, Thought)):
            # Nothing marks the tokens of thoughts, so they are counted by their share of the text.
            self.thought += round(len(fresh.token_ids) * min(1.0, thought / max(len(fresh.text), 1)))
        finish_reason: str | None = "tool_calls" if reason == "stop" and calls else reason
        if finish_reason is not None:
            self.reasons.add(finish_reason)
        return ChoicePart(
            index, pieces, finish_reason, fresh.stop_reason, fresh.token_ids, fresh.logprobs, fresh.drafted, fresh.text
        )

    def answers(self, outputs: Sequence[RequestOutput]) -> list[FinishedChoice]:
        """All choices of all prompts, when they are done."""
        return [self.answer(i, whole) for i, output in enumerate(outputs) for whole in output.outputs]

    def answer(self, prompt: int, whole: CompletionOutput) -> FinishedChoice:
        fresh = Fresh(whole.index, whole.text, whole.token_ids, whole.logprobs, whole.finish_reason, whole.stop_reason)
        part = self.part(prompt, fresh)
        content, reasoning, calls = collect(part.pieces)
        return FinishedChoice(
            index=part.index,
            content="" if content is None and not calls else content,
            finish_reason=part.finish_reason or "stop",
            reasoning=reasoning,
            calls=calls,
            stop_reason=part.stop_reason,
            token_ids=part.token_ids,
            logprobs=part.logprobs,
            raw=part.raw,
        )


def collect(pieces: Iterable[Piece]) -> tuple[str | None, str | None, list[ToolCall]]:
    """(content, reasoning, calls); None where there was no piece of a kind."""
    texts: dict[type, list[str]] = {Said: [], Thought: []}
    calls: list[tuple[CallStart, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append((piece, []))
        elif isinstance(piece, Arguments):
            calls[piece.index][1].append(piece.text)
        else:
            texts[type(piece)].append(piece.text)
    content, reasoning = ("".join(parts) if parts else None for parts in texts.values())
    return content, reasoning, [ToolCall(call.id, call.name, "".join(parts)) for call, parts in calls]
