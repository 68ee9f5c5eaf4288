"""Incremental text against the full decode: nothing half, nothing of a stop string, nothing
lost.
"""

import random
from types import SimpleNamespace

import pytest

from quire.model.text.tokenizer import Tokenizer
from quire.serving.request.detokenizer import Detokenizer
from quire.serving.request.stop_strings import StopMatcher
from quire.tests.support.tokenizer_zoo import EOS, TURN, ZOO, characters, random_text, save


@pytest.fixture(scope="module", params=ZOO)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return Tokenizer(save(tmp_path_factory.mktemp(request.param), ZOO[request.param]()))


@pytest.fixture(scope="module")
def letters(tmp_path_factory) -> Tokenizer:
    """Byte level, so that any text can be pushed one character, or one byte, a token."""
    return Tokenizer(save(tmp_path_factory.mktemp("letters"), ZOO["byte_level"]()))


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token a character."""
    return [
        token
        for character in text
        for token in tokenizer.encode(character, add_special_tokens=False)
    ]


def random_ids(rng: random.Random, tokenizer: Tokenizer, kind: int) -> list[int]:
    """Ids of a text, ids at random, or a text cut short and followed by ids that make broken bytes
    likely.
    """
    if kind == 0:
        return tokenizer.encode(random_text(rng), add_special_tokens=False)
    noise = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randint(0, 40))]
    if kind == 1:
        return noise
    ids = tokenizer.encode(random_text(rng), add_special_tokens=False)
    some = sorted(tokenizer.byte_tokens) or range(tokenizer.vocab_size)
    return ids[: rng.randint(0, len(ids))] + rng.choices(some, k=rng.randint(0, 30)) + ids


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("skip", [True, False])
def test_deltas_joined_are_the_full_decode(tokenizer, kind, skip):
    rng = random.Random(kind)
    for _ in range(60):
        ids = random_ids(rng, tokenizer, kind)
        full = tokenizer.decode(ids, skip)
        stream = Detokenizer(tokenizer, skip)
        so_far = ""
        for token in ids:
            so_far += stream.push([token])
            assert full.startswith(so_far), characters(so_far)
        assert so_far + stream.finish() == full


def test_each_character_comes_with_its_last_token(tokenizer):
    """What is held back is never more than the U+FFFD at the end."""
    rng = random.Random(5)
    for _ in range(40):
        stream = Detokenizer(tokenizer)
        so_far = ""
        ids = random_ids(rng, tokenizer, 0)
        for count, token in enumerate(ids, start=1):
            so_far += stream.push([token])
            whole = tokenizer.decode(ids[:count])
            assert so_far == whole.rstrip("\ufffd") or whole[len(so_far) :].strip("\ufffd") == ""
            assert len(whole) - len(so_far) <= 3


def test_groups_of_tokens_change_nothing(tokenizer):
    rng = random.Random(6)
    for _ in range(40):
        ids = random_ids(rng, tokenizer, rng.randrange(3))
        text = tokenizer.decode(ids)
        stop = [text[at : at + 3] for at in range(2, len(text) - 3, 9)][:2]
        one = Detokenizer(tokenizer, stop=stop)
        many = Detokenizer(tokenizer, stop=stop)
        single = "".join(one.push([token]) for token in ids) + one.finish()
        grouped = ""
        rest = ids
        while rest:
            size = rng.randint(1, 7)
            grouped = grouped + many.push(rest[:size])
            rest = rest[size:]
        assert grouped + many.finish() == single
        assert one.stopped == many.stopped


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Reference: (start, stop) of the stop string that ends first, the longest of several; one
    character at a time.
    """
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return end - len(longest), longest
    return None


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_anywhere(tokenizer, include):
    rng = random.Random(7)
    stopped = 0
    for _ in range(150):
        ids = random_ids(rng, tokenizer, rng.choice([0, 0, 2]))
        text = tokenizer.decode(ids)
        stops = [
            text[at : at + rng.randint(1, 7)]
            for at in (rng.randrange(len(text) + 1) for _ in range(3))
        ]
        stops = [stop + "x" * (rng.random() < 0.5) for stop in stops]
        stops = [stop for stop in stops if stop] or ["zz"]
        # A broken byte at the end of a stop string is certain only later; here text and tokens are
        # to agree.
        stops = [stop.replace("\ufffd", "") or "zz" for stop in stops]
        match = first_stop(text, stops)
        expected = text if match is None else text[: match[0] + len(match[1]) * include]
        stream = Detokenizer(tokenizer, stop=stops, include_stop=include)
        so_far = ""
        for count, token in enumerate(ids, start=1):
            so_far += stream.push([token])
            assert expected.startswith(so_far)  # so no head of the stop string was ever out
            if stream.stopped is not None:
                break
            whole = tokenizer.decode(ids[:count])
            held = whole[len(so_far) :].rstrip("\ufffd")
            # nor held for nothing
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
        assert so_far + stream.finish() == expected
        assert stream.stopped == (None if match is None else match[1])
        assert stream.push(ids) == stream.finish() == "" or match is None
        stopped += match is not None
    assert stopped > 40


