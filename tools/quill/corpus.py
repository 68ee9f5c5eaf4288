"""Quill's training corpus: the tokenizer, and rows of whole documents packed to one length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from . import tasks as tasks

# Sampling weights of document kinds. Lookup is trained first and alone until it is learned: mixed
# with other tasks from the start, it stayed at chance level.
DRILLS = {"drill": 1.0}
MIX = {
    "story": 3.0,
    "story_plain": 2.4,
    "add": 4.0,
    "subtract": 4.0,
    "multiply": 1.5,
    "sort_numbers": 2.0,
    "sort_letters": 0.7,
    "sort_words": 1.0,
    "copy": 1.0,
    "reverse": 1.0,
    "json": 1.0,
    "lookup_short": 2.5,
    "drill": 0.5,
}
# Sampling weights for training the tokenizer, separate so that changes of MIX do not change tokens.
SPELLED = {
    "story": 1.0,
    "story_plain": 0.8,
    "add": 6.0,
    "subtract": 6.0,
    "multiply": 2.0,
    "sort_numbers": 6.0,
    "sort_letters": 3.0,
    "sort_words": 4.0,
    "copy": 3.0,
    "reverse": 3.0,
    "json": 6.0,
    "lookup_short": 4.0,
}
# Row length -> long documents of which each row starts with one, before short ones fill it up.
LONG = {256: {}, 512: {"lookup_200": 1.0}, 1024: {"lookup_400": 1.0, "lookup_600": 1.0}}


def train_tokenizer(vocab_size: int, seed: int = 0) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the corpus; every digit is a separate token."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = Random(f"tokenizer/{seed}")
    texts = ("".join(text for text, _ in tasks.document(rng, SPELLED)) for _ in range(20_000))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=tasks.SPECIALS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (tasks.BOS, tokenizer.token_to_id(tasks.BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tasks.BOS} $A", pair=f"{tasks.BOS} $A $B", special_tokens=[bos]
    )
    return tokenizer


@dataclass(frozen=True)
class PackedRows:
    """Packed rows; position t predicts targets[t], with loss weight weights[t].

    Documents do not attend to each other.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    documents: np.ndarray


def encode(
    tokenizer: Tokenizer, weighted_texts: list[tuple[str, float]]
) -> tuple[list[int], list[float]]:
    """Encode (text, loss weight) pairs to (token ids, loss weight of each token)."""
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in weighted_texts:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        weights += [weight] * len(piece)
    return ids, weights


def pack(documents: list[list[tuple[list[int], list[float]]]], length: int) -> PackedRows:
    """Pack each list of documents into one row; the remainder is padding with loss weight 0."""
    shape = (len(documents), length)
    tokens, targets, owner = (np.zeros(shape, np.int32) for _ in range(3))
    weights = np.zeros(shape, np.float32)
    for row, members in enumerate(documents):
        at = 0
        for number, (ids, learned) in enumerate(members):
            n = len(ids)
            tokens[row, at : at + n] = ids
            targets[row, at : at + n - 1] = ids[1:]
            weights[row, at : at + n - 1] = learned[1:]
            owner[row, at : at + n] = number + 1
            at += n
    return PackedRows(tokens, targets, weights, owner)


def documents(name: str, count: int) -> Iterator[list[tuple[str, float]]]:
    """Held-out documents as (text, loss weight) pairs; `name` seeds a generator that training does
    not use.
    """
    rng = Random(name)
    return (tasks.document(rng, MIX) for _ in range(count))


def training_rows(
    tokenizer: Tokenizer, seed: str, rows: int, length: int, mix: dict[str, float]
) -> PackedRows:
    """Generate training rows; the same seed gives the same rows."""
    rng = Random(f"train/{seed}")
    return pack([_row(tokenizer, rng, length, mix) for _ in range(rows)], length)


def _row(
    tokenizer: Tokenizer, rng: Random, length: int, mix: dict[str, float]
) -> list[tuple[list[int], list[float]]]:
    members = []
    num_free = length
    misses = 0
    while misses < 3 and num_free > 12:
        lead = LONG[length] if not members else {}
        encoded = encode(tokenizer, tasks.document(rng, lead or mix))
        if mix is DRILLS:
            # A truncated list is still a valid list.
            encoded = encoded[0][:num_free], encoded[1][:num_free]
        if len(encoded[0]) <= num_free:
            members.append(encoded)
            num_free -= len(encoded[0])
        else:
            misses += 1
    return members
