"""/v1/embeddings as OpenAI has it, /classify, /score and /rerank as vLLM, Jina and Cohere have them."""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..api.errors import RequestError
from ..api.params import PLAIN, Terms
from ..api.validation import boolean, integer, items, refuse_unknown, shown
from ..api.validation import unicode_text as unicode
from .answers.answer import Head, Usage
from .completion import MAX_PROMPTS, parse_prompts
from .fields import LABELS, TERMS, TRUNCATION, known_fields, terms_of, truncation

EMBEDDINGS = (
    "model", "input", "encoding_format", "dimensions", "add_special_tokens", *TRUNCATION, *TERMS, *LABELS,
)  # fmt: skip
POOLING = (*EMBEDDINGS, "task")
TASKS = ("embed", "classify")
CLASSIFY = ("model", "input", "add_special_tokens", *TRUNCATION, *TERMS, *LABELS)
# Names of the two sides of /score. Documents and queries are scored as /rerank does it.
SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("documents", "queries"), ("items", "queries"))
SCORE = ("model", *dict.fromkeys(name for pair in SIDES for name in pair), *TERMS, *LABELS)
RERANK = ("model", "query", "documents", "top_n", "return_documents", *TERMS, *LABELS)
MAX_DIMENSIONS = 65_536


@dataclass(frozen=True)
class EmbeddingRequest:
    """Texts, or token ids, that are to be vectors."""

    prompts: list[str | list[int]]
    model: str | None = None
    terms: Terms = PLAIN
    encoding_format: str = "float"
    dimensions: int | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    task: str | None = None  # of /pooling: what the model must be for


@dataclass(frozen=True)
class ScoreRequest:
    """Pairs of texts: a query and a document as a rule."""

    pairs: list[tuple[str, str]]
    model: str | None = None
    terms: Terms = PLAIN
    ranks: bool = False  # a model that writes says how likely the query is after the document, not the other way round


@dataclass(frozen=True)
class RerankRequest(ScoreRequest):
    """The pairs are the query with each document."""

    top_n: int = 0  # 0: all
    return_documents: bool = True


def parse_classify(body: Any) -> EmbeddingRequest:
    return parse_prompts_of(known_fields(body, CLASSIFY, {}))


def parse_embeddings(body: Any) -> EmbeddingRequest:
    return parse_prompts_of(known_fields(body, EMBEDDINGS, {}))


def parse_pooling(body: Any) -> EmbeddingRequest:
    given = known_fields(body, POOLING, {})
    task = given.get("task")
    if task is not None and task not in TASKS:
        raise RequestError("task", f"must be one of {', '.join(TASKS)}, got {shown(task)}")
    return replace(parse_prompts_of(given), task=task)


def parse_prompts_of(given: Mapping[str, Any]) -> EmbeddingRequest:
    form = given.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise RequestError("encoding_format", f"must be float or base64, got {shown(form)}")
    dimensions = given.get("dimensions")
    return EmbeddingRequest(
        parse_prompts(given.get("input"), "input"),
        given.get("model"),
        terms_of(given),
        form,
        None if dimensions is None else integer("dimensions", dimensions, 1, MAX_DIMENSIONS),
        boolean("add_special_tokens", given.get("add_special_tokens", True)),
        **truncation(given),
    )


def parse_score(body: Any) -> ScoreRequest:
    """One text against one or many, or as many against as many."""
    given = known_fields(body, SCORE, {})
    known = {name for pair in SIDES for name in pair if name in given}
    names = next((pair for pair in SIDES if known == set(pair)), None)
    if names is None:
        pairs = ", ".join(f"{one} and {other}" for one, other in SIDES)
        got = " and ".join(sorted(known)) or "none"
        raise RequestError("text_1", f"and text_2 must be given, or another of the pairs {pairs}; got {got}")
    first, second = (texts(name, given[name]) for name in names)
    single, others = (second, first) if names[1] == "queries" else (first, second)
    if len(single) == 1:
        single *= len(others)
    if len(single) != len(others):
        one, other = reversed(names) if names[1] == "queries" else names
        told = f"must be as many texts as {one}, or {one} a single one; got {len(others)} and {len(single)}"
        raise RequestError(other, told)
    pairs = list(zip(single, others, strict=True))
    return ScoreRequest(pairs, given.get("model"), terms_of(given), names[1] == "queries")


def parse_rerank(body: Any) -> RerankRequest:
    given = known_fields(body, RERANK, {})
    query = unicode("query", given.get("query"))
    documents = [document(f"documents[{i}]", one) for i, one in enumerate(listed("documents", given.get("documents")))]
    top = integer("top_n", given.get("top_n", 0), 0, MAX_PROMPTS)
    keeps = boolean("return_documents", given.get("return_documents", True))
    pairs = [(query, text) for text in documents]
    return RerankRequest(pairs, given.get("model"), terms_of(given), True, top, keeps)


def texts(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [unicode(name, value)]
    return [unicode(f"{name}[{i}]", one) for i, one in enumerate(listed(name, value))]


def listed(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise RequestError(name, f"must be a list of one or more texts, got {shown(value)}")
    return items(name, value, MAX_PROMPTS)


def document(where: str, value: Any) -> str:
    if isinstance(value, Mapping):
        refuse_unknown(value, ("text",), f"{where}.")
        value = value.get("text")
    return unicode(where, value)


def usage_body(usage: Usage, detailed: bool) -> dict[str, Any]:
    found = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return found | ({"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}} if detailed else {})


def embeddings_response(
    head: Head, request: EmbeddingRequest, vectors: Sequence[Sequence[float]], usage: dict[str, Any]
) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": i, "embedding": coded(vector, request.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    return {"object": "list", "model": head.model, "data": data, "usage": usage}


def coded(vector: Sequence[float], encoding_format: str) -> list[float] | str:
    if encoding_format == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def pooling_response(
    head: Head, request: EmbeddingRequest, vectors: Sequence[Sequence[float]], usage: dict[str, Any]
) -> dict[str, Any]:
    data = [
        {"object": "pooling", "index": i, "data": coded(vector, request.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    return {
        "id": head.id, "object": "list", "created": head.created, "model": head.model, "data": data, "usage": usage,
    }  # fmt: skip


def classify_response(
    head: Head, labels: Sequence[str], probs: Sequence[Sequence[float]], usage: dict[str, Any]
) -> dict[str, Any]:
    """Each text's likeliest class, and the probabilities of all."""
    data = [
        {"index": i, "label": labels[max(range(len(own)), key=own.__getitem__)], "probs": own, "num_classes": len(own)}
        for i, own in enumerate(probs)
    ]
    return {
        "id": head.id, "object": "list", "created": head.created, "model": head.model, "data": data, "usage": usage,
    }  # fmt: skip


def score_response(head: Head, scores: Sequence[float], usage: dict[str, Any]) -> dict[str, Any]:
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    common = {"id": head.id, "object": "list", "created": head.created, "model": head.model}
    return common | {"data": data, "usage": usage}


def rerank_response(
    head: Head, request: RerankRequest, scores: Sequence[float], usage: dict[str, Any], ranked_by: str
) -> dict[str, Any]:
    """The best first; those that are equal stay in their order."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: request.top_n or None]
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": request.pairs[i][1]}} if request.return_documents else {})
        for i in order
    ]
    return {"id": head.id, "model": head.model, "usage": usage, "results": results, "ranked_by": ranked_by}
