"""Draft heads of every published kind: reading folders, and outputs against numpy in float64."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.model import decoder, draft_heads
from quire.model.checkpoint.loader import load_weights, read_config
from quire.model.config import ModelError
from quire.model.mixers import LayerHooks
from quire.sharding.spec import random_arrays
from quire.tests.support import naive_heads as naive
from quire.tests.support import tiny, tiny_deepseek, tiny_qwen, uncached

pytestmark = pytest.mark.usefixtures("compiled_quickly")
D = 32
V = 96
L = 8
T = 7
TARGET = tiny.LLAMA | {"num_hidden_layers": L}
LAYER_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": D,
    "vocab_size": V,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(config, weights, float64 tensors) of the target model."""
    folder = tmp_path_factory.mktemp("target")
    tensors = tiny.write(folder, TARGET)
    config = read_config(folder)
    return config, load_weights(folder, config), as_float64(tensors)


def as_float64(tensors):
    return {name: value.astype(np.float64) for name, value in tensors.items()}


def layer_shapes(prefix: str, config: dict, inputs: int, bias: bool = False, qk_norm: bool = False):
    """Tensor shapes of a Llama layer whose attention inputs have width `inputs`."""
    W = config["hidden_size"]
    F = config["intermediate_size"]
    N = config["num_attention_heads"]
    K = config["num_key_value_heads"]
    H = config.get("head_dim") or W // N
    shapes = {
        f"{prefix}.self_attn.{x}_proj.weight": (n * H, inputs)
        for x, n in (("q", N), ("k", K), ("v", K))
    }
    if bias:
        shapes |= {
            f"{prefix}.self_attn.{x}_proj.bias": (n * H,) for x, n in (("q", N), ("k", K), ("v", K))
        }
    if qk_norm:
        shapes |= {f"{prefix}.self_attn.{x}_norm.weight": (H,) for x in "qk"}
    shapes |= {
        f"{prefix}.self_attn.o_proj.weight": (W, N * H),
        f"{prefix}.mlp.down_proj.weight": (W, F),
    }
    shapes |= {f"{prefix}.mlp.{x}_proj.weight": (F, W) for x in ("gate", "up")}
    return shapes | {f"{prefix}.post_attention_layernorm.weight": (W,)}


def random_rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def assert_close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=2e-4, atol=2e-4)


def medusa_shapes(count: int, depth: int, bias: bool, table: int | None):
    shapes: dict[str, tuple[int, ...]] = {}
    for c in range(count):
        for j in range(depth):
            shapes[f"blocks.{c}.layers.{j}.weight"] = (D, D)
            if bias:
                shapes[f"blocks.{c}.layers.{j}.bias"] = (D,)
        if table:
            shapes[f"lm_heads.{c}.weight"] = (table, D)
    return shapes


MEDUSA_CONFIG = {
    "medusa_num_heads": 3,
    "medusa_num_layers": 2,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
}
VLLM_CONFIG = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "hidden_size": D,
    "vocab_size": V,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "max_paths": 64,
    "topk": 10,
    "truncated_vocab_size": V,
    "original_lm_head": False,
    "medusa_fc_bias": False,
}


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
def test_original_medusa_checkpoint_format(tmp_path, target, prefix):
    config, weights, _ = target
    tensors = tiny.even(medusa_shapes(3, 2, True, V))
    stored = {}
    for name, value in tensors.items():
        kind, c, *suffixes = name.split(".")
        head_weights = (
            f"{c}.{suffixes[1]}.linear.{suffixes[2]}" if kind == "blocks" else f"{c}.2.weight"
        )
        stored[f"{prefix}{head_weights}"] = value
    tmp_path.joinpath("config.json").write_text(json.dumps(MEDUSA_CONFIG))
    save_file(stored, tmp_path / "medusa_lm_head.safetensors")
    heads = draft_heads.read_heads(tmp_path, config, "medusa")
    assert (heads.count, heads.depth, heads.bias, heads.own_head) == (3, 2, True, True)
    head_weights = draft_heads.load(tmp_path, heads)
    hidden = random_rows(1, 5, D)
    logits = draft_heads.medusa_logits(
        heads, head_weights, weights, jnp.asarray(hidden, jnp.float32)
    )
    assert logits.shape == (3, 5, V) and logits.dtype == jnp.float32
    for c in range(3):
        assert_close(
            logits[c],
            naive.medusa(
                as_float64(tensors), c, 2, hidden, as_float64(tensors)[f"lm_heads.{c}.weight"]
            ),
        )


