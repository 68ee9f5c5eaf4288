"""Train quill, the bundled model, from nothing: `python -m tools.quill.train --out runs/quill
--minutes 80`.

Start it with GLIBC_TUNABLES=glibc.malloc.hugetlb=1 on Linux: a third faster, for the big
temporaries of a step otherwise cost a page fault every 4 KB. Stopped by Ctrl-C or SIGTERM it saves
and can be started again.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import typer
from optax.contrib import MuonDimensionNumbers, muon
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from quire.model.config import ModelConfig
from quire.model.families.quill import small_cache_config
from quire.model.weights import abstract
from quire.sharding.spec import random_arrays

from . import corpus as corpus
from . import tasks as tasks
from .export import export
from .model import looking_back, loss_of, predictions

VOCAB = 1280
TOKENS = 4096
WARMUP = 60
RATE = 4e-3
EMA = 0.99
SIZES = {
    "quill": {"dim": 192, "num_layers": 8, "heads": 4, "head_dim": 64, "ffn": 512},
    "quill-draft": {"dim": 96, "num_layers": 4, "heads": 2, "head_dim": 64, "ffn": 256},
}
RECALL = 0.97  # of the values in lists are known: then drills have done their work
DRILLED = 0.1  # of the time at most: quill-draft is too small to get there
# a row that holds one; 256 holds the others
ROW = {"lookup_200": 512, "lookup_400": 1024, "lookup_600": 1024}
# (until this part of the time, how often a batch has rows of each length): short first, the long
# ones last.
CURRICULUM = [
    (0.4, {256: 1.0}),
    (0.7, {256: 0.95, 512: 0.05}),
    (1.01, {256: 0.7, 512: 0.12, 1024: 0.18}),
]


def model_config(size: str) -> ModelConfig:
    """The small-cache recipe at one of the two sizes: windows and global layers in pairs that share
    one cache.
    """
    return small_cache_config(
        vocab_size=VOCAB, window=64, global_every=2, max_len=1024, dtype="float32", **SIZES[size]
    )


def matrices(weights):
    """Muon takes every weight that maps one space to another, seen as a matrix; Adam the norms and
    the embedding.
    """
    inputs = {"qkv_DGH": 1, "out_NHD": 2, "up_DGF": 1, "down_FD": 1}

    def numbers(path, leaf):
        if (cut := inputs.get(path[-1].name)) is None:
            return None
        return MuonDimensionNumbers(tuple(range(cut)), tuple(range(cut, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(numbers, weights)


def optimizer():
    """Updates for a learning rate of one; the loop scales them, since the rate follows the
    clock.
    """
    scaled = muon(
        1.0,
        weight_decay=0.05,
        adam_b2=0.98,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), scaled)


def learning_rate(step: int, done: float) -> float:
    """Warm-up, a plateau, and a linear way down over the last third of the time."""
    return RATE * min(1.0, (step + 1) / WARMUP, max(0.02, (1 - done) / 0.35))


def row_length(rng: Random, done: float) -> int:
    """The length of the rows of a batch, by the curriculum."""
    shares = next(shares for until, shares in CURRICULUM if done < until)
    return rng.choices(list(shares), list(shares.values()))[0]


def make_step(config: ModelConfig):
    """One step: gradients, update, and the moving average that is what gets exported."""
    tx = optimizer()

    def step(state, batch, rate, decay):
        loss, grads = jax.value_and_grad(loss_of)(state["weights"], batch, config)
        updates, opt = tx.update(grads, state["opt"], state["weights"])
        weights = jax.tree.map(lambda w, u: w + rate * u, state["weights"], updates)
        ema = jax.tree.map(lambda e, w: decay * e + (1 - decay) * w, state["ema"], weights)
        return {"weights": weights, "ema": ema, "opt": opt}, loss

    return jax.jit(step, donate_argnums=0)


def accuracy(predict, weights, tokenizer, count: int) -> dict[str, float]:
    """Exact matches of greedy answers on fresh samples, in one pass: every token of an answer must
    be the best one.
    """
    judged: dict[str, list[bool]] = {
        task: [] for task in tasks.TASKS if not task.startswith("story")
    }
    lengths = {task: ROW.get(task, 256) for task in judged}
    for length in sorted(set(lengths.values())):
        rows = [[]]
        room = length
        for task in (task for task in judged if lengths[task] == length):
            for example in tasks.fresh(task, count if length == 256 else count // 4):
                parts = [(example.text, 0.0), (example.answer + tasks.END, 1.0)]
                one = (task, *corpus.encode(tokenizer, parts))
                if len(one[1]) > room:
                    rows = [*rows, []]
                    room = length
                rows[-1].append(one)
                room -= len(one[1])
        size = TOKENS // length
        for start in range(0, len(rows), size):
            some = rows[start : start + size] + [[]] * max(0, start + size - len(rows))
            batch = corpus.pack([[one[1:] for one in row] for row in some], length)
            wrong = np.asarray(predict(weights, batch.tokens, batch.documents)) != batch.targets
            wrong &= batch.weights > 0
            for row, members in enumerate(some):
                for number, (task, *_) in enumerate(members):
                    judged[task].append(not wrong[row][batch.documents[row] == number + 1].any())
    return {task: sum(right) / len(right) for task, right in judged.items()}


def recall(predict, weights, tokenizer) -> float:
    """The share of values in lists that are known when their name comes again."""
    rows = corpus.training_rows(tokenizer, "recall", TOKENS // 256, 256, corpus.DRILLS)
    asked = (rows.tokens == tokenizer.token_to_id(":")) & (rows.weights == 1)
    return float(
        (np.asarray(predict(weights, rows.tokens, rows.documents)) == rows.targets)[asked].mean()
    )


def main(
    out: Annotated[Path, typer.Option(help="folder for checkpoints and the exported model")] = Path(
        "runs/quill"
    ),
    size: Annotated[str, typer.Option(help=f"one of {', '.join(SIZES)}")] = "quill",
    minutes: Annotated[float, typer.Option(help="training time, all sessions together")] = 80.0,
    seed: int = 0,
    check: Annotated[
        float, typer.Option(help="minutes between checkpoints, each with its accuracy")
    ] = 5.0,
    tokenizer_file: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", help="a tokenizer.json to use; else one is trained on the corpus"
        ),
    ] = None,
    only_export: Annotated[
        bool, typer.Option("--export", help="export the latest checkpoint and stop")
    ] = False,
):
    """Train, checkpoint, resume, export."""
    if size not in SIZES:
        raise typer.BadParameter(
            f"{size!r} is not a size; it can be {' or '.join(SIZES)}", param_hint="--size"
        )
    console = Console()
    config = model_config(size)
    tokenizer = (
        Tokenizer.from_file(str(tokenizer_file))
        if tokenizer_file
        else corpus.train_tokenizer(VOCAB)
    )
    manager = ocp.CheckpointManager(
        (out / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)
    )
    weights = looking_back(random_arrays(abstract(config), seed), config)
    state = {
        "weights": weights,
        "ema": jax.tree.map(jnp.copy, weights),
        "opt": optimizer().init(weights),
    }
    step = 0
    elapsed = 0.0
    drilled = False
    latest = manager.latest_step()
    if latest is not None:
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(state), meta=ocp.args.JsonRestore()
        )
        restored = manager.restore(latest, args=args)
        meta = restored["meta"]
        state = restored["state"]
        step = latest
        elapsed = meta["elapsed"]
        drilled = meta["drilled"]
    if only_export:
        if latest is None:
            raise typer.BadParameter(f"{out} holds no checkpoint yet", param_hint="--out")
        export(out / "hf", state["ema"], config, tokenizer)
        console.print(f"step {step} is in {out / 'hf'}")
        return
    count = sum(leaf.size for leaf in jax.tree.leaves(weights))
    console.print(
        f"{size}: {count / 1e6:.2f} M parameters; step {step}, {elapsed / 60:.0f} of {minutes:.0f} "
        "minutes done"
    )

    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.append(True))
    train = make_step(config)
    predict = jax.jit(lambda w, tokens, documents: predictions(w, tokens, documents, config))

    def save():
        meta = ocp.args.JsonSave({"elapsed": elapsed, "drilled": drilled})
        manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=meta))
        manager.wait_until_finished()

    def batch(at: int, done: float):
        length = row_length(Random(f"length/{seed}/{at}"), done) if drilled else 256
        mix = corpus.MIX if drilled else corpus.DRILLS
        return corpus.training_rows(tokenizer, f"{seed}/{at}", TOKENS // length, length, mix)

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with (
        ThreadPoolExecutor(1) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        line = bar.add_task("training", total=minutes * 60, completed=elapsed)
        last = time.monotonic()
        losses = []
        checked = elapsed
        following = pool.submit(batch, step, elapsed / 60 / minutes)
        while elapsed < minutes * 60 and not stop:
            done = elapsed / 60 / minutes
            rows = following.result()
            following = pool.submit(batch, step + 1, done)
            fields = (rows.tokens, rows.targets, rows.weights, rows.documents)
            state, loss = train(
                state, fields, learning_rate(step, done), min(EMA, (1 + step) / (10 + step))
            )
            losses.append(float(loss))
            step = step + 1
            now = time.monotonic()
            elapsed = elapsed + now - last
            last = now
            bar.update(line, completed=elapsed, description=f"step {step} loss {losses[-1]:.3f}")
            if not drilled and step % 20 == 0:
                known = recall(predict, state["weights"], tokenizer)
                drilled = known >= RECALL or done > DRILLED
                console.print(f"step {step:6d}  {known:.0%} of values known", highlight=False)
            if step % 50 == 0:
                mean = sum(losses[-50:]) / len(losses[-50:])
                console.print(
                    f"step {step:6d}  {elapsed / 60:6.1f} min  loss {mean:.4f}", highlight=False
                )
            if elapsed - checked > check * 60:
                checked = elapsed
                save()
                scores = accuracy(predict, state["ema"], tokenizer, 64)
                console.print(
                    "  ".join(f"{task} {value:.0%}" for task, value in scores.items()),
                    highlight=False,
                )
                last = time.monotonic()  # judging is not training time
    save()
    if not stop:
        export(out / "hf", state["ema"], config, tokenizer)
        console.print(
            f"exported to {out / 'hf'}: {accuracy(predict, state['ema'], tokenizer, 256)}"
        )


if __name__ == "__main__":
    typer.run(main)
