"""The kernel that normalises, rotates and appends heads: in Pallas' interpreter, and lowered."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from quire.ops import heads
from quire.ops.attention import KVPages, QueryRows
from quire.ops.attention.xla import append
from quire.ops.gpu import self_test
from quire.ops.heads import Heads, accuracy, hopper
from quire.ops.heads.xla import split_heads
from quire.tests.support import kernels_ahead
from quire.tests.support.cases import thinned

pytestmark = pytest.mark.usefixtures("interpreted_once")
S = 32
P = 5
ROWS = 5
# one sequence crosses a page border; another sequence and padding follow
SLOTS = [2 * S - 1, 3 * S, 3 * S + 1, S + 7]


@dataclass(frozen=True)
class Case:
    N: int = 4
    K: int = 2
    H: int = 64
    pairs: int = 32
    norm: bool = False
    codes: str | None = None

    def inputs(self, seed: int = 0):
        """(qkv_TGH, heads, pages); the last row is NaN padding."""
        rng = np.random.default_rng(seed)
        qkv_TGH = rng.standard_normal((ROWS, self.N + 2 * self.K, self.H)) * rng.choice(
            [0.01, 1, 50], (ROWS, 1, 1)
        )
        qkv_TGH[len(SLOTS) :] = np.nan
        phase_TC = rng.random((ROWS, self.pairs)) * 9
        cos_sin = tuple(jnp.asarray(x, jnp.float32) for x in (np.cos(phase_TC), np.sin(phase_TC)))
        scales = [jnp.asarray(1 + 0.3 * rng.standard_normal(self.H), jnp.float32) for _ in range(2)]
        work = Heads(self.N, self.K, cos_sin if self.pairs else None, eps=1e-5)
        if self.norm:
            work = Heads(self.N, self.K, work.cos_sin, "head", *scales, 1e-5)
        page_arrays = [
            jnp.asarray(rng.integers(-9, 9, (P, S, self.K, self.H)), self.codes or "bfloat16")
            for _ in range(2)
        ]
        scale = (
            [jnp.asarray(rng.random((P, self.K, S)), jnp.float32) for _ in range(2)]
            if self.codes
            else []
        )
        return jnp.asarray(qkv_TGH, jnp.bfloat16), work, KVPages(*page_arrays, *scale)


CASES = {
    "plain": Case(),
    "a norm, a part rotated": Case(norm=True, pairs=16),
    "int8": Case(norm=True, codes="int8"),
    "float8": Case(N=60, K=6, H=128, pairs=64, norm=True, codes="float8_e4m3fn"),  # two tiles
    "without rotation": Case(N=6, pairs=0, codes="int8"),
    "one KV head, wide": Case(N=8, K=1, H=256, pairs=128, norm=True),
    "Llama-3-8B": Case(N=32, K=8, H=128, pairs=64),
}


def query_rows(slots) -> QueryRows:
    slots_T = np.zeros(ROWS, np.int32)
    slots_T[: len(slots)] = slots
    return QueryRows(None, jnp.asarray([0, len(slots)], jnp.int32), None, jnp.asarray(slots_T))


def run_kernel(qkv_TGH, work, pages, rows):
    def step(qkv_TGH, pages, rows):
        return hopper.prepare(
            qkv_TGH, work, pages, rows, interpret=InterpretGPUParams(detect_races=True)
        )

    q_TNH, k, v, pages = jax.jit(step)(qkv_TGH, pages, rows)
    assert k is None and v is None
    assert not gpu_callbacks.get_races().races_found
    return q_TNH, pages


def as_float64(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def test_kernel_rejects_key_shifts_for_quantized_pages():
    """The kernel appends keys itself; unquantised pages ignore the shift."""
    for name in ("plain", "int8"):
        qkv_TGH, work, pages = CASES[name].inputs()
        shifted = replace(work, k_shift_KH=jnp.ones((work.keys, qkv_TGH.shape[2])))
        reasons = hopper.unsupported_reasons(qkv_TGH, shifted, pages)
        assert any("keys are shifted" in reason for reason in reasons) == (name == "int8")


def test_key_shift_applies_to_quantized_pages_only():
    qkv_TGH, work, pages = CASES["plain"].inputs()
    shifted = replace(work, k_shift_KH=jnp.full((work.keys, qkv_TGH.shape[2]), 3.0))
    live = query_rows(SLOTS)
    int8_pages = CASES["int8"].inputs()[2]
    for kv_pages, offset in ((pages, 0), (int8_pages, 3)):
        actual, unshifted = (
            heads.prepare(qkv_TGH, options, kv_pages, live, "xla") for options in (shifted, work)
        )
        for name, x, y in zip("qkv", actual, unshifted, strict=False):
            expected = as_float64(y) - (offset if name == "k" else 0)
            np.testing.assert_array_equal(
                as_float64(x), as_float64(jnp.asarray(expected, jnp.bfloat16))
            )


@pytest.mark.parametrize("name", thinned(CASES, ["a norm, a part rotated", "float8"]))
@pytest.mark.slow
def test_kernel_matches_float64_and_xla(name):
    """Queries, and keys, values and scales in the rows' slots; nothing else is written."""
    case = CASES[name]
    qkv_TGH, work, pages = case.inputs()
    live = len(SLOTS)
    q_TNH, new_pages = run_kernel(qkv_TGH, work, pages, query_rows(SLOTS))
    q, k, v = (x[:live] for x in accuracy.in_float64(qkv_TGH, work))
    size = np.abs(q).max((1, 2), keepdims=True)
    assert np.all(np.abs(as_float64(q_TNH)[:live] - q) < 1e-2 * size)
    page_T = np.array(SLOTS) // S
    at_T = np.array(SLOTS) % S
    step = {None: 1e-2, "int8": 1e-2, "float8_e4m3fn": 5e-2}[case.codes]
    for array, scale, expected in (
        (new_pages.k_PSKH, new_pages.k_scale_PKS, k),
        (new_pages.v_PSKH, new_pages.v_scale_PKS, v),
    ):
        actual = as_float64(array)[page_T, at_T]
        if scale is not None:
            actual = actual * np.asarray(scale)[page_T, :, at_T][..., None]
        assert np.all(
            np.abs(actual - expected) < step * np.abs(expected).max((1, 2), keepdims=True)
        )
    _, k_TKH, v_TKH = split_heads(qkv_TGH[:live], Heads(**{**vars(work), "cos_sin": work.cos_sin and tuple(
        x[:live] for x in work.cos_sin)}))  # fmt: skip
    xla_pages = append(pages, k_TKH, v_TKH, jnp.asarray(SLOTS))
    for actual, expected in zip(
        jax.tree.leaves(new_pages), jax.tree.leaves(xla_pages), strict=True
    ):
        is_unused = np.ones(
            expected.shape[:1]
            + ((expected.shape[1],) if expected.dtype != jnp.float32 else (case.K, S)),
            bool,
        )
        if expected.dtype == jnp.float32:
            is_unused[page_T, :, at_T] = False
        else:
            is_unused[page_T, at_T] = False
        # slots of no row are unchanged
        assert np.array_equal(as_float64(actual)[is_unused], as_float64(expected)[is_unused])