@pytest.mark.parametrize(
    "form", ["own heads", "the target's head", "fewer tokens", "fewer heads than tensors"]
)
def test_vllm_medusa_checkpoint_format(tmp_path, target, form):
    config, weights, target_tensors = target
    hf = dict(VLLM_CONFIG)
    table = V
    if form == "the target's head":
        hf = hf | {"original_lm_head": True}
        table = None
    elif form == "fewer tokens":
        hf = hf | {"truncated_vocab_size": 20}
        table = 20
    tensors = tiny.even(
        medusa_shapes(3 if form == "fewer heads than tensors" else 2, 1, False, table)
    )
    token_map = {}
    tokens = np.arange(V)
    if form == "fewer tokens":
        tokens = np.random.default_rng(2).permutation(V)[:20]
        token_map["token_map"] = tokens
    tiny.write(tmp_path, hf, tensors | token_map)
    heads = draft_heads.read_heads(tmp_path, config, "medusa")
    head_weights = draft_heads.load(tmp_path, heads)
    hidden = random_rows(1, 5, D)
    logits = np.asarray(
        draft_heads.medusa_logits(heads, head_weights, weights, jnp.asarray(hidden, jnp.float32))
    )
    assert logits.shape == (2, 5, V)
    for c in range(2):
        lm = (
            target_tensors["lm_head.weight"]
            if table is None
            else as_float64(tensors)[f"lm_heads.{c}.weight"]
        )
        assert_close(logits[c][:, tokens], naive.medusa(as_float64(tensors), c, 1, hidden, lm))
        assert np.isneginf(np.delete(logits[c], tokens, axis=1)).all()


def run_heads(heads, head_weights, weights, tokens, target_outputs, draft_tokens):
    """(features, hidden states, logits) of `tokens`, which have target features, and draft tokens.

    The features of the draft tokens are the heads' own outputs.
    """
    config = heads.model
    target_features = draft_heads.take_features(
        heads, head_weights, jnp.asarray(target_outputs, jnp.float32)
    )
    all_tokens = np.asarray([*tokens, *draft_tokens])
    length = len(all_tokens)
    features = np.zeros((len(all_tokens), target_features.shape[1]), np.float32)
    features[: len(tokens)] = target_features
    feature = hidden = features
    for end in range(len(tokens), length + 1):  # later rows exist, but attention is causal
        positions = jnp.arange(length)
        hooks = LayerHooks(uncached.attention(config, 1, length))
        feature, hidden, _ = draft_heads.run(
            heads,
            head_weights,
            weights,
            jnp.array(all_tokens),
            jnp.array(features),
            positions,
            {},
            hooks,
        )
        features[end : end + 1] = feature[end - 1]
    return feature, hidden, draft_heads.logits(heads, head_weights, weights, hidden)


def reference_drafts(compute, tokens, features, draft_tokens):
    outputs = features
    for count in range(len(draft_tokens) + 1):
        outputs = compute(np.asarray([*tokens, *draft_tokens[:count]]), features)
        features = np.concatenate(
            [features, (outputs[0] if isinstance(outputs, tuple) else outputs)[-1:]]
        )
    return outputs if isinstance(outputs, tuple) else (outputs, outputs)


TOKENS = [5, 90, 17, 3, 3, 41, 60]
DRAFT_TOKENS = [11, 7, 95]


