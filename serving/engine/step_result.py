"""A step in flight and its results."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import NamedTuple

import jax
import numpy as np

from ...ops.sampling import Sampled
from ..device.page_copier import Offload
from ..device.step_shape import Size
from ..request.sequence import Score
from .scheduler import ScheduledSequence, StepPlan


class InFlightStep(NamedTuple):
    """A step between its launch and its results.

    Its arrays are futures until `read_result` waits for them.
    """

    plan: StepPlan
    size: Size
    sampled: Sampled
    hidden_RD: jax.Array
    offloads: list[Offload]  # page copies to host memory that were launched before the step
    # of a fused plan: the steps that ran before every sequence had stopped
    num_steps: jax.Array | None = None
    # Times of the engine's clock, in seconds: the host began to plan the step, had planned it, had
    # launched it.
    began: float = 0.0
    scheduled: float = 0.0
    launched: float = 0.0
    follows_media: bool = False  # a part of the encoder runs between it and the step before it


class SampledTokens(NamedTuple):  # hundreds are made a step
    """What a step sampled for one sequence.

    In the step's arrays a sequence has a row for each prompt token that is scored, then one for
    each sampled token.
    """

    item: ScheduledSequence
    row: int  # the first
    # of the scored rows and the first sampled one: 0, or `sampling.BROKEN` or `BANNED`
    failure: int
    tokens: list[int]  # the accepted draft tokens and the next token; negative where a row failed
    # draft tokens for the next step, where the step itself drafts
    proposals: list[int] | None = None

    @property
    def num_accepted(self) -> int:
        """Draft tokens that are in the output, once it has its tokens; the output may have ended
        amid them.
        """
        return max(0, min(len(self.tokens) - 1, len(self.item.seq.tokens) - self.item.num_known))


class StepResult(NamedTuple):
    """The results of a step."""

    step: InFlightStep
    outputs: list[SampledTokens]
    sampled: Sampled  # in host memory where a score is wanted
    hidden_RD: np.ndarray | None = None  # where a sequence has a pool
    # Times of the engine's clock, in seconds: the host began to wait, the results were there, and
    # the device could begin, since the step was launched and the step before it was done.
    began: float = 0.0
    collected: float = 0.0
    device_began: float = 0.0

    @property
    def plan(self) -> StepPlan:
        return self.step.plan

    @property
    def num_steps(self) -> int:
        """Number of decode steps that ran, of a fused plan."""
        return len(self.outputs[0].tokens) if self.plan.steps > 1 else 1

    def score(self, row: int) -> Score:
        """The log-probabilities of one sampled or scored token."""
        s = self.sampled
        token = int(s.tokens_R[row])
        logprob = float(s.logprobs_R[row])
        rank = int(s.ranks_R[row])
        return Score(
            token,
            logprob,
            rank,
            s.top_ids_RK[row],
            s.top_logprobs_RK[row],
            s.token_id_logprobs_RL[row],
        )


def read_result(step: InFlightStep) -> StepResult:
    """Wait for a step: its tokens, and log-probabilities only if a request wants them."""
    items = step.plan.items
    sampled = step.sampled
    if any(item.scored_positions or item.seq.scored for item in items):
        sampled = jax.device_get(sampled)
    if step.num_steps is not None:
        return read_fused_result(step, sampled, int(step.num_steps))
    hidden_RD = (
        np.asarray(step.hidden_RD) if any(item.seq.pool is not None for item in items) else None
    )
    tokens_R = np.asarray(sampled.tokens_R).tolist()
    drafts_BK = None if sampled.drafts_BK is None else np.asarray(sampled.drafts_BK).tolist()
    outputs = []
    row = 0
    number = 0
    replica = 0
    for item in items:
        if item.assumes_all_accepted:
            item = item.resolved()
        if item.seq.replica != replica:
            replica = item.seq.replica
            row = replica * step.size.samples
            number = replica * step.size.seqs
        proposals = None if drafts_BK is None else drafts_BK[number]
        number += 1
        if item.num_samples == 1 and not item.scored_positions:
            outputs.append(
                SampledTokens(item, row, min(tokens_R[row], 0), [tokens_R[row]], proposals)
            )
            row += 1
        elif item.num_samples or item.scored_positions:
            output, row = read_output(item, row, tokens_R, proposals)
            outputs.append(output)
    return StepResult(step, outputs, sampled, hidden_RD)


def read_output(
    item: ScheduledSequence, row: int, tokens_R: list[int], proposals: list[int] | None
) -> tuple[SampledTokens, int]:
    """(the output of a sequence with scored or draft tokens, whose rows begin at `row`; the next
    row).
    """
    first = row + len(item.scored_positions)
    end = row + len(item.scored_positions) + item.num_samples
    count = sum(1 for _ in accepted(item.draft_tokens, tokens_R[first:end])) + 1
    failures = [token for token in tokens_R[row : first + min(item.num_samples, 1)] if token < 0]
    failure = max(failures, default=0)  # broken logits are worse than banned tokens
    return SampledTokens(item, row, failure, tokens_R[first:end][:count], proposals), end


def read_fused_result(step: InFlightStep, sampled: Sampled, num_steps: int) -> StepResult:
    """The tokens that each sequence sampled in the fused steps that ran."""
    tokens_RS = np.asarray(sampled.tokens_R)[:num_steps].T
    if any(item.seq.scored for item in step.plan.items):  # a sequence's scores are adjacent
        sampled = jax.tree.map(
            lambda all_S: np.concatenate(np.swapaxes(all_S[:num_steps], 0, 1)), sampled
        )
    outputs = [
        SampledTokens(
            item, row * num_steps, min([0, *tokens_RS[row, :1].tolist()]), tokens_RS[row].tolist()
        )
        for row, item in enumerate(step.plan.items)
    ]
    return StepResult(step, outputs, sampled)


def accepted(drafts: Seq[int], sampled: Seq[int]) -> Iterator[int]:
    """The draft tokens that equal the token sampled in their place, up to the first that does
    not.
    """
    return (
        draft
        for draft, _ in takewhile(
            lambda pair: pair[0] == pair[1], zip(drafts, sampled, strict=False)
        )
    )
