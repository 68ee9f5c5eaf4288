"""Measure draft acceptance on quill's tasks, against the formula: `python -m
tools.quill.acceptance`.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from quire.serving.engine.step_record import Observer, StepRecord

from .drafts import ASKED, CONFIGS
from .eval import LONGEST
from .tasks import fresh

DRAFTS = 4
# Drafters whose distributions can be computed, because they are models themselves.
DRAWN = "draft_model", "self, int8-weights"


class Verified(Observer):
    """An engine observer that records the length and accepted tokens of each proposal."""

    def __init__(self):
        self.lengths: list[int] = []  # draft tokens of each proposal
        self.right: list[int] = []  # accepted tokens of each proposal

    def observe(self, record: StepRecord) -> None:
        for output in record.result.outputs if record.result else ():
            if output.item.draft_tokens:
                self.lengths.append(len(output.item.draft_tokens))
                self.right.append(len(output.tokens) - 1)

    @property
    def rate(self) -> float:
        """The probability that a draft token is accepted if all before it are."""
        right = sum(self.right)
        missed = sum(n < k for n, k in zip(self.right, self.lengths, strict=True))
        return right / max(right + missed, 1)

    @property
    def first(self) -> float:
        """The probability that a proposal's first draft token is accepted."""
        return sum(n > 0 for n in self.right) / max(len(self.right), 1)

    @property
    def measured(self) -> float:
        """Mean tokens per step."""
        return 1 + sum(self.right) / max(len(self.right), 1)

    @property
    def expected(self) -> float:
        """Expected tokens per step by (1 - a^(k+1)) / (1 - a), for k draft tokens in each step."""
        return float(
            np.mean([sum(self.rate**i for i in range(k + 1)) for k in self.lengths] or [1.0])
        )


def main(
    samples: Annotated[int, typer.Option(min=1, help="Prompts per task.")] = 6,
    prompts: Annotated[int, typer.Option(min=1, help="Stories to generate at temperature 1.")] = 24,
):
    """Print tokens per step by drafter and task, and acceptance at temperature 1 with shared
    sampling noise compared with rejection sampling.
    """
    from quire import LLM

    console = Console(width=110)
    table = Table("drafter", "task", "steps with drafts", "a", "by the formula", "tokens a step")
    noise = Table(
        "drafter", "drafts", "independent draws", "by rejection", "the same noise", "as measured"
    )
    for name, config in CONFIGS.items():
        if config is None:
            continue
        llm = LLM(speculative_config=config | {"num_speculative_tokens": DRAFTS, "adapts": False})
        for task in ASKED:
            observer = measure_acceptance(llm, task, samples)
            counts = (
                f"{len(observer.right)}",
                f"{observer.rate:.2f}",
                f"{observer.expected:.2f}",
                f"{observer.measured:.2f}",
            )
            table.add_row(name, task, *counts)
        if name in DRAWN:
            observer = Verified()
            llm.engine.observers[:] = [observer]
            texts = sample_stories(llm, prompts)
            model_options = (
                {"model": config["model"]}
                if "model" in config
                else {"quantization": config["quantization"]}
            )
            pairs = zip(distributions({}, texts), distributions(model_options, texts), strict=True)
            chances = np.mean([agreement(p, q) for p, q in pairs], axis=0)
            noise.add_row(
                name,
                f"{len(observer.right)}",
                *(f"{chance:.3f}" for chance in chances),
                f"{observer.first:.3f}",
            )
        llm.close()
    console.print(table)
    console.print("How often a draft is right at temperature 1, where those before it are:", noise)


def measure_acceptance(llm, task: str, samples: int) -> Verified:
    """Draft acceptance in greedy answers to fresh examples of a task."""
    from quire import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=LONGEST)
    examples = list(fresh(task, samples))
    observer = Verified()
    llm.engine.observers[:] = [observer]
    if plain_prompts := [e.prompt for e in examples if e.plain]:
        llm.generate(plain_prompts, greedy, use_tqdm=False)
    if chats := [e.messages for e in examples if not e.plain]:
        llm.chat(chats, greedy, use_tqdm=False)
    return observer


def sample_stories(llm, count: int) -> list[tuple[list[int], int]]:
    """Generate texts at temperature 1.

    Returns (prompt and output tokens, prompt length) of each.
    """
    from quire import SamplingParams

    prompts = [example.prompt for example in fresh("story_plain", count)]
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=100) for seed in range(count)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        ([*o.prompt_token_ids, *o.outputs[0].token_ids], len(o.prompt_token_ids)) for o in outputs
    ]


def distributions(options: dict, texts: list[tuple[list[int], int]]):
    """A model's probability distribution over the vocabulary at each output token of the texts."""
    from quire import LLM, SamplingParams

    llm = LLM(**options, max_logprobs=-1, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    probabilities = []
    for tokens, start in texts:
        (output,) = llm.generate([tokens], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for entry in output.prompt_logprobs[start:]:
            assert entry is not None  # it is None for the first token of the prompt only
            row = np.zeros(len(entry))
            row[list(entry)] = np.exp([logprob.logprob for logprob in entry.values()])
            probabilities.append(row / row.sum())
    llm.close()
    return probabilities


def agreement(p, q) -> tuple[float, float, float]:
    """The probability that a draft from q is accepted for p: (independent samples, rejection
    sampling, the same Gumbel noise).

    Rejection sampling accepts by p / q and keeps the distribution, not the answer. With the same
    noise both sample token i if its noise exceeds that of every other token by the larger of the
    two differences of log-probabilities.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.maximum(p[None] / p[:, None], q[None] / q[:, None])  # [i, j]
        same_noise = np.nan_to_num(1 / ratios.sum(1), nan=0.0)
    return float(p @ q), float(np.minimum(p, q).sum()), float(same_noise.sum())


if __name__ == "__main__":
    typer.run(main)
