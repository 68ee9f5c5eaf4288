"""Answers of transformers from the golden files, and the check that Quire gives the same."""

import json
from pathlib import Path

import numpy as np

from quire import LLM, SamplingParams

from .folder import HERE, write_folder
from .variant import Variant

TOLERANCE = 2e-4  # absolute, of logits


class Golden:
    """One golden file, and a folder with the model that it was made with."""

    def __init__(self, variant: Variant, folder: Path):
        with np.load(HERE / f"{variant.name}.npz") as arrays:
            self.prompts = [arrays[f"prompt{i}"].tolist() for i in range(len(variant.prompts))]
            self.tokens = [arrays[f"tokens{i}"].tolist() for i in range(len(variant.prompts))]
            self.logits = arrays["logits"]
            meta = json.loads(arrays["meta"].tobytes())
        self.folder = write_folder(
            folder / variant.name, variant.config, meta["tensors"], meta["seed"]
        )


def check_answers(llm: LLM, golden: Golden, tolerance: float) -> None:
    """Check greedy answers against transformers, and that a token's log-probability differs by at
    most `tolerance` between batches (0: bitwise batch invariance).
    """
    scores = {}
    for prompts, expected in batches_to_check(golden.prompts, golden.tokens):
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            [
                SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True, logprobs=0)
                for tokens in expected
            ],
            use_tqdm=False,
        )
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        for ids, tokens, output in zip(prompts, expected, outputs, strict=True):
            for at, (token, top_logprobs) in enumerate(
                zip(tokens, output.outputs[0].logprobs or (), strict=True)
            ):
                score = top_logprobs[token].logprob
                assert abs(scores.setdefault((*ids, *tokens[: at + 1]), score) - score) <= tolerance


def batches_to_check(prompts: list[list[int]], tokens: list[list[int]]):
    """(prompts, expected answers): first one prompt alone; then one batch of both prompts and of
    three prompts that already hold a part of their answers.
    """
    long_prompt, short_prompt = prompts
    long_answer, short_answer = tokens
    yield [long_prompt], [long_answer]
    batch = [
        (short_prompt, short_answer, 0),
        (long_prompt, long_answer, 0),
        (short_prompt, short_answer, 9),
        (long_prompt, long_answer, 30),
    ]
    batch.append((long_prompt, long_answer, len(long_answer) - 1))
    yield (
        [ids + answer[:num_answered] for ids, answer, num_answered in batch],
        [answer[num_answered:] for _, answer, num_answered in batch],
    )
