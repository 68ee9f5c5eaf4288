"""Attention steps that check any implementation against float64, with NaN in every slot that no
sequence owns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from quire.ops.attention import KVPages, QueryRows, paged_attention
from quire.ops.attention.backend import AttentionParams, AttentionShape
from quire.sharding.device_axes import UNSPLIT, Axis
from quire.tests.support import four_bits

LONGEST = 192  # maximum length of a sequence
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Shape:
    """A model's attention parameters and a step's sizes (static in a compiled step)."""

    K: int = 2
    G: int = 3
    H: int = 16
    S: int = 16
    T: int = 48
    B: int = 6
    dtype: str = "float32"
    bits: bool = False  # bfloat16 pages held as uint16
    codes: str | None = None  # pages held as int8, float8_e4m3fn or int4 with scales
    paired: bool = False  # keys and values in one array of pages
    window: int | None = None
    chunked: bool = False
    ahead: int = 0
    soft_cap: float | None = None
    sinks: bool = False
    value_dim: int | None = None
    context: Axis = UNSPLIT

    @property
    def tolerance(self) -> dict[str, float]:
        """Tolerances: kernels may round queries once more after the rotation of int4 keys."""
        if self.dtype == "float32":
            return {"rtol": 2e-5, "atol": 2e-5}
        return {"rtol": 1e-2, "atol": 3e-2 if self.codes == "int4" else 4e-3}

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(
            self.H**-0.5,
            self.window,
            self.chunked,
            self.ahead,
            self.soft_cap,
            self.value_dim,
            self.context,
        )


def call_shape(q_TNH, pages: KVPages, params: AttentionParams) -> AttentionShape:
    """The shape of a call with one sequence."""
    return AttentionShape.of(q_TNH, pages, QueryRows(None, None, np.zeros((1, 1)), None), params)


@dataclass
class Sequence:
    """Random arrays of a sequence; they depend on the seed, not on the split into steps."""

    seed: int
    start: int  # tokens before this one are in the cache
    rows: int

    def arrays(self, shape: Shape):
        rng = np.random.default_rng(self.seed)
        q = rng.standard_normal((LONGEST, shape.K * shape.G, shape.H))
        k, v = rng.standard_normal((2, LONGEST, shape.K, shape.H))
        q[rng.random(LONGEST) < 0.2] *= 6  # a few sharp rows
        return [
            x.astype(np.dtype(shape.dtype) if shape.dtype == "float32" else BFLOAT16)
            for x in (q, k, v)
        ]

    def numbers(self, shape: Shape):
        """`arrays` in float64; keys and values are dequantised from what the pages hold."""
        q, *key_values = self.arrays(shape)
        if shape.codes == "int4":
            k, v = (
                four_bits.dequantize(*codes_and_scale)
                for codes_and_scale in (
                    quantize_rows(shape, key_values[0], keys=True),
                    quantize_rows(shape, key_values[1]),
                )
            )
            key_values = [k @ four_bits.hadamard_matrix(shape.H), v]
        elif shape.codes is not None:
            key_values = [
                codes.astype(np.float64) * scale[..., None]
                for codes, scale in (quantize_rows(shape, x) for x in key_values)
            ]
        return [x.astype(np.float64) for x in (q, *key_values)]


def quantize_rows(shape: Shape, x: np.ndarray, keys: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scale of each row): a row's largest magnitude becomes the largest code."""
    if shape.codes == "int4":
        return four_bits.quantize(four_bits.hadamard_rotate(x) if keys else x)
    x = x.astype(np.float32)
    largest = np.float32(127 if shape.codes == "int8" else 448)
    row_max = np.abs(x).max(-1)
    codes = np.nan_to_num(x * (largest / row_max)[..., None])  # padding rows may hold anything
    codes = (
        np.round(codes).astype(np.int8)
        if shape.codes == "int8"
        else codes.astype(ml_dtypes.float8_e4m3fn)
    )
    return codes, row_max * (np.float32(1) / largest)


@dataclass
class Case:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pages: list[np.ndarray]  # keys, values, then their scales if quantised
    rows: QueryRows
    places: list[range]  # the tokens of each sequence


