"""Anthropic's /v1/messages and /v1/messages/count_tokens: a body to a request."""

from collections.abc import Mapping
from typing import Any

from ..api.errors import RequestError
from ..api.params import SAMPLING
from ..api.validation import INT32_MAX, boolean, integer, shown, strings, unicode_text
from .answers.answer import ChatRequest
from .chat import MAX_MESSAGES
from .context import parse_edits
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
)
from .objects import listed, message_of, plain, texts, typed
from .tools import MAX_TOOLS, choice_of, parse_function, strict_names

OWN_SAMPLING = sampling_fields("messages")
# What is computed for a prompt is found again without being asked for, so cache_control labels like the others.
LABELS = ("metadata", "service_tier", "user_profile_id", "workspace_id", "cache_control")
COUNTED = (  # fields that say something of the prompt
    "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "add_generation_prompt",
    "continue_final_message", "chat_template", "chat_template_kwargs", "context_management", *TRUNCATION, *LABELS,
)  # fmt: skip
FIELDS = (*COUNTED, "stop_sequences", "stream", "request_id", *OWN_SAMPLING, *TERMS)
NEUTRAL = {"mcp_servers": [], "n": 1, "echo": False, "return_token_ids": False, "speed": "standard"}
REFUSED = {
    **dict.fromkeys(("container", "diagnostics", "inference_geo"), ABSENT),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "top_logprobs"), ABSENT),
    "max_completion_tokens": "is max_tokens here",
    "reasoning_effort": "is output_config.effort here",
    "response_format": "is output_config.format here",
    "stop": "is stop_sequences here",
}
TEXT = {"text": ("text", "citations", "cache_control")}
BLOCKS = {
    "user": {**TEXT, "tool_result": ("tool_use_id", "content", "is_error", "cache_control")},
    "assistant": {
        **TEXT,
        "thinking": ("thinking", "signature"),
        "tool_use": ("id", "name", "input", "caller", "cache_control"),
    },
    "system": TEXT,
}
TOOL = ("type", "name", "description", "input_schema", "strict", "eager_input_streaming", "cache_control")
CHOICES = {  # with the name that it has in a request
    "auto": ("disable_parallel_tool_use",),
    "any": ("disable_parallel_tool_use",),
    "tool": ("name", "disable_parallel_tool_use"),
    "none": (),
}
THINKING = {"enabled": ("budget_tokens", "display"), "adaptive": ("display",), "disabled": ()}
EFFORTS = ("low", "medium", "high", "xhigh", "max")


def parse(body: Any) -> ChatRequest:
    """The request in a body of /v1/messages."""
    given = known_fields(body, FIELDS, NEUTRAL, REFUSED)
    own = {name: given[name] for name in OWN_SAMPLING if name in given}
    own["max_tokens"] = SAMPLING["max_tokens"].rule.check("max_tokens", given.get("max_tokens"))
    own["stop"] = strings("stop_sequences", given.get("stop_sequences", ()))
    return request_of(given, own)


def parse_count(body: Any) -> ChatRequest:
    """The request in a body of /v1/messages/count_tokens, of which only the prompt is wanted."""
    return request_of(known_fields(body, COUNTED, NEUTRAL, REFUSED), {})


def request_of(given: dict[str, Any], own: dict[str, Any]) -> ChatRequest:
    config = plain("output_config", given.get("output_config", {}), ("effort", "format"))
    tools = parse_tools(given.get("tools", []))
    choice, parallel = parse_choice(given.get("tool_choice", {"type": "auto"}), tools)
    ignored: set[str] = set()
    messages = parse_messages(given.get("system"), given.get("messages"), ignored)
    last = messages[-1]
    if last["role"] == "assistant" and last["content"].strip() and "add_generation_prompt" not in given:
        given.setdefault("continue_final_message", True)  # what is said so far goes on
    return ChatRequest(
        messages=messages,
        ignored=tuple(sorted(ignored)),
        **sampling_of(own | form_of_text(parse_format(config.get("format"), given), choice)),
        template_options=parse_thinking(given.get("thinking"))
        | parse_effort(config.get("effort"))
        | template_options(given),
        tools=tools,
        strict=strict_names(given.get("tools")),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        edits=parse_edits(given.get("context_management")),
        **common_fields(given),
    )


