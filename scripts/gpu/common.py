"""Common code of the GPU checks: sizes, an incrementally saved report, timing, and a runner with
random weights.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...model.checkpoint.loader import family_for
from ...model.weights import abstract
from ...ops import attention
from ...ops.cache_folder import publish
from ...serving.device.step_shape import Size, StepShape
from ...serving.engine.runner import Runner
from ...sharding.spec import random_arrays
from .shapes import GPT_OSS_20B, LLAMA_8B, QWEN3_30B

PAGE = 16
# Attention implementation -> its module in ops.attention, which runs without a self-test.
UNTESTED = {"mosaic_gpu": "hopper", "triton": "triton", "xla": "xla"}
ONE_LAYER = {"num_hidden_layers": 1}


@dataclass(frozen=True)
class CheckSizes:
    """Sizes of all parts: `FULL` to measure a GPU, `TINY` to test the checks themselves."""

    hf: dict[str, Any]  # config.json of the dense model
    kernel: str  # attention to compare with XLA's; Triton's on GPUs other than Hopper
    context: int  # tokens of each sequence that decodes
    batches: tuple[int, ...]  # batch sizes of the decode step
    steps: int  # decode steps per timed burst
    streams: int  # concurrent requests
    requests: int  # total requests
    prompt: int  # prompt tokens of a request
    answer: int  # output tokens of a request
    rows: int  # tokens of a prefill step
    longest: int  # maximum sequence length; longer attention cases are skipped
    copied: int  # bytes to copy when measuring the copy bandwidth
    multiplied: int  # matrix side when measuring the product throughput
    experts: dict[str, Any]  # config.json of the mixture of experts whose step is timed
    mixtures: tuple[dict[str, Any], ...]  # configs of mixtures whose MoE layer is timed alone


FULL = CheckSizes(
    LLAMA_8B,
    "mosaic_gpu",
    1024,
    (1, 64),
    32,
    64,
    128,
    512,
    256,
    2048,
    1 << 20,
    2 << 30,
    8192,
    QWEN3_30B,
    (QWEN3_30B | ONE_LAYER, GPT_OSS_20B | ONE_LAYER),
)
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
FEW_EXPERTS = {"num_experts": 6, "moe_intermediate_size": 32}, {"num_local_experts": 6}
FEW = SMALL | {
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 1,
}
FEW_MIXTURES = tuple(
    hf | FEW | few_experts for hf, few_experts in zip(FULL.mixtures, FEW_EXPERTS, strict=True)
)
TINY = CheckSizes(LLAMA_8B | SMALL, "xla", 40, (1, 6), 8, 6, 9, 20, 12, 32, 300, 1 << 22, 64,
             FEW_MIXTURES[0], FEW_MIXTURES)  # fmt: skip


class PartReport:
    """Prints the findings of a part and saves them after each call, so that a crash loses none."""

    def __init__(self, file: Path):
        self.file = file
        self.found = {}

    def __call__(self, line: str = "", **findings: Any) -> None:
        if line:
            print(line, flush=True)
        self.found |= findings
        with publish(self.file) as temporary_path:
            temporary_path.write_text(json.dumps(self.found))

    def wrong(self, reason: str) -> None:
        self(wrong=[*self.found.get("wrong", []), reason])


def seconds(run: Callable, *inputs, bursts: int = 5) -> float:
    """Seconds of one call on a warm GPU: the median over bursts of calls."""

    def burst(num_calls: int) -> Any:
        out = None
        for _ in range(num_calls):
            out = run(*inputs)  # keeps only the last result: all of them might not fit
        return out

    timed(lambda: burst(1))
    num_calls = max(3, min(50, int(0.2 / max(timed(lambda: burst(1)), 1e-5))))
    return float(np.median([timed(lambda: burst(num_calls)) / num_calls for _ in range(bursts)]))


def timed(run: Callable[[], Any]) -> float:
    """Seconds until the result of `run` is ready."""
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


def measured_rates(report: PartReport, scale: CheckSizes) -> tuple[float, float]:
    """Measure (copy bandwidth in bytes/s, matrix product throughput in FLOP/s)."""
    copy = copy_rate(scale.copied)
    product = product_rate(scale.multiplied)
    report(
        f"copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s",
        copy=copy,
        product=product,
    )
    return copy, product


def copy_rate(size: int) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes."""
    return 2 * size / seconds(jax.jit(lambda x: x + 1), jnp.ones(size // 2, jnp.bfloat16))


def product_rate(side: int) -> float:
    """FLOP/s of a product of two square bfloat16 matrices."""
    a, b = (jax.random.normal(jax.random.key(n), (side, side), jnp.bfloat16) for n in (1, 2))
    return 2 * side**3 / seconds(jax.jit(jnp.matmul), a, b)


@contextmanager
def attention_by(name: str) -> Iterator[None]:
    """Compile with one attention implementation only, without its self-test."""
    table = attention.IMPLEMENTATIONS
    listed = dict(table)
    module: Any = import_module(f".{UNTESTED[name]}", attention.__name__)
    backend = module.BACKEND
    jax.clear_caches()  # so that no cached trace with another implementation is reused
    table.clear()
    table[name] = f".{UNTESTED[name]}"
    # Without the limits that run the self-test; `attend` checks the kernel's own limits.
    module.BACKEND = replace(backend, limits=lambda params, shape: None)
    try:
        yield
    finally:
        module.BACKEND = backend
        table.clear()
        table.update(listed)
        jax.clear_caches()


def make_runner(
    scale: CheckSizes,
    max_len: int,
    select_sizes: Callable[[Iterable[Size]], Iterable[Size]],
    name: str,
    seed: int,
) -> Runner:
    """A runner with random weights and KV cache for all streams at full length.

    Args:
        scale: Sizes of the check.
        max_len: Maximum length of a sequence.
        select_sizes: Selects the step sizes to compile.
        name: Attention implementation.
        seed: Seed of the weights.
    """
    config = family_for(scale.hf).config(scale.hf, max_len)
    weights = random_arrays(abstract(config), seed, on_device=True)
    max_seqs = max(scale.streams, *scale.batches)
    shape = StepShape.largest(max_seqs, max(scale.rows, max_seqs + 1), max(max_seqs, 16))
    num_pages = max_seqs * -(-max_len // PAGE) + 1
    runner = Runner(config, weights, shape, (num_pages,), PAGE, max_len)
    layouts = runner.batch_builder.layouts
    sizes = sorted(set(select_sizes(layouts)))
    runner.batch_builder.layouts = {size: layouts[size] for size in sizes}
    with attention_by(name):
        runner.warm_up()
    return runner


@partial(jax.jit, static_argnames=("struct", "scale"))
def noise(key, struct: jax.ShapeDtypeStruct, scale: float):
    """Random normal numbers for a page array, which may store bfloat16 values as uint16."""
    is_bitcast = struct.dtype == jnp.uint16
    dtype = jnp.bfloat16 if is_bitcast else struct.dtype
    values = scale * jax.random.normal(key, struct.shape, dtype)
    return jax.lax.bitcast_convert_type(values, struct.dtype) if is_bitcast else values
