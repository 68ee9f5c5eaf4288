"""What was drafted under a benchmark's load, and what of it was right."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..tables import table


class Drafts(NamedTuple):
    """Counts of a time."""

    proposals: int = 0  # of some drafts each, for a sequence in a step
    drafts: int = 0
    accepted: tuple[int, ...] = ()  # by position

    def since(self, before: "Drafts") -> "Drafts":
        accepted = [now - then for now, then in zip(self.accepted, before.accepted, strict=True)]
        return Drafts(self.proposals - before.proposals, self.drafts - before.drafts, tuple(accepted))

    def joined(self, other: "Drafts") -> "Drafts":
        accepted = [one + two for one, two in zip(self.accepted, other.accepted, strict=True)]
        return Drafts(self.proposals + other.proposals, self.drafts + other.drafts, tuple(accepted))

    @property
    def length(self) -> float:
        """Tokens that a step with drafts gives a sequence: those accepted and the one after them."""
        return 1 + sum(self.accepted) / max(self.proposals, 1)

    @property
    def share(self) -> float:
        return sum(self.accepted) / max(self.drafts, 1)

    @property
    def by_position(self) -> list[float]:
        """The share of proposals of which the first, the second, ... draft was accepted."""
        return [count / max(self.proposals, 1) for count in self.accepted]

    def result(self) -> dict[str, Any]:
        """Under the names of vLLM's result files; the rate is in percent, as there."""
        return {
            "spec_decode_acceptance_rate": 100 * self.share,
            "spec_decode_acceptance_length": self.length,
            "spec_decode_num_drafts": self.proposals,
            "spec_decode_draft_tokens": self.drafts,
            "spec_decode_accepted_tokens": sum(self.accepted),
            "spec_decode_per_position_acceptance_rates": self.by_position,
        }


def drafts_of(llm: Any) -> Drafts | None:
    """Of an engine so far; None where it does not draft."""
    from ...serving.engine.snapshot import take_snapshot

    found = take_snapshot(llm.engine).drafts
    return None if found is None else Drafts(*found)


def drafts_table(name: str, found: Sequence[tuple[Any, Drafts]]) -> str:
    """For people, a row for each of several loads."""
    rows = [
        (label, f"{d.drafts:,}", f"{d.share:.1%}", f"{d.length:.2f}", "  ".join(f"{p:.0%}" for p in d.by_position))
        for label, d in found
    ]
    return table((name, "drafted", "accepted", "tokens a step", "accepted by position"), rows)
