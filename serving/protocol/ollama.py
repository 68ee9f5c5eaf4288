"""Parsing of Ollama's /api/chat, /api/generate, /api/embed and /api/embeddings.

Sampling parameters that a request leaves out have the model's defaults, or else llama.cpp's.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..api.content import Content, parts_of
from ..api.errors import RequestError
from ..api.validation import shown
from .answers.answer import Delivery, OllamaRequest
from .chat import parse_call
from .cohere import EmbedRequest
from .fields import parse_sampling
from .objects import keep_known_fields
from .ollama_fields import (
    CHAT,
    EMBED,
    EMBEDDINGS,
    GENERATE,
    MESSAGE,
    PULL,
    SHOW,
    parse_model_name,
    read_fields,
)
from .tools import parse_tools, strict_functions


@dataclass(frozen=True)
class OllamaEmbed(EmbedRequest):
    """Texts to embed; with `single`, the response has one vector instead of a list."""

    single: bool = False
    called: str = ""
    began: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True)
class OllamaNamed:
    """A request about a model."""

    model: str
    stream: bool = True


def parse_chat(body: Any) -> OllamaRequest:
    """Parse a body of /api/chat."""
    fields = read_fields(body, CHAT)
    ignored: set[str] = set()
    messages = parse_messages(fields.get("messages", []), ignored)
    typed_tools = [
        parse_tool(f"tools[{i}]", tool) for i, tool in enumerate(fields.get("tools", []))
    ]
    tools, _ = parse_tools(typed_tools, nested=True)
    return make_request(
        fields,
        messages,
        tools=tools,
        strict=strict_functions(typed_tools),
        ignored=tuple(sorted(ignored)),
    )


def parse_generate(body: Any) -> OllamaRequest:
    """Parse a body of /api/generate."""
    fields = read_fields(body, GENERATE)
    prompt, suffix, system = (fields.get(name, "") for name in ("prompt", "suffix", "system"))
    for name in ("raw", "suffix"):
        for excluded in ("system", "context", "think"):
            if fields.get(name) and is_requested(fields, excluded):
                raise RequestError(
                    excluded, f"has no place with {name}, which leaves the chat template out"
                )
    messages = [{"role": "system", "content": system}] if system else []
    images = fields.get("images", ())
    for name in ("raw", "suffix", "context"):
        if images and fields.get(name):
            raise RequestError("images", f"have no place with {name}; leave one of them out")
    messages.append({"role": "user", "content": with_images(prompt, images)})
    return make_request(
        fields,
        messages,
        prompt=prompt,
        suffix=suffix,
        raw=fields.get("raw", False),
        context=fields.get("context", ()),
    )


def with_images(text: str, images: Sequence[dict[str, Any]]) -> Content:
    """A message's images and, after them, its text."""
    return [*images, *parts_of(text)] if images else text


def is_requested(fields: Mapping[str, Any], name: str) -> bool:
    """Whether a field is given and has an effect."""
    return bool(
        fields["think"]["thinking"] if name == "think" and name in fields else fields.get(name)
    )


def make_request(
    fields: Mapping[str, Any], messages: list[dict[str, Any]], **request_fields: Any
) -> OllamaRequest:
    """Make a request of the common fields of /api/chat and /api/generate."""
    sampling = fields.get("options", {}) | fields.get("format", {})
    if fields.get("logprobs", False):
        sampling["logprobs"] = fields.get("top_logprobs", 0)
    elif fields.get("top_logprobs"):
        raise RequestError(
            "top_logprobs", f"needs logprobs to be true, got {fields['top_logprobs']}"
        )
    sampling_fields = parse_sampling({"max_tokens": None, **sampling})
    if "max_tokens" in sampling:  # also if it is unlimited
        sampling_fields["explicit_params"] |= {"max_tokens"}
    template = fields.get("think", {})
    last = messages[-1] if messages else {}
    continues_message = (
        last.get("role") == "assistant"
        and "tool_calls" not in last
        and bool(last["content"].strip())
    )
    return OllamaRequest(
        model=parse_model(fields),
        called=fields["model"],
        messages=messages,
        **sampling_fields,
        template_options=template
        | {"add_generation_prompt": not continues_message}
        | ({"continue_final_message": True} if continues_message else {}),
        delivery=Delivery(stream=fields.get("stream", True)),
        drops_oldest=fields.get("truncate", True),
        thinks=is_requested(fields, "think"),
        unloads=fields.get("keep_alive", False),
        **request_fields,
    )


def parse_model(fields: Mapping[str, Any]) -> str:
    """The model's name, from `model` or the older field `name`."""
    name = fields.get("model")
    old_name = fields.get("name")
    if name and old_name and name != old_name:
        raise RequestError(
            "name",
            f"is the old name of model, and they differ; leave it out, got {shown(old_name)}",
        )
    return parse_model_name("model", name or old_name)


