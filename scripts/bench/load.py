"""Benchmark requests, generated at random or read from a data set, and their arrival times."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated, Any

from .. import options as o

DATA = "The requests"
DATASET_DEFAULTS = {  # data set -> its options with defaults; other data sets' options are rejected
    "random": {"random_input_len": 256, "random_output_len": 128, "random_range_ratio": 0.0},
    "sharegpt": {"sharegpt_output_len": None},
    "prefix_repetition": {
        "prefix_repetition_prefix_len": 256,
        "prefix_repetition_suffix_len": 256,
        "prefix_repetition_num_prefixes": 10,
        "prefix_repetition_output_len": 128,
    },
    "custom": {"custom_output_len": 128},
}
FROM_FILE = ("sharegpt", "custom")
# Length limits in tokens for ShareGPT conversations, the same as vLLM's for comparable results.
LONGEST_PROMPT = 1024
LONGEST_TOTAL = 2048
SHORTEST = 4


def dataset_option(dataset: str, option: str, help: str, metavar: str = "TOKENS") -> Any:
    default = DATASET_DEFAULTS[dataset][option]
    return Annotated[
        int | None, o.size_option(help, DATA, metavar, False if default is None else f"{default}")
    ]


REPEAT = "prefix_repetition"
DATASET_OPTIONS = {
    "dataset_name": Annotated[
        str, o.option(f"Data set: {', '.join(DATASET_DEFAULTS)}.", DATA, "NAME")
    ],
    "dataset_path": Annotated[
        Path | None,
        o.option(
            "Data set file: the ShareGPT JSON file; for custom, JSON Lines with a prompt each.",
            DATA,
            "FILE",
        ),
    ],
    "random_input_len": dataset_option("random", "random_input_len", "random: prompt length."),
    "random_output_len": dataset_option("random", "random_output_len", "random: output length."),
    "random_range_ratio": Annotated[
        float | None,
        o.option(
            "random: range of lengths R, sampled uniformly from length*(1-R) to length*(1+R).",
            DATA,
            "0..1",
            "0",
        ),
    ],
    "sharegpt_output_len": dataset_option(
        "sharegpt",
        "sharegpt_output_len",
        "sharegpt: output length, instead of the length of the recorded answer.",
    ),
    "custom_output_len": dataset_option(
        "custom", "custom_output_len", "custom: output length of lines without output_tokens."
    ),
    "prefix_repetition_prefix_len": dataset_option(
        REPEAT, "prefix_repetition_prefix_len", "prefix_repetition: length of a shared prefix."
    ),
    "prefix_repetition_suffix_len": dataset_option(
        REPEAT, "prefix_repetition_suffix_len", "prefix_repetition: length after the prefix."
    ),
    "prefix_repetition_num_prefixes": dataset_option(
        REPEAT, "prefix_repetition_num_prefixes", "prefix_repetition: number of prefixes.", "N"
    ),
    "prefix_repetition_output_len": dataset_option(
        REPEAT, "prefix_repetition_output_len", "prefix_repetition: output length."
    ),
}
NumPrompts = Annotated[int, o.size_option("Number of requests.", DATA, "N")]
Temperature = Annotated[
    float, o.option("Sampling temperature; 0 is greedy decoding.", DATA, min=0, max=100)
]
Seed = Annotated[int, o.option("Seed for the requests.", DATA)]


@dataclass(frozen=True)
class Sample:
    """One request: the prompt as text or token ids, and the number of output tokens."""

    prompt: str | list[int]
    output_len: int


@dataclass(frozen=True)
class Dataset:
    """A source of requests with checked settings."""

    name: str
    path: Path | None
    settings: dict[str, Any]

    @property
    def needs_tokenizer(self) -> bool:
        return self.name != "custom"

    def samples(
        self, count: int, tokenizer, seed: object, vocab: int | None = None
    ) -> list[Sample]:
        """Generate or read `count` requests; a file with fewer is repeated."""
        rng = random.Random(f"{seed}")
        s = self.settings
        if self.name == "random":
            return random_samples(rng, ordinary_ids(tokenizer, vocab), count, **s)
        if self.name == "prefix_repetition":
            return repeated_prefixes(rng, ordinary_ids(tokenizer, vocab), count, **s)
        assert self.path is not None
        data = o.read_text(self.path)
        entries = (
            custom(data, self.path, **s)
            if self.name == "custom"
            else sharegpt(data, self.path, tokenizer, rng, **s)
        )
        samples = list(islice(entries, count))
        if not samples:
            raise o.UsageError(f"{self.path} has no request that can be used")
        return [samples[i % len(samples)] for i in range(count)]


def dataset(dataset_name: str, dataset_path: Path | None = None, **settings: Any) -> Dataset:
    """Make a `Dataset`: check the options and fill in defaults."""
    name = dataset_name
    path = dataset_path
    if name not in DATASET_DEFAULTS:
        raise o.UsageError(f"--dataset-name is {name!r}; it can be {', '.join(DATASET_DEFAULTS)}")
    if (path is not None) != (name in FROM_FILE):
        verb = "needs" if path is None else "draws its requests itself: leave out"
        raise o.UsageError(f"--dataset-name {name} {verb} --dataset-path")
    if strange := [option for option in settings if option not in DATASET_DEFAULTS[name]]:
        raise o.UsageError(
            f"--{strange[0].replace('_', '-')} is not for --dataset-name {name}: leave it out"
        )
    ratio = settings.get("random_range_ratio", 0.0)
    if not 0 <= ratio < 1:
        raise o.UsageError(f"--random-range-ratio is {ratio:g}; it must be at least 0 and below 1")
    above_zero(
        **{option: value for option, value in settings.items() if option != "random_range_ratio"}
    )
    return Dataset(name, path, DATASET_DEFAULTS[name] | settings)


# Decorator that replaces a command's parameter `dataset` by the options of data sets.
takes_dataset = o.takes("dataset", DATASET_OPTIONS, {"dataset_name": "random"}, dataset)


def above_zero(**options: float | None) -> None:
    """Raise for the first option that is zero, negative or NaN."""
    for name, value in options.items():
        if value is not None and not value > 0:
            raise o.UsageError(f"--{name.replace('_', '-')} is {value:g}; it must be above 0")


def ordinary_ids(tokenizer, vocab: int | None) -> list[int]:
    """The ids of non-special tokens; `vocab` is the size of the model's vocabulary."""
    return [
        i
        for i in range(min(tokenizer.vocab_size, vocab or tokenizer.vocab_size))
        if i not in tokenizer.special_ids
    ]


