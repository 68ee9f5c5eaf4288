"""docs/api.md: the fields of the server's endpoints and the calls of official clients.

`python tests/support/conformance.py` prints the page; with `--check` it compares.

The fields come from the tables of the protocols, and tests/http/test_conformance.py compares each
row with a parsed request. The clients' rows are the tests that are marked with `shows`.
"""

import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from quire.serving.api.structured import SHAPES, SPACING
from quire.serving.api.validation import INT32_MAX
from quire.serving.http import app
from quire.serving.http.endpoints import adapters, admin, openapi, pooled, status
from quire.serving.http.endpoints import ollama as ollama_paths
from quire.serving.http.endpoints import tokens as tokens_paths
from quire.serving.protocol import (
    batches,
    chat,
    cohere,
    completion,
    context,
    conversations,
    fields,
    label_scores,
    messages,
    ollama,
    ollama_fields,
    pooling,
    responses,
    schema,
    tools,
)
from quire.serving.protocol import tokens as tokenizing
from quire.serving.protocol.answers import messages as message_answers
from quire.serving.protocol.answers import shapes
from quire.serving.protocol.fields import STREAM_OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
CLIENTS = ("test_clients_openai", "test_stored", "test_batches", "test_clients_anthropic")
sys.path.append(str(Path(__file__).parents[1] / "http"))  # the folder of CLIENTS
EXTRA_SUMMARIES = {  # endpoints that are not in the OpenAPI document
    "/live": "The page's data, as server-sent events.",
    "/openapi.json": "These endpoints as an OpenAPI document.",
    "/reset_prefix_cache": "Empty the prefix cache.",
    "/sleep": "Free the device's memory; with `level` 2 also the host's. Requests under way wait.",
    "/wake_up": "Serve again after `/sleep`.",
    "/is_sleeping": "Whether the model sleeps.",
    "/pause": "Accept requests without computing them.",
    "/resume": "Compute again after `/pause`.",
    "/expert_loads": (
        "For each layer of a mixture of experts, how many tokens each expert got, and its device."
    ),
    "/rebalance_experts": (
        "Place the copies of experts by recent loads, with `--expert-redundancy`."
    ),
    "/v1/load_lora_adapter": (
        "Serve an adapter below `--lora-dir`: `lora_name`, `lora_path`, `load_inplace`."
    ),
    "/v1/unload_lora_adapter": "Serve it no more: `lora_name`. Requests under way go on.",
}
INTRODUCTION = """\
The base URL is `http://127.0.0.1:8000/v1` for OpenAI's clients and `http://127.0.0.1:8000` for Anthropic's.
What Ollama's endpoints make of theirs is in [ollama.md](ollama.md). Fields that a client has no argument for go into
`extra_body`. A field is applied, is a label without effect, is checked without effect, or is refused with a 400 that
names it. null means that a field is not
given. A field that is in no table is refused too. Of messages other servers know more fields: those that are unknown
here are ignored, and `X-Ignored-Fields` in the answer names them, as does the log, once. Stored responses,
conversations, files and batches are in the memory of one server and end with it, unless `--state-dir` names a folder
for them ([deploy.md](deploy.md#stored-state)). One of several replicas does not know what another stores."""
ERRORS_INTRODUCTION = """\
An error is `{"error": {"message", "type", "param", "code"}}`; at `/v1/messages` it is `{"type": "error", "error":
{"type", "message"}}`, at Ollama's paths `{"error": "..."}`. In a stream that has begun it is an event, at
`/v1/responses` `response.failed`, at Ollama's paths the last line.
`type` has OpenAI's names, where vLLM has those of classes (BadRequestError, NotFoundError). `code` is what clients look
for: context_length_exceeded where a prompt is longer than the model reads, model_not_found, response_not_found,
invalid_api_key, queue_full."""
STATUSES = {
    400: "A field is wrong; `param` names it.",
    401: "No valid key was given.",
    403: "The server does not answer to this Host.",
    404: "There is no such path or model.",
    405: "The path has another method.",
    408: (
        "The body did not arrive in time, or `timeout` passed before there was a vector or a score."
    ),
    413: "The body is larger than `--max-body-bytes`.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; `Retry-After` says when to try again.",
    500: "A step of the engine failed; the request can be sent again.",
    503: "The server shuts down, or the model or its engine has failed.",
}
CLIENTS_INTRODUCTION = "Each row is a test with the official client against a server over a socket."
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
VALUES: dict[str, Any] = {  # for each applied field a value that differs from its default
    "n": 3,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "temperature": 0,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "max_tokens": 9,
    "min_tokens": 2,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "logprobs": True,
    "logprob_token_ids": [3],
    "include_stop_str_in_output": True,
    "logit_bias": {"5": -1.5},
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
    "structured_outputs": {"regex": "a+"},
    "best_of": 5,
    "max_completion_tokens": 9,
    "max_output_tokens": 9,
    "random_seed": 5,
    "stop_sequences": ["END"],
    "top_logprobs": 3,
    "response_format": {"type": "json_object"},
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "request_id": "mine",
    "priority": 3,
    "return_tokens_as_token_ids": True,
    "include_reasoning": False,
    "enable_response_messages": True,
    "cache_salt": "s",
    "timeout": 2.5,
    "truncate_prompt_tokens": 5,
    "truncation_side": "right",
    "echo": True,
    "use_beam_search": True,
    "length_penalty": 0.5,
    "add_special_tokens": False,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template": "{{ x }}",
    "chat_template_kwargs": {"x": 1},
    "reasoning_effort": "low",
    "model": "other",
    "prompt": "Twice",
    "messages": [{"role": "user", "content": "Ho"}],
    "tools": [TOOL],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "input": "Ho",
    "instructions": "Be kind.",
    "system": "Be kind.",
    "include": [responses.LOGPROBS],
    "text": {"format": {"type": "json_object"}},
    "reasoning": {"effort": "low"},
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"},
    "encoding_format": "base64",
    "dimensions": 5,
    "text_1": "c",
    "text_2": "d",
    "query": "e",
    "documents": ["f", "g"],
    "top_n": 1,
    "return_documents": False,
    "return_token_strs": True,
    "tokens": [3],
    "detokenize": False,
    "input_type": "clustering",
    "truncate": "START",
    "output_dimension": 5,
    "label_token_ids": [3],
    "apply_softmax": False,
    "item_first": True,
    "suffix": "end",
    "verbosity": "low",
    "functions": [{"name": "f"}],
    "function_call": "none",
    "truncation": "auto",
    "input_file_id": "file-1",
    "endpoint": "/v1/chat/completions",
    "requests": [{"custom_id": "b", "params": {}}],
    "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
}
NEEDS: dict[str, dict[str, Any]] = {  # fields that a field needs beside it, at any endpoint
    "truncation_side": {"truncate_prompt_tokens": 5}, "length_penalty": {"use_beam_search": True},
}  # fmt: skip


