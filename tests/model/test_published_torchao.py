"""torchao checkpoints as saved by transformers: by specification, and by torchao itself."""

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
PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
PER_TENSOR = {"_type": "PerTensor", "_version": 1, "_data": {}}


def enum(kind: str, name: str) -> dict:
    return {"_type": kind, "_data": name}


def typed(kind: str, **data) -> dict:
    return {"_type": kind, "_version": 2, "_data": data}


def per_group(size: int) -> dict:
    return {"_type": "PerGroup", "_version": 1, "_data": {"group_size": size}}


def intx_config(bits: int = 4, size: int | None = 32, mapping: str = "SYMMETRIC") -> dict:
    """IntxWeightOnlyConfig as torchao 0.14 writes it."""
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


def int8_rows_intx_config(size: int) -> dict:
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


def quantization_config(quant_type: dict, **changes) -> dict:
    """`quantization_config` as transformers writes it."""
    return {
        "quant_method": "torchao",
        "quant_type": {"default": quant_type},
        "quant_type_kwargs": {},
        "modules_to_not_convert": None,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    } | changes


def tensor_names(stem: str, tensors: dict, old: bool) -> dict:
    return {
        stem + (f".weight:{name}" if old else f"._weight_{name}"): value
        for name, value in tensors.items()
    }


def random_int8(
    rng, stem: str, shape, bits=8, size=None, scale="groups", zeros=False, old=False, dtype=BF16
):
    """Random Int8Tensor, or IntxUnpackedToInt8Tensor if it has zero points; its dense values."""
    rows, columns = shape
    groups = columns // size if size else 1
    half = 1 << bits - 1
    codes = rng.integers(-half, half, shape).astype(np.int8)
    scales = rng.uniform(0.001, 0.02, {"groups": (rows, groups), "one": ()}[scale]).astype(dtype)
    tensors = {"qdata": codes, "scale": np.asarray(scales)}
    zero = np.zeros((rows, groups), np.int8)
    if zeros:
        zero = rng.integers(-half, half, (rows, groups)).astype(np.int8) if zeros == "own" else zero
        tensors["zero_point"] = zero
    group_size = columns // groups
    broadcast_scales = np.broadcast_to(scales.astype(np.float64), (rows, groups))
    dense = (codes.astype(int) - zero.repeat(group_size, 1)) * broadcast_scales.repeat(
        group_size, 1
    )
    return tensor_names(stem, tensors, old), dense


