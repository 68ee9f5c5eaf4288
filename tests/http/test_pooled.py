"""Scores and vectors over HTTP, in the forms of vLLM and Cohere, against what the other
endpoints say.
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
    with Client(server.url) as found:
        yield found
    frees_all(server)


def good(client, path: str, **body) -> dict:
    status, found = client.post(path, body)
    assert status == 200, found
    return found


def refused(parse, **body) -> str:
    with pytest.raises(RequestError) as caught:
        parse(body)
    return str(caught.value)


def scores(client, **body) -> list[float]:
    found = good(client, "/score", **body)
    assert [one["index"] for one in found["data"]] == list(range(len(found["data"])))
    return [one["score"] for one in found["data"]]


def test_the_names_of_the_two_sides(client):
    """A document is scored as /rerank does it; data_1 and data_2 are other names of text_1 and
    text_2.
    """
    lines = [f"{document}\n" for document in DOCUMENTS]
    plain = scores(client, text_1=lines, text_2=[" cat"] * 3)
    assert scores(client, data_1=lines, data_2=[" cat"] * 3) == plain
    assert scores(client, queries=" cat", documents=DOCUMENTS) == plain
    assert scores(client, queries=[" cat"] * 3, items=DOCUMENTS) == plain
    ranking = good(client, "/rerank", query=" cat", documents=DOCUMENTS)
    assert ranking["ranked_by"] == "mean log-probability of the query's tokens after each document"
    ranked = ranking["results"]
    assert {one["index"]: one["relevance_score"] for one in ranked} == dict(enumerate(plain))
    assert all(score <= 0 for score in plain)
    assert scores(client, text_1="Once", text_2=[" upon", " cat"]) == [
        scores(client, text_1="Once", text_2=text)[0] for text in (" upon", " cat")
    ]


def test_a_query_of_one_token_ranks_documents_of_any_length(client):
    """A line break stands between them, so that a query has a token of its own: also after none,
    and after its head.
    """
    found = good(client, "/rerank", query="s", documents=["", "cat", "s"])
    assert sorted(one["index"] for one in found["results"]) == [0, 1, 2]
    assert all(math.isfinite(one["relevance_score"]) for one in found["results"])


def test_other_paths_of_the_same(client):
    ranked = {"query": " cat", "documents": DOCUMENTS}
    results = [
        good(client, path, **ranked)["results"] for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ]
    assert results[0] == results[1] == results[2]
    pair = {"text_1": "Once", "text_2": " upon"}
    assert good(client, "/v1/score", **pair)["data"] == good(client, "/score", **pair)["data"]
    vectors = good(client, "/v1/embeddings", input=["a", "b"])["data"]
    pooled = good(client, "/pooling", input=["a", "b"])
    assert [one["data"] for one in pooled["data"]] == [one["embedding"] for one in vectors]
    assert [one["object"] for one in pooled["data"]] == ["pooling"] * 2 and pooled[
        "object"
    ] == "list"
    assert good(client, "/pooling", input="a", task="embed")["data"] == pooled["data"][:1]
    status, body = client.post("/pooling", {"input": "a", "task": "classify"})
    assert (status, body["error"]["param"]) == (400, "task")
    assert (
        refused(pooling.parse_pooling, input="a", task="x")
        == "task: must be one of embed, classify, got 'x'"
    )


def test_truncation_to_the_models_length(server, client):
    """No token is drawn: nothing is left for an answer."""
    found = good(client, "/v1/embeddings", input="0123456789 " * 2000, truncate_prompt_tokens=-1)
    assert found["usage"]["prompt_tokens"] == server.engine.admission.max_prompt_tokens


def test_sides_that_are_none():
    for body, got in (
        ({"text_1": "a"}, "text_1"),
        ({"text_1": "a", "text_2": "b", "data_1": "c"}, "data_1 and text_1 and text_2"),
        ({"queries": "a", "text_2": "b"}, "queries and text_2"),
        ({}, "none"),
    ):
        told = refused(pooling.parse_score, **body)
        assert told.startswith("text_1: and text_2 must be given") and told.endswith(f"; got {got}")
    assert refused(pooling.parse_score, queries=["a", "b"], documents=["c"]).startswith(
        "documents: must be as many"
    )
    assert refused(pooling.parse_score, text_1=["a", "b"], text_2=["c"]).startswith(
        "text_2: must be as many"
    )


def test_generative_scoring(client):
    """The probabilities of tokens that may come next, against the log-probabilities of a
    completion.
    """
    own = good(
        client,
        "/v1/completions",
        prompt="Once upon a",
        max_tokens=1,
        temperature=0,
        logprobs=5,
        return_tokens_as_token_ids=True,
    )["choices"][0]["logprobs"]
    told = {
        int(name.removeprefix("token_id:")): value for name, value in own["top_logprobs"][0].items()
    }
    labels = list(told)[:3]
    asked = {"query": "Once", "items": [" upon a", " upon"], "label_token_ids": labels}
    true = good(client, "/generative_scoring", **asked, apply_softmax=False)
    assert true["data"][0]["score"] == pytest.approx(math.exp(told[labels[0]]), abs=1e-3)
    shares = good(client, "/generative_scoring", **asked)["data"][0]["score"]
    assert shares == pytest.approx(
        math.exp(told[labels[0]]) / sum(math.exp(told[label]) for label in labels), abs=2e-3
    )
    assert [one["object"] for one in true["data"]] == ["score", "score"]
    tokens = good(client, "/tokenize", prompt="Once")["count"]
    usage = true["usage"]
    assert usage["prompt_tokens"] > 2 * tokens and usage["completion_tokens"] == 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2
    turned = good(
        client,
        "/generative_scoring",
        **asked | {"query": " upon a", "items": ["Once"]},
        item_first=True,
        apply_softmax=False,
        add_special_tokens=False,
    )["data"][0]["score"]
    same = good(
        client, "/generative_scoring", **asked, add_special_tokens=False, apply_softmax=False
    )
    assert turned == pytest.approx(same["data"][0]["score"], abs=1e-4)


def test_labels_that_are_refused(server, client):
    end = min(server.engine.tokenizer.eos_token_ids)
    found = good(client, "/generative_scoring", query="Once", items=["a"], label_token_ids=[end, 5])
    assert 0 <= found["data"][0]["score"] <= 1
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


def test_scores_add_up_over_the_labels():
    logprobs = [math.log(0.5), math.log(0.25)]
    assert label_scores.score(logprobs, False) == pytest.approx(0.5)
    assert label_scores.score(logprobs, True) == pytest.approx(2 / 3)
    assert label_scores.score([-2000.0, -2001.0], True) == pytest.approx(1 / (1 + math.exp(-1)))


def test_cohere(client):
    """The vectors of /v1/embeddings, in each form."""
    texts = ["a mouse", "a cat"]
    plain = [one["embedding"] for one in good(client, "/v1/embeddings", input=texts)["data"]]
    found = good(client, "/v2/embed", texts=texts, input_type="search_query",
                 embedding_types=["float", "base64", "binary", "ubinary"])  # fmt: skip
    forms = found["embeddings"]
    assert (
        forms["float"] == plain
        and found["texts"] == texts
        and found["response_type"] == "embeddings_by_type"
    )
    assert (
        found["meta"]["api_version"] == {"version": "2"}
        and found["meta"]["tokens"]["input_tokens"] > 2
    )
    (vector, *_) = forms["float"]
    (coded, *_) = forms["base64"]
    assert list(struct.unpack(f"<{len(vector)}f", base64.b64decode(coded))) == pytest.approx(
        vector, rel=1e-6
    )
    (unsigned, *_) = forms["ubinary"]
    (signed, *_) = forms["binary"]
    assert [bool(unsigned[i // 8] >> (7 - i % 8) & 1) for i in range(len(vector))] == [
        x > 0 for x in vector
    ]
    assert [byte + 128 for byte in signed] == unsigned
    parts = [{"content": [{"type": "text", "text": text}]} for text in texts]
    assert good(client, "/v2/embed", inputs=parts)["embeddings"] == {"float": plain}
    assert (
        len(good(client, "/v2/embed", texts=["a"], output_dimension=8)["embeddings"]["float"][0])
        == 8
    )


def test_what_cohere_leaves_out_of_a_text(client):
    words = (
        " ".join(f"start{i}" for i in range(3000)) + " " + " ".join(f"end{i}" for i in range(3000))
    )

    def ask(**fields):
        status, body = client.post("/v2/embed", {"texts": [words], **fields})
        return body["embeddings"]["float"][0] if status == 200 else (status, body["error"])

    assert ask() == ask(truncate="END") != ask(truncate="START")
    status, error = ask(truncate="NONE")
    assert (status, error["code"]) == (400, "context_length_exceeded")
    same = good(client, "/v2/embed", texts=["a cat"])["embeddings"]
    assert (
        good(client, "/v2/embed", texts=["a cat"], truncate="NONE", max_tokens=50)["embeddings"]
        == same
    )
    assert good(client, "/v2/embed", texts=["a cat"], max_tokens=2)["embeddings"] != same


def test_what_cohere_s_form_refuses():
    for fields, told in (
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
        assert refused(cohere.parse, **fields).startswith(told)


def test_details_of_usage_where_they_are_asked_for(server, client):
    details = {"prompt_tokens_details": {"cached_tokens": 1}}
    usage = pooling.Usage(3, 0, 1)
    assert pooling.usage_body(usage, True) == pooling.usage_body(usage, False) | details
    assert "prompt_tokens_details" not in good(client, "/v1/embeddings", input="a")["usage"]
    assert (
        "prompt_tokens_details"
        in good(client, "/v1/completions", prompt="a", max_tokens=1)["usage"]
    )
