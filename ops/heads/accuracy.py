"""Self-test cases of the head kernel: random tokens, appended at random slots, against float64."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..attention import KVPages, QueryRows
from ..gpu.self_test import Case, InLayers
from . import Heads

LARGEST_ERROR = 6e-3  # relative to float64, for bfloat16
LARGEST_QUANTISED_ERROR = {"int8": 1.2e-2, "float8_e4m3fn": 4e-2}
FILLED = 3  # the value of all page elements before; only the tokens' slots may change
PADDING = 5  # padding tokens


@dataclass(frozen=True)
class HeadsCase:
    """Compares the queries, or with `paged` the keys and values in the pages."""

    kind: dict
    paged: bool
    rows: int = 300  # more than twice the number of multiprocessors
    interpret: Any = None

    @property
    def name(self) -> str:
        return "keys and values in the pages" if self.paged else "queries"

    @property
    def allowed(self) -> float:
        if not self.paged:
            return LARGEST_ERROR
        return LARGEST_QUANTISED_ERROR.get(self.kind["codes"], LARGEST_ERROR)

    def build(self, seed: int):
        kind = self.kind
        rng = np.random.default_rng(seed)
        N = kind["queries"]
        K = kind["keys"]
        H = kind["width"]
        S = kind["page"]
        num_live = self.rows - PADDING
        qkv_TGH = rng.standard_normal((self.rows, N + 2 * K, H)) * rng.choice(
            [0.01, 1, 50], (self.rows, 1, 1)
        )
        qkv_TGH[num_live:] = np.nan
        angle_TC = rng.uniform(0, 9, (self.rows, kind["pairs"]))
        rotation = {
            "cos_sin": tuple(
                jnp.asarray(x, jnp.float32) for x in (np.cos(angle_TC), np.sin(angle_TC))
            ),
            "scales": tuple(
                jnp.asarray(1 + 0.3 * rng.standard_normal(H), kind["dtype"]) for _ in range(2)
            ),
        }
        P = 2 + 2 * self.rows // S
        slots_T = np.r_[S + rng.permutation((P - 1) * S)[:num_live], np.zeros(PADDING)]
        rows = QueryRows(
            None, jnp.asarray([0, num_live], jnp.int32), None, jnp.asarray(slots_T, jnp.int32)
        )
        page_arrays = [
            jnp.full((P, S, K, H), FILLED, kind["codes"] or kind["dtype"]) for _ in range(2)
        ]
        if kind["codes"]:
            page_arrays += [jnp.full((P, K, S), FILLED, jnp.float32) for _ in range(2)]
        inputs = jnp.asarray(qkv_TGH, kind["dtype"]), rotation, rows
        q, k, v = (x[:num_live] for x in in_float64(inputs[0], self.heads(rotation)))
        return KVPages(*page_arrays), inputs, np.stack((k, v), 1) if self.paged else q

    def heads(self, rotation: dict) -> Heads:
        kind = self.kind
        cos_sin = rotation["cos_sin"] if kind["pairs"] else None
        if not kind["norm"]:
            return Heads(kind["queries"], kind["keys"], cos_sin)
        q_scale, k_scale = rotation["scales"]
        return Heads(kind["queries"], kind["keys"], cos_sin, "head", q_scale, k_scale)

    def run(self, donated, inputs):
        """The results, or NaN if anything but the tokens' slots has changed in the pages."""
        qkv_TGH, rotation, rows = inputs
        q_TNH, pages = rotate_and_append(
            qkv_TGH, self.heads(rotation), donated, rows, self.interpret
        )
        num_live = self.rows - PADDING
        S = self.kind["page"]
        page_T = rows.slots_T[:num_live] // S
        offset_T = rows.slots_T[:num_live] % S
        is_written_PS = jnp.zeros(pages.k_PSKH.shape[:2], bool).at[page_T, offset_T].set(True)
        is_unchanged = jnp.bool(True)
        written = []
        for x_PSKH, scale_PKS in (
            (pages.k_PSKH, pages.k_scale_PKS),
            (pages.v_PSKH, pages.v_scale_PKS),
        ):
            is_unchanged &= jnp.all(
                (x_PSKH.astype(jnp.float32) == FILLED) | is_written_PS[:, :, None, None]
            )
            x_TKH = x_PSKH[page_T, offset_T].astype(jnp.float32)
            if scale_PKS is not None:
                is_unchanged &= jnp.all((scale_PKS == FILLED) | is_written_PS[:, None])
                x_TKH = x_TKH * scale_PKS[page_T, :, offset_T][..., None]
            written.append(x_TKH)
        out = jnp.stack(written, 1) if self.paged else q_TNH[:num_live].astype(jnp.float32)
        return jnp.where(is_unchanged, out, jnp.nan), pages


def cases(kind: dict) -> list[Case]:
    """The cases of the self-test."""
    queries = HeadsCase(kind, paged=False)
    pages = HeadsCase(kind, paged=True)
    return [queries, pages, InLayers(pages)]


def rotate_and_append(
    qkv_TGH, heads: Heads, pages: KVPages, rows: QueryRows, interpret: Any
) -> tuple[Any, KVPages]:
    from .hopper_kernel import rotate_and_append

    return rotate_and_append(qkv_TGH, heads, pages, rows, interpret)


def in_float64(qkv_TGH, heads: Heads):
    """(queries, keys, values), computed on the host."""

    def numbers(x) -> np.ndarray:
        return np.asarray(x.astype(jnp.float32), np.float64)

    x_TGH = numbers(qkv_TGH)
    num_rotated = heads.queries + heads.keys
    rotated_TGH = x_TGH[:, :num_rotated]
    if heads.norm:
        scale_GH = np.repeat(
            [numbers(heads.q_scale), numbers(heads.k_scale)], [heads.queries, heads.keys], axis=0
        )
        rotated_TGH = (
            rotated_TGH / np.sqrt(np.mean(rotated_TGH**2, -1, keepdims=True) + heads.eps) * scale_GH
        )
    if heads.cos_sin is not None:
        cos, sin = (numbers(x)[:, None] for x in heads.cos_sin)
        first_half, second_half, unrotated = np.split(
            rotated_TGH, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1
        )
        rotated_TGH = np.concatenate(
            [first_half * cos - second_half * sin, second_half * cos + first_half * sin, unrotated],
            axis=-1,
        )
    return rotated_TGH[:, : heads.queries], rotated_TGH[:, heads.queries :], x_TGH[:, num_rotated:]
