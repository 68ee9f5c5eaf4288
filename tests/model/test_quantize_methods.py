"""GPTQ, AWQ and SmoothQuant over one matrix, against scalar loops over the papers' algorithms."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.model.config import ModelError
from quire.model.quantize import awq, smoothquant
from quire.model.quantize.gptq import gptq, inverse_cholesky
from quire.model.quantize.grid import Grid, grid_for_format
from quire.ops import quant
from quire.sharding.spec import ArraySpec

FORMATS = [
    "int8",
    "int8-weights",
    "int4",
    "int4-64",
    "int4-128",
    "int4-32-zero",
    "int4-64-zero",
    "int3-32",
    "int3-64-zero",
    "int2-32-zero",
    "int2-64",
]


def random_weights(rng, rows: int, columns: int) -> np.ndarray:
    """Random weights with some much larger columns."""
    return (
        rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal(columns) * 0.5)
    ).astype(np.float32)


def random_inputs(rng, count: int, columns: int) -> np.ndarray:
    """Correlated random inputs, some of them large."""
    low_rank = rng.standard_normal((count, max(2, columns // 3))) @ rng.standard_normal(
        (max(2, columns // 3), columns)
    )
    return (low_rank + 0.3 * rng.standard_normal((count, columns))) * np.exp(
        rng.standard_normal(columns)
    )


def output_error(W: np.ndarray, Q: np.ndarray, X: np.ndarray) -> float:
    """The squared error of the outputs."""
    return float(np.square(X @ (Q - W).T.astype(np.float64)).sum())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [128, 256])
def test_grid_gives_the_codes_of_its_format(name, columns):
    """By rounding to nearest, and by GPTQ with uncorrelated inputs."""
    W = random_weights(np.random.default_rng(1), 24, columns)
    grid = grid_for_format(name)
    W[3, :64] = 0
    spec = quant.packed(name, ArraySpec((columns, 24), np.float32, (None, None), inputs=(0,)))
    expected = spec.quantize(W.T)
    scales, zeros = grid.fit(W)
    codes = grid.codes(W, grid.spread(scales, columns), grid.spread(zeros, columns))
    by_order = gptq(W, np.eye(columns) * 3, grid, search=False)
    by_size = gptq(W, np.diag(W[0] ** 2), grid, act_order=True, search=False)
    for grid_codes in (codes, by_order.codes, by_size.codes):
        actual = spec.from_codes(grid_codes.astype(np.uint8).T, scales.T, zeros.T).parts(
            spec_form(name)
        )
        for ending, value in expected.parts(spec_form(name)).items():
            np.testing.assert_array_equal(actual[ending], value)
            assert actual[ending].dtype == value.dtype


def spec_form(name: str) -> str:
    return quant.stored_schemes()[quant.stored_name(name)].forms[0]


def test_float_format_has_no_grid():
    with pytest.raises(ModelError, match="'fp8'.*int8, int8-weights, int4-32"):
        grid_for_format("fp8")


def naive_gptq(
    W, H, bits: int, group: int | None, has_zeros: bool, act_order: bool, damp: float = 0.01
):
    """GPTQ by the paper's equation 3 in float64, inverting the Hessian anew for each column.

    Returns the codes, and a mask of the outputs that have no value near a rounding tie.
    """
    W = W.astype(np.float64)
    H = H.astype(np.float64).copy()
    count = W.shape[1]
    size = group or count
    middle = 2 ** (bits - 1)
    static = act_order or group is None
    used_inputs = [j for j in range(count) if H[j, j] != 0]
    mean = np.mean([H[j, j] for j in used_inputs])
    for j in range(count):
        if H[j, j] == 0:
            H[j, j] = 1
        H[j, j] += damp * mean
    dtype = np.float32 if bits == 8 and not has_zeros else np.float16

    def fit(values):
        if has_zeros:
            low = min(values.min(), 0)
            high = max(values.max(), 0)
            scale = float(dtype((np.float32(high) - np.float32(low)) / np.float32(2**bits - 1)))
            return scale, float(np.clip(np.rint(-low / scale), 0, 2**bits - 1)) if scale else 0
        if bits == 8:
            return float(dtype(np.float32(np.abs(values).max()) / np.float32(127))), middle
        top = values[np.abs(values).argmax()]
        return float(dtype(np.float32(top) / np.float32(-middle))), middle

    scale_and_zero = {}
    if static:
        for o in range(len(W)):
            for g in range(-(-count // size)):
                scale_and_zero[o, g] = fit(W[o, g * size : (g + 1) * size])
    order = (
        sorted(range(count), key=lambda j: (-(H[j, j] - damp * mean) * (j in used_inputs), j))
        if act_order
        else None
    )
    remaining = list(order or range(count))
    codes = np.zeros(W.shape, int)
    is_unambiguous = np.ones(len(W), bool)
    while remaining:
        j = remaining[0]
        F = np.linalg.inv(H[np.ix_(remaining, remaining)])
        for o in range(len(W)):
            if not static and j % size == 0:
                scale_and_zero[o, j // size] = fit(W[o, j : j + size])
            scale, zero = scale_and_zero[o, j // size]
            exact = W[o, j] / scale if scale else 0.0
            is_unambiguous[o] &= abs(exact - np.floor(exact) - 0.5) > 1e-3
            code = np.clip(np.rint(exact) + zero, int(bits == 8 and not has_zeros), 2**bits - 1)
            codes[o, j] = code
            error = (W[o, j] - (code - zero) * scale) / F[0, 0]
            for position, k in enumerate(remaining):
                W[o, k] -= error * F[0, position]
        remaining = remaining[1:]
    return codes, is_unambiguous


def grid_options():
    """Strategy for (bits, group size, has zero points, act_order)."""
    return st.tuples(
        st.sampled_from([2, 3, 4, 8]),
        st.sampled_from([None, 4, 8, 16]),
        st.booleans(),
        st.booleans(),
    )


@given(grid_options(), st.integers(0, 2**32 - 1))
def test_gptq_matches_the_papers_algorithm(options, seed):
    bits, group, has_zeros, act_order = options
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 6))
    columns = 16 * int(rng.integers(1, 4))
    W = random_weights(rng, rows, columns)
    X = random_inputs(rng, 60, columns)
    X[:, rng.integers(0, columns, 2)] = 0  # dead inputs
    H = X.T @ X
    grid = Grid(bits, group, has_zeros, np.float32 if bits == 8 and not has_zeros else np.float16)
    quantized = gptq(W, H, grid, act_order, damp=0.01, search=False)
    codes, is_unambiguous = naive_gptq(W, H, bits, group, has_zeros, act_order)
    np.testing.assert_array_equal(quantized.codes[is_unambiguous], codes[is_unambiguous])


@given(grid_options(), st.integers(0, 2**32 - 1))
def test_gptq_has_lower_output_error_than_round_to_nearest(options, seed):
    """Not a theorem: with two bits the updates are often clipped, and the error may be larger."""
    bits, group, has_zeros, act_order = options
    rng = np.random.default_rng(seed)
    W = random_weights(rng, 32, 64)
    X = random_inputs(rng, 400, 64)
    grid = Grid(bits, group, has_zeros, np.float32)
    quantized = gptq(W, X.T @ X, grid, act_order)
    assert output_error(W, grid.decode(quantized), X) < output_error(W, grid.nearest(W), X) * (
        1.5 if bits == 2 else 1
    )
    low, high = grid.limits
    assert quantized.codes.min() >= low and quantized.codes.max() <= high


@given(
    st.sampled_from([2, 4]), st.sampled_from([None, 8]), st.booleans(), st.integers(0, 2**32 - 1)
)
def test_best_fit_finds_the_best_scale_of_each_group(bits, group, has_zeros, seed):
    """Compared with all shrinking factors in float64."""
    rng = np.random.default_rng(seed)
    W = random_weights(rng, 3, 32)
    weight = np.exp(rng.standard_normal(32)).astype(np.float32)
    grid = Grid(bits, group, has_zeros, np.float32)
    scales, zeros = grid.best_fit(W, weight)
    size = group or 32
    last = 2**bits - 1
    middle = 2 ** (bits - 1)
    for o in range(3):
        for g in range(32 // size):
            columns = np.s_[g * size : (g + 1) * size]
            values = W[o, columns].astype(np.float64)
            cost = weight[columns]

            def error(scale: float, zero: float, values=values, cost=cost) -> float:
                code = np.clip(np.rint(values / scale) + zero, 0, last)
                return float((np.square((code - zero) * scale - values) * cost).sum())

            low = min(values.min(), 0)
            high = max(values.max(), 0)
            errors = []
            for shrink in np.arange(20, 11, -1) / 20:
                if has_zeros:
                    scale = (high - low) * shrink / last
                    errors.append(error(scale, np.clip(np.rint(-low * shrink / scale), 0, last)))
                else:
                    top = max(high, -low) * shrink / middle
                    errors += [error(top, middle), error(-top, middle)]
            assert error(float(scales[o, g]), zeros[o, g]) <= min(errors) * (1 + 1e-3)


@pytest.mark.parametrize("name", ["int4-32", "int4-64-zero", "int3-32"])
def test_gptq_error_matches_a_float64_reference(name):
    """The reference is the paper's algorithm 1, with correlated inputs."""
    rng = np.random.default_rng(7)
    grid = grid_for_format(name)
    W = random_weights(rng, 48, 192)
    X = random_inputs(rng, 1000, 192)
    H = X.T @ X
    order = np.argsort(-np.diag(H), kind="stable")
    damped = H + 0.1 * np.diag(H).mean() * np.eye(192)
    inverse = np.linalg.inv(damped[np.ix_(order, order)])
    quantized = gptq(W, H, grid, act_order=True)
    scales, zeros = (
        grid.spread(group_values, 192).astype(np.float64)
        for group_values in (quantized.scales, quantized.zeros)
    )
    remaining = W[:, order].astype(np.float64)
    expected = np.empty(W.shape)
    for i, column in enumerate(order):
        scale = scales[:, column]
        zero = zeros[:, column]
        code = np.clip(np.rint(remaining[:, i] / scale) + zero, *grid.limits)
        expected[:, column] = (code - zero) * scale
        remaining -= np.outer(remaining[:, i] - expected[:, column], inverse[i] / inverse[i, i])
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = 1  # its row and column are zero now
    nearest_error = output_error(W, grid.nearest(W), X)
    gptq_error = output_error(W, grid.decode(quantized), X)
    assert gptq_error == pytest.approx(output_error(W, expected, X), rel=0.02)
    assert gptq_error < 0.5 * nearest_error
    assert gptq_error < output_error(
        W, grid.decode(gptq(W, H, grid, act_order=True, search=False)), X
    )


