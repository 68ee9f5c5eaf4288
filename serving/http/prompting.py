"""From a parsed request to prompts of token ids.

This can take long, so it runs in a thread, not in the event loop.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...model.text.chat_template import PromptError
from ...model.text.tokenizer import Tokenizer
from .. import parsing
from ..api.content import take_images
from ..api.errors import RequestError, TooLong
from ..api.params import SamplingParams
from ..api.structured import ServersGrammar
from ..async_llm import EngineRequest
from ..chat_prompt import render, template_source
from ..engine.admission import check_listed
from ..engine.engine import Engine
from ..parsing.custom import CustomCalls
from ..parsing.forced import Forced
from ..parsing.schema_types import declared_properties
from ..protocol import responses
from ..protocol.answers.answer import (
    AnsweredPrompt,
    ChatBatch,
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
)
from ..protocol.context import Messages, drop_oldest_turns, edit_messages
from ..protocol.pooling import EmbeddingRequest
from ..protocol.sent_fields import ToolSchemaError
from ..protocol.tools import INPUT
from .settings import Formats

S = TypeVar("S", str, list[int])
PROBE_CHARACTERS = 8  # per token of the context length: a text of more characters rarely fits
PROBE_MARGIN = 512  # tokens, since cutting the text changes the tokens at the cut
# The requests that have `truncate_prompt_tokens`.
TruncatingRequest = ChatRequest | CompletionRequest | EmbeddingRequest


@dataclass(frozen=True)
class Prepared:
    """The requests to the engine, and how its answers are parsed."""

    engine_requests: list[EngineRequest]
    prompts: list[AnsweredPrompt]
    parser: Any  # makes a parser for each answer
    max_calls: int | None = None  # tool calls in one answer


def chat(engine: Engine, request: ChatRequest, formats: Formats, must_fit: bool = True) -> Prepared:
    """Render and tokenise a conversation, and choose the grammar and the parser of its answer.

    `must_fit` is false where the prompt's tokens are only counted.
    """
    engine.check_images(take_images(request.messages)[1])
    tokenizer = chat_tokenizer(engine, formats)
    tools = request.tools if request.tool_choice != "none" else []
    template = template_source(tokenizer, tools, request.template_options)
    tool_parser, reasoning_parser = formats.parsers(template)

    def encode_messages(messages: Messages, must_fit: bool = must_fit) -> tuple[str, list[int]]:
        text = render(tokenizer, take_images(messages)[0], tools, request.template_options)
        return text, encode(engine, "messages", text, False, request, must_fit)

    messages, applied_edits = edit_messages(
        request.messages, request.edits, lambda messages: len(encode_messages(messages, False)[1])
    )
    if request.drops_oldest:
        max_tokens = max(engine.max_len - (request.params.max_tokens or request.kept_room), 1)
        messages = drop_oldest_turns(
            messages, lambda messages: fits(encode_messages, messages, max_tokens)
        )
    text, tokens = encode_messages(messages)
    params = request.params
    is_custom_call = False  # the answer is nothing but the text for a custom tool
    opens_thought = parsing.opens_thought(text)
    schemas = (
        {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        if tools
        else None
    )

    def parser() -> Any:
        is_json = request.params.structured_outputs is not None
        return parsing.make_parser(tool_parser, reasoning_parser, schemas, opens_thought, is_json)

    if schemas and request.tool_choice not in ("auto", "none"):
        any_of_them = request.tool_choice == "required"
        names = list(schemas) if any_of_them else [request.tool_choice.removeprefix("function:")]
        calls = "several" if any_of_them and request.parallel_tool_calls else "one"

        def call_form(tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
            """The grammar of an answer that calls these tools, and whether it is plain JSON.

            Otherwise the call is in the model's own format.
            """
            schemas_by_name = {
                tool["function"]["name"]: tool["function"]["parameters"] for tool in tools
            }
            schemas_by_name = {name: schemas_by_name[name] for name in names}
            form = native_call_form(
                tokenizer,
                request,
                tool_parser,
                reasoning_parser,
                schemas_by_name,
                calls,
                opens_thought,
            )
            return (
                (form, False)
                if form
                else (forced_call(request, tools, names[0] if len(names) == 1 else None), True)
            )

        first_form, is_json = call_form(tools)
        form = first_form
        try:
            compile_grammar(engine, replace(params, structured_outputs=form))
        except RequestError as error:
            form, is_json = call_form([relax_schema(engine, request, tool) for tool in tools])
            if form == first_form:
                raise ToolSchemaError(names[0] if len(names) == 1 else "", error.message) from None
        if is_json:
            name = names[0] if len(names) == 1 else None
            is_custom_call = name is not None and form == request.custom.get(name)

            def parser() -> Any:
                return Forced(name) if name else parsing.make_parser("llama3_json", None, {})

        params = replace(params, structured_outputs=form)
    elif tools and tool_parser is None:
        raise RequestError(
            "tools",
            "are not understood by this server: --tool-call-parser names the model's format",
        )
    elif schemas and schemas.keys() <= request.strict and params.structured_outputs is None:
        form = native_call_form(
            tokenizer, request, tool_parser, reasoning_parser, schemas, "any", opens_thought
        )
        if form is not None and not can_compile(engine, form):
            form = None
            for tool in tools:
                # Raises ToolSchemaError for the one that does not compile.
                relax_schema(engine, request, tool)
        params = replace(params, structured_outputs=form)
    if parser().keeps_special and params.skip_special_tokens:
        params = replace(params, skip_special_tokens=False)
    compile_grammar(engine, params)
    if tools and request.custom:
        inner_parser = parser
        checks = custom_tool_checks(engine, request)

        def parser() -> Any:
            return CustomCalls(inner_parser(), INPUT, checks, is_custom_call)

    check_listed(
        "top_logprobs", params.logprobs, engine.config.vocab_size, engine.runner.shape.num_logprobs
    )
    tokens, media = engine.read_images(tokens, take_images(messages)[1], is_client=True)
    if media is not None and request.truncate_prompt_tokens is not None:
        raise RequestError("truncate_prompt_tokens", "cannot be used with images; leave it out")
    if media is not None and request.length_penalty is not None:
        raise RequestError("use_beam_search", "cannot be used with images; leave it out")
    tokens = truncate_prompt(tokens, request, params, engine)
    ask = EngineRequest(tokens, params, text, request.request_options, media=media)
    return Prepared(
        [ask],
        [AnsweredPrompt(text, tokens, applied=applied_edits)],
        parser,
        None if request.parallel_tool_calls else 1,
    )


def fits(
    encode_messages: Callable[[Messages], tuple[str, list[int]]],
    messages: Messages,
    max_tokens: int,
) -> bool:
    try:
        return len(encode_messages(messages)[1]) <= max_tokens
    except TooLong:
        return False


def compact(engine: Engine, request: ResponsesRequest, formats: Formats) -> Prepared:
    """The prompt that asks for a summary of a conversation."""
    return chat(
        engine, replace(request, messages=responses.ask_for_summary(request.messages)), formats
    )


def chat_batch(engine: Engine, request: ChatBatch, formats: Formats) -> Prepared:
    """The prompts of several conversations, whose answers share one parser."""
    prepared = [chat(engine, conversation, formats) for conversation in request.each()]
    engine_requests = [ask for conversation in prepared for ask in conversation.engine_requests]
    prompts = [prompt for conversation in prepared for prompt in conversation.prompts]
    return replace(prepared[0], engine_requests=engine_requests, prompts=prompts)


def native_call_form(
    tokenizer: Tokenizer,
    request: ChatRequest,
    tool_parser: str | None,
    reasoning_parser: str | None,
    schemas: parsing.Tools,
    calls: str,
    opens_thought: bool | None,
) -> dict[str, Any] | None:
    """The grammar of a call in the model's own format; None if that format has no grammar."""
    if tool_parser is None or any(request.custom.get(name) for name in schemas):
        return None
    refuse_second_form(request)
    specials = {
        text: None if token in tokenizer.eos_token_ids else token
        for text, token in tokenizer.special_texts.items()
    }
    try:
        grammar = parsing.call_grammar(
            tool_parser, reasoning_parser, schemas, specials, calls, opens_thought
        )
    except parsing.InexpressibleSchema:
        return None
    return {"grammar": ServersGrammar(grammar)}


