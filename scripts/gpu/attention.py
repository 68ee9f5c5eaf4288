"""Checks of the attention kernel alone: accuracy against float64 on random inputs, and time.

Free pages and unused slots hold NaN, so that reads out of bounds are noticed. Times are compared
with the GPU's measured copy bandwidth and matrix product throughput.
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
from .common import UNTESTED, CheckSizes, PartReport, measured_rates, seconds
from .step_time import attention_seconds, known_device


@dataclass(frozen=True)
class TimedTrial(Trial):
    """A benchmark case, with the bytes that it moves and the operations that it computes."""

    goal: str = ""  # target in words, for the report

    @property
    def seen(self) -> int:
        """Number of unmasked (query, key) pairs in one sequence."""
        first = self.length - self.rows
        return sum(min(p + 1, self.window or p + 1) for p in range(first, self.length))

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, each read once, and of queries and results."""
        keys = min(self.length, (self.window or self.length) + self.rows - 1)
        elements = self.width if self.values else 2 * self.width
        # Quantised pages have a float32 scale per key and per value.
        bytes_per_key = elements * 2 if self.codes is None else elements + 2 * 4
        row_bytes = (
            self.sequences * self.rows * self.heads * (self.width + (self.values or self.width)) * 2
        )
        return self.sequences * keys * self.kv_heads * bytes_per_key + row_bytes

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
    """The `attend` function of an implementation, without its self-test."""
    module = import_module(f".{UNTESTED[name]}", attention.__name__)
    return module.attend


def right(report: PartReport, scale: CheckSizes, seed: int) -> None:
    """Compare the kernel with float64 in every case."""
    for trial in RIGHT:
        if trial.length > scale.longest:
            continue
        try:
            accuracy = measure_attention(trial, implementation(scale.kernel), seed)
        except NotImplementedError as reason:
            report(f"left   {trial.name:34} {reason}")
            continue
        if accuracy.wrong:
            report.wrong(f"{trial.name}: wrong {accuracy.wrong}")
        report(
            f"{'WRONG' if accuracy.wrong else 'right'}  {trial.name:34} error "
            f"{accuracy.error:.1e}, in the worst row {accuracy.worst_row:.1e}",
            **{trial.name: accuracy.error},
        )


def chosen(report: PartReport, scale: CheckSizes, seed: int) -> None:
    """Check that an engine selects the kernel by itself, in a process that has allocated most of
    the GPU's memory.
    """
    trial = Trial("decode", 5, 700)
    began = time.perf_counter()
    measurements = []
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CACHE_HOME"] = empty  # no cached self-test results
        name, rejections = first_supported(
            lambda implementation: measurements.append(
                measure_attention(trial, implementation, seed)
            )
        )
    took = time.perf_counter() - began
    accuracy = measurements[0]
    summary = "; ".join((name, *rejections))
    report(
        f"{summary}; found out in {took:.0f} s, error {accuracy.error:.1e}",
        chosen=name,
        declined=rejections,
        error=accuracy.error,
    )
    if gpu_device.is_gpu() and name not in (scale.kernel, "flashinfer"):
        report.wrong(f"{name} was chosen")
    if accuracy.wrong:
        report.wrong(f"it is wrong {accuracy.wrong}")


def fast(report: PartReport, scale: CheckSizes, seed: int) -> None:
    """Time each case: the kernel, the performance model's prediction, XLA, and FlashInfer where it
    is installed and supports the case. Also reports the shares of the GPU's measured copy bandwidth
    and product throughput.
    """
    copy, product = measured_rates(report, scale)
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
            took, xla_seconds = (
                seconds(
                    jax.jit(partial(attend, work, implementation(name))), *inputs, bursts=bursts
                )
                for name, bursts in ((scale.kernel, 5), ("xla", 3))
            )
        except NotImplementedError as reason:
            report(f"{work.name:32} {reason}")
            continue
        flashinfer_seconds = time_flashinfer(work, inputs)
        shares = work.bytes / took / copy, work.operations / took / product
        guess = attention_seconds(device, work.bytes, work.operations) if device else None
        report(
            f"{work.name:32} {took * 1e3:9.3f} {milliseconds(guess)} {shares[0]:7.1%} "
            f"{shares[1]:7.1%} {milliseconds(xla_seconds)} {milliseconds(flashinfer_seconds)}  "
            f"{work.goal}",
            **{
                work.name: {
                    "seconds": took,
                    "guess": guess,
                    "xla": xla_seconds,
                    "flashinfer": flashinfer_seconds,
                    "copy": shares[0],
                    "product": shares[1],
                }
            },
        )


def milliseconds(duration: float | None) -> str:
    """Seconds formatted as milliseconds, nine characters wide."""
    return f"{'-':>9}" if duration is None else f"{duration * 1e3:9.3f}"


def time_flashinfer(work: Trial, inputs: tuple) -> float | None:
    """Seconds of FlashInfer's kernel; None if it is not installed or does not support the case."""
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