@pytest.mark.parametrize(
    "form", ["bias", "no bias", "two layers", "qwen2", "qwen3", "own copies", "soft cap"]
)
def test_eagle_heads_match_float64(tmp_path, target, form):
    config, weights, target_tensors = target
    hf = LAYER_CONFIG | {"num_hidden_layers": 2 if form == "two layers" else 1}
    if form == "qwen2":
        hf |= {
            "model_type": "qwen2",
            "qkv_bias": True,
            "use_sliding_window": False,
            "sliding_window": 4096,
        }
    if form == "qwen3":
        hf |= {"model_type": "qwen3", "head_dim": 16, "attention_bias": False}
    shapes = {"fc.weight": (D, 2 * D)} | ({} if form == "no bias" else {"fc.bias": (D,)})
    for i in range(hf["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{i}", hf, D, form == "qwen2", form == "qwen3")
        shapes |= {f"layers.{i}.input_layernorm.weight": (D,)} if i else {}
    tensors = tiny.even(shapes)
    copies = (
        {"embed_tokens.weight": random_rows(5, V, D).astype(np.float32)}
        if form == "own copies"
        else {}
    )
    tiny.write(tmp_path, hf, tensors | copies)
    if form == "soft cap":
        config = replace(config, final_soft_cap=3.0)
    heads = draft_heads.read_heads(tmp_path, config, "eagle")
    assert heads.normed and heads.bias == (form != "no bias")
    head_weights = draft_heads.load(tmp_path, heads)
    target_outputs = random_rows(1, T, D)
    feature, hidden, logits = run_heads(
        heads, head_weights, weights, TOKENS, target_outputs, DRAFT_TOKENS
    )
    embed = target_tensors["model.embed_tokens.weight"]
    expected, _ = reference_drafts(
        lambda *x: naive.eagle(as_float64(tensors), hf, embed, *x),
        TOKENS,
        target_outputs,
        DRAFT_TOKENS,
    )
    assert_close(feature, expected)
    assert_close(hidden, expected)
    expected = expected @ target_tensors["lm_head.weight"].T
    assert_close(logits, 3 * np.tanh(expected / 3) if form == "soft cap" else expected)


def eagle3_shapes(hf: dict, count: int):
    W = hf["hidden_size"]
    shapes = layer_shapes("midlayer", hf, 2 * W, qk_norm=hf["model_type"] == "qwen3")
    shapes |= {f"midlayer.{x}.weight": (W,) for x in ("hidden_norm", "input_layernorm")}
    return shapes | {"fc.weight": (W, 3 * D), "norm.weight": (W,), "lm_head.weight": (count, W)}


EAGLE3_FORMS = [
    "fewer tokens",
    "all tokens",
    "normed residual",
    "another width",
    "speculators",
    "qwen3",
]


@pytest.mark.parametrize("form", EAGLE3_FORMS)
def test_eagle3_heads_match_float64(tmp_path, target, form):
    config, weights, target_tensors = target
    U = V if form == "all tokens" else 40
    hf = LAYER_CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": U}
    if form == "another width":
        hf |= {"hidden_size": 24, "target_hidden_size": D}
    if form in ("normed residual", "speculators"):
        hf |= {"norm_before_residual": True}
    if form == "qwen3":
        hf |= {"model_type": "qwen3"}
    tensors = tiny.even(eagle3_shapes(hf, U))
    token_ids = np.sort(np.random.default_rng(4).permutation(V)[:U])
    maps = {"d2t": token_ids - np.arange(U), "t2d": np.isin(np.arange(V), token_ids)}
    embed = target_tensors["model.embed_tokens.weight"]
    stored = tensors
    written_config = hf
    if form in ("another width", "speculators"):
        stored = tensors | {
            "embed_tokens.weight": random_rows(5, V, hf["hidden_size"]).astype(np.float32)
        }
        embed = as_float64(stored)["embed_tokens.weight"]
    if form == "speculators":
        stored = {name.replace("midlayer", "layers.0"): value for name, value in stored.items()}
        own_keys = {key: hf[key] for key in ("draft_vocab_size", "norm_before_residual")}
        written_config = own_keys | {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.1",
            "speculators_config": {"algorithm": "eagle3"},
            "torch_dtype": "bfloat16",
            "transformer_layer_config": {
                key: value for key, value in hf.items() if key not in own_keys
            },
        }
    tiny.write(tmp_path, written_config, stored | maps)
    heads = draft_heads.read_heads(tmp_path, config, "eagle3")
    assert heads.features == (1, 3, 4) and not heads.normed and heads.vocab == (0 if U == V else U)
    head_weights = draft_heads.load(tmp_path, heads)
    target_outputs = random_rows(1, T, 3 * D)
    feature, hidden, logits = run_heads(
        heads, head_weights, weights, TOKENS, target_outputs, DRAFT_TOKENS
    )
    w = as_float64(tensors)
    expected_feature, expected = reference_drafts(
        lambda *x: naive.eagle3(w, hf, embed, *x),
        TOKENS,
        target_outputs @ w["fc.weight"].T,
        DRAFT_TOKENS,
    )
    assert_close(feature, expected_feature)
    assert_close(hidden, expected)
    assert logits.shape == (T + len(DRAFT_TOKENS), V)
    assert_close(logits[:, token_ids], expected @ w["lm_head.weight"].T)
    assert np.isneginf(np.delete(logits, token_ids, axis=1)).all()


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (1, 3, 4)),  # outputs of the layers before 2, L // 2 and L - 3
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}, (0, 4, 7)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [], "use_last_layernorm": True}},
            (1, 3, 4),
        ),
        (
            {
                "eagle_config": {
                    "eagle_aux_hidden_state_layer_ids": [1, 5, 7],
                    "use_aux_hidden_state": True,
                }
            },
            (1, 5, 7),
        ),
    ],
)
def test_feature_layers_follow_the_config(target, keys, layers):
    assert draft_heads.parse_heads(LAYER_CONFIG | keys, [], target[0], "eagle3").features == layers


