"""Log-probabilities of positions, as callers read them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, repeat
from typing import Any

from ..api.outputs import FlatLogprobs, Logprob
from .sequence import Score


class PromptLogprobs(Sequence[Mapping[int, Logprob] | None]):
    """The log-probabilities of a prompt, one entry a token, made when they are read.

    The engine's thread makes outputs, and 20 candidates for each of 8,000 tokens take it long.
    """

    def __init__(self, scores: Sequence[Score | None], num_candidates: int, tokenizer: Any):
        """`scores` lacks the first token, which nothing precedes."""
        self._scores = [None, *scores]
        self._num_candidates = num_candidates
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, at) -> Any:  # an entry, or a list of them for a slice
        if isinstance(at, slice):
            return [self._entry(score) for score in self._scores[at]]
        return self._entry(self._scores[at])

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return map(self._entry, self._scores)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # another process has no tokenizer to read it with

    def _entry(self, score: Score | None) -> dict[int, Logprob] | None:
        return None if score is None else logprob_entry(score, self._num_candidates, self._tokenizer)


def flat_prompt_logprobs(scores: Sequence[Score | None], num_candidates: int, tokenizer: Any) -> FlatLogprobs:
    flat = FlatLogprobs([None])
    for score in scores:
        flat.append_candidates([] if score is None else candidates(score, num_candidates, tokenizer))
    return flat


def logprob_entry(score: Score, num_candidates: int, tokenizer: Any, wanted: Sequence[int] = ()) -> dict[int, Logprob]:
    """The candidates of a position by their ids."""
    return {
        token: Logprob(logprob, rank, text)
        for token, logprob, rank, text in candidates(score, num_candidates, tokenizer, wanted)
    }


def candidates(
    score: Score, num_candidates: int, tokenizer: Any, wanted: Sequence[int] = ()
) -> list[tuple[int, float, int | None, str | None]]:
    """(token, log-probability, rank, text) of the token itself, then of the likeliest (-1: of all) or of the wanted."""
    most = None if num_candidates == -1 else num_candidates
    if wanted:  # after a token that another engine drew nothing is known of them
        others = zip(wanted, score.wanted_logprobs.tolist(), repeat(None), strict=False)
    else:
        others = zip(score.best[:most].tolist(), score.best_logprobs[:most].tolist(), count(1), strict=False)
    found = [(score.token, score.logprob, score.rank)]
    found += [other for other in others if other[0] != score.token]
    if tokenizer is None:
        return [(*candidate, None) for candidate in found]
    return [(*candidate, tokenizer.token_text(candidate[0])) for candidate in found]
