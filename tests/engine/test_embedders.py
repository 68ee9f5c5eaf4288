"""Reads sentence-transformers folders, and serves their models: embeddings, scores and errors for
generation.
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
LAST_TOKEN_POOLING = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def write_embedder(
    folder,
    modules=("Transformer", "Pooling", "Normalize"),
    pooling_config=LAST_TOKEN_POOLING,
    prompts_config=None,
    path="1_Pooling",
):
    module_entries = [
        {"idx": i, "name": str(i), "path": path if i else "", "type": f"a.b.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(module_entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling_config))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts_config or {}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder") / "model"
    shutil.copytree(hub.resolve(None), folder)
    return write_embedder(
        folder, prompts_config={"prompts": PROMPTS, "default_prompt_name": "classification"}
    )


def test_embedding_prompts_are_prepended(folder):
    prompting_llm = LLM(str(folder), **OPTIONS)
    plain_llm = LLM(**OPTIONS)
    encode = prompting_llm.get_tokenizer().encode

    def vectors(llm, prompts, **options):
        return [
            output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False, **options)
        ]

    texts = ["Once upon a time", "A dog ran home."]
    for name in (*PROMPTS, None):
        prompt = PROMPTS[name or "classification"]
        expected = vectors(plain_llm, [prompt + text for text in texts])
        np.testing.assert_allclose(
            vectors(prompting_llm, texts, prompt_name=name), expected, atol=1e-5
        )
        actual = vectors(
            prompting_llm,
            [{"prompt": texts[0]}, {"prompt_token_ids": encode(texts[1])}],
            prompt_name=name,
        )
        np.testing.assert_allclose(
            actual, [expected[0], vectors(plain_llm, texts[1])[0]], atol=1e-5
        )
    with pytest.raises(
        RequestError,
        match="prompt_name: must be 'classification' or 'document' or 'query', got 'x'",
    ):
        prompting_llm.embed(texts, prompt_name="x")
    with pytest.raises(RequestError, match="prompt_name: must be left out: the model has none"):
        plain_llm.embed(texts, prompt_name="query")
    with pytest.raises(RequestError, match="prompt"):
        prompting_llm.embed([""])
    with pytest.raises(RequestError, match="model: makes embeddings and writes no text"):
        prompting_llm.generate("x", use_tqdm=False)
    queries, documents = (
        vectors(prompting_llm, texts, prompt_name=name) for name in ("query", "document")
    )
    scores = [score.outputs.score for score in prompting_llm.score(texts[0], texts, use_tqdm=False)]
    # the embeddings are normalised, so that the score is their dot product
    np.testing.assert_allclose(scores, np.array(documents) @ queries[0], atol=1e-6)
    with pytest.raises(RequestError, match="text_1"):
        prompting_llm.score("x", ["y", "\ud800"])
    assert not prompting_llm.engine.busy
    mean_llm = LLM(str(folder), pooling="mean", **OPTIONS)
    assert not np.allclose(vectors(mean_llm, texts), vectors(prompting_llm, texts), atol=1e-3)


def test_http_api_prepends_embedding_prompts(folder):
    options = make_options(str(folder), **OPTIONS)
    model = Model(("m",), lambda: make_engine(options))
    with (
        served(model, formats=Formats("none", chat_template=PLAIN)) as state,
        Client(state.url) as client,
    ):

        def post(path, **body):
            status, response = client.post(path, body)
            assert status == 200, response
            return response

        text = "Once upon a time"
        token_ids = post("/tokenize", prompt=PROMPTS["query"] + text)["tokens"]
        expected = post("/v1/embeddings", input=token_ids)["data"][0]["embedding"]
        for kind, is_equal in (("search_query", True), ("search_document", False)):
            response = post("/v2/embed", texts=[text], input_type=kind, embedding_types=["float"])
            assert np.allclose(response["embeddings"]["float"][0], expected, atol=1e-5) == is_equal
        token_ids = post("/tokenize", prompt=PROMPTS["classification"] + text)["tokens"]
        ids_vector, text_vector = (
            post("/v1/embeddings", input=prompt)["data"][0]["embedding"]
            for prompt in (token_ids, text)
        )
        np.testing.assert_allclose(text_vector, ids_vector, atol=1e-5)
        documents = ["A dog ran home.", text]
        ranking = post("/rerank", query=text, documents=documents)
        scores = post("/score", queries=text, documents=documents)["data"]
        assert [result["score"] for result in scores] == [
            result["relevance_score"]
            for result in sorted(ranking["results"], key=lambda result: result["index"])
        ]
        assert ranking["ranked_by"] == "cosine of the embeddings of the query and each document"
        bodies = {
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        }
        for path, body in bodies.items():
            for stream_fields in ({}, {"stream": True}) if path.startswith("/v1") else ({},):
                status, response = client.post(path, body | stream_fields)
                assert status == 400 and response["error"]["param"] == "model", (path, response)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"modules": ("Transformer", "Pooling", "Dense")},
            "in_features and out_features must be numbers",
        ),
        (
            {"modules": ("Transformer", "Dense", "Pooling")},
            "names the modules Transformer, Dense, Pooling; supported",
        ),
        ({"modules": ("Transformer",)}, "names the modules Transformer; supported"),
        (
            {"pooling_config": {"pooling_mode_max_tokens": True}},
            "supported is one of pooling_mode_lasttoken, ",
        ),
        (
            {"pooling_config": LAST_TOKEN_POOLING | {"pooling_mode_mean_tokens": True}},
            "supported is one of pooling_mode_lasttoken, ",
        ),
        ({"pooling_config": {}}, "supported is one of pooling_mode_lasttoken, "),
        (
            {"pooling_config": {"pooling_mode": ["mean"]}},
            "supported is one of lasttoken, mean, cls",
        ),
        (
            {"pooling_config": LAST_TOKEN_POOLING | {"include_prompt": False}},
            "include_prompt = False is not supported",
        ),
        ({"path": "../elsewhere"}, "must be inside of the folder"),
        ({"prompts_config": {"prompts": {"query": 1}}}, "must be an object of texts"),
        (
            {"prompts_config": {"prompts": {}, "default_prompt_name": "query"}},
            "default_prompt_name = 'query'",
        ),
    ],
)
def test_invalid_embedder_folders_are_refused(tmp_path, options, message):
    with pytest.raises(ModelError) as error_info:
        embedder.read(write_embedder(tmp_path, **options))
    assert message in str(error_info.value)


def test_embedder_config_is_read(tmp_path):
    assert embedder.read(tmp_path) is None
    actual = embedder.read(
        write_embedder(tmp_path, ("Transformer", "Pooling"), {"pooling_mode": "cls"})
    )
    assert actual == embedder.Embedder("cls", False)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelError, match="must hold a list"):
        embedder.read(tmp_path)


def copy_with_special_tokens(folder, target):
    """Copies a model, with a tokenizer that adds one token before a text and two after it."""
    shutil.copytree(folder, target)
    tokenizer = tokenizers.Tokenizer.from_file(str(target / "tokenizer.json"))
    tokens = {
        name: tokenizer.id_to_token(number) for name, number in (("a", 5), ("b", 6), ("c", 7))
    }
    tokenizer.post_processor = TemplateProcessing(
        single="{a} $A {b} {c}".format(**tokens),
        special_tokens=[(tokens[name], 5 + i) for i, name in enumerate("abc")],
    )
    tokenizer.save(str(target / "tokenizer.json"))
    return target


@pytest.fixture(scope="module")
def truncating_folder(folder, tmp_path_factory):
    """A folder with a `max_seq_length` of 9."""
    copied_folder = copy_with_special_tokens(
        folder, tmp_path_factory.mktemp("truncating") / "model"
    )
    write_embedder(copied_folder)
    (copied_folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 9, "do_lower_case": False})
    )
    return copied_folder


LONG_TEXT = "Once upon a time there was a little dog who ran home. " * 5


def test_encode_truncated_matches_the_tokenizers_truncation(truncating_folder):
    """Special tokens of the template are kept, and count; sentence-transformers does the same."""
    tokenizer = Tokenizer(truncating_folder)
    rng = random.Random(0)
    for side in ("right", "left"):
        core = tokenizers.Tokenizer.from_file(str(truncating_folder / "tokenizer.json"))
        for _ in range(30):
            text = LONG_TEXT[: rng.randrange(len(LONG_TEXT))]
            length = rng.randrange(4, 80)
            core.enable_truncation(length, direction=side)
            assert tokenizer.encode_truncated(text, length, side) == core.encode(text).ids, (
                side,
                length,
                text,
            )
    assert (
        tokenizer.encode_truncated(LONG_TEXT, 4, add_special_tokens=False)
        == tokenizer.encode(LONG_TEXT, False)[:4]
    )
    assert tokenizer.encode_truncated(LONG_TEXT * 1000, 9) == tokenizer.encode_truncated(
        LONG_TEXT, 9
    )


def test_text_is_truncated_to_max_seq_length(truncating_folder):
    llm = LLM(str(truncating_folder), **OPTIONS)
    token_ids = llm.get_tokenizer().encode(LONG_TEXT)
    truncated_ids = [*token_ids[:7], *token_ids[-2:]]
    assert len(token_ids) > 60

    def embed(prompts, llm=llm):
        outputs = llm.embed(prompts, use_tqdm=False)
        return [output.prompt_token_ids for output in outputs], np.array(
            [output.outputs.embedding for output in outputs]
        )

    ids, actual = embed([LONG_TEXT, {"prompt": LONG_TEXT}, "A dog", LONG_TEXT * 10_000])
    assert ids == [truncated_ids, truncated_ids, llm.get_tokenizer().encode("A dog"), truncated_ids]
    np.testing.assert_allclose(actual[0], embed([truncated_ids])[1][0], atol=1e-6)
    ids, _ = embed([{"prompt_token_ids": token_ids[:60]}])  # token ids are not truncated
    assert ids == [token_ids[:60]]
    (pair,) = llm.score(LONG_TEXT, LONG_TEXT + "Truncated", use_tqdm=False)
    assert pair.prompt_token_ids == truncated_ids + truncated_ids
    # max_model_len overrides max_seq_length
    longer_llm = LLM(str(truncating_folder), max_model_len=41, **OPTIONS)
    assert embed([LONG_TEXT], longer_llm)[0] == [[*token_ids[:38], *token_ids[-2:]]]


def test_http_api_truncates_to_max_seq_length(truncating_folder):
    options = make_options(str(truncating_folder), **OPTIONS)
    model = Model(("m",), lambda: make_engine(options))
    with served(model, formats=Formats("none")) as state, Client(state.url) as client:

        def post(path, status=200, **body):
            actual_status, response = client.post(path, body)
            assert actual_status == status, response
            return response

        embeddings = "/v1/embeddings"
        assert (
            post(embeddings, input=[LONG_TEXT, LONG_TEXT * 10_000])["usage"]["prompt_tokens"] == 18
        )
        assert (
            post(embeddings, input=LONG_TEXT, truncate_prompt_tokens=4)["usage"]["prompt_tokens"]
            == 4
        )
        assert (
            post(embeddings, input=LONG_TEXT, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"]
            == 9
        )
        assert (
            post(embeddings, input=LONG_TEXT, add_special_tokens=False)["usage"]["prompt_tokens"]
            == 9
        )
        response_by_side = {
            side: post("/v2/embed", texts=[LONG_TEXT], input_type="search_query", truncate=side)
            for side in ("END", "START")
        }
        assert {
            response["meta"]["billed_units"]["input_tokens"]
            for response in response_by_side.values()
        } == {9}
        error_response = post(
            "/v2/embed", 400, texts=[LONG_TEXT], input_type="search_query", truncate="NONE"
        )
        assert "at most 9 are read" in json.dumps(error_response)
        ids = Tokenizer(truncating_folder).encode(LONG_TEXT)
        for side, truncated_ids in {
            "END": [*ids[:7], *ids[-2:]],
            "START": [ids[0], *ids[-8:]],
        }.items():
            expected = post(embeddings, input=truncated_ids)["data"][0]["embedding"]
            np.testing.assert_allclose(
                response_by_side[side]["embeddings"]["float"][0], expected, atol=1e-5
            )
        documents = [LONG_TEXT * 10_000, "A dog ran home."]
        assert len(post("/score", queries="A dog", documents=documents)["data"]) == 2


@pytest.mark.parametrize("value", [0, "9", True, 1.5])
def test_invalid_max_seq_length_is_refused(tmp_path, value):
    write_embedder(tmp_path)
    (tmp_path / "sentence_roberta_config.json").write_text(json.dumps({"max_seq_length": value}))
    with pytest.raises(ModelError, match=r"max_seq_length = .*; it must be 1 or more, or null"):
        embedder.read(tmp_path)