def test_observed_features_are_the_layers_outputs(target):
    """Each observed feature equals the output of the model truncated after that layer."""
    config, weights, _ = target
    tokens = jnp.asarray(TOKENS)
    positions = jnp.arange(T)
    features = {}
    hooks = LayerHooks(uncached.attention(config, 1, T))
    x = decoder.embed(weights, tokens, positions, config)
    (expected_x, _), _ = decoder.run_layers(weights.layers, 0, x, {}, positions, config, hooks)
    observed = replace(hooks, observe=features.__setitem__)
    (actual_x, _), _ = decoder.run_layers(weights.layers, 0, x, {}, positions, config, observed)
    assert np.array_equal(expected_x, actual_x) and sorted(features) == list(range(L))
    for index in range(L):
        first = weights.layers[: index + 1]
        (expected, _), _ = decoder.run_layers(first, 0, x, {}, positions, config, hooks)
        assert np.array_equal(features[index], expected)


def test_mtp_heads_match_float64(tmp_path):
    tensors = tiny_deepseek.write(tmp_path)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)
    w = as_float64(tensors)
    heads = draft_heads.read_heads(tmp_path, config, "mtp")
    head_weights = draft_heads.load(tmp_path, heads)
    target_outputs = random_rows(1, T, D)
    feature, hidden, logits = run_heads(
        heads, head_weights, weights, TOKENS, target_outputs, DRAFT_TOKENS
    )
    embed = w["model.embed_tokens.weight"]
    next_feature, expected = reference_drafts(
        lambda *x: naive.mtp(w, tiny_deepseek.CONFIG, embed, *x),
        TOKENS,
        target_outputs,
        DRAFT_TOKENS,
    )
    assert not heads.normed
    assert_close(hidden, expected)
    assert_close(feature, next_feature)
    assert_close(logits, expected @ w["lm_head.weight"].T)


