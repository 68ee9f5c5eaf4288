"""Products of the GPU kernel where there is none: in Pallas' interpreter against float64, and
compiled.
"""

import json
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from quire.ops import linear as products
from quire.ops import moe
from quire.ops.gpu import device, self_test
from quire.ops.linear import gpu as linear
from quire.ops.linear.gpu_kernel import accuracy, prepare, shape
from quire.ops.linear.weight import GpuMatrix, RoundedRows
from quire.ops.moe import Experts, routing
from quire.ops.moe import gpu as experts
from quire.ops.moe.routing.blocks import align, max_blocks
from quire.ops.quant.fp8 import Fp8, round_to_float8
from quire.ops.quant.int4 import Int4
from quire.ops.quant.int8 import Int8, round_to_int8
from quire.ops.quant.mxfp4 import Mxfp4
from quire.ops.quant.stack import Stack
from quire.ops.rounding.xla import round_rows
from quire.tests.support import copies, kernels_ahead
from quire.tests.support.cases import cases, nightly_from, thinned

pytestmark = pytest.mark.usefixtures("interpreted_once")
INTERPRETED = InterpretGPUParams(detect_races=True)
CLOSE = {"rtol": 1e-2, "atol": 2e-2}  # results are rounded to bfloat16


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """There is room for two steps only."""
    monkeypatch.setattr(shape.ProductShape, "stages", 2)
    jax.clear_caches()


@pytest.fixture(params=["mosaic", "triton"])
def by(request):
    """Either kernel, in its interpreter; that of Mosaic GPU looks for races."""
    mosaic = request.param == "mosaic"
    yield INTERPRETED if mosaic else True
    assert not (mosaic and gpu_callbacks.get_races().races_found)


def draw(rng, *axes: int, scale: float = 1.0):
    return jnp.asarray(rng.standard_normal(axes, np.float32) * scale, jnp.bfloat16)


def exact(x) -> np.ndarray:
    return np.asarray(x, np.float64)


DENSE = {  # subscripts, axes of the weight, rows, options
    "one row": ("TD,DGH->TGH", (128, 3, 64), 1, {}),
    "a bias": ("TD,DGH->TGH", (192, 2, 64), 16, {"bias": True}),
    "several inputs": ("TNH,NHD->TD", (2, 64, 128), 17, {}),
    "a head": ("RD,VD->RV", (192, 128), 5, {"dtype": jnp.float32}),
    "a head, many rows": ("RD,VD->RV", (128, 128), 130, {"dtype": jnp.float32}),
    "many rows": ("TD,DA->TA", (64, 64), 130, {"bias": True}),
    "two warpgroups": ("TD,DA->TA", (192, 256), 100, {"bias": True}),
}


@pytest.mark.parametrize("name", thinned(DENSE, ["a bias", "a head", "two warpgroups"]))
@pytest.mark.slow
def test_dense_against_float64(name):
    subscripts, axes, rows, options = DENSE[name]
    rng = np.random.default_rng(0)
    rank = len(subscripts.partition(",")[0]) - 1
    inputs = axes[-1:] if options.get("dtype") else axes[:rank]
    out = axes[:1] if options.get("dtype") else axes[rank:]
    x = draw(rng, rows, *inputs)
    weight = draw(rng, *axes, scale=np.prod(inputs) ** -0.5)
    bias = jnp.asarray(rng.standard_normal(out), jnp.float32) if options.get("bias") else None
    found = linear.weight_of(weight, INTERPRETED).einsum(subscripts, x, bias, options.get("dtype"))
    wanted = np.einsum(subscripts, exact(x), exact(weight)) + (0 if bias is None else exact(bias))
    np.testing.assert_allclose(exact(found), wanted, **CLOSE)
    assert found.dtype == options.get("dtype", jnp.bfloat16)
    assert not gpu_callbacks.get_races().races_found


def rounded(weight, dynamic: bool, into: int = 1) -> Int8:
    """A weight in int8 whose inputs come first."""
    axes = weight.shape
    spec = Int8(None, None, dynamic, into=axes[:into], out=axes[into:], inputs=tuple(range(into)))
    return jax.tree.map(jnp.asarray, spec.quantize(np.asarray(weight, np.float32)))


def exact_rows(x, dynamic: bool) -> np.ndarray:
    """What the products see of rows."""
    if not dynamic:
        return exact(x)
    most = np.abs(exact(x)).max(-1, keepdims=True)
    return np.rint(exact(x) * (127 / most)) * most / 127


INT8S = {  # subscripts, axes of the weight, rows, whether the rows are rounded too
    "weights": ("TD,DGH->TGH", (192, 2, 64), 5, False),
    "rows too": ("TNH,NHD->TD", (2, 64, 128), 17, True),
    "two warpgroups": ("TD,DA->TA", (192, 128), 100, True),
}


@pytest.mark.parametrize("name", thinned(INT8S, ["weights", "rows too"]))
@pytest.mark.slow
def test_int8_against_float64(by, name):
    subscripts, axes, rows, dynamic = INT8S[name]
    rng = np.random.default_rng(3)
    into = len(subscripts.partition(",")[0]) - 1
    x = draw(rng, rows, *axes[:into])
    weight = rounded(draw(rng, *axes, scale=0.1), dynamic, into)
    bias = jnp.asarray(rng.standard_normal(axes[into:]), jnp.float32)
    found = linear.weight_of(weight, by).einsum(subscripts, x, bias, jnp.float32)
    x_RK = exact_rows(x.reshape(rows, -1), dynamic).reshape(x.shape)
    wanted = np.einsum(subscripts, x_RK, exact(weight.codes) * exact(weight.scale)) + exact(bias)
    np.testing.assert_allclose(exact(found), wanted, rtol=1e-3, atol=2e-2 if dynamic else 1e-4)


def in_four_bits(weight, group: int, into: int = 1, zero: bool = False) -> Int4:
    """A weight in int4 whose inputs come first."""
    axes = weight.shape
    spec = Int4(
        None,
        None,
        zero or None,
        group,
        into=axes[:into],
        out=axes[into:],
        inputs=tuple(range(into)),
    )
    return jax.tree.map(jnp.asarray, spec.quantize(np.asarray(weight, np.float32)))


