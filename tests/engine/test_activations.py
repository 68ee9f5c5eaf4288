"""`activation_dtype`: int8 activations for products with quantised weights."""

import jax
import pytest

from quire import LLM, SamplingParams
from quire.model.config import ModelError
from quire.ops import native
from quire.ops.linear.cpu import PackedWeight

PROMPTS = ["Once upon a time", "copy: a b c", "The old lighthouse", "sort: 5 3 9 1"]
PARAMS = SamplingParams(max_tokens=12, temperature=0, logprobs=1)


def uses_int8_activations(llm):
    """Returns, for each product with weights, whether its activations are int8."""
    nodes = jax.tree.leaves(
        llm.engine.runner.weights, is_leaf=lambda node: isinstance(node, PackedWeight)
    )
    return [node.int8_activations for node in nodes if isinstance(node, PackedWeight)]


def generate(llm, prompts):
    """Returns token ids and log-probabilities of each answer."""
    answers = [output.outputs[0] for output in llm.generate(prompts, PARAMS, use_tqdm=False)]
    return [
        (
            answer.token_ids,
            [
                entry[token].logprob
                for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
        )
        for answer in answers
    ]


@pytest.mark.slow
def test_int8_activations_are_batch_invariant_and_accurate():
    if not native.serves():
        pytest.skip("no compiler")
    options = {
        "quantization": "int4-64",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
    }
    with LLM(**options) as llm:
        bfloat16_answers = generate(llm, PROMPTS)
        assert not any(uses_int8_activations(llm))
    with LLM(**options, activation_dtype="int8") as llm:
        assert uses_int8_activations(llm).count(False) == 1  # the head is kept in int8
        batched_answers = generate(llm, PROMPTS)
        assert [generate(llm, [prompt])[0] for prompt in PROMPTS] == batched_answers
    assert batched_answers != bfloat16_answers  # int8 activations change the results
    pairs = zip(bfloat16_answers, batched_answers, strict=True)
    differences = [
        abs(logprobs[0] - int8_logprobs[0]) for (_, logprobs), (_, int8_logprobs) in pairs
    ]
    assert max(differences) < 0.3


@pytest.mark.parametrize(
    ("options", "kernels", "message"),
    [
        ({"activation_dtype": "int4"}, "", "activation_dtype is 'int4'; it can be auto or int8"),
        (
            {"activation_dtype": "int8"},
            "",
            "no weight of the model has a format with int8 activations on request",
        ),
        (
            {"activation_dtype": "int8", "quantization": "nf4"},
            "",
            "no weight of the model has a format with int8 activations",
        ),
        (
            {"activation_dtype": "int8", "quantization": "int4-64"},
            "off",
            "native kernels, .* are not in use here",
        ),
    ],
)
@pytest.mark.slow
def test_activation_dtype_without_matching_weights_is_refused(
    monkeypatch, options, kernels, message
):
    monkeypatch.setenv("QUIRE_NATIVE", kernels)
    if not kernels and not native.serves():
        pytest.skip("no compiler")
    with pytest.raises(ModelError, match=message):
        LLM(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, **options)
