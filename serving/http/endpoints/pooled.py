"""Vectors and scores: prompts are computed, and no text is written."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request

from ....model.config import ModelConfig
from ...api.errors import EngineError, RequestError, TooLong
from ...api.outputs import RequestOutput
from ...api.params import SamplingParams
from ...async_llm import Ask
from ...engine.engine import Engine
from ...engine.thread import EngineFailed
from ...protocol import cohere, label_scores
from ...protocol import pooling as shapes
from ...protocol.answers.answer import Head, Usage
from ...protocol.schema import ALIASES
from ...protocol.tokens import checked
from ...request import classes, pooling
from ...request.pair_scores import PairScores, pair_scores
from .. import prompting
from ..answering import watched
from ..errors import HttpError, JsonResponse
from ..guard import new_id
from ..service import Service
from ..settings import ServerSettings

LABEL = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


class Answered(NamedTuple):
    """A request, the outputs for all its prompts, and the engine that computed them."""

    head: Head
    asked: Any
    outputs: list[RequestOutput]
    usage: Usage
    engine: Engine


async def outputs_of(
    service: Service, request: Request, prefix: str, parse: Callable[[Any], Any], prepare: Callable[..., list[Ask]]
) -> Answered:
    """The outputs for all prompts of a request, when they are computed."""
    asked, _ = await service.read(request, parse)
    return await outputs_for(service, request, prefix, asked, prepare)


async def outputs_for(
    service: Service, request: Request, prefix: str, asked: Any, prepare: Callable[..., list[Ask]]
) -> Answered:
    """The same of a request that was read."""
    async with service.counted(), service.models.use(asked.model) as model:
        terms = service.terms(asked.terms, service.key(request))
        asked = replace(asked, terms=await service.adapted(model, asked.model, terms))
        asks = await service.beside(prepare, model.llm.engine, asked)
        name = f"{prefix}{new_id()}"
        answers = await model.llm.ask([f"{name}-{i}" for i in range(len(asks))], asks, at_end=True)
        async with watched(request.receive, answers):
            outputs = await answers.outputs()
        check_ends(outputs)
        usage = Usage(sum(len(ask.tokens) for ask in asks), 0, sum(output.num_cached_tokens for output in outputs))
        request.state.facts |= {"model": model.name, "prompt_tokens": usage.prompt_tokens}
        return Answered(service.head(name, asked.model or model.name), asked, outputs, usage, model.llm.engine)


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
    usage = counts(service, found.usage)
    return JsonResponse(shapes.embeddings_response(found.head, found.asked, vectors_of(found), usage))


def counts(service: Service, usage: Usage) -> dict[str, Any]:
    return shapes.usage_body(usage, service.settings.enable_prompt_tokens_details)


def vectors_of(found: Answered) -> list[Sequence[float]]:
    dimensions, normalize = found.asked.dimensions, found.engine.embedder.normalize
    return [pooling.embedding(output, dimensions, normalize).outputs.embedding for output in found.outputs]


async def embed(service: Service, request: Request) -> JsonResponse:
    """Cohere's form of the same."""
    found = await outputs_of(service, request, "embd-", cohere.parse, ask_for_texts)
    return JsonResponse(cohere.response(found.head, found.asked, vectors_of(found), found.usage))


def ask_for_texts(
    engine: Engine, asked: cohere.EmbedRequest, texts: str = "texts", dimension: str = "output_dimension"
) -> list[Ask]:
    """`texts` and `dimension` are what the fields are called."""
    pooling.check_dimensions(asked.dimensions, engine.config, dimension)
    asks, how = [], engine.embedder
    most = min(
        each for each in (engine.admission.max_prompt_tokens, asked.max_tokens, how.max_tokens) if each is not None
    )
    side = {"END": "right", "START": "left"}.get(asked.truncate)
    name = cohere.PROMPT_NAMES.get(asked.input_type)
    first = pooling.before(how, name if name in how.prompts else None)
    for i, text in enumerate(asked.texts):
        text = first + text if text else text
        if side is None:
            tokens = prompting.encode(engine, f"{texts}[{i}]", text, True)
            if len(tokens) > most:
                raise TooLong(f"{texts}[{i}]", f"has {len(tokens)} tokens; at most {most} are read")
        else:
            tokens = prompting.encode_truncated(engine, f"{texts}[{i}]", text, most, side)
        asks.append(Ask(tokens, pooling.PARAMS, text, asked.terms, how.pooling))
    return asks


def ask_for_vectors(engine: Engine, asked: shapes.EmbeddingRequest) -> list[Ask]:
    pooling.check_dimensions(asked.dimensions, engine.config)
    how = engine.embedder
    first = pooling.before(how, None)
    asked = replace(asked, prompts=[first + one if one and isinstance(one, str) else one for one in asked.prompts])
    prompts = prompting.prompts_of(engine, "input", asked, pooling.PARAMS, how.max_tokens)
    return [Ask(tokens, pooling.PARAMS, text, asked.terms, how.pooling) for text, tokens in prompts]


