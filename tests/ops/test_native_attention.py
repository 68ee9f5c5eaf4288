"""The CPU attention kernel against a float64 softmax, for this machine's instruction sets."""

import dataclasses
import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops import native
from quire.ops.attention import KVPages, QueryRows, xla
from quire.ops.attention import cpu as attention
from quire.ops.attention.backend import AttentionParams
from quire.ops.native import build
from quire.tests.support import four_bits
from quire.tests.support.cases import cases, thinned

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LONGEST = 1300  # positions: more than two spans of keys
# Instruction sets with bfloat16 dot products: attention weights are rounded to bfloat16, and so are
# rotated queries.
PAIRWISE = "avx512_bf16", "bf16"
ISAS = [name for name in build.isas() if "emulated" not in name]


@pytest.fixture(params=thinned(ISAS, ISAS[:1]))
def isa(request, monkeypatch):
    monkeypatch.setenv("QUIRE_NATIVE", request.param)
    if not native.serves():
        pytest.skip("no compiler")
    jax.clear_caches()  # the instruction set is not part of a trace's key


@dataclass(frozen=True)
class Shape:
    """A model's attention, and the format of its KV pages."""

    K: int = 2
    G: int = 3
    H: int = 64
    S: int = 16
    dtype: str = "bfloat16"  # of queries, new keys and results
    pages: str = "bits"  # bits, bfloat16, float32, int8 or int4
    window: int | None = None
    chunked: bool = False
    lookahead: int = 0
    span: int = 0  # rows see up to the end of their run of this many positions
    soft_cap: float | None = None
    sinks: bool = False
    value_dim: int | None = None  # values are the first `value_dim` elements of the keys

    @property
    def V(self):
        return self.value_dim or self.H

    @property
    def scaled(self):
        return self.pages in ("int8", "int4")

    @property
    def options(self):
        cap = self.soft_cap
        sinks = None
        if self.sinks:
            sinks = np.linspace(-2, 3, self.K * self.G).astype(np.float32)
        return AttentionParams(
            self.H**-0.5,
            self.window,
            self.chunked,
            self.lookahead,
            cap,
            self.value_dim,
            spans=self.span > 0,
        ), sinks

    def sees(self, sequence: "Sequence"):
        """The last position that each row sees, with spans."""
        positions = np.arange(sequence.start, sequence.end)
        return np.minimum((positions // self.span + 1) * self.span, sequence.end) - 1

    @property
    def page_dtype(self):
        """The dtype of the pages in numpy."""
        kinds = {
            "bits": BFLOAT16,
            "bfloat16": BFLOAT16,
            "float32": np.float32,
            "int8": np.int8,
            "int4": np.uint8,
        }
        return np.dtype(kinds[self.pages])


@dataclass(frozen=True)
class Sequence:
    """Rows [start, start + rows) of a sequence; the cache holds the earlier positions."""

    seed: int
    start: int
    rows: int

    @property
    def end(self):
        return self.start + self.rows


@cache
def random_qkv(shape: Shape, seed: int):
    """Queries, keys and values of a whole sequence, independent of its chunks."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((LONGEST, shape.K * shape.G, shape.H), np.float32)
    k, v = rng.standard_normal((2, LONGEST, shape.K, shape.H), np.float32)
    q[rng.random(LONGEST) < 0.2] *= 6  # a few sharp rows
    k[:, :, 0] *= 4
    return tuple(
        x.astype(np.dtype(shape.dtype) if shape.dtype == "float32" else BFLOAT16) for x in (q, k, v)
    )


def quantize_int8(x):
    """(int8 codes, scales) of rows, rounding ties to even; each row's maximum becomes 127."""
    x = x.astype(np.float32)
    max_abs = np.abs(x).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), max_abs, out=np.zeros_like(max_abs), where=max_abs > 0)
    return np.round(x * inverse).astype(np.int8), max_abs[..., 0] * np.float32(1 / 127)


def to_pages(shape: Shape, x, keys: bool):
    """(rows in the pages' format, their scales or None)."""
    if shape.pages == "int4":
        return four_bits.quantize(four_bits.hadamard_rotate(x) if keys else x)
    return quantize_int8(x) if shape.pages == "int8" else (x.astype(shape.page_dtype), None)


