"""The fields of Ollama's bodies: one rule checks each of them and describes it."""

import re
from collections.abc import Mapping
from typing import Any

from ..api.errors import RequestError
from ..api.params import MAX_LOGPROBS, SAMPLING, SEEDS
from ..api.validation import (
    FLAG,
    INT32_MAX,
    TOKEN,
    Rule,
    Schema,
    many,
    number,
    or_null,
    real,
    refuse_unknown,
    rule,
    shown,
    token_ids,
    unicode_text,
    whole,
)
from .chat import MAX_MESSAGES
from .fields import ABSENT, MAX_SCHEMA, known_fields
from .objects import listed
from .pooling import MAX_DIMENSIONS, MAX_PROMPTS
from .tokens import MAX_TOKENS
from .tools import MAX_NAME, MAX_TOOLS, TOOL_NAME

ROLES = ("system", "user", "assistant", "tool")
LEVELS = ("low", "medium", "high")
DURATION = r"-?([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+|-?[0-9]+"
IMAGES = "are not understood: the models of this server read text; leave it out"
TEMPLATE = (
    "is in Go's template language there, and templates are Jinja here: quire serve --chat-template names one, and with "
    "raw the prompt is taken as it is"
)


def only(nothing: Any, why: str) -> Rule:
    """Of what is not implemented: the value that asks for nothing."""

    def check(param: str, value: Any) -> Any:
        if value != nothing or isinstance(value, bool) != isinstance(nothing, bool):
            raise RequestError(param, f"{why}; got {shown(value)}")
        return value

    return rule(check, {"const": nothing})


APPLIED = {  # options, and the sampling parameters that they are
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed",
    "num_predict": "max_tokens", "stop": "stop", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
}  # fmt: skip
COUNT = whole(-1)
LOADING = {  # options that have no effect: how a model is loaded is said by the server's own
    **dict.fromkeys(("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread"), COUNT),
    **dict.fromkeys(("numa", "low_vram", "f16_kv", "use_mmap", "use_mlock", "penalize_newline"), FLAG),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), real(0, INT32_MAX)),
}
NOTHING = {  # options that are not implemented, with the value that asks for nothing
    "mirostat": 0, "tfs_z": 1, "typical_p": 1, "logits_all": False, "vocab_only": False, "embedding_only": False,
}  # fmt: skip
OPTIONS: dict[str, Rule] = {
    **{theirs: SAMPLING[ours].rule for theirs, ours in APPLIED.items()},
    "num_predict": whole(-2, remedy=" (0 and less are no limit)"),
    "seed": whole(-1, SEEDS[-1], " (-1 draws anew)"),
    "repeat_last_n": COUNT,
    **LOADING,
    **{name: only(nothing, "is not implemented, leave it out") for name, nothing in NOTHING.items()},
}
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}  # and what is none


def options_of(param: str, value: Any) -> dict[str, Any]:
    """Options as sampling parameters; `max_tokens` is None where the answer's length is said to have no limit."""
    if not isinstance(value, Mapping):
        raise RequestError(param, f"must be a JSON object, got {shown(value)}")
    refuse_unknown(value, list(OPTIONS), f"{param}.")
    given = {name: option_of(f"{param}.{name}", name, one) for name, one in value.items() if one is not None}
    found = {ours: given[theirs] for theirs, ours in APPLIED.items() if theirs in given}
    if found.get("max_tokens", 1) <= 0:
        found["max_tokens"] = None
    if found.get("seed") == -1:
        found["seed"] = None  # drawn anew for each request
    return found | penalized(f"{param}.repeat_last_n", given.get("repeat_last_n", -1), found)


def option_of(param: str, name: str, value: Any) -> Any:
    """An option as its rule keeps it; whole numbers may come as 40.0."""
    its = OPTIONS[name]
    is_whole = its.schema.get("type") == "integer" and isinstance(value, float) and value.is_integer()
    return its.check(param, int(value) if is_whole else value)


