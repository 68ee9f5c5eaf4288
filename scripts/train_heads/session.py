"""A folder in which heads are trained: answers, checkpoints, and the heads that come of it."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ...model import draft_heads
from ...model.checkpoint import hub, loader
from ...model.checkpoint.folder import CONFIG, read_json
from ...model.config import ModelConfig, ModelError
from ...model.draft_heads import DraftHeads, DraftHeadsWeights
from ...model.weights import ModelWeights
from ...ops.linear import rows
from .answers import Answers, Rows, batches, load, pack, parts, read_prompts, write
from .beginning import at_dtype, check_kind, first_weights, new_heads
from .lesson import judge, loss_of
from .settings import Settings

GLANCE = 8  # batches of held-out answers at a checkpoint; in the end it is all


class Session:
    """One training, of which several processes may do parts, one after another."""

    def __init__(self, model: str, out: Path, settings: Settings):
        self.folder = hub.resolve(model)
        self.out = out
        self.settings = settings
        self.console = Console()
        self.stop = []
        served = loader.read_config(self.folder)
        # On a CPU float32 is the fastest that can be differentiated.
        self.target = replace(served, dtype="float32") if jax.default_backend() == "cpu" else served
        if settings.length > served.max_len:
            raise ModelError(
                f"length is {settings.length}; the model reads at most {served.max_len} tokens"
            )
        s = settings
        if s.start is None:
            found, self.hf = new_heads(
                s.kind, served, s.heads, s.depth, not s.shared_head, s.draft_vocab
            )
        else:
            check_kind(s.kind)
            found = draft_heads.read_heads(s.start, served, s.kind)
            self.hf = read_json(s.start / CONFIG)
        self.written, self.heads = found, at_dtype(found, self.target.dtype)

    def run(self) -> None:
        """Do what is left to do, until Ctrl-C."""
        self.settings.begin(self.out)
        before = [
            (number, signal.signal(number, self.end)) for number in (signal.SIGINT, signal.SIGTERM)
        ]
        try:
            answers = self.answers()
            if not self.stop:
                self.train(answers)
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def end(self, *_) -> None:
        """Stop after what is under way; when asked again, at once."""
        if self.stop:
            raise KeyboardInterrupt
        self.stop.append(True)

    def bar(self) -> Progress:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        return Progress(*columns, console=self.console, disable=not self.console.is_terminal)

    def answers(self) -> Answers:
        """What the model has written, and what it writes now where that is not all."""
        s = self.settings
        path = self.out / "answers.npz"
        prompts: list[Any] = [] if s.prompts is None else read_prompts(s.prompts)
        count = len(prompts) or s.samples
        found = load(path)
        if len(found) >= count:
            return found
        from ... import LLM

        with LLM(str(self.folder)) as llm, self.bar() as bar:
            line = bar.add_task("answers", total=count)

            def told(number: int) -> bool:
                bar.update(line, completed=number)
                return not self.stop

            drawn = {} if s.temperature is None else {"temperature": s.temperature}
            params = replace(llm.get_default_sampling_params(), max_tokens=s.max_tokens, **drawn)
            asked = prompts or [{"prompt_token_ids": beginning(llm)}] * count
            found = write(llm, asked, path, params, s.greedy if prompts else 0.0, s.seed, told)
        self.console.print(
            f"{len(found)} answers, {len(found.tokens) - found.prompts.sum():,} tokens",
            highlight=False,
        )
        return found

    def train(self, answers: Answers) -> None:
        s = self.settings
        console = self.console
        learned, held = halves(len(answers), s.held_out)
        config = self.target
        weights = with_dense_head(loader.load(self.folder, self.target, skip_packing=True))
        if s.start is None:
            own = first_weights(self.heads, weights, answers, s.seed)
        else:
            own = draft_heads.load(s.start, self.heads, skip_packing=True)
        tokens_U, own = own.tokens_U, master(own.replace(tokens_U=None))
        tx = optimizer(s)
        state = {"own": own, "opt": tx.init(own)}
        step = 0
        manager = ocp.CheckpointManager(
            (self.out / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2),
        )
        if (latest := manager.latest_step()) is not None:
            state = manager.restore(latest, args=ocp.args.StandardRestore(state))
            step = latest
        count = sum(leaf.size for leaf in jax.tree.leaves(own))
        console.print(
            f"{s.kind}: {count / 1e6:.2f} M parameters; step {step} of {s.steps}", highlight=False
        )
        places = self.heads.count if s.kind == "medusa" else s.places
        train = make_step(self.heads, config, tx, places)
        look = jax.jit(
            lambda own, weights, batch: judge(self.heads, own, weights, config, batch, places + 1)
        )

        def save() -> None:
            if manager.latest_step() != step:
                manager.save(step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()

        def trial(most: int | None) -> list[tuple[int, int]]:
            given = cast(self.heads, state["own"], tokens_U)
            every = parts(pack(answers, held, s.length), s.rows)
            return added(look(given, weights, batch) for batch in islice(every, most))

        with self.bar() as bar:
            line = bar.add_task("training", total=s.steps, completed=step)
            losses = []
            for batch in islice(
                batches(answers, learned, s.length, s.rows, s.seed, step), s.steps - step
            ):
                if self.stop:
                    break
                state, loss = train(state, tokens_U, weights, batch)
                losses.append(float(loss))
                step += 1
                bar.update(line, completed=step, description=f"loss {losses[-1]:.3f}")
                if step % s.check == 0 and step < s.steps:
                    save()
                    shares = "  ".join(
                        f"{right / max(asked, 1):.1%}" for right, asked in trial(GLANCE)
                    )
                    mean = sum(losses[-s.check :]) / len(losses[-s.check :])
                    console.print(
                        f"step {step:6d}  loss {mean:.4f}  accepted {shares}", highlight=False
                    )
        save()
        if step < s.steps:
            console.print(f"stopped at step {step}; the same command goes on", highlight=False)
            return
        self.show(trial(None))
        finished = cast(self.written, state["own"], tokens_U)
        draft_heads.save(self.out / "heads", self.written, finished, self.hf)
        size = sum(file.stat().st_size for file in (self.out / "heads").iterdir())
        console.print(f"wrote {self.out / 'heads'}: {size / 2**20:.2f} MiB", highlight=False)

    def show(self, found: list[tuple[int, int]]) -> None:
        """A table of what would be accepted of drafts by the likeliest token, on answers that were
        held out.
        """
        table = Table(
            "place ahead", "accepted", "of those whose drafts before were", title="held-out answers"
        )
        before = 1.0
        for place, (right, asked) in enumerate(found, 1):
            share = right / max(asked, 1)
            table.add_row(str(place), f"{share:.1%}", f"{share / before:.1%}" if before else "")
            before = share
        self.console.print(table)


def with_dense_head(weights: ModelWeights) -> ModelWeights:
    """The model with its output matrix as an array: rows that are rounded to int8 for a product
    have no gradient.
    """
    tied = weights.head_VD is None
    table: Any = weights.embed_VD if tied else weights.head_VD
    dense_VD = table[jnp.arange(rows(table))]
    return weights.replace(embed_VD=dense_VD) if tied else weights.replace(head_VD=dense_VD)


def beginning(llm: Any) -> list[int]:
    """The token that a text begins with."""
    if (found := llm.get_tokenizer().bos_token_id) is None:
        raise ModelError(
            "the model has no token that texts begin with, so it needs prompts: give --prompts"
        )
    return [found]


def halves(count: int, held_out: float) -> tuple[list[int], list[int]]:
    """(the documents to learn from, those that are held out, evenly among all)."""
    every = max(2, round(1 / held_out))
    held = list(range(every - 1, count, every)) or [count - 1]
    if count < 2:
        raise ModelError(
            f"there are {count} answers; two are the least: one to learn from, and one that is "
            "held out"
        )
    return [number for number in range(count) if number not in set(held)], held


def master(own: DraftHeadsWeights) -> DraftHeadsWeights:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), own)


def cast(heads: DraftHeads, own: DraftHeadsWeights, tokens_U) -> DraftHeadsWeights:
    """The weights in the dtypes that they are computed with."""
    specs = draft_heads.abstract(heads).replace(tokens_U=None)
    return jax.tree.map(lambda spec, leaf: leaf.astype(spec.dtype), specs, own).replace(
        tokens_U=tokens_U
    )


def optimizer(s: Settings) -> optax.GradientTransformation:
    """AdamW; matrices decay, norms and biases do not."""
    warmup = min(s.warmup, s.steps - 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, s.rate, warmup, s.steps, s.rate / 50)

    def matrices(own):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, own)

    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.01, mask=matrices)
    )


def make_step(heads: DraftHeads, config: ModelConfig, tx, places: int) -> Callable[..., Any]:
    def step(state, tokens_U, weights, batch: Rows):
        def loss(own):
            return loss_of(judge(heads, cast(heads, own, tokens_U), weights, config, batch, places))

        value, slope = jax.value_and_grad(loss)(state["own"])
        updates, opt = tx.update(slope, state["opt"], state["own"])
        return {"own": optax.apply_updates(state["own"], updates), "opt": opt}, value

    return jax.jit(step, donate_argnums=0)


def added(found: Iterator[Any]) -> list[tuple[int, int]]:
    """(right, asked) at each place, of all batches."""
    sums: np.ndarray | None = None
    for one in found:
        counts = np.asarray([(int(place.right), int(place.asked)) for place in one])
        sums = counts if sums is None else sums + counts
    return [] if sums is None else [tuple(row) for row in sums.tolist()]
