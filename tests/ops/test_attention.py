"""Paged attention in XLA and in the CPU kernels."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops.attention import (
    KVPages,
    flashinfer,
    hopper,
    page_dtype,
    paged_attention,
    uses_paired_pages,
    xla,
)
from quire.ops.attention.backend import AttentionParams
from quire.ops.attention.xla import BLOCK, tiles
from quire.ops.heads import Heads
from quire.ops.heads import hopper as heads_gpu
from quire.ops.implementations import NoImplementation
from quire.ops.ordered_sum import sum_pairs
from quire.sharding.device_axes import Axis
from quire.tests.support.attention_cases import (
    LONGEST,
    Sequence,
    Shape,
    build,
    call_shape,
    check,
    ragged,
    run,
    step,
)  # fmt: skip
from quire.tests.support.cases import thinned


@pytest.fixture(autouse=True, scope="module", params=["", "off"], ids=["native", "xla"])
def kernels(request):
    """Run every test with the CPU kernels (if there is a compiler) and with XLA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_NATIVE", request.param)
        jax.clear_caches()  # the choice is not part of a trace's key
        yield
        jax.clear_caches()


GQA = Shape()
MIXED_STEP_SHAPES = {
    "gqa": GQA,
    "mha": Shape(K=4, G=1),
    "mqa": Shape(K=1, G=4, H=32),
    "one head": Shape(K=1, G=1),
    "wide group": Shape(K=1, G=60, T=32),
    "page 8": Shape(S=8),
    "page 32": Shape(S=32),
    "page 96": Shape(S=96),
    "page 1": Shape(S=1),
    "window": Shape(window=40),
    "window 1": Shape(window=1, S=8),
    "window of a block": Shape(window=BLOCK, S=8),
    "chunks": Shape(window=40, chunked=True),
    "chunks of blocks": Shape(window=BLOCK, chunked=True, S=8, sinks=True, K=1, G=4),
    "chunks, bfloat16": Shape(window=56, chunked=True, dtype="bfloat16", bits=True),
    "both ways": Shape(ahead=1 << 29),
    "both ways in a window": Shape(window=20, ahead=19, S=1, dtype="bfloat16", bits=True),
    "soft cap": Shape(soft_cap=2.0),
    "sinks": Shape(sinks=True, window=24),
    "latent": Shape(K=1, G=4, H=24, value_dim=16),
    "everything": Shape(window=70, soft_cap=3.0, sinks=True, S=8),
    "bfloat16": Shape(dtype="bfloat16"),
    "bfloat16 bits": Shape(dtype="bfloat16", bits=True, window=50),
    "latent bits": Shape(K=1, G=4, H=24, value_dim=16, dtype="bfloat16", bits=True),
    "int8": Shape(dtype="bfloat16", codes="int8", window=50),
    "float8": Shape(codes="float8_e4m3fn", S=32, sinks=True),
    "int4": Shape(codes="int4", H=48, window=50, soft_cap=3.0),
    "int4 on bfloat16": Shape(codes="int4", H=64, K=1, G=4, sinks=True, dtype="bfloat16"),
    "paired": Shape(paired=True, window=40),
    "paired bits": Shape(paired=True, dtype="bfloat16", bits=True, sinks=True, soft_cap=3.0),
    "few rows": Shape(T=5, B=4),
    "one sequence": Shape(T=64, B=1),
}
ALWAYS_TESTED = [
    "mqa", "wide group", "both ways", "both ways in a window", "page 1", "window 1",
    "chunks", "everything", "bfloat16 bits", "latent bits", "int8", "float8", "int4",
    "paired bits", "few rows",
]  # fmt: skip


@pytest.mark.parametrize("name", thinned(MIXED_STEP_SHAPES, ALWAYS_TESTED))
@pytest.mark.slow
def test_mixed_steps_match_float64(name):
    """Decoding, verifying and prefilling rows in one step."""
    rng = np.random.default_rng(7)
    for _ in range(8):
        check(MIXED_STEP_SHAPES[name], ragged(MIXED_STEP_SHAPES[name], rng), rng)


