"""What adapters add to products: beside float64, alone and in company."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops import native
from quire.ops.adapter import IMPLEMENTATIONS, Adapted, AdapterRows
from quire.ops.implementations import NoImplementation
from quire.tests.support.cases import cases

WAYS = [name for name in IMPLEMENTATIONS if name != "native" or native.serves()]


def draw(rng, dtype, *shape, scale: float = 1.0):
    return jnp.asarray(rng.standard_normal(shape) * scale, dtype)


def drawn(rng, dtype: str, slots: int, stack: int | None = None):
    """(a weight's adapters, how many inputs they have): of one to three matrices, with any numbers
    of outputs.
    """
    D = rng.integers(1, 90)
    R = rng.integers(1, 40)
    widths = rng.integers(1, 300, rng.integers(1, 4))
    ends = np.cumsum(widths)
    parts = tuple((int(end - width), int(end)) for end, width in zip(ends, widths, strict=True))
    lead = (slots,) if stack is None else (slots, stack)
    down = draw(rng, dtype, *lead, D, R * len(parts), scale=D**-0.5)
    up = draw(rng, dtype, *lead, R, ends[-1])
    return Adapted(
        None, down, up, draw(rng, "float32", *lead, ends[-1], scale=0.1), output_ranges=parts
    ), int(D)


def numbers(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def slowly(weight: Adapted, slots, x, out):
    """A loop over rows; the one matrix of a stack that is meant is taken before."""
    found = numbers(out).copy()
    rank = weight.up.shape[1]
    for t, slot in enumerate(slots):
        if slot < len(weight.down):
            inner = numbers(x)[t] @ numbers(weight.down)[slot]
            for part, (first, last) in enumerate(weight.output_ranges):
                up = numbers(weight.up)[slot, :, first:last]
                found[t, first:last] += inner[part * rank :][:rank] @ up
            found[t] += numbers(weight.dora_gain)[slot] * numbers(out)[t]
    return found


def adapted(weight: Adapted, slots, x, out, way: str):
    rows = AdapterRows.of(jnp.asarray(slots, jnp.int32), len(weight.down))
    return jax.jit(lambda weight, x, out: weight.adapt(x, out, way))(
        weight.replace(adapter_rows=rows), x, out
    )


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_against_float64(way, dtype):
    rng = np.random.default_rng(1)
    for _ in range(cases(30, least=3)):
        slots = int(rng.integers(1, 6))
        T = int(rng.integers(1, 50))
        weight, D = drawn(rng, dtype, slots)
        whose = rng.integers(0, slots + 1, T)
        x = draw(rng, dtype, T, D)
        out = draw(rng, "float32", T, weight.up.shape[2])
        found = adapted(weight, whose, x, out, way)
        np.testing.assert_allclose(
            numbers(found), slowly(weight, whose, x, out), rtol=2e-5, atol=2e-5
        )


@pytest.mark.parametrize("way", WAYS)
def test_the_one_that_is_meant_of_a_stack(way):
    rng = np.random.default_rng(2)
    weight, D = drawn(rng, "bfloat16", slots=3, stack=4)
    whose = rng.integers(0, 4, 20)
    x = draw(rng, "bfloat16", 20, D)
    out = draw(rng, "float32", 20, weight.up.shape[3])
    one = Adapted(
        None,
        weight.down[:, 2],
        weight.up[:, 2],
        weight.dora_gain[:, 2],
        output_ranges=weight.output_ranges,
    )
    found = adapted(weight.replace(matrix=jnp.int32(2)), whose, x, out, way)
    assert np.array_equal(found, adapted(one, whose, x, out, way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_the_same_bits_in_any_company_and_in_any_slot(way):
    rng = np.random.default_rng(3)
    for _ in range(cases(20, least=3)):
        weight, D = drawn(rng, "bfloat16", slots=5)
        T = int(rng.integers(2, 40))
        whose = rng.integers(0, 6, T)
        x = draw(rng, "bfloat16", T, D)
        out = draw(rng, "float32", T, weight.up.shape[2])
        whole = adapted(weight, whose, x, out, way)
        t = int(rng.integers(T))
        order = rng.permutation(5)
        moved = weight.replace(
            down=weight.down[order], up=weight.up[order], dora_gain=weight.dora_gain[order]
        )
        there = np.append(np.argsort(order), 5)[whose[t : t + 1]]
        alone = adapted(moved, there, x[t : t + 1], out[t : t + 1], way)
        assert np.array_equal(alone[0], whole[t])


@pytest.mark.skipif(not native.serves(), reason="no compiler")
def test_a_type_that_the_kernel_does_not_know_is_left_to_xla():
    rng = np.random.default_rng(4)
    weight, D = drawn(rng, "bfloat16", slots=2)
    x = draw(rng, "float16", 3, D)
    out = draw(rng, "float32", 3, weight.up.shape[2])
    with pytest.raises(
        NoImplementation,
        match="bfloat16 or float32, and sums float32, not bfloat16, bfloat16, float16",
    ):
        adapted(weight, [0, 1, 2], x, out, "native")
    rows = AdapterRows.of(jnp.array([0, 1, 2], jnp.int32), 2)
    assert weight.replace(adapter_rows=rows).adapt(x, out).shape == out.shape
