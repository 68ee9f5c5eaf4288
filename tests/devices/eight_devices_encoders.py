"""Encoders over several devices make the vectors that they make on one: run by
test_eight_devices.py.
"""

import jax
import numpy as np
import pytest

from quire import LLM
from quire.model.config import ModelError
from quire.tests.support.cases import nightly_from
from quire.tests.support.golden.encoders import ENCODERS, GoldenEncoder

assert len(jax.devices()) == 8

NAMED = {variant.name: variant for variant in ENCODERS}
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "max_model_len": 120,
}


TWO = {"tensor": 2, "data": 2}
STAGES = {"pipeline": 2}
CASES = [
    ("bert", TWO),
    ("modernbert", STAGES),
    ("embeddinggemma", TWO),
    ("embeddinggemma", STAGES),
    ("bert", STAGES),
    ("modernbert", TWO),
]


@pytest.mark.parametrize(("name", "mesh"), nightly_from(1, CASES))
def test_vectors(name, mesh, tmp_path):
    made = GoldenEncoder(NAMED[name], tmp_path)
    sizes = {f"{axis}_parallel_size": size for axis, size in mesh.items()}
    llm = LLM(str(made.folder), skip_tokenizer_init=True, **OPTIONS, **sizes)
    found = [one.outputs.embedding for one in llm.embed(made.texts, use_tqdm=False)]
    np.testing.assert_allclose(
        found, made.mean / np.linalg.norm(made.mean, axis=1, keepdims=True), atol=2e-5
    )


def test_rows_cannot_be_parted(tmp_path):
    made = GoldenEncoder(NAMED["bert"], tmp_path)
    with pytest.raises(ModelError, match="context_parallel_size is 2, .* it can only be 1"):
        LLM(str(made.folder), skip_tokenizer_init=True, **OPTIONS, context_parallel_size=2)
