"""Distributes a step's results to sequences and requests."""

from collections.abc import Iterator
from typing import Any

from ...ops.sampling import BANNED
from ..api.outputs import NO_TOKEN_ALLOWED, FinishReason
from ..cache.page_table import PageTable
from ..request.request import Request
from ..request.sequence import Sequence
from ..speculative.speculator import Speculator
from .scheduler import Scheduler
from .step_result import SampledTokens, StepResult


class ResultProcessor:
    """Appends sampled tokens to sequences and ends them.

    `requests` holds the requests that have not ended.
    """

    def __init__(
        self, scheduler: Scheduler, tables: list[PageTable], speculator: Speculator | None
    ):
        self.scheduler = scheduler
        self.tables = tables
        self.speculator = speculator
        self.requests: dict[str, Request] = {}  # that have not ended, by id

    def process(self, result: StepResult) -> Iterator[Request]:
        """Process the result of each sequence in a step; yields its request."""
        for output in result.outputs:
            item = output.item
            seq = item.seq
            seq.pending -= item.num_samples
            if seq.finish_reason is not None:
                continue  # ended while this step was in flight
            yield seq.request
            if item.draft_tokens:
                self.scheduler.roll_back(item, len(output.tokens) - 1)
            elif len(output.tokens) < item.num_samples:
                self.scheduler.shorten(item, len(output.tokens))
            if output.failure:
                self.fail(seq, output.failure)
            elif seq.pool is not None:
                self.pool(result, output)
            else:
                self.push_all(result, output)
                if self.speculator is not None:
                    self.speculator.update(output)

    def push_all(self, result: StepResult, output: SampledTokens) -> None:
        """Append a sequence's prompt scores and sampled tokens, up to the one that ends it."""
        item = output.item
        seq = item.seq
        for index, position in enumerate(item.scored_positions):
            assert seq.prompt_scores is not None
            seq.prompt_scores[position] = result.score(output.row + index)
        for row, token in enumerate(output.tokens, output.row + len(item.scored_positions)):
            if seq.finish_reason is not None:
                break
            if token < 0:
                self.fail(seq, token)
                break
            self.push(seq, token, result.score(row) if seq.scored else None, result.collected)

    def push(self, seq: Sequence, token: int, score: Any, now: float) -> None:
        """Append a token to a sequence, and end it if this was the last."""
        seq.tokens.append(token)
        reason = seq.request.push(seq.index, token, score, now)
        if seq.constraint is not None and reason != "stop":  # what ended it is not in its grammar
            reason = seq.constraint.advance(token) or reason
        if reason:
            self.end(seq, reason)

    def pool(self, result: StepResult, output: SampledTokens) -> None:
        """Add hidden states to a sequence's pool; with the last one the sequence ends."""
        item = output.item
        seq = item.seq
        positions = (
            [*item.scored_positions, item.start + item.num_tokens - 1]
            if item.num_samples
            else item.scored_positions
        )
        assert seq.pool is not None and result.hidden_RD is not None
        for index, position in enumerate(positions):
            seq.pool.add(position, result.hidden_RD[output.row + index])
        for position in item.scored_positions:
            assert seq.prompt_scores is not None
            seq.prompt_scores[position] = True
        if item.num_samples:
            self.end(seq, "stop")

    def fail(self, seq: Sequence, failure: int) -> None:
        """End a sequence whose next token could not be sampled.

        If its logits were NaN, its pages leave the prefix cache.
        """
        if failure == BANNED:
            seq.request.completions[seq.index].stop_reason = NO_TOKEN_ALLOWED
        else:
            self.tables[seq.replica].invalidate(seq)
        self.end(seq, "error")

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End one sequence, and with the last one its request."""
        self.scheduler.finish(seq, reason)
        if self.speculator is not None:
            self.speculator.remove(seq)
        request = seq.request
        request.end(seq.index, reason)
        if request.finished:
            self.requests.pop(request.request_id, None)

    def end_all(self, request: Request, reason: FinishReason) -> None:
        """End the sequences of a request that have not ended yet."""
        for seq in request.sequences:
            if seq.finish_reason is None:
                self.end(seq, reason)
