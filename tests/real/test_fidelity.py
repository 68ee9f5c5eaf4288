"""Compares tokens and log-probabilities of GGUF files with trained weights with transformers in
float32.
"""

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.tests.support.real_prompts import PROMPTS, TEXT

NUM_TOKENS = 24
OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 256 << 20,
}
NAMES = ["smollm2", pytest.param("qwen-500m", marks=pytest.mark.large)]


@pytest.fixture(scope="module")
def engine(model):
    engines: dict[str, LLM] = {}

    def make_or_get_engine(name: str) -> LLM:
        if name not in engines:
            engines[name] = LLM(model(name), max_model_len=1024, **OPTIONS)
        return engines[name]

    return make_or_get_engine


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer_matches_transformers(engine, reference, name):
    tokenizer = engine(name).get_tokenizer()
    for text in (*PROMPTS, TEXT, TEXT.upper(), " \n\n\t x  ", "naïve 東京 🙂 1234567890"):
        assert tokenizer.encode(text, False) == reference(name).tokenizer.encode(
            text, add_special_tokens=False
        )


@pytest.mark.parametrize("name", NAMES)
def test_prompt_logprobs_match_transformers(engine, reference, name):
    """Teacher-forced, so that one different token does not change the following ones."""
    tokens = engine(name).get_tokenizer().encode(TEXT)[:400]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = engine(name).generate([tokens], params, use_tqdm=False)
    actual = np.array(
        [
            step[token].logprob
            for step, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
        ]
    )
    expected_TV = reference(name).logprobs(tokens)
    expected = expected_TV[np.arange(len(tokens) - 1), tokens[1:]]
    assert np.abs(actual - expected).mean() < 1e-4
    assert np.abs(actual - expected).max() < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_the_likeliest_of_transformers(engine, reference, name):
    """Given the tokens before it, each token is the likeliest of transformers, or nearly so."""
    prompts = [engine(name).get_tokenizer().encode(prompt) for prompt in PROMPTS[:8]]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine(name).generate(prompts, params, use_tqdm=False)
    logprob_gaps = []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        logprobs_TV = reference(name).logprobs([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        logprob_gaps += [
            logprobs_V.max() - logprobs_V[token]
            for logprobs_V, token in zip(logprobs_TV, answer, strict=True)
        ]
    assert len(logprob_gaps) == 8 * NUM_TOKENS and max(logprob_gaps) < 0.1
    assert np.mean(np.array(logprob_gaps) > 0) < 0.03
