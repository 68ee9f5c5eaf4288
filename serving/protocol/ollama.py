"""Ollama's /api/chat, /api/generate, /api/embed and /api/embeddings: a body to a request.

What a request leaves out is the model's own, as at every endpoint here, and not Ollama's defaults.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..api.errors import RequestError
from ..api.params import MAX_LOGPROBS
from ..api.validation import INT32_MAX, boolean, integer, number, refuse_unknown, shown, strings
from ..api.validation import unicode_text as unicode
from .answers.answer import Delivery, OllamaRequest
from .chat import MAX_MESSAGES, parse_call
from .cohere import EmbedRequest
from .fields import known_fields, sampling_of
from .objects import known_of, listed
from .pooling import MAX_DIMENSIONS, MAX_PROMPTS
from .tools import parse_tools

WRITES = (
    "model", "stream", "format", "options", "keep_alive", "think", "logprobs", "top_logprobs", "truncate", "shift",
)  # fmt: skip
CHAT = (*WRITES, "messages", "tools")
GENERATE = (*WRITES, "prompt", "suffix", "system", "context", "raw")
EMBED = ("model", "input", "truncate", "dimensions", "options", "keep_alive")
EMBEDDINGS = ("model", "prompt", "options", "keep_alive")
MODEL = ("model", "name", "verbose", "system", "template", "options")  # of /api/show; `name` is the model's old name
IMAGES = "are not understood: the models of this server read text; leave it out"
REFUSED = {
    "template": "is in Go's template language there, and templates are Jinja here: quire serve --chat-template names "
    "one, and with raw the prompt is taken as it is",
}
NEUTRAL = {"images": [], "width": 0, "height": 0, "steps": 0, "debug_render_only": False, "_debug_render_only": False}

APPLIED = {  # options, and the sampling parameters that they are
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed",
    "num_predict": "max_tokens", "stop": "stop", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
}  # fmt: skip
NO_EFFECT = (  # how a model is loaded, which the server's own options say
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap",
    "use_mlock", "penalize_newline", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
NOTHING = {  # options that are not implemented, with the value that asks for nothing
    "mirostat": 0, "tfs_z": 1, "typical_p": 1, "logits_all": False, "vocab_only": False, "embedding_only": False,
}  # fmt: skip
OPTIONS = (*APPLIED, "repeat_last_n", *NO_EFFECT, *NOTHING)
WHOLE = ("top_k", "seed", "num_predict", "repeat_last_n")
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}  # and what is none
ROLES = ("system", "user", "assistant", "tool")
MESSAGE = ("role", "content", "thinking", "images", "tool_calls", "tool_name", "name", "tool_call_id")
LEVELS = ("low", "medium", "high")
DURATION = re.compile(r"-?(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+|-?\d+")


@dataclass(frozen=True)
class OllamaEmbed(EmbedRequest):
    """Texts that are to be vectors; `single` has one answer and no list of them."""

    single: bool = False
    called: str = ""
    began: float = field(default_factory=time.monotonic, compare=False)


def parse_chat(body: Any) -> OllamaRequest:
    """The request in a body of /api/chat."""
    given = known_fields(body, CHAT, {}, {})
    ignored: set[str] = set()
    messages = parse_messages(given.get("messages", []), ignored)
    tools, _ = parse_tools(
        [{"type": "function", **tool} if isinstance(tool, Mapping) else tool for tool in listed_of(given, "tools")],
        nested=True,
    )
    return request_of(given, messages, tools=tools, ignored=tuple(sorted(ignored)))


def parse_generate(body: Any) -> OllamaRequest:
    """The request in a body of /api/generate."""
    if isinstance(body, Mapping):  # clients send what is not used as an empty text
        body = {name: value for name, value in body.items() if not (value == "" and name in ("template", "system"))}
        if body.get("images"):
            raise RequestError("images", IMAGES)
    given = known_fields(body, GENERATE, NEUTRAL, REFUSED)
    prompt, suffix = (unicode(name, given.get(name, "")) for name in ("prompt", "suffix"))
    raw, context = boolean("raw", given.get("raw", False)), listed("context", given.get("context", []), INT32_MAX)
    system = unicode("system", given.get("system", ""))
    for name, value in (("raw", raw), ("suffix", suffix)):
        for other in ("system", "context", "think"):
            if value and given.get(other):
                raise RequestError(other, f"has no place with {name}, which leaves the chat template out")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return request_of(
        given, messages, prompt=prompt, suffix=suffix, raw=raw,
        context=[integer(f"context[{i}]", token, 0, INT32_MAX) for i, token in enumerate(context)],
    )  # fmt: skip


def request_of(given: Mapping[str, Any], messages: list[dict[str, Any]], **own: Any) -> OllamaRequest:
    """The fields that both have."""
    sampling = parse_options(given.get("options", {}))
    unlimited = sampling.pop("unlimited")
    sampling.setdefault("max_tokens", None)
    sampling |= parse_format(given.get("format"))
    if boolean("logprobs", given.get("logprobs", False)):
        sampling["logprobs"] = integer("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
    elif given.get("top_logprobs"):
        raise RequestError("top_logprobs", f"needs logprobs to be true, got {shown(given['top_logprobs'])}")
    found = sampling_of(sampling)
    if unlimited:
        found["given"] |= {"max_tokens"}
    template = parse_think(given.get("think"))
    last = messages[-1] if messages else {}
    goes_on = last.get("role") == "assistant" and "tool_calls" not in last and bool(last["content"].strip())
    boolean("shift", given.get("shift", False))
    return OllamaRequest(
        model=model_of(given),
        called=given["model"],
        messages=messages,
        **found,
        template_options=template
        | {"add_generation_prompt": not goes_on}
        | ({"continue_final_message": True} if goes_on else {}),
        delivery=Delivery(stream=boolean("stream", given.get("stream", True))),
        drops_oldest=boolean("truncate", given.get("truncate", True)),
        thinks=given.get("think", False) is not False,
        unloads=is_zero(given.get("keep_alive")),
        **own,
    )


def model_of(given: Mapping[str, Any]) -> str:
    name = given.get("model")
    if not isinstance(name, str) or not name:
        raise RequestError("model", f"must be the name of a model of this server, got {shown(name)}")
    return unicode("model", name)


def listed_of(given: Mapping[str, Any], name: str) -> list[Any]:
    return listed(name, given.get(name, []), MAX_MESSAGES)


def parse_options(value: Any) -> dict[str, Any]:
    """Options as sampling parameters, and whether the answer's length is said to have no limit."""
    if not isinstance(value, Mapping):
        raise RequestError("options", f"must be a JSON object, got {shown(value)}")
    refuse_unknown(value, OPTIONS, "options.")
    given = {name: plain_number(name, option) for name, option in value.items() if option is not None}
    for name, nothing in NOTHING.items():
        if given.get(name, nothing) != nothing:
            raise RequestError(f"options.{name}", f"is not implemented, leave it out; got {shown(given[name])}")
    found: dict[str, Any] = {"unlimited": False}
    for name, parameter in APPLIED.items():
        if name in given:
            found[parameter] = given[name]
    if "stop" in found:
        found["stop"] = strings("options.stop", [found["stop"]] if isinstance(found["stop"], str) else found["stop"])
    if "num_predict" in given and integer("options.num_predict", given["num_predict"], -2, INT32_MAX) <= 0:
        found |= {"max_tokens": None, "unlimited": True}
    if "seed" in given and integer("options.seed", given["seed"], -1, (1 << 63) - 1) == -1:
        found["seed"] = None  # drawn anew for each request
    try:
        sampling_of({name: option for name, option in found.items() if name != "unlimited"})
    except RequestError as error:
        name = next((theirs for theirs, ours in APPLIED.items() if ours == error.param), error.param)
        raise RequestError(f"options.{name}", error.message) from None
    return found | penalized(given, found)


