"""Equal layers are traced once; the compiled program equals one with separately traced layers."""

import re
from collections import Counter

import jax
import pytest

from quire.model import decoder
from quire.model.checkpoint.loader import family_for
from quire.model.weights import abstract
from quire.serving.device import step
from quire.serving.device.batch import BatchLayout
from quire.serving.device.pipeline import Pipeline
from quire.serving.device.step_shape import Size, StepShape
from quire.sharding.spec import random_arrays
from quire.tests.support import tiny

CONFIG_CHANGES = {
    "llama": {},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "head_dim": 8,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}
# the first layer is traced separately, as its input has no residual to add
NUM_TRACED = {"llama": 2, "gemma2": 3, "mixtral": 2}


def operations(lowered) -> Counter[tuple[str, str]]:
    """Counts the operations of the compiled program by name and result type.

    Computations called by sorts and reductions are left out: they may be shared or repeated.
    """
    computations = lowered.compile().as_text().split("\n\n")
    counted_text = "\n".join(
        computation for computation in computations if computation.startswith(("%fused", "ENTRY"))
    )
    return Counter(re.findall(r" = (\S+) ([\w-]+)\(", counted_text))


@pytest.fixture(params=CONFIG_CHANGES)
def model(request):
    """A model of six layers: its name, and a function that lowers its step."""
    config = family_for(CONFIG_CHANGES[request.param] or tiny.LLAMA).config(
        tiny.LLAMA | {"num_hidden_layers": 6} | CONFIG_CHANGES[request.param], None
    )
    weights = random_arrays(abstract(config))
    pipeline = Pipeline(config, None)
    num_groups = len(config.windows)
    layout = BatchLayout(StepShape(Size(8, 2, 2), 2).with_cache(num_groups, 16, 64))
    state = pipeline.make_state((9,) * num_groups, 16, 2)
    return request.param, lambda: pipeline.lower(weights, state, layout)[0]


@pytest.mark.slow
def test_equal_layers_are_traced_once(model, monkeypatch):
    name, lower = model
    traced_layers = []
    block = decoder.attention_block
    monkeypatch.setattr(
        decoder, "attention_block", lambda *args: traced_layers.append(args[0]) or block(*args)
    )
    shared = lower()
    assert len(traced_layers) == NUM_TRACED[name]
    jax.clear_caches()
    monkeypatch.setattr(step, "share_with", lambda *args: None)
    unshared = lower()
    assert len(traced_layers) == NUM_TRACED[name] + 6
    assert len(shared.as_text()) < len(unshared.as_text())
    assert operations(shared) == operations(unshared)
