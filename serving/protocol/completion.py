"""Parsing of OpenAI's /v1/completions."""

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
    REQUEST_OPTIONS,
    TRUNCATION,
    VLLM_ONLY,
    known_fields,
    parse_common_fields,
    parse_length_penalty,
    parse_response_format,
    parse_sampling,
    sampling_fields,
)

SAMPLING_FIELDS = sampling_fields("completions")
FIELDS = (
    "model", "prompt", "suffix", "echo", "response_format", "add_special_tokens",
    *TRUNCATION, *SAMPLING_FIELDS, *BEAMS, *DELIVERY, *REQUEST_OPTIONS, *LABELS,
)  # fmt: skip
MAX_PROMPTS = 2048  # in one request


def parse(body: Any) -> CompletionRequest:
    """Parse a body."""
    fields = known_fields(body, FIELDS, {}, VLLM_ONLY)
    sampling_values = {
        name: fields[name] for name in SAMPLING_FIELDS if name in fields
    } | parse_response_format(fields)
    common = parse_common_fields(fields)
    echo = boolean("echo", fields.get("echo", False))
    silent = (
        echo
        and sampling_values.get("max_tokens") == 0
        and sampling_values["max_tokens"] is not False
    )
    if silent:
        sampling_values["max_tokens"] = 1  # the sampled token is not sent
    sampling = parse_sampling(sampling_values)
    params: SamplingParams = sampling["params"]
    if params.logprob_token_ids and params.logprobs is None:
        raise RequestError("logprob_token_ids", "needs logprobs to be given")
    if params.logprob_token_ids and silent:
        raise RequestError(
            "logprob_token_ids", "says something of tokens that are written, and max_tokens is 0"
        )
    if common["delivery"].stream:
        if params.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs", "cannot be streamed; leave one of them out")
        if params.num_sequences > params.n:
            raise RequestError(
                "best_of", "cannot be streamed: which answers are the likeliest shows at the end"
            )
        if echo and params.logprobs is not None:
            raise RequestError("echo", "with logprobs cannot be streamed; leave one of them out")
    if echo and params.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=params.logprobs)
    suffix = unicode("suffix", fields.get("suffix", ""))
    if suffix and echo:
        raise RequestError("echo", "has no place for a suffix; leave one of them out")
    return CompletionRequest(
        suffix=suffix,
        prompts=parse_prompts(fields.get("prompt")),
        params=params,
        explicit_params=sampling["explicit_params"],
        add_special_tokens=boolean("add_special_tokens", fields.get("add_special_tokens", True)),
        echo=echo,
        silent=silent,
        length_penalty=parse_length_penalty(fields, sampling),
        wants_prompt_logprobs=fields.get("prompt_logprobs") is not None,
        **common,
    )


def parse_prompts(value: Any, name: str = "prompt") -> list[str | list[int]]:
    """One text, one list of token ids, or a list of either."""
    if isinstance(value, str):
        return [unicode(name, value)]
    if not isinstance(value, list) or not value:
        raise RequestError(
            name, f"must be text, token ids, or a list of one or more of either, got {shown(value)}"
        )
    if not isinstance(value[0], str | list):
        return [list(token_ids(name, value, INT32_MAX))]
    return [
        list(token_ids(f"{name}[{i}]", prompt, INT32_MAX))
        if isinstance(prompt, list)
        else unicode(f"{name}[{i}]", prompt)
        for i, prompt in enumerate(items(name, value, MAX_PROMPTS))
    ]
