"""OpenAI's protocol as pure functions: request bodies to prompts and parameters, results to response bodies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .outputs import CompletionOutput, Logprob, RequestOutput
from .request import (
    INT32_MAX,
    MAX_LOGPROBS,
    RequestError,
    SamplingParams,
    boolean,
    integer,
    items,
    refuse_unknown,
    shown,
    token_ids,
    unicode_text,
)

SAMPLING = (  # fields that are SamplingParams' own, under the same name
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "prompt_logprobs",
    "skip_special_tokens", "include_stop_str_in_output", "logit_bias", "allowed_token_ids", "bad_words",
)  # fmt: skip
LABELS = ("user", "metadata", "store", "service_tier")  # label a request and have no effect, here as there
NEUTRAL = {  # fields that are not implemented, with the value that asks for nothing
    "stream": False,
    "echo": False,
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "continue_final_message": False,
}
CHAT = (
    "model", "messages", "logprobs", "top_logprobs", "max_completion_tokens", "add_generation_prompt",
    "chat_template_kwargs", "stream", "tools", "tool_choice", "response_format", "continue_final_message",
    *SAMPLING, *LABELS,
)  # fmt: skip
COMPLETION = (
    "model",
    "prompt",
    "best_of",
    "logprobs",
    "stream",
    "echo",
    "suffix",
    "response_format",
    *SAMPLING,
    *LABELS,
)
MAX_PROMPTS = 2048  # in one request
LEAST_LOGPROB = -9999.0  # JSON has no infinity
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to answer."""

    messages: list[dict[str, str]]
    params: SamplingParams
    model: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompletionRequest:
    """Prompts to write on from, each as text or as token ids."""

    prompts: list[str | list[int]]
    params: SamplingParams
    model: str | None = None


@dataclass(frozen=True)
class Head:
    """What a response says about itself."""

    id: str
    model: str
    created: int  # seconds since 1970
    system_fingerprint: str | None = None


