"""Prompts as callers give them."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class PromptTerms(TypedDict):
    """How a prompt is served: the fields of `Terms`."""

    cache_salt: NotRequired[str]
    share_key: NotRequired[str]
    priority: NotRequired[int]
    timeout: NotRequired[float]


class TextPrompt(PromptTerms):
    """A prompt as text."""

    prompt: str


class TokensPrompt(PromptTerms):
    """A prompt as token ids; its text, if there is one, comes back in the result."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
