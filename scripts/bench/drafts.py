"""Draft token statistics (speculative decoding) of a benchmark run."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..tables import table


class Drafts(NamedTuple):
    """Draft token counts over a period."""

    proposals: int = 0  # number of (sequence, step) pairs with draft tokens
    drafts: int = 0  # draft tokens
    accepted: tuple[int, ...] = ()  # accepted draft tokens by position in the draft

    def since(self, earlier: "Drafts") -> "Drafts":
        accepted = [now - then for now, then in zip(self.accepted, earlier.accepted, strict=True)]
        return Drafts(
            self.proposals - earlier.proposals, self.drafts - earlier.drafts, tuple(accepted)
        )

    def joined(self, added: "Drafts") -> "Drafts":
        accepted = [sum(counts) for counts in zip(self.accepted, added.accepted, strict=True)]
        return Drafts(self.proposals + added.proposals, self.drafts + added.drafts, tuple(accepted))

    @property
    def length(self) -> float:
        """Mean acceptance length: tokens per proposal, with the token that the step samples."""
        return 1 + sum(self.accepted) / max(self.proposals, 1)

    @property
    def share(self) -> float:
        """Acceptance rate: the fraction of draft tokens that were accepted."""
        return sum(self.accepted) / max(self.drafts, 1)

    @property
    def by_position(self) -> list[float]:
        """The fraction of proposals whose draft token at each position was accepted."""
        return [count / max(self.proposals, 1) for count in self.accepted]

    def result(self) -> dict[str, Any]:
        """The statistics by the keys of vLLM's benchmark results; the rate is in percent."""
        return {
            "spec_decode_acceptance_rate": 100 * self.share,
            "spec_decode_acceptance_length": self.length,
            "spec_decode_num_drafts": self.proposals,
            "spec_decode_draft_tokens": self.drafts,
            "spec_decode_accepted_tokens": sum(self.accepted),
            "spec_decode_per_position_acceptance_rates": self.by_position,
        }


def count_drafts(llm: Any) -> Drafts | None:
    """An engine's counts so far; None without speculative decoding."""
    from ...serving.engine.snapshot import take_snapshot

    counts = take_snapshot(llm.engine).drafts
    return None if counts is None else Drafts(*counts)


def drafts_table(name: str, drafts_by_load: Sequence[tuple[Any, Drafts]]) -> str:
    """A table with a row for each load; `name` is the heading of the first column."""
    rows = [
        (
            label,
            f"{d.drafts:,}",
            f"{d.share:.1%}",
            f"{d.length:.2f}",
            "  ".join(f"{p:.0%}" for p in d.by_position),
        )
        for label, d in drafts_by_load
    ]
    return table((name, "drafted", "accepted", "tokens a step", "accepted by position"), rows)
