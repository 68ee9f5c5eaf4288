"""Weight quantisation formats: rounding errors, sizes, packing and names."""

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
def test_specs_have_the_shapes_and_dtypes_of_quantized_arrays(name):
    spec = quant.packed(name, dense_spec())
    weight = np.random.default_rng(0).standard_normal((256, 2, 64)).astype(np.float32)
    node = spec.quantize(weight)
    for leaf_spec, array in zip(jax.tree.leaves(spec), jax.tree.leaves(node), strict=True):
        assert (leaf_spec.shape, leaf_spec.dtype) == (array.shape, array.dtype)
    extra = 4 * 128 if name in ("int8", "int8-weights", "fp8", "fp8-weights") else 0
    assert nbytes(spec) == pytest.approx(FORMATS[name] * weight.size + extra)
    values = dequantize(random_arrays(spec, 1))
    # random weights have the size that dense ones would have
    assert 0.5 < values.std() * 256**0.5 < 2


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_error_is_at_most_half_a_step(name):
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
    group_max = (
        flat.reshape(-1, size, 128).max(1).repeat(size, 0)
    )  # maximum of the values that share a scale
    # the widest step between neighbouring codebook values
    gaps = {"nf4": 0.304, "fp4": 4 / 12, "iq4": 25 / 113, "nvfp4": 2 / 6}
    gaps |= {"iq4-levels": gaps["iq4"], "mxfp4": 2 / 3.5}  # MXFP4 scales the maximum to 3.5 to 7
    if name.endswith("least"):
        step = (
            2
            * group_max
            / (255 if name.startswith("int8") else 63 if name.startswith("k6") else 15)
        )
    elif name[0] == "k":
        step = group_max / (31 if name.startswith("k6") else 7)
    elif name.startswith("int8"):
        step = group_max / 127
    elif name.startswith("fp8"):  # three mantissa bits down to 2^-6, subnormals below
        step = np.maximum(flat / 8, group_max / 448 / 512)
    elif name in gaps:
        step = group_max * gaps[name]
    else:
        group = int(name.split("-")[1]) if "-" in name else 32
        grouped = weight.reshape(-1, group, 128)
        value_range = (
            grouped.max(1) - grouped.min(1) if "zero" in name else np.abs(grouped).max(1) * 2
        )
        # Zero points are rounded; without them, the value opposite the maximum may be clipped.
        step = (value_range / 15 * 2.2).repeat(group, 0)
    assert (error <= step * 0.51 + 0.01 * np.abs(weight).reshape(256, -1)).all()


@pytest.mark.parametrize("name", ["int4", "int4-128"])
def test_last_group_may_be_partial(name):
    weight = np.random.default_rng(2).standard_normal((6, 13, 5)).astype(np.float32)
    node = quant.packed(name, dense_spec((6, 13), (5,))).quantize(weight)
    x = np.random.default_rng(3).standard_normal((3, 6, 13)).astype(np.float32)
    outputs = einsum("TNH,NHD->TD", jnp.asarray(x), node, jnp.float32)
    np.testing.assert_allclose(outputs, np.einsum("tnh,nhd->td", x, weight), atol=2.5)


@pytest.mark.parametrize("inputs", [2, 6, 126, 128, 130, 192, 256, 2880])
def test_4_bit_codes_are_packed_half_a_block_apart(inputs):
    """Each byte holds two inputs of one block; the last block ends with the last input."""
    codes = np.random.default_rng(inputs).integers(0, 16, (inputs, 3), np.uint8)
    data = four_bits.join(codes)
    side = min(inputs, 128)
    assert (
        data.shape == (four_bits.count(inputs), 3) and len(data) == -(-inputs // side) * side // 2
    )
    for index, byte in enumerate(data):
        block, offset = divmod(index, side // 2)
        k = min(block * side, inputs - side) + offset
        assert np.array_equal(byte & 15, codes[k]) and np.array_equal(
            byte >> 4, codes[k + side // 2]
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
def test_error_lists_the_valid_format_names(name):
    with pytest.raises(ValueError, match="int8|int4|int3|weights") as error:
        quant.check(name)
    assert repr(name) in str(error.value) or repr(name.partition("-")[2]) in str(error.value)


@pytest.mark.parametrize(
    "code, dtype", [("float8", ml_dtypes.float8_e4m3fn), ("float4", ml_dtypes.float4_e2m1fn)]
)
def test_float_codes_match_a_cast(code, dtype):
    """Compared by value, as -0 equals 0; no code is NaN."""
    numbers = CODES[code].numbers
    inside = np.linspace(-numbers.max(), numbers.max(), 20001, dtype=np.float32)
    middles = (lambda sorted_values: (sorted_values[1:] + sorted_values[:-1]) / 2)(
        np.unique(numbers)
    )
    values = np.concatenate([inside, numbers, middles, np.float32([1e-9, -1e-9, 1e-30, -1e-30])])
    codes = nearest(numbers, values)
    np.testing.assert_array_equal(
        codes.view(dtype).astype(np.float32), values.astype(dtype).astype(np.float32)
    )
