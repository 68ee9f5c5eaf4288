"""/tokenize and /detokenize, as vLLM has them: text or a conversation to token ids, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..api.errors import RequestError
from ..api.validation import INT32_MAX, boolean, integer, token_ids
from ..api.validation import unicode_text as unicode
from .chat import parse_messages
from .fields import TEMPLATE, known_fields, template_options
from .tools import parse_tools

TOKENIZE = ("model", "prompt", "messages", "tools", "add_special_tokens", "return_token_strs", *TEMPLATE)
DETOKENIZE = ("model", "tokens", "skip_special_tokens")
MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class TokenizeRequest:
    """What is to be cut into tokens."""

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
    given = known_fields(body, TOKENIZE, {})
    if ("prompt" in given) == ("messages" in given):
        raise RequestError("prompt", "or messages must be given, and not both")
    chat = "messages" in given
    ignored: set[str] = set()
    messages = parse_messages(given["messages"], ignored) if chat else []
    return TokenizeRequest(
        given.get("model"),
        None if chat else unicode("prompt", given["prompt"]),
        messages,
        parse_tools(given.get("tools", []), nested=True)[0] if chat else [],
        template_options(given),
        boolean("add_special_tokens", given.get("add_special_tokens", not chat)),
        boolean("return_token_strs", given.get("return_token_strs", False)),
        tuple(sorted(ignored)),
    )


def parse_detokenize(body: Any) -> DetokenizeRequest:
    given = known_fields(body, DETOKENIZE, {})
    return DetokenizeRequest(
        given.get("model"),
        list(token_ids("tokens", given.get("tokens"), MAX_TOKENS)),
        boolean("skip_special_tokens", given.get("skip_special_tokens", False)),
    )


def checked(tokens: list[int], vocabulary: int, name: str = "tokens") -> list[int]:
    for index, token in enumerate(tokens):
        integer(f"{name}[{index}]", token, 0, min(vocabulary - 1, INT32_MAX), " (a token id)")
    return tokens
