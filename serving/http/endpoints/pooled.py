"""Embeddings, class probabilities and scores: requests that generate no text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request

from ....model.config import ModelConfig
from ...api.errors import EngineError, RequestError, TooLong
from ...api.outputs import RequestOutput
from ...api.params import SamplingParams
from ...async_llm import EngineRequest
from ...engine.engine import Engine
from ...engine.thread import EngineFailed
from ...protocol import cohere, label_scores
from ...protocol import pooling as shapes
from ...protocol.answers.answer import ResponseHead, Usage
from ...protocol.schema import ALIASES
from ...protocol.tokens import check_token_ids
from ...request import classes, pooling
from ...request.pair_scores import PairScores, pair_scores
from .. import prompting
from ..answering import end_on_disconnect
from ..errors import HttpError, JsonResponse
from ..guard import new_id
from ..service import Service
from ..settings import ServerSettings

LABEL = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


class PooledAnswer(NamedTuple):
    """A parsed request, the outputs for all its prompts, and the engine that computed them."""

    head: ResponseHead
    parsed: Any
    outputs: list[RequestOutput]
    usage: Usage
    engine: Engine


async def read_and_compute(
    service: Service,
    request: Request,
    prefix: str,
    parse: Callable[[Any], Any],
    prepare: Callable[..., list[EngineRequest]],
) -> PooledAnswer:
    """Receive and parse a request, and compute the outputs for all its prompts."""
    parsed, _ = await service.read(request, parse)
    return await compute_outputs(service, request, prefix, parsed, prepare)


async def compute_outputs(
    service: Service,
    request: Request,
    prefix: str,
    parsed: Any,
    prepare: Callable[..., list[EngineRequest]],
) -> PooledAnswer:
    """Compute the outputs for all prompts of a parsed request."""
    async with service.open_request(), service.models.use(parsed.model) as model:
        request_options = service.tenant_options(parsed.request_options, service.key(request))
        parsed = replace(
            parsed,
            request_options=await service.terms_with_adapter(model, parsed.model, request_options),
        )
        engine_requests = await service.run_in_thread(prepare, model.llm.engine, parsed)
        name = f"{prefix}{new_id()}"
        answers = await model.llm.ask(
            [f"{name}-{i}" for i in range(len(engine_requests))], engine_requests, at_end=True
        )
        async with end_on_disconnect(request.receive, answers):
            outputs = await answers.outputs()
        check_finished(outputs)
        usage = Usage(
            sum(len(ask.tokens) for ask in engine_requests),
            0,
            sum(output.num_cached_tokens for output in outputs),
        )
        request.state.facts |= {"model": model.name, "prompt_tokens": usage.prompt_tokens}
        return PooledAnswer(
            service.head(name, parsed.model or model.name), parsed, outputs, usage, model.llm.engine
        )


def check_finished(outputs: list[RequestOutput]) -> None:
    """Raise an error if some output is incomplete: half a text has no vector and no score."""
    reasons = {answer.finish_reason for output in outputs for answer in output.outputs}
    if "error" in reasons:
        raise EngineError("the engine failed on this request; it can be sent again")
    if "timeout" in reasons:
        raise HttpError(408, "timeout: the time was over before all was read", "timeout")
    if "abort" in reasons:
        raise EngineFailed("the request was cut off")


async def embeddings(service: Service, request: Request) -> JsonResponse:
    result = await read_and_compute(
        service, request, "embd-", shapes.parse_embeddings, requests_for_embeddings
    )
    usage = usage_body(service, result.usage)
    return JsonResponse(
        shapes.embeddings_response(result.head, result.parsed, embedding_vectors(result), usage)
    )


def usage_body(service: Service, usage: Usage) -> dict[str, Any]:
    return shapes.usage_body(usage, service.settings.enable_prompt_tokens_details)


def embedding_vectors(result: PooledAnswer) -> list[Sequence[float]]:
    dimensions = result.parsed.dimensions
    normalize = result.engine.embedder.normalize
    return [
        pooling.embedding(output, dimensions, normalize).outputs.embedding
        for output in result.outputs
    ]


async def embed(service: Service, request: Request) -> JsonResponse:
    """Embeddings in Cohere's form."""
    result = await read_and_compute(service, request, "embd-", cohere.parse, requests_for_texts)
    return JsonResponse(
        cohere.response(result.head, result.parsed, embedding_vectors(result), result.usage)
    )