def plain_number(name: str, value: Any) -> Any:
    """Whole numbers may come as 40.0."""
    return int(value) if name in WHOLE and isinstance(value, float) and value.is_integer() else value


def penalized(given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What `repeat_last_n` changes: with 0 nothing is penalized; here the prompt and the whole answer are looked at."""
    last = integer("options.repeat_last_n", given.get("repeat_last_n", -1), -1, INT32_MAX)
    if last == 0:
        return dict(PENALTIES)
    if last > 0 and any(found.get(name, none) != none for name, none in PENALTIES.items()):
        why = "cannot be kept: penalties look at all tokens so far; it can be -1 (all) or 0 (none)"
        raise RequestError("options.repeat_last_n", f"{why}, got {last}")
    return {}


def parse_format(value: Any) -> dict[str, Any]:
    """The form of the answer as the sampling parameter that it stands for."""
    if value is None or value == "":
        return {}
    if value != "json" and not isinstance(value, Mapping):
        raise RequestError("format", f"must be 'json' or a JSON schema, got {shown(value)}")
    return {"structured_outputs": {"json_object": True} if value == "json" else {"json": value}}


def parse_think(value: Any) -> dict[str, Any]:
    """Whether and how much to think, as variables of the chat template."""
    if value is None:
        return {}
    if isinstance(value, bool):
        return {"enable_thinking": value, "thinking": value}
    if value not in LEVELS:
        raise RequestError("think", f"must be true, false or one of {', '.join(LEVELS)}, got {shown(value)}")
    return {"enable_thinking": True, "thinking": True, "reasoning_effort": value}


def is_zero(value: Any) -> bool:
    """Whether a model is not to be kept. It is a number of seconds, or a duration such as 5m."""
    if value is None:
        return False
    if isinstance(value, str):
        if not DURATION.fullmatch(value):
            raise RequestError("keep_alive", f"must be seconds or a duration such as '5m', got {shown(value)}")
        return not re.search("[1-9]", value)
    return number("keep_alive", value, -INT32_MAX, INT32_MAX) == 0


def parse_messages(value: Any, ignored: set[str]) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Calls have no ids there: a result is of the first call that has none."""
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # name and id
    for i, message in enumerate(listed("messages", value, MAX_MESSAGES)):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(where, f"must be an object with role and content, got {shown(message)}")
        given = {name: one for name, one in message.items() if one is not None and one != []}
        given = known_of(where, given, MESSAGE, ignored)
        role = given.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise RequestError(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
        if "images" in given:
            raise RequestError(f"{where}.images", IMAGES)
        one: dict[str, Any] = {"role": role, "content": unicode(f"{where}.content", given.get("content", ""))}
        if "thinking" in given:
            one["reasoning_content"] = unicode(f"{where}.thinking", given["thinking"])
        if "tool_calls" in given:
            one["tool_calls"] = calls_of(f"{where}.tool_calls", given["tool_calls"], len(found), ignored)
            open_calls += [(call["function"]["name"], call["id"]) for call in one["tool_calls"]]
        if role == "tool":
            one |= result_of(where, given, open_calls)
        found.append(one)
    return found


def calls_of(where: str, value: Any, place: int, ignored: set[str]) -> list[dict[str, Any]]:
    calls = []
    for i, call in enumerate(listed(where, value, MAX_MESSAGES)):
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
            function = {name: one for name, one in call["function"].items() if name != "index"}
            call = {**call, "type": "function", "function": function}
        calls.append({"id": f"c{place:04d}{i:04d}"} | parse_call(f"{where}[{i}]", call, ignored))
    return calls


def result_of(where: str, given: Mapping[str, Any], open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Which call a result is of: by its id, by the tool's name, or the first that has no result."""
    name = given.get("tool_name", given.get("name"))
    name = None if name is None else unicode(f"{where}.tool_name", name)
    wanted = given.get("tool_call_id")
    if wanted is not None:
        wanted = unicode(f"{where}.tool_call_id", wanted)
        open_calls[:] = [call for call in open_calls if call[1] != wanted]
    elif call := next((call for call in open_calls if name in (None, call[0])), None):
        open_calls.remove(call)
        name, wanted = call
    return {key: value for key, value in (("name", name), ("tool_call_id", wanted)) if value is not None}


def parse_embed(body: Any) -> OllamaEmbed:
    """The request in a body of /api/embed."""
    given = known_fields(body, EMBED, {})
    value = given.get("input", [])
    texts = [value] if isinstance(value, str) else listed("input", value, MAX_PROMPTS)
    dimensions = given.get("dimensions") or None  # 0 is the model's own
    return embed_of(
        given,
        [unicode(f"input[{i}]", text) for i, text in enumerate(texts)],
        dimensions=None if dimensions is None else integer("dimensions", dimensions, 1, MAX_DIMENSIONS),
        truncate="END" if boolean("truncate", given.get("truncate", True)) else "NONE",
    )


def parse_embeddings(body: Any) -> OllamaEmbed:
    """The request in a body of /api/embeddings, the older form for one text."""
    given = known_fields(body, EMBEDDINGS, {})
    prompt = unicode("prompt", given.get("prompt", ""))
    return embed_of(given, [prompt] if prompt else [], single=True)


def embed_of(given: Mapping[str, Any], texts: list[str], **own: Any) -> OllamaEmbed:
    parse_options(given.get("options", {}))  # nothing of them changes a vector
    is_zero(given.get("keep_alive"))
    return OllamaEmbed(texts, model_of(given), called=given["model"], **own)


def parse_model(body: Any) -> str:
    """The name in a body that asks about a model."""
    given = known_fields(body, MODEL, {})
    return model_of({"model": given.get("model", given.get("name"))})
