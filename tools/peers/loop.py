"""Data classes of a worker's jobs and answers, and the request loop for engines that can be
stepped.

Every runner imports this module in its own environment, so it may import only the standard library.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

ADAPTER_RANK = 16


@dataclass(frozen=True)
class LoadSettings:
    """How to load the model; the limits are the same for every engine."""

    model: str  # the folder with config.json, model.safetensors and tokenizer.json
    prepared: str  # folder for this engine's conversion of the model
    weights: str  # bf16, int8, int4, int4-32, q4_k_m or gguf
    max_len: int
    max_seqs: int
    threads: int
    drafts: int = 0  # maximum n-gram draft tokens per step
    # Folders of LoRA adapters of rank ADAPTER_RANK, assigned to the requests in turn.
    adapters: tuple[str, ...] = ()
    file: str = ""  # the GGUF file if `weights` is gguf


@dataclass(frozen=True)
class TimedPrompt:
    """A prompt, the number of tokens to generate, and the arrival in seconds from the start."""

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
    """Add each request at its arrival time and step the engine until all are finished.

    Args:
        requests: The requests.
        add: Called with (index, request) to queue a request in the engine.
        step: Runs a step of the engine; yields (index of the request, new tokens).
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
