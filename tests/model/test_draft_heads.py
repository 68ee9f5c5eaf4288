"""Drafting heads: published folders of each kind, read, loaded and computed, against numpy in
float64.
"""

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
LAYER = {
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
    """(configuration, weights, tensors) of the model that the heads are for."""
    folder = tmp_path_factory.mktemp("target")
    tensors = tiny.write(folder, TARGET)
    config = read_config(folder)
    return config, load_weights(folder, config), wide(tensors)


def wide(tensors):
    return {name: value.astype(np.float64) for name, value in tensors.items()}


def layer_shapes(here: str, config: dict, inputs: int, bias: bool = False, qk_norm: bool = False):
    """The tensors of a layer like Llama's, whose attention reads rows of width `inputs`."""
    W = config["hidden_size"]
    F = config["intermediate_size"]
    N = config["num_attention_heads"]
    K = config["num_key_value_heads"]
    H = config.get("head_dim") or W // N
    found = {
        f"{here}.self_attn.{x}_proj.weight": (n * H, inputs)
        for x, n in (("q", N), ("k", K), ("v", K))
    }
    if bias:
        found |= {
            f"{here}.self_attn.{x}_proj.bias": (n * H,) for x, n in (("q", N), ("k", K), ("v", K))
        }
    if qk_norm:
        found |= {f"{here}.self_attn.{x}_norm.weight": (H,) for x in "qk"}
    found |= {f"{here}.self_attn.o_proj.weight": (W, N * H), f"{here}.mlp.down_proj.weight": (W, F)}
    found |= {f"{here}.mlp.{x}_proj.weight": (F, W) for x in ("gate", "up")}
    return found | {f"{here}.post_attention_layernorm.weight": (W,)}


def rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def assert_close(got, expected):
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2e-4, atol=2e-4)


def medusa_shapes(count: int, depth: int, bias: bool, table: int | None):
    found: dict[str, tuple[int, ...]] = {}
    for c in range(count):
        for j in range(depth):
            found[f"blocks.{c}.layers.{j}.weight"] = (D, D)
            if bias:
                found[f"blocks.{c}.layers.{j}.bias"] = (D,)
        if table:
            found[f"lm_heads.{c}.weight"] = (table, D)
    return found


