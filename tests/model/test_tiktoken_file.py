"""Kimi's tokenizer from a tiktoken file, against a reference of byte-pair merging."""

import base64
import json
import random

import pytest

from quire.model.config import ModelError
from quire.model.text.tokenizer import Tokenizer

CONFIG = {
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "tokenizer_class": "TikTokenTokenizer",
}
TEXT = (
    "The theme of the thesis: there is another theory. I'll say that they're THEIRS, it's 12345 "
    "things.\n\n  Then 'tis über alles 東京都は日本の首都です。中文字 mixed中文text  \n\tend   "
)


def learn_ranks(text: str, count: int) -> dict[bytes, int]:
    """Learn BPE ranks: single bytes, then the most frequent pair again and again."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [
        [bytes([byte]) for byte in word.encode()] for word in text.replace(" ", "| ").split("|")
    ]
    while len(ranks) < 256 + count:
        pairs: dict[bytes, int] = {}
        for word in words:
            for piece, next_piece in zip(word, word[1:], strict=False):
                pairs[piece + next_piece] = pairs.get(piece + next_piece, 0) + 1
        best = max(sorted(pairs), key=lambda pair: (pair not in ranks, pairs[pair]))
        ranks[best] = len(ranks)
        words = [merge_pair(word, best) for word in words]
    return ranks


def merge_pair(word: list[bytes], token: bytes) -> list[bytes]:
    out: list[bytes] = []
    for piece in word:
        if out and out[-1] + piece == token:
            out[-1] = token
        else:
            out.append(piece)
    return out


def reference_encode(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Merge the first neighbours whose union has the lowest rank until no union is a token."""
    pieces = [bytes([byte]) for byte in word]
    while word not in ranks or len(pieces) > 1:
        if word in ranks:
            return [ranks[word]]
        unions = [
            (ranks[a + b], at)
            for at, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            if a + b in ranks
        ]
        if not unions:
            break
        _, at = min(unions)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [ranks[piece] for piece in pieces]


def write_tokenizer(folder, ranks: dict[bytes, int], **config):
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    added_tokens = {
        str(len(ranks)): {"content": "[BOS]", "special": True},
        str(len(ranks) + 1): {"content": "[EOS]", "special": True},
        str(len(ranks) + 4): {"content": "<think>", "special": False},
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(CONFIG | {"added_tokens_decoder": added_tokens} | config)
    )
    return folder


@pytest.fixture(scope="module")
def ranks():
    return learn_ranks(TEXT, 60)


def test_random_words_match_the_reference(tmp_path, ranks):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, ranks))
    rng = random.Random(1)
    letters = "thesirnoy"
    for _ in range(300):
        word = "".join(rng.choice(letters) for _ in range(rng.randrange(1, 14)))
        assert tokenizer.encode(word) == reference_encode(word.encode(), ranks)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello WORLD", ["Hello", " WORLD"]),
        ("it's THEY'RE", ["it's", " THEY'RE"]),
        ("helloWorld", ["hello", "World"]),
        ("12345", ["123", "45"]),
        ("中文text", ["中文", "text"]),
        ("a中", ["a", "中"]),
        ("x = -1;\n\ny", ["x", " =", " -", "1", ";\n\n", "y"]),
        ("a   b  ", ["a", "  ", " b", "  "]),
        ("über Ünïcode", ["über", " Ünïcode"]),
    ],
)
def test_pre_tokenizer_splits_texts_into_words(tmp_path, ranks, text, words):
    ids = Tokenizer(write_tokenizer(tmp_path, ranks)).encode(text)
    assert ids == [token for word in words for token in reference_encode(word.encode(), ranks)]


def test_random_texts_round_trip(tmp_path, ranks):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, ranks))
    rng = random.Random(2)
    for _ in range(200):
        text = "".join(rng.choice(TEXT + "😀é\u200b\x00") for _ in range(40))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_and_reserved_tokens(tmp_path, ranks):
    tokenizer = Tokenizer(write_tokenizer(tmp_path, ranks))
    first = len(ranks)
    assert tokenizer.encode("[BOS]the<think>[EOS]") == [
        first,
        *reference_encode(b"the", ranks),
        first + 4,
        first + 1,
    ]
    assert tokenizer.decode([first, first + 4, first + 1]) == "<think>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (first, frozenset([first + 1]))
    assert tokenizer.encode(f"<|reserved_token_{first + 2}|>") == [first + 2]
    assert tokenizer.encode(f"<|reserved_token_{first + 255}|>") == [first + 255]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ranks: ranks | {b"zzz": len(ranks) + 1}, "count from 0 without a gap"),
        (
            lambda ranks: {token: rank for rank, token in enumerate(list(ranks)[1:])},
            "every byte must be a token",
        ),
    ],
)
def test_invalid_ranks_are_rejected(tmp_path, ranks, change, message):
    with pytest.raises(ModelError, match=message):
        Tokenizer(write_tokenizer(tmp_path, change(ranks)))


@pytest.mark.parametrize("line", [b"YQ==", b"YQ== x", b"!! 3", b"YQ== 3 4"])
def test_invalid_line_is_rejected(tmp_path, ranks, line):
    write_tokenizer(tmp_path, ranks)
    (tmp_path / "tiktoken.model").write_bytes(line)
    with pytest.raises(ModelError, match="line 1 is .* a token in base64 and a rank"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "added", [{"7": {"content": "x"}}, {"x": {"content": "x"}}, {"400": {}}, {"400": "x"}]
)
def test_invalid_added_tokens_are_rejected(tmp_path, ranks, added):
    with pytest.raises(ModelError, match="added_tokens_decoder in tokenizer_config.json has"):
        Tokenizer(write_tokenizer(tmp_path, ranks, added_tokens_decoder=added))


def test_tiktoken_files_of_other_models_are_rejected(tmp_path, ranks):
    with pytest.raises(ModelError, match="known of Kimi's alone"):
        Tokenizer(
            write_tokenizer(
                tmp_path,
                ranks,
                auto_map={"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
            )
        )
