"""Search for stop strings in a growing text."""

from bisect import bisect_right
from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings, and the end of a text that may be the start of one.

    The cost is linear in the length of the text, whatever the length of the stop strings: each
    character is compared with the stop strings that end in it, and each position is tried once as a
    start.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = sorted(set(stops))  # strings with a common prefix are adjacent
        self.first_characters = frozenset(stop[0] for stop in self.stops)
        self.by_last_character: dict[str, list[str]] = {}  # longest first
        for stop in sorted(self.stops, key=len, reverse=True):
            self.by_last_character.setdefault(stop[-1], []).append(stop)

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """Return the position and the text of the stop string that ends first, at `start` or later.

        Of several that end together, the longest wins.
        """
        for last in range(start, len(text)):
            for stop in self.by_last_character.get(text[last], ()):
                position = last + 1 - len(stop)
                if position >= 0 and text.startswith(stop, position):
                    return position, stop
        return None

    def held(self, text: str) -> int:
        """Return the number of characters at the end of the text that may start a stop string."""
        for position, character in enumerate(text):
            if character in self.first_characters and self.is_beginning(text[position:]):
                return len(text) - position
        return 0

    def is_beginning(self, piece: str) -> bool:
        """Return whether `piece` is a proper prefix of a stop string."""
        index = bisect_right(self.stops, piece)
        return index < len(self.stops) and self.stops[index].startswith(piece)
