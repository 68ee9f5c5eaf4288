"""OpenAI's /v1/embeddings; /classify, /score and /rerank of vLLM, Jina and Cohere."""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..api.errors import RequestError
from ..api.params import PLAIN, RequestOptions
from ..api.validation import boolean, integer, items, refuse_unknown, shown
from ..api.validation import unicode_text as unicode
from .answers.answer import ResponseHead, Usage
from .completion import MAX_PROMPTS, parse_prompts
from .fields import (
    LABELS,
    REQUEST_OPTIONS,
    TRUNCATION,
    known_fields,
    parse_request_options,
    parse_truncation,
)

EMBEDDINGS = (
    "model",
    "input",
    "encoding_format",
    "dimensions",
    "add_special_tokens",
    *TRUNCATION,
    *REQUEST_OPTIONS,
    *LABELS,
)
POOLING = (*EMBEDDINGS, "task")
TASKS = ("embed", "classify")
CLASSIFY = ("model", "input", "add_special_tokens", *TRUNCATION, *REQUEST_OPTIONS, *LABELS)
# Field names of the text pairs of /score. Documents and queries are scored as by /rerank.
SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("documents", "queries"), ("items", "queries"))
SCORE = (
    "model",
    *dict.fromkeys(name for pair in SIDES for name in pair),
    *REQUEST_OPTIONS,
    *LABELS,
)
RERANK = ("model", "query", "documents", "top_n", "return_documents", *REQUEST_OPTIONS, *LABELS)
MAX_DIMENSIONS = 65_536


@dataclass(frozen=True)
class EmbeddingRequest:
    """Texts or token ids to embed or to classify."""

    prompts: list[str | list[int]]
    model: str | None = None
    request_options: RequestOptions = PLAIN
    encoding_format: str = "float"
    dimensions: int | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    task: str | None = None  # /pooling: the task that the model must have


@dataclass(frozen=True)
class ScoreRequest:
    """Pairs of texts to score, such as a query and a document."""

    pairs: list[tuple[str, str]]
    model: str | None = None
    request_options: RequestOptions = PLAIN
    # A generative model scores the query after the document, and not the document after the query.
    ranks: bool = False


@dataclass(frozen=True)
class RerankRequest(ScoreRequest):
    """The pairs are the query with each document."""

    top_n: int = 0  # 0: all
    return_documents: bool = True


def parse_classify(body: Any) -> EmbeddingRequest:
    return make_embedding_request(known_fields(body, CLASSIFY, {}))


def parse_embeddings(body: Any) -> EmbeddingRequest:
    return make_embedding_request(known_fields(body, EMBEDDINGS, {}))


def parse_pooling(body: Any) -> EmbeddingRequest:
    fields = known_fields(body, POOLING, {})
    task = fields.get("task")
    if task is not None and task not in TASKS:
        raise RequestError("task", f"must be one of {', '.join(TASKS)}, got {shown(task)}")
    return replace(make_embedding_request(fields), task=task)


def make_embedding_request(fields: Mapping[str, Any]) -> EmbeddingRequest:
    form = fields.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise RequestError("encoding_format", f"must be float or base64, got {shown(form)}")
    dimensions = fields.get("dimensions")
    return EmbeddingRequest(
        parse_prompts(fields.get("input"), "input"),
        fields.get("model"),
        parse_request_options(fields),
        form,
        None if dimensions is None else integer("dimensions", dimensions, 1, MAX_DIMENSIONS),
        boolean("add_special_tokens", fields.get("add_special_tokens", True)),
        **parse_truncation(fields),
    )


def parse_score(body: Any) -> ScoreRequest:
    """Parse a body of /score: one text with one or many, or pairs of equally many texts."""
    fields = known_fields(body, SCORE, {})
    given_names = {name for pair in SIDES for name in pair if name in fields}
    names = next((pair for pair in SIDES if given_names == set(pair)), None)
    if names is None:
        pairs = ", ".join(f"{first_name} and {second_name}" for first_name, second_name in SIDES)
        received = " and ".join(sorted(given_names)) or "none"
        raise RequestError(
            "text_1", f"and text_2 must be given, or another of the pairs {pairs}; got {received}"
        )
    first_texts, second_texts = (texts(name, fields[name]) for name in names)
    queries, documents = (
        (second_texts, first_texts) if names[1] == "queries" else (first_texts, second_texts)
    )
    if len(queries) == 1:
        queries *= len(documents)
    if len(queries) != len(documents):
        first_name, second_name = reversed(names) if names[1] == "queries" else names
        message = f"must be as many texts as {first_name}, or {first_name} a single one"
        raise RequestError(second_name, f"{message}; got {len(documents)} and {len(queries)}")
    pairs = list(zip(queries, documents, strict=True))
    return ScoreRequest(
        pairs, fields.get("model"), parse_request_options(fields), names[1] == "queries"
    )


