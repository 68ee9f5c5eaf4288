"""OpenAI's /v1/responses: a body to a request."""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..api.errors import RequestError
from ..api.params import SAMPLING
from ..api.validation import boolean, shown, unicode_text
from . import fields
from .answers.answer import ResponsesRequest
from .chat import MAX_MESSAGES, read_arguments
from .conversation import Conversation
from .fields import (
    ABSENT,
    TERMS,
    TRUNCATION,
    common_fields,
    form_of_text,
    known_fields,
    sampling_fields,
    sampling_of,
    structured,
    template_options,
    verbosity_of,
)
from .objects import listed, message_of, plain, texts, typed
from .tools import INPUT, parse_choice, parse_tools, strict_names

OWN_SAMPLING = sampling_fields("responses")
LABELS = tuple(name for name in fields.LABELS if name != "store")  # here it is more than a label
RAW = "enable_response_messages"
FIELDS = (
    "model", "input", "instructions", "max_output_tokens", "top_logprobs", "include", "stream", "request_id", "tools",
    "tool_choice", "parallel_tool_calls", "text", "reasoning", "truncation", "add_generation_prompt",
    "continue_final_message", "chat_template", "chat_template_kwargs", "store", "background", "previous_response_id",
    "conversation", RAW, *TRUNCATION, *OWN_SAMPLING, *TERMS, *LABELS,
)  # fmt: skip
COUNTED = (  # fields that say something of the prompt
    "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "truncation",
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
    "previous_response_id", "conversation", *TRUNCATION,
)  # fmt: skip
COMPACTED = ("model", "input", "instructions", "previous_response_id", "prompt_cache_key", "service_tier")
NEUTRAL = {  # fields that are not implemented, with the value that asks for nothing
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
# By a name and the field that has it: the items of a conversation, or those that led to a response, and its own.
History = Callable[[str, str], list[dict[str, Any]]]
SHORTLY = (
    "Write a summary of this conversation for somebody who has to go on with it and has not seen it: what is wanted, "
    "what was found and decided, what is open. Write the summary and nothing else."
)
BEFORE = "(What was said before, in short:)"
LOGPROBS = "message.output_text.logprobs"
# Thoughts are part of the answer as they are, and can be sent back so: there is nothing to encrypt.
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
REASONING = {"summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "standard"}  # all that there is
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
PARTS = {"input_text": ("text",), "output_text": ("text", "annotations", "logprobs"), "refusal": ("refusal",)}
FORMATS = {"text": (), "json_object": (), "json_schema": ("name", "description", "schema", "strict")}


def parse_count(body: Any, history: History | None = None) -> ResponsesRequest:
    """The request in a body of /v1/responses/input_tokens, of which only the prompt is wanted."""
    return parse(known_fields(body, COUNTED, NEUTRAL, REFUSED), history)


def parse_compact(body: Any, history: History | None = None) -> ResponsesRequest:
    """The request in a body of /v1/responses/compact: what was said, which the model is to say in short."""
    return parse(known_fields(body, COMPACTED, NEUTRAL, REFUSED), history)


def in_short(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation whose last turn asks for its summary."""
    *before, last = messages
    if last["role"] != "user":
        return [*messages, {"role": "user", "content": SHORTLY}]
    return [*before, last | {"content": f"{last['content']}\n\n({SHORTLY})"}]


def parse(body: Any, history: History | None = None) -> ResponsesRequest:
    """The request in a body; `history` gives the items that led to a stored response, and its own."""
    given = known_fields(body, FIELDS, NEUTRAL, REFUSED)
    text = plain("text", given.get("text", {}), ("format", "verbosity"))
    tools, custom = parse_tools(given.get("tools", []), nested=False)
    tools, choice = parse_choice(given.get("tool_choice"), tools, nested=False)
    own = {name: given[name] for name in OWN_SAMPLING if name in given} | form_of_text(
        parse_format(text, given), choice
    )
    own["max_tokens"] = given.get("max_output_tokens")  # not given: up to the model's length
    if own["max_tokens"] is not None:
        SAMPLING["max_tokens"].rule.check("max_output_tokens", own["max_tokens"])
    own["logprobs"] = parse_logprobs(given)
    told = parse_effort(given.get("reasoning", {}))
    if "verbosity" in text:
        told |= verbosity_of("text.verbosity", text["verbosity"])
    ignored: set[str] = set()
    previous, talk = given.get("previous_response_id"), conversation_of(given.get("conversation"))
    if previous is not None and talk is not None:
        raise RequestError("conversation", "and previous_response_id both say what was before; leave one of them out")
    before: list[dict[str, Any]] = []
    for name, value in (("previous_response_id", previous), ("conversation", talk)):
        if value is not None:
            unicode_text(name, value)
            if history is None:
                raise RequestError(name, "goes on from what is stored, and there is nothing here")
            before = history(value, name)
    store, background, common = keeping(given, common_fields(given))
    return ResponsesRequest(
        messages=parse_input(given.get("instructions"), given.get("input"), ignored, before),
        store=store,
        background=background,
        previous_response_id=previous,
        conversation=talk,
        ignored=tuple(sorted(ignored)),
        **sampling_of(own),
        template_options=told | template_options(given),
        tools=tools,
        custom=custom,
        strict=strict_names(given.get("tools")),
        tool_choice=choice,
        drops_oldest=drops_oldest(given),
        shows_raw=boolean(RAW, given.get(RAW, False)),
        parallel_tool_calls=boolean("parallel_tool_calls", given.get("parallel_tool_calls", True)),
        **common,
    )


def conversation_of(value: Any) -> Any:
    """The name of a conversation, given as it is or in an object."""
    return plain("conversation", value, ("id",)).get("id") if isinstance(value, Mapping) else value


def keeping(given: Mapping[str, Any], common: dict[str, Any]) -> tuple[bool, bool, dict[str, Any]]:
    """Whether the answer is kept, and whether the client waits for it."""
    store, background = (boolean(name, given.get(name, default)) for name, default in
                         (("store", True), ("background", False)))  # fmt: skip
    if background and not store:
        raise RequestError("background", "can only be used when store is true: the answer is asked for later")
    return store, background, common


def items_of(value: Any) -> list[dict[str, Any]]:
    """The input as items, as they are kept; a request that only goes on from earlier ones has none."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    return [{"type": "message", **item} if item.get("type") is None else dict(item) for item in value]


def parse_input(
    instructions: Any, value: Any, ignored: set[str], before: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The messages that instructions and items stand for; `before` are those of the responses before."""
    talk = Conversation()
    if instructions is not None:
        talk.say("system", unicode_text("instructions", instructions))
    add_items(talk, "previous_response_id", before, set())
    if isinstance(value, str):
        talk.say("user", unicode_text("input", value))
    elif value is not None or not before:
        if not isinstance(value, list):
            raise RequestError("input", f"must be text or a list of items, got {shown(value)}")
        add_items(talk, "input", listed("input", value, MAX_MESSAGES, least=1), ignored)
    return talk.messages


def add_items(talk: Conversation, name: str, items: Sequence[Any], ignored: set[str]) -> None:
    """What items add to a conversation."""
    before = None  # the type of the item before
    for i, item in enumerate(items):
        where = f"{name}[{i}]"
        if isinstance(item, Mapping) and "role" in item and item.get("type") is None:
            item = {**item, "type": "message"}
        if isinstance(item, Mapping) and item.get("type") == "message":
            item = message_of(where, item, ("type", *ITEMS["message"]), ignored)
        given = typed(where, item, ITEMS)
        ADD[given["type"]](talk, where, given, before)
        before = given["type"]


def add_message(talk: Conversation, where: str, given: dict[str, Any], before: str | None) -> None:
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    text = texts(f"{where}.content", given.get("content"), PARTS, MAX_MESSAGES)
    if role != "assistant" or before == "message":  # two messages side by side are two
        talk.say(ROLES[role], text)
    else:
        talk.turn()["content"] += text


def add_reasoning(talk: Conversation, where: str, given: dict[str, Any], _: str | None) -> None:
    """The thoughts themselves, or else what is left of them in the summary."""
    if "encrypted_content" in given:
        raise RequestError(f"{where}.encrypted_content", "cannot be read here; leave it out")
    said = {
        name: texts(f"{where}.{name}", listed(f"{where}.{name}", given[name], MAX_MESSAGES), kind, MAX_MESSAGES)
        for name, kind in (("content", {"reasoning_text": ("text",)}), ("summary", {"summary_text": ("text",)}))
        if name in given
    }
    talk.think(said.get("content") or said.get("summary") or "")


def add_call(talk: Conversation, where: str, given: dict[str, Any], _: str | None) -> None:
    name, call_id = (unicode_text(f"{where}.{name}", given.get(name)) for name in ("name", "call_id"))
    talk.call(name, call_id, read_arguments(f"{where}.arguments", given.get("arguments")))


def add_custom_call(talk: Conversation, where: str, given: dict[str, Any], _: str | None) -> None:
    name, call_id, text = (unicode_text(f"{where}.{name}", given.get(name)) for name in ("name", "call_id", "input"))
    talk.call(name, call_id, {INPUT: text})


def add_compaction(talk: Conversation, where: str, given: dict[str, Any], _: str | None) -> None:
    """What was said before in short, with what users said before it: one message, for templates want turns."""
    text = f"{BEFORE}\n{summary_of(f'{where}.encrypted_content', given.get('encrypted_content'))}"
    while talk.role == "user":
        text = f"{talk.messages.pop()['content']}\n\n{text}"
    talk.say("user", text)


def summary_of(where: str, value: Any) -> str:
    """What /v1/responses/compact wrote; it is packed, and no secret."""
    try:
        return base64.b64decode(unicode_text(where, value), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(where, f"must be what /v1/responses/compact gave, got {shown(value)}") from None


def add_output(talk: Conversation, where: str, given: dict[str, Any], _: str | None) -> None:
    text = texts(f"{where}.output", given.get("output"), PARTS, MAX_MESSAGES)
    talk.result(f"{where}.call_id", given.get("call_id"), text)


ADD = {
    "message": add_message,
    "reasoning": add_reasoning,
    "function_call": add_call,
    "function_call_output": add_output,
    "custom_tool_call": add_custom_call,
    "custom_tool_call_output": add_output,
    "compaction": add_compaction,
}


def drops_oldest(given: Mapping[str, Any]) -> bool:
    """Whether the oldest turns may be left out where not all fit."""
    value = given.get("truncation", "disabled")
    if value not in ("auto", "disabled"):
        raise RequestError("truncation", f"must be auto or disabled, got {shown(value)}")
    return value == "auto"


def parse_format(text: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The form of the text as the sampling parameter that it stands for."""
    form = typed("text.format", text.get("format", {"type": "text"}), FORMATS)
    return structured("text.format", form["type"], given, "text.format", form)


def parse_logprobs(given: Mapping[str, Any]) -> int | None:
    """How many log-probabilities a token are wanted beside its own."""
    count = SAMPLING["logprobs"].rule.check("top_logprobs", given.get("top_logprobs", 0))
    wanted = listed("include", given.get("include", []), MAX_MESSAGES)
    for i, name in enumerate(wanted):
        if name not in INCLUDED:
            raise RequestError(f"include[{i}]", f"must be {' or '.join(INCLUDED)}, got {shown(name)}")
    if LOGPROBS in wanted:
        return count
    if count:
        raise RequestError("top_logprobs", f"needs {LOGPROBS} in include, got {count}")
    return None


def parse_effort(value: Any) -> dict[str, Any]:
    """How much thought is wanted, as variables of the chat template."""
    given = plain("reasoning", value, ("effort", *REASONING))
    for name, only in REASONING.items():
        if given.get(name, only) != only:
            raise RequestError(f"reasoning.{name}", f"must be {only!r} or null, got {shown(given[name])}")
    effort = given.get("effort")
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise RequestError("reasoning.effort", f"must be one of {', '.join(EFFORTS)}, got {shown(effort)}")
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}
