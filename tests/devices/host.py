"""One process of an engine, run by test_hosts.py. Process 0, or a single process, answers
requests.
"""

import json
import sys

import numpy as np

import quire
from quire import LLM, SamplingParams
from quire.model.checkpoint.safetensors import Tensor

REQUESTS = 200


def example_requests() -> tuple[list[dict], list[SamplingParams]]:
    """Prompts of many lengths, some with a common prefix, and every kind of sampling parameter."""
    rng = np.random.default_rng(7)
    prompts = []
    params = []
    for index in range(REQUESTS):
        shared = [11] * 20 if index % 5 == 0 else []
        tokens = [*shared, *rng.integers(3, 160, rng.integers(1, 60)).tolist()]
        prompts.append({"prompt_token_ids": tokens})
        kinds = [
            {"temperature": 0},
            {"temperature": 1.0, "seed": index},
            {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": index},
            {
                "temperature": 0,
                "repetition_penalty": 1.4,
                "frequency_penalty": 0.3,
                "presence_penalty": 0.2,
            },
            {"temperature": 0, "logit_bias": {5: 3.0, 77: -4.0}, "logprobs": 3},
            {
                "temperature": 0.7,
                "allowed_token_ids": list(range(3, 60)),
                "seed": index,
                "min_tokens": 2,
            },
            {"temperature": 0, "prompt_logprobs": 1, "logprobs": 0},
            {"temperature": 0.9, "n": 2, "seed": index},
        ]
        params.append(
            SamplingParams(
                max_tokens=int(rng.integers(2, 13)), ignore_eos=True, **kinds[index % len(kinds)]
            )
        )
    return prompts, params


def generate_outputs(llm: LLM, count: int = REQUESTS) -> list:
    """Token ids and logprobs of each completion."""
    prompts, params = example_requests()
    outputs = llm.generate(prompts[:count], params[:count], use_tqdm=False)
    print("tokens that were cached:", sum(output.num_cached_tokens for output in outputs))
    return [
        [
            completion.token_ids,
            [score.logprob for entry in completion.logprobs or [] for score in entry.values()],
        ]
        for output in outputs
        for completion in output.outputs
    ]


class FullReadCounter:
    """Counts the bytes of tensors that are read in full."""

    def __init__(self):
        self.bytes = 0
        self.read = Tensor.read
        Tensor.read = lambda tensor: self.count(tensor)  # type: ignore[method-assign]

    def count(self, tensor: Tensor) -> np.ndarray:
        value = self.read(tensor)
        self.bytes += value.nbytes
        return value


def main() -> None:
    model = sys.argv[1]
    options = json.loads(sys.argv[2])
    out = sys.argv[3]
    if options.get("process_id"):
        quire.follow(model, progress=print, **options)
        return
    full_reads = FullReadCounter()
    with LLM(model, **options) as llm:
        runner = llm.engine.runner
        results = {"read": full_reads.bytes, "first": generate_outputs(llm)}
        for level, keep in ((1, True), (2, False)):
            llm.sleep(level, keep_pages=keep)
            llm.wake_up()
        runner.reset()
        llm.reset_prefix_cache()
        results |= {"again": generate_outputs(llm, 32), "recompiles": runner.compiles.recompiles}
        with open(out, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
