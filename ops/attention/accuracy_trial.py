"""Trials of an attention implementation: random inputs, and its error against float64.

Pages that no sequence owns hold NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import KVPages, QueryRows, xla

LARGEST_ERROR = 6e-3  # allowed in bfloat16, against float64


@dataclass(frozen=True)
class Trial:
    """A step of attention over sequences of equal length with equally many rows each."""

    name: str
    sequences: int
    length: int  # including the new rows
    rows: int = 1  # of each sequence
    empty: int = 0  # further sequences without rows, and as many padding rows
    room: int = 0  # positions that the page tables have room for, where that is more than the length
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    page: int = 16
    codes: str | None = None  # dtype of the pages, where they hold eight bits and scales
    values: int | None = None  # width of the values, where they are a part of the keys
    dtype: str = "bfloat16"

    @property
    def scale(self) -> float:
        return self.width**-0.5


def error(trial: Trial, implementation: Callable, seed: int) -> float:
    """||out - reference|| / ||reference||; NaN where anything is NaN."""
    inputs = arrays(trial, seed)
    out = np.asarray(jax.jit(partial(attend, trial, implementation))(*inputs), np.float64)
    wanted = reference(trial, *inputs)
    out = out[: len(wanted)]
    return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))


def arrays(trial: Trial, seed: int) -> tuple[Any, ...]:
    """(q, pages, rows, sinks): pages in random order, with NaN where no sequence owns them."""
    B, R, K, H = trial.sequences, trial.rows, trial.kv_heads, trial.width
    S, T = trial.page, B * R + trial.empty
    M = -(-trial.length // S)
    keys = jax.random.split(jax.random.key(seed), 3)
    tables_BM = 1 + np.random.default_rng(seed).permutation(B * M).reshape(B, M)
    q_TNH = jax.random.normal(keys[0], (T, trial.heads, H), trial.dtype)

    def poison(pages, *between):
        """With NaN in the dummy page and in the unused end of each sequence's last page."""
        left = trial.length - (M - 1) * S
        return pages.at[0].set(jnp.nan).at[(tables_BM[:, -1], *between, slice(left, None))].set(jnp.nan)

    pages, scales = [], []
    for key in keys[1:] if trial.values is None else keys[1:2]:
        page_PSKH = jax.random.normal(key, (B * M + 1, S, K, H), trial.dtype)
        if trial.codes is None:
            pages.append(poison(page_PSKH))
            continue
        codes_PSKH, scale_PSK = xla.quantise(page_PSKH, jnp.dtype(trial.codes))
        pages.append(codes_PSKH)
        scales.append(poison(jnp.swapaxes(scale_PSK, 1, 2), slice(None)))
    positions_T = np.zeros(T)
    positions_T[: B * R] = np.tile(np.arange(trial.length - R, trial.length), B)
    starts_B1 = np.minimum(np.arange(B + trial.empty + 1), B) * R
    wider_BM = np.zeros((B + trial.empty, max(M, -(-trial.room // S))))
    wider_BM[:B, :M] = tables_BM
    rows = QueryRows(*(jnp.asarray(x, jnp.int32) for x in (positions_T, starts_B1, wider_BM, np.zeros(T))))
    sinks_N = jnp.linspace(-2.0, 3.0, trial.heads) if trial.sinks else None
    held = dict(zip(("k_PSKH", "v_PSKH"), pages, strict=False))
    held |= dict(zip(("k_scale_PKS", "v_scale_PKS"), scales, strict=False))
    return q_TNH, KVPages(**held), rows, sinks_N


def attend(trial: Trial, implementation: Callable, q, pages, rows, sinks):
    out, _ = implementation(
        q, None, None, pages, rows, scale=trial.scale, window=trial.window, soft_cap=trial.soft_cap, sinks_N=sinks,
        value_dim=trial.values,
    )  # fmt: skip
    return out


def reference(trial: Trial, q, pages, rows, sinks) -> np.ndarray:
    """The result in float64, on the host, from the same inputs. G rows of a KV head, J keys."""

    def numbers(held, scale=None):
        x = np.asarray(held.astype(jnp.float32), np.float64)
        return x if scale is None else x * np.swapaxes(np.asarray(scale, np.float64), 1, 2)[..., None]

    k = numbers(pages.k_PSKH, pages.k_scale_PKS)
    v = k[..., : trial.values] if trial.values else numbers(pages.v_PSKH, pages.v_scale_PKS)
    B, R, K = trial.sequences, trial.rows, trial.kv_heads
    tables = np.asarray(rows.tables_BM)[:, : -(-trial.length // trial.page)]
    q_BKGH = np.moveaxis(numbers(q[: B * R]).reshape(B, R, K, -1, trial.width), 2, 1).reshape(B, K, -1, trial.width)
    each = trial.heads // K  # rows of one position
    position_G, key_J = np.repeat(np.arange(trial.length - R, trial.length), each), np.arange(trial.length)
    seen_GJ = key_J <= position_G[:, None]
    if trial.window is not None:
        seen_GJ &= key_J > position_G[:, None] - trial.window
    sink_KG1 = None if sinks is None else np.tile(np.asarray(sinks, np.float64).reshape(K, each), R)[..., None]
    out = []
    for b in range(B):
        k_KJH, v_KJH = (np.moveaxis(x[tables[b]].reshape(-1, *x.shape[2:])[: trial.length], 1, 0) for x in (k, v))
        score_KGJ = q_BKGH[b] @ np.swapaxes(k_KJH, 1, 2) * trial.scale
        if trial.soft_cap is not None:
            score_KGJ = trial.soft_cap * np.tanh(score_KGJ / trial.soft_cap)
        score_KGJ = np.where(seen_GJ, score_KGJ, -np.inf)
        top_KG1 = score_KGJ.max(-1, keepdims=True)
        if sink_KG1 is not None:
            top_KG1 = np.maximum(top_KG1, sink_KG1)
        weight_KGJ = np.exp(score_KGJ - top_KG1)
        total_KG1 = weight_KGJ.sum(-1, keepdims=True) + (0 if sink_KG1 is None else np.exp(sink_KG1 - top_KG1))
        mixed_KGH = (weight_KGJ / total_KG1) @ v_KJH
        out.append(np.moveaxis(mixed_KGH.reshape(K, R, each, -1), 1, 0).reshape(R, trial.heads, -1))
    return np.concatenate(out)
