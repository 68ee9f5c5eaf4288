"""Parsing of vLLM's /tokenize and /detokenize."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..api.errors import RequestError
from ..api.validation import INT32_MAX, boolean, integer, token_ids
from ..api.validation import unicode_text as unicode
from .chat import parse_messages
from .fields import TEMPLATE, known_fields, template_options
from .tools import parse_tools

TOKENIZE = (
    "model",
    "prompt",
    "messages",
    "tools",
    "add_special_tokens",
    "return_token_strs",
    *TEMPLATE,
)
DETOKENIZE = ("model", "tokens", "skip_special_tokens")
MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class TokenizeRequest:
    """A text or a conversation to tokenise."""

    model: str | None
    prompt: str | None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    add_special_tokens: bool
    return_token_strs: bool
    ignored: Sequence[str] = ()


@dataclass(frozen=True)
class DetokenizeRequest:
    model: str | None
    tokens: list[int]
    skip_special_tokens: bool


def parse_tokenize(body: Any) -> TokenizeRequest:
    fields = known_fields(body, TOKENIZE, {})
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("prompt", "or messages must be given, and not both")
    is_chat = "messages" in fields
    ignored: set[str] = set()
    messages = parse_messages(fields["messages"], ignored) if is_chat else []
    return TokenizeRequest(
        fields.get("model"),
        None if is_chat else unicode("prompt", fields["prompt"]),
        messages,
        parse_tools(fields.get("tools", []), nested=True)[0] if is_chat else [],
        template_options(fields),
        boolean("add_special_tokens", fields.get("add_special_tokens", not is_chat)),
        boolean("return_token_strs", fields.get("return_token_strs", False)),
        tuple(sorted(ignored)),
    )


def parse_detokenize(body: Any) -> DetokenizeRequest:
    fields = known_fields(body, DETOKENIZE, {})
    return DetokenizeRequest(
        fields.get("model"),
        list(token_ids("tokens", fields.get("tokens"), MAX_TOKENS)),
        boolean("skip_special_tokens", fields.get("skip_special_tokens", False)),
    )


def check_token_ids(tokens: list[int], vocabulary: int, name: str = "tokens") -> list[int]:
    for index, token in enumerate(tokens):
        integer(f"{name}[{index}]", token, 0, min(vocabulary - 1, INT32_MAX), " (a token id)")
    return tokens
