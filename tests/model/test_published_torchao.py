"""Checkpoints of torchao as transformers saves them: written by specification, and by torchao
itself.
"""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from quire import LLM
from quire.model.checkpoint.loader import read_config
from quire.model.config import ModelError
from quire.ops.quant.fp8 import Fp8
from quire.ops.quant.grouped import Grouped
from quire.ops.quant.int4 import Int4
from quire.tests.support import served_codes, tiny
from quire.tests.support.quantized_files import (
    FLOAT8,
    LLAMA,
    assert_dequantized,
    check_damage,
    dense_of,
    pack_nibbles,
    read,
)

BF16 = ml_dtypes.bfloat16
UNIT = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
WHOLE = {"_type": "PerTensor", "_version": 1, "_data": {}}


def enum(kind: str, name: str) -> dict:
    return {"_type": kind, "_data": name}


def typed(kind: str, **data) -> dict:
    return {"_type": kind, "_version": 2, "_data": data}


def per_group(size: int) -> dict:
    return {"_type": "PerGroup", "_version": 1, "_data": {"group_size": size}}


def intx(bits: int = 4, size: int | None = 32, mapping: str = "SYMMETRIC") -> dict:
    """As torchao 0.14 writes it."""
    granularity = (
        per_group(size) if size else {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}}
    )
    return typed(
        "IntxWeightOnlyConfig",
        weight_dtype=enum("torch.dtype", f"int{bits}"),
        granularity=granularity,
        mapping_type=enum("MappingType", mapping),
        scale_dtype=None,
        version=2,
        intx_packing_format=enum("IntxPackingFormat", "UNPACKED_TO_INT8"),
    )


def rows_and_intx(size: int) -> dict:
    return typed(
        "Int8DynamicActivationIntxWeightConfig",
        weight_dtype=enum("torch.dtype", "int4"),
        version=2,
        weight_granularity=per_group(size),
        weight_mapping_type=enum("MappingType", "SYMMETRIC"),
        weight_scale_dtype=None,
        act_mapping_type=enum("MappingType", "ASYMMETRIC"),
        intx_packing_format=enum("IntxPackingFormat", "UNPACKED_TO_INT8"),
    )


def config(quant_type: dict, **changes) -> dict:
    """As transformers writes it."""
    return {
        "quant_method": "torchao",
        "quant_type": {"default": quant_type},
        "quant_type_kwargs": {},
        "modules_to_not_convert": None,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    } | changes


def named(stem: str, tensors: dict, old: bool) -> dict:
    return {
        stem + (f".weight:{name}" if old else f"._weight_{name}"): value
        for name, value in tensors.items()
    }


def bytes_of(
    rng, stem: str, shape, bits=8, size=None, scale="groups", zeros=False, old=False, dtype=BF16
):
    """A matrix of signed bytes: Int8Tensor, and IntxUnpackedToInt8Tensor where it has zeros."""
    rows, columns = shape
    groups = columns // size if size else 1
    half = 1 << bits - 1
    codes = rng.integers(-half, half, shape).astype(np.int8)
    each = rng.uniform(0.001, 0.02, {"groups": (rows, groups), "one": ()}[scale]).astype(dtype)
    tensors = {"qdata": codes, "scale": np.asarray(each)}
    zero = np.zeros((rows, groups), np.int8)
    if zeros:
        zero = rng.integers(-half, half, (rows, groups)).astype(np.int8) if zeros == "own" else zero
        tensors["zero_point"] = zero
    again = columns // groups
    wide = np.broadcast_to(each.astype(np.float64), (rows, groups))
    dense = (codes.astype(int) - zero.repeat(again, 1)) * wide.repeat(again, 1)
    return named(stem, tensors, old), dense