@dataclass(frozen=True)
class Endpoint:
    """A path whose request body has fields."""

    path: str
    parse: Callable[[Any], Any]
    base: Mapping[str, Any]  # a valid body
    labels: Sequence[str] = ()
    neutral: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)  # instead of VALUES
    required_with: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # beside NEEDS
    # fields that are checked and change nothing, with a value
    idle: Mapping[str, Any] = field(default_factory=dict)
    # members of fields that are objects
    inside: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def fields(self) -> Sequence[str]:
        return tuple(dict.fromkeys(schema.BODIES[self.path][0]))


OBJECTS = {
    "structured_outputs": (*SHAPES, *SPACING),
    "stream_options": STREAM_OPTIONS,
    "response_format.type": ("text", "json_object", "json_schema", "structural_tag"),
}
CHAT = {
    "messages[].role": chat.ROLES,
    **{
        f"messages[] of {role}": ("content", "name", *names)
        for role, names in chat.OWN_FIELDS.items()
    },
    "messages[].content[].type": ("text", "image_url"),
    "tools[].type": tuple(tools.KINDS),
    "tools[].custom.format.type": tuple(tools.FORMATS),
    "tools[].custom.format.grammar.syntax": tuple(tools.SYNTAXES),
    "tool_choice": ("auto", "none", "required"),
    "tool_choice.type": (*tools.KINDS, "allowed_tools"),
    "verbosity": fields.VERBOSITIES,
}
RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": {}}
MESSAGES_TOOL = {"name": "f", "input_schema": {}}
STORED_FIELDS = {"previous_response_id": "resp_1", "conversation": "conv_1"}
STREAM_NEEDS = {"stream_options": {"stream": True}}
LOGPROB_NEEDS = dict.fromkeys(("top_logprobs", "logprob_token_ids"), {"logprobs": True})

