"""Tokenise calibration text."""

import json
from pathlib import Path
from random import Random
from typing import Any

from ..config import ModelError
from ..text.chat_template import PromptError
from ..text.tokenizer import Tokenizer

# General text: prose, letters, news, mathematics, eight programming and markup languages,
# conversations, and German, French, Spanish, Chinese, Japanese and Russian; 37 documents, about
# 11,000 tokens.
BUNDLED = Path(__file__).with_name("calibration.jsonl")


def read_samples(path: Path, tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """At most `count` pieces of at most `length` tokens, sampled deterministically from the text.

    A .jsonl file has one document in each line; another file is one document. Every piece begins
    with the special tokens that the tokenizer puts before a text, such as BOS.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"calibration text {path} cannot be read: {error}") from None
    lines = enumerate(text.splitlines(), 1)
    if path.suffix == ".jsonl":
        documents = [
            tokenize_line(path, number, line, tokenizer) for number, line in lines if line.strip()
        ]
    else:
        documents = [tokenizer.encode(text)]
    ids, char_ends = tokenizer.encode_with_ends("a")
    prefix = ids[: next((place for place, end in enumerate(char_ends) if end), 0)]
    pieces = [piece for ids in documents for piece in split_pieces(ids, prefix, length)]
    if not text.strip() or not pieces:
        raise ModelError(
            f"calibration text {path} is empty; give some pages of what the model will read "
            "and write"
        )
    return Random(0).sample(pieces, count) if len(pieces) > count else pieces


def split_pieces(ids: list[int], prefix: list[int], length: int) -> list[list[int]]:
    """Split a document into pieces of at most `length` tokens, each with its `prefix`."""
    size = len(prefix)
    if not size or ids[:size] != prefix or length <= size:
        return [ids[at : at + length] for at in range(0, len(ids), length)]
    step = length - size
    return [prefix + ids[at : at + step] for at in range(size, max(len(ids), size + 1), step)]


def tokenize_line(path: Path, number: int, line: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a JSON line: its `text`, `prompt`, or `messages` by the chat template."""
    place = f"calibration text {path}, line {number}"
    try:
        document: Any = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{place} is not JSON: {error}") from None
    document = document if isinstance(document, dict) else {}
    if isinstance(document.get("messages"), list):
        if path == BUNDLED and tokenizer.chat_template is None:  # a base model
            return tokenizer.encode(
                "\n\n".join(message["content"] for message in document["messages"])
            )
        try:
            prompt = tokenizer.apply_chat_template(
                document["messages"], add_generation_prompt=False
            )
        except PromptError as error:
            raise ModelError(f"{place}: {error}") from None
        return tokenizer.encode(prompt, add_special_tokens=False)
    for key in ("text", "prompt"):
        if isinstance(document.get(key), str):
            return tokenizer.encode(document[key])
    raise ModelError(f"{place} must be an object with text, prompt or messages")
