"""How much of the drafts is right, beside the formula: `python -m tools.quill.acceptance`."""

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
# whose distributions are those of a model that can be asked for them
DRAWN = "draft_model", "self, int8-weights"


class Verified(Observer):
    """Counts what became of drafts."""

    def __init__(self):
        self.lengths: list[int] = []  # of the proposals
        self.right: list[int] = []

    def observe(self, record: StepRecord) -> None:
        for output in record.result.outputs if record.result else ():
            if output.item.draft_tokens:
                self.lengths.append(len(output.item.draft_tokens))
                self.right.append(len(output.tokens) - 1)

    @property
    def rate(self) -> float:
        """The chance that a draft is right if those before it are."""
        right, missed = (
            sum(self.right),
            sum(n < k for n, k in zip(self.right, self.lengths, strict=True)),
        )
        return right / max(right + missed, 1)

    @property
    def first(self) -> float:
        """The chance that the first one is."""
        return sum(n > 0 for n in self.right) / max(len(self.right), 1)

    @property
    def measured(self) -> float:
        """Tokens a step."""
        return 1 + sum(self.right) / max(len(self.right), 1)

    @property
    def expected(self) -> float:
        """The same by (1 - a^(k+1)) / (1 - a) for the k drafts of each step."""
        return float(
            np.mean([sum(self.rate**i for i in range(k + 1)) for k in self.lengths] or [1.0])
        )


def main(
    samples: Annotated[int, typer.Option(min=1, help="prompts per task")] = 6,
    prompts: Annotated[
        int, typer.Option(min=1, help="stories that are told at temperature 1")
    ] = 24,
):
    """Print tokens a step by drafter and task, and what drawing with the model's own noise gains at
    temperature 1.
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
            seen = verified(llm, task, samples)
            counts = (
                f"{len(seen.right)}",
                f"{seen.rate:.2f}",
                f"{seen.expected:.2f}",
                f"{seen.measured:.2f}",
            )
            table.add_row(name, task, *counts)
        if name in DRAWN:
            seen = Verified()
            llm.engine.observers[:] = [seen]
            texts = told(llm, prompts)
            own = (
                {"model": config["model"]}
                if "model" in config
                else {"quantization": config["quantization"]}
            )
            pairs = zip(distributions({}, texts), distributions(own, texts), strict=True)
            chances = np.mean([agreement(p, q) for p, q in pairs], axis=0)
            noise.add_row(
                name,
                f"{len(seen.right)}",
                *(f"{chance:.3f}" for chance in chances),
                f"{seen.first:.3f}",
            )
        llm.close()
    console.print(table)
    console.print("How often a draft is right at temperature 1, where those before it are:", noise)


def verified(llm, task: str, samples: int) -> Verified:
    """What became of drafts in greedy answers to fresh questions."""
    from quire import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=LONGEST)
    examples = list(fresh(task, samples))
    seen = Verified()
    llm.engine.observers[:] = [seen]
    if plain := [e.prompt for e in examples if e.plain]:
        llm.generate(plain, greedy, use_tqdm=False)
    if chats := [e.messages for e in examples if not e.plain]:
        llm.chat(chats, greedy, use_tqdm=False)
    return seen


def told(llm, count: int) -> list[tuple[list[int], int]]:
    """Texts, and how long the prompt of each is."""
    from quire import SamplingParams

    asked = [example.prompt for example in fresh("story_plain", count)]
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=100) for seed in range(count)]
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [
        ([*o.prompt_token_ids, *o.outputs[0].token_ids], len(o.prompt_token_ids)) for o in outputs
    ]


def distributions(options: dict, texts: list[tuple[list[int], int]]):
    """What a model says of each token of the answers: [vocabulary]."""
    from quire import LLM, SamplingParams

    llm = LLM(**options, max_logprobs=-1, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    found = []
    for tokens, start in texts:
        (output,) = llm.generate([tokens], params, use_tqdm=False)
        for entry in output.prompt_logprobs[start:]:
            row = np.zeros(len(entry))
            row[list(entry)] = np.exp([one.logprob for one in entry.values()])
            found.append(row / row.sum())
    llm.close()
    return found


def agreement(p, q) -> tuple[float, float, float]:
    """The chance that a draft from q is what is drawn from p: by itself, by rejection sampling,
    with the same noise.

    Rejection sampling accepts by p / q and keeps the distribution, not the answer. With the same
    Gumbel noise both say token i where its noise beats each other's by the larger of their two
    differences.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.maximum(p[None] / p[:, None], q[None] / q[:, None])  # [i, j]
        same = np.nan_to_num(1 / ratios.sum(1), nan=0.0)
    return float(p @ q), float(np.minimum(p, q).sum()), float(same.sum())


if __name__ == "__main__":
    typer.run(main)
