"""The whole decode step of a model with random weights: its time relative to the bytes it reads,
and its results compared between attention implementations.
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

# Maximum relative difference of final hidden states in bfloat16; unrelated ones differ by about 1.
LARGEST_DIFFERENCE = 0.15


def run(
    report: PartReport, scale: CheckSizes, seed: int, attention: str, batches: tuple[int, ...] = ()
) -> None:
    """Time the step at each batch size, and compare its results with the other attention's."""
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
    """`run` for a mixture of experts at the largest batch size."""
    run(report, replace(scale, hf=scale.experts), seed, attention, scale.batches[-1:])


def measure(
    report: PartReport, scale: CheckSizes, runner: Runner, batch: int, seed: int, copy: float
) -> None:
    fill(runner, seed)
    sent = decode_steps(runner, scale, batch, seed)
    launches = []

    def burst(branches: bool = False) -> list:
        started = time.perf_counter()
        outputs = []
        for size, program, buffer in sent:
            compiled = runner.compiled[size] if branches else program
            sampled, hidden_RD, runner.state = compiled(runner.weights, runner.state, buffer)
            outputs.append((sampled.tokens_R, hidden_RD))
        launches.append((time.perf_counter() - started) / len(sent))
        return outputs

    def median(branches: bool) -> tuple[float, float]:
        """Median (seconds of a step, seconds of the host to launch it)."""
        burst(branches)
        launches.clear()
        step_seconds = [timed(lambda: burst(branches)) / len(sent) for _ in range(5)]
        return float(np.median(step_seconds)), float(np.median(launches))

    steps = burst()
    token_ids = np.stack([np.asarray(tokens_R)[:batch] for tokens_R, _ in steps])
    first = np.asarray(steps[0][1], np.float32)[:batch]
    if not (token_ids >= 0).all() or not np.isfinite(first).all():
        report.wrong(f"batch {batch}: a row is not a number")
    seconds, launch = median(False)
    slow, slow_launch = median(True)
    moved, _ = least(runner.config, batch, batch, scale.context + len(sent) // 2)
    share = moved / seconds / copy
    (model,) = [model for model, hf in SHAPES.items() if hf["model_type"] == scale.hf["model_type"]]
    name = f"{model}, bf16, batch {batch}"
    report(
        f"batch {batch:3}: {seconds * 1e3:8.3f} ms a step, {share:6.1%} of the roof; to reach {GOALS.get(name, '-')}\n"
        # If the launch takes as long as the step, the device waits for the host.
        f"           launched in {launch * 1e3:.3f} ms; with sampling's branches {slow * 1e3:.3f} ms a step, "
        f"launched in {slow_launch * 1e3:.3f}",
        **{
            f"batch {batch}": {"seconds": seconds, "launch": launch, "bytes": moved, "share": share}
        },
        **{f"batch {batch} with branches": {"seconds": slow, "launch": slow_launch}},
    )
    compare(report, name, token_ids, first)


def compare(report: PartReport, name: str, token_ids: np.ndarray, hidden: np.ndarray) -> None:
    """Compare the results with those that an earlier part saved under `name`, or save them."""
    reference_path = report.file.with_name(f"{name}.npz")
    if not reference_path.exists():
        np.savez(reference_path, drawn=token_ids, hidden=hidden)
        return
    with np.load(reference_path) as reference:
        difference = np.linalg.norm(hidden - reference["hidden"])
        error = float(difference / np.linalg.norm(reference["hidden"]))
        agreement = [
            float((token_ids[:n] == reference["drawn"][:n]).mean()) for n in (1, len(token_ids))
        ]
    if not error < LARGEST_DIFFERENCE:
        report.wrong(f"{name}: hidden states differ by {error:.2f} from those of the other step")
    report(
        f"           against the step before: hidden states differ by {error:.1e}, "
        f"{agreement[0]:.0%} of the first tokens and {agreement[1]:.0%} of {len(token_ids)} are "
        "the same",
        **{
            f"{name}, compared": {
                "hidden": error,
                "first_tokens": agreement[0],
                "tokens": agreement[1],
            }
        },
    )


def fill(runner: Runner, seed: int) -> None:
    """Fill the KV cache with random numbers; keys are scaled up so that attention weights are
    peaked, as in a real model.
    """
    leaves, tree = jax.tree.flatten(runner.state.pages)
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    for leaf in leaves:
        leaf.delete()  # frees memory for the new arrays
    keys = jax.random.split(jax.random.key(seed), len(structs))
    pages = [
        noise(key, struct, 1.0 if i % 2 else 3.0)
        for i, (key, struct) in enumerate(zip(keys, structs, strict=True))
    ]
    runner.state = runner.state.replace(pages=tree.unflatten(pages))


def decode_steps(
    runner: Runner, scale: CheckSizes, batch: int, seed: int
) -> list[tuple[Size, Any, jax.Array]]:
    """Consecutive decode steps as (size, compiled program, input buffer on the device)."""
    rng = np.random.default_rng(seed)
    width = -(-(scale.context + scale.steps) // PAGE)
    pages = 1 + rng.permutation(batch * width).reshape(batch, width)
    seqs = []
    for slot in range(batch):
        tokens = rng.integers(0, runner.config.vocab_size, scale.context).tolist()
        seq = Sequence(
            0, tokens, scale.context, SamplingParams(temperature=0, ignore_eos=True), scale.steps, 0
        )
        seq.slot = slot
        seq.cache.pages = [pages[slot].tolist()]
        runner.assign(seq, scale.context - 1)
        seqs.append(seq)
    sent = []
    for step in range(scale.steps):
        position = scale.context - 1 + step
        items = tuple(ScheduledSequence(seq, position, 1, True, not step) for seq in seqs)
        size, buffer = runner.batch_builder.build(StepPlan((items,)))
        sent.append(
            (size, runner.program(size, runner.batch_builder.draws_plainly), jax.device_put(buffer))
        )
    jax.block_until_ready([buffer for *_, buffer in sent])
    return sent
