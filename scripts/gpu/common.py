"""What the checks on a GPU share: sizes, a report that is saved as it grows, timing, and a random
model.
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
UNTRIED = {"mosaic_gpu": "hopper", "triton": "triton", "xla": "xla"}  # modules of attention
ONE_LAYER = {"num_hidden_layers": 1}


@dataclass(frozen=True)
class CheckSizes:
    """The sizes of everything: enough to measure a card, or as little as shows that the parts
    work.
    """

    hf: dict[str, Any]
    # the attention that is checked against XLA's; on cards other than Hopper it is Triton's
    kernel: str
    context: int  # of the sequences that decode
    batches: tuple[int, ...]
    steps: int  # of a burst
    streams: int  # at once
    requests: int
    prompt: int
    answer: int
    rows: int  # of a step that reads prompts
    longest: int  # attention works on longer sequences are left out
    copied: int  # bytes
    multiplied: int  # the side of a matrix
    experts: dict[str, Any]  # a mixture whose step is timed
    mixtures: tuple[dict[str, Any], ...]  # whose experts are timed by themselves


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
FEW_MIXTURES = tuple(hf | FEW | few for hf, few in zip(FULL.mixtures, FEW_EXPERTS, strict=True))
TINY = CheckSizes(LLAMA_8B | SMALL, "xla", 40, (1, 6), 8, 6, 9, 20, 12, 32, 300, 1 << 22, 64,
             FEW_MIXTURES[0], FEW_MIXTURES)  # fmt: skip


class PartReport:
    """The findings of a part, printed and saved at once: those before a crash are kept."""

    def __init__(self, file: Path):
        self.file = file
        self.found = {}

    def __call__(self, line: str = "", **found: Any) -> None:
        if line:
            print(line, flush=True)
        self.found |= found
        with publish(self.file) as part:
            part.write_text(json.dumps(self.found))

    def wrong(self, reason: str) -> None:
        self(wrong=[*self.found.get("wrong", []), reason])


def seconds(run: Callable, *inputs, bursts: int = 5) -> float:
    """Seconds of one run, with the card warm: the median of bursts, which hide the host's part."""

    def burst(many: int) -> Any:
        out = None
        for _ in range(many):
            out = run(*inputs)  # only the last is kept: fifty results would not always fit
        return out

    timed(lambda: burst(1))
    many = max(3, min(50, int(0.2 / max(timed(lambda: burst(1)), 1e-5))))
    return float(np.median([timed(lambda: burst(many)) / many for _ in range(bursts)]))


def timed(run: Callable[[], Any]) -> float:
    """Seconds until the result is ready; a card does one thing after the other."""
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


def card_rates(report: PartReport, scale: CheckSizes) -> tuple[float, float]:
    """(bytes a second that are copied, operations a second of products)."""
    copy = copy_rate(scale.copied)
    product = product_rate(scale.multiplied)
    report(
        f"copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s",
        copy=copy,
        product=product,
    )
    return copy, product


def copy_rate(size: int) -> float:
    """Bytes a second, read and written, of a copy of so many bytes."""
    return 2 * size / seconds(jax.jit(lambda x: x + 1), jnp.ones(size // 2, jnp.bfloat16))


def product_rate(side: int) -> float:
    """Operations a second of a product of two square matrices."""
    a, b = (jax.random.normal(jax.random.key(n), (side, side), jnp.bfloat16) for n in (1, 2))
    return 2 * side**3 / seconds(jax.jit(jnp.matmul), a, b)


@contextmanager
def attention_by(name: str) -> Iterator[None]:
    """Whatever is compiled in this context uses this attention implementation alone, listed or
    not.
    """
    table = attention.IMPLEMENTATIONS
    listed = dict(table)
    module = import_module(f".{UNTRIED[name]}", attention.__name__)
    backend = module.BACKEND
    jax.clear_caches()  # else a step that was traced before would be reused
    table.clear()
    table[name] = f".{UNTRIED[name]}"
    # `attend` knows the kernel's own
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
    wanted: Callable[[Iterable[Size]], Iterable[Size]],
    name: str,
    seed: int,
) -> Runner:
    """A runner of random weights with room for all streams at full length; only the sizes wanted
    are compiled.
    """
    config = family_for(scale.hf).config(scale.hf, max_len)
    weights = random_arrays(abstract(config), seed, on_device=True)
    most = max(scale.streams, *scale.batches)
    shape = StepShape.largest(most, max(scale.rows, most + 1), max(most, 16))
    runner = Runner(config, weights, shape, (most * -(-max_len // PAGE) + 1,), PAGE, max_len)
    layouts = runner.batch_builder.layouts
    runner.batch_builder.layouts = {size: layouts[size] for size in sorted(set(wanted(layouts)))}
    with attention_by(name):
        runner.warm_up()
    return runner


@partial(jax.jit, static_argnames=("like", "scale"))
def noise(key, like: jax.ShapeDtypeStruct, scale: float):
    """Random numbers shaped like a page array, also where it holds bfloat16 as uint16."""
    bits = like.dtype == jnp.uint16
    drawn = scale * jax.random.normal(key, like.shape, jnp.bfloat16 if bits else like.dtype)
    return jax.lax.bitcast_convert_type(drawn, like.dtype) if bits else drawn
