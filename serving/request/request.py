"""A request in service: the text, log-probabilities and timestamps of its completions."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ..api.outputs import (
    CompletionDelta,
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestDelta,
    RequestMetrics,
    RequestOutput,
)
from ..api.params import SamplingParams
from .detokenizer import Detokenizer
from .logprobs import PromptLogprobs, flat_prompt_logprobs, logprob_entry
from .sequence import Score, Sequence


class Completion:
    """One completion of a request, of `n` or, if the likeliest are chosen, of `best_of`."""

    def __init__(self, seq: Sequence, params: SamplingParams, tokenizer):
        self.seq = seq
        self.params = params
        self.tokenizer = tokenizer
        self.logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
        if params.gives_logprobs:
            self.logprobs = FlatLogprobs() if params.flat_logprobs else []
        self.cumulative = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.undecoded: list[int] = []
        self.text_parts: list[str] = []
        self.num_taken_parts = self.num_taken_tokens = 0
        self.has_taken_end = False
        self.detokenizer = None
        if tokenizer is not None and params.detokenize:
            self.detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
            )

    def push(self, token: int, score: Score | None) -> str | None:
        """Append a token; return the reason to finish, if this is the last one."""
        seq = self.seq
        p = self.params
        if score is not None:
            self.cumulative += score.logprob
            if self.logprobs is not None:
                self.logprobs.append(
                    logprob_entry(score, p.logprobs or 0, self.tokenizer, p.logprob_token_ids or ())
                )
        stopped = token in seq.stop_ids
        if self.detokenizer is not None and (not stopped or p.include_stop_str_in_output):
            self.undecoded.append(token)
            if p.stop:
                self.decode(check_stops=seq.num_output >= p.min_tokens)
                if self.detokenizer.stopped is not None:
                    self.stop_reason = self.detokenizer.stopped
                    return "stop"
        if stopped:
            self.stop_reason = None if token in seq.eos_ids else token
            return "stop"
        return "length" if len(seq.tokens) - seq.num_prompt >= seq.max_tokens else None

    def decode(self, check_stops: bool = True) -> None:
        """Decode the new tokens: at each token if there are stop strings, otherwise when text is
        read.
        """
        if self.undecoded:
            self.text_parts.append(self.detokenizer.push(self.undecoded, check_stops))
            self.undecoded.clear()

    def end(self, reason: str) -> None:
        """Finish the text: no more tokens follow, so text that was held back belongs to it."""
        self.decode()
        if self.detokenizer is not None and self.detokenizer.stopped is None:
            enough = self.seq.num_output >= self.params.min_tokens
            self.text_parts.append(self.detokenizer.finish(check_stops=enough))
            if self.detokenizer.stopped is not None:  # the held text completed a stop string
                reason = "stop"
                self.stop_reason = self.detokenizer.stopped
        self.finish_reason = reason

    @property
    def sum(self) -> float | None:
        """Cumulative log-probability so far, if log-probabilities are computed."""
        return self.cumulative if self.params.scored else None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens, by which `best_of` chooses."""
        return self.cumulative / self.seq.num_output if self.seq.num_output else -math.inf

    def take(self, index: int) -> CompletionDelta | None:
        """Return the update since the last call, or None; the finish reason is part of only one."""
        self.decode()
        seq = self.seq
        new_parts = self.text_parts[self.num_taken_parts :]
        first = self.num_taken_tokens
        is_end = self.finish_reason is not None and not self.has_taken_end
        if seq.num_output == first and not is_end and not any(new_parts):
            return None
        self.num_taken_parts = len(self.text_parts)
        self.num_taken_tokens = seq.num_output
        self.has_taken_end = self.has_taken_end or is_end
        return CompletionDelta(
            index=index,
            text="".join(new_parts),
            token_ids=seq.tokens[seq.num_prompt + first :],
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            finish_reason=self.finish_reason if is_end else None,
            stop_reason=self.stop_reason if is_end else None,
            drafted=[
                position - first
                for position in seq.draft.accepted_positions[
                    bisect_left(seq.draft.accepted_positions, first) :
                ]
            ],
        )

    def output(self, index: int) -> CompletionOutput:
        self.decode()
        self.text_parts = [
            "".join(self.text_parts[: self.num_taken_parts]),
            "".join(self.text_parts[self.num_taken_parts :]),
        ]
        self.num_taken_parts = 1
        return CompletionOutput(
            index=index,
            text="".join(self.text_parts),
            token_ids=self.seq.tokens[self.seq.num_prompt :],
            cumulative_logprob=self.sum,
            logprobs=None if self.logprobs is None else self.logprobs[:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Request:
    """A prompt and its completions; `output()` returns the user's view at any moment."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        sequences: list[Sequence],
        tokenizer,
        arrival: float,
    ):
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.sequences = sequences
        for seq in sequences:
            seq.request = self
        self.tokenizer = tokenizer
        self.completions = [Completion(seq, params, tokenizer) for seq in sequences]
        self.arrival = arrival
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.watched = True  # its tokens are read as they arrive
        self.finished = False  # read for hundreds of requests in every step
        self.flat_prompt_logprobs: FlatLogprobs | None = None  # set once all of them are known

    def scheduled(self, now: float) -> None:
        self.first_scheduled = self.first_scheduled or now

    def push(self, index: int, token: int, score, now: float) -> str | None:
        """Append a token to a completion; return the reason to finish, if there is one."""
        self.first_token = self.first_token or now
        self.last_token = now
        return self.completions[index].push(token, score)

    def end(self, index: int, reason: str) -> None:
        self.completions[index].end(reason)
        self.finished = all(completion.finish_reason is not None for completion in self.completions)
        # Breaks a reference cycle, so that memory is freed at once.
        self.sequences[index].request = None

    def take(self) -> RequestDelta:
        """Return each completion's update since the last call, at a cost independent of earlier
        tokens.

        With `best_of`, everything is returned at the end, when the likeliest completions are known.
        """
        finished = self.finished
        is_choice_known = finished or len(self.completions) == self.params.n
        chosen = self.chosen_completions() if is_choice_known else []
        fresh = [
            update
            for index, completion in enumerate(chosen)
            if (update := completion.take(index)) is not None
        ]
        return RequestDelta(fresh, finished)

    def output(self) -> RequestOutput:
        """Return everything so far."""
        return self.result(
            [completion.output(index) for index, completion in enumerate(self.chosen_completions())]
        )

    def delta(self) -> RequestOutput:
        """Return the same with only the updates since the last call."""
        return self.result(
            [
                CompletionOutput(
                    update.index,
                    update.text,
                    update.token_ids,
                    self.chosen_completions()[update.index].sum,
                    update.logprobs,
                    update.finish_reason,
                    update.stop_reason,
                )  # fmt: skip
                for update in self.take().completions
            ]
        )

    def result(self, outputs: list[CompletionOutput]) -> RequestOutput:
        seq = self.sequences[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=seq.tokens[: seq.num_prompt],
            prompt_logprobs=self.prompt_logprobs(),
            outputs=outputs,
            metrics=RequestMetrics(
                arrival_time=self.arrival,
                first_scheduled_time=self.first_scheduled,
                first_token_time=self.first_token,
                last_token_time=self.last_token,
                num_preemptions=sum(seq.num_preemptions for seq in self.sequences),
                num_generation_tokens=sum(seq.num_output for seq in self.sequences),
                num_draft_tokens=sum(seq.draft.num_verified for seq in self.sequences),
                num_accepted_tokens=sum(
                    len(seq.draft.accepted_positions) for seq in self.sequences
                ),
            ),
            num_cached_tokens=seq.cache.num_cached,
            pooled=None if seq.pool is None else seq.pool.vector(),
            finished=self.finished,
        )

    def chosen_completions(self) -> list[Completion]:
        """Return the completions to answer with: all, or the likeliest so far."""
        if len(self.completions) == self.params.n:
            return self.completions
        return sorted(
            self.completions, key=lambda completion: completion.mean_logprob, reverse=True
        )[: self.params.n]

    def facts(self) -> dict[str, int]:
        """Return the numbers that a trace shows."""
        seqs = self.sequences
        return {
            "prompt_tokens": seqs[0].num_prompt,
            "cached_tokens": seqs[0].cache.num_cached,
            "tokens": sum(seq.num_output for seq in seqs),
            "preemptions": sum(seq.num_preemptions for seq in seqs),
        }

    def prompt_logprobs(self) -> Seq[Mapping[int, Logprob] | None] | None:
        """Return one entry per prompt token; the first token has nothing to be predicted from."""
        scores = self.sequences[0].prompt_scores
        count = self.params.prompt_logprobs
        if scores is None or count is None:
            return None
        if not self.params.flat_logprobs:
            return PromptLogprobs(scores, count, self.tokenizer)
        if self.flat_prompt_logprobs is None and None not in scores:
            self.flat_prompt_logprobs = flat_prompt_logprobs(scores, count, self.tokenizer)
        return self.flat_prompt_logprobs or flat_prompt_logprobs(scores, count, self.tokenizer)
