"""From tokens to text as they come: never half a character, never the head of a stop string."""

from collections.abc import Sequence

HALF = "\ufffd"  # what a decoder makes of bytes that are not a whole character yet


class Detokenizer:
    """Text of one growing answer.

        tokens   |-------- decoded before --------|-- window --|
                                          ^ context           ^ new
        text     |-------- emitted --------|-- held back --|

    Decoding a token depends on the few before it (spaces, byte fallback, merged characters), so each step
    decodes a short window twice, without and with the new tokens, and emits the difference. The window moves
    on whenever the text ends in a whole character.
    """

    def __init__(
        self, tokenizer, skip_special_tokens: bool = True, stop: Sequence[str] | None = None, include_stop: bool = False
    ):
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.stops, self.include_stop = tuple(stop or ()), include_stop
        self.window: list[int] = []
        self.context = 0  # tokens of the window whose text has been taken
        self.held = ""
        self.stopped: str | None = None

    def push(self, ids: Sequence[int], check_stops: bool = True) -> str:
        """The text that is certain now; after a stop string, nothing more."""
        if self.stopped is not None:
            return ""
        out = []
        for token in ids:
            out.append(self.release(self.advance(token), check_stops))
            if self.stopped is not None:
                break
        return "".join(out)

    def finish(self) -> str:
        """What was held back: no more tokens will come."""
        if self.stopped is not None:
            return ""
        rest = self.held + self.decode(self.window)[len(self.decode(self.window[: self.context])) :]
        self.held, self.window, self.context = "", [], 0
        return rest

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip)

    def advance(self, token: int) -> str:
        """The characters that one more token completes."""
        self.window.append(token)
        before, after = self.decode(self.window[: self.context]), self.decode(self.window)
        if after.endswith(HALF) and len(self.window) - self.context < 8 or not after.startswith(before):
            return ""  # bytes are missing; after eight tokens they are not coming, and U+FFFD is the text
        new = after[len(before) :]
        # The last tokens stay as context; the first of them may read differently at a text's start.
        keep = len(self.window) - self.context
        self.window = self.window[max(0, self.context - 2) :]
        self.context = len(self.window)
        return new if keep else ""

    def release(self, new: str, check_stops: bool) -> str:
        """Pass text on, less the end that may be the head of a stop string."""
        if not self.stops:
            return new
        if not check_stops:
            text, self.held = self.held + new, ""
            return text
        text = self.held + new
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self.held = ""
            return text[: at + len(self.stopped)] if self.include_stop else text[:at]
        hold = max((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - hold :] if hold else ""
        return text[: len(text) - hold]