class NaiveStops:
    """Reference: every stop string is looked for in all that was held back, and every beginning of
    each at its end.
    """

    def __init__(self, stops: list[str], include_stop: bool):
        self.stops = stops
        self.include_stop = include_stop
        self.held = ""
        self.stopped: str | None = None

    def push(self, new: str, check_stops: bool) -> str:
        if self.stopped is not None:
            return ""
        text = self.held + new
        ends = range(len(self.held) + 1, len(text) + 1) if check_stops else ()
        for end in ends:
            ended = [stop for stop in self.stops if text[:end].endswith(stop)]
            if ended:
                self.stopped = max(ended, key=len)
                self.held = ""
                return text[: end if self.include_stop else end - len(self.stopped)]
        beginnings = [stop[:size] for stop in self.stops for size in range(1, len(stop))]
        self.held = max(
            (piece for piece in beginnings if text.endswith(piece)), key=len, default=""
        )
        return text[: len(text) - len(self.held)]


@pytest.mark.parametrize("seed", range(4))
def test_stop_strings_agree_with_a_naive_search(letters, seed):
    """Random stop strings over two or three letters, in random pieces, some of which do not
    count.
    """
    rng = random.Random(seed)
    endings = 0
    for _ in range(250):
        alphabet = "ab" if rng.random() < 0.7 else "abé"
        stops = [
            "".join(rng.choices(alphabet, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 5))
        ]
        include = rng.random() < 0.5
        stream = Detokenizer(letters, stop=stops, include_stop=include)
        naive = NaiveStops(stops, include)
        least = rng.choice([0, 0, 12])
        for count in range(40):
            token = rng.choice(alphabet)
            assert stream.push(spell(letters, token), count >= least) == naive.push(
                token, count >= least
            )
            assert stream.stopped == naive.stopped
        assert stream.finish() == naive.held
        endings += naive.stopped is not None
    assert 100 < endings < 250


def test_the_cost_of_stop_strings_is_linear_in_the_text(letters, monkeypatch):
    """64 stop strings of 1,024 characters that begin alike: each place of the text is looked at
    once.
    """
    looked = 0
    is_beginning = StopMatcher.is_beginning

    def counted(matcher: StopMatcher, piece: str) -> bool:
        nonlocal looked
        looked += 1
        return is_beginning(matcher, piece)

    monkeypatch.setattr(StopMatcher, "is_beginning", counted)
    stops = ["ab" * 500 + f"{number:024}" for number in range(64)]
    stream = Detokenizer(letters, stop=stops)
    text = "ab" * 499 + "b" + "ab" * 1500 + "a" * 2000 + "ab" * 499
    out = "".join(stream.push([token]) for token in spell(letters, text))
    assert out == text[: -2 * 499] and stream.finish() == "ab" * 499
    assert looked <= 2 * len(text)