MAKERS = {
    "medusa_num_heads": 3,
    "medusa_num_layers": 2,
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
}
VLLM = {
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
def test_medusa_as_its_makers_write_it(tmp_path, target, prefix):
    config, weights, _ = target
    tensors = tiny.even(medusa_shapes(3, 2, True, V))
    stored = {}
    for name, value in tensors.items():
        kind, c, *rest = name.split(".")
        own = f"{c}.{rest[1]}.linear.{rest[2]}" if kind == "blocks" else f"{c}.2.weight"
        stored[f"{prefix}{own}"] = value
    tmp_path.joinpath("config.json").write_text(json.dumps(MAKERS))
    save_file(stored, tmp_path / "medusa_lm_head.safetensors")
    heads = draft_heads.read_heads(tmp_path, config, "medusa")
    assert (heads.count, heads.depth, heads.bias, heads.own_head) == (3, 2, True, True)
    own = draft_heads.load(tmp_path, heads)
    hidden = rows(1, 5, D)
    logits = draft_heads.medusa_logits(heads, own, weights, jnp.asarray(hidden, jnp.float32))
    assert logits.shape == (3, 5, V) and logits.dtype == jnp.float32
    for c in range(3):
        assert_close(
            logits[c],
            naive.medusa(wide(tensors), c, 2, hidden, wide(tensors)[f"lm_heads.{c}.weight"]),
        )


@pytest.mark.parametrize(
    "form", ["own heads", "the target's head", "fewer tokens", "fewer heads than tensors"]
)
def test_medusa_as_vllm_writes_it(tmp_path, target, form):
    config, weights, of_target = target
    hf = dict(VLLM)
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
    more = {}
    tokens = np.arange(V)
    if form == "fewer tokens":
        tokens = np.random.default_rng(2).permutation(V)[:20]
        more["token_map"] = tokens
    tiny.write(tmp_path, hf, tensors | more)
    heads = draft_heads.read_heads(tmp_path, config, "medusa")
    own = draft_heads.load(tmp_path, heads)
    hidden = rows(1, 5, D)
    logits = np.asarray(
        draft_heads.medusa_logits(heads, own, weights, jnp.asarray(hidden, jnp.float32))
    )
    assert logits.shape == (2, 5, V)
    for c in range(2):
        lm = of_target["lm_head.weight"] if table is None else wide(tensors)[f"lm_heads.{c}.weight"]
        assert_close(logits[c][:, tokens], naive.medusa(wide(tensors), c, 1, hidden, lm))
        assert np.isneginf(np.delete(logits[c], tokens, axis=1)).all()


def drafted(heads, own, weights, tokens, raw, further):
    """(features, hidden states, logits) of rows with the target's features, and of `further` tokens
    after them.
    """
    config = heads.model
    known = draft_heads.take_features(heads, own, jnp.asarray(raw, jnp.float32))
    all_tokens = np.asarray([*tokens, *further])
    length = len(all_tokens)
    features = np.zeros((len(all_tokens), known.shape[1]), np.float32)
    features[: len(tokens)] = known
    feature = hidden = features
    for end in range(len(tokens), length + 1):  # what comes after is there, and nobody looks at it
        positions = jnp.arange(length)
        hooks = LayerHooks(uncached.attention(config, 1, length))
        feature, hidden, _ = draft_heads.run(
            heads, own, weights, jnp.array(all_tokens), jnp.array(features), positions, {}, hooks
        )
        features[end : end + 1] = feature[end - 1]
    return feature, hidden, draft_heads.logits(heads, own, weights, hidden)


def naive_drafted(compute, tokens, features, further):
    made = features
    for count in range(len(further) + 1):
        made = compute(np.asarray([*tokens, *further[:count]]), features)
        features = np.concatenate([features, (made[0] if isinstance(made, tuple) else made)[-1:]])
    return made if isinstance(made, tuple) else (made, made)


TOKENS = [5, 90, 17, 3, 3, 41, 60]
FURTHER = [11, 7, 95]


@pytest.mark.parametrize(
    "form", ["bias", "no bias", "two layers", "qwen2", "qwen3", "own copies", "soft cap"]
)
def test_eagle(tmp_path, target, form):
    config, weights, of_target = target
    hf = LAYER | {"num_hidden_layers": 2 if form == "two layers" else 1}
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
        {"embed_tokens.weight": rows(5, V, D).astype(np.float32)} if form == "own copies" else {}
    )
    tiny.write(tmp_path, hf, tensors | copies)
    if form == "soft cap":
        config = replace(config, final_soft_cap=3.0)
    heads = draft_heads.read_heads(tmp_path, config, "eagle")
    assert heads.normed and heads.bias == (form != "no bias")
    own = draft_heads.load(tmp_path, heads)
    raw = rows(1, T, D)
    feature, hidden, logits = drafted(heads, own, weights, TOKENS, raw, FURTHER)
    embed = of_target["model.embed_tokens.weight"]
    expected, _ = naive_drafted(
        lambda *x: naive.eagle(wide(tensors), hf, embed, *x), TOKENS, raw, FURTHER
    )
    assert_close(feature, expected)
    assert_close(hidden, expected)
    expected = expected @ of_target["lm_head.weight"].T
    assert_close(logits, 3 * np.tanh(expected / 3) if form == "soft cap" else expected)


def eagle3_shapes(hf: dict, count: int):
    W = hf["hidden_size"]
    shapes = layer_shapes("midlayer", hf, 2 * W, qk_norm=hf["model_type"] == "qwen3")
    shapes |= {f"midlayer.{x}.weight": (W,) for x in ("hidden_norm", "input_layernorm")}
    return shapes | {"fc.weight": (W, 3 * D), "norm.weight": (W,), "lm_head.weight": (count, W)}


FORMS = ["fewer tokens", "all tokens", "normed residual", "another width", "speculators", "qwen3"]


