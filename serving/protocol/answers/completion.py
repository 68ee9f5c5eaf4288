"""OpenAI's /v1/completions: answers to a body, or to a stream of events."""

from collections.abc import Sequence
from typing import Any

from ...parsing.pieces import Said
from .answer import ChoicePart, CompletionRequest, FinishedChoice, Head, Prompted, Usage
from .shapes import ChunkStream, completion_logprobs, head_fields, metrics_body, prompt_logprobs, usage_body


def response(
    head: Head, request: CompletionRequest, body: Any, answers: Sequence[FinishedChoice], usage: Usage
) -> dict[str, Any]:
    """The body that answers a request; its choices are those of the first prompt, of the second, ..."""
    choices = [choice(request, head.prompts[answer.index // request.params.n], answer) for answer in answers]
    told = {"usage": usage_body(usage), **metrics_body(request.delivery, usage)}
    return head_fields(head, "text_completion") | {"choices": choices} | told


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
        found["logprobs"], _ = completion_logprobs(tokens, logprobs, at, prompt.first, request.delivery.tokens_as_ids)
        found["logprobs"]["text_offset"] = [max(offset, 0) for offset in found["logprobs"]["text_offset"]]
    found |= {"prompt_logprobs": None, "token_ids": None, "prompt_token_ids": None}  # clients look for them unasked
    if request.wants_prompt_logprobs and prompt.logprobs is not None:
        found["prompt_logprobs"] = prompt_logprobs(prompt.logprobs)
    if request.delivery.return_token_ids:
        found |= {"token_ids": own, "prompt_token_ids": list(prompt.token_ids)}
    return found


class CompletionStream(ChunkStream):
    """The answers as events."""

    def __init__(self, head: Head, request: CompletionRequest, body: Any):
        super().__init__(head, "text_completion", request.delivery)
        self.request, self.prompts = request, head.prompts
        self.offsets: dict[int, int] = {}  # where the next text of each choice begins

    def part(self, part: ChoicePart) -> bytes:
        """A chunk; the first of each choice says its prompt again, where that is wanted."""
        begins = part.index not in self.offsets
        text = "".join(piece.text for piece in part.pieces if isinstance(piece, Said))
        tokens, prompt = list(part.token_ids), self.prompts[part.index // self.request.params.n]
        if self.request.silent:
            text, tokens = "", []
        if begins and self.request.echo:
            text = (prompt.text or "") + text
        told = self.delivery
        shows = part.logprobs is not None or told.return_token_ids or told.continuous_usage or told.include_drafted
        if not (text or part.finish_reason or (tokens and shows)):
            return b""
        at = self.offsets.setdefault(part.index, 0)
        found: dict[str, Any] = {"index": part.index, "text": text, "logprobs": None, "finish_reason": None}
        if part.logprobs is not None:
            found["logprobs"], self.offsets[part.index] = completion_logprobs(
                tokens, part.logprobs, at, as_ids=self.delivery.tokens_as_ids
            )
        if part.finish_reason is not None:
            found |= {"finish_reason": part.finish_reason, "stop_reason": part.stop_reason}
        if self.delivery.return_token_ids:
            found["token_ids"] = tokens
            if begins:
                found["prompt_token_ids"] = list(prompt.token_ids)
        if self.delivery.include_drafted:
            found["drafted"] = [] if self.request.silent else list(part.drafted)
        return self.chunk({"choices": [found]})
