"""Media in a prompt: spans of placeholder tokens whose embeddings an encoder computes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, overload

if TYPE_CHECKING:
    import numpy as np

ROW_BITS = 20  # of a row's number within its item, in a prefix key


@dataclass(frozen=True, eq=False)
class MediaItem:
    """One image, as its encoder reads it."""

    digest: int  # of the content and of the rule by which it was read, 256 bits
    patches: np.ndarray
    rows: int  # of patches
    columns: int
    num_rows: int  # embeddings that the encoder makes of it: tokens of the prompt


class MediaSpan(NamedTuple):
    """Placeholder tokens of consecutive rows of an item."""

    start: int
    item: MediaItem
    first_row: int
    num_rows: int

    @property
    def stop(self) -> int:
        return self.start + self.num_rows


class PromptMedia:
    """The media of a prompt, in order. The sequences of a request share it.

    Args:
        spans: Where the items are.
        shifts_AT: For each token its position on each axis of the rotary embedding, minus its
            position in the prompt; tokens after the prompt have that of its last token.
    """

    def __init__(self, spans: Sequence[MediaSpan], shifts_AT: np.ndarray):
        self.spans = tuple(spans)
        self.shifts_AT = shifts_AT
        self.stops = [span.stop for span in self.spans]
        self.stop = self.stops[-1]

    def between(self, start: int, stop: int) -> Iterator[MediaSpan]:
        """The spans that overlap these positions."""
        first = bisect_right(self.stops, start)
        return takewhile(lambda span: span.start < stop, islice(self.spans, first, None))

    def shifts(self, start: int, stop: int) -> np.ndarray:
        """The shifts of these positions, [axes, stop - start]."""
        last = self.shifts_AT.shape[1] - 1
        return self.shifts_AT[:, [min(position, last) for position in range(start, stop)]]


class PrefixKeys(Sequence[int]):
    """A sequence's tokens as the prefix tree compares them: an item's placeholders are replaced by
    negative numbers that name its content and the row.
    """

    def __init__(self, tokens: list[int], media: PromptMedia):
        self.tokens = tokens
        self.media = media

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self[index : index + 1][0]
        start, stop, _ = index.indices(len(self.tokens))
        keys = self.tokens[start:stop]
        for span in self.media.between(start, stop):
            first = max(span.start, start)
            last = min(span.stop, stop)
            keys[first - start : last - start] = [
                -1 - ((span.item.digest << ROW_BITS) + span.first_row + position - span.start)
                for position in range(first, last)
            ]
        return keys