def relax_schema(engine: Engine, request: ChatRequest, tool: dict[str, Any]) -> dict[str, Any]:
    """Allow any argument values of a tool if its schema cannot be compiled.

    The names of the arguments stay required. A strict tool raises ToolSchemaError instead.
    """
    function = tool["function"]
    if engine.admission.grammars is None or function["name"] in request.custom:
        return tool
    try:
        engine.admission.grammars.compile({"json": json.dumps(function["parameters"])})
    except RequestError as error:
        if function["name"] in request.strict:
            raise ToolSchemaError(function["name"], error.message) from None
        properties = declared_properties(function["parameters"])
        required = function["parameters"].get("required")
        parameters = {
            "type": "object",
            "properties": {key: {} for key in properties},
            "required": [
                key for key in properties if isinstance(required, list) and key in required
            ],
        }
        return tool | {"function": function | {"parameters": parameters}}
    return tool


def refuse_second_form(request: ChatRequest) -> None:
    if request.params.structured_outputs is not None:
        raise RequestError(
            "tool_choice", "and a form of the answer cannot both be kept; leave one of them out"
        )


def forced_call(
    request: ChatRequest, tools: Sequence[dict[str, Any]], name: str | None
) -> dict[str, Any]:
    """The grammar of a call in JSON: the arguments of `name`, or a name and arguments."""
    refuse_second_form(request)
    functions = [tool["function"] for tool in tools]
    if name is not None:
        parameters = next(
            function["parameters"] for function in functions if function["name"] == name
        )
        return dict(request.custom.get(name) or {"json": parameters})
    if any("grammar" in (request.custom.get(function["name"]) or ()) for function in functions):
        raise RequestError(
            "tool_choice", "must name a tool that has a grammar, where others may be called too"
        )
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": arguments_schema(request, function, i),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, function in enumerate(functions)
    ]
    return {"json": json.dumps({"anyOf": calls})}


