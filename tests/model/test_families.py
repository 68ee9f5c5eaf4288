"""Published config.json files: parameter counts, windows and rope; every key is read."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.model.checkpoint import loader
from quire.model.checkpoint.published import split_quantization
from quire.model.config import Attention, ModelError, Rope
from quire.model.families import common
from quire.model.weights import abstract
from quire.ops.rope import angles, rotate
from quire.tests.support.published import PUBLISHED, RELATIVES
from quire.tests.support.published_moe import PUBLISHED_MOE, RELATIVES_MOE
from quire.tests.support.published_more import PUBLISHED_MORE

PUBLISHED = PUBLISHED | PUBLISHED_MORE
FOR_EACH_MODEL = pytest.mark.parametrize("name", PUBLISHED)


def parse_config(hf: dict, max_len: int | None = None):
    return loader.family_for(hf).config(split_quantization(hf)[0], max_len)


@FOR_EACH_MODEL
def test_published_config_gives_the_known_parameters(name):
    published = PUBLISHED[name]
    config = parse_config(published.config)
    assert [layer.attention.window for layer in config.layers] == published.windows
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract(config)))
    assert parameters == pytest.approx(published.parameters, rel=0.001)


@pytest.mark.parametrize("name", RELATIVES | RELATIVES_MOE)
def test_related_models_load_or_are_rejected(name):
    base_model, change, expected = (RELATIVES | RELATIVES_MOE)[name]
    hf = (PUBLISHED | PUBLISHED_MOE)[base_model].config | change
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=re.escape(expected)):
            parse_config(hf)
        return
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract(parse_config(hf)))) == pytest.approx(
        expected, rel=0.005
    )


@FOR_EACH_MODEL
def test_sources_fill_every_leaf_exactly(name):
    """A leaf's source tensors have as many elements as the leaf, and none is used twice."""
    config = parse_config(PUBLISHED[name].config)
    sources = loader.family_for(PUBLISHED[name].config).sources(config)
    names = []

    def check(spec, source):
        assert sum(int(np.prod(tensor.shape)) for tensor in source.parts) == spec.size
        names.extend(tensor.name for tensor in source.parts)

    jax.tree.map(check, abstract(config), sources)
    assert len(names) == len(set(names))


@FOR_EACH_MODEL
def test_unsupported_config_key_is_rejected(name):
    with pytest.raises(ModelError, match="'?attention_chunk_size'? = 8192"):
        parse_config(PUBLISHED[name].config | {"attention_chunk_size": 8192})


@pytest.mark.parametrize(
    "name",
    [
        "Llama-3.1-8B",
        "Mistral-7B-v0.1",
        "Qwen2.5-7B",
        "gemma-2-9b",
        "gemma-3-4b",
        "gemma-3-1b",
        "Phi-4-mini",
        "OLMo-3-7B",
        "granite-3.3-8b",
        "SmolLM3-3B",
        "GLM-4-9B-0414",
        "Seed-OSS-36B",
        "EXAONE-4.0-32B",
        "Ministral-3-3B",
        "c4ai-command-r7b",
        "ERNIE-4.5-0.3B",
        "Hunyuan-7B",
    ],
)
@pytest.mark.slow
def test_wrong_config_values_raise_one_line_errors(name, tmp_path):
    """For any value of any key."""
    published = PUBLISHED[name].config
    for key in published:
        for value in ("x", -1, 0, 1.5, [], {}, [{}], {"rope_type": "yarn"}, None, True):
            (tmp_path / "config.json").write_text(json.dumps(published | {key: value}))
            try:
                loader.read_config(tmp_path)
            except ModelError as error:
                assert "\n" not in str(error)


def test_llama3_rope_scales_long_wavelengths():
    """Llama 3.1: short wavelengths stay, long ones grow by 8, those between by 1 to 8."""
    hf = PUBLISHED["Llama-3.1-8B"].config
    rope = parse_config(hf).layers[0].attention.rope
    unscaled = parse_config(hf | {"rope_scaling": None}).layers[0].attention.rope
    ratio = np.array(unscaled.inv_freq) / rope.inv_freq
    assert len(ratio) == 64
    wavelength = 2 * np.pi / np.array(unscaled.inv_freq)
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1)
    np.testing.assert_allclose(ratio[wavelength > 8192], 8)
    middle = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(middle) and np.all((middle > 1) & (middle < 8))


def test_longrope_factors_depend_on_max_model_len():
    """Phi-3 uses the short factors up to 4096 positions, and one attention factor for both."""
    hf = PUBLISHED["Phi-3-mini-128k"].config
    short_rope, long_rope = (
        parse_config(hf, max_len).layers[0].attention.rope for max_len in (4096, 4097)
    )
    assert long_rope == parse_config(hf).layers[0].attention.rope
    factors = [np.array(hf["rope_scaling"][name]) for name in ("short_factor", "long_factor")]
    unscaled = 10000.0 ** -(np.arange(48) / 48)
    np.testing.assert_allclose(np.array(short_rope.inv_freq) * factors[0], unscaled)
    np.testing.assert_allclose(np.array(long_rope.inv_freq) * factors[1], unscaled)
    assert (
        short_rope.factor
        == long_rope.factor
        == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)
    )


