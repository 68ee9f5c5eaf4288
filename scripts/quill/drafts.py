"""What drafts gain on quill's tasks, by drafter and batch: `python -m quire.scripts.quill.drafts`."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .eval import LONGEST
from .tasks import fresh

ASKED = "copy", "reverse", "sort_numbers", "json", "story", "lookup_200"
DRAFT = str(Path(__file__).parents[2] / "model" / "quill_draft")
CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "draft_model": {"method": "draft_model", "model": DRAFT},
    "self, int8-weights": {"method": "self", "quantization": "int8-weights"},
    "self, 4 of 8 layers": {"method": "self", "num_layers": 4},
}


def serve(llm, examples: list, batch: int) -> tuple[list, float]:
    """Each answer's tokens, and tokens a second."""
    from ... import SamplingParams

    params, answers, began = SamplingParams(temperature=0, max_tokens=LONGEST), [], time.perf_counter()
    for start in range(0, len(examples), batch):
        some = examples[start : start + batch]
        for plain in (True, False):
            if asked := [e.prompt if plain else e.messages for e in some if e.plain is plain]:
                outputs = (llm.generate if plain else llm.chat)(asked, params, use_tqdm=False)
                answers += [output.outputs[0].token_ids for output in outputs]
    return answers, sum(map(len, answers)) / (time.perf_counter() - began)


def main(
    samples: Annotated[int, typer.Option(min=1, help="prompts per task")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="times that everything is asked, in turns; the median counts")] = 3,
    batch: Annotated[list[int] | None, typer.Option(help="requests at a time; may be repeated")] = None,
):
    """Print tokens a second against plain decoding, whose answers all must equal."""
    from ... import LLM

    examples = [example for task in ASKED for example in fresh(task, samples)]
    llms = {name: LLM(speculative_config=config, enable_prefix_caching=False) for name, config in CONFIGS.items()}
    table = Table("drafter", "requests", "tokens/s", "times plain", "accepted", "tokens a step with drafts")
    for count in batch or [1, 4, 16]:
        speeds: dict[str, list[float]] = {name: [] for name in llms}
        before = {name: llm.get_metrics() for name, llm in llms.items()}
        for _ in range(rounds):
            expected = None
            for name, llm in llms.items():
                answers, speed = serve(llm, examples, count)
                expected = expected or answers
                assert answers == expected, f"{name} answers something else than plain decoding"
                speeds[name].append(speed)
        middle = {name: statistics.median(found) for name, found in speeds.items()}
        for name, llm in llms.items():
            gained = drafted(llm.get_metrics(), before[name])
            table.add_row(name, str(count), f"{middle[name]:.0f}", f"{middle[name] / middle['plain']:.2f}", *gained)
    Console(width=100).print(table)
    for llm in llms.values():
        llm.close()


def drafted(now: dict[str, Any], before: dict[str, Any]) -> tuple[str, str]:
    """The share of drafts that was accepted, and tokens that a step with drafts gave a sequence."""
    names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
    if f"vllm:spec_decode_{names[0]}" not in now:
        return "", ""
    times, drafts, accepted = (now[f"vllm:spec_decode_{n}"] - before[f"vllm:spec_decode_{n}"] for n in names)
    return (f"{accepted / drafts:.0%}", f"{1 + accepted / times:.2f}") if drafts else ("", "")


if __name__ == "__main__":
    typer.run(main)
