"""Cohere's /v2/embed: parsing of requests, and response bodies."""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.errors import RequestError
from ..api.params import PLAIN, RequestOptions
from ..api.validation import INT32_MAX, integer, shown
from ..api.validation import unicode_text as unicode
from .answers.answer import ResponseHead, Usage
from .fields import REQUEST_OPTIONS, known_fields, parse_request_options
from .objects import join_texts, parse_list, parse_object
from .pooling import MAX_DIMENSIONS, MAX_PROMPTS

FIELDS = (
    "model",
    "texts",
    "inputs",
    "input_type",
    "embedding_types",
    "output_dimension",
    "max_tokens",
    "truncate",
    *REQUEST_OPTIONS,
)
REFUSED = {"images": "cannot be read here; leave it out"}
# The use of the texts; it selects a prompt of the model, if the model has one for it.
INPUT_TYPES = ("search_document", "search_query", "classification", "clustering")
# The names of these prompts in sentence-transformers' folders.
PROMPT_NAMES: Mapping[str | None, str] = {
    "search_document": "document", "search_query": "query", "classification": "classification",
    "clustering": "clustering",
}  # fmt: skip
EMBEDDING_TYPES = ("float", "base64", "binary", "ubinary")
TRUNCATE = ("END", "START", "NONE")
TEXT = {"text": ("text",)}


@dataclass(frozen=True)
class EmbedRequest:
    """Texts to embed."""

    texts: list[str]
    model: str | None = None
    request_options: RequestOptions = PLAIN
    input_type: str | None = None
    embedding_types: Sequence[str] = ("float",)
    dimensions: int | None = None
    max_tokens: int | None = None
    truncate: str = "END"  # the end at which a text that is too long is cut; NONE: it is refused


def parse(body: Any) -> EmbedRequest:
    """Parse a body."""
    fields = known_fields(body, FIELDS, {}, REFUSED)
    types = parse_list(
        "embedding_types", fields.get("embedding_types", ["float"]), len(EMBEDDING_TYPES), minimum=1
    )
    dimension = fields.get("output_dimension")
    max_tokens = fields.get("max_tokens")
    return EmbedRequest(
        parse_texts(fields),
        fields.get("model"),
        parse_request_options(fields),
        None
        if "input_type" not in fields
        else check_choice("input_type", fields["input_type"], INPUT_TYPES),
        [
            check_choice(f"embedding_types[{i}]", kind, EMBEDDING_TYPES)
            for i, kind in enumerate(types)
        ],
        None if dimension is None else integer("output_dimension", dimension, 1, MAX_DIMENSIONS),
        None if max_tokens is None else integer("max_tokens", max_tokens, 1, INT32_MAX),
        check_choice("truncate", fields.get("truncate", "END"), TRUNCATE),
    )


def parse_texts(fields: Mapping[str, Any]) -> list[str]:
    if ("texts" in fields) == ("inputs" in fields):
        raise RequestError("texts", "or inputs must be given, and not both")
    if "texts" in fields:
        return [
            unicode(f"texts[{i}]", text)
            for i, text in enumerate(parse_list("texts", fields["texts"], MAX_PROMPTS, minimum=1))
        ]
    joined = []
    for i, value in enumerate(parse_list("inputs", fields["inputs"], MAX_PROMPTS, minimum=1)):
        content = parse_object(f"inputs[{i}]", value, ("content",)).get("content")
        joined.append(join_texts(f"inputs[{i}].content", content, TEXT, MAX_PROMPTS))
    return joined


def check_choice(param: str, value: Any, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise RequestError(param, f"must be {' or '.join(allowed)}, got {shown(value)}")
    return value


def response(
    head: ResponseHead, request: EmbedRequest, vectors: Sequence[Sequence[float]], usage: Usage
) -> dict[str, Any]:
    """The vectors in each of the requested embedding types."""
    tokens = {"input_tokens": usage.prompt_tokens, "output_tokens": 0}
    return {
        "id": head.id,
        "embeddings": {
            kind: [FORMS[kind](vector) for vector in vectors] for kind in request.embedding_types
        },
        "texts": request.texts,
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": usage.prompt_tokens},
            "tokens": tokens,
        },
        "response_type": "embeddings_by_type",
    }


def encode_base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def bits(vector: Sequence[float]) -> list[int]:
    """The signs, packed eight per byte with the first in the highest bit.

    The last byte is padded with 0.
    """
    signs = [value > 0 for value in vector]
    return [
        sum(sign << (7 - bit) for bit, sign in enumerate(signs[start : start + 8]))
        for start in range(0, len(signs), 8)
    ]


FORMS = {
    "float": list,
    "base64": encode_base64,
    "ubinary": bits,
    "binary": lambda vector: [byte - 128 for byte in bits(vector)],
}
