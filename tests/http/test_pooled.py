"""Scores and embeddings over HTTP in the formats of vLLM and Cohere, compared with other
endpoints.
"""

import base64
import math
import struct

import pytest

from quire.serving.api.errors import RequestError
from quire.serving.protocol import cohere, label_scores, pooling
from quire.tests.support.canary import Client
from quire.tests.support.talk import bundled_server, frees_all

DOCUMENTS = ["Sort: 3 1 2", "Once upon a time there was a cat", "Sort: 9 8 7"]


@pytest.fixture(scope="module")
def server():
    with bundled_server() as state:
        yield state


@pytest.fixture
def client(server):
    with Client(server.url) as http_client:
        yield http_client
    frees_all(server)


def post_ok(client, path: str, **body) -> dict:
    status, response = client.post(path, body)
    assert status == 200, response
    return response


def rejection_message(parse, **body) -> str:
    with pytest.raises(RequestError) as caught:
        parse(body)
    return str(caught.value)


def post_score(client, **body) -> list[float]:
    response = post_ok(client, "/score", **body)
    assert [result["index"] for result in response["data"]] == list(range(len(response["data"])))
    return [result["score"] for result in response["data"]]


def test_score_field_aliases(client):
    """Documents get the scores of /rerank; data_1 and data_2 are aliases of text_1 and text_2."""
    document_lines = [f"{document}\n" for document in DOCUMENTS]
    expected = post_score(client, text_1=document_lines, text_2=[" cat"] * 3)
    assert post_score(client, data_1=document_lines, data_2=[" cat"] * 3) == expected
    assert post_score(client, queries=" cat", documents=DOCUMENTS) == expected
    assert post_score(client, queries=[" cat"] * 3, items=DOCUMENTS) == expected
    ranking = post_ok(client, "/rerank", query=" cat", documents=DOCUMENTS)
    assert ranking["ranked_by"] == "mean log-probability of the query's tokens after each document"
    ranked = ranking["results"]
    assert {result["index"]: result["relevance_score"] for result in ranked} == dict(
        enumerate(expected)
    )
    assert all(score <= 0 for score in expected)
    assert post_score(client, text_1="Once", text_2=[" upon", " cat"]) == [
        post_score(client, text_1="Once", text_2=text)[0] for text in (" upon", " cat")
    ]


def test_rerank_query_of_one_token(client):
    """A line break separates document and query, so that the query has a token of its own, whatever
    the document.
    """
    ranking = post_ok(client, "/rerank", query="s", documents=["", "cat", "s"])
    assert sorted(result["index"] for result in ranking["results"]) == [0, 1, 2]
    assert all(math.isfinite(result["relevance_score"]) for result in ranking["results"])


def test_path_aliases(client):
    ranked = {"query": " cat", "documents": DOCUMENTS}
    results = [
        post_ok(client, path, **ranked)["results"]
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ]
    assert results[0] == results[1] == results[2]
    pair = {"text_1": "Once", "text_2": " upon"}
    assert post_ok(client, "/v1/score", **pair)["data"] == post_ok(client, "/score", **pair)["data"]
    vectors = post_ok(client, "/v1/embeddings", input=["a", "b"])["data"]
    pooled = post_ok(client, "/pooling", input=["a", "b"])
    assert [item["data"] for item in pooled["data"]] == [item["embedding"] for item in vectors]
    assert [item["object"] for item in pooled["data"]] == ["pooling"] * 2 and pooled[
        "object"
    ] == "list"
    assert post_ok(client, "/pooling", input="a", task="embed")["data"] == pooled["data"][:1]
    status, body = client.post("/pooling", {"input": "a", "task": "classify"})
    assert (status, body["error"]["param"]) == (400, "task")
    assert (
        rejection_message(pooling.parse_pooling, input="a", task="x")
        == "task: must be one of embed, classify, got 'x'"
    )


