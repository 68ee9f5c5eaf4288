"""Perplexity of trained models with quantised KV caches and weights."""

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.tests.support.real_prompts import TEXT

pytestmark = pytest.mark.large
OPTIONS = {
    "max_model_len": 1024,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
}


def perplexity(path: str, tokens: list[int], **options) -> float:
    llm = LLM(path, **OPTIONS, **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([tokens], params, use_tqdm=False)
    llm.close()
    steps = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
    return float(np.exp(-np.mean([step[token].logprob for step, token in steps])))


@pytest.mark.parametrize("name", ["smollm2", "qwen-500m"])
def test_int8_kv_cache_keeps_perplexity(model, reference, name):
    tokens = reference(name).tokenizer(TEXT)["input_ids"]
    plain_perplexity = perplexity(model(name), tokens)
    assert perplexity(model(name), tokens, kv_cache_dtype="int8") / plain_perplexity < 1.03


def test_dequantised_and_int8_weights_keep_perplexity(reference, tmp_path):
    """Dequantised weights in a folder have the reference's perplexity in float32, and nearly so in
    int8.
    """
    reference_model = reference("smollm2")
    reference_model.write(tmp_path)
    tokens = reference_model.tokenizer(TEXT)["input_ids"]
    logprobs_TV = reference_model.logprobs(tokens)
    expected = np.exp(-logprobs_TV[np.arange(len(tokens) - 1), tokens[1:]].mean())
    options = {"skip_tokenizer_init": True}
    assert perplexity(str(tmp_path), tokens, dtype="float32", **options) == pytest.approx(
        expected, rel=1e-4
    )
    assert (
        perplexity(str(tmp_path), tokens, dtype="bfloat16", quantization="int8", **options)
        / expected
        < 1.1
    )