def float8(rng, stem: str, shape, scale="rows", old=False, **_):
    rows, columns = shape
    codes = (
        (rng.standard_normal(shape) * rng.choice([1e-3, 1, 100], shape))
        .clip(-448, 448)
        .astype(FLOAT8)
    )
    size = {"rows": (rows, 1), "one": (1, 1), "blocks": (rows // 128, columns // 128)}[scale]
    each = rng.uniform(0.0005, 0.0015, size).astype(np.float32)
    wide = each.astype(np.float64).repeat(rows // size[0], 0).repeat(columns // size[1], 1)
    return named(stem, {"qdata": codes, "scale": each}, old), codes.astype(np.float64) * wide


def fours(rng, stem: str, shape, size=128, old=False, **_):
    """A matrix of Int4Tensor: two signed codes a byte, and a number for each group that is
    added.
    """
    rows, columns = shape
    codes = rng.integers(-8, 8, shape)
    scale, added = (
        rng.uniform(low, 0.02, (columns // size, rows)).astype(BF16) for low in (0.001, -0.02)
    )
    dense = codes * scale.T.astype(np.float64).repeat(size, 1) + added.T.astype(np.float64).repeat(
        size, 1
    )
    packed = pack_nibbles((codes & 15).astype(np.uint8)).view(np.int8)
    return named(stem, {"qdata": packed, "scale": scale, "zero_point": added}, old), dense


def tiled(rng, stem: str, shape, size=128, old=False, **_):
    """A matrix of Int4TilePackedTo4dTensor, by PyTorch's loops over the lanes of a tensor core."""
    rows, columns = shape
    whole = [-(-rows // 8) * 8, -(-columns // 1024) * 1024]
    codes = rng.integers(0, 16, whole)
    words = np.zeros((whole[0] // 8, whole[1] // 128, 32, 4), np.uint32)
    for lane in range(32):
        for tile in range(4):
            for nibble, at in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
                own = codes[lane // 4 :: 8, 32 * tile + at + 2 * (lane % 4) :: 128].astype(
                    np.uint32
                )
                words[:, :, lane, tile] |= own << (4 * nibble)
    shared = np.stack(
        [rng.uniform(low, 0.02, (whole[1] // size, whole[0])) for low in (0.001, -0.02)], -1
    ).astype(BF16)
    scale, zero = shared.astype(np.float64).repeat(size, 0).transpose(2, 1, 0)
    dense = ((codes - 8) * scale + zero)[:rows, :columns]
    return named(stem, {"qdata": words.view(np.int32), "scale_and_zero": shared}, old), dense


INT8 = typed(
    "Int8WeightOnlyConfig", group_size=None, granularity=UNIT, set_inductor_config=True, version=2
)
INT4 = typed(
    "Int4WeightOnlyConfig", group_size=128, set_inductor_config=True, version=2,
    int4_packing_format=enum("Int4PackingFormat", "PLAIN"),
    int4_choose_qparams_algorithm=enum("Int4ChooseQParamsAlgorithm", "TINYGEMM"),
)  # fmt: skip
TILES = INT4 | {
    "_data": INT4["_data"] | {"int4_packing_format": enum("Int4PackingFormat", "TILE_PACKED_TO_4D")}
}
F8 = typed("Float8WeightOnlyConfig", weight_dtype=enum("torch.dtype", "float8_e4m3fn"), version=2)
F8_ROWS = typed(
    "Float8DynamicActivationFloat8WeightConfig",
    activation_dtype=enum("torch.dtype", "float8_e4m3fn"),
    weight_dtype=enum("torch.dtype", "float8_e4m3fn"),
    granularity=[UNIT, UNIT],
    activation_value_lb=None,
    mm_config={"_type": "Float8MMConfig", "_version": 1, "_data": {"use_fast_accum": True}},
    version=2,
    kernel_preference=enum("KernelPreference", "AUTO"),
    set_inductor_config=True,
)
INT8_ROWS = typed(
    "Int8DynamicActivationInt8WeightConfig",
    layout=None,
    act_mapping_type=enum("MappingType", "SYMMETRIC"),
    weight_only_decode=False,
    granularity=[UNIT, UNIT],
    set_inductor_config=True,
    version=2,
)


def changed(quant_type: dict, **data) -> dict:
    return quant_type | {"_data": quant_type["_data"] | data}


BLOCKS = changed(
    F8_ROWS,
    granularity=[typed("PerBlock", block_size=[1, 128]), typed("PerBlock", block_size=[128, 128])],
)

# How a matrix is written, the options of that, quant_type, and what it is kept as; None: widened.
CASES: dict[str, tuple[Any, dict, dict, str | None]] = {
    "int8": (bytes_of, {}, INT8, "int8-weights"),
    "int8-old": (bytes_of, {"old": True}, INT8, "int8-weights"),
    "int8-one": (bytes_of, {"scale": "one"}, changed(INT8, granularity=WHOLE), "int8-weights"),
    "int8-groups": (
        bytes_of,
        {"size": 64, "dtype": np.float32},
        changed(INT8, granularity=per_group(64)),
        "int8-weights-64",
    ),
    "int8-rows": (bytes_of, {}, INT8_ROWS, "int8"),
    "fp8": (float8, {}, F8, "fp8-weights"),
    "fp8-old": (float8, {"old": True}, F8, "fp8-weights"),
    "fp8-rows": (float8, {}, F8_ROWS, "fp8"),
    "fp8-one": (float8, {"scale": "one"}, changed(F8_ROWS, granularity=[WHOLE, WHOLE]), "fp8"),
    "fp8-blocks": (float8, {"scale": "blocks"}, BLOCKS, "fp8-weights-128"),
    "int4": (fours, {}, INT4, "int4-128-least"),
    "int4-32": (fours, {"size": 32}, changed(INT4, group_size=32), "int4-32-least"),
    "int4-tiles": (tiled, {}, TILES, "int4-128-least"),
    "int4-tiles-32": (
        tiled,
        {"size": 32},
        changed(TILES, group_size=32, int4_tile_packed_ntile=8),
        "int4-32-least",
    ),
    "int4-rows": (
        fours,
        {},
        INT4 | {"_type": "Float8DynamicActivationInt4WeightConfig"},
        "int4-128-least",
    ),
    "intx-4": (bytes_of, {"bits": 4, "size": 32, "zeros": True}, intx(), "int4-32"),
    "intx-4-zeros": (
        bytes_of,
        {"bits": 4, "size": 64, "zeros": "own"},
        intx(4, 64, "ASYMMETRIC"),
        "int4-64-zero",
    ),
    "intx-3": (bytes_of, {"bits": 3, "size": 32, "zeros": True}, intx(3), "int4-32"),
    "intx-6": (
        bytes_of,
        {"bits": 6, "size": 32, "zeros": "own"},
        intx(6, 32, "ASYMMETRIC"),
        "int8-weights-32-least",
    ),
    "intx-8": (bytes_of, {"zeros": True}, intx(8, None), "int8-weights"),
    "intx-4-all": (bytes_of, {"bits": 4, "zeros": True}, intx(4, None), None),
    "intx-rows": (bytes_of, {"bits": 4, "size": 32, "zeros": True}, rows_and_intx(32), "int4-32"),
}


def written(folder, case: str, spare: tuple[str, ...] = (), model: dict = LLAMA, **changes):
    """A folder as transformers writes it, and every matrix of it in float64."""
    write, options, quant_type, _ = CASES[case]
    rng = np.random.default_rng(0)
    tensors = {}
    expected = {}
    for name, value in tiny.draw(model).items():
        stem = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or stem.endswith(spare or ("\n",)):
            tensors[name], expected[name] = value, value.astype(np.float64)
            continue
        parts, expected[name] = write(rng, stem, value.shape, **options)
        tensors |= parts
    tiny.write(folder, model | {"quantization_config": config(quant_type, **changes)}, tensors)
    if write is tiled:
        save_file(tensors, folder / "model.safetensors", shapes_of(expected))
    return tensors, expected


def shapes_of(dense: dict) -> dict[str, str]:
    """The metadata that torchao keeps of its tensors."""
    return {
        name: json.dumps(
            {
                "_type": "Int4TilePackedTo4dTensor",
                "_data": {"block_size": [1, 128], "shape": value.shape},
            }
        )
        for name, value in dense.items()
    }


def near(case: str) -> float:
    """How far a weight may be off where a number is added, which is kept in float32."""
    return 1e-8 if case.startswith("int4") else 0


@pytest.mark.parametrize("case", CASES)
def test_each_matrix_is_what_its_form_says(tmp_path, case):
    _, expected = written(tmp_path, case)
    assert read_config(tmp_path).quant == CASES[case][3]
    weights = read(tmp_path)
    widened = CASES[case][3] is None
    assert isinstance(weights.layers[0].mlp.down_FD, np.ndarray) == widened
    assert_dequantized(weights, expected, 1e-6 if widened else 0, near(case))
    np.testing.assert_array_equal(weights.embed_VD, expected["model.embed_tokens.weight"])


@pytest.mark.parametrize("case", ["int8", "fp8", "int4"])
def test_what_the_config_leaves_dense(tmp_path, case):
    spare = ("self_attn.o_proj", "layers.0.mlp.down_proj")
    _, expected = written(tmp_path / "said", case, spare, modules_to_not_convert=list(spare))
    weights = read(tmp_path / "said")
    assert_dequantized(weights, expected, atol=near(case))
    assert isinstance(weights.layers[1].attention.out_NHD, np.ndarray)
    assert not isinstance(weights.layers[1].mlp.down_FD, np.ndarray)
    written(tmp_path / "unsaid", case, spare)
    with pytest.raises(ModelError, match=r"self_attn.o_proj.weight' is not quantised"):
        read(tmp_path / "unsaid")


@pytest.mark.parametrize("key", ["fqn_to_config", "module_fqn_to_config"])
def test_modules_with_configs_of_their_own(tmp_path, key):
    """By name, by that of the weight, by a pattern, none; embedding and head in codes, which are
    widened.
    """
    kinds = {
        "mlp.down_proj": (bytes_of, {"bits": 4, "size": 32, "zeros": True}),
        "self_attn.o_proj": (fours, {}),
        "embed_tokens": (bytes_of, {"size": 32, "zeros": "own"}),
        "lm_head": (bytes_of, {}),
    }
    rng = np.random.default_rng(0)
    tensors = {}
    expected = {}
    for name, value in tiny.draw(LLAMA).items():
        stem = name.removesuffix(".weight")
        tensors[name], expected[name] = value, value
        if value.ndim == 1 or stem == "model.layers.0.mlp.down_proj":
            continue
        write, options = next(
            (kind for end, kind in kinds.items() if stem.endswith(end)), (float8, {})
        )
        del tensors[name]
        parts, expected[name] = write(rng, stem, value.shape, **options)
        tensors |= parts
    each = {
        "_default": F8,
        "model.layers.0.mlp.down_proj": None,
        r"re:.*\.mlp\.down_proj": intx(),
        "model.layers.0.self_attn.o_proj.weight": INT4,
        r"re:model\.layers\.1\.self_attn\.o_proj\.weight": INT4,
        "model.embed_tokens": intx(8, 32, "ASYMMETRIC"),
        "lm_head": INT8,
    }
    quant_type = {"_type": "FqnToConfig", "_version": 1, "_data": {key: each}}
    tiny.write(tmp_path, LLAMA | {"quantization_config": config(quant_type)}, tensors)
    weights = read(tmp_path)
    assert isinstance(weights.layers[0].mlp.down_FD, np.ndarray)
    assert isinstance(weights.layers[1].mlp.down_FD, Int4)
    assert isinstance(weights.layers[0].attention.out_NHD, Grouped)
    assert isinstance(weights.layers[1].attention.qkv_DGH, Fp8)
    assert_dequantized(weights, expected, 1e-6)
    for leaf, name in (
        (weights.embed_VD, "model.embed_tokens.weight"),
        (weights.head_VD, "lm_head.weight"),
    ):
        np.testing.assert_allclose(dense_of(leaf), expected[name], rtol=1e-6)


@pytest.mark.parametrize("case", ["int8-rows", "fp8-rows", "int4", "intx-4-zeros"])
@pytest.mark.slow
def test_tokens_and_company(tmp_path, case):
    """Through the whole engine: near the dense model of the same numbers, and the same bits in
    company.
    """
    _, expected = written(tmp_path / "codes", case, model=LLAMA | {"torch_dtype": "bfloat16"})
    dense = {name: np.ascontiguousarray(value, np.float32) for name, value in expected.items()}
    tiny.write(tmp_path / "dense", LLAMA, dense)
    llm = LLM(tmp_path / "codes", skip_tokenizer_init=True, **served_codes.SIZES)
    served_codes.check(llm, tmp_path / "dense", times=8 if case.endswith("rows") else 3)


STEM = "model.layers.1.mlp.down_proj._weight_"
DAMAGE: list[tuple[str, str, Any, str]] = [
    ("int8", "scale", lambda x: x[:-1], f"tensor '{STEM}scale' is"),
    ("int8", "scale", lambda x: None, f"lacks the tensor '{STEM}scale'"),
    ("int8", "qdata", lambda x: None, f"lacks the tensor '{STEM}qdata'"),
    ("int8", "scale", lambda x: x * BF16(np.nan), f"tensor '{STEM}scale' holds a scale"),
    ("int8", "qdata", lambda x: x.view(np.uint8), f"tensor '{STEM}qdata' is"),
    ("int8", "qdata", lambda x: x.reshape(-1), "must be a matrix"),
    ("int8-groups", "qdata", lambda x: x[:, :-8], "do not divide by the group of 64"),
    ("int4", "zero_point", lambda x: None, f"lacks the tensor '{STEM}zero_point'"),
    ("int4", "zero_point", lambda x: x[:, :-1], f"tensor '{STEM}zero_point' is"),
    ("int4", "zero_point", lambda x: x * BF16(np.inf), "not finite"),
    ("int4", "qdata", lambda x: x[:, :-8], "do not divide by the group of 128"),
    ("int4-tiles", "scale_and_zero", lambda x: None, f"lacks the tensor '{STEM}scale_and_zero'"),
    ("int4-tiles", "scale_and_zero", lambda x: x[:-1], f"tensor '{STEM}scale_and_zero' is"),
    ("int4-tiles", "scale_and_zero", lambda x: x * BF16(np.nan), "not finite"),
    ("int4-tiles", "qdata", lambda x: x[..., :2], f"tensor '{STEM}qdata' is"),
    ("int4-tiles", "qdata", lambda x: x[0], r"must be \[out / 8"),
    (
        "intx-4",
        "qdata",
        lambda x: x * 0 + 8,
        f"tensor '{STEM}qdata' holds 8, which is more than 4 bits",
    ),
    (
        "intx-4",
        "zero_point",
        lambda x: x - 9,
        f"tensor '{STEM}zero_point' holds -9, which is more than 4 bits",
    ),
    (
        "intx-4",
        "zero_point",
        lambda x: x + 1,
        "and quantization_config says that codes are symmetric",
    ),
    ("intx-4", "zero_point", lambda x: x.astype(BF16), f"tensor '{STEM}zero_point' is"),
    ("fp8", "qdata", lambda x: np.full_like(x, np.nan), "holds a code that is no number"),
    ("fp8", "scale", lambda x: x[:-1], f"tensor '{STEM}scale' is"),
]


@pytest.mark.parametrize(
    ("case", "part", "change", "words"), DAMAGE, ids=[f"{x[0]}-{x[1]}-{x[3]}" for x in DAMAGE]
)
def test_damage_is_named(tmp_path, case, part, change, words):
    tensors, expected = written(tmp_path, case)
    about = shapes_of(expected) if case == "int4-tiles" else None
    check_damage(tmp_path, tensors, STEM + part, change, words, about)


SHAPE = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, r"has shape \[256, 1024\]; config.json wants"),
        ("{", r"has shape \[256, 1024\]; config.json wants"),
        ('{"_data": {"shape": [0, 256]}}', r"has shape \[256, 1024\]; config.json wants"),
        ('{"_data": {"shape": [256, 1e99]}}', r"has shape \[256, 1024\]; config.json wants"),
        ('{"_data": {"shape": [256, 200]}}', "do not divide by the group of 128"),
        ('{"_data": {"shape": [264, 256]}}', rf"tensor '{STEM}qdata' is \[32, 8, 32, 4\]"),
    ],
)
def test_shapes_of_tiles_that_are_not_so(tmp_path, said, words):
    tensors, expected = written(tmp_path, "int4-tiles")
    about = shapes_of(expected) | {SHAPE: said}
    save_file(
        tensors,
        tmp_path / "model.safetensors",
        {name: text for name, text in about.items() if text is not None},
    )
    with pytest.raises(ModelError, match=words):
        read(tmp_path)


def test_a_form_that_is_not_read(tmp_path):
    tensors, _ = written(tmp_path, "int4")
    save_file(
        tensors | {f"{STEM}act_pre_scale": np.ones(4, np.float32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        ModelError,
        match=f"tensor '{STEM}act_pre_scale' is of a form of torchao that is not supported",
    ):
        read(tmp_path)


CONFIGS: list[tuple[dict, str]] = [
    (config(INT8) | {"quant_type": "int8_weight_only"}, "quant_type = 'int8_weight_only'"),
    (config(INT8) | {"quant_type": {}}, "quant_type = {}"),
    (config(INT8, quant_type_kwargs={"group_size": 8}), "quant_type_kwargs"),
    (config(INT8, spin=1), "spin = 1 is not understood"),
    (
        config(typed("GemliteUIntXWeightOnlyConfig")),
        "default._type = 'GemliteUIntXWeightOnlyConfig'",
    ),
    (config({"_type": 3}), "default._type = 3"),
    (config([1]), "default = [1]"),
    (config(changed(INT8, spin=2)), "default._data.spin = 2 is not understood"),
    (config(changed(INT8, group_size=-3)), "group_size = -3"),
    (config(changed(INT8, granularity=typed("PerToken"))), "granularity = "),
    (config(changed(TILES, int4_tile_packed_ntile=16)), "int4_tile_packed_ntile = 16"),
    (config(changed(INT4, int4_packing_format="preshuffled")), "packing_format = 'PRESHUFFLED'"),
    (config(changed(INT4, group_size=48)), "group_size = 48"),
    (
        config(changed(F8, weight_dtype=enum("torch.dtype", "float8_e5m2"))),
        "weight_dtype = 'float8_e5m2'",
    ),
    (
        config(changed(BLOCKS, granularity=[typed("PerBlock", block_size=[64, 64])] * 2)),
        "granularity = ",
    ),
    (config(changed(intx(), weight_dtype=enum("torch.dtype", "int9"))), "weight_dtype = 'int9'"),
    (config(changed(intx(), mapping_type=enum("MappingType", "ODD"))), "mapping_type = 'ODD'"),
    (config(changed(intx(), granularity=typed("PerAxis", axis=1))), "granularity = "),
    (config(typed("FqnToConfig", fqn_to_config={})), "fqn_to_config = {}"),
    (config(typed("FqnToConfig", fqn_to_config={"re:(a+)+": INT8})), "(a+)+"),
    (
        config(typed("FqnToConfig", fqn_to_config={"a": {"_type": "b"}})),
        "fqn_to_config.a._type = 'b'",
    ),
]


@pytest.mark.parametrize(("quantization", "words"), CONFIGS, ids=[words for _, words in CONFIGS])
def test_a_config_that_is_not_understood(tmp_path, quantization, words):
    tiny.write(
        tmp_path, LLAMA | {"quantization_config": quantization}, {"x": np.zeros(1, np.float32)}
    )
    with pytest.raises(ModelError, match="quantization_config") as error:
        read_config(tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_what_torchao_itself_writes(tmp_path):
    """Its own numbers, where it is installed: those of its dequantize."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    config_to_dict = pytest.importorskip("torchao.core.config").config_to_dict
    from safetensors.torch import save_file as save

    of_four = {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32), "version": 2}
    own_zeros = {"mapping_type": quantization.MappingType.ASYMMETRIC}
    for index, (own, name) in enumerate([
        (quantization.Float8WeightOnlyConfig(), "fp8-weights"),
        (quantization.Int8WeightOnlyConfig(version=2), "int8-weights"),
        (quantization.Int8DynamicActivationInt8WeightConfig(version=2), "int8"),
        (quantization.IntxWeightOnlyConfig(**of_four), "int4-32"),
        (quantization.IntxWeightOnlyConfig(**of_four | own_zeros), "int4-32-zero"),
        (quantization.IntxWeightOnlyConfig(**of_four | own_zeros | {"weight_dtype": torch.int8}),
         "int8-weights-32-least"),
    ]):  # fmt: skip
        folder = tmp_path / str(index)
        tensors = {
            name: torch.from_numpy(value).bfloat16() for name, value in tiny.draw(LLAMA).items()
        }
        expected = {}
        for stem in [
            key.removesuffix(".weight") for key in tensors if key.endswith("_proj.weight")
        ]:
            module = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
            module.weight = torch.nn.Parameter(tensors[f"{stem}.weight"], requires_grad=False)
            quantization.quantize_(module, own)
            tensors[f"{stem}.weight"] = module.weight.data
            expected[f"{stem}.weight"] = module.weight.dequantize().float().numpy()
        parts, metadata = support.flatten_tensor_state_dict(tensors)
        described = json.loads(json.dumps(config(config_to_dict(own))))
        tiny.write(
            folder, LLAMA | {"torch_dtype": "bfloat16", "quantization_config": described}, {}
        )
        save(parts, folder / "model.safetensors", metadata=metadata)
        assert read_config(folder).quant == name
        assert_dequantized(read(folder), expected, 2**-8)  # its dequantize rounds to bfloat16
