"""The speculative part of a sequence."""

from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class DraftState:
    """The draft tokens of one sequence, from their proposal to their verification.

    Drafted on the host: `tokens` are verified in the next step, which is scheduled once they are
    there (`waits_for_host`). Drafted on the device: each step drafts `num_requested` tokens for the
    next one. That step may be scheduled before the host has read them, with placeholders for
    `num_on_device` tokens.
    """

    tokens: list[int] = field(default_factory=list)  # known to the host, for the next step
    waits_for_host: bool = False  # the host drafts after each step of this sequence
    num_requested: int = 0  # tokens for the next step to draft
    num_on_device: int = 0  # tokens that the step in flight drafts
    num_verifying: int = 0  # tokens that the step in flight verifies
    proposals: list[int] = field(default_factory=list)  # drafted by the last step, where requested
    # Leading tokens of the sequence whose KV the draft model has computed.
    num_prefilled: int = 0
    num_verified: int = 0  # in all steps so far
    # Output positions of the tokens that were accepted.
    accepted_positions: list[int] = field(default_factory=list)

    @property
    def is_on_device(self) -> bool:
        """Whether the step in flight makes or verifies draft tokens."""
        return self.num_on_device > 0 or self.num_verifying > 0

    def clear(self) -> None:
        """Drop the draft tokens for the next step."""
        self.tokens = []
        self.num_on_device = 0
