"""Parsing of Anthropic's /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Mapping
from typing import Any

from ..api.content import text_part
from ..api.errors import RequestError
from ..api.params import SAMPLING
from ..api.validation import INT32_MAX, boolean, integer, shown, strings, unicode_text
from .answers.answer import ChatRequest
from .chat import MAX_MESSAGES
from .context import parse_edits
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
    sampling_fields,
    template_options,
)
from .media import join_parts, parse_image_block
from .objects import join_texts, parse_list, parse_message_fields, parse_object, parse_typed_object
from .tools import MAX_TOOLS, function_choice, parse_function, strict_functions

SAMPLING_FIELDS = sampling_fields("messages")
# Fields without effect; prefix caching is automatic, so cache_control is one of them.
LABELS = ("metadata", "service_tier", "user_profile_id", "workspace_id", "cache_control")
COUNT_FIELDS = (  # fields that concern the prompt
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "context_management",
    *TRUNCATION,
    *LABELS,
)
FIELDS = (
    *COUNT_FIELDS,
    "stop_sequences",
    "stream",
    "request_id",
    *SAMPLING_FIELDS,
    *REQUEST_OPTIONS,
)
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
IMAGE = {"image": ("source", "cache_control")}
BLOCKS = {
    "user": {
        **TEXT,
        "tool_result": ("tool_use_id", "content", "is_error", "cache_control"),
        **IMAGE,
    },
    "assistant": {
        **TEXT,
        "thinking": ("thinking", "signature"),
        "tool_use": ("id", "name", "input", "caller", "cache_control"),
    },
    "system": TEXT,
}
TOOL = (
    "type",
    "name",
    "description",
    "input_schema",
    "strict",
    "eager_input_streaming",
    "cache_control",
)
CHOICES = {  # the fields of each type of `tool_choice`
    "auto": ("disable_parallel_tool_use",),
    "any": ("disable_parallel_tool_use",),
    "tool": ("name", "disable_parallel_tool_use"),
    "none": (),
}
THINKING = {"enabled": ("budget_tokens", "display"), "adaptive": ("display",), "disabled": ()}
EFFORTS = ("low", "medium", "high", "xhigh", "max")


def parse(body: Any) -> ChatRequest:
    """Parse a body of /v1/messages."""
    fields = known_fields(body, FIELDS, NEUTRAL, REFUSED)
    sampling_values = {name: fields[name] for name in SAMPLING_FIELDS if name in fields}
    sampling_values["max_tokens"] = SAMPLING["max_tokens"].rule.check(
        "max_tokens", fields.get("max_tokens")
    )
    sampling_values["stop"] = strings("stop_sequences", fields.get("stop_sequences", ()))
    return make_request(fields, sampling_values)


def parse_count(body: Any) -> ChatRequest:
    """Parse a body of /v1/messages/count_tokens."""
    return make_request(known_fields(body, COUNT_FIELDS, NEUTRAL, REFUSED), {})


def make_request(fields: dict[str, Any], sampling_values: dict[str, Any]) -> ChatRequest:
    config = parse_object("output_config", fields.get("output_config", {}), ("effort", "format"))
    tools = parse_tools(fields.get("tools", []))
    choice, allows_parallel = parse_choice(fields.get("tool_choice", {"type": "auto"}), tools)
    ignored: set[str] = set()
    messages = parse_messages(fields.get("system"), fields.get("messages"), ignored)
    last = messages[-1]
    if (
        last["role"] == "assistant"
        and last["content"].strip()
        and "add_generation_prompt" not in fields
    ):
        fields.setdefault("continue_final_message", True)  # the answer continues the last message
    return ChatRequest(
        messages=messages,
        ignored=tuple(sorted(ignored)),
        **parse_sampling(
            sampling_values | answer_grammar(parse_format(config.get("format"), fields), choice)
        ),
        template_options=parse_thinking(fields.get("thinking"))
        | parse_effort(config.get("effort"))
        | template_options(fields),
        tools=tools,
        strict=strict_functions(fields.get("tools")),
        tool_choice=choice,
        parallel_tool_calls=allows_parallel,
        edits=parse_edits(fields.get("context_management")),
        **parse_common_fields(fields),
    )


def parse_messages(system: Any, value: Any, ignored: set[str]) -> list[dict[str, Any]]:
    """The messages of a conversation; consecutive messages of one role are joined."""
    conversation = Conversation()
    if system is not None:
        conversation.add_message("system", join_texts("system", system, TEXT, MAX_MESSAGES))
    for i, message in enumerate(parse_list("messages", value, MAX_MESSAGES, minimum=1)):
        param = f"messages[{i}]"
        fields = parse_message_fields(param, message, ("role", "content"), ignored)
        role = fields.get("role")
        if not isinstance(role, str) or role not in BLOCKS:
            raise RequestError(
                f"{param}.role", f"must be one of {', '.join(BLOCKS)}, got {shown(role)}"
            )
        add_turn(conversation, f"{param}.content", role, fields.get("content"))
    if "tool_calls" in conversation.messages[-1]:
        raise RequestError(
            f"messages[{len(value) - 1}].content",
            "has a tool_use and no tool_result comes after it",
        )
    return conversation.messages


def add_turn(conversation: Conversation, param: str, role: str, content: Any) -> None:
    if role == "system":
        conversation.add_message("system", join_texts(param, content, TEXT, MAX_MESSAGES))
        return
    if role == "assistant":
        conversation.assistant_message()  # also for empty content
    if not isinstance(content, list):
        content = [{"type": "text", "text": unicode_text(param, content)}]
    for i, value in enumerate(
        parse_list(param, content, MAX_MESSAGES, minimum=int(role == "user"))
    ):
        block = parse_typed_object(f"{param}[{i}]", value, BLOCKS[role])
        add_block(conversation, f"{param}[{i}]", role, block)


def add_block(conversation: Conversation, param: str, role: str, block: dict[str, Any]) -> None:
    kind = block["type"]
    if kind == "tool_use":
        call_id, name = (
            unicode_text(f"{param}.{name}", block.get(name)) for name in ("id", "name")
        )
        conversation.add_call(name, call_id, require_object(f"{param}.input", block.get("input")))
    elif kind == "tool_result":
        content = join_parts(
            f"{param}.content",
            block.get("content", ""),
            TEXT | IMAGE,
            MAX_MESSAGES,
            "image",
            parse_image_block,
        )
        # Chat templates have no field for it.
        if boolean(f"{param}.is_error", block.get("is_error", False)):
            content = (
                f"Error: {content}" if isinstance(content, str) else [text_part("Error:"), *content]
            )
        conversation.add_result(f"{param}.tool_use_id", block.get("tool_use_id"), content)
    elif kind == "image":
        conversation.add_user_part(parse_image_block(param, block))
    elif kind == "thinking":
        conversation.add_reasoning(unicode_text(f"{param}.thinking", block.get("thinking")))
    else:
        text = unicode_text(f"{param}.text", block.get("text"))
        if role == "assistant":
            conversation.assistant_message()["content"] += text
        else:
            conversation.add_user_part(text_part(text))


def require_object(param: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(param, f"must be a JSON object, got {shown(value)}")
    return value


def parse_tools(value: Any) -> list[dict[str, Any]]:
    tools = []
    for i, tool in enumerate(parse_list("tools", value, MAX_TOOLS)):
        param = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in (None, "custom"):
            raise RequestError(
                f"{param}.type",
                f"must be 'custom' or null, the server has no tools, got {shown(kind)}",
            )
        fields = parse_object(param, tool, TOOL)
        schema = require_object(f"{param}.input_schema", fields.get("input_schema"))
        function = {
            "name": fields.get("name"),
            "description": fields.get("description"),
            "parameters": schema,
        }
        tools.append({"type": "function", "function": parse_function(param, function)})
    return tools


def parse_choice(value: Any, tools: list[dict[str, Any]]) -> tuple[str, bool]:
    """The tool choice, and whether an answer may have several calls."""
    fields = parse_typed_object("tool_choice", value, CHOICES)
    one_call = boolean(
        "tool_choice.disable_parallel_tool_use", fields.get("disable_parallel_tool_use", False)
    )
    if fields["type"] == "tool":
        return function_choice(fields.get("name"), "tool_choice.name", tools), not one_call
    if fields["type"] == "any" and not tools:
        raise RequestError("tool_choice.type", "is 'any' and tools are missing")
    return {"any": "required"}.get(fields["type"], fields["type"]), not one_call


def parse_thinking(value: Any) -> dict[str, Any]:
    """The thinking mode and budget, as variables of the chat template."""
    if value is None:
        return {}
    fields = parse_typed_object("thinking", value, THINKING)
    if fields.get("display", "summarized") != "summarized":
        raise RequestError(
            "thinking.display", f"must be 'summarized' or null, got {shown(fields['display'])}"
        )
    if fields["type"] == "adaptive":
        return {}
    variables: dict[str, Any] = {"enable_thinking": fields["type"] == "enabled"}
    if "budget_tokens" in fields:
        variables["thinking_budget"] = integer(
            "thinking.budget_tokens", fields["budget_tokens"], 1, INT32_MAX
        )
    return variables


def parse_effort(effort: Any) -> dict[str, Any]:
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise RequestError(
            "output_config.effort", f"must be one of {', '.join(EFFORTS)}, got {shown(effort)}"
        )
    return {"reasoning_effort": effort}


def parse_format(value: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `output_config.format` to the sampling parameter `structured_outputs`."""
    if value is None:
        return {}
    form = parse_typed_object("output_config.format", value, {"json_schema": ("schema",)})
    return parse_text_format(
        "output_config.format", form["type"], fields, "output_config.format", form
    )