def from_pages(shape: Shape, x, keys: bool):
    """Rows as attention reads them from pages, in float64."""
    stored, scale = to_pages(shape, x, keys)
    if shape.pages == "int4":
        values = four_bits.dequantize(stored, scale)
        return values @ four_bits.hadamard_matrix(shape.H) if keys else values
    return stored.astype(np.float64) * (1 if scale is None else scale.astype(np.float64)[..., None])


def reference_attention(shape: Shape, s: Sequence):
    """(float64 attention outputs, tolerance for attention weights that are rounded to bfloat16)."""
    options, sinks = shape.options
    q, k, v = random_qkv(shape, s.seed)
    q = q[s.start : s.end].astype(np.float64)
    k = from_pages(shape, k[: s.end], keys=True)
    if shape.pages == "int4" and shape.dtype == "bfloat16" and native.instruction_set() in PAIRWISE:
        q = four_bits.hadamard_rotate(q).astype(BFLOAT16).astype(
            np.float64
        ) @ four_bits.hadamard_matrix(shape.H)
    v = (
        from_pages(shape, v[: s.end], keys=False)
        if shape.value_dim is None
        else k[..., : shape.value_dim]
    )
    score = (
        np.einsum("tkgh,jkh->tkgj", q.reshape(s.rows, shape.K, shape.G, shape.H), k) * options.scale
    )
    if shape.soft_cap is not None:
        score = shape.soft_cap * np.tanh(score / shape.soft_cap)
    distance = np.arange(s.start, s.end)[:, None] - np.arange(s.end)
    hidden = (distance < -shape.lookahead) | (distance >= (shape.window or LONGEST))
    if shape.span:
        hidden = np.arange(s.end) > shape.sees(s)[:, None]
        hidden |= distance >= (shape.window or LONGEST)
    if shape.chunked and shape.window is not None:
        hidden |= (
            np.arange(s.start, s.end)[:, None] // shape.window > np.arange(s.end) // shape.window
        )
    score = np.where(hidden[:, None, None], -np.inf, score)
    best = score.max(-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(np.float64).reshape(shape.K, shape.G, 1)
    best = best if sink is None else np.maximum(best, sink)
    weight = np.exp(score - best)
    total = weight.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - best))
    outputs, max_output = (
        np.einsum("tkgj,jkv->tkgv", weight / total, x).reshape(s.rows, -1, shape.V)
        for x in (v, abs(v))
    )
    rounded = (
        shape.dtype == "bfloat16"
        and shape.pages != "float32"
        and native.instruction_set() in PAIRWISE
    )
    return outputs, max_output * rounded * 2**-8


