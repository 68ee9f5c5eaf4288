"""Parsing of the fields that several protocols share.

In all parsers, `fields` are the non-null fields of a body, and `param` is the path of a field, such
as `messages[0].content`, which errors name.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..api.errors import RequestError
from ..api.params import MAX_LOGPROBS, SAMPLING, RequestOptions, SamplingParams, declarations
from ..api.validation import (
    INT32_MAX,
    boolean,
    integer,
    number,
    refuse_unknown,
    shown,
    unicode_text,
)
from .answers.answer import Delivery

# Fields without effect.
LABELS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
DELIVERY = (
    "stream",
    "stream_options",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "request_id",
)
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_drafted")
REQUEST_OPTIONS = tuple(
    name for name, declaration in declarations(RequestOptions).items() if declaration.endpoints
)
TEMPLATE = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "verbosity",
)
VERBOSITIES = ("low", "medium", "high")
BEAMS = ("use_beam_search", "length_penalty")
BEAM_PARAMS = ("n", "max_tokens", "ignore_eos", "skip_special_tokens")  # that a beam search uses
PENALTY = -10, 10
TRUNCATION = ("truncate_prompt_tokens", "truncation_side")
SIDES = ("left", "right")
MAX_REQUEST_ID = 128
MAX_TEMPLATE = 65_536  # characters
MAX_SCHEMA = 65_536
FORMATS = {  # of a text, with their own fields
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema", "value"),
    "json": ("value",),
    "regex": ("value",),
    "structural_tag": ("structures", "triggers", "format"),
}
STRUCTURED_OUTPUTS = "structured_outputs"
GUIDED_FIELDS = {  # vLLM's older fields, with the keys of structured_outputs that replaced them
    f"guided_{name}": name
    for name in ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
}
OLD_BACKEND = "guided_decoding_backend"  # has no effect
ABSENT = "is not implemented for this endpoint, leave it out"
VLLM_ONLY = {
    "kv_transfer_params": (
        "says where vLLM's servers hand pages on; replicas here do so unasked, leave it out"
    )
}


def sampling_fields(endpoint: str) -> tuple[str, ...]:
    """Names of the sampling parameters that an endpoint takes as fields of the same names."""
    return tuple(
        name for name, declaration in SAMPLING.items() if endpoint in declaration.endpoints
    )


def known_fields(
    body: Any,
    names: Iterable[str],
    neutral: Mapping[str, Any],
    refused: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The non-null fields of a body.

    Args:
        body: The JSON body.
        names: The supported fields.
        neutral: Fields that are not implemented, with the value that is accepted and dropped.
        refused: Fields that are not implemented, with the text of the error.

    Raises:
        RequestError: The body is no object, or has an unknown or unsupported field.
    """
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be a JSON object, got {shown(body)}")
    names = tuple(names)
    if STRUCTURED_OUTPUTS in names and any(name.startswith("guided_") for name in body):
        body = merge_guided_fields(body)
    refuse_unknown(body, (*names, *neutral, *refused))
    fields = {name: value for name, value in body.items() if value is not None}
    for name, reason in refused.items():
        if name in fields:
            raise RequestError(name, reason)
    for name, neutral_value in neutral.items():
        if name in fields:
            value = fields.pop(name)
            if value != neutral_value or type(value) is not type(neutral_value):
                raise RequestError(name, f"{ABSENT}; got {shown(value)}")
    if "model" in fields:
        unicode_text("model", fields["model"])
    return fields


def merge_guided_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Merge vLLM's older `guided_*` fields into `structured_outputs`; some clients send both."""
    merged = {
        name: value
        for name, value in body.items()
        if name not in GUIDED_FIELDS and name != OLD_BACKEND
    }
    structured_outputs = merged.get(STRUCTURED_OUTPUTS) or {}
    if not isinstance(structured_outputs, Mapping):
        return merged  # it is refused later
    old_values = {
        option: body[name] for name, option in GUIDED_FIELDS.items() if body.get(name) is not None
    }
    for option in old_values.keys() & structured_outputs.keys():
        if old_values[option] != structured_outputs[option]:
            raise RequestError(
                f"guided_{option}",
                f"is the old name of {STRUCTURED_OUTPUTS}.{option}, and they differ; leave it out",
            )
    return merged | (
        {STRUCTURED_OUTPUTS: {**old_values, **structured_outputs}}
        if old_values or structured_outputs
        else {}
    )


