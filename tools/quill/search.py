"""Measure test-time search on quill's arithmetic with a small reward model: `python -m
tools.quill.search`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from .tasks import fresh, score

TASKS = "add", "subtract", "multiply"
COUNTS = 1, 2, 4, 8, 16, 32
LONGEST = 12  # tokens of an answer
PATTERN = r"-?\d+"
ONE = "one of them is right"
METHODS = {
    "best of n": ("best_of_n", True),
    "majority": ("majority", False),
    "majority, by reward": ("majority", True),
}


def main(
    folder: Annotated[Path, typer.Argument(help="Output folder for the reward model.")] = Path(
        "runs/reward"
    ),
    samples: Annotated[int, typer.Option(min=1, help="Fresh questions per task.")] = 100,
    training: Annotated[
        int, typer.Option(min=10, help="Training questions per task for the reward model.")
    ] = 400,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="Sampling temperature, so high that quill is often wrong."),
    ] = 2.5,
    plot: Annotated[Path | None, typer.Option(help="File for a plot.")] = None,
):
    """Train a reward model for sums, and print accuracy by method and number of candidates."""
    from quire import LLM, SamplingParams, SearchParams

    sampling = SamplingParams(temperature=temperature, max_tokens=LONGEST, seed=0)
    with LLM() as llm:
        right = train_reward_model(llm, folder, training, sampling)
        with LLM(str(folder)) as reward:
            rows = {name: [] for name in (*METHODS, ONE)}
            written = []
            total = samples * len(TASKS)
            for n in COUNTS:
                good = dict.fromkeys(rows, 0)
                for name, (method, rewarded) in METHODS.items():
                    params = SearchParams(method, n, min(2, n), answer=PATTERN, sampling=sampling)
                    count = good[ONE] = 0  # all methods get the same candidates
                    for task in TASKS:
                        examples = list(fresh(task, samples, seed=2))
                        results = llm.search(
                            [e.messages for e in examples],
                            params,
                            reward=reward if rewarded else None,
                        )
                        for example, result in zip(examples, results, strict=True):
                            good[name] += score(example, result.text)
                            good[ONE] += any(
                                score(example, candidate.text) for candidate in result.candidates
                            )
                            count += result.num_generated_tokens
                    if name == [*METHODS][-1]:
                        written.append(count / total)
                for name, number in good.items():
                    rows[name].append(number / total)
    table = Table(
        "answers",
        *map(str, COUNTS),
        title=f"right answers, {samples} sums of each kind at temperature {temperature:g}",
    )
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.1%}" for value in row))
    table.add_row("tokens written a question", *(f"{value:.0f}" for value in written))
    console = Console()
    console.print(table)
    console.print(
        f"Of the {training * len(TASKS) * 3} answers that the head was trained on {right:.1%} "
        "were right."
    )
    if plot is not None:
        plot_accuracy(rows, plot)


def train_reward_model(llm, folder: Path, count: int, sampling) -> float:
    """Train a reward model that tells right sums from wrong ones, and write it to a folder.

    It is quill with a linear head on the hidden state at the end of an answer. Returns the fraction
    of right answers in the training data.
    """
    from dataclasses import replace

    from quire.model.checkpoint import hub
    from quire.model.checkpoint.safetensors import INDEX, SINGLE, find_tensors, write_tensors
    from quire.serving.request.pooling import PARAMS

    prompts = []
    right = []
    for task in TASKS:
        examples = list(fresh(task, count, seed=1))
        params = [replace(sampling, n=3, seed=number) for number in range(count)]
        for example, output in zip(
            examples, llm.chat([e.messages for e in examples], params, False), strict=True
        ):
            for answer in output.outputs:
                conversation = [*example.messages, {"role": "assistant", "content": answer.text}]
                prompts.append(llm.chat_prompt(conversation, add_generation_prompt=False))
                right.append(score(example, answer.text))
    states = llm.run(prompts, [PARAMS] * len(prompts), False, "last")
    weight_D = fit_logistic(
        np.array([output.pooled for output in states], np.float64), np.array(right, np.float64)
    )
    source = hub.resolve(None)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    head = {"architectures": ["QuillForSequenceClassification"], "num_labels": 1}
    (folder / "config.json").write_text(json.dumps(config | head, indent=2) + "\n")
    value = weight_D[None].astype(np.float32)
    shard_name = f"head-{SINGLE}"
    write_tensors(folder / shard_name, {"score.weight": (value.dtype, value.shape)}, [value])
    places = dict.fromkeys(find_tensors(source), SINGLE) | {"score.weight": shard_name}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return float(np.mean(right))


def fit_logistic(x_ND, y_N, decay: float = 1e-3, steps: int = 12):
    """Logistic regression by Newton's method. Returns the weights without the intercept, which does
    not affect rankings.
    """
    mean_D = x_ND.mean(0)
    spread_D = x_ND.std(0) + 1e-6
    x_NE = np.concatenate([(x_ND - mean_D) / spread_D, np.ones((len(x_ND), 1))], axis=1)
    w_E = np.zeros(x_NE.shape[1])
    for _ in range(steps):
        p_N = 1 / (1 + np.exp(-x_NE @ w_E))
        slope_E = x_NE.T @ (p_N - y_N) / len(y_N) + decay * w_E
        bend_EE = (x_NE * (p_N * (1 - p_N))[:, None]).T @ x_NE / len(y_N) + decay * np.eye(len(w_E))
        w_E -= np.linalg.solve(bend_EE, slope_E)
    return w_E[:-1] / spread_D


def plot_accuracy(rows: dict[str, list[float]], path: Path) -> None:
    """Plot accuracy against the number of candidates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, row in rows.items():
        style: dict[str, Any] = (
            {"color": "#999999", "linestyle": "--"} if name == ONE else {"marker": "o"}
        )
        axes.plot(COUNTS, [100 * value for value in row], label=name, **style)
    axes.set(
        xscale="log", xlabel="answers to each question", ylabel="right answers (%)", ylim=(0, 102)
    )
    axes.set_xticks(COUNTS, list(map(str, COUNTS)))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)
