"""What a sentence-transformers folder says, and what its model answers: to embeddings, and to who asks for text."""

import json
import shutil

import numpy as np
import pytest
from canary import Client
from served import served
from talk import PLAIN

from quire import LLM
from quire.model.checkpoint import embedder, hub
from quire.model.config import ModelError
from quire.serving.api.errors import RequestError
from quire.serving.api.options import options_of
from quire.serving.build import make_engine
from quire.serving.http.models import Model
from quire.serving.http.settings import Formats

PROMPTS = {"query": "Find: ", "document": "", "classification": "Class of: "}
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "dtype": "float32", "kv_cache_memory_bytes": 32 << 20}
POOLED = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def write(folder, modules=("Transformer", "Pooling", "Normalize"), pooled=POOLED, prompts=None, path="1_Pooling"):
    named = [
        {"idx": i, "name": str(i), "path": path if i else "", "type": f"a.b.{kind}"} for i, kind in enumerate(modules)
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
    own, plain = LLM(str(folder), **OPTIONS), LLM(**OPTIONS)
    tokens = own.get_tokenizer().encode

    def vectors(llm, prompts, **options):
        return [one.outputs.embedding for one in llm.embed(prompts, use_tqdm=False, **options)]

    texts = ["Once upon a time", "A dog ran home."]
    for name in (*PROMPTS, None):
        first = PROMPTS[name or "classification"]
        expected = vectors(plain, [first + text for text in texts])
        np.testing.assert_allclose(vectors(own, texts, prompt_name=name), expected, atol=1e-5)
        found = vectors(own, [{"prompt": texts[0]}, {"prompt_token_ids": tokens(texts[1])}], prompt_name=name)
        np.testing.assert_allclose(found, [expected[0], vectors(plain, texts[1])[0]], atol=1e-5)
    with pytest.raises(RequestError, match="prompt_name: must be 'classification' or 'document' or 'query', got 'x'"):
        own.embed(texts, prompt_name="x")
    with pytest.raises(RequestError, match="prompt_name: must be left out: the model has none"):
        plain.embed(texts, prompt_name="query")
    with pytest.raises(RequestError, match="prompt"):
        own.embed([""])
    with pytest.raises(RequestError, match="model: makes embeddings and writes no text"):
        own.generate("x", use_tqdm=False)
    queries, documents = (vectors(own, texts, prompt_name=name) for name in ("query", "document"))
    scores = [one.outputs.score for one in own.score(texts[0], texts, use_tqdm=False)]
    np.testing.assert_allclose(scores, np.array(documents) @ queries[0], atol=1e-6)  # the vectors have length 1
    with pytest.raises(RequestError, match="text_1"):
        own.score("x", ["y", "\ud800"])
    assert not own.engine.busy
    mean = LLM(str(folder), pooling="mean", **OPTIONS)
    assert not np.allclose(vectors(mean, texts), vectors(own, texts), atol=1e-3)


def test_http(folder):
    options = options_of(str(folder), **OPTIONS)
    model = Model(("m",), lambda: make_engine(options))
    with served(model, formats=Formats("none", chat_template=PLAIN)) as state, Client(state.url) as client:

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
        ids, words = (good("/v1/embeddings", input=given)["data"][0]["embedding"] for given in (raw, text))
        np.testing.assert_allclose(words, ids, atol=1e-5)
        documents = ["A dog ran home.", text]
        ranked = good("/rerank", query=text, documents=documents)
        scored = good("/score", queries=text, documents=documents)["data"]
        assert [one["score"] for one in scored] == [
            one["relevance_score"] for one in sorted(ranked["results"], key=lambda one: one["index"])
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
