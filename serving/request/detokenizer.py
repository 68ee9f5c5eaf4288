"""From tokens to text as they come: never half a character, never the beginning of a stop string."""

from collections.abc import Sequence

from ...model.text.tokenizer import Tokenizer
from .stop_strings import StopMatcher

HALF = "\ufffd"  # what a decoder makes of bytes that are not a whole character yet
LONGEST_HALF = 3  # bytes of a character that lacks its last one
CONTEXT = 8  # tokens kept when the window gets shorter: bytes of two characters, so that none is cut in half
WINDOW = 16  # tokens


class Detokenizer:
    """Text of one growing answer.

        tokens   |first|---- forgotten ----|-------------- last --------------|
        text     |------------------- taken -------------------|half characters|
                 |------------ emitted ------------|-- held ---|

    A token reads differently by what stands before it (spaces, bytes), so each step decodes a window: the first
    token and the last ones. Only the end of its text can still change, the half characters there; the rest is
    taken. `held` is the end of what was taken that may be the head of a stop string.

    The stop string that ends first wins, the longest of several that end together; so the cut depends on the
    text alone, not on how it came in tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stop: Sequence[str] | None = None,
        include_stop: bool = False,
    ):
        self.tokenizer = tokenizer
        self.skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.matcher = StopMatcher(stop) if stop else None
        self.include_stop = include_stop
        self.stopped: str | None = None  # the stop string that ended the text
        self._window: list[int] = []
        self._taken = 0  # characters of the window's text
        self._limit = WINDOW
        self._held = ""

    def push(self, ids: Sequence[int], check_stops: bool = True) -> str:
        """The text that is certain now; after a stop string, nothing more.

        Without `check_stops` a stop string that these tokens complete is ordinary text.
        """
        if self.matcher is None:
            return self._advance(ids)  # all at once: the text is the same, and a window is decoded once
        out = []
        for token in ids:
            if self.stopped is not None:
                break
            out.append(self._release(self._advance([token]), check_stops))
        return "".join(out)

    def finish(self, check_stops: bool = True) -> str:
        """What was held back, for no more tokens come."""
        if self.stopped is not None:
            return ""
        rest = self._decode(self._window)[self._taken :]
        self._window, self._taken = [], 0
        out = self._release(rest, check_stops)
        if self.stopped is None:
            out, self._held = out + self._held, ""
        return out

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _advance(self, ids: Sequence[int]) -> str:
        """The characters that more tokens make certain."""
        shown = [token for token in ids if token not in self.skipped]
        if not shown:
            return ""
        self._window += shown
        text = self._decode(self._window)
        certain = len(text)
        while certain > len(text) - LONGEST_HALF and text[certain - 1 : certain] == HALF:
            certain -= 1
        new = text[self._taken : certain]
        self._taken = max(self._taken, certain)
        if len(self._window) >= self._limit:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Forget tokens in the middle of the window, if the end then reads as it does in the whole.

        The first token stays, so that none of the others is read as the first of a text.
        """
        pending = len(text) - self._taken
        first = self._window[:1]
        head = len(self._decode(first))
        for keep in range(CONTEXT, len(self._window) - 1):
            shorter = self._decode(first + self._window[-keep:])
            if len(shorter) - head >= pending and text.endswith(shorter[head:]):
                self._window = first + self._window[-keep:]
                self._taken = len(shorter) - pending
                self._limit = max(WINDOW, 2 * keep)
                return
        self._limit *= 2  # none does, in the middle of a character say: try again, ever more rarely

    def _release(self, new: str, check_stops: bool) -> str:
        """Pass text on, less the end that may be the head of a stop string."""
        if self.matcher is None or not new:
            return new
        text = self._held + new
        if check_stops:
            # A match ends within the new text: what was held has been searched, or its match was not to count.
            match = self.matcher.find(text, len(self._held))
            if match is not None:
                start, self.stopped = match
                self._held = ""
                return text[: start + len(self.stopped) if self.include_stop else start]
        certain = len(text) - self.matcher.held(text)
        self._held = text[certain:]
        return text[:certain]
