"""Model configs and tensors from GGUF: written by llama.cpp's rules, and read back."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire.model.config import ModelError
from quire.model.gguf.architectures import ARCHITECTURES, hf_config
from quire.model.gguf.tensors import checkpoint_name, origins, tensor_change, unpaired_rows
from quire.tests.support import gguf_written
from quire.tests.support.cases import cases
from quire.tests.support.gguf_files import WRITTEN, File, family, shapes_of

# Config keys that GGUF does not store: llama.cpp hard-codes them or does not support them.
NOT_IN_GGUF: dict[str, dict[str, Any]] = {
    "deepseek-v3-small": {"rope_interleave": True},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3-text": {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6},
    "gemma3-vision": {"query_pre_attn_scalar": 32},
    "glm4-moe-lite": {"model_type": "deepseek_v3"},
    "gpt-oss-wide": {"swiglu_limit": 7.0},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "use_qk_norm": True},
    "llama4-text": {"attention_chunk_size": 8192, "floor_scale": 8192},
    "mistral": {"model_type": "llama", "sliding_window": None},
    "mistral-nemo": {"model_type": "llama"},
    "mistral3": {"model_type": "llama"},
    "mixtral": {"sliding_window": None},
    "phimoe": {"router_jitter_noise": 0.01},
    "qwen2-moe-window": {"use_sliding_window": False, "norm_topk_prob": False},
    "qwen2-window": {"use_sliding_window": False},
    "qwen3-moe-bias": {"norm_topk_prob": True},
    "qwen3-window": {"use_sliding_window": False, "layer_types": None},
}
FOR_EACH_VARIANT = pytest.mark.parametrize("name", WRITTEN)


def fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of all fields of a config."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from fields(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, tuple):
        yield f"{path} length", len(value)
        for index, item in enumerate(value):
            yield from fields(item, f"{path}[{index}]")
    else:
        yield path, value


@FOR_EACH_VARIANT
def test_gguf_config_matches_the_original_config(name):
    file = File(name)
    read = file.config()
    expected = file.variant.config | NOT_IN_GGUF.get(name, {})
    expected = {
        key: value for key, value in expected.items() if (key, value) != ("layer_types", None)
    }
    actual = dict(fields(family(read).config(read, file.variant.max_len)))
    expected_fields = dict(fields(family(expected).config(expected, file.variant.max_len)))
    assert actual.keys() == expected_fields.keys()
    for path, value in expected_fields.items():
        if path not in (".family", ".dtype"):  # several families share one architecture
            assert actual[path] == (
                pytest.approx(value, rel=3e-6) if isinstance(value, float) else value
            ), path


@FOR_EACH_VARIANT
def test_tensors_are_restored_exactly(name):
    file = File(name)
    read = file.config()
    tensor_origins = origins(file.architecture, file.shapes, read)
    assert {key: origin.shape for key, origin in tensor_origins.items()} == {
        key: tensor.shape for key, tensor in file.checkpoint.items()
    }
    for key, origin in tensor_origins.items():
        restored = origin.build(file.tensors.__getitem__)
        if origin.transform is None:
            np.testing.assert_array_equal(restored, file.checkpoint[key], err_msg=key)
        else:  # subtracting one from a norm's scale rounds
            np.testing.assert_allclose(
                restored, file.checkpoint[key], rtol=0, atol=1e-6, err_msg=key
            )


@FOR_EACH_VARIANT
def test_tensor_names_match_the_family(name):
    file = File(name)
    read = file.config()
    expected_shapes = shapes_of(family(read).config(read, file.variant.max_len))
    assert {
        key: origin.shape for key, origin in origins(file.architecture, file.shapes, read).items()
    } == expected_shapes
    canonical = getattr(family(read), "canonical", str)
    assert all(canonical(key) == key for key in expected_shapes)
    for tensor_name in file.shapes:
        if not tensor_name.startswith("rope_"):
            target = checkpoint_name(file.architecture, tensor_name)
            assert target is not None
            assert target.replace("{E}", "0") in expected_shapes


def test_every_architecture_has_a_variant():
    tested = {
        gguf_written.ARCHITECTURES[variant.config["model_type"]] for variant in WRITTEN.values()
    }
    # nemotron_h is the name of the variant without experts
    assert tested | {"nemotron_h"} == {*ARCHITECTURES}


def test_fused_qkv_and_experts_are_split():
    file = File("mixtral")
    config = file.config()
    tensors = dict(file.tensors)
    for layer in range(config["num_hidden_layers"]):
        matrices = [tensors.pop(f"blk.{layer}.attn_{x}.weight") for x in "qkv"]
        tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(matrices)
        matrices = [tensors.pop(f"blk.{layer}.ffn_{x}_exps.weight") for x in ("gate", "up")]
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(matrices, axis=1)
    tensor_origins = origins(
        "llama", {name: tensor.shape for name, tensor in tensors.items()}, config
    )
    assert tensor_origins.keys() == file.checkpoint.keys()
    for name, origin in tensor_origins.items():
        assert origin.transform is None
        np.testing.assert_array_equal(
            origin.build(tensors.__getitem__), file.checkpoint[name], err_msg=name
        )


def test_llama_cpp_rotary_permutation_is_undone():
    rows = np.arange(3 * 8)
    np.testing.assert_array_equal(gguf_written.permuted(rows, 3)[unpaired_rows(3, 8)], rows)
    change = tensor_change(
        "llama", "blk.0.attn_k.weight", {"num_key_value_heads": 3, "head_dim": 8}
    )
    np.testing.assert_array_equal(change.rows, unpaired_rows(3, 8))
    assert tensor_change("llama", "blk.0.attn_v.weight", {}).rows is None
    assert tensor_change("qwen2", "blk.0.attn_q.weight", {}).rows is None


def test_llama3_rope_scaling_is_recovered_from_rope_freqs():
    file = File("llama-llama3")
    # an original length that no published model has
    assert file.config()["rope_scaling"]["rope_type"] == "longrope"
    hf = file.variant.config | {"rope_theta": 500000.0}
    for low, high, length, factor in ((1.0, 4.0, 8192, 8.0), (1.0, 4.0, 8192, 32.0)):
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }
        file.tensors |= gguf_written.factors(hf | {"rope_scaling": scaling})
        assert file.config(**{"rope.freq_base": 500000.0})["rope_scaling"] == scaling


def test_partial_rotary_factor_is_not_rounded_down():
    file = File("glm4")
    for head in range(2, 257, 2):
        for rotary_dim in range(2, head + 1, 2):
            sizes = {
                "attention.key_length": head,
                "attention.value_length": head,
                "rope.dimension_count": rotary_dim,
            }
            share = (
                file.config(**sizes).get("partial_rotary_factor", 1.0) if head % 30 == 0 else None
            )
            assert share is None or int(head * share) == rotary_dim


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"block_count": None}, "llama.block_count is missing"),
        (
            "llama",
            {"block_count": "3"},
            "llama.block_count = '3'; it must be a whole number of at least 1",
        ),
        ("llama", {"block_count": 10**9}, "the file has 30 tensors"),
        ("llama", {"attention.head_count": [4, 8, 4]}, "must be the same for all layers"),
        (
            "llama",
            {"attention.head_count": [4, True, 4]},
            "has True at place 1; it must be a whole number",
        ),
        ("llama", {"attention.value_length": 8}, "must be the 16 of attention.key_length"),
        ("llama", {"attention.layer_norm_rms_epsilon": float("nan")}, "must be a number"),
        ("llama", {"attention.layer_norm_rms_epsilon": 0.0}, "must be a positive number"),
        ("llama", {"rope.dimension_count": 17}, "must be even and at most the heads' 16"),
        ("llama", {"rope.scaling.type": "su"}, "it can be none, linear, yarn or longrope"),
        ("llama", {"rope.scaling.type": "yarn"}, "yarn needs a positive number"),
        ("mixtral", {"expert_used_count": 5}, "there are 4 experts"),
        ("minimax-m2", {"expert_gating_func": 4}, "it can be 1 for softmax or 2 for sigmoid"),
        ("glm4", {"rope.dimension_sections": [8, 4, 4, 0]}, "vision models are not supported"),
        ("cohere2", {"attention.sliding_window_pattern": [True]}, "has 1 entries for 4 layers"),
        ("llama4-text", {"attention.sliding_window": 0}, "is not supported"),
        ("gemma4-moe", {"attention.sliding_window_pattern": None}, "must be a list"),
        ("qwen3-5", {"attention.recurrent_layers": [True]}, "has 1 entries for 4 layers"),
        ("qwen3-5", {"ssm.inner_size": 130}, "must divide among 4 value heads"),
        ("mamba2", {"ssm.inner_size": 129}, "it must be a multiple of 8 heads"),
    ],
)
def test_error_names_the_invalid_key(name, change, message):
    with pytest.raises(ModelError, match=message):
        File(name).config(**change)


def test_error_lists_the_supported_architectures():
    with pytest.raises(ModelError, match="'mamba'.*llama.*smollm3"):
        hf_config({"general.architecture": "mamba"}, {})
    with pytest.raises(ModelError, match="general.architecture is missing"):
        hf_config({}, {})


def test_unknown_missing_and_misshapen_tensors_are_rejected():
    file = File("llama")
    config = file.config()
    with pytest.raises(ModelError, match=r"blk.0.attn_extra.weight is not known in llama models"):
        origins("llama", file.shapes | {"blk.0.attn_extra.weight": (3,)}, config)
    with pytest.raises(
        ModelError, match=r"blk.0.attn_q.weight has shape \(3, 64\); it must have 64 rows"
    ):
        origins("llama", file.shapes | {"blk.0.attn_q.weight": (3, 64)}, config)
    with_ignored = file.shapes | {
        "blk.3.attn_norm.weight": (64,),
        "blk.0.attn_rot_embd.weight": (8,),
    }
    assert origins("llama", with_ignored, config).keys() == file.checkpoint.keys()
    file = File("granite-moe-shared")
    incomplete = {
        name: shape for name, shape in file.shapes.items() if name != "blk.1.ffn_up_shexp.weight"
    }
    with pytest.raises(
        ModelError, match="needs a tensor for up in addition to blk.1.ffn_gate_shexp.weight"
    ):
        origins("granitemoe", incomplete, file.config())


def test_inconsistent_biases_are_rejected():
    file = File("llama-biases")
    del file.shapes["blk.1.attn_q.bias"]
    with pytest.raises(ModelError, match=r"layer 1 has no tensor attn_q.bias, which others have"):
        file.config()
    file = File("qwen3-moe-bias")
    file.shapes = {
        name: shape for name, shape in file.shapes.items() if not name.endswith("attn_output.bias")
    }
    with pytest.raises(ModelError, match="attn_q has a bias and attn_output has none"):
        file.config()


JUNK = [
    None,
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    1e30,
    0.5,
    float("nan"),
    float("inf"),
    True,
    "",
    "yarn",
    "longrope",
    [],
    [0],
    [1, 2],
    [2**40] * 9,
    ["a"],
    [True, False] * 9,
    [[1]],
    {},
    b"x",
]


def test_random_metadata_gives_a_config_or_model_error():
    """With random values of keys and random shapes of tensors."""
    rng = random.Random(11)
    files = {name: File(name) for name in WRITTEN}
    for _ in range(cases(4000, least=400)):
        file = files[rng.choice([*files])]
        metadata = dict(file.metadata)
        shapes = dict(file.shapes)
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.6:
                metadata[rng.choice([*metadata, f"{file.architecture}.rope.scaling.type"])] = (
                    rng.choice(JUNK)
                )
            elif rng.random() < 0.5:
                del shapes[rng.choice([*shapes])]
            else:
                name = rng.choice([*shapes])
                shapes[name] = rng.choice(
                    [(), (0,), (1,), (2, 2), (7, 64), (3, 5, 7), shapes[name][::-1]]
                )
        try:
            config = hf_config(metadata, shapes, lambda name, file=file: file.tensors[name])
            origins(metadata["general.architecture"], shapes, config)
        except ModelError:
            pass
