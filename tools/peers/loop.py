"""The jobs and answers of a worker, and the loop that drives every engine which can be stepped.

Every runner imports this in its own environment: nothing but the standard library may be imported
here.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

ADAPTER_RANK = 16


@dataclass(frozen=True)
class LoadSettings:
    """How to load: the same limits for every engine."""

    model: str  # the folder with config.json, model.safetensors and tokenizer.json
    prepared: str  # where this engine keeps its conversion of that folder
    weights: str  # bf16, int8, int4 or q4_k_m
    max_len: int
    max_seqs: int
    threads: int
    drafts: int = 0  # tokens that the text's own n-grams draft a step, at most
    # folders of LoRA adapters of ADAPTER_RANK, which requests take in turn
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class TimedPrompt:
    """A prompt, how many tokens to write, and when it arrives, in seconds from the start."""

    prompt: list[int]
    count: int
    arrival: float = 0.0


@dataclass
class TimedTokens:
    """The tokens of a request, with times in seconds from the start of the run."""

    first: float = 0.0
    last: float = 0.0
    tokens: list[int] = field(default_factory=list)


def drive(
    requests: list[TimedPrompt],
    add: Callable[[int, TimedPrompt], None],
    step: Callable[[], Iterable[tuple[int, list[int]]]],
) -> list[TimedTokens]:
    """Add each request when its time comes and step until all are done; `step` yields (request, new
    tokens).
    """
    answers = [TimedTokens() for _ in requests]
    waiting = sorted(range(len(requests)), key=lambda index: requests[index].arrival)[::-1]
    missing = [request.count for request in requests]
    running = 0
    start = time.perf_counter()
    while waiting or running:
        while waiting and requests[waiting[-1]].arrival <= time.perf_counter() - start:
            index = waiting.pop()
            add(index, requests[index])
            running += 1
        if not running:
            time.sleep(max(0.0, requests[waiting[-1]].arrival - (time.perf_counter() - start)))
            continue
        for index, tokens in step():
            answer = answers[index]
            now = time.perf_counter() - start
            if not tokens or not missing[index]:
                continue
            answer.first = answer.first if answer.tokens else now
            answer.last = now
            answer.tokens += tokens
            missing[index] -= len(tokens)
            running -= missing[index] == 0
    return answers