def penalized(param: str, last: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """What `repeat_last_n` changes: with 0 nothing is penalized; here the prompt and the whole answer are looked at."""
    if last == 0:
        return dict(PENALTIES)
    if last > 0 and any(found.get(name, none) != none for name, none in PENALTIES.items()):
        why = "cannot be kept: penalties look at all tokens so far; it can be -1 (all) or 0 (none)"
        raise RequestError(param, f"{why}, got {last}")
    return {}


def format_of(param: str, value: Any) -> dict[str, Any]:
    """The form of the answer as the sampling parameter that it stands for."""
    if value == "":
        return {}
    if value != "json" and not isinstance(value, Mapping):
        raise RequestError(param, f"must be 'json' or a JSON schema, got {shown(value)}")
    return {"structured_outputs": {"json_object": True} if value == "json" else {"json": value}}


def think_of(param: str, value: Any) -> dict[str, Any]:
    """Whether and how much to think, as variables of the chat template."""
    if isinstance(value, bool):
        return {"enable_thinking": value, "thinking": value}
    if value not in LEVELS:
        raise RequestError(param, f"must be true, false or one of {', '.join(LEVELS)}, got {shown(value)}")
    return {"enable_thinking": True, "thinking": True, "reasoning_effort": value}


def is_zero(param: str, value: Any) -> bool:
    """Whether a model is not to be kept. It is a number of seconds, or a duration such as 5m."""
    if isinstance(value, str):
        if not re.fullmatch(DURATION, value):
            raise RequestError(param, f"must be seconds or a duration such as '5m', got {shown(value)}")
        return not re.search("[1-9]", value)
    return number(param, value, -INT32_MAX, INT32_MAX) == 0


def texts_of(param: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else listed(param, value, MAX_PROMPTS)
    return [unicode_text(f"{param}[{i}]", text) for i, text in enumerate(texts)]


def name_of(param: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(param, f"must be the name of a model of this server, got {shown(value)}")
    return unicode_text(param, value)


def role_of(param: str, value: Any) -> str:
    if value not in ROLES:
        raise RequestError(param, f"must be one of {', '.join(ROLES)}, got {shown(value)}")
    return value


def objects(most: int, schema: Schema) -> Rule:
    """A list of so many at most; what each is, who reads it checks."""
    return rule(lambda param, value: listed(param, value, most), many(schema, most))


def object_of(properties: Mapping[str, Schema], *required: str) -> Schema:
    """An object with these fields; those that need not be given may be null."""
    described = {name: one if name in required else or_null(one) for name, one in properties.items()}
    return {"type": "object", "properties": described} | ({"required": list(required)} if required else {})


def schemas_of(rules: Mapping[str, Rule]) -> dict[str, Schema]:
    return {name: one.schema for name, one in rules.items()}


def read_fields(body: Any, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """The fields of a body that are given, each as its rule keeps it."""
    return {name: rules[name].check(name, value) for name, value in known_fields(body, rules, {}).items()}


TEXT = rule(unicode_text, {"type": "string"})
OBJECT: Schema = {"type": "object"}
FUNCTION = object_of(
    {
        "name": {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$", "minLength": 1, "maxLength": MAX_NAME},
        "description": TEXT.schema | {"maxLength": MAX_SCHEMA}, "parameters": OBJECT, "strict": FLAG.schema,
    },
    "name",
)  # fmt: skip
TOOL = object_of({"type": {"const": "function"}, "function": FUNCTION | {"additionalProperties": False}}, "function")
CALLED = object_of({"name": TEXT.schema, "arguments": {"anyOf": [OBJECT, TEXT.schema]}}, "name")
NO_IMAGES = only([], IMAGES)
MESSAGE = {  # fields of messages; others are ignored
    "role": rule(role_of, {"enum": list(ROLES)}),
    "content": TEXT, "thinking": TEXT, "images": NO_IMAGES,
    "tool_calls": objects(MAX_MESSAGES, object_of({"id": TEXT.schema, "function": CALLED}, "function")),
    "tool_name": TEXT, "name": TEXT, "tool_call_id": TEXT,
}  # fmt: skip

MODEL = rule(name_of, {"type": "string", "minLength": 1})
KEEP_ALIVE = rule(
    is_zero,
    {
        "anyOf": [
            {"type": "string", "pattern": f"^({DURATION})$"},
            {"type": "number", "minimum": -INT32_MAX, "maximum": INT32_MAX},
        ]
    },
)
SET = rule(options_of, object_of(schemas_of(OPTIONS)) | {"additionalProperties": False})
OF_MODEL = {"model": MODEL, "options": SET, "keep_alive": KEEP_ALIVE}
WRITES = OF_MODEL | {
    "stream": FLAG,
    "format": rule(format_of, {"anyOf": [{"enum": ["json", ""]}, OBJECT]}),
    "think": rule(think_of, {"anyOf": [FLAG.schema, {"enum": list(LEVELS)}]}),
    "logprobs": FLAG,
    "top_logprobs": whole(0, MAX_LOGPROBS),
    "truncate": FLAG,
    "shift": FLAG,
}
CHAT = WRITES | {
    "messages": objects(MAX_MESSAGES, object_of(schemas_of(MESSAGE), "role")),
    "tools": objects(MAX_TOOLS, TOOL | {"additionalProperties": False}),
}
GENERATE = WRITES | {
    "prompt": TEXT, "suffix": TEXT, "system": TEXT, "raw": FLAG,
    "context": rule(lambda param, value: token_ids(param, value, MAX_TOKENS), many(TOKEN, MAX_TOKENS)),
    "template": only("", TEMPLATE), "images": NO_IMAGES,
    **dict.fromkeys(("width", "height", "steps"), only(0, ABSENT)),
    **dict.fromkeys(("debug_render_only", "_debug_render_only"), only(False, ABSENT)),
}  # fmt: skip
EMBED = OF_MODEL | {
    "input": rule(texts_of, {"anyOf": [TEXT.schema, many(TEXT.schema, MAX_PROMPTS)]}),
    "truncate": FLAG,
    "dimensions": whole(0, MAX_DIMENSIONS, " (0 is the model's own)"),
}
EMBEDDINGS = OF_MODEL | {"prompt": TEXT}
NAMED = {"model": TEXT, "name": TEXT}  # of which one is given; `name` is the old one, and clients send it empty
SHOW = NAMED | {"verbose": FLAG, "system": TEXT, "template": TEXT, "options": SET}
PULL = NAMED | {"stream": FLAG, "insecure": FLAG, "username": TEXT, "password": TEXT}
