"""Types of prompts that callers may pass."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict


class PromptTerms(TypedDict):
    """Service options of a prompt: the fields of `RequestOptions`."""

    cache_salt: NotRequired[str]
    share_key: NotRequired[str]
    priority: NotRequired[int]
    timeout: NotRequired[float]


class MediaTerms(TypedDict):
    """What a prompt shows beside text, of models that read images."""

    multi_modal_data: NotRequired[Mapping[str, Any]]  # {"image": an image or a list of images}


class TextPrompt(PromptTerms, MediaTerms):
    """A prompt as text."""

    prompt: str


class TokensPrompt(PromptTerms, MediaTerms):
    """A prompt as token ids; its text, if given, is copied to the result."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]
