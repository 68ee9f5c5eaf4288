"""Tokenizers of Hugging Face folders: ids, text, special tokens, chat templates and errors."""

import json
import random
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from quire.model.config import ModelError
from quire.model.text.chat_template import PromptError
from quire.model.text.tokenizer import Tokenizer
from quire.tests.support.tokenizer_zoo import BOS, CORPUS, EOS, TURN, ZOO, random_text, save

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", params=ZOO)
def folder(request, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), ZOO[request.param]())


@pytest.fixture
def byte_level(tmp_path) -> Path:
    return save(tmp_path, ZOO["byte_level"](), chat_template=CHATML)


def write_file(folder: Path, name: str, content) -> Tokenizer:
    """Write a file and return the folder's tokenizer."""
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return Tokenizer(folder)


def test_encode_and_decode_match_the_tokenizers_library(folder):
    tokenizer = Tokenizer(folder)
    library = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(0)
    for _ in range(200):
        text = random_text(rng) + rng.choice(["", TURN, EOS])
        for special in (True, False):
            ids = library.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert tokenizer.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@pytest.fixture
def without_gil_switches():
    """The GIL changes hands only where its holder releases it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("without_gil_switches")
@pytest.mark.parametrize("method", ["encode", "encode_with_ends", "encode_pair", "decode"])
def test_other_threads_run_while_a_long_text_is_tokenised(byte_level, method):
    tokenizer = Tokenizer(byte_level)
    library = HfTokenizer.from_file(str(byte_level / "tokenizer.json"))
    text = " ".join(CORPUS) * 100
    encoding = library.encode(text)
    pair = library.encode(text, "second")
    expected = {
        "encode": encoding.ids,
        "encode_with_ends": (encoding.ids, [end for _, end in encoding.offsets]),
        "encode_pair": (pair.ids, pair.sequence_ids.index(1)),
        "decode": library.decode(encoding.ids * 10),
    }
    arguments = {"encode_pair": (text, "second"), "decode": (encoding.ids * 10,)}.get(
        method, (text,)
    )
    is_done = threading.Event()
    num_wakes = 0

    def count() -> None:
        nonlocal num_wakes
        while not is_done.is_set():
            time.sleep(0.001)
            num_wakes += 1

    def lets_thread_wake() -> bool:
        before = num_wakes
        assert getattr(tokenizer, method)(*arguments) == expected[method]
        return num_wakes > before

    thread = threading.Thread(target=count)
    thread.start()
    try:
        assert any(lets_thread_wake() for _ in range(50))
    finally:
        is_done.set()
        thread.join()


def test_max_characters_bounds_the_text_of_tokens(folder):
    tokenizer = Tokenizer(folder)
    rng = random.Random(4)
    names = sorted(tokenizer.get_vocab())
    assert tokenizer.keeps_characters == folder.name.startswith("byte_level")
    for _ in range(300):
        text = (
            random_text(rng)
            if rng.random() < 0.5
            else "".join(rng.choices(names, k=rng.randint(1, 20)))
        )
        if "".join(text.split()) and "\ufffd" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if tokenizer.get_vocab().get("<unk>") not in ids:
                assert tokenizer.max_characters(len(ids)) >= len(text.strip())


@pytest.mark.parametrize("token", [{"rstrip": True}, {"lstrip": True}])
def test_stripping_tokens_may_drop_characters(tmp_path, token):
    core = ZOO["byte_level"]()
    core.add_special_tokens([AddedToken("<|strips|>", **token)])
    tokenizer = Tokenizer(save(tmp_path, core))
    assert not tokenizer.keeps_characters
    assert tokenizer.max_characters(1) == 4 * len("<|strips|>")


def test_random_ids_decode(folder):
    tokenizer = Tokenizer(folder)
    rng = random.Random(1)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size + 9) for _ in range(rng.randint(0, 30))]
        tokenizer.decode(ids).encode()
    assert tokenizer.decode([]) == tokenizer.decode([tokenizer.vocab_size + 1]) == ""


def test_invalid_utf8_becomes_replacement_characters(tmp_path):
    """Random invalid bytes, against a reference that finds the valid characters."""
    tokenizer = Tokenizer(save(tmp_path, ZOO["byte_fallback_unstripped"]()))
    byte_of = {tokenizer.token_bytes(token)[0]: token for token in tokenizer.byte_tokens}
    assert len(byte_of) == 256
    rng = random.Random(2)
    for _ in range(300):
        text_bytes = "".join(rng.choices("a🙂é日", k=4)).encode()
        cut = rng.randint(0, len(text_bytes))
        text_bytes = (
            text_bytes[:cut]
            + bytes(rng.choices([0x80, 0xE2, 0xF0, 0xFF, 0xC0, 0x0A], k=rng.randint(0, 3)))
            + text_bytes[cut:]
        )
        expected = ""
        index = 0
        while index < len(text_bytes):
            size = next((n for n in range(1, 5) if is_character(text_bytes[index : index + n])), 0)
            expected += text_bytes[index : index + size].decode() if size else "\ufffd"
            index += size or 1
        ids = [byte_of[byte] for byte in text_bytes]
        assert tokenizer.decode(ids) == expected
        fox_ids = tokenizer.encode("fox", add_special_tokens=False)
        assert tokenizer.decode([*ids, *fox_ids, *ids]) == f"{expected}fox{expected}"


def is_character(piece: bytes) -> bool:
    try:
        return len(piece.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback_unstripped"])
def test_token_bytes_join_to_the_text(kind, tmp_path):
    tokenizer = Tokenizer(save(tmp_path, ZOO[kind]()))
    rng = random.Random(3)
    for _ in range(100):
        # SentencePiece uses this character for spaces
        text = random_text(rng).replace("▁", "")
        ids = tokenizer.encode(text + TURN, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text + TURN


def test_token_text_of_single_tokens(folder):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("the small fox", add_special_tokens=False)
    texts = [tokenizer.token_text(token) for token in ids]
    assert "".join(texts).strip() == "the small fox"
    assert any(" " in text for text in texts[1:])
    assert tokenizer.token_text(tokenizer.vocab_size) == ""
    assert tokenizer.token_text(tokenizer.encode(TURN, add_special_tokens=False)[-1]) == TURN


def test_token_text_of_partial_characters(byte_level):
    tokenizer = Tokenizer(byte_level)
    ids = tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    assert len(ids) > 1
    assert all("\ufffd" in tokenizer.token_text(token) for token in ids)


def test_truncation_and_padding_settings_are_ignored(byte_level):
    core = ZOO["byte_level"]()
    core.enable_truncation(4)
    core.enable_padding(length=64)
    core.save(str(byte_level / "tokenizer.json"))
    text = "a text of many more tokens than four"
    assert Tokenizer(byte_level).encode(text) == ZOO["byte_level"]().encode(text).ids


def test_vocab_size_is_the_largest_id_plus_one(byte_level):
    tokenizer = Tokenizer(byte_level)
    vocab = json.loads((byte_level / "tokenizer.json").read_text())["model"]["vocab"]
    assert tokenizer.vocab_size == max(vocab.values()) + 1
    assert tokenizer.token_text(tokenizer.vocab_size - 1)


def test_bos_and_eos_tokens_of_all_files(byte_level):
    library = HfTokenizer.from_file(str(byte_level / "tokenizer.json"))
    bos_id, eos_id, turn_id = (library.token_to_id(token) for token in (BOS, EOS, TURN))
    tokenizer = Tokenizer(byte_level)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (bos_id, {eos_id})
    assert write_file(byte_level, "config.json", {"eos_token_id": turn_id}).eos_token_ids == {
        eos_id,
        turn_id,
    }
    assert write_file(
        byte_level, "generation_config.json", {"eos_token_id": None}
    ).eos_token_ids == {
        eos_id,
        turn_id,
    }
    assert write_file(
        byte_level, "generation_config.json", {"eos_token_id": [7, 8]}
    ).eos_token_ids == {
        eos_id,
        7,
        8,
    }
    without_tokens = write_file(byte_level, "tokenizer_config.json", {})
    assert (without_tokens.bos_token_id, without_tokens.eos_token_ids) == (None, {7, 8})
    mapped = write_file(
        byte_level, "special_tokens_map.json", {"bos_token": {"content": TURN}, "eos_token": EOS}
    )
    assert (mapped.bos_token_id, mapped.eos_token_ids) == (turn_id, {eos_id, 7, 8})


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<end>"},
        {"eos_token": {"content": "<end>", "lstrip": False}},
        {"additional_special_tokens": ["<end>"]},
        {"extra_special_tokens": {"end": "<end>"}},
        {"added_tokens_decoder": {"360": {"content": "<end>", "special": True}}},
    ],
)
def test_special_tokens_of_all_files(byte_level, config):
    core = ZOO["byte_level"]()
    core.add_tokens(["<end>"])
    save(byte_level, core, tokenizer_config={})
    ids = Tokenizer(byte_level).encode("fox<end>", add_special_tokens=False)
    assert Tokenizer(byte_level).decode(ids) == "fox<end>"
    tokenizer = write_file(byte_level, "tokenizer_config.json", config)
    assert tokenizer.encode("fox<end>", add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "fox<end>"


def test_unknown_special_token_is_ignored(byte_level):
    size = Tokenizer(byte_level).vocab_size
    tokenizer = write_file(byte_level, "tokenizer_config.json", {"eos_token": "<nowhere>"})
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (size, frozenset())


def test_lone_surrogates_are_rejected(folder):
    with pytest.raises(PromptError, match=r"valid Unicode.*'\\ud83d' at 2"):
        Tokenizer(folder).encode("ab\ud83d")


def test_chat_prompt_has_one_bos(byte_level):
    tokenizer = Tokenizer(byte_level)
    text = tokenizer.apply_chat_template(MESSAGES)
    assert text == f"{BOS}<|turn|>user\nHi\n<|turn|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [token for token in ids if token == tokenizer.bos_token_id] == ids[:1]
    assert tokenizer.encode("Hi")[0] == tokenizer.bos_token_id
    assert (
        tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
        == f"{BOS}<|turn|>user\nHi\n"
    )


def test_chat_template_files_and_their_precedence(byte_level):
    assert Tokenizer(byte_level).chat_template == CHATML
    assert (
        write_file(
            byte_level, "chat_template.json", {"chat_template": "from json"}
        ).apply_chat_template(MESSAGES)
        == "from json"
    )
    assert (
        write_file(byte_level, "chat_template.jinja", "from jinja").apply_chat_template(MESSAGES)
        == "from jinja"
    )


def test_named_chat_templates(byte_level):
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    tokenizer = write_file(byte_level, "tokenizer_config.json", {"chat_template": templates})
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "f"}]) == "1 tools"
    (byte_level / "additional_chat_templates").mkdir()
    tokenizer = write_file(byte_level, "additional_chat_templates/tool_use.jinja", "from a folder")
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "f"}]) == "from a folder"


def test_adopted_template_replaces_the_models(byte_level):
    tokenizer = Tokenizer(byte_level)
    original = tokenizer.apply_chat_template(MESSAGES)
    tokenizer.adopt("{{ messages[0].content }}?")
    assert tokenizer.apply_chat_template(MESSAGES) == "Hi?" != original
    assert tokenizer.template_for([{"type": "function"}]) == "{{ messages[0].content }}?"
    templates = tokenizer._templates
    tokenizer.adopt("{{ messages[0].content }}?")
    assert tokenizer._templates is templates, "the same template keeps its process"


def test_chat_template_of_a_request(byte_level):
    tokenizer = Tokenizer(byte_level)
    template = "{{ eos_token }}{{ messages[0].content }}{{ extra }}{{ add_generation_prompt }}"
    assert (
        tokenizer.apply_chat_template(MESSAGES, chat_template=template, extra="!")
        == f"{EOS}Hi!True"
    )
    assert tokenizer.apply_chat_template(
        MESSAGES, chat_template=None
    ) == tokenizer.apply_chat_template(MESSAGES)
    for wrong in ("", "x" * 65_537, 5, ["x"]):
        with pytest.raises(PromptError, match="1 to 65536 characters"):
            tokenizer.apply_chat_template(MESSAGES, chat_template=wrong)
    doubled = (
        "{% set ns = namespace(a='a' * 1000) %}{% for i in range(40) %}{% set ns.a = ns.a ~ "
        "ns.a %}{% endfor %}"
    )
    with pytest.raises(PromptError, match="chat template"):
        tokenizer.apply_chat_template(MESSAGES, chat_template=doubled)
    with pytest.raises(PromptError, match="valid Unicode|plain JSON"):
        tokenizer.apply_chat_template(MESSAGES, chat_template="\ud800")
    assert tokenizer.apply_chat_template(MESSAGES) == f"{BOS}<|turn|>user\nHi\n<|turn|>assistant\n"


def test_chat_template_of_a_request_for_a_model_without_one(folder):
    assert (
        Tokenizer(folder).apply_chat_template(MESSAGES, chat_template="{{ messages[0].role }}")
        == "user"
    )


def test_encode_with_ends_returns_ascending_offsets(folder):
    tokenizer = Tokenizer(folder)
    rng = random.Random(0)
    for _ in range(200):
        text = random_text(rng)
        ids, offsets = tokenizer.encode_with_ends(text)
        assert ids == tokenizer.encode(text) and len(offsets) == len(ids)
        assert offsets == sorted(offsets) and max(offsets, default=0) <= len(text)


def test_decoded_text_is_the_tokens_bytes_if_shows_bytes(folder):
    """Structured output needs this; a first space may be dropped."""
    tokenizer = Tokenizer(folder)
    rng = random.Random(0)
    words = sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids)
    kind = folder.name.rstrip("0123456789")
    assert tokenizer.shows_bytes == (kind not in ("word_piece", "end_of_word"))
    assert not tokenizer.shows_bytes or tokenizer.drops_space == (
        kind in ("byte_fallback", "unigram")
    )
    num_valid = 0
    for _ in range(3000 if tokenizer.shows_bytes else 0):
        ids = rng.choices(words, k=rng.randint(1, 6))
        spelled = b"".join(map(tokenizer.token_bytes, ids))
        spelled = spelled[tokenizer.drops_space and spelled.startswith(b" ") :]
        try:
            text = spelled.decode()
        except UnicodeDecodeError:
            continue
        assert tokenizer.decode(ids) == text
        num_valid += 1
    assert num_valid > 500 or not tokenizer.shows_bytes


def test_missing_chat_template_is_an_error(folder):
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_template is None
    with pytest.raises(PromptError, match="this model has none"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer.json", "", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: not JSON"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object, got list"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template must be a text .* got 5"),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "default"}]}',
            "chat_template must be a text",
        ),
        (
            "generation_config.json",
            '{"eos_token_id": "</s>"}',
            "eos_token_id must be a token id .* got </s>",
        ),
        (
            "generation_config.json",
            '{"eos_token_id": [1, -1]}',
            "eos_token_id must be a token id .* got -1",
        ),
        ("config.json", '{"bos_token_id": true}', "bos_token_id must be a token id .* got True"),
    ],
)
def test_error_names_the_invalid_file(byte_level, name, content, message):
    with pytest.raises(ModelError, match=message) as caught:
        write_file(byte_level, name, content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other_file", [None, "tokenizer.model", "vocab.txt"])
def test_folder_without_tokenizer_json_is_rejected(tmp_path, other_file):
    if other_file:
        (tmp_path / other_file).write_text("x")
    with pytest.raises(ModelError, match="no tokenizer.json") as caught:
        Tokenizer(tmp_path)
    assert other_file is None or other_file in str(caught.value)
