"""OpenAI's /v1/completions: answers to a body, or to a stream of events."""

from collections.abc import Sequence
from typing import Any

from ...parsing.pieces import Said
from .answer import ChoicePart, CompletionRequest, FinishedChoice, Head, Prompted, Usage
from .shapes import DONE, completion_logprobs, error, event, prompt_logprobs, usage_body


def response(
    head: Head, request: CompletionRequest, body: Any, answers: Sequence[FinishedChoice], usage: Usage
) -> dict[str, Any]:
    """The body that answers a request; its choices are those of the first prompt, of the second, ..."""
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
        "choices": [choice(request, head.prompts[answer.index // request.params.n], answer) for answer in answers],
        "usage": usage_body(usage),
    }


def choice(request: CompletionRequest, prompt: Prompted, answer: FinishedChoice) -> dict[str, Any]:
    text, own, logprobs = answer.content or "", list(answer.token_ids), list(answer.logprobs or ())
    if request.silent:
        text, own, logprobs = "", [], []
    found: dict[str, Any] = {
        "index": answer.index,
        "text": (prompt.text or "") + text if request.echo else text,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if answer.logprobs is not None:
        tokens = own
        if request.echo:
            tokens, logprobs = [*prompt.token_ids, *own], [*(prompt.logprobs or ()), *logprobs]
        # The text of a prompt begins with its first token, unless the tokenizer added that.
        at = 0 if (prompt.text or "").startswith(prompt.first) else -len(prompt.first)
        found["logprobs"], _ = completion_logprobs(tokens, logprobs, at, prompt.first)
        found["logprobs"]["text_offset"] = [max(offset, 0) for offset in found["logprobs"]["text_offset"]]
    if request.wants_prompt_logprobs and prompt.logprobs is not None:
        found["prompt_logprobs"] = prompt_logprobs(prompt.logprobs)
    if request.delivery.return_token_ids:
        found |= {"token_ids": own, "prompt_token_ids": list(prompt.token_ids)}
    return found


class CompletionStream:
    """The answers as events: chunks, then the usage, then the end."""

    def __init__(self, head: Head, request: CompletionRequest, body: Any):
        self.request, self.delivery, self.prompts = request, request.delivery, head.prompts
        self.frame = {
            "id": head.id,
            "object": "text_completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
        }
        self.offsets: dict[int, int] = {}  # where the next text of each choice begins
        self.usage: Usage | None = None

    def begin(self, usage: Usage) -> bytes:
        self.usage = usage
        return b""

    def part(self, part: ChoicePart) -> bytes:
        """A chunk; the first of each choice says its prompt again, where that is wanted."""
        begins = part.index not in self.offsets
        text = "".join(piece.text for piece in part.pieces if isinstance(piece, Said))
        tokens, prompt = list(part.token_ids), self.prompts[part.index // self.request.params.n]
        if self.request.silent:
            text, tokens = "", []
        if begins and self.request.echo:
            text = (prompt.text or "") + text
        shows = part.logprobs is not None or self.delivery.return_token_ids or self.delivery.continuous_usage
        if not (text or part.finish_reason or (tokens and shows)):
            return b""
        at = self.offsets.setdefault(part.index, 0)
        found: dict[str, Any] = {"index": part.index, "text": text, "logprobs": None, "finish_reason": None}
        if part.logprobs is not None:
            found["logprobs"], self.offsets[part.index] = completion_logprobs(tokens, part.logprobs, at)
        if part.finish_reason is not None:
            found |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if self.delivery.return_token_ids:
            found["token_ids"] = tokens
            if begins:
                found["prompt_token_ids"] = list(prompt.token_ids)
        return self.chunk([found])

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        found = self.frame | {"choices": choices}
        if self.delivery.include_usage or self.delivery.continuous_usage:
            shown = self.usage if self.delivery.continuous_usage and usage is None else usage
            found["usage"] = None if shown is None else usage_body(shown)
        return event(found)

    def counted(self, usage: Usage) -> None:
        """What was used so far."""
        self.usage = usage

    def end(self, usage: Usage) -> bytes:
        return (self.chunk([], usage) if self.delivery.include_usage else b"") + DONE

    def fail(self, status: int, message: str, param: str | None = None) -> bytes:
        return event(error(status, message, param)) + DONE
