"""Train quill, the bundled model, from scratch: `python -m tools.quill.train --out runs/quill
--minutes 80`.

On Linux, set GLIBC_TUNABLES=glibc.malloc.hugetlb=1: huge pages make it a third faster, because the
large temporaries of a step otherwise cost a page fault every 4 KB. Ctrl-C or SIGTERM saves a
checkpoint, from which the same command continues.
"""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Annotated, Any

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
from .model import init_lookback_heads, loss_of, predictions

VOCAB = 1280
TOKENS = 4096
WARMUP = 60
RATE = 4e-3
EMA = 0.99
SIZES: dict[str, dict[str, Any]] = {  # arguments of `small_cache_config`
    "quill": {"dim": 192, "num_layers": 8, "heads": 4, "head_dim": 64, "ffn": 512},
    "quill-draft": {"dim": 96, "num_layers": 4, "heads": 2, "head_dim": 64, "ffn": 256},
}
RECALL = 0.97  # recall of values in lists at which the drills end
DRILLED = 0.1  # maximum fraction of the time for drills: quill-draft is too small to reach RECALL
# Row length that holds an example of each task; 256 for all others.
ROW = {"lookup_200": 512, "lookup_400": 1024, "lookup_600": 1024}
# (end as a fraction of the training time, row length -> probability): from short to long rows.
CURRICULUM = [
    (0.4, {256: 1.0}),
    (0.7, {256: 0.95, 512: 0.05}),
    (1.01, {256: 0.7, 512: 0.12, 1024: 0.18}),
]


def model_config(size: str) -> ModelConfig:
    """The config of a size: alternating pairs of window and global layers, each pair with a shared
    KV cache.
    """
    return small_cache_config(
        vocab_size=VOCAB, window=64, global_every=2, max_len=1024, dtype="float32", **SIZES[size]
    )


def muon_dimension_numbers(weights):
    """Muon's dimension numbers: linear weights as matrices; None for norms and the embedding, which
    Adam optimises.
    """
    inputs = {"qkv_DGH": 1, "out_NHD": 2, "up_DGF": 1, "down_FD": 1}

    def numbers(path, leaf):
        if (cut := inputs.get(path[-1].name)) is None:
            return None
        return MuonDimensionNumbers(tuple(range(cut)), tuple(range(cut, leaf.ndim)))

    return jax.tree_util.tree_map_with_path(numbers, weights)


def optimizer():
    """The optimizer with learning rate 1; the training loop scales its updates by a rate that
    depends on the elapsed time.
    """
    scaled = muon(
        1.0,
        weight_decay=0.05,
        adam_b2=0.98,
        muon_weight_dimension_numbers=muon_dimension_numbers,
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), scaled)


def learning_rate(step: int, progress: float) -> float:
    """Warm-up, a plateau, and linear decay over the last third of the time."""
    return RATE * min(1.0, (step + 1) / WARMUP, max(0.02, (1 - progress) / 0.35))


def row_length(rng: Random, progress: float) -> int:
    """Draw the row length of a batch by the curriculum."""
    shares = next(shares for until, shares in CURRICULUM if progress < until)
    return rng.choices(list(shares), list(shares.values()))[0]


def make_step(config: ModelConfig):
    """A compiled training step, which also updates the moving average of weights to export."""
    tx = optimizer()

    def step(state, batch, rate, decay):
        loss, grads = jax.value_and_grad(loss_of)(state["weights"], batch, config)
        updates, opt = tx.update(grads, state["opt"], state["weights"])
        weights = jax.tree.map(lambda w, u: w + rate * u, state["weights"], updates)
        ema = jax.tree.map(lambda e, w: decay * e + (1 - decay) * w, state["ema"], weights)
        return {"weights": weights, "ema": ema, "opt": opt}, loss

    return jax.jit(step, donate_argnums=0)


