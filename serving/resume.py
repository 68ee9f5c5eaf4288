"""What a stream has sent its reader, so that another engine can go on where this one stopped."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from .api.errors import EngineError
from .api.outputs import Fresh
from .engine.engine import Engine
from .request.request import Request
from .request.sequence import Score

Streamed = tuple[int, int, list[int]]  # which prompt, which of its completions, and the tokens sent at once
NONE = np.zeros(0)


@dataclass
class Journal:
    """Kept by whoever passes the stream on; an engine that gets an empty one begins at the start.

    Tokens depend on nothing but the prompt, the parameters, the seed and the tokens before them, so that any engine of
    the same model goes on as this one would have done.
    """

    name: str = ""  # of the answer
    created: int = 0
    seeds: list[int] = field(default_factory=list)  # of each prompt, also where the request did not choose one
    streamed: list[Streamed] = field(default_factory=list)
    call_ids: dict[tuple[int, int], str] = field(default_factory=dict)  # of tool calls, by choice and index

    def add(self, prompt: int, fresh: Fresh) -> None:
        self.streamed.append((prompt, fresh.index, list(fresh.token_ids)))


def seed_of(request: Request) -> int:
    """The seed that makes a request draw what this one draws."""
    high, low = request.sequences[0].seed
    base = high << 32 | low
    return base - (1 << 64) if base >> 63 else base


def resume(engine: Engine, requests: Seq[Request], streamed: Seq[Streamed]) -> list[tuple[int, Fresh]]:
    """Give requests that were just added the tokens that they had, in the same pieces; the pieces, with their prompts.

    In the engine's thread. Their rows are computed like those of a prompt. Scores are not known any more; the text is.
    """
    now, found = engine.clock(), []
    for prompt, index, tokens in streamed:
        request = requests[prompt]
        if request.params.num_sequences > request.params.n:
            raise EngineError("the engine that wrote this answer is gone; the request can be sent again")
        seq = request.sequences[index]
        for token in tokens:
            if seq.finish_reason is None:
                engine.results.push(seq, token, Score(token, 0.0, 1, NONE, NONE, NONE) if seq.scored else None, now)
        if (fresh := request.completions[index].take(index)) is not None:
            found.append((prompt, fresh))
    return found
