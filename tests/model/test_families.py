"""Published config.json files: they load, say what is known of their models, and nothing in them
goes unread.
"""

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
BY_NAME = pytest.mark.parametrize("name", PUBLISHED)


def read(hf: dict, max_len: int | None = None):
    return loader.family_for(hf).config(split_quantization(hf)[0], max_len)


@BY_NAME
def test_published_config(name):
    published = PUBLISHED[name]
    config = read(published.config)
    assert [layer.attention.window for layer in config.layers] == published.windows
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract(config)))
    assert parameters == pytest.approx(published.parameters, rel=0.001)


@pytest.mark.parametrize("name", RELATIVES | RELATIVES_MOE)
def test_relatives_load_or_are_refused_by_name(name):
    like, change, expected = (RELATIVES | RELATIVES_MOE)[name]
    hf = (PUBLISHED | PUBLISHED_MOE)[like].config | change
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=re.escape(expected)):
            read(hf)
        return
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract(read(hf)))) == pytest.approx(
        expected, rel=0.005
    )


@BY_NAME
def test_sources_fill_every_leaf_exactly(name):
    """The parts that the checkpoint is made of have as many values as the leaf, and no name comes
    twice.
    """
    config = read(PUBLISHED[name].config)
    sources = loader.family_for(PUBLISHED[name].config).sources(config)
    names = []

    def check(spec, source):
        assert sum(int(np.prod(part.shape)) for part in source.parts) == spec.size
        names.extend(part.name for part in source.parts)

    jax.tree.map(check, abstract(config), sources)
    assert len(names) == len(set(names))


@BY_NAME
def test_an_unread_key_is_refused(name):
    with pytest.raises(ModelError, match="'?attention_chunk_size'? = 8192"):
        read(PUBLISHED[name].config | {"attention_chunk_size": 8192})


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
def test_a_value_of_the_wrong_kind_is_a_model_error(name, tmp_path):
    """Whatever a key holds, reading ends well or in one line that says what is wrong."""
    published = PUBLISHED[name].config
    for key in published:
        for value in ("x", -1, 0, 1.5, [], {}, [{}], {"rope_type": "yarn"}, None, True):
            (tmp_path / "config.json").write_text(json.dumps(published | {key: value}))
            try:
                loader.read_config(tmp_path)
            except ModelError as error:
                assert "\n" not in str(error)


def test_rope_of_llama3():
    """Llama 3.1: short waves stay, long ones turn 8 times slower, and those between are between."""
    hf = PUBLISHED["Llama-3.1-8B"].config
    rope = read(hf).layers[0].attention.rope
    plain = read(hf | {"rope_scaling": None}).layers[0].attention.rope
    ratio = np.array(plain.inv_freq) / rope.inv_freq
    assert len(ratio) == 64
    wavelength = 2 * np.pi / np.array(plain.inv_freq)
    np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1)
    np.testing.assert_allclose(ratio[wavelength > 8192], 8)
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(between) and np.all((between > 1) & (between < 8))


def test_longrope_is_chosen_by_the_served_length():
    """Phi-3: the short factors within the original 4k, the long ones beyond; the scale of cos and
    sin is the same.
    """
    hf = PUBLISHED["Phi-3-mini-128k"].config
    short, long = (read(hf, max_len).layers[0].attention.rope for max_len in (4096, 4097))
    assert long == read(hf).layers[0].attention.rope
    factors = [np.array(hf["rope_scaling"][name]) for name in ("short_factor", "long_factor")]
    plain = 10000.0 ** -(np.arange(48) / 48)
    np.testing.assert_allclose(np.array(short.inv_freq) * factors[0], plain)
    np.testing.assert_allclose(np.array(long.inv_freq) * factors[1], plain)
    assert short.factor == long.factor == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)


def test_longrope_under_its_first_name():
    hf = PUBLISHED["Phi-3-mini-128k"].config
    assert read(hf | {"rope_scaling": hf["rope_scaling"] | {"type": "su"}}) == read(hf)
    with pytest.raises(ModelError, match="'linear' is not supported for phi3"):
        read(hf | {"rope_scaling": {"type": "linear", "factor": 2.0}})


def test_partial_rotary():
    # of 64 pairs
    assert len(read(PUBLISHED["Phi-4-mini"].config).layers[0].attention.rope.inv_freq) == 48


def test_gemma3_turns_local_and_global_layers_differently():
    config = read(PUBLISHED["gemma-3-4b"].config)
    local = config.layers[0].attention.rope
    full = config.layers[5].attention.rope
    assert local.inv_freq[64] == pytest.approx(10000**-0.5)
    assert full.inv_freq[64] == pytest.approx(1000000**-0.5 / 8)
    assert config.embed_scale == 2560**0.5
    assert read(PUBLISHED["gemma-3-27b"].config).layers[0].attention.scale == 168**-0.5


def test_olmo3_stretches_global_layers_alone():
    config = read(PUBLISHED["OLMo-3-7B"].config)
    local = config.layers[0].attention.rope
    full = config.layers[3].attention.rope
    assert (local.factor, full.factor) == (1.0, 1.2079441541679836)
    assert local.inv_freq[-1] == pytest.approx(full.inv_freq[-1] * 8)
    assert local.inv_freq[0] == full.inv_freq[0]