DECODE_SHAPES = {
    "gqa": Shape(T=16, B=16),
    "mha": Shape(T=16, B=16, K=4, G=1, S=8),
    "window": Shape(T=16, B=16, window=33, S=8),
    "chunks": Shape(T=16, B=16, window=32, chunked=True, S=8),
    "bits": Shape(T=16, B=16, S=32, dtype="bfloat16", bits=True),
}


@pytest.mark.parametrize("name", DECODE_SHAPES)
def test_decode_at_every_edge(name):
    """One row per sequence, at lengths near every page, block and window edge."""
    shape = DECODE_SHAPES[name]
    rng = np.random.default_rng(3)
    edges = [*range(0, LONGEST, shape.S), *range(0, LONGEST, BLOCK), shape.window or 0, LONGEST]
    starts = sorted({p + d for p in edges for d in (-2, -1, 0, 1)} & set(range(LONGEST)))
    for at in range(0, len(starts), shape.B):
        check(shape, [Sequence(p, p, 1) for p in starts[at : at + shape.B]], rng)


def test_decode_step_with_a_chunk():
    """As many rows as sequences, but several rows of one sequence."""
    shape = Shape(T=16, B=16)
    rng = np.random.default_rng(3)
    check(shape, [Sequence(1, 60, 9), Sequence(2, 130, 1), Sequence(3, 0, 6)], rng)
    check(Shape(T=16, B=16, G=1), [Sequence(1, 60, 9), Sequence(2, 130, 1), Sequence(3, 0, 6)], rng)


def test_prefill_at_every_edge():
    """Chunks that begin and end near the edges of pages, tiles and blocks."""
    shape = Shape(T=80, B=2, S=8)
    rng = np.random.default_rng(5)
    for start in (0, 1, 7, 8, 9, 63, 64, 65, 100):
        for rows in (1, 2, 15, 16, 17, 33, 64, 65):
            check(shape, [Sequence(start, start, rows), Sequence(99, 127, 2)], rng)


def test_attention_without_new_keys_reads_shared_pages():
    """Without new keys nothing is written."""
    rng = np.random.default_rng(1)
    sequences = [Sequence(1, 70, 3), Sequence(2, 0, 20)]
    case = build(GQA, sequences, rng)
    out, pages = run(GQA, case)
    kv_pages = KVPages(*(jnp.asarray(x) for x in pages))
    out_again, pages_after = step(jnp.asarray(case.q), None, None, kv_pages, case.rows, None, GQA)
    assert np.asarray(out_again).tobytes() == out.tobytes()
    assert all(
        np.asarray(x).tobytes() == y.tobytes()
        for x, y in zip((pages_after.k_PSKH, pages_after.v_PSKH), pages, strict=True)
    )


def test_step_without_rows_returns_zeros():
    case = build(GQA, [Sequence(1, 0, 0)], np.random.default_rng(1))
    out, _ = run(GQA, case)
    assert not out.any()


BATCH_INVARIANCE_SHAPES = {
    f"{name}, {dtype}": dataclasses.replace(shape, dtype=dtype, bits=dtype == "bfloat16")
    for dtype in ("float32", "bfloat16")
    for name, shape in {
        "gqa": Shape(K=4, G=3, H=64),
        "mha": Shape(K=4, G=1, H=64),
        "mqa": Shape(K=1, G=4, H=64),
        "narrow mqa": Shape(K=1, G=4, H=32),
        "window": Shape(K=2, G=2, H=16, window=40, sinks=True),
    }.items()
}
BATCH_INVARIANCE_SHAPES["int4"] = Shape(K=2, G=2, H=64, codes="int4")