def requests_for_texts(
    engine: Engine,
    parsed: cohere.EmbedRequest,
    texts: str = "texts",
    dimension: str = "output_dimension",
) -> list[EngineRequest]:
    """Engine requests for texts; errors name the fields `texts` and `dimension`."""
    pooling.check_dimensions(parsed.dimensions, engine.config, dimension)
    engine_requests = []
    embedder = engine.embedder
    max_tokens = min(
        limit
        for limit in (engine.admission.max_prompt_tokens, parsed.max_tokens, embedder.max_tokens)
        if limit is not None
    )
    side = {"END": "right", "START": "left"}.get(parsed.truncate)
    name = cohere.PROMPT_NAMES.get(parsed.input_type)
    prefix = pooling.prompt_prefix(embedder, name if name in embedder.prompts else None)
    for i, text in enumerate(parsed.texts):
        text = prefix + text if text else text
        if side is None:
            tokens = prompting.encode(engine, f"{texts}[{i}]", text, True)
            if len(tokens) > max_tokens:
                raise TooLong(
                    f"{texts}[{i}]", f"has {len(tokens)} tokens; at most {max_tokens} are read"
                )
        else:
            tokens = prompting.encode_truncated(engine, f"{texts}[{i}]", text, max_tokens, side)
        engine_requests.append(
            EngineRequest(tokens, pooling.PARAMS, text, parsed.request_options, embedder.pooling)
        )
    return engine_requests


def requests_for_embeddings(engine: Engine, parsed: shapes.EmbeddingRequest) -> list[EngineRequest]:
    pooling.check_dimensions(parsed.dimensions, engine.config)
    embedder = engine.embedder
    prefix = pooling.prompt_prefix(embedder, None)
    parsed = replace(
        parsed,
        prompts=[
            prefix + prompt if prompt and isinstance(prompt, str) else prompt
            for prompt in parsed.prompts
        ],
    )
    prompts = prompting.encode_prompts(engine, "input", parsed, pooling.PARAMS, embedder.max_tokens)
    return [
        EngineRequest(tokens, pooling.PARAMS, text, parsed.request_options, embedder.pooling)
        for text, tokens in prompts
    ]


async def classify(service: Service, request: Request) -> JsonResponse:
    result = await read_and_compute(
        service, request, "classify-", shapes.parse_classify, requests_for_classes
    )
    config = result.engine.config
    assert config.classes is not None
    probs = [classes.probabilities(output, config) for output in result.outputs]
    usage = usage_body(service, result.usage)
    return JsonResponse(shapes.classify_response(result.head, config.classes.labels, probs, usage))


async def pool(service: Service, request: Request) -> JsonResponse:
    """The pooled output for each text: class probabilities, a reward, or an embedding."""
    result = await read_and_compute(
        service, request, "pool-", shapes.parse_pooling, requests_for_pooling
    )
    config = result.engine.config
    usage = usage_body(service, result.usage)
    if config.classes is None:
        vectors = embedding_vectors(result)
    elif is_reward(config):
        vectors = [classes.reward_output(output, config).outputs.data for output in result.outputs]
    else:
        vectors = [classes.probabilities(output, config) for output in result.outputs]
    return JsonResponse(shapes.pooling_response(result.head, result.parsed, vectors, usage))


def requests_for_pooling(engine: Engine, parsed: shapes.EmbeddingRequest) -> list[EngineRequest]:
    config = engine.config
    task = "embed" if config.classes is None else "classify"
    if parsed.task not in (None, task):
        raise RequestError("task", f"is {parsed.task}, and this model's is {task}; leave it out")
    if config.classes is None:
        return requests_for_embeddings(engine, parsed)
    if parsed.dimensions is not None:
        raise RequestError("dimensions", "is for models that make embeddings; leave it out")
    engine_requests = requests_for_classes(engine, parsed)
    return (
        engine_requests
        if config.classes.step is None
        else [ask._replace(pooling="steps") for ask in engine_requests]
    )


def is_reward(config: ModelConfig) -> bool:
    return config.classes is not None and (
        config.classes.step is not None or len(config.classes.labels) == 1
    )


def requests_for_classes(engine: Engine, parsed: shapes.EmbeddingRequest) -> list[EngineRequest]:
    classes.check_classifier(engine.config)
    prompts = prompting.encode_prompts(engine, "input", parsed, pooling.PARAMS)
    return [
        EngineRequest(tokens, pooling.PARAMS, text, parsed.request_options, "last")
        for text, tokens in prompts
    ]


