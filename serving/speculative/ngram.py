"""The method `ngram`: draft what followed the last occurrence of the latest tokens."""

from ..request.sequence import Sequence
from .config import SpeculativeConfig


class NgramDrafter:
    """Looks for the longest of the latest runs of tokens that occurred before, the last time that
    it did.

        ... the quick brown fox ... the quick           "the quick" occurred: draft "brown fox"

    Each sequence has its own index, which grows with its tokens, so that a look-up costs the same
    in any text.
    """

    def __init__(self, shortest: int, longest: int):
        self.lengths = range(longest, shortest - 1, -1)
        self.indices: dict[Sequence, NgramIndex] = {}

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        index = self.indices.get(seq)
        if index is None:
            index = self.indices[seq] = NgramIndex(self.lengths)
        return index.after(seq.tokens, max_tokens)

    def end(self, seq: Sequence) -> None:
        self.indices.pop(seq, None)


class NgramIndex:
    """Where each run of tokens of one text was followed by another token, the last time."""

    def __init__(self, lengths: range):
        self.lengths = lengths
        self.known = 0
        self.followed: dict[tuple[int, ...], int] = {}

    def after(self, tokens: list[int], max_tokens: int) -> list[int]:
        """The tokens after the last occurrence of the longest matching suffix; past the end they
        repeat.
        """
        for end in range(max(self.known, 1), len(tokens)):
            for length in self.lengths:
                if length <= end:
                    self.followed[tuple(tokens[end - length : end])] = end
        self.known = len(tokens)
        for length in self.lengths:
            at = self.followed.get(tuple(tokens[-length:])) if length <= len(tokens) else None
            if at is not None:
                period = len(tokens) - at
                return [tokens[at + index % period] for index in range(max_tokens)]
        return []


def make_drafter(config: SpeculativeConfig) -> NgramDrafter:
    return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
