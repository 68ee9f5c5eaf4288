"""The kernels' weight products against float64, on every instruction set that this machine has."""

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
IN_BYTES = (  # those whose kernels can round rows to bytes
    "int4",
    "int4-64",
    "int4-128-zero",
    "int4-zero",
    "int4-32-least",
    "k4-32-least",
    "iq4",
    "iq4-levels",
    "mxfp4",
)
EVERY = (*FORMATS, *(f"{name} of bytes" for name in IN_BYTES))
LOW_BITS = ("codebook-4", "e8p-2", "e8p-4")
OF_FLOATS = ("int8-weights of floats", "int4-64 of floats", "nf4 of floats", "k6-16 of floats")
# of float32 rows, whose kernels take seconds to compile
QUICK = ("int8-weights-64", "int4-32-least")
# what pack is told of the rows, by the end of a name
ROWS = {"": "bfloat16", "bytes": "int8", "floats": "float32"}


@pytest.fixture(params=thinned(ISAS, ISAS[:1]))
def isa(request, monkeypatch):
    monkeypatch.setenv("QUIRE_NATIVE", request.param)
    if not native.serves():
        pytest.skip("no compiler")
    jax.clear_caches()  # the instruction set is no part of a trace's key


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


def made(rng, into, out, dtype):
    scale = rng.uniform(0.1, 3) / math.sqrt(math.prod(into))
    return (rng.standard_normal((*into, *out)) * scale).astype(dtype)


def rounded(name, spec, w):
    """A weight in a format, and as the kernels have it."""
    name, _, rows = name.partition(" of ")
    node = quant.packed(name, spec).quantize(w)
    return node, pack(spec, node, ROWS[rows])


def wide(x):
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
    x = made(rng, (rows,), into, dtype)
    w = made(rng, into, out, dtype)
    x[max(rows - padding, 0) :] = 0
    b = made(rng, (), out, dtype) if bias else None
    node = pack(spec_of(into, out, dtype), w)
    letters = ("TD,D", "TNH,NH")[len(into) - 1] + "XY"[: len(out)] + "->T" + "XY"[: len(out)]
    got = project(letters, jnp.asarray(x), node, None if b is None else jnp.asarray(b), jnp.float32)
    exact = np.tensordot(wide(x), wide(w), len(into)) + (0 if b is None else wide(b))
    size = np.tensordot(np.abs(wide(x)), np.abs(wide(w)), len(into)) + 1
    np.testing.assert_array_less(np.abs(wide(got) - exact) / size, 1e-6)
    rounded = project(letters, jnp.asarray(x), node, None if b is None else jnp.asarray(b))
    assert rounded.dtype == dtype
    np.testing.assert_array_equal(rounded, np.asarray(got).astype(dtype))
    one = rng.integers(rows)
    alone = project(
        letters,
        jnp.asarray(x[one : one + 1]),
        node,
        None if b is None else jnp.asarray(b),
        jnp.float32,
    )
    np.testing.assert_array_equal(alone[0], got[one])


