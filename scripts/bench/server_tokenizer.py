"""A server's tokenizer over HTTP, so that a benchmark needs no tokenizer files."""

import asyncio
import random
from functools import cached_property
from typing import Any

from . import client as client

TIMEOUT = 10.0  # seconds
NUM_WORDS = 4000  # random words to tokenize; prompts are sampled from their tokens
WORDS_PER_TEXT = 250  # short, because servers reject texts longer than the context length
SYLLABLES = [
    first + vowel + last
    for first in "bcdfghklmnprstvw"
    for vowel in "aeiou"
    for last in ("", *"lnrst")
]


class ServerTokenizer:
    """The tokenizer interface for `load.Dataset.samples`, by a server's `/tokenize` and
    `/detokenize`.
    """

    def __init__(self, server: client.ServerAddress, model: str):
        self.server = server
        self.model = model

    @cached_property
    def ordinary(self) -> frozenset[int]:
        """Token ids of random words: a large part of the vocabulary, without special tokens."""
        rng = random.Random(0)
        words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(NUM_WORDS)]
        texts = [
            " ".join(words[start : start + WORDS_PER_TEXT])
            for start in range(0, NUM_WORDS, WORDS_PER_TEXT)
        ]
        return frozenset().union(*map(self.encode, texts))

    @property
    def vocab_size(self) -> int:
        return max(self.ordinary) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """All ids below `vocab_size` that prompts are not sampled from."""
        return frozenset(range(self.vocab_size)) - self.ordinary

    def encode(self, text: str) -> list[int]:
        tokens = self.ask("/tokenize", {"prompt": text, "add_special_tokens": False}).get("tokens")
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(token) is int and token >= 0 for token in tokens)
        ):
            raise client.Failure("/tokenize answers without a list of token ids")
        return tokens

    def decode(self, ids: list[int]) -> str:
        text = self.ask("/detokenize", {"tokens": ids}).get("prompt")
        if not isinstance(text, str):
            raise client.Failure("/detokenize answers without a text")
        return text

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return asyncio.run(client.post(self.server, path, {"model": self.model} | body, TIMEOUT))
