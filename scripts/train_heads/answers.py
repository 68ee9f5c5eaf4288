"""Answers that the target model generates, and training batches packed from them."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from ...model.config import ModelError
from ...ops.cache_folder import publish

CHUNK = 256  # prompts to answer between two saves


@dataclass(frozen=True)
class Answers:
    """Concatenated documents, each a prompt followed by the model's answer."""

    tokens: np.ndarray  # token ids of all documents
    document_ends: np.ndarray  # index in `tokens` after the last token of each document
    prompts: np.ndarray  # number of prompt tokens of each document

    def __len__(self) -> int:
        return len(self.document_ends)

    def document(self, number: int) -> np.ndarray:
        start = self.document_ends[number - 1] if number else 0
        return self.tokens[start : self.document_ends[number]]

    def joined(self, documents: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Answers":
        """These answers and more documents, given as (prompt, answer) token ids."""
        sizes = [len(prompt) + len(answer) for prompt, answer in documents]
        new_tokens = [token for prompt, answer in documents for token in (*prompt, *answer)]
        new_ends = len(self.tokens) + np.cumsum(sizes, dtype=np.int64)
        return Answers(
            np.concatenate([self.tokens, np.asarray(new_tokens, np.int32)]),
            np.concatenate([self.document_ends, new_ends]),
            np.concatenate(
                [self.prompts, np.asarray([len(prompt) for prompt, _ in documents], np.int64)]
            ),
        )

    def save(self, path: Path) -> None:
        with publish(path) as temporary_path, open(temporary_path, "xb") as file:
            np.savez(file, tokens=self.tokens, ends=self.document_ends, prompts=self.prompts)


def none_yet() -> Answers:
    return Answers(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))


def load(path: Path) -> Answers:
    """Load saved answers; none if the file does not exist."""
    if not path.exists():
        return none_yet()
    with np.load(path, allow_pickle=False) as arrays:
        return Answers(arrays["tokens"], arrays["ends"], arrays["prompts"])


def read_prompts(path: Path) -> list[Any]:
    """Read prompts, one per line: text, or in a .jsonl file an object with `prompt`,
    `prompt_token_ids` or `messages`.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the prompts in {path} cannot be read: {error}") from None
    if not lines:
        raise ModelError(f"{path} holds no prompts; it must have one a line")
    return (
        [read_object(path, number, line) for number, line in enumerate(lines, 1)]
        if path.suffix == ".jsonl"
        else lines
    )


def read_object(path: Path, number: int, line: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{path}, line {number} is not JSON: {error}") from None
    for key, kind in (("messages", list), ("prompt_token_ids", list), ("prompt", str)):
        if isinstance(value, dict) and isinstance(value.get(key), kind):
            return value if key == "messages" else {key: value[key]}
    raise ModelError(
        f"{path}, line {number} must be an object with messages, prompt or prompt_token_ids"
    )


def write(
    llm: Any,
    prompts: Sequence[Any],
    path: Path,
    params: Any,
    greedy: float,
    seed: int,
    on_progress: Callable[[int], bool],
) -> Answers:
    """Generate the model's answers to all prompts.

    Answers are saved after every `CHUNK` prompts; generation continues from those in `path`.

    Args:
        llm: The target model.
        prompts: As from `read_prompts`.
        path: File for the answers.
        params: Sampling parameters.
        greedy: Fraction of the answers to decode greedily.
        seed: Selects the greedy answers and seeds the others.
        on_progress: Called with the number of answers; generation stops if it returns False.
    """
    answers = load(path)
    while len(answers) < len(prompts) and on_progress(len(answers)):
        start = len(answers)
        chunk = [
            llm.chat_prompt(prompt["messages"])
            if isinstance(prompt, dict) and "messages" in prompt
            else prompt
            for prompt in prompts[start : start + CHUNK]
        ]
        params_by_prompt = []
        for number in range(start, start + len(chunk)):
            is_greedy = Random(f"{seed}/{number}").random() < greedy
            params_by_prompt.append(
                replace(params, temperature=0.0)
                if is_greedy
                else replace(params, seed=seed + number)
            )
        outputs = llm.generate(chunk, params_by_prompt, use_tqdm=False)
        answers = answers.joined(
            [(out.prompt_token_ids, out.outputs[0].token_ids) for out in outputs]
        )
        answers.save(path)
    on_progress(len(answers))
    return answers


class Rows(NamedTuple):
    """Arrays [B, T] of packed rows. A row holds several documents, which do not attend to each
    other.
    """

    tokens: np.ndarray
    documents: np.ndarray  # number of the document in its row, from 1; 0 is padding
    positions: np.ndarray  # position in the document; -1 is padding
    written: np.ndarray  # whether the model generated the token


def pack(answers: Answers, numbers: Sequence[int], length: int) -> Rows:
    """Pack documents into rows of `length` tokens (first fit among the 16 latest rows); longer
    documents are truncated.
    """
    rows: list[list[int]] = []
    free_tokens: list[int] = []
    for number in numbers:
        size = min(len(answers.document(number)), length)
        latest = range(max(0, len(rows) - 16), len(rows))
        at = next((row for row in latest if free_tokens[row] >= size), None)
        if at is None:
            at = len(rows)
            rows.append([])
            free_tokens.append(length)
        rows[at].append(number)
        free_tokens[at] -= size
    shape = (len(rows), length)
    tokens = np.zeros(shape, np.int32)
    documents = np.zeros(shape, np.int32)
    positions = np.full(shape, -1, np.int32)
    written = np.zeros(shape, bool)
    for row, members in enumerate(rows):
        at = 0
        for place, number in enumerate(members, 1):
            document = answers.document(number)[:length]
            span = np.s_[row, at : at + len(document)]
            tokens[span] = document
            documents[span] = place
            positions[span] = np.arange(len(document))
            written[span] = np.arange(len(document)) >= answers.prompts[number]
            at += len(document)
    return Rows(tokens, documents, positions, written)


def split_rows(rows: Rows, size: int) -> Iterator[Rows]:
    """Split rows into batches of `size` rows; the last batch is padded with empty rows."""
    for start in range(0, len(rows.tokens), size):
        batch = Rows(*(field[start : start + size] for field in rows))
        missing = size - len(batch.tokens)
        yield Rows(
            *(
                np.pad(x, ((0, missing), (0, 0)), constant_values=-1 if x is batch.positions else 0)
                for x in batch
            )
        )


def batches(
    answers: Answers, numbers: Sequence[int], length: int, size: int, seed: int, first: int
) -> Iterator[Rows]:
    """Endless training batches, starting with batch number `first`. Each epoch has another order;
    the same seed gives the same batches.
    """
    epoch = 0
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(np.asarray(numbers))
        rows = pack(answers, order.tolist(), length)
        count = -(-len(rows.tokens) // size)
        if first < count:
            for number, batch in enumerate(split_rows(rows, size)):
                if number >= first:
                    yield batch
        first = max(0, first - count)
        epoch = epoch + 1