def random_samples(
    rng: random.Random,
    ids: list[int],
    count: int,
    random_input_len: int,
    random_output_len: int,
    random_range_ratio: float,
) -> list[Sample]:
    def length(middle: int) -> int:
        low = math.floor(middle * (1 - random_range_ratio))
        return rng.randint(max(1, low), max(1, math.ceil(middle * (1 + random_range_ratio))))

    return [
        Sample(rng.choices(ids, k=length(random_input_len)), length(random_output_len))
        for _ in range(count)
    ]


def repeated_prefixes(
    rng: random.Random,
    ids: list[int],
    count: int,
    prefix_repetition_prefix_len: int,
    prefix_repetition_suffix_len: int,
    prefix_repetition_num_prefixes: int,
    prefix_repetition_output_len: int,
) -> list[Sample]:
    """Prompts with shared prefixes, each prefix equally often, in random order."""
    prefixes = [
        rng.choices(ids, k=prefix_repetition_prefix_len)
        for _ in range(prefix_repetition_num_prefixes)
    ]
    order = [prefixes[i % len(prefixes)] for i in range(count)]
    rng.shuffle(order)
    return [
        Sample(
            prefix + rng.choices(ids, k=prefix_repetition_suffix_len), prefix_repetition_output_len
        )
        for prefix in order
    ]


def sharegpt(
    data: str, path: Path, tokenizer, rng: random.Random, sharegpt_output_len: int | None
) -> Iterator[Sample]:
    """The first turn and its answer of each conversation, shuffled; very short or long ones are
    skipped, as in vLLM.
    """
    try:
        entries = json.loads(data)
    except ValueError as error:
        raise o.UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise o.UsageError(f"{path} must hold a list of conversations")
    rng.shuffle(entries)
    for entry in entries:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        texts: list[Any] = (  # from JSON
            [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)]
            if isinstance(turns, list)
            else []
        )
        if len(texts) < 2 or not all(isinstance(text, str) and text for text in texts):
            continue
        prompt, answer = (tokenizer.encode(text) for text in texts)
        written = sharegpt_output_len or len(answer)
        min_output = 1 if sharegpt_output_len else SHORTEST
        max_output = LONGEST_TOTAL - len(prompt)
        if SHORTEST <= len(prompt) <= LONGEST_PROMPT and min_output <= written <= max_output:
            yield Sample(texts[0], written)


def custom(data: str, path: Path, custom_output_len: int) -> Iterator[Sample]:
    """Parse lines of {"prompt": text or token ids, "output_tokens": optional integer}."""
    for number, line in enumerate(data.split("\n"), start=1):
        if not line.strip():
            continue
        location = f"{path}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise o.UsageError(f"{location} is not JSON: {error}") from None
        prompt = entry.get("prompt") if isinstance(entry, dict) else None
        if not prompt or not (isinstance(prompt, str) or all_tokens(prompt)):
            raise o.UsageError(
                f'{location} must be an object with "prompt": a text or a list of token ids'
            )
        written = entry.get("output_tokens", custom_output_len)
        if not isinstance(written, int) or isinstance(written, bool) or written < 1:
            raise o.UsageError(
                f"{location}: output_tokens is {written!r:.40}; it must be an integer of at least 1"
            )
        yield Sample(prompt, written)


def all_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)


def arrivals(count: int, rate: float, burstiness: float, seed: object) -> list[float]:
    """The arrival time of each request in seconds from the start; all 0 if `rate` is infinite.

    Intervals are gamma-distributed with shape `burstiness`: 1 is a Poisson process, less is
    burstier, more is steadier. They are scaled so that the mean rate is exactly `rate` (requests
    per second) with every seed.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(f"{seed} arrivals")
    even = math.isinf(burstiness)
    intervals = [
        1.0 if even else rng.gammavariate(burstiness, 1 / burstiness) for _ in range(count)
    ]
    scale = count / rate / max(math.fsum(intervals), 1e-300)
    return [moment * scale for moment in accumulate(intervals)]