def parse_tool(param: str, value: Any) -> Any:
    """A tool in OpenAI's form; Ollama's clients may omit its type."""
    if not isinstance(value, Mapping):
        raise RequestError(param, f"must be an object with function, got {shown(value)}")
    fields = {name: field for name, field in value.items() if field is not None}
    if fields.get("type", "function") != "function":
        raise RequestError(
            f"{param}.type", f"must be 'function' or null, got {shown(fields['type'])}"
        )
    return fields | {"type": "function"}


def parse_messages(value: Sequence[Any], ignored: set[str]) -> list[dict[str, Any]]:
    """Messages for the chat template.

    Ollama's calls have no ids, so a result belongs to the first call without a result.
    """
    messages: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # name and id
    for i, message in enumerate(value):
        param = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                param, f"must be an object with role and content, got {shown(message)}"
            )
        known_fields = keep_known_fields(
            param,
            {name: field for name, field in message.items() if field is not None},
            list(MESSAGE),
            ignored,
        )
        fields = {
            name: MESSAGE[name].check(f"{param}.{name}", field)
            for name, field in known_fields.items()
        }
        role = MESSAGE["role"].check(f"{param}.role", fields.get("role"))
        content = fields.get("content", "")
        if role in ("user", "tool"):
            content = with_images(content, fields.get("images", ()))
        elif fields.get("images"):
            raise RequestError(f"{param}.images", "belong to messages of the roles user and tool")
        parsed: dict[str, Any] = {"role": role, "content": content}
        if "thinking" in fields:
            parsed["reasoning_content"] = fields["thinking"]
        if fields.get("tool_calls"):
            parsed["tool_calls"] = parse_calls(
                f"{param}.tool_calls", fields["tool_calls"], len(messages), ignored
            )
            open_calls += [(call["function"]["name"], call["id"]) for call in parsed["tool_calls"]]
        if role == "tool":
            parsed |= match_result(fields, open_calls)
        messages.append(parsed)
    return messages


def parse_calls(
    param: str, value: Sequence[Any], message_index: int, ignored: set[str]
) -> list[dict[str, Any]]:
    calls = []
    for i, call in enumerate(value):
        function_fields = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function_fields, Mapping):
            expected = "must be an object with function, which has name and arguments"
            raise RequestError(f"{param}[{i}]", f"{expected}, got {shown(call)}")
        function = {
            name: value
            for name, value in function_fields.items()
            if name != "index" and value is not None
        }
        typed_call = {**call, "type": "function", "function": function}
        calls.append(
            {"id": f"c{message_index:04d}{i:04d}"}
            | parse_call(f"{param}[{i}]", typed_call, ignored)
        )
    return calls


def match_result(fields: Mapping[str, Any], open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Match a result to an open call: by the id, by the tool's name, or else to the first one."""
    name = fields.get("tool_name", fields.get("name"))
    call_id = fields.get("tool_call_id")
    if call_id is not None:
        open_calls[:] = [call for call in open_calls if call[1] != call_id]
    elif call := next((call for call in open_calls if name in (None, call[0])), None):
        open_calls.remove(call)
        name, call_id = call
    return {
        key: value
        for key, value in (("name", name), ("tool_call_id", call_id))
        if value is not None
    }


def parse_embed(body: Any) -> OllamaEmbed:
    """Parse a body of /api/embed."""
    fields = read_fields(body, EMBED)
    dimensions = fields.get("dimensions") or None  # 0 is the model's own
    truncate = "END" if fields.get("truncate", True) else "NONE"
    return make_embed_request(
        fields, fields.get("input", []), dimensions=dimensions, truncate=truncate
    )


def parse_embeddings(body: Any) -> OllamaEmbed:
    """Parse a body of /api/embeddings, the older form for one text."""
    fields = read_fields(body, EMBEDDINGS)
    return make_embed_request(
        fields, [fields["prompt"]] if fields.get("prompt") else [], single=True
    )


def make_embed_request(
    fields: Mapping[str, Any], texts: list[str], **request_fields: Any
) -> OllamaEmbed:
    return OllamaEmbed(texts, parse_model(fields), called=fields["model"], **request_fields)


def parse_show(body: Any) -> OllamaNamed:
    """Parse a body of /api/show."""
    return OllamaNamed(parse_model(read_fields(body, SHOW)))


def parse_pull(body: Any) -> OllamaNamed:
    """Parse a body of /api/pull."""
    fields = read_fields(body, PULL)
    return OllamaNamed(parse_model(fields), fields.get("stream", True))
