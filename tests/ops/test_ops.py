"""Norms, activations and rotary embeddings against float64 formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from quire.model.config import ModelError
from quire.model.families import rope
from quire.ops.activation import ACTIVATIONS, glu, soft_cap
from quire.ops.norm import rms_norm
from quire.ops.rope import angles, rotate

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64), (0, 8)])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_rms_norm_matches_float64(shape, eps):
    x = RNG.standard_normal(shape).astype(np.float32)
    scale = RNG.standard_normal(shape[-1]).astype(np.float32)
    x_float64 = x.astype(np.float64)
    expected = x_float64 / np.sqrt((x_float64**2).sum(-1, keepdims=True) / shape[-1] + eps)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), None, eps), expected, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(
        rms_norm(jnp.asarray(x), scale, eps), expected * scale, rtol=2e-6, atol=1e-7
    )


def test_rms_norm_of_zero_and_extreme_rows():
    """Zeros stay zero; bfloat16 is computed in float32, where squares do not overflow."""
    assert not np.asarray(rms_norm(jnp.zeros((1, 4)))).any()
    x = jnp.asarray([[1e18, -1e18], [3e-3, 3e-3]], jnp.bfloat16)
    out = rms_norm(x, None, 1e-12)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), [[1, -1], [1, 1]], rtol=4e-3)


FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.where(x > 0, x, 0),
    "tanh": np.tanh,
    "relu2": lambda x: np.where(x > 0, x, 0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_glu_matches_float64(name):
    x = (4 * RNG.standard_normal((5, 2, 33))).astype(np.float32)
    gate, up = x.astype(np.float64).swapaxes(0, 1)
    np.testing.assert_allclose(
        glu(jnp.asarray(x), name), FORMULAS[name](gate) * up, rtol=1e-5, atol=2e-6
    )
    alone = glu(jnp.asarray(x[:, :1]), name)  # without a gate
    np.testing.assert_allclose(alone, FORMULAS[name](gate), rtol=1e-5, atol=2e-6)


def test_clamped_glu():
    """The gate is clamped above, the linear part on both sides; then one is added to it."""
    x = np.array([[[9.0, -9.0, 1.0, 8.0], [1.0, 9.0, -9.0, 0.5]]], np.float32)
    gate = np.array([[7.0, -9.0, 1.0, 7.0]])
    up = np.array([[1.0, 7.0, -7.0, 0.5]])
    expected = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    np.testing.assert_allclose(
        glu(jnp.asarray(x), "silu", 7.0, 1.702), expected, rtol=1e-5, atol=1e-8
    )


def test_soft_cap_matches_float64():
    x = np.array([-1e9, -40.0, -0.01, 0.0, 0.01, 3.0, 1e9], np.float32)
    np.testing.assert_allclose(
        soft_cap(jnp.asarray(x), 30.0), 30 * np.tanh(x.astype(np.float64) / 30), rtol=1e-6
    )
    assert soft_cap(x, None) is x


def rotate_reference(x, positions, frequencies, factor=1.0):
    """Rotate each pair (i, i + pairs) as a complex number."""
    pairs = len(frequencies)
    out = x.astype(np.float64).copy()
    for t, position in enumerate(positions):
        for i, frequency in enumerate(frequencies):
            z = (x[t, :, i] + 1j * x[t, :, i + pairs]) * factor * np.exp(1j * position * frequency)
            out[t, :, i], out[t, :, i + pairs] = z.real, z.imag
    return out


@pytest.mark.parametrize("pairs", [8, 4, 1])
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rotate_matches_complex_rotation(pairs, factor):
    """Dimensions beyond the rotary ones pass through."""
    x = RNG.standard_normal((6, 3, 16)).astype(np.float32)
    positions = np.array([0, 1, 2, 17, 500, 4095])
    frequencies = 1e4 ** -(np.arange(pairs) / pairs)
    out = rotate(jnp.asarray(x), angles(jnp.asarray(positions), tuple(frequencies), factor))
    np.testing.assert_allclose(
        out, rotate_reference(x, positions, frequencies, factor), rtol=1e-4, atol=4e-4
    )
    assert np.array_equal(np.asarray(out)[..., 2 * pairs :], x[..., 2 * pairs :])


def test_scores_depend_on_the_distance_only():
    q, k = RNG.standard_normal((2, 1, 1, 32)).astype(np.float32)
    frequencies = rope.build({"rope_theta": 10000.0}, 32, 4096).inv_freq

    def score(position, distance):
        rotated = (
            rotate(jnp.asarray(x), angles(jnp.asarray([p]), frequencies))
            for x, p in ((q, position), (k, position - distance))
        )
        a, b = (np.asarray(x, np.float64).ravel() for x in rotated)
        return a @ b

    assert [score(position, 7) for position in (7, 100, 3000)] == pytest.approx(
        [score(50, 7)] * 3, abs=2e-3
    )


def default_frequency(i, dim=64, theta=500000.0):
    return theta ** (-2 * i / dim)


def llama3_frequency(i):
    """Meta's formula: slow pairs are scaled by 8, fast ones stay, and those between are blended."""
    wavelength = 2 * math.pi / default_frequency(i)
    if wavelength < 8192 / 4:
        return default_frequency(i)
    if wavelength > 8192 / 1:
        return default_frequency(i) / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * default_frequency(i) / 8 + smooth * default_frequency(i)