def parse_messages(system: Any, value: Any, ignored: set[str]) -> list[dict[str, Any]]:
    """The messages that the turns stand for; turns of one side without a break are one."""
    talk = Conversation()
    if system is not None:
        talk.say("system", texts("system", system, TEXT, MAX_MESSAGES))
    for i, message in enumerate(listed("messages", value, MAX_MESSAGES, least=1)):
        where = f"messages[{i}]"
        given = message_of(where, message, ("role", "content"), ignored)
        role = given.get("role")
        if not isinstance(role, str) or role not in BLOCKS:
            raise RequestError(f"{where}.role", f"must be one of {', '.join(BLOCKS)}, got {shown(role)}")
        add_turn(talk, f"{where}.content", role, given.get("content"))
    if "tool_calls" in talk.messages[-1]:
        raise RequestError(f"messages[{len(value) - 1}].content", "has a tool_use and no tool_result comes after it")
    return talk.messages


def add_turn(talk: Conversation, where: str, role: str, content: Any) -> None:
    if role == "system":
        talk.say("system", texts(where, content, TEXT, MAX_MESSAGES))
        return
    if role == "assistant":
        talk.turn()  # also where nothing was said
    if not isinstance(content, list):
        content = [{"type": "text", "text": unicode_text(where, content)}]
    for i, value in enumerate(listed(where, content, MAX_MESSAGES, least=int(role == "user"))):
        block = typed(f"{where}[{i}]", value, BLOCKS[role])
        add_block(talk, f"{where}[{i}]", role, block)


def add_block(talk: Conversation, where: str, role: str, block: dict[str, Any]) -> None:
    kind = block["type"]
    if kind == "tool_use":
        call_id, name = (unicode_text(f"{where}.{name}", block.get(name)) for name in ("id", "name"))
        talk.call(name, call_id, plain_input(f"{where}.input", block.get("input")))
    elif kind == "tool_result":
        text = texts(f"{where}.content", block.get("content", ""), TEXT, MAX_MESSAGES)
        failed = boolean(f"{where}.is_error", block.get("is_error", False))  # templates have no other place for it
        talk.result(f"{where}.tool_use_id", block.get("tool_use_id"), f"Error: {text}" if failed else text)
    elif kind == "thinking":
        talk.think(unicode_text(f"{where}.thinking", block.get("thinking")))
    else:
        text = unicode_text(f"{where}.text", block.get("text"))
        if role == "assistant":
            talk.turn()["content"] += text
        elif talk.role == "user":
            talk.messages[-1]["content"] += f"\n{text}"
        else:
            talk.say("user", text)


def plain_input(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(where, f"must be a JSON object, got {shown(value)}")
    return value


def parse_tools(value: Any) -> list[dict[str, Any]]:
    found = []
    for i, tool in enumerate(listed("tools", value, MAX_TOOLS)):
        where = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in (None, "custom"):
            raise RequestError(f"{where}.type", f"must be 'custom' or null, the server has no tools, got {shown(kind)}")
        given = plain(where, tool, TOOL)
        schema = plain_input(f"{where}.input_schema", given.get("input_schema"))
        function = {"name": given.get("name"), "description": given.get("description"), "parameters": schema}
        found.append({"type": "function", "function": parse_function(where, function)})
    return found


def parse_choice(value: Any, tools: list[dict[str, Any]]) -> tuple[str, bool]:
    """The tool choice, and whether several calls may come at once."""
    given = typed("tool_choice", value, CHOICES)
    alone = boolean("tool_choice.disable_parallel_tool_use", given.get("disable_parallel_tool_use", False))
    if given["type"] == "tool":
        return choice_of(given.get("name"), "tool_choice.name", tools), not alone
    if given["type"] == "any" and not tools:
        raise RequestError("tool_choice.type", "is 'any' and tools are missing")
    return {"any": "required"}.get(given["type"], given["type"]), not alone


def parse_thinking(value: Any) -> dict[str, Any]:
    """Whether and how long to think, as variables of the chat template, which says it to the model."""
    if value is None:
        return {}
    given = typed("thinking", value, THINKING)
    if given.get("display", "summarized") != "summarized":
        raise RequestError("thinking.display", f"must be 'summarized' or null, got {shown(given['display'])}")
    if given["type"] == "adaptive":
        return {}
    found: dict[str, Any] = {"enable_thinking": given["type"] == "enabled"}
    if "budget_tokens" in given:
        found["thinking_budget"] = integer("thinking.budget_tokens", given["budget_tokens"], 1, INT32_MAX)
    return found


def parse_effort(effort: Any) -> dict[str, Any]:
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise RequestError("output_config.effort", f"must be one of {', '.join(EFFORTS)}, got {shown(effort)}")
    return {"reasoning_effort": effort}


def parse_format(value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The form of the text as the sampling parameter that it stands for."""
    if value is None:
        return {}
    form = typed("output_config.format", value, {"json_schema": ("schema",)})
    return structured("output_config.format", form["type"], given, "output_config.format", form)
