"""Exact-match accuracy of quill by task on fresh samples: `python -m tools.quill.eval`."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quire.scripts import options as o

from .tasks import TASKS, fresh, score

LONGEST = 260  # maximum tokens of an answer; a story has about 150


def evaluate(
    llm, samples: int, seed: int = 0, only: list[str] | None = None, temperature: float = 0.0
) -> dict[str, dict[str, float]]:
    """The number of right answers, the number of samples and the accuracy of each task."""
    from quire import SamplingParams

    params = [
        SamplingParams(temperature=temperature, max_tokens=LONGEST, seed=number)
        for number in range(samples)
    ]
    result = {}
    for task in only or TASKS:
        examples = list(fresh(task, samples, seed))
        if examples[0].plain:
            outputs = llm.generate([e.prompt for e in examples], params, use_tqdm=False)
        else:
            outputs = llm.chat([e.messages for e in examples], params, use_tqdm=False)
        right = sum(score(e, out.outputs[0].text) for e, out in zip(examples, outputs, strict=True))
        result[task] = {"right": right, "samples": samples, "accuracy": right / samples}
    return result


@o.takes_engine()
def main(
    model: Annotated[
        str, typer.Option(help="Model folder or Hugging Face model ID; default: the bundled quill.")
    ] = "",
    samples: Annotated[int, typer.Option(min=1, help="Fresh samples per task.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed for the samples.")] = 0,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 is greedy decoding.")
    ] = 0.0,
    task: Annotated[
        list[str] | None, typer.Option(help="Task to evaluate; repeatable. Default: all.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of the table.")
    ] = False,
    *,
    engine: dict[str, Any],
):
    """Print exact-match accuracy per task."""
    if unknown := [name for name in task or [] if name not in TASKS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is not a task; there are {', '.join(TASKS)}", param_hint="--task"
        )
    from quire import LLM

    with LLM(model=model or None, **engine) as llm:
        start = time.monotonic()
        result = evaluate(llm, samples, seed, task, temperature)
        seconds = time.monotonic() - start
    if as_json:
        summary = {
            "model": model or "quill",
            **engine,
            "seed": seed,
            "seconds": round(seconds, 2),
            "tasks": result,
        }
        print(json.dumps(summary))
        return
    formats = "".join(f", {name} {value}" for name, value in engine.items())
    table = Table(
        title=f"{model or 'quill'}{formats}: exact matches, {samples} samples a task, "
        f"{seconds:.1f} s"
    )
    table.add_column("task")
    table.add_column("right", justify="right")
    table.add_column("accuracy", justify="right")
    for name, row in result.items():
        table.add_row(name, f"{row['right']}/{row['samples']}", f"{row['accuracy']:.1%}")
    mean = sum(row["accuracy"] for row in result.values()) / len(result)
    table.add_section()
    table.add_row("mean", "", f"{mean:.1%}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