def test_longrope_type_su():
    hf = PUBLISHED["Phi-3-mini-128k"].config
    assert parse_config(hf | {"rope_scaling": hf["rope_scaling"] | {"type": "su"}}) == parse_config(
        hf
    )
    with pytest.raises(ModelError, match="'linear' is not supported for phi3"):
        parse_config(hf | {"rope_scaling": {"type": "linear", "factor": 2.0}})


def test_partial_rotary_factor():
    # of 64 rotary pairs
    assert len(parse_config(PUBLISHED["Phi-4-mini"].config).layers[0].attention.rope.inv_freq) == 48


def test_gemma3_local_and_global_layers_have_different_rope():
    config = parse_config(PUBLISHED["gemma-3-4b"].config)
    local = config.layers[0].attention.rope
    full = config.layers[5].attention.rope
    assert local.inv_freq[64] == pytest.approx(10000**-0.5)
    assert full.inv_freq[64] == pytest.approx(1000000**-0.5 / 8)
    assert config.embed_scale == 2560**0.5
    assert parse_config(PUBLISHED["gemma-3-27b"].config).layers[0].attention.scale == 168**-0.5


def test_olmo3_scales_rope_of_global_layers_only():
    config = parse_config(PUBLISHED["OLMo-3-7B"].config)
    local = config.layers[0].attention.rope
    full = config.layers[3].attention.rope
    assert (local.factor, full.factor) == (1.0, 1.2079441541679836)
    assert local.inv_freq[-1] == pytest.approx(full.inv_freq[-1] * 8)
    assert local.inv_freq[0] == full.inv_freq[0]


def test_gemma2_soft_caps():
    config = parse_config(PUBLISHED["gemma-2-9b"].config)
    assert (config.layers[0].attention.soft_cap, config.final_soft_cap, config.tied) == (
        50.0,
        30.0,
        True,
    )


@pytest.mark.parametrize(
    ("name", "new"),
    [
        (
            "Llama-3.1-8B",
            {
                "rope_parameters": {
                    **PUBLISHED["Llama-3.1-8B"].config["rope_scaling"],
                    "rope_theta": 5e5,
                }
            },
        ),
        ("Qwen3-8B", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}),
        (
            "gemma-3-1b",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1000000},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
                },
                "layer_types": [
                    "sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(26)
                ],
                "_sliding_window_pattern": 6,
            },
        ),
        (
            "OLMo-3-7B",
            {
                "rope_parameters": {
                    "full_attention": {
                        **PUBLISHED["OLMo-3-7B"].config["rope_scaling"],
                        "rope_theta": 500000,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
                }
            },
        ),
        (
            "Phi-4-mini",
            {
                "rope_parameters": PUBLISHED["Phi-4-mini"].config["rope_scaling"]
                | {
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.75,
                }
            },
        ),
    ],
)
def test_rope_parameters_of_transformers_5(name, new):
    """transformers 5 rewrites the rope keys; both forms give one config."""
    hf = PUBLISHED[name].config
    old_keys = (
        "rope_theta",
        "rope_scaling",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "partial_rotary_factor",
    )
    assert parse_config(
        {key: value for key, value in hf.items() if key not in old_keys} | new
    ) == parse_config(hf)


def test_sliding_windows_follow_layer_types():
    hf = PUBLISHED["Qwen2.5-7B"].config
    window_keys = {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 21}
    assert [layer.attention.window for layer in parse_config(hf | window_keys).layers] == [
        None
    ] * 21 + [1024] * 7
    types = ["sliding_attention", "full_attention"] * 14
    assert [
        layer.attention.window
        for layer in parse_config(hf | window_keys | {"layer_types": types}).layers
    ] == [1024, None] * 14
    with pytest.raises(ModelError, match="no sliding_window is in use"):
        parse_config(hf | {"layer_types": types})
    with pytest.raises(ModelError, match="27 entries for 28 layers"):
        parse_config(hf | window_keys | {"layer_types": types[1:]})
    with pytest.raises(ModelError, match="'chunked_attention' is not supported"):
        parse_config(hf | window_keys | {"layer_types": ["chunked_attention"] * 28})