def build_case(shape: Shape, sequences, rng, num_padding: int = 0):
    """A step's inputs: (q, k, v), page arrays, scales, rows, and each sequence's slice of the rows.

    Unused elements, also of padding rows, are NaN.
    """
    S = shape.S
    B = len(sequences) + int(rng.integers(3))
    M = -(-max(s.end for s in sequences) // S) + 1
    T = sum(s.rows for s in sequences) + num_padding
    P = 2 + M * len(sequences)
    free = list(rng.permutation(np.arange(1, P)))
    dtype = random_qkv(shape, sequences[0].seed)[0].dtype
    new = [np.full((T, n, shape.H), np.nan, dtype) for n in (shape.K * shape.G, shape.K, shape.K)]
    garbage = rng.integers(0, 128) if shape.scaled else np.nan
    width = shape.H // 2 if shape.pages == "int4" else shape.H
    page_arrays = [np.full((P, S, shape.K, width), garbage, shape.page_dtype) for _ in range(2)]
    scales = [np.full((P, shape.K, S), np.nan, np.float32) for _ in range(2)]
    positions = rng.integers(0, 9, T)
    slots = rng.integers(0, S, T)
    tables = rng.integers(-9, P + 9, (B, M))
    starts = np.zeros(B + 1, int)
    places = []
    for b, s in enumerate(sequences):
        oldest = 0 if shape.window is None else max(0, s.start - shape.window + 1)
        for page in range(oldest // S, -(-s.end // S)):
            tables[b, page] = free.pop()
        place = slice(starts[b], starts[b] + s.rows)
        p = np.arange(oldest, s.end)
        slot_ids = tables[b, p // S] * S + p % S
        for keys, array, scale, x in zip(
            (True, False), page_arrays, scales, random_qkv(shape, s.seed)[1:], strict=True
        ):
            old_rows, old_scale = to_pages(shape, x[oldest : s.start], keys)
            array.reshape(-1, shape.K, width)[slot_ids[: s.start - oldest]] = old_rows
            if old_scale is not None:
                old_slots = slot_ids[: s.start - oldest]
                scale[old_slots // S, :, old_slots % S] = old_scale
        for array, x in zip(new, random_qkv(shape, s.seed), strict=True):
            array[place] = x[s.start : s.end]
        positions[place], slots[place] = np.arange(s.start, s.end), slot_ids[s.start - oldest :]
        starts[b + 1 :] = place.stop
        places.append(place)
    rows = QueryRows(*(jnp.asarray(x, jnp.int32) for x in (positions, starts, tables, slots)))
    if shape.span:
        sees = positions.copy()
        for s, place in zip(sequences, places, strict=True):
            sees[place] = shape.sees(s)
        rows = rows.replace(sees_T=jnp.asarray(sees, jnp.int32))
    return new, page_arrays, scales if shape.scaled else [None, None], rows, places


@partial(jax.jit, static_argnames=("shape", "implementation"), donate_argnames="pages")
def step(q, k, v, pages, rows, sinks, shape, implementation):
    return implementation(q, k, v, pages, rows, shape.options[0], sinks)


def run(shape: Shape, case, implementation=attention.attend, append=True):
    """(out, pages) of one step, as numpy arrays."""
    (q, k, v), page_arrays, scales, rows, _ = case
    num_arrays = 1 if shape.value_dim else 2
    page_arrays = [
        jnp.asarray(x.view(np.uint16) if shape.pages == "bits" else x)
        for x in page_arrays[:num_arrays]
    ]
    scales = [None if x is None else jnp.asarray(x) for x in scales[:num_arrays]]
    missing = [None] * (2 - num_arrays)
    new = [jnp.asarray(x) for x in (k, v)[:num_arrays]] + missing if append else [None, None]
    pages = KVPages(*page_arrays, *missing, *scales, *missing)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pages)]
    out, pages = step(jnp.asarray(q), *new, pages, rows, shape.options[1], shape, implementation)
    if implementation is attention.attend and append:
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pages)] == pointers, (
            "pages are written in place"
        )
    return np.asarray(out), [np.asarray(x) for x in jax.tree.leaves(pages)]


