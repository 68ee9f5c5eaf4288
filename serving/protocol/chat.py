"""OpenAI's /v1/chat/completions: a body to a request."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..api.errors import RequestError
from ..api.params import MAX_LOGPROBS, SAMPLING
from ..api.validation import boolean, integer, refuse_unknown, shown
from ..api.validation import unicode_text as unicode
from .answers.answer import ChatBatch, ChatRequest
from .fields import (
    ABSENT,
    DELIVERY,
    LABELS,
    MAX_SCHEMA,
    TEMPLATE,
    TERMS,
    common_fields,
    form_of_text,
    known_fields,
    sampling_fields,
    sampling_of,
    structure,
    template_options,
    text,
)
from .objects import known_of, listed

OWN_SAMPLING = sampling_fields("chat")
FIELDS = (
    "model", "messages", "logprobs", "top_logprobs", "max_completion_tokens", "response_format", "tools",
    "tool_choice", "parallel_tool_calls", "truncate_prompt_tokens", "echo",
    *TEMPLATE, *OWN_SAMPLING, *DELIVERY, *TERMS, *LABELS,
)  # fmt: skip
BATCH_FIELDS = tuple(name for name in FIELDS if name not in ("stream", "stream_options"))
NEUTRAL = {  # fields that are not implemented, with the value that asks for nothing
    "modalities": ["text"],
    "functions": [],
    "function_call": "none",
    "documents": [],
    "prompt_cache_retention": "in_memory",
    "verbosity": "medium",
}
REFUSED = dict.fromkeys(("audio", "moderation", "prediction", "prompt_cache_options", "web_search_options"), ABSENT)
ROLES = ("system", "developer", "user", "assistant", "tool")
OWN_FIELDS = {  # of messages; clients send back `parsed` as they got it from content, and it says the same
    "assistant": ("tool_calls", "reasoning", "reasoning_content", "refusal", "parsed"),
    "tool": ("tool_call_id",),
}
MAX_TOOLS = 128
MAX_NAME = 128
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]+")
MAX_MESSAGES = 4096
MAX_CONVERSATIONS = 2048  # in a batch


def parse(body: Any) -> ChatRequest:
    """The request in a body."""
    given = known_fields(body, FIELDS, NEUTRAL, REFUSED)
    ignored: set[str] = set()
    messages = parse_messages(given.get("messages"), ignored)
    tools = parse_tools(given.get("tools", []))
    choice = parse_choice(given.get("tool_choice"), tools)
    own = {name: given[name] for name in OWN_SAMPLING if name in given} | form_of_text(structure(given), choice)
    own["max_tokens"] = given.get("max_tokens")  # not given: up to the model's length
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise RequestError("max_tokens", "is the old name of max_completion_tokens; leave one of them out")
        own["max_tokens"] = SAMPLING["max_tokens"].rule.check("max_completion_tokens", given["max_completion_tokens"])
    if boolean("logprobs", given.get("logprobs", False)):
        own["logprobs"] = integer("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
    elif given.get("top_logprobs"):
        raise RequestError("top_logprobs", f"needs logprobs to be true, got {shown(given['top_logprobs'])}")
    common = common_fields(given)
    if common["delivery"].stream and own.get("prompt_logprobs") is not None:
        raise RequestError("prompt_logprobs", "cannot be streamed; leave one of them out")
    return ChatRequest(
        messages=messages,
        ignored=tuple(sorted(ignored)),
        **sampling_of(own),
        template_options=template_options(given),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=boolean("parallel_tool_calls", given.get("parallel_tool_calls", True)),
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


def parse_messages(value: Any, ignored: set[str], where: str = "messages") -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        got = f"{len(value)} of them" if isinstance(value, list) else shown(value)
        raise RequestError(where, f"must be a list of 1 to {MAX_MESSAGES} messages, got {got}")
    return [parse_message(f"{where}[{i}]", message, ignored) for i, message in enumerate(value)]


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
    if "refusal" in given and "content" in given:
        raise RequestError(f"{where}.refusal", "and content are both given; leave one of them out")
    if "refusal" in given:
        found["content"] = unicode(f"{where}.refusal", given["refusal"])
    elif "content" in given or calls is None:
        found["content"] = content_text(f"{where}.content", given.get("content"), ignored)
    else:
        found["content"] = ""
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
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise RequestError(where, f"must be an object with id, type 'function' and function, got {shown(call)}")
    call = known_of(where, call, ("id", "type", "function", "index"), ignored)
    function = known_of(f"{where}.function", function, ("name", "arguments", "parsed_arguments"), ignored)
    name = unicode(f"{where}.function.name", function.get("name"))
    arguments = read_arguments(f"{where}.function.arguments", function.get("arguments", "{}"))
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


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """Functions that the model may call, as chat templates take them."""
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        got = f"{len(value)} of them" if isinstance(value, list) else shown(value)
        raise RequestError("tools", f"must be a list of at most {MAX_TOOLS} tools, got {got}")
    found = []
    for i, tool in enumerate(value):
        where = f"tools[{i}]"
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise RequestError(where, f"must be {{'type': 'function', 'function': {{...}}}}, got {shown(tool)}")
        refuse_unknown(tool, ("type", "function"), f"{where}.")
        found.append({"type": "function", "function": parse_function(f"{where}.function", function)})
    return found


def parse_function(where: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """A function's name, what it does, and the schema of its arguments."""
    refuse_unknown(function, ("name", "description", "parameters", "strict"), f"{where}.")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not TOOL_NAME.fullmatch(name):
        raise RequestError(f"{where}.name", f"must be 1 to {MAX_NAME} letters, digits, _, - and ., got {shown(name)}")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or len(json.dumps(parameters)) > MAX_SCHEMA:
        raise RequestError(
            f"{where}.parameters", f"must be a JSON schema of at most {MAX_SCHEMA} bytes, got {shown(parameters)}"
        )
    found = {"name": name, "parameters": dict(parameters)}
    if function.get("description") is not None:
        found["description"] = text(f"{where}.description", function["description"], MAX_SCHEMA)
    return found


def parse_choice(value: Any, tools: list[dict[str, Any]]) -> str:
    """`auto`, `none`, `required`, or `function:NAME`."""
    if value is None:
        return "auto"
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(value, str) and value in ("auto", "none", "required"):
        if value == "required" and not tools:
            raise RequestError("tool_choice", "is 'required' and tools are missing")
        return value
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            "tool_choice", f"must be auto, none, required or {{'type': 'function', ...}}, got {shown(value)}"
        )
    if name not in names:
        raise RequestError("tool_choice.function.name", f"must be one of the tools, got {shown(name)}")
    return f"function:{name}"