def test_gemma2_caps():
    config = read(PUBLISHED["gemma-2-9b"].config)
    assert (config.layers[0].attention.soft_cap, config.final_soft_cap, config.tied) == (
        50.0,
        30.0,
        True,
    )


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("Llama-3.1-8B", {"rope_parameters": {**PUBLISHED["Llama-3.1-8B"].config["rope_scaling"], "rope_theta": 5e5}}),
        ("Qwen3-8B", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}),
        (
            "gemma-3-1b",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1000000},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
                },
                "layer_types": ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(26)],
                "_sliding_window_pattern": 6,
            },
        ),
        (
            "OLMo-3-7B",
            {
                "rope_parameters": {
                    "full_attention": {**PUBLISHED["OLMo-3-7B"].config["rope_scaling"], "rope_theta": 500000},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
                }
            },
        ),
        ("Phi-4-mini", {"rope_parameters": PUBLISHED["Phi-4-mini"].config["rope_scaling"] | {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        }}),
    ],
)  # fmt: skip
def test_new_rope_parameters_mean_the_same(name, new):
    """transformers 5 rewrites the rope keys; both forms give one config."""
    hf = PUBLISHED[name].config
    gone = (
        "rope_theta",
        "rope_scaling",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "partial_rotary_factor",
    )
    assert read({key: value for key, value in hf.items() if key not in gone} | new) == read(hf)


def test_windows_by_layer_types():
    hf = PUBLISHED["Qwen2.5-7B"].config
    slides = {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 21}
    assert [layer.attention.window for layer in read(hf | slides).layers] == [None] * 21 + [
        1024
    ] * 7
    types = ["sliding_attention", "full_attention"] * 14
    assert [
        layer.attention.window for layer in read(hf | slides | {"layer_types": types}).layers
    ] == [1024, None] * 14
    with pytest.raises(ModelError, match="no sliding_window is in use"):
        read(hf | {"layer_types": types})
    with pytest.raises(ModelError, match="27 entries for 28 layers"):
        read(hf | slides | {"layer_types": types[1:]})
    with pytest.raises(ModelError, match="'chunked_attention' is not supported"):
        read(hf | slides | {"layer_types": ["chunked_attention"] * 28})


def test_a_missing_window_is_not_a_null_one():
    """As in transformers: Mistral without the key has a window of 4096, with null it has none."""
    hf = dict(PUBLISHED["Mistral-7B-v0.3"].config)
    assert read(hf).layers[0].attention.window is None
    del hf["sliding_window"]
    assert read(hf).layers[0].attention.window == 4096


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
def test_what_is_not_supported_is_named(name, change, message):
    with pytest.raises(ModelError, match=message):
        read(PUBLISHED[name].config | change)


@pytest.mark.parametrize(
    ("stored", "plain"),
    [
        ("language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
    ],
)
def test_nested_names(stored, plain):
    assert loader.canonical_name(loader.family_for({"model_type": "gemma3_text"}), stored) == plain


def test_dtype_of_a_nested_config(tmp_path):
    hf = PUBLISHED["gemma-3-4b"].config
    text = hf["text_config"] | {"torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(hf | {"text_config": text}))
    config = loader.read_config(tmp_path)
    assert config.dtype == "bfloat16"
    assert loader.read_config(tmp_path, "float32") == replace(config, dtype="float32")


def test_interleaved_pairs_give_the_same_scores():
    """A checkpoint that keeps rotary pairs side by side, turned to halves, against its own
    rotation.
    """
    rng = np.random.default_rng(0)
    attention = Attention(
        heads=2, kv_heads=1, head_dim=12, scale=1.0, rope=Rope((1.0, 0.1, 0.01, 0.003)), bias=True
    )
    D = 8
    H = 12
    pairs = 4
    at = np.arange(5) * 7
    sources = common.attention_sources(attention, D, "a", interleaved=True)
    x_TD = rng.standard_normal((len(at), D))
    stored = {}
    loaded_TGH = np.zeros((len(at), 4, H))
    for part in (*sources.qkv_DGH.parts, *sources.qkv_bias_GH.parts):
        tensor = stored[part.name] = rng.standard_normal(part.shape)
        whole = np.zeros((D, 4, H) if "weight" in part.name else (4, H))
        whole[part.at] = part.transform(tensor)
        loaded_TGH += np.einsum("TD,DGH->TGH", x_TD, whole) if "weight" in part.name else whole

    phase = np.exp(1j * at[:, None, None] * np.array(attention.rope.inv_freq))

    def published(name: str):
        x_TNH = (x_TD @ stored[f"a.{name}_proj.weight"].T + stored[f"a.{name}_proj.bias"]).reshape(
            len(at), -1, H
        )
        turned = (x_TNH[..., : 2 * pairs : 2] + 1j * x_TNH[..., 1 : 2 * pairs : 2]) * phase
        return np.concatenate([turned.real, turned.imag, x_TNH[..., 2 * pairs :]], axis=-1)

    cos_sin = angles(at, attention.rope.inv_freq)
    q_TNH, k_TKH = (
        np.asarray(rotate(jnp.asarray(x), cos_sin)) for x in (loaded_TGH[:, :2], loaded_TGH[:, 2:3])
    )
    scores, expected = (
        np.einsum("TNH,JKH->NTJ", *both) for both in ((q_TNH, k_TKH), map(published, "qk"))
    )
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-3)
    np.testing.assert_allclose(
        loaded_TGH[:, 3:], (x_TD @ stored["a.v_proj.weight"].T + stored["a.v_proj.bias"])[:, None]
    )
