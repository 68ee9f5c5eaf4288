"""The whole decode step of a model with random weights: its time against its bytes, and the tokens
it samples.
"""

import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ...serving.api.params import SamplingParams
from ...serving.device.step_shape import Size, choose
from ...serving.engine.runner import Runner
from ...serving.engine.scheduler import ScheduledSequence, StepPlan
from ...serving.request.sequence import Sequence
from .common import PAGE, CheckSizes, PartReport, copy_rate, make_runner, noise, timed
from .shapes import SHAPES
from .step_time import GOALS, least

# of hidden states, once through all layers in bfloat16; those of another context differ by 1
LARGEST_DIFFERENCE = 0.15


def run(
    report: PartReport, scale: CheckSizes, seed: int, attention: str, batches: tuple[int, ...] = ()
) -> None:
    """Time the step at each batch size, and compare its results with those of the other
    attention.
    """
    batches = batches or scale.batches
    copy = copy_rate(scale.copied)
    name = scale.kernel if attention == "kernel" else attention
    report(f"attention: {name}; copy {copy / 1e12:.2f} TB/s", attention=name, copy=copy)
    started = time.perf_counter()
    runner = make_runner(
        scale,
        scale.context + scale.steps,
        lambda sizes: [choose(sizes, batch, batch, batch, True) for batch in batches],
        name,
        seed,
    )
    took = time.perf_counter() - started
    report(f"weights made and steps compiled in {took:.0f} s", ready=took)
    for batch in batches:
        measure(report, scale, runner, batch, seed, copy)


def experts(report: PartReport, scale: CheckSizes, seed: int, attention: str) -> None:
    """The same of a mixture of experts, with the most sequences."""
    run(report, replace(scale, hf=scale.experts), seed, attention, scale.batches[-1:])


def measure(
    report: PartReport, scale: CheckSizes, runner: Runner, batch: int, seed: int, copy: float
) -> None:
    fill(runner, seed)
    sent = decode_steps(runner, scale, batch, seed)
    launches = []

    def burst(branches: bool = False) -> list:
        started = time.perf_counter()
        found = []
        for size, program, buffer in sent:
            compiled = runner.compiled[size] if branches else program
            sampled, hidden_RD, runner.state = compiled(runner.weights, runner.state, buffer)
            found.append((sampled.tokens_R, hidden_RD))
        launches.append((time.perf_counter() - started) / len(sent))
        return found

    def median(branches: bool) -> tuple[float, float]:
        """Seconds of a step, and of the host's launch."""
        burst(branches)
        launches.clear()
        whole = [timed(lambda: burst(branches)) / len(sent) for _ in range(5)]
        return float(np.median(whole)), float(np.median(launches))

    steps = burst()
    drawn = np.stack([np.asarray(tokens_R)[:batch] for tokens_R, _ in steps])
    first = np.asarray(steps[0][1], np.float32)[:batch]
    if not (drawn >= 0).all() or not np.isfinite(first).all():
        report.wrong(f"batch {batch}: a row is not a number")
    seconds, launch = median(False)
    slow, slow_launch = median(True)
    moved, _ = least(runner.config, batch, batch, scale.context + len(sent) // 2)
    share = moved / seconds / copy
    (model,) = [model for model, hf in SHAPES.items() if hf["model_type"] == scale.hf["model_type"]]
    name = f"{model}, bf16, batch {batch}"
    report(
        f"batch {batch:3}: {seconds * 1e3:8.3f} ms a step, {share:6.1%} of the roof; to reach {GOALS.get(name, '-')}\n"
        # To launch one takes as long as a step where the step waits for the host.
        f"           launched in {launch * 1e3:.3f} ms; with sampling's branches {slow * 1e3:.3f} ms a step, "
        f"launched in {slow_launch * 1e3:.3f}",
        **{
            f"batch {batch}": {"seconds": seconds, "launch": launch, "bytes": moved, "share": share}
        },
        **{f"batch {batch} with branches": {"seconds": slow, "launch": slow_launch}},
    )
    compare(report, name, drawn, first)


def compare(report: PartReport, name: str, drawn: np.ndarray, hidden: np.ndarray) -> None:
    """Save the results of the first step of a name; compare those of later ones with them."""
    kept = report.file.with_name(f"{name}.npz")
    if not kept.exists():
        np.savez(kept, drawn=drawn, hidden=hidden)
        return
    with np.load(kept) as other:
        error = float(np.linalg.norm(hidden - other["hidden"]) / np.linalg.norm(other["hidden"]))
        same = [float((drawn[:n] == other["drawn"][:n]).mean()) for n in (1, len(drawn))]
    if not error < LARGEST_DIFFERENCE:
        report.wrong(f"{name}: hidden states differ by {error:.2f} from those of the other step")
    report(
        f"           against the step before: hidden states differ by {error:.1e}, {same[0]:.0%} "
        f"of the first tokens and {same[1]:.0%} of {len(drawn)} are the same",
        **{f"{name}, compared": {"hidden": error, "first_tokens": same[0], "tokens": same[1]}},
    )


def fill(runner: Runner, seed: int) -> None:
    """Fill the cache with random numbers; keys so large that a query attends to few of them, as in
    a real model.
    """
    leaves, tree = jax.tree.flatten(runner.state.pages)
    likes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    for leaf in leaves:
        leaf.delete()  # the new ones need the memory
    keys = jax.random.split(jax.random.key(seed), len(likes))
    pages = [
        noise(key, like, 1.0 if i % 2 else 3.0)
        for i, (key, like) in enumerate(zip(keys, likes, strict=True))
    ]
    runner.state = runner.state.replace(pages=tree.unflatten(pages))


def decode_steps(
    runner: Runner, scale: CheckSizes, batch: int, seed: int
) -> list[tuple[Size, Any, jax.Array]]:
    """Consecutive decode steps: size, program, and arrays on the device, so that host time does not
    count.
    """
    rng = np.random.default_rng(seed)
    width = -(-(scale.context + scale.steps) // PAGE)
    pages = 1 + rng.permutation(batch * width).reshape(batch, width)
    seqs = []
    for slot in range(batch):
        tokens = rng.integers(0, runner.config.vocab_size, scale.context).tolist()
        seq = Sequence(
            0, tokens, scale.context, SamplingParams(temperature=0, ignore_eos=True), scale.steps, 0
        )
        seq.slot, seq.cache.pages = slot, [pages[slot].tolist()]
        runner.assign(seq, scale.context - 1)
        seqs.append(seq)
    sent = []
    for step in range(scale.steps):
        at = scale.context - 1 + step
        part = tuple(ScheduledSequence(seq, at, 1, True, not step) for seq in seqs)
        size, buffer = runner.batch_builder.build(StepPlan((part,)))
        sent.append(
            (size, runner.program(size, runner.batch_builder.draws_plainly), jax.device_put(buffer))
        )
    jax.block_until_ready([buffer for *_, buffer in sent])
    return sent
