"""OpenAI's /v1/chat/completions: a body to a request."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..api.errors import RequestError
from ..api.params import SAMPLING
from ..api.validation import boolean, shown
from ..api.validation import unicode_text as unicode
from .answers.answer import ChatBatch, ChatRequest
from .fields import (
    ABSENT,
    BEAMS,
    DELIVERY,
    OF_VLLM,
    TEMPLATE,
    TERMS,
    TRUNCATION,
    beams_of,
    common_fields,
    form_of_text,
    known_fields,
    sampling_fields,
    sampling_of,
    structure,
    template_options,
)
from .fields import LABELS as COMMON_LABELS
from .objects import known_of, listed, plain
from .tools import INPUT, MAX_TOOLS, Custom, choice_of, parse_choice, parse_function, parse_tools, strict_names

OWN_SAMPLING = sampling_fields("chat")
LABELS = (*COMMON_LABELS, "prediction")  # which elsewhere makes the same answer come sooner
FIELDS = (
    "model", "messages", "logprobs", "top_logprobs", "max_completion_tokens", "response_format", "tools",
    "random_seed", "tool_choice", "parallel_tool_calls", "functions", "function_call", "echo", "include_reasoning",
    *TRUNCATION, *TEMPLATE, *OWN_SAMPLING, *BEAMS, *DELIVERY, *TERMS, *LABELS,
)  # fmt: skip
BATCH_FIELDS = tuple(name for name in FIELDS if name not in ("stream", "stream_options"))
NEUTRAL = {  # fields that are not implemented, with the value that asks for nothing
    "modalities": ["text"],
    "documents": [],
    "prompt_cache_retention": "in_memory",
}
REFUSED = OF_VLLM | dict.fromkeys(("audio", "moderation", "prompt_cache_options", "web_search_options"), ABSENT)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OWN_FIELDS = {  # of messages; clients send back `parsed` as they got it from content, and it says the same
    "assistant": ("tool_calls", "function_call", "reasoning", "reasoning_content", "refusal", "parsed"),
    "tool": ("tool_call_id",),
}
FUNCTION = ("name", "description", "parameters")
MAX_MESSAGES = 4096
MAX_CONVERSATIONS = 2048  # in a batch


def parse(body: Any) -> ChatRequest:
    """The request in a body."""
    given = known_fields(body, FIELDS, NEUTRAL, REFUSED)
    ignored: set[str] = set()
    messages = parse_messages(given.get("messages"), ignored)
    old = "functions" in given or "function_call" in given
    tools, custom, choice = old_tools(given) if old else new_tools(given)
    own = {name: given[name] for name in OWN_SAMPLING if name in given} | form_of_text(structure(given), choice)
    own["max_tokens"] = given.get("max_tokens")  # not given: up to the model's length
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise RequestError("max_tokens", "is the old name of max_completion_tokens; leave one of them out")
        own["max_tokens"] = SAMPLING["max_tokens"].rule.check("max_completion_tokens", given["max_completion_tokens"])
    if "random_seed" in given:  # Mistral's name
        if "seed" in given:
            raise RequestError("random_seed", "is Mistral's name of seed; leave one of them out")
        own["seed"] = SAMPLING["seed"].rule.check("random_seed", given["random_seed"])
    if boolean("logprobs", given.get("logprobs", False)):
        own["logprobs"] = SAMPLING["logprobs"].rule.check("top_logprobs", given.get("top_logprobs", 0))
    elif given.get("top_logprobs"):
        raise RequestError("top_logprobs", f"needs logprobs to be true, got {shown(given['top_logprobs'])}")
    elif given.get("logprob_token_ids"):
        raise RequestError("logprob_token_ids", "needs logprobs to be true")
    common, sampling = common_fields(given), sampling_of(own)
    penalty = beams_of(given, sampling)
    if penalty is not None and tools:
        raise RequestError("use_beam_search", "has no place beside tools; leave one of them out")
    if common["delivery"].stream and own.get("prompt_logprobs") is not None:
        raise RequestError("prompt_logprobs", "cannot be streamed; leave one of them out")
    return ChatRequest(
        messages=messages,
        ignored=tuple(sorted(ignored)),
        **sampling,
        length_penalty=penalty,
        template_options=template_options(given),
        tools=tools,
        custom=custom,
        strict=strict_names(given.get("tools")),
        old_calls=old,
        tool_choice=choice,
        parallel_tool_calls=boolean("parallel_tool_calls", given.get("parallel_tool_calls", True)) and not old,
        echo=boolean("echo", given.get("echo", False)),
        **common,
    )


def parse_batch(body: Any) -> ChatBatch:
    """The requests in a body whose messages are a list of conversations."""
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be a JSON object, got {shown(body)}")
    for name in ("stream", "stream_options"):
        if body.get(name):
            raise RequestError(name, "has no place in a batch; leave it out")
    conversations = listed("messages", body.get("messages"), MAX_CONVERSATIONS, least=1)
    ignored: set[str] = set()
    found = [parse_messages(conversation, ignored, f"messages[{i}]") for i, conversation in enumerate(conversations)]
    first = parse({**body, "messages": conversations[0]})
    given = {each.name: getattr(first, each.name) for each in fields(first)}
    return ChatBatch(**given | {"ignored": tuple(sorted(ignored)), "conversations": found})


def new_tools(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Custom, str]:
    """The tools that may be called, which of them are custom, and the tool choice."""
    tools, custom = parse_tools(given.get("tools", []), nested=True)
    tools, choice = parse_choice(given.get("tool_choice"), tools, nested=True)
    return tools, custom, choice


def old_tools(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Custom, str]:
    """The same under their old names, `functions` and `function_call`."""
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if new in given:
            raise RequestError(new, f"and {old if old in given else 'functions'} are its new and its old name; use one")
    tools = [
        {"type": "function", "function": parse_function(f"functions[{i}]", plain(f"functions[{i}]", one, FUNCTION))}
        for i, one in enumerate(listed("functions", given.get("functions", []), MAX_TOOLS))
    ]
    choice = given.get("function_call", "auto")
    if isinstance(choice, Mapping):
        name = plain("function_call", choice, ("name",)).get("name")
        return tools, {}, choice_of(name, "function_call.name", tools)
    if choice not in ("auto", "none"):
        raise RequestError("function_call", f"must be auto, none or {{'name': ...}}, got {shown(choice)}")
    return tools, {}, choice


def parse_messages(value: Any, ignored: set[str], where: str = "messages") -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        got = f"{len(value)} of them" if isinstance(value, list) else shown(value)
        raise RequestError(where, f"must be a list of 1 to {MAX_MESSAGES} messages, got {got}")
    found = [parse_message(f"{where}[{i}]", message, ignored) for i, message in enumerate(value)]
    calls: dict[str, str] = {}  # the ids of calls by the names of functions: results under the old name have no other
    for i, message in enumerate(found):
        for call in message.get("tool_calls", ()):
            if "tool_calls" not in value[i]:
                call["id"] = f"call{i:05d}"
            calls[call["function"]["name"]] = call.get("id", "")
        if message["role"] == "function":
            message |= {"role": "tool", "tool_call_id": calls.get(message.get("name", ""), f"call{i:05d}")}
    return found


def parse_message(where: str, message: Any, ignored: set[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(where, f"must be an object with role and content, got {shown(message)}")
    given = {name: value for name, value in message.items() if value is not None and value != []}
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    given = known_of(where, given, ("role", "content", "name", *OWN_FIELDS.get(role, ())), ignored)
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = given.get("tool_calls")
    if calls is None and "function_call" in given:
        calls = [{"function": given["function_call"]}]
    if "refusal" in given and "content" in given:
        raise RequestError(f"{where}.refusal", "and content are both given; leave one of them out")
    if "refusal" in given:
        found["content"] = unicode(f"{where}.refusal", given["refusal"])
    elif "content" in given or calls is None:
        found["content"] = content_text(f"{where}.content", given.get("content"), ignored)
    for name in ("name", "tool_call_id"):
        if name in given:
            found[name] = unicode(f"{where}.{name}", given[name])
    for name in ("reasoning", "reasoning_content"):
        if name in given:
            found["reasoning_content"] = unicode(f"{where}.{name}", given[name])
    if calls is not None:
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls", f"must be a list, got {shown(calls)}")
        found["tool_calls"] = [parse_call(f"{where}.tool_calls[{i}]", call, ignored) for i, call in enumerate(calls)]
    return found


def parse_call(where: str, call: Any, ignored: set[str]) -> dict[str, Any]:
    """A call that an earlier answer made; chat templates take its arguments as an object."""
    kind = call.get("type", "function") if isinstance(call, Mapping) else None
    given = call.get(kind) if kind in ("function", "custom") else None
    if not isinstance(given, Mapping):
        raise RequestError(where, f"must be an object with id, type 'function' and function, got {shown(call)}")
    call = known_of(where, call, ("id", "type", kind, "index"), ignored)
    names = ("name", "input") if kind == "custom" else ("name", "arguments", "parsed_arguments")  # the last by clients
    given = known_of(f"{where}.{kind}", given, names, ignored)
    name = unicode(f"{where}.{kind}.name", given.get("name"))
    if kind == "custom":
        arguments = {INPUT: unicode(f"{where}.custom.input", given.get("input"))}
    else:
        arguments = read_arguments(f"{where}.function.arguments", given.get("arguments", "{}"))
    found = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return found | ({"id": unicode(f"{where}.id", call["id"])} if call.get("id") is not None else {})


def read_arguments(where: str, arguments: Any) -> dict[str, Any]:
    """The object in the JSON text of a call's arguments."""
    found = arguments
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict):
        raise RequestError(where, f"must be a JSON object, as text, got {shown(arguments)}")
    return found


def content_text(where: str, content: Any, ignored: set[str]) -> str:
    """A message's text: a string, or the lines of its text parts."""
    if not isinstance(content, list):
        return unicode(where, content)
    lines = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text", "refusal"):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where}[{i}].type", f"must be 'text', got {shown(kind)}")
        part = known_of(f"{where}[{i}]", part, ("type", "text", "refusal", "annotations"), ignored)
        lines.append(unicode(f"{where}[{i}].text", part.get("text", part.get("refusal"))))
    return "\n".join(lines)
