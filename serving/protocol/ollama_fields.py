"""The fields of Ollama's bodies; one rule per field parses it and has its JSON schema."""

import re
from collections.abc import Mapping
from typing import Any

from ..api.content import image_part
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
from .media import decode_base64
from .objects import parse_list
from .pooling import MAX_DIMENSIONS, MAX_PROMPTS
from .tokens import MAX_TOKENS
from .tools import MAX_NAME, MAX_TOOLS, TOOL_NAME

ROLES = ("system", "user", "assistant", "tool")
LEVELS = ("low", "medium", "high")
DURATION = r"-?([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+|-?[0-9]+"
BASE64 = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
TEMPLATE = (
    "is in Go's template language there, and templates are Jinja here: quire serve "
    "--chat-template names one, and with raw the prompt is taken as it is"
)


def only_value(neutral_value: Any, reason: str) -> Rule:
    """A rule for an unimplemented field, which accepts only the value without effect."""

    def check(param: str, value: Any) -> Any:
        if value != neutral_value or isinstance(value, bool) != isinstance(neutral_value, bool):
            raise RequestError(param, f"{reason}; got {shown(value)}")
        return value

    return rule(check, {"const": neutral_value})


APPLIED = {  # options, and the corresponding sampling parameters
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "num_predict": "max_tokens",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
COUNT = whole(-1)
LOADING = {  # options without effect: the server's own options determine how a model is loaded
    **dict.fromkeys(
        ("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread"), COUNT
    ),
    **dict.fromkeys(
        ("numa", "low_vram", "f16_kv", "use_mmap", "use_mlock", "penalize_newline"), FLAG
    ),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), real(0, INT32_MAX)),
}
NOTHING = {  # unimplemented options, with the value that has no effect
    "mirostat": 0,
    "tfs_z": 1,
    "typical_p": 1,
    "logits_all": False,
    "vocab_only": False,
    "embedding_only": False,
}
OPTIONS: dict[str, Rule] = {
    **{option: SAMPLING[parameter].rule for option, parameter in APPLIED.items()},
    "num_predict": whole(-2, remedy=" (0 and less are no limit)"),
    "seed": whole(-1, SEEDS[-1], " (-1 draws anew)"),
    "repeat_last_n": COUNT,
    **LOADING,
    **{
        name: only_value(nothing, "is not implemented, leave it out")
        for name, nothing in NOTHING.items()
    },
}
PENALTIES = {  # with the values that turn them off
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip


def parse_options(param: str, value: Any) -> dict[str, Any]:
    """Convert options to sampling parameters; `max_tokens` is None if the client sets no limit."""
    if not isinstance(value, Mapping):
        raise RequestError(param, f"must be a JSON object, got {shown(value)}")
    refuse_unknown(value, list(OPTIONS), f"{param}.")
    options = {
        name: parse_option(f"{param}.{name}", name, option_value)
        for name, option_value in value.items()
        if option_value is not None
    }
    params = {
        parameter: options[option] for option, parameter in APPLIED.items() if option in options
    }
    if params.get("max_tokens", 1) <= 0:
        params["max_tokens"] = None
    if params.get("seed") == -1:
        params["seed"] = None  # a random seed for each request
    return params | penalty_changes(
        f"{param}.repeat_last_n", options.get("repeat_last_n", -1), params
    )


def parse_option(param: str, name: str, value: Any) -> Any:
    """Parse an option by its rule; 40.0 is accepted for a whole number."""
    field_rule = OPTIONS[name]
    is_whole = (
        field_rule.schema.get("type") == "integer"
        and isinstance(value, float)
        and value.is_integer()
    )
    return field_rule.check(param, int(value) if is_whole else value)


def penalty_changes(param: str, num_tokens: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that `repeat_last_n` changes: 0 turns penalties off.

    Other limits are refused, since penalties always cover the prompt and the whole answer.
    """
    if num_tokens == 0:
        return dict(PENALTIES)
    if num_tokens > 0 and any(
        params.get(name, neutral_value) != neutral_value
        for name, neutral_value in PENALTIES.items()
    ):
        reason = (
            "cannot be kept: penalties look at all tokens so far; it can be -1 (all) or 0 (none)"
        )
        raise RequestError(param, f"{reason}, got {num_tokens}")
    return {}


def parse_format(param: str, value: Any) -> dict[str, Any]:
    """Convert `format` to the sampling parameter `structured_outputs`."""
    if value == "":
        return {}
    if value != "json" and not isinstance(value, Mapping):
        raise RequestError(param, f"must be 'json' or a JSON schema, got {shown(value)}")
    return {"structured_outputs": {"json_object": True} if value == "json" else {"json": value}}


def parse_think(param: str, value: Any) -> dict[str, Any]:
    """The thinking mode and effort, as variables of the chat template."""
    if isinstance(value, bool):
        return {"enable_thinking": value, "thinking": value}
    if value not in LEVELS:
        raise RequestError(
            param, f"must be true, false or one of {', '.join(LEVELS)}, got {shown(value)}"
        )
    return {"enable_thinking": True, "thinking": True, "reasoning_effort": value}


def is_zero(param: str, value: Any) -> bool:
    """Whether `keep_alive`, in seconds or as a duration such as 5m, is zero."""
    if isinstance(value, str):
        if not re.fullmatch(DURATION, value):
            raise RequestError(
                param, f"must be seconds or a duration such as '5m', got {shown(value)}"
            )
        return not re.search("[1-9]", value)
    return number(param, value, -INT32_MAX, INT32_MAX) == 0


def parse_texts(param: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else parse_list(param, value, MAX_PROMPTS)
    return [unicode_text(f"{param}[{i}]", text) for i, text in enumerate(texts)]


def parse_model_name(param: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(param, f"must be the name of a model of this server, got {shown(value)}")
    return unicode_text(param, value)


def parse_role(param: str, value: Any) -> str:
    if value not in ROLES:
        raise RequestError(param, f"must be one of {', '.join(ROLES)}, got {shown(value)}")
    return value


def object_list(maximum: int, schema: Schema) -> Rule:
    """A rule for a list of at most `maximum` objects, whose fields the caller checks."""
    return rule(lambda param, value: parse_list(param, value, maximum), many(schema, maximum))


def object_schema(properties: Mapping[str, Schema], *required: str) -> Schema:
    """The schema of an object with these fields; optional ones may be null."""
    described = {
        name: schema if name in required else or_null(schema) for name, schema in properties.items()
    }
    return {"type": "object", "properties": described} | (
        {"required": list(required)} if required else {}
    )


def rule_schemas(rules: Mapping[str, Rule]) -> dict[str, Schema]:
    return {name: field_rule.schema for name, field_rule in rules.items()}


def read_fields(body: Any, rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Parse the non-null fields of a body by their rules."""
    return {
        name: rules[name].check(name, value)
        for name, value in known_fields(body, rules, {}).items()
    }


TEXT = rule(unicode_text, {"type": "string"})
OBJECT: Schema = {"type": "object"}
FUNCTION = object_schema(
    {
        "name": {
            "type": "string",
            "pattern": f"^{TOOL_NAME.pattern}$",
            "minLength": 1,
            "maxLength": MAX_NAME,
        },
        "description": TEXT.schema | {"maxLength": MAX_SCHEMA},
        "parameters": OBJECT,
        "strict": FLAG.schema,
    },
    "name",
)
TOOL = object_schema(
    {"type": {"const": "function"}, "function": FUNCTION | {"additionalProperties": False}},
    "function",
)
CALLED = object_schema({"name": TEXT.schema, "arguments": {"anyOf": [OBJECT, TEXT.schema]}}, "name")
IMAGES = rule(
    lambda param, value: [
        image_part(f"{param}[{i}]", decode_base64(f"{param}[{i}]", image))
        for i, image in enumerate(parse_list(param, value, MAX_MESSAGES))
    ],
    many({"type": "string", "pattern": BASE64}, MAX_MESSAGES),
)
MESSAGE = {  # fields of messages; others are ignored
    "role": rule(parse_role, {"enum": list(ROLES)}),
    "content": TEXT,
    "thinking": TEXT,
    "images": IMAGES,
    "tool_calls": object_list(
        MAX_MESSAGES, object_schema({"id": TEXT.schema, "function": CALLED}, "function")
    ),
    "tool_name": TEXT,
    "name": TEXT,
    "tool_call_id": TEXT,
}

MODEL = rule(parse_model_name, {"type": "string", "minLength": 1})
KEEP_ALIVE = rule(
    is_zero,
    {
        "anyOf": [
            {"type": "string", "pattern": f"^({DURATION})$"},
            {"type": "number", "minimum": -INT32_MAX, "maximum": INT32_MAX},
        ]
    },
)
SET = rule(parse_options, object_schema(rule_schemas(OPTIONS)) | {"additionalProperties": False})
OF_MODEL = {"model": MODEL, "options": SET, "keep_alive": KEEP_ALIVE}
WRITES = OF_MODEL | {
    "stream": FLAG,
    "format": rule(parse_format, {"anyOf": [{"enum": ["json", ""]}, OBJECT]}),
    "think": rule(parse_think, {"anyOf": [FLAG.schema, {"enum": list(LEVELS)}]}),
    "logprobs": FLAG,
    "top_logprobs": whole(0, MAX_LOGPROBS),
    "truncate": FLAG,
    "shift": FLAG,
}
CHAT = WRITES | {
    "messages": object_list(MAX_MESSAGES, object_schema(rule_schemas(MESSAGE), "role")),
    "tools": object_list(MAX_TOOLS, TOOL | {"additionalProperties": False}),
}
GENERATE = WRITES | {
    "prompt": TEXT,
    "suffix": TEXT,
    "system": TEXT,
    "raw": FLAG,
    "context": rule(
        lambda param, value: token_ids(param, value, MAX_TOKENS), many(TOKEN, MAX_TOKENS)
    ),
    "template": only_value("", TEMPLATE),
    "images": IMAGES,
    **dict.fromkeys(("width", "height", "steps"), only_value(0, ABSENT)),
    **dict.fromkeys(("debug_render_only", "_debug_render_only"), only_value(False, ABSENT)),
}
EMBED = OF_MODEL | {
    "input": rule(parse_texts, {"anyOf": [TEXT.schema, many(TEXT.schema, MAX_PROMPTS)]}),
    "truncate": FLAG,
    "dimensions": whole(0, MAX_DIMENSIONS, " (0 is the model's own)"),
}
EMBEDDINGS = OF_MODEL | {"prompt": TEXT}
# One is required; `name` is the old one, and clients may send it empty.
NAMED = {"model": TEXT, "name": TEXT}
SHOW = NAMED | {"verbose": FLAG, "system": TEXT, "template": TEXT, "options": SET}
PULL = NAMED | {"stream": FLAG, "insecure": FLAG, "username": TEXT, "password": TEXT}
