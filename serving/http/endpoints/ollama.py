"""Ollama's endpoints, for its clients and for the editors that support it."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from starlette.requests import Request
from starlette.responses import Response

from ....model.planning.cost import dense_specs, weight_bytes
from ...api.errors import RequestError
from ...api.validation import shown
from ...engine.engine import Engine
from ...protocol import ollama
from ...protocol.answers import ollama as answers
from ...protocol.answers.answer import CompletionRequest, OllamaRequest, Usage
from ...protocol.fields import STRUCTURED_OUTPUTS
from ...protocol.ollama import OllamaEmbed
from ...protocol.tokens import check_token_ids
from .. import prompting
from ..answering import AS_LINES, LINES
from ..errors import HttpError, JsonResponse
from ..models import ASLEEP, READY, Model
from ..prompting import Prepared
from ..service import Protocol, Service
from ..settings import Formats
from .pooled import compute_outputs, embedding_vectors, requests_for_texts

OLLAMA_VERSION = "0.13.0"  # the version whose API this is: clients require a minimum
LATEST = ":latest"
FOREVER = "2318-01-01T00:00:00Z"  # `expires_at` of all models: none is unloaded after a time


def served_name(service: Service, name: str) -> str:
    """The served name for a name in Ollama's form, where `:latest` is optional."""
    served_names = [served_names for model in service.models.models for served_names in model.names]
    for candidate in (name, name.removesuffix(LATEST), name + LATEST):
        if candidate in served_names:
            return candidate
    raise HttpError(
        404,
        f"model '{shown(name)[1:-1]}' not found; this server has {', '.join(served_names)}",
        "model",
    )


