"""GGUF block types against the gguf package, bit for bit."""

import gguf
import numpy as np
import pytest
from gguf import quants

from quire.model.gguf.blocks import TYPES
from quire.model.gguf.grids import codebook
from quire.tests.support import tiny_gguf
from quire.tests.support.cases import cases

NOT_READ = {"Q8_1", "Q8_K"}
HALVES = {  # byte offsets of float16 scales in a block
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ3_XXS": [0],
    "IQ1_S": [0],
    "IQ4_NL": [0],
    "IQ3_S": [0],
    "IQ2_S": [0],
    "IQ4_XS": [0],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "Q1_0": [0],
}
FIELDS = {  # types with codes and scales: bits of a code, elements that share a scale
    "Q4_0": (4, 32),
    "Q4_1": (4, 32),
    "Q5_0": (5, 32),
    "Q5_1": (5, 32),
    "Q8_0": (8, 32),
    "Q2_K": (2, 16),
    "Q3_K": (3, 16),
    "Q4_K": (4, 32),
    "Q5_K": (5, 32),
    "Q6_K": (6, 16),
    "IQ4_NL": (4, 32),
    "IQ4_XS": (4, 32),
    "MXFP4": (4, 32),
    "NVFP4": (4, 16),
    "TQ1_0": (2, 256),
    "TQ2_0": (2, 256),
    "Q1_0": (1, 128),
}
# types with integer scales times a float16 super-scale
TWO_LEVEL = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"}
QUANTISED = [kind for kind in TYPES.values() if not kind.is_plain]
for_each_kind = pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)


def random_blocks(kind, count: int, seed: int = 0) -> np.ndarray:
    """Random bytes with finite scales, some of them 0 or -0."""
    rng = np.random.default_rng([kind.number, seed])
    blocks = rng.integers(0, 256, (count, kind.nbytes), np.uint8)
    blocks[0], blocks[1] = 0, 255
    for at in HALVES.get(kind.name, []):
        high = blocks[:, at + 1]
        high[high & 0x7C == 0x7C] &= 0xFB
        zero = rng.random(count) < 0.05
        blocks[zero, at] = 0
        high[zero] &= 0x80
    if kind.name == "IQ1_M":
        blocks[:, 55] &= 0xBF
    if kind.name == "MXFP4":
        blocks[:, 0] = np.minimum(blocks[:, 0], 250)
    return blocks


def reference(kind, blocks: np.ndarray) -> np.ndarray:
    return tiny_gguf.decoded(blocks, gguf.GGMLQuantizationType(kind.number))


def float_bits(values: np.ndarray) -> np.ndarray:
    assert values.dtype == np.float32
    return values.view(np.uint32)


def test_type_table_matches_the_gguf_package():
    package_types = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    types = {number: (kind.name, kind.elements, kind.nbytes) for number, kind in TYPES.items()}
    assert types.items() <= package_types.items()
    # Types of intermediate sums; numbers above 41 are newer types.
    assert {
        name for number, (name, *_) in package_types.items() if number not in types and number <= 41
    } == NOT_READ
    assert all(number == kind.number for number, kind in TYPES.items())


@pytest.mark.random
@for_each_kind
def test_decode_matches_the_gguf_package(kind):
    for seed in range(cases(20, least=2)):
        blocks = random_blocks(kind, 500, seed)
        expected = reference(kind, blocks)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(float_bits(kind.decode(blocks)), float_bits(expected))
        np.testing.assert_array_equal(
            float_bits(kind.decode(blocks[7:8])), float_bits(expected[7:8])
        )
    assert kind.decode(random_blocks(kind, 2)[:0]).shape == (0, kind.elements)


@for_each_kind
def test_non_finite_scales_decode_as_in_the_gguf_package(kind):
    """Without a warning; Q1_0 loses the sign of infinities."""
    blocks = np.random.default_rng(kind.number).integers(0, 256, (2000, kind.nbytes), np.uint8)
    for at in HALVES.get(kind.name, []):
        blocks[:, at + 1] |= 0x7C
        blocks[::2, at : at + 2] = 0, 0x7C  # infinite
    with np.errstate(all="ignore"):
        expected = reference(kind, blocks)
    if kind.name == "Q1_0":
        assert not np.isfinite(kind.decode(blocks)).any()
        return
    np.testing.assert_array_equal(kind.decode(blocks), expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_float_types_decode(name):
    kind = next(kind for kind in TYPES.values() if kind.name == name)
    values = np.random.default_rng(0).standard_normal((100, 1)).astype(kind.dtype)
    decoded = kind.decode(values.view(np.uint8))
    assert decoded.dtype == kind.dtype
    np.testing.assert_array_equal(
        float_bits(decoded.astype(np.float32)), float_bits(reference(kind, values.view(np.uint8)))
    )


def test_types_with_fields():
    assert {kind.name for kind in TYPES.values() if kind.has_scales} == FIELDS.keys()


@pytest.mark.random
@pytest.mark.parametrize(
    "kind", [kind for kind in QUANTISED if kind.has_scales], ids=lambda kind: kind.name
)
def test_fields_reproduce_the_decoded_values(kind):
    """Values computed from the documented fields equal the package's."""
    width, group = FIELDS[kind.name]
    for seed in range(cases(20, least=2)):
        blocks = random_blocks(kind, 300, seed)
        fields = kind.fields(blocks)
        assert (fields.codes.dtype, fields.codes.shape) == (np.uint8, (300, kind.elements))
        is_two_level = kind.name in TWO_LEVEL
        dtype = np.int8 if is_two_level else np.float32
        assert (fields.scale.dtype, fields.scale.shape) == (dtype, (300, kind.elements // group))
        assert fields.group == group
        assert fields.codes.max() < 1 << width
        assert fields.table is None or (fields.table.dtype, fields.table.shape, fields.zero) == (
            np.float32,
            (16,),
            0,
        )
        levels = (
            fields.codes.astype(np.float32) - fields.zero
            if fields.table is None
            else fields.table[fields.codes]
        )
        scale = fields.scale
        least = fields.least
        super_scales = (fields.super_scale, fields.super_least)
        assert [super_scale is not None for super_scale in super_scales] == [
            is_two_level,
            is_two_level and least is not None,
        ]
        assert all(
            super_scale is None or (super_scale.dtype, super_scale.shape) == (np.float16, (300, 1))
            for super_scale in super_scales
        )
        if is_two_level:
            scale = scale.astype(np.float32) * super_scales[0].astype(np.float32)
        values = levels * np.repeat(scale, group, axis=1)
        if least is not None:
            assert (least.dtype, least.shape) == (dtype, scale.shape)
            least = (
                least.astype(np.float32) * super_scales[1].astype(np.float32)
                if is_two_level
                else least
            )
            values = values - np.repeat(least, group, axis=1)
        np.testing.assert_array_equal(float_bits(values), float_bits(reference(kind, blocks)))
        np.testing.assert_array_equal(float_bits(values), float_bits(fields.values()))
        np.testing.assert_array_equal(float_bits(values), float_bits(kind.decode(blocks)))


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_codebooks_match_the_gguf_package(name):
    """All entries, as random blocks may not use each one."""
    package_type = getattr(quants, name)
    package_type.init_grid()
    np.testing.assert_array_equal(
        codebook("IQ1" if name == "IQ1_S" else name),
        package_type.grid.reshape(package_type.grid_shape),
    )
