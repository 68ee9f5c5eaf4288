"""What is lost by fewer bits of keys, values and weights, as perplexity of a text by models with
trained weights.
"""

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
def test_int8_pages(model, reference, name):
    tokens = reference(name).tokenizer(TEXT)["input_ids"]
    plain = perplexity(model(name), tokens)
    assert perplexity(model(name), tokens, kv_cache_dtype="int8") / plain < 1.03


def test_dense_and_rounded_weights(reference, tmp_path):
    """The dequantised weights as a folder: the same model in float32, and with little lost in
    int8.
    """
    dense = reference("smollm2")
    dense.write(tmp_path)
    tokens = dense.tokenizer(TEXT)["input_ids"]
    logprobs_TV = dense.logprobs(tokens)
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
