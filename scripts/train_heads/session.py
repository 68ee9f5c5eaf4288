"""Training of draft heads in a folder that holds the answers, checkpoints and trained heads."""

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
from .answers import Answers, Rows, batches, load, pack, read_prompts, split_rows, write
from .initial_heads import check_kind, first_weights, new_heads, with_dtype
from .loss import mean_loss, score_drafts
from .settings import Settings

GLANCE = 8  # batches of held-out answers to evaluate at a checkpoint; at the end, all


class Session:
    """A training run, which can be stopped and continued by another process."""

    def __init__(self, model: str, out: Path, settings: Settings):
        self.folder = hub.resolve(model)
        self.out = out
        self.settings = settings
        self.console = Console()
        self.stop = []
        served = loader.read_config(self.folder)
        # On CPUs, float32 is the fastest differentiable dtype.
        self.target = replace(served, dtype="float32") if jax.default_backend() == "cpu" else served
        if settings.length > served.max_len:
            raise ModelError(
                f"length is {settings.length}; the model reads at most {served.max_len} tokens"
            )
        s = settings
        if s.start is None:
            heads, self.hf = new_heads(
                s.kind, served, s.heads, s.depth, not s.shared_head, s.draft_vocab
            )
        else:
            check_kind(s.kind)
            heads = draft_heads.read_heads(s.start, served, s.kind)
            self.hf = read_json(s.start / CONFIG)
        self.written = heads
        self.heads = with_dtype(heads, self.target.dtype)

    def run(self) -> None:
        """Generate answers and train, from where the last run stopped, until done or Ctrl-C."""
        self.settings.begin(self.out)
        previous_handlers = [
            (number, signal.signal(number, self.end)) for number in (signal.SIGINT, signal.SIGTERM)
        ]
        try:
            answers = self.answers()
            if not self.stop:
                self.train(answers)
        finally:
            for number, handler in previous_handlers:
                signal.signal(number, handler)

    def end(self, *_) -> None:
        """Signal handler: stop after the current step; on the second signal, at once."""
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
        """Load the saved answers, and generate those that are missing."""
        s = self.settings
        path = self.out / "answers.npz"
        prompts: list[Any] = [] if s.prompts is None else read_prompts(s.prompts)
        count = len(prompts) or s.samples
        answers = load(path)
        if len(answers) >= count:
            return answers
        from ... import LLM

        with LLM(str(self.folder)) as llm, self.bar() as bar:
            line = bar.add_task("answers", total=count)

            def on_progress(number: int) -> bool:
                bar.update(line, completed=number)
                return not self.stop

            overrides = {} if s.temperature is None else {"temperature": s.temperature}
            params = replace(
                llm.get_default_sampling_params(), max_tokens=s.max_tokens, **overrides
            )
            prompts = prompts or [{"prompt_token_ids": bos_prompt(llm)}] * count
            greedy = 0.0 if s.prompts is None else s.greedy
            answers = write(llm, prompts, path, params, greedy, s.seed, on_progress)
        self.console.print(
            f"{len(answers)} answers, {len(answers.tokens) - answers.prompts.sum():,} tokens",
            highlight=False,
        )
        return answers

    def train(self, answers: Answers) -> None:
        s = self.settings
        console = self.console
        training, held_out = split_held_out(len(answers), s.held_out)
        config = self.target
        weights = with_dense_head(loader.load(self.folder, self.target, skip_packing=True))
        if s.start is None:
            head_weights = first_weights(self.heads, weights, answers, s.seed)
        else:
            head_weights = draft_heads.load(s.start, self.heads, skip_packing=True)
        tokens_U = head_weights.tokens_U
        head_weights = to_float32(head_weights.replace(tokens_U=None))
        tx = optimizer(s)
        # Optax's Params leave out classes that are pytrees.
        opt = tx.init(head_weights)  # pyright: ignore[reportArgumentType]
        state = {"own": head_weights, "opt": opt}
        step = 0
        manager = ocp.CheckpointManager(
            (self.out / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=2),
        )
        if (latest := manager.latest_step()) is not None:
            state = manager.restore(latest, args=ocp.args.StandardRestore(state))
            step = latest
        count = sum(leaf.size for leaf in jax.tree.leaves(head_weights))
        console.print(
            f"{s.kind}: {count / 1e6:.2f} M parameters; step {step} of {s.steps}", highlight=False
        )
        places = self.heads.count if s.kind == "medusa" else s.places
        train = make_step(self.heads, config, tx, places)
        score_batch = jax.jit(
            lambda head_weights, weights, batch: score_drafts(
                self.heads, head_weights, weights, config, batch, places + 1
            )
        )

        def save() -> None:
            if manager.latest_step() != step:
                manager.save(step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()

        def evaluate(max_batches: int | None) -> list[tuple[int, int]]:
            eval_weights = cast(self.heads, state["own"], tokens_U)
            held_out_batches = split_rows(pack(answers, held_out, s.length), s.rows)
            return sum_scores(
                score_batch(eval_weights, weights, batch)
                for batch in islice(held_out_batches, max_batches)
            )

        with self.bar() as bar:
            line = bar.add_task("training", total=s.steps, completed=step)
            losses = []
            for batch in islice(
                batches(answers, training, s.length, s.rows, s.seed, step), s.steps - step
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
                        f"{num_accepted / max(num_drafted, 1):.1%}"
                        for num_accepted, num_drafted in evaluate(GLANCE)
                    )
                    mean = sum(losses[-s.check :]) / len(losses[-s.check :])
                    console.print(
                        f"step {step:6d}  loss {mean:.4f}  accepted {shares}", highlight=False
                    )
        save()
        if step < s.steps:
            console.print(f"stopped at step {step}; the same command goes on", highlight=False)
            return
        self.show(evaluate(None))
        finished = cast(self.written, state["own"], tokens_U)
        draft_heads.save(self.out / "heads", self.written, finished, self.hf)
        size = sum(file.stat().st_size for file in (self.out / "heads").iterdir())
        console.print(f"wrote {self.out / 'heads'}: {size / 2**20:.2f} MiB", highlight=False)

    def show(self, counts: list[tuple[int, int]]) -> None:
        """Print acceptance rates of greedy drafts by draft position, on the held-out answers."""
        table = Table(
            "place ahead", "accepted", "of those whose drafts before were", title="held-out answers"
        )
        previous_share = 1.0
        for place, (num_accepted, num_drafted) in enumerate(counts, 1):
            share = num_accepted / max(num_drafted, 1)
            table.add_row(
                str(place),
                f"{share:.1%}",
                f"{share / previous_share:.1%}" if previous_share else "",
            )
            previous_share = share
        self.console.print(table)


def with_dense_head(weights: ModelWeights) -> ModelWeights:
    """Dequantise the output matrix, because products with int8 activations have no gradient."""
    tied = weights.head_VD is None
    table: Any = weights.embed_VD if tied else weights.head_VD
    dense_VD = table[jnp.arange(rows(table))]
    return weights.replace(embed_VD=dense_VD) if tied else weights.replace(head_VD=dense_VD)


def bos_prompt(llm: Any) -> list[int]:
    """A prompt of the BOS token alone, for unconditional generation."""
    if (bos_token_id := llm.get_tokenizer().bos_token_id) is None:
        raise ModelError(
            "the model has no token that texts begin with, so it needs prompts: give --prompts"
        )
    return [bos_token_id]


def split_held_out(count: int, held_out: float) -> tuple[list[int], list[int]]:
    """(numbers of the training documents, numbers of the held-out documents, evenly spaced)."""
    period = max(2, round(1 / held_out))
    held_out_numbers = list(range(period - 1, count, period)) or [count - 1]
    if count < 2:
        raise ModelError(
            f"there are {count} answers; two are the least: one to learn from, and one that is "
            "held out"
        )
    return [
        number for number in range(count) if number not in set(held_out_numbers)
    ], held_out_numbers


def to_float32(head_weights: DraftHeadsWeights) -> DraftHeadsWeights:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), head_weights)