def prepare(engine: Engine, request: OllamaRequest, formats: Formats) -> Prepared:
    """The prompt of a conversation, or of a text with or without the chat template."""
    tokenizer = prompting.chat_tokenizer(engine, formats)
    if request.thinks and formats.parsers(tokenizer.template_for(request.tools) or "")[1] is None:
        raise RequestError(
            "think", "is not understood by this model: its chat template shows no thoughts"
        )
    request = replace(request, kept_room=engine.max_len // 4)
    if request.prompt is None:
        return prompting.chat(engine, request, formats)
    is_untemplated = tokenizer.chat_template is None and len(request.messages) == 1
    if is_untemplated and not isinstance(request.messages[0]["content"], str):
        raise RequestError("images", "need a chat template, and the model has none")
    if request.raw or request.suffix or is_untemplated:
        completion_request = CompletionRequest(
            [request.prompt],
            request.params,
            suffix=request.suffix,
            request_options=request.request_options,
        )
        prepared = prompting.completion(engine, completion_request, formats)
    else:
        prepared = prompting.chat(engine, request, formats)
    return prepend_context(engine, request, prepared)


def prepend_context(engine: Engine, request: OllamaRequest, prepared: Prepared) -> Prepared:
    """Put the tokens of `context` before the prompt, whose own start tokens are dropped."""
    if not request.context:
        return prepared
    context_tokens = check_token_ids(list(request.context), engine.config.vocab_size, "context")
    [ask] = prepared.engine_requests
    [prompt] = prepared.prompts
    bos_tokens = prompting.require_tokenizer(engine).encode("")
    tokens = (
        ask.tokens[len(bos_tokens) :] if ask.tokens[: len(bos_tokens)] == bos_tokens else ask.tokens
    )
    tokens = [*context_tokens, *tokens]
    return replace(
        prepared,
        engine_requests=[ask._replace(tokens=tokens, text=None)],
        prompts=[replace(prompt, token_ids=tokens)],
    )


def protocol(parse: Callable[[Any], OllamaRequest]) -> Protocol:
    return Protocol(
        "ollama-",
        parse,
        prepare,
        answers.response,
        answers.LineStream,
        AS_LINES,
        uses_chat_defaults=True,
    )


async def write_answer(protocol: Protocol, service: Service, request: Request) -> Any:
    """Answer a request; errors about its grammar name the field `format`, as the client does."""
    try:
        return await answer(protocol, service, request)
    except RequestError as error:
        if not error.param.startswith(STRUCTURED_OUTPUTS):
            raise
        raise RequestError("format", error.message) from None


async def answer(protocol: Protocol, service: Service, request: Request) -> Any:
    """Answer a request; one without a prompt loads the model, or unloads it with keep_alive 0."""
    parsed, body = await service.read(request, protocol.parse)
    parsed = replace(parsed, model=served_name(service, parsed.called))
    if not parsed.only_loads:
        return await service.serve(request, protocol, parsed, body)
    reason = "load"
    if parsed.unloads:
        reason = "unload"
        await put_to_sleep(service, service.models.find(parsed.model))
    else:
        async with service.open_request(), service.models.use(parsed.model):
            pass
    status = answers.loaded_body(parsed, reason)
    if parsed.delivery.stream:
        return Response(answers.line(status), headers=dict(LINE_HEADERS))
    return JsonResponse(status)


LINE_HEADERS = [(name.decode(), value.decode()) for name, value in LINES]


async def put_to_sleep(service: Service, model: Model) -> None:
    """Put a model to sleep; allowed with --admin only, since other clients may be using it."""
    if not service.settings.admin:
        reason = (
            "is for operators: quire serve --admin; models sleep by themselves with --max-loaded"
        )
        raise HttpError(403, f"keep_alive: 0 without a prompt {reason}", "keep_alive")
    if model.state == READY:
        await service.models.move(model, ASLEEP, lambda: model.llm.sleep(1))


async def embed(
    parse: Callable[[Any], OllamaEmbed], service: Service, request: Request
) -> JsonResponse:
    """Embed texts; a request without texts loads the model."""
    parsed, _ = await service.read(request, parse)
    parsed = replace(parsed, model=served_name(service, parsed.called))
    vectors = []
    usage = Usage(0, 0)
    if parsed.texts:
        prepare = partial(
            requests_for_texts, texts="prompt" if parsed.single else "input", dimension="dimensions"
        )
        result = await compute_outputs(service, request, "embd-", parsed, prepare)
        vectors = embedding_vectors(result)
        usage = result.usage
    else:
        async with service.open_request(), service.models.use(parsed.model):
            pass
    if parsed.single:
        return JsonResponse({"embedding": list(vectors[0]) if vectors else []})
    return JsonResponse(answers.embed_response(parsed.called, parsed.began, vectors, usage))


async def tags(service: Service, request: Request) -> JsonResponse:
    models = [
        describe_model(model, name) | {"modified_at": answers.iso_time(model.created)}
        for model in service.models.models
        for name in model.names
    ]
    return JsonResponse({"models": models})


async def running(service: Service, request: Request) -> JsonResponse:
    """The models that are awake."""
    models = []
    for model in service.models.models:
        if model.state == READY:
            description = describe_model(model, model.name)
            length = model.llm.engine.max_len
            models.append(
                description
                | {
                    "size_vram": description["size"],
                    "context_length": length,
                    "expires_at": FOREVER,
                }
            )
    return JsonResponse({"models": models})


def describe_model(model: Model, name: str) -> dict[str, Any]:
    """A model's entry in lists; size and details are blank until it was loaded once."""
    display_name = name if ":" in name else name + LATEST
    engine = None if model.loaded is None else model.llm.engine
    return {
        "name": display_name,
        "model": display_name,
        "size": 0 if engine is None else weight_bytes(engine.config),
        # Of the name: Quire has no digest of a model's files.
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "details": details(engine),
    }


def details(engine: Engine | None) -> dict[str, Any]:
    details_body = {"parent_model": "", "format": "safetensors"}
    if engine is None:
        return details_body | {
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        }
    family = engine.config.family
    return details_body | {
        "format": "safetensors" if engine.config.file_format is None else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": format_count(count_parameters(engine)),
        "quantization_level": engine.config.weights_format,
    }


def count_parameters(engine: Engine) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(dense_specs(engine.config)))


def format_count(number: float) -> str:
    """Format a number: 8030000000 is 8.0B."""
    for unit in ("", "K", "M", "B"):
        if number < 1000 or unit == "B":
            break
        number /= 1000
    return f"{number:.1f}{unit}"


