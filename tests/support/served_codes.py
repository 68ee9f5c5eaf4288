"""Checks of a quantised model in the engine: close to the dequantised model, and batch-invariant."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire import LLM, SamplingParams
from quire.model.checkpoint.loader import load_weights, read_config
from quire.tests.support import uncached

SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_logprobs": 96}
# So many that a single activation that rounds differently to int8 does not decide.
PROMPTS = [
    [1] * 20,
    *(np.random.default_rng(n).integers(1, 96, 2 + n % 18).tolist() for n in range(31)),
]
RUN = jax.jit(uncached.forward, static_argnums=2)


def check(llm: LLM, dense: Path, prompts: list[list[int]] = PROMPTS, times: float = 3) -> None:
    """Check that log-probabilities deviate at most `times` as much as those of the dense model in
    bfloat16.

    Deviations are compared by their root mean square, since the maximum depends on chance.
    """
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=96)
    together = llm.generate(prompts, params)
    actual = [
        [output.outputs[0].logprobs[0][token].logprob for token in range(96)] for output in together
    ]
    exact, rounded = (reference_scores(dense, dtype, prompts) for dtype in ("float32", "bfloat16"))
    assert root_mean_square(actual - exact) < times * root_mean_square(rounded - exact)
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, params)[0].outputs[0]
        assert (alone.token_ids, alone.logprobs) == (
            output.outputs[0].token_ids,
            output.outputs[0].logprobs,
        )


def root_mean_square(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).mean()))


def reference_scores(folder: Path, dtype: str, prompts: list[list[int]]) -> np.ndarray:
    """Log-probabilities of all tokens after each prompt, by the uncached decoder."""
    config = read_config(folder, dtype)
    weights = load_weights(folder, config)
    longest = max(map(len, prompts))
    ids = jnp.array([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    logits = RUN(weights, ids, config)[np.arange(len(prompts)), np.array([*map(len, prompts)]) - 1]
    return np.asarray(jax.nn.log_softmax(logits))