OLLAMA_VALUES = {
    "options": {"seed": 1},
    "keep_alive": 0,
    "stream": False,
    "format": "json",
    "think": True,
    "truncate": False,
    "raw": True,
    "context": [3],
}
OLLAMA_OBJECTS = {"options": tuple(ollama_fields.OPTIONS)}


def stored_items(name: str, field: str) -> list[dict[str, Any]]:
    """A stored response or conversation of this name."""
    return responses.input_items(name)


ENDPOINTS = [
    Endpoint(
        "/v1/chat/completions",
        chat.parse,
        CHAT_BODY,
        chat.LABELS,
        chat.NEUTRAL,
        chat.REFUSED,
        required_with={**LOGPROB_NEEDS, **STREAM_NEEDS},
        inside=CHAT | OBJECTS,
    ),
    Endpoint(
        "/v1/chat/completions/batch",
        chat.parse_batch,
        {"messages": [CHAT_BODY["messages"]] * 2},
        chat.LABELS,
        chat.NEUTRAL,
        chat.REFUSED,
        values={"messages": [CHAT_BODY["messages"]] * 3},
        required_with=LOGPROB_NEEDS,
    ),
    Endpoint(
        "/v1/completions",
        completion.parse,
        {"prompt": "Once"},
        fields.LABELS,
        refused=fields.VLLM_ONLY,
        values={"logprobs": 3},
        required_with={"logprob_token_ids": {"logprobs": 0}, **STREAM_NEEDS},
        inside=OBJECTS,
    ),
    Endpoint(
        "/v1/responses",
        partial(responses.parse, history=stored_items),
        {"input": "Hi"},
        responses.LABELS,
        responses.NEUTRAL,
        responses.REFUSED,
        values={"tools": [RESPONSES_TOOL], "store": False, "background": True, **STORED_FIELDS},
        required_with={"top_logprobs": {"include": [responses.LOGPROBS]}},
        inside={
            "input[].type": tuple(responses.ITEMS),
            **{f"input[] of {kind}": names for kind, names in responses.ITEMS.items()},
            "input[].content[].type": tuple(responses.PARTS),
            "tools[].type": tuple(tools.KINDS),
            "tools[].format.type": tuple(tools.FORMATS),
            "tool_choice": ("auto", "none", "required"),
            "tool_choice.type": (*tools.KINDS, "allowed_tools"),
            "include": responses.INCLUDED,
            "text": ("format", "verbosity"),
            "text.format.type": tuple(responses.FORMATS),
            "reasoning": (
                "effort",
                *(f"{name}: {value}" for name, value in responses.REASONING.items()),
            ),
            "reasoning.effort": responses.EFFORTS,
            "structured_outputs": (*SHAPES, *SPACING),
        },
    ),
    Endpoint(
        "/v1/responses/input_tokens",
        partial(responses.parse_count, history=stored_items),
        {"input": "Hi"},
        (),
        responses.NEUTRAL,
        responses.REFUSED,
        values={"tools": [RESPONSES_TOOL], **STORED_FIELDS},
    ),
    Endpoint(
        "/v1/responses/compact",
        partial(responses.parse_compact, history=stored_items),
        {"input": "Hi"},
        ("prompt_cache_key", "service_tier"),
        responses.NEUTRAL,
        responses.REFUSED,
        values={**STORED_FIELDS},
    ),
    Endpoint(
        "/v1/conversations",
        conversations.parse,
        {},
        values={"items": [{"role": "user", "content": "Hi"}], "metadata": {"a": "b"}},
    ),
    Endpoint(
        "/v1/messages",
        messages.parse,
        {**CHAT_BODY, "max_tokens": 5},
        messages.LABELS,
        messages.NEUTRAL,
        messages.REFUSED,
        values={"tools": [MESSAGES_TOOL], "tool_choice": {"type": "none"}},
        inside={
            "messages[].role": tuple(messages.BLOCKS),
            **{f"blocks of {role}": tuple(kinds) for role, kinds in messages.BLOCKS.items()},
            "tools[]": messages.TOOL,
            "tool_choice.type": tuple(messages.CHOICES),
            "thinking.type": tuple(messages.THINKING),
            "context_management.edits[].type": tuple(context.EDITS),
            "output_config": ("effort", "format"),
            "output_config.effort": messages.EFFORTS,
            "output_config.format.type": ("json_schema",),
            "structured_outputs": (*SHAPES, *SPACING),
        },
    ),
    Endpoint(
        "/v1/messages/count_tokens",
        messages.parse_count,
        CHAT_BODY,
        messages.LABELS,
        messages.NEUTRAL,
        messages.REFUSED,
        values={"tools": [MESSAGES_TOOL], "tool_choice": {"type": "none"}},
    ),
    Endpoint(
        "/v1/messages/batches",
        batches.parse_messages,
        {"requests": [{"custom_id": "a", "params": {}}]},
        inside={"requests[]": ("custom_id", "params")},
    ),
    Endpoint(
        "/v1/batches",
        batches.parse,
        {"input_file_id": "file-0", "endpoint": "/v1/completions"},
        neutral=batches.NEUTRAL,
        values={"metadata": {"a": "b"}},
    ),
    Endpoint("/v1/embeddings", pooling.parse_embeddings, {"input": "Hi"}, fields.LABELS),
    Endpoint(
        "/v2/embed",
        cohere.parse,
        {"texts": ["Hi"]},
        refused=cohere.REFUSED,
        values={
            "texts": {"texts": ["Ho"]},
            "inputs": {"inputs": [{"content": [{"type": "text", "text": "a"}]}]},
            "embedding_types": ["binary"],
            "max_tokens": 9,
        },
    ),
    Endpoint("/classify", pooling.parse_classify, {"input": "Hi"}, fields.LABELS),
    Endpoint(
        "/pooling", pooling.parse_pooling, {"input": "Hi"}, fields.LABELS, values={"task": "embed"}
    ),
    Endpoint(
        "/score",
        pooling.parse_score,
        {"text_1": "a", "text_2": "b"},
        fields.LABELS,
        values={
            name: {left: "c", right: "d"} for left, right in pooling.SIDES for name in (left, right)
        },
        inside={"one of the pairs": [f"{left}, {right}" for left, right in pooling.SIDES]},
    ),
    Endpoint(
        "/generative_scoring",
        label_scores.parse,
        {"query": "a", "items": ["b"], "label_token_ids": [1, 2]},
        fields.LABELS,
        values={"items": ["c"]},
    ),
    Endpoint(
        "/rerank", pooling.parse_rerank, {"query": "a", "documents": ["b", "c"]}, fields.LABELS
    ),
    Endpoint(
        "/tokenize",
        tokenizing.parse_tokenize,
        CHAT_BODY,
        values={"prompt": {"prompt": "Hi"}, "add_special_tokens": True},
    ),
    Endpoint(
        "/detokenize",
        tokenizing.parse_detokenize,
        {"tokens": [1, 2]},
        values={"skip_special_tokens": True},
    ),
    Endpoint(
        "/api/chat",
        ollama.parse_chat,
        {"model": "quill", **CHAT_BODY},
        values=OLLAMA_VALUES,
        required_with=LOGPROB_NEEDS,
        idle={"shift": True},
        inside=OLLAMA_OBJECTS
        | {
            "messages[].role": ollama_fields.ROLES,
            "messages[]": tuple(ollama_fields.MESSAGE),
            "tools[].type": ("function",),
        },
    ),
    Endpoint(
        "/api/generate",
        ollama.parse_generate,
        {"model": "quill", "prompt": "Hi"},
        values=OLLAMA_VALUES | {"images": ["aGk="]},
        required_with=LOGPROB_NEEDS,
        idle={
            "shift": True,
            "template": "",
            "width": 0,
            "height": 0,
            "steps": 0,
            "debug_render_only": False,
            "_debug_render_only": False,
        },
        inside=OLLAMA_OBJECTS,
    ),
    Endpoint(
        "/api/embed",
        ollama.parse_embed,
        {"model": "quill", "input": "Hi"},
        values={"truncate": False},
        idle={"options": {"seed": 1}, "keep_alive": "5m"},
    ),
    Endpoint(
        "/api/embeddings",
        ollama.parse_embeddings,
        {"model": "quill", "prompt": "Hi"},
        idle={"options": {"seed": 1}, "keep_alive": "5m"},
    ),
    Endpoint(
        "/api/show",
        ollama.parse_show,
        {"model": "quill"},
        values={"name": {"name": "other"}},
        idle={"verbose": True, "system": "x", "template": "x", "options": {"seed": 1}},
    ),
    Endpoint(
        "/api/pull",
        ollama.parse_pull,
        {"model": "quill"},
        values={"name": {"name": "other"}, "stream": False},
        idle={"insecure": True, "username": "x", "password": "x"},
    ),
]


