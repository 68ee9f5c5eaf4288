"""Ollama's endpoints, so that its clients and the editors that speak to it work as they are."""

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
from ...protocol.fields import FORM
from ...protocol.ollama import OllamaEmbed
from ...protocol.tokens import checked
from .. import prompting
from ..answering import AS_LINES, LINES
from ..errors import HttpError, JsonResponse
from ..models import ASLEEP, READY, Model
from ..prompting import Prepared
from ..service import Protocol, Service
from ..settings import Formats
from .pooled import ask_for_texts, outputs_for, vectors_of

SPOKEN = "0.13.0"  # the version of Ollama whose form this is: clients ask for a lowest one
LATEST = ":latest"
FOREVER = "2318-01-01T00:00:00Z"  # no model is unloaded because time has passed


def named(service: Service, name: str) -> str:
    """The name of a model here; there `:latest` may be left out."""
    known = [known for model in service.models.models for known in model.names]
    for one in (name, name.removesuffix(LATEST), name + LATEST):
        if one in known:
            return one
    raise HttpError(404, f"model '{shown(name)[1:-1]}' not found; this server has {', '.join(known)}", "model")


def prepare(engine: Engine, request: OllamaRequest, formats: Formats) -> Prepared:
    """The prompt of a conversation, or of a text with or without the chat template."""
    tokenizer = prompting.chat_tokenizer(engine, formats)
    if request.thinks and formats.parsers(tokenizer.template_for(request.tools) or "")[1] is None:
        raise RequestError("think", "is not understood by this model: its chat template shows no thoughts")
    request = replace(request, kept_room=engine.max_len // 4)
    if request.prompt is None:
        return prompting.chat(engine, request, formats)
    plain = tokenizer.chat_template is None and len(request.messages) == 1
    if request.raw or request.suffix or plain:
        whole = CompletionRequest([request.prompt], request.params, suffix=request.suffix, terms=request.terms)
        found = prompting.completion(engine, whole, formats)
    else:
        found = prompting.chat(engine, request, formats)
    return after(engine, request, found)


def after(engine: Engine, request: OllamaRequest, found: Prepared) -> Prepared:
    """The prompt after the tokens of an earlier one and its answer; a text begins once only."""
    if not request.context:
        return found
    before = checked(list(request.context), engine.config.vocab_size, "context")
    [ask], [prompt] = found.asks, found.prompts
    begin = prompting.needs_tokenizer(engine).encode("")
    tokens = ask.tokens[len(begin) :] if ask.tokens[: len(begin)] == begin else ask.tokens
    tokens = [*before, *tokens]
    return replace(found, asks=[ask._replace(tokens=tokens, text=None)], prompts=[replace(prompt, token_ids=tokens)])


def protocol(parse: Callable[[Any], OllamaRequest]) -> Protocol:
    return Protocol("ollama-", parse, prepare, answers.response, answers.LineStream, AS_LINES, uses_chat_defaults=True)


async def write(protocol: Protocol, service: Service, request: Request) -> Any:
    """An answer in lines or whole; an error calls the form of the text as the client does."""
    try:
        return await answer(protocol, service, request)
    except RequestError as error:
        if not error.param.startswith(FORM):
            raise
        raise RequestError("format", error.message) from None


async def answer(protocol: Protocol, service: Service, request: Request) -> Any:
    """What was asked for; the model alone where nothing is."""
    parsed, body = await service.read(request, protocol.parse)
    parsed = replace(parsed, model=named(service, parsed.called))
    if not parsed.loads:
        return await service.serve(request, protocol, parsed, body)
    reason = "load"
    if parsed.unloads:
        reason = "unload"
        await put_to_sleep(service, service.models.find(parsed.model))
    else:
        async with service.counted(), service.models.use(parsed.model):
            pass
    found = answers.loaded(parsed, reason)
    if parsed.delivery.stream:
        return Response(answers.line(found), headers=dict(LINE_HEADERS))
    return JsonResponse(found)


LINE_HEADERS = [(name.decode(), value.decode()) for name, value in LINES]


async def put_to_sleep(service: Service, model: Model) -> None:
    """What keep_alive = 0 without a prompt asks for; others may be using the model."""
    if not service.settings.admin:
        why = "is for operators: quire serve --admin; models sleep by themselves with --max-loaded"
        raise HttpError(403, f"keep_alive: 0 without a prompt {why}", "keep_alive")
    if model.state == READY:
        await service.models.move(model, ASLEEP, lambda: model.llm.sleep(1))


async def embed(parse: Callable[[Any], OllamaEmbed], service: Service, request: Request) -> JsonResponse:
    """Texts as vectors; none are asked for by a client that wants the model loaded."""
    asked, _ = await service.read(request, parse)
    asked = replace(asked, model=named(service, asked.called))
    vectors, usage = [], Usage(0, 0)
    if asked.texts:
        prepare = partial(ask_for_texts, texts="prompt" if asked.single else "input", dimension="dimensions")
        found = await outputs_for(service, request, "embd-", asked, prepare)
        vectors, usage = vectors_of(found), found.usage
    else:
        async with service.counted(), service.models.use(asked.model):
            pass
    if asked.single:
        return JsonResponse({"embedding": list(vectors[0]) if vectors else []})
    return JsonResponse(answers.embed_response(asked.called, asked.began, vectors, usage))


async def tags(service: Service, request: Request) -> JsonResponse:
    found = [
        about(model, name) | {"modified_at": answers.moment(model.created)}
        for model in service.models.models
        for name in model.names
    ]
    return JsonResponse({"models": found})


async def running(service: Service, request: Request) -> JsonResponse:
    """The models that are awake."""
    found = []
    for model in service.models.models:
        if model.state == READY:
            one = about(model, model.name)
            length = model.llm.engine.max_len
            found.append(one | {"size_vram": one["size"], "context_length": length, "expires_at": FOREVER})
    return JsonResponse({"models": found})


def about(model: Model, name: str) -> dict[str, Any]:
    """What lists say of a model; of one that was not loaded yet little is known."""
    shown = name if ":" in name else name + LATEST
    engine = None if model.loaded is None else model.llm.engine
    return {
        "name": shown,
        "model": shown,
        "size": 0 if engine is None else weight_bytes(engine.config),
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),  # of its name: files have none here
        "details": details(engine),
    }