def test_mtp_layer_of_fp8_checkpoint_is_dequantized(tmp_path):
    """The weights equal those of the dequantised checkpoint exactly."""
    tensors = tiny_deepseek.write(tmp_path)
    rng = np.random.default_rng(0)
    names = [name for name in tensors if name.endswith("_proj.weight")]
    codes = dict(tensors)
    dense = dict(tensors)
    for name in names:
        scale = rng.uniform(0.5, 1.5, [-(-size // 128) for size in tensors[name].shape]).astype(
            np.float32
        )
        codes[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
        codes[f"{name}_scale_inv"] = scale
        element_scale = scale.repeat(128, 0).repeat(128, 1)[
            : tensors[name].shape[0], : tensors[name].shape[1]
        ]
        dense[name] = codes[name].astype(np.float32) * element_scale
    weights = []
    for tensors, quantization in (
        (dense, {}),
        (codes, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ):
        config = tiny_deepseek.CONFIG | (
            {"quantization_config": quantization} if quantization else {}
        )
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(
            {name: np.ascontiguousarray(value) for name, value in tensors.items()},
            tmp_path / "model.safetensors",
        )
        heads = draft_heads.read_heads(tmp_path, read_config(tmp_path), "mtp")
        weights.append(draft_heads.load(tmp_path, heads, skip_packing=True))
    jax.tree.map(np.testing.assert_array_equal, *weights)


def test_qwen_mtp_heads_match_float64(tmp_path):
    tensors = tiny_qwen.write(tmp_path)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)
    w = as_float64(tensors)
    heads = draft_heads.read_heads(tmp_path, config, "mtp")
    head_weights = draft_heads.load(tmp_path, heads)
    target_outputs = random_rows(1, T, D)
    feature, hidden, logits = run_heads(
        heads, head_weights, weights, TOKENS, target_outputs, DRAFT_TOKENS
    )
    embed = w["model.embed_tokens.weight"]
    expected, _ = reference_drafts(
        lambda *x: naive.qwen_mtp(w, tiny_qwen.CONFIG, embed, *x),
        TOKENS,
        target_outputs,
        DRAFT_TOKENS,
    )
    assert heads.normed
    assert_close(hidden, expected)
    assert_close(feature, expected)
    assert_close(logits, expected @ w["lm_head.weight"].T)
    with pytest.raises(ModelError, match="mtp_use_dedicated_embeddings = True"):
        draft_heads.parse_heads(
            {"mtp_use_dedicated_embeddings": True}, ["mtp.fc.weight"], config, "mtp"
        )
    with pytest.raises(ModelError, match="this qwen3_next model brings no layer that predicts"):
        draft_heads.parse_heads({}, ["model.norm.weight"], config, "mtp")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_non_finite_padding_features_are_zeroed(target, kind):
    config, weights, _ = target
    heads = draft_heads.parse_heads(LAYER_CONFIG, ["fc.bias"], config, kind)
    head_weights = random_weights(heads)
    features = jnp.asarray(random_rows(1, T, D), jnp.float32)
    nan_features = features.at[3].set(jnp.nan)
    positions = jnp.asarray([0, 1, 2, -1, 3, 4, 5])

    def attend(index, q_TNH, k_TKH, v_TKH, cache, params, sinks_N=None):
        assert not np.isnan(q_TNH).any() and not np.isnan(v_TKH).any()
        return q_TNH, cache

    outputs = draft_heads.run(
        heads,
        head_weights,
        weights,
        jnp.asarray(TOKENS),
        nan_features,
        positions,
        {},
        LayerHooks(attend),
    )
    assert not np.asarray(outputs[0][3]).any() and not np.asarray(outputs[1][3]).any()
    assert not np.isnan(outputs[1]).any()


def random_weights(heads):
    head_weights = random_arrays(draft_heads.abstract(heads))
    return (
        head_weights
        if head_weights.join_bias_D is None
        else head_weights.replace(join_bias_D=head_weights.join_bias_D + 1)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_saved_heads_are_read_back(tmp_path, target, kind, dtype):
    hf = {
        "medusa": VLLM_CONFIG | {"truncated_vocab_size": 30},
        "eagle": LAYER_CONFIG,
        "eagle3": LAYER_CONFIG | {"draft_vocab_size": 30},
    }[kind]
    config = replace(target[0], dtype=dtype)
    heads = draft_heads.parse_heads(hf, ["fc.bias", "blocks.0.layers.0.bias"], config, kind)
    head_weights = random_weights(heads)
    if heads.vocab:
        head_weights = head_weights.replace(
            tokens_U=jnp.asarray(np.random.default_rng(0).permutation(V)[:30], jnp.int32)
        )
    draft_heads.save(tmp_path / "out", heads, head_weights, hf)
    saved_heads = draft_heads.read_heads(tmp_path / "out", config, kind)
    assert saved_heads == heads
    names = {
        "medusa": "blocks.1.layers.0.weight",
        "eagle": "layers.0.mlp.up_proj.weight",
        "eagle3": "midlayer.hidden_norm.weight",
    }
    assert names[kind] in load_file(tmp_path / "out" / "model.safetensors")
    read = draft_heads.load(tmp_path / "out", saved_heads, skip_packing=True)
    for expected, actual in zip(*map(jax.tree.leaves, (head_weights, read)), strict=True):
        assert expected.dtype == actual.dtype and np.array_equal(expected, actual)


@pytest.mark.parametrize(
    ("kind", "hf", "message"),
    [
        ("medusa", VLLM_CONFIG | {"hidden_size": 64}, "hidden_size = 64; the target is 32"),
        ("medusa", VLLM_CONFIG | {"vocab_size": 97}, "vocab_size = 97; the target is 96"),
        ("medusa", VLLM_CONFIG | {"truncated_vocab_size": 97}, "at most the target's 96"),
        (
            "medusa",
            VLLM_CONFIG | {"truncated_vocab_size": 9, "original_lm_head": True},
            "original_lm_head must be false",
        ),
        ("medusa", VLLM_CONFIG | {"logit_scale": 0.5}, "logit_scale = 0.5"),
        ("medusa", VLLM_CONFIG | {"gate": 1}, "gate = 1 is not understood for medusa heads"),
        ("medusa", {}, "lacks 'num_heads'"),
        ("medusa", VLLM_CONFIG | {"num_heads": "four"}, "num_heads = 'four'"),
        ("eagle", LAYER_CONFIG | {"hidden_size": 64}, "hidden_size = 64; the target is 32"),
        ("eagle", LAYER_CONFIG | {"vocab_size": 97}, "vocab_size = 97; the target is 96"),
        (
            "eagle",
            LAYER_CONFIG | {"add_para_norm": True},
            "add_para_norm = True is not understood for eagle heads",
        ),
        ("eagle", LAYER_CONFIG | {"num_key_value_heads": 3}, "4 query heads do not divide into 3"),
        ("eagle", LAYER_CONFIG | {"mlp_bias": True}, "mlp_bias = True"),
        ("eagle3", LAYER_CONFIG | {"hidden_size": 64}, "hidden_size = 64; the target is 32"),
        (
            "eagle3",
            LAYER_CONFIG | {"target_hidden_size": 64},
            "target_hidden_size = 64; the target is 32",
        ),
        (
            "eagle3",
            LAYER_CONFIG | {"target_hidden_size": D, "hidden_size": 24},
            "'embed_tokens.weight'",
        ),
        ("eagle3", LAYER_CONFIG | {"vocab_size": 97}, "vocab_size = 97; the target is 96"),
        ("eagle3", LAYER_CONFIG | {"draft_vocab_size": 97}, "at most the target's 96"),
        (
            "eagle3",
            LAYER_CONFIG | {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
            "numbered from 0 to 7",
        ),
        (
            "eagle3",
            LAYER_CONFIG | {"eagle_aux_hidden_state_layer_ids": [0, 4, 8]},
            "numbered from 0 to 7",
        ),
        (
            "eagle3",
            LAYER_CONFIG | {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state",
        ),
        (
            "eagle3",
            LAYER_CONFIG | {"eagle_config": {"use_last_layernorm": False}},
            "use_last_layernorm = False is not supported",
        ),
        (
            "eagle3",
            LAYER_CONFIG | {"eagle_config": {"parallel_draft_step": 2}},
            "parallel_draft_step = 2 is not supported",
        ),
        (
            "eagle3",
            LAYER_CONFIG | {"eagle_config": {"gate": 2}},
            "gate = 2 is not understood for eagle3 heads",
        ),
        ("eagle3", LAYER_CONFIG | {"eagle_config": 3}, "eagle_config = 3; it must be an object"),
        ("eagle3", LAYER_CONFIG | {"eagle_aux_hidden_state_layer_ids": ["a"]}, "of the wrong kind"),
        (
            "eagle3",
            LAYER_CONFIG | {"fc_norm": True},
            "fc_norm = True is not understood for eagle3 heads",
        ),
        ("mtp", LAYER_CONFIG, "this llama model brings no layer"),
        ("hydra", LAYER_CONFIG, "kind 'hydra'; they can be medusa, eagle, eagle3, mtp"),
    ],
)
def test_heads_for_another_model_are_rejected(target, kind, hf, message):
    with pytest.raises(ModelError) as error:
        draft_heads.parse_heads(hf, [], target[0], kind)
    assert message in str(error.value)


def test_missing_extra_or_misshapen_head_tensors_are_rejected(tmp_path, target):
    tensors = tiny.even({"fc.weight": (D, 2 * D), **layer_shapes("layers.0", LAYER_CONFIG, D)})

    def load_error(tensors, hf=LAYER_CONFIG, kind="eagle") -> str:
        tiny.write(tmp_path, hf, tensors)
        heads = draft_heads.read_heads(tmp_path, target[0], kind)
        with pytest.raises(ModelError) as error:
            draft_heads.load(tmp_path, heads)
        return str(error.value)

    incomplete = {
        name: value for name, value in tensors.items() if name != "layers.0.mlp.up_proj.weight"
    }
    assert "lacks the tensor 'layers.0.mlp.up_proj.weight', which eagle heads need" in load_error(
        incomplete
    )
    misshapen = tensors | {"fc.weight": tensors["fc.weight"][:, :D].copy()}
    assert "tensor 'fc.weight' has shape [32, 32]; config.json wants [32, 64]" in load_error(
        misshapen
    )
    assert "holds the tensor 'hydra.weight', which eagle heads do not have" in load_error(
        tensors | {"hydra.weight": tensors["fc.weight"]}
    )
    small = LAYER_CONFIG | {"draft_vocab_size": 30}
    eagle3_tensors = tiny.even(eagle3_shapes(small, 30))
    repeated_ids = {"d2t": -np.arange(30)}  # every id maps to token 0
    assert "map their 30 tokens to different ones from 0 to 95" in load_error(
        eagle3_tensors | repeated_ids, small, "eagle3"
    )
    out_of_range_ids = {"d2t": np.full(30, 67)}
    assert "map their 30 tokens" in load_error(eagle3_tensors | out_of_range_ids, small, "eagle3")
    assert "lacks the tensor 'd2t'" in load_error(eagle3_tensors, small, "eagle3")


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_pickled_head_files_are_rejected_with_a_remedy(tmp_path, target, name):
    tmp_path.joinpath("config.json").write_text(json.dumps(LAYER_CONFIG))
    tmp_path.joinpath(name).write_bytes(b"PK")
    with pytest.raises(ModelError, match="weights_only=True") as error:
        draft_heads.read_heads(tmp_path, target[0], "eagle")
    assert name in str(error.value)
