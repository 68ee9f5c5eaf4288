"""What the engine says of the choices of a request, as the parts and answers that it means."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...api.errors import EngineError
from ...api.outputs import CompletionOutput, Fresh, RequestOutput
from ...parsing.pieces import Arguments, Call, Thought
from .answer import Answer, Part
from .collected import collect


class Reader(NamedTuple):
    """What a choice has behind it."""

    parser: Any
    calls: list[int]  # of the tool calls so far


class Choices:
    """Reads the texts of all choices; these count through all prompts."""

    def __init__(self, make_parser: Callable[[], Any], each: int, most_calls: int | None = None):
        self.make_parser, self.each, self.most_calls = make_parser, each, most_calls
        self.readers: dict[int, Reader] = {}
        self.written = 0  # tokens, of all choices
        self.thought = 0  # those of them that were for the model itself
        self.reasons: set[str] = set()

    def part(self, prompt: int, fresh: Fresh) -> Part:
        """What came of one choice since the last time."""
        index = prompt * self.each + fresh.index
        if index not in self.readers:
            self.readers[index] = Reader(self.make_parser(), [])
        parser, calls = self.readers[index]
        pieces, reason = list(parser.push(fresh.text)) if fresh.text else [], fresh.finish_reason
        if reason is not None:
            if reason == "error":
                raise EngineError("the engine failed on this request; it can be sent again")
            pieces += parser.finish()
        if self.most_calls is not None:
            pieces = [
                piece
                for piece in pieces
                if not (isinstance(piece, Call | Arguments) and piece.index >= self.most_calls)
            ]
        calls += [piece.index for piece in pieces if isinstance(piece, Call)]
        self.written += len(fresh.token_ids)
        if thought := sum(len(piece.text) for piece in pieces if isinstance(piece, Thought)):
            # Tokens cannot be told apart by what they mean, so they are counted by their share of the text.
            self.thought += round(len(fresh.token_ids) * min(1.0, thought / max(len(fresh.text), 1)))
        told: str | None = reason
        if reason == "stop" and calls:
            told = "tool_calls"
        if told is not None:
            self.reasons.add(told)
        return Part(index, pieces, told, fresh.stop_reason, fresh.token_ids, fresh.logprobs)

    def answers(self, outputs: Sequence[RequestOutput]) -> list[Answer]:
        """All choices of all prompts, when they are done."""
        return [self.answer(i, whole) for i, output in enumerate(outputs) for whole in output.outputs]

    def answer(self, prompt: int, whole: CompletionOutput) -> Answer:
        fresh = Fresh(whole.index, whole.text, whole.token_ids, whole.logprobs, whole.finish_reason, whole.stop_reason)
        part = self.part(prompt, fresh)
        content, reasoning, calls = collect(part.pieces)
        return Answer(
            index=part.index,
            content="" if content is None and not calls else content,
            finish_reason=part.finish_reason or "stop",
            reasoning=reasoning,
            calls=calls,
            stop_reason=part.stop_reason,
            token_ids=part.token_ids,
            logprobs=part.logprobs,
        )
