"""Tokenizers of GGUF files against the original tokenizers and llama.cpp's merge algorithm."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.model.config import ModelError
from quire.model.gguf.pre_tokenizers import RULES
from quire.model.gguf.tokenizer import load_tokenizer, tokenizer_files
from quire.model.text.tokenizer import Tokenizer as FolderTokenizer
from quire.tests.support.cases import cases
from quire.tests.support.tokenizer_zoo import (
    CORPUS,
    SPECIAL,
    byte_fallback,
    byte_level,
    random_text,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
NASTY = [
    "",
    " ",
    "  ",
    "\n",
    "\r\n \n",
    "a\n\n\nb",
    "\t\t x",
    " a",
    "a ",
    "   a   b",
    ("It's we'LL They'Re I'm 'tis"),
    "1",
    "12",
    "1234567890",
    "3.14159, 2,718",
    "x1y22z333",
    "½ ² ٣٤٥ Ⅻ",
    "Hello, World!!! (yes)",
    "foo_bar->baz();",
    "CamelCase HTMLParser iPhone",
    "!important /path/to //x\n/\n",
    "日本語テキスト。你好，世界",
    "안녕하세요 ㄱㄴ",
    "🙂👨‍👩‍👧 🇫🇷",
    "e\u0301a\u0308",
    "नमस्ते ไทย",
    "Ünïcödé ΑΒΓ абв",
    "\u00a0\u3000x",
    "\ufffd\u200d",
    "a" * 60,
    " " * 70,
    "don’t “quote” — dash…",
    "<s>[INST]</s>",
    "<|turn|>hi<|turn|>",
    "$100 + 5% = ~7 ^2 | `x`",
    ("'S 'T 'LL 'd"),
]
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CAPITAL = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END"
    r"|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(False)
DIGITS = pre_tokenizers.Digits(True)
# pre_tokenizer of a published model's tokenizer.json, by GGUF name
PUBLISHED: dict[str, list[Any]] = {
    "llama-bpe": [rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}{REST}"],
    "qwen2": [rf"{CONTRACTIONS}|{WORD}|\p{{N}}{REST}"],
    "qwen35": [
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [CAPITAL.replace("END", f"{CONTRACTIONS}?").replace("DIGITS", "{1,3}")],
    "tekken": [CAPITAL.replace("END", "").replace("DIGITS", "")],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS],
    "seed-coder": [
        rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "jais-2": [
        rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)"
        r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    ],
    "falcon": [
        pre_tokenizers.Punctuation("contiguous"),
        BYTES,
        pre_tokenizers.Digits(False),
        "[0-9][0-9][0-9]",
    ],
    "command-r": [DIGITS, BYTES],
    "gpt-2": [BYTES],
    "viking": [" ?[^(\\s|.,!?…。，、।۔،)]+", DIGITS],
}


def small_tokenizer(name: str) -> Tokenizer:
    """A small tokenizer with the pre-tokenizer of a published model."""
    core = Tokenizer(models.BPE())
    steps = [
        step if not isinstance(step, str) else pre_tokenizers.Split(Regex(step), "isolated")
        for step in PUBLISHED[name]
    ]
    has_byte_level = any(isinstance(step, pre_tokenizers.ByteLevel) for step in steps)
    steps += (
        []
        if has_byte_level
        else [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(steps)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*CORPUS, *NASTY], trainer)
    core.add_tokens([AddedToken("[INST]", normalized=False)])
    return core


def byte_level_metadata(core: Tokenizer, **keys: Any) -> dict[str, Any]:
    """Metadata as llama.cpp's converter writes it for a byte-level tokenizer."""
    ids = core.get_vocab(with_added_tokens=True)
    added = core.get_added_tokens_decoder()
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
    kinds = [
        NORMAL if i not in added else CONTROL if added[i].special else USER_DEFINED
        for i in range(len(tokens))
    ]
    merges = [" ".join(merge) for merge in json.loads(core.to_str())["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def sample_texts(seed: int, number: int = 300) -> list[str]:
    rng = random.Random(seed)
    random_texts = [
        "".join(rng.choices("ab AB1234'\n\t.,/!_<s>日한é🙂ा", k=rng.randint(1, 40)))
        for _ in range(cases(number))
    ]
    return NASTY + random_texts + [random_text(rng) for _ in range(cases(number))]


@pytest.mark.parametrize("name", PUBLISHED)
def test_byte_level_bpe_matches_the_original_tokenizer(name):
    core = small_tokenizer(name)
    core.model.ignore_merges = RULES[name].whole_words
    read = load_tokenizer(byte_level_metadata(core, pre=name))
    for text in sample_texts(1):
        ids = core.encode(text, add_special_tokens=False).ids
        assert read.encode(text, add_special_tokens=False).ids == ids, repr(text)
        assert read.decode(ids, skip_special_tokens=False) == core.decode(
            ids, skip_special_tokens=False
        )


def test_every_pre_tokenizer_round_trips_long_texts():
    """Also in bounded time for long texts of one kind of character."""
    core = byte_level()
    for name in RULES:
        read = load_tokenizer(byte_level_metadata(core, pre=name))
        for text in [
            *NASTY,
            "1" * 3000,
            " " * 3000,
            "a'" * 1500,
            "\n" * 3000,
            "日" * 1000,
            "A" * 3000,
        ]:
            ids = read.encode(text, add_special_tokens=False).ids
            assert read.decode(ids, skip_special_tokens=False) == text, (name, text)


def test_pre_tokenizers_split_numbers():
    def pieces(name: str, text: str) -> list[str]:
        pre_tokenizer = load_tokenizer(byte_level_metadata(byte_level(), pre=name)).pre_tokenizer
        assert pre_tokenizer is not None
        return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]

    assert pieces("qwen2", "a12345") == ["a", "1", "2", "3", "4", "5"]
    assert pieces("llama-bpe", "a12345") == ["a", "123", "45"]
    assert pieces("afmoe", "a12345") == ["a", "12", "345"]
    assert pieces("superbpe", "12345") == ["12", "345"]
    assert pieces("default", "12345") == ["123", "45"]
    assert pieces("tiny_aya", "12345") == ["12", "345"]
    assert pieces("gpt-2", "a12345") == ["a", "12345"]


def sentencepiece_metadata(pieces: dict[str, float], **keys: Any) -> dict[str, Any]:
    """Metadata of SentencePiece BPE with the byte tokens and these pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            UNKNOWN,
            CONTROL,
            CONTROL,
            *[BYTE] * 256,
            *[NORMAL] * len(pieces),
        ],
        "tokenizer.ggml.scores": [*[0.0] * 259, *pieces.values()],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def merge_by_score(text: str, pieces: dict[str, float], first: int = 259) -> list[int]:
    """llama.cpp's algorithm: merge the leftmost neighbours whose token has the best score."""
    ids = {piece: first + number for number, piece in enumerate(pieces)}
    symbols = list(text)
    while True:
        candidates = [
            (-pieces[a + b], i)
            for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))
            if a + b in pieces
        ]
        if not candidates:
            break
        _, at = min(candidates)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        i for s in symbols for i in ([ids[s]] if s in ids else [3 + byte for byte in s.encode()])
    ]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_match_llama_cpp(prefix):
    rng = random.Random(7)
    for round_ in range(cases(60, least=6)):
        letters = "ab▁" if round_ % 2 else "abcdefgh▁é日"
        pieces: dict[str, float] = {letter: -1000.0 - i for i, letter in enumerate(letters)}
        for _ in range(rng.randint(5, 60)):
            piece = rng.choice([*pieces]) + rng.choice([*pieces])
            if len(piece) <= 9:
                pieces.setdefault(piece, -float(len(pieces)))  # earlier pieces have better scores
        read = load_tokenizer(sentencepiece_metadata(pieces, add_space_prefix=prefix))
        for _ in range(40):
            text = "".join(rng.choices(letters.replace("▁", " ") + "x🙂\n", k=rng.randint(1, 30)))
            expected = merge_by_score(("▁" if prefix else "") + text.replace(" ", "▁"), pieces)
            assert read.encode(text, add_special_tokens=False).ids == expected, (text, pieces)