def codes_of(data: np.ndarray, inputs: int) -> list[np.ndarray]:
    """A loop over the inputs of bytes, 64 for 128 inputs, of which the last ones end with the last
    input.
    """
    found = []
    for k in range(inputs):
        block = k // 128
        place = k - min(128 * block, inputs - 128)
        found.append(data[64 * block + place % 64] >> 4 * (place // 64) & 15)
    return found


def unpacked(weight: Int4) -> np.ndarray:
    """A loop over the inputs, in bfloat16, as products see it."""
    scale = np.asarray(weight.scale, np.float32)
    zero = np.full(scale.shape, 8.0) if weight.zero is None else np.asarray(weight.zero, np.float32)
    groups = [k // weight.group for k in range(np.prod(weight.into))]
    codes = codes_of(np.asarray(weight.nibbles), len(groups))
    found = [(codes[k] - zero[g]) * scale[g] for k, g in enumerate(groups)]
    return exact(jnp.asarray(np.array(found), jnp.bfloat16)).reshape(weight.into + weight.out)


def in_float8(weight, dynamic: bool, into: int = 1) -> Fp8:
    """A weight in fp8 whose inputs come first."""
    axes = weight.shape
    spec = Fp8(None, None, dynamic, into=axes[:into], out=axes[into:], inputs=tuple(range(into)))
    return jax.tree.map(jnp.asarray, spec.quantize(np.asarray(weight, np.float32)))


def numbers_of(weight: Int8 | Fp8) -> np.ndarray:
    codes = np.asarray(weight.codes)
    return exact(codes.view(ml_dtypes.float8_e4m3fn) if isinstance(weight, Fp8) else codes) * exact(
        weight.scale
    )


@pytest.mark.parametrize("name", thinned(INT8S, ["rows too"]))
@pytest.mark.slow
def test_fp8_against_float64(by, name):
    """Its sums, and those of XLA, of the codes that rows become."""
    subscripts, axes, rows, dynamic = INT8S[name]
    rng = np.random.default_rng(3)
    into = len(subscripts.partition(",")[0]) - 1
    x = draw(rng, rows, *axes[:into])
    weight = in_float8(draw(rng, *axes, scale=0.1), dynamic, into)
    bias = jnp.asarray(rng.standard_normal(axes[into:]), jnp.float32)
    found = linear.weight_of(weight, by).einsum(subscripts, x, bias, jnp.float32)
    x_RK = exact(x.reshape(rows, -1))
    if dynamic:
        codes, scale = round_to_float8(x.reshape(rows, -1))
        x_RK = exact(codes) * exact(scale)
    wanted = np.einsum(subscripts, x_RK.reshape(x.shape), numbers_of(weight)) + exact(bias)
    np.testing.assert_allclose(exact(found), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        weight.einsum(subscripts, x, bias, jnp.float32), wanted, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("T", "N", "K", "out"), [(5, 3, 128, 64), (17, 2, 64, 192), (140, 2, 128, 64), (1, 1, 64, 64)]
)
@pytest.mark.slow
def test_a_matrix_for_each_head(T, N, K, out):
    """As latent attention has them."""
    rng = np.random.default_rng(T)
    x = draw(rng, T, N, K)
    w = draw(rng, N, out, K)
    found = exact(linear.weight_of(w, INTERPRETED).einsum("TNA,NHA->TNH", x, dtype=jnp.float32))
    wanted, size = (
        np.einsum("TNA,NHA->TNH", of(exact(x)), of(exact(w))) for of in (np.asarray, np.abs)
    )
    assert found.shape == wanted.shape and np.all(np.abs(found - wanted) < 1e-6 * size)
    assert not gpu_callbacks.get_races().races_found


ROUTERS = {
    "128 experts": (192, 128, 17),
    "32 experts": (128, 32, 5),
    "two warpgroups": (64, 256, 100),
}


@pytest.mark.parametrize("name", thinned(ROUTERS, ["32 experts"]))
def test_a_router_has_all_bits_of_float32(name):
    """As no product of bfloat16 or TF32 has, for rows of bfloat16 and any float32 weight."""
    D, E, T = ROUTERS[name]
    rng = np.random.default_rng(D)
    x = draw(rng, T, D)
    w = jnp.asarray(rng.standard_normal((D, E)) * rng.choice([1e-3, 1], (D, 1)), jnp.float32)
    found = exact(linear.weight_of(w, INTERPRETED).exact("TD,DE->TE", x))
    wanted = exact(x) @ exact(w)
    size = np.abs(exact(x)) @ np.abs(exact(w))
    assert found.shape == (T, E) and np.all(np.abs(found - wanted) < 1e-6 * size)
    narrow = exact(x) @ exact(w.astype(jnp.bfloat16))
    assert np.mean(np.abs(narrow - wanted) > 1e-6 * size) > 0.9  # the weight's last bits count
    pieces = exact(prepare.summands(w)).reshape(3, D, E)
    assert np.array_equal(pieces.sum(0), exact(w))
    stored = w.astype(jnp.bfloat16)  # as most checkpoints keep it
    assert np.all(
        np.abs(exact(linear.weight_of(stored, INTERPRETED).exact("TD,DE->TE", x)) - narrow)
        < 1e-6 * size
    )
    assert not gpu_callbacks.get_races().races_found


def test_a_router_of_another_form_is_declined():
    x = jnp.ones((1, 64))
    w = jnp.ones((64, 64))
    with pytest.raises(
        NotImplementedError, match="the weight must be one matrix that is not quantised"
    ):
        linear.weight_of(rounded(w, False), INTERPRETED).exact("TD,DE->TE", x.astype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="rows must be bfloat16, not float32"):
        linear.weight_of(w, INTERPRETED).exact("TD,DE->TE", x)


@pytest.mark.parametrize("make", thinned([rounded, in_float8], [in_float8]))
@pytest.mark.slow
def test_rows_that_come_in_codes(make):
    """They are multiplied as they come; codes of another kind are left, and all by weights that
    round no rows.
    """
    rng = np.random.default_rng(9)
    kind = "int8" if make is rounded else "float8"
    x = draw(rng, 5, 2, 64)
    dense = draw(rng, 2, 64, 2, 64, scale=0.1)
    codes, scale = round_rows(x.reshape(5, -1), kind)

    def product(given, dynamic: bool = True):
        weight = linear.weight_of(make(dense, dynamic, 2), InterpretGPUParams())
        return exact(weight.gated("TNH,NHGF->TGF", given, "silu")), exact(
            weight.einsum("TNH,NHGF->TGF", given)
        )

    for twice, dynamic, used in (
        (1, True, kind),
        (2, True, kind),
        (2, True, "other"),
        (2, False, kind),
    ):
        given = RoundedRows(x, codes.reshape(x.shape), scale * twice, used)
        for found, wanted in zip(
            product(given, dynamic),
            product(x * (twice if dynamic and used == kind else 1), dynamic),
            strict=True,
        ):
            assert np.array_equal(found, wanted)


def test_every_code_of_fp8_is_exact(by):
    bits = np.resize(np.delete(np.arange(256, dtype=np.uint8), [127, 255]), (64, 256))
    weight = Fp8(jnp.asarray(bits), jnp.ones(256), False, into=(64,), out=(256,), inputs=(0,))
    found = linear.weight_of(weight, by).einsum("TD,DA->TA", jnp.eye(64, dtype=jnp.bfloat16))
    assert np.array_equal(exact(found), exact(bits.view(ml_dtypes.float8_e4m3fn)))


# subscripts, axes of the weight, rows, inputs that share a scale, whether groups have zeros
INT4S = {
    "half a step": ("TD,DGH->TGH", (192, 2, 64), 5, 32, False),
    "half a step, zeros": ("TD,DGH->TGH", (192, 2, 64), 5, 32, True),
    "groups of 128, zeros": ("TD,DA->TA", (384, 64), 17, 128, True),
    "groups of 32": ("TD,DGH->TGH", (256, 2, 64), 5, 32, False),
    "groups of 64": ("TNH,NHD->TD", (2, 64, 128), 100, 64, False),
    "groups of 128": ("TD,DA->TA", (384, 64), 17, 128, False),
}


@pytest.mark.parametrize(
    "name", thinned(INT4S, ["half a step", "groups of 64", "groups of 128, zeros"])
)
def test_int4_against_float64(by, name):
    subscripts, axes, rows, group, zero = INT4S[name]
    rng = np.random.default_rng(6)
    into = len(subscripts.partition(",")[0]) - 1
    x = draw(rng, rows, *axes[:into])
    weight = in_four_bits(draw(rng, *axes, scale=0.1), group, into, zero)
    bias = jnp.asarray(rng.standard_normal(axes[into:]), jnp.float32)
    found = linear.weight_of(weight, by).einsum(subscripts, x, bias, jnp.float32)
    np.testing.assert_allclose(
        exact(found),
        np.einsum(subscripts, exact(x), unpacked(weight)) + exact(bias),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
def test_gated_against_float64(activation):
    rng = np.random.default_rng(1)
    x = draw(rng, 9, 128)
    weight = draw(rng, 128, 2, 64, scale=0.1)
    found = linear.weight_of(weight, INTERPRETED).gated("TD,DGF->TGF", x, activation)
    up = np.einsum("TD,DGF->TGF", exact(x), exact(weight))
    kind = {"clamp": None, "activation": activation}
    np.testing.assert_allclose(
        exact(found), accuracy.apply_activation(kind, up[:, 0], up[:, 1]), **CLOSE
    )
    assert not gpu_callbacks.get_races().races_found


def chosen(rng, T: int, X: int, E: int, kind: str) -> np.ndarray:
    """Which experts each row is sent to; E is none."""
    if kind == "one":
        return np.where(np.arange(X) == 0, 3, E) + np.zeros((T, 1), int)
    if kind == "few":  # half of them are never chosen
        return np.stack([rng.permutation(np.r_[:E:2, E])[:X] for _ in range(T)])
    return np.stack([rng.permutation(E)[:X] for _ in range(T)])


@pytest.mark.parametrize("kind", ["any", "one", "few"])
@pytest.mark.parametrize("T", thinned([1, 2, 15, 16, 33, 70, 130], [1, 16, 33]))
@pytest.mark.slow
def test_each_pair_has_its_place(T, kind):
    """Against a loop: a place of its own, in a block of its expert; the others are empty."""
    E = 12
    X = 4
    rows = 16
    whose = chosen(np.random.default_rng(T), T, X, E, kind)
    weights = np.random.default_rng(T).random((T, X), np.float32)
    found = jax.tree.map(
        np.asarray, align(jnp.asarray(whose, jnp.int32), jnp.asarray(weights), E, rows)
    )
    counts = np.bincount(whose.reshape(-1), minlength=E + 1)[:E]
    needed = -(-counts // rows)
    assert found.count_1 == [needed.sum()] and needed.sum() <= max_blocks(T * X, E, rows) == len(
        found.experts_B
    )
    assert found.experts_B[: needed.sum()].tolist() == np.repeat(np.arange(E), needed).tolist()
    wanted = np.full(len(found.pair_P), T * X)
    next_place = (np.cumsum(needed) - needed) * rows
    for pair, e in enumerate(whose.reshape(-1)):
        if e < E:
            wanted[next_place[e]] = pair
            assert found.place_Z[pair] == next_place[e]
            next_place[e] += 1
        else:
            assert found.place_Z[pair] >= len(wanted)
    assert found.pair_P.tolist() == wanted.tolist()
    assert found.weight_P.tolist() == np.r_[weights.reshape(-1), 0][wanted].tolist()


D = 64
F = 128
E = 6
X = 3


def mixture(rng, **more) -> Experts:
    return Experts(
        draw(rng, E, D, 2, F, scale=0.2),
        draw(rng, E, F, D, scale=0.2),
        **{"activation": "silu", **more},
    )


def mixed_slowly(x, weights, whose, mixture: Experts) -> np.ndarray:
    kind = {"clamp": mixture.clamp, "alpha": mixture.alpha, "activation": mixture.activation}
    up = exact(mixture.up_EDGF)
    down = exact(mixture.down_EFD)
    out = np.zeros(x.shape)
    up_bias, down_bias = (
        np.zeros((E, 1)) if bias is None else exact(bias)
        for bias in (mixture.up_bias_EGF, mixture.down_bias_ED)
    )
    for t, row in enumerate(exact(x)):
        for weight, e in zip(exact(weights)[t], whose[t], strict=True):
            if e < E:
                gate, right = np.einsum("d,dgf->gf", row, up[e]) + up_bias[e]
                inner = accuracy.apply_activation(kind, gate, right)
                out[t] += weight * (inner @ down[e] + down_bias[e])
    return out


MIXTURES = {
    "one row": (1, "any", {}),
    "a few": (13, "few", {"activation": "gelu_tanh"}),
    "one expert": (40, "one", {}),
    "biases and a clamp": (20, "any", {"clamp": 1.0, "alpha": 1.7, "bias": True}),
    "many": (130, "any", {}),
}


@pytest.mark.parametrize("name", thinned(MIXTURES, ["biases and a clamp"]))
@pytest.mark.slow
def test_experts_against_float64(by, name):
    T, kind, options = MIXTURES[name]
    rng = np.random.default_rng(T)
    if options.pop("bias", False):
        options |= {"up_bias_EGF": draw(rng, E, 2, F), "down_bias_ED": draw(rng, E, D)}
    mixture_ = mixture(rng, **options)
    whose = chosen(rng, T, X, E, kind)
    x = draw(rng, T, D)
    weights = jnp.asarray(rng.random((T, X)), jnp.float32)
    found = experts.mix_experts(x, weights, jnp.asarray(whose, jnp.int32), E, mixture_, by)
    np.testing.assert_allclose(
        exact(found), mixed_slowly(x, weights, whose, mixture_), rtol=2e-2, atol=3e-2
    )


@pytest.mark.parametrize(
    ("dynamic", "make"),
    nightly_from(2, [(False, rounded), (True, in_float8), (True, rounded), (False, in_float8)]),
)
@pytest.mark.slow
def test_experts_in_eight_bits_against_float64(by, dynamic, make):
    rng = np.random.default_rng(4)
    dense = mixture(rng)
    whose = chosen(rng, 9, X, E, "any")
    x = draw(rng, 9, D)
    weights = np.ones((9, X), np.float32)
    stacks = []
    for array in (dense.up_EDGF, dense.down_EFD):
        nodes = [make(array[e], dynamic) for e in range(E)]
        stacks.append(Stack(jax.tree.map(lambda *leaves: jnp.stack(leaves), *nodes)))
    numbers = [np.stack([numbers_of(stack[e]) for e in range(E)]) for stack in stacks]
    codes, scale = round_to_float8(x) if make is in_float8 else round_to_int8(x)
    rows = exact(codes) * exact(scale) if dynamic else x
    wanted = mixed_slowly(rows, weights, whose, Experts(*numbers, "silu"))
    given = jnp.asarray(weights), jnp.asarray(whose, jnp.int32), E, Experts(*stacks, "silu")
    found = exact(experts.mix_experts(x, *given, by))
    # Rows of a down product are rounded too, which the reference does not do.
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < (
        6e-3 if not dynamic else 2e-2 if make is rounded else 5e-2
    )


@pytest.mark.parametrize("zero", thinned([False, True], [True]))
@pytest.mark.slow
def test_int4_experts_against_float64(by, zero):
    rng = np.random.default_rng(7)
    D = 128
    dense = Experts(draw(rng, E, D, 2, F, scale=0.2), draw(rng, E, F, D, scale=0.2), "silu")
    whose = chosen(rng, 9, X, E, "any")
    x = draw(rng, 9, D)
    weights = np.ones((9, X), np.float32)
    nodes = [
        [in_four_bits(array[e], 32, zero=zero) for e in range(E)]
        for array in (dense.up_EDGF, dense.down_EFD)
    ]
    stacks = [Stack(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)) for each in nodes]
    wanted = mixed_slowly(
        x,
        weights,
        whose,
        Experts(*(np.stack([unpacked(n) for n in each]) for each in nodes), "silu"),
    )
    given = jnp.asarray(weights), jnp.asarray(whose, jnp.int32), E, Experts(*stacks, "silu")
    found = exact(experts.mix_experts(x, *given, by))
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 6e-3


def in_mxfp4(rng, *axes: int) -> tuple[Mxfp4, np.ndarray]:
    """A stack of any bits, and what they mean, input by input."""
    E, K, *out = axes
    data = rng.integers(0, 256, (E, -(-K // 128) * 64, *out), np.uint8)
    scales = rng.integers(120, 126, (E, K // 32, *out), np.uint8)
    codes = codes_of(data.swapaxes(0, 1), K)
    found = [accuracy.FLOAT4[codes[k]] * 2.0 ** (scales[:, k // 32] - 127.0) for k in range(K)]
    return Mxfp4(jnp.asarray(data), jnp.asarray(scales)), np.stack(found, 1)


@pytest.mark.parametrize(
    ("T", "D", "F"), [(20, 128, 192), pytest.param(70, 192, 128, marks=pytest.mark.nightly)]
)
@pytest.mark.slow
def test_mxfp4_experts_against_float64(by, T, D, F):
    """gpt-oss': biases, its clamped activation, and sizes that are no whole number of steps."""
    rng = np.random.default_rng(8)
    whose = chosen(rng, T, X, E, "any")
    x = draw(rng, T, D)
    weights = jnp.asarray(rng.random((T, X)), jnp.float32)
    up, exact_up = in_mxfp4(rng, E, D, 2, F)
    down, exact_down = in_mxfp4(rng, E, F, D)
    options = {
        "activation": "silu",
        "up_bias_EGF": draw(rng, E, 2, F),
        "down_bias_ED": draw(rng, E, D),
    }
    options |= {"clamp": 1.0, "alpha": 1.7}
    wanted = mixed_slowly(x, weights, whose, Experts(exact_up, exact_down, **options))
    given = weights, jnp.asarray(whose, jnp.int32), E, Experts(up, down, **options)
    found = exact(experts.mix_experts(x, *given, by))
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 6e-3


def test_every_code_and_scale_of_mxfp4_is_decoded_as_by_xla(by):
    """The products with the rows of an identity are the matrix itself."""
    codes = np.arange(256, dtype=np.uint8)
    scales = np.arange(2, 250, dtype=np.uint8)
    blocks = np.resize(codes, (1, 64, len(scales) + 8))
    each = np.resize(np.r_[scales, np.full(8, 127, np.uint8)], (1, 4, len(scales) + 8))
    node = Mxfp4(jnp.asarray(blocks), jnp.asarray(each))
    one = prepare.as_gpu_matrix(jax.tree.map(lambda leaf: leaf[0], node))
    found = prepare.dense(jnp.eye(128, dtype=jnp.bfloat16), one, dtype=jnp.bfloat16, interpret=by)
    assert np.array_equal(exact(found), exact(node[0]))


def test_an_expert_that_nobody_chose_is_never_read(by):
    rng = np.random.default_rng(0)
    whole = mixture(rng)
    whose = chosen(rng, 9, X, E, "few")
    x = draw(rng, 9, D)
    weights = jnp.ones((9, X), jnp.float32)
    spoilt = mixture(rng)
    spoilt = Experts(
        whole.up_EDGF.at[1::2].set(jnp.nan), whole.down_EFD.at[1::2].set(jnp.nan), spoilt.activation
    )
    found = experts.mix_experts(x, weights, jnp.asarray(whose, jnp.int32), E, spoilt, by)
    assert np.isfinite(exact(found)).all()


# how a weight is kept, and what is copied of it: scales of eight bits are read when the sums are
# done
WEIGHTS = {
    "bf16": (lambda weight: weight, lambda weight: weight.nbytes),
    "int8": (lambda weight: rounded(weight, False), lambda weight: weight.codes.nbytes),
    "int4": (
        lambda weight: in_four_bits(weight, 32),
        lambda weight: weight.nibbles.nbytes + weight.scale.nbytes,
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.slow
def test_each_byte_of_a_weight_is_copied_once(name, monkeypatch):
    """And rows once for each 64 outputs, which the card's cache has by then."""
    rng = np.random.default_rng(8)
    make, bytes_of = WEIGHTS[name]
    x = draw(rng, 5, 256)
    weight = make(draw(rng, 256, 2, 128))
    copied = copies.record_copies(monkeypatch)
    linear.weight_of(weight, INTERPRETED).einsum("TD,DGH->TGH", x)
    rows = [part for part in copied if part.shape[0] == 16]
    assert sum(part.nbytes for part in copied) - sum(part.nbytes for part in rows) == bytes_of(
        weight
    )
    assert sum(part.nbytes for part in rows) == 4 * 16 * 256 * 2


def test_an_expert_that_was_chosen_is_copied_once(monkeypatch):
    rng = np.random.default_rng(0)
    whole = mixture(rng)
    whose = chosen(rng, 40, X, E, "few")
    x = draw(rng, 40, D)
    weights = jnp.ones((40, X), jnp.float32)
    copied = copies.record_copies(monkeypatch)
    experts.mix_experts(x, weights, jnp.asarray(whose, jnp.int32), E, whole, INTERPRETED)
    blocks = sum(-(-np.count_nonzero(whose == e) // 32) for e in range(E))
    assert sum(part.nbytes for part in copied if part.shape[0] != 32) == blocks * (
        whole.up_EDGF[0].nbytes + whole.down_EFD[0].nbytes
    )


COMPANY = (7,), (17, 3, 5, 4), tuple(range(5, 47)), tuple(range(99, 1, -1))


@pytest.mark.parametrize("rows", thinned(COMPANY, [(17, 3, 5, 4)]), ids=len)
def test_the_same_bits_in_any_company(rows):
    """Of a row's dense product and of its experts, among twenty others and among these, in blocks
    of any size.
    """
    rng = np.random.default_rng(5)
    x = draw(rng, 100, 192)
    weight = draw(rng, 192, 128, scale=0.1)
    bias = jnp.asarray(rng.random(128), jnp.float32)
    whole = mixture(rng)
    y = draw(rng, 100, D)
    weights = jnp.asarray(rng.random((100, X)), jnp.float32)
    whose = jnp.asarray(chosen(rng, 100, X, E, "any"), jnp.int32)
    interpreted = InterpretGPUParams()

    router = jnp.asarray(rng.standard_normal((192, 32)), jnp.float32)
    routers = router, router.astype(jnp.bfloat16)
    coded = rounded(weight, True), in_four_bits(weight, 32), in_float8(weight, True)
    in_floats = Experts(in_mxfp4(rng, E, 192, 2, F)[0], in_mxfp4(rng, E, F, 64)[0], "silu")

    def run(*rows: int):
        at = np.array(rows)
        dense = [
            linear.weight_of(each, interpreted).einsum("TD,DA->TA", x[at], bias, jnp.float32)
            for each in (weight, *coded)
        ]
        mixed = [
            experts.mix_experts(given[at], weights[at], whose[at], E, each, interpreted)
            for given, each in ((y, whole), (x, in_floats))
        ]
        routed = [linear.weight_of(each, interpreted).exact("TD,DE->TE", x[at]) for each in routers]
        per_head = linear.weight_of(weight.reshape(3, 128, 64), interpreted)
        heads = per_head.einsum("TNA,NHA->TNH", x[at].reshape(-1, 3, 64))
        return [exact(found) for found in (*dense, *mixed, *routed, heads)]

    for found, wanted in zip(run(*rows), run(*range(20)), strict=True):
        both = [row for row in rows if row < 20]
        assert np.array_equal(found[[rows.index(row) for row in both]], wanted[both])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(cases(8, 4)))
def test_random_experts(by, seed):
    rng = np.random.default_rng(seed)
    T = int(rng.integers(1, 131))
    kind = ["any", "one", "few"][seed % 3]
    whole = mixture(rng, activation=prepare.ACTIVATIONS[seed % 3])
    whose = chosen(rng, T, X, E, kind)
    x = draw(rng, T, D)
    weights = jnp.asarray(rng.random((T, X)), jnp.float32)
    found = experts.mix_experts(x, weights, jnp.asarray(whose, jnp.int32), E, whole, by)
    np.testing.assert_allclose(
        exact(found), mixed_slowly(x, weights, whose, whole), rtol=2e-2, atol=6e-2
    )


KIND = {
    "grouped": False,
    "projections": 1,
    "transposed": False,
    "activation": None,
    "clamp": None,
    "alpha": 1.0,
    "bias": True,
    "weighted": False,
    "out_dtype": "bfloat16",
    "codes": None,
    "group": 0,
    "zeros": False,
    "rounded": False,
    "summands": 1,
    "kernel": "mosaic",
}
GPT_OSS = {
    "grouped": True,
    "projections": 2,
    "activation": "silu",
    "clamp": 7.0,
    "alpha": 1.702,
    "codes": "float4",
    "group": 32,
}
KINDS = {
    "dense": KIND,
    "a head": KIND | {"transposed": True, "bias": False, "out_dtype": "float32"},
    "gate and up": KIND | {"grouped": True, "projections": 2, "activation": "silu"},
    "weighed": KIND | {"grouped": True, "weighted": True, "out_dtype": "float32"},
    "int8": KIND
    | {"grouped": True, "projections": 2, "activation": "silu", "codes": "int8", "rounded": True},
    "int4": KIND
    | {"grouped": True, "projections": 2, "activation": "silu", "codes": "int4", "group": 32},
    "int4 with zeros": KIND | {"codes": "int4", "group": 128, "zeros": True},
    "mxfp4": KIND | GPT_OSS,
    "fp8": KIND | {"codes": "float8", "rounded": True},
    "a matrix for each head": KIND | {"grouped": True, "transposed": True, "bias": False},
    "a router": KIND | {"out_dtype": "float32", "summands": 3, "bias": False},
}
BY_TRITON = {
    f"{name}, by Triton": kind | {"kernel": "triton"}
    for name, kind in KINDS.items()
    if kind["grouped"] or kind["codes"]
    if not kind["transposed"]
}


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("name", thinned(KINDS | BY_TRITON, ["a head", *BY_TRITON]))
def test_a_trial(name, spoilt, monkeypatch):
    """What it finds on a card, at small sizes in the interpreter: it tells a kernel that is right
    from another.
    """
    real = accuracy.multiply
    last = []
    kind = (KINDS | BY_TRITON)[name]

    def kernel(*given):
        out = real(*given)
        last.append(out.at[5].multiply(1.02) if spoilt else out)
        return last[-1]

    monkeypatch.setattr(accuracy, "multiply", kernel)
    monkeypatch.setattr(accuracy, "BLOCKS", (16, 32))
    (allowed,) = {case.allowed for case in accuracy.cases(kind)}
    interpret = True if name in BY_TRITON else InterpretGPUParams()
    case = accuracy.ProductCase(kind, 256, 64, 2, allowed, interpret=interpret)
    assert (self_test.measure(case, 0, repeats=2).wrong is None) == (not spoilt)


@pytest.mark.parametrize("other", [None, 64])
def test_a_trial_finds_other_bits(other, monkeypatch):
    """Of one size of blocks, in one number, by an amount that would be allowed."""

    def product(shape, operands, _):
        ones = jnp.ones((len(operands.x), 64), jnp.bfloat16)
        return ones.at[7, 5].add(2**-7) if shape.rows == other else ones

    monkeypatch.setattr(accuracy, "multiply", product)
    case = accuracy.ProductCase(KIND, 64, 64, interpret=InterpretGPUParams())
    held, given, _ = case.build(0)
    out, _ = case.run(held, given)
    assert bool(jnp.isfinite(out).all()) == (other is None)


@pytest.fixture
def card(monkeypatch):
    """A card is pretended; what would run on it is noted."""
    ran = []

    def run(shape, operands, interpret):
        prepare.require_self_test(shape)
        ran.append(shape)
        return jnp.full((shape.blocks * shape.rows, shape.outputs), 7, shape.out_dtype)

    monkeypatch.setattr(device, "is_hopper", lambda: True)
    monkeypatch.setattr(device, "num_processors", lambda: 132)
    monkeypatch.setattr(prepare, "run", run)
    monkeypatch.setattr(routing, "IMPLEMENTATIONS", {"xla": ".xla"})
    monkeypatch.setenv("QUIRE_MOSAIC", "trusted")
    self_test.warn_once.cache_clear()
    return ran


def test_it_serves_where_there_is_a_card(card):
    rng = np.random.default_rng(0)
    x = draw(rng, 5, 128)
    weight = draw(rng, 128, 64)
    up = draw(rng, 128, 2, 64)
    assert (products.einsum("TD,DA->TA", x, weight) == 7).all()
    assert (products.gated("TD,DGF->TGF", x, up, "silu") == 7).all()
    y = draw(rng, 5, D)
    weights = jnp.ones((5, X))
    whose = jnp.zeros((5, X), jnp.int32)
    assert (moe.mix(y, weights, whose, E, mixture(rng)) == 7 * X).all()
    assert [(ran.projections, ran.experts, ran.weighted) for ran in card] == [
        (1, 1, False), (2, 1, False), (2, E, False), (1, E, True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("x", "weight", "subscripts", "says"),
    [
        ((5, 128), (128, 64), "TD,DA->TA", None),
        ((5, 96), (96, 60), "TD,DA->TA", "must divide by 64, and are 96 and 60"),
        ((5, 2, 64), (2, 64, 64), "TNH,NAH->TNA", None),
        ((5, 2, 64), (64, 64, 2), "TNH,AHN->TA", "is not a product of rows with one matrix"),
    ],
)
def test_what_it_declines_is_left_to_xla(card, x, weight, subscripts, says):
    rng = np.random.default_rng(0)
    x = draw(rng, *x)
    weight = draw(rng, *weight)
    found = products.einsum(subscripts, x, weight)
    if says is None:
        assert card
        return
    assert not card
    np.testing.assert_allclose(
        exact(found), np.einsum(subscripts, exact(x), exact(weight)), rtol=2e-2, atol=0.2
    )
    with pytest.raises(NotImplementedError, match=says):
        products.einsum(subscripts, x, weight, implementation="mosaic")


def test_it_says_all_that_stands_against_it(card):
    x = jnp.zeros((5, 60))
    weight = jnp.zeros((60, 2, 64))
    wanted = (
        "rows must be bfloat16, not float32; weights must be bfloat16 or codes, not float32; "
        "inputs "
    )
    with pytest.raises(
        NotImplementedError,
        match=wanted + "and .* are 60 and 64; the activation must be one of silu, .* not gelu",
    ):
        products.gated("TD,DGF->TGF", x, weight, "gelu", "mosaic")


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [("8.0", "triton"), ("8.9", "triton"), ("9.0", "mosaic"), ("10.0", "triton")],
)
def test_each_generation_has_its_kernel(capability, kernel, monkeypatch):
    """On all but Hopper for experts and codes alone; codes of four bits come in blocks of 64 rows
    at most.
    """
    device.is_hopper.cache_clear()
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(device, "capability", lambda: capability)
    monkeypatch.setattr(device, "num_processors", lambda: 108)
    ran = []

    def run(shape, operands, interpret):
        ran.append((shape.kernel, shape.rows))
        return jnp.zeros((shape.blocks * shape.rows, shape.outputs), shape.out_dtype)

    monkeypatch.setattr(prepare, "run", run)
    rng = np.random.default_rng(0)
    weight = draw(rng, 128, 64)
    x = draw(rng, 200, 128)
    for each in (rounded(weight, False), in_four_bits(weight, 32)):
        linear.weight_of(each).einsum("TD,DA->TA", x)
    assert ran == [(kernel, 128), (kernel, 64 if kernel == "triton" else 128)]
    if kernel == "triton":
        with pytest.raises(
            NotImplementedError, match="on this card the kernel is for experts and for codes"
        ):
            linear.weight_of(weight).einsum("TD,DA->TA", x)
        with pytest.raises(
            NotImplementedError, match="groups must be of 32, 64 or 128 inputs, not 16"
        ):
            linear.weight_of(in_four_bits(weight, 16)).einsum("TD,DA->TA", x)
        for gigabytes, declined in ((2, False), (3, True), (4, True), (5, False)):
            stack = jax.ShapeDtypeStruct((gigabytes << 10, 1024, 1024), jnp.int8)
            codes = GpuMatrix(stack, "int8", jnp.ones(1))
            given = prepare.choose_kernel(None), x, codes, 1024, 1024
            if not declined:
                prepare.check_supported(*given, grouped=True)
                continue
            with pytest.raises(NotImplementedError, match="codes must not be of 2 to 4 GiB"):
                prepare.check_supported(*given, grouped=True)
    device.is_hopper.cache_clear()


@pytest.mark.parametrize("capability", ["7.5", "gfx942"])
def test_older_cards_and_other_makers_are_declined(capability, monkeypatch):
    device.is_hopper.cache_clear()
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(device, "capability", lambda: capability)
    with pytest.raises(
        NotImplementedError,
        match=f"capability 8.0 .Ampere. or later, and this GPU's is {capability}",
    ):
        linear.weight_of(jnp.ones((64, 64)))
    device.is_hopper.cache_clear()


def test_without_a_card_it_is_not_used():
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        products.einsum("TD,DA->TA", jnp.ones((1, 64)), jnp.ones((64, 64)), implementation="mosaic")


def test_a_kind_that_fails_its_trial_is_left_to_xla(card, monkeypatch, caplog, tmp_path):
    """The trial is attention's, in a process of its own, with this kernel's kind."""
    tried = []

    def test(module: str, kind: str):
        tried.append((module, json.loads(kind)))
        return {"blocks": self_test.CaseResult(0.5, 0.5, 0, 6e-3)}

    monkeypatch.setattr(self_test, "run_self_test", test)
    monkeypatch.setenv("QUIRE_MOSAIC", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    self_test.verdict.cache_clear()
    rng = np.random.default_rng(0)
    x = draw(rng, 5, 128)
    weight = draw(rng, 128, 64)
    with caplog.at_level(logging.WARNING, "quire"):
        assert not (products.einsum("TD,DA->TA", x, weight) == 7).all()
    assert not card and "it is wrong on this GPU: blocks by 5.0e-01" in caplog.text
    assert tried == [("quire.ops.linear.gpu_kernel.accuracy", KIND | {"bias": False})]
    self_test.verdict.cache_clear()


INT8 = {"codes": "int8", "rounded": True}
FP8 = {"codes": "float8", "rounded": True}
INT4 = {"codes": "int4", "group": 32}
BASE = shape.ProductShape(1, 16, 1, 4096, 4096, 1, 132, "bfloat16")
PRODUCTION = {
    "Llama-3-8B, qkv, 16 rows": BASE._replace(outputs=6144),
    "Llama-3-8B, qkv, 64 rows": BASE._replace(outputs=6144, rows=64),
    "Llama-3-8B, out, 16 rows": BASE._replace(),
    "Llama-3-8B, up, 16 rows": BASE._replace(outputs=14336, projections=2, activation="silu"),
    "Llama-3-8B, up, 64 rows": BASE._replace(
        outputs=14336, projections=2, activation="silu", rows=64
    ),
    "Llama-3-8B, up, 2048 rows": BASE._replace(
        outputs=14336, projections=2, activation="silu", rows=128, blocks=16
    ),
    "Llama-3-8B, down, 16 rows": BASE._replace(inputs=14336),
    "Llama-3-8B, down, 2048 rows": BASE._replace(inputs=14336, rows=128, blocks=16),
    "Llama-3-8B, head, 16 rows": BASE._replace(
        outputs=128256, transposed=True, out_dtype="float32"
    ),
    "Llama-3-8B in int8, up, 16 rows": BASE._replace(
        outputs=14336, projections=2, activation="silu", **INT8
    ),
    "Llama-3-8B in int8, up, 64 rows": BASE._replace(
        outputs=14336, projections=2, activation="silu", rows=64, **INT8
    ),
    "Llama-3-8B in int8, up, 2048 rows": BASE._replace(
        outputs=14336, projections=2, activation="silu", rows=128, blocks=16, **INT8
    ),
    "Llama-3-8B in int4, up, 16 rows": BASE._replace(
        outputs=14336, projections=2, activation="silu", **INT4
    ),
    "Llama-3-8B in int4, up, 64 rows": BASE._replace(
        outputs=14336, projections=2, activation="silu", rows=64, **INT4
    ),
    "Llama-3-8B in int4-128, up, 2048 rows": BASE._replace(
        outputs=14336,
        projections=2,
        activation="silu",
        rows=128,
        blocks=16,
        **INT4 | {"group": 128},
    ),
    "Llama-3-8B in int4-128-zero, up, 64 rows": BASE._replace(
        outputs=14336,
        projections=2,
        activation="silu",
        rows=64,
        **INT4 | {"group": 128, "zeros": True},
    ),
    "Llama-3-8B in int4-zero, up, 64 rows": BASE._replace(
        outputs=14336, projections=2, activation="silu", rows=64, **INT4 | {"zeros": True}
    ),
    "Qwen3-30B-A3B in int4, down": BASE._replace(
        blocks=152,
        experts=128,
        inputs=768,
        outputs=2048,
        weighted=True,
        out_dtype="float32",
        **INT4,
    ),
    "Llama-3-8B in int8-weights, down, 64 rows": BASE._replace(inputs=14336, rows=64, codes="int8"),
    "Qwen3-30B-A3B in int8, down": BASE._replace(
        blocks=152,
        experts=128,
        inputs=768,
        outputs=2048,
        weighted=True,
        out_dtype="float32",
        **INT8,
    ),
    "Llama-3-8B in fp8, up, 64 rows": BASE._replace(
        outputs=14336, projections=2, activation="silu", rows=64, **FP8
    ),
    "Llama-3-8B in fp8, up, 2048 rows": BASE._replace(
        outputs=14336, projections=2, activation="silu", rows=128, blocks=16, **FP8
    ),
    "Qwen3-30B-A3B in fp8, down": BASE._replace(
        blocks=152, experts=128, inputs=768, outputs=2048, weighted=True, out_dtype="float32", **FP8
    ),
    "Qwen3-30B-A3B, up": BASE._replace(
        blocks=152, experts=128, inputs=2048, outputs=768, projections=2, activation="silu"
    ),
    "Qwen3-30B-A3B, down": BASE._replace(
        blocks=152, experts=128, inputs=768, outputs=2048, weighted=True, out_dtype="float32"
    ),
    "gpt-oss-20b, up": BASE._replace(
        blocks=46,
        experts=32,
        inputs=2880,
        outputs=2880,
        projections=2,
        activation="silu",
        clamp=7.0,
        alpha=1.702,
        bias=True,
    ),
    "gpt-oss-20b in MXFP4, up": BASE._replace(
        blocks=46,
        experts=32,
        inputs=2880,
        outputs=2880,
        projections=2,
        activation="silu",
        clamp=7.0,
        alpha=1.702,
        bias=True,
        codes="float4",
        group=32,
    ),
    "gpt-oss-20b in MXFP4, down": BASE._replace(
        blocks=46,
        experts=32,
        inputs=2880,
        outputs=2880,
        bias=True,
        weighted=True,
        out_dtype="float32",
        codes="float4",
        group=32,
    ),
    "gpt-oss-20b in MXFP4, up, long": BASE._replace(
        blocks=542,
        rows=128,
        experts=32,
        inputs=2880,
        outputs=2880,
        projections=2,
        activation="silu",
        clamp=7.0,
        alpha=1.702,
        bias=True,
        codes="float4",
        group=32,
    ),
    "gpt-oss-20b, down, long": BASE._replace(
        blocks=542,
        rows=128,
        experts=32,
        inputs=2880,
        outputs=2880,
        bias=True,
        weighted=True,
        out_dtype="float32",
    ),
}

LOWERED = ["Llama-3-8B, up, 2048 rows", "gpt-oss-20b, up"]


def operands_of(s: shape.ProductShape) -> shape.Operands:
    """The shapes of what a product reads."""
    rows = s.blocks * s.rows

    def array(*axes: int, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(axes, dtype)

    axes = (
        (s.outputs, s.inputs)
        if s.transposed
        else (s.inputs // (2 if s.packed else 1), s.projections, s.outputs)
    )
    stored = jnp.uint8 if s.packed else jnp.int8 if s.codes else jnp.bfloat16
    scale = jnp.uint8 if s.codes == "float4" else jnp.float16
    return shape.Operands(
        array(rows, s.steps * s.step),
        array(s.experts, *axes, dtype=stored),
        array(s.experts, s.projections, s.outputs, dtype=jnp.float32) if s.bias else None,
        array(rows, dtype=jnp.float32) if s.weighted else None,
        array(s.blocks, dtype=jnp.int32),
        array(1, dtype=jnp.int32),
        array(s.experts, s.projections, s.outputs, dtype=jnp.float32)
        if s.codes and not s.packed
        else None,
        array(rows, dtype=jnp.float32) if s.rounded else None,
        array(s.experts, s.inputs // s.group, s.projections, s.outputs, dtype=scale)
        if s.packed
        else None,
        array(s.experts, s.inputs // s.group, s.projections, s.outputs, dtype=jnp.uint8)
        if s.zeros
        else None,
    )


def step_of(name: str):
    """(a product by the kernel of this card, or Hopper's where there is none, the shapes of its
    operands).
    """
    other = device.is_gpu() and not device.is_hopper()
    s = PRODUCTION[name]._replace(kernel="triton" if other else "mosaic")
    return jax.jit(lambda operands: prepare.multiply(s, operands, None)), (operands_of(s),)


@pytest.mark.parametrize("name", thinned(PRODUCTION, LOWERED))
def test_lowers_for_cuda(name, monkeypatch):
    monkeypatch.undo()
    product, operands = step_of(name)
    assert "mosaic_gpu" in product.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture(scope="module")
def steps():
    return kernels_ahead.compile_some(__file__, PRODUCTION, LOWERED)


@pytest.mark.slow
@kernels_ahead.needs_compiler
@pytest.mark.parametrize("name", thinned(PRODUCTION, LOWERED))
def test_compiles_for_hopper(name, steps):
    """To SASS: it fits, products are not made to wait for each other, and nothing is spilled."""
    (kernel,) = steps[name].kernels
    print(
        "|",
        name,
        "|",
        kernel.registers,
        "|",
        kernel.stored,
        "/",
        kernel.loaded,
        "|",
        kernel.shared,
        "|",
    )
    assert "wgmma" not in kernel.log and kernel.stored == 0


OTHERS = [
    name
    for name, s in PRODUCTION.items()
    if not s.transposed
    and (s.experts > 1 or s.codes)
    and s.rows in shape.block_sizes("triton", s.codes)
]
TRIED = ["gpt-oss-20b in MXFP4, up", "Qwen3-30B-A3B, down"]


@pytest.fixture(scope="module", params=["a100", "b200"])
def steps_of_others(request):
    return request.param, kernels_ahead.compile_some(__file__, OTHERS, TRIED, request.param)


@pytest.mark.slow
@kernels_ahead.needs_compiler
@pytest.mark.parametrize("name", thinned(OTHERS, TRIED))
def test_compiles_for_other_cards(name, steps_of_others):
    """By Triton, to one launch that spills nothing."""
    card, steps = steps_of_others
    step = steps[name]
    print("|", card, "|", name, "|", step.spilled, "|")
    assert step.outside == {"kCustomKernel": 1} and not step.spilled and not step.kernels
