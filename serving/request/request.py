"""A request that is being served, and the text, log-probabilities and times of its completions."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ..api.outputs import CompletionOutput, Delta, FlatLogprobs, Fresh, Logprob, RequestMetrics, RequestOutput
from ..api.params import SamplingParams
from .detokenizer import Detokenizer
from .logprobs import PromptLogprobs, flat_prompt_logprobs, logprob_entry
from .sequence import Score, Sequence


class Completion:
    """One of the answers to a request: `n` or, where the likeliest are chosen, `best_of` are written."""

    def __init__(self, seq: Sequence, params: SamplingParams, tokenizer):
        self.seq, self.params, self.tokenizer = seq, params, tokenizer
        self.logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
        if params.gives_logprobs:
            self.logprobs = FlatLogprobs() if params.flat_logprobs else []
        self.cumulative = 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.unread: list[int] = []
        self.parts: list[str] = []
        self.taken_parts = self.taken_tokens = 0
        self.taken_end = False
        self.detokenizer = None
        if tokenizer is not None and params.detokenize:
            self.detokenizer = Detokenizer(
                tokenizer,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop,
                include_stop=params.include_stop_str_in_output,
            )

    def push(self, token: int, score: Score | None) -> str | None:
        """Take a token; the reason to finish, if this is the last one."""
        seq, p = self.seq, self.params
        if score is not None:
            self.cumulative += score.logprob
            if self.logprobs is not None:
                self.logprobs.append(logprob_entry(score, p.logprobs or 0, self.tokenizer, p.logprob_token_ids or ()))
        stopped = token in seq.stop_ids
        if self.detokenizer is not None and (not stopped or p.include_stop_str_in_output):
            self.unread.append(token)
            if p.stop:
                self.read(check_stops=seq.num_output >= p.min_tokens)
                if self.detokenizer.stopped is not None:
                    self.stop_reason = self.detokenizer.stopped
                    return "stop"
        if stopped:
            self.stop_reason = None if token in seq.eos_ids else token
            return "stop"
        return "length" if len(seq.tokens) - seq.num_prompt >= seq.max_tokens else None

    def read(self, check_stops: bool = True) -> None:
        """Turn what has come into text: with stop strings at each token, otherwise when somebody looks."""
        if self.unread:
            self.parts.append(self.detokenizer.push(self.unread, check_stops))
            self.unread.clear()

    def end(self, reason: str) -> None:
        """No more tokens come: what was held back belongs to the text."""
        self.read()
        if self.detokenizer is not None and self.detokenizer.stopped is None:
            enough = self.seq.num_output >= self.params.min_tokens
            self.parts.append(self.detokenizer.finish(check_stops=enough))
            if self.detokenizer.stopped is not None:  # what was held back completed a stop string
                reason, self.stop_reason = "stop", self.detokenizer.stopped
        self.finish_reason = reason

    @property
    def sum(self) -> float | None:
        """Of the log-probabilities so far, where they are computed."""
        return self.cumulative if self.params.scored else None

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens: `best_of` chooses by it."""
        return self.cumulative / self.seq.num_output if self.seq.num_output else -math.inf

    def take(self, index: int) -> Fresh | None:
        """What came since the last time, or None; the end comes once."""
        self.read()
        seq, parts, first = self.seq, self.parts[self.taken_parts :], self.taken_tokens
        ends = self.finish_reason is not None and not self.taken_end
        if seq.num_output == first and not ends and not any(parts):
            return None
        self.taken_parts, self.taken_tokens, self.taken_end = len(self.parts), seq.num_output, self.taken_end or ends
        return Fresh(
            index=index,
            text="".join(parts),
            token_ids=seq.tokens[seq.num_prompt + first :],
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            finish_reason=self.finish_reason if ends else None,
            stop_reason=self.stop_reason if ends else None,
            drafted=[place - first for place in seq.accepted[bisect_left(seq.accepted, first) :]],
        )

    def output(self, index: int) -> CompletionOutput:
        self.read()
        self.parts = ["".join(self.parts[: self.taken_parts]), "".join(self.parts[self.taken_parts :])]
        self.taken_parts = 1
        return CompletionOutput(
            index=index,
            text="".join(self.parts),
            token_ids=self.seq.tokens[self.seq.num_prompt :],
            cumulative_logprob=self.sum,
            logprobs=None if self.logprobs is None else self.logprobs[:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Request:
    """A prompt and the completions that answer it; `output()` is what the user gets, at any moment."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        sequences: list[Sequence],
        tokenizer,
        arrival: float,
    ):
        self.request_id, self.prompt, self.params, self.sequences = request_id, prompt, params, sequences
        for seq in sequences:
            seq.request = self
        self.tokenizer = tokenizer
        self.completions = [Completion(seq, params, tokenizer) for seq in sequences]
        self.arrival = arrival
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.watched = True  # its tokens are read as they come
        self.finished = False  # asked for hundreds of requests in every step
        self.flat_prompt_logprobs: FlatLogprobs | None = None  # once all of them are known

    def scheduled(self, now: float) -> None:
        self.first_scheduled = self.first_scheduled or now

    def push(self, index: int, token: int, score, now: float) -> str | None:
        """Give a completion its next token; the reason to finish it, if there is one."""
        self.first_token, self.last_token = self.first_token or now, now
        return self.completions[index].push(token, score)

    def end(self, index: int, reason: str) -> None:
        self.completions[index].end(reason)
        self.finished = all(completion.finish_reason is not None for completion in self.completions)
        self.sequences[index].request = None  # a cycle would keep what is over until the collector comes

    def take(self) -> Delta:
        """What each answer got since the last call; the cost does not grow with what came before.

        With `best_of` everything comes at the end: which answers are the likeliest is not known before.
        """
        finished = self.finished
        known = finished or len(self.completions) == self.params.n
        chosen = self.chosen() if known else []
        fresh = [part for index, completion in enumerate(chosen) if (part := completion.take(index)) is not None]
        return Delta(fresh, finished)

    def output(self) -> RequestOutput:
        """Everything so far."""
        return self.result([completion.output(index) for index, completion in enumerate(self.chosen())])

    def delta(self) -> RequestOutput:
        """The same with what came since the last call only."""
        return self.result(
            [
                CompletionOutput(
                    part.index,
                    part.text,
                    part.token_ids,
                    self.chosen()[part.index].sum,
                    part.logprobs,
                    part.finish_reason,
                    part.stop_reason,
                )  # fmt: skip
                for part in self.take().parts
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
                num_draft_tokens=sum(seq.num_drafts for seq in self.sequences),
                num_accepted_tokens=sum(len(seq.accepted) for seq in self.sequences),
            ),
            num_cached_tokens=seq.cache.num_cached,
            pooled=None if seq.pool is None else seq.pool.vector(),
            finished=self.finished,
        )

    def chosen(self) -> list[Completion]:
        """The completions that are the answer: all, or the likeliest so far."""
        if len(self.completions) == self.params.n:
            return self.completions
        return sorted(self.completions, key=lambda completion: completion.likelihood, reverse=True)[: self.params.n]

    def facts(self) -> dict[str, int]:
        """The numbers that a trace shows of it."""
        seqs = self.sequences
        return {
            "prompt_tokens": seqs[0].num_prompt,
            "cached_tokens": seqs[0].cache.num_cached,
            "tokens": sum(seq.num_output for seq in seqs),
            "preemptions": sum(seq.num_preemptions for seq in seqs),
        }

    def prompt_logprobs(self) -> Seq[Mapping[int, Logprob] | None] | None:
        """One entry a prompt token; the first has nothing before it to be predicted from."""
        scores, count = self.sequences[0].prompt_scores, self.params.prompt_logprobs
        if scores is None or count is None:
            return None
        if not self.params.flat_logprobs:
            return PromptLogprobs(scores, count, self.tokenizer)
        if self.flat_prompt_logprobs is None and None not in scores:
            self.flat_prompt_logprobs = flat_prompt_logprobs(scores, count, self.tokenizer)
        return self.flat_prompt_logprobs or flat_prompt_logprobs(scores, count, self.tokenizer)