def test_kernel_is_batch_invariant():
    qkv_TGH, work, pages = CASES["int8"].inputs()
    q_TNH, new_pages = run_kernel(qkv_TGH, work, pages, query_rows(SLOTS))
    # the padding row is no longer last, so it is a row that writes page 4
    order = np.array([3, 1, 4, 0, 2])
    reordered = Heads(**{**vars(work), "cos_sin": tuple(x[order] for x in work.cos_sin)})
    slots = [*np.array(SLOTS)[order[:2]], 4 * S, *np.array(SLOTS)[order[3:]]]
    q_other, other_pages = run_kernel(qkv_TGH[order], reordered, pages, query_rows(slots))
    for n, row in enumerate(order):
        assert np.asarray(q_other[n]).tobytes() == np.asarray(q_TNH[row]).tobytes()
    for a, b in zip(jax.tree.leaves(new_pages), jax.tree.leaves(other_pages), strict=True):
        assert np.asarray(a[:4]).tobytes() == np.asarray(b[:4]).tobytes()


def test_error_lists_every_unsupported_property(monkeypatch):
    qkv_TGH, _, pages = CASES["plain"].inputs()
    work = Heads(4, 2, norm="all", v_norm=True)
    with pytest.raises(
        NotImplementedError, match=r"not float32, and .* without a norm, and .* over each head"
    ):
        hopper.prepare(qkv_TGH.astype(jnp.float32), work, pages, query_rows(SLOTS), interpret=True)
    with pytest.raises(NotImplementedError, match="mosaic_gpu: there is no NVIDIA GPU"):
        heads.prepare(qkv_TGH, work, pages, query_rows(SLOTS), "mosaic_gpu")


def spoil_queries(q_TNH, pages):
    return q_TNH.at[5].multiply(1.02), pages


def spoil_values(q_TNH, pages):
    return q_TNH, pages.replace(v_PSKH=jnp.roll(pages.v_PSKH, 1, 3))


def spoil_other_slots(q_TNH, pages):
    return q_TNH, pages.replace(k_PSKH=pages.k_PSKH.at[0, 0, 0, 0].set(7))


