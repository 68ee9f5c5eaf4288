"""Encoders: the vectors that transformers makes, in any company, and what they are not asked
for.
"""

import json

import numpy as np
import pytest

from quire import LLM, RequestError
from quire.model.checkpoint import loader
from quire.model.config import ModelError
from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.serving.engine.snapshot import take_snapshot
from quire.serving.http.models import Model
from quire.serving.http.settings import Formats
from quire.tests.support.canary import Client
from quire.tests.support.golden.encoders import ENCODERS, GoldenEncoder
from quire.tests.support.served import served

pytestmark = pytest.mark.usefixtures("few_programs")
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "max_model_len": 120,
}
OPTIONS["skip_tokenizer_init"] = True
NAMED = {variant.name: variant for variant in ENCODERS}


def vectors(llm: LLM, texts) -> list[list[float]]:
    return [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)]


def length_one(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.slow
def test_vectors_are_those_of_transformers(name, tmp_path):
    """Texts that share steps, and each alone: to the last bit the same."""
    made = GoldenEncoder(NAMED[name], tmp_path)
    llm = LLM(str(made.folder), **OPTIONS)
    found = vectors(llm, made.texts)
    np.testing.assert_allclose(found, length_one(made.mean), atol=2e-5)
    assert [vectors(llm, [text])[0] for text in made.texts] == found
    assert take_snapshot(llm.engine).recompiles == 0 and not llm.engine.busy


def test_first_row(tmp_path):
    made = GoldenEncoder(NAMED["modernbert"], tmp_path)
    found = vectors(LLM(str(made.folder), pooling="cls", **OPTIONS), made.texts)
    np.testing.assert_allclose(found, length_one(made.cls), atol=2e-5)


def test_bfloat16(tmp_path):
    """Near, and the same bits in any company."""
    made = GoldenEncoder(NAMED["bert"], tmp_path)
    llm = LLM(str(made.folder), **OPTIONS | {"dtype": "bfloat16"})
    found = vectors(llm, made.texts)
    assert (np.sum(np.array(found) * length_one(made.mean), axis=1) > 0.999).all()
    assert [vectors(llm, [text])[0] for text in made.texts] == found


def test_what_is_refused(tmp_path):
    made = GoldenEncoder(NAMED["bert"], tmp_path)
    llm = LLM(str(made.folder), **OPTIONS)
    assert len(vectors(llm, [[5] * 120])) == 1
    for ask, said in (
        (lambda: llm.embed([[5] * 121]), "prompt: has 121 tokens; this model reads at most 120"),
        (lambda: llm.generate([[5] * 9]), "model: makes embeddings and writes no text"),
        (lambda: llm.classify([[5] * 9]), "model"),
    ):
        with pytest.raises(RequestError, match=said):
            ask()
    with pytest.raises(ModelError, match="no use for drafts"):
        LLM(str(made.folder), **OPTIONS, speculative_config={"method": "ngram"})
    short = LLM(str(made.folder), **OPTIONS | {"max_num_batched_tokens": 64})
    with pytest.raises(
        RequestError, match="reads all of them in one step, which holds 64; raise --max-num-batched"
    ):
        short.embed([[5] * 100])
    assert not short.engine.busy and len(vectors(short, [[5] * 64, [5] * 64, [7]])) == 3


def test_over_http(tmp_path):
    made = GoldenEncoder(NAMED["embeddinggemma"], tmp_path)
    options = make_options(str(made.folder), **OPTIONS)
    with (
        served(Model(("m",), lambda: make_engine(options)), formats=Formats("none")) as state,
        Client(state.url) as client,
    ):
        status, found = client.post("/v1/embeddings", {"input": made.texts})
        assert status == 200, found
        np.testing.assert_allclose(
            [one["embedding"] for one in found["data"]], length_one(made.mean), atol=2e-5
        )
        status, found = client.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 3})
        assert status == 400 and found["error"]["param"] == "model", found


@pytest.mark.parametrize(
    ("said", "activation"),
    [
        ({}, "sigmoid"),
        (
            {
                "sentence_transformers": {
                    "activation_fn": "torch.nn.modules.linear.Identity",
                    "version": "4.1.0",
                }
            },
            "none",
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            "sigmoid",
        ),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.GELU"}}, None),
    ],
)
def test_what_a_cross_encoder_makes_of_its_numbers(said, activation, tmp_path):
    own = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(NAMED["bert"].config | own | said))
    if activation is None:
        with pytest.raises(
            ModelError,
            match="an activation of scores is 'torch.nn.modules.activation.GELU'; supported",
        ):
            loader.read_config(tmp_path)
    else:
        assert loader.read_config(tmp_path).classes.activation == activation
