"""Trials of the kernel for a kind of heads: random rows into slots at random, and the result in
float64.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..attention import KVPages, QueryRows
from ..gpu.self_test import Case, InLayers
from . import Heads

LARGEST_ERROR = 6e-3  # allowed in bfloat16, against float64
# allowed of what lies in codes: their steps are this coarse
CODED = {"int8": 1.2e-2, "float8_e4m3fn": 4e-2}
FILLED = 3  # what is in the pages before, which no row may change but in its own slot
PADDING = 5  # rows


@dataclass(frozen=True)
class HeadsCase:
    """Either the queries of a kind of heads, or what is in the pages after."""

    kind: dict
    paged: bool
    rows: int = 300  # more than twice the card's processors
    interpret: Any = None

    @property
    def name(self) -> str:
        return "keys and values in the pages" if self.paged else "queries"

    @property
    def allowed(self) -> float:
        return CODED.get(self.kind["codes"], LARGEST_ERROR) if self.paged else LARGEST_ERROR

    def build(self, seed: int):
        kind = self.kind
        rng = np.random.default_rng(seed)
        N = kind["queries"]
        K = kind["keys"]
        H = kind["width"]
        S = kind["page"]
        live = self.rows - PADDING
        qkv_TGH = rng.standard_normal((self.rows, N + 2 * K, H)) * rng.choice(
            [0.01, 1, 50], (self.rows, 1, 1)
        )
        qkv_TGH[live:] = np.nan
        phase_TC = rng.uniform(0, 9, (self.rows, kind["pairs"]))
        work = {
            "cos_sin": tuple(
                jnp.asarray(x, jnp.float32) for x in (np.cos(phase_TC), np.sin(phase_TC))
            ),
            "scales": tuple(
                jnp.asarray(1 + 0.3 * rng.standard_normal(H), kind["dtype"]) for _ in range(2)
            ),
        }
        P = 2 + 2 * self.rows // S
        slots_T = np.r_[S + rng.permutation((P - 1) * S)[:live], np.zeros(PADDING)]
        rows = QueryRows(
            None, jnp.asarray([0, live], jnp.int32), None, jnp.asarray(slots_T, jnp.int32)
        )
        held = [jnp.full((P, S, K, H), FILLED, kind["codes"] or kind["dtype"]) for _ in range(2)]
        if kind["codes"]:
            held += [jnp.full((P, K, S), FILLED, jnp.float32) for _ in range(2)]
        given = jnp.asarray(qkv_TGH, kind["dtype"]), work, rows
        q, k, v = (x[:live] for x in in_float64(given[0], self.heads(work)))
        return KVPages(*held), given, np.stack((k, v), 1) if self.paged else q

    def heads(self, work: dict) -> Heads:
        kind = self.kind
        cos_sin = work["cos_sin"] if kind["pairs"] else None
        scales = work["scales"] if kind["norm"] else (None, None)
        return Heads(
            kind["queries"], kind["keys"], cos_sin, "head" if kind["norm"] else None, *scales
        )

    def run(self, held, given):
        """NaN where anything is written that is no row's own."""
        qkv_TGH, work, rows = given
        q_TNH, pages = turn_and_append(qkv_TGH, self.heads(work), held, rows, self.interpret)
        live = self.rows - PADDING
        S = self.kind["page"]
        page_T = rows.slots_T[:live] // S
        at_T = rows.slots_T[:live] % S
        own_PS = jnp.zeros(pages.k_PSKH.shape[:2], bool).at[page_T, at_T].set(True)
        kept = jnp.bool(True)
        found = []
        for x_PSKH, scale_PKS in (
            (pages.k_PSKH, pages.k_scale_PKS),
            (pages.v_PSKH, pages.v_scale_PKS),
        ):
            kept &= jnp.all((x_PSKH.astype(jnp.float32) == FILLED) | own_PS[:, :, None, None])
            x_TKH = x_PSKH[page_T, at_T].astype(jnp.float32)
            if scale_PKS is not None:
                kept &= jnp.all((scale_PKS == FILLED) | own_PS[:, None])
                x_TKH = x_TKH * scale_PKS[page_T, :, at_T][..., None]
            found.append(x_TKH)
        out = jnp.stack(found, 1) if self.paged else q_TNH[:live].astype(jnp.float32)
        return jnp.where(kept, out, jnp.nan), pages


def cases(kind: dict) -> list[Case]:
    """What the process that tries runs."""
    queries = HeadsCase(kind, paged=False)
    pages = HeadsCase(kind, paged=True)
    return [queries, pages, InLayers(pages)]


def turn_and_append(
    qkv_TGH, heads: Heads, pages: KVPages, rows: QueryRows, interpret: Any
) -> tuple[Any, KVPages]:
    from .hopper_kernel import turn_and_append

    return turn_and_append(qkv_TGH, heads, pages, rows, interpret)


def in_float64(qkv_TGH, heads: Heads):
    """(queries, keys, values), on the host."""

    def numbers(x) -> np.ndarray:
        return np.asarray(x.astype(jnp.float32), np.float64)

    x_TGH = numbers(qkv_TGH)
    turned = heads.queries + heads.keys
    own_TGH = x_TGH[:, :turned]
    if heads.norm:
        scale_GH = np.repeat(
            [numbers(heads.q_scale), numbers(heads.k_scale)], [heads.queries, heads.keys], axis=0
        )
        own_TGH = own_TGH / np.sqrt(np.mean(own_TGH**2, -1, keepdims=True) + heads.eps) * scale_GH
    if heads.cos_sin is not None:
        cos, sin = (numbers(x)[:, None] for x in heads.cos_sin)
        a, b, rest = np.split(own_TGH, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
        own_TGH = np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
    return own_TGH[:, : heads.queries], own_TGH[:, heads.queries :], x_TGH[:, turned:]