def same_bytes(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def check(shape: Shape, sequences, rng):
    """Check the outputs and pages of one step, and that nothing else was written."""
    case = build_case(shape, sequences, rng, num_padding=int(rng.integers(4)))
    out, pages = run(shape, case)
    new, page_arrays, scales, rows, places = case
    # Sharp rows have scores above fifty, where one float32 ulp changes a weight by 4e-6.
    tolerances = (4e-5, 4e-5) if shape.dtype == "float32" else (8e-3, 2e-3)
    for s, place in zip(sequences, places, strict=True):
        expected_rows, rounding = reference_attention(shape, s)
        error = abs(out[place].astype(np.float64) - expected_rows) - rounding
        np.testing.assert_array_less(error, tolerances[1] + tolerances[0] * abs(expected_rows))
    num_rows = places[-1].stop
    assert not out[num_rows:].astype(np.float32).any(), "padding rows are zero"
    slots = np.asarray(rows.slots_T)[:num_rows]
    expected = [[], []]
    for keys, array, scale, x in zip((True, False), page_arrays, scales, new[1:], strict=True):
        new_rows, new_scale = to_pages(shape, x[:num_rows], keys)
        array.reshape(-1, *array.shape[2:])[slots] = new_rows
        expected[0].append(array)
        if scale is not None:
            scale[slots // shape.S, :, slots % shape.S] = new_scale
            expected[1].append(scale)
    num_arrays = 1 if shape.value_dim else 2
    pages = [x[1:] for x in pages]  # page 0 belongs to no sequence
    assert same_bytes(pages, [x[1:] for kind in expected for x in kind[:num_arrays]]), (
        "only the slots of the rows are written"
    )


@st.composite
def random_shapes(draw):
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    wide_formats = ["bits", "bits", "bfloat16"] if dtype == "bfloat16" else ["float32"]
    pages = draw(st.sampled_from([*wide_formats, "int8", "int4"]))
    H = draw(st.sampled_from([64, 128, 8, 16, 20, 33, 80, 96, 192]))
    latent = draw(st.sampled_from([None, None, None, H - 8 if H > 8 else 5]))
    if pages == "int4":
        H = H + H % 2
        latent = None
    K, G = draw(st.sampled_from([(1, 1), (4, 1), (2, 3), (1, 7), (1, 20), (3, 2), (1, 130)]))
    window = draw(st.sampled_from([None, None, 1, 40, 64, 600]))
    return Shape(
        K=K,
        G=G,
        H=H,
        S=draw(st.sampled_from([8, 16, 32, 5])),
        dtype=dtype,
        pages=pages,
        value_dim=latent,
        window=window,
        chunked=window is not None and draw(st.booleans()),
        lookahead=draw(st.sampled_from([0, 0, 1, 63, 70, 1 << 29])),
        soft_cap=draw(st.sampled_from([None, None, 3.0])),
        sinks=draw(st.booleans()),
    )


@st.composite
def random_sequences(draw):
    """Sequences that decode, verify drafts or prefill a chunk, many of them near a span's edge."""
    sequences = []
    for seed in range(draw(st.integers(1, 4))):
        rows = draw(st.sampled_from([1, 1, 4, 17, 70]))
        edge = draw(st.sampled_from([0, 0, 16, 64, 128, 512, 1024])) + draw(st.integers(-2, 40))
        sequences.append(Sequence(seed, min(max(0, edge), LONGEST - rows), rows))
    return sequences


@settings(max_examples=cases(25))
@given(shape=random_shapes(), sequences=random_sequences(), seed=st.integers(0, 999))
def check_random(shape, sequences, seed):
    check(shape, sequences, np.random.default_rng(seed))


@pytest.mark.random
def test_random_cases_match_float64(isa):
    check_random()


CASES = {
    "decode": (Shape(), [Sequence(n, 80 * n, 1) for n in range(16)]),
    "heads of 128": (Shape(H=128, K=1, G=8), [Sequence(0, 600, 3), Sequence(1, 30, 1)]),
    "heads of 256": (Shape(H=256, K=1, G=2, soft_cap=30.0), [Sequence(0, 500, 20)]),
    "latent": (Shape(H=576, K=1, G=16, value_dim=512), [Sequence(0, 510, 5), Sequence(1, 3, 1)]),
    "wide queries on narrow pages": (Shape(dtype="float32", pages="bits"), [Sequence(0, 100, 5)]),
    "narrow queries on wide pages": (Shape(pages="float32"), [Sequence(0, 100, 5)]),
    "nothing seen but a sink": (Shape(window=1, sinks=True, S=8), [Sequence(0, 77, 9)]),
    "one key": (Shape(), [Sequence(0, 0, 1)]),
    "four bits": (
        Shape(pages="int4", H=128, K=2, G=4, S=32),
        [Sequence(n, 150 * n, 1 + 9 * n) for n in range(4)],
    ),
    "four bits, heads that are padded": (
        Shape(pages="int4", H=80, window=70, dtype="float32"),
        [Sequence(0, 600, 30)],
    ),
    "both ways": (
        Shape(dtype="float32", pages="float32", lookahead=1 << 29),
        [Sequence(0, 0, 70), Sequence(1, 0, 1)],
    ),
    "spans that see themselves": (
        Shape(span=50, K=1, G=4),
        [Sequence(0, 100, 130), Sequence(1, 0, 30), Sequence(2, 510, 1)],
    ),
    "spans in a window": (
        Shape(span=40, window=64, dtype="float32", pages="float32"),
        [Sequence(0, 480, 120), Sequence(1, 30, 9)],
    ),
    "both ways in a window": (
        Shape(window=65, lookahead=64, S=1),
        [Sequence(0, 0, 300), Sequence(1, 0, 64)],
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_special_cases_match_float64(isa, name):
    check(*CASES[name], np.random.default_rng(4))


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][0].span])
def test_spans_see_themselves_in_xla_too(isa, name):
    shape, sequences = CASES[name]
    case = build_case(shape, sequences, np.random.default_rng(4))
    (native_out, _), (xla_out, _) = (run(shape, case, f) for f in (attention.attend, xla.attend))
    np.testing.assert_allclose(
        native_out.astype(np.float32), xla_out.astype(np.float32), rtol=8e-3, atol=2e-3
    )


@pytest.mark.parametrize("pages", ["int8", "int4"])
def test_quantized_pages_are_bit_identical_to_xla(isa, pages):
    """Also for rows of zeros, huge rows and rounding ties."""
    shape = Shape(pages=pages, H=40)
    rng = np.random.default_rng(2)
    case = build_case(shape, [Sequence(0, 20, 60), Sequence(1, 90, 1)], rng)
    for x in case[0][1:]:
        x[3], x[4], x[5] = 0, x[4] * 1e30, x[5] * 1e-30
        x[6, :, ::2] = x[6, :, :1]  # many of the same size
        x[7, :, 1:] = x[7, :, :1].astype(float) * (np.arange(1, 40) / 254)[None]  # on the ties
    native_result, xla_result = (run(shape, case, f) for f in (attention.attend, xla.attend))
    assert same_bytes(*([x[1:] for x in pages] for _, pages in (native_result, xla_result)))
    decode_rows = case[4][1]
    np.testing.assert_allclose(
        *(out[decode_rows].astype(np.float32) for out, _ in (native_result, xla_result)), 8e-3, 2e-3
    )


def test_attention_without_new_keys_reads_shared_pages(isa):
    """Without new keys nothing is written, and the rows read the existing pages."""
    shape = Shape()
    case = build_case(shape, [Sequence(1, 70, 3), Sequence(2, 0, 20)], np.random.default_rng(1))
    out, pages = run(shape, case)
    out_again, pages_after = run(
        shape, (case[0], [x.view(BFLOAT16) for x in pages], *case[2:]), append=False
    )
    assert same_bytes([out, *pages], [out_again, *pages_after])


BATCH_INVARIANCE_SHAPES = {
    "gqa": Shape(H=32),
    "mha": Shape(K=3, G=1, H=16, dtype="float32", pages="float32"),
    "wide group": Shape(K=1, G=9, H=24),
    "int8": Shape(H=16, pages="int8"),
    "int4": Shape(H=48, pages="int4"),
    "latent": Shape(K=1, G=4, H=40, value_dim=24),
    "window": Shape(H=16, window=300, sinks=True, soft_cap=4.0),
}


def decode_positions(shape: Shape, positions, seed=77):
    """Yield (position, bytes of its output), each decoded in its own step."""
    for p in positions:
        case = build_case(shape, [Sequence(seed, p, 1)], np.random.default_rng(p))
        yield p, run(shape, case)[0][0].tobytes()


@pytest.mark.parametrize("name", BATCH_INVARIANCE_SHAPES)
@pytest.mark.slow
def test_attention_is_batch_invariant(isa, name):
    """A row's output does not depend on the other rows or on the chunk's start."""
    shape = BATCH_INVARIANCE_SHAPES[name]
    rng = np.random.default_rng(5)
    alone = dict(
        decode_positions(
            shape, [0, 1, 15, 16, 63, 64, 100, 511, 512, 513, 600, 1023, 1024, 1100, 1299]
        )
    )
    for start, rows in (
        (0, 70),
        (0, 600),
        (60, 5),
        (505, 9),
        (512, 100),
        (590, 520),
        (1000, 300),
        (1290, 10),
    ):
        other_sequences = [
            Sequence(n, int(rng.integers(1000)), int(rng.choice([1, 1, 5, 90])))
            for n in range(rng.integers(4))
        ]
        index = int(rng.integers(len(other_sequences) + 1))
        case = build_case(
            shape,
            [*other_sequences[:index], Sequence(77, start, rows), *other_sequences[index:]],
            rng,
        )
        out, _ = run(shape, case)
        for offset, row in enumerate(out[case[4][index]]):
            bits = alone.setdefault(start + offset, row.tobytes())
            assert bits == row.tobytes(), (
                f"position {start + offset} of a chunk of {rows} from {start}"
            )


def digest() -> str:
    """SHA-256 of steps whose work partition depends on the number of threads."""
    sha256 = hashlib.sha256()
    for shape in (Shape(H=32), Shape(H=32, K=1, window=700, sinks=True)):
        for sequences in (
            [Sequence(0, 1299, 1)],
            [Sequence(0, 1100, 150), *(Sequence(n, 9 * n, 1) for n in range(6))],
        ):
            out, pages = run(shape, build_case(shape, sequences, np.random.default_rng(1)))
            for x in (out, *pages):
                sha256.update(x[1 if x.ndim == 4 else 0 :].tobytes())
    return sha256.hexdigest()


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_threads():
    if not native.serves():
        pytest.skip("no compiler")

    def digest_with(threads: int) -> str:
        environment = {**os.environ, "NPROC": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)}
        result = subprocess.run(
            [sys.executable, __file__], env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert digest_with(1) == digest_with(2) == digest_with(7)


def test_float16_is_rejected(isa):
    case = build_case(Shape(), [Sequence(0, 9, 3)], np.random.default_rng(0))
    new, page_arrays, _, rows, _ = case
    half = [[x.astype(np.float16) for x in arrays] for arrays in (new, page_arrays)]
    for q_k_v, pages in (
        (half[0], page_arrays),
        (new, half[1]),
        (half[0][:1] + new[1:], page_arrays),
    ):
        with pytest.raises(NotImplementedError, match="float16|bfloat16"):
            check_arguments(q_k_v, pages, rows)


def check_arguments(new, pages, rows, **fields):
    pages = KVPages(*(jnp.asarray(x) for x in pages)).replace(**fields)
    return attention.BACKEND(*map(jnp.asarray, new), pages, rows, Shape().options[0])


def test_mismatched_shapes_are_rejected():
    if not native.serves():
        pytest.skip("no compiler")
    new, page_arrays, _, rows, _ = build_case(
        Shape(), [Sequence(0, 9, 3)], np.random.default_rng(0)
    )
    for wrong, name in (
        ([new[0], new[1][:2], new[2]], "k_TKH"),
        ([new[0], new[1], new[2][..., :9]], "v_TKH"),
        ([new[0][..., :32], *new[1:]], "k_PSKH"),
        ([new[0][:, :5], *new[1:]], "5 query heads"),
    ):
        with pytest.raises(ValueError, match=name):
            check_arguments(wrong, page_arrays, rows)
    with pytest.raises(ValueError, match="starts_B1"):
        check_arguments(new, page_arrays, dataclasses.replace(rows, starts_B1=rows.starts_B1[:-1]))
    with pytest.raises(ValueError, match="k_scale_PKS"):
        check_arguments(new, [np.zeros(x.shape, np.int8) for x in page_arrays], rows)
    with pytest.raises(ValueError, match="value_dim"):
        check_arguments(new, page_arrays, rows, v_PSKH=None)
    bytes_PSKX = [np.zeros((*x.shape[:-1], 32), np.uint8) for x in page_arrays]
    with pytest.raises(ValueError, match="uint8 need k_scale_PKS"):
        check_arguments(new, bytes_PSKX, rows)
    with pytest.raises(NotImplementedError, match="cannot hold the values"):
        check_arguments(new, bytes_PSKX, rows, v_PSKH=None)


@pytest.mark.parametrize("starts", [[0, 5, 3], [0, 2, 99], [1, 2, 3], [0, -1, 3]])
def test_invalid_sequence_starts_are_rejected(isa, starts):
    case = build_case(Shape(), [Sequence(0, 9, 3)], np.random.default_rng(0))
    tables_BM = case[3].tables_BM[:1].repeat(2, 0)
    rows = dataclasses.replace(
        case[3], starts_B1=jnp.asarray(starts, jnp.int32), tables_BM=tables_BM
    )
    with pytest.raises(Exception, match="starts_B1"):
        run(Shape(), (*case[:3], rows, case[4]))


if __name__ == "__main__":
    print(digest())
