"""Parsing of OpenAI's /v1/responses."""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..api.content import Content, joined_texts, text_part
from ..api.errors import RequestError
from ..api.params import SAMPLING
from ..api.validation import boolean, shown, unicode_text
from .answers.answer import ResponsesRequest
from .chat import MAX_MESSAGES, read_arguments
from .conversation import Conversation
from .fields import (
    ABSENT,
    REQUEST_OPTIONS,
    TRUNCATION,
    answer_grammar,
    known_fields,
    parse_common_fields,
    parse_sampling,
    parse_text_format,
    parse_verbosity,
    sampling_fields,
    template_options,
)
from .fields import LABELS as COMMON_LABELS
from .media import join_parts, parse_input_image
from .objects import (
    Kinds,
    join_texts,
    parse_list,
    parse_message_fields,
    parse_object,
    parse_typed_object,
)
from .tools import INPUT, parse_choice, parse_tools, strict_functions

SAMPLING_FIELDS = sampling_fields("responses")
LABELS = tuple(name for name in COMMON_LABELS if name != "store")  # `store` has an effect here
RAW = "enable_response_messages"
FIELDS = (
    "model",
    "input",
    "instructions",
    "max_output_tokens",
    "top_logprobs",
    "include",
    "stream",
    "request_id",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "text",
    "reasoning",
    "truncation",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "store",
    "background",
    "previous_response_id",
    "conversation",
    RAW,
    *TRUNCATION,
    *SAMPLING_FIELDS,
    *REQUEST_OPTIONS,
    *LABELS,
)
COUNT_FIELDS = (  # fields that concern the prompt
    "model",
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "text",
    "reasoning",
    "truncation",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "previous_response_id",
    "conversation",
    *TRUNCATION,
)
COMPACT_FIELDS = (
    "model",
    "input",
    "instructions",
    "previous_response_id",
    "prompt_cache_key",
    "service_tier",
)
NEUTRAL = {  # unimplemented fields, with the value that has no effect
    "context_management": [],
    "echo": False,
    "n": 1,
    "prompt_cache_retention": "in_memory",
    "return_token_ids": False,
    "stream_options": {"include_obfuscation": False},
}
REFUSED = {
    "prompt": "is not implemented: prompts are not stored; send instructions and input",
    "max_tool_calls": "counts calls of built-in tools, and there are none; leave it out",
    **dict.fromkeys(("access_programs", "background_options", "image", "moderation"), ABSENT),
    **dict.fromkeys(("prompt_cache_options", "prompt_logprobs"), ABSENT),
    "logprobs": "is include: ['message.output_text.logprobs'] here, with top_logprobs",
    "max_completion_tokens": "is max_output_tokens here",
    "max_tokens": "is max_output_tokens here",
    "messages": "is input here",
    "reasoning_effort": "is reasoning.effort here",
    "response_format": "is text.format here",
}
# (id, field with the id) -> the items of a conversation, or of a response and its predecessors.
History = Callable[[str, str], list[dict[str, Any]]]
SUMMARY_REQUEST = (
    "Write a summary of this conversation for somebody who has to go on with it and has not seen "
    "it: what is wanted, what was found and decided, what is open. Write the summary and nothing "
    "else."
)
SUMMARY_HEADING = "(What was said before, in short:)"
LOGPROBS = "message.output_text.logprobs"
# Reasoning is returned as plain text and can be sent back, so there is no encrypted form.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# The only supported values.
REASONING = {"summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "standard"}
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
ITEMS = {
    "message": ("role", "content", "id", "status", "phase"),
    "function_call": ("call_id", "name", "arguments", "id", "status"),
    "function_call_output": ("call_id", "output", "name", "id", "status"),
    "custom_tool_call": ("call_id", "name", "input", "id", "status"),
    "custom_tool_call_output": ("call_id", "output", "name", "id", "status"),
    "reasoning": ("summary", "content", "encrypted_content", "id", "status"),
    "compaction": ("encrypted_content", "id"),
}
PARTS = {
    "input_text": ("text",),
    "output_text": ("text", "annotations", "logprobs"),
    "refusal": ("refusal",),
}
IMAGE = {"input_image": ("image_url", "detail", "file_id")}
FORMATS = {
    "text": (),
    "json_object": (),
    "json_schema": ("name", "description", "schema", "strict"),
}


def parse_count(body: Any, history: History | None = None) -> ResponsesRequest:
    """Parse a body of /v1/responses/input_tokens."""
    return parse(known_fields(body, COUNT_FIELDS, NEUTRAL, REFUSED), history)


def parse_compact(body: Any, history: History | None = None) -> ResponsesRequest:
    """Parse a body of /v1/responses/compact, the conversation to summarise."""
    return parse(known_fields(body, COMPACT_FIELDS, NEUTRAL, REFUSED), history)


def ask_for_summary(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append the request for a summary to a conversation."""
    *earlier, last = messages
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": SUMMARY_REQUEST}]
    request = f"({SUMMARY_REQUEST})"
    content = last["content"]
    if isinstance(content, str):
        return [*earlier, last | {"content": f"{content}\n\n{request}"}]
    return [*earlier, last | {"content": [*content, text_part(request)]}]


def parse(body: Any, history: History | None = None) -> ResponsesRequest:
    """Parse a body; `history` reads the stored items that it continues from."""
    fields = known_fields(body, FIELDS, NEUTRAL, REFUSED)
    text = parse_object("text", fields.get("text", {}), ("format", "verbosity"))
    tools, custom = parse_tools(fields.get("tools", []), nested=False)
    tools, choice = parse_choice(fields.get("tool_choice"), tools, nested=False)
    sampling_values = {
        name: fields[name] for name in SAMPLING_FIELDS if name in fields
    } | answer_grammar(parse_format(text, fields), choice)
    # None: up to the context length
    sampling_values["max_tokens"] = fields.get("max_output_tokens")
    if sampling_values["max_tokens"] is not None:
        SAMPLING["max_tokens"].rule.check("max_output_tokens", sampling_values["max_tokens"])
    sampling_values["logprobs"] = parse_logprobs(fields)
    variables = parse_effort(fields.get("reasoning", {}))
    if "verbosity" in text:
        variables |= parse_verbosity("text.verbosity", text["verbosity"])
    ignored: set[str] = set()
    previous = fields.get("previous_response_id")
    conversation = parse_conversation_id(fields.get("conversation"))
    if previous is not None and conversation is not None:
        raise RequestError(
            "conversation",
            "and previous_response_id both say what was before; leave one of them out",
        )
    earlier_items: list[dict[str, Any]] = []
    for name, value in (("previous_response_id", previous), ("conversation", conversation)):
        if value is not None:
            unicode_text(name, value)
            if history is None:
                raise RequestError(name, "goes on from what is stored, and there is nothing here")
            earlier_items = history(value, name)
    store, background, common = parse_storing(fields, parse_common_fields(fields))
    return ResponsesRequest(
        messages=parse_input(
            fields.get("instructions"), fields.get("input"), ignored, earlier_items
        ),
        store=store,
        background=background,
        previous_response_id=previous,
        conversation=conversation,
        ignored=tuple(sorted(ignored)),
        **parse_sampling(sampling_values),
        template_options=variables | template_options(fields),
        tools=tools,
        custom=custom,
        strict=strict_functions(fields.get("tools")),
        tool_choice=choice,
        drops_oldest=parse_truncation(fields),
        shows_raw=boolean(RAW, fields.get(RAW, False)),
        parallel_tool_calls=boolean("parallel_tool_calls", fields.get("parallel_tool_calls", True)),
        **common,
    )


def parse_conversation_id(value: Any) -> Any:
    """The id of a conversation, given as a string or in an object."""
    return (
        parse_object("conversation", value, ("id",)).get("id")
        if isinstance(value, Mapping)
        else value
    )


def parse_storing(
    fields: Mapping[str, Any], common: dict[str, Any]
) -> tuple[bool, bool, dict[str, Any]]:
    """Parse `store` and `background`."""
    store, background = (boolean(name, fields.get(name, default)) for name, default in
                         (("store", True), ("background", False)))  # fmt: skip
    if background and not store:
        raise RequestError(
            "background", "can only be used when store is true: the answer is asked for later"
        )
    return store, background, common


def input_items(value: Any) -> list[dict[str, Any]]:
    """The input in the form of stored items."""
    if value is None:
        return []
    if isinstance(value, str):
        return [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}
        ]
    return [
        {"type": "message", **item} if item.get("type") is None else dict(item) for item in value
    ]


def parse_input(
    instructions: Any, value: Any, ignored: set[str], earlier_items: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The messages of instructions, stored `earlier_items` and input."""
    conversation = Conversation()
    if instructions is not None:
        conversation.add_message("system", unicode_text("instructions", instructions))
    add_items(conversation, "previous_response_id", earlier_items, set())
    if isinstance(value, str):
        conversation.add_message("user", unicode_text("input", value))
    elif value is not None or not earlier_items:
        if not isinstance(value, list):
            raise RequestError("input", f"must be text or a list of items, got {shown(value)}")
        add_items(
            conversation, "input", parse_list("input", value, MAX_MESSAGES, minimum=1), ignored
        )
    return conversation.messages


def add_items(
    conversation: Conversation, name: str, items: Sequence[Any], ignored: set[str]
) -> None:
    """Add items to a conversation; unknown fields of messages go into `ignored`."""
    last_kind = None
    for i, item in enumerate(items):
        param = f"{name}[{i}]"
        if isinstance(item, Mapping) and "role" in item and item.get("type") is None:
            item = {**item, "type": "message"}
        if isinstance(item, Mapping) and item.get("type") == "message":
            item = parse_message_fields(param, item, ("type", *ITEMS["message"]), ignored)
        fields = parse_typed_object(param, item, ITEMS)
        ADD[fields["type"]](conversation, param, fields, last_kind)
        last_kind = fields["type"]


def add_message(
    conversation: Conversation, param: str, fields: dict[str, Any], last_kind: str | None
) -> None:
    role = fields.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{param}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    if role == "user":
        conversation.add_message(
            role, parse_content(f"{param}.content", fields.get("content"), PARTS)
        )
        return
    text = join_texts(f"{param}.content", fields.get("content"), PARTS, MAX_MESSAGES)
    if role != "assistant" or last_kind == "message":  # adjacent messages stay separate
        conversation.add_message(ROLES[role], text)
    else:
        conversation.assistant_message()["content"] += text


def parse_content(param: str, value: Any, kinds: Kinds) -> Content:
    """A text, or a list of texts and images."""
    return join_parts(
        param, value, {**kinds, **IMAGE}, MAX_MESSAGES, "input_image", parse_input_image
    )


def add_reasoning(
    conversation: Conversation, param: str, fields: dict[str, Any], _: str | None
) -> None:
    """Add the reasoning text, or else its summary."""
    if "encrypted_content" in fields:
        raise RequestError(f"{param}.encrypted_content", "cannot be read here; leave it out")
    texts_by_field = {
        name: join_texts(
            f"{param}.{name}",
            parse_list(f"{param}.{name}", fields[name], MAX_MESSAGES),
            kind,
            MAX_MESSAGES,
        )
        for name, kind in (
            ("content", {"reasoning_text": ("text",)}),
            ("summary", {"summary_text": ("text",)}),
        )
        if name in fields
    }
    conversation.add_reasoning(texts_by_field.get("content") or texts_by_field.get("summary") or "")


def add_call(conversation: Conversation, param: str, fields: dict[str, Any], _: str | None) -> None:
    name, call_id = (
        unicode_text(f"{param}.{name}", fields.get(name)) for name in ("name", "call_id")
    )
    conversation.add_call(
        name, call_id, read_arguments(f"{param}.arguments", fields.get("arguments"))
    )


def add_custom_call(
    conversation: Conversation, param: str, fields: dict[str, Any], _: str | None
) -> None:
    name, call_id, text = (
        unicode_text(f"{param}.{name}", fields.get(name)) for name in ("name", "call_id", "input")
    )
    conversation.add_call(name, call_id, {INPUT: text})


def add_compaction(
    conversation: Conversation, param: str, fields: dict[str, Any], _: str | None
) -> None:
    """Add a summary, joined with the user messages before it: templates expect turns."""
    text = f"{SUMMARY_HEADING}\n{decode_summary(f'{param}.encrypted_content', fields.get('encrypted_content'))}"
    while conversation.role == "user":
        text = f"{joined_texts(conversation.messages.pop()['content'])}\n\n{text}"
    conversation.add_message("user", text)


def decode_summary(param: str, value: Any) -> str:
    """Decode a summary by /v1/responses/compact (base64, not encrypted)."""
    try:
        return base64.b64decode(unicode_text(param, value), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            param, f"must be what /v1/responses/compact gave, got {shown(value)}"
        ) from None


def add_output(
    conversation: Conversation, param: str, fields: dict[str, Any], _: str | None
) -> None:
    content = parse_content(f"{param}.output", fields.get("output"), PARTS)
    conversation.add_result(f"{param}.call_id", fields.get("call_id"), content)


ADD = {
    "message": add_message,
    "reasoning": add_reasoning,
    "function_call": add_call,
    "function_call_output": add_output,
    "custom_tool_call": add_custom_call,
    "custom_tool_call_output": add_output,
    "compaction": add_compaction,
}


def parse_truncation(fields: Mapping[str, Any]) -> bool:
    """Whether the oldest turns may be dropped if not all fit."""
    value = fields.get("truncation", "disabled")
    if value not in ("auto", "disabled"):
        raise RequestError("truncation", f"must be auto or disabled, got {shown(value)}")
    return value == "auto"


def parse_format(text: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `text.format` to the sampling parameter `structured_outputs`."""
    form = parse_typed_object("text.format", text.get("format", {"type": "text"}), FORMATS)
    return parse_text_format("text.format", form["type"], fields, "text.format", form)


def parse_logprobs(fields: Mapping[str, Any]) -> int | None:
    """The number of alternatives per token with log-probabilities; None: no log-probabilities."""
    count = SAMPLING["logprobs"].rule.check("top_logprobs", fields.get("top_logprobs", 0))
    included = parse_list("include", fields.get("include", []), MAX_MESSAGES)
    for i, name in enumerate(included):
        if name not in INCLUDED:
            raise RequestError(
                f"include[{i}]", f"must be {' or '.join(INCLUDED)}, got {shown(name)}"
            )
    if LOGPROBS in included:
        return count
    if count:
        raise RequestError("top_logprobs", f"needs {LOGPROBS} in include, got {count}")
    return None


def parse_effort(value: Any) -> dict[str, Any]:
    """The reasoning effort, as variables of the chat template."""
    fields = parse_object("reasoning", value, ("effort", *REASONING))
    for name, supported in REASONING.items():
        if fields.get(name, supported) != supported:
            raise RequestError(
                f"reasoning.{name}", f"must be {supported!r} or null, got {shown(fields[name])}"
            )
    effort = fields.get("effort")
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise RequestError(
            "reasoning.effort", f"must be one of {', '.join(EFFORTS)}, got {shown(effort)}"
        )
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
