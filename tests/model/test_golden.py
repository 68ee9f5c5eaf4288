"""Every family against golden files, which transformers computed from the same tiny models."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire import LLM
from quire.model.checkpoint import loader
from quire.model.families import FAMILIES
from quire.ops import native
from quire.tests.support import uncached
from quire.tests.support.cases import thinned
from quire.tests.support.golden.encoders import ENCODERS
from quire.tests.support.golden.families import KINDS, VARIANTS
from quire.tests.support.golden.folder import POSITIONS
from quire.tests.support.golden.recorded import TOLERANCE, Golden, check_answers

pytestmark = pytest.mark.usefixtures("few_programs")


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(
        lambda name: Golden(
            next(v for v in VARIANTS if v.name == name), tmp_path_factory.mktemp("g")
        )
    )


def test_every_family_has_a_variant():
    configs = [variant.config for variant in (*VARIANTS, *ENCODERS)]
    configs += [config["text_config"] for config in configs if "text_config" in config]
    covered = {FAMILIES[config["model_type"]] for config in configs if "model_type" in config}
    assert set(FAMILIES.values()) - covered == {
        ".quill"
    }  # the family without an implementation in transformers


# the first golden variant of each type of model
VARIANT_BY_MODEL_TYPE = {
    variant.config["model_type"]: variant.name for variant in reversed(VARIANTS)
}


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize(
    "variant",
    thinned(VARIANTS, [v for v in VARIANTS if v.name in {*VARIANT_BY_MODEL_TYPE.values(), *KINDS}]),
    ids=lambda v: v.name,
)
def test_logits_match_transformers(variant, golden):
    model = golden(variant.name)
    config = loader.read_config(model.folder, "float32", variant.max_len)
    weights = loader.load_weights(model.folder, config)
    token_ids = model.prompts[0] + model.tokens[0]
    logits = jax.jit(uncached.forward, static_argnums=2)(weights, jnp.array([token_ids]), config)[0]
    rows = [position for position in POSITIONS if position < len(token_ids)]
    np.testing.assert_allclose(logits[np.array(rows)], model.logits, rtol=0, atol=TOLERANCE)
    start = len(model.prompts[0]) - 1
    assert np.argmax(logits[start:-1], axis=-1).tolist() == model.tokens[0]


@pytest.mark.parametrize(
    ("variant", "block_size"),
    [
        pytest.param(
            variant,
            (8, 16)[i % 2],
            id=variant.name,
            marks=[] if variant.name in KINDS else pytest.mark.nightly,
        )
        for i, variant in enumerate(VARIANTS)
        if variant.new_tokens
    ],
)
@pytest.mark.slow
def test_engine_greedy_tokens_match_transformers(variant, block_size, golden):
    """Alone and in batches of unequal lengths, with chunked prefill and page sizes 8 and 16."""
    model = golden(variant.name)
    llm = LLM(
        model=str(model.folder),
        skip_tokenizer_init=True,
        language_model_only=True,
        dtype="float32",
        block_size=block_size,
        max_model_len=variant.max_len,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )
    # XLA's order of summation may depend on the batch
    check_answers(llm, model, tolerance=0 if native.serves() else 2e-5)