@pytest.mark.parametrize(
    ("text", "stops", "cut", "stop"),
    [
        ("aaab!", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("xabcabd", ["abcabd", "bcx"], "x", "abcabd"),
        ("one two", ["two", "one"], "", "one"),
        ("the end", ["end", "the end"], "", "the end"),  # both end there: the longer
        ("abcd", ["abcd", "bc"], "a", "bc"),  # ends first, though it starts later
        ("a\n\nUser: hi", ["\nUser:"], "a\n", "\nUser:"),
        ("a\n\nUse it", ["\nUser:"], "a\n\nUse it", None),
        ("日本語です", ["本語"], "日", "本語"),
        ("🙂🙃🙂", ["🙃"], "🙂", "🙃"),
        ("no stop", ["stopp"], "no stop", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_stop_string_cases(letters, text, stops, cut, stop, size):
    ids = spell(letters, text)
    stream = Detokenizer(letters, stop=stops)
    out = (
        "".join(stream.push(ids[at : at + size]) for at in range(0, len(ids), size))
        + stream.finish()
    )
    assert (out, stream.stopped) == (cut, stop)
    inclusive = Detokenizer(letters, stop=stops, include_stop=True)
    assert inclusive.push(ids) + inclusive.finish() == cut + (stop or "")


def test_stop_at_a_newline_that_is_a_byte_token(tmp_path):
    """Llama 2 writes a newline as <0x0A>: the stop string must not wait for what follows."""
    tokenizer = Tokenizer(save(tmp_path, ZOO["byte_fallback"]()))
    stream = Detokenizer(tokenizer, stop=["\n"])
    ids = tokenizer.encode("the fox\n", add_special_tokens=False)
    assert ids[-1] in tokenizer.byte_tokens
    assert stream.push(ids) == "the fox"
    assert stream.stopped == "\n"


def test_stop_strings_wait_for_the_least_number_of_tokens(letters):
    stream = Detokenizer(letters, stop=["end"])
    assert stream.push(spell(letters, "the end"), check_stops=False) == "the end"
    assert stream.push(spell(letters, " of the en")) == " of the "
    assert stream.stopped is None
    assert stream.push(spell(letters, "d")) == ""
    assert stream.stopped == "end"


def test_stop_string_across_the_least_number_of_tokens(letters):
    """It counts where it ends; one that ended before is no match later, even inside what is
    held back.
    """
    stream = Detokenizer(letters, stop=["xbcy", "bc"])
    assert stream.push(spell(letters, "xbc"), check_stops=False) == ""
    assert stream.push(spell(letters, "z")) == "xbcz"
    assert stream.push(spell(letters, "xb"), check_stops=False) == ""
    assert stream.push(spell(letters, "c")) == "x"
    assert stream.stopped == "bc"


def test_what_is_held_back_comes_at_the_end(letters):
    stream = Detokenizer(letters, stop=["STOP"])
    smile = [letters.encode("🙂", add_special_tokens=False)]
    assert len(smile[0]) > 1
    assert stream.push(spell(letters, "go ST")) == "go "
    assert stream.finish() == "ST"
    half = Detokenizer(letters)
    assert half.push(smile[0][:-1]) == ""
    assert half.finish() == "\ufffd"


def test_special_tokens_are_skipped_or_shown(letters):
    ids = [
        *spell(letters, "a"),
        *letters.encode(TURN + EOS, add_special_tokens=False),
        *spell(letters, "b"),
    ]
    hidden = Detokenizer(letters)
    shown = Detokenizer(letters, skip_special_tokens=False, stop=[EOS])
    assert hidden.push(ids) + hidden.finish() == "ab"
    assert shown.push(ids) + shown.finish() == "a" + TURN
    assert shown.stopped == EOS


def long_runs(tokenizer: Tokenizer) -> list[list[int]]:
    """Streams that keep something unfinished for ever."""
    inside = sorted(
        token for token in range(tokenizer.vocab_size) if tokenizer.token_text(token) == "\ufffd"
    )
    glued = [
        token for token in range(tokenizer.vocab_size) if tokenizer.token_text(token)[:1].isalpha()
    ]
    runs = [
        [tokenizer.vocab_size + 5],
        tokenizer.encode("The fox sang.", add_special_tokens=False),
        glued,
    ]
    return [*runs, inside] if inside else runs


def test_cost_of_a_token_does_not_grow(tokenizer):
    """Counted in tokens decoded: some two dozen for each one pushed, however long the text is."""
    for run in long_runs(tokenizer):
        decoded = 0

        def counted(ids, skip_special_tokens=True):
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens)

        counting = SimpleNamespace(decode=counted, special_ids=frozenset())
        ids = (tokenizer.encode("The fox", add_special_tokens=False) + run * 3000)[:3000]
        stream = Detokenizer(counting, stop=["never seen"])  # type: ignore[arg-type]
        out = "".join(stream.push([token]) for token in ids) + stream.finish()
        assert out == tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded < 40 * len(ids)