def parse_chat(body: Any) -> ChatRequest:
    """The request in a body of /v1/chat/completions."""
    given = _fields(body, CHAT)
    own = {name: given[name] for name in SAMPLING if name in given}
    own["max_tokens"] = given.get("max_tokens")  # not given: up to the model's length
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise RequestError("max_tokens", "is the old name of max_completion_tokens; leave one of them out")
        limit = integer("max_completion_tokens", given["max_completion_tokens"], 1, INT32_MAX)
        own["max_tokens"] = limit
    if boolean("logprobs", given.get("logprobs", False)):
        own["logprobs"] = integer("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
    elif "top_logprobs" in given:
        raise RequestError("top_logprobs", f"needs logprobs to be true, got {shown(given['top_logprobs'])}")
    return ChatRequest(
        _messages(given.get("messages")), SamplingParams.from_dict(own), given.get("model"), _template_options(given)
    )


def parse_completion(body: Any) -> CompletionRequest:
    """The request in a body of /v1/completions."""
    given = _fields(body, COMPLETION)
    own = {name: given[name] for name in (*SAMPLING, "best_of", "logprobs") if name in given}
    return CompletionRequest(_prompts(given.get("prompt")), SamplingParams.from_dict(own), given.get("model"))


def _fields(body: Any, known: Sequence[str]) -> dict[str, Any]:
    """The fields that say something: known ones, without those that are null or neutral."""
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be a JSON object, got {shown(body)}")
    refuse_unknown(body, known)
    given = {name: value for name, value in body.items() if value is not None}
    for name, neutral in NEUTRAL.items():
        if name in given:
            value = given.pop(name)
            if value != neutral or type(value) is not type(neutral):
                raise RequestError(name, f"is not implemented for this endpoint, leave it out; got {shown(value)}")
    if not isinstance(given.get("model"), str | None):
        raise RequestError("model", f"must be a string, got {shown(given['model'])}")
    return given


def _template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    options = given.get("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise RequestError("chat_template_kwargs", f"must be a JSON object, got {shown(options)}")
    for name in ("self", "messages", "add_generation_prompt", "chat_template"):
        if name in options:
            raise RequestError(f"chat_template_kwargs.{name}", "is not a variable to set here; leave it out")
    return {
        **options,
        "add_generation_prompt": boolean("add_generation_prompt", given.get("add_generation_prompt", True)),
    }


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise RequestError("messages", f"must be a list of one or more messages, got {shown(value)}")
    return [_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise RequestError(where, f"must be an object with role and content, got {shown(message)}")
    given = {name: value for name, value in message.items() if value not in (None, [])}
    refuse_unknown(given, ("role", "content", "name"), f"{where}.")
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    found = {"role": ROLES[role], "content": _content(f"{where}.content", given.get("content"))}
    return found | ({"name": unicode_text(f"{where}.name", given["name"])} if "name" in given else {})


def _content(where: str, content: Any) -> str:
    """A message's text: a string, or the lines of its text parts."""
    if not isinstance(content, list):
        return unicode_text(where, content)
    lines = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where}[{i}].type", f"must be 'text', got {shown(kind)}")
        refuse_unknown(part, ("type", "text"), f"{where}[{i}].")
        lines.append(unicode_text(f"{where}[{i}].text", part.get("text")))
    return "\n".join(lines)


def _prompts(value: Any) -> list[str | list[int]]:
    """One text, one list of token ids, or a list of either."""
    if isinstance(value, str):
        return [unicode_text("prompt", value)]
    if not isinstance(value, list) or not value:
        raise RequestError("prompt", f"must be text, token ids, or a list of one or more of either, got {shown(value)}")
    if not isinstance(value[0], str | list):
        return [list(token_ids("prompt", value, INT32_MAX))]
    return [
        list(token_ids(f"prompt[{i}]", prompt, INT32_MAX))
        if isinstance(prompt, list)
        else unicode_text(f"prompt[{i}]", prompt)
        for i, prompt in enumerate(items("prompt", value, MAX_PROMPTS))
    ]


def chat_response(head: Head, output: RequestOutput, params: SamplingParams) -> dict[str, Any]:
    """The body that answers a chat request."""
    choices = [
        {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": None if answer.logprobs is None else {"content": list(_chat_logprobs(answer, params))},
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        for answer in output.outputs
    ]
    body = _body(head, "chat.completion", choices, [output])
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = _prompt_logprobs(output)
    return body


def completion_response(head: Head, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The body that answers a completion request; its choices are those of the first prompt, of the second, ..."""
    choices = []
    for output in outputs:
        for answer in output.outputs:
            choice = {
                "index": len(choices),
                "text": answer.text,
                "logprobs": None if answer.logprobs is None else _completion_logprobs(answer),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            if output.prompt_logprobs is not None:
                choice["prompt_logprobs"] = _prompt_logprobs(output)
            choices.append(choice)
    return _body(head, "text_completion", choices, outputs)


def _body(head: Head, kind: str, choices: list[dict], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    written = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
        },
    }


def _text(token: int, entry: Logprob) -> str:
    return f"token_id:{token}" if entry.decoded_token is None else entry.decoded_token


def _logprob(entry: Logprob) -> float:
    return max(entry.logprob, LEAST_LOGPROB)


def _chat_logprobs(answer: CompletionOutput, params: SamplingParams) -> Iterator[dict[str, Any]]:
    """For each token of an answer itself and the likeliest in its place."""

    def described(token: int, entry: Logprob) -> dict[str, Any]:
        text = _text(token, entry)
        # A part of a character has bytes that its text no longer tells.
        known = entry.decoded_token is not None and "\ufffd" not in text
        return {"token": text, "logprob": _logprob(entry), "bytes": list(text.encode()) if known else None}

    for token, entries in zip(answer.token_ids, answer.logprobs or (), strict=True):
        best = sorted(entries.items(), key=lambda item: -item[1].logprob)[: params.logprobs]
        yield {**described(token, entries[token]), "top_logprobs": [described(*item) for item in best]}


def _completion_logprobs(answer: CompletionOutput) -> dict[str, Any]:
    """The same as parallel lists; here the token itself is among the likeliest, beyond their number if it must."""
    tokens, own, top, offsets, at = [], [], [], [], 0
    for token, entries in zip(answer.token_ids, answer.logprobs or (), strict=True):
        text = _text(token, entries[token])
        tokens.append(text)
        own.append(_logprob(entries[token]))
        ranked = sorted(entries.items(), key=lambda item: item[1].logprob)  # of one text the likeliest stays
        top.append({_text(*item): _logprob(item[1]) for item in ranked})
        offsets.append(at)
        at += len(text)
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def _prompt_logprobs(output: RequestOutput) -> list[dict[str, dict[str, Any]] | None]:
    return [
        None if entries is None else {
            str(token): {"logprob": _logprob(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in entries.items()
        }
        for entries in output.prompt_logprobs or ()
    ]  # fmt: skip
