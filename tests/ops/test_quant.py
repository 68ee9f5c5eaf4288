"""Formats that weights are rounded to: how near they stay, how small they are, and what a wrong
name is told.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quire.ops import quant
from quire.ops.linear import einsum
from quire.ops.quant import four_bits
from quire.ops.quant.grouped import CODES, nearest
from quire.sharding.spec import ArraySpec, nbytes, random_arrays
from quire.tests.support.dense_values import dequantize

FORMATS = {
    "int8": 1.0,
    "int8-weights": 1.0,
    "fp8": 1.0,
    "fp8-weights": 1.0,
    "fp8-weights-128": 1.0 + 4 / 128,
    "int8-weights-64": 1.0 + 4 / 64,
    "nf4": 0.5 + 4 / 64,
    "iq4": 0.5 + 4 / 32,
    "fp4": 0.5 + 4 / 64,
    "nvfp4": 0.5 + 4 / 16,
    "mxfp4": 0.5 + 4 / 32,
    "int8-weights-32-least": 1.0 + 8 / 32,
    "int4-32-least": 0.5 + 8 / 32,
    "iq4-levels": 0.5 + 1 / 32 + 2 / 256,
    "k4-32-least": 0.5 + 2 / 32 + 4 / 256,
    "k4-16-least": 0.5 + 2 / 16 + 4 / 256,
    "k4-16": 0.5 + 1 / 16 + 2 / 256,
    "k6-16": 1.0 + 1 / 16 + 2 / 256,
    "k6-32-least": 1.0 + 2 / 32 + 4 / 256,
    "int4": 0.5 + 2 / 32,
    "int4-64": 0.5 + 2 / 64,
    "int4-128-zero": 0.5 + 3 / 128,
}


def dense_spec(into=(256,), out=(2, 64)):
    inputs = tuple(range(len(into)))
    return ArraySpec(
        (*into, *out),
        jnp.bfloat16,
        (None,) * len(into + out),
        fan_in=int(np.prod(into)),
        inputs=inputs,
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.slow
def test_specs_say_what_is_made(name):
    spec = quant.packed(name, dense_spec())
    weight = np.random.default_rng(0).standard_normal((256, 2, 64)).astype(np.float32)
    node = spec.quantize(weight)
    for one, array in zip(jax.tree.leaves(spec), jax.tree.leaves(node), strict=True):
        assert (one.shape, one.dtype) == (array.shape, array.dtype)
    extra = 4 * 128 if name in ("int8", "int8-weights", "fp8", "fp8-weights") else 0
    assert nbytes(spec) == pytest.approx(FORMATS[name] * weight.size + extra)
    values = dequantize(random_arrays(spec, 1))
    # random weights have the size that dense ones would have
    assert 0.5 < values.std() * 256**0.5 < 2


@pytest.mark.parametrize("name", FORMATS)
def test_each_weight_is_within_half_a_step(name):
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((256, 2, 64)) * rng.uniform(0.01, 10, (1, 2, 64))
    error = np.abs(dequantize(quant.packed(name, dense_spec()).quantize(weight)) - weight).reshape(
        256, -1
    )
    sizes = {
        "int8-weights-64": 64,
        "int8-weights-32-least": 32,
        "int4-32-least": 32,
        "fp8-weights-128": 128,
    }
    groups = {"nf4": 64, "fp4": 64, "iq4": 32, "iq4-levels": 32, "nvfp4": 16, "mxfp4": 32}
    size = int(name.split("-")[1]) if name[0] == "k" else sizes.get(name, groups.get(name, 256))
    flat = np.abs(weight).reshape(256, -1)
    most = flat.reshape(-1, size, 128).max(1).repeat(size, 0)  # of those that share a scale
    # the widest between neighbours
    gaps = {"nf4": 0.304, "fp4": 4 / 12, "iq4": 25 / 113, "nvfp4": 2 / 6}
    gaps |= {"iq4-levels": gaps["iq4"], "mxfp4": 2 / 3.5}  # the largest of MXFP4 is 3.5 to 7
    if name.endswith("least"):
        step = 2 * most / (255 if name.startswith("int8") else 63 if name.startswith("k6") else 15)
    elif name[0] == "k":
        step = most / (31 if name.startswith("k6") else 7)
    elif name.startswith("int8"):
        step = most / 127
    elif name.startswith("fp8"):  # three bits of mantissa, down to 2^-6 and fewer below
        step = np.maximum(flat / 8, most / 448 / 512)
    elif name in gaps:
        step = most * gaps[name]
    else:
        group = int(name.split("-")[1]) if "-" in name else 32
        grouped = weight.reshape(-1, group, 128)
        spread = grouped.max(1) - grouped.min(1) if "zero" in name else np.abs(grouped).max(1) * 2
        # With zeros the zero itself is rounded; without, the value opposite the largest may be one
        # step too far out.
        step = (spread / 15 * 2.2).repeat(group, 0)
    assert (error <= step * 0.51 + 0.01 * np.abs(weight).reshape(256, -1)).all()


@pytest.mark.parametrize("name", ["int4", "int4-128"])
def test_inputs_that_do_not_fill_the_last_group(name):
    weight = np.random.default_rng(2).standard_normal((6, 13, 5)).astype(np.float32)
    node = quant.packed(name, dense_spec((6, 13), (5,))).quantize(weight)
    x = np.random.default_rng(3).standard_normal((3, 6, 13)).astype(np.float32)
    got = einsum("TNH,NHD->TD", jnp.asarray(x), node, jnp.float32)
    np.testing.assert_allclose(got, np.einsum("tnh,nhd->td", x, weight), atol=2.5)


@pytest.mark.parametrize("inputs", [2, 6, 126, 128, 130, 192, 256, 2880])
def test_codes_of_four_bits_two_a_byte(inputs):
    """Each byte has two inputs of one block, half a block apart, and the last block ends with the
    last input.
    """
    codes = np.random.default_rng(inputs).integers(0, 16, (inputs, 3), np.uint8)
    data = four_bits.join(codes)
    side = min(inputs, 128)
    assert (
        data.shape == (four_bits.count(inputs), 3) and len(data) == -(-inputs // side) * side // 2
    )
    for place, both in enumerate(data):
        block, at = divmod(place, side // 2)
        k = min(block * side, inputs - side) + at
        assert np.array_equal(both & 15, codes[k]) and np.array_equal(
            both >> 4, codes[k + side // 2]
        )
    for array in (data, jnp.asarray(data)):
        assert np.array_equal(four_bits.split(array, inputs), codes)


@pytest.mark.parametrize(
    "name",
    [
        "int5",
        "int8-32",
        "int4-48",
        "int3-least",
        "int4-32-64",
        "int4-one",
        "",
        "iq4",
        "int4-",
        "fp8-32",
    ],
)
def test_a_wrong_name_is_told_what_would_be_right(name):
    with pytest.raises(ValueError, match="int8|int4|int3|weights") as error:
        quant.check(name)
    assert repr(name) in str(error.value) or repr(name.partition("-")[2]) in str(error.value)


@pytest.mark.parametrize(
    "code, dtype", [("float8", ml_dtypes.float8_e4m3fn), ("float4", ml_dtypes.float4_e2m1fn)]
)
def test_codes_are_those_that_a_cast_gives(code, dtype):
    """By value, since both zeros mean one; and none is a code that stands for no number."""
    numbers = CODES[code].numbers
    inside = np.linspace(-numbers.max(), numbers.max(), 20001, dtype=np.float32)
    middles = (lambda known: (known[1:] + known[:-1]) / 2)(np.unique(numbers))
    values = np.concatenate([inside, numbers, middles, np.float32([1e-9, -1e-9, 1e-30, -1e-30])])
    found = nearest(numbers, values)
    np.testing.assert_array_equal(
        found.view(dtype).astype(np.float32), values.astype(dtype).astype(np.float32)
    )
