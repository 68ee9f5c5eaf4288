"""What drafts gain on quill's tasks, by drafter and batch: `python -m tools.quill.drafts`."""

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
    "plain, again": None,  # another engine: what its row is away from 1.00 is chance
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "draft_model": {"method": "draft_model", "model": "quill-draft"},
    "self, int8-weights": {"method": "self", "quantization": "int8-weights"},
    "self, 4 of 8 layers": {"method": "self", "num_layers": 4},
    "medusa, quill-medusa": {"method": "medusa", "model": "quill-medusa"},
    "eagle, quill-eagle": {"method": "eagle", "model": "quill-eagle"},
}
WORST = 64, 100  # random tokens of a prompt, and tokens of its answer


class Turn(NamedTuple):
    """Some prompts that are asked together."""

    asked: list[tuple[str, list, Any]]  # (method of `LLM`, prompts, parameters)

    def run(self, llm) -> tuple[list, float]:
        """Each answer's tokens, and seconds."""
        answers = []
        began = time.perf_counter()
        for method, prompts, params in self.asked:
            outputs = getattr(llm, method)(prompts, params, use_tqdm=False)
            answers += [output.outputs[0].token_ids for output in outputs]
        return answers, time.perf_counter() - began


def tasks(samples: int, batch: int) -> list[Turn]:
    """The tasks of ASKED, greedy."""
    from quire import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=LONGEST)
    turns = []
    examples = [example for task in ASKED for example in fresh(task, samples)]
    for start in range(0, len(examples), batch):
        some = examples[start : start + batch]
        plain, chats = (
            [e.prompt for e in some if e.plain],
            [e.messages for e in some if not e.plain],
        )
        asked = [("generate", plain, params), ("chat", chats, params)]
        turns.append(Turn([one for one in asked if one[1]]))
    return turns


def worst(samples: int, batch: int) -> list[Turn]:
    """Random tokens, continued at temperature 1: nothing to guess."""
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
    samples: Annotated[int, typer.Option(min=1, help="prompts per task")] = 6,
    rounds: Annotated[
        int, typer.Option(min=1, help="times that everything is asked; the median counts")
    ] = 3,
    batch: Annotated[
        list[int] | None, typer.Option(help="requests at a time; may be repeated")
    ] = None,
    random_prompts: Annotated[
        bool, typer.Option(help="ask random tokens, at temperature 1, instead of tasks")
    ] = False,
    drafter: Annotated[
        list[str] | None, typer.Option(help="one of the table's; may be repeated")
    ] = None,
):
    """Print tokens a second against plain decoding, whose answers all must equal.

    All drafters take turns at the same few prompts, each between two turns of plain decoding, and
    times plain is the ratio of the sums: what else the machine does meanwhile harms both alike.
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
        turns = (worst if random_prompts else tasks)(samples, count)
        speeds: dict[str, list[float]] = {name: [] for name in names}
        gains: dict[str, list[float]] = {name: [] for name in names[1:]}
        before = {name: llm.get_metrics() for name, llm in llms.items()}
        for _ in range(rounds):
            tokens = 0
            seconds = dict.fromkeys(names, 0.0)
            beside = dict.fromkeys(names, 0.0)  # of the plain turns before and after
            for turn in turns:
                expected, last = turn.run(llms["plain"])
                tokens += sum(map(len, expected))
                for name in names[1:]:
                    answers, own = turn.run(llms[name])
                    assert answers == expected, f"{name} answers something else than plain decoding"
                    _, after = turn.run(llms["plain"])
                    seconds[name] += own
                    beside[name] += (last + after) / 2
                    last = after
            for name in names[1:]:
                speeds[name].append(tokens / seconds[name])
                gains[name].append(beside[name] / seconds[name])
            speeds["plain"].append(tokens / statistics.mean(beside[name] for name in names[1:]))
        for name, llm in llms.items():
            own = gains.get(name, [1.0])
            gained = drafted(llm.get_metrics(), before[name])
            listed = " ".join(f"{gain:.2f}" for gain in own)
            speed = f"{statistics.median(speeds[name]):.0f}"
            table.add_row(name, str(count), speed, f"{statistics.median(own):.2f}", listed, *gained)
    Console(width=110).print(table)
    for llm in llms.values():
        llm.close()


def drafted(now: dict[str, Any], before: dict[str, Any]) -> tuple[str, str]:
    """The share of drafts that was accepted, and tokens that a step with drafts gave a sequence."""
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    if f"vllm:spec_decode_{names[0]}" not in now:
        return "", ""
    times, drafts, accepted = (
        now[f"vllm:spec_decode_{n}"] - before[f"vllm:spec_decode_{n}"] for n in names
    )
    return (f"{accepted / drafts:.0%}", f"{1 + accepted / times:.2f}") if drafts else ("", "")


if __name__ == "__main__":
    typer.run(main)
