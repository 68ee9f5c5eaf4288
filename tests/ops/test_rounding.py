"""The GPU kernel that quantises rows: in Pallas' interpreter, and lowered."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from quire.ops import rounding
from quire.ops.gpu import self_test
from quire.ops.rounding import accuracy, hopper, xla
from quire.tests.support.cases import thinned

pytestmark = pytest.mark.usefixtures("interpreted_once")


def random_rows(width: int, rows: int = 6):
    """Random rows of different magnitudes; the second is zero."""
    return accuracy.RoundingCase({"width": width, "codes": "int8"}, rows).build(0)[1][0]


def run_kernel(x_RK, codes: str = "int8"):
    def step(x_RK):
        return hopper.round_rows(x_RK, codes, interpret=InterpretGPUParams(detect_races=True))

    codes_RK, scale_R = jax.jit(step)(x_RK)
    assert not gpu_callbacks.get_races().races_found
    assert codes_RK.dtype == x_RK.dtype and scale_R.dtype == jnp.float32
    return np.asarray(codes_RK, np.float32), np.asarray(scale_R)


@pytest.mark.parametrize("width", thinned([64, 512, 704, 2880, 14336, 16384], [64, 704]))
def test_int8_rows_match_float64_and_xla(width):
    x_RK = random_rows(width)
    codes_RK, scale_R = run_kernel(x_RK)
    exact = np.asarray(x_RK, np.float64)
    np.testing.assert_allclose(scale_R, np.abs(exact).max(1) / 127, rtol=1e-6)
    assert np.all(
        np.abs(codes_RK * scale_R[:, None].astype(np.float64) - exact) <= 0.501 * scale_R[:, None]
    )
    assert np.abs(codes_RK).max(1).tolist() == [127, 0, 127, 127, 127, 127]
    xla_outputs = xla.round_rows(x_RK, "int8")
    assert np.array_equal(codes_RK, np.asarray(xla_outputs[0], np.float32)) and np.array_equal(
        scale_R, xla_outputs[1]
    )


@pytest.mark.parametrize("width", thinned([64, 704, 4096], [704]))
def test_float8_rows_match_float64_and_xla(width):
    """Codes are nearest float8 values; scales map each row's maximum to 448."""
    x_RK = random_rows(width)
    codes_RK, scale_R = run_kernel(x_RK, "float8")
    exact = np.asarray(x_RK, np.float64)
    np.testing.assert_allclose(scale_R, np.abs(exact).max(1) / 448, rtol=1e-6)
    assert np.abs(codes_RK).max(1).tolist() == [448, 0, 448, 448, 448, 448]
    float8_values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    float8_values = float8_values[np.isfinite(float8_values)]
    quotient = exact / np.where(scale_R > 0, scale_R, 1).astype(np.float64)[:, None]
    min_error = np.abs(quotient[:, :64, None] - float8_values).min(-1)
    assert np.isin(codes_RK, float8_values).all() and np.all(
        np.abs(codes_RK - quotient)[:, :64] <= min_error * 1.001 + 1e-5
    )
    xla_outputs = xla.round_rows(x_RK, "float8")
    assert np.array_equal(codes_RK, np.asarray(xla_outputs[0], np.float32)) and np.array_equal(
        scale_R, xla_outputs[1]
    )


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_kernel_is_batch_invariant(kind):
    """Also with non-finite rows, whose scales become NaN."""
    x_RK = random_rows(192)
    codes_RK, scale_R = run_kernel(x_RK, kind)
    order = np.array([3, 0, 5, 4])
    other_rows = x_RK[order].at[1, 7].set(jnp.nan).at[2, 3].set(-jnp.inf)
    codes, scale = run_kernel(other_rows, kind)
    for row in (0, 3):
        assert codes[row].tobytes() == codes_RK[order[row]].tobytes()
        assert scale[row] == scale_R[order[row]]
    assert np.isnan(scale[1:3]).all() and np.isfinite(codes).all()


def test_error_lists_every_unsupported_property():
    with pytest.raises(
        NotImplementedError, match=r"bfloat16, not float32, and .* multiple of 64 .* not 100"
    ):
        hopper.round_rows(jnp.zeros((2, 100)), "int8", interpret=True)
    with pytest.raises(NotImplementedError, match="mosaic_gpu: there is no NVIDIA GPU"):
        rounding.round_rows(random_rows(64), implementation="mosaic_gpu")


def spoil_a_code(codes_RK, scale_R):
    return codes_RK.at[5, 3].add(codes_RK[5].max() / 127), scale_R


def spoil_a_scale(codes_RK, scale_R):
    return codes_RK, scale_R.at[4].multiply(1.001)


@pytest.mark.parametrize("codes", ["int8", "float8"])
@pytest.mark.parametrize("spoil", [None, spoil_a_code, spoil_a_scale])
def test_self_test_rejects_inaccurate_kernel(spoil, codes, monkeypatch):
    """The GPU self-test, with few rows in the interpreter, accepts only an accurate kernel."""
    real = accuracy.code_rows

    def kernel(*arguments):
        outputs = real(*arguments)
        return outputs if spoil is None else spoil(*outputs)

    monkeypatch.setattr(accuracy, "code_rows", kernel)
    case, _ = accuracy.cases({"width": 192, "codes": codes})
    result = self_test.measure(
        accuracy.RoundingCase(case.kind, 8, InterpretGPUParams()), 0, repeats=2
    )
    assert (result.wrong is not None) == (spoil is not None)


def test_lowers_for_cuda_as_one_kernel(monkeypatch):
    monkeypatch.setattr(hopper.device, "is_hopper", lambda: True)
    monkeypatch.setenv("QUIRE_MOSAIC", "trusted")
    text = (
        jax.jit(rounding.round_rows)
        .trace(random_rows(512))
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert text.count("@mosaic_gpu_v2") == 1 and "stablehlo.reduce" not in text
