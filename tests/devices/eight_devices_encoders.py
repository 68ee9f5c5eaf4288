"""Encoders over several devices give the embeddings of one device; run by test_eight_devices.py."""

import jax
import numpy as np
import pytest

from quire import LLM
from quire.model.config import ModelError
from quire.tests.support.cases import nightly_from
from quire.tests.support.golden.encoders import ENCODERS, GoldenEncoder

assert len(jax.devices()) == 8

ENCODER_BY_NAME = {variant.name: variant for variant in ENCODERS}
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "max_model_len": 120,
}


TENSOR_AND_DATA = {"tensor": 2, "data": 2}
STAGES = {"pipeline": 2}
CASES = [
    ("bert", TENSOR_AND_DATA),
    ("modernbert", STAGES),
    ("embeddinggemma", TENSOR_AND_DATA),
    ("embeddinggemma", STAGES),
    ("bert", STAGES),
    ("modernbert", TENSOR_AND_DATA),
]


@pytest.mark.parametrize(("name", "mesh"), nightly_from(1, CASES))
def test_embeddings_equal_golden_vectors(name, mesh, tmp_path):
    golden_case = GoldenEncoder(ENCODER_BY_NAME[name], tmp_path)
    sizes = {f"{axis}_parallel_size": size for axis, size in mesh.items()}
    llm = LLM(str(golden_case.folder), skip_tokenizer_init=True, **OPTIONS, **sizes)
    embeddings = [
        output.outputs.embedding for output in llm.embed(golden_case.texts, use_tqdm=False)
    ]
    np.testing.assert_allclose(
        embeddings,
        golden_case.mean / np.linalg.norm(golden_case.mean, axis=1, keepdims=True),
        atol=2e-5,
    )


def test_encoders_reject_context_parallelism(tmp_path):
    golden_case = GoldenEncoder(ENCODER_BY_NAME["bert"], tmp_path)
    with pytest.raises(ModelError, match="context_parallel_size is 2, .* it can only be 1"):
        LLM(str(golden_case.folder), skip_tokenizer_init=True, **OPTIONS, context_parallel_size=2)
