"""Log-probabilities of tokens as callers read them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, repeat
from typing import Any

import numpy as np

from ..api.outputs import FlatLogprobs, Logprob
from .sequence import Score


class PromptLogprobs(Sequence[Mapping[int, Logprob] | None]):
    """The log-probabilities of a prompt, one entry per token, built when they are read.

    Building them earlier would block the engine's thread: 20 candidates for each of 8,000 tokens
    take long.
    """

    def __init__(self, scores: Sequence[Score | None], num_candidates: int, tokenizer: Any):
        """Args:
        scores: The scores of all tokens but the first, which nothing precedes.
        """
        self._scores = [None, *scores]
        self._num_candidates = num_candidates
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._scores)

    def __getitem__(self, index) -> Any:  # an entry, or a list of them for a slice
        if isinstance(index, slice):
            return [self._entry(score) for score in self._scores[index]]
        return self._entry(self._scores[index])

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return map(self._entry, self._scores)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # another process lacks the tokenizer

    def to_array(self) -> np.ndarray:
        """The log-probabilities [T, V] of the whole vocabulary after each token but the last.

        Needs `prompt_logprobs=-1`. Much faster than reading the entries, each of which is a dict.
        """
        if self._num_candidates != -1:
            raise ValueError(
                f"prompt_logprobs is {self._num_candidates}; it must be -1 for an array of the "
                "whole vocabulary"
            )
        scores = [score for score in self._scores if score is not None]
        vocab_size = len(scores[0].best) if scores else 0
        logprobs_TV = np.empty((len(scores), vocab_size), np.float32)
        for row_V, score in zip(logprobs_TV, scores, strict=True):
            row_V[score.best] = score.best_logprobs
        return logprobs_TV

    def _entry(self, score: Score | None) -> dict[int, Logprob] | None:
        return (
            None if score is None else logprob_entry(score, self._num_candidates, self._tokenizer)
        )


def flat_prompt_logprobs(
    scores: Sequence[Score | None], num_candidates: int, tokenizer: Any
) -> FlatLogprobs:
    flat = FlatLogprobs([None])
    for score in scores:
        flat.append_candidates(
            [] if score is None else candidates(score, num_candidates, tokenizer)
        )
    return flat


def logprob_entry(
    score: Score, num_candidates: int, tokenizer: Any, token_ids: Sequence[int] = ()
) -> dict[int, Logprob]:
    """Return the candidates of a position by their ids."""
    return {
        token: Logprob(logprob, rank, text)
        for token, logprob, rank, text in candidates(score, num_candidates, tokenizer, token_ids)
    }


def candidates(
    score: Score, num_candidates: int, tokenizer: Any, token_ids: Sequence[int] = ()
) -> list[tuple[int, float, int | None, str | None]]:
    """Return (token, log-probability, rank, text) of the token itself and of the alternatives.

    The alternatives are `token_ids` if given, otherwise the `num_candidates` likeliest (-1: all).
    """
    limit = None if num_candidates == -1 else num_candidates
    if token_ids:  # none for a token that another engine sampled
        alternatives = zip(token_ids, score.wanted_logprobs.tolist(), repeat(None), strict=False)
    else:
        alternatives = zip(
            score.best[:limit].tolist(),
            score.best_logprobs[:limit].tolist(),
            count(1),
            strict=False,
        )
    entries: list[tuple[int, float, int | None]] = [(score.token, score.logprob, score.rank)]
    entries += [alternative for alternative in alternatives if alternative[0] != score.token]
    return [
        (token, logprob, rank, None if tokenizer is None else tokenizer.token_text(token))
        for token, logprob, rank in entries
    ]
