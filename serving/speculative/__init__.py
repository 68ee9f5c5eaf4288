"""Speculative decoding: tokens that may come next, verified together in one step.

A drafter proposes; the step draws at each of the proposed tokens as plain decoding would, with the
same seed and position, and those that equal what is drawn in their place are accepted. So the
answer is that of plain decoding.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from ..api.speculation import IN_STEP, SpeculativeConfig
from ..request.sequence import Sequence

DRAFTERS = {"ngram": ".ngram", "suffix": ".suffix"} | dict.fromkeys(IN_STEP, ".in_step")


class Drafter(Protocol):
    """Proposes from the tokens so far, or passes on what the sequence's last step proposed."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """Tokens that may come next, at most so many; none where it has no idea."""
        ...

    def end(self, seq: Sequence) -> None:
        """The sequence is over."""
        ...


def make_drafter(config: SpeculativeConfig) -> Drafter:
    make: Callable[[SpeculativeConfig], Any] = import_module(DRAFTERS[config.method], __name__).make
    return make(config)