def arguments_schema(request: ChatRequest, function: dict[str, Any], index: int) -> dict[str, Any]:
    """The schema of a function's arguments; for a custom tool, with the pattern of its text."""
    form = request.custom.get(function["name"])
    if form is None:
        return as_root_schema(function["parameters"], index)
    text = {"type": "string", "pattern": f"^(?:{form['regex']})$"}
    return function["parameters"] | {"properties": {INPUT: text}}


def custom_tool_checks(engine: Engine, request: ChatRequest) -> dict[str, Callable[[str], bool]]:
    """For each custom tool, a function that tells whether a text has the required format."""

    def check(name: str, form: Mapping[str, Any] | None) -> Callable[[str], bool]:
        if form is None:
            return lambda text: True
        if engine.admission.grammars is None:
            raise RequestError(
                "tools", "cannot have a grammar: this server has no tokenizer for the model"
            )
        try:
            return engine.admission.grammars.checker(form)
        except RequestError as error:
            raise ToolSchemaError(name, error.message) from None

    return {name: check(name, form) for name, form in request.custom.items()}


def as_root_schema(parameters: dict[str, Any], index: int) -> dict[str, Any]:
    """Make a tool's schema a separate document, so that its `#/$defs/...` stay local."""
    return parameters | {"$id": f"urn:tool:{index}"}


def completion(engine: Engine, request: CompletionRequest, formats: Formats) -> Prepared:
    """The prompts of a completion request."""
    engine_requests = []
    prompts = []
    compile_grammar(engine, request.params)
    encoded_request = replace(request, add_special_tokens=False) if request.suffix else request
    for text, tokens in encode_prompts(engine, "prompt", encoded_request, request.params):
        if request.suffix:
            text = None
            tokens = infill_tokens(engine, request, tokens)
        engine_requests.append(EngineRequest(tokens, request.params, text, request.request_options))
        if request.echo and (text is None or request.truncate_prompt_tokens is not None):
            tokenizer = require_tokenizer(engine)
            vocabulary = engine.config.vocab_size
            text = tokenizer.decode([token for token in tokens if token < vocabulary])
        first = ""
        if request.echo and tokens:
            first = require_tokenizer(engine).token_text(tokens[0])
        prompts.append(AnsweredPrompt(text, tokens, first=first))
    return Prepared(engine_requests, prompts, plain_parser)


def infill_tokens(
    engine: Engine, request: CompletionRequest, prefix_tokens: list[int]
) -> list[int]:
    """The fill-in-the-middle prompt with `prefix_tokens` and the request's suffix."""
    tokenizer = require_tokenizer(engine)
    if tokenizer.infill is None:
        raise RequestError(
            "suffix",
            "is not understood by this model: its tokenizer has no fill-in-the-middle tokens",
        )
    suffix_tokens = encode(engine, "suffix", request.suffix, False)
    bos_tokens = tokenizer.encode("") if request.add_special_tokens else []
    return [
        *bos_tokens,
        tokenizer.infill[0],
        *prefix_tokens,
        tokenizer.infill[1],
        *suffix_tokens,
        tokenizer.infill[2],
    ]


def encode_prompts(
    engine: Engine,
    name: str,
    request: CompletionRequest | EmbeddingRequest,
    params: SamplingParams,
    max_tokens: int | None = None,
) -> Iterator[tuple[str | None, list[int]]]:
    """Yield (text, tokens) of each prompt in the field `name`; token ids have the text None.

    A text is cut to `max_tokens`, if given, before the truncation that the request asks for.
    """
    for index, prompt in enumerate(request.prompts):
        param = f"{name}[{index}]" if len(request.prompts) > 1 else name
        special = request.add_special_tokens
        text = None
        if not isinstance(prompt, str):
            tokens = prompt
        elif max_tokens is not None:
            text = prompt
            tokens = encode_truncated(engine, param, text, max_tokens, special=special)
        else:
            text = prompt
            tokens = encode(engine, param, text, special, request)
        yield text, truncate_prompt(tokens, request, params, engine)


