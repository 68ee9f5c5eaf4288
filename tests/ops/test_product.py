"""The GPU kernel's products without a GPU: against float64 in Pallas' interpreter, and compiled."""

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
def two_pipeline_stages(monkeypatch):
    """Limit the pipeline to two stages."""
    monkeypatch.setattr(shape.ProductShape, "stages", 2)
    jax.clear_caches()


@pytest.fixture(params=["mosaic", "triton"])
def interpret(request):
    """Interpreter option of either kernel; Mosaic GPU's interpreter also detects races."""
    mosaic = request.param == "mosaic"
    yield INTERPRETED if mosaic else True
    assert not (mosaic and gpu_callbacks.get_races().races_found)


def random_bfloat16(rng, *axes: int, scale: float = 1.0):
    return jnp.asarray(rng.standard_normal(axes, np.float32) * scale, jnp.bfloat16)


def as_float64(x) -> np.ndarray:
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
def test_dense_product_matches_float64(name):
    subscripts, axes, rows, options = DENSE[name]
    rng = np.random.default_rng(0)
    rank = len(subscripts.partition(",")[0]) - 1
    inputs = axes[-1:] if options.get("dtype") else axes[:rank]
    out = axes[:1] if options.get("dtype") else axes[rank:]
    x = random_bfloat16(rng, rows, *inputs)
    weight = random_bfloat16(rng, *axes, scale=np.prod(inputs) ** -0.5)
    bias = jnp.asarray(rng.standard_normal(out), jnp.float32) if options.get("bias") else None
    outputs = linear.weight_of(weight, INTERPRETED).einsum(
        subscripts, x, bias, options.get("dtype")
    )
    expected = np.einsum(subscripts, as_float64(x), as_float64(weight)) + (
        0 if bias is None else as_float64(bias)
    )
    np.testing.assert_allclose(as_float64(outputs), expected, **CLOSE)
    assert outputs.dtype == options.get("dtype", jnp.bfloat16)
    assert not gpu_callbacks.get_races().races_found


def quantize_int8(weight, dynamic: bool, into: int = 1) -> Int8:
    """Quantise a weight to int8; its first `into` axes are the inputs."""
    axes = weight.shape
    spec = Int8(None, None, dynamic, into=axes[:into], out=axes[into:], inputs=tuple(range(into)))
    return jax.tree.map(jnp.asarray, spec.quantize(np.asarray(weight, np.float32)))


def quantized_rows(x, dynamic: bool) -> np.ndarray:
    """Rows as the product reads them: quantised to int8 if `dynamic`."""
    if not dynamic:
        return as_float64(x)
    max_abs = np.abs(as_float64(x)).max(-1, keepdims=True)
    return np.rint(as_float64(x) * (127 / max_abs)) * max_abs / 127


INT8S = {  # subscripts, axes of the weight, rows, whether the rows are quantised too
    "weights": ("TD,DGH->TGH", (192, 2, 64), 5, False),
    "rows too": ("TNH,NHD->TD", (2, 64, 128), 17, True),
    "two warpgroups": ("TD,DA->TA", (192, 128), 100, True),
}


@pytest.mark.parametrize("name", thinned(INT8S, ["weights", "rows too"]))
@pytest.mark.slow
def test_int8_product_matches_float64(interpret, name):
    subscripts, axes, rows, dynamic = INT8S[name]
    rng = np.random.default_rng(3)
    into = len(subscripts.partition(",")[0]) - 1
    x = random_bfloat16(rng, rows, *axes[:into])
    weight = quantize_int8(random_bfloat16(rng, *axes, scale=0.1), dynamic, into)
    bias = jnp.asarray(rng.standard_normal(axes[into:]), jnp.float32)
    outputs = linear.weight_of(weight, interpret).einsum(subscripts, x, bias, jnp.float32)
    x_RK = quantized_rows(x.reshape(rows, -1), dynamic).reshape(x.shape)
    expected = np.einsum(
        subscripts, x_RK, as_float64(weight.codes) * as_float64(weight.scale)
    ) + as_float64(bias)
    np.testing.assert_allclose(
        as_float64(outputs), expected, rtol=1e-3, atol=2e-2 if dynamic else 1e-4
    )


def quantize_int4(weight, group: int, into: int = 1, zero: bool = False) -> Int4:
    """Quantise a weight to int4; its first `into` axes are the inputs."""
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