async def show(service: Service, request: Request) -> JsonResponse:
    """A model's capabilities and context length, by which editors choose models."""
    parsed, _ = await service.read(request, ollama.parse_show)
    async with (
        service.open_request(),
        service.models.use(served_name(service, parsed.model)) as model,
    ):
        engine = model.llm.engine
        formats = service.settings.formats
        family = engine.config.family
        template = ""
        if engine.tokenizer is not None:
            template = prompting.chat_tokenizer(engine, formats).template_for([{}]) or ""
        return JsonResponse(
            {
                "modelfile": (
                    f"# Served by Quire: quire serve {model.root or model.name}\nFROM "
                    f"{model.name}\n"
                ),
                "parameters": "\n".join(
                    f"{name} {value:g}" for name, value in engine.chat_defaults.items()
                ),
                "template": template,
                "details": details(engine),
                "model_info": {
                    "general.architecture": family,
                    "general.parameter_count": count_parameters(engine),
                    f"{family}.context_length": engine.max_len,
                    f"{family}.embedding_length": engine.config.dim,
                    f"{family}.block_count": len(engine.config.layers),
                    f"{family}.vocab_size": engine.config.vocab_size,
                },
                "capabilities": capabilities(engine, formats, template),
                "modified_at": answers.iso_time(model.created),
            }
        )


def capabilities(engine: Engine, formats: Formats, template: str) -> list[str]:
    tools, thoughts = formats.parsers(template)
    has_capability = {
        "completion": engine.config.writes,
        "vision": engine.media_reader is not None,
        "tools": tools is not None and "tools" in template,
        "thinking": thoughts is not None,
        "insert": engine.tokenizer is not None and engine.tokenizer.infill is not None,
        "embedding": not engine.config.writes and engine.config.classes is None,
    }
    return [name for name, is_supported in has_capability.items() if is_supported]


async def version(service: Service, request: Request) -> JsonResponse:
    return JsonResponse({"version": OLLAMA_VERSION})


async def pull(service: Service, request: Request) -> Any:
    """Succeed for a served model; clients cannot make the server download another."""
    parsed, _ = await service.read(request, ollama.parse_pull)
    try:
        served_name(service, parsed.model)
    except HttpError:
        reason = (
            "is not served here, and a server fetches no model for a client: quire pull, then "
            "quire serve MODEL"
        )
        raise HttpError(403, f"model '{shown(parsed.model)[1:-1]}' {reason}", "model") from None
    body = {"status": "success"}
    if parsed.stream:
        return Response(answers.line(body), headers=dict(LINE_HEADERS))
    return JsonResponse(body)


async def refuse_request(status: int, reason: str, service: Service, request: Request) -> Any:
    raise HttpError(status, f"{request.method} {request.url.path[:200]}: {reason}")


NO_MODEL_CREATION = "a server makes no models: a folder or a GGUF file is one, quire serve FOLDER"
REFUSED = {  # unsupported operations: the status, and what an operator can do instead
    ("DELETE", "/api/delete"): (403, "a client cannot delete models: quire rm MODEL"),
    ("POST", "/api/create"): (501, NO_MODEL_CREATION),
    ("POST", "/api/copy"): (501, "another name for a model is quire serve --served-model-name"),
    ("POST", "/api/push"): (501, "a folder is put on the Hub by `hf upload`"),
    ("POST", "/api/blobs/{digest}"): (501, NO_MODEL_CREATION),
    ("HEAD", "/api/blobs/{digest}"): (404, NO_MODEL_CREATION),
}
ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/api/chat"): partial(write_answer, protocol(ollama.parse_chat)),
    ("POST", "/api/generate"): partial(write_answer, protocol(ollama.parse_generate)),
    ("POST", "/api/embed"): partial(embed, ollama.parse_embed),
    ("POST", "/api/embeddings"): partial(embed, ollama.parse_embeddings),
    ("GET", "/api/tags"): tags,
    ("GET", "/api/ps"): running,
    ("POST", "/api/show"): show,
    ("GET", "/api/version"): version,
    ("POST", "/api/pull"): pull,
    **{route: partial(refuse_request, status, why) for route, (status, why) in REFUSED.items()},
}
