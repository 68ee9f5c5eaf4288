"""The method `suffix`: draft by a vote over running texts and recent answers."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator

from ..request.sequence import Sequence
from .config import SpeculativeConfig

KEY = 2  # tokens by which places are found
COMPARED = 64  # the latest places with the same key
REACH = 32  # tokens before a place that are compared
LEAST = 0.1  # chance of a draft by the votes; below it, it costs more than it brings


class Places:
    """Where each pair of tokens occurs in some texts, the latest first."""

    def __init__(self):
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[tuple[int, ...], deque[tuple[int, int]]] = {}

    def add(self, number: int, text: list[int], num_known: int) -> None:
        """Index the positions of a text from `num_known` on."""
        self.texts[number] = text
        for end in range(max(num_known, KEY), len(text)):
            places = self.ends.setdefault(tuple(text[end - KEY : end]), deque(maxlen=COMPARED))
            places.appendleft((number, end))

    def remove(self, number: int) -> None:
        text = self.texts.pop(number)
        for end in range(KEY, len(text)):
            key = tuple(text[end - KEY : end])
            if (places := self.ends.get(key)) is None:
                continue
            if all(text_number == number for text_number, _ in places):
                del self.ends[key]
            elif any(text_number == number for text_number, _ in places):
                self.ends[key] = deque((place for place in places if place[0] != number), COMPARED)

    def alike(self, tokens: list[int]) -> Iterator[tuple[int, list[int], int]]:
        """Yield (length of the common suffix, text, position) of candidates for a continuation."""
        for number, end in self.ends.get(tuple(tokens[-KEY:]), ()):
            text = self.texts[number]
            count = KEY
            max_common = min(REACH, end, len(tokens))
            while count < max_common and text[end - count - 1] == tokens[-count - 1]:
                count += 1
            yield count, text, end


class SuffixDrafter:
    """Votes among the positions, in texts of the same cache salt, with the longest common suffix.

    The texts are those of running sequences and the latest finished answers. Texts with different
    salts are separate.
    """

    def __init__(self, max_texts: int):
        self.max_texts = max_texts
        self.places: dict[Hashable, Places] = {}
        # the text's number, and tokens that are known
        self.running: dict[Sequence, tuple[int, int]] = {}
        self.done: OrderedDict[int, Hashable] = OrderedDict()
        self.count = 0

    def propose(self, seq: Sequence, max_tokens: int) -> list[int]:
        places = self.take(seq)
        matches = list(places.alike(seq.tokens))
        longest = max((count for count, _, _ in matches), default=0)
        voters = [(text, end) for count, text, end in matches if count == longest]
        drafts = []
        chance = 1.0
        while len(drafts) < max_tokens:
            votes: dict[int, int] = {}
            for text, end in voters:
                if end < len(text):
                    votes[text[end]] = votes.get(text[end], 0) + 1
            if not votes:
                break
            best = max(votes, key=lambda token: votes[token])  # of equals the latest
            chance *= votes[best] / len(voters)
            if chance < LEAST:
                break
            drafts.append(best)
            voters = [
                (text, end + 1) for text, end in voters if end < len(text) and text[end] == best
            ]
        return drafts

    def take(self, seq: Sequence) -> Places:
        """The index of a sequence's salt, updated with the sequence's new tokens."""
        places = self.places.setdefault(seq.cache.salt, Places())
        number, num_known = self.running.get(seq, (self.count, 0))
        self.count = max(self.count, number + 1)
        places.add(number, seq.tokens, num_known)
        self.running[seq] = number, len(seq.tokens)
        return places

    def end(self, seq: Sequence) -> None:
        """Keep a finished answer for later requests."""
        if seq not in self.running:
            return
        self.take(seq)
        number, _ = self.running.pop(seq)
        self.done[number] = seq.cache.salt
        while len(self.done) > self.max_texts:
            oldest, salt = self.done.popitem(last=False)
            self.places[salt].remove(oldest)
            if not self.places[salt].texts:
                del self.places[salt]


def make_drafter(config: SpeculativeConfig) -> SuffixDrafter:
    return SuffixDrafter(config.suffix_max_texts)
