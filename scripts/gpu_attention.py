"""The attention kernel by itself: compared with float64 on fresh random inputs, and timed with the card warm.

NaN lies in whatever nobody owns. The table sets the bytes and operations that the work needs against what this card
copies and multiplies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import attention
from ..ops.attention import KVPages, Rows, xla
from .gpu_common import Report, Scale, copy_rate, product_rate, seconds

LARGEST_ERROR = 6e-3  # of bfloat16, against float64


@dataclass(frozen=True)
class Work:
    """A step of attention: sequences of equal length that bring equally many rows."""

    name: str
    sequences: int
    length: int  # with the new rows
    rows: int = 1  # of each
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    page: int = 16
    codes: str | None = None  # of the pages, where they hold eight bits and scales
    values: int | None = None  # their width, where they are a part of the keys
    goal: str = ""

    @property
    def seen(self) -> int:
        """Pairs of a row and a key that it sees, in one sequence."""
        first = self.length - self.rows
        return sum(min(p + 1, self.window or p + 1) for p in range(first, self.length))

    @property
    def bytes(self) -> int:
        """Keys and values once, queries and results once."""
        keys = min(self.length, (self.window or self.length) + self.rows - 1)
        held = self.width if self.values else 2 * self.width
        each = held * 2 if self.codes is None else held + 2 * 4
        rows = self.sequences * self.rows * self.heads * (self.width + (self.values or self.width)) * 2
        return self.sequences * keys * self.kv_heads * each + rows

    @property
    def operations(self) -> int:
        return 2 * self.sequences * self.seen * self.heads * (self.width + (self.values or self.width))


RIGHT = [
    Work("decode", 5, 700),
    Work("decode, MHA", 3, 300, heads=8),
    Work("decode, MQA", 3, 300, heads=16, kv_heads=1),
    Work("decode, width 64, sinks, window", 5, 700, width=64, window=128, sinks=True),
    Work("decode, cap", 3, 500, heads=16, soft_cap=50.0),
    Work("decode, three spans", 2, 9000),
    Work("decode, width 256", 3, 700, heads=16, width=256),
    Work("decode, int8", 3, 700, page=32, codes="int8"),
    Work("decode, float8, window", 3, 700, page=64, codes="float8_e4m3fn", window=300),
    Work("decode, latent", 3, 700, heads=128, kv_heads=1, width=576, values=512),
    Work("decode, latent, three spans", 1, 9000, heads=16, kv_heads=1, width=576, values=512),
    Work("chunk", 3, 500, rows=200),
    Work("chunk, width 256", 2, 300, rows=100, heads=16, width=256),
    Work("chunk, int8", 2, 300, rows=100, page=64, codes="int8"),
    Work("chunk, latent", 2, 300, rows=50, heads=16, kv_heads=1, width=576, values=512),
    Work("chunk, window", 2, 500, rows=130, heads=16, window=100),
    Work("chunk, width 64, sinks", 2, 5000, rows=77, heads=64, width=64, sinks=True),
]
FAST = [
    Work("decode, 64 of 8k", 64, 8192, goal="85 % of copy"),
    Work("decode, 1 of 128k", 1, 131072, goal="75 % of copy"),
    Work("decode, 64 of 4k", 64, 4096),
    Work("decode, 16 of 128k, window 4k", 16, 131072, window=4096, goal="1.3 times 16 of 4k"),
    Work("decode, 16 of 4k", 16, 4096),
    Work("prefill, 8k causal", 1, 8192, rows=8192, goal="60 % of products"),
    Work("decode, 64 of 8k, pages of 64", 64, 8192, page=64),
    Work("decode, 64 of 8k, int8", 64, 8192, page=64, codes="int8"),
    Work("decode, 64 of 8k, float8", 64, 8192, page=64, codes="float8_e4m3fn"),
    Work("decode, 64 of 8k, width 256", 64, 8192, heads=16, width=256),
    Work("decode, 64 of 8k, latent", 64, 8192, heads=128, kv_heads=1, width=576, values=512),
]


def arrays(work: Work, seed: int) -> tuple[Any, ...]:
    """(q, pages, rows, sinks): pages in random order, NaN where nobody's."""
    B, R, K, H = work.sequences, work.rows, work.kv_heads, work.width
    S = work.page
    M = -(-work.length // S)
    keys = jax.random.split(jax.random.key(seed), 3)
    tables_BM = 1 + np.random.default_rng(seed).permutation(B * M).reshape(B, M)
    q_TNH = jax.random.normal(keys[0], (B * R, work.heads, H), jnp.bfloat16)

    def poison(pages, *between):
        """NaN in what nobody owns: the dummy page, and the end of each last page."""
        left = work.length - (M - 1) * S
        return pages.at[0].set(jnp.nan).at[(tables_BM[:, -1], *between, slice(left, None))].set(jnp.nan)

    pages, scales = [], []
    for key in keys[1:] if work.values is None else keys[1:2]:
        page_PSKH = jax.random.normal(key, (B * M + 1, S, K, H), jnp.bfloat16)
        if work.codes is None:
            pages.append(poison(page_PSKH))
            continue
        codes_PSKH, scale_PSK = xla.quantise(page_PSKH, jnp.dtype(work.codes))
        pages.append(codes_PSKH)
        scales.append(poison(jnp.swapaxes(scale_PSK, 1, 2), slice(None)))
    positions_T = np.tile(np.arange(work.length - R, work.length), B)
    starts_B1 = np.arange(B + 1) * R
    slots_T = np.zeros(B * R)
    rows = Rows(*(jnp.asarray(x, jnp.int32) for x in (positions_T, starts_B1, tables_BM, slots_T)))
    sinks_N = jnp.linspace(-2.0, 3.0, work.heads) if work.sinks else None
    held = dict(zip(("k_PSKH", "v_PSKH"), pages, strict=False))
    held |= dict(zip(("k_scale_PKS", "v_scale_PKS"), scales, strict=False))
    return q_TNH, KVPages(**held), rows, sinks_N


def attend(work: Work, implementation: Callable, q, pages, rows, sinks):
    out, _ = implementation(
        q, None, None, pages, rows, scale=work.width**-0.5, window=work.window, soft_cap=work.soft_cap,
        sinks_N=sinks, value_dim=work.values,
    )  # fmt: skip
    return out


def reference(work: Work, q, pages, rows, sinks) -> np.ndarray:
    """In float64, on the host, from the same inputs."""

    def numbers(held, scale=None):
        x = np.asarray(held.astype(jnp.float32), np.float64)
        return x if scale is None else x * np.swapaxes(np.asarray(scale, np.float64), 1, 2)[..., None]

    q, k = numbers(q), numbers(pages.k_PSKH, pages.k_scale_PKS)
    v = k[..., : work.values] if work.values else numbers(pages.v_PSKH, pages.v_scale_PKS)
    tables, group, out = np.asarray(rows.tables_BM), work.heads // work.kv_heads, []
    for b in range(work.sequences):
        keys, values = (x[tables[b]].reshape(-1, *x.shape[2:])[: work.length] for x in (k, v))
        for r in range(work.rows):
            position = work.length - work.rows + r
            first = 0 if work.window is None else max(0, position - work.window + 1)
            row = q[b * work.rows + r].reshape(work.kv_heads, group, work.width)
            score = np.einsum("kgh,jkh->kgj", row, keys[first : position + 1]) * work.width**-0.5
            if work.soft_cap is not None:
                score = work.soft_cap * np.tanh(score / work.soft_cap)
            top = score.max(-1, keepdims=True)
            total = 0.0
            if sinks is not None:
                sink = np.asarray(sinks, np.float64).reshape(work.kv_heads, group, 1)
                top = np.maximum(top, sink)
                total = np.exp(sink - top)
            weight = np.exp(score - top)
            total = total + weight.sum(-1, keepdims=True)
            mixed = np.einsum("kgj,jkh->kgh", weight / total, values[first : position + 1])
            out.append(mixed.reshape(work.heads, -1))
    return np.stack(out)


def implementation(name: str) -> Callable:
    return import_module(f".{name}", attention.__name__).paged_attention


def check(work: Work, name: str, seed: int) -> float:
    """||out - reference|| / ||reference||, NaN where anything is."""
    inputs = arrays(work, seed)
    out = np.asarray(jax.jit(partial(attend, work, implementation(name)))(*inputs), np.float64)
    wanted = reference(work, *inputs)
    return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))