@pytest.mark.random
def test_dense(isa):
    check_dense()


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "float16")])
def test_kernel_refuses_rows_and_results_that_are_neither_float32_nor_bfloat16(dtypes):
    rows, result = dtypes
    node = pack(spec_of((32,), (16,), np.float32), np.ones((32, 16), np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a kernel is called with other arrays"):
        einsum("TD,DX->TX", jnp.ones((3, 32), rows), node, jnp.dtype(result)).block_until_ready()


def test_matrix_of_eight_byte_elements_is_refused():
    with pytest.raises(TypeError, match="the matrix is of float64"):
        tile(np.ones((32, 16)), 1)


@pytest.mark.parametrize("name", [None, *EVERY, *OF_FLOATS])
@pytest.mark.slow
def test_matrices_of_a_stack(isa, name):
    """One that is named, with a bias or a gate; and each with rows of its own, the last ones zeros:
    to the bit what the matrix gives by itself."""
    rng = np.random.default_rng(4)
    E = 5
    K = 96
    F = 32
    w, x, rows = (made(rng, shape, (K,), np.float32) for shape in ((E, 2, F), (7,), (7, E)))
    w = np.ascontiguousarray(np.moveaxis(w, -1, 1))
    bias, rows[5:] = made(rng, (), (2, F), np.float32), 0
    dense = ArraySpec(w.shape, np.float32, (None,) * 4, inputs=(1,), stacked=True)
    one = spec_of((K,), (2, F), np.float32)
    leaf: Any = w
    alone: list[Any] = [pack(one, matrix) for matrix in w]
    if name is not None:
        nodes, alone = zip(*(rounded(name, one, matrix) for matrix in w), strict=True)
        leaf = Stack(jax.tree.map(lambda *arrays: np.stack(arrays), *nodes))
    stack: Any = pack(dense, leaf, ROWS[(name or "").partition(" of ")[2]])
    pick = jax.jit(lambda stack, e, x: project("TD,DGF->TGF", x, stack.pick(e), bias))
    for e in range(E):
        np.testing.assert_array_equal(pick(stack, e, x), project("TD,DGF->TGF", x, alone[e], bias))
        both = (
            gated("TD,DGF->TGF", jnp.asarray(x), node, "silu") for node in (stack.pick(e), alone[e])
        )
        np.testing.assert_array_equal(*both)
    every = einsum("TED,EDGF->TEGF", jnp.asarray(rows), stack)
    for e in range(E):
        np.testing.assert_array_equal(
            every[:, e], einsum("TD,DGF->TGF", jnp.asarray(rows[:, e]), alone[e])
        )
    for e in (-1, E):
        with pytest.raises((ValueError, RuntimeError), match="the stack has no such matrix"):
            jax.block_until_ready(pick(stack, e, x))


@settings(max_examples=cases(12))
@given(
    rows=st.integers(1, 40), padding=st.integers(0, 9), K=st.sampled_from([32, 96, 320]),
    out=st.sampled_from([(16,), (7,), (2, 24), (500,)]), bias=st.booleans(), seed=st.integers(0, 999),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
)  # fmt: skip
def check_mxfp4(rows, padding, K, out, bias, seed, dtype):
    """As it is decoded: what JAX makes of the codes is exact in bfloat16, scales of 2^-127
    being zero.
    """
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (3, four_bits.count(K), *out), np.uint8)
    scales = rng.integers(110, 130, (3, K // 32, *out)).astype(np.uint8)
    scales[rng.random(scales.shape) < 0.05] = 0
    leaf = Mxfp4(blocks, scales)
    x = made(rng, (rows,), (K,), dtype)
    x[max(rows - padding, 0) :] = 0
    b = made(rng, (), out, ml_dtypes.bfloat16) if bias else None
    dense = ArraySpec((3, K, *out), BFLOAT16, (None,) * (2 + len(out)), stacked=True)
    stack: Any = pack(quant.packed("mxfp4", dense), leaf, np.dtype(dtype).name)
    e = int(rng.integers(3))
    letters = "TD,DXY"[: 4 + len(out)] + "->T" + "XY"[: len(out)]
    given = [None if b is None else jnp.asarray(b), jnp.float32]
    got = project(letters, jnp.asarray(x), stack.pick(e), *given)
    w = wide(decode(jnp.asarray(blocks[e]), jnp.asarray(scales[e])))
    exact = np.tensordot(wide(x), w, 1) + (0 if b is None else wide(b))
    size = (
        np.tensordot(np.abs(wide(x)), np.abs(w), 1) + (0 if b is None else np.abs(wide(b))) + 1e-30
    )
    np.testing.assert_array_less(np.abs(wide(got) - exact) / size, 1e-6)
    one = rng.integers(rows)
    np.testing.assert_array_equal(
        project(letters, jnp.asarray(x[one : one + 1]), stack.pick(e), *given)[0], got[one]
    )


@pytest.mark.random
@pytest.mark.slow
def test_mxfp4(isa):
    check_mxfp4()


def between_bytes(x):
    """Where a value lies half-way between two bytes of its row, and may become either."""
    size = np.abs(wide(x))
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
def check_rounded(name, rows, padding, into, out, bias, dtype, seed):
    rng = np.random.default_rng(seed)
    x = made(rng, (rows,), into, dtype)
    w = made(rng, into, out, dtype)
    x[max(rows - padding, 0) :] = 0
    x[between_bytes(x)] = 0
    spec = spec_of(into, out, dtype)
    node = quant.packed(name, spec).quantize(w)
    letters = ("TD,D", "TNH,NH")[len(into) - 1] + "XY"[: len(out)] + "->T" + "XY"[: len(out)]
    plain = wide(einsum(letters, jnp.asarray(x), node, jnp.float32))
    packed = pack(spec, node, np.dtype(dtype).name)
    got = einsum(letters, jnp.asarray(x), packed, jnp.float32)
    size = np.tensordot(np.abs(wide(x)), np.abs(wide(w)), len(into)).max()
    # XLA's path rounds a weight of groups to bfloat16 before the product with such rows, the
    # kernels do not.
    in_groups = (
        name.startswith(("int4", "nf4", "iq4")) or name.endswith("least") or name[-1].isdigit()
    )
    near = 4e-3 if in_groups and dtype is not np.float32 else 2e-6
    np.testing.assert_allclose(wide(got), plain, atol=size * near)
    exact = np.tensordot(wide(x), wide(w), len(into))
    worst = {
        "int8": 0.02,
        "int4": 0.2,
        "fp8": 0.1,
        "nf4": 0.25,
        "fp4": 0.25,
        "iq4": 0.3,
        "nvfp4": 0.25,
        "mxfp4": 0.3,
        "k4": 0.2,
        "k6": 0.05,
    }[name.split("-")[0]]
    np.testing.assert_allclose(wide(got), exact, atol=worst * size)
    b = jnp.asarray(made(rng, (), out, np.float32)) if bias else None
    one = rng.integers(rows)
    whole = project(letters, jnp.asarray(x), packed, b, jnp.float32)
    np.testing.assert_allclose(whole, got if b is None else got + b, atol=size * 2e-6)
    alone = project(letters, jnp.asarray(x[one : one + 1]), packed, b, jnp.float32)
    np.testing.assert_array_equal(alone[0], whole[one])


@pytest.mark.random
@pytest.mark.slow
def test_rounded(isa):
    check_rounded()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (*FORMATS, *LOW_BITS)
    ],
)
def test_float32_rows_keep_all_their_bits(name):
    """Products of float32 rows are float64's with the decoded weight, by XLA and by the kernels; a
    row's bits are the same alone. Formats that round rows to codes do so here too."""
    rng = np.random.default_rng(5)
    x = made(rng, (70,), (512,), np.float32)
    w = made(rng, (512,), (100,), np.float32)
    node, packed = rounded(f"{name} of floats", spec_of((512,), (100,), np.float32), w)
    if node.rounds is not None:
        # which codes hold exactly
        x = np.where(rng.random(x.shape) < 0.5, 1.0, -1.0).astype(np.float32)
    decoded = wide(einsum("TD,DF->TF", jnp.eye(512), node, implementation="xla"))
    np.testing.assert_allclose(decoded, w, atol=np.abs(w).max() / 2)
    exact = wide(x) @ decoded
    size = np.abs(wide(x)) @ np.abs(decoded)
    for weight in (node, packed):
        got = np.asarray(einsum("TD,DF->TF", jnp.asarray(x), weight))
        assert (np.abs(got - exact) < 1e-6 * size).all()
    for rows in (1, 7, 64):
        np.testing.assert_array_equal(
            einsum("TD,DF->TF", jnp.asarray(x[-rows:]), packed), got[-rows:]
        )


def in_groups(x_TK, group):
    return np.pad(wide(x_TK), ((0, 0), (0, -x_TK.shape[1] % group))).reshape(len(x_TK), -1, group)


def in_bytes(x_TK, group):
    """Rows as they meet codes of four bits: the largest of each group becomes 127."""
    groups = in_groups(x_TK, group)
    scale = np.abs(groups).max(2, keepdims=True) / 127
    bytes_TGK = np.rint(np.divide(groups, scale, out=np.zeros_like(groups), where=scale > 0))
    return (bytes_TGK * scale).reshape(len(x_TK), -1)[:, : x_TK.shape[1]]


@settings(max_examples=cases(20))
@given(
    name=st.sampled_from(IN_BYTES), rows=st.integers(1, 40), padding=st.integers(0, 9),
    K=st.sampled_from([32, 64, 322, 1024]), out=st.sampled_from([(16,), (7,), (3, 24), (500,)]), bias=st.booleans(),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]), seed=st.integers(0, 999),
)  # fmt: skip
def check_rows_of_bytes(name, rows, padding, K, out, bias, dtype, seed):
    """To the last bits what float64 makes of the rounded rows and the decoded weight."""
    rng = np.random.default_rng(seed)
    x = made(rng, (rows,), (K,), dtype)
    w = made(rng, (K,), out, dtype)
    x *= 10 ** rng.uniform(-3, 3, (rows, 1)).astype(dtype)
    x[max(rows - padding, 0) :] = 0
    x[:, rng.integers(K)] *= 0
    node, packed = rounded(f"{name} of bytes", spec_of((K,), out, dtype), w)
    assert packed.int8_activations
    code = node.dense() if name.startswith("int4") and "least" not in name else node.dense(K)
    w_KO = wide(code).reshape(K, -1)
    between = np.stack([between_bytes(row).reshape(-1)[:K] for row in in_groups(x, node.group)])
    x[between] = 0
    bytes_TK = in_bytes(x, node.group)
    b = made(rng, (), out, np.float32) if bias else None
    letters = "TD,DXY"[: 4 + len(out)] + "->T" + "XY"[: len(out)]
    given = None if b is None else jnp.asarray(b), jnp.float32
    got = project(letters, jnp.asarray(x), packed, *given)
    exact = (bytes_TK @ w_KO).reshape(rows, *out) + (0 if b is None else wide(b))
    above = (
        16 * wide(np.abs(node.scale)).max()
        if node.scale.dtype != np.int8
        else np.abs(w_KO).max() * 128
    )
    size = (np.abs(bytes_TK) @ (np.abs(w_KO) + above)).reshape(rows, *out) + (
        0 if b is None else np.abs(wide(b))
    )
    np.testing.assert_array_less(np.abs(wide(got) - exact), 2e-6 * size + 1e-30)
    one = rng.integers(rows)
    alone = project(letters, jnp.asarray(x[one : one + 1]), packed, *given)
    np.testing.assert_array_equal(alone[0], got[one])


