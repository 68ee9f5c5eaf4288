"""Triton attention: in Pallas' interpreter against float64, and compiled for A100 and B200."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops import attention
from quire.ops.attention import KVPages, QueryRows, cpu, triton, triton_kernel
from quire.ops.attention.accuracy import AttentionCase, Trial, arrays
from quire.ops.attention.backend import AttentionParams
from quire.ops.gpu import device, self_test
from quire.ops.implementations import NoImplementation, variance
from quire.tests.support import kernels_ahead
from quire.tests.support.attention_cases import (
    Sequence,
    Shape,
    build,
    call_shape,
    check,
    ragged,
    run,
)
from quire.tests.support.cases import cases, thinned

attend = partial(triton.attend, interpret=True)
CLOSE = {"rtol": 2e-2, "atol": 1e-2}  # attention weights are rounded to bfloat16
SHAPES = {  # each parameter value occurs with several values of the others
    "gqa": {"K": 2, "G": 4},
    "mha, a soft cap": {"K": 3, "G": 1, "soft_cap": 3.0},
    "mqa, sinks": {"K": 1, "G": 8, "H": 128, "S": 32, "sinks": True},
    "seven heads, a window": {"K": 1, "G": 7, "window": 40},
    "a wide group": {"K": 1, "G": 60, "S": 8},
    "width 256, a window": {"K": 1, "G": 2, "H": 256, "window": 24, "sinks": True},
    "pages of 96": {"K": 2, "G": 2, "S": 96},
    "a window of one": {"K": 2, "G": 2, "S": 8, "window": 1},
    "int8": {"K": 2, "G": 4, "S": 32, "codes": "int8", "window": 50},
    "float8, sinks": {
        "K": 2,
        "G": 2,
        "S": 32,
        "codes": "float8_e4m3fn",
        "sinks": True,
        "soft_cap": 2.0,
    },
}
ALWAYS_TESTED = ["gqa", "seven heads, a window", "int8", "float8, sinks"]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """Use short spans, so that contexts are split early."""
    monkeypatch.setattr(triton_kernel, "MIN_SPAN", 64)
    jax.clear_caches()


@pytest.mark.random
@pytest.mark.slow
@pytest.mark.parametrize(("T", "B"), [(7, 7), (70, 5)], ids=["decoding", "mixed"])
@pytest.mark.parametrize("name", thinned(SHAPES, ALWAYS_TESTED))
def test_random_steps_match_float64(name, T, B):
    """Unused memory holds NaN, and unused table entries hold stale page ids."""
    shape = Shape(**{"H": 64, "T": T, "B": B, "dtype": "bfloat16", **SHAPES[name]})
    rng = np.random.default_rng(3)
    for _ in range(cases(4, least=1)):
        check(shape, ragged(shape, rng), rng, attend, CLOSE)


@pytest.mark.slow
def test_contexts_at_span_and_block_edges():
    shape = Shape(K=1, G=4, H=64, T=8, B=8, dtype="bfloat16", sinks=True)
    starts = [0, 62, 63, 64, 127, 128, 150]
    sequences = [Sequence(number, start, 1) for number, start in enumerate(starts)]
    check(shape, sequences, np.random.default_rng(0), attend, CLOSE)
    # all rows of a decode-sized step belong to one sequence
    check(shape, [Sequence(1, 120, 5)], np.random.default_rng(1), attend, CLOSE)


def test_a_step_without_rows():
    shape = Shape(T=4, B=2, K=1, G=4, H=64, dtype="bfloat16")
    out, _ = run(shape, build(shape, [Sequence(1, 20, 0)], np.random.default_rng(0)), attend)
    assert not out.any()


def test_decode_is_batch_invariant():
    shape = Shape(K=1, G=4, H=64, T=6, B=6, dtype="bfloat16")
    expected = None
    for other_sequences in (
        [],
        [Sequence(1, 9, 1)],
        [Sequence(number, 140, 1) for number in range(5)],
    ):
        case = build(
            shape,
            [*other_sequences, Sequence(77, 133, 1)],
            np.random.default_rng(len(other_sequences)),
        )
        row = run(shape, case, attend)[0][case.places[-1]].tobytes()
        expected = row if expected is None else expected
        assert row == expected


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", [False, True])
def test_self_test_rejects_inaccurate_kernel(spoilt):
    """The GPU self-test, at small sizes, accepts only an accurate kernel."""
    kind = {"heads": 4, "kv_heads": 1, "width": 64, "sinks": True}

    def kernel(q, k, v, pages, rows, params, sinks_N=None):
        params = replace(params, scale=params.scale * (1.02 if spoilt else 1))
        return attend(q, k, v, pages, rows, params, sinks_N)

    for trial in (
        Trial("", 2, 200, 1, 1, **kind),
        Trial("", 1, 90, 30, 3, **kind),
        Trial("", 2, 90, layers=2, **kind),
    ):
        assert (self_test.measure(AttentionCase(trial, kernel), 0, repeats=2).wrong is None) == (
            not spoilt
        )
    trials = triton.trials(kind)
    assert {trial.rows == 1 for trial in trials} == {True, False} and max(
        trial.layers for trial in trials
    ) > 4
    assert max(trial.length for trial in trials) > 32 * 512, "spans longer than the shortest"
    assert [case.trial for case in triton.cases(kind)] == trials


@pytest.fixture
def a100(monkeypatch):
    """Pretend an A100 without FlashInfer; Triton kernels run in the interpreter."""
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(device, "is_hopper", lambda: False)
    monkeypatch.setattr(device, "capability", lambda: "8.0")
    monkeypatch.setattr(cpu, "BACKEND", replace(cpu.BACKEND, limits=lambda *_: "there is another"))
    monkeypatch.setattr(triton, "BACKEND", replace(triton.BACKEND, attend=attend))
    monkeypatch.setenv("QUIRE_MOSAIC", "trusted")
    self_test.verdict.cache_clear()
    self_test.warn_once.cache_clear()
    jax.clear_caches()
    yield
    self_test.verdict.cache_clear()
    jax.clear_caches()


def traced_jaxpr(trial: Trial, implementation: str | None = None):
    q, pages, rows, sinks = arrays(trial, 1)

    def step(q, pages, rows, sinks):
        return attention.paged_attention(
            q, None, None, pages, rows, trial.params, sinks, implementation
        )

    return jax.make_jaxpr(step)(q, pages, rows, sinks)


def test_triton_is_used_without_flashinfer(a100):
    jaxpr = traced_jaxpr(Trial("", 2, 30, heads=4, kv_heads=2, width=64))
    assert "pallas_call" in str(jaxpr)
    assert variance(jaxpr.jaxpr) == {triton.varies()}


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (Trial("", 2, 30, heads=4, kv_heads=1, width=96, values=64), "none within the other"),
        (Trial("", 2, 30, heads=4, kv_heads=2, width=80), r"one width of \(64, 128, 256\), not 80"),
        (
            Trial("", 2, 30, heads=4, kv_heads=2, width=64, dtype="float32"),
            "bfloat16 or float16, not float32",
        ),
    ],
)
def test_unsupported_cases_run_in_xla(a100, trial, message, caplog):
    assert "pallas_call" not in str(traced_jaxpr(trial))
    assert "attention by Triton: its kernel is not in use on this GPU" in caplog.text
    with pytest.raises(NoImplementation, match=message):
        traced_jaxpr(trial, "triton")


@pytest.mark.parametrize(
    ("gigabytes", "codes", "is_unsupported"),
    [(2, 1, False), (3, 1, True), (5, 1, False), (3, 2, False)],
)
def test_8_bit_pages_of_2_to_4_gib_are_unsupported(gigabytes, codes, is_unsupported):
    """Pallas would use negative 32-bit offsets."""
    dtype = jnp.int8 if codes == 1 else jnp.bfloat16
    page_array = jax.ShapeDtypeStruct((gigabytes << 10, 1024 // codes, 8, 128), dtype)
    q = jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16)
    scales = [None, None] if codes == 2 else [0, 0]
    params = AttentionParams(1.0)
    reason = triton.kernel_limits(
        params, call_shape(q, KVPages(page_array, page_array, *scales), params)
    )
    assert "must not be of 2 to 4 GiB" in str(reason) if is_unsupported else reason is None


def test_older_gpus_are_rejected(a100, monkeypatch, caplog):
    monkeypatch.setattr(device, "capability", lambda: "7.5")
    with pytest.raises(
        NoImplementation,
        match=r"needs compute capability 8.0 .Ampere. or later, and this GPU's is 7.5",
    ):
        traced_jaxpr(Trial("", 2, 30, heads=4, kv_heads=2, width=64), "triton")


def test_kernel_that_fails_its_self_test_is_replaced_by_xla(a100, monkeypatch, tmp_path, caplog):
    tested_modules = []

    def test(module, kind):
        tested_modules.append(module)
        return {"decoding": self_test.CaseResult(0.5, 0.5, 0, 6e-3)}

    monkeypatch.setattr(self_test, "run_self_test", test)
    monkeypatch.setattr(self_test, "results_folder", lambda: tmp_path)
    monkeypatch.setenv("QUIRE_MOSAIC", "")
    assert "pallas_call" not in str(traced_jaxpr(Trial("", 2, 30, heads=4, kv_heads=2, width=64)))
    assert "quire.ops.attention.triton" in tested_modules and "decoding by 5.0e-01" in caplog.text


PRODUCTION_SHAPES = {
    "Llama-3-8B, 64 rows": Shape(T=64, B=64, K=8, G=4, H=128),
    "Llama-3-8B, 2048 rows": Shape(T=2048, B=64, K=8, G=4, H=128),
    "Llama-3-8B in int8, 64 rows": Shape(T=64, B=64, K=8, G=4, H=128, S=32, codes="int8"),
    "Llama-3-8B in int8, 2048 rows": Shape(T=2048, B=64, K=8, G=4, H=128, S=32, codes="int8"),
    "Llama-3-8B in fp8, 64 rows": Shape(T=64, B=64, K=8, G=4, H=128, S=32, codes="float8_e4m3fn"),
    "Llama-3-8B in fp8, 2048 rows": Shape(
        T=2048, B=64, K=8, G=4, H=128, S=32, codes="float8_e4m3fn"
    ),
    "Qwen3-30B-A3B, 2048 rows": Shape(T=2048, B=64, K=4, G=8, H=128),
    "Gemma-3-12B, 64 rows": Shape(T=64, B=64, K=8, G=2, H=256, window=1024),
    "Gemma-3-12B, 2048 rows": Shape(T=2048, B=64, K=8, G=2, H=256, window=1024),
    "Gemma-3-12B in fp8, 2048 rows": Shape(
        T=2048, B=64, K=8, G=2, H=256, S=32, codes="float8_e4m3fn"
    ),
    "gpt-oss-20b, 64 rows": Shape(T=64, B=64, K=8, G=8, H=64, window=128, sinks=True),
    "gpt-oss-20b, 2048 rows": Shape(T=2048, B=64, K=8, G=8, H=64, sinks=True),
    "MHA, a soft cap, 2048 rows": Shape(T=2048, B=64, K=16, G=1, H=128, soft_cap=50.0),
}
ALWAYS_COMPILED = ["Llama-3-8B, 64 rows", "Llama-3-8B in fp8, 2048 rows"]


def step_of(name: str):
    """(a step of the kernel, the shapes of its arguments)."""
    shape = PRODUCTION_SHAPES[name]
    length = 4096

    def array(*axes: int, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(axes, dtype)

    T = shape.T
    B = shape.B
    K = shape.K
    H = shape.H
    S = shape.S
    pages = B * length // S + 1
    dtype = jnp.dtype(shape.codes or jnp.bfloat16)
    scales = [array(pages, K, S, dtype=jnp.float32)] * 2 if shape.codes else []
    kv_pages = KVPages(*[array(pages, S, K, H, dtype=dtype)] * 2, *scales)
    rows = QueryRows(array(T), array(B + 1), array(B, length // S), array(T))
    sinks = array(K * shape.G, dtype=jnp.float32) if shape.sinks else None

    def step(q, pages, rows, sinks):
        options = {"window": shape.window, "soft_cap": shape.soft_cap, "sinks_N": sinks}
        return triton_kernel.attend(q, pages, rows, scale=H**-0.5, **options)

    return jax.jit(step), (array(T, K * shape.G, H, dtype=jnp.bfloat16), kv_pages, rows, sinks)


@pytest.fixture(scope="module", params=["a100", "b200"])
def gpu_steps(request):
    return request.param, kernels_ahead.compile_some(
        __file__, PRODUCTION_SHAPES, ALWAYS_COMPILED, request.param
    )


@pytest.mark.slow
@kernels_ahead.needs_compiler
@pytest.mark.parametrize("name", thinned(PRODUCTION_SHAPES, ALWAYS_COMPILED))
def test_compiles_for_gpus(name, gpu_steps):
    """Compiled to SASS in one graph, without spills except for one shape."""
    gpu, steps = gpu_steps
    max_spilled = 8 if (gpu, name) == ("b200", "Gemma-3-12B, 2048 rows") else 0  # stored and loaded
    print("|", gpu, "|", name, "|", steps[name].outside, "|", steps[name].spilled, "|")
    assert (
        steps[name].graphs == 1 and not steps[name].outside and steps[name].spilled <= max_spilled
    )
