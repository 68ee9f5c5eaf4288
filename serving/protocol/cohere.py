"""Cohere's /v2/embed: a body to a request, vectors to a body."""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.errors import RequestError
from ..api.params import PLAIN, Terms
from ..api.validation import INT32_MAX, integer, shown
from ..api.validation import unicode_text as unicode
from .answers.answer import Head, Usage
from .fields import TERMS, known_fields, terms_of
from .objects import listed, plain, texts
from .pooling import MAX_DIMENSIONS, MAX_PROMPTS

FIELDS = (
    "model", "texts", "inputs", "input_type", "embedding_types", "output_dimension", "max_tokens", "truncate", *TERMS,
)  # fmt: skip
REFUSED = {"images": "cannot be read here; leave it out"}
# What the texts are for. Without a prompt of the model's for it, it has no effect.
INPUT_TYPES = ("search_document", "search_query", "classification", "clustering")
# The names that such prompts have in sentence-transformers' folders.
PROMPT_NAMES: Mapping[str | None, str] = {
    "search_document": "document", "search_query": "query", "classification": "classification",
    "clustering": "clustering",
}  # fmt: skip
EMBEDDING_TYPES = ("float", "base64", "binary", "ubinary")
TRUNCATE = ("END", "START", "NONE")
TEXT = {"text": ("text",)}


@dataclass(frozen=True)
class EmbedRequest:
    """Texts that are to be vectors."""

    texts: list[str]
    model: str | None = None
    terms: Terms = PLAIN
    input_type: str | None = None
    embedding_types: Sequence[str] = ("float",)
    dimensions: int | None = None
    max_tokens: int | None = None
    truncate: str = "END"  # which end of a text that is too long is left out; NONE: it is refused


def parse(body: Any) -> EmbedRequest:
    """The request in a body."""
    given = known_fields(body, FIELDS, {}, REFUSED)
    types = listed("embedding_types", given.get("embedding_types", ["float"]), len(EMBEDDING_TYPES), least=1)
    dimension, most = given.get("output_dimension"), given.get("max_tokens")
    return EmbedRequest(
        parse_texts(given),
        given.get("model"),
        terms_of(given),
        None if "input_type" not in given else one_of("input_type", given["input_type"], INPUT_TYPES),
        [one_of(f"embedding_types[{i}]", kind, EMBEDDING_TYPES) for i, kind in enumerate(types)],
        None if dimension is None else integer("output_dimension", dimension, 1, MAX_DIMENSIONS),
        None if most is None else integer("max_tokens", most, 1, INT32_MAX),
        one_of("truncate", given.get("truncate", "END"), TRUNCATE),
    )


def parse_texts(given: Mapping[str, Any]) -> list[str]:
    if ("texts" in given) == ("inputs" in given):
        raise RequestError("texts", "or inputs must be given, and not both")
    if "texts" in given:
        return [
            unicode(f"texts[{i}]", text) for i, text in enumerate(listed("texts", given["texts"], MAX_PROMPTS, least=1))
        ]
    found = []
    for i, value in enumerate(listed("inputs", given["inputs"], MAX_PROMPTS, least=1)):
        content = plain(f"inputs[{i}]", value, ("content",)).get("content")
        found.append(texts(f"inputs[{i}].content", content, TEXT, MAX_PROMPTS))
    return found


def one_of(where: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        raise RequestError(where, f"must be {' or '.join(known)}, got {shown(value)}")
    return value


def response(head: Head, request: EmbedRequest, vectors: Sequence[Sequence[float]], usage: Usage) -> dict[str, Any]:
    """The vectors in each of the forms that were asked for."""
    tokens = {"input_tokens": usage.prompt_tokens, "output_tokens": 0}
    return {
        "id": head.id,
        "embeddings": {kind: [FORMS[kind](vector) for vector in vectors] for kind in request.embedding_types},
        "texts": request.texts,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": usage.prompt_tokens},
            "tokens": tokens,
        },
        "response_type": "embeddings_by_type",
    }


def coded(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def bits(vector: Sequence[float]) -> list[int]:
    """The signs, eight a byte, the first in the highest bit; what a last byte lacks is 0."""
    signs = [value > 0 for value in vector]
    return [
        sum(sign << (7 - place) for place, sign in enumerate(signs[start : start + 8]))
        for start in range(0, len(signs), 8)
    ]


FORMS = {
    "float": list,
    "base64": coded,
    "ubinary": bits,
    "binary": lambda vector: [byte - 128 for byte in bits(vector)],
}
