"""From a parsed request to prompts of token ids. It may take a while, so it runs beside the event loop."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...model.text.chat_template import PromptError
from ...model.text.tokenizer import Tokenizer
from .. import parsing
from ..api.errors import RequestError, TooLong
from ..api.params import SamplingParams
from ..api.structured import ServersGrammar
from ..async_llm import Ask
from ..chat_prompt import render, template_source
from ..engine.admission import check_listed
from ..engine.engine import Engine
from ..parsing.custom import CustomCalls
from ..parsing.forced import Forced
from ..parsing.schema_types import properties_of
from ..protocol import responses
from ..protocol.answers.answer import ChatBatch, ChatRequest, CompletionRequest, Prompted, ResponsesRequest
from ..protocol.context import Messages, edited, newest
from ..protocol.pooling import EmbeddingRequest
from ..protocol.sent_fields import ToolSchemaError
from ..protocol.tools import INPUT
from .settings import Formats

S = TypeVar("S", str, list[int])
PROBE = 8  # characters for each token of the model's length: few texts of more characters fit
PROBE_MARGIN = 512  # tokens: those at the end of the probed characters may differ from those of the whole text
Cut = ChatRequest | CompletionRequest | EmbeddingRequest  # what says how much of a prompt is kept


@dataclass(frozen=True)
class Prepared:
    """The requests to the engine, and how its answers are parsed."""

    asks: list[Ask]
    prompts: list[Prompted]
    parser: Any  # makes a parser for each answer
    most_calls: int | None = None  # of tools, in one answer


def chat(engine: Engine, request: ChatRequest, formats: Formats, must_fit: bool = True) -> Prepared:
    """The prompt of a conversation, and who reads the answer; `must_fit` is false where only its tokens are counted."""
    tokenizer = chat_tokenizer(engine, formats)
    tools = request.tools if request.tool_choice != "none" else []
    template = template_source(tokenizer, tools, request.template_options)
    tool_parser, reasoning_parser = formats.parsers(template)

    def encoded(messages: Messages, must_fit: bool = must_fit) -> tuple[str, list[int]]:
        text = render(tokenizer, messages, tools, request.template_options)
        return text, encode(engine, "messages", text, False, request, must_fit)

    messages, applied = edited(request.messages, request.edits, lambda messages: len(encoded(messages, False)[1]))
    if request.drops_oldest:
        room = max(engine.max_len - (request.params.max_tokens or request.kept_room), 1)
        messages = newest(messages, lambda messages: fits(encoded, messages, room))
    text, tokens = encoded(messages)
    params = request.params
    bare, opened = False, parsing.opens_thought(text)  # bare: the answer is the text that a custom tool takes
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools} if tools else None

    def parser() -> Any:
        is_json = request.params.structured_outputs is not None
        return parsing.make_parser(tool_parser, reasoning_parser, schemas, opened, is_json)

    if schemas and request.tool_choice not in ("auto", "none"):
        any_of_them = request.tool_choice == "required"
        names = list(schemas) if any_of_them else [request.tool_choice.removeprefix("function:")]
        calls = "several" if any_of_them and request.parallel_tool_calls else "one"

        def wanted(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
            """The form of an answer that calls some of these tools, and whether it is JSON and not the model's own."""
            held = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
            held = {name: held[name] for name in names}
            form = own_form(tokenizer, request, tool_parser, reasoning_parser, held, calls, opened)
            return (form, False) if form else (forced_call(request, tools, names[0] if len(names) == 1 else None), True)

        tried, is_json = wanted(tools)
        form = tried
        try:
            compile_form(engine, replace(params, structured_outputs=form))
        except RequestError as error:
            form, is_json = wanted([relaxed(engine, request, tool) for tool in tools])
            if form == tried:
                raise ToolSchemaError(names[0] if len(names) == 1 else "", error.message) from None
        if is_json:
            name = names[0] if len(names) == 1 else None
            bare = name is not None and form == request.custom.get(name)

            def parser() -> Any:
                return Forced(name) if name else parsing.make_parser("llama3_json", None, {})

        params = replace(params, structured_outputs=form)
    elif tools and tool_parser is None:
        raise RequestError("tools", "are not understood by this server: --tool-call-parser names the model's format")
    elif schemas and schemas.keys() <= request.strict and params.structured_outputs is None:
        form = own_form(tokenizer, request, tool_parser, reasoning_parser, schemas, "any", opened)
        if form is not None and not can_be_kept(engine, form):
            form = None
            for tool in tools:
                relaxed(engine, request, tool)  # refuses the schema that a strict tool cannot be held to
        params = replace(params, structured_outputs=form)
    if parser().keeps_special and params.skip_special_tokens:
        params = replace(params, skip_special_tokens=False)
    compile_form(engine, params)
    if tools and request.custom:
        inner, checks = parser, checks_of(engine, request)

        def parser() -> Any:
            return CustomCalls(inner(), INPUT, checks, bare)

    check_listed("top_logprobs", params.logprobs, engine.config.vocab_size, engine.runner.shape.num_logprobs)
    tokens = truncated(tokens, request, params, engine)
    ask = Ask(tokens, params, text, request.terms)
    return Prepared(
        [ask], [Prompted(text, tokens, applied=applied)], parser, None if request.parallel_tool_calls else 1
    )