@pytest.mark.parametrize("strip", [True, False])
def test_sentencepiece_tokenizer_matches_the_original(strip):
    """Scores are the negative ranks of the original's merges."""
    core = byte_fallback(strip)
    model = json.loads(core.to_str())["model"]
    order = {
        "".join(merge): -float(rank) for rank, merge in reversed([*enumerate(model["merges"])])
    }
    ids = core.get_vocab(with_added_tokens=True)
    added = core.get_added_tokens_decoder()
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
    kinds = [
        CONTROL if i in added else BYTE if re.fullmatch("<0x..>", t) else NORMAL
        for i, t in enumerate(tokens)
    ]
    read = load_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.scores": [order.get(token, -1e6 - i) for i, token in enumerate(tokens)],
            "tokenizer.ggml.add_space_prefix": strip,
            "tokenizer.ggml.bos_token_id": 1,
        }
    )
    for text in sample_texts(2):
        ids = core.encode(text)
        assert read.encode(text).ids == ids.ids, repr(text)
        assert read.decode(ids.ids) == core.decode(ids.ids)


def test_gemma4_merges_are_read():
    pieces = ["a", "b", "▁", "ab", "▁ab", "\n", "\n\n"]
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
    ]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.token_type": [CONTROL] * 4 + [BYTE] * 256 + [NORMAL] * 7,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.merges": ["a b", "▁ ab", "\n \n"],
        "tokenizer.ggml.unknown_token_id": 3,
    }
    read = load_tokenizer(metadata)
    assert read.encode("ab ab\n\nc").tokens == ["<bos>", "ab", "▁ab", "\n\n", "<0x63>"]