def unpack_nibbles(data: np.ndarray, inputs: int) -> list[np.ndarray]:
    """Unpack 4-bit codes, one array per input.

    64 bytes hold a block of 128 inputs; the last block ends with the last input.
    """
    codes = []
    for k in range(inputs):
        block = k // 128
        offset = k - min(128 * block, inputs - 128)
        codes.append(data[64 * block + offset % 64] >> 4 * (offset // 64) & 15)
    return codes


def dequantize_int4(weight: Int4) -> np.ndarray:
    """Dequantise to bfloat16, the precision of the products, input by input."""
    scale = np.asarray(weight.scale, np.float32)
    zero = np.full(scale.shape, 8.0) if weight.zero is None else np.asarray(weight.zero, np.float32)
    groups = [k // weight.group for k in range(np.prod(weight.into))]
    codes = unpack_nibbles(np.asarray(weight.nibbles), len(groups))
    values = [(codes[k] - zero[g]) * scale[g] for k, g in enumerate(groups)]
    return as_float64(jnp.asarray(np.array(values), jnp.bfloat16)).reshape(weight.into + weight.out)


def quantize_fp8(weight, dynamic: bool, into: int = 1) -> Fp8:
    """Quantise a weight to fp8; its first `into` axes are the inputs."""
    axes = weight.shape
    spec = Fp8(None, None, dynamic, into=axes[:into], out=axes[into:], inputs=tuple(range(into)))
    return jax.tree.map(jnp.asarray, spec.quantize(np.asarray(weight, np.float32)))


def dequantize_8_bit(weight: Int8 | Fp8) -> np.ndarray:
    codes = np.asarray(weight.codes)
    return as_float64(
        codes.view(ml_dtypes.float8_e4m3fn) if isinstance(weight, Fp8) else codes
    ) * as_float64(weight.scale)


@pytest.mark.parametrize("name", thinned(INT8S, ["rows too"]))
@pytest.mark.slow
def test_fp8_product_matches_float64(interpret, name):
    """The kernel and XLA both match the product with quantised rows."""
    subscripts, axes, rows, dynamic = INT8S[name]
    rng = np.random.default_rng(3)
    into = len(subscripts.partition(",")[0]) - 1
    x = random_bfloat16(rng, rows, *axes[:into])
    weight = quantize_fp8(random_bfloat16(rng, *axes, scale=0.1), dynamic, into)
    bias = jnp.asarray(rng.standard_normal(axes[into:]), jnp.float32)
    outputs = linear.weight_of(weight, interpret).einsum(subscripts, x, bias, jnp.float32)
    x_RK = as_float64(x.reshape(rows, -1))
    if dynamic:
        codes, scale = round_to_float8(x.reshape(rows, -1))
        x_RK = as_float64(codes) * as_float64(scale)
    expected = np.einsum(subscripts, x_RK.reshape(x.shape), dequantize_8_bit(weight)) + as_float64(
        bias
    )
    np.testing.assert_allclose(as_float64(outputs), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        weight.einsum(subscripts, x, bias, jnp.float32), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("T", "N", "K", "out"), [(5, 3, 128, 64), (17, 2, 64, 192), (140, 2, 128, 64), (1, 1, 64, 64)]
)
@pytest.mark.slow
def test_per_head_product_matches_float64(T, N, K, out):
    """Latent attention multiplies each head by its own matrix."""
    rng = np.random.default_rng(T)
    x = random_bfloat16(rng, T, N, K)
    w = random_bfloat16(rng, N, out, K)
    outputs = as_float64(
        linear.weight_of(w, INTERPRETED).einsum("TNA,NHA->TNH", x, dtype=jnp.float32)
    )
    expected, magnitude = (
        np.einsum("TNA,NHA->TNH", transform(as_float64(x)), transform(as_float64(w)))
        for transform in (np.asarray, np.abs)
    )
    assert outputs.shape == expected.shape and np.all(np.abs(outputs - expected) < 1e-6 * magnitude)
    assert not gpu_callbacks.get_races().races_found


ROUTERS = {
    "128 experts": (192, 128, 17),
    "32 experts": (128, 32, 5),
    "two warpgroups": (64, 256, 100),
}


@pytest.mark.parametrize("name", thinned(ROUTERS, ["32 experts"]))
def test_router_product_is_accurate_to_float32(name):
    """For bfloat16 rows and any float32 weight; bfloat16 or TF32 products would not suffice."""
    D, E, T = ROUTERS[name]
    rng = np.random.default_rng(D)
    x = random_bfloat16(rng, T, D)
    w = jnp.asarray(rng.standard_normal((D, E)) * rng.choice([1e-3, 1], (D, 1)), jnp.float32)
    outputs = as_float64(linear.weight_of(w, INTERPRETED).exact("TD,DE->TE", x))
    expected = as_float64(x) @ as_float64(w)
    magnitude = np.abs(as_float64(x)) @ np.abs(as_float64(w))
    assert outputs.shape == (T, E) and np.all(np.abs(outputs - expected) < 1e-6 * magnitude)
    bfloat16_expected = as_float64(x) @ as_float64(w.astype(jnp.bfloat16))
    assert (
        np.mean(np.abs(bfloat16_expected - expected) > 1e-6 * magnitude) > 0.9
    )  # the weight's last bits count
    pieces = as_float64(prepare.summands(w)).reshape(3, D, E)
    assert np.array_equal(pieces.sum(0), as_float64(w))
    stored = w.astype(jnp.bfloat16)  # the dtype in most checkpoints
    assert np.all(
        np.abs(
            as_float64(linear.weight_of(stored, INTERPRETED).exact("TD,DE->TE", x))
            - bfloat16_expected
        )
        < 1e-6 * magnitude
    )
    assert not gpu_callbacks.get_races().races_found


def test_router_product_rejects_quantised_weights_and_float32_rows():
    x = jnp.ones((1, 64))
    w = jnp.ones((64, 64))
    with pytest.raises(
        NotImplementedError, match="the weight must be one matrix that is not quantised"
    ):
        linear.weight_of(quantize_int8(w, False), INTERPRETED).exact(
            "TD,DE->TE", x.astype(jnp.bfloat16)
        )
    with pytest.raises(NotImplementedError, match="rows must be bfloat16, not float32"):
        linear.weight_of(w, INTERPRETED).exact("TD,DE->TE", x)


@pytest.mark.parametrize("make", thinned([quantize_int8, quantize_fp8], [quantize_fp8]))
@pytest.mark.slow
def test_prequantised_rows_are_used_if_the_weight_quantises_rows_alike(make):
    """Quantised rows of another kind are ignored, and so are all by weight-only quantisation."""
    rng = np.random.default_rng(9)
    kind = "int8" if make is quantize_int8 else "float8"
    x = random_bfloat16(rng, 5, 2, 64)
    dense = random_bfloat16(rng, 2, 64, 2, 64, scale=0.1)
    codes, scale = round_rows(x.reshape(5, -1), kind)

    def product(rows, dynamic: bool = True):
        weight = linear.weight_of(make(dense, dynamic, 2), InterpretGPUParams())
        return as_float64(weight.gated("TNH,NHGF->TGF", rows, "silu")), as_float64(
            weight.einsum("TNH,NHGF->TGF", rows)
        )

    for factor, dynamic, rows_kind in (
        (1, True, kind),
        (2, True, kind),
        (2, True, "other"),
        (2, False, kind),
    ):
        quantized_x = RoundedRows(x, codes.reshape(x.shape), scale * factor, rows_kind)
        for outputs, expected in zip(
            product(quantized_x, dynamic),
            product(x * (factor if dynamic and rows_kind == kind else 1), dynamic),
            strict=True,
        ):
            assert np.array_equal(outputs, expected)


def test_every_fp8_code_is_decoded_exactly(interpret):
    bits = np.resize(np.delete(np.arange(256, dtype=np.uint8), [127, 255]), (64, 256))
    weight = Fp8(jnp.asarray(bits), jnp.ones(256), False, into=(64,), out=(256,), inputs=(0,))
    outputs = linear.weight_of(weight, interpret).einsum(
        "TD,DA->TA", jnp.eye(64, dtype=jnp.bfloat16)
    )
    assert np.array_equal(as_float64(outputs), as_float64(bits.view(ml_dtypes.float8_e4m3fn)))


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
def test_int4_product_matches_float64(interpret, name):
    subscripts, axes, rows, group, zero = INT4S[name]
    rng = np.random.default_rng(6)
    into = len(subscripts.partition(",")[0]) - 1
    x = random_bfloat16(rng, rows, *axes[:into])
    weight = quantize_int4(random_bfloat16(rng, *axes, scale=0.1), group, into, zero)
    bias = jnp.asarray(rng.standard_normal(axes[into:]), jnp.float32)
    outputs = linear.weight_of(weight, interpret).einsum(subscripts, x, bias, jnp.float32)
    np.testing.assert_allclose(
        as_float64(outputs),
        np.einsum(subscripts, as_float64(x), dequantize_int4(weight)) + as_float64(bias),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
def test_gated_product_matches_float64(activation):
    rng = np.random.default_rng(1)
    x = random_bfloat16(rng, 9, 128)
    weight = random_bfloat16(rng, 128, 2, 64, scale=0.1)
    outputs = linear.weight_of(weight, INTERPRETED).gated("TD,DGF->TGF", x, activation)
    up = np.einsum("TD,DGF->TGF", as_float64(x), as_float64(weight))
    kind = {"clamp": None, "activation": activation}
    np.testing.assert_allclose(
        as_float64(outputs), accuracy.apply_activation(kind, up[:, 0], up[:, 1]), **CLOSE
    )
    assert not gpu_callbacks.get_races().races_found


def draw_expert_ids(rng, T: int, X: int, E: int, kind: str) -> np.ndarray:
    """Expert ids per token; E stands for no expert."""
    if kind == "one":
        return np.where(np.arange(X) == 0, 3, E) + np.zeros((T, 1), int)
    if kind == "few":  # half of the experts are never selected
        return np.stack([rng.permutation(np.r_[:E:2, E])[:X] for _ in range(T)])
    return np.stack([rng.permutation(E)[:X] for _ in range(T)])


@pytest.mark.parametrize("kind", ["any", "one", "few"])
@pytest.mark.parametrize("T", thinned([1, 2, 15, 16, 33, 70, 130], [1, 16, 33]))
@pytest.mark.slow
def test_align_gives_each_token_expert_pair_one_place(T, kind):
    """Every pair gets a place in a block of its expert; the remaining places are empty."""
    E = 12
    X = 4
    rows = 16
    expert_ids = draw_expert_ids(np.random.default_rng(T), T, X, E, kind)
    weights = np.random.default_rng(T).random((T, X), np.float32)
    blocks = jax.tree.map(
        np.asarray, align(jnp.asarray(expert_ids, jnp.int32), jnp.asarray(weights), E, rows)
    )
    counts = np.bincount(expert_ids.reshape(-1), minlength=E + 1)[:E]
    blocks_per_expert = -(-counts // rows)
    assert blocks.count_1 == [blocks_per_expert.sum()] and blocks_per_expert.sum() <= max_blocks(
        T * X, E, rows
    ) == len(blocks.experts_B)
    assert (
        blocks.experts_B[: blocks_per_expert.sum()].tolist()
        == np.repeat(np.arange(E), blocks_per_expert).tolist()
    )
    expected_pairs = np.full(len(blocks.pair_P), T * X)
    next_place = (np.cumsum(blocks_per_expert) - blocks_per_expert) * rows
    for pair, e in enumerate(expert_ids.reshape(-1)):
        if e < E:
            expected_pairs[next_place[e]] = pair
            assert blocks.place_Z[pair] == next_place[e]
            next_place[e] += 1
        else:
            assert blocks.place_Z[pair] >= len(expected_pairs)
    assert blocks.pair_P.tolist() == expected_pairs.tolist()
    assert blocks.weight_P.tolist() == np.r_[weights.reshape(-1), 0][expected_pairs].tolist()


D = 64
F = 128
E = 6
X = 3


def random_experts(rng, **options) -> Experts:
    return Experts(
        random_bfloat16(rng, E, D, 2, F, scale=0.2),
        random_bfloat16(rng, E, F, D, scale=0.2),
        **{"activation": "silu", **options},
    )


def reference_mixture(x, weights, expert_ids, experts: Experts) -> np.ndarray:
    kind = {"clamp": experts.clamp, "alpha": experts.alpha, "activation": experts.activation}
    up = as_float64(experts.up_EDGF)
    down = as_float64(experts.down_EFD)
    out = np.zeros(x.shape)
    up_bias, down_bias = (
        np.zeros((E, 1)) if bias is None else as_float64(bias)
        for bias in (experts.up_bias_EGF, experts.down_bias_ED)
    )
    for t, row in enumerate(as_float64(x)):
        for weight, e in zip(as_float64(weights)[t], expert_ids[t], strict=True):
            if e < E:
                gate, linear_part = np.einsum("d,dgf->gf", row, up[e]) + up_bias[e]
                inner = accuracy.apply_activation(kind, gate, linear_part)
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
def test_experts_match_float64(interpret, name):
    T, kind, options = MIXTURES[name]
    rng = np.random.default_rng(T)
    if options.pop("bias", False):
        options |= {
            "up_bias_EGF": random_bfloat16(rng, E, 2, F),
            "down_bias_ED": random_bfloat16(rng, E, D),
        }
    mixture = random_experts(rng, **options)
    expert_ids = draw_expert_ids(rng, T, X, E, kind)
    x = random_bfloat16(rng, T, D)
    weights = jnp.asarray(rng.random((T, X)), jnp.float32)
    outputs = experts.mix_experts(
        x, weights, jnp.asarray(expert_ids, jnp.int32), E, mixture, interpret
    )
    np.testing.assert_allclose(
        as_float64(outputs),
        reference_mixture(x, weights, expert_ids, mixture),
        rtol=2e-2,
        atol=3e-2,
    )


@pytest.mark.parametrize(
    ("dynamic", "make"),
    nightly_from(
        2,
        [
            (False, quantize_int8),
            (True, quantize_fp8),
            (True, quantize_int8),
            (False, quantize_fp8),
        ],
    ),
)
@pytest.mark.slow
def test_8_bit_experts_match_float64(interpret, dynamic, make):
    rng = np.random.default_rng(4)
    dense = random_experts(rng)
    expert_ids = draw_expert_ids(rng, 9, X, E, "any")
    x = random_bfloat16(rng, 9, D)
    weights = np.ones((9, X), np.float32)
    stacks = []
    for array in (dense.up_EDGF, dense.down_EFD):
        nodes = [make(array[e], dynamic) for e in range(E)]
        stacks.append(Stack(jax.tree.map(lambda *leaves: jnp.stack(leaves), *nodes)))
    dequantized = [np.stack([dequantize_8_bit(stack[e]) for e in range(E)]) for stack in stacks]
    codes, scale = round_to_float8(x) if make is quantize_fp8 else round_to_int8(x)
    rows = as_float64(codes) * as_float64(scale) if dynamic else x
    expected = reference_mixture(rows, weights, expert_ids, Experts(*dequantized, "silu"))
    arguments = (
        jnp.asarray(weights),
        jnp.asarray(expert_ids, jnp.int32),
        E,
        Experts(*stacks, "silu"),
    )
    outputs = as_float64(experts.mix_experts(x, *arguments, interpret))
    # Rows of a down product are rounded too, which the reference does not do.
    assert np.linalg.norm(outputs - expected) / np.linalg.norm(expected) < (
        6e-3 if not dynamic else 2e-2 if make is quantize_int8 else 5e-2
    )


@pytest.mark.parametrize("zero", thinned([False, True], [True]))
@pytest.mark.slow
def test_int4_experts_match_float64(interpret, zero):
    rng = np.random.default_rng(7)
    D = 128
    dense = Experts(
        random_bfloat16(rng, E, D, 2, F, scale=0.2),
        random_bfloat16(rng, E, F, D, scale=0.2),
        "silu",
    )
    expert_ids = draw_expert_ids(rng, 9, X, E, "any")
    x = random_bfloat16(rng, 9, D)
    weights = np.ones((9, X), np.float32)
    nodes = [
        [quantize_int4(array[e], 32, zero=zero) for e in range(E)]
        for array in (dense.up_EDGF, dense.down_EFD)
    ]
    stacks = [
        Stack(jax.tree.map(lambda *leaves: jnp.stack(leaves), *expert_nodes))
        for expert_nodes in nodes
    ]
    expected = reference_mixture(
        x,
        weights,
        expert_ids,
        Experts(
            *(np.stack([dequantize_int4(n) for n in expert_nodes]) for expert_nodes in nodes),
            "silu",
        ),
    )
    arguments = (
        jnp.asarray(weights),
        jnp.asarray(expert_ids, jnp.int32),
        E,
        Experts(*stacks, "silu"),
    )
    outputs = as_float64(experts.mix_experts(x, *arguments, interpret))
    assert np.linalg.norm(outputs - expected) / np.linalg.norm(expected) < 6e-3


def random_mxfp4(rng, *axes: int) -> tuple[Mxfp4, np.ndarray]:
    """A stack of random MXFP4 codes and scales, and its dequantised values."""
    E, K, *out = axes
    data = rng.integers(0, 256, (E, -(-K // 128) * 64, *out), np.uint8)
    scales = rng.integers(120, 126, (E, K // 32, *out), np.uint8)
    codes = unpack_nibbles(data.swapaxes(0, 1), K)
    values = [accuracy.FLOAT4[codes[k]] * 2.0 ** (scales[:, k // 32] - 127.0) for k in range(K)]
    return Mxfp4(jnp.asarray(data), jnp.asarray(scales)), np.stack(values, 1)


@pytest.mark.parametrize(
    ("T", "D", "F"), [(20, 128, 192), pytest.param(70, 192, 128, marks=pytest.mark.nightly)]
)
@pytest.mark.slow
def test_mxfp4_experts_match_float64(interpret, T, D, F):
    """As in gpt-oss: biases, a clamped activation, and sizes that no pipeline step divides."""
    rng = np.random.default_rng(8)
    expert_ids = draw_expert_ids(rng, T, X, E, "any")
    x = random_bfloat16(rng, T, D)
    weights = jnp.asarray(rng.random((T, X)), jnp.float32)
    up, exact_up = random_mxfp4(rng, E, D, 2, F)
    down, exact_down = random_mxfp4(rng, E, F, D)
    options = {
        "activation": "silu",
        "up_bias_EGF": random_bfloat16(rng, E, 2, F),
        "down_bias_ED": random_bfloat16(rng, E, D),
    }
    options |= {"clamp": 1.0, "alpha": 1.7}
    expected = reference_mixture(x, weights, expert_ids, Experts(exact_up, exact_down, **options))
    arguments = weights, jnp.asarray(expert_ids, jnp.int32), E, Experts(up, down, **options)
    outputs = as_float64(experts.mix_experts(x, *arguments, interpret))
    assert np.linalg.norm(outputs - expected) / np.linalg.norm(expected) < 6e-3


def test_every_code_and_scale_of_mxfp4_is_decoded_as_by_xla(interpret):
    """Multiplying the identity returns the dequantised matrix."""
    codes = np.arange(256, dtype=np.uint8)
    scales = np.arange(2, 250, dtype=np.uint8)
    blocks = np.resize(codes, (1, 64, len(scales) + 8))
    scale_array = np.resize(np.r_[scales, np.full(8, 127, np.uint8)], (1, 4, len(scales) + 8))
    node = Mxfp4(jnp.asarray(blocks), jnp.asarray(scale_array))
    matrix = prepare.as_gpu_matrix(jax.tree.map(lambda leaf: leaf[0], node))
    outputs = prepare.dense(
        jnp.eye(128, dtype=jnp.bfloat16), matrix, dtype=jnp.bfloat16, interpret=interpret
    )
    assert np.array_equal(as_float64(outputs), as_float64(node[0]))


def test_unselected_experts_are_never_read(interpret):
    rng = np.random.default_rng(0)
    mixture = random_experts(rng)
    expert_ids = draw_expert_ids(rng, 9, X, E, "few")
    x = random_bfloat16(rng, 9, D)
    weights = jnp.ones((9, X), jnp.float32)
    spoilt = random_experts(rng)
    spoilt = Experts(
        mixture.up_EDGF.at[1::2].set(jnp.nan),
        mixture.down_EFD.at[1::2].set(jnp.nan),
        spoilt.activation,
    )
    outputs = experts.mix_experts(
        x, weights, jnp.asarray(expert_ids, jnp.int32), E, spoilt, interpret
    )
    assert np.isfinite(as_float64(outputs)).all()


# How to store a weight, and the number of bytes copied; the 8-bit formats' scales are read in the
# epilogue, without a copy.
WEIGHTS = {
    "bf16": (lambda weight: weight, lambda weight: weight.nbytes),
    "int8": (lambda weight: quantize_int8(weight, False), lambda weight: weight.codes.nbytes),
    "int4": (
        lambda weight: quantize_int4(weight, 32),
        lambda weight: weight.nibbles.nbytes + weight.scale.nbytes,
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.slow
def test_weight_bytes_are_copied_once(name, monkeypatch):
    """Rows are copied once per 64 outputs; the GPU's cache serves the repeated reads."""
    rng = np.random.default_rng(8)
    make, weight_bytes = WEIGHTS[name]
    x = random_bfloat16(rng, 5, 256)
    weight = make(random_bfloat16(rng, 256, 2, 128))
    blocks = copies.record_copies(monkeypatch)
    linear.weight_of(weight, INTERPRETED).einsum("TD,DGH->TGH", x)
    row_blocks = [block for block in blocks if block.shape[0] == 16]
    assert sum(block.nbytes for block in blocks) - sum(
        block.nbytes for block in row_blocks
    ) == weight_bytes(weight)
    assert sum(block.nbytes for block in row_blocks) == 4 * 16 * 256 * 2


def test_selected_expert_is_copied_once_per_block(monkeypatch):
    rng = np.random.default_rng(0)
    mixture = random_experts(rng)
    expert_ids = draw_expert_ids(rng, 40, X, E, "few")
    x = random_bfloat16(rng, 40, D)
    weights = jnp.ones((40, X), jnp.float32)
    copied_blocks = copies.record_copies(monkeypatch)
    experts.mix_experts(x, weights, jnp.asarray(expert_ids, jnp.int32), E, mixture, INTERPRETED)
    num_blocks = sum(-(-np.count_nonzero(expert_ids == e) // 32) for e in range(E))
    assert sum(block.nbytes for block in copied_blocks if block.shape[0] != 32) == num_blocks * (
        mixture.up_EDGF[0].nbytes + mixture.down_EFD[0].nbytes
    )


BATCHES = (7,), (17, 3, 5, 4), tuple(range(5, 47)), tuple(range(99, 1, -1))


@pytest.mark.parametrize("rows", thinned(BATCHES, [(17, 3, 5, 4)]), ids=len)
def test_products_are_batch_invariant(rows):
    """Dense, expert, router and per-head products do not depend on other rows or block sizes."""
    rng = np.random.default_rng(5)
    x = random_bfloat16(rng, 100, 192)
    weight = random_bfloat16(rng, 192, 128, scale=0.1)
    bias = jnp.asarray(rng.random(128), jnp.float32)
    mixture = random_experts(rng)
    y = random_bfloat16(rng, 100, D)
    weights = jnp.asarray(rng.random((100, X)), jnp.float32)
    expert_ids = jnp.asarray(draw_expert_ids(rng, 100, X, E, "any"), jnp.int32)
    interpreted = InterpretGPUParams()

    router = jnp.asarray(rng.standard_normal((192, 32)), jnp.float32)
    routers = router, router.astype(jnp.bfloat16)
    quantized = quantize_int8(weight, True), quantize_int4(weight, 32), quantize_fp8(weight, True)
    mxfp4_mixture = Experts(
        random_mxfp4(rng, E, 192, 2, F)[0], random_mxfp4(rng, E, F, 64)[0], "silu"
    )

    def run(*rows: int):
        row_ids = np.array(rows)
        dense_outputs = [
            linear.weight_of(operand, interpreted).einsum(
                "TD,DA->TA", x[row_ids], bias, jnp.float32
            )
            for operand in (weight, *quantized)
        ]
        expert_outputs = [
            experts.mix_experts(
                inputs[row_ids], weights[row_ids], expert_ids[row_ids], E, operand, interpreted
            )
            for inputs, operand in ((y, mixture), (x, mxfp4_mixture))
        ]
        router_outputs = [
            linear.weight_of(operand, interpreted).exact("TD,DE->TE", x[row_ids])
            for operand in routers
        ]
        per_head = linear.weight_of(weight.reshape(3, 128, 64), interpreted)
        head_outputs = per_head.einsum("TNA,NHA->TNH", x[row_ids].reshape(-1, 3, 64))
        return [
            as_float64(outputs)
            for outputs in (*dense_outputs, *expert_outputs, *router_outputs, head_outputs)
        ]

    for outputs, expected in zip(run(*rows), run(*range(20)), strict=True):
        shared_rows = [row for row in rows if row < 20]
        assert np.array_equal(
            outputs[[rows.index(row) for row in shared_rows]], expected[shared_rows]
        )


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(cases(8, 4)))
def test_random_experts_match_float64(interpret, seed):
    rng = np.random.default_rng(seed)
    T = int(rng.integers(1, 131))
    kind = ["any", "one", "few"][seed % 3]
    mixture = random_experts(rng, activation=prepare.ACTIVATIONS[seed % 3])
    expert_ids = draw_expert_ids(rng, T, X, E, kind)
    x = random_bfloat16(rng, T, D)
    weights = jnp.asarray(rng.random((T, X)), jnp.float32)
    outputs = experts.mix_experts(
        x, weights, jnp.asarray(expert_ids, jnp.int32), E, mixture, interpret
    )
    np.testing.assert_allclose(
        as_float64(outputs),
        reference_mixture(x, weights, expert_ids, mixture),
        rtol=2e-2,
        atol=6e-2,
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
def test_self_test_rejects_inaccurate_kernel(name, spoilt, monkeypatch):
    """The GPU self-test, at small sizes in the interpreter, accepts only an accurate kernel."""
    real = accuracy.multiply
    outputs = []
    kind = (KINDS | BY_TRITON)[name]

    def kernel(*operands):
        out = real(*operands)
        outputs.append(out.at[5].multiply(1.02) if spoilt else out)
        return outputs[-1]

    monkeypatch.setattr(accuracy, "multiply", kernel)
    monkeypatch.setattr(accuracy, "BLOCKS", (16, 32))
    (allowed,) = {case.allowed for case in accuracy.cases(kind)}
    interpret = True if name in BY_TRITON else InterpretGPUParams()
    case = accuracy.ProductCase(kind, 256, 64, 2, allowed, interpret=interpret)
    assert (self_test.measure(case, 0, repeats=2).wrong is None) == (not spoilt)


@pytest.mark.parametrize("spoilt_rows", [None, 64])
def test_self_test_finds_a_block_size_with_different_bits(spoilt_rows, monkeypatch):
    """One element differs in one block size, by less than the self-test's tolerance."""

    def product(shape, operands, _):
        ones = jnp.ones((len(operands.x), 64), jnp.bfloat16)
        return ones.at[7, 5].add(2**-7) if shape.rows == spoilt_rows else ones

    monkeypatch.setattr(accuracy, "multiply", product)
    case = accuracy.ProductCase(KIND, 64, 64, interpret=InterpretGPUParams())
    weights, inputs, _ = case.build(0)
    out, _ = case.run(weights, inputs)
    assert bool(jnp.isfinite(out).all()) == (spoilt_rows is None)


@pytest.fixture
def launched_shapes(monkeypatch):
    """Pretend a Hopper GPU, and record the shapes that would be launched on it."""
    shapes = []

    def run(shape, operands, interpret):
        prepare.require_self_test(shape)
        shapes.append(shape)
        return jnp.full((shape.blocks * shape.rows, shape.outputs), 7, shape.out_dtype)

    monkeypatch.setattr(device, "is_hopper", lambda: True)
    monkeypatch.setattr(device, "num_processors", lambda: 132)
    monkeypatch.setattr(prepare, "run", run)
    monkeypatch.setattr(routing, "IMPLEMENTATIONS", {"xla": ".xla"})
    monkeypatch.setenv("QUIRE_MOSAIC", "trusted")
    self_test.warn_once.cache_clear()
    return shapes


def test_kernel_is_chosen_on_a_gpu(launched_shapes):
    rng = np.random.default_rng(0)
    x = random_bfloat16(rng, 5, 128)
    weight = random_bfloat16(rng, 128, 64)
    up = random_bfloat16(rng, 128, 2, 64)
    assert (products.einsum("TD,DA->TA", x, weight) == 7).all()
    assert (products.gated("TD,DGF->TGF", x, up, "silu") == 7).all()
    y = random_bfloat16(rng, 5, D)
    weights = jnp.ones((5, X))
    expert_ids = jnp.zeros((5, X), jnp.int32)
    assert (moe.mix(y, weights, expert_ids, E, random_experts(rng)) == 7 * X).all()
    assert [(shape.projections, shape.experts, shape.weighted) for shape in launched_shapes] == [
        (1, 1, False), (2, 1, False), (2, E, False), (1, E, True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("x", "weight", "subscripts", "message"),
    [
        ((5, 128), (128, 64), "TD,DA->TA", None),
        ((5, 96), (96, 60), "TD,DA->TA", "must divide by 64, and are 96 and 60"),
        ((5, 2, 64), (2, 64, 64), "TNH,NAH->TNA", None),
        ((5, 2, 64), (64, 64, 2), "TNH,AHN->TA", "is not a product of rows with one matrix"),
    ],
)
def test_unsupported_products_run_in_xla(launched_shapes, x, weight, subscripts, message):
    rng = np.random.default_rng(0)
    x = random_bfloat16(rng, *x)
    weight = random_bfloat16(rng, *weight)
    outputs = products.einsum(subscripts, x, weight)
    if message is None:
        assert launched_shapes
        return
    assert not launched_shapes
    np.testing.assert_allclose(
        as_float64(outputs),
        np.einsum(subscripts, as_float64(x), as_float64(weight)),
        rtol=2e-2,
        atol=0.2,
    )
    with pytest.raises(NotImplementedError, match=message):
        products.einsum(subscripts, x, weight, implementation="mosaic")


def test_error_lists_every_unsupported_property(launched_shapes):
    x = jnp.zeros((5, 60))
    weight = jnp.zeros((60, 2, 64))
    message = (
        "rows must be bfloat16, not float32; weights must be bfloat16 or codes, not float32; "
        "inputs "
    )
    with pytest.raises(
        NotImplementedError,
        match=message + "and .* are 60 and 64; the activation must be one of silu, .* not gelu",
    ):
        products.gated("TD,DGF->TGF", x, weight, "gelu", "mosaic")


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [("8.0", "triton"), ("8.9", "triton"), ("9.0", "mosaic"), ("10.0", "triton")],
)
def test_gpu_generation_decides_the_kernel(capability, kernel, monkeypatch):
    """GPUs other than Hopper run only expert and quantised products, in Triton.

    Triton's int4 kernel has blocks of at most 64 rows.
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
    weight = random_bfloat16(rng, 128, 64)
    x = random_bfloat16(rng, 200, 128)
    for quantized in (quantize_int8(weight, False), quantize_int4(weight, 32)):
        linear.weight_of(quantized).einsum("TD,DA->TA", x)
    assert ran == [(kernel, 128), (kernel, 64 if kernel == "triton" else 128)]
    if kernel == "triton":
        with pytest.raises(
            NotImplementedError, match="on this card the kernel is for experts and for codes"
        ):
            linear.weight_of(weight).einsum("TD,DA->TA", x)
        with pytest.raises(
            NotImplementedError, match="groups must be of 32, 64 or 128 inputs, not 16"
        ):
            linear.weight_of(quantize_int4(weight, 16)).einsum("TD,DA->TA", x)
        for gigabytes, is_unsupported in ((2, False), (3, True), (4, True), (5, False)):
            stack = jax.ShapeDtypeStruct((gigabytes << 10, 1024, 1024), jnp.int8)
            codes = GpuMatrix(stack, "int8", jnp.ones(1))
            arguments = prepare.choose_kernel(None), x, codes, 1024, 1024
            if not is_unsupported:
                prepare.check_supported(*arguments, grouped=True)
                continue
            with pytest.raises(NotImplementedError, match="codes must not be of 2 to 4 GiB"):
                prepare.check_supported(*arguments, grouped=True)
    device.is_hopper.cache_clear()


@pytest.mark.parametrize("capability", ["7.5", "gfx942"])
def test_older_gpus_and_other_vendors_are_rejected(capability, monkeypatch):
    device.is_hopper.cache_clear()
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(device, "capability", lambda: capability)
    with pytest.raises(
        NotImplementedError,
        match=f"capability 8.0 .Ampere. or later, and this GPU's is {capability}",
    ):
        linear.weight_of(jnp.ones((64, 64)))
    device.is_hopper.cache_clear()


def test_mosaic_requires_an_nvidia_gpu():
    with pytest.raises(NotImplementedError, match="there is no NVIDIA GPU"):
        products.einsum("TD,DA->TA", jnp.ones((1, 64)), jnp.ones((64, 64)), implementation="mosaic")


def test_product_that_fails_its_self_test_runs_in_xla(
    launched_shapes, monkeypatch, caplog, tmp_path
):
    """The self-test runs in another process with this kernel's parameters."""
    tested = []

    def test(module: str, kind: str):
        tested.append((module, json.loads(kind)))
        return {"blocks": self_test.CaseResult(0.5, 0.5, 0, 6e-3)}

    monkeypatch.setattr(self_test, "run_self_test", test)
    monkeypatch.setenv("QUIRE_MOSAIC", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    self_test.verdict.cache_clear()
    rng = np.random.default_rng(0)
    x = random_bfloat16(rng, 5, 128)
    weight = random_bfloat16(rng, 128, 64)
    with caplog.at_level(logging.WARNING, "quire"):
        assert not (products.einsum("TD,DA->TA", x, weight) == 7).all()
    assert not launched_shapes and "it is wrong on this GPU: blocks by 5.0e-01" in caplog.text
    assert tested == [("quire.ops.linear.gpu_kernel.accuracy", KIND | {"bias": False})]
    self_test.verdict.cache_clear()


INT8 = {"codes": "int8", "rounded": True}
FP8 = {"codes": "float8", "rounded": True}
INT4 = {"codes": "int4", "group": 32}
BASE = shape.ProductShape(1, 16, 1, 4096, 4096, 1, 132, "bfloat16")
PRODUCTION_SHAPES = {
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

ALWAYS_LOWERED = ["Llama-3-8B, up, 2048 rows", "gpt-oss-20b, up"]


def operands_of(s: shape.ProductShape) -> shape.Operands:
    """Shapes and dtypes of a product's operands."""
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
    """(a product by this GPU's kernel, or Hopper's without a GPU; the shapes of its operands)."""
    uses_triton = device.is_gpu() and not device.is_hopper()
    s = PRODUCTION_SHAPES[name]._replace(kernel="triton" if uses_triton else "mosaic")
    return jax.jit(lambda operands: prepare.multiply(s, operands, None)), (operands_of(s),)


@pytest.mark.parametrize("name", thinned(PRODUCTION_SHAPES, ALWAYS_LOWERED))
def test_lowers_for_cuda(name, monkeypatch):
    monkeypatch.undo()
    product, operands = step_of(name)
    assert "mosaic_gpu" in product.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture(scope="module")
def hopper_steps():
    return kernels_ahead.compile_some(__file__, PRODUCTION_SHAPES, ALWAYS_LOWERED)


@pytest.mark.slow
@kernels_ahead.needs_compiler
@pytest.mark.parametrize("name", thinned(PRODUCTION_SHAPES, ALWAYS_LOWERED))
def test_compiles_for_hopper(name, hopper_steps):
    """Compiled to SASS, the kernel fits, does not serialise `wgmma`, and spills no registers."""
    (kernel,) = hopper_steps[name].kernels
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


TRITON_SHAPES = [
    name
    for name, s in PRODUCTION_SHAPES.items()
    if not s.transposed
    and (s.experts > 1 or s.codes)
    and s.rows in shape.block_sizes("triton", s.codes)
]
ALWAYS_COMPILED = ["gpt-oss-20b in MXFP4, up", "Qwen3-30B-A3B, down"]


@pytest.fixture(scope="module", params=["a100", "b200"])
def triton_steps(request):
    return request.param, kernels_ahead.compile_some(
        __file__, TRITON_SHAPES, ALWAYS_COMPILED, request.param
    )


@pytest.mark.slow
@kernels_ahead.needs_compiler
@pytest.mark.parametrize("name", thinned(TRITON_SHAPES, ALWAYS_COMPILED))
def test_compiles_for_other_gpus(name, triton_steps):
    """Triton compiles a product to one launch without register spills."""
    gpu, steps = triton_steps
    step = steps[name]
    print("|", gpu, "|", name, "|", step.spilled, "|")
    assert step.outside == {"kCustomKernel": 1} and not step.spilled and not step.kernels


def test_gpu_weight_looks_up_rows_and_picks_a_matrix_as_xla_does():
    rng = np.random.default_rng(0)
    table_VD = jnp.asarray(rng.normal(size=(6, 16)), jnp.bfloat16)
    table = linear.GpuWeight(table_VD)
    np.testing.assert_array_equal(table[jnp.array([4, 0, 4])], table_VD[jnp.array([4, 0, 4])])
    assert table.rows == 6
    stack_EDF = jnp.asarray(rng.normal(size=(3, 4, 8)), jnp.bfloat16)
    np.testing.assert_array_equal(linear.GpuWeight(stack_EDF).pick(1), stack_EDF[1])
