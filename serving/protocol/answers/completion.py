"""OpenAI's /v1/completions: response bodies and event streams."""

from collections.abc import Sequence
from typing import Any

from ...parsing.pieces import TextPiece
from .answer import (
    AnsweredPrompt,
    ChoicePart,
    CompletionRequest,
    FinishedChoice,
    ResponseHead,
    Usage,
)
from .shapes import (
    ChunkStream,
    completion_logprobs,
    head_fields,
    metrics_body,
    prompt_logprobs,
    usage_body,
)


def response(
    head: ResponseHead,
    request: CompletionRequest,
    body: Any,
    answers: Sequence[FinishedChoice],
    usage: Usage,
) -> dict[str, Any]:
    """The body of complete answers, with the choices of all prompts one after another."""
    choices = [
        choice(request, head.prompts[answer.index // request.params.n], answer)
        for answer in answers
    ]
    usage_fields = {"usage": usage_body(usage), **metrics_body(request.delivery, usage)}
    return head_fields(head, "text_completion") | {"choices": choices} | usage_fields


def choice(
    request: CompletionRequest, prompt: AnsweredPrompt, answer: FinishedChoice
) -> dict[str, Any]:
    text = answer.content or ""
    token_ids = list(answer.token_ids)
    logprobs = list(answer.logprobs or ())
    if request.silent:
        text = ""
        token_ids = []
        logprobs = []
    body: dict[str, Any] = {
        "index": answer.index,
        "text": (prompt.text or "") + text if request.echo else text,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if answer.logprobs is not None:
        listed_tokens = token_ids
        if request.echo:
            listed_tokens = [*prompt.token_ids, *token_ids]
            logprobs = [*(prompt.logprobs or ()), *logprobs]
        # The prompt's text starts with its first token, unless the tokenizer added that token.
        first_offset = 0 if (prompt.text or "").startswith(prompt.first) else -len(prompt.first)
        body["logprobs"], _ = completion_logprobs(
            listed_tokens, logprobs, first_offset, prompt.first, request.delivery.tokens_as_ids
        )
        body["logprobs"]["text_offset"] = [
            max(offset, 0) for offset in body["logprobs"]["text_offset"]
        ]
    # Clients of vLLM expect these fields.
    body |= {"prompt_logprobs": None, "token_ids": None, "prompt_token_ids": None}
    if request.wants_prompt_logprobs and prompt.logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(prompt.logprobs)
    if request.delivery.return_token_ids:
        body |= {"token_ids": token_ids, "prompt_token_ids": list(prompt.token_ids)}
    return body


class CompletionStream(ChunkStream):
    """Encodes answers as chunks."""

    def __init__(self, head: ResponseHead, request: CompletionRequest, body: Any):
        super().__init__(head, "text_completion", request.delivery)
        self.request = request
        self.prompts = head.prompts
        self.offsets: dict[int, int] = {}  # length of the text so far, by choice

    def part(self, choice_part: ChoicePart) -> bytes:
        """A chunk of one choice; with `echo`, its first chunk starts with the prompt."""
        is_first_chunk = choice_part.index not in self.offsets
        text = "".join(piece.text for piece in choice_part.pieces if isinstance(piece, TextPiece))
        tokens = list(choice_part.token_ids)
        prompt = self.prompts[choice_part.index // self.request.params.n]
        if self.request.silent:
            text = ""
            tokens = []
        if is_first_chunk and self.request.echo:
            text = (prompt.text or "") + text
        delivery = self.delivery
        shows_tokens = (
            choice_part.logprobs is not None
            or delivery.return_token_ids
            or delivery.continuous_usage
            or delivery.include_drafted
        )
        if not (text or choice_part.finish_reason or (tokens and shows_tokens)):
            return b""
        offset = self.offsets.setdefault(choice_part.index, 0)
        body: dict[str, Any] = {
            "index": choice_part.index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
        }
        if choice_part.logprobs is not None:
            body["logprobs"], self.offsets[choice_part.index] = completion_logprobs(
                tokens, choice_part.logprobs, offset, as_ids=self.delivery.tokens_as_ids
            )
        if choice_part.finish_reason is not None:
            body |= {
                "finish_reason": choice_part.finish_reason,
                "stop_reason": choice_part.stop_reason,
            }
        if self.delivery.return_token_ids:
            body["token_ids"] = tokens
            if is_first_chunk:
                body["prompt_token_ids"] = list(prompt.token_ids)
        if self.delivery.include_drafted:
            body["drafted"] = [] if self.request.silent else list(choice_part.drafted)
        return self.chunk({"choices": [body]})
