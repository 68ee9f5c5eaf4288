"""MXFP4 against a decoder of the bits of E2M1 floats."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.model.checkpoint import loader
from quire.ops import native
from quire.ops.linear.cpu import PackedStack
from quire.ops.quant import packed
from quire.ops.quant.mxfp4 import Mxfp4, decode, tensors
from quire.sharding.spec import ArraySpec, nbytes, random_arrays
from quire.tests.support import uncached as dense
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden


def e2m1(code: int) -> float:
    """One sign bit, two of exponent with a bias of 1, one of mantissa; exponent 0 is subnormal."""
    sign = code >> 3
    exponent = (code >> 1) & 3
    mantissa = code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def reference_decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode bytes (see `four_bits.py`) and [D / 32, F] scales value by value in float64."""
    D = 32 * len(scales)
    F = scales.shape[1]
    side = min(D, 128)
    out = np.zeros((D, F))
    for d in range(D):
        half, offset = divmod(d - min(d // side * side, D - side), side // 2)
        for f in range(F):
            code = int(blocks[d // side * (side // 2) + offset, f]) >> 4 * half & 15
            out[d, f] = e2m1(code) * 2.0 ** (int(scales[d // 32, f]) - 127)
    return out


def test_all_sixteen_codes():
    assert [e2m1(code) for code in range(8)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    # each code once in the low nibbles; the high nibbles are zero
    blocks = np.arange(16, dtype=np.uint8)[:, None]
    values = decode(jnp.asarray(blocks), jnp.full((1, 1), 127, jnp.uint8))
    assert values.shape == (32, 1)
    assert np.asarray(values, np.float32)[:16, 0].tolist() == [e2m1(code) for code in range(16)]
    assert not np.asarray(values, np.float32)[16:].any()


@pytest.mark.parametrize(("D", "half"), [(32, 16), (96, 48), (128, 64), (160, 128), (320, 192)])
def test_decode_matches_the_reference(D, half):
    rng = np.random.default_rng(D)
    blocks = rng.integers(0, 256, (5, half, 7), np.uint8)
    # scales whose values are normal in float32
    scales = rng.integers(3, 252, (5, D // 32, 7), np.uint8)
    node = Mxfp4(jnp.asarray(blocks), jnp.asarray(scales))
    take = jax.jit(lambda node, e: node[e])
    for e in range(5):
        dense = take(node, e)
        assert (dense.dtype, dense.shape) == (jnp.bfloat16, (D, 7))
        np.testing.assert_array_equal(
            np.asarray(dense, np.float64), reference_decode(blocks[e], scales[e])
        )


def test_decode_of_stacked_gate_and_up():
    """Gate and up are the axis after the inputs."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (1, 16, 2, 5), np.uint8)
    scales = rng.integers(120, 130, (1, 1, 2, 5), np.uint8)
    values = np.asarray(Mxfp4(jnp.asarray(blocks), jnp.asarray(scales))[0], np.float32)
    for g in range(2):
        np.testing.assert_array_equal(
            values[:, g], reference_decode(blocks[0, :, g], scales[0, :, g])
        )


@pytest.mark.parametrize(("into", "out"), [(64, (5,)), (128, (2, 3)), (320, (2, 3))])
@pytest.mark.slow
def test_checkpoint_blocks_are_converted(into, out):
    """Checkpoints pack neighbouring inputs into a byte and interleave gate and up."""
    rng = np.random.default_rng(0)
    E = 2
    rows = int(np.prod(out))
    blocks = rng.integers(0, 256, (E, rows, into // 32, 16), np.uint8)
    scales = rng.integers(120, 130, (E, rows, into // 32), np.uint8)
    dense = ArraySpec((E, into, *out), None, (None,) * (2 + len(out)), stacked=True)
    stored = tensors(E, into, out)
    spec = packed("mxfp4", dense)
    node = Mxfp4(jnp.asarray(stored.nibbles.turn(blocks)), jnp.asarray(stored.scales.turn(scales)))
    assert node.nibbles.shape == spec.nibbles.shape and node.scales.shape == spec.scales.shape
    for e in range(E):
        values = np.asarray(node[e], np.float32).reshape(into, *out)
        for k in range(into):
            for row in range(rows):
                code = int(blocks[e, row, k // 32, k % 32 // 2]) >> 4 * (k % 2) & 15
                position = divmod(row, 2)[::-1] if len(out) == 2 else (row,)
                assert values[k, *position] == e2m1(code) * 2.0 ** (
                    int(scales[e, row, k // 32]) - 127
                )


def test_kernel_logits_are_as_close_to_float32_as_xla(tmp_path):
    """In float32 they are equal up to summation order, in bfloat16 up to the activations' rounding."""
    if not native.serves():
        pytest.skip("no compiler")
    golden = Golden(next(variant for variant in VARIANTS if variant.name == "gpt-oss"), tmp_path)
    prompt = jnp.array([golden.prompts[0]])

    def logits(dtype, skip_packing):
        config = loader.read_config(golden.folder, dtype)
        weights = loader.load(golden.folder, config, skip_packing=skip_packing)
        experts = weights.layers[0].moe.up_EDGF
        if skip_packing:
            assert isinstance(experts, Mxfp4)
        else:
            assert isinstance(experts, PackedStack)
            assert experts.node.float_rows == (dtype == "float32")
        forward = jax.jit(dense.forward, static_argnums=2)
        return np.asarray(forward(weights, prompt, config)[0], np.float32)

    exact = logits("float32", skip_packing=True)

    def error(dtype, skip_packing):
        return np.median(np.abs(logits(dtype, skip_packing) - exact)) / exact.std()

    assert error("float32", skip_packing=False) < 1e-5
    assert error("bfloat16", skip_packing=False) < 1.2 * error("bfloat16", skip_packing=True)
    difference = logits("bfloat16", skip_packing=False) - logits("bfloat16", skip_packing=True)
    has_16_bit_rows = native.instruction_set() in ("avx512_vnni", "amx")  # bfloat16 bits elsewhere
    tolerance = 0.015 if has_16_bit_rows else 0.01
    assert np.median(np.abs(difference)) < tolerance * exact.std()


def test_specs_are_small_and_random_weights_have_the_usual_size():
    """Random weights have the standard deviation of dense ones."""
    dense = ArraySpec(
        (3, 256, 2, 64), jnp.bfloat16, ("experts", "embed", None, "ffn"), fan_in=256, stacked=True
    )
    specs = packed("mxfp4", dense)
    assert nbytes(specs) < dense.nbytes / 3
    for spec in jax.tree.leaves(specs):
        assert (spec.shape[0], spec.shape[2:], spec.axes) == (3, (2, 64), dense.axes)
    values = np.asarray(random_arrays(specs, 1)[0], np.float32)
    assert values.shape == dense.shape[1:]
    assert 0.6 < values.std() * 256**0.5 < 1.6
    assert packed(None, dense) is dense


def test_inputs_must_divide_into_blocks():
    with pytest.raises(ValueError, match="an axis of 48 does not divide into blocks of 32"):
        packed("mxfp4", ArraySpec((2, 48, 8), jnp.bfloat16, (None, None, None), stacked=True))
