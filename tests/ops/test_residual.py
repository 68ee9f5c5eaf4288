"""Sum and norm: the kernel where there is no card, in Pallas' interpreter and lowered, beside
float64 and XLA.
"""

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
    normed: bool = False  # what is added has a norm of its own
    adds: bool = True  # otherwise it is a norm alone
    norm: str = "scale"  # or "centred", or "centred, bias"; of what is added too
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
KINDS = [
    "a line for each thread",
    "lines that no thread shares",
    "nothing to add",
    "means taken off, and a bias",
]
FLOATS = ["float32, a head of Qwen3-Next", "float32, with all that there is"]


def run(rows: Residual, scale_D):
    def step(rows, scale_D):
        return hopper.add_and_norm(
            rows, scale_D, EPS, interpret=InterpretGPUParams(detect_races=True)
        )

    found = jax.jit(step)(rows, scale_D)
    assert not gpu_callbacks.get_races().races_found
    return found


@pytest.mark.parametrize("name", thinned(CASES, KINDS + FLOATS))
@pytest.mark.slow
def test_against_float64_and_xla(name):
    """Every row is right, the sum has the bits of XLA's, and nothing races."""
    rows, scale_D = CASES[name].inputs()
    found = run(rows, scale_D)
    allowed = 1e-2 if CASES[name].dtype == "bfloat16" else 1e-6
    for out, right in zip(found, accuracy.in_float64(rows, scale_D, EPS), strict=True):
        assert np.all(
            np.abs(np.asarray(out, np.float64) - right)
            < allowed * np.abs(right).max(1, keepdims=True)
        )
    by_xla = xla.add_and_norm(rows, scale_D, EPS)
    for out, other in zip(found, by_xla, strict=True):
        assert out.dtype == other.dtype
        out, other = (np.asarray(array, np.float32) for array in (out, other))
        assert np.all(np.abs(out - other) <= allowed * np.abs(other).max(1, keepdims=True))
    if rows.scale_D is None:
        assert np.asarray(found[0]).tobytes() == np.asarray(by_xla[0]).tobytes()


@pytest.mark.parametrize("name", [*KINDS[1:], *FLOATS])
def test_a_row_has_the_same_bits_in_any_company(name):
    rows, scale_D = CASES[name].inputs()
    found = run(rows, scale_D)
    order = np.array([3, 0, 4])
    y_TD = None if rows.y_TD is None else rows.y_TD[order]
    others = run(Residual(rows.x_TD[order].at[1].set(jnp.nan), y_TD, rows.scale_D), scale_D)
    for out, other in zip(found, others, strict=True):
        for place in (0, 2):
            assert np.asarray(out[order[place]]).tobytes() == np.asarray(other[place]).tobytes()
        assert np.all(np.isnan(np.asarray(other[1], np.float32)))


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("name", thinned([name for name in CASES if name not in FLOATS], KINDS[1:]))
@pytest.mark.slow
def test_the_norm_in_codes_besides(name, kind):
    """They are those that the norm's own bits are rounded to by themselves, and change neither norm
    nor sum.
    """
    given = CASES[name].inputs()

    def step(rows, scale_D):
        return hopper.add_and_norm(
            rows, scale_D, EPS, kind, interpret=InterpretGPUParams(detect_races=True)
        )

    total, normed = jax.jit(step)(*given)
    assert not gpu_callbacks.get_races().races_found
    for out, other in zip((total, normed.rows), run(*given), strict=True):
        assert np.asarray(out).tobytes() == np.asarray(other).tobytes()
    codes, scale = round_rows(normed.rows, kind)
    assert normed.kind == kind and normed.codes.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(normed.codes, np.float32), np.asarray(codes, np.float32))
    assert np.array_equal(normed.scale, scale)


@pytest.mark.parametrize(("D", "normed"), [(7, False), (48, True)])
def test_xla_adds_and_normalises_as_separate_operations_do(D, normed):
    """To the bit. It serves nothing to add, and no norm of the sum, too."""
    (x_TD, y_TD, y_scale_D), scale_D = Case(D, normed).inputs()
    x_TD = x_TD.astype(jnp.float32)
    y_TD = y_TD.astype(jnp.float32)
    rows = Residual(x_TD, y_TD, y_scale_D)
    total = x_TD + (rms_norm(y_TD, y_scale_D, EPS) if normed else y_TD)
    for out, right in zip(
        xla.add_and_norm(rows, scale_D, EPS), (total, rms_norm(total, scale_D, EPS)), strict=True
    ):
        assert np.asarray(out).tobytes() == np.asarray(right).tobytes()
    nothing = xla.add_and_norm(Residual(x_TD), scale_D, EPS)
    plain = xla.add_and_norm(rows, None, EPS)
    assert np.array_equal(nothing[0], x_TD) and np.array_equal(
        nothing[1], rms_norm(x_TD, scale_D, EPS)
    )
    assert np.array_equal(plain[0], total) and np.array_equal(plain[1], total)
    for out in residual.add_and_norm(rows, None, EPS):
        np.testing.assert_allclose(out, total, rtol=1e-5, atol=1e-5)


def test_all_reasons_are_said():
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


TRIALS = [
    (None, None),
    (None, spoil_a_sum),
    (None, spoil_a_norm),
    ("int8", None),
    ("float8", spoil_a_scale),
]


@pytest.mark.parametrize(("rounds", "spoil"), TRIALS)
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
def test_a_trial(case, rounds, spoil, monkeypatch):
    """What it finds on a card, with few rows in the interpreter: it tells a kernel that is right
    from another.
    """
    real = accuracy.sum_and_norm

    def kernel(*given):
        found = real(*given)
        return found if spoil is None else spoil(*found)

    monkeypatch.setattr(accuracy, "sum_and_norm", kernel)
    kind = hopper.kind(*case.inputs(), rounds)
    found = self_test.measure(accuracy.ResidualCase(kind, 12, InterpretGPUParams()), 0, repeats=2)
    assert (found.wrong is not None) == (spoil is not None)


def test_a_kind_that_fails_its_trial_is_left_to_xla(monkeypatch, caplog, tmp_path):
    asked = []

    def test(module, kind):
        asked.append((module, kind))
        return {"sums and norms": self_test.CaseResult(0.5, 0.5, 0, 6e-3)}

    monkeypatch.setattr(hopper.device, "is_hopper", lambda: True)
    monkeypatch.setattr(self_test, "results_folder", lambda: tmp_path)
    monkeypatch.setattr(self_test, "run_self_test", test)
    monkeypatch.delenv("QUIRE_MOSAIC", raising=False)
    self_test.verdict.cache_clear()
    self_test.warn_once.cache_clear()
    rows, scale_D = Case().inputs()
    for _ in range(2):
        found = residual.add_and_norm(rows, scale_D, EPS)
        # sums have the same bits by all
        assert np.array_equal(found[0], xla.add_and_norm(rows, scale_D, EPS)[0])
    assert [module for module, _ in asked] == ["quire.ops.residual.accuracy"]
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
def test_norms_of_heads_are_those_of_their_rows(norm):
    rng = np.random.default_rng(0)
    x_TNH = jnp.asarray(rng.standard_normal((5, 3, 128)), jnp.float32)
    weights = accuracy.random_norm(norm, 128, rng)
    found = residual.norm_alone(x_TNH, weights, EPS)
    ones_D = jnp.ones(128) if weights is None else weights
    right = accuracy.in_float64(Residual(x_TNH.reshape(15, 128)), ones_D, EPS)[1]
    np.testing.assert_allclose(found, right.reshape(5, 3, 128), rtol=1e-5, atol=1e-6)