def shows(client: str, call: str) -> Callable:
    """Mark a test that shows what a client's call does; its docstring describes that."""

    def mark(test: Callable) -> Callable:
        test.shows = (*getattr(test, "shows", ()), (client, call))  # type: ignore[attr-defined]
        return test

    return mark


def shown() -> Iterator[tuple[str, str, str, str]]:
    """(client, call, description, test name) of every marked test."""
    for name in CLIENTS:
        for test in vars(importlib.import_module(name)).values():
            for client, call in getattr(test, "shows", ()):
                assert test.__doc__, f"{test.__name__} does not say what it shows"
                yield client, call, " ".join(test.__doc__.split("\n\n")[0].split()), test.__name__


def describe_schema(schema_node: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "anyOf" in schema_node:
        return " or ".join(describe_schema(option) for option in schema_node["anyOf"])
    if "enum" in schema_node or "const" in schema_node:
        return " or ".join(
            f"`{json.dumps(value)}`"
            for value in schema_node.get("enum", [schema_node.get("const")])
        )
    kind = schema_node.get("type")
    if kind in ("integer", "number"):
        return f"{kind} {describe_limits(schema_node)}".strip()
    if kind == "array":
        limit = f" (up to {number(schema_node['maxItems'])})" if "maxItems" in schema_node else ""
        return f"list{limit} of {describe_schema(schema_node['items'])}"
    return {"boolean": "true or false", "string": "text", "object": "object"}.get(kind, "")


def describe_limits(schema_node: Mapping[str, Any]) -> str:
    low, exclusive_low, high = (
        schema_node.get(name) for name in ("minimum", "exclusiveMinimum", "maximum")
    )
    if high in (INT32_MAX, None):
        return "" if low is None else f"from {number(low)}"
    return (
        f"above {number(exclusive_low)}, up to {number(high)}"
        if exclusive_low is not None
        else f"{number(low)} to {number(high)}"
    )


def number(value: Any) -> str:
    """Format a number; large powers of two as 2^n."""
    size = int(abs(value)).bit_length()
    if abs(value) > 1 << 40:
        return (
            f"{'-' if value < 0 else ''}2^{size - 1}"
            if abs(value) == 1 << (size - 1)
            else f"2^{size} - 1"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), f"|{'---|' * len(head)}", *map(line, rows)])


