"""The draft tokens of a replica's next step, and the pages that they need."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..cache.page_table import PageTable
from ..request.sequence import Sequence


def encode_device_token(slot: int, place: int, max_seqs: int) -> int:
    """Placeholder of a token that only the device knows: a slot's next token (place 0), or a draft
    token after it.
    """
    return -1 - slot - place * max_seqs


class DraftPrefill(NamedTuple):
    """Tokens that the draft model computes before a step, since it drafts after them in it."""

    seq: Sequence
    start: int
    num_tokens: int


class DraftPlanner:
    """Gives the sequences of a step that is being planned their draft tokens.

    Draft tokens never preempt: they get the rows and the pages that are left over.
    """

    def __init__(self, table: PageTable, max_seqs: int, needs_prefill: bool):
        self.table = table
        self.max_seqs = max_seqs
        self.needs_prefill = needs_prefill  # a draft model has KV pages of its own
        self.num_left = 0  # draft tokens that still fit into the step
        self.is_prefilling = False  # the draft model computes the step's tokens too

    def begin_step(self, running: Iterable[Sequence], max_drafts: int) -> None:
        self.num_left = max_drafts
        self.is_prefilling = self.needs_prefill and any(seq.draft.num_requested for seq in running)

    def add_tokens(self, seq: Sequence, start: int, end: int) -> None:
        """A sequence computes known tokens in the step, and so does the draft model."""
        if not self.needs_prefill:
            return
        self.is_prefilling |= seq.draft.num_requested > 0  # the sequence may be new
        if self.is_prefilling and seq.draft.num_prefilled >= start:
            seq.draft.num_prefilled = end

    def take_drafts(self, seq: Sequence, num_known: int, max_tokens: int) -> tuple[int, ...]:
        """The sequence's draft tokens after its first `num_known`, as far as there is room."""
        draft = seq.draft
        tokens = draft.tokens
        if seq.pending:  # the step in flight makes them
            tokens = [
                encode_device_token(seq.slot, place, self.max_seqs)
                for place in range(1, draft.num_on_device + 1)
            ]
        # The step samples one token anyway.
        num_wanted = seq.max_tokens - (num_known - seq.num_prompt) - 1
        tokens = tokens[: max(0, min(self.num_left, max_tokens, num_wanted))]
        while tokens and not self.table.grow(seq, num_known + len(tokens)):
            tokens = tokens[:-1]
        self.num_left -= len(tokens)
        return tuple(tokens)

    def reserve_pages(self, seq: Sequence, num_tokens: int) -> None:
        """Allocate pages for what the step drafts after these tokens; without them it drafts worse."""
        end = min(num_tokens + seq.draft.num_requested, seq.num_prompt + seq.max_tokens)
        while end > num_tokens and not self.table.grow(seq, end):
            end -= 1

    def end_step(self, items: Iterable[Any]) -> tuple[DraftPrefill, ...]:
        """Note what each scheduled sequence drafts and verifies; returns what the draft model must
        compute before the step.
        """
        prefills = []
        for item in items:
            draft = item.seq.draft
            draft.num_verifying = len(item.draft_tokens)
            draft.num_on_device = item.num_to_draft
            if not self.is_prefilling:
                continue
            if item.num_to_draft and draft.num_prefilled < item.start:
                lag = item.start - draft.num_prefilled
                prefills.append(DraftPrefill(item.seq, draft.num_prefilled, lag))
                draft.num_prefilled = item.start
            if draft.num_prefilled >= item.start:
                draft.num_prefilled = item.start + item.num_tokens
        return tuple(prefills)
