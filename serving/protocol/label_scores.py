"""vLLM's /generative_scoring: the probabilities of label tokens as the next token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..api.errors import RequestError
from ..api.params import MAX_WANTED, PLAIN, RequestOptions
from ..api.validation import INT32_MAX, boolean, items, shown, token_ids
from ..api.validation import unicode_text as unicode
from .completion import MAX_PROMPTS
from .fields import LABELS, REQUEST_OPTIONS, known_fields, parse_request_options

FIELDS = (
    "model",
    "query",
    "items",
    "label_token_ids",
    "apply_softmax",
    "item_first",
    "add_special_tokens",
    *REQUEST_OPTIONS,
    *LABELS,
)


@dataclass(frozen=True)
class LabelRequest:
    """A query, the items that are combined with it, and the label tokens."""

    query: str | list[int]
    items: list[str | list[int]]
    labels: tuple[int, ...]
    model: str | None = None
    request_options: RequestOptions = PLAIN
    apply_softmax: bool = True  # the labels' probabilities add up to 1
    item_first: bool = False
    add_special_tokens: bool = True


def parse(body: Any) -> LabelRequest:
    """Parse a body."""
    fields = known_fields(body, FIELDS, {})
    texts = items("items", fields.get("items"), MAX_PROMPTS)
    labels = token_ids("label_token_ids", fields.get("label_token_ids"), MAX_WANTED)
    for name, values in (("items", texts), ("label_token_ids", labels)):
        if not values:
            raise RequestError(name, "must hold at least one")
    if len(set(labels)) < len(labels):
        raise RequestError("label_token_ids", f"must differ, got {shown(list(labels))}")
    flags = {
        name: boolean(name, fields.get(name, default))
        for name, default in (
            ("apply_softmax", True),
            ("item_first", False),
            ("add_special_tokens", True),
        )
    }
    return LabelRequest(
        text_or_tokens("query", fields.get("query")),
        [text_or_tokens(f"items[{i}]", item) for i, item in enumerate(texts)],
        labels,
        fields.get("model"),
        parse_request_options(fields),
        **flags,
    )


def text_or_tokens(param: str, value: Any) -> str | list[int]:
    return (
        list(token_ids(param, value, INT32_MAX))
        if isinstance(value, list)
        else unicode(param, value)
    )


def score(logprobs: Sequence[float], apply_softmax: bool) -> float:
    """The probability of the first label among the labels (`apply_softmax`) or all tokens."""
    if not apply_softmax:
        return math.exp(logprobs[0])
    max_logprob = max(logprobs)
    return math.exp(logprobs[0] - max_logprob) / sum(
        math.exp(logprob - max_logprob) for logprob in logprobs
    )