def rows_of(endpoint: Endpoint) -> Iterator[tuple[str, str, str]]:
    """(field, status, accepted values or the reason of the refusal)."""
    field_schemas = schema.FIELDS | schema.SCHEMAS_BY_PATH.get(endpoint.path, {})
    needed = schema.BODIES[endpoint.path][1]
    for name in endpoint.fields:
        if name in endpoint.labels:
            yield f"`{name}`", "label without effect", "anything"
            continue
        description = describe_schema(field_schemas.get(name, {})) or "see below"
        if name in endpoint.idle:
            yield f"`{name}`", "checked, without effect", description
            continue
        yield f"`{name}`", "applied, must be given" if name in needed else "applied", description
    for name, neutral_value in endpoint.neutral.items():
        if name not in endpoint.fields:
            yield (
                f"`{name}`",
                "refused",
                f"is not implemented; `{json.dumps(neutral_value)}`, which asks for nothing, may stand",
            )
    for name, reason in endpoint.refused.items():
        yield f"`{name}`", "refused", reason


def section(endpoint: Endpoint) -> str:
    about = openapi.SUMMARIES[endpoint.path]
    text = (
        "## "
        f"{endpoint.path}\n\n{about}\n\n{table(('field', 'here', 'takes, or why not'), rows_of(endpoint))}\n"
    )
    if endpoint.inside:
        inside = [
            (f"`{location}`", ", ".join(f"`{name}`" for name in names))
            for location, names in endpoint.inside.items()
        ]
        text += f"\n{table(('in it', 'may be'), inside)}\n"
    return text


