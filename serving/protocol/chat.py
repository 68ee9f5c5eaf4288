"""Parsing of OpenAI's /v1/chat/completions."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ..api.content import text_part
from ..api.errors import RequestError
from ..api.params import SAMPLING
from ..api.validation import boolean, shown
from ..api.validation import unicode_text as unicode
from .answers.answer import ChatBatch, ChatRequest
from .fields import (
    ABSENT,
    BEAMS,
    DELIVERY,
    REQUEST_OPTIONS,
    TEMPLATE,
    TRUNCATION,
    VLLM_ONLY,
    answer_grammar,
    known_fields,
    parse_common_fields,
    parse_length_penalty,
    parse_response_format,
    parse_sampling,
    sampling_fields,
    template_options,
)
from .fields import LABELS as COMMON_LABELS
from .media import IMAGE_TYPES, parse_image
from .objects import keep_known_fields, parse_list, parse_object
from .tools import (
    INPUT,
    MAX_TOOLS,
    Custom,
    function_choice,
    parse_choice,
    parse_function,
    parse_tools,
    strict_functions,
)

SAMPLING_FIELDS = sampling_fields("chat")
LABELS = (*COMMON_LABELS, "prediction")  # prediction would only make the same answer faster
FIELDS = (
    "model",
    "messages",
    "logprobs",
    "top_logprobs",
    "max_completion_tokens",
    "response_format",
    "tools",
    "random_seed",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "echo",
    "include_reasoning",
    *TRUNCATION,
    *TEMPLATE,
    *SAMPLING_FIELDS,
    *BEAMS,
    *DELIVERY,
    *REQUEST_OPTIONS,
    *LABELS,
)
BATCH_FIELDS = tuple(name for name in FIELDS if name not in ("stream", "stream_options"))
NEUTRAL = {  # unimplemented fields, with the value that has no effect
    "modalities": ["text"],
    "documents": [],
    "prompt_cache_retention": "in_memory",
}
REFUSED = VLLM_ONLY | dict.fromkeys(
    ("audio", "moderation", "prompt_cache_options", "web_search_options"), ABSENT
)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OWN_FIELDS = {  # by role; `parsed` repeats `content` in messages that clients send back
    "assistant": (
        "tool_calls",
        "function_call",
        "reasoning",
        "reasoning_content",
        "refusal",
        "parsed",
    ),
    "tool": ("tool_call_id",),
}
TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
FUNCTION = ("name", "description", "parameters")
MAX_MESSAGES = 4096
MAX_CONVERSATIONS = 2048  # in a batch


def parse(body: Any) -> ChatRequest:
    """Parse a body."""
    fields = known_fields(body, FIELDS, NEUTRAL, REFUSED)
    ignored: set[str] = set()
    messages = parse_messages(fields.get("messages"), ignored)
    uses_old_names = "functions" in fields or "function_call" in fields
    tools, custom, choice = old_tools(fields) if uses_old_names else new_tools(fields)
    sampling_values = {
        name: fields[name] for name in SAMPLING_FIELDS if name in fields
    } | answer_grammar(parse_response_format(fields), choice)
    sampling_values["max_tokens"] = fields.get("max_tokens")  # None: up to the context length
    if "max_completion_tokens" in fields:
        if "max_tokens" in fields:
            raise RequestError(
                "max_tokens", "is the old name of max_completion_tokens; leave one of them out"
            )
        sampling_values["max_tokens"] = SAMPLING["max_tokens"].rule.check(
            "max_completion_tokens", fields["max_completion_tokens"]
        )
    if "random_seed" in fields:  # Mistral's name
        if "seed" in fields:
            raise RequestError("random_seed", "is Mistral's name of seed; leave one of them out")
        sampling_values["seed"] = SAMPLING["seed"].rule.check("random_seed", fields["random_seed"])
    if boolean("logprobs", fields.get("logprobs", False)):
        sampling_values["logprobs"] = SAMPLING["logprobs"].rule.check(
            "top_logprobs", fields.get("top_logprobs", 0)
        )
    elif fields.get("top_logprobs"):
        raise RequestError(
            "top_logprobs", f"needs logprobs to be true, got {shown(fields['top_logprobs'])}"
        )
    elif fields.get("logprob_token_ids"):
        raise RequestError("logprob_token_ids", "needs logprobs to be true")
    common = parse_common_fields(fields)
    sampling = parse_sampling(sampling_values)
    length_penalty = parse_length_penalty(fields, sampling)
    if length_penalty is not None and tools:
        raise RequestError("use_beam_search", "has no place beside tools; leave one of them out")
    if common["delivery"].stream and sampling_values.get("prompt_logprobs") is not None:
        raise RequestError("prompt_logprobs", "cannot be streamed; leave one of them out")
    return ChatRequest(
        messages=messages,
        ignored=tuple(sorted(ignored)),
        **sampling,
        length_penalty=length_penalty,
        template_options=template_options(fields),
        tools=tools,
        custom=custom,
        strict=strict_functions(fields.get("tools")),
        old_calls=uses_old_names,
        tool_choice=choice,
        parallel_tool_calls=boolean("parallel_tool_calls", fields.get("parallel_tool_calls", True))
        and not uses_old_names,
        echo=boolean("echo", fields.get("echo", False)),
        **common,
    )


def parse_batch(body: Any) -> ChatBatch:
    """Parse a body whose `messages` are a list of conversations."""
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be a JSON object, got {shown(body)}")
    for name in ("stream", "stream_options"):
        if body.get(name):
            raise RequestError(name, "has no place in a batch; leave it out")
    conversations = parse_list("messages", body.get("messages"), MAX_CONVERSATIONS, minimum=1)
    ignored: set[str] = set()
    conversations_messages = [
        parse_messages(conversation, ignored, f"messages[{i}]")
        for i, conversation in enumerate(conversations)
    ]
    first = parse({**body, "messages": conversations[0]})
    common = {
        request_field.name: getattr(first, request_field.name)
        for request_field in dataclasses.fields(first)
    }
    return ChatBatch(
        **common | {"ignored": tuple(sorted(ignored)), "conversations": conversations_messages}
    )


def new_tools(fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Custom, str]:
    """The callable tools, the formats of the custom ones among them, and the tool choice."""
    tools, custom = parse_tools(fields.get("tools", []), nested=True)
    tools, choice = parse_choice(fields.get("tool_choice"), tools, nested=True)
    return tools, custom, choice


def old_tools(fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Custom, str]:
    """As `new_tools`, from the old fields `functions` and `function_call`."""
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if new in fields:
            raise RequestError(
                new,
                f"and {old if old in fields else 'functions'} are its new and its old "
                "name; use one",
            )
    tools = [
        {
            "type": "function",
            "function": parse_function(
                f"functions[{i}]", parse_object(f"functions[{i}]", function, FUNCTION)
            ),
        }
        for i, function in enumerate(
            parse_list("functions", fields.get("functions", []), MAX_TOOLS)
        )
    ]
    choice = fields.get("function_call", "auto")
    if isinstance(choice, Mapping):
        name = parse_object("function_call", choice, ("name",)).get("name")
        return tools, {}, function_choice(name, "function_call.name", tools)
    if choice not in ("auto", "none"):
        raise RequestError(
            "function_call", f"must be auto, none or {{'name': ...}}, got {shown(choice)}"
        )
    return tools, {}, choice


def parse_messages(value: Any, ignored: set[str], param: str = "messages") -> list[dict[str, Any]]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        received = f"{len(value)} of them" if isinstance(value, list) else shown(value)
        raise RequestError(param, f"must be a list of 1 to {MAX_MESSAGES} messages, got {received}")
    messages = [parse_message(f"{param}[{i}]", message, ignored) for i, message in enumerate(value)]
    # Call ids by function name: results with the role `function` have no id.
    calls: dict[str, str] = {}
    for i, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            if "tool_calls" not in value[i]:
                call["id"] = f"call{i:05d}"
            calls[call["function"]["name"]] = call.get("id", "")
        if message["role"] == "function":
            message |= {
                "role": "tool",
                "tool_call_id": calls.get(message.get("name", ""), f"call{i:05d}"),
            }
    return messages


def parse_message(param: str, message: Any, ignored: set[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(param, f"must be an object with role and content, got {shown(message)}")
    fields = {name: value for name, value in message.items() if value is not None and value != []}
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{param}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    fields = keep_known_fields(
        param, fields, ("role", "content", "name", *OWN_FIELDS.get(role, ())), ignored
    )
    parsed: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = fields.get("tool_calls")
    if calls is None and "function_call" in fields:
        calls = [{"function": fields["function_call"]}]
    if "refusal" in fields and "content" in fields:
        raise RequestError(f"{param}.refusal", "and content are both given; leave one of them out")
    if "refusal" in fields:
        parsed["content"] = unicode(f"{param}.refusal", fields["refusal"])
    elif "content" in fields or calls is None:
        content = fields.get("content")
        parsed["content"] = (
            content_parts(f"{param}.content", content, ignored)
            if role in ("user", "tool") and isinstance(content, list) and has_images(content)
            else content_text(f"{param}.content", content, ignored)
        )
    for name in ("name", "tool_call_id"):
        if name in fields:
            parsed[name] = unicode(f"{param}.{name}", fields[name])
    for name in ("reasoning", "reasoning_content"):
        if name in fields:
            parsed["reasoning_content"] = unicode(f"{param}.{name}", fields[name])
    if calls is not None:
        if not isinstance(calls, list):
            raise RequestError(f"{param}.tool_calls", f"must be a list, got {shown(calls)}")
        parsed["tool_calls"] = [
            parse_call(f"{param}.tool_calls[{i}]", call, ignored) for i, call in enumerate(calls)
        ]
    return parsed


def parse_call(param: str, call: Any, ignored: set[str]) -> dict[str, Any]:
    """Parse a tool call of an earlier answer; chat templates take its arguments as an object."""
    kind = call.get("type", "function") if isinstance(call, Mapping) else None
    function_fields = call.get(kind) if kind in ("function", "custom") else None
    if not isinstance(function_fields, Mapping):
        raise RequestError(
            param, f"must be an object with id, type 'function' and function, got {shown(call)}"
        )
    call = keep_known_fields(param, call, ("id", "type", str(kind), "index"), ignored)
    # Some clients add parsed_arguments.
    names = ("name", "input") if kind == "custom" else ("name", "arguments", "parsed_arguments")
    function_fields = keep_known_fields(f"{param}.{kind}", function_fields, names, ignored)
    name = unicode(f"{param}.{kind}.name", function_fields.get("name"))
    if kind == "custom":
        arguments = {INPUT: unicode(f"{param}.custom.input", function_fields.get("input"))}
    else:
        arguments = read_arguments(
            f"{param}.function.arguments", function_fields.get("arguments", "{}")
        )
    parsed = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return parsed | (
        {"id": unicode(f"{param}.id", call["id"])} if call.get("id") is not None else {}
    )


def read_arguments(param: str, arguments: Any) -> dict[str, Any]:
    """Parse the JSON text of a call's arguments."""
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
    if not isinstance(parsed, dict):
        raise RequestError(param, f"must be a JSON object, as text, got {shown(arguments)}")
    return parsed


