"""Measure the speedup of speculative decoding on quill's tasks, by drafter and batch size: `python
-m tools.quill.drafts`.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from .eval import LONGEST
from .tasks import fresh

ASKED = "copy", "reverse", "sort_numbers", "json", "story", "lookup_200"
CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "plain, again": None,  # a second plain engine: its deviation from 1.00 is measurement noise
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "draft_model": {"method": "draft_model", "model": "quill-draft"},
    "self, int8-weights": {"method": "self", "quantization": "int8-weights"},
    "self, 4 of 8 layers": {"method": "self", "num_layers": 4},
    "medusa, quill-medusa": {"method": "medusa", "model": "quill-medusa"},
    "eagle, quill-eagle": {"method": "eagle", "model": "quill-eagle"},
}
WORST = 64, 100  # (prompt tokens, output tokens) of random prompts


class Turn(NamedTuple):
    """Prompts that are sent as one batch."""

    calls: list[tuple[str, list, Any]]  # (method of `LLM`, prompts, parameters)

    def run(self, llm) -> tuple[list, float]:
        """Run the batch. Returns (tokens of each answer, seconds)."""
        answers = []
        began = time.perf_counter()
        for method, prompts, params in self.calls:
            outputs = getattr(llm, method)(prompts, params, use_tqdm=False)
            answers += [output.outputs[0].token_ids for output in outputs]
        return answers, time.perf_counter() - began


def task_batches(samples: int, batch: int) -> list[Turn]:
    """Batches of the tasks in ASKED, decoded greedily."""
    from quire import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=LONGEST)
    turns = []
    examples = [example for task in ASKED for example in fresh(task, samples)]
    for start in range(0, len(examples), batch):
        batch_examples = examples[start : start + batch]
        plain_prompts = [e.prompt for e in batch_examples if e.plain]
        chats = [e.messages for e in batch_examples if not e.plain]
        calls = [("generate", plain_prompts, params), ("chat", chats, params)]
        turns.append(Turn([call for call in calls if call[1]]))
    return turns


def random_batches(samples: int, batch: int) -> list[Turn]:
    """Batches of random tokens, continued at temperature 1: the worst case for drafters."""
    from quire import SamplingParams

    rng = random.Random(0)
    turns = []
    length, answer = WORST
    for turn in range(-(-samples * len(ASKED) // batch)):
        prompts = [[rng.randrange(6, 1280) for _ in range(length)] for _ in range(batch)]
        params = [
            SamplingParams(
                temperature=1, seed=turn * batch + index, max_tokens=answer, ignore_eos=True
            )
            for index in range(batch)
        ]
        turns.append(Turn([("generate", prompts, params)]))
    return turns


def main(
    samples: Annotated[int, typer.Option(min=1, help="Prompts per task.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; reports the median.")] = 3,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size; repeatable.")] = None,
    random_prompts: Annotated[
        bool, typer.Option(help="Use random tokens at temperature 1 instead of tasks.")
    ] = False,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Drafter to run (a row of the table); repeatable.")
    ] = None,
):
    """Print tokens per second relative to plain decoding, and check that answers are identical.

    All drafters take turns at the same batches, each between two runs of plain decoding, so that
    other load on the machine affects both alike. The column "times plain" is the ratio of the sums
    of these times.
    """
    from quire import LLM

    names = ["plain", *(drafter or [name for name in CONFIGS if name != "plain"])]
    if unknown := [name for name in names if name not in CONFIGS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(CONFIGS)}", param_hint="--drafter"
        )
    llms = {
        name: LLM(speculative_config=CONFIGS[name], enable_prefix_caching=False) for name in names
    }
    table = Table(
        "drafter",
        "requests",
        "tokens/s",
        "times plain",
        "rounds",
        "accepted",
        "tokens a step with drafts",
    )
    for count in batch or [1, 4, 16]:
        turns = (random_batches if random_prompts else task_batches)(samples, count)
        speeds: dict[str, list[float]] = {name: [] for name in names}
        gains: dict[str, list[float]] = {name: [] for name in names[1:]}
        metrics_before = {name: llm.get_metrics() for name, llm in llms.items()}
        for _ in range(rounds):
            tokens = 0
            seconds = dict.fromkeys(names, 0.0)
            plain_seconds = dict.fromkeys(names, 0.0)  # mean of the plain runs before and after
            for turn in turns:
                expected, seconds_before = turn.run(llms["plain"])
                tokens += sum(map(len, expected))
                for name in names[1:]:
                    answers, drafter_seconds = turn.run(llms[name])
                    assert answers == expected, f"{name} answers something else than plain decoding"
                    _, seconds_after = turn.run(llms["plain"])
                    seconds[name] += drafter_seconds
                    plain_seconds[name] += (seconds_before + seconds_after) / 2
                    seconds_before = seconds_after
            for name in names[1:]:
                speeds[name].append(tokens / seconds[name])
                gains[name].append(plain_seconds[name] / seconds[name])
            speeds["plain"].append(
                tokens / statistics.mean(plain_seconds[name] for name in names[1:])
            )
        for name, llm in llms.items():
            drafter_seconds = gains.get(name, [1.0])
            gained = draft_statistics(llm.get_metrics(), metrics_before[name])
            gains_text = " ".join(f"{gain:.2f}" for gain in drafter_seconds)
            speed = f"{statistics.median(speeds[name]):.0f}"
            table.add_row(
                name,
                str(count),
                speed,
                f"{statistics.median(drafter_seconds):.2f}",
                gains_text,
                *gained,
            )
    Console(width=110).print(table)
    for llm in llms.values():
        llm.close()


def draft_statistics(now: dict[str, Any], earlier: dict[str, Any]) -> tuple[str, str]:
    """(acceptance rate, tokens per sequence and step with drafts), as text."""
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    if f"vllm:spec_decode_{names[0]}" not in now:
        return "", ""
    times, drafts, accepted = (
        now[f"vllm:spec_decode_{n}"] - earlier[f"vllm:spec_decode_{n}"] for n in names
    )
    return (f"{accepted / drafts:.0%}", f"{1 + accepted / times:.2f}") if drafts else ("", "")


if __name__ == "__main__":
    typer.run(main)