def random_fp8(rng, stem: str, shape, scale="rows", old=False, **_):
    rows, columns = shape
    codes = (
        (rng.standard_normal(shape) * rng.choice([1e-3, 1, 100], shape))
        .clip(-448, 448)
        .astype(FLOAT8)
    )
    size = {"rows": (rows, 1), "one": (1, 1), "blocks": (rows // 128, columns // 128)}[scale]
    scales = rng.uniform(0.0005, 0.0015, size).astype(np.float32)
    element_scales = (
        scales.astype(np.float64).repeat(rows // size[0], 0).repeat(columns // size[1], 1)
    )
    return tensor_names(stem, {"qdata": codes, "scale": scales}, old), codes.astype(
        np.float64
    ) * element_scales


def random_int4(rng, stem: str, shape, size=128, old=False, **_):
    """Random Int4Tensor: two signed codes per byte, and an offset per group; its dense values."""
    rows, columns = shape
    codes = rng.integers(-8, 8, shape)
    scale, added = (
        rng.uniform(low, 0.02, (columns // size, rows)).astype(BF16) for low in (0.001, -0.02)
    )
    dense = codes * scale.T.astype(np.float64).repeat(size, 1) + added.T.astype(np.float64).repeat(
        size, 1
    )
    packed = pack_nibbles((codes & 15).astype(np.uint8)).view(np.int8)
    return tensor_names(stem, {"qdata": packed, "scale": scale, "zero_point": added}, old), dense


def random_tiled_int4(rng, stem: str, shape, size=128, old=False, **_):
    """Random Int4TilePackedTo4dTensor, packed by PyTorch's loops over tensor core lanes."""
    rows, columns = shape
    padded_shape = [-(-rows // 8) * 8, -(-columns // 1024) * 1024]
    codes = rng.integers(0, 16, padded_shape)
    words = np.zeros((padded_shape[0] // 8, padded_shape[1] // 128, 32, 4), np.uint32)
    for lane in range(32):
        for tile in range(4):
            for nibble, at in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
                tile_codes = codes[lane // 4 :: 8, 32 * tile + at + 2 * (lane % 4) :: 128].astype(
                    np.uint32
                )
                words[:, :, lane, tile] |= tile_codes << (4 * nibble)
    scale_and_zero = np.stack(
        [
            rng.uniform(low, 0.02, (padded_shape[1] // size, padded_shape[0]))
            for low in (0.001, -0.02)
        ],
        -1,
    ).astype(BF16)
    scale, zero = scale_and_zero.astype(np.float64).repeat(size, 0).transpose(2, 1, 0)
    dense = ((codes - 8) * scale + zero)[:rows, :columns]
    return tensor_names(
        stem, {"qdata": words.view(np.int32), "scale_and_zero": scale_and_zero}, old
    ), dense


INT8 = typed(
    "Int8WeightOnlyConfig",
    group_size=None,
    granularity=PER_ROW,
    set_inductor_config=True,
    version=2,
)
INT4 = typed(
    "Int4WeightOnlyConfig",
    group_size=128,
    set_inductor_config=True,
    version=2,
    int4_packing_format=enum("Int4PackingFormat", "PLAIN"),
    int4_choose_qparams_algorithm=enum("Int4ChooseQParamsAlgorithm", "TINYGEMM"),
)
TILES = INT4 | {
    "_data": INT4["_data"] | {"int4_packing_format": enum("Int4PackingFormat", "TILE_PACKED_TO_4D")}
}
F8 = typed("Float8WeightOnlyConfig", weight_dtype=enum("torch.dtype", "float8_e4m3fn"), version=2)
F8_ROWS = typed(
    "Float8DynamicActivationFloat8WeightConfig",
    activation_dtype=enum("torch.dtype", "float8_e4m3fn"),
    weight_dtype=enum("torch.dtype", "float8_e4m3fn"),
    granularity=[PER_ROW, PER_ROW],
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
    granularity=[PER_ROW, PER_ROW],
    set_inductor_config=True,
    version=2,
)


def with_data(quant_type: dict, **data) -> dict:
    return quant_type | {"_data": quant_type["_data"] | data}


BLOCKS = with_data(
    F8_ROWS,
    granularity=[typed("PerBlock", block_size=[1, 128]), typed("PerBlock", block_size=[128, 128])],
)

# (writer of a matrix, its options, quant_type, Quire's format or None if dequantised)
CASES: dict[str, tuple[Any, dict, dict, str | None]] = {
    "int8": (random_int8, {}, INT8, "int8-weights"),
    "int8-old": (random_int8, {"old": True}, INT8, "int8-weights"),
    "int8-one": (
        random_int8,
        {"scale": "one"},
        with_data(INT8, granularity=PER_TENSOR),
        "int8-weights",
    ),
    "int8-groups": (
        random_int8,
        {"size": 64, "dtype": np.float32},
        with_data(INT8, granularity=per_group(64)),
        "int8-weights-64",
    ),
    "int8-rows": (random_int8, {}, INT8_ROWS, "int8"),
    "fp8": (random_fp8, {}, F8, "fp8-weights"),
    "fp8-old": (random_fp8, {"old": True}, F8, "fp8-weights"),
    "fp8-rows": (random_fp8, {}, F8_ROWS, "fp8"),
    "fp8-one": (
        random_fp8,
        {"scale": "one"},
        with_data(F8_ROWS, granularity=[PER_TENSOR, PER_TENSOR]),
        "fp8",
    ),
    "fp8-blocks": (random_fp8, {"scale": "blocks"}, BLOCKS, "fp8-weights-128"),
    "int4": (random_int4, {}, INT4, "int4-128-least"),
    "int4-32": (random_int4, {"size": 32}, with_data(INT4, group_size=32), "int4-32-least"),
    "int4-tiles": (random_tiled_int4, {}, TILES, "int4-128-least"),
    "int4-tiles-32": (
        random_tiled_int4,
        {"size": 32},
        with_data(TILES, group_size=32, int4_tile_packed_ntile=8),
        "int4-32-least",
    ),
    "int4-rows": (
        random_int4,
        {},
        INT4 | {"_type": "Float8DynamicActivationInt4WeightConfig"},
        "int4-128-least",
    ),
    "intx-4": (random_int8, {"bits": 4, "size": 32, "zeros": True}, intx_config(), "int4-32"),
    "intx-4-zeros": (
        random_int8,
        {"bits": 4, "size": 64, "zeros": "own"},
        intx_config(4, 64, "ASYMMETRIC"),
        "int4-64-zero",
    ),
    "intx-3": (random_int8, {"bits": 3, "size": 32, "zeros": True}, intx_config(3), "int4-32"),
    "intx-6": (
        random_int8,
        {"bits": 6, "size": 32, "zeros": "own"},
        intx_config(6, 32, "ASYMMETRIC"),
        "int8-weights-32-least",
    ),
    "intx-8": (random_int8, {"zeros": True}, intx_config(8, None), "int8-weights"),
    "intx-4-all": (random_int8, {"bits": 4, "zeros": True}, intx_config(4, None), None),
    "intx-rows": (
        random_int8,
        {"bits": 4, "size": 32, "zeros": True},
        int8_rows_intx_config(32),
        "int4-32",
    ),
}


def write_folder(
    folder, case: str, dense_modules: tuple[str, ...] = (), model: dict = LLAMA, **changes
):
    """Write a folder in transformers' format; return its tensors and float64 matrices."""
    write, options, quant_type, _ = CASES[case]
    rng = np.random.default_rng(0)
    tensors = {}
    expected = {}
    for name, value in tiny.draw(model).items():
        stem = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or stem.endswith(dense_modules or ("\n",)):
            tensors[name], expected[name] = value, value.astype(np.float64)
            continue
        matrix_tensors, expected[name] = write(rng, stem, value.shape, **options)
        tensors |= matrix_tensors
    tiny.write(
        folder, model | {"quantization_config": quantization_config(quant_type, **changes)}, tensors
    )
    if write is random_tiled_int4:
        save_file(tensors, folder / "model.safetensors", tile_metadata(expected))
    return tensors, expected


def tile_metadata(dense: dict) -> dict[str, str]:
    """torchao's metadata of tile-packed tensors."""
    return {
        name: json.dumps(
            {
                "_type": "Int4TilePackedTo4dTensor",
                "_data": {"block_size": [1, 128], "shape": value.shape},
            }
        )
        for name, value in dense.items()
    }


def tolerance(case: str) -> float:
    """Absolute tolerance: float32 rounding of the groups' offsets."""
    return 1e-8 if case.startswith("int4") else 0


@pytest.mark.parametrize("case", CASES)
def test_matrices_match_the_torchao_format(tmp_path, case):
    _, expected = write_folder(tmp_path, case)
    assert read_config(tmp_path).quant == CASES[case][3]
    weights = read(tmp_path)
    is_dequantized = CASES[case][3] is None
    assert isinstance(weights.layers[0].mlp.down_FD, np.ndarray) == is_dequantized
    assert_dequantized(weights, expected, 1e-6 if is_dequantized else 0, tolerance(case))
    np.testing.assert_array_equal(weights.embed_VD, expected["model.embed_tokens.weight"])


@pytest.mark.parametrize("case", ["int8", "fp8", "int4"])
def test_modules_to_not_convert_stay_dense(tmp_path, case):
    dense_modules = ("self_attn.o_proj", "layers.0.mlp.down_proj")
    _, expected = write_folder(
        tmp_path / "said", case, dense_modules, modules_to_not_convert=list(dense_modules)
    )
    weights = read(tmp_path / "said")
    assert_dequantized(weights, expected, atol=tolerance(case))
    assert isinstance(weights.layers[1].attention.out_NHD, np.ndarray)
    assert not isinstance(weights.layers[1].mlp.down_FD, np.ndarray)
    write_folder(tmp_path / "unsaid", case, dense_modules)
    with pytest.raises(ModelError, match=r"self_attn.o_proj.weight' is not quantised"):
        read(tmp_path / "unsaid")


@pytest.mark.parametrize("key", ["fqn_to_config", "module_fqn_to_config"])
def test_fqn_to_config_sets_a_format_per_module(tmp_path, key):
    """By module name, weight name and pattern, or None; quantised embedding and head."""
    kinds = {
        "mlp.down_proj": (random_int8, {"bits": 4, "size": 32, "zeros": True}),
        "self_attn.o_proj": (random_int4, {}),
        "embed_tokens": (random_int8, {"size": 32, "zeros": "own"}),
        "lm_head": (random_int8, {}),
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
            (kind for end, kind in kinds.items() if stem.endswith(end)), (random_fp8, {})
        )
        del tensors[name]
        matrix_tensors, expected[name] = write(rng, stem, value.shape, **options)
        tensors |= matrix_tensors
    config_by_name = {
        "_default": F8,
        "model.layers.0.mlp.down_proj": None,
        r"re:.*\.mlp\.down_proj": intx_config(),
        "model.layers.0.self_attn.o_proj.weight": INT4,
        r"re:model\.layers\.1\.self_attn\.o_proj\.weight": INT4,
        "model.embed_tokens": intx_config(8, 32, "ASYMMETRIC"),
        "lm_head": INT8,
    }
    quant_type = {"_type": "FqnToConfig", "_version": 1, "_data": {key: config_by_name}}
    tiny.write(tmp_path, LLAMA | {"quantization_config": quantization_config(quant_type)}, tensors)
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
def test_engine_tokens_match_dense_and_are_batch_invariant(tmp_path, case):
    """The dense model has the dequantised weights."""
    _, expected = write_folder(tmp_path / "codes", case, model=LLAMA | {"torch_dtype": "bfloat16"})
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
    ("case", "tensor", "change", "words"), DAMAGE, ids=[f"{x[0]}-{x[1]}-{x[3]}" for x in DAMAGE]
)
def test_error_names_the_damaged_tensor(tmp_path, case, tensor, change, words):
    tensors, expected = write_folder(tmp_path, case)
    metadata = tile_metadata(expected) if case == "int4-tiles" else None
    check_damage(tmp_path, tensors, STEM + tensor, change, words, metadata)


SHAPE = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("metadata_text", "words"),
    [
        (None, r"has shape \[256, 1024\]; config.json wants"),
        ("{", r"has shape \[256, 1024\]; config.json wants"),
        ('{"_data": {"shape": [0, 256]}}', r"has shape \[256, 1024\]; config.json wants"),
        ('{"_data": {"shape": [256, 1e99]}}', r"has shape \[256, 1024\]; config.json wants"),
        ('{"_data": {"shape": [256, 200]}}', "do not divide by the group of 128"),
        ('{"_data": {"shape": [264, 256]}}', rf"tensor '{STEM}qdata' is \[32, 8, 32, 4\]"),
    ],
)
def test_wrong_shapes_in_tile_metadata_are_rejected(tmp_path, metadata_text, words):
    tensors, expected = write_folder(tmp_path, "int4-tiles")
    metadata = tile_metadata(expected) | {SHAPE: metadata_text}
    save_file(
        tensors,
        tmp_path / "model.safetensors",
        {name: text for name, text in metadata.items() if text is not None},
    )
    with pytest.raises(ModelError, match=words):
        read(tmp_path)


def test_unsupported_tensor_form_is_rejected(tmp_path):
    tensors, _ = write_folder(tmp_path, "int4")
    save_file(
        tensors | {f"{STEM}act_pre_scale": np.ones(4, np.float32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        ModelError,
        match=f"tensor '{STEM}act_pre_scale' is of a form of torchao that is not supported",
    ):
        read(tmp_path)


CONFIGS: list[tuple[dict, str]] = [
    (
        quantization_config(INT8) | {"quant_type": "int8_weight_only"},
        "quant_type = 'int8_weight_only'",
    ),
    (quantization_config(INT8) | {"quant_type": {}}, "quant_type = {}"),
    (quantization_config(INT8, quant_type_kwargs={"group_size": 8}), "quant_type_kwargs"),
    (quantization_config(INT8, spin=1), "spin = 1 is not understood"),
    (
        quantization_config(typed("GemliteUIntXWeightOnlyConfig")),
        "default._type = 'GemliteUIntXWeightOnlyConfig'",
    ),
    (quantization_config({"_type": 3}), "default._type = 3"),
    (quantization_config([1]), "default = [1]"),
    (quantization_config(with_data(INT8, spin=2)), "default._data.spin = 2 is not understood"),
    (quantization_config(with_data(INT8, group_size=-3)), "group_size = -3"),
    (quantization_config(with_data(INT8, granularity=typed("PerToken"))), "granularity = "),
    (
        quantization_config(with_data(TILES, int4_tile_packed_ntile=16)),
        "int4_tile_packed_ntile = 16",
    ),
    (
        quantization_config(with_data(INT4, int4_packing_format="preshuffled")),
        "packing_format = 'PRESHUFFLED'",
    ),
    (quantization_config(with_data(INT4, group_size=48)), "group_size = 48"),
    (
        quantization_config(with_data(F8, weight_dtype=enum("torch.dtype", "float8_e5m2"))),
        "weight_dtype = 'float8_e5m2'",
    ),
    (
        quantization_config(
            with_data(BLOCKS, granularity=[typed("PerBlock", block_size=[64, 64])] * 2)
        ),
        "granularity = ",
    ),
    (
        quantization_config(with_data(intx_config(), weight_dtype=enum("torch.dtype", "int9"))),
        "weight_dtype = 'int9'",
    ),
    (
        quantization_config(with_data(intx_config(), mapping_type=enum("MappingType", "ODD"))),
        "mapping_type = 'ODD'",
    ),
    (
        quantization_config(with_data(intx_config(), granularity=typed("PerAxis", axis=1))),
        "granularity = ",
    ),
    (quantization_config(typed("FqnToConfig", fqn_to_config={})), "fqn_to_config = {}"),
    (quantization_config(typed("FqnToConfig", fqn_to_config={"re:(a+)+": INT8})), "(a+)+"),
    (
        quantization_config(typed("FqnToConfig", fqn_to_config={"a": {"_type": "b"}})),
        "fqn_to_config.a._type = 'b'",
    ),
]


@pytest.mark.parametrize(("quantization", "words"), CONFIGS, ids=[words for _, words in CONFIGS])
def test_error_names_the_unsupported_config_key(tmp_path, quantization, words):
    tiny.write(
        tmp_path, LLAMA | {"quantization_config": quantization}, {"x": np.zeros(1, np.float32)}
    )
    with pytest.raises(ModelError, match="quantization_config") as error:
        read_config(tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_checkpoints_written_by_torchao_itself(tmp_path):
    """If torchao is installed: the values equal those of its `dequantize`."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    config_to_dict = pytest.importorskip("torchao.core.config").config_to_dict
    from safetensors.torch import save_file as save

    int4_options = {
        "weight_dtype": torch.int4,
        "granularity": quantization.PerGroup(32),
        "version": 2,
    }
    asymmetric = {"mapping_type": quantization.MappingType.ASYMMETRIC}
    for index, (torchao_config, name) in enumerate(
        [
            (quantization.Float8WeightOnlyConfig(), "fp8-weights"),
            (quantization.Int8WeightOnlyConfig(version=2), "int8-weights"),
            (quantization.Int8DynamicActivationInt8WeightConfig(version=2), "int8"),
            (quantization.IntxWeightOnlyConfig(**int4_options), "int4-32"),
            (quantization.IntxWeightOnlyConfig(**int4_options | asymmetric), "int4-32-zero"),
            (
                quantization.IntxWeightOnlyConfig(
                    **int4_options | asymmetric | {"weight_dtype": torch.int8}
                ),
                "int8-weights-32-least",
            ),
        ]
    ):
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
            quantization.quantize_(module, torchao_config)
            tensors[f"{stem}.weight"] = module.weight.data
            expected[f"{stem}.weight"] = module.weight.dequantize().float().numpy()
        flat_tensors, metadata = support.flatten_tensor_state_dict(tensors)
        config_json = json.loads(json.dumps(quantization_config(config_to_dict(torchao_config))))
        tiny.write(
            folder, LLAMA | {"torch_dtype": "bfloat16", "quantization_config": config_json}, {}
        )
        save(flat_tensors, folder / "model.safetensors", metadata=metadata)
        assert read_config(folder).quant == name
        assert_dequantized(read(folder), expected, 2**-8)  # torchao's dequantize rounds to bfloat16
