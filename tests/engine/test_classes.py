"""quill with a head for classes: what it answers by Python and HTTP, and what it refuses."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire import LLM
from quire.model.checkpoint import hub, loader
from quire.model.config import ModelError
from quire.serving.api.errors import RequestError
from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.serving.http.models import Model
from quire.serving.http.settings import Formats
from quire.serving.request.pooling import PARAMS
from quire.tests.support.canary import Client
from quire.tests.support.served import served
from quire.tests.support.talk import PLAIN

OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "dtype": "float32",
    "kv_cache_memory_bytes": 32 << 20,
}
TEXTS = ["Once upon a time", "A dog ran home, " * 9, "x"]
LABELS = ["good", "bad", "neither"]


def write(folder, **changes):
    shutil.copytree(hub.resolve(None), folder)
    told = {
        "architectures": ["QuillForSequenceClassification"],
        "id2label": dict(enumerate(LABELS)),
    }
    hf = json.loads((folder / "config.json").read_text()) | told | changes
    (folder / "config.json").write_text(json.dumps(hf))
    drawn = (
        np.random.default_rng(0)
        .standard_normal((len(LABELS), hf["hidden_size"]))
        .astype(np.float32)
    )
    weights = load_file(folder / "model.safetensors") | {"score.weight": drawn}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, drawn


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write(tmp_path_factory.mktemp("classes") / "model")


def expected_of(drawn) -> np.ndarray:
    """The softmax of the head's products with the bundled model's own last hidden states."""
    llm = LLM(**OPTIONS)
    rows = [llm.run([text], [PARAMS], False, "last")[0].pooled for text in TEXTS]
    logits = np.asarray(rows, np.float64) @ drawn.T.astype(np.float64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.slow
def test_classes_by_python_and_http(made):
    folder, drawn = made
    expected = expected_of(drawn)
    llm = LLM(str(folder), **OPTIONS)
    found = llm.classify(TEXTS, use_tqdm=False)
    np.testing.assert_allclose([one.outputs.probs for one in found], expected, atol=1e-3)
    alone = [llm.classify(text, use_tqdm=False)[0].outputs for text in TEXTS]
    assert alone == [one.outputs for one in found]
    for ask in (llm.generate, llm.embed, llm.reward):
        with pytest.raises(RequestError, match="model: "):
            ask(TEXTS, use_tqdm=False)
    with pytest.raises(
        RequestError, match="model: has no classes; ask a model whose architecture is"
    ):
        LLM(**OPTIONS).classify(TEXTS)
    model = Model(("m",), lambda: make_engine(make_options(str(folder), **OPTIONS)))
    with (
        served(model, formats=Formats("none", chat_template=PLAIN)) as state,
        Client(state.url) as client,
    ):
        status, body = client.post("/classify", {"input": TEXTS})
        assert status == 200 and body["object"] == "list" and body["usage"]["prompt_tokens"] > 0
        for index, (one, own) in enumerate(zip(body["data"], alone, strict=True)):
            label = LABELS[int(np.argmax(own.probs))]
            assert one == {"index": index, "label": label, "probs": own.probs, "num_classes": 3}
        status, body = client.post("/pooling", {"input": TEXTS, "task": "classify"})
        assert status == 200 and [one["data"] for one in body["data"]] == [
            own.probs for own in alone
        ]
        status, body = client.post("/pooling", {"input": TEXTS, "dimensions": 3})
        assert status == 400 and body["error"]["param"] == "dimensions"
        asks = {
            "/v1/completions": {"prompt": "x"},
            "/v1/embeddings": {"input": "x"},
            "/v2/embed": {"texts": ["x"]},
            "/rerank": {"query": "x", "documents": ["y"]},
        }
        for path, given in asks.items():
            status, body = client.post(path, given)
            assert status == 400 and body["error"]["param"] == "model", (path, body)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"id2label": None, "num_labels": 0}, "num_labels = 0; it must be from 1 to"),
        ({"id2label": {"0": "a", "2": "b"}}, "it must name the classes 0, 1 and so on"),
        ({"id2label": {}}, "it must name the classes 0, 1 and so on"),
        ({"problem_type": "x"}, "problem_type = 'x'; it can be null, regression"),
    ],
)
def test_heads_that_are_refused(tmp_path, changes, told):
    with pytest.raises(ModelError) as caught:
        loader.read_config(write(tmp_path / "model", **changes)[0])
    assert told in str(caught.value)
