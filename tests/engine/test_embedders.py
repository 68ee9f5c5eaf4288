"""What a sentence-transformers folder says, and what its model answers: to embeddings, and to who
asks for text.
"""

import json
import random
import shutil

import numpy as np
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from quire import LLM
from quire.model.checkpoint import embedder, hub
from quire.model.config import ModelError
from quire.model.text.tokenizer import Tokenizer
from quire.serving.api.errors import RequestError
from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.serving.http.models import Model
from quire.serving.http.settings import Formats
from quire.tests.support.canary import Client
from quire.tests.support.served import served
from quire.tests.support.talk import PLAIN

PROMPTS = {"query": "Find: ", "document": "", "classification": "Class of: "}
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "kv_cache_memory_bytes": 32 << 20,
}
POOLED = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def write(
    folder,
    modules=("Transformer", "Pooling", "Normalize"),
    pooled=POOLED,
    prompts=None,
    path="1_Pooling",
):
    named = [
        {"idx": i, "name": str(i), "path": path if i else "", "type": f"a.b.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(named))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooled))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts or {}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("embedder") / "model"
    shutil.copytree(hub.resolve(None), made)
    return write(made, prompts={"prompts": PROMPTS, "default_prompt_name": "classification"})


def test_prompts_come_before_texts(folder):
    own = LLM(str(folder), **OPTIONS)
    plain = LLM(**OPTIONS)
    tokens = own.get_tokenizer().encode

    def vectors(llm, prompts, **options):
        return [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False, **options)]

    texts = ["Once upon a time", "A dog ran home."]
    for name in (*PROMPTS, None):
        first = PROMPTS[name or "classification"]
        expected = vectors(plain, [first + text for text in texts])
        np.testing.assert_allclose(vectors(own, texts, prompt_name=name), expected, atol=1e-5)
        found = vectors(
            own, [{"prompt": texts[0]}, {"prompt_token_ids": tokens(texts[1])}], prompt_name=name
        )
        np.testing.assert_allclose(found, [expected[0], vectors(plain, texts[1])[0]], atol=1e-5)
    with pytest.raises(
        RequestError,
        match="prompt_name: must be 'classification' or 'document' or 'query', got 'x'",
    ):
        own.embed(texts, prompt_name="x")
    with pytest.raises(RequestError, match="prompt_name: must be left out: the model has none"):
        plain.embed(texts, prompt_name="query")
    with pytest.raises(RequestError, match="prompt"):
        own.embed([""])
    with pytest.raises(RequestError, match="model: makes embeddings and writes no text"):
        own.generate("x", use_tqdm=False)
    queries, documents = (vectors(own, texts, prompt_name=name) for name in ("query", "document"))
    scores = [one.outputs.score for one in own.score(texts[0], texts, use_tqdm=False)]
    # the vectors have length 1
    np.testing.assert_allclose(scores, np.array(documents) @ queries[0], atol=1e-6)
    with pytest.raises(RequestError, match="text_1"):
        own.score("x", ["y", "\ud800"])
    assert not own.engine.busy
    mean = LLM(str(folder), pooling="mean", **OPTIONS)
    assert not np.allclose(vectors(mean, texts), vectors(own, texts), atol=1e-3)


def test_http(folder):
    options = make_options(str(folder), **OPTIONS)
    model = Model(("m",), lambda: make_engine(options))
    with (
        served(model, formats=Formats("none", chat_template=PLAIN)) as state,
        Client(state.url) as client,
    ):

        def good(path, **body):
            status, found = client.post(path, body)
            assert status == 200, found
            return found

        text = "Once upon a time"
        raw = good("/tokenize", prompt=PROMPTS["query"] + text)["tokens"]
        expected = good("/v1/embeddings", input=raw)["data"][0]["embedding"]
        for kind, same in (("search_query", True), ("search_document", False)):
            found = good("/v2/embed", texts=[text], input_type=kind, embedding_types=["float"])
            assert np.allclose(found["embeddings"]["float"][0], expected, atol=1e-5) == same
        raw = good("/tokenize", prompt=PROMPTS["classification"] + text)["tokens"]
        ids, words = (
            good("/v1/embeddings", input=given)["data"][0]["embedding"] for given in (raw, text)
        )
        np.testing.assert_allclose(words, ids, atol=1e-5)
        documents = ["A dog ran home.", text]
        ranked = good("/rerank", query=text, documents=documents)
        scored = good("/score", queries=text, documents=documents)["data"]
        assert [one["score"] for one in scored] == [
            one["relevance_score"]
            for one in sorted(ranked["results"], key=lambda one: one["index"])
        ]
        assert ranked["ranked_by"] == "cosine of the embeddings of the query and each document"
        asks = {
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        }
        for path, body in asks.items():
            for extra in ({}, {"stream": True}) if path.startswith("/v1") else ({},):
                status, found = client.post(path, body | extra)
                assert status == 400 and found["error"]["param"] == "model", (path, found)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"modules": ("Transformer", "Pooling", "Dense")}, "in_features and out_features must be numbers"),
        ({"modules": ("Transformer", "Dense", "Pooling")}, "names the modules Transformer, Dense, Pooling; supported"),
        ({"modules": ("Transformer",)}, "names the modules Transformer; supported"),
        ({"pooled": {"pooling_mode_max_tokens": True}}, "supported is one of pooling_mode_lasttoken, "),
        ({"pooled": POOLED | {"pooling_mode_mean_tokens": True}}, "supported is one of pooling_mode_lasttoken, "),
        ({"pooled": {}}, "supported is one of pooling_mode_lasttoken, "),
        ({"pooled": {"pooling_mode": ["mean"]}}, "supported is one of lasttoken, mean, cls"),
        ({"pooled": POOLED | {"include_prompt": False}}, "include_prompt = False is not supported"),
        ({"path": "../elsewhere"}, "must be inside of the folder"),
        ({"prompts": {"prompts": {"query": 1}}}, "must be an object of texts"),
        ({"prompts": {"prompts": {}, "default_prompt_name": "query"}}, "default_prompt_name = 'query'"),
    ],
)  # fmt: skip
def test_folders_that_are_refused(tmp_path, options, told):
    with pytest.raises(ModelError) as caught:
        embedder.read(write(tmp_path, **options))
    assert told in str(caught.value)