def routes() -> Iterator[tuple[str, str, str]]:
    """(path, method, purpose)."""
    about = openapi.SUMMARIES | EXTRA_SUMMARIES
    for path in app.PROTOCOLS:
        yield f"`{path}`", "POST", about[path]
    for routes in (tokens_paths.ROUTES, pooled.ROUTES, status.ROUTES, ollama_paths.ROUTES):
        for method, path in (route for route in routes if route not in openapi.OTHER_ROUTES):
            yield f"`{path.replace(':path', '')}`", method, about[path.replace(":path", "")]
    for (method, path), purpose in openapi.OTHER_ROUTES.items():
        yield f"`{path}`", method, purpose
    for path, purpose in openapi.INFO.items():
        yield f"`{path}`", "GET", f"{purpose} With `--enable-tokenizer-info-endpoint`."
    for method, path in admin.ROUTES | adapters.ROUTES:
        yield f"`{path}`", method, f"{about[path]} With `--admin`."


def errors() -> Iterator[tuple[str, ...]]:
    for code, reason in STATUSES.items():
        kinds = (
            shapes.error(code, "")["error"]["type"],
            message_answers.error(code, "")["error"]["type"],
        )
        yield str(code), reason, *(f"`{kind}`" for kind in kinds)


def document() -> str:
    """The text of docs/api.md."""
    clients: dict[str, list[tuple[str, str, str]]] = {}
    for client, call, summary, test in shown():
        clients.setdefault(client, []).append((call, summary, f"`{test}`"))
    blocks = [
        (
            "# The HTTP interface\n\nWritten by `python tests/support/conformance.py > "
            "docs/api.md`; do not edit.\n"
        ),
        textwrap.fill(INTRODUCTION, 120) + "\n",
        f"## Endpoints\n\n{table(('path', 'method', 'what it is for'), list(routes()))}\n",
        *map(section, ENDPOINTS),
        f"## Errors\n\n{textwrap.fill(ERRORS_INTRODUCTION, 120)}\n\n"
        f"{table(('status', 'when', 'type', 'at /v1/messages'), list(errors()))}\n",
        f"## What official clients do here\n\n{textwrap.fill(CLIENTS_INTRODUCTION, 120)}\n",
    ]
    for client, calls in clients.items():
        blocks.append(f"### {client}, Python\n\n{table(('call', 'what it does', 'test'), calls)}\n")
    return "\n".join(blocks)


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        if PAGE.read_text() != document():
            sys.exit(
                f"{PAGE.name} is not up to date: python tests/support/conformance.py > docs/api.md"
            )
    elif sys.argv[1:]:
        sys.exit("usage: python tests/support/conformance.py [--check]")
    else:
        sys.stdout.write(document())


if __name__ == "__main__":
    main()