@pytest.mark.random
def test_rows_of_bytes(isa):
    check_rows_of_bytes()


@settings(max_examples=cases(12))
@given(
    name=st.sampled_from([name for name in FORMATS if name[0] == "k"] + ["k6-16-least", "iq4-levels"]),
    rows=st.integers(1, 40), K=st.sampled_from([256, 320, 1024]), out=st.sampled_from([(16,), (3, 24), (500,)]),
    seed=st.integers(0, 999),
)  # fmt: skip
def check_levels(name, rows, K, out, seed):
    """Scales of any sign, of blocks that differ much, some of them zero or so small that float16
    has few bits.
    """
    rng = np.random.default_rng(seed)
    spec = spec_of((K,), out, np.float32)
    node = random_arrays(quant.packed(name, spec), seed)

    def upper():
        some = 2.0 ** rng.integers(-24, -8, (-(-K // 256), *out)) * rng.uniform(
            0.5, 1, (-(-K // 256), *out)
        )
        return np.where(rng.random(some.shape) < 0.1, 0, some).astype(np.float16)

    parts = {
        "scale": rng.integers(-128, 128, node.scale.shape).astype(np.int8),
        "super_scale": upper(),
    }
    if node.least is not None:
        parts |= {
            "least": rng.integers(-128, 128, node.least.shape).astype(np.int8),
            "super_least": upper(),
        }
    node = jax.tree.map(np.asarray, node.replace(**parts))
    x = made(rng, (rows,), (K,), ml_dtypes.bfloat16)
    scale, least = (
        None
        if part is None
        else wide(part).repeat(node.group, 0)[:K] * wide(above).repeat(256, 0)[:K]
        for part, above in ((node.scale, node.super_scale), (node.least, node.super_least))
    )
    codes = (four_bits.split(node.codes, K) if node.packed else node.codes).reshape(K, *out)
    w = CODES[node.code].numbers.astype(np.float64)[codes] * scale - (0 if least is None else least)
    np.testing.assert_array_equal(np.asarray(node.dense(K)).reshape(w.shape), w.astype(np.float32))
    packed: Any = pack(spec, node)
    got = einsum(
        "TD,DXY"[: 4 + len(out)] + "->T" + "XY"[: len(out)], jnp.asarray(x), packed, jnp.float32
    )
    size = np.tensordot(np.abs(wide(x)), np.abs(w) + 128 * np.abs(scale), 1) + 1e-30
    np.testing.assert_array_less(np.abs(wide(got) - np.tensordot(wide(x), w, 1)) / size, 1e-6)
    one = rng.integers(rows)
    alone = einsum(
        "TD,DXY"[: 4 + len(out)] + "->T" + "XY"[: len(out)],
        jnp.asarray(x[one : one + 1]),
        packed,
        jnp.float32,
    )
    np.testing.assert_array_equal(alone[0], got[one])
    if len(out) == 1:
        some = rng.integers(0, *out, 5)
        np.testing.assert_array_equal(packed[jnp.asarray(some)], w.astype(np.float32)[:, some].T)
        np.testing.assert_array_equal(node[some], w.astype(np.float32)[:, some].T)


@pytest.mark.random
@pytest.mark.slow
def test_levels(isa):
    check_levels()


@pytest.mark.parametrize("name", [None, *EVERY, *OF_FLOATS])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.slow
def test_gate_and_up_in_one_pass(isa, name, activation):
    rng = np.random.default_rng(1)
    x = made(rng, (9,), (64,), np.float32)
    w = made(rng, (64,), (2, 48), np.float32)
    spec = spec_of((64,), (2, 48), np.float32)
    packed = pack(spec, w) if name is None else rounded(name, spec, w)[1]
    got = gated("TD,DGF->TGF", jnp.asarray(x), packed, activation)
    np.testing.assert_allclose(
        got, glu(einsum("TD,DGF->TGF", jnp.asarray(x), packed), activation), atol=2e-6
    )


@pytest.mark.parametrize("name", [None, "int8", "int8-weights", "fp8", "fp8-weights"])
def test_head_that_is_an_embedding_too(isa, name):
    rng = np.random.default_rng(2)
    w = made(rng, (50,), (24,), np.float32)
    x = made(rng, (3,), (24,), np.float32)
    spec = spec_of((24,), (50,), np.float32, head=True)
    node = w if name is None else quant.packed(name, spec).quantize(w.T)
    packed: Any = pack(spec, node)
    tokens = jnp.array([0, 49, 17, 17])
    near = 1e-6 if name is None else 0.05
    np.testing.assert_allclose(packed[tokens], w[tokens], atol=near)
    np.testing.assert_allclose(einsum("RD,VD->RV", jnp.asarray(x), packed), x @ w.T, atol=10 * near)
    if name is not None:
        np.testing.assert_array_equal(packed[tokens], node[tokens])


@pytest.mark.parametrize("name", [None, *EVERY, *OF_FLOATS])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.slow
def test_a_row_that_is_not_finite_spoils_no_other(isa, name, bad):
    rng = np.random.default_rng(3)
    x = made(rng, (8,), (64,), np.float32)
    w = made(rng, (64,), (40,), np.float32)
    spec = spec_of((64,), (40,), np.float32)
    packed = pack(spec, w) if name is None else rounded(name, spec, w)[1]
    before = np.asarray(einsum("TD,DF->TF", jnp.asarray(x), packed))
    x[5, 7] = bad
    after = np.asarray(einsum("TD,DF->TF", jnp.asarray(x), packed))
    assert not np.isfinite(after[5]).any()
    np.testing.assert_array_equal(np.delete(after, 5, 0), np.delete(before, 5, 0))


def test_zeros_stay_zeros(isa):
    for name in EVERY:
        spec = spec_of((32,), (16,), np.float32)
        packed = rounded(name, spec, np.zeros((32, 16), np.float32))[1]
        assert not np.asarray(einsum("TD,DF->TF", jnp.ones((2, 32)), packed)).any()
        assert not np.asarray(einsum("TD,DF->TF", jnp.zeros((2, 32)), packed)).any()
