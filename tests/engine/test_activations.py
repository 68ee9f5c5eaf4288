"""`activation_dtype`: rows as bytes before they meet weights of four bits."""

import jax
import pytest

from quire import LLM, SamplingParams
from quire.model.config import ModelError
from quire.ops import native
from quire.ops.linear.cpu import PackedWeight

PROMPTS = ["Once upon a time", "copy: a b c", "The old lighthouse", "sort: 5 3 9 1"]
PARAMS = SamplingParams(max_tokens=12, temperature=0, logprobs=1)


def of_bytes(llm):
    """Whether each product of the weights is with such rows."""
    nodes = jax.tree.leaves(
        llm.engine.runner.weights, is_leaf=lambda node: isinstance(node, PackedWeight)
    )
    return [node.int8_activations for node in nodes if isinstance(node, PackedWeight)]


def said(llm, prompts):
    return [
        (
            out.outputs[0].token_ids,
            [entry[token].logprob for token, entry in zip(*both, strict=True)],
        )
        for out in llm.generate(prompts, PARAMS, use_tqdm=False)
        for both in [(out.outputs[0].token_ids, out.outputs[0].logprobs)]
    ]


@pytest.mark.slow
def test_the_same_bits_alone_and_in_company():
    if not native.serves():
        pytest.skip("no compiler")
    small = {
        "quantization": "int4-64",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
    }
    with LLM(**small) as llm:
        plain = said(llm, PROMPTS)
        assert not any(of_bytes(llm))
    with LLM(**small, activation_dtype="int8") as llm:
        assert of_bytes(llm).count(False) == 1  # the head is kept in int8
        together = said(llm, PROMPTS)
        assert [said(llm, [prompt])[0] for prompt in PROMPTS] == together
    assert together != plain  # rows were rounded
    near = [abs(left[0] - right[0]) for (_, left), (_, right) in zip(plain, together, strict=True)]
    assert max(near) < 0.3


@pytest.mark.parametrize(
    ("options", "kernels", "message"),
    [
        ({"activation_dtype": "int4"}, "", "activation_dtype is 'int4'; it can be auto or int8"),
        (
            {"activation_dtype": "int8"},
            "",
            "no weight of the model has four bits in groups of at least 32 inputs",
        ),
        (
            {"activation_dtype": "int8", "quantization": "nvfp4"},
            "",
            "no weight of the model has four bits in groups",
        ),
        (
            {"activation_dtype": "int8", "quantization": "int4-64"},
            "off",
            "native kernels, .* are not in use here",
        ),
    ],
)
@pytest.mark.slow
def test_refused_where_nothing_takes_it(monkeypatch, options, kernels, message):
    monkeypatch.setenv("QUIRE_NATIVE", kernels)
    if not kernels and not native.serves():
        pytest.skip("no compiler")
    with pytest.raises(ModelError, match=message):
        LLM(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, **options)
