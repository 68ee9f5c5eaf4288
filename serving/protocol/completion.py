"""OpenAI's /v1/completions: a body to a request."""

from dataclasses import replace
from typing import Any

from ..api.errors import RequestError
from ..api.params import SamplingParams
from ..api.validation import INT32_MAX, boolean, items, shown, token_ids
from ..api.validation import unicode_text as unicode
from .answers.answer import CompletionRequest
from .fields import (
    BEAMS,
    DELIVERY,
    LABELS,
    OF_VLLM,
    TERMS,
    TRUNCATION,
    beams_of,
    common_fields,
    known_fields,
    sampling_fields,
    sampling_of,
    structure,
)

OWN_SAMPLING = sampling_fields("completions")
FIELDS = (
    "model", "prompt", "suffix", "echo", "response_format", "add_special_tokens",
    *TRUNCATION, *OWN_SAMPLING, *BEAMS, *DELIVERY, *TERMS, *LABELS,
)  # fmt: skip
MAX_PROMPTS = 2048  # in one request


def parse(body: Any) -> CompletionRequest:
    """The request in a body."""
    given = known_fields(body, FIELDS, {}, OF_VLLM)
    own = {name: given[name] for name in OWN_SAMPLING if name in given} | structure(given)
    common, echo = common_fields(given), boolean("echo", given.get("echo", False))
    silent = echo and own.get("max_tokens") == 0 and own["max_tokens"] is not False
    if silent:
        own["max_tokens"] = 1  # the token that is drawn is not sent
    sampling = sampling_of(own)
    params: SamplingParams = sampling["params"]
    if params.logprob_token_ids and params.logprobs is None:
        raise RequestError("logprob_token_ids", "needs logprobs to be given")
    if params.logprob_token_ids and silent:
        raise RequestError("logprob_token_ids", "says something of tokens that are written, and max_tokens is 0")
    if common["delivery"].stream:
        if params.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "cannot be streamed; leave one of them out")
        if params.num_sequences > params.n:
            raise RequestError("best_of", "cannot be streamed: which answers are the likeliest shows at the end")
        if echo and params.logprobs is not None:
            raise RequestError("echo", "with logprobs cannot be streamed; leave one of them out")
    if echo and params.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=params.logprobs)
    suffix = unicode("suffix", given.get("suffix", ""))
    if suffix and echo:
        raise RequestError("echo", "has no place for a suffix; leave one of them out")
    return CompletionRequest(
        suffix=suffix,
        prompts=parse_prompts(given.get("prompt")),
        params=params,
        given=sampling["given"],
        add_special_tokens=boolean("add_special_tokens", given.get("add_special_tokens", True)),
        echo=echo,
        silent=silent,
        length_penalty=beams_of(given, sampling),
        wants_prompt_logprobs=given.get("prompt_logprobs") is not None,
        **common,
    )


def parse_prompts(value: Any, name: str = "prompt") -> list[str | list[int]]:
    """One text, one list of token ids, or a list of either."""
    if isinstance(value, str):
        return [unicode(name, value)]
    if not isinstance(value, list) or not value:
        raise RequestError(name, f"must be text, token ids, or a list of one or more of either, got {shown(value)}")
    if not isinstance(value[0], str | list):
        return [list(token_ids(name, value, INT32_MAX))]
    return [
        list(token_ids(f"{name}[{i}]", prompt, INT32_MAX))
        if isinstance(prompt, list)
        else unicode(f"{name}[{i}]", prompt)
        for i, prompt in enumerate(items(name, value, MAX_PROMPTS))
    ]
