"""Incremental detokenization: emits neither partial characters nor the start of a stop string."""

from collections.abc import Sequence

from ...model.text.tokenizer import Tokenizer
from .stop_strings import StopMatcher

REPLACEMENT = "\ufffd"  # what a decoder makes of bytes that are not a complete character yet
MAX_PARTIAL = 3  # bytes of an incomplete UTF-8 character
# Tokens kept when the window is shortened: bytes of two characters, so that none is cut.
CONTEXT = 8
WINDOW = 16  # tokens


class Detokenizer:
    """The text of one growing answer.

        tokens   |first|---- dropped ----|-------------- last --------------|
        text     |----------------- taken -------------------|partial character|
                 |------------ emitted ------------|- held --|

    A token decodes differently after other tokens (spaces, bytes), so each step decodes a window:
    the first token and the last ones. Only a partial character at the end of its text can still
    change; the text before it is taken. `held` is the end of the taken text that may be the start
    of a stop string.

    The stop string that ends first wins, the longest of several that end together; so the cut
    depends on the text alone, not on its division into tokens.
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
        """Return the text that is now final; nothing after a stop string.

        Without `check_stops`, a stop string that these tokens complete is ordinary text.
        """
        if self.matcher is None:
            return self._advance(ids)  # one decode for all: the text is the same
        out = []
        for token in ids:
            if self.stopped is not None:
                break
            out.append(self._release(self._advance([token]), check_stops))
        return "".join(out)

    def finish(self, check_stops: bool = True) -> str:
        """Return the text that was held back; no more tokens follow."""
        if self.stopped is not None:
            return ""
        remaining = self._decode(self._window)[self._taken :]
        self._window = []
        self._taken = 0
        out = self._release(remaining, check_stops)
        if self.stopped is None:
            out = out + self._held
            self._held = ""
        return out

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _advance(self, ids: Sequence[int]) -> str:
        """Add tokens to the window and return the characters that became final."""
        visible = [token for token in ids if token not in self.skipped]
        if not visible:
            return ""
        self._window += visible
        text = self._decode(self._window)
        certain = len(text)
        while certain > len(text) - MAX_PARTIAL and text[certain - 1 : certain] == REPLACEMENT:
            certain -= 1
        new = text[self._taken : certain]
        self._taken = max(self._taken, certain)
        if len(self._window) >= self._limit:
            self._shorten(text)
        return new

    def _shorten(self, text: str) -> None:
        """Drop tokens from the middle of the window if its end still decodes to the same text.

        The first token stays, because decoders treat the first token of a text differently.
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
        # No cut works, for example in the middle of a character: retry ever more rarely.
        self._limit *= 2

    def _release(self, new: str, check_stops: bool) -> str:
        """Emit text, except an end that may be the start of a stop string."""
        if self.matcher is None or not new:
            return new
        text = self._held + new
        if check_stops:
            # A match must end within the new text: the held text has been searched before.
            match = self.matcher.find(text, len(self._held))
            if match is not None:
                start, self.stopped = match
                self._held = ""
                return text[: start + len(self.stopped) if self.include_stop else start]
        certain = len(text) - self.matcher.held(text)
        self._held = text[certain:]
        return text[:certain]
