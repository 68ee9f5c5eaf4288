"""Streamed text equals the full decode, without incomplete characters or parts of stop strings."""

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
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    """A byte-level tokenizer, which can encode any text one character, or one byte, at a time."""
    return Tokenizer(save(tmp_path_factory.mktemp("letters"), ZOO["byte_level"]()))


def encode_characters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes each character by itself."""
    return [
        token
        for character in text
        for token in tokenizer.encode(character, add_special_tokens=False)
    ]


def random_ids(rng: random.Random, tokenizer: Tokenizer, kind: int) -> list[int]:
    """Returns the ids of a text (kind 0), random ids (1), or a truncated text followed by ids that
    make invalid bytes likely (2).
    """
    if kind == 0:
        return tokenizer.encode(random_text(rng), add_special_tokens=False)
    random_tokens = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randint(0, 40))]
    if kind == 1:
        return random_tokens
    ids = tokenizer.encode(random_text(rng), add_special_tokens=False)
    common_ids = sorted(tokenizer.byte_tokens) or range(tokenizer.vocab_size)
    return ids[: rng.randint(0, len(ids))] + rng.choices(common_ids, k=rng.randint(0, 30)) + ids


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("skip", [True, False])
def test_streamed_deltas_join_to_the_decoded_text(tokenizer, kind, skip):
    rng = random.Random(kind)
    for _ in range(60):
        ids = random_ids(rng, tokenizer, kind)
        text = tokenizer.decode(ids, skip)
        stream = Detokenizer(tokenizer, skip)
        streamed = ""
        for token in ids:
            streamed += stream.push([token])
            assert text.startswith(streamed), characters(streamed)
        assert streamed + stream.finish() == text


def test_characters_are_streamed_with_their_last_token(tokenizer):
    """Only U+FFFD at the end of the text is held back."""
    rng = random.Random(5)
    for _ in range(40):
        stream = Detokenizer(tokenizer)
        streamed = ""
        ids = random_ids(rng, tokenizer, 0)
        for count, token in enumerate(ids, start=1):
            streamed += stream.push([token])
            text = tokenizer.decode(ids[:count])
            assert streamed == text.rstrip("\ufffd") or text[len(streamed) :].strip("\ufffd") == ""
            assert len(text) - len(streamed) <= 3


def test_text_is_independent_of_token_grouping(tokenizer):
    rng = random.Random(6)
    for _ in range(40):
        ids = random_ids(rng, tokenizer, rng.randrange(3))
        text = tokenizer.decode(ids)
        stops = [text[at : at + 3] for at in range(2, len(text) - 3, 9)][:2]
        single_stream = Detokenizer(tokenizer, stop=stops)
        grouped_stream = Detokenizer(tokenizer, stop=stops)
        single_text = "".join(single_stream.push([token]) for token in ids) + single_stream.finish()
        grouped_text = ""
        remaining = ids
        while remaining:
            size = rng.randint(1, 7)
            grouped_text = grouped_text + grouped_stream.push(remaining[:size])
            remaining = remaining[size:]
        assert grouped_text + grouped_stream.finish() == single_text
        assert single_stream.stopped == grouped_stream.stopped


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Reference: returns (start, stop string) of the longest match that ends first."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return end - len(longest), longest
    return None


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_match_the_reference_anywhere(tokenizer, include):
    rng = random.Random(7)
    num_stopped = 0
    for _ in range(150):
        ids = random_ids(rng, tokenizer, rng.choice([0, 0, 2]))
        text = tokenizer.decode(ids)
        stops = [
            text[at : at + rng.randint(1, 7)]
            for at in (rng.randrange(len(text) + 1) for _ in range(3))
        ]
        stops = [stop + "x" * (rng.random() < 0.5) for stop in stops]
        stops = [stop for stop in stops if stop] or ["zz"]
        # an invalid byte at the end of a stop string is known to be invalid only later
        stops = [stop.replace("\ufffd", "") or "zz" for stop in stops]
        match = first_stop(text, stops)
        expected = text if match is None else text[: match[0] + len(match[1]) * include]
        stream = Detokenizer(tokenizer, stop=stops, include_stop=include)
        streamed = ""
        for count, token in enumerate(ids, start=1):
            streamed += stream.push([token])
            assert expected.startswith(streamed)  # no part of a stop string was streamed
            if stream.stopped is not None:
                break
            decoded = tokenizer.decode(ids[:count])
            held_back = decoded[len(streamed) :].rstrip("\ufffd")
            # text is held back only if it may begin a stop string
            assert not held_back or any(
                stop.startswith(held_back) and stop != held_back for stop in stops
            )
        assert streamed + stream.finish() == expected
        assert stream.stopped == (None if match is None else match[1])
        assert stream.push(ids) == stream.finish() == "" or match is None
        num_stopped += match is not None
    assert num_stopped > 40


class NaiveStops:
    """Reference: searches the held-back text for stop strings, and its end for prefixes."""

    def __init__(self, stops: list[str], include_stop: bool):
        self.stops = stops
        self.include_stop = include_stop
        self.held = ""
        self.stopped: str | None = None

    def push(self, new: str, check_stops: bool) -> str:
        if self.stopped is not None:
            return ""
        text = self.held + new
        end_positions = range(len(self.held) + 1, len(text) + 1) if check_stops else ()
        for end in end_positions:
            matches = [stop for stop in self.stops if text[:end].endswith(stop)]
            if matches:
                self.stopped = max(matches, key=len)
                self.held = ""
                return text[: end if self.include_stop else end - len(self.stopped)]
        prefixes = [stop[:size] for stop in self.stops for size in range(1, len(stop))]
        self.held = max(
            (prefix for prefix in prefixes if text.endswith(prefix)), key=len, default=""
        )
        return text[: len(text) - len(self.held)]


@pytest.mark.parametrize("seed", range(4))
def test_random_stop_strings_match_a_naive_search(byte_tokenizer, seed):
    """Random stop strings over two or three letters, with and without `min_tokens`."""
    rng = random.Random(seed)
    num_stopped = 0
    for _ in range(250):
        alphabet = "ab" if rng.random() < 0.7 else "abé"
        stops = [
            "".join(rng.choices(alphabet, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 5))
        ]
        include = rng.random() < 0.5
        stream = Detokenizer(byte_tokenizer, stop=stops, include_stop=include)
        naive = NaiveStops(stops, include)
        min_tokens = rng.choice([0, 0, 12])
        for count in range(40):
            token = rng.choice(alphabet)
            assert stream.push(
                encode_characters(byte_tokenizer, token), count >= min_tokens
            ) == naive.push(token, count >= min_tokens)
            assert stream.stopped == naive.stopped
        assert stream.finish() == naive.held
        num_stopped += naive.stopped is not None
    assert 100 < num_stopped < 250


def test_stop_string_cost_is_linear_in_the_text(byte_tokenizer, monkeypatch):
    """With 64 stop strings that share a prefix of 1,000 characters, positions are checked once."""
    num_lookups = 0
    is_beginning = StopMatcher.is_beginning

    def count_and_call(matcher: StopMatcher, piece: str) -> bool:
        nonlocal num_lookups
        num_lookups += 1
        return is_beginning(matcher, piece)

    monkeypatch.setattr(StopMatcher, "is_beginning", count_and_call)
    stops = ["ab" * 500 + f"{number:024}" for number in range(64)]
    stream = Detokenizer(byte_tokenizer, stop=stops)
    text = "ab" * 499 + "b" + "ab" * 1500 + "a" * 2000 + "ab" * 499
    text_out = "".join(stream.push([token]) for token in encode_characters(byte_tokenizer, text))
    assert text_out == text[: -2 * 499] and stream.finish() == "ab" * 499
    assert num_lookups <= 2 * len(text)


@pytest.mark.parametrize(
    ("text", "stops", "expected", "stop"),
    [
        ("aaab!", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("xabcabd", ["abcabd", "bcx"], "x", "abcabd"),
        ("one two", ["two", "one"], "", "one"),
        ("the end", ["end", "the end"], "", "the end"),  # both end here: the longer one
        ("abcd", ["abcd", "bc"], "a", "bc"),  # ends first, though it starts later
        ("a\n\nUser: hi", ["\nUser:"], "a\n", "\nUser:"),
        ("a\n\nUse it", ["\nUser:"], "a\n\nUse it", None),
        ("日本語です", ["本語"], "日", "本語"),
        ("🙂🙃🙂", ["🙃"], "🙂", "🙃"),
        ("no stop", ["stopp"], "no stop", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_stop_string_cases(byte_tokenizer, text, stops, expected, stop, size):
    ids = encode_characters(byte_tokenizer, text)
    stream = Detokenizer(byte_tokenizer, stop=stops)
    text_out = (
        "".join(stream.push(ids[at : at + size]) for at in range(0, len(ids), size))
        + stream.finish()
    )
    assert (text_out, stream.stopped) == (expected, stop)
    inclusive = Detokenizer(byte_tokenizer, stop=stops, include_stop=True)
    assert inclusive.push(ids) + inclusive.finish() == expected + (stop or "")


def test_newline_stop_string_matches_a_byte_token(tmp_path):
    """Llama 2 encodes a newline as <0x0A>; the stop string must match without further tokens."""
    tokenizer = Tokenizer(save(tmp_path, ZOO["byte_fallback"]()))
    stream = Detokenizer(tokenizer, stop=["\n"])
    ids = tokenizer.encode("the fox\n", add_special_tokens=False)
    assert ids[-1] in tokenizer.byte_tokens
    assert stream.push(ids) == "the fox"
    assert stream.stopped == "\n"


def test_stop_strings_are_ignored_before_min_tokens(byte_tokenizer):
    stream = Detokenizer(byte_tokenizer, stop=["end"])
    assert stream.push(encode_characters(byte_tokenizer, "the end"), check_stops=False) == "the end"
    assert stream.push(encode_characters(byte_tokenizer, " of the en")) == " of the "
    assert stream.stopped is None
    assert stream.push(encode_characters(byte_tokenizer, "d")) == ""
    assert stream.stopped == "end"


def test_stop_string_ending_after_min_tokens_matches(byte_tokenizer):
    """A match must end after `min_tokens`; an earlier one in held-back text is ignored."""
    stream = Detokenizer(byte_tokenizer, stop=["xbcy", "bc"])
    assert stream.push(encode_characters(byte_tokenizer, "xbc"), check_stops=False) == ""
    assert stream.push(encode_characters(byte_tokenizer, "z")) == "xbcz"
    assert stream.push(encode_characters(byte_tokenizer, "xb"), check_stops=False) == ""
    assert stream.push(encode_characters(byte_tokenizer, "c")) == "x"
    assert stream.stopped == "bc"


def test_held_back_text_is_flushed_at_the_end(byte_tokenizer):
    stream = Detokenizer(byte_tokenizer, stop=["STOP"])
    smile_ids = [byte_tokenizer.encode("🙂", add_special_tokens=False)]
    assert len(smile_ids[0]) > 1
    assert stream.push(encode_characters(byte_tokenizer, "go ST")) == "go "
    assert stream.finish() == "ST"
    incomplete_stream = Detokenizer(byte_tokenizer)
    assert incomplete_stream.push(smile_ids[0][:-1]) == ""
    assert incomplete_stream.finish() == "\ufffd"


def test_skip_special_tokens(byte_tokenizer):
    ids = [
        *encode_characters(byte_tokenizer, "a"),
        *byte_tokenizer.encode(TURN + EOS, add_special_tokens=False),
        *encode_characters(byte_tokenizer, "b"),
    ]
    skipping_stream = Detokenizer(byte_tokenizer)
    showing_stream = Detokenizer(byte_tokenizer, skip_special_tokens=False, stop=[EOS])
    assert skipping_stream.push(ids) + skipping_stream.finish() == "ab"
    assert showing_stream.push(ids) + showing_stream.finish() == "a" + TURN
    assert showing_stream.stopped == EOS


def long_runs(tokenizer: Tokenizer) -> list[list[int]]:
    """Returns token sequences that, repeated, keep some text incomplete."""
    incomplete_ids = sorted(
        token for token in range(tokenizer.vocab_size) if tokenizer.token_text(token) == "\ufffd"
    )
    word_ids = [
        token for token in range(tokenizer.vocab_size) if tokenizer.token_text(token)[:1].isalpha()
    ]
    runs = [
        [tokenizer.vocab_size + 5],
        tokenizer.encode("The fox sang.", add_special_tokens=False),
        word_ids,
    ]
    return [*runs, incomplete_ids] if incomplete_ids else runs


def test_decoding_cost_per_token_is_constant(tokenizer):
    """About two dozen tokens are decoded for each new token, however long the text is."""
    for token_run in long_runs(tokenizer):
        num_decoded = 0

        def count_and_decode(ids, skip_special_tokens=True):
            nonlocal num_decoded
            num_decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens)

        counting = SimpleNamespace(decode=count_and_decode, special_ids=frozenset())
        ids = (tokenizer.encode("The fox", add_special_tokens=False) + token_run * 3000)[:3000]
        stream = Detokenizer(counting, stop=["never seen"])  # type: ignore[arg-type]
        text = "".join(stream.push([token]) for token in ids) + stream.finish()
        assert text == tokenizer.decode(ids, skip_special_tokens=False)
        assert num_decoded < 40 * len(ids)
