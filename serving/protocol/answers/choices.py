"""Turns the engine's outputs into the choices of a request: parses texts and counts tokens."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ...api.errors import EngineError, RequestError
from ...api.outputs import NO_TOKEN_ALLOWED, CompletionDelta, CompletionOutput, RequestOutput
from ...parsing.pieces import Arguments, CallStart, Piece, ReasoningPiece, TextPiece
from .answer import ChoicePart, FinishedChoice, ToolCall


class ChoiceState(NamedTuple):
    """The parser of one choice, and the indices of its tool calls so far."""

    parser: Any
    calls: list[int]


class Choices:
    """Parses the texts of all choices, numbered across all prompts (`num_choices` for each)."""

    def __init__(
        self, make_parser: Callable[[], Any], num_choices: int, max_calls: int | None = None
    ):
        self.make_parser = make_parser
        self.num_choices = num_choices
        self.max_calls = max_calls
        self.states: dict[int, ChoiceState] = {}
        self.num_tokens = 0  # of all choices
        self.num_reasoning_tokens = 0  # estimated
        self.finish_reasons: set[str] = set()

    def part(self, prompt: int, fresh: CompletionDelta) -> ChoicePart:
        """Parse new output of one choice."""
        index = prompt * self.num_choices + fresh.index
        if index not in self.states:
            self.states[index] = ChoiceState(self.make_parser(), [])
        parser, calls = self.states[index]
        pieces = list(parser.push(fresh.text)) if fresh.text else []
        reason = fresh.finish_reason
        if reason is not None:
            if fresh.stop_reason == NO_TOKEN_ALLOWED and reason == "error":
                raise RequestError(
                    "allowed_token_ids",
                    "leaves, with logit_bias, bad_words, min_tokens and structured_outputs, no "
                    "token that may come next; allow more",
                )
            if reason == "error":
                raise EngineError("the engine failed on this request; it can be sent again")
            pieces += parser.finish()
        if self.max_calls is not None:
            pieces = [
                piece
                for piece in pieces
                if not (isinstance(piece, CallStart | Arguments) and piece.index >= self.max_calls)
            ]
        calls += [piece.index for piece in pieces if isinstance(piece, CallStart)]
        self.num_tokens += len(fresh.token_ids)
        if num_thought_characters := sum(
            len(piece.text) for piece in pieces if isinstance(piece, ReasoningPiece)
        ):
            # Reasoning tokens are not marked, so they are estimated by their share of the text.
            self.num_reasoning_tokens += round(
                len(fresh.token_ids) * min(1.0, num_thought_characters / max(len(fresh.text), 1))
            )
        finish_reason: str | None = "tool_calls" if reason == "stop" and calls else reason
        if finish_reason is not None:
            self.finish_reasons.add(finish_reason)
        return ChoicePart(
            index,
            pieces,
            finish_reason,
            fresh.stop_reason,
            fresh.token_ids,
            fresh.logprobs,
            fresh.drafted,
            fresh.text,
        )

    def answers(self, outputs: Sequence[RequestOutput]) -> list[FinishedChoice]:
        """The complete choices of all prompts."""
        return [
            self.answer(i, completion)
            for i, output in enumerate(outputs)
            for completion in output.outputs
        ]

    def answer(self, prompt: int, completion: CompletionOutput) -> FinishedChoice:
        fresh = CompletionDelta(
            completion.index,
            completion.text,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            completion.stop_reason,
        )
        choice_part = self.part(prompt, fresh)
        content, reasoning, calls = collect(choice_part.pieces)
        return FinishedChoice(
            index=choice_part.index,
            content="" if content is None and not calls else content,
            finish_reason=choice_part.finish_reason or "stop",
            reasoning=reasoning,
            calls=calls,
            stop_reason=choice_part.stop_reason,
            token_ids=choice_part.token_ids,
            logprobs=choice_part.logprobs,
            raw=choice_part.raw,
        )


def collect(pieces: Iterable[Piece]) -> tuple[str | None, str | None, list[ToolCall]]:
    """Join pieces to (content, reasoning, calls); a text without pieces is None."""
    texts: dict[type, list[str]] = {TextPiece: [], ReasoningPiece: []}
    calls: list[tuple[CallStart, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append((piece, []))
        elif isinstance(piece, Arguments):
            calls[piece.index][1].append(piece.text)
        else:
            texts[type(piece)].append(piece.text)
    content, reasoning = (
        "".join(texts_of_kind) if texts_of_kind else None for texts_of_kind in texts.values()
    )
    return (
        content,
        reasoning,
        [ToolCall(call.id, call.name, "".join(texts_of_kind)) for call, texts_of_kind in calls],
    )