@pytest.mark.parametrize("spoil", [None, spoil_queries, spoil_values, spoil_other_slots])
@pytest.mark.parametrize("name", thinned(CASES, ["int8"]))
@pytest.mark.slow
def test_self_test_rejects_inaccurate_kernel(name, spoil, monkeypatch):
    """The GPU self-test, with few rows in the interpreter, accepts only an accurate kernel."""
    real = accuracy.rotate_and_append

    def kernel(*arguments):
        outputs = real(*arguments)
        return outputs if spoil is None else spoil(*outputs)

    monkeypatch.setattr(accuracy, "rotate_and_append", kernel)
    kind = hopper.kind(*CASES[name].inputs())
    for paged, wrong in (
        (False, (spoil_queries, spoil_other_slots)),
        (True, (spoil_values, spoil_other_slots)),
    ):
        result = self_test.measure(
            accuracy.HeadsCase(kind, paged, 12, InterpretGPUParams()), 0, repeats=2
        )
        assert (result.wrong is not None) == (spoil in wrong)


def test_kernel_that_fails_its_self_test_is_replaced_by_xla(monkeypatch, caplog, tmp_path):
    tested = []

    def test(module, kind):
        tested.append((module, kind))
        return {"queries": self_test.CaseResult(0.5, 0.5, 0, 6e-3)}

    monkeypatch.setattr(hopper.device, "is_hopper", lambda: True)
    monkeypatch.setattr(self_test, "results_folder", lambda: tmp_path)
    monkeypatch.setattr(self_test, "run_self_test", test)
    monkeypatch.delenv("QUIRE_MOSAIC", raising=False)
    self_test.verdict.cache_clear()
    self_test.warn_once.cache_clear()
    qkv_TGH, work, pages = CASES["plain"].inputs()
    for _ in range(2):
        q_TNH, k_TKH, _, _ = heads.prepare(qkv_TGH, work, pages, query_rows(SLOTS))
        assert k_TKH is not None
    assert [module for module, _ in tested] == ["quire.ops.heads.accuracy"]
    assert (
        caplog.text.count("it is wrong on this GPU: queries by 5.0e-01, where 6e-03 is allowed")
        == 1
    )
    self_test.verdict.cache_clear()


def test_kernel_lowers_to_one_call_that_updates_pages_in_place(monkeypatch):
    """The pages are aliased outputs."""
    monkeypatch.setattr(hopper.device, "is_hopper", lambda: True)
    monkeypatch.setenv("QUIRE_MOSAIC", "trusted")
    qkv_TGH, work, pages = CASES["int8"].inputs()

    def step(qkv_TGH, pages, rows):
        return heads.prepare(qkv_TGH, work, pages, rows)

    traced = jax.jit(step, donate_argnums=1).trace(qkv_TGH, pages, query_rows(SLOTS))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert text.count("output_operand_alias<") == 4
    assert "scatter" not in text


PRODUCTION_CASES = {
    "Llama-3-8B": Case(N=32, K=8, H=128, pairs=64),
    "Llama-3-8B in int8": Case(N=32, K=8, H=128, pairs=64, codes="int8"),
    "Qwen3-30B-A3B": Case(N=32, K=4, H=128, pairs=64, norm=True),
    "Qwen3-30B-A3B in float8": Case(N=32, K=4, H=128, pairs=64, norm=True, codes="float8_e4m3fn"),
    "Gemma-3-12B": Case(N=16, K=8, H=256, pairs=128, norm=True),
    "Gemma-3-12B in int8": Case(N=16, K=8, H=256, pairs=128, norm=True, codes="int8"),
    "Qwen3-Next": Case(N=16, K=2, H=256, pairs=32, norm=True),
    "Qwen3-Next in float8": Case(N=16, K=2, H=256, pairs=32, norm=True, codes="float8_e4m3fn"),
}
ALWAYS_COMPILED = ["Gemma-3-12B in int8", "Qwen3-Next"]


def step_of(name: str):
    """(a step of the kernel, the shapes of its arguments)."""
    qkv_TGH, work, pages = PRODUCTION_CASES[name].inputs()
    arguments = qkv_TGH, work.cos_sin, work.q_scale, work.k_scale, pages, query_rows(SLOTS)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)

    def step(qkv_TGH, cos_sin, q_scale, k_scale, pages, rows):
        options = replace(work, cos_sin=cos_sin, q_scale=q_scale, k_scale=k_scale)
        return hopper.prepare(qkv_TGH, options, pages, rows)

    return jax.jit(step, donate_argnums=4), shapes


@pytest.fixture(scope="module")
def hopper_steps():
    return kernels_ahead.compile_some(__file__, PRODUCTION_CASES, ALWAYS_COMPILED)


@pytest.mark.slow
@kernels_ahead.needs_compiler
@pytest.mark.parametrize("name", thinned(PRODUCTION_CASES, ALWAYS_COMPILED))
def test_compiles_for_hopper(name, hopper_steps):
    """Compiled to SASS, the kernel spills no registers."""
    (kernel,) = hopper_steps[name].kernels
    print(
        "|",
        name,
        "|",
        kernel.registers,
        "|",
        kernel.stored,
        "/",
        kernel.loaded,
        "|",
        kernel.shared,
        "|",
    )
    assert kernel.stored == 0