def build(shape: Shape, sequences: list[Sequence], rng: np.random.Generator) -> Case:
    """Make a step's inputs. Pages are in random order; padding and unowned slots are NaN."""
    S, M, T, B = shape.S, -(-LONGEST // shape.S), shape.T, shape.B
    dtype = sequences[0].arrays(shape)[0].dtype
    P = 2 + M * shape.B
    if shape.codes is None:
        pages = [np.full((P, S, shape.K, shape.H), np.nan, dtype) for _ in range(2)]
    else:
        four = shape.codes == "int4"
        page_dtype = np.dtype(np.uint8 if four else getattr(ml_dtypes, shape.codes, shape.codes))
        size = P, S, shape.K, shape.H // 2 if four else shape.H
        pages = [rng.integers(-128, 128, size, np.int8).view(page_dtype) for _ in range(2)]
        pages += [np.full((P, shape.K, S), np.nan, np.float32) for _ in range(2)]
    q = np.full((T, shape.K * shape.G, shape.H), np.nan, dtype)
    k, v = (np.full((T, shape.K, shape.H), np.nan, dtype) for _ in range(2))
    positions = rng.integers(0, 9, T)  # positions of padding may be anything
    slots = rng.integers(0, S, T)
    tables = rng.integers(0, P, (B, M))  # unused entries are stale page numbers
    starts = np.zeros(B + 1, int)
    free = list(rng.permutation(np.arange(1, P)))
    at = 0
    places = []
    for b, sequence in enumerate(sequences):
        q_all, k_all, v_all = sequence.arrays(shape)
        end = sequence.start + sequence.rows
        oldest = 0 if shape.window is None else max(0, sequence.start - shape.window + 1)
        for page in range(oldest // S, -(-end // S)):
            tables[b, page] = free.pop()
        cached_rows = page_form(shape, k_all, v_all)
        for p in range(oldest // S * S, sequence.start):
            write_token(pages, cached_rows, p, tables[b, p // S] * S + p % S)
        places.append(range(at, at + sequence.rows))
        for p in range(sequence.start, end):
            q[at], k[at], v[at], positions[at] = q_all[p], k_all[p], v_all[p], p
            slots[at], at = tables[b, p // S] * S + p % S, at + 1
        starts[b + 1] = at
    starts[len(sequences) + 1 :] = at
    rows = QueryRows(*(jnp.asarray(x, jnp.int32) for x in (positions, starts, tables, slots)))
    return Case(q, k, v, pages, rows, places)


def page_form(shape: Shape, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Keys and values (and scales) in the form in which a case's pages hold them."""
    if shape.codes is None:
        return [k, v]
    k, k_scale = quantize_rows(shape, k, keys=True)
    v, v_scale = quantize_rows(shape, v)
    return [k, v, k_scale, v_scale]


def write_token(pages: list[np.ndarray], arrays: list[np.ndarray], row: int, slot: int) -> None:
    """Write a token's keys and values where a step should write them."""
    for array_pages, array in zip(pages, arrays, strict=False):
        S = pages[0].shape[1]
        if array.ndim == 3:
            array_pages[slot // S, slot % S] = array[row]
        else:
            array_pages[slot // S, :, slot % S] = array[row]


@partial(jax.jit, static_argnames=("shape", "attend"), donate_argnames="pages")
def step(q, k, v, pages, rows, sinks, shape, attend=paged_attention):
    return attend(q, k, v, pages, rows, shape.params, sinks)


def attention_sinks(shape: Shape):
    return np.linspace(-2, 3, shape.K * shape.G).astype(np.float32) if shape.sinks else None


def run(shape: Shape, case: Case, attend: Callable[..., Any] = paged_attention):
    """(out, pages) of one step, as numpy arrays in the model's dtype."""
    pages_on_device = [jnp.asarray(x.view(np.uint16) if shape.bits else x) for x in case.pages]
    latent = shape.value_dim is not None
    if shape.paired:
        pairs = jnp.stack(pages_on_device, axis=3)
        pages = KVPages(kv_PSYH=pairs.reshape(*pairs.shape[:2], -1, shape.H))
    else:
        pages = KVPages(pages_on_device[0]) if latent else KVPages(*pages_on_device)
    v = None if latent else jnp.asarray(case.v)
    out, pages = step(
        jnp.asarray(case.q),
        jnp.asarray(case.k),
        v,
        pages,
        case.rows,
        attention_sinks(shape),
        shape,
        attend,
    )
    out_pages = (
        [pages.kv_PSYH[:, :, at::2] for at in range(2)] if shape.paired else jax.tree.leaves(pages)
    )
    assert all(
        x.dtype == device_pages.dtype
        for x, device_pages in zip(out_pages, pages_on_device, strict=not latent)
    )
    return np.asarray(out), [
        np.asarray(x).view(y.dtype) for x, y in zip(out_pages, case.pages, strict=False)
    ]


def reference(shape: Shape, sequence: Sequence) -> np.ndarray:
    """Attention by its definition in float64, one token at a time."""
    q, k, v = sequence.numbers(shape)
    if shape.value_dim is not None:
        v = k[..., : shape.value_dim]
    sinks = attention_sinks(shape)
    out = []
    for p in range(sequence.start, sequence.start + sequence.rows):
        first = 0 if shape.window is None else max(0, p - shape.window + 1)
        if shape.chunked and shape.window is not None:
            first = p // shape.window * shape.window
        end = min(p + shape.ahead, sequence.start + sequence.rows - 1) + 1
        heads = []
        for n in range(shape.K * shape.G):
            score = k[first:end, n // shape.G] @ q[p, n] * shape.H**-0.5
            if shape.soft_cap is not None:
                score = shape.soft_cap * np.tanh(score / shape.soft_cap)
            top = max(score.max(), -np.inf if sinks is None else sinks[n])
            weight = np.exp(score - top)
            total = weight.sum() + (0 if sinks is None else np.exp(sinks[n] - top))
            heads.append(weight @ v[first:end, n // shape.G] / total)
        out.append(heads)
    return np.array(out)


def check(
    shape: Shape,
    sequences: list[Sequence],
    rng: np.random.Generator,
    attend: Callable[..., Any] = paged_attention,
    tolerance: dict[str, float] | None = None,
) -> None:
    """Check a step's results, and that it writes only its tokens' slots and zeros padding."""
    case = build(shape, sequences, rng)
    out, pages = run(shape, case, attend)
    tolerance = tolerance or shape.tolerance
    for sequence, place in zip(sequences, case.places, strict=True):
        np.testing.assert_allclose(
            out[place].astype(np.float64), reference(shape, sequence), **tolerance
        )
    padding = out[case.places[-1].stop :].astype(np.float32)
    assert not padding.any(), "padding rows are zero"
    expected_pages = [x.copy() for x in case.pages]
    held_rows = page_form(shape, case.k, case.v)
    for row, slot in enumerate(np.asarray(case.rows.slots_T)[: case.places[-1].stop]):
        write_token(expected_pages, held_rows, row, slot)
    for actual, expected in zip(pages, expected_pages, strict=False):
        assert actual[1:].tobytes() == expected[1:].tobytes(), (
            "only the slots of the tokens are written"
        )


def ragged(shape: Shape, rng: np.random.Generator) -> list[Sequence]:
    """Sequences that decode, verify drafts or prefill a chunk, until the token budget is used."""
    sequences = []
    num_free = shape.T
    for number in range(int(rng.integers(1, shape.B + 1))):
        max_rows = min(num_free - (shape.B - number - 1), LONGEST)
        kind = rng.integers(3)
        rows = int(
            1
            if kind == 0 or max_rows < 2
            else rng.integers(2, min(max_rows, 6) + 1)
            if kind == 1
            else 0
        )
        rows = rows or int(rng.integers(1, max_rows + 1))
        start = 0 if rng.random() < 0.2 else int(rng.integers(0, LONGEST - rows + 1))
        sequences.append(Sequence(int(rng.integers(1 << 30)), start, rows))
        num_free -= rows
    return sequences