async def classify(service: Service, request: Request) -> JsonResponse:
    found = await outputs_of(service, request, "classify-", shapes.parse_classify, ask_for_classes)
    config = found.engine.config
    probs = [classes.probabilities(output, config) for output in found.outputs]
    usage = counts(service, found.usage)
    return JsonResponse(shapes.classify_response(found.head, config.classes.labels, probs, usage))


async def pool(service: Service, request: Request) -> JsonResponse:
    """What the model gives for each text: its classes, its reward, or a vector."""
    found = await outputs_of(service, request, "pool-", shapes.parse_pooling, ask_for_pooling)
    config, usage = found.engine.config, counts(service, found.usage)
    if config.classes is None:
        vectors = vectors_of(found)
    elif is_reward(config):
        vectors = [classes.rewarded(output, config).outputs.data for output in found.outputs]
    else:
        vectors = [classes.probabilities(output, config) for output in found.outputs]
    return JsonResponse(shapes.pooling_response(found.head, found.asked, vectors, usage))


def ask_for_pooling(engine: Engine, asked: shapes.EmbeddingRequest) -> list[Ask]:
    config = engine.config
    task = "embed" if config.classes is None else "classify"
    if asked.task not in (None, task):
        raise RequestError("task", f"is {asked.task}, and this model's is {task}; leave it out")
    if config.classes is None:
        return ask_for_vectors(engine, asked)
    if asked.dimensions is not None:
        raise RequestError("dimensions", "is for models that make embeddings; leave it out")
    asks = ask_for_classes(engine, asked)
    return asks if config.classes.step is None else [ask._replace(pooling="steps") for ask in asks]


def is_reward(config: ModelConfig) -> bool:
    return config.classes is not None and (config.classes.step is not None or len(config.classes.labels) == 1)


def ask_for_classes(engine: Engine, asked: shapes.EmbeddingRequest) -> list[Ask]:
    classes.check(engine.config)
    prompts = prompting.prompts_of(engine, "input", asked, pooling.PARAMS)
    return [Ask(tokens, pooling.PARAMS, text, asked.terms, "last") for text, tokens in prompts]


async def score(service: Service, request: Request) -> JsonResponse:
    head, _, scores, usage, _ = await scores_of(service, request, "score-", shapes.parse_score)
    return JsonResponse(shapes.score_response(head, scores, counts(service, usage)))


async def rerank(service: Service, request: Request) -> JsonResponse:
    head, asked, scores, usage, by = await scores_of(service, request, "rerank-", shapes.parse_rerank)
    return JsonResponse(shapes.rerank_response(head, asked, scores, counts(service, usage), by))


async def scores_of(service: Service, request: Request, prefix: str, parse: Callable[[Any], Any]) -> tuple[Any, ...]:
    found: list[PairScores] = []

    def prepare(engine: Engine, asked: shapes.ScoreRequest) -> list[Ask]:
        for pair in asked.pairs:
            if engine.embedder.max_tokens is None:
                prompting.check_length(engine, "text_1", "".join(pair))
        tokenizer = prompting.needs_tokenizer(engine)
        found.append(pair_scores(engine.config, engine.embedder, tokenizer, asked.pairs, asked.ranks))
        return [Ask(one.tokens, one.params, None, asked.terms, one.pooling, one.second) for one in found[0].asked]

    answered = await outputs_of(service, request, prefix, parse, prepare)
    scores = [output.outputs.score for output in found[0].scores(answered.outputs)]
    return answered.head, answered.asked, scores, answered.usage, found[0].ranked_by


async def generative_scoring(service: Service, request: Request) -> JsonResponse:
    head, asked, outputs, usage, _ = await outputs_of(
        service, request, "generative-scoring-", label_scores.parse, partial(ask_for_labels, service.settings)
    )
    steps = [step for output in outputs for answer in output.outputs for step in answer.logprobs or ()]
    scores = [
        label_scores.score([step[label].logprob for label in asked.labels], asked.apply_softmax) for step in steps
    ]
    counted = counts(service, usage) | {"completion_tokens": len(steps)}
    counted["total_tokens"] += len(steps)
    return JsonResponse(shapes.score_response(head, scores, counted))


def ask_for_labels(settings: ServerSettings, engine: Engine, asked: label_scores.LabelRequest) -> list[Ask]:
    """A request for each item, of whose next token only the log-probabilities of the labels are looked at."""
    if (number := len(asked.items)) > settings.max_choices:
        raise RequestError("items", f"must be at most {settings.max_choices} (--max-choices), got {number}")
    checked(list(asked.labels), engine.config.vocab_size, "label_token_ids")

    def tokens_of(where: str, given: str | list[int], special: bool) -> list[int]:
        if isinstance(given, list):
            return checked(given, engine.config.vocab_size, where)
        return prompting.encode(engine, where, given, special)

    asks, params = [], replace(LABEL, logprob_token_ids=asked.labels)
    query = tokens_of("query", asked.query, asked.add_special_tokens)
    for i, given in enumerate(asked.items):
        item = tokens_of(f"items[{i}]", given, False)
        tokens = item + query if asked.item_first else query + item
        engine.admission.check(tokens, params)
        asks.append(Ask(tokens, params, None, asked.terms))
    return asks


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
