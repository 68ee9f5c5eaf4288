"""LoRA and DoRA adapters of products against float64; batch invariance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops import native
from quire.ops.adapter import IMPLEMENTATIONS, Adapted, AdapterRows
from quire.ops.implementations import NoImplementation
from quire.tests.support.cases import cases

AVAILABLE_IMPLEMENTATIONS = [
    name for name in IMPLEMENTATIONS if name != "native" or native.serves()
]


def draw(rng, dtype, *shape, scale: float = 1.0):
    return jnp.asarray(rng.standard_normal(shape) * scale, dtype)


def random_adapters(rng, dtype: str, slots: int, stack: int | None = None):
    """(adapters of a weight that fuses one to three matrices, its number of inputs)."""
    D = rng.integers(1, 90)
    R = rng.integers(1, 40)
    widths = rng.integers(1, 300, rng.integers(1, 4))
    bounds = np.cumsum(widths)
    ranges = tuple((int(end - width), int(end)) for end, width in zip(bounds, widths, strict=True))
    leading_axes = (slots,) if stack is None else (slots, stack)
    down = draw(rng, dtype, *leading_axes, D, R * len(ranges), scale=D**-0.5)
    up = draw(rng, dtype, *leading_axes, R, bounds[-1])
    return Adapted(
        None,
        down,
        up,
        draw(rng, "float32", *leading_axes, bounds[-1], scale=0.1),
        output_ranges=ranges,
    ), int(D)


def as_float64(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def reference_adapted(weight: Adapted, slots, x, out):
    """Adapted outputs row by row, for a single weight (not a stack)."""
    expected = as_float64(out).copy()
    rank = weight.up.shape[1]
    for t, slot in enumerate(slots):
        if slot < len(weight.down):
            inner = as_float64(x)[t] @ as_float64(weight.down)[slot]
            for index, (first, last) in enumerate(weight.output_ranges):
                up = as_float64(weight.up)[slot, :, first:last]
                expected[t, first:last] += inner[index * rank :][:rank] @ up
            expected[t] += as_float64(weight.dora_gain)[slot] * as_float64(out)[t]
    return expected


def run_adapted(weight: Adapted, slots, x, out, implementation: str):
    rows = AdapterRows.of(jnp.asarray(slots, jnp.int32), len(weight.down))
    return jax.jit(lambda weight, x, out: weight.adapt(x, out, implementation))(
        weight.replace(adapter_rows=rows), x, out
    )


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", AVAILABLE_IMPLEMENTATIONS)
@pytest.mark.slow
def test_adapted_outputs_match_float64(implementation, dtype):
    rng = np.random.default_rng(1)
    for _ in range(cases(30, least=3)):
        slots = int(rng.integers(1, 6))
        T = int(rng.integers(1, 50))
        weight, D = random_adapters(rng, dtype, slots)
        adapter_slots = rng.integers(0, slots + 1, T)
        x = draw(rng, dtype, T, D)
        out = draw(rng, "float32", T, weight.up.shape[2])
        actual = run_adapted(weight, adapter_slots, x, out, implementation)
        np.testing.assert_allclose(
            as_float64(actual),
            reference_adapted(weight, adapter_slots, x, out),
            rtol=2e-5,
            atol=2e-5,
        )


@pytest.mark.parametrize("implementation", AVAILABLE_IMPLEMENTATIONS)
def test_selected_matrix_of_a_stack_is_adapted(implementation):
    rng = np.random.default_rng(2)
    weight, D = random_adapters(rng, "bfloat16", slots=3, stack=4)
    adapter_slots = rng.integers(0, 4, 20)
    x = draw(rng, "bfloat16", 20, D)
    out = draw(rng, "float32", 20, weight.up.shape[3])
    single = Adapted(
        None,
        weight.down[:, 2],
        weight.up[:, 2],
        weight.dora_gain[:, 2],
        output_ranges=weight.output_ranges,
    )
    actual = run_adapted(weight.replace(matrix=jnp.int32(2)), adapter_slots, x, out, implementation)
    assert np.array_equal(actual, run_adapted(single, adapter_slots, x, out, implementation))


@pytest.mark.parametrize("implementation", AVAILABLE_IMPLEMENTATIONS)
@pytest.mark.slow
def test_adapters_are_batch_and_slot_invariant(implementation):
    rng = np.random.default_rng(3)
    for _ in range(cases(20, least=3)):
        weight, D = random_adapters(rng, "bfloat16", slots=5)
        T = int(rng.integers(2, 40))
        adapter_slots = rng.integers(0, 6, T)
        x = draw(rng, "bfloat16", T, D)
        out = draw(rng, "float32", T, weight.up.shape[2])
        expected = run_adapted(weight, adapter_slots, x, out, implementation)
        t = int(rng.integers(T))
        order = rng.permutation(5)
        reordered = weight.replace(
            down=weight.down[order], up=weight.up[order], dora_gain=weight.dora_gain[order]
        )
        new_slot = np.append(np.argsort(order), 5)[adapter_slots[t : t + 1]]
        alone = run_adapted(reordered, new_slot, x[t : t + 1], out[t : t + 1], implementation)
        assert np.array_equal(alone[0], expected[t])


@pytest.mark.skipif(not native.serves(), reason="no compiler")
def test_unsupported_dtype_runs_in_xla():
    rng = np.random.default_rng(4)
    weight, D = random_adapters(rng, "bfloat16", slots=2)
    x = draw(rng, "float16", 3, D)
    out = draw(rng, "float32", 3, weight.up.shape[2])
    with pytest.raises(
        NoImplementation,
        match="bfloat16 or float32, and sums float32, not bfloat16, bfloat16, float16",
    ):
        run_adapted(weight, [0, 1, 2], x, out, "native")
    rows = AdapterRows.of(jnp.array([0, 1, 2], jnp.int32), 2)
    assert weight.replace(adapter_rows=rows).adapt(x, out).shape == out.shape