def cast(heads: DraftHeads, head_weights: DraftHeadsWeights, tokens_U) -> DraftHeadsWeights:
    """Cast the float32 master weights to the dtypes that the heads compute in."""
    specs = draft_heads.abstract(heads).replace(tokens_U=None)
    return jax.tree.map(lambda spec, leaf: leaf.astype(spec.dtype), specs, head_weights).replace(
        tokens_U=tokens_U
    )


def optimizer(s: Settings) -> optax.GradientTransformation:
    """AdamW with a cosine schedule; weight decay applies to matrices, not to norms and biases."""
    warmup = min(s.warmup, s.steps - 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, s.rate, warmup, s.steps, s.rate / 50)

    def is_matrix(head_weights):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, head_weights)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b2=0.95, weight_decay=0.01, mask=is_matrix),
    )


def make_step(heads: DraftHeads, config: ModelConfig, tx, places: int) -> Callable[..., Any]:
    def step(state, tokens_U, weights, batch: Rows):
        def loss(head_weights):
            return mean_loss(
                score_drafts(
                    heads, cast(heads, head_weights, tokens_U), weights, config, batch, places
                )
            )

        value, gradient = jax.value_and_grad(loss)(state["own"])
        updates, opt = tx.update(gradient, state["opt"], state["own"])
        return {"own": optax.apply_updates(state["own"], updates), "opt": opt}, value

    return jax.jit(step, donate_argnums=0)


def sum_scores(batch_scores: Iterator[Any]) -> list[tuple[int, int]]:
    """(accepted drafts, drafts) at each draft position, summed over all batches."""
    sums: np.ndarray | None = None
    for scores in batch_scores:
        counts = np.asarray([(int(score.num_accepted), int(score.num_drafted)) for score in scores])
        sums = counts if sums is None else sums + counts
    return [] if sums is None else [tuple(row) for row in sums.tolist()]
