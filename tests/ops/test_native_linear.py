"""The CPU kernels' weight products against float64, for every instruction set of this machine."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.ops import native, quant
from quire.ops.activation import glu
from quire.ops.linear import einsum, gated, project
from quire.ops.linear.cpu_layout import pack, tile
from quire.ops.native import build
from quire.ops.quant import four_bits
from quire.ops.quant.grouped import CODES
from quire.ops.quant.mxfp4 import Mxfp4, decode
from quire.ops.quant.stack import Stack
from quire.sharding.spec import ArraySpec, random_arrays
from quire.tests.support.cases import cases, thinned

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ISAS = list(build.isas())
FORMATS = (
    "int8",
    "int8-weights",
    "int4",
    "int4-64",
    "int4-128-zero",
    "int4-zero",
    "fp8",
    "fp8-weights",
    "fp8-weights-128",
    "int8-weights-64",
    "nf4",
    "nvfp4",
    "int8-weights-16",
    "int8-weights-32-least",
    "int4-32-least",
    "int4-32-least-half",
    "int5-32",
    "int5-32-least",
    "iq4",
    "fp4",
    "k4-32-least",
    "k4-16-least",
    "k4-16",
    "k6-16",
    "k6-32-least",
    "iq4-levels",
    "mxfp4",
)
INT8_ROW_FORMATS = (  # formats whose kernels can quantise rows to int8
    "int4",
    "int4-64",
    "int4-128-zero",
    "int4-zero",
    "int4-32-least",
    "int4-32-least-half",
    "k4-32-least",
    "iq4",
    "iq4-levels",
    "mxfp4",
    "int5-32",
    "k6-16",
    "int8-weights-64",
)
ALL_FORMATS = (*FORMATS, *(f"{name} of bytes" for name in INT8_ROW_FORMATS))
LOW_BITS = ("codebook-4", "e8p-2", "e8p-4")
FLOAT32_ROW_FORMATS = (
    "int8-weights of floats",
    "int4-64 of floats",
    "nf4 of floats",
    "int5-32 of floats",
    "k6-16 of floats",
)
# formats tested outside of slow runs: float32 kernels take seconds to compile
QUICK = ("int8-weights-64", "int4-32-least")
# pack's dtype of the rows, by the suffix of a format's name ("int4 of bytes")
ROW_DTYPES = {"": "bfloat16", "bytes": "int8", "floats": "float32"}


@pytest.fixture(params=thinned(ISAS, ISAS[:1]))
def isa(request, monkeypatch):
    monkeypatch.setenv("QUIRE_NATIVE", request.param)
    if not native.serves():
        pytest.skip("no compiler")
    jax.clear_caches()  # the instruction set is not part of a trace's key


def spec_of(into, out, dtype, head=False):
    if head:
        return ArraySpec(
            (*out, *into),
            dtype,
            (None,) * (len(into) + len(out)),
            fan_in=math.prod(into),
            inputs=(1,),
        )
    inputs = tuple(range(len(into)))
    return ArraySpec(
        (*into, *out),
        dtype,
        (None,) * (len(into) + len(out)),
        fan_in=math.prod(into),
        inputs=inputs,
    )


def random_matrix(rng, into, out, dtype):
    scale = rng.uniform(0.1, 3) / math.sqrt(math.prod(into))
    return (rng.standard_normal((*into, *out)) * scale).astype(dtype)


def quantize_and_pack(name, spec, w):
    """A weight quantised to a format, and the same packed for the kernels."""
    name, _, rows = name.partition(" of ")
    node = quant.packed(name, spec).quantize(w)
    return node, pack(spec, node, ROW_DTYPES[rows])


def as_float64(x):
    return np.asarray(x).astype(np.float64)


@settings(max_examples=cases(12))
@given(
    rows=st.integers(1, 70), padding=st.integers(0, 9),
    into=st.sampled_from([(8,), (32,), (100,), (4, 24), (288,), (515,)]),
    out=st.sampled_from([(16,), (5,), (3, 24), (2, 64), (200,), (1000,)]), bias=st.booleans(),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]), seed=st.integers(0, 999),
)  # fmt: skip
def check_dense(rows, padding, into, out, bias, dtype, seed):
    rng = np.random.default_rng(seed)
    x = random_matrix(rng, (rows,), into, dtype)
    w = random_matrix(rng, into, out, dtype)
    x[max(rows - padding, 0) :] = 0
    b = random_matrix(rng, (), out, dtype) if bias else None
    node = pack(spec_of(into, out, dtype), w)
    letters = ("TD,D", "TNH,NH")[len(into) - 1] + "XY"[: len(out)] + "->T" + "XY"[: len(out)]
    outputs = project(
        letters, jnp.asarray(x), node, None if b is None else jnp.asarray(b), jnp.float32
    )
    expected = np.tensordot(as_float64(x), as_float64(w), len(into)) + (
        0 if b is None else as_float64(b)
    )
    size = np.tensordot(np.abs(as_float64(x)), np.abs(as_float64(w)), len(into)) + 1
    np.testing.assert_array_less(np.abs(as_float64(outputs) - expected) / size, 1e-6)
    rounded = project(letters, jnp.asarray(x), node, None if b is None else jnp.asarray(b))
    assert rounded.dtype == dtype
    np.testing.assert_array_equal(rounded, np.asarray(outputs).astype(dtype))
    row = rng.integers(rows)
    alone = project(
        letters,
        jnp.asarray(x[row : row + 1]),
        node,
        None if b is None else jnp.asarray(b),
        jnp.float32,
    )
    np.testing.assert_array_equal(alone[0], outputs[row])


@pytest.mark.random
def test_dense_products_match_float64(isa):
    check_dense()


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float16")])
def test_kernel_rejects_dtypes_other_than_float32_and_bfloat16(dtypes):
    rows, result = dtypes
    node = pack(spec_of((32,), (16,), np.float32), np.ones((32, 16), np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a kernel is called with other arrays"):
        einsum("TD,DX->TX", jnp.ones((3, 32), rows), node, jnp.dtype(result)).block_until_ready()


def test_float64_matrix_is_rejected():
    with pytest.raises(TypeError, match="the matrix is of float64"):
        tile(np.ones((32, 16)), 1)


@pytest.mark.parametrize("name", [None, *ALL_FORMATS, *FLOAT32_ROW_FORMATS])
@pytest.mark.slow
def test_products_with_stacked_matrices_match_single_matrices(isa, name):
    """Bit-identical: one picked matrix with a bias or gate, and all with their own rows."""
    rng = np.random.default_rng(4)
    E = 5
    K = 96
    F = 32
    w, x, rows = (
        random_matrix(rng, shape, (K,), np.float32) for shape in ((E, 2, F), (7,), (7, E))
    )
    w = np.ascontiguousarray(np.moveaxis(w, -1, 1))
    bias, rows[5:] = random_matrix(rng, (), (2, F), np.float32), 0
    dense = ArraySpec(w.shape, np.float32, (None,) * 4, inputs=(1,), stacked=True)
    single_spec = spec_of((K,), (2, F), np.float32)
    leaf: Any = w
    alone: list[Any] = [pack(single_spec, matrix) for matrix in w]
    if name is not None:
        nodes, alone = zip(
            *(quantize_and_pack(name, single_spec, matrix) for matrix in w), strict=True
        )
        leaf = Stack(jax.tree.map(lambda *arrays: np.stack(arrays), *nodes))
    stack: Any = pack(dense, leaf, ROW_DTYPES[(name or "").partition(" of ")[2]])
    pick = jax.jit(lambda stack, e, x: project("TD,DGF->TGF", x, stack.pick(e), bias))
    for e in range(E):
        np.testing.assert_array_equal(pick(stack, e, x), project("TD,DGF->TGF", x, alone[e], bias))
        products = (
            gated("TD,DGF->TGF", jnp.asarray(x), node, "silu") for node in (stack.pick(e), alone[e])
        )
        np.testing.assert_array_equal(*products)
    stacked = einsum("TED,EDGF->TEGF", jnp.asarray(rows), stack)
    for e in range(E):
        np.testing.assert_array_equal(
            stacked[:, e], einsum("TD,DGF->TGF", jnp.asarray(rows[:, e]), alone[e])
        )
    for e in (-1, E):
        with pytest.raises((ValueError, RuntimeError), match="the stack has no such matrix"):
            jax.block_until_ready(pick(stack, e, x))


@settings(max_examples=cases(12))
@given(
    rows=st.integers(1, 40), padding=st.integers(0, 9), K=st.sampled_from([32, 96, 320]),
    out=st.sampled_from([(16,), (7,), (2, 24), (500,)]), bias=st.booleans(),
    seed=st.integers(0, 999), dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
)  # fmt: skip
def check_mxfp4(rows, padding, K, out, bias, seed, dtype):
    """The kernel multiplies by the values that JAX decodes, which are exact in bfloat16.

    Scales of 2^-127 stand for zero.
    """
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (3, four_bits.count(K), *out), np.uint8)
    scales = rng.integers(110, 130, (3, K // 32, *out)).astype(np.uint8)
    scales[rng.random(scales.shape) < 0.05] = 0
    leaf = Mxfp4(blocks, scales)
    x = random_matrix(rng, (rows,), (K,), dtype)
    x[max(rows - padding, 0) :] = 0
    b = random_matrix(rng, (), out, ml_dtypes.bfloat16) if bias else None
    dense = ArraySpec((3, K, *out), BFLOAT16, (None,) * (2 + len(out)), stacked=True)
    stack: Any = pack(quant.packed("mxfp4", dense), leaf, np.dtype(dtype).name)
    e = int(rng.integers(3))
    letters = "TD,DXY"[: 4 + len(out)] + "->T" + "XY"[: len(out)]
    options = [None if b is None else jnp.asarray(b), jnp.float32]
    outputs = project(letters, jnp.asarray(x), stack.pick(e), *options)
    w = as_float64(decode(jnp.asarray(blocks[e]), jnp.asarray(scales[e])))
    expected = np.tensordot(as_float64(x), w, 1) + (0 if b is None else as_float64(b))
    size = (
        np.tensordot(np.abs(as_float64(x)), np.abs(w), 1)
        + (0 if b is None else np.abs(as_float64(b)))
        + 1e-30
    )
    limit = 1e-6 * size + (0 if dtype is np.float32 else rounding_error(x, w, 32))
    np.testing.assert_array_less(np.abs(as_float64(outputs) - expected), limit)
    row = rng.integers(rows)
    np.testing.assert_array_equal(
        project(letters, jnp.asarray(x[row : row + 1]), stack.pick(e), *options)[0], outputs[row]
    )


@pytest.mark.random
@pytest.mark.slow
def test_mxfp4_products_match_float64(isa):
    check_mxfp4()


def rounding_error(x_TK, w, group):
    """The largest error of the kernels' 16-bit rows: of each group's largest value, 1 / 65278.

    It is 0 on instruction sets whose kernels do not round bfloat16 rows.
    """
    if native.instruction_set() not in ("avx512_vnni", "amx"):
        return 0
    largest_TG = np.abs(split_groups(x_TK, group)).max(2)
    step_TK = largest_TG.repeat(group, 1)[:, : x_TK.shape[1]] / 65278
    return 1.01 * np.tensordot(step_TK, np.abs(w), 1)


def is_near_rounding_tie(x):
    """Where a value lies half-way between two int8 steps of its row and may round either way."""
    size = np.abs(as_float64(x))
    steps = size * 127 / np.maximum(size.max(tuple(range(1, x.ndim)), keepdims=True), 1e-9)
    return np.abs(steps % 1 - 0.5) < 1e-3


@settings(max_examples=cases(12))
@given(
    name=st.sampled_from(FORMATS), rows=st.integers(1, 40), padding=st.integers(0, 9),
    into=st.sampled_from([(32,), (192,), (6, 32), (322,)]),
    out=st.sampled_from([(16,), (7,), (3, 24), (500,)]), bias=st.booleans(),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]), seed=st.integers(0, 999),
)  # fmt: skip
@example(name="fp8", rows=2, padding=0, into=(32,), out=(16,), bias=False, dtype=np.float32, seed=0)
def check_quantized(name, rows, padding, into, out, bias, dtype, seed):
    rng = np.random.default_rng(seed)
    x = random_matrix(rng, (rows,), into, dtype)
    w = random_matrix(rng, into, out, dtype)
    x[max(rows - padding, 0) :] = 0
    x[is_near_rounding_tie(x)] = 0
    spec = spec_of(into, out, dtype)
    node = quant.packed(name, spec).quantize(w)
    letters = ("TD,D", "TNH,NH")[len(into) - 1] + "XY"[: len(out)] + "->T" + "XY"[: len(out)]
    xla_outputs = as_float64(einsum(letters, jnp.asarray(x), node, jnp.float32))
    packed = pack(spec, node, np.dtype(dtype).name)
    outputs = einsum(letters, jnp.asarray(x), packed, jnp.float32)
    size = np.tensordot(np.abs(as_float64(x)), np.abs(as_float64(w)), len(into)).max()
    # With bfloat16 rows XLA rounds group-quantised weights to bfloat16; the kernels do not.
    in_groups = (
        name.startswith(("int4", "nf4", "iq4")) or name.endswith("least") or name[-1].isdigit()
    )
    tolerance = 4e-3 if in_groups and dtype is not np.float32 else 2e-6
    np.testing.assert_allclose(as_float64(outputs), xla_outputs, atol=size * tolerance)
    expected = np.tensordot(as_float64(x), as_float64(w), len(into))
    worst = {
        "int8": 0.02,
        "int4": 0.2,
        "int5": 0.1,
        "fp8": 0.1,
        "nf4": 0.25,
        "fp4": 0.25,
        "iq4": 0.3,
        "nvfp4": 0.25,
        "mxfp4": 0.3,
        "k4": 0.2,
        "k6": 0.05,
    }[name.split("-")[0]]
    np.testing.assert_allclose(as_float64(outputs), expected, atol=worst * size)
    b = jnp.asarray(random_matrix(rng, (), out, np.float32)) if bias else None
    row = rng.integers(rows)
    with_bias = project(letters, jnp.asarray(x), packed, b, jnp.float32)
    np.testing.assert_allclose(with_bias, outputs if b is None else outputs + b, atol=size * 2e-6)
    alone = project(letters, jnp.asarray(x[row : row + 1]), packed, b, jnp.float32)
    np.testing.assert_array_equal(alone[0], with_bias[row])


@pytest.mark.random
@pytest.mark.slow
def test_quantized_products_match_xla_and_float64(isa):
    check_quantized()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (*FORMATS, *LOW_BITS)
    ],
)
def test_float32_rows_are_multiplied_in_full_precision(name):
    """In XLA and in the kernels, products match float64's with the decoded weight.

    They are batch-invariant. Formats that quantise rows do so here too.
    """
    rng = np.random.default_rng(5)
    x = random_matrix(rng, (70,), (512,), np.float32)
    w = random_matrix(rng, (512,), (100,), np.float32)
    node, packed = quantize_and_pack(f"{name} of floats", spec_of((512,), (100,), np.float32), w)
    if node.rounds is not None:
        # values that the codes represent exactly
        x = np.where(rng.random(x.shape) < 0.5, 1.0, -1.0).astype(np.float32)
    decoded = as_float64(einsum("TD,DF->TF", jnp.eye(512), node, implementation="xla"))
    np.testing.assert_allclose(decoded, w, atol=np.abs(w).max() / 2)
    expected = as_float64(x) @ decoded
    size = np.abs(as_float64(x)) @ np.abs(decoded)
    for weight in (node, packed):
        outputs = np.asarray(einsum("TD,DF->TF", jnp.asarray(x), weight))
        assert (np.abs(outputs - expected) < 1e-6 * size).all()
    for rows in (1, 7, 64):
        np.testing.assert_array_equal(
            einsum("TD,DF->TF", jnp.asarray(x[-rows:]), packed), outputs[-rows:]
        )


def split_groups(x_TK, group):
    return np.pad(as_float64(x_TK), ((0, 0), (0, -x_TK.shape[1] % group))).reshape(
        len(x_TK), -1, group
    )


def round_to_int8(x_TK, group):
    """Rows as 4-bit kernels read them: the largest absolute value of each group becomes 127."""
    groups = split_groups(x_TK, group)
    scale = np.abs(groups).max(2, keepdims=True) / 127
    bytes_TGK = np.rint(np.divide(groups, scale, out=np.zeros_like(groups), where=scale > 0))
    return (bytes_TGK * scale).reshape(len(x_TK), -1)[:, : x_TK.shape[1]]


@settings(max_examples=cases(20))
@given(
    name=st.sampled_from(INT8_ROW_FORMATS), rows=st.integers(1, 40), padding=st.integers(0, 9),
    K=st.sampled_from([32, 64, 322, 1024]), out=st.sampled_from([(16,), (7,), (3, 24), (500,)]),
    bias=st.booleans(),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]), seed=st.integers(0, 999),
)  # fmt: skip
def check_int8_rows(name, rows, padding, K, out, bias, dtype, seed):
    """The product of int8 rows and the decoded weight is accurate to float32."""
    rng = np.random.default_rng(seed)
    x = random_matrix(rng, (rows,), (K,), dtype)
    w = random_matrix(rng, (K,), out, dtype)
    x *= 10 ** rng.uniform(-3, 3, (rows, 1)).astype(dtype)
    x[max(rows - padding, 0) :] = 0
    x[:, rng.integers(K)] *= 0
    node, packed = quantize_and_pack(f"{name} of bytes", spec_of((K,), out, dtype), w)
    assert packed.int8_activations
    code = node.dense() if name.startswith("int4") and "least" not in name else node.dense(K)
    w_KO = as_float64(code).reshape(K, -1)
    is_tie = np.stack(
        [is_near_rounding_tie(row).reshape(-1)[:K] for row in split_groups(x, node.group)]
    )
    x[is_tie] = 0
    bytes_TK = round_to_int8(x, node.group)
    b = random_matrix(rng, (), out, np.float32) if bias else None
    letters = "TD,DXY"[: 4 + len(out)] + "->T" + "XY"[: len(out)]
    options = None if b is None else jnp.asarray(b), jnp.float32
    outputs = project(letters, jnp.asarray(x), packed, *options)
    expected = (bytes_TK @ w_KO).reshape(rows, *out) + (0 if b is None else as_float64(b))
    margin = (
        16 * as_float64(np.abs(node.scale)).max()
        if node.scale.dtype != np.int8
        else np.abs(w_KO).max() * 128
    )
    size = (np.abs(bytes_TK) @ (np.abs(w_KO) + margin)).reshape(rows, *out) + (
        0 if b is None else np.abs(as_float64(b))
    )
    np.testing.assert_array_less(np.abs(as_float64(outputs) - expected), 2e-6 * size + 1e-30)
    index = rng.integers(rows)
    alone = project(letters, jnp.asarray(x[index : index + 1]), packed, *options)
    np.testing.assert_array_equal(alone[0], outputs[index])


@pytest.mark.random
def test_products_of_int8_rows_match_float64(isa):
    check_int8_rows()


@settings(max_examples=cases(12))
@given(
    name=st.sampled_from([name for name in FORMATS if name[0] == "k"]
                         + ["k6-16-least", "iq4-levels"]),
    rows=st.integers(1, 40), K=st.sampled_from([256, 320, 1024]),
    out=st.sampled_from([(16,), (3, 24), (500,)]),
    seed=st.integers(0, 999),
)  # fmt: skip
def check_two_level_scales(name, rows, K, out, seed):
    """Scales of either sign and of very different sizes: also zero and subnormal in float16."""
    rng = np.random.default_rng(seed)
    spec = spec_of((K,), out, np.float32)
    node = random_arrays(quant.packed(name, spec), seed)

    def random_super_scales():
        scales = 2.0 ** rng.integers(-24, -8, (-(-K // 256), *out)) * rng.uniform(
            0.5, 1, (-(-K // 256), *out)
        )
        return np.where(rng.random(scales.shape) < 0.1, 0, scales).astype(np.float16)

    fields = {
        "scale": rng.integers(-128, 128, node.scale.shape).astype(np.int8),
        "super_scale": random_super_scales(),
    }
    if node.least is not None:
        fields |= {
            "least": rng.integers(-128, 128, node.least.shape).astype(np.int8),
            "super_least": random_super_scales(),
        }
    node = jax.tree.map(np.asarray, node.replace(**fields))
    x = random_matrix(rng, (rows,), (K,), ml_dtypes.bfloat16)
    scale: Any
    scale, least = (
        None
        if inner is None
        else as_float64(inner).repeat(node.group, 0)[:K]
        * as_float64(super_scale).repeat(256, 0)[:K]
        for inner, super_scale in ((node.scale, node.super_scale), (node.least, node.super_least))
    )
    codes = (four_bits.split(node.codes, K) if node.packed else node.codes).reshape(K, *out)
    w = CODES[node.code].numbers.astype(np.float64)[codes] * scale - (0 if least is None else least)
    np.testing.assert_array_equal(np.asarray(node.dense(K)).reshape(w.shape), w.astype(np.float32))
    packed: Any = pack(spec, node)
    outputs = einsum(
        "TD,DXY"[: 4 + len(out)] + "->T" + "XY"[: len(out)], jnp.asarray(x), packed, jnp.float32
    )
    weight_bound = np.abs(w) + 128 * np.abs(scale)
    size = np.tensordot(np.abs(as_float64(x)), weight_bound, 1) + 1e-30
    np.testing.assert_array_less(
        np.abs(as_float64(outputs) - np.tensordot(as_float64(x), w, 1)),
        1e-6 * size + rounding_error(x, weight_bound, node.group),
    )
    row = rng.integers(rows)
    alone = einsum(
        "TD,DXY"[: 4 + len(out)] + "->T" + "XY"[: len(out)],
        jnp.asarray(x[row : row + 1]),
        packed,
        jnp.float32,
    )
    np.testing.assert_array_equal(alone[0], outputs[row])
    if len(out) == 1:
        columns = rng.integers(0, *out, 5)
        np.testing.assert_array_equal(
            packed[jnp.asarray(columns)], w.astype(np.float32)[:, columns].T
        )
        np.testing.assert_array_equal(node[columns], w.astype(np.float32)[:, columns].T)


@pytest.mark.random
@pytest.mark.slow
def test_products_with_two_level_scales_match_float64(isa):
    check_two_level_scales()


@pytest.mark.parametrize("name", [None, *ALL_FORMATS, *FLOAT32_ROW_FORMATS])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.slow
def test_fused_gate_and_up_product(isa, name, activation):
    rng = np.random.default_rng(1)
    x = random_matrix(rng, (9,), (64,), np.float32)
    w = random_matrix(rng, (64,), (2, 48), np.float32)
    spec = spec_of((64,), (2, 48), np.float32)
    packed = pack(spec, w) if name is None else quantize_and_pack(name, spec, w)[1]
    outputs = gated("TD,DGF->TGF", jnp.asarray(x), packed, activation)
    np.testing.assert_allclose(
        outputs, glu(einsum("TD,DGF->TGF", jnp.asarray(x), packed), activation), atol=2e-6
    )


@pytest.mark.parametrize("name", [None, "int8", "int8-weights", "fp8", "fp8-weights"])
def test_packed_head_serves_embedding_lookups(isa, name):
    rng = np.random.default_rng(2)
    w = random_matrix(rng, (50,), (24,), np.float32)
    x = random_matrix(rng, (3,), (24,), np.float32)
    spec = spec_of((24,), (50,), np.float32, head=True)
    node = w if name is None else quant.packed(name, spec).quantize(w.T)
    packed: Any = pack(spec, node)
    tokens = jnp.array([0, 49, 17, 17])
    tolerance = 1e-6 if name is None else 0.05
    np.testing.assert_allclose(packed[tokens], w[tokens], atol=tolerance)
    np.testing.assert_allclose(
        einsum("RD,VD->RV", jnp.asarray(x), packed), x @ w.T, atol=10 * tolerance
    )
    if name is not None:
        np.testing.assert_array_equal(packed[tokens], node[tokens])


@pytest.mark.parametrize("name", [None, *ALL_FORMATS, *FLOAT32_ROW_FORMATS])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.slow
def test_non_finite_row_does_not_change_other_rows(isa, name, value):
    rng = np.random.default_rng(3)
    x = random_matrix(rng, (8,), (64,), np.float32)
    w = random_matrix(rng, (64,), (40,), np.float32)
    spec = spec_of((64,), (40,), np.float32)
    packed = pack(spec, w) if name is None else quantize_and_pack(name, spec, w)[1]
    finite = np.asarray(einsum("TD,DF->TF", jnp.asarray(x), packed))
    x[5, 7] = value
    outputs = np.asarray(einsum("TD,DF->TF", jnp.asarray(x), packed))
    assert not np.isfinite(outputs[5]).any()
    np.testing.assert_array_equal(np.delete(outputs, 5, 0), np.delete(finite, 5, 0))


def test_zero_rows_and_zero_weights_give_zeros(isa):
    for name in ALL_FORMATS:
        spec = spec_of((32,), (16,), np.float32)
        packed = quantize_and_pack(name, spec, np.zeros((32, 16), np.float32))[1]
        assert not np.asarray(einsum("TD,DF->TF", jnp.ones((2, 32)), packed)).any()
        assert not np.asarray(einsum("TD,DF->TF", jnp.zeros((2, 32)), packed)).any()