def test_folders_that_are_read(tmp_path):
    assert embedder.read(tmp_path) is None
    found = embedder.read(write(tmp_path, ("Transformer", "Pooling"), {"pooling_mode": "cls"}))
    assert found == embedder.Embedder("cls", False)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelError, match="must hold a list"):
        embedder.read(tmp_path)


def write_wrapped(folder, target):
    """A copy of a model whose tokenizer adds a token before a text and two after it, as BERT's
    does.
    """
    shutil.copytree(folder, target)
    core = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
    names = {name: core.id_to_token(number) for name, number in (("a", 5), ("b", 6), ("c", 7))}
    core.post_processor = TemplateProcessing(
        single="{a} $A {b} {c}".format(**names),
        special_tokens=[(names[name], 5 + i) for i, name in enumerate("abc")],
    )
    core.save(str(target / "tokenizer.json"))
    return target


@pytest.fixture(scope="module")
def short(folder, tmp_path_factory):
    """A folder of which sentence-transformers reads 9 tokens at most."""
    made = write_wrapped(folder, tmp_path_factory.mktemp("short") / "model")
    write(made)
    (made / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 9, "do_lower_case": False})
    )
    return made


LONG = "Once upon a time there was a little dog who ran home. " * 5


def test_truncated_tokens_are_those_of_the_tokenizers_own_truncation(short):
    """Which sentence-transformers uses: what a template adds stays, and counts."""
    own = Tokenizer(short)
    rng = random.Random(0)
    for side in ("right", "left"):
        core = tokenizers.Tokenizer.from_file(str(short / "tokenizer.json"))
        for _ in range(30):
            text = LONG[: rng.randrange(len(LONG))]
            length = rng.randrange(4, 80)
            core.enable_truncation(length, direction=side)
            assert own.encode_truncated(text, length, side) == core.encode(text).ids, (
                side,
                length,
                text,
            )
    assert own.encode_truncated(LONG, 4, add_special_tokens=False) == own.encode(LONG, False)[:4]
    assert own.encode_truncated(LONG * 1000, 9) == own.encode_truncated(LONG, 9)


