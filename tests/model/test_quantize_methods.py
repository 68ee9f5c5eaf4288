"""GPTQ, AWQ and SmoothQuant over one matrix, against loops that do what the papers say, one number
at a time.
"""

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


def matrix(rng, rows: int, columns: int) -> np.ndarray:
    """Weights, some columns much larger than others."""
    return (
        rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal(columns) * 0.5)
    ).astype(np.float32)


def inputs(rng, count: int, columns: int) -> np.ndarray:
    """Rows whose numbers depend on each other, some large."""
    few = rng.standard_normal((count, max(2, columns // 3))) @ rng.standard_normal(
        (max(2, columns // 3), columns)
    )
    return (few + 0.3 * rng.standard_normal((count, columns))) * np.exp(
        rng.standard_normal(columns)
    )


def lost(W: np.ndarray, Q: np.ndarray, X: np.ndarray) -> float:
    """The squared error of the outputs."""
    return float(np.square(X @ (Q - W).T.astype(np.float64)).sum())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("columns", [128, 256])
def test_a_grid_is_its_format(name, columns):
    """The same codes to nearest, and by GPTQ too where no input says anything of another."""
    W = matrix(np.random.default_rng(1), 24, columns)
    grid = grid_for_format(name)
    W[3, :64] = 0
    spec = quant.packed(name, ArraySpec((columns, 24), np.float32, (None, None), inputs=(0,)))
    expected = spec.quantize(W.T)
    scales, zeros = grid.fit(W)
    codes = grid.codes(W, grid.spread(scales, columns), grid.spread(zeros, columns))
    by_order = gptq(W, np.eye(columns) * 3, grid, search=False)
    by_size = gptq(W, np.diag(W[0] ** 2), grid, act_order=True, search=False)
    for found in (codes, by_order.codes, by_size.codes):
        parts = spec.from_codes(found.astype(np.uint8).T, scales.T, zeros.T).parts(spec_form(name))
        for ending, value in expected.parts(spec_form(name)).items():
            np.testing.assert_array_equal(parts[ending], value)
            assert parts[ending].dtype == value.dtype


def spec_form(name: str) -> str:
    return quant.stored_schemes()[quant.stored_name(name)].forms[0]


def test_a_format_of_floats_has_no_grid():
    with pytest.raises(ModelError, match="'fp8'.*int8, int8-weights, int4-32"):
        grid_for_format("fp8")


def naive_gptq(
    W, H, bits: int, group: int | None, own_zeros: bool, act_order: bool, damp: float = 0.01
):
    """Column by column in float64, the inverse made anew after each as the paper's equation 3 has
    it.

    Returns the codes, and which outputs never had a value that float32 could round to the other
    side.
    """
    W = W.astype(np.float64)
    H = H.astype(np.float64).copy()
    count = W.shape[1]
    size = group or count
    middle = 2 ** (bits - 1)
    static = act_order or group is None
    alive = [j for j in range(count) if H[j, j] != 0]
    mean = np.mean([H[j, j] for j in alive])
    for j in range(count):
        if H[j, j] == 0:
            H[j, j] = 1
        H[j, j] += damp * mean
    dtype = np.float32 if bits == 8 and not own_zeros else np.float16

    def fit(values):
        if own_zeros:
            low = min(values.min(), 0)
            high = max(values.max(), 0)
            scale = float(dtype((np.float32(high) - np.float32(low)) / np.float32(2**bits - 1)))
            return scale, float(np.clip(np.rint(-low / scale), 0, 2**bits - 1)) if scale else 0
        if bits == 8:
            return float(dtype(np.float32(np.abs(values).max()) / np.float32(127))), middle
        top = values[np.abs(values).argmax()]
        return float(dtype(np.float32(top) / np.float32(-middle))), middle

    shared = {}
    if static:
        for o in range(len(W)):
            for g in range(-(-count // size)):
                shared[o, g] = fit(W[o, g * size : (g + 1) * size])
    order = (
        sorted(range(count), key=lambda j: (-(H[j, j] - damp * mean) * (j in alive), j))
        if act_order
        else None
    )
    left = list(order or range(count))
    codes = np.zeros(W.shape, int)
    clear = np.ones(len(W), bool)
    while left:
        j = left[0]
        F = np.linalg.inv(H[np.ix_(left, left)])
        for o in range(len(W)):
            if not static and j % size == 0:
                shared[o, j // size] = fit(W[o, j : j + size])
            scale, zero = shared[o, j // size]
            exact = W[o, j] / scale if scale else 0.0
            clear[o] &= abs(exact - np.floor(exact) - 0.5) > 1e-3
            code = np.clip(np.rint(exact) + zero, int(bits == 8 and not own_zeros), 2**bits - 1)
            codes[o, j] = code
            error = (W[o, j] - (code - zero) * scale) / F[0, 0]
            for place, k in enumerate(left):
                W[o, k] -= error * F[0, place]
        left = left[1:]
    return codes, clear


def sizes():
    """(bits, group, own zeros, act order)."""
    return st.tuples(
        st.sampled_from([2, 3, 4, 8]),
        st.sampled_from([None, 4, 8, 16]),
        st.booleans(),
        st.booleans(),
    )


@given(sizes(), st.integers(0, 2**32 - 1))
def test_gptq_is_the_papers(options, seed):
    bits, group, own_zeros, act_order = options
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 6))
    columns = 16 * int(rng.integers(1, 4))
    W = matrix(rng, rows, columns)
    X = inputs(rng, 60, columns)
    X[:, rng.integers(0, columns, 2)] = 0  # dead inputs
    H = X.T @ X
    grid = Grid(bits, group, own_zeros, np.float32 if bits == 8 and not own_zeros else np.float16)
    found = gptq(W, H, grid, act_order, damp=0.01, search=False)
    codes, clear = naive_gptq(W, H, bits, group, own_zeros, act_order)
    np.testing.assert_array_equal(found.codes[clear], codes[clear])


@given(sizes(), st.integers(0, 2**32 - 1))
def test_gptq_loses_less_than_rounding_to_nearest(options, seed):
    """No theorem: with the four values of two bits what columns take up is cut off, and it may lose
    more.
    """
    bits, group, own_zeros, act_order = options
    rng = np.random.default_rng(seed)
    W = matrix(rng, 32, 64)
    X = inputs(rng, 400, 64)
    grid = Grid(bits, group, own_zeros, np.float32)
    coded = gptq(W, X.T @ X, grid, act_order)
    assert lost(W, grid.decode(coded), X) < lost(W, grid.nearest(W), X) * (1.5 if bits == 2 else 1)
    low, high = grid.limits
    assert coded.codes.min() >= low and coded.codes.max() <= high


@given(
    st.sampled_from([2, 4]), st.sampled_from([None, 8]), st.booleans(), st.integers(0, 2**32 - 1)
)
def test_best_fit_is_the_best_scale_of_each_group(bits, group, own_zeros, seed):
    """Against every factor for every group of every output, in float64."""
    rng = np.random.default_rng(seed)
    W = matrix(rng, 3, 32)
    weight = np.exp(rng.standard_normal(32)).astype(np.float32)
    grid = Grid(bits, group, own_zeros, np.float32)
    scales, zeros = grid.best_fit(W, weight)
    size = group or 32
    last = 2**bits - 1
    middle = 2 ** (bits - 1)
    for o in range(3):
        for g in range(32 // size):
            part = np.s_[g * size : (g + 1) * size]
            values = W[o, part].astype(np.float64)
            cost = weight[part]

            def error(scale: float, zero: float, values=values, cost=cost) -> float:
                code = np.clip(np.rint(values / scale) + zero, 0, last)
                return float((np.square((code - zero) * scale - values) * cost).sum())

            low = min(values.min(), 0)
            high = max(values.max(), 0)
            tried = []
            for shrink in np.arange(20, 11, -1) / 20:
                if own_zeros:
                    scale = (high - low) * shrink / last
                    tried.append(error(scale, np.clip(np.rint(-low * shrink / scale), 0, last)))
                else:
                    top = max(high, -low) * shrink / middle
                    tried += [error(top, middle), error(-top, middle)]
            assert error(float(scales[o, g]), zeros[o, g]) <= min(tried) * (1 + 1e-3)


@pytest.mark.parametrize("name", ["int4-32", "int4-64-zero", "int3-32"])
def test_gptq_over_one_layer_beside_a_float64_reference(name):
    """Correlated inputs; the reference rounds with the inverse of H as the paper's algorithm 1
    has it.
    """
    rng = np.random.default_rng(7)
    grid = grid_for_format(name)
    W = matrix(rng, 48, 192)
    X = inputs(rng, 1000, 192)
    H = X.T @ X
    order = np.argsort(-np.diag(H), kind="stable")
    damped = H + 0.1 * np.diag(H).mean() * np.eye(192)
    inverse = np.linalg.inv(damped[np.ix_(order, order)])
    coded = gptq(W, H, grid, act_order=True)
    scales, zeros = (
        grid.spread(shared, 192).astype(np.float64) for shared in (coded.scales, coded.zeros)
    )
    left = W[:, order].astype(np.float64)
    expected = np.empty(W.shape)
    for i, column in enumerate(order):
        scale = scales[:, column]
        zero = zeros[:, column]
        code = np.clip(np.rint(left[:, i] / scale) + zero, *grid.limits)
        expected[:, column] = (code - zero) * scale
        left -= np.outer(left[:, i] - expected[:, column], inverse[i] / inverse[i, i])
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, i] = 1  # its row and column are zero now
    plain = lost(W, grid.nearest(W), X)
    found = lost(W, grid.decode(coded), X)
    assert found == pytest.approx(lost(W, expected, X), rel=0.02)
    assert found < 0.5 * plain
    assert found < lost(W, grid.decode(gptq(W, H, grid, act_order=True, search=False)), X)


PAIRS = {
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
        pytest.param(*case, marks=[] if case in PAIRS else pytest.mark.nightly)
        for case in product((False, True), (None, 32, 100), (160, 300))
    ],
)
@pytest.mark.slow
def test_gptq_over_several_blocks(columns, group, act_order):
    rng = np.random.default_rng(columns)
    W = matrix(rng, 5, columns)
    X = inputs(rng, 600, columns)
    found = gptq(W, X.T @ X, Grid(4, group), act_order, damp=0.01, search=False)
    codes, clear = naive_gptq(W, X.T @ X, 4, group, False, act_order)
    assert clear.any()
    np.testing.assert_array_equal(found.codes[clear], codes[clear])


def test_gptq_with_fewer_rows_than_inputs():
    rng = np.random.default_rng(0)
    W = matrix(rng, 8, 64)
    X = inputs(rng, 5, 64)
    X[:, 10:20] = 0
    grid = Grid(4, 32)
    coded = gptq(W, X.T @ X, grid, damp=0.0)  # not positive definite until it is damped
    assert lost(W, grid.decode(coded), X) < lost(W, grid.nearest(W), X)
    nothing = gptq(W, np.zeros((64, 64)), grid, search=False)
    np.testing.assert_array_equal(grid.decode(nothing), grid.nearest(W))


def test_what_gptq_refuses():
    with pytest.raises(ModelError, match="finite"):
        inverse_cholesky(np.array([[np.inf]]), 0.01)
    with pytest.raises(ModelError, match="too closely"):
        inverse_cholesky(np.array([[1.0, -9.0], [-9.0, 1.0]]), 1e-6)


def test_inverse_cholesky():
    X = inputs(np.random.default_rng(0), 50, 12)
    H = X.T @ X
    U = inverse_cholesky(H, 0.02)
    assert not np.tril(U, -1).any()
    np.testing.assert_allclose(
        U.T @ U @ (H + 0.02 * np.diag(H).mean() * np.eye(12)), np.eye(12), atol=1e-8
    )


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_awq_finds_the_best_alpha(seed, own_zeros):
    """Of all twenty, by the outputs themselves."""
    rng = np.random.default_rng(seed)
    W = matrix(rng, 10, 32)
    X = inputs(rng, 50, 32)
    grid = Grid(4, 16, own_zeros)
    size = np.abs(X).mean(0)
    s = awq.scales(W, X.T @ X, size, grid)
    tried = []
    for number in range(20):
        own = size ** (number / 20)
        own = (own / np.sqrt(own.max() * own.min())).astype(np.float32)
        tried.append(lost(W, grid.nearest(W * own) / own, X))
    assert lost(W, grid.nearest(W * s) / s, X) <= min(tried) * (1 + 1e-4)
    assert min(tried) <= lost(W, grid.nearest(W), X)


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 8, 16]))
def test_awq_clips_where_it_helps(seed, group):
    """Against every bound for every group of every output."""
    rng = np.random.default_rng(seed)
    W = matrix(rng, 3, 32)
    X = inputs(rng, 50, 32)
    grid = Grid(3, group, False, np.float32)
    cut = awq.clip_weights(W, X.T @ X, grid)
    size = group or 32
    for o in range(3):
        for start in range(0, 32, size):
            part = np.s_[start : start + size]
            own = W[o : o + 1, part]
            rows = X[:, part]
            tried = []
            for step in range(11):
                bound = np.abs(own).max() * (1 - step / 20)
                tried.append(lost(own, grid.nearest(np.clip(own, -bound, bound)), rows))
            assert (
                lost(own, grid.nearest(cut[o : o + 1, part]), rows)
                <= min(tried) * (1 + 1e-4) + 1e-9
            )


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 0.5, 0.8]))
def test_smoothquant(seed, a):
    rng = np.random.default_rng(seed)
    X = np.abs(inputs(rng, 4, 20)).max(0)
    W = np.abs(matrix(rng, 4, 20)).max(0)
    X[3] = W[5] = 0
    s = smoothquant.scales(X, W, a)
    for j in range(20):
        right = 1 if j in (3, 5) else X[j] ** a / W[j] ** (1 - a)
        assert s[j] == pytest.approx(right, rel=1e-5)
    np.testing.assert_allclose((X / s * W * s), X * W, rtol=1e-5)
    if a == 0.5:  # both are equally hard to round then
        known = (X > 0) & (W > 0)
        np.testing.assert_allclose((X / s)[known], (W * s)[known], rtol=1e-4)


@given(st.integers(0, 2**32 - 1))
def test_smoothquant_helps_where_some_inputs_are_large(seed):
    """Rows and weights in bytes, the inputs' outliers a hundred times the rest."""
    rng = np.random.default_rng(seed)
    W = rng.standard_normal((8, 64))
    X = rng.standard_normal((40, 64))
    X[:, rng.integers(0, 64, 2)] *= 100

    def in_bytes(x):
        step = np.abs(x).max(1, keepdims=True) / 127
        return np.rint(x / step) * step

    s = smoothquant.scales(np.abs(X).max(0), np.abs(W).max(0))
    exact = X @ W.T
    plain = in_bytes(X) @ in_bytes(W).T
    smooth = in_bytes(X / s) @ in_bytes(W * s).T
    assert np.square(smooth - exact).sum() < np.square(plain - exact).sum()