def test_truncate_to_model_length(server, client):
    """Embeddings sample no token, so the whole context length is available to the prompt."""
    response = post_ok(
        client, "/v1/embeddings", input="0123456789 " * 2000, truncate_prompt_tokens=-1
    )
    assert response["usage"]["prompt_tokens"] == server.engine.admission.max_prompt_tokens


def test_incomplete_score_pairs_are_rejected():
    for body, given_names in (
        ({"text_1": "a"}, "text_1"),
        ({"text_1": "a", "text_2": "b", "data_1": "c"}, "data_1 and text_1 and text_2"),
        ({"queries": "a", "text_2": "b"}, "queries and text_2"),
        ({}, "none"),
    ):
        message = rejection_message(pooling.parse_score, **body)
        assert message.startswith("text_1: and text_2 must be given") and message.endswith(
            f"; got {given_names}"
        )
    assert rejection_message(pooling.parse_score, queries=["a", "b"], documents=["c"]).startswith(
        "documents: must be as many"
    )
    assert rejection_message(pooling.parse_score, text_1=["a", "b"], text_2=["c"]).startswith(
        "text_2: must be as many"
    )


def test_generative_scoring(client):
    """Scores equal the probabilities of next tokens that a completion reports."""
    logprobs = post_ok(
        client,
        "/v1/completions",
        prompt="Once upon a",
        max_tokens=1,
        temperature=0,
        logprobs=5,
        return_tokens_as_token_ids=True,
    )["choices"][0]["logprobs"]
    logprob_by_token = {
        int(name.removeprefix("token_id:")): value
        for name, value in logprobs["top_logprobs"][0].items()
    }
    labels = list(logprob_by_token)[:3]
    request_fields = {"query": "Once", "items": [" upon a", " upon"], "label_token_ids": labels}
    unnormalized = post_ok(client, "/generative_scoring", **request_fields, apply_softmax=False)
    assert unnormalized["data"][0]["score"] == pytest.approx(
        math.exp(logprob_by_token[labels[0]]), abs=1e-3
    )
    normalized_score = post_ok(client, "/generative_scoring", **request_fields)["data"][0]["score"]
    assert normalized_score == pytest.approx(
        math.exp(logprob_by_token[labels[0]])
        / sum(math.exp(logprob_by_token[label]) for label in labels),
        abs=2e-3,
    )
    assert [item["object"] for item in unnormalized["data"]] == ["score", "score"]
    tokens = post_ok(client, "/tokenize", prompt="Once")["count"]
    usage = unnormalized["usage"]
    assert usage["prompt_tokens"] > 2 * tokens and usage["completion_tokens"] == 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2
    reversed_score = post_ok(
        client,
        "/generative_scoring",
        **request_fields | {"query": " upon a", "items": ["Once"]},
        item_first=True,
        apply_softmax=False,
        add_special_tokens=False,
    )["data"][0]["score"]
    forward_order = post_ok(
        client,
        "/generative_scoring",
        **request_fields,
        add_special_tokens=False,
        apply_softmax=False,
    )
    assert reversed_score == pytest.approx(forward_order["data"][0]["score"], abs=1e-4)


def test_invalid_label_token_ids_are_rejected(server, client):
    end = min(server.engine.tokenizer.eos_token_ids)
    response = post_ok(
        client, "/generative_scoring", query="Once", items=["a"], label_token_ids=[end, 5]
    )
    assert 0 <= response["data"][0]["score"] <= 1
    for fields, param in (
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [1, 1]}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids[0]"),
        ({"items": []}, "items"),
        ({"items": ["a"] * 129}, "items"),
        ({"items": [[10**6]]}, "items[0][0]"),
        ({"items": ["x " * 1500]}, "prompt"),
        ({"items": ["x " * 9000]}, "items[0]"),
    ):
        status, body = client.post(
            "/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [1], **fields}
        )
        assert (status, body["error"]["param"]) == (400, param), body


def test_label_scores_are_normalized_over_labels():
    logprobs = [math.log(0.5), math.log(0.25)]
    assert label_scores.score(logprobs, False) == pytest.approx(0.5)
    assert label_scores.score(logprobs, True) == pytest.approx(2 / 3)
    assert label_scores.score([-2000.0, -2001.0], True) == pytest.approx(1 / (1 + math.exp(-1)))