def parse_delivery(fields: Mapping[str, Any]) -> Delivery:
    """Parse the delivery options: `stream`, `stream_options` and what each choice includes."""
    stream = boolean("stream", fields.get("stream", False))
    options = fields.get("stream_options", {})
    if "stream_options" in fields and not stream:
        raise RequestError("stream_options", "needs stream to be true")
    if not isinstance(options, Mapping):
        raise RequestError("stream_options", f"must be a JSON object, got {shown(options)}")
    refuse_unknown(options, (*STREAM_OPTIONS, "include_obfuscation"), "stream_options.")
    if options.get("include_obfuscation"):
        raise RequestError("stream_options.include_obfuscation", "is not implemented; leave it out")
    include_usage, continuous_usage, include_drafted = (
        boolean(f"stream_options.{name}", options.get(name) or False) for name in STREAM_OPTIONS
    )

    def flag(name: str, default: bool = False) -> bool:
        return boolean(name, fields.get(name, default))

    return Delivery(
        stream,
        include_usage,
        continuous_usage,
        return_token_ids=flag("return_token_ids"),
        tokens_as_ids=flag("return_tokens_as_token_ids"),
        request_id=parse_request_id(fields),
        include_drafted=include_drafted,
        include_reasoning=flag("include_reasoning", True),
    )


def parse_request_id(fields: Mapping[str, Any]) -> str | None:
    """A client's request id, of the characters that headers and logs may contain."""
    name = fields.get("request_id")
    if name is None:
        return None
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_REQUEST_ID or not is_plain(name):
        expected = f"1 to {MAX_REQUEST_ID} letters, digits and -_.:"
        raise RequestError("request_id", f"must be {expected}, got {shown(name)}")
    return name


def is_plain(name: str) -> bool:
    return name.isascii() and all(character.isalnum() or character in "-_.:" for character in name)


def parse_request_options(fields: Mapping[str, Any]) -> RequestOptions:
    """Parse the options that concern scheduling and caching, such as `priority` and `timeout`."""
    return RequestOptions(**{name: fields[name] for name in REQUEST_OPTIONS if name in fields})


def template_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the variables of the chat template, and the template itself if the request has one."""
    options = fields.get("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise RequestError("chat_template_kwargs", f"must be a JSON object, got {shown(options)}")
    for name in options:
        if name in ("self", "messages", "tools", "name", *TEMPLATE[:4]) or not isinstance(
            name, str
        ):
            raise RequestError(
                f"chat_template_kwargs.{name}", "is not a variable to set here; leave it out"
            )
    variables = dict(options)
    if "reasoning_effort" in fields:
        variables["reasoning_effort"] = unicode_text("reasoning_effort", fields["reasoning_effort"])
    if "verbosity" in fields:
        variables |= parse_verbosity("verbosity", fields["verbosity"])
    if "chat_template" in fields:
        variables["chat_template"] = bounded_text(
            "chat_template", fields["chat_template"], MAX_TEMPLATE
        )
    continues_message = boolean(
        "continue_final_message", fields.get("continue_final_message", False)
    )
    adds_prompt = boolean(
        "add_generation_prompt", fields.get("add_generation_prompt", not continues_message)
    )
    if continues_message and adds_prompt:
        raise RequestError("continue_final_message", "needs add_generation_prompt to be false")
    return variables | {
        "add_generation_prompt": adds_prompt,
        **({"continue_final_message": True} if continues_message else {}),
    }


def parse_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request about sampling: all parameters, and the names of explicit ones."""
    names = frozenset(name for name, value in values.items() if value is not None)
    return {"params": SamplingParams.from_dict(values), "explicit_params": names}


