"""Self-test cases of attention implementations: random inputs, and the float64 reference.

Pages that no sequence owns hold NaN, so that reading them shows.
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
    """A step of attention over sequences of equal length, with equally many rows each."""

    name: str
    sequences: int
    length: int  # of each sequence, including the new rows
    rows: int = 1  # of each sequence
    empty: int = 0  # number of further sequences without rows, and of padding rows
    room: int = 0  # positions for which the page tables have room, if more than the length
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    page: int = 16
    codes: str | None = None  # dtype of the pages, if they are quantised
    values: int | None = None  # width of the values, if they are part of the keys (MLA)
    dtype: str = "bfloat16"
    layers: int = 1  # of the step; with several layers, each appends its rows before it attends

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(
            self.width**-0.5, window=self.window, soft_cap=self.soft_cap, value_dim=self.values
        )


@dataclass(frozen=True)
class AttentionCase:
    """A trial of an implementation, as a `Case` of `ops/gpu/self_test.py`.

    Each layer has pages of its own, which are donated.
    """

    trial: Trial
    implementation: Callable
    allowed: float = LARGEST_ERROR

    @property
    def name(self) -> str:
        return self.trial.name

    def build(self, seed: int):
        trial = self.trial
        num_rows = trial.sequences * trial.rows
        donated = []
        inputs = []
        expected = []
        for layer in range(seed, seed + trial.layers):
            q, pages, rows, sinks = arrays(trial, layer, seed)
            out = reference(trial, q, pages, rows, sinks)
            expected.append(np.concatenate((out, np.zeros((trial.empty, *out.shape[1:])))))
            new: list[Any] = [None, None]
            if trial.layers > 1:
                page_T = rows.slots_T // trial.page
                offset_T = rows.slots_T % trial.page
                for i, raw_PSKH in enumerate(raw_pages(trial, layer)):
                    new[i] = raw_PSKH[page_T, offset_T]
                pages = poison_rows(pages, page_T[:num_rows], offset_T[:num_rows])
            donated.append(pages)
            inputs.append((q, *new, rows, sinks))
        return donated, inputs, np.stack(expected)

    def run(self, donated, inputs):
        outs = []
        new_pages = []
        out = None
        arrivals = new_arrivals()
        for pages, (q, k, v, rows, sinks) in zip(donated, inputs, strict=True):
            q, _ = jax.lax.optimization_barrier((q, out))  # layers run one after the other
            rows = rows.replace(arrivals=arrivals)
            out, pages = self.implementation(q, k, v, pages, rows, self.trial.params, sinks)
            outs.append(out)
            new_pages.append(pages)
        return jnp.stack(outs), new_pages


def self_tested(
    kernel: SelfTestedKernel,
    kernel_limits: Callable[[AttentionParams, AttentionShape], str | None],
    device_reason: Callable[[], str | None],
) -> Callable[[AttentionParams, AttentionShape], str | None]:
    """Make `AttentionBackend.limits` for a kernel that must pass its self-test.

    Args:
        kernel_limits: Returns why the kernel does not support a call on any GPU.
        device_reason: Returns why this process's GPU cannot run the kernel.
    """

    def limits(params: AttentionParams, shape: AttentionShape) -> str | None:
        if (device_unavailable := device_reason()) == device.NO_GPU:
            return device_unavailable
        if (reason := kernel_limits(params, shape)) is not None:
            warn_once(kernel.work, reason)
            return reason
        return unverified(kernel, kind_of_trial(params, shape), device_unavailable)

    return limits


def kind_of_trial(params: AttentionParams, shape: AttentionShape) -> dict[str, Any]:
    """The arguments of `Trial` that follow from a call: the `kind` of its self-test."""
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
    """Run a trial once and measure its errors."""
    return measure(AttentionCase(trial, implementation), seed, repeats=1)


def raw_pages(trial: Trial, seed: int) -> list[jax.Array]:
    """The pages of keys, and of values unless they are part of the keys, before quantisation."""
    pages = 1 + trial.sequences * -(-trial.length // trial.page)
    keys = jax.random.split(jax.random.key(seed), 3)[1 : 3 if trial.values is None else 2]
    return [
        jax.random.normal(key, (pages, trial.page, trial.kv_heads, trial.width), trial.dtype)
        for key in keys
    ]


def arrays(trial: Trial, seed: int, page_order_seed: int | None = None) -> tuple[Any, ...]:
    """Make the inputs of a trial.

    Args:
        page_order_seed: Seed of the order of the pages; `seed` by default.

    Returns:
        (q, pages, rows, sinks): pages hold NaN where no sequence owns them.
    """
    B = trial.sequences
    R = trial.rows
    S = trial.page
    T = B * R + trial.empty
    M = -(-trial.length // S)
    tables_BM = 1 + np.random.default_rng(
        seed if page_order_seed is None else page_order_seed
    ).permutation(B * M).reshape(B, M)
    q_TNH = jax.random.normal(
        jax.random.split(jax.random.key(seed), 3)[0], (T, trial.heads, trial.width), trial.dtype
    )

    def poison(pages, *middle_index):
        """Put NaN into the dummy page and the unused end of each sequence's last page."""
        last_length = trial.length - (M - 1) * S
        return (
            pages.at[0]
            .set(jnp.nan)
            .at[(tables_BM[:, -1], *middle_index, slice(last_length, None))]
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
    padded_tables_BM = np.zeros((B + trial.empty, max(M, -(-trial.room // S))))
    padded_tables_BM[:B, :M] = tables_BM
    rows = QueryRows(
        *(jnp.asarray(x, jnp.int32) for x in (positions_T, starts_B1, padded_tables_BM, slots_T))
    )
    sinks_N = jnp.linspace(-2.0, 3.0, trial.heads) if trial.sinks else None
    fields = dict(zip(("k_PSKH", "v_PSKH"), pages, strict=False))
    fields |= dict(zip(("k_scale_PKS", "v_scale_PKS"), scales, strict=False))
    return q_TNH, KVPages(**fields), rows, sinks_N


def poison_rows(pages: KVPages, page_R, offset_R) -> KVPages:
    """Put NaN in the place of rows that are yet to be appended."""
    if pages.k_scale_PKS is not None:
        k_scale_PKS, v_scale_PKS = (
            x.at[page_R, :, offset_R].set(jnp.nan) for x in (pages.k_scale_PKS, pages.v_scale_PKS)
        )
        return pages.replace(k_scale_PKS=k_scale_PKS, v_scale_PKS=v_scale_PKS)
    return jax.tree.map(lambda page_PSKH: page_PSKH.at[page_R, offset_R].set(jnp.nan), pages)


def attend(trial: Trial, implementation: Callable, q, pages, rows, sinks):
    """Attend with an implementation, to pages that hold all rows already."""
    out, _ = implementation(q, None, None, pages, rows, trial.params, sinks)
    return out


def reference(trial: Trial, q, pages, rows, sinks) -> np.ndarray:
    """Compute the result in float64 on the host. Dimensions: G rows of a KV head, J keys."""

    def numbers(stored, scale=None):
        x = np.asarray(stored.astype(jnp.float32), np.float64)
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
    group = trial.heads // K  # rows of one position
    position_G = np.repeat(np.arange(trial.length - R, trial.length), group)
    key_J = np.arange(trial.length)
    visible_GJ = key_J <= position_G[:, None]
    if trial.window is not None:
        visible_GJ &= key_J > position_G[:, None] - trial.window
    sink_KG1 = (
        None
        if sinks is None
        else np.tile(np.asarray(sinks, np.float64).reshape(K, group), R)[..., None]
    )
    out = []
    for seq in range(B):
        k_KJH, v_KJH = (
            np.moveaxis(x[tables[seq]].reshape(-1, *x.shape[2:])[: trial.length], 1, 0)
            for x in (k, v)
        )
        score_KGJ = q_BKGH[seq] @ np.swapaxes(k_KJH, 1, 2) * trial.params.scale
        if trial.soft_cap is not None:
            score_KGJ = trial.soft_cap * np.tanh(score_KGJ / trial.soft_cap)
        score_KGJ = np.where(visible_GJ, score_KGJ, -np.inf)
        top_KG1 = score_KGJ.max(-1, keepdims=True)
        if sink_KG1 is not None:
            top_KG1 = np.maximum(top_KG1, sink_KG1)
        weight_KGJ = np.exp(score_KGJ - top_KG1)
        total_KG1 = weight_KGJ.sum(-1, keepdims=True) + (
            0 if sink_KG1 is None else np.exp(sink_KG1 - top_KG1)
        )
        mixed_KGH = (weight_KGJ / total_KG1) @ v_KJH
        out.append(
            np.moveaxis(mixed_KGH.reshape(K, R, group, -1), 1, 0).reshape(R, trial.heads, -1)
        )
    return np.concatenate(out)
