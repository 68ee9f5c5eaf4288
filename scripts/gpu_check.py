"""Checks and times the kernels on this machine's NVIDIA GPU: `python -m quire.scripts.gpu_check [--out FOLDER]`.

Every case is compared with float64 on fresh random inputs, with NaN in whatever nobody owns, and timed with the card
warm. The table sets the bytes and operations that the work needs against what this card copies and multiplies.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops.attention import KVPages, Rows, mosaic_gpu, xla

PAGE = 16


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
        kv = self.sequences * keys * self.kv_heads * self.width * 2 * 2
        return kv + 2 * 2 * self.sequences * self.rows * self.heads * self.width

    @property
    def operations(self) -> int:
        return 4 * self.sequences * self.seen * self.heads * self.width


RIGHT = [
    Work("decode", 5, 700),
    Work("decode, MHA", 3, 300, heads=8),
    Work("decode, MQA", 3, 300, heads=16, kv_heads=1),
    Work("decode, width 64, sinks, window", 5, 700, width=64, window=128, sinks=True),
    Work("decode, cap", 3, 500, heads=16, soft_cap=50.0),
    Work("decode, three spans", 2, 9000),
    Work("chunk", 3, 500, rows=200),
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
]


def arrays(work: Work, seed: int) -> tuple[Any, ...]:
    """(q, pages, rows, sinks): pages in random order, NaN where nobody's."""
    B, R, K, H = work.sequences, work.rows, work.kv_heads, work.width
    M = -(-work.length // PAGE)
    keys = jax.random.split(jax.random.key(seed), 3)
    tables_BM = 1 + np.random.default_rng(seed).permutation(B * M).reshape(B, M)
    q_TNH = jax.random.normal(keys[0], (B * R, work.heads, H), jnp.bfloat16)
    pages = []
    for key in keys[1:]:
        page_PSKH = jax.random.normal(key, (B * M + 1, PAGE, K, H), jnp.bfloat16).at[0].set(jnp.nan)
        left = work.length - (M - 1) * PAGE
        pages.append(page_PSKH.at[tables_BM[:, -1], left:].set(jnp.nan))
    positions_T = np.tile(np.arange(work.length - R, work.length), B)
    starts_B1 = np.arange(B + 1) * R
    slots_T = np.zeros(B * R)
    rows = Rows(*(jnp.asarray(x, jnp.int32) for x in (positions_T, starts_B1, tables_BM, slots_T)))
    sinks_N = jnp.linspace(-2.0, 3.0, work.heads) if work.sinks else None
    return q_TNH, KVPages(*pages), rows, sinks_N


def attend(work: Work, implementation: Callable, q, pages, rows, sinks):
    out, _ = implementation(
        q, None, None, pages, rows, scale=work.width**-0.5, window=work.window, soft_cap=work.soft_cap,
        sinks_N=sinks, value_dim=None,
    )  # fmt: skip
    return out


def reference(work: Work, q, pages, rows, sinks) -> np.ndarray:
    """In float64, on the host, from the same bfloat16 inputs."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, pages.k_PSKH, pages.v_PSKH))
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
            out.append(mixed.reshape(work.heads, work.width))
    return np.stack(out)


def seconds(run: Callable, *inputs, repeat: int = 20) -> float:
    """Of one run, with the card warm: the median of bursts, so that the host's part is hidden."""
    jax.block_until_ready(run(*inputs))
    many = max(3, min(50, int(0.2 / max(timed(run, *inputs), 1e-5))))

    def burst() -> float:
        started = time.perf_counter()
        jax.block_until_ready([run(*inputs) for _ in range(many)])
        return (time.perf_counter() - started) / many

    return float(np.median([burst() for _ in range(max(3, repeat // 4))]))


def timed(run: Callable, *inputs) -> float:
    started = time.perf_counter()
    jax.block_until_ready(run(*inputs))
    return time.perf_counter() - started


def ceilings() -> tuple[float, float]:
    """(bytes a second of a copy, operations a second of a large product) of this card."""
    x = jax.random.normal(jax.random.key(0), (1 << 30,), jnp.bfloat16)
    copy = 2 * x.nbytes / seconds(jax.jit(lambda x: x + 1), x)
    del x
    a, b = (jax.random.normal(jax.random.key(n), (8192, 8192), jnp.bfloat16) for n in (1, 2))
    product = 2 * 8192**3 / seconds(jax.jit(jnp.matmul), a, b)
    return copy, product


def check(work: Work, seed: int) -> float:
    """||out - reference|| / ||reference||, NaN where anything is."""
    inputs = arrays(work, seed)
    out = np.asarray(jax.jit(partial(attend, work, mosaic_gpu.paged_attention))(*inputs), np.float64)
    wanted = reference(work, *inputs)
    return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the kernels on this machine's NVIDIA GPU.")
    parser.add_argument("--out", type=Path, help="a folder for gpu_check.json")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the random inputs")
    chosen = parser.parse_args()
    if not mosaic_gpu.has_gpu():
        parser.exit(1, f"there is no NVIDIA GPU of compute capability 9.0 or more here: {jax.devices()[0]}\n")
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, seed {chosen.seed}")
    found: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "seed": chosen.seed}
    failed = 0
    for work in RIGHT:
        error = check(work, chosen.seed)
        right = error < 6e-3
        failed += not right
        found[work.name] = {"error": error}
        print(f"{'right' if right else 'WRONG'}  {work.name:34} error {error:.1e}", flush=True)
    copy, product = ceilings()
    found["copy"], found["product"] = copy, product
    print(f"\ncopy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s\n")
    print(f"{'work':32} {'ms':>9} {'% copy':>7} {'% prod.':>7} {'XLA ms':>9}  to reach")
    for work in FAST:
        inputs = arrays(work, chosen.seed)
        took = seconds(jax.jit(partial(attend, work, mosaic_gpu.paged_attention)), *inputs)
        plain = seconds(jax.jit(partial(attend, work, xla.paged_attention)), *inputs, repeat=4)
        shares = work.bytes / took / copy, work.operations / took / product
        found[work.name] = {"seconds": took, "xla": plain, "copy": shares[0], "product": shares[1]}
        print(
            f"{work.name:32} {took * 1e3:9.3f} {shares[0]:7.1%} {shares[1]:7.1%} {plain * 1e3:9.3f}  {work.goal}",
            flush=True,
        )
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "gpu_check.json").write_text(json.dumps(found, indent=1))
    if failed:
        raise SystemExit(f"{failed} of {len(RIGHT)} cases are wrong")


if __name__ == "__main__":
    main()
