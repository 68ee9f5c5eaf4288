"""Encoders: embeddings match transformers and are batch invariant; generation is refused."""

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
ENCODERS_BY_NAME = {variant.name: variant for variant in ENCODERS}


def embed(llm: LLM, texts) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def normalized(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("name", ENCODERS_BY_NAME)
@pytest.mark.slow
def test_embeddings_match_transformers(name, tmp_path):
    """Batched embeddings are bit-identical to those of each text alone."""
    golden = GoldenEncoder(ENCODERS_BY_NAME[name], tmp_path)
    llm = LLM(str(golden.folder), **OPTIONS)
    actual = embed(llm, golden.texts)
    np.testing.assert_allclose(actual, normalized(golden.mean), atol=2e-5)
    assert [embed(llm, [text])[0] for text in golden.texts] == actual
    assert take_snapshot(llm.engine).recompiles == 0 and not llm.engine.busy


def test_cls_pooling_matches_transformers(tmp_path):
    golden = GoldenEncoder(ENCODERS_BY_NAME["modernbert"], tmp_path)
    actual = embed(LLM(str(golden.folder), pooling="cls", **OPTIONS), golden.texts)
    np.testing.assert_allclose(actual, normalized(golden.cls), atol=2e-5)


def test_bfloat16_embeddings_are_near_and_batch_invariant(tmp_path):
    golden = GoldenEncoder(ENCODERS_BY_NAME["bert"], tmp_path)
    llm = LLM(str(golden.folder), **OPTIONS | {"dtype": "bfloat16"})
    actual = embed(llm, golden.texts)
    assert (np.sum(np.array(actual) * normalized(golden.mean), axis=1) > 0.999).all()
    assert [embed(llm, [text])[0] for text in golden.texts] == actual


def test_encoder_refuses_generation_and_long_prompts(tmp_path):
    golden = GoldenEncoder(ENCODERS_BY_NAME["bert"], tmp_path)
    llm = LLM(str(golden.folder), **OPTIONS)
    assert len(embed(llm, [[5] * 120])) == 1
    for call, message in (
        (lambda: llm.embed([[5] * 121]), "prompt: has 121 tokens; this model reads at most 120"),
        (lambda: llm.generate([[5] * 9]), "model: makes embeddings and writes no text"),
        (lambda: llm.classify([[5] * 9]), "model"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    with pytest.raises(ModelError, match="no use for drafts"):
        LLM(str(golden.folder), **OPTIONS, speculative_config={"method": "ngram"})
    short_step_llm = LLM(str(golden.folder), **OPTIONS | {"max_num_batched_tokens": 64})
    with pytest.raises(
        RequestError, match="reads all of them in one step, which holds 64; raise --max-num-batched"
    ):
        short_step_llm.embed([[5] * 100])
    assert (
        not short_step_llm.engine.busy
        and len(embed(short_step_llm, [[5] * 64, [5] * 64, [7]])) == 3
    )


def test_encoder_over_http(tmp_path):
    golden = GoldenEncoder(ENCODERS_BY_NAME["embeddinggemma"], tmp_path)
    options = make_options(str(golden.folder), **OPTIONS)
    with (
        served(Model(("m",), lambda: make_engine(options)), formats=Formats("none")) as state,
        Client(state.url) as client,
    ):
        status, response = client.post("/v1/embeddings", {"input": golden.texts})
        assert status == 200, response
        np.testing.assert_allclose(
            [item["embedding"] for item in response["data"]], normalized(golden.mean), atol=2e-5
        )
        status, response = client.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 3})
        assert status == 400 and response["error"]["param"] == "model", response


@pytest.mark.parametrize(
    ("fields", "activation"),
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
def test_score_activation_of_a_cross_encoder_config(fields, activation, tmp_path):
    classifier_fields = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
    }
    (tmp_path / "config.json").write_text(
        json.dumps(ENCODERS_BY_NAME["bert"].config | classifier_fields | fields)
    )
    if activation is None:
        with pytest.raises(
            ModelError,
            match="an activation of scores is 'torch.nn.modules.activation.GELU'; supported",
        ):
            loader.read_config(tmp_path)
    else:
        assert loader.read_config(tmp_path).classes.activation == activation