ALWAYS_TESTED = {
    (False, None, 160),
    (True, None, 300),
    (False, 32, 300),
    (True, 32, 160),
    (False, 100, 160),
    (True, 100, 300),
}


@pytest.mark.parametrize(
    ("act_order", "group", "columns"),
    [
        pytest.param(*case, marks=[] if case in ALWAYS_TESTED else pytest.mark.nightly)
        for case in product((False, True), (None, 32, 100), (160, 300))
    ],
)
@pytest.mark.slow
def test_gptq_over_several_blocks_matches_the_reference(columns, group, act_order):
    rng = np.random.default_rng(columns)
    W = random_weights(rng, 5, columns)
    X = random_inputs(rng, 600, columns)
    quantized = gptq(W, X.T @ X, Grid(4, group), act_order, damp=0.01, search=False)
    codes, is_unambiguous = naive_gptq(W, X.T @ X, 4, group, False, act_order)
    assert is_unambiguous.any()
    np.testing.assert_array_equal(quantized.codes[is_unambiguous], codes[is_unambiguous])


def test_gptq_with_fewer_rows_than_inputs():
    rng = np.random.default_rng(0)
    W = random_weights(rng, 8, 64)
    X = random_inputs(rng, 5, 64)
    X[:, 10:20] = 0
    grid = Grid(4, 32)
    quantized = gptq(W, X.T @ X, grid, damp=0.0)  # not positive definite until it is damped
    assert output_error(W, grid.decode(quantized), X) < output_error(W, grid.nearest(W), X)
    without_inputs = gptq(W, np.zeros((64, 64)), grid, search=False)
    np.testing.assert_array_equal(grid.decode(without_inputs), grid.nearest(W))


