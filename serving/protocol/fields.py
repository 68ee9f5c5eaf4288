"""The fields that requests of every protocol share, and how they are read."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..api.errors import RequestError
from ..api.params import MAX_LOGPROBS, SAMPLING, SamplingParams, Terms, declarations
from ..api.validation import INT32_MAX, boolean, integer, number, refuse_unknown, shown, unicode_text
from .answers.answer import Delivery

LABELS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")  # have no effect
DELIVERY = ("stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids", "request_id")
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_drafted")
TERMS = tuple(name for name, declaration in declarations(Terms).items() if declaration.endpoints)
TEMPLATE = (
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "reasoning_effort",
    "verbosity",
)  # fmt: skip
VERBOSITIES = ("low", "medium", "high")
BEAMS = ("use_beam_search", "length_penalty")
OF_BEAMS = ("n", "max_tokens", "ignore_eos", "skip_special_tokens")  # parameters that say something of a beam search
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
FORM = "structured_outputs"
OLD_FORMS = {  # vLLM's names of its parts before it had one
    f"guided_{name}": name for name in ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
}
OLD_BACKEND = "guided_decoding_backend"  # has no effect
ABSENT = "is not implemented for this endpoint, leave it out"
OF_VLLM = {"kv_transfer_params": "says where vLLM's servers hand pages on; replicas here do so unasked, leave it out"}


def sampling_fields(endpoint: str) -> tuple[str, ...]:
    """The sampling parameters that an endpoint takes under their own names."""
    return tuple(name for name, declaration in SAMPLING.items() if endpoint in declaration.endpoints)


def known_fields(
    body: Any, names: Iterable[str], neutral: Mapping[str, Any], refused: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """The fields of a body, all known, without those that are null or have a neutral value."""
    if not isinstance(body, Mapping):
        raise RequestError("body", f"must be a JSON object, got {shown(body)}")
    names = tuple(names)
    if FORM in names and any(name.startswith("guided_") for name in body):
        body = with_form(body)
    refuse_unknown(body, (*names, *neutral, *refused))
    given = {name: value for name, value in body.items() if value is not None}
    for name, why in refused.items():
        if name in given:
            raise RequestError(name, why)
    for name, nothing in neutral.items():
        if name in given:
            value = given.pop(name)
            if value != nothing or type(value) is not type(nothing):
                raise RequestError(name, f"{ABSENT}; got {shown(value)}")
    if "model" in given:
        unicode_text("model", given["model"])
    return given


def with_form(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with what the old names say in `structured_outputs`; some clients send both."""
    found = {name: value for name, value in body.items() if name not in OLD_FORMS and name != OLD_BACKEND}
    form = found.get(FORM)
    if form is not None and not isinstance(form, Mapping):
        return found  # which is refused
    old = {part: body[name] for name, part in OLD_FORMS.items() if body.get(name) is not None}
    for part in old.keys() & (form or {}).keys():
        if old[part] != form[part]:
            raise RequestError(f"guided_{part}", f"is the old name of {FORM}.{part}, and they differ; leave it out")
    return found | ({FORM: {**old, **(form or {})}} if old or form else {})


def delivery_of(given: Mapping[str, Any]) -> Delivery:
    """How the answer is to be sent."""
    stream = boolean("stream", given.get("stream", False))
    options = given.get("stream_options", {})
    if "stream_options" in given and not stream:
        raise RequestError("stream_options", "needs stream to be true")
    if not isinstance(options, Mapping):
        raise RequestError("stream_options", f"must be a JSON object, got {shown(options)}")
    refuse_unknown(options, (*STREAM_OPTIONS, "include_obfuscation"), "stream_options.")
    if options.get("include_obfuscation"):
        raise RequestError("stream_options.include_obfuscation", "is not implemented; leave it out")
    *flags, drafted = [boolean(f"stream_options.{name}", options.get(name) or False) for name in STREAM_OPTIONS]
    flags += [boolean(name, given.get(name, False)) for name in ("return_token_ids", "return_tokens_as_token_ids")]
    return Delivery(
        stream, *flags, name_of(given), drafted, boolean("include_reasoning", given.get("include_reasoning", True))
    )


def name_of(given: Mapping[str, Any]) -> str | None:
    """The request id that a client has chosen: it comes back in headers and logs, so it is plain."""
    name = given.get("request_id")
    if name is None:
        return None
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_REQUEST_ID or not is_plain(name):
        wanted = f"1 to {MAX_REQUEST_ID} letters, digits and -_.:"
        raise RequestError("request_id", f"must be {wanted}, got {shown(name)}")
    return name


def is_plain(name: str) -> bool:
    return name.isascii() and all(character.isalnum() or character in "-_.:" for character in name)


def terms_of(given: Mapping[str, Any]) -> Terms:
    """How the request is to be served."""
    return Terms(**{name: given[name] for name in TERMS if name in given})


def template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template, and the template itself where the request brings one."""
    options = given.get("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise RequestError("chat_template_kwargs", f"must be a JSON object, got {shown(options)}")
    for name in options:
        if name in ("self", "messages", "tools", "name", *TEMPLATE[:4]) or not isinstance(name, str):
            raise RequestError(f"chat_template_kwargs.{name}", "is not a variable to set here; leave it out")
    found = dict(options)
    if "reasoning_effort" in given:
        found["reasoning_effort"] = unicode_text("reasoning_effort", given["reasoning_effort"])
    if "verbosity" in given:
        found |= verbosity_of("verbosity", given["verbosity"])
    if "chat_template" in given:
        found["chat_template"] = text("chat_template", given["chat_template"], MAX_TEMPLATE)
    goes_on = boolean("continue_final_message", given.get("continue_final_message", False))
    adds = boolean("add_generation_prompt", given.get("add_generation_prompt", not goes_on))
    if goes_on and adds:
        raise RequestError("continue_final_message", "needs add_generation_prompt to be false")
    return found | {"add_generation_prompt": adds, **({"continue_final_message": True} if goes_on else {})}


def sampling_of(own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request about sampling: all parameters, and the names of those that it gives."""
    given = frozenset(name for name, value in own.items() if value is not None)
    return {"params": SamplingParams.from_dict(own), "given": given}