def fits(encoded: Callable[[Messages], tuple[str, list[int]]], messages: Messages, room: int) -> bool:
    try:
        return len(encoded(messages)[1]) <= room
    except TooLong:
        return False


def compact(engine: Engine, request: ResponsesRequest, formats: Formats) -> Prepared:
    """The prompt that asks for a conversation in short."""
    return chat(engine, replace(request, messages=responses.in_short(request.messages)), formats)


def chat_batch(engine: Engine, request: ChatBatch, formats: Formats) -> Prepared:
    """The prompts of several conversations; they have one template, so their answers are read alike."""
    found = [chat(engine, one, formats) for one in request.each()]
    asks, prompts = ([given for each in found for given in getattr(each, name)] for name in ("asks", "prompts"))
    return replace(found[0], asks=asks, prompts=prompts)


def own_form(
    tokenizer: Tokenizer,
    request: ChatRequest,
    tool_parser: str | None,
    reasoning_parser: str | None,
    schemas: parsing.Tools,
    calls: str,
    opened: bool | None,
) -> dict[str, Any] | None:
    """The form of an answer that is a call in the model's own format; None where the format cannot be held to that."""
    if tool_parser is None or any(request.custom.get(name) for name in schemas):
        return None
    refuse_two_forms(request)
    specials = {
        text: None if token in tokenizer.eos_token_ids else token for text, token in tokenizer.special_texts.items()
    }
    try:
        found = parsing.call_grammar(tool_parser, reasoning_parser, schemas, specials, calls, opened)
    except parsing.Unsayable:
        return None
    return {"grammar": ServersGrammar(found)}


def relaxed(engine: Engine, request: ChatRequest, tool: dict[str, Any]) -> dict[str, Any]:
    """A tool whose arguments may have any values if its schema cannot be kept; ToolSchemaError if it is to be kept."""
    function = tool["function"]
    if engine.admission.grammars is None or function["name"] in request.custom:
        return tool
    try:
        engine.admission.grammars.compile({"json": json.dumps(function["parameters"])})
    except RequestError as error:
        if function["name"] in request.strict:
            raise ToolSchemaError(function["name"], error.message) from None
        properties = properties_of(function["parameters"])
        required = function["parameters"].get("required")
        parameters = {
            "type": "object",
            "properties": {key: {} for key in properties},
            "required": [key for key in properties if isinstance(required, list) and key in required],
        }
        return tool | {"function": function | {"parameters": parameters}}
    return tool


def refuse_two_forms(request: ChatRequest) -> None:
    if request.params.structured_outputs is not None:
        raise RequestError("tool_choice", "and a form of the answer cannot both be kept; leave one of them out")


