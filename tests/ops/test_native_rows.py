"""The C++ kernels of heads and residuals against float64; batch invariance."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops import heads, native, residual
from quire.ops.heads import Heads
from quire.ops.norm import LayerNorm
from quire.ops.residual import Residual
from quire.tests.support.cases import thinned

pytestmark = pytest.mark.skipif(not native.serves(), reason="no compiler")
ROWS = 7
EPS = 1e-5
TOLERANCE_BY_DTYPE = {"float32": 3e-6, "bfloat16": 1e-2}
NORMS = None, "plain", "head", "all", "turned"
WIDTHS = {
    "a half rotated": (64, 16),
    "no whole vector": (40, 20),
    "narrower than a vector": (6, 2),
    "not rotated": (32, 0),
}
HEADS = {
    f"{norm}, {name}": (norm, *width) for norm, (name, width) in product(NORMS, WIDTHS.items())
}
SCALES = {"none": None, "rms": "rms", "mean off": "mean", "mean off, a bias": "bias"}
SUMS = {
    f"{added} on {norm}, {D}": (SCALES[added], SCALES[norm], D)
    for added, norm, D in product(SCALES, ("rms", "mean off, a bias"), (5, 64, 200))
} | {"nothing on rms": ("nothing", "rms", 48)}


def as_float64(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def is_close(actual, expected, dtype: str) -> bool:
    max_abs = np.abs(expected).max(axis=tuple(range(1, expected.ndim)), keepdims=True)
    return bool(
        np.all(np.abs(as_float64(actual) - expected) <= TOLERANCE_BY_DTYPE[dtype] * max_abs)
    )


def normed(x, scale=None, centred=False, bias=0):
    x = x - x.mean(-1, keepdims=True) if centred else x
    return (
        x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * (1 if scale is None else scale) + bias
    )


def random_rows(rng, *shape, dtype):
    """Random rows; the last two are padding of zeros."""
    x = rng.standard_normal((ROWS, *shape)) * rng.choice([0.01, 1, 50], (ROWS, *[1] * len(shape)))
    x[-2:] = 0
    return jnp.asarray(x, dtype)


def heads_case(name: str, dtype: str, tied: bool, N: int = 6, K: int = 2):
    norm, H, pairs = HEADS[name]
    rng = np.random.default_rng(len(name))
    qkv_TGH = random_rows(rng, N + (1 if tied else 2) * K, H, dtype=dtype)
    phase_TC = rng.random((ROWS, pairs)) * 9
    cos_sin = (
        tuple(jnp.asarray(x, jnp.float32) for x in (np.cos(phase_TC), np.sin(phase_TC)))
        if pairs
        else None
    )
    q_scale, k_scale = (
        jnp.asarray(1 + 0.3 * rng.standard_normal(count * H if norm == "all" else H), dtype)
        for count in (N, K)
    )
    scales = (None, None) if norm in (None, "plain") else (q_scale, k_scale)
    return qkv_TGH, Heads(N, K, cos_sin, norm, *scales, EPS, v_norm=tied, tied=tied)


def heads_in_float64(qkv_TGH, work: Heads):
    x = as_float64(qkv_TGH)
    N = work.queries
    K = work.keys
    heads_TNH = []
    for x_TNH, scale in ((x[:, :N], work.q_scale), (x[:, N : N + K], work.k_scale)):
        scale = None if scale is None else as_float64(scale)
        if work.norm == "all":
            x_TNH = normed(x_TNH.reshape(ROWS, -1), scale).reshape(x_TNH.shape)
        if work.norm in ("plain", "head"):
            x_TNH = normed(x_TNH, scale)
        if work.cos_sin is not None:
            cos, sin = (as_float64(angle)[:, None] for angle in work.cos_sin)
            a, b, unrotated = np.split(x_TNH, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
            x_TNH = np.concatenate([a * cos - b * sin, b * cos + a * sin, unrotated], axis=-1)
        heads_TNH.append(normed(x_TNH, scale) if work.norm == "turned" else x_TNH)
    values = x[:, N : N + K] if work.tied else x[:, N + K :]
    return *heads_TNH, normed(values) if work.v_norm else values


@pytest.mark.parametrize("dtype", TOLERANCE_BY_DTYPE)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "name", thinned(HEADS, ["head, a half rotated", "turned, no whole vector", "all, not rotated"])
)
def test_heads_match_float64(name, tied, dtype):
    """Padding stays zero, and rows do not depend on the other rows."""
    qkv_TGH, work = heads_case(name, dtype, tied)
    *outputs, _ = heads.prepare(qkv_TGH, work, None, None, "native")
    for out, expected in zip(outputs, heads_in_float64(qkv_TGH, work), strict=True):
        assert is_close(out, expected, dtype)
        assert not np.any(as_float64(out)[-2:])
    middle_rows = Heads(
        **{**vars(work), "cos_sin": work.cos_sin and tuple(x[2:4] for x in work.cos_sin)}
    )
    for out, alone in zip(
        outputs, heads.prepare(qkv_TGH[2:4], middle_rows, None, None, "native"), strict=False
    ):
        assert np.asarray(out[2:4]).tobytes() == np.asarray(alone).tobytes()


def test_heads_without_keys_return_queries_only():
    qkv_TGH, work = heads_case("head, a half rotated", "bfloat16", False)
    q_TNH, *_ = heads.prepare(qkv_TGH, work, None, None, "native")
    queries_only = Heads(**{**vars(work), "keys": 0})
    actual, k, v, _ = heads.prepare(qkv_TGH[:, : work.queries], queries_only, None, None, "native")
    assert k is None and v is None and np.asarray(actual).tobytes() == np.asarray(q_TNH).tobytes()


def test_unsupported_heads_are_rejected():
    qkv_TGH, work = heads_case("head, a half rotated", "float32", False)
    with pytest.raises(NotImplementedError, match="must be bfloat16 or float32, not float16"):
        heads.prepare(qkv_TGH.astype(jnp.float16), work, None, None, "native")
    with pytest.raises(ValueError, match=r"q_scale has shape \(3,\), and not \(64,\)"):
        heads.prepare(
            qkv_TGH, Heads(**{**vars(work), "q_scale": jnp.ones(3)}), None, None, "native"
        )
    # XLA supports float16
    assert heads.prepare(qkv_TGH.astype(jnp.float16), work, None, None)[0].dtype == jnp.float16


def sum_case(name: str, dtype: str):
    added, norm, D = SUMS[name]
    rng = np.random.default_rng(len(name))

    def weights(kind):
        if kind is None:
            return None
        scale, bias = (
            jnp.asarray(x, dtype)
            for x in (1 + 0.3 * rng.standard_normal(D), rng.standard_normal(D))
        )
        return scale if kind == "rms" else LayerNorm(scale, bias if kind == "bias" else None)

    x, y = (random_rows(rng, D, dtype=dtype) for _ in range(2))
    rows = Residual(x) if added == "nothing" else Residual(x, y, weights(added))
    return rows, weights(norm)


def norm_in_float64(x, weights):
    if not isinstance(weights, LayerNorm):
        return normed(x, as_float64(weights))
    return normed(
        x,
        as_float64(weights.scale_D),
        True,
        0 if weights.bias_D is None else as_float64(weights.bias_D),
    )


@pytest.mark.parametrize("dtype", TOLERANCE_BY_DTYPE)
@pytest.mark.parametrize(
    "name", thinned(SUMS, ["rms on rms, 200", "mean off, a bias on mean off, a bias, 5"])
)
def test_sums_and_norms_match_float64(name, dtype):
    """The norm is that of the rounded sum, and rows do not depend on the other rows."""
    rows, scale_D = sum_case(name, dtype)
    sum_TD, normed_TD = residual.add_and_norm(rows, scale_D, EPS, implementation="native")
    expected = as_float64(rows.x_TD)
    if rows.y_TD is not None:
        y = as_float64(rows.y_TD)
        expected = expected + (y if rows.scale_D is None else norm_in_float64(y, rows.scale_D))
    assert is_close(sum_TD, expected, dtype)
    assert is_close(normed_TD, norm_in_float64(as_float64(sum_TD), scale_D), dtype)
    middle_rows = Residual(*(None if x is None else x[2:4] for x in rows[:2]), rows.scale_D)
    for out, alone in zip(
        (sum_TD, normed_TD),
        residual.add_and_norm(middle_rows, scale_D, EPS, None, "native"),
        strict=True,
    ):
        assert np.asarray(out[2:4]).tobytes() == np.asarray(alone).tobytes()


@pytest.mark.parametrize("name", ["nothing on rms", "rms on mean off, a bias, 64"])
def test_gradient_matches_xla(name):
    """Fine-tuning differentiates through the same residuals."""
    rows, scale_D = sum_case(name, "float32")
    rows = jax.tree.map(lambda x: x + 1, rows)  # the norm of a zero row is not differentiable

    def loss_gradient(implementation):
        def loss(rows, scale_D):
            return sum(
                jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))
                for out in residual.add_and_norm(rows, scale_D, EPS, implementation=implementation)
            )

        return jax.grad(jax.jit(loss), argnums=(0, 1))(rows, scale_D)

    for actual, expected in zip(
        jax.tree.leaves(loss_gradient("native")), jax.tree.leaves(loss_gradient("xla")), strict=True
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_unsupported_sums_are_rejected():
    rows, scale_D = sum_case("rms on rms, 64", "bfloat16")
    for shape in ((0, 64), (1, 7, 64)):
        with pytest.raises(NotImplementedError, match="rows in one list"):
            residual.add_and_norm(Residual(jnp.ones(shape)), scale_D, EPS, implementation="native")
    with pytest.raises(NotImplementedError, match="not bfloat16 and float32"):
        residual.add_and_norm(
            rows._replace(y_TD=rows.y_TD.astype(jnp.float32)), scale_D, EPS, implementation="native"
        )
    with pytest.raises(ValueError, match=r"shape \(3,\) beside rows of \(7, 64\)"):
        residual.add_and_norm(rows, jnp.ones(3), EPS, implementation="native")
