"""Write prompts of quill's tasks for `quire train-heads`: `python -m tools.quill.prompts
prompts.jsonl`. With --documents, write whole documents as calibration text for `quire quantize`.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from .corpus import MIX, documents
from .tasks import BOS, TASKS


def main(
    out: Annotated[Path, typer.Argument(help="Output file (JSON Lines).")],
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 8000,
    seed: Annotated[int, typer.Option(help="Seed for the prompts.")] = 0,
    write_documents: Annotated[
        bool,
        typer.Option("--documents", help="Write documents with answers, for `quire quantize`."),
    ] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Task to use; repeatable, all equally often. Default: all by weight."),
    ] = None,
):
    """Write prompts. Evaluation uses other random generators, so its samples differ from these."""
    if unknown := [name for name in task or [] if name not in TASKS]:
        raise typer.BadParameter(
            f"{unknown[0]!r} is not a task; there are {', '.join(TASKS)}", param_hint="--task"
        )
    if write_documents:
        texts = (
            "".join(piece for piece, _ in document).removeprefix(BOS)
            for document in documents(f"heads/{seed}", count)
        )
        out.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return
    rng = Random(f"heads/{seed}")
    weights = {name: weight for name, weight in MIX.items() if name in TASKS}
    weights |= dict.fromkeys(("lookup_200", "lookup_400", "lookup_600"), 0.3)
    weights = dict.fromkeys(task, 1.0) if task else weights
    with out.open("w") as file:
        for name in rng.choices(list(weights), list(weights.values()), k=count):
            example = TASKS[name](rng)
            entry = {"prompt": example.prompt} if example.plain else {"messages": example.messages}
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    typer.run(main)