def beams_of(given: Mapping[str, Any], sampling: Mapping[str, Any]) -> float | None:
    """The length penalty of a beam search, which is to choose the answers in place of draws; None: draws choose."""
    if not boolean("use_beam_search", given.get("use_beam_search", False)):
        if "length_penalty" in given:
            raise RequestError("length_penalty", "needs use_beam_search to be true")
        return None
    if given.get("stream"):
        raise RequestError("use_beam_search", "cannot be streamed: which answers are the likeliest shows at the end")
    params, neutral = sampling["params"], SamplingParams()
    for name in sorted(sampling["given"] - set(OF_BEAMS)):
        value = getattr(params, name)
        if value != getattr(neutral, name) and not (name == "temperature" and value == 0):
            raise RequestError(
                name, f"says nothing of a beam search; leave it or use_beam_search out, got {shown(value)}"
            )
    integer("n", params.n, 1, MAX_LOGPROBS // 2, " (with use_beam_search)")
    return number("length_penalty", given.get("length_penalty", 1.0), *PENALTY)


def verbosity_of(where: str, value: Any) -> dict[str, Any]:
    """How much is to be said, as a variable of the chat template."""
    if value not in VERBOSITIES:
        raise RequestError(where, f"must be one of {', '.join(VERBOSITIES)}, got {shown(value)}")
    return {"verbosity": value}


def truncation(given: Mapping[str, Any]) -> dict[str, Any]:
    """How many tokens of a prompt are kept (-1: as many as the model takes), and on which side others are left out."""
    if "truncate_prompt_tokens" not in given:
        if "truncation_side" in given:
            raise RequestError("truncation_side", "needs truncate_prompt_tokens, which says how many tokens are kept")
        return {}
    most = integer("truncate_prompt_tokens", given["truncate_prompt_tokens"], -1, INT32_MAX)
    if most == 0:
        raise RequestError("truncate_prompt_tokens", "must be 1 or more, or -1 for what the model takes, got 0")
    side = given.get("truncation_side", SIDES[0])
    if side not in SIDES:
        raise RequestError("truncation_side", f"must be {' or '.join(SIDES)}, got {shown(side)}")
    return {"truncate_prompt_tokens": most, "truncation_side": side}


def common_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ChatRequest` and `CompletionRequest` that are read alike in every protocol."""
    return {
        "model": given.get("model"),
        "terms": terms_of(given),
        "delivery": delivery_of(given),
        **truncation(given),
    }


def text(name: str, value: Any, most: int) -> str:
    found = unicode_text(name, value)
    if len(found) > most:
        raise RequestError(name, f"must hold at most {most} characters, got {len(found)}")
    return found


def structure(given: Mapping[str, Any]) -> dict[str, Any]:
    """`response_format` as the sampling parameter that it stands for."""
    form = given.get("response_format")
    if form is None:
        return {}
    if not isinstance(form, Mapping):
        raise RequestError("response_format", f"must be a JSON object, got {shown(form)}")
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise RequestError("response_format.type", f"must be one of {', '.join(FORMATS)}, got {shown(kind)}")
    refuse_unknown(form, ("type", *FORMATS[kind]), "response_format.")
    if kind == "json_object" and form.get("schema") is not None:
        return formed("response_format", given, {"json": form["schema"]})
    if kind in ("json", "regex"):  # as huggingface_hub writes them
        if form.get("value") is None:
            raise RequestError("response_format.value", "is missing; it must be a JSON schema, or a regular expression")
        return formed("response_format", given, {kind: form["value"]})
    if kind == "json_schema" and form.get("value") is not None:
        return structured("response_format", kind, given, "response_format.value", form["value"])
    named = form if kind == "structural_tag" else form.get("json_schema")
    return structured("response_format", kind, given, "response_format.json_schema", named)


def structured(where: str, kind: str, given: Mapping[str, Any], place: str, named: Any) -> dict[str, Any]:
    """The form of the text as the sampling parameter; what it says beside its kind is `named`, at this place."""
    if kind == "text":
        return {}
    if kind == "structural_tag":
        return formed(where, given, {"structural_tag": dict(named)})
    return formed(where, given, {"json_object": True} if kind == "json_object" else {"json": schema_of(place, named)})


def formed(where: str, given: Mapping[str, Any], form: dict[str, Any]) -> dict[str, Any]:
    """The form of the text, said by the field `where`, as the sampling parameter."""
    if FORM in given:
        raise RequestError(where, f"and {FORM} say the same; leave one of them out")
    return {FORM: form}


def form_of_text(form: dict[str, Any], tool_choice: str) -> dict[str, Any]:
    """The form that the text of an answer has to have; an answer that must be a call has no text."""
    return form if tool_choice in ("auto", "none") else {}


def schema_of(where: str, given: Any) -> Mapping[str, Any]:
    """The schema in a named one: {"name", "description", "schema", "strict"}."""
    if not isinstance(given, Mapping):
        raise RequestError(where, f"must be a JSON object, got {shown(given)}")
    refuse_unknown(given, ("name", "description", "schema", "strict", "type"), f"{where}.")
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where}.schema", f"must be a JSON schema, got {shown(schema)}")
    return schema