@pytest.mark.parametrize(
    "name", thinned(BATCH_INVARIANCE_SHAPES, ["gqa, bfloat16", "window, float32"])
)
@pytest.mark.slow
def test_attention_is_batch_invariant(name):
    """A row's output does not depend on the other rows, its chunk's start, or the step's size."""
    shape = BATCH_INVARIANCE_SHAPES[name]
    rng = np.random.default_rng(11)
    seed = 77
    expected_bits = {}

    def compare(
        T: int, B: int, start: int, rows: int, other_sequences: list[Sequence], index: int
    ) -> None:
        step_shape = dataclasses.replace(shape, T=T, B=B)
        case = build(
            step_shape,
            [*other_sequences[:index], Sequence(seed, start, rows), *other_sequences[index:]],
            rng,
        )
        out, _ = run(step_shape, case)
        for offset, row in enumerate(out[case.places[index]]):
            bits = expected_bits.setdefault(start + offset, row.tobytes())
            assert bits == row.tobytes(), (
                f"position {start + offset} of a chunk from {start} in {T} rows"
            )

    for start, rows in ((0, 64), (64, 64), (128, 60)):
        compare(64, 4, start, rows, [], 0)
    for start, rows in ((0, 3), (3, 17), (20, 50), (62, 4), (100, 33), (127, 37)):
        compare(64, 4, start, rows, [Sequence(5, 150, 1), Sequence(6, 9, 5)], int(rng.integers(3)))
        compare(
            160, 8, start, rows, [Sequence(8, 30, 80), Sequence(9, 180, 1)], int(rng.integers(3))
        )
    decode_sequences = [Sequence(100 + n, int(rng.integers(LONGEST)), 1) for n in range(15)]
    for start in (0, 1, 15, 16, 63, 64, 100, 187):
        compare(1, 1, start, 1, [], 0)
        compare(4, 4, start, 1, decode_sequences[:2], 1)
        compare(16, 16, start, 1, decode_sequences, 9)
        compare(64, 16, start, 1, decode_sequences, 4)


def test_tiles_cover_each_row_once():
    """For random sequence lengths."""
    rng = np.random.default_rng(2)
    for T, B, Q in (
        (1, 1, 1),
        (1, 1, 16),
        (7, 3, 2),
        (16, 16, 1),
        (16, 16, 2),
        (33, 5, 4),
        (40, 8, 16),
        (39, 1, 12),
    ):
        make_tiles = jax.jit(partial(tiles, T=T, Q=Q))
        for _ in range(30):
            starts = np.concatenate([[0], np.sort(rng.integers(0, T + 1, B))])
            row, seq, valid = (np.asarray(x) for x in make_tiles(jnp.asarray(starts, jnp.int32)))
            assert sorted(row[valid]) == list(range(starts[-1]))
            sequence_of_row = np.repeat(np.arange(B), np.diff(starts))
            assert (
                np.broadcast_to(seq[:, None], row.shape)[valid] == sequence_of_row[row[valid]]
            ).all()


def test_sum_pairs_matches_float64():
    for size in (1, 2, 3, 48, 64, 96):
        x = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
        np.testing.assert_allclose(
            sum_pairs(jnp.asarray(x)), x.astype(np.float64).sum(-1), rtol=1e-5, atol=1e-6
        )


def test_interleaved_pages_give_the_same_bits(monkeypatch):
    """Pages with keys and values in one array against separate arrays."""
    monkeypatch.setenv("QUIRE_NATIVE", "off")
    jax.clear_caches()
    outputs = {}
    for paired in (False, True):
        shape = Shape(dtype="bfloat16", bits=True, paired=paired)
        case = build(shape, [Sequence(1, 70, 3), Sequence(2, 0, 20)], np.random.default_rng(1))
        outputs[paired] = run(shape, case)[0].tobytes()
    assert outputs[False] == outputs[True]


def test_page_dtype_has_the_bytes_of_the_kv_dtype():
    """On CPUs bfloat16 pages are stored as uint16."""
    assert page_dtype(jnp.float32) == jnp.float32
    assert page_dtype(jnp.bfloat16) == jnp.uint16
    assert page_dtype(jnp.dtype("int4")) == jnp.uint8


