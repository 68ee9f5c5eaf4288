"""/v1/embeddings, /score and /rerank: prompts are computed, and no token is generated."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from ...api.errors import EngineError
from ...api.outputs import RequestOutput
from ...async_llm import Ask
from ...engine.engine import Engine
from ...engine.thread import EngineFailed
from ...protocol import pooling as shapes
from ...protocol.answers.answer import Head, Usage
from ...request import pooling, scoring
from .. import prompting
from ..answering import watched
from ..errors import HttpError, JsonResponse
from ..guard import new_id
from ..service import Service


async def outputs_of(
    service: Service, request: Request, prefix: str, parse: Callable[[Any], Any], prepare: Callable[..., list[Ask]]
) -> tuple[Head, Any, list[RequestOutput], Usage]:
    """The outputs for all prompts of a request, when they are computed."""
    asked, _ = await service.read(request, parse)
    async with service.counted(), service.models.use(asked.model) as model:
        asked = replace(asked, terms=service.terms(asked.terms, service.key(request)))
        asks = await service.beside(prepare, model.llm.engine, asked)
        name = f"{prefix}{new_id()}"
        answers = await model.llm.ask([f"{name}-{i}" for i in range(len(asks))], asks, at_end=True)
        async with watched(request.receive, answers):
            outputs = await answers.outputs()
        check_ends(outputs)
        usage = Usage(sum(len(ask.tokens) for ask in asks), 0, sum(output.num_cached_tokens for output in outputs))
        request.state.facts |= {"model": model.name, "prompt_tokens": usage.prompt_tokens}
        return service.head(name, asked.model or model.name), asked, outputs, usage


def check_ends(outputs: list[RequestOutput]) -> None:
    """There is no half of a vector, and no score of half a text."""
    reasons = {answer.finish_reason for output in outputs for answer in output.outputs}
    if "error" in reasons:
        raise EngineError("the engine failed on this request; it can be sent again")
    if "timeout" in reasons:
        raise HttpError(408, "timeout: the time was over before all was read", "timeout")
    if "abort" in reasons:
        raise EngineFailed("the request was cut off")


async def embeddings(service: Service, request: Request) -> JsonResponse:
    found = await outputs_of(service, request, "embd-", shapes.parse_embeddings, ask_for_vectors)
    head, asked, outputs, usage = found
    vectors = [pooling.embedding(output, asked.dimensions).outputs.embedding for output in outputs]
    return JsonResponse(shapes.embeddings_response(head, asked, vectors, usage))


def ask_for_vectors(engine: Engine, asked: shapes.EmbeddingRequest) -> list[Ask]:
    pooling.check_dimensions(asked.dimensions, engine.config.dim)
    prompts = prompting.prompts_of(engine, "input", asked, pooling.PARAMS)
    return [Ask(tokens, pooling.PARAMS, text, asked.terms, engine.pooling) for text, tokens in prompts]


async def score(service: Service, request: Request) -> JsonResponse:
    head, _, scores, usage = await scores_of(service, request, "score-", shapes.parse_score)
    return JsonResponse(shapes.score_response(head, scores, usage))


async def rerank(service: Service, request: Request) -> JsonResponse:
    head, asked, scores, usage = await scores_of(service, request, "rerank-", shapes.parse_rerank)
    return JsonResponse(shapes.rerank_response(head, asked, scores, usage))


async def scores_of(service: Service, request: Request, prefix: str, parse: Callable[[Any], Any]) -> tuple[Any, ...]:
    firsts: list[int] = []  # where the second text of each pair begins

    def prepare(engine: Engine, asked: shapes.ScoreRequest) -> list[Ask]:
        asks = []
        for pair in asked.pairs:
            prompting.check_length(engine, "text_1", "".join(pair))
            tokens, first = scoring.pair_tokens(prompting.needs_tokenizer(engine), *pair)
            firsts.append(first)
            asks.append(Ask(tokens, scoring.PARAMS, None, asked.terms))
        return asks

    head, asked, outputs, usage = await outputs_of(service, request, prefix, parse, prepare)
    return head, asked, list(map(value, outputs, firsts)), usage


def value(output: RequestOutput, first: int) -> float:
    return scoring.scored(output, first).outputs.score


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/embeddings"): embeddings,
    ("POST", "/score"): score,
    ("POST", "/rerank"): rerank,
}