def test_cohere_embed(client):
    """The vectors of /v1/embeddings, in every embedding type."""
    texts = ["a mouse", "a cat"]
    expected = [
        item["embedding"] for item in post_ok(client, "/v1/embeddings", input=texts)["data"]
    ]
    response = post_ok(client, "/v2/embed", texts=texts, input_type="search_query",
                 embedding_types=["float", "base64", "binary", "ubinary"])  # fmt: skip
    embeddings = response["embeddings"]
    assert (
        embeddings["float"] == expected
        and response["texts"] == texts
        and response["response_type"] == "embeddings_by_type"
    )
    assert (
        response["meta"]["api_version"] == {"version": "2"}
        and response["meta"]["tokens"]["input_tokens"] > 2
    )
    (vector, *_) = embeddings["float"]
    (base64_vector, *_) = embeddings["base64"]
    assert list(
        struct.unpack(f"<{len(vector)}f", base64.b64decode(base64_vector))
    ) == pytest.approx(vector, rel=1e-6)
    (unsigned, *_) = embeddings["ubinary"]
    (signed, *_) = embeddings["binary"]
    assert [bool(unsigned[i // 8] >> (7 - i % 8) & 1) for i in range(len(vector))] == [
        x > 0 for x in vector
    ]
    assert [byte + 128 for byte in signed] == unsigned
    inputs = [{"content": [{"type": "text", "text": text}]} for text in texts]
    assert post_ok(client, "/v2/embed", inputs=inputs)["embeddings"] == {"float": expected}
    assert (
        len(post_ok(client, "/v2/embed", texts=["a"], output_dimension=8)["embeddings"]["float"][0])
        == 8
    )


def test_cohere_truncation(client):
    text = (
        " ".join(f"start{i}" for i in range(3000)) + " " + " ".join(f"end{i}" for i in range(3000))
    )

    def embed(**fields):
        status, body = client.post("/v2/embed", {"texts": [text], **fields})
        return body["embeddings"]["float"][0] if status == 200 else (status, body["error"])

    assert embed() == embed(truncate="END") != embed(truncate="START")
    status, error = embed(truncate="NONE")
    assert (status, error["code"]) == (400, "context_length_exceeded")
    embeddings = post_ok(client, "/v2/embed", texts=["a cat"])["embeddings"]
    assert (
        post_ok(client, "/v2/embed", texts=["a cat"], truncate="NONE", max_tokens=50)["embeddings"]
        == embeddings
    )
    assert post_ok(client, "/v2/embed", texts=["a cat"], max_tokens=2)["embeddings"] != embeddings


def test_invalid_cohere_requests_are_rejected():
    for fields, message in (
        ({}, "texts: or inputs must be given, and not both"),
        ({"texts": ["a"], "images": ["b"]}, "images: cannot be read here"),
        ({"texts": []}, "texts: must be a list of 1 to 2048"),
        ({"texts": ["a"], "input_type": "image"}, "input_type: must be search_document or"),
        (
            {"texts": ["a"], "embedding_types": ["int8"]},
            "embedding_types[0]: must be float or base64 or binary",
        ),
        (
            {"inputs": [{"content": [{"type": "image_url"}]}]},
            "inputs[0].content[0].type: must be text",
        ),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate: must be END or START or NONE"),
    ):
        assert rejection_message(cohere.parse, **fields).startswith(message)


def test_prompt_tokens_details_are_opt_in(server, client):
    details = {"prompt_tokens_details": {"cached_tokens": 1}}
    usage = pooling.Usage(3, 0, 1)
    assert pooling.usage_body(usage, True) == pooling.usage_body(usage, False) | details
    assert "prompt_tokens_details" not in post_ok(client, "/v1/embeddings", input="a")["usage"]
    assert (
        "prompt_tokens_details"
        in post_ok(client, "/v1/completions", prompt="a", max_tokens=1)["usage"]
    )
