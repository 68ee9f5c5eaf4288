"""Every family against transformers: the golden files hold what it computed from the same tiny
models.
"""

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
    covered = {FAMILIES[variant.config["model_type"]] for variant in (*VARIANTS, *ENCODERS)}
    assert set(FAMILIES.values()) - covered == {".quill"}  # which transformers does not know


# of each type of model
FIRST = {variant.config["model_type"]: variant.name for variant in reversed(VARIANTS)}


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize(
    "variant",
    thinned(VARIANTS, [v for v in VARIANTS if v.name in {*FIRST.values(), *KINDS}]),
    ids=lambda v: v.name,
)
def test_logits(variant, golden):
    made = golden(variant.name)
    config = loader.read_config(made.folder, "float32", variant.max_len)
    weights = loader.load_weights(made.folder, config)
    whole = made.prompts[0] + made.tokens[0]
    logits = jax.jit(uncached.forward, static_argnums=2)(weights, jnp.array([whole]), config)[0]
    rows = [position for position in POSITIONS if position < len(whole)]
    np.testing.assert_allclose(logits[np.array(rows)], made.logits, rtol=0, atol=TOLERANCE)
    start = len(made.prompts[0]) - 1
    assert np.argmax(logits[start:-1], axis=-1).tolist() == made.tokens[0]


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
def test_greedy_tokens(variant, block_size, golden):
    """Alone and in a batch of unequal lengths, in chunks, through pages of 8 and 16."""
    made = golden(variant.name)
    llm = LLM(
        model=str(made.folder),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=block_size,
        max_model_len=variant.max_len,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )
    # XLA sums in an order that rows may change
    check_answers(llm, made, tolerance=0 if native.serves() else 2e-5)
