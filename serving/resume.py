"""Journal of a stream, by which another engine continues an answer."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from .api.errors import EngineError
from .api.outputs import CompletionDelta
from .engine.engine import Engine
from .request.request import Request
from .request.sequence import Score

# Index of the prompt, index of the completion, and the tokens sent together.
Streamed = tuple[int, int, list[int]]
NONE = np.zeros(0)


@dataclass
class Journal:
    """Kept by the process that forwards a stream; an empty journal starts from the beginning.

    Tokens depend only on the prompt, the parameters, the seed and the tokens before them, so any
    engine with the same model continues an answer as the first engine would have.
    """

    name: str = ""  # of the answer
    created: int = 0
    # Of each prompt, including seeds chosen by the engine.
    seeds: list[int] = field(default_factory=list)
    streamed: list[Streamed] = field(default_factory=list)
    # Of tool calls, by choice and index.
    call_ids: dict[tuple[int, int], str] = field(default_factory=dict)

    def add(self, prompt: int, fresh: CompletionDelta) -> None:
        self.streamed.append((prompt, fresh.index, list(fresh.token_ids)))


def seed_of(request: Request) -> int:
    """Return the seed with which a request samples the same tokens as this one."""
    high, low = request.sequences[0].seed
    base = high << 32 | low
    return base - (1 << 64) if base >> 63 else base


def resume(
    engine: Engine, requests: Seq[Request], streamed: Seq[Streamed]
) -> list[tuple[int, CompletionDelta]]:
    """Give newly added requests the tokens that were streamed already.

    Called in the engine's thread. The tokens are computed like a prompt. Their scores are unknown,
    their text is not.

    Returns:
        (index of the prompt, delta) for each streamed piece.
    """
    now = engine.clock()
    deltas = []
    for prompt, index, tokens in streamed:
        request = requests[prompt]
        if request.params.num_sequences > request.params.n:
            raise EngineError(
                "the engine that wrote this answer is gone; the request can be sent again"
            )
        seq = request.sequences[index]
        for token in tokens:
            if seq.finish_reason is None:
                engine.results.push(
                    seq, token, Score(token, 0.0, 1, NONE, NONE, NONE) if seq.scored else None, now
                )
        if (fresh := request.completions[index].take(index)) is not None:
            deltas.append((prompt, fresh))
    return deltas