def write_folder(path: Path, metadata: dict[str, Any]) -> FolderTokenizer:
    for name, text in tokenizer_files(metadata).items():
        (path / name).write_text(text, encoding="utf-8")
    return FolderTokenizer(path)


def test_tokenizer_files_load_as_a_folder(tmp_path):
    core = byte_level()
    ids = core.get_vocab()
    read = write_folder(
        tmp_path,
        byte_level_metadata(
            core, pre="llama-bpe", bos_token_id=ids["<s>"], eos_token_id=ids["<|turn|>"]
        )
        | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"},
    )
    assert read.encode("a") == [ids["<s>"], *read.encode("a", add_special_tokens=False)]
    assert read.bos_token_id == ids["<s>"]
    assert read.eos_token_ids == {
        ids["<|turn|>"],
        ids["</s>"],
    }  # the second is recognised by its name
    assert read.special_ids == {ids[token] for token in SPECIAL}
    assert read.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"
    assert read.vocab_size == len(ids)


@pytest.mark.parametrize(
    ("keys", "generation"),
    [
        ({}, {}),
        (
            {"temp": np.float32(0.7), "top_k": 20, "top_p": np.float32(0.95), "min_p": 0.0},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.0},
        ),
        (
            {"penalty_repeat": np.float32(1.1), "penalty_last_n": 64},
            {"repetition_penalty": 1.1, "repetition_penalty_last_n": 64},
        ),
        ({"penalty_repeat": np.float32(1.1), "penalty_last_n": 0}, {}),
        ({"penalty_repeat": 1.0, "penalty_last_n": 64}, {}),
        (
            {"mirostat": 2, "xtc_probability": 0.5, "sequence": "kpt"},
            {"mirostat": 2, "xtc_probability": 0.5, "sampler_sequence": "kpt"},
        ),
    ],
)
def test_recommended_sampling_becomes_generation_config(keys, generation):
    metadata = byte_level_metadata(byte_level(), pre="gpt-2") | {
        f"general.sampling.{key}": value for key, value in keys.items()
    }
    generation_config = json.loads(tokenizer_files(metadata)["generation_config.json"])
    assert {
        name: value for name, value in generation_config.items() if not name.endswith("_token_id")
    } == generation