def accuracy(predict, weights, tokenizer, count: int) -> dict[str, float]:
    """Exact-match accuracy of greedy answers on fresh samples by task, by teacher forcing: every
    token of an answer must be the most likely one.
    """
    judged: dict[str, list[bool]] = {
        task: [] for task in tasks.TASKS if not task.startswith("story")
    }
    lengths = {task: ROW.get(task, 256) for task in judged}
    for length in sorted(set(lengths.values())):
        rows = [[]]
        num_free = length
        for task in (task for task in judged if lengths[task] == length):
            for example in tasks.fresh(task, count if length == 256 else count // 4):
                segments = [(example.text, 0.0), (example.answer + tasks.END, 1.0)]
                encoded = (task, *corpus.encode(tokenizer, segments))
                if len(encoded[1]) > num_free:
                    rows = [*rows, []]
                    num_free = length
                rows[-1].append(encoded)
                num_free -= len(encoded[1])
        size = TOKENS // length
        for start in range(0, len(rows), size):
            batch_rows = rows[start : start + size] + [[]] * max(0, start + size - len(rows))
            batch = corpus.pack([[encoded[1:] for encoded in row] for row in batch_rows], length)
            wrong = np.asarray(predict(weights, batch.tokens, batch.documents)) != batch.targets
            wrong &= batch.weights > 0
            for row, members in enumerate(batch_rows):
                for number, (task, *_) in enumerate(members):
                    judged[task].append(not wrong[row][batch.documents[row] == number + 1].any())
    return {task: sum(right) / len(right) for task, right in judged.items()}


def recall(predict, weights, tokenizer) -> float:
    """The fraction of list values predicted right when their name is repeated."""
    rows = corpus.training_rows(tokenizer, "recall", TOKENS // 256, 256, corpus.DRILLS)
    mask = (rows.tokens == tokenizer.token_to_id(":")) & (rows.weights == 1)
    return float(
        (np.asarray(predict(weights, rows.tokens, rows.documents)) == rows.targets)[mask].mean()
    )


def main(
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints and the exported model.")
    ] = Path("runs/quill"),
    size: Annotated[str, typer.Option(help=f"Model size: {' or '.join(SIZES)}.")] = "quill",
    minutes: Annotated[float, typer.Option(help="Total training time in minutes.")] = 80.0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    check: Annotated[
        float, typer.Option(help="Minutes between checkpoints with evaluations.")
    ] = 5.0,
    tokenizer_file: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", help="tokenizer.json to use; by default one is trained on the corpus."
        ),
    ] = None,
    only_export: Annotated[
        bool, typer.Option("--export", help="Export the latest checkpoint and exit.")
    ] = False,
):
    """Train quill, or continue from the latest checkpoint, and export the model."""
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
    weights = init_lookback_heads(random_arrays(abstract(config), seed), config)
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

    def batch(at: int, progress: float):
        length = row_length(Random(f"length/{seed}/{at}"), progress) if drilled else 256
        mix = corpus.MIX if drilled else corpus.DRILLS
        return corpus.training_rows(tokenizer, f"{seed}/{at}", TOKENS // length, length, mix)

    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with (
        ThreadPoolExecutor(1) as pool,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        line = bar.add_task(
            "training",
            total=minutes * 60,
            completed=elapsed,  # pyright: ignore[reportArgumentType]
        )
        last = time.monotonic()
        losses = []
        checked = elapsed
        following = pool.submit(batch, step, elapsed / 60 / minutes)
        while elapsed < minutes * 60 and not stop:
            progress = elapsed / 60 / minutes
            rows = following.result()
            following = pool.submit(batch, step + 1, progress)
            fields = (rows.tokens, rows.targets, rows.weights, rows.documents)
            state, loss = train(
                state, fields, learning_rate(step, progress), min(EMA, (1 + step) / (10 + step))
            )
            losses.append(float(loss))
            step = step + 1
            now = time.monotonic()
            elapsed = elapsed + now - last
            last = now
            bar.update(line, completed=elapsed, description=f"step {step} loss {losses[-1]:.3f}")
            if not drilled and step % 20 == 0:
                recalled_share = recall(predict, state["weights"], tokenizer)
                drilled = recalled_share >= RECALL or progress > DRILLED
                console.print(
                    f"step {step:6d}  {recalled_share:.0%} of values known", highlight=False
                )
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
                last = time.monotonic()  # evaluation does not count as training time
    save()
    if not stop:
        export(out / "hf", state["ema"], config, tokenizer)
        console.print(
            f"exported to {out / 'hf'}: {accuracy(predict, state['ema'], tokenizer, 256)}"
        )


if __name__ == "__main__":
    typer.run(main)
