"""Calibration text as tokens."""

import json
from pathlib import Path
from random import Random
from typing import Any

from ..config import ModelError
from ..text.chat_template import PromptError
from ..text.tokenizer import Tokenizer

# General text for models of any kind: prose, letters, news, mathematics, eight programming and markup languages,
# conversations, and German, French, Spanish, Chinese, Japanese and Russian; 37 documents, about 11,000 tokens.
BUNDLED = Path(__file__).with_name("calibration.jsonl")


def read_samples(path: Path, tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """At most `count` pieces of at most `length` tokens, drawn from all of the text; always the same ones.

    A .jsonl file has a document a line; another file is one document. Every piece begins with the special tokens that
    the tokenizer puts before a text (BOS, where it has one).
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"calibration text {path} cannot be read: {error}") from None
    lines = enumerate(text.splitlines(), 1)
    if path.suffix == ".jsonl":
        documents = [tokens_of(path, number, line, tokenizer) for number, line in lines if line.strip()]
    else:
        documents = [tokenizer.encode(text)]
    ids, ends = tokenizer.encode_with_ends("a")
    before = ids[: next((place for place, end in enumerate(ends) if end), 0)]
    pieces = [piece for ids in documents for piece in pieces_of(ids, before, length)]
    if not text.strip() or not pieces:
        raise ModelError(f"calibration text {path} is empty; give some pages of what the model will read and write")
    return Random(0).sample(pieces, count) if len(pieces) > count else pieces


def pieces_of(ids: list[int], before: list[int], length: int) -> list[list[int]]:
    """A document in pieces of at most `length` tokens; if it begins with the tokens `before`, so does each."""
    size = len(before)
    if not size or ids[:size] != before or length <= size:
        return [ids[at : at + length] for at in range(0, len(ids), length)]
    step = length - size
    return [before + ids[at : at + step] for at in range(size, max(len(ids), size + 1), step)]


def tokens_of(path: Path, number: int, line: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of an object in a line: its `text` or `prompt`, or its `messages` by the model's chat template."""
    where = f"calibration text {path}, line {number}"
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{where} is not JSON: {error}") from None
    found = found if isinstance(found, dict) else {}
    if isinstance(found.get("messages"), list):
        if path == BUNDLED and tokenizer.chat_template is None:  # a model that was not trained on conversations
            return tokenizer.encode("\n\n".join(message["content"] for message in found["messages"]))
        try:
            prompt = tokenizer.apply_chat_template(found["messages"], add_generation_prompt=False)
        except PromptError as error:
            raise ModelError(f"{where}: {error}") from None
        return tokenizer.encode(prompt, add_special_tokens=False)
    for key in ("text", "prompt"):
        if isinstance(found.get(key), str):
            return tokenizer.encode(found[key])
    raise ModelError(f"{where} must be an object with text, prompt or messages")