def compile_grammar(engine: Engine, params: SamplingParams) -> None:
    """Compile a request's grammar, so that the engine finds it in the cache."""
    grammar: Any = params.structured_outputs  # a mapping, once the parameters are parsed
    if grammar is not None and engine.admission.grammars is not None:
        engine.admission.grammars.compile(grammar)


def can_compile(engine: Engine, form: Mapping[str, Any]) -> bool:
    """Whether a grammar that the client did not ask for explicitly compiles."""
    try:
        return engine.admission.grammars is not None and bool(
            engine.admission.grammars.compile(form)
        )
    except RequestError:
        return False


def plain_parser() -> Any:
    """A parser for answers without tool calls and reasoning."""
    return parsing.make_parser(None, None, None)


def encode(
    engine: Engine,
    param: str,
    text: str,
    special: bool,
    truncation: TruncatingRequest | None = None,
    must_fit: bool = True,
) -> list[int]:
    """The token ids of a text. One that is far too long is refused before all of it is tokenised.

    Args:
        engine: Its tokenizer and context length are used.
        param: The field that errors name.
        text: The text.
        special: Whether the tokenizer adds its special tokens.
        truncation: A request that may ask for truncation.
        must_fit: Whether a text that has too many tokens is an error.
    """
    if not text:
        raise RequestError(param, "is empty; it must have at least one character")
    tokenizer = require_tokenizer(engine)
    try:
        if truncation is not None and truncation.truncate_prompt_tokens is not None:
            text = truncate(
                text, tokenizer.max_characters(engine.max_len), truncation.truncation_side
            )
        else:
            check_length(engine, param, text)
            if must_fit:
                probe_length(engine, param, text)
        return tokenizer.encode(text, add_special_tokens=special)
    except PromptError as error:
        raise RequestError(param, str(error)) from None


def encode_truncated(
    engine: Engine,
    param: str,
    text: str,
    max_tokens: int,
    side: str = "right",
    special: bool = True,
) -> list[int]:
    """At most `max_tokens` tokens of a text.

    The special tokens that are added to it count and stay.
    """
    if not text:
        raise RequestError(param, "is empty; it must have at least one character")
    try:
        return require_tokenizer(engine).encode_truncated(text, max_tokens, side, special)
    except PromptError as error:
        raise RequestError(param, str(error)) from None


def check_length(engine: Engine, param: str, text: str) -> None:
    """Refuse a text of more characters than the context length can hold.

    Tokenising it would take seconds.
    """
    if len(text) > require_tokenizer(engine).max_characters(engine.max_len):
        raise TooLong(param, f"has {len(text)} characters; {maximum_length(engine)}")


def probe_length(engine: Engine, param: str, text: str) -> None:
    """Refuse a long text by its first characters alone if they are too many tokens already."""
    probe = text[: PROBE_CHARACTERS * engine.max_len]
    if len(probe) == len(text):
        return
    count = len(require_tokenizer(engine).encode(probe, add_special_tokens=False))
    if count > engine.max_len + PROBE_MARGIN:
        message = f"has {len(text)} characters, of which the first {len(probe)} are {count} tokens"
        raise TooLong(param, f"{message}; {maximum_length(engine)}")


def maximum_length(engine: Engine) -> str:
    return f"this model's maximum context length is {engine.max_len} tokens"


def require_tokenizer(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise RequestError(
            "prompt", "must be token ids: this server has no tokenizer for the model"
        )
    return engine.tokenizer


def chat_tokenizer(engine: Engine, formats: Formats) -> Tokenizer:
    """The tokenizer, with the chat template of this server's options if there is one."""
    tokenizer = require_tokenizer(engine)
    if formats.chat_template is not None:
        tokenizer.adopt(formats.chat_template)
    return tokenizer


def truncate_prompt(
    tokens: list[int], truncation: TruncatingRequest, params: SamplingParams, engine: Engine
) -> list[int]:
    """Cut a prompt to the request's `truncate_prompt_tokens`."""
    max_tokens = truncation.truncate_prompt_tokens
    if max_tokens is None:
        return tokens
    if max_tokens == -1:
        max_tokens = (
            engine.admission.max_prompt_tokens
            if isinstance(truncation, EmbeddingRequest)
            else max_prompt_length(engine, params)
        )
    return truncate(tokens, max_tokens, truncation.truncation_side)


def truncate(prompt: S, length: int, side: str) -> S:
    """The last (`side` is left) or first `length` characters or tokens of a prompt."""
    return prompt[-length:] if side == "left" else prompt[:length]


def max_prompt_length(engine: Engine, params: SamplingParams) -> int:
    """The number of prompt tokens that leaves room for `max_tokens`."""
    return max(engine.max_len - (params.max_tokens or 1), 1)