def test_gptq_rejects_non_finite_and_singular_hessians():
    with pytest.raises(ModelError, match="finite"):
        inverse_cholesky(np.array([[np.inf]]), 0.01)
    with pytest.raises(ModelError, match="too closely"):
        inverse_cholesky(np.array([[1.0, -9.0], [-9.0, 1.0]]), 1e-6)


def test_inverse_cholesky_inverts_the_damped_matrix():
    X = random_inputs(np.random.default_rng(0), 50, 12)
    H = X.T @ X
    U = inverse_cholesky(H, 0.02)
    assert not np.tril(U, -1).any()
    np.testing.assert_allclose(
        U.T @ U @ (H + 0.02 * np.diag(H).mean() * np.eye(12)), np.eye(12), atol=1e-8
    )


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_awq_finds_the_best_alpha(seed, has_zeros):
    """Compared with the output errors of all twenty."""
    rng = np.random.default_rng(seed)
    W = random_weights(rng, 10, 32)
    X = random_inputs(rng, 50, 32)
    grid = Grid(4, 16, has_zeros)
    size = np.abs(X).mean(0)
    s = awq.scales(W, X.T @ X, size, grid)
    errors = []
    for number in range(20):
        scale = size ** (number / 20)
        scale = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
        errors.append(output_error(W, grid.nearest(W * scale) / scale, X))
    assert output_error(W, grid.nearest(W * s) / s, X) <= min(errors) * (1 + 1e-4)
    assert min(errors) <= output_error(W, grid.nearest(W), X)


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 8, 16]))
def test_awq_finds_the_best_clipping_of_each_group(seed, group):
    """Compared with all clipping bounds."""
    rng = np.random.default_rng(seed)
    W = random_weights(rng, 3, 32)
    X = random_inputs(rng, 50, 32)
    grid = Grid(3, group, False, np.float32)
    clipped = awq.clip_weights(W, X.T @ X, grid)
    size = group or 32
    for o in range(3):
        for start in range(0, 32, size):
            columns = np.s_[start : start + size]
            weights = W[o : o + 1, columns]
            rows = X[:, columns]
            errors = []
            for step in range(11):
                bound = np.abs(weights).max() * (1 - step / 20)
                errors.append(
                    output_error(weights, grid.nearest(np.clip(weights, -bound, bound)), rows)
                )
            assert (
                output_error(weights, grid.nearest(clipped[o : o + 1, columns]), rows)
                <= min(errors) * (1 + 1e-4) + 1e-9
            )


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 0.5, 0.8]))
def test_smoothquant_scales_follow_the_formula(seed, a):
    rng = np.random.default_rng(seed)
    X = np.abs(random_inputs(rng, 4, 20)).max(0)
    W = np.abs(random_weights(rng, 4, 20)).max(0)
    X[3] = W[5] = 0
    s = smoothquant.scales(X, W, a)
    for j in range(20):
        expected = 1 if j in (3, 5) else X[j] ** a / W[j] ** (1 - a)
        assert s[j] == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose((X / s * W * s), X * W, rtol=1e-5)
    if a == 0.5:  # balances the ranges of inputs and weights
        is_nonzero = (X > 0) & (W > 0)
        np.testing.assert_allclose((X / s)[is_nonzero], (W * s)[is_nonzero], rtol=1e-4)


@given(st.integers(0, 2**32 - 1))
def test_smoothquant_lowers_the_error_of_outlier_inputs(seed):
    """Inputs and weights in int8; outlier inputs are a hundred times larger."""
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((8, 64))
    X = rng.standard_normal((40, 64))
    X[:, rng.integers(0, 64, 2)] *= 100

    def round_to_int8(x):
        step = np.abs(x).max(1, keepdims=True) / 127
        return np.rint(x / step) * step

    s = smoothquant.scales(np.abs(X).max(0), np.abs(W).max(0))
    exact = X @ W.T
    unscaled = round_to_int8(X) @ round_to_int8(W).T
    smooth = round_to_int8(X / s) @ round_to_int8(W * s).T
    assert np.square(smooth - exact).sum() < np.square(unscaled - exact).sum()