def right(report: Report, scale: Scale, seed: int) -> None:
    """Every case against float64."""
    for work in RIGHT:
        if work.length > scale.longest:
            continue
        error = check(work, scale.kernel, seed)
        if not error < LARGEST_ERROR:
            report.wrong(f"{work.name}: error {error:.1e}")
        report(
            f"{'right' if error < LARGEST_ERROR else 'WRONG'}  {work.name:34} error {error:.1e}", **{work.name: error}
        )


def fast(report: Report, scale: Scale, seed: int) -> None:
    """What each work takes, beside what its bytes and its operations would at this card's own rates."""
    copy, product = copy_rate(scale.copied), product_rate(scale.multiplied)
    report(f"copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s", copy=copy, product=product)
    report(f"{'work':32} {'ms':>9} {'% copy':>7} {'% prod.':>7} {'XLA ms':>9}  to reach")
    for work in [work for work in FAST if work.length <= scale.longest] or [Work("decode, 2 of 64", 2, 64)]:
        inputs = arrays(work, seed)
        took, plain = (
            seconds(jax.jit(partial(attend, work, implementation(name))), *inputs, bursts=bursts)
            for name, bursts in ((scale.kernel, 5), ("xla", 3))
        )
        shares = work.bytes / took / copy, work.operations / took / product
        report(
            f"{work.name:32} {took * 1e3:9.3f} {shares[0]:7.1%} {shares[1]:7.1%} {plain * 1e3:9.3f}  {work.goal}",
            **{work.name: {"seconds": took, "xla": plain, "copy": shares[0], "product": shares[1]}},
        )
