"""What a drafter in the step proposed, for tests to look at."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Recorded:
    """The drafter of an engine, with all that was proposed after each text."""

    drafter: Any
    proposed: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, engine) -> "Recorded":
        """Takes the place of the engine's drafter."""
        engine.speculator.drafter = cls(engine.speculator.drafter)
        return engine.speculator.drafter

    def propose(self, seq, most: int) -> list[int]:
        self.proposed[tuple(seq.tokens)] = list(seq.proposed)
        return self.drafter.propose(seq, most)

    def end(self, seq) -> None:
        self.drafter.end(seq)
