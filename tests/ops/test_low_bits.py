"""Per-output codebooks (SqueezeLLM) and E8 lattice points (QuIP#) against their papers."""

from fractions import Fraction
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard as hadamard_matrix

from quire.ops import native, quant
from quire.ops.linear import einsum
from quire.ops.linear.cpu_layout import pack
from quire.ops.quant import clusters, e8p
from quire.ops.quant.compressed import join_codes, split_words
from quire.ops.quant.hadamard import restored, rotated, signs
from quire.sharding.spec import ArraySpec, random_arrays
from quire.tests.support.low_bits import dequantize


def spec_of(into, out):
    inputs = tuple(range(len(into)))
    return ArraySpec(
        (*into, *out),
        np.float32,
        (None,) * len(into + out),
        fan_in=int(np.prod(into)),
        inputs=inputs,
    )


# Weighted k-means


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.booleans())
def test_means_minimize_the_weighted_error(seed, count, has_duplicates):
    """Compared with all partitions of the sorted values into runs."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(count, 9))
    values = (
        rng.integers(-4, 4, (3, size)) / 8 if has_duplicates else rng.standard_normal((3, size))
    )
    mass = rng.exponential(1, (3, size)) + 0.01
    means = clusters.means(values, mass, count)
    assert means.shape == (3, count) and (np.diff(means, axis=1) >= 0).all()
    for row, row_mass, table in zip(values, mass, means, strict=True):
        order = np.argsort(row, kind="stable")
        errors = []
        for cuts in combinations(range(1, size), count - 1):
            runs = np.split(order, cuts)
            middles = [np.average(row[run], weights=row_mass[run]) for run in runs]
            errors.append(
                sum(
                    (row_mass[run] * (row[run] - middle) ** 2).sum()
                    for run, middle in zip(runs, middles, strict=True)
                )
            )
        error = (row_mass * np.square(row[:, None] - table).min(1)).sum()
        assert error <= min(errors) * (1 + 1e-4) + 1e-9


def test_means_of_many_values_are_a_local_optimum():
    """Each mean is the centroid of its values, and the total error is near the optimum."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, 3000))
    mass = rng.exponential(1, (4, 3000))
    for row, row_mass, table in zip(values, mass, clusters.means(values, mass, 8), strict=True):
        codes = np.abs(row[:, None] - table).argmin(1)
        for code, mean in enumerate(table):
            assert mean == pytest.approx(
                np.average(row[codes == code], weights=row_mass[codes == code]), abs=2e-3
            )
        error = np.average(np.square(row - table[codes]), weights=row_mass)
        # the Lloyd-Max optimum of eight levels for normal numbers is 0.0345
        assert error < 0.0380


def test_means_of_few_or_weightless_values():
    (means,) = clusters.means(np.array([[1.0, 2, 4]]), np.zeros((1, 3)), 5).tolist()
    assert len(means) == 5 and {*means} == {1, 2, 4}
    np.testing.assert_allclose(
        clusters.means(np.array([[1.0, 3, 9]]), np.array([[1, 1, 0]]), 1), [[2]], atol=1e-4
    )


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 4, 8]))
def test_codes_are_packed_into_int32_words(seed, bits):
    """Codes do not cross word boundaries."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (3, int(rng.integers(1, 40))), np.uint8)
    words = join_codes(codes, bits)
    codes_per_word = 32 // bits
    assert words.dtype == np.int32 and words.shape == (3, -(-codes.shape[1] // codes_per_word))
    for row, row_words in zip(codes.tolist(), words.tolist(), strict=True):
        for index, code in enumerate(row):
            assert (
                row_words[index // codes_per_word] % 2**32 >> index % codes_per_word * bits
            ) % 2**bits == code
    np.testing.assert_array_equal(split_words(words, bits)[:, : codes.shape[1]], codes)


@pytest.mark.parametrize("bits", [3, 4])
def test_codebook_keeps_outliers_and_rounds_to_the_nearest_entry(bits):
    """Outliers are exact to float16; the other values take the output's nearest table entry."""
    rng = np.random.default_rng(bits)
    W = rng.standard_normal((5, 512)).astype(np.float32)
    mass = rng.exponential(1, (5, 512)).astype(np.float32)
    W[2, 17], mass[2, 400] = 30, 1000
    node = quant.packed(f"codebook-{bits}", spec_of((512,), (5,))).fit(W, mass)
    assert node.table.shape == (1 << bits, 5) and node.apart.shape == (3, 5)  # 0.45 % of 512
    values = np.asarray(node.dense()).T
    for o in range(5):
        columns = node.columns[:, o]
        assert sorted({*columns}) == columns.tolist()
        np.testing.assert_array_equal(values[o, columns], W[o, columns].astype(np.float16))
        dense_columns = np.delete(np.arange(512), columns)
        table = node.table[:, o].astype(np.float64)
        best = np.abs(W[o, dense_columns, None].astype(np.float64) - table).min(1)
        np.testing.assert_allclose(
            np.abs(W[o, dense_columns] - values[o, dense_columns]), best, atol=1e-6
        )
        assert np.abs(W[o, columns]).min() >= np.abs(W[o, dense_columns]).max()
    assert 17 in node.columns[:, 2]
    unweighted = np.asarray(
        quant.packed(f"codebook-{bits}", spec_of((512,), (5,))).quantize(W.T).dense()
    ).T
    assert (mass * np.square(values - W)).sum() < (mass * np.square(unweighted - W)).sum()


