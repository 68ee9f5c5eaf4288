"""Tokenizers from Hugging Face folders: ids, text, special tokens, chat templates, and folders that
are wrong.
"""

import json
import random
import threading
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from quire.model.config import ModelError
from quire.model.text.chat_template import PromptError
from quire.model.text.tokenizer import Tokenizer
from quire.tests.support.tokenizer_zoo import BOS, CORPUS, EOS, TURN, ZOO, random_text, save

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
ASK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", params=ZOO)
def folder(request, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), ZOO[request.param]())


@pytest.fixture
def byte_level(tmp_path) -> Path:
    return save(tmp_path, ZOO["byte_level"](), chat_template=CHATML)


def write(folder: Path, name: str, content) -> Tokenizer:
    """The tokenizer of the folder with one file more."""
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return Tokenizer(folder)


def test_texts_agree_with_the_library(folder):
    ours = Tokenizer(folder)
    library = Library.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(0)
    for _ in range(200):
        text = random_text(rng) + rng.choice(["", TURN, EOS])
        for special in (True, False):
            ids = library.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("method", ["encode", "encode_with_ends", "encode_pair", "decode"])
def test_other_threads_run_while_a_long_text_is_tokenised(byte_level, method):
    """A second thread that sleeps a millisecond at a time: with the GIL held, it would wake once or
    twice.
    """
    tokenizer = Tokenizer(byte_level)
    library = Library.from_file(str(byte_level / "tokenizer.json"))
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
    wake_times: list[float] = []

    def count() -> None:
        while not is_done.is_set():
            time.sleep(0.001)
            wake_times.append(time.perf_counter())

    thread = threading.Thread(target=count)
    thread.start()
    began = time.perf_counter()
    result = getattr(tokenizer, method)(*arguments)
    ended = time.perf_counter()
    is_done.set()
    thread.join()
    assert result == expected[method]
    assert sum(began < at < ended for at in wake_times) >= 5, ended - began


def test_a_text_has_at_most_the_characters_of_the_longest_token_for_each_token(folder):
    tokenizer = Tokenizer(folder)
    rng = random.Random(4)
    names = list(tokenizer.get_vocab())
    assert tokenizer.keeps_characters == folder.name.startswith("byte_level")
    for _ in range(300):
        text = (
            random_text(rng)
            if rng.random() < 0.5
            else "".join(rng.choices(names, k=rng.randint(1, 20)))
        )
        if "".join(text.split()) and "\ufffd" not in text:
            count = len(tokenizer.encode(text, add_special_tokens=False))
            assert tokenizer.max_characters(count) >= len(text.strip())


@pytest.mark.parametrize("token", [{"rstrip": True}, {"lstrip": True}])
def test_a_tokenizer_that_strips_spaces_may_drop_characters(tmp_path, token):
    core = ZOO["byte_level"]()
    core.add_special_tokens([AddedToken("<|strips|>", **token)])
    tokenizer = Tokenizer(save(tmp_path, core))
    assert not tokenizer.keeps_characters
    assert tokenizer.max_characters(1) == 4 * len("<|strips|>")


def test_any_ids_decode(folder):
    tokenizer = Tokenizer(folder)
    rng = random.Random(1)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size + 9) for _ in range(rng.randint(0, 30))]
        tokenizer.decode(ids).encode()
    assert tokenizer.decode([]) == tokenizer.decode([tokenizer.vocab_size + 1]) == ""


def test_a_broken_byte_spoils_no_other(tmp_path):
    """Bytes between two characters, against a reference that looks for the characters itself."""
    tokenizer = Tokenizer(save(tmp_path, ZOO["byte_fallback_unstripped"]()))
    byte_of = {tokenizer.token_bytes(token)[0]: token for token in tokenizer.byte_tokens}
    assert len(byte_of) == 256
    rng = random.Random(2)
    for _ in range(300):
        run = "".join(rng.choices("a🙂é日", k=4)).encode()
        cut = rng.randint(0, len(run))
        run = (
            run[:cut]
            + bytes(rng.choices([0x80, 0xE2, 0xF0, 0xFF, 0xC0, 0x0A], k=rng.randint(0, 3)))
            + run[cut:]
        )
        expected = ""
        at = 0
        while at < len(run):
            size = next((n for n in range(1, 5) if is_character(run[at : at + n])), 0)
            expected += run[at : at + size].decode() if size else "\ufffd"
            at += size or 1
        ids = [byte_of[byte] for byte in run]
        assert tokenizer.decode(ids) == expected
        between = tokenizer.encode("fox", add_special_tokens=False)
        assert tokenizer.decode([*ids, *between, *ids]) == f"{expected}fox{expected}"


