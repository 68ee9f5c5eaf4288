"""The fused sum and norm against float64 and XLA, in Pallas' interpreter, and lowered."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from quire.ops import residual
from quire.ops.gpu import self_test
from quire.ops.norm import rms_norm
from quire.ops.residual import Residual, accuracy, hopper, xla
from quire.ops.rounding.xla import round_rows
from quire.tests.support.cases import thinned

pytestmark = pytest.mark.usefixtures("interpreted_once")
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    D: int = 512
    normed: bool = False  # the addend has its own norm
    adds: bool = True  # otherwise a norm without a sum
    norm: str = "scale"  # or "centred", or "centred, bias"; also the addend's norm
    dtype: str = "bfloat16"

    def inputs(self, seed: int = 0, rows: int = 5):
        rng = np.random.default_rng(seed)
        x, y = (
            rng.standard_normal((rows, self.D)) * rng.choice([0.01, 1, 50], (rows, 1))
            for _ in range(2)
        )
        norms = [accuracy.random_norm(self.norm, self.D, rng) for _ in range(2)]
        x, y = (jnp.asarray(array, self.dtype) for array in (x, y))
        return Residual(x, y if self.adds else None, norms[0] if self.normed else None), norms[1]


CASES = {
    "a line for each thread": Case(),
    "one line": Case(D=64, normed=True),
    "lines that no thread shares": Case(D=704, normed=True),
    "nothing to add": Case(D=704, adds=False),
    "gpt-oss-20b": Case(D=2880),
    "Gemma-3-12B": Case(D=3840, normed=True),
    "the widest": Case(D=16384, normed=True),
    "means taken off": Case(D=704, normed=True, norm="centred"),
    "means taken off, and a bias": Case(D=704, normed=True, norm="centred, bias"),
    "ModernBERT": Case(D=768, norm="centred"),
    "float32, a head of Qwen3-Next": Case(D=128, adds=False, dtype="float32"),
    "float32, with all that there is": Case(
        D=704, normed=True, norm="centred, bias", dtype="float32"
    ),
}
ALWAYS_TESTED = [
    "a line for each thread",
    "lines that no thread shares",
    "nothing to add",
    "means taken off, and a bias",
]
FLOAT32_CASES = ["float32, a head of Qwen3-Next", "float32, with all that there is"]


def run_kernel(rows: Residual, scale_D):
    def step(rows, scale_D):
        return hopper.add_and_norm(
            rows, scale_D, EPS, interpret=InterpretGPUParams(detect_races=True)
        )

    outputs = jax.jit(step)(rows, scale_D)
    assert not gpu_callbacks.get_races().races_found
    return outputs


@pytest.mark.parametrize("name", thinned(CASES, ALWAYS_TESTED + FLOAT32_CASES))
@pytest.mark.slow
def test_kernel_matches_float64_and_xla(name):
    """The sum is bit-identical to XLA's unless the addend has a norm."""
    rows, scale_D = CASES[name].inputs()
    outputs = run_kernel(rows, scale_D)
    tolerance = 1e-2 if CASES[name].dtype == "bfloat16" else 1e-6
    for out, expected in zip(outputs, accuracy.in_float64(rows, scale_D, EPS), strict=True):
        assert np.all(
            np.abs(np.asarray(out, np.float64) - expected)
            < tolerance * np.abs(expected).max(1, keepdims=True)
        )
    xla_outputs = xla.add_and_norm(rows, scale_D, EPS)
    for out, xla_out in zip(outputs, xla_outputs, strict=True):
        assert out.dtype == xla_out.dtype
        out, xla_out = (np.asarray(array, np.float32) for array in (out, xla_out))
        assert np.all(np.abs(out - xla_out) <= tolerance * np.abs(xla_out).max(1, keepdims=True))
    if rows.scale_D is None:
        assert np.asarray(outputs[0]).tobytes() == np.asarray(xla_outputs[0]).tobytes()