def test_missing_sliding_window_differs_from_null():
    """As in transformers, Mistral's default window is 4096; null disables it."""
    hf = dict(PUBLISHED["Mistral-7B-v0.3"].config)
    assert parse_config(hf).layers[0].attention.window is None
    del hf["sliding_window"]
    assert parse_config(hf).layers[0].attention.window == 4096


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Llama-3.1-8B", {"hidden_act": "relu6"}, "'relu6' is not known"),
        ("Llama-3.1-8B", {"num_key_value_heads": 5}, "32 query heads do not divide into 5"),
        (
            "Llama-3.1-8B",
            {"rope_scaling": {"rope_type": "spiral"}},
            "rope_type 'spiral' is not known",
        ),
        (
            "Llama-3.1-8B",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "needs the parameter 'low_freq",
        ),
        (
            "Llama-3.1-8B",
            {"rope_scaling": {"rope_type": "linear", "factor": -2}},
            "factor = -2; it must be a positive",
        ),
        ("Llama-3.1-8B", {"rope_theta": "5e5"}, "rope_theta = '5e5'; it must be a number"),
        (
            "Llama-3.1-8B",
            {"tie_word_embeddings": "no"},
            "tie_word_embeddings = 'no'; it must be true or false",
        ),
        ("Llama-3.1-8B", {"num_hidden_layers": "32"}, "num_hidden_layers = '32'"),
        (
            "gemma-3-1b",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping = 50.0 is not supported",
        ),
        ("gemma-2-9b", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma-3-1b", {"rope_parameters": {"rope_type": "default"}}, "lacks 'sliding_attention'"),
        ("Phi-3-mini-128k", {"head_dim": 64}, "'long_factor' has 48 entries; the heads have 32"),
        ("Mistral-7B-v0.1", {"sliding_window": 0}, "sliding_window = 0; it must be a whole number"),
        ("Qwen2.5-7B", {"use_mrope": True}, "use_mrope = True is not supported"),
        ("Qwen3-8B", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_error_names_the_unsupported_option(name, change, message):
    with pytest.raises(ModelError, match=message):
        parse_config(PUBLISHED[name].config | change)


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
    ],
)
def test_names_of_nested_text_models(stored, canonical):
    assert (
        loader.canonical_name(loader.family_for({"model_type": "gemma3_text"}), stored) == canonical
    )


def test_dtype_of_a_nested_text_config(tmp_path):
    hf = PUBLISHED["gemma-3-4b"].config
    text = hf["text_config"] | {"torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(hf | {"text_config": text}))
    config = loader.read_config(tmp_path)
    assert config.dtype == "bfloat16"
    assert loader.read_config(tmp_path, "float32") == replace(config, dtype="float32")


def test_interleaved_rotary_pairs_give_the_same_scores():
    """Weights reordered from interleaved pairs to halves, against the checkpoint's own rotation."""
    rng = np.random.default_rng(0)
    attention = Attention(
        heads=2, kv_heads=1, head_dim=12, scale=1.0, rope=Rope((1.0, 0.1, 0.01, 0.003)), bias=True
    )
    D = 8
    H = 12
    pairs = 4
    position_ids = np.arange(5) * 7
    sources = common.attention_sources(attention, D, "a", interleaved=True)
    x_TD = rng.standard_normal((len(position_ids), D))
    stored = {}
    loaded_TGH = np.zeros((len(position_ids), 4, H))
    for tensor_source in (*sources.qkv_DGH.parts, *sources.qkv_bias_GH.parts):
        tensor = stored[tensor_source.name] = rng.standard_normal(tensor_source.shape)
        leaf = np.zeros((D, 4, H) if "weight" in tensor_source.name else (4, H))
        leaf[tensor_source.at] = tensor_source.transform(tensor)
        loaded_TGH += (
            np.einsum("TD,DGH->TGH", x_TD, leaf) if "weight" in tensor_source.name else leaf
        )

    phase = np.exp(1j * position_ids[:, None, None] * np.array(attention.rope.inv_freq))

    def published(name: str):
        x_TNH = (x_TD @ stored[f"a.{name}_proj.weight"].T + stored[f"a.{name}_proj.bias"]).reshape(
            len(position_ids), -1, H
        )
        rotated = (x_TNH[..., : 2 * pairs : 2] + 1j * x_TNH[..., 1 : 2 * pairs : 2]) * phase
        return np.concatenate([rotated.real, rotated.imag, x_TNH[..., 2 * pairs :]], axis=-1)

    cos_sin = angles(position_ids, attention.rope.inv_freq)
    q_TNH, k_TKH = (
        np.asarray(rotate(jnp.asarray(x), cos_sin)) for x in (loaded_TGH[:, :2], loaded_TGH[:, 2:3])
    )
    scores, expected = (
        np.einsum("TNH,JKH->NTJ", *queries_and_keys)
        for queries_and_keys in ((q_TNH, k_TKH), map(published, "qk"))
    )
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-3)
    np.testing.assert_allclose(
        loaded_TGH[:, 3:], (x_TD @ stored["a.v_proj.weight"].T + stored["a.v_proj.bias"])[:, None]
    )
