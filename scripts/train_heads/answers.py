"""What a model writes to prompts, and rows of it for training."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from ...model.config import ModelError
from ...ops.cache_folder import publish

CHUNK = 256  # prompts that are answered before the answers are saved


@dataclass(frozen=True)
class Answers:
    """Documents, one after another: each is a prompt and what the model wrote to it."""

    tokens: np.ndarray
    ends: np.ndarray  # where each document ends among the tokens
    prompts: np.ndarray  # how many tokens of it are the prompt

    def __len__(self) -> int:
        return len(self.ends)

    def document(self, number: int) -> np.ndarray:
        return self.tokens[self.ends[number - 1] if number else 0 : self.ends[number]]

    def joined(self, documents: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Answers":
        """With more documents, each as prompt and answer."""
        sizes = [len(prompt) + len(answer) for prompt, answer in documents]
        more = [token for prompt, answer in documents for token in (*prompt, *answer)]
        return Answers(
            np.concatenate([self.tokens, np.asarray(more, np.int32)]),
            np.concatenate([self.ends, len(self.tokens) + np.cumsum(sizes, dtype=np.int64)]),
            np.concatenate(
                [self.prompts, np.asarray([len(prompt) for prompt, _ in documents], np.int64)]
            ),
        )

    def save(self, path: Path) -> None:
        with publish(path) as part, open(part, "xb") as file:
            np.savez(file, tokens=self.tokens, ends=self.ends, prompts=self.prompts)


def none_yet() -> Answers:
    return Answers(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))


def load(path: Path) -> Answers:
    """The answers of a file; none where there is no file."""
    if not path.exists():
        return none_yet()
    with np.load(path, allow_pickle=False) as found:
        return Answers(found["tokens"], found["ends"], found["prompts"])


def read_prompts(path: Path) -> list[Any]:
    """A prompt a line; of a .jsonl file the `prompt`, the `prompt_token_ids` or the `messages` of
    each object.
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
        found = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{path}, line {number} is not JSON: {error}") from None
    for key, kind in (("messages", list), ("prompt_token_ids", list), ("prompt", str)):
        if isinstance(found, dict) and isinstance(found.get(key), kind):
            return found if key == "messages" else {key: found[key]}
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
    told: Callable[[int], bool],
) -> Answers:
    """The model's answers to all prompts, of which the share `greedy` are the likeliest and the
    others drawn.

    They are saved as they come, and a file that has some of them is gone on with. `told` is told
    how many there are, and says whether to go on.
    """
    answers = load(path)
    while len(answers) < len(prompts) and told(len(answers)):
        start = len(answers)
        some = [prompts[number] for number in range(start, min(start + CHUNK, len(prompts)))]
        asked = [
            llm.chat_prompt(one["messages"]) if isinstance(one, dict) and "messages" in one else one
            for one in some
        ]
        given = []
        for number in range(start, start + len(some)):
            likeliest = Random(f"{seed}/{number}").random() < greedy
            given.append(
                replace(params, temperature=0.0)
                if likeliest
                else replace(params, seed=seed + number)
            )
        outputs = llm.generate(asked, given, use_tqdm=False)
        answers = answers.joined(
            [(out.prompt_token_ids, out.outputs[0].token_ids) for out in outputs]
        )
        answers.save(path)
    told(len(answers))
    return answers


class Rows(NamedTuple):
    """Rows of a batch, [B, T]: documents one after another, which do not see each other.

    Padding is at position -1.
    """

    tokens: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    written: np.ndarray  # whether the model wrote the token


def pack(answers: Answers, numbers: Sequence[int], length: int) -> Rows:
    """Documents in rows; each goes to the first of the latest rows that has room, and is cut where
    none could have.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for number in numbers:
        size = min(len(answers.document(number)), length)
        latest = range(max(0, len(rows) - 16), len(rows))
        at = next((row for row in latest if room[row] >= size), None)
        if at is None:
            at = len(rows)
            rows.append([])
            room.append(length)
        rows[at].append(number)
        room[at] -= size
    shape = (len(rows), length)
    tokens = np.zeros(shape, np.int32)
    documents = np.zeros(shape, np.int32)
    positions = np.full(shape, -1, np.int32)
    written = np.zeros(shape, bool)
    for row, members in enumerate(rows):
        at = 0
        for place, number in enumerate(members, 1):
            document = answers.document(number)[:length]
            here = np.s_[row, at : at + len(document)]
            tokens[here], documents[here] = document, place
            positions[here] = np.arange(len(document))
            written[here] = np.arange(len(document)) >= answers.prompts[number]
            at += len(document)
    return Rows(tokens, documents, positions, written)


def parts(rows: Rows, size: int) -> Iterator[Rows]:
    """Batches of `size` rows; the last is filled up with empty ones."""
    for start in range(0, len(rows.tokens), size):
        some = Rows(*(field[start : start + size] for field in rows))
        missing = size - len(some.tokens)
        yield Rows(
            *(
                np.pad(x, ((0, missing), (0, 0)), constant_values=-1 if x is some.positions else 0)
                for x in some
            )
        )


def batches(
    answers: Answers, numbers: Sequence[int], length: int, size: int, seed: int, first: int
) -> Iterator[Rows]:
    """Batches without end from the one numbered `first`, the same for the same seed; each epoch in
    another order.
    """
    epoch = 0
    while True:
        order = np.random.default_rng((seed, epoch)).permutation(np.asarray(numbers))
        rows = pack(answers, order.tolist(), length)
        count = -(-len(rows.tokens) // size)
        if first < count:
            for number, batch in enumerate(parts(rows, size)):
                if number >= first:
                    yield batch
        first = max(0, first - count)
        epoch = epoch + 1
