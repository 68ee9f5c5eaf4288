"""Codebooks by output, and points of a lattice after a Hadamard transform, against what their
papers say.
"""

from fractions import Fraction
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard as matrix_of_signs

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


# Means


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.booleans())
def test_means_are_the_best_of_all(seed, count, same):
    """Every way to cut values in order into runs, each with the mean of its own."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(count, 9))
    values = rng.integers(-4, 4, (3, size)) / 8 if same else rng.standard_normal((3, size))
    mass = rng.exponential(1, (3, size)) + 0.01
    found = clusters.means(values, mass, count)
    assert found.shape == (3, count) and (np.diff(found, axis=1) >= 0).all()
    for row, own, table in zip(values, mass, found, strict=True):
        order = np.argsort(row, kind="stable")
        tried = []
        for cuts in combinations(range(1, size), count - 1):
            runs = np.split(order, cuts)
            middles = [np.average(row[run], weights=own[run]) for run in runs]
            tried.append(
                sum(
                    (own[run] * (row[run] - at) ** 2).sum()
                    for run, at in zip(runs, middles, strict=True)
                )
            )
        lost = (own * np.square(row[:, None] - table).min(1)).sum()
        assert lost <= min(tried) * (1 + 1e-4) + 1e-9


def test_means_of_many_values():
    """More than are tried one by one: none of the means can move for the better, and they come near
    to the best.
    """
    rng = np.random.default_rng(0)
    values = rng.standard_normal((4, 3000))
    mass = rng.exponential(1, (4, 3000))
    for row, own, table in zip(values, mass, clusters.means(values, mass, 8), strict=True):
        mine = np.abs(row[:, None] - table).argmin(1)
        for code, mean in enumerate(table):
            assert mean == pytest.approx(
                np.average(row[mine == code], weights=own[mine == code]), abs=2e-3
            )
        lost = np.average(np.square(row - table[mine]), weights=own)
        # Lloyd's and Max's best of eight for normal numbers, with some luck of the draw: 0.0345
        assert lost < 0.0380


def test_means_where_values_are_few_or_weigh_nothing():
    (found,) = clusters.means(np.array([[1.0, 2, 4]]), np.zeros((1, 3)), 5).tolist()
    assert len(found) == 5 and {*found} == {1, 2, 4}
    np.testing.assert_allclose(
        clusters.means(np.array([[1.0, 3, 9]]), np.array([[1, 1, 0]]), 1), [[2]], atol=1e-4
    )


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 4, 8]))
def test_codes_in_words(seed, bits):
    """Bit by bit; what a word has no room for begins the next one."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (3, int(rng.integers(1, 40))), np.uint8)
    words = join_codes(codes, bits)
    each = 32 // bits
    assert words.dtype == np.int32 and words.shape == (3, -(-codes.shape[1] // each))
    for row, found in zip(codes.tolist(), words.tolist(), strict=True):
        for place, code in enumerate(row):
            assert (found[place // each] % 2**32 >> place % each * bits) % 2**bits == code
    np.testing.assert_array_equal(split_words(words, bits)[:, : codes.shape[1]], codes)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_codebook_by_output(bits):
    """What is apart is as it was, or nearly; the rest is the nearest of the output's own
    numbers.
    """
    rng = np.random.default_rng(bits)
    W = rng.standard_normal((5, 512)).astype(np.float32)
    mass = rng.exponential(1, (5, 512)).astype(np.float32)
    W[2, 17], mass[2, 400] = 30, 1000
    node = quant.packed(f"codebook-{bits}", spec_of((512,), (5,))).fit(W, mass)
    assert node.table.shape == (1 << bits, 5) and node.apart.shape == (3, 5)  # 0.45 % of 512
    found = np.asarray(node.dense()).T
    for o in range(5):
        columns = node.columns[:, o]
        assert sorted({*columns}) == columns.tolist()
        np.testing.assert_array_equal(found[o, columns], W[o, columns].astype(np.float16))
        rest = np.delete(np.arange(512), columns)
        table = node.table[:, o].astype(np.float64)
        best = np.abs(W[o, rest, None].astype(np.float64) - table).min(1)
        np.testing.assert_allclose(np.abs(W[o, rest] - found[o, rest]), best, atol=1e-6)
        assert np.abs(W[o, columns]).min() >= np.abs(W[o, rest]).max()
    assert 17 in node.columns[:, 2]
    plain = np.asarray(
        quant.packed(f"codebook-{bits}", spec_of((512,), (5,))).quantize(W.T).dense()
    ).T
    assert (mass * np.square(found - W)).sum() < (mass * np.square(plain - W)).sum()


def test_the_most_sensitive_stay_apart():
    """One in nine of those apart, however small."""
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


def every_point() -> tuple[np.ndarray, np.ndarray]:
    """(codes, points) of all 65,536, in whole quarters."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    return codes, e8p.decode_points(codes)


def test_the_table_is_the_papers():
    """227 absolute values of norm 10 or less and 29 of norm 12; each point is in E8, moved by a
    quarter.
    """
    table = e8p.table()
    odd = [(Fraction(1, 2)), Fraction(3, 2), Fraction(5, 2)]
    inner = {point for point in product(odd, repeat=8) if sum(x * x for x in point) <= 10}
    mine = [tuple(map(Fraction, map(float, row))) for row in table]
    assert len(inner) == 227 and {*mine[:227]} == inner and len({*mine}) == 256
    assert all(sum(x * x for x in point) == 12 for point in mine[227:])
    codes, found = every_point()
    assert len(np.unique(found, axis=0)) == len(codes)
    # halves of odd numbers, four times as large
    moved = np.where(codes[:, None] >> 15, found - 1, found + 1)
    assert (moved % 4 == 2).all() and (moved.sum(1) % 8 == 0).all()  # whose sum is even
    np.testing.assert_array_equal(np.sort(np.abs(moved), 1), np.sort(4 * table[codes & 255], 1))
    np.testing.assert_array_equal((moved[:, :7] < 0), codes[:, None] >> np.arange(8, 15) & 1)
    np.testing.assert_array_equal(np.asarray(e8p.decode_points(jnp.asarray(codes))), found)


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 1.0, 3.0]))
def test_the_nearest_point_of_all(seed, size):
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((64, 8)) * size).astype(np.float32)
    _, every = every_point()
    far = [np.square(every / 4 - value.astype(np.float64)).sum(1).min() for value in values]
    codes, found = e8p.nearest_points(values)
    np.testing.assert_array_equal(np.asarray(found), e8p.decode_points(np.asarray(codes)) / 4)
    np.testing.assert_allclose(
        np.square(np.asarray(found, np.float64) - values).sum(1), far, atol=1e-5
    )


@pytest.mark.parametrize("count", [8, 64, 192, 7, 40])
@pytest.mark.slow
def test_a_transform_is_hadamards(count):
    block = count & -count
    H = np.kron(np.eye(count // block), matrix_of_signs(block)) / block**0.5
    x = np.random.default_rng(count).standard_normal((3, count)).astype(np.float32)
    expected = x.astype(np.float64) * signs(count) @ H
    np.testing.assert_allclose(rotated(x), expected, atol=1e-5)
    np.testing.assert_allclose(rotated(jnp.asarray(x)), expected, atol=1e-5)
    np.testing.assert_allclose(restored(rotated(x)), x, atol=1e-5)
    assert count < 8 or {*signs(count).tolist()} == {1, -1}


def test_signs_are_those_that_are_documented():
    """The last steps of MurmurHash3, in whole numbers."""
    for i, sign in enumerate(signs(500).tolist()):
        h = i ^ i >> 16
        h = h * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        assert sign == (-1 if (h ^ h >> 16) & 1 else 1)
    assert abs(signs(4096).mean()) < 0.05


@pytest.mark.parametrize("name, most", [("e8p-2", 0.095), ("e8p-4", 0.0090)])
def test_how_much_of_normal_numbers_is_lost(name, most):
    W = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    node = quant.packed(name, spec_of((512,), (64,))).quantize(W)
    x = np.eye(512, dtype=np.float32)
    found = np.asarray(einsum("TD,DF->TF", jnp.asarray(x), node, jnp.float32))
    assert np.square(found - W).mean() < most


# As weights

NAMES = ("codebook-4", "codebook-3", "e8p-2", "e8p-4")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("into, out", [((64,), (20,)), ((6, 16), (2, 24)), ((192,), (5,))])
@pytest.mark.slow
def test_products(name, into, out):
    """By XLA and as it is laid out for the kernels, against what the codes mean; and a row alone is
    as in company.
    """
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
    exact = np.asarray(x, np.float64).reshape(9, -1) @ W64
    weights = [node]
    if native.serves():
        weights.append(pack(dense, node))
        assert type(weights[1]) is not type(node)
    for weight in weights:
        found = np.asarray(einsum(letters, x, weight, jnp.float32)).reshape(9, -1)
        np.testing.assert_allclose(found, exact, atol=0.02 * np.abs(exact).max())
        assert not found[6:].any()
        for row in range(9 if weight is not node else 0):
            alone = np.asarray(einsum(letters, x[row : row + 1], weight, jnp.float32))
            np.testing.assert_array_equal(alone.reshape(-1), found[row])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_specs_say_what_is_made(name):
    spec = quant.packed(name, spec_of((256,), (2, 64)))
    node = spec.quantize(np.random.default_rng(0).standard_normal((256, 2, 64)).astype(np.float32))
    for one, array in zip(jax.tree.leaves(spec), jax.tree.leaves(node), strict=True):
        assert (one.shape, one.dtype) == (array.shape, array.dtype)
    drawn = random_arrays(spec, 1)
    values = np.asarray(einsum("TD,DGF->TGF", jnp.eye(256), drawn, jnp.float32))
    assert 0.4 < values.std() * 256**0.5 < 2.5


@pytest.mark.parametrize("name", ["e8p", "e8p-3", "codebook", "codebook-2", "codebook-4-3"])
def test_a_wrong_name_is_told_what_would_be_right(name):
    with pytest.raises(
        ValueError, match=f"{name.partition('-')[0]} has no option '.*'; it must be . or ."
    ):
        quant.check(name)