def test_most_sensitive_weights_are_stored_exactly():
    """One in nine of the exact values is chosen by sensitivity, even if it is small."""
    rng = np.random.default_rng(0)
    W = rng.standard_normal((2, 2000)).astype(np.float32)
    mass = np.ones((2, 2000), np.float32)
    W[:, 5], mass[:, 5] = 0.01, 9
    node = quant.packed("codebook-4", spec_of((2000,), (2,))).fit(W, mass)
    assert len(node.columns) == 9 and (node.columns == 5).any(0).all()
    largest = np.sort(np.abs(W), 1)[:, -8]
    for o in range(2):
        assert {*np.flatnonzero(np.abs(W[o]) >= largest[o])} | {5} == {*node.columns[:, o]}


# The lattice


def all_points() -> tuple[np.ndarray, np.ndarray]:
    """(codes, points) of all 65,536 lattice points, in units of 1/4."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    return codes, e8p.decode_points(codes)


def test_e8p_table_matches_the_paper():
    """227 vectors of squared norm up to 10 and 29 of 12; points lie in E8 shifted by 1/4."""
    table = e8p.table()
    half_integers = [(Fraction(1, 2)), Fraction(3, 2), Fraction(5, 2)]
    inner = {point for point in product(half_integers, repeat=8) if sum(x * x for x in point) <= 10}
    table_rows = [tuple(map(Fraction, map(float, row))) for row in table]
    assert len(inner) == 227 and {*table_rows[:227]} == inner and len({*table_rows}) == 256
    assert all(sum(x * x for x in point) == 12 for point in table_rows[227:])
    codes, points = all_points()
    assert len(np.unique(points, axis=0)) == len(codes)
    # half-integers, in units of 1/4
    unshifted = np.where(codes[:, None] >> 15, points - 1, points + 1)
    assert (unshifted % 4 == 2).all() and (unshifted.sum(1) % 8 == 0).all()  # with an even sum
    np.testing.assert_array_equal(np.sort(np.abs(unshifted), 1), np.sort(4 * table[codes & 255], 1))
    np.testing.assert_array_equal((unshifted[:, :7] < 0), codes[:, None] >> np.arange(8, 15) & 1)
    np.testing.assert_array_equal(np.asarray(e8p.decode_points(jnp.asarray(codes))), points)


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 1.0, 3.0]))
def test_nearest_lattice_point_is_exact(seed, size):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((64, 8)) * size).astype(np.float32)
    _, points = all_points()
    distances = [np.square(points / 4 - value.astype(np.float64)).sum(1).min() for value in values]
    codes, nearest = e8p.nearest_points(values)
    np.testing.assert_array_equal(np.asarray(nearest), e8p.decode_points(np.asarray(codes)) / 4)
    np.testing.assert_allclose(
        np.square(np.asarray(nearest, np.float64) - values).sum(1), distances, atol=1e-5
    )


@pytest.mark.parametrize("count", [8, 64, 192, 7, 40])
@pytest.mark.slow
def test_rotation_matches_the_hadamard_matrix(count):
    block = count & -count
    H = np.kron(np.eye(count // block), hadamard_matrix(block)) / block**0.5
    x = np.random.default_rng(count).standard_normal((3, count)).astype(np.float32)
    expected = x.astype(np.float64) * signs(count) @ H
    np.testing.assert_allclose(rotated(x), expected, atol=1e-5)
    np.testing.assert_allclose(rotated(jnp.asarray(x)), expected, atol=1e-5)
    np.testing.assert_allclose(restored(rotated(x)), x, atol=1e-5)
    assert count < 8 or {*signs(count).tolist()} == {1, -1}


def test_signs_follow_murmurhash3():
    """The finaliser of MurmurHash3 in Python integers."""
    for i, sign in enumerate(signs(500).tolist()):
        h = i ^ i >> 16
        h = h * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        assert sign == (-1 if (h ^ h >> 16) & 1 else 1)
    assert abs(signs(4096).mean()) < 0.05


@pytest.mark.parametrize("name, max_error", [("e8p-2", 0.095), ("e8p-4", 0.0090)])
def test_quantization_error_of_normal_weights(name, max_error):
    W = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    node = quant.packed(name, spec_of((512,), (64,))).quantize(W)
    x = np.eye(512, dtype=np.float32)
    values = np.asarray(einsum("TD,DF->TF", jnp.asarray(x), node, jnp.float32))
    assert np.square(values - W).mean() < max_error


# Products

FORMATS = ("codebook-4", "codebook-3", "e8p-2", "e8p-4")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("into, out", [((64,), (20,)), ((6, 16), (2, 24)), ((192,), (5,))])
@pytest.mark.slow
def test_low_bit_products_match_float64(name, into, out):
    """In XLA and packed for the kernels, against the dequantised weight; batch-invariant."""
    rng = np.random.default_rng(sum(into))
    dense = spec_of(into, out)
    W = rng.standard_normal((*into, *out)).astype(np.float32)
    node = quant.packed(name, dense).quantize(W)
    W64 = dequantize(node, name)
    assert (
        np.square(W64 - W.reshape(W64.shape)).mean() < {"4": 0.02, "3": 0.05, "2": 0.12}[name[-1]]
    )
    letters = ("TD,D", "TNH,NH")[len(into) - 1] + "XY"[: len(out)] + "->T" + "XY"[: len(out)]
    x = jnp.asarray(rng.standard_normal((9, *into)).astype(np.float32)).at[6:].set(0)
    expected = np.asarray(x, np.float64).reshape(9, -1) @ W64
    weights = [node]
    if native.serves():
        weights.append(pack(dense, node))
        assert type(weights[1]) is not type(node)
    for weight in weights:
        outputs = np.asarray(einsum(letters, x, weight, jnp.float32)).reshape(9, -1)
        np.testing.assert_allclose(outputs, expected, atol=0.02 * np.abs(expected).max())
        assert not outputs[6:].any()
        for row in range(9 if weight is not node else 0):
            alone = np.asarray(einsum(letters, x[row : row + 1], weight, jnp.float32))
            np.testing.assert_array_equal(alone.reshape(-1), outputs[row])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.slow
def test_specs_have_the_shapes_and_dtypes_of_quantized_arrays(name):
    spec = quant.packed(name, spec_of((256,), (2, 64)))
    node = spec.quantize(np.random.default_rng(0).standard_normal((256, 2, 64)).astype(np.float32))
    for leaf_spec, array in zip(jax.tree.leaves(spec), jax.tree.leaves(node), strict=True):
        assert (leaf_spec.shape, leaf_spec.dtype) == (array.shape, array.dtype)
    random_weight = random_arrays(spec, 1)
    values = np.asarray(einsum("TD,DGF->TGF", jnp.eye(256), random_weight, jnp.float32))
    assert 0.4 < values.std() * 256**0.5 < 2.5


@pytest.mark.parametrize("name", ["e8p", "e8p-3", "codebook", "codebook-2", "codebook-4-3"])
def test_error_lists_the_valid_options(name):
    with pytest.raises(
        ValueError, match=f"{name.partition('-')[0]} has no option '.*'; it must be . or ."
    ):
        quant.check(name)
