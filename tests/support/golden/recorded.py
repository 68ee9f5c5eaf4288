"""What transformers answered, from the golden files, and the check that Quire answers the same."""

import json
from pathlib import Path

import numpy as np

from quire import LLM, SamplingParams

from .folder import HERE, write_folder
from .variant import Variant

TOLERANCE = 2e-4  # of logits


class Golden:
    """One golden file, and a folder with the model that it was made of."""

    def __init__(self, variant: Variant, folder: Path):
        with np.load(HERE / f"{variant.name}.npz") as arrays:
            self.prompts = [arrays[f"prompt{i}"].tolist() for i in range(len(variant.prompts))]
            self.tokens = [arrays[f"tokens{i}"].tolist() for i in range(len(variant.prompts))]
            self.logits = arrays["logits"]
            meta = json.loads(arrays["meta"].tobytes())
        self.folder = write_folder(
            folder / variant.name, variant.config, meta["tensors"], meta["seed"]
        )


def check_answers(llm: LLM, made: Golden, near: float) -> None:
    """It answers as transformers did; a token's score is the same, to the bit or so near, alone and
    in company.
    """
    scores = {}
    for prompts, expected in asked(made.prompts, made.tokens):
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
            for at, (token, found) in enumerate(
                zip(tokens, output.outputs[0].logprobs or (), strict=True)
            ):
                score = found[token].logprob
                assert abs(scores.setdefault((*ids, *tokens[: at + 1]), score) - score) <= near


def asked(prompts: list[list[int]], tokens: list[list[int]]):
    """The first prompt alone; then both and three that have already come a part of the way, all at
    once.
    """
    long, short = prompts
    after_long, after_short = tokens
    yield [long], [after_long]
    batch = [
        (short, after_short, 0),
        (long, after_long, 0),
        (short, after_short, 9),
        (long, after_long, 30),
    ]
    batch.append((long, after_long, len(after_long) - 1))
    yield [ids + after[:n] for ids, after, n in batch], [after[n:] for _, after, n in batch]