def parse_length_penalty(fields: Mapping[str, Any], sampling: Mapping[str, Any]) -> float | None:
    """The length penalty of a beam search; None: sample instead."""
    if not boolean("use_beam_search", fields.get("use_beam_search", False)):
        if "length_penalty" in fields:
            raise RequestError("length_penalty", "needs use_beam_search to be true")
        return None
    if fields.get("stream"):
        raise RequestError(
            "use_beam_search",
            "cannot be streamed: which answers are the likeliest shows at the end",
        )
    params = sampling["params"]
    neutral = SamplingParams()
    for name in sorted(sampling["explicit_params"] - set(BEAM_PARAMS)):
        value = getattr(params, name)
        if value != getattr(neutral, name) and not (name == "temperature" and value == 0):
            raise RequestError(
                name,
                "says nothing of a beam search; leave it or use_beam_search out, got "
                f"{shown(value)}",
            )
    integer("n", params.n, 1, MAX_LOGPROBS // 2, " (with use_beam_search)")
    return number("length_penalty", fields.get("length_penalty", 1.0), *PENALTY)


def parse_verbosity(param: str, value: Any) -> dict[str, Any]:
    """The verbosity of the answer, as a variable of the chat template."""
    if value not in VERBOSITIES:
        raise RequestError(param, f"must be one of {', '.join(VERBOSITIES)}, got {shown(value)}")
    return {"verbosity": value}


def parse_truncation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Parse prompt truncation: the number of tokens (-1: as many as fit) and the side to cut."""
    if "truncate_prompt_tokens" not in fields:
        if "truncation_side" in fields:
            raise RequestError(
                "truncation_side",
                "needs truncate_prompt_tokens, which says how many tokens are kept",
            )
        return {}
    max_tokens = integer("truncate_prompt_tokens", fields["truncate_prompt_tokens"], -1, INT32_MAX)
    if max_tokens == 0:
        raise RequestError(
            "truncate_prompt_tokens", "must be 1 or more, or -1 for what the model takes, got 0"
        )
    side = fields.get("truncation_side", SIDES[0])
    if side not in SIDES:
        raise RequestError("truncation_side", f"must be {' or '.join(SIDES)}, got {shown(side)}")
    return {"truncate_prompt_tokens": max_tokens, "truncation_side": side}


def parse_common_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ChatRequest` and `CompletionRequest` that all protocols parse alike."""
    return {
        "model": fields.get("model"),
        "request_options": parse_request_options(fields),
        "delivery": parse_delivery(fields),
        **parse_truncation(fields),
    }


def bounded_text(name: str, value: Any, max_length: int) -> str:
    checked = unicode_text(name, value)
    if len(checked) > max_length:
        raise RequestError(name, f"must hold at most {max_length} characters, got {len(checked)}")
    return checked


def parse_response_format(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `response_format` to the sampling parameter `structured_outputs`."""
    response_format = fields.get("response_format")
    if response_format is None:
        return {}
    if not isinstance(response_format, Mapping):
        raise RequestError(
            "response_format", f"must be a JSON object, got {shown(response_format)}"
        )
    kind = response_format.get("type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise RequestError(
            "response_format.type", f"must be one of {', '.join(FORMATS)}, got {shown(kind)}"
        )
    refuse_unknown(response_format, ("type", *FORMATS[kind]), "response_format.")
    if kind == "json_object" and response_format.get("schema") is not None:
        return as_structured_outputs("response_format", fields, {"json": response_format["schema"]})
    if kind in ("json", "regex"):  # as huggingface_hub writes them
        if response_format.get("value") is None:
            raise RequestError(
                "response_format.value",
                "is missing; it must be a JSON schema, or a regular expression",
            )
        return as_structured_outputs("response_format", fields, {kind: response_format["value"]})
    if kind == "json_schema" and response_format.get("value") is not None:
        return parse_text_format(
            "response_format", kind, fields, "response_format.value", response_format["value"]
        )
    schema_object = (
        response_format if kind == "structural_tag" else response_format.get("json_schema")
    )
    return parse_text_format(
        "response_format", kind, fields, "response_format.json_schema", schema_object
    )


def parse_text_format(
    param: str, kind: str, fields: Mapping[str, Any], schema_param: str, schema_object: Any
) -> dict[str, Any]:
    """Convert a text format to the sampling parameter `structured_outputs`.

    Args:
        param: The field of the text format.
        kind: Its type: text, json_object, json_schema or structural_tag.
        fields: All fields of the body.
        schema_param: The field of `schema_object`.
        schema_object: The other keys of the format, which contain the schema.
    """
    if kind == "text":
        return {}
    if kind == "structural_tag":
        return as_structured_outputs(param, fields, {"structural_tag": dict(schema_object)})
    return as_structured_outputs(
        param,
        fields,
        {"json_object": True}
        if kind == "json_object"
        else {"json": parse_named_schema(schema_param, schema_object)},
    )


def as_structured_outputs(
    param: str, fields: Mapping[str, Any], form: dict[str, Any]
) -> dict[str, Any]:
    """The sampling parameter for a text format in the field `param`.

    The body must not have `structured_outputs`.
    """
    if STRUCTURED_OUTPUTS in fields:
        raise RequestError(param, f"and {STRUCTURED_OUTPUTS} say the same; leave one of them out")
    return {STRUCTURED_OUTPUTS: form}


def answer_grammar(form: dict[str, Any], tool_choice: str) -> dict[str, Any]:
    """The structured outputs of an answer's text; none if the answer must be a tool call."""
    return form if tool_choice in ("auto", "none") else {}


def parse_named_schema(param: str, schema_object: Any) -> Mapping[str, Any]:
    """The schema in an object {"name", "description", "schema", "strict"}."""
    if not isinstance(schema_object, Mapping):
        raise RequestError(param, f"must be a JSON object, got {shown(schema_object)}")
    refuse_unknown(schema_object, ("name", "description", "schema", "strict", "type"), f"{param}.")
    schema = schema_object.get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"{param}.schema", f"must be a JSON schema, got {shown(schema)}")
    return schema