@pytest.mark.parametrize("name", [*ALWAYS_TESTED[1:], *FLOAT32_CASES])
def test_kernel_is_batch_invariant(name):
    rows, scale_D = CASES[name].inputs()
    outputs = run_kernel(rows, scale_D)
    order = np.array([3, 0, 4])
    y_TD = None if rows.y_TD is None else rows.y_TD[order]
    other_outputs = run_kernel(
        Residual(rows.x_TD[order].at[1].set(jnp.nan), y_TD, rows.scale_D), scale_D
    )
    for out, other_out in zip(outputs, other_outputs, strict=True):
        for row in (0, 2):
            assert np.asarray(out[order[row]]).tobytes() == np.asarray(other_out[row]).tobytes()
        assert np.all(np.isnan(np.asarray(other_out[1], np.float32)))


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize(
    "name", thinned([name for name in CASES if name not in FLOAT32_CASES], ALWAYS_TESTED[1:])
)
@pytest.mark.slow
def test_quantized_norm_equals_the_quantized_rows_of_the_norm(name, kind):
    """Quantised outputs do not change the norm or the sum."""
    inputs = CASES[name].inputs()

    def step(rows, scale_D):
        return hopper.add_and_norm(
            rows, scale_D, EPS, kind, interpret=InterpretGPUParams(detect_races=True)
        )

    total, normed = jax.jit(step)(*inputs)
    assert not gpu_callbacks.get_races().races_found
    for out, expected in zip((total, normed.rows), run_kernel(*inputs), strict=True):
        assert np.asarray(out).tobytes() == np.asarray(expected).tobytes()
    codes, scale = round_rows(normed.rows, kind)
    assert normed.kind == kind and normed.codes.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(normed.codes, np.float32), np.asarray(codes, np.float32))
    assert np.array_equal(normed.scale, scale)


@pytest.mark.parametrize(("D", "normed"), [(7, False), (48, True)])
def test_xla_matches_separate_sum_and_norm(D, normed):
    """Bit-identical; also without an addend, and without a norm of the sum."""
    (x_TD, y_TD, y_scale_D), scale_D = Case(D, normed).inputs()
    x_TD = x_TD.astype(jnp.float32)
    y_TD = y_TD.astype(jnp.float32)
    rows = Residual(x_TD, y_TD, y_scale_D)
    total = x_TD + (rms_norm(y_TD, y_scale_D, EPS) if normed else y_TD)
    for out, expected in zip(
        xla.add_and_norm(rows, scale_D, EPS), (total, rms_norm(total, scale_D, EPS)), strict=True
    ):
        assert np.asarray(out).tobytes() == np.asarray(expected).tobytes()
    norm_only = xla.add_and_norm(Residual(x_TD), scale_D, EPS)
    sum_only = xla.add_and_norm(rows, None, EPS)
    assert np.array_equal(norm_only[0], x_TD) and np.array_equal(
        norm_only[1], rms_norm(x_TD, scale_D, EPS)
    )
    assert np.array_equal(sum_only[0], total) and np.array_equal(sum_only[1], total)
    for out in residual.add_and_norm(rows, None, EPS):
        np.testing.assert_allclose(out, total, rtol=1e-5, atol=1e-5)


def test_error_lists_every_unsupported_property():
    rows, scale_D = Case(D=100).inputs()
    with pytest.raises(
        NotImplementedError,
        match=r"all float32, not bfloat16 and float32, and .* multiple of 64 .* 100",
    ):
        hopper.add_and_norm(
            rows._replace(x_TD=rows.x_TD.astype(jnp.float32)), scale_D, EPS, interpret=True
        )
    rows, scale_D = Case(D=16384, normed=True, dtype="float32").inputs()
    with pytest.raises(
        NotImplementedError,
        match=r"to codes must be bfloat16, and .* fit into 225280 bytes, .* 262144",
    ):
        hopper.add_and_norm(rows, scale_D, EPS, "int8", interpret=True)
    with pytest.raises(NotImplementedError, match="mosaic_gpu: there is no NVIDIA GPU"):
        residual.add_and_norm(rows, scale_D, EPS, implementation="mosaic_gpu")