async def score(service: Service, request: Request) -> JsonResponse:
    head, _, scores, usage, _ = await compute_scores(service, request, "score-", shapes.parse_score)
    return JsonResponse(shapes.score_response(head, scores, usage_body(service, usage)))


async def rerank(service: Service, request: Request) -> JsonResponse:
    head, parsed, scores, usage, ranked_by = await compute_scores(
        service, request, "rerank-", shapes.parse_rerank
    )
    return JsonResponse(
        shapes.rerank_response(head, parsed, scores, usage_body(service, usage), ranked_by)
    )


async def compute_scores(
    service: Service, request: Request, prefix: str, parse: Callable[[Any], Any]
) -> tuple[Any, ...]:
    pair_scorers: list[PairScores] = []

    def prepare(engine: Engine, parsed: shapes.ScoreRequest) -> list[EngineRequest]:
        for pair in parsed.pairs:
            if engine.embedder.max_tokens is None:
                prompting.check_length(engine, "text_1", "".join(pair))
        tokenizer = prompting.require_tokenizer(engine)
        pair_scorers.append(
            pair_scores(engine.config, engine.embedder, tokenizer, parsed.pairs, parsed.ranks)
        )
        return [
            EngineRequest(
                scored_prompt.tokens,
                scored_prompt.params,
                None,
                parsed.request_options,
                scored_prompt.pooling,
                scored_prompt.second_start,
            )
            for scored_prompt in pair_scorers[0].prompts
        ]

    answered = await read_and_compute(service, request, prefix, parse, prepare)
    scores = [output.outputs.score for output in pair_scorers[0].scores(answered.outputs)]
    return answered.head, answered.parsed, scores, answered.usage, pair_scorers[0].ranked_by


async def generative_scoring(service: Service, request: Request) -> JsonResponse:
    head, parsed, outputs, usage, _ = await read_and_compute(
        service,
        request,
        "generative-scoring-",
        label_scores.parse,
        partial(requests_for_labels, service.settings),
    )
    steps = [
        step for output in outputs for answer in output.outputs for step in answer.logprobs or ()
    ]
    scores = [
        label_scores.score([step[label].logprob for label in parsed.labels], parsed.apply_softmax)
        for step in steps
    ]
    usage_counts = usage_body(service, usage) | {"completion_tokens": len(steps)}
    usage_counts["total_tokens"] += len(steps)
    return JsonResponse(shapes.score_response(head, scores, usage_counts))


def requests_for_labels(
    settings: ServerSettings, engine: Engine, parsed: label_scores.LabelRequest
) -> list[EngineRequest]:
    """One engine request per item, for the log-probabilities of the labels as the next token."""
    if (num_items := len(parsed.items)) > settings.max_choices:
        raise RequestError(
            "items", f"must be at most {settings.max_choices} (--max-choices), got {num_items}"
        )
    check_token_ids(list(parsed.labels), engine.config.vocab_size, "label_token_ids")

    def tokens_of(param: str, text_or_tokens: str | list[int], special: bool) -> list[int]:
        if isinstance(text_or_tokens, list):
            return check_token_ids(text_or_tokens, engine.config.vocab_size, param)
        return prompting.encode(engine, param, text_or_tokens, special)

    engine_requests = []
    params = replace(LABEL, logprob_token_ids=parsed.labels)
    query = tokens_of("query", parsed.query, parsed.add_special_tokens)
    for i, text_or_tokens in enumerate(parsed.items):
        item = tokens_of(f"items[{i}]", text_or_tokens, False)
        tokens = item + query if parsed.item_first else query + item
        engine.admission.check(tokens, params)
        engine_requests.append(EngineRequest(tokens, params, None, parsed.request_options))
    return engine_requests


ROUTES: dict[tuple[str, str], Callable] = {
    ("POST", "/v1/embeddings"): embeddings,
    ("POST", "/v2/embed"): embed,
    ("POST", "/classify"): classify,
    ("POST", "/score"): score,
    ("POST", "/generative_scoring"): generative_scoring,
    ("POST", "/rerank"): rerank,
    ("POST", "/pooling"): pool,
}
ROUTES |= {("POST", alias): ROUTES["POST", path] for alias, path in ALIASES.items()}
