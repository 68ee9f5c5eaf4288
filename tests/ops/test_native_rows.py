"""The C++ kernels for a layer's heads and its residual: beside float64, alone and in company."""

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
ALLOWED = {"float32": 3e-6, "bfloat16": 1e-2}
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
    f"{added} on {own}, {D}": (SCALES[added], SCALES[own], D)
    for added, own, D in product(SCALES, ("rms", "mean off, a bias"), (5, 64, 200))
} | {"nothing on rms": ("nothing", "rms", 48)}


def numbers(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def close(found, right, dtype: str) -> bool:
    most = np.abs(right).max(axis=tuple(range(1, right.ndim)), keepdims=True)
    return bool(np.all(np.abs(numbers(found) - right) <= ALLOWED[dtype] * most))


def normed(x, scale=None, centred=False, bias=0):
    x = x - x.mean(-1, keepdims=True) if centred else x
    return (
        x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * (1 if scale is None else scale) + bias
    )


def rows_of(rng, *shape, dtype):
    """The last two are padding, zeros."""
    x = rng.standard_normal((ROWS, *shape)) * rng.choice([0.01, 1, 50], (ROWS, *[1] * len(shape)))
    x[-2:] = 0
    return jnp.asarray(x, dtype)


def heads_case(name: str, dtype: str, tied: bool, N: int = 6, K: int = 2):
    norm, H, pairs = HEADS[name]
    rng = np.random.default_rng(len(name))
    qkv_TGH = rows_of(rng, N + (1 if tied else 2) * K, H, dtype=dtype)
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


def in_float64(qkv_TGH, work: Heads):
    x = numbers(qkv_TGH)
    N = work.queries
    K = work.keys
    found = []
    for own, scale in ((x[:, :N], work.q_scale), (x[:, N : N + K], work.k_scale)):
        scale = None if scale is None else numbers(scale)
        if work.norm == "all":
            own = normed(own.reshape(ROWS, -1), scale).reshape(own.shape)
        if work.norm in ("plain", "head"):
            own = normed(own, scale)
        if work.cos_sin is not None:
            cos, sin = (numbers(part)[:, None] for part in work.cos_sin)
            a, b, rest = np.split(own, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
            own = np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
        found.append(normed(own, scale) if work.norm == "turned" else own)
    values = x[:, N : N + K] if work.tied else x[:, N + K :]
    return *found, normed(values) if work.v_norm else values


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "name", thinned(HEADS, ["head, a half rotated", "turned, no whole vector", "all, not rotated"])
)
def test_heads(name, tied, dtype):
    """Each is right, padding stays zeros, and the first rows have the same bits without the
    others.
    """
    qkv_TGH, work = heads_case(name, dtype, tied)
    *found, _ = heads.prepare(qkv_TGH, work, None, None, "native")
    for out, right in zip(found, in_float64(qkv_TGH, work), strict=True):
        assert close(out, right, dtype)
        assert not np.any(numbers(out)[-2:])
    few = Heads(**{**vars(work), "cos_sin": work.cos_sin and tuple(x[2:4] for x in work.cos_sin)})
    for out, alone in zip(
        found, heads.prepare(qkv_TGH[2:4], few, None, None, "native"), strict=False
    ):
        assert np.asarray(out[2:4]).tobytes() == np.asarray(alone).tobytes()


def test_heads_that_read_the_pages_of_others():
    qkv_TGH, work = heads_case("head, a half rotated", "bfloat16", False)
    q_TNH, *_ = heads.prepare(qkv_TGH, work, None, None, "native")
    own = Heads(**{**vars(work), "keys": 0})
    found, k, v, _ = heads.prepare(qkv_TGH[:, : work.queries], own, None, None, "native")
    assert k is None and v is None and np.asarray(found).tobytes() == np.asarray(q_TNH).tobytes()


def test_heads_that_the_kernel_declines():
    qkv_TGH, work = heads_case("head, a half rotated", "float32", False)
    with pytest.raises(NotImplementedError, match="must be bfloat16 or float32, not float16"):
        heads.prepare(qkv_TGH.astype(jnp.float16), work, None, None, "native")
    with pytest.raises(ValueError, match=r"q_scale has shape \(3,\), and not \(64,\)"):
        heads.prepare(
            qkv_TGH, Heads(**{**vars(work), "q_scale": jnp.ones(3)}), None, None, "native"
        )
    # by XLA
    assert heads.prepare(qkv_TGH.astype(jnp.float16), work, None, None)[0].dtype == jnp.float16


def sum_case(name: str, dtype: str):
    added, own, D = SUMS[name]
    rng = np.random.default_rng(len(name))

    def weights(kind):
        if kind is None:
            return None
        scale, bias = (
            jnp.asarray(x, dtype)
            for x in (1 + 0.3 * rng.standard_normal(D), rng.standard_normal(D))
        )
        return scale if kind == "rms" else LayerNorm(scale, bias if kind == "bias" else None)

    x, y = (rows_of(rng, D, dtype=dtype) for _ in range(2))
    rows = Residual(x) if added == "nothing" else Residual(x, y, weights(added))
    return rows, weights(own)


def norm_in_float64(x, weights):
    if not isinstance(weights, LayerNorm):
        return normed(x, numbers(weights))
    return normed(
        x, numbers(weights.scale_D), True, 0 if weights.bias_D is None else numbers(weights.bias_D)
    )


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize(
    "name", thinned(SUMS, ["rms on rms, 200", "mean off, a bias on mean off, a bias, 5"])
)
def test_sums_and_norms(name, dtype):
    """Each row is right; the norm is that of the sum as it is kept; and rows have the same bits
    without the others.
    """
    rows, scale_D = sum_case(name, dtype)
    sum_TD, normed_TD = residual.add_and_norm(rows, scale_D, EPS, implementation="native")
    right = numbers(rows.x_TD)
    if rows.y_TD is not None:
        y = numbers(rows.y_TD)
        right = right + (y if rows.scale_D is None else norm_in_float64(y, rows.scale_D))
    assert close(sum_TD, right, dtype)
    assert close(normed_TD, norm_in_float64(numbers(sum_TD), scale_D), dtype)
    few = Residual(*(None if x is None else x[2:4] for x in rows[:2]), rows.scale_D)
    for out, alone in zip(
        (sum_TD, normed_TD), residual.add_and_norm(few, scale_D, EPS, None, "native"), strict=True
    ):
        assert np.asarray(out[2:4]).tobytes() == np.asarray(alone).tobytes()


@pytest.mark.parametrize("name", ["nothing on rms", "rms on mean off, a bias, 64"])
def test_the_derivative_is_that_of_xla(name):
    """Training goes through the same residuals."""
    rows, scale_D = sum_case(name, "float32")
    rows = jax.tree.map(lambda x: x + 1, rows)  # a row of zeros has no slope to speak of

    def loss(implementation):
        def of(rows, scale_D):
            return sum(
                jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))
                for out in residual.add_and_norm(rows, scale_D, EPS, implementation=implementation)
            )

        return jax.grad(jax.jit(of), argnums=(0, 1))(rows, scale_D)

    for found, right in zip(
        jax.tree.leaves(loss("native")), jax.tree.leaves(loss("xla")), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


def test_sums_that_the_kernel_declines():
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
