"""Trials of an attention implementation: random inputs, and the result in float64.

Pages that no sequence owns hold NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..gpu import device
from ..gpu.self_test import CaseResult, SelfTestedKernel, measure, unverified, warn_once
from . import KVPages, QueryRows, new_arrivals, xla
from .backend import AttentionParams, AttentionShape

LARGEST_ERROR = 6e-3  # allowed in bfloat16, against float64


@dataclass(frozen=True)
class Trial:
    """A step of attention over sequences of equal length with equally many rows each."""

    name: str
    sequences: int
    length: int  # including the new rows
    rows: int = 1  # of each sequence
    empty: int = 0  # further sequences without rows, and as many padding rows
    # positions that the page tables have room for, where that is more than the length
    room: int = 0
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
    layers: int = 1  # of a step; several append their rows

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(
            self.width**-0.5, window=self.window, soft_cap=self.soft_cap, value_dim=self.values
        )


@dataclass(frozen=True)
class AttentionCase:
    """A trial by an implementation, as a `Case` of `ops/gpu/self_test.py`.

    Several layers are a part of a step: each appends its rows to pages of its own, which are
    donated.
    """

    trial: Trial
    implementation: Callable
    allowed: float = LARGEST_ERROR

    @property
    def name(self) -> str:
        return self.trial.name

    def build(self, seed: int):
        trial, owned = self.trial, self.trial.sequences * self.trial.rows
        held = []
        given = []
        wanted = []
        for layer in range(seed, seed + trial.layers):
            q, pages, rows, sinks = arrays(trial, layer, seed)
            out = reference(trial, q, pages, rows, sinks)
            wanted.append(np.concatenate((out, np.zeros((trial.empty, *out.shape[1:])))))
            new: list[Any] = [None, None]
            if trial.layers > 1:
                page_T = rows.slots_T // trial.page
                at_T = rows.slots_T % trial.page
                for at, raw_PSKH in enumerate(raw_pages(trial, layer)):
                    new[at] = raw_PSKH[page_T, at_T]
                pages = without(pages, page_T[:owned], at_T[:owned])
            held.append(pages)
            given.append((q, *new, rows, sinks))
        return held, given, np.stack(wanted)

    def run(self, held, given):
        outs = []
        after = []
        out = None
        arrivals = new_arrivals()
        for pages, (q, k, v, rows, sinks) in zip(held, given, strict=True):
            q, _ = jax.lax.optimization_barrier((q, out))  # a layer comes after the one before
            rows = rows.replace(arrivals=arrivals)
            out, pages = self.implementation(q, k, v, pages, rows, self.trial.params, sinks)
            outs.append(out)
            after.append(pages)
        return jnp.stack(outs), after


def self_tested(
    kernel: SelfTestedKernel,
    kernel_limits: Callable[[AttentionParams, AttentionShape], str | None],
    device_reason: Callable[[], str | None],
) -> Callable[[AttentionParams, AttentionShape], str | None]:
    """`AttentionBackend.limits` of a kernel for NVIDIA GPUs: what it does not serve, or its
    self-test did not show.
    """

    def limits(params: AttentionParams, shape: AttentionShape) -> str | None:
        if (no_device := device_reason()) == device.NO_GPU:
            return no_device
        if (reason := kernel_limits(params, shape)) is not None:
            warn_once(kernel.work, reason)
            return reason
        return unverified(kernel, kind_of_trial(params, shape), no_device)

    return limits


def kind_of_trial(params: AttentionParams, shape: AttentionShape) -> dict[str, Any]:
    """What the trials of a self-test have in common with a call, as arguments of `Trial`."""
    return {
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "width": shape.head_dim,
        "window": params.window,
        "soft_cap": params.soft_cap,
        "sinks": shape.has_sinks,
        "page": shape.page_size,
        "codes": shape.page_dtype if shape.has_scales else None,
        "values": params.value_dim,
        "dtype": shape.dtype,
    }


def measure_attention(trial: Trial, implementation: Callable, seed: int) -> CaseResult:
    """What a trial shows of an implementation in one run."""
    return measure(AttentionCase(trial, implementation), seed, repeats=1)


def raw_pages(trial: Trial, seed: int) -> list[jax.Array]:
    """The pages of keys, and of values where they have their own, before they are coded."""
    pages = 1 + trial.sequences * -(-trial.length // trial.page)
    keys = jax.random.split(jax.random.key(seed), 3)[1 : 3 if trial.values is None else 2]
    return [
        jax.random.normal(key, (pages, trial.page, trial.kv_heads, trial.width), trial.dtype)
        for key in keys
    ]


def arrays(trial: Trial, seed: int, order: int | None = None) -> tuple[Any, ...]:
    """(q, pages, rows, sinks): pages in random order (that of the seed `order`), NaN where no
    sequence owns them.
    """
    B = trial.sequences
    R = trial.rows
    S = trial.page
    T = B * R + trial.empty
    M = -(-trial.length // S)
    tables_BM = 1 + np.random.default_rng(seed if order is None else order).permutation(
        B * M
    ).reshape(B, M)
    q_TNH = jax.random.normal(
        jax.random.split(jax.random.key(seed), 3)[0], (T, trial.heads, trial.width), trial.dtype
    )

    def poison(pages, *between):
        """With NaN in the dummy page and in the unused end of each sequence's last page."""
        left = trial.length - (M - 1) * S
        return (
            pages.at[0]
            .set(jnp.nan)
            .at[(tables_BM[:, -1], *between, slice(left, None))]
            .set(jnp.nan)
        )

    pages = []
    scales = []
    for page_PSKH in raw_pages(trial, seed):
        if trial.codes is None:
            pages.append(poison(page_PSKH))
            continue
        codes_PSKH, scale_PSK = xla.quantise(page_PSKH, jnp.dtype(trial.codes))
        pages.append(codes_PSKH)
        scales.append(poison(jnp.swapaxes(scale_PSK, 1, 2), slice(None)))
    positions_T, slots_T = np.zeros((2, T))
    positions_T[: B * R] = np.tile(np.arange(trial.length - R, trial.length), B)
    new_R = np.arange(trial.length - R, trial.length)
    slots_T[: B * R] = (tables_BM[:, new_R // S] * S + new_R % S).reshape(-1)
    starts_B1 = np.minimum(np.arange(B + trial.empty + 1), B) * R
    wider_BM = np.zeros((B + trial.empty, max(M, -(-trial.room // S))))
    wider_BM[:B, :M] = tables_BM
    rows = QueryRows(
        *(jnp.asarray(x, jnp.int32) for x in (positions_T, starts_B1, wider_BM, slots_T))
    )
    sinks_N = jnp.linspace(-2.0, 3.0, trial.heads) if trial.sinks else None
    held = dict(zip(("k_PSKH", "v_PSKH"), pages, strict=False))
    held |= dict(zip(("k_scale_PKS", "v_scale_PKS"), scales, strict=False))
    return q_TNH, KVPages(**held), rows, sinks_N


def without(pages: KVPages, page_R, at_R) -> KVPages:
    """Pages whose new rows are not there yet, but NaN."""
    if pages.k_scale_PKS is not None:
        k_scale_PKS, v_scale_PKS = (
            x.at[page_R, :, at_R].set(jnp.nan) for x in (pages.k_scale_PKS, pages.v_scale_PKS)
        )
        return pages.replace(k_scale_PKS=k_scale_PKS, v_scale_PKS=v_scale_PKS)
    return jax.tree.map(lambda page_PSKH: page_PSKH.at[page_R, at_R].set(jnp.nan), pages)


def attend(trial: Trial, implementation: Callable, q, pages, rows, sinks):
    out, _ = implementation(q, None, None, pages, rows, trial.params, sinks)
    return out


def reference(trial: Trial, q, pages, rows, sinks) -> np.ndarray:
    """The result in float64, on the host, from the same inputs. G rows of a KV head, J keys."""

    def numbers(held, scale=None):
        x = np.asarray(held.astype(jnp.float32), np.float64)
        return (
            x if scale is None else x * np.swapaxes(np.asarray(scale, np.float64), 1, 2)[..., None]
        )

    k = numbers(pages.k_PSKH, pages.k_scale_PKS)
    v = k[..., : trial.values] if trial.values else numbers(pages.v_PSKH, pages.v_scale_PKS)
    B = trial.sequences
    R = trial.rows
    K = trial.kv_heads
    tables = np.asarray(rows.tables_BM)[:, : -(-trial.length // trial.page)]
    q_BKGH = np.moveaxis(numbers(q[: B * R]).reshape(B, R, K, -1, trial.width), 2, 1).reshape(
        B, K, -1, trial.width
    )
    each = trial.heads // K  # rows of one position
    position_G = np.repeat(np.arange(trial.length - R, trial.length), each)
    key_J = np.arange(trial.length)
    seen_GJ = key_J <= position_G[:, None]
    if trial.window is not None:
        seen_GJ &= key_J > position_G[:, None] - trial.window
    sink_KG1 = (
        None
        if sinks is None
        else np.tile(np.asarray(sinks, np.float64).reshape(K, each), R)[..., None]
    )
    out = []
    for b in range(B):
        k_KJH, v_KJH = (
            np.moveaxis(x[tables[b]].reshape(-1, *x.shape[2:])[: trial.length], 1, 0)
            for x in (k, v)
        )
        score_KGJ = q_BKGH[b] @ np.swapaxes(k_KJH, 1, 2) * trial.params.scale
        if trial.soft_cap is not None:
            score_KGJ = trial.soft_cap * np.tanh(score_KGJ / trial.soft_cap)
        score_KGJ = np.where(seen_GJ, score_KGJ, -np.inf)
        top_KG1 = score_KGJ.max(-1, keepdims=True)
        if sink_KG1 is not None:
            top_KG1 = np.maximum(top_KG1, sink_KG1)
        weight_KGJ = np.exp(score_KGJ - top_KG1)
        total_KG1 = weight_KGJ.sum(-1, keepdims=True) + (
            0 if sink_KG1 is None else np.exp(sink_KG1 - top_KG1)
        )
        mixed_KGH = (weight_KGJ / total_KG1) @ v_KJH
        out.append(np.moveaxis(mixed_KGH.reshape(K, R, each, -1), 1, 0).reshape(R, trial.heads, -1))
    return np.concatenate(out)
