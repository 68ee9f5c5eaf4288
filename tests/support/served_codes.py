"""A model in codes through the whole engine: near the dense model of the same numbers, and the same
in company.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quire import LLM, SamplingParams
from quire.model.checkpoint.loader import load_weights, read_config
from quire.tests.support import uncached

SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_logprobs": 96}
# So many that a row which falls on the other side of a rounding to eight bits does not decide.
PROMPTS = [
    [1] * 20,
    *(np.random.default_rng(n).integers(1, 96, 2 + n % 18).tolist() for n in range(31)),
]
RUN = jax.jit(uncached.forward, static_argnums=2)


def check(llm: LLM, dense: Path, prompts: list[list[int]] = PROMPTS, times: float = 3) -> None:
    """The scores are no further away than so many times what bfloat16 itself takes the dense model.

    By the root of the mean square: the largest of a few hundred is a matter of chance in both.
    """
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=96)
    together = llm.generate(prompts, params)
    found = [[one.outputs[0].logprobs[0][token].logprob for token in range(96)] for one in together]
    exact, rounded = (scores(dense, dtype, prompts) for dtype in ("float32", "bfloat16"))
    assert size(found - exact) < times * size(rounded - exact)
    for prompt, one in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, params)[0].outputs[0]
        assert (alone.token_ids, alone.logprobs) == (
            one.outputs[0].token_ids,
            one.outputs[0].logprobs,
        )


def size(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).mean()))


def scores(folder: Path, dtype: str, prompts: list[list[int]]) -> np.ndarray:
    """The log-probabilities of all tokens after each prompt, by the reference."""
    config = read_config(folder, dtype)
    weights = load_weights(folder, config)
    longest = max(map(len, prompts))
    ids = jnp.array([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    logits = RUN(weights, ids, config)[np.arange(len(prompts)), np.array([*map(len, prompts)]) - 1]
    return np.asarray(jax.nn.log_softmax(logits))