def test_interleaved_pages_are_used_on_tpus_only(monkeypatch):
    """Only the TPU kernel needs interleaved bfloat16 pages."""
    for backend, dtypes in (("cpu", ()), ("gpu", ()), ("tpu", ("bfloat16",))):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert [
            name for name in ("bfloat16", "float32", "int8") if uses_paired_pages(jnp.dtype(name))
        ] == list(dtypes)


def test_implementation_is_forced_by_name():
    case = build(GQA, [Sequence(1, 60, 9)], np.random.default_rng(3))
    served = run(GQA, case, partial(paged_attention, implementation="xla"))
    assert served[0].tobytes() == run(GQA, case, xla.attend)[0].tobytes()
    with pytest.raises(NoImplementation, match="mosaic_tpu: there is no TPU") as error:
        run(GQA, case, partial(paged_attention, implementation="mosaic_tpu"))
    assert len(error.value.exceptions) == 1
    with pytest.raises(
        ValueError,
        match="implementation is 'cuda'; it can be native, mosaic_tpu, mosaic_gpu, flashinfer, "
        "triton, xla",
    ):
        run(GQA, case, partial(paged_attention, implementation="cuda"))


def test_context_parallel_attention_runs_in_xla_only():
    """The kernels raise the reason."""
    case = build(GQA, [Sequence(1, 60, 9)], np.random.default_rng(3))
    context_parallel = dataclasses.replace(GQA, context=Axis("context", 2))
    for name in ("native", "mosaic_tpu", "mosaic_gpu"):
        with pytest.raises(NoImplementation, match=f"{name}: positions are spread over 2 devices"):
            run(context_parallel, case, partial(paged_attention, implementation=name))


def test_gpu_kernels_reject_int4_pages():
    q_TNH = jnp.zeros((2, 8, 64), jnp.bfloat16)
    half = jnp.zeros((3, 32, 2, 32), jnp.uint8)
    pages = KVPages(half, half, jnp.zeros((3, 2, 32)), jnp.zeros((3, 2, 32)))
    params = AttentionParams(1.0)
    shape = call_shape(q_TNH, pages, params)
    assert (
        hopper.kernel_limits(params, shape)
        == "pages are int4, whose codes the kernel does not read"
    )
    assert "not codes with a scale" in str(flashinfer.kernel_limits(params, shape))
    qkv_TGH = jnp.zeros((2, 12, 64), jnp.bfloat16)
    assert heads_gpu.unsupported_reasons(qkv_TGH, Heads(8, 2), pages) == [
        "pages are int4, whose codes the kernel does not write"
    ]


@pytest.mark.parametrize("codes", [None, "int8", "float8_e4m3fn", "uint8"])
@pytest.mark.slow
def test_append_on_gpus_writes_no_padding(codes, monkeypatch):
    """The scatter has unique indices; padding rows point outside, so page 0 is unchanged."""
    rng = np.random.default_rng(3)
    P = 9
    S = 4
    K = 2
    H = 8
    T = 21
    slots_T = rng.permutation(np.arange(S, P * S))[:T]  # several rows of one page, in random order
    padding = slice(15, None)
    slots_T[padding] = rng.integers(0, S, T - 15)
    slots_T[17] = P * S  # as if another device held the position
    width = H // 2 if codes == "uint8" else H
    page_PSKH = jnp.asarray(rng.integers(0, 9, (P, S, K, width)), codes or "bfloat16")
    scales = () if codes is None else (jnp.ones((P, K, S)),) * 2
    pages = KVPages(page_PSKH, page_PSKH, *scales)
    k_TKH, v_TKH = (jnp.asarray(rng.standard_normal((T, K, H)), jnp.bfloat16) for _ in range(2))
    expected_pages = xla.append(pages, k_TKH[:15], v_TKH[:15], slots_T[:15])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    lowered = jax.jit(xla.append).lower(pages, k_TKH, v_TKH, slots_T)
    assert lowered.as_text().count("unique_indices = true") == len(jax.tree.leaves(pages))
    for actual, expected in zip(
        jax.tree.leaves(lowered.compile()(pages, k_TKH, v_TKH, slots_T)),
        jax.tree.leaves(expected_pages),
        strict=True,
    ):
        assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()
