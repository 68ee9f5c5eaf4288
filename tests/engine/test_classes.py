"""quill with a classification head: answers in Python and over HTTP, and refused requests."""

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


def write_classifier(folder, **changes):
    shutil.copytree(hub.resolve(None), folder)
    class_fields = {
        "architectures": ["QuillForSequenceClassification"],
        "id2label": dict(enumerate(LABELS)),
    }
    config = json.loads((folder / "config.json").read_text()) | class_fields | changes
    (folder / "config.json").write_text(json.dumps(config))
    head = (
        np.random.default_rng(0)
        .standard_normal((len(LABELS), config["hidden_size"]))
        .astype(np.float32)
    )
    weights = load_file(folder / "model.safetensors") | {"score.weight": head}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, head


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("classes") / "model")


def expected_probabilities(head) -> np.ndarray:
    """Returns the softmax of the head applied to the bundled model's last hidden states."""
    llm = LLM(**OPTIONS)
    hidden_states = [llm.run([text], [PARAMS], False, "last")[0].pooled for text in TEXTS]
    logits = np.asarray(hidden_states, np.float64) @ head.T.astype(np.float64)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


@pytest.mark.slow
def test_classify_in_python_and_over_http(classifier):
    folder, head = classifier
    expected = expected_probabilities(head)
    llm = LLM(str(folder), **OPTIONS)
    outputs = llm.classify(TEXTS, use_tqdm=False)
    np.testing.assert_allclose([output.outputs.probs for output in outputs], expected, atol=1e-3)
    single_classes = [llm.classify(text, use_tqdm=False)[0].outputs for text in TEXTS]
    assert single_classes == [output.outputs for output in outputs]
    for call in (llm.generate, llm.embed, llm.reward):
        with pytest.raises(RequestError, match="model: "):
            call(TEXTS, use_tqdm=False)
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
        for index, (output, classes) in enumerate(zip(body["data"], single_classes, strict=True)):
            label = LABELS[int(np.argmax(classes.probs))]
            assert output == {
                "index": index,
                "label": label,
                "probs": classes.probs,
                "num_classes": 3,
            }
        status, body = client.post("/pooling", {"input": TEXTS, "task": "classify"})
        assert status == 200 and [output["data"] for output in body["data"]] == [
            classes.probs for classes in single_classes
        ]
        status, body = client.post("/pooling", {"input": TEXTS, "dimensions": 3})
        assert status == 400 and body["error"]["param"] == "dimensions"
        bodies = {
            "/v1/completions": {"prompt": "x"},
            "/v1/embeddings": {"input": "x"},
            "/v2/embed": {"texts": ["x"]},
            "/rerank": {"query": "x", "documents": ["y"]},
        }
        for path, request_body in bodies.items():
            status, body = client.post(path, request_body)
            assert status == 400 and body["error"]["param"] == "model", (path, body)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": None, "num_labels": 0}, "num_labels = 0; it must be from 1 to"),
        ({"id2label": {"0": "a", "2": "b"}}, "it must name the classes 0, 1 and so on"),
        ({"id2label": {}}, "it must name the classes 0, 1 and so on"),
        ({"problem_type": "x"}, "problem_type = 'x'; it can be null, regression"),
    ],
)
def test_invalid_class_heads_are_refused(tmp_path, changes, message):
    with pytest.raises(ModelError) as error_info:
        loader.read_config(write_classifier(tmp_path / "model", **changes)[0])
    assert message in str(error_info.value)