def yarn_frequency(
    i, dim=64, theta=500000.0, trained=4096, factor=16, fast=32, slow=1, rounded=True
):
    """NTK by parts.

    Pairs with more than `fast` turns in the trained length stay; those with fewer than `slow` are
    scaled.
    """
    bounds = [
        dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (fast, slow)
    ]
    low, high = (math.floor(bounds[0]), math.ceil(bounds[1])) if rounded else bounds
    low = max(low, 0)
    high = min(high, dim - 1)
    share = min(max((i - low) / (high - low), 0), 1)
    return (
        default_frequency(i, dim, theta) * (1 - share)
        + default_frequency(i, dim, theta) / factor * share
    )


def dynamic_frequency(i, length, trained, factor, dim=64, theta=500000.0):
    """Dynamic NTK: the base grows with the length."""
    return (theta * (factor * length / trained - factor + 1) ** (dim / (dim - 2))) ** (-2 * i / dim)


FACTORS = {
    "short_factor": [1.0 + i / 100 for i in range(32)],
    "long_factor": [2.0 + i for i in range(32)],
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 16.0, "original_max_position_embeddings": 4096}
LONG = {"factor": 32.0, "original_max_position_embeddings": 4096, **FACTORS}
RULES = {
    "default": ({}, 4096, default_frequency, 1.0),
    "linear": ({"factor": 4.0}, 4096, lambda i: default_frequency(i) / 4, 1.0),
    "dynamic within": (
        {"factor": 2.0, "original_max_position_embeddings": 4096},
        4096,
        default_frequency,
        1.0,
    ),
    "dynamic": (
        {"factor": 2.0, "original_max_position_embeddings": 4096},
        10000,
        lambda i: dynamic_frequency(i, 10000, 4096, 2),
        1.0,
    ),
    "proportional": (
        {"partial_rotary_factor": 0.25},
        4096,
        lambda i: default_frequency(i) if i < 8 else 0.0,
        1.0,
    ),
    "llama3": (LLAMA3, 131072, llama3_frequency, 1.0),
    "yarn": (YARN, 65536, yarn_frequency, 0.1 * math.log(16) + 1),
    "yarn, own factor": (YARN | {"attention_factor": 1.5}, 65536, yarn_frequency, 1.5),
    "yarn, unrounded": (
        YARN | {"truncate": False},
        65536,
        lambda i: yarn_frequency(i, rounded=False),
        0.1 * math.log(16) + 1,
    ),
    "yarn, other turns": (
        YARN | {"beta_fast": 16, "beta_slow": 2},
        65536,
        lambda i: yarn_frequency(i, fast=16, slow=2),
        0.1 * math.log(16) + 1,
    ),
    "yarn, two scales": (
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
        65536,
        yarn_frequency,
        (0.1 * 0.707 * math.log(16) + 1) / (0.1 * math.log(16) + 1),
    ),
    "longrope within": (
        LONG,
        4096,
        lambda i: default_frequency(i) / (1 + i / 100),
        math.sqrt(1 + math.log(32) / math.log(4096)),
    ),
    "longrope": (
        LONG,
        131072,
        lambda i: default_frequency(i) / (2 + i),
        math.sqrt(1 + math.log(32) / math.log(4096)),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rope_types_follow_their_formulas(name):
    params, max_len, formula, factor = RULES[name]
    built_rope = rope.build(
        {"rope_type": name.split()[0].rstrip(","), "rope_theta": 500000.0, **params}, 64, max_len
    )
    np.testing.assert_allclose(built_rope.inv_freq, [formula(i) for i in range(32)], rtol=1e-12)
    assert built_rope.factor == pytest.approx(factor, rel=1e-12)


def test_partial_rotary_factor():
    built_rope = rope.build({"rope_theta": 10000.0, "partial_rotary_factor": 0.4}, 80, 2048)
    np.testing.assert_allclose(
        built_rope.inv_freq, [default_frequency(i, 32, 10000.0) for i in range(16)], rtol=1e-12
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast"),
        ({"rope_type": "linear", "factor": -2.0}, "factor"),
        ({"rope_type": "linear", "factor": "2"}, "factor"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_type": "longrope", **LONG, "long_factor": [1.0, 2.0]}, "long_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ],
)
def test_invalid_rope_parameters_are_rejected(params, message):
    with pytest.raises(ModelError, match=message):
        rope.build(params, 64, 8192)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [32, 96, 512, 768, 2560])
@pytest.mark.slow
def test_rms_norm_is_batch_invariant(dtype, size):
    """XLA's own sums over the last axis are not batch-invariant for some of these sizes."""
    rng = np.random.default_rng(size)
    x, y = (jnp.asarray(rng.standard_normal((512, size)), dtype) for _ in range(2))
    scale = jnp.asarray(rng.standard_normal(size), dtype)
    for norm in (lambda x, y: rms_norm(x, scale), lambda x, y: rms_norm(x + y, scale)):
        expected = np.asarray(jax.jit(norm)(x, y).astype(jnp.float32))
        for rows in (1, 4, 16, 64):
            actual = np.asarray(
                jax.jit(lambda x, y, norm=norm: norm(x, y))(x[:rows], y[:rows]).astype(jnp.float32)
            )
            assert np.array_equal(actual, expected[:rows])