def is_character(piece: bytes) -> bool:
    try:
        return len(piece.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback_unstripped"])
def test_the_bytes_of_tokens_joined_are_the_text(kind, tmp_path):
    tokenizer = Tokenizer(save(tmp_path, ZOO[kind]()))
    rng = random.Random(3)
    for _ in range(100):
        # SentencePiece cannot write this one: it is its space
        text = random_text(rng).replace("▁", "")
        ids = tokenizer.encode(text + TURN, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text + TURN


def test_text_of_one_token(folder):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("the small fox", add_special_tokens=False)
    texts = [tokenizer.token_text(token) for token in ids]
    assert "".join(texts).strip() == "the small fox"
    assert any(" " in text for text in texts[1:])
    assert tokenizer.token_text(tokenizer.vocab_size) == ""
    assert tokenizer.token_text(tokenizer.encode(TURN, add_special_tokens=False)[-1]) == TURN


def test_text_of_a_part_of_a_character(byte_level):
    tokenizer = Tokenizer(byte_level)
    ids = tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    assert len(ids) > 1
    assert all("\ufffd" in tokenizer.token_text(token) for token in ids)


def test_settings_of_a_training_run_are_dropped(byte_level):
    core = ZOO["byte_level"]()
    core.enable_truncation(4)
    core.enable_padding(length=64)
    core.save(str(byte_level / "tokenizer.json"))
    text = "a text of many more tokens than four"
    assert Tokenizer(byte_level).encode(text) == ZOO["byte_level"]().encode(text).ids


def test_vocab_size_is_past_the_largest_id(byte_level):
    tokenizer = Tokenizer(byte_level)
    vocab = json.loads((byte_level / "tokenizer.json").read_text())["model"]["vocab"]
    assert tokenizer.vocab_size == max(vocab.values()) + 1
    assert tokenizer.token_text(tokenizer.vocab_size - 1)


def test_ends_of_a_text(byte_level):
    library = Library.from_file(str(byte_level / "tokenizer.json"))
    bos, eos, turn = (library.token_to_id(token) for token in (BOS, EOS, TURN))
    tokenizer = Tokenizer(byte_level)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (bos, {eos})
    assert write(byte_level, "config.json", {"eos_token_id": turn}).eos_token_ids == {eos, turn}
    assert write(byte_level, "generation_config.json", {"eos_token_id": None}).eos_token_ids == {
        eos,
        turn,
    }
    assert write(byte_level, "generation_config.json", {"eos_token_id": [7, 8]}).eos_token_ids == {
        eos,
        7,
        8,
    }
    bare = write(byte_level, "tokenizer_config.json", {})
    assert (bare.bos_token_id, bare.eos_token_ids) == (None, {7, 8})
    mapped = write(
        byte_level, "special_tokens_map.json", {"bos_token": {"content": TURN}, "eos_token": EOS}
    )
    assert (mapped.bos_token_id, mapped.eos_token_ids) == (turn, {eos, 7, 8})


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
def test_a_token_is_special_where_any_file_says_so(byte_level, config):
    core = ZOO["byte_level"]()
    core.add_tokens(["<end>"])
    save(byte_level, core, tokenizer_config={})
    ids = Tokenizer(byte_level).encode("fox<end>", add_special_tokens=False)
    assert Tokenizer(byte_level).decode(ids) == "fox<end>"
    tokenizer = write(byte_level, "tokenizer_config.json", config)
    assert tokenizer.encode("fox<end>", add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "fox<end>"


def test_a_special_token_that_the_vocabulary_lacks_adds_nothing(byte_level):
    size = Tokenizer(byte_level).vocab_size
    tokenizer = write(byte_level, "tokenizer_config.json", {"eos_token": "<nowhere>"})
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (size, frozenset())


def test_lone_surrogates_are_refused(folder):
    with pytest.raises(PromptError, match=r"valid Unicode.*'\\ud83d' at 2"):
        Tokenizer(folder).encode("ab\ud83d")


def test_a_conversation_has_one_bos(byte_level):
    tokenizer = Tokenizer(byte_level)
    text = tokenizer.apply_chat_template(ASK)
    assert text == f"{BOS}<|turn|>user\nHi\n<|turn|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [token for token in ids if token == tokenizer.bos_token_id] == ids[:1]
    assert tokenizer.encode("Hi")[0] == tokenizer.bos_token_id
    assert (
        tokenizer.apply_chat_template(ASK, add_generation_prompt=False)
        == f"{BOS}<|turn|>user\nHi\n"
    )


def test_where_the_chat_template_comes_from(byte_level):
    assert Tokenizer(byte_level).chat_template == CHATML
    assert (
        write(byte_level, "chat_template.json", {"chat_template": "from json"}).apply_chat_template(
            ASK
        )
        == "from json"
    )
    assert (
        write(byte_level, "chat_template.jinja", "from jinja").apply_chat_template(ASK)
        == "from jinja"
    )


def test_named_chat_templates(byte_level):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }} tools"},
    ]
    tokenizer = write(byte_level, "tokenizer_config.json", {"chat_template": named})
    assert tokenizer.apply_chat_template(ASK) == "plain"
    assert tokenizer.apply_chat_template(ASK, tools=[{"name": "f"}]) == "1 tools"
    (byte_level / "additional_chat_templates").mkdir()
    tokenizer = write(byte_level, "additional_chat_templates/tool_use.jinja", "from a folder")
    assert tokenizer.apply_chat_template(ASK, tools=[{"name": "f"}]) == "from a folder"