def has_images(parts: list[Any]) -> bool:
    """Whether an image is among the parts of a message."""
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES for part in parts)


def content_parts(param: str, content: list[Any], ignored: set[str]) -> list[dict[str, Any]]:
    """The texts and images of a message, in order."""
    parts = []
    for i, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES:
            parts.append(parse_image(f"{param}[{i}]", part, ignored))
        else:
            parts.append(text_part(part_text(f"{param}[{i}]", part, ignored)))
    return parts


def content_text(param: str, content: Any, ignored: set[str]) -> str:
    """A message's text: a string, or its text parts joined by newlines."""
    if not isinstance(content, list):
        return unicode(param, content)
    return "\n".join(part_text(f"{param}[{i}]", part, ignored) for i, part in enumerate(content))


def part_text(param: str, content_part: Any, ignored: set[str]) -> str:
    """The text of a content part."""
    kind = content_part.get("type") if isinstance(content_part, Mapping) else content_part
    if not isinstance(content_part, Mapping) or kind not in TEXT_TYPES:
        raise RequestError(f"{param}.type", f"must be 'text', got {shown(kind)}")
    names = ("type", "text", "refusal", "annotations")
    content_part = keep_known_fields(param, content_part, names, ignored)
    return unicode(f"{param}.text", content_part.get("text", content_part.get("refusal")))