def test_wrong_type_of_recommended_sampling_is_rejected():
    with pytest.raises(ModelError, match="general.sampling.temp = 'hot'; it must be a number"):
        tokenizer_files(
            byte_level_metadata(byte_level(), pre="gpt-2") | {"general.sampling.temp": "hot"}
        )


def test_named_chat_templates(tmp_path):
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_templates": ["tool_use"]}
    metadata = (
        byte_level_metadata(byte_level(), pre="gpt-2")
        | templates
        | {"tokenizer.chat_template.tool_use": "tools"}
    )
    read = write_folder(tmp_path, metadata)
    assert read.template_for([]) == "plain"
    assert read.template_for([1]) == "tools"


@pytest.mark.parametrize(
    ("keys", "special_tokens"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True, "bos_token_id": 0}, (["<s>"], [])),
        ({"add_eos_token": True, "bos_token_id": 0, "eos_token_id": 1}, ([], ["</s>"])),
        (
            {"add_bos_token": True, "add_eos_token": True, "bos_token_id": 0, "eos_token_id": 1},
            (["<s>"], ["</s>"]),
        ),
    ],
)
def test_bos_and_eos_are_added(keys, special_tokens):
    prefix, suffix = special_tokens
    read = load_tokenizer(byte_level_metadata(byte_level(), pre="qwen2", **keys))
    assert read.encode("a").tokens == [*prefix, "a", *suffix]
    assert read.encode("a", "b").tokens == [*prefix, "a", *suffix, *prefix, "b", *suffix]


def test_end_of_message_token_is_not_eos(tmp_path):
    core = byte_level()
    core.add_special_tokens(["<|end|>", "<|return|>", "<|call|>"])
    ids = core.get_vocab(with_added_tokens=True)
    read = write_folder(
        tmp_path, byte_level_metadata(core, pre="gpt-4o", eos_token_id=ids["<|return|>"])
    )
    assert read.eos_token_ids == {ids["<|return|>"], ids["<|call|>"], ids["</s>"]}


def test_padding_tokens_are_dropped_from_the_vocabulary():
    metadata = byte_level_metadata(byte_level(), pre="qwen2")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["[PAD1]", "[PAD1]", ""]
    metadata["tokenizer.ggml.token_type"] += [UNUSED, UNUSED, NORMAL]
    read = load_tokenizer(metadata)
    assert read.get_vocab_size() == size
    assert read.id_to_token(size) is None