@pytest.mark.parametrize("form", FORMS)
def test_eagle3(tmp_path, target, form):
    config, weights, of_target = target
    U = V if form == "all tokens" else 40
    hf = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": U}
    if form == "another width":
        hf |= {"hidden_size": 24, "target_hidden_size": D}
    if form in ("normed residual", "speculators"):
        hf |= {"norm_before_residual": True}
    if form == "qwen3":
        hf |= {"model_type": "qwen3"}
    tensors = tiny.even(eagle3_shapes(hf, U))
    chosen = np.sort(np.random.default_rng(4).permutation(V)[:U])
    maps = {"d2t": chosen - np.arange(U), "t2d": np.isin(np.arange(V), chosen)}
    embed = of_target["model.embed_tokens.weight"]
    stored = tensors
    written = hf
    if form in ("another width", "speculators"):
        stored = tensors | {"embed_tokens.weight": rows(5, V, hf["hidden_size"]).astype(np.float32)}
        embed = wide(stored)["embed_tokens.weight"]
    if form == "speculators":
        stored = {name.replace("midlayer", "layers.0"): value for name, value in stored.items()}
        own_keys = {key: hf[key] for key in ("draft_vocab_size", "norm_before_residual")}
        written = own_keys | {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.1",
            "speculators_config": {"algorithm": "eagle3"},
            "torch_dtype": "bfloat16",
            "transformer_layer_config": {
                key: value for key, value in hf.items() if key not in own_keys
            },
        }
    tiny.write(tmp_path, written, stored | maps)
    heads = draft_heads.read_heads(tmp_path, config, "eagle3")
    assert heads.features == (1, 3, 4) and not heads.normed and heads.vocab == (0 if U == V else U)
    own = draft_heads.load(tmp_path, heads)
    raw = rows(1, T, 3 * D)
    feature, hidden, logits = drafted(heads, own, weights, TOKENS, raw, FURTHER)
    w = wide(tensors)
    expected_feature, expected = naive_drafted(
        lambda *x: naive.eagle3(w, hf, embed, *x), TOKENS, raw @ w["fc.weight"].T, FURTHER
    )
    assert_close(feature, expected_feature)
    assert_close(hidden, expected)
    assert logits.shape == (T + len(FURTHER), V)
    assert_close(logits[:, chosen], expected @ w["lm_head.weight"].T)
    assert np.isneginf(np.delete(logits, chosen, axis=1)).all()


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, (1, 3, 4)),  # what goes into layers 2, L // 2 and L - 3
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
def test_which_layers_give_features(target, keys, layers):
    assert draft_heads.parse_heads(LAYER | keys, [], target[0], "eagle3").features == layers


def test_features_are_what_layers_give(target):
    """What a layer gives is what the model's first layers up to it make."""
    config, weights, _ = target
    tokens = jnp.asarray(TOKENS)
    positions = jnp.arange(T)
    seen = {}
    hooks = LayerHooks(uncached.attention(config, 1, T))
    x = decoder.embed(weights, tokens, positions, config)
    (plain, _), _ = decoder.run_layers(weights.layers, 0, x, {}, positions, config, hooks)
    observed = replace(hooks, observe=seen.__setitem__)
    (watched, _), _ = decoder.run_layers(weights.layers, 0, x, {}, positions, config, observed)
    assert np.array_equal(plain, watched) and sorted(seen) == list(range(L))
    for index in range(L):
        first = weights.layers[: index + 1]
        (expected, _), _ = decoder.run_layers(first, 0, x, {}, positions, config, hooks)
        assert np.array_equal(seen[index], expected)


def test_mtp(tmp_path):
    tensors = tiny_deepseek.write(tmp_path)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)
    w = wide(tensors)
    heads = draft_heads.read_heads(tmp_path, config, "mtp")
    own = draft_heads.load(tmp_path, heads)
    raw = rows(1, T, D)
    feature, hidden, logits = drafted(heads, own, weights, TOKENS, raw, FURTHER)
    embed = w["model.embed_tokens.weight"]
    next_feature, expected = naive_drafted(
        lambda *x: naive.mtp(w, tiny_deepseek.CONFIG, embed, *x), TOKENS, raw, FURTHER
    )
    assert not heads.normed
    assert_close(hidden, expected)
    assert_close(feature, next_feature)
    assert_close(logits, expected @ w["lm_head.weight"].T)


