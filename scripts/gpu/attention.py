"""The attention kernel by itself: compared with float64 on random inputs, and timed with the card
warm.

Pages and slots that no sequence owns hold NaN. The table sets the bytes and operations of each case
against the card's own rates of copying and multiplying.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import jax

from ...ops import attention
from ...ops.attention import flashinfer
from ...ops.attention.accuracy import Trial, arrays, attend, measure_attention
from ...ops.attention.backend import AttentionShape
from ...ops.attention.flashinfer_kernel import library
from ...ops.gpu import device as gpu_device
from ..collect_env import first_supported
from .common import UNTRIED, CheckSizes, PartReport, card_rates, seconds
from .step_time import attention_seconds, known_device


@dataclass(frozen=True)
class TimedTrial(Trial):
    """A trial with the bytes that it moves and the operations that it computes."""

    goal: str = ""

    @property
    def seen(self) -> int:
        """Pairs of a query and a key that it attends to, in one sequence."""
        first = self.length - self.rows
        return sum(min(p + 1, self.window or p + 1) for p in range(first, self.length))

    @property
    def bytes(self) -> int:
        """Keys and values once, queries and results once."""
        keys = min(self.length, (self.window or self.length) + self.rows - 1)
        held = self.width if self.values else 2 * self.width
        each = held * 2 if self.codes is None else held + 2 * 4
        rows = (
            self.sequences * self.rows * self.heads * (self.width + (self.values or self.width)) * 2
        )
        return self.sequences * keys * self.kv_heads * each + rows

    @property
    def operations(self) -> int:
        return (
            2 * self.sequences * self.seen * self.heads * (self.width + (self.values or self.width))
        )


RIGHT = [
    Trial("decode", 5, 700),
    Trial("decode, MHA", 3, 300, heads=8),
    Trial("decode, MQA", 3, 300, heads=16, kv_heads=1),
    Trial("decode, width 64, sinks, window", 5, 700, width=64, window=128, sinks=True),
    Trial("decode, cap", 3, 500, heads=16, soft_cap=50.0),
    Trial("decode, three spans", 2, 9000),
    Trial("decode, width 256", 3, 700, heads=16, width=256),
    Trial("decode, int8", 3, 700, page=32, codes="int8"),
    Trial("decode, float8, window", 3, 700, page=64, codes="float8_e4m3fn", window=300),
    Trial("decode, latent", 3, 700, heads=128, kv_heads=1, width=576, values=512),
    Trial("decode, latent, three spans", 1, 9000, heads=16, kv_heads=1, width=576, values=512),
    Trial("chunk", 3, 500, rows=200),
    Trial("chunk, width 256", 2, 300, rows=100, heads=16, width=256),
    Trial("chunk, int8", 2, 300, rows=100, page=64, codes="int8"),
    Trial("chunk, latent", 2, 300, rows=50, heads=16, kv_heads=1, width=576, values=512),
    Trial("chunk, window", 2, 500, rows=130, heads=16, window=100),
    Trial("chunk, width 64, sinks", 2, 5000, rows=77, heads=64, width=64, sinks=True),
]
FAST = [
    TimedTrial("decode, 64 of 8k", 64, 8192, goal="85 % of copy"),
    TimedTrial("decode, 1 of 128k", 1, 131072, goal="75 % of copy"),
    TimedTrial("decode, 64 of 4k", 64, 4096),
    TimedTrial("decode, 16 of 128k, window 4k", 16, 131072, window=4096, goal="1.3 times 16 of 4k"),
    TimedTrial("decode, 16 of 4k", 16, 4096),
    TimedTrial("prefill, 8k causal", 1, 8192, rows=8192, goal="60 % of products"),
    TimedTrial("decode, 64 of 8k, pages of 64", 64, 8192, page=64),
    TimedTrial("decode, 64 of 8k, int8", 64, 8192, page=64, codes="int8"),
    TimedTrial("decode, 64 of 8k, float8", 64, 8192, page=64, codes="float8_e4m3fn"),
    TimedTrial("decode, 64 of 8k, width 256", 64, 8192, heads=16, width=256),
    TimedTrial("decode, 64 of 8k, latent", 64, 8192, heads=128, kv_heads=1, width=576, values=512),
]


def implementation(name: str) -> Callable:
    """Without a trial."""
    module = import_module(f".{UNTRIED[name]}", attention.__name__)
    return module.attend


def right(report: PartReport, scale: CheckSizes, seed: int) -> None:
    """Every case against float64."""
    for trial in RIGHT:
        if trial.length > scale.longest:
            continue
        try:
            found = measure_attention(trial, implementation(scale.kernel), seed)
        except NotImplementedError as reason:
            report(f"left   {trial.name:34} {reason}")
            continue
        if found.wrong:
            report.wrong(f"{trial.name}: wrong {found.wrong}")
        report(
            f"{'WRONG' if found.wrong else 'right'}  {trial.name:34} error {found.error:.1e}, "
            f"in the worst row {found.worst_row:.1e}",
            **{trial.name: found.error},
        )


def chosen(report: PartReport, scale: CheckSizes, seed: int) -> None:
    """Whether an engine chooses the kernel by itself, in a process that holds most of the card's
    memory.
    """
    trial = Trial("decode", 5, 700)
    began = time.perf_counter()
    shown = []
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CACHE_HOME"] = empty  # no earlier choice is cached there
        name, declined = first_supported(
            lambda implementation: shown.append(measure_attention(trial, implementation, seed))
        )
    took = time.perf_counter() - began
    found = shown[0]
    said = "; ".join((name, *declined))
    report(
        f"{said}; found out in {took:.0f} s, error {found.error:.1e}",
        chosen=name,
        declined=declined,
        error=found.error,
    )
    if gpu_device.is_gpu() and name not in (scale.kernel, "flashinfer"):
        report.wrong(f"{name} was chosen")
    if found.wrong:
        report.wrong(f"it is wrong {found.wrong}")


def fast(report: PartReport, scale: CheckSizes, seed: int) -> None:
    """The time of each case, beside that of its bytes and of its operations at the card's own
    rates, the guess, XLA's, and FlashInfer's where that is installed and has a kernel for it."""
    copy, product = card_rates(report, scale)
    device = known_device(jax.devices()[0].device_kind)
    report(
        f"{'work':32} {'ms':>9} {'guess':>9} {'% copy':>7} {'% prod.':>7} {'XLA ms':>9} "
        f"{'FI ms':>9}  to reach"
    )
    for work in [work for work in FAST if work.length <= scale.longest] or [
        TimedTrial("decode, 2 of 64", 2, 64)
    ]:
        inputs = arrays(work, seed)
        try:
            took, plain = (
                seconds(
                    jax.jit(partial(attend, work, implementation(name))), *inputs, bursts=bursts
                )
                for name, bursts in ((scale.kernel, 5), ("xla", 3))
            )
        except NotImplementedError as reason:
            report(f"{work.name:32} {reason}")
            continue
        other = by_flashinfer(work, inputs)
        shares = work.bytes / took / copy, work.operations / took / product
        guess = attention_seconds(device, work.bytes, work.operations) if device else None
        report(
            f"{work.name:32} {took * 1e3:9.3f} {shown(guess)} {shares[0]:7.1%} {shares[1]:7.1%} "
            f"{shown(plain)} {shown(other)}  {work.goal}",
            **{
                work.name: {
                    "seconds": took,
                    "guess": guess,
                    "xla": plain,
                    "flashinfer": other,
                    "copy": shares[0],
                    "product": shares[1],
                }
            },
        )


def shown(found: float | None) -> str:
    """Milliseconds, in a column of nine."""
    return f"{'-':>9}" if found is None else f"{found * 1e3:9.3f}"


def by_flashinfer(work: Trial, inputs: tuple) -> float | None:
    """Seconds of FlashInfer's kernel; None where there is none."""
    q, pages, rows, sinks = inputs
    if library.missing() is not None or not gpu_device.is_gpu():
        return None
    try:
        if reason := flashinfer.kernel_limits(
            work.params, AttentionShape.of(q, pages, rows, work.params, sinks)
        ):
            raise NotImplementedError(reason)
        return seconds(jax.jit(partial(attend, work, flashinfer.attend)), *inputs)
    except NotImplementedError as reason:
        print(f"FlashInfer: {work.name}: {reason}")
        return None
