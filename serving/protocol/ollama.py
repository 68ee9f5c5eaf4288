"""Ollama's /api/chat, /api/generate, /api/embed and /api/embeddings: a body to a request.

What a request leaves out is what the model recommends; where it recommends no sampling, llama.cpp's defaults.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..api.errors import RequestError
from ..api.validation import shown
from .answers.answer import Delivery, OllamaRequest
from .chat import parse_call
from .cohere import EmbedRequest
from .fields import sampling_of
from .objects import known_of
from .ollama_fields import CHAT, EMBED, EMBEDDINGS, GENERATE, MESSAGE, PULL, SHOW, name_of, read_fields
from .tools import parse_tools, strict_names


@dataclass(frozen=True)
class OllamaEmbed(EmbedRequest):
    """Texts that are to be vectors; `single` has one answer and no list of them."""

    single: bool = False
    called: str = ""
    began: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True)
class OllamaNamed:
    """A question about a model."""

    model: str
    stream: bool = True


def parse_chat(body: Any) -> OllamaRequest:
    """The request in a body of /api/chat."""
    given = read_fields(body, CHAT)
    ignored: set[str] = set()
    messages = parse_messages(given.get("messages", []), ignored)
    told = [tool_of(f"tools[{i}]", tool) for i, tool in enumerate(given.get("tools", []))]
    tools, _ = parse_tools(told, nested=True)
    return request_of(given, messages, tools=tools, strict=strict_names(told), ignored=tuple(sorted(ignored)))


def parse_generate(body: Any) -> OllamaRequest:
    """The request in a body of /api/generate."""
    given = read_fields(body, GENERATE)
    prompt, suffix, system = (given.get(name, "") for name in ("prompt", "suffix", "system"))
    for name in ("raw", "suffix"):
        for other in ("system", "context", "think"):
            if given.get(name) and asks(given, other):
                raise RequestError(other, f"has no place with {name}, which leaves the chat template out")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return request_of(
        given, messages, prompt=prompt, suffix=suffix, raw=given.get("raw", False), context=given.get("context", ())
    )


def asks(given: Mapping[str, Any], name: str) -> bool:
    """Whether a field is there and asks for something."""
    return bool(given["think"]["thinking"] if name == "think" and name in given else given.get(name))


def request_of(given: Mapping[str, Any], messages: list[dict[str, Any]], **own: Any) -> OllamaRequest:
    """The fields that both have."""
    sampling = given.get("options", {}) | given.get("format", {})
    if given.get("logprobs", False):
        sampling["logprobs"] = given.get("top_logprobs", 0)
    elif given.get("top_logprobs"):
        raise RequestError("top_logprobs", f"needs logprobs to be true, got {given['top_logprobs']}")
    found = sampling_of({"max_tokens": None, **sampling})
    if "max_tokens" in sampling:  # also where it has no limit
        found["given"] |= {"max_tokens"}
    template = given.get("think", {})
    last = messages[-1] if messages else {}
    goes_on = last.get("role") == "assistant" and "tool_calls" not in last and bool(last["content"].strip())
    return OllamaRequest(
        model=model_of(given),
        called=given["model"],
        messages=messages,
        **found,
        template_options=template
        | {"add_generation_prompt": not goes_on}
        | ({"continue_final_message": True} if goes_on else {}),
        delivery=Delivery(stream=given.get("stream", True)),
        drops_oldest=given.get("truncate", True),
        thinks=asks(given, "think"),
        unloads=given.get("keep_alive", False),
        **own,
    )


def model_of(given: Mapping[str, Any]) -> str:
    """Which model is meant; `name` is the older field for it."""
    name, old = given.get("model"), given.get("name")
    if name and old and name != old:
        raise RequestError("name", f"is the old name of model, and they differ; leave it out, got {shown(old)}")
    return name_of("model", name or old)


def tool_of(where: str, value: Any) -> Any:
    """A tool as others write it: its type may be left out here."""
    if not isinstance(value, Mapping):
        raise RequestError(where, f"must be an object with function, got {shown(value)}")
    given = {name: one for name, one in value.items() if one is not None}
    if given.get("type", "function") != "function":
        raise RequestError(f"{where}.type", f"must be 'function' or null, got {shown(given['type'])}")
    return given | {"type": "function"}


def parse_messages(value: Sequence[Any], ignored: set[str]) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Calls have no ids there: a result is of the first call that has none."""
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # name and id
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(where, f"must be an object with role and content, got {shown(message)}")
        known = known_of(where, {name: one for name, one in message.items() if one is not None}, list(MESSAGE), ignored)
        given = {name: MESSAGE[name].check(f"{where}.{name}", one) for name, one in known.items()}
        role = MESSAGE["role"].check(f"{where}.role", given.get("role"))
        one: dict[str, Any] = {"role": role, "content": given.get("content", "")}
        if "thinking" in given:
            one["reasoning_content"] = given["thinking"]
        if given.get("tool_calls"):
            one["tool_calls"] = calls_of(f"{where}.tool_calls", given["tool_calls"], len(found), ignored)
            open_calls += [(call["function"]["name"], call["id"]) for call in one["tool_calls"]]
        if role == "tool":
            one |= result_of(given, open_calls)
        found.append(one)
    return found


def calls_of(where: str, value: Sequence[Any], place: int, ignored: set[str]) -> list[dict[str, Any]]:
    calls = []
    for i, call in enumerate(value):
        given = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(given, Mapping):
            why = "must be an object with function, which has name and arguments"
            raise RequestError(f"{where}[{i}]", f"{why}, got {shown(call)}")
        function = {name: one for name, one in given.items() if name != "index" and one is not None}
        whole = {**call, "type": "function", "function": function}
        calls.append({"id": f"c{place:04d}{i:04d}"} | parse_call(f"{where}[{i}]", whole, ignored))
    return calls


def result_of(given: Mapping[str, Any], open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Which call a result is of: by its id, by the tool's name, or the first that has no result."""
    name, wanted = given.get("tool_name", given.get("name")), given.get("tool_call_id")
    if wanted is not None:
        open_calls[:] = [call for call in open_calls if call[1] != wanted]
    elif call := next((call for call in open_calls if name in (None, call[0])), None):
        open_calls.remove(call)
        name, wanted = call
    return {key: value for key, value in (("name", name), ("tool_call_id", wanted)) if value is not None}


def parse_embed(body: Any) -> OllamaEmbed:
    """The request in a body of /api/embed."""
    given = read_fields(body, EMBED)
    dimensions = given.get("dimensions") or None  # 0 is the model's own
    truncate = "END" if given.get("truncate", True) else "NONE"
    return embed_of(given, given.get("input", []), dimensions=dimensions, truncate=truncate)


def parse_embeddings(body: Any) -> OllamaEmbed:
    """The request in a body of /api/embeddings, the older form for one text."""
    given = read_fields(body, EMBEDDINGS)
    return embed_of(given, [given["prompt"]] if given.get("prompt") else [], single=True)


def embed_of(given: Mapping[str, Any], texts: list[str], **own: Any) -> OllamaEmbed:
    return OllamaEmbed(texts, model_of(given), called=given["model"], **own)


def parse_show(body: Any) -> OllamaNamed:
    """The model in a body of /api/show."""
    return OllamaNamed(model_of(read_fields(body, SHOW)))


def parse_pull(body: Any) -> OllamaNamed:
    """The model in a body of /api/pull, and whether the answer comes in lines."""
    given = read_fields(body, PULL)
    return OllamaNamed(model_of(given), given.get("stream", True))
