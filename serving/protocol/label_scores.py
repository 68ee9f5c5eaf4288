"""/generative_scoring, as vLLM has it: how likely one of some tokens is to come next, for each of several items."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..api.errors import RequestError
from ..api.params import MAX_WANTED, PLAIN, Terms
from ..api.validation import INT32_MAX, boolean, items, shown, token_ids
from ..api.validation import unicode_text as unicode
from .completion import MAX_PROMPTS
from .fields import LABELS, TERMS, known_fields, terms_of

FIELDS = (
    "model", "query", "items", "label_token_ids", "apply_softmax", "item_first", "add_special_tokens",
    *TERMS, *LABELS,
)  # fmt: skip


@dataclass(frozen=True)
class LabelRequest:
    """A query with each of the items, and the tokens among which the next one is looked for."""

    query: str | list[int]
    items: list[str | list[int]]
    labels: tuple[int, ...]
    model: str | None = None
    terms: Terms = PLAIN
    apply_softmax: bool = True  # the labels' probabilities add up to 1
    item_first: bool = False
    add_special_tokens: bool = True


def parse(body: Any) -> LabelRequest:
    """The request in a body."""
    given = known_fields(body, FIELDS, {})
    found = items("items", given.get("items"), MAX_PROMPTS)
    labels = token_ids("label_token_ids", given.get("label_token_ids"), MAX_WANTED)
    for name, values in (("items", found), ("label_token_ids", labels)):
        if not values:
            raise RequestError(name, "must hold at least one")
    if len(set(labels)) < len(labels):
        raise RequestError("label_token_ids", f"must differ, got {shown(list(labels))}")
    flags = {
        name: boolean(name, given.get(name, default))
        for name, default in (("apply_softmax", True), ("item_first", False), ("add_special_tokens", True))
    }
    return LabelRequest(
        text_or_tokens("query", given.get("query")),
        [text_or_tokens(f"items[{i}]", item) for i, item in enumerate(found)],
        labels,
        given.get("model"),
        terms_of(given),
        **flags,
    )


def text_or_tokens(where: str, value: Any) -> str | list[int]:
    return list(token_ids(where, value, INT32_MAX)) if isinstance(value, list) else unicode(where, value)


def score(logprobs: Sequence[float], apply_softmax: bool) -> float:
    """The probability of the first label: among the labels, or among all tokens."""
    if not apply_softmax:
        return math.exp(logprobs[0])
    most = max(logprobs)
    return math.exp(logprobs[0] - most) / sum(math.exp(logprob - most) for logprob in logprobs)
