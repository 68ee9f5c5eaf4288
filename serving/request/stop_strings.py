"""Stop strings in a text that grows."""

from bisect import bisect_right
from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings, and the end of a text that may be the beginning of one.

    The cost of a text is linear in its length, whatever the length of the stop strings: each character
    is compared with the stop strings that end in it, and each place is tried once as a beginning.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = sorted(set(stops))  # those with a common beginning stand together
        self.first_characters = frozenset(stop[0] for stop in self.stops)
        self.by_last_character: dict[str, list[str]] = {}  # the longest first
        for stop in sorted(self.stops, key=len, reverse=True):
            self.by_last_character.setdefault(stop[-1], []).append(stop)

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """The place and the text of the stop string that ends first at `start` or later.

        Of several that end together it is the longest.
        """
        for last in range(start, len(text)):
            for stop in self.by_last_character.get(text[last], ()):
                place = last + 1 - len(stop)
                if place >= 0 and text.startswith(stop, place):
                    return place, stop
        return None

    def held(self, text: str) -> int:
        """Number of characters at the end of the text that begin a stop string which is longer."""
        for place, character in enumerate(text):
            if character in self.first_characters and self.is_beginning(text[place:]):
                return len(text) - place
        return 0

    def is_beginning(self, piece: str) -> bool:
        """Whether a stop string that is longer begins like this."""
        after = bisect_right(self.stops, piece)
        return after < len(self.stops) and self.stops[after].startswith(piece)