def parse_rerank(body: Any) -> RerankRequest:
    fields = known_fields(body, RERANK, {})
    query = unicode("query", fields.get("query"))
    documents = [
        document_text(f"documents[{i}]", text)
        for i, text in enumerate(text_list("documents", fields.get("documents")))
    ]
    top_n = integer("top_n", fields.get("top_n", 0), 0, MAX_PROMPTS)
    return_documents = boolean("return_documents", fields.get("return_documents", True))
    pairs = [(query, text) for text in documents]
    return RerankRequest(
        pairs, fields.get("model"), parse_request_options(fields), True, top_n, return_documents
    )


def texts(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [unicode(name, value)]
    return [unicode(f"{name}[{i}]", text) for i, text in enumerate(text_list(name, value))]


def text_list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise RequestError(name, f"must be a list of one or more texts, got {shown(value)}")
    return items(name, value, MAX_PROMPTS)


def document_text(param: str, value: Any) -> str:
    if isinstance(value, Mapping):
        refuse_unknown(value, ("text",), f"{param}.")
        value = value.get("text")
    return unicode(param, value)


def usage_body(usage: Usage, detailed: bool) -> dict[str, Any]:
    body = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return body | (
        {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}} if detailed else {}
    )


def embeddings_response(
    head: ResponseHead,
    request: EmbeddingRequest,
    vectors: Sequence[Sequence[float]],
    usage: dict[str, Any],
) -> dict[str, Any]:
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": encode_vector(vector, request.encoding_format),
        }
        for i, vector in enumerate(vectors)
    ]
    return {"object": "list", "model": head.model, "data": data, "usage": usage}


def encode_vector(vector: Sequence[float], encoding_format: str) -> list[float] | str:
    if encoding_format == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def pooling_response(
    head: ResponseHead,
    request: EmbeddingRequest,
    vectors: Sequence[Sequence[float]],
    usage: dict[str, Any],
) -> dict[str, Any]:
    data = [
        {"object": "pooling", "index": i, "data": encode_vector(vector, request.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    return {
        "id": head.id,
        "object": "list",
        "created": head.created,
        "model": head.model,
        "data": data,
        "usage": usage,
    }


def classify_response(
    head: ResponseHead,
    labels: Sequence[str],
    probs: Sequence[Sequence[float]],
    usage: dict[str, Any],
) -> dict[str, Any]:
    """The likeliest class of each text, and the probabilities of all classes."""
    data = [
        {
            "index": i,
            "label": labels[max(range(len(class_probs)), key=class_probs.__getitem__)],
            "probs": class_probs,
            "num_classes": len(class_probs),
        }
        for i, class_probs in enumerate(probs)
    ]
    return {
        "id": head.id,
        "object": "list",
        "created": head.created,
        "model": head.model,
        "data": data,
        "usage": usage,
    }


def score_response(
    head: ResponseHead, scores: Sequence[float], usage: dict[str, Any]
) -> dict[str, Any]:
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    common = {"id": head.id, "object": "list", "created": head.created, "model": head.model}
    return common | {"data": data, "usage": usage}


def rerank_response(
    head: ResponseHead,
    request: RerankRequest,
    scores: Sequence[float],
    usage: dict[str, Any],
    ranked_by: str,
) -> dict[str, Any]:
    """Documents by descending score; equal scores keep their order."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: request.top_n or None]
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": request.pairs[i][1]}} if request.return_documents else {})
        for i in order
    ]
    return {
        "id": head.id,
        "model": head.model,
        "usage": usage,
        "results": results,
        "ranked_by": ranked_by,
    }