def test_a_template_in_place_of_the_models_own(byte_level):
    tokenizer = Tokenizer(byte_level)
    before = tokenizer.apply_chat_template(ASK)
    tokenizer.adopt("{{ messages[0].content }}?")
    assert tokenizer.apply_chat_template(ASK) == "Hi?" != before
    assert tokenizer.template_for([{"type": "function"}]) == "{{ messages[0].content }}?"
    held = tokenizer._templates
    tokenizer.adopt("{{ messages[0].content }}?")
    assert tokenizer._templates is held, "the same template has the same process"


def test_a_template_that_comes_with_the_conversation(byte_level):
    tokenizer = Tokenizer(byte_level)
    given = "{{ eos_token }}{{ messages[0].content }}{{ extra }}{{ add_generation_prompt }}"
    assert tokenizer.apply_chat_template(ASK, chat_template=given, extra="!") == f"{EOS}Hi!True"
    assert tokenizer.apply_chat_template(ASK, chat_template=None) == tokenizer.apply_chat_template(
        ASK
    )
    for wrong in ("", "x" * 65_537, 5, ["x"]):
        with pytest.raises(PromptError, match="1 to 65536 characters"):
            tokenizer.apply_chat_template(ASK, chat_template=wrong)
    doubled = (
        "{% set ns = namespace(a='a' * 1000) %}{% for i in range(40) %}{% set ns.a = ns.a ~ "
        "ns.a %}{% endfor %}"
    )
    with pytest.raises(PromptError, match="chat template"):
        tokenizer.apply_chat_template(ASK, chat_template=doubled)
    with pytest.raises(PromptError, match="valid Unicode|plain JSON"):
        tokenizer.apply_chat_template(ASK, chat_template="\ud800")
    assert tokenizer.apply_chat_template(ASK) == f"{BOS}<|turn|>user\nHi\n<|turn|>assistant\n"


def test_a_model_without_a_template_takes_one(folder):
    assert (
        Tokenizer(folder).apply_chat_template(ASK, chat_template="{{ messages[0].role }}") == "user"
    )


def test_where_tokens_end_in_a_text(folder):
    tokenizer = Tokenizer(folder)
    rng = random.Random(0)
    for _ in range(200):
        text = random_text(rng)
        ids, ends = tokenizer.encode_with_ends(text)
        assert ids == tokenizer.encode(text) and len(ends) == len(ids)
        assert ends == sorted(ends) and max(ends, default=0) <= len(text)


def test_the_text_of_tokens_is_their_bytes_where_it_is_said_so(folder):
    """So that what may come next can be said of bytes: less a first space that is not shown."""
    tokenizer = Tokenizer(folder)
    rng = random.Random(0)
    words = sorted(set(range(tokenizer.vocab_size)) - tokenizer.special_ids)
    kind = folder.name.rstrip("0123456789")
    assert tokenizer.shows_bytes == (kind not in ("word_piece", "end_of_word"))
    assert not tokenizer.shows_bytes or tokenizer.drops_space == (
        kind in ("byte_fallback", "unigram")
    )
    whole = 0
    for _ in range(3000 if tokenizer.shows_bytes else 0):
        ids = rng.choices(words, k=rng.randint(1, 6))
        spelled = b"".join(map(tokenizer.token_bytes, ids))
        spelled = spelled[tokenizer.drops_space and spelled.startswith(b" ") :]
        try:
            text = spelled.decode()
        except UnicodeDecodeError:
            continue
        assert tokenizer.decode(ids) == text
        whole += 1
    assert whole > 500 or not tokenizer.shows_bytes


def test_no_chat_template(folder):
    tokenizer = Tokenizer(folder)
    assert tokenizer.chat_template is None
    with pytest.raises(PromptError, match="this model has none"):
        tokenizer.apply_chat_template(ASK)


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
def test_a_wrong_file_is_named(byte_level, name, content, message):
    with pytest.raises(ModelError, match=message) as caught:
        write(byte_level, name, content)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other", [None, "tokenizer.model", "vocab.txt"])
def test_a_folder_without_tokenizer_json(tmp_path, other):
    if other:
        (tmp_path / other).write_text("x")
    with pytest.raises(ModelError, match="no tokenizer.json") as caught:
        Tokenizer(tmp_path)
    assert other is None or other in str(caught.value)