def details(engine: Engine | None) -> dict[str, Any]:
    found = {"parent_model": "", "format": "safetensors"}
    if engine is None:
        return found | {"family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    family = engine.config.family
    return found | {
        "format": "safetensors" if engine.config.file_format is None else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": short(parameters(engine)),
        "quantization_level": engine.config.weights_format,
    }


def parameters(engine: Engine) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(dense_specs(engine.config)))


def short(count: float) -> str:
    """8030000000 is 8.0B."""
    for unit in ("", "K", "M", "B"):
        if count < 1000 or unit == "B":
            break
        count /= 1000
    return f"{count:.1f}{unit}"


async def show(service: Service, request: Request) -> JsonResponse:
    """What a model can do, and how long its context is: editors choose models by it."""
    asked, _ = await service.read(request, ollama.parse_show)
    async with service.counted(), service.models.use(named(service, asked.model)) as model:
        engine, formats = model.llm.engine, service.settings.formats
        family, template = engine.config.family, ""
        if engine.tokenizer is not None:
            template = prompting.chat_tokenizer(engine, formats).template_for([{}]) or ""
        return JsonResponse(
            {
                "modelfile": f"# Served by Quire: quire serve {model.root or model.name}\nFROM {model.name}\n",
                "parameters": "\n".join(f"{name} {value:g}" for name, value in engine.chat_defaults.items()),
                "template": template,
                "details": details(engine),
                "model_info": {
                    "general.architecture": family,
                    "general.parameter_count": parameters(engine),
                    f"{family}.context_length": engine.max_len,
                    f"{family}.embedding_length": engine.config.dim,
                    f"{family}.block_count": len(engine.config.layers),
                    f"{family}.vocab_size": engine.config.vocab_size,
                },
                "capabilities": capabilities(engine, formats, template),
                "modified_at": answers.moment(model.created),
            }
        )


def capabilities(engine: Engine, formats: Formats, template: str) -> list[str]:
    tools, thoughts = formats.parsers(template)
    can = {
        "completion": engine.config.writes,
        "tools": tools is not None and "tools" in template,
        "thinking": thoughts is not None,
        "insert": engine.tokenizer is not None and engine.tokenizer.infill is not None,
        "embedding": not engine.config.writes and engine.config.classes is None,
    }
    return [name for name, so in can.items() if so]


async def version(service: Service, request: Request) -> JsonResponse:
    return JsonResponse({"version": SPOKEN})


async def pull(service: Service, request: Request) -> Any:
    """A model that is served is there; a client cannot make the server fetch another."""
    asked, _ = await service.read(request, ollama.parse_pull)
    try:
        named(service, asked.model)
    except HttpError:
        why = "is not served here, and a server fetches no model for a client: quire pull, then quire serve MODEL"
        raise HttpError(403, f"model '{shown(asked.model)[1:-1]}' {why}", "model") from None
    found = {"status": "success"}
    if asked.stream:
        return Response(answers.line(found), headers=dict(LINE_HEADERS))
    return JsonResponse(found)


async def refused(status: int, why: str, service: Service, request: Request) -> Any:
    raise HttpError(status, f"{request.method} {request.url.path[:200]}: {why}")


MAKES = "a server makes no models: a folder or a GGUF file is one, quire serve FOLDER"
REFUSED = {  # what no client can do here: the status, and what an operator does in its place
    ("DELETE", "/api/delete"): (403, "a client cannot delete models: quire rm MODEL"),
    ("POST", "/api/create"): (501, MAKES),
    ("POST", "/api/copy"): (501, "another name for a model is quire serve --served-model-name"),
    ("POST", "/api/push"): (501, "a folder is put on the Hub by `hf upload`"),
    ("POST", "/api/blobs/{digest}"): (501, MAKES),
    ("HEAD", "/api/blobs/{digest}"): (404, MAKES),
}
ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/api/chat"): partial(write, protocol(ollama.parse_chat)),
    ("POST", "/api/generate"): partial(write, protocol(ollama.parse_generate)),
    ("POST", "/api/embed"): partial(embed, ollama.parse_embed),
    ("POST", "/api/embeddings"): partial(embed, ollama.parse_embeddings),
    ("GET", "/api/tags"): tags,
    ("GET", "/api/ps"): running,
    ("POST", "/api/show"): show,
    ("GET", "/api/version"): version,
    ("POST", "/api/pull"): pull,
    **{route: partial(refused, status, why) for route, (status, why) in REFUSED.items()},
}