def forced_call(request: ChatRequest, tools: Sequence[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """The form of an answer that is a call in JSON: the arguments of one function, or a name and its arguments."""
    refuse_two_forms(request)
    functions = [tool["function"] for tool in tools]
    if name is not None:
        own = next(function["parameters"] for function in functions if function["name"] == name)
        return dict(request.custom.get(name) or {"json": own})
    if any("grammar" in (request.custom.get(function["name"]) or ()) for function in functions):
        raise RequestError("tool_choice", "must name a tool that has a grammar, where others may be called too")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": arguments_of(request, function, i)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, function in enumerate(functions)
    ]
    return {"json": json.dumps({"anyOf": calls})}


def arguments_of(request: ChatRequest, function: dict[str, Any], index: int) -> dict[str, Any]:
    """The schema of a function's arguments, of a custom tool with the form of its text."""
    form = request.custom.get(function["name"])
    if form is None:
        return own_root(function["parameters"], index)
    text = {"type": "string", "pattern": f"^(?:{form['regex']})$"}
    return function["parameters"] | {"properties": {INPUT: text}}


def checks_of(engine: Engine, request: ChatRequest) -> dict[str, Callable[[str], bool]]:
    """For each custom tool whether a text has the form that it takes."""

    def check(name: str, form: Mapping[str, Any] | None) -> Callable[[str], bool]:
        if form is None:
            return lambda text: True
        if engine.admission.grammars is None:
            raise RequestError("tools", "cannot have a grammar: this server has no tokenizer for the model")
        try:
            return engine.admission.grammars.checker(form)
        except RequestError as error:
            raise ToolSchemaError(name, error.message) from None

    return {name: check(name, form) for name, form in request.custom.items()}


def own_root(parameters: dict[str, Any], index: int) -> dict[str, Any]:
    """A tool's schema as a document of its own inside of a larger one: `#/$defs/...` means its own definitions."""
    return parameters | {"$id": f"urn:tool:{index}"}


def completion(engine: Engine, request: CompletionRequest, formats: Formats) -> Prepared:
    """The prompts of a completion request."""
    asks, prompts = [], []
    compile_form(engine, request.params)
    given = replace(request, add_special_tokens=False) if request.suffix else request
    for text, tokens in prompts_of(engine, "prompt", given, request.params):
        if request.suffix:
            text, tokens = None, round_gap(engine, request, tokens)
        asks.append(Ask(tokens, request.params, text, request.terms))
        if request.echo and (text is None or request.truncate_prompt_tokens is not None):
            tokenizer, vocabulary = needs_tokenizer(engine), engine.config.vocab_size
            text = tokenizer.decode([token for token in tokens if token < vocabulary])
        first = engine.tokenizer.token_text(tokens[0]) if request.echo and tokens else ""
        prompts.append(Prompted(text, tokens, first=first))
    return Prepared(asks, prompts, plain)


def round_gap(engine: Engine, request: CompletionRequest, before: list[int]) -> list[int]:
    """The prompt of a model that is to fill the gap between a text and its suffix."""
    tokenizer = needs_tokenizer(engine)
    if tokenizer.infill is None:
        raise RequestError("suffix", "is not understood by this model: its tokenizer has no fill-in-the-middle tokens")
    after = encode(engine, "suffix", request.suffix, False)
    first = tokenizer.encode("") if request.add_special_tokens else []
    return [*first, tokenizer.infill[0], *before, tokenizer.infill[1], *after, tokenizer.infill[2]]


def prompts_of(
    engine: Engine,
    name: str,
    request: CompletionRequest | EmbeddingRequest,
    params: SamplingParams,
    max_tokens: int | None = None,
) -> Iterator[tuple[str | None, list[int]]]:
    """The text and the tokens of each prompt in the field `name`; no text where it came as token ids.

    A text is truncated to `max_tokens`, if given, before anything that the request asks for.
    """
    for index, prompt in enumerate(request.prompts):
        where = f"{name}[{index}]" if len(request.prompts) > 1 else name
        text = prompt if isinstance(prompt, str) else None
        special = request.add_special_tokens
        if text is None:
            tokens = prompt
        elif max_tokens is not None:
            tokens = encode_truncated(engine, where, text, max_tokens, special=special)
        else:
            tokens = encode(engine, where, text, special, request)
        yield text, truncated(tokens, request, params, engine)


def compile_form(engine: Engine, params: SamplingParams) -> None:
    """A grammar takes a while the first time: now, and not when the engine takes the request."""
    if params.structured_outputs is not None and engine.admission.grammars is not None:
        engine.admission.grammars.compile(params.structured_outputs)


def can_be_kept(engine: Engine, form: Mapping[str, Any]) -> bool:
    """Whether answers can be held to a form that was not asked for by itself: a `strict` tool does not fail for it."""
    try:
        return engine.admission.grammars is not None and bool(engine.admission.grammars.compile(form))
    except RequestError:
        return False


def plain() -> Any:
    """Reads an answer that is nothing but text."""
    return parsing.make_parser(None, None, None)


def encode(
    engine: Engine, where: str, text: str, special: bool, cut: Cut | None = None, must_fit: bool = True
) -> list[int]:
    """The token ids of a text. One that is far too long is refused before all of it is tokenised.

    Args:
        where: The field that errors name.
        cut: A request that may ask for truncation.
        must_fit: Whether a text that has too many tokens is an error.
    """
    if not text:
        raise RequestError(where, "is empty; it must have at least one character")
    tokenizer = needs_tokenizer(engine)
    try:
        if cut is not None and cut.truncate_prompt_tokens is not None:
            text = kept(text, tokenizer.max_characters(engine.max_len), cut.truncation_side)
        else:
            check_length(engine, where, text)
            if must_fit:
                probe_length(engine, where, text)
        return tokenizer.encode(text, add_special_tokens=special)
    except PromptError as error:
        raise RequestError(where, str(error)) from None


def encode_truncated(
    engine: Engine, where: str, text: str, max_tokens: int, side: str = "right", special: bool = True
) -> list[int]:
    """At most so many tokens of a text; all special tokens that are added to it stay."""
    if not text:
        raise RequestError(where, "is empty; it must have at least one character")
    try:
        return needs_tokenizer(engine).encode_truncated(text, max_tokens, side, special)
    except PromptError as error:
        raise RequestError(where, str(error)) from None


def check_length(engine: Engine, where: str, text: str) -> None:
    """Refuse a text of more characters than the model's length can hold; tokenising it would take seconds."""
    if len(text) > needs_tokenizer(engine).max_characters(engine.max_len):
        raise TooLong(where, f"has {len(text)} characters; {maximum_length(engine)}")


def probe_length(engine: Engine, where: str, text: str) -> None:
    """Refuse a text whose first characters are too many tokens already, so that the others need no tokenising."""
    probe = text[: PROBE * engine.max_len]
    if len(probe) == len(text):
        return
    count = len(needs_tokenizer(engine).encode(probe, add_special_tokens=False))
    if count > engine.max_len + PROBE_MARGIN:
        message = f"has {len(text)} characters, of which the first {len(probe)} are {count} tokens"
        raise TooLong(where, f"{message}; {maximum_length(engine)}")


def maximum_length(engine: Engine) -> str:
    return f"this model's maximum context length is {engine.max_len} tokens"


def needs_tokenizer(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise RequestError("prompt", "must be token ids: this server has no tokenizer for the model")
    return engine.tokenizer


def chat_tokenizer(engine: Engine, formats: Formats) -> Tokenizer:
    """The tokenizer, with the chat template of this server's options if there is one."""
    tokenizer = needs_tokenizer(engine)
    if formats.chat_template is not None:
        tokenizer.adopt(formats.chat_template)
    return tokenizer


def truncated(tokens: list[int], cut: Cut, params: SamplingParams, engine: Engine) -> list[int]:
    """The tokens of a prompt, of which no more may be wanted."""
    most = cut.truncate_prompt_tokens
    if most is None:
        return tokens
    if most == -1:
        most = engine.admission.max_prompt_tokens if isinstance(cut, EmbeddingRequest) else room_of(engine, params)
    return kept(tokens, most, cut.truncation_side)


def kept(whole: S, most: int, side: str) -> S:
    """So much of a text or its tokens, where the rest is left out on one side."""
    return whole[-most:] if side == "left" else whole[:most]


def room_of(engine: Engine, params: SamplingParams) -> int:
    """The most tokens of a prompt that leave room for the answer."""
    return max(engine.max_len - (params.max_tokens or 1), 1)