def test_text_is_truncated_as_the_folder_says(short):
    llm = LLM(str(short), **OPTIONS)
    tokens = llm.get_tokenizer().encode(LONG)
    cut = [*tokens[:7], *tokens[-2:]]
    assert len(tokens) > 60

    def vectors(prompts, llm=llm):
        outputs = llm.embed(prompts, use_tqdm=False)
        return [one.prompt_token_ids for one in outputs], np.array(
            [one.outputs.embedding for one in outputs]
        )

    ids, found = vectors([LONG, {"prompt": LONG}, "A dog", LONG * 10_000])
    assert ids == [cut, cut, llm.get_tokenizer().encode("A dog"), cut]
    np.testing.assert_allclose(found[0], vectors([cut])[1][0], atol=1e-6)
    ids, _ = vectors([{"prompt_token_ids": tokens[:60]}])  # token ids are taken as they are
    assert ids == [tokens[:60]]
    (pair,) = llm.score(LONG, LONG + "Not read", use_tqdm=False)
    assert pair.prompt_token_ids == cut + cut
    # A longer maximum that the user names takes its place.
    longer = LLM(str(short), max_model_len=41, **OPTIONS)
    assert vectors([LONG], longer)[0] == [[*tokens[:38], *tokens[-2:]]]


def test_http_truncates_as_the_folder_says(short):
    options = make_options(str(short), **OPTIONS)
    model = Model(("m",), lambda: make_engine(options))
    with served(model, formats=Formats("none")) as state, Client(state.url) as client:

        def tokens_of(path, status=200, **body):
            got, found = client.post(path, body)
            assert got == status, found
            return found

        embeddings = "/v1/embeddings"
        assert tokens_of(embeddings, input=[LONG, LONG * 10_000])["usage"]["prompt_tokens"] == 18
        assert (
            tokens_of(embeddings, input=LONG, truncate_prompt_tokens=4)["usage"]["prompt_tokens"]
            == 4
        )
        assert (
            tokens_of(embeddings, input=LONG, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"]
            == 9
        )
        assert (
            tokens_of(embeddings, input=LONG, add_special_tokens=False)["usage"]["prompt_tokens"]
            == 9
        )
        sides = {
            side: tokens_of("/v2/embed", texts=[LONG], input_type="search_query", truncate=side)
            for side in ("END", "START")
        }
        assert {found["meta"]["billed_units"]["input_tokens"] for found in sides.values()} == {9}
        refused = tokens_of(
            "/v2/embed", 400, texts=[LONG], input_type="search_query", truncate="NONE"
        )
        assert "at most 9 are read" in json.dumps(refused)
        ids = Tokenizer(short).encode(LONG)
        for side, kept in {"END": [*ids[:7], *ids[-2:]], "START": [ids[0], *ids[-8:]]}.items():
            expected = tokens_of(embeddings, input=kept)["data"][0]["embedding"]
            np.testing.assert_allclose(sides[side]["embeddings"]["float"][0], expected, atol=1e-5)
        documents = [LONG * 10_000, "A dog ran home."]
        assert len(tokens_of("/score", queries="A dog", documents=documents)["data"]) == 2


@pytest.mark.parametrize("value", [0, "9", True, 1.5])
def test_a_length_that_is_none_is_refused(tmp_path, value):
    write(tmp_path)
    (tmp_path / "sentence_roberta_config.json").write_text(json.dumps({"max_seq_length": value}))
    with pytest.raises(ModelError, match=r"max_seq_length = .*; it must be 1 or more, or null"):
        embedder.read(tmp_path)