def test_numpy_arrays_in_metadata():
    metadata = sentencepiece_metadata({"a": -1.0, "b": -2.0, "ab": -3.0, "▁": -4.0})
    expected = load_tokenizer(metadata)
    metadata["tokenizer.ggml.scores"] = np.float32(metadata["tokenizer.ggml.scores"])
    metadata["tokenizer.ggml.token_type"] = np.int32(metadata["tokenizer.ggml.token_type"])
    assert load_tokenizer(metadata).encode("ab a").ids == expected.encode("ab a").ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model": "bert"},
            "tokenizer.ggml.model = 'bert' is not supported; supported are gemma4, gpt2, llama",
        ),
        ({"model": 3}, "tokenizer.ggml.model = 3; it must be text"),
        ({"pre": "new"}, "tokenizer.ggml.pre = 'new' is not known; it can be default"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens = 'abc'; it must be a list"),
        ({"tokens": ["a", 3]}, "tokenizer.ggml.tokens has 3 at place 1; it must be text"),
        ({"tokens": []}, "has 0 entries; it must have 1"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, "has 'a' twice, as 0 and 1"),
        ({"tokens": ["a" * 5000], "token_type": [1]}, "token 0 has 5000 characters"),
        ({"token_type": [1]}, "token_type has 1 entries for"),
        ({"token_type": [0] * 360}, "token_type has 0 at place 0; it can be 1 to 6"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "merges has 'ab' at place 0; it must be two tokens that make one"),
        (
            {"merges": ["zz yy"]},
            "merges has 'zz yy' at place 0; it must be two tokens that make one",
        ),
        ({"bos_token_id": 9999}, "bos_token_id = 9999; there are 360 tokens"),
        ({"bos_token_id": -1}, "bos_token_id = -1; it must be a whole number of at least 0"),
        ({"add_bos_token": True}, "add_bos_token is true, but bos_token_id is missing"),
        ({"add_bos_token": 1}, "add_bos_token = 1; it must be true or false"),
    ],
)
def test_error_names_the_invalid_key(change, message):
    metadata = byte_level_metadata(byte_level(), pre="qwen2") | {
        f"tokenizer.ggml.{key}": value for key, value in change.items()
    }
    with pytest.raises(ModelError, match=re.escape(message)):
        tokenizer_files(metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [0.0]}, "scores has 1 entries for 260 tokens"),
        (
            {"scores": [0.0] * 259 + [float("nan")]},
            "scores has nan at place 259; it must be a number",
        ),
        ({"scores": ["0"] * 260}, "scores has '0' at place 0; it must be a number"),
        (
            {"unknown_token_id": None, "token_type": [5] * 259 + [1]},
            "unknown_token_id is missing, and there is no token",
        ),
    ],
)
def test_error_names_the_invalid_sentencepiece_key(change, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        tokenizer_files(
            sentencepiece_metadata({"a": 0.0})
            | {f"tokenizer.ggml.{key}": value for key, value in change.items()}
        )


def test_too_long_tokens_are_rejected():
    pieces = {"a" * 4000 + str(number): 0.0 for number in range(100)}
    with pytest.raises(ModelError, match="the tokens are too long to find their merges"):
        tokenizer_files(sentencepiece_metadata(pieces))


JUNK = [
    None,
    0,
    -1,
    2**40,
    0.5,
    float("nan"),
    True,
    "",
    "llama",
    "gpt2",
    "default",
    [],
    ["a"],
    [1],
    [None],
    [""] * 360,
    {},
]


def test_random_metadata_gives_a_tokenizer_or_model_error():
    rng = random.Random(5)
    valid_metadata = [
        byte_level_metadata(
            byte_level(),
            pre="qwen2",
            bos_token_id=0,
            eos_token_id=1,
            add_bos_token=True,
            eot_token_id=2,
        ),
        sentencepiece_metadata(
            {"a": -1.0, "b": -2.0, "ab": -3.0},
            add_space_prefix=True,
            add_bos_token=True,
            padding_token_id=0,
        )
        | {
            "tokenizer.chat_templates": ["x"],
            "tokenizer.chat_template.x": "x",
            "tokenizer.chat_template": "y",
        },
    ]
    for _ in range(cases(600, least=60)):
        metadata = dict(rng.choice(valid_metadata))
        for _ in range(rng.randint(1, 2)):
            key = rng.choice([*metadata])
            value = metadata[key]
            if isinstance(value, list) and rng.random() < 0.6:
                value = list(value)
                value[rng.randrange(len(value))] = rng.choice(
                    [*JUNK, "\ud800", "a b", " ", "x" * 999]
                )
                metadata[key] = value
            else:
                metadata[key] = rng.choice(JUNK)
        try:
            tokenizer_files(metadata)
            load_tokenizer(metadata).encode("ab a <s>\n")
        except ModelError:
            pass
