"""The tokenizer of a server, asked over HTTP: a benchmark needs no files of the model."""

import asyncio
import random
from functools import cached_property
from typing import Any

from . import client as client

SECONDS = 10.0  # that an answer may take
NUM_WORDS = 4000  # of the texts whose tokens prompts are drawn from
WORDS_PER_TEXT = 250  # a server refuses a text of more characters than its model could ever read
SYLLABLES = [first + vowel + last for first in "bcdfghklmnprstvw" for vowel in "aeiou" for last in ("", *"lnrst")]


class ServerTokenizer:
    """What `load.Dataset.samples` needs of a tokenizer, by `/tokenize` and `/detokenize` of a server."""

    def __init__(self, server: client.ServerAddress, model: str):
        self.server, self.model = server, model

    @cached_property
    def ordinary(self) -> frozenset[int]:
        """Token ids of made-up words: many of the vocabulary, and none with a meaning of its own."""
        rng = random.Random(0)
        words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(NUM_WORDS)]
        texts = [" ".join(words[start : start + WORDS_PER_TEXT]) for start in range(0, NUM_WORDS, WORDS_PER_TEXT)]
        return frozenset().union(*map(self.encode, texts))

    @property
    def vocab_size(self) -> int:
        return max(self.ordinary) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """All ids below `vocab_size` that prompts are not to be drawn from."""
        return frozenset(range(self.vocab_size)) - self.ordinary

    def encode(self, text: str) -> list[int]:
        tokens = self.ask("/tokenize", {"prompt": text, "add_special_tokens": False}).get("tokens")
        if not isinstance(tokens, list) or not tokens or not all(type(token) is int and token >= 0 for token in tokens):
            raise client.Failure("/tokenize answers without a list of token ids")
        return tokens

    def decode(self, ids: list[int]) -> str:
        text = self.ask("/detokenize", {"tokens": ids}).get("prompt")
        if not isinstance(text, str):
            raise client.Failure("/detokenize answers without a text")
        return text

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return asyncio.run(client.post(self.server, path, {"model": self.model} | body, SECONDS))