def test_mtp_of_codes(tmp_path):
    """A checkpoint in FP8: the layer that predicts is widened, to the very numbers."""
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
        each = scale.repeat(128, 0).repeat(128, 1)[
            : tensors[name].shape[0], : tensors[name].shape[1]
        ]
        dense[name] = codes[name].astype(np.float32) * each
    found = []
    for tensors, more in (
        (dense, {}),
        (codes, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ):
        config = tiny_deepseek.CONFIG | ({"quantization_config": more} if more else {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(
            {name: np.ascontiguousarray(value) for name, value in tensors.items()},
            tmp_path / "model.safetensors",
        )
        heads = draft_heads.read_heads(tmp_path, read_config(tmp_path), "mtp")
        found.append(draft_heads.load(tmp_path, heads, skip_packing=True))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_mtp_of_qwen(tmp_path):
    tensors = tiny_qwen.write(tmp_path)
    config = read_config(tmp_path)
    weights = load_weights(tmp_path, config)
    w = wide(tensors)
    heads = draft_heads.read_heads(tmp_path, config, "mtp")
    own = draft_heads.load(tmp_path, heads)
    raw = rows(1, T, D)
    feature, hidden, logits = drafted(heads, own, weights, TOKENS, raw, FURTHER)
    embed = w["model.embed_tokens.weight"]
    expected, _ = naive_drafted(
        lambda *x: naive.qwen_mtp(w, tiny_qwen.CONFIG, embed, *x), TOKENS, raw, FURTHER
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
def test_padding_is_zeros_whatever_it_holds(target, kind):
    config, weights, _ = target
    heads = draft_heads.parse_heads(LAYER, ["fc.bias"], config, kind)
    own = random(heads)
    features = jnp.asarray(rows(1, T, D), jnp.float32)
    spoiled = features.at[3].set(jnp.nan)
    positions = jnp.asarray([0, 1, 2, -1, 3, 4, 5])

    def attend(index, q_TNH, k_TKH, v_TKH, cache, params, sinks_N=None):
        assert not np.isnan(q_TNH).any() and not np.isnan(v_TKH).any()
        return q_TNH, cache

    made = draft_heads.run(
        heads, own, weights, jnp.asarray(TOKENS), spoiled, positions, {}, LayerHooks(attend)
    )
    assert not np.asarray(made[0][3]).any() and not np.asarray(made[1][3]).any()
    assert not np.isnan(made[1]).any()


def random(heads):
    own = random_arrays(draft_heads.abstract(heads))
    return own if own.join_bias_D is None else own.replace(join_bias_D=own.join_bias_D + 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_written_and_read_again(tmp_path, target, kind, dtype):
    hf = {
        "medusa": VLLM | {"truncated_vocab_size": 30},
        "eagle": LAYER,
        "eagle3": LAYER | {"draft_vocab_size": 30},
    }[kind]
    config = replace(target[0], dtype=dtype)
    heads = draft_heads.parse_heads(hf, ["fc.bias", "blocks.0.layers.0.bias"], config, kind)
    own = random(heads)
    if heads.vocab:
        own = own.replace(
            tokens_U=jnp.asarray(np.random.default_rng(0).permutation(V)[:30], jnp.int32)
        )
    draft_heads.save(tmp_path / "out", heads, own, hf)
    again = draft_heads.read_heads(tmp_path / "out", config, kind)
    assert again == heads
    names = {
        "medusa": "blocks.1.layers.0.weight",
        "eagle": "layers.0.mlp.up_proj.weight",
        "eagle3": "midlayer.hidden_norm.weight",
    }
    assert names[kind] in load_file(tmp_path / "out" / "model.safetensors")
    read = draft_heads.load(tmp_path / "out", again, skip_packing=True)
    for one, other in zip(*map(jax.tree.leaves, (own, read)), strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)


@pytest.mark.parametrize(
    ("kind", "hf", "message"),
    [
        ("medusa", VLLM | {"hidden_size": 64}, "hidden_size = 64; the target is 32"),
        ("medusa", VLLM | {"vocab_size": 97}, "vocab_size = 97; the target is 96"),
        ("medusa", VLLM | {"truncated_vocab_size": 97}, "at most the target's 96"),
        (
            "medusa",
            VLLM | {"truncated_vocab_size": 9, "original_lm_head": True},
            "original_lm_head must be false",
        ),
        ("medusa", VLLM | {"logit_scale": 0.5}, "logit_scale = 0.5"),
        ("medusa", VLLM | {"gate": 1}, "gate = 1 is not understood for medusa heads"),
        ("medusa", {}, "lacks 'num_heads'"),
        ("medusa", VLLM | {"num_heads": "four"}, "num_heads = 'four'"),
        ("eagle", LAYER | {"hidden_size": 64}, "hidden_size = 64; the target is 32"),
        ("eagle", LAYER | {"vocab_size": 97}, "vocab_size = 97; the target is 96"),
        (
            "eagle",
            LAYER | {"add_para_norm": True},
            "add_para_norm = True is not understood for eagle heads",
        ),
        ("eagle", LAYER | {"num_key_value_heads": 3}, "4 query heads do not divide into 3"),
        ("eagle", LAYER | {"mlp_bias": True}, "mlp_bias = True"),
        ("eagle3", LAYER | {"hidden_size": 64}, "hidden_size = 64; the target is 32"),
        ("eagle3", LAYER | {"target_hidden_size": 64}, "target_hidden_size = 64; the target is 32"),
        ("eagle3", LAYER | {"target_hidden_size": D, "hidden_size": 24}, "'embed_tokens.weight'"),
        ("eagle3", LAYER | {"vocab_size": 97}, "vocab_size = 97; the target is 96"),
        ("eagle3", LAYER | {"draft_vocab_size": 97}, "at most the target's 96"),
        ("eagle3", LAYER | {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "numbered from 0 to 7"),
        ("eagle3", LAYER | {"eagle_aux_hidden_state_layer_ids": [0, 4, 8]}, "numbered from 0 to 7"),
        (
            "eagle3",
            LAYER | {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state",
        ),
        (
            "eagle3",
            LAYER | {"eagle_config": {"use_last_layernorm": False}},
            "use_last_layernorm = False is not supported",
        ),
        (
            "eagle3",
            LAYER | {"eagle_config": {"parallel_draft_step": 2}},
            "parallel_draft_step = 2 is not supported",
        ),
        (
            "eagle3",
            LAYER | {"eagle_config": {"gate": 2}},
            "gate = 2 is not understood for eagle3 heads",
        ),
        ("eagle3", LAYER | {"eagle_config": 3}, "eagle_config = 3; it must be an object"),
        ("eagle3", LAYER | {"eagle_aux_hidden_state_layer_ids": ["a"]}, "of the wrong kind"),
        ("eagle3", LAYER | {"fc_norm": True}, "fc_norm = True is not understood for eagle3 heads"),
        ("mtp", LAYER, "this llama model brings no layer"),
        ("hydra", LAYER, "kind 'hydra'; they can be medusa, eagle, eagle3, mtp"),
    ],
)
def test_heads_for_another_model_are_refused(target, kind, hf, message):
    with pytest.raises(ModelError) as refused:
        draft_heads.parse_heads(hf, [], target[0], kind)
    assert message in str(refused.value)


def test_tensors_that_do_not_fit(tmp_path, target):
    tensors = tiny.even({"fc.weight": (D, 2 * D), **layer_shapes("layers.0", LAYER, D)})

    def refused(stored, hf=LAYER, kind="eagle") -> str:
        tiny.write(tmp_path, hf, stored)
        heads = draft_heads.read_heads(tmp_path, target[0], kind)
        with pytest.raises(ModelError) as error:
            draft_heads.load(tmp_path, heads)
        return str(error.value)

    without = {
        name: value for name, value in tensors.items() if name != "layers.0.mlp.up_proj.weight"
    }
    assert "lacks the tensor 'layers.0.mlp.up_proj.weight', which eagle heads need" in refused(
        without
    )
    other = tensors | {"fc.weight": tensors["fc.weight"][:, :D].copy()}
    assert "tensor 'fc.weight' has shape [32, 32]; config.json wants [32, 64]" in refused(other)
    assert "holds the tensor 'hydra.weight', which eagle heads do not have" in refused(
        tensors | {"hydra.weight": tensors["fc.weight"]}
    )
    small = LAYER | {"draft_vocab_size": 30}
    of_three = tiny.even(eagle3_shapes(small, 30))
    twice = {"d2t": -np.arange(30)}  # each of them is token 0
    assert "map their 30 tokens to different ones from 0 to 95" in refused(
        of_three | twice, small, "eagle3"
    )
    beyond = {"d2t": np.full(30, 67)}
    assert "map their 30 tokens" in refused(of_three | beyond, small, "eagle3")
    assert "lacks the tensor 'd2t'" in refused(of_three, small, "eagle3")


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_older_formats_are_refused_with_what_to_do(tmp_path, target, name):
    tmp_path.joinpath("config.json").write_text(json.dumps(LAYER))
    tmp_path.joinpath(name).write_bytes(b"PK")
    with pytest.raises(ModelError, match="weights_only=True") as refused:
        draft_heads.read_heads(tmp_path, target[0], "eagle")
    assert name in str(refused.value)