def spoil_a_sum(sum_TD, normed_TD):
    return sum_TD.at[5].multiply(1.02), normed_TD


def spoil_a_norm(sum_TD, normed_TD):
    return sum_TD, normed_TD.at[7].multiply(1.02)


def spoil_a_scale(sum_TD, normed):
    return sum_TD, normed.replace(scale=normed.scale.at[7].multiply(1.02))


SELF_TESTS = [
    (None, None),
    (None, spoil_a_sum),
    (None, spoil_a_norm),
    ("int8", None),
    ("float8", spoil_a_scale),
]


@pytest.mark.parametrize(("rounds", "spoil"), SELF_TESTS)
@pytest.mark.parametrize(
    "case",
    [
        Case(192),
        Case(192, normed=True, norm="centred, bias"),
        Case(192, adds=False, norm="centred"),
    ],
    ids=str,
)
@pytest.mark.slow
def test_self_test_rejects_inaccurate_kernel(case, rounds, spoil, monkeypatch):
    """The GPU self-test, with few rows in the interpreter, accepts only an accurate kernel."""
    real = accuracy.sum_and_norm

    def kernel(*arguments):
        outputs = real(*arguments)
        return outputs if spoil is None else spoil(*outputs)

    monkeypatch.setattr(accuracy, "sum_and_norm", kernel)
    kind = hopper.kind(*case.inputs(), rounds)
    result = self_test.measure(accuracy.ResidualCase(kind, 12, InterpretGPUParams()), 0, repeats=2)
    assert (result.wrong is not None) == (spoil is not None)


def test_kernel_that_fails_its_self_test_is_replaced_by_xla(monkeypatch, caplog, tmp_path):
    tested = []

    def test(module, kind):
        tested.append((module, kind))
        return {"sums and norms": self_test.CaseResult(0.5, 0.5, 0, 6e-3)}

    monkeypatch.setattr(hopper.device, "is_hopper", lambda: True)
    monkeypatch.setattr(self_test, "results_folder", lambda: tmp_path)
    monkeypatch.setattr(self_test, "run_self_test", test)
    monkeypatch.delenv("QUIRE_MOSAIC", raising=False)
    self_test.verdict.cache_clear()
    self_test.warn_once.cache_clear()
    rows, scale_D = Case().inputs()
    for _ in range(2):
        outputs = residual.add_and_norm(rows, scale_D, EPS)
        # all implementations give bit-identical sums
        assert np.array_equal(outputs[0], xla.add_and_norm(rows, scale_D, EPS)[0])
    assert [module for module, _ in tested] == ["quire.ops.residual.accuracy"]
    assert (
        caplog.text.count(
            "it is wrong on this GPU: sums and norms by 5.0e-01, where 6e-03 is allowed"
        )
        == 1
    )
    self_test.verdict.cache_clear()


def test_lowers_for_cuda_as_one_kernel(monkeypatch):
    monkeypatch.setattr(hopper.device, "is_hopper", lambda: True)
    monkeypatch.setenv("QUIRE_MOSAIC", "trusted")
    traced = jax.jit(lambda rows, scale_D: residual.add_and_norm(rows, scale_D, EPS)).trace(
        *Case().inputs()
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1 and "stablehlo.add" not in text


@pytest.mark.parametrize("norm", [None, "scale", "centred, bias"])
def test_norm_over_heads_equals_the_norm_over_rows(norm):
    rng = np.random.default_rng(0)
    x_TNH = jnp.asarray(rng.standard_normal((5, 3, 128)), jnp.float32)
    weights = accuracy.random_norm(norm, 128, rng)
    actual = residual.norm_alone(x_TNH, weights, EPS)
    ones_D = jnp.ones(128) if weights is None else weights
    expected = accuracy.in_float64(Residual(x_TNH.reshape(15, 128)), ones_D, EPS)[1]
    np.testing.assert_allclose(actual, expected.reshape(5, 3, 128), rtol=1e-5, atol=1e-6)
