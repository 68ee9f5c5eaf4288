"""Differences of Quire and llama.cpp from float32 on the same GGUF file: `python
tests/support/real_fidelity.py [NAME ...]`.

The reference is transformers with the dequantised weights. All engines score one fixed text, so
that differences do not accumulate. Needs `make real`, which fetches the models and builds
llama.cpp.
"""

import gc
import sys
from functools import partial
from typing import NamedTuple

import numpy as np

from quire.tests.support import real_models
from quire.tests.support.real_prompts import TEXT

NUM_TOKENS = 400
GGUF = ("smollm2", "qwen-500m")


class Distance(NamedTuple):
    """Differences of an engine's log-probabilities of a text's tokens from the reference's."""

    mean: float  # of the absolute differences, in nats
    worst: float
    perplexity: float  # of the text, by the engine

    @classmethod
    def between(cls, actual: np.ndarray, expected: np.ndarray) -> "Distance":
        differences = np.abs(actual - expected)
        return cls(
            float(differences.mean()), float(differences.max()), float(np.exp(-actual.mean()))
        )


def of_reference(path: str) -> tuple[list[int], np.ndarray]:
    """(tokens of the text, log-probabilities of all tokens but the first)."""
    from quire.tests.support.real_reference import Reference

    reference = Reference(path)
    tokens = reference.tokenizer(TEXT)["input_ids"][:NUM_TOKENS]
    return tokens, reference.logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]


def of_quire(path: str, tokens: list[int], dtype: str) -> np.ndarray:
    from quire import LLM, SamplingParams

    with LLM(
        path, dtype=dtype, max_model_len=1024, max_num_seqs=2, kv_cache_memory_bytes=128 << 20
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([tokens], params, use_tqdm=False)
    steps = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
    return np.array([step[token].logprob for step, token in steps])


def of_llama_cpp(path: str, tokens: list[int]) -> np.ndarray:
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    llm = Llama(path, n_ctx=1024, logits_all=True, verbose=False)
    llm.eval(tokens)
    logits_TV = np.array(llm.scores[: len(tokens)], np.float64)
    logits_TV -= logits_TV.max(-1, keepdims=True)
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    return logprobs_TV[np.arange(len(tokens) - 1), tokens[1:]]


ENGINES = {
    "Quire": partial(of_quire, dtype="auto"),
    "Quire, `--dtype float32`": partial(of_quire, dtype="float32"),
    "llama.cpp": of_llama_cpp,
}


def main() -> None:
    print("| file | engine | mean difference | largest | perplexity |\n|---|---|---|---|---|")
    for name in sys.argv[1:] or GGUF:
        path = str(real_models.path_of(name))
        title = real_models.MODELS[name]["title"]
        tokens, expected = of_reference(path)
        gc.collect()
        print(f"| {title} | transformers, float32 | | | {np.exp(-expected.mean()):.3f} |")
        for engine, logprobs in ENGINES.items():
            mean, worst, perplexity = Distance.between(logprobs(path, tokens), expected)
            print(f"| | {engine} | {mean:.2g} | {worst:.2g} | {perplexity:.3f} |", flush=True)


if __name__ == "__main__":
    main()
