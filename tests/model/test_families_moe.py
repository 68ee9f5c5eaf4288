"""Published config.json files of mixture-of-experts models: parameters, layers and errors."""

import json

import jax
import numpy as np
import pytest

from quire.model.checkpoint import loader
from quire.model.checkpoint.published import split_quantization
from quire.model.config import ModelError
from quire.model.indexer import Indexer
from quire.model.weights import abstract
from quire.ops.quant.mxfp4 import Mxfp4
from quire.sharding.spec import nbytes
from quire.tests.support.golden.families_moe import MOE_VARIANTS
from quire.tests.support.published_moe import GEMMA4_ROPES, PUBLISHED_MOE, RELATIVES_MOE

FOR_EACH_MODEL = pytest.mark.parametrize("name", PUBLISHED_MOE)


def parse_config(hf: dict, max_len: int | None = None):
    return loader.family_for(hf).config(split_quantization(hf)[0], max_len)


def change_text_config(hf: dict, change: dict) -> dict:
    """Change keys of `hf`, or of its text_config if there is one."""
    return hf | {"text_config": hf["text_config"] | change} if "text_config" in hf else hf | change


def is_packed(leaf) -> bool:
    return isinstance(leaf, Mxfp4)


def count_parameters(tree) -> int:
    """Number of weights in a tree; a packed MXFP4 byte holds two."""
    leaves = jax.tree.leaves(tree, is_leaf=is_packed)
    return sum(32 * leaf.scales.size if is_packed(leaf) else leaf.size for leaf in leaves)


@FOR_EACH_MODEL
def test_published_config_gives_the_known_parameters(name):
    published = PUBLISHED_MOE[name]
    config = parse_config(published.config)
    assert [layer.attention.window for layer in config.layers] == published.windows
    assert count_parameters(abstract(config)) == pytest.approx(published.parameters, rel=0.005)


@pytest.mark.parametrize("variant", MOE_VARIANTS, ids=lambda variant: variant.name)
def test_sources_fill_every_leaf_once(variant):
    """Source tensors cover each leaf exactly, also with fused experts; only `kv_b` is reused."""
    config = parse_config(variant.config)
    names = []

    def check(spec, source):
        alternatives = [(alternative,) for alternative in source.whole]
        for tensors in filter(None, (source.parts, *alternatives)):
            filled = np.zeros(spec.shape, np.int8)
            marker = 1
            for tensor in tensors:
                if tensor.name.endswith("_blocks"):
                    marker = 0x11  # two codes per byte, which loading unpacks
                filled[tensor.at] += tensor.transform(
                    np.full(tensor.shape, marker, np.uint8)
                ).astype(np.int8)
            assert (filled == marker).all()
        names.extend(
            tensor.name for tensor in source.parts if not tensor.name.endswith(".kv_b_proj.weight")
        )

    jax.tree.map(check, abstract(config), loader.family_for(variant.config).sources(config))
    assert len(names) == len(set(names))


@FOR_EACH_MODEL
def test_unsupported_config_key_is_rejected(name):
    with pytest.raises(ModelError, match="attention_chunk_size = 8192"):
        parse_config(PUBLISHED_MOE[name].config | {"attention_chunk_size": 8192})


@pytest.mark.parametrize(
    "name", sorted({*PUBLISHED_MOE} - {"gpt-oss-120b", "DeepSeek-V2-Lite", "gemma-4-31B"})
)
@pytest.mark.slow
def test_wrong_config_values_raise_one_line_errors(name, tmp_path):
    """For any value of any key."""
    published = PUBLISHED_MOE[name].config
    for key in published.get("text_config", published):
        for value in (
            "x",
            -1,
            0,
            1.5,
            [],
            {},
            [{}],
            {"rope_type": "yarn"},
            {"1": 2},
            {"x": {}},
            None,
            True,
        ):
            (tmp_path / "config.json").write_text(
                json.dumps(change_text_config(published, {key: value}))
            )
            try:
                loader.read_config(tmp_path)
            except ModelError as error:
                assert "\n" not in str(error)


def test_mxfp4_stays_packed():
    """Padding of 2,880 inputs to whole blocks adds 2 % to the files' 13.8 and 65.3 GB."""
    for name, size in {"gpt-oss-20b": 13.98e9, "gpt-oss-120b": 66.55e9}.items():
        assert nbytes(abstract(parse_config(PUBLISHED_MOE[name].config))) == pytest.approx(
            size, rel=0.002
        )
    dense_config = dict(PUBLISHED_MOE["gpt-oss-20b"].config)
    del dense_config["quantization_config"]
    assert nbytes(abstract(parse_config(dense_config))) == pytest.approx(2 * 20.915e9, rel=0.001)


def test_gpt_oss_default_config_values():
    """Missing keys get gpt-oss' own values."""
    hf = dict(PUBLISHED_MOE["gpt-oss-20b"].config)
    for key in (
        "rope_scaling",
        "layer_types",
        "swiglu_limit",
        "sliding_window",
        "experts_per_token",
        "head_dim",
    ):
        del hf[key]
    assert parse_config(hf) == parse_config(PUBLISHED_MOE["gpt-oss-20b"].config)
    moe = parse_config(hf).layers[0].moe
    assert (moe.alpha, moe.clamp, moe.score, parse_config(hf).dtype) == (
        1.702,
        7.0,
        "softmax_top",
        "bfloat16",
    )


def test_deepseek_dense_and_moe_layers():
    config = parse_config(PUBLISHED_MOE["DeepSeek-V3"].config)
    assert [layer.moe is None for layer in config.layers] == [True] * 3 + [False] * 58
    assert (config.layers[0].mlp.dim, config.layers[3].mlp.dim) == (18432, 2048)
    sparse = parse_config(PUBLISHED_MOE["DeepSeek-V2-Lite"].config | {"moe_layer_freq": 2})
    assert [layer.moe is None for layer in sparse.layers[:5]] == [True, True, False, True, False]
    attention = config.layers[0].attention
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert attention.rope.factor == 1.0


def test_indexer_that_selects_every_token_is_dropped():
    """DeepSeek-V3.2 equals DeepSeek-V3 up to a context of `index_topk` tokens."""
    base_model, change, _ = RELATIVES_MOE["DeepSeek-V3.2"]
    sparse = PUBLISHED_MOE[base_model].config | change
    dense = PUBLISHED_MOE[base_model].config
    assert parse_config(sparse, 2048).layers == parse_config(dense, 2048).layers
    assert parse_config(sparse | {"index_topk": 1 << 20}).layers == parse_config(dense).layers
    longer = parse_config(sparse, 2049).layers
    assert {layer.attention.indexer for layer in longer} == {Indexer(2048, 64, 128)}


def test_glm_indexer_layers():
    """GLM-5's config.json has three ways to list the layers with an indexer."""
    base_model, change, _ = RELATIVES_MOE["DeepSeek-V3.2"]
    glm = (
        PUBLISHED_MOE[base_model].config
        | change
        | {"model_type": "glm_moe_dsa", "num_hidden_layers": 6}
    )

    def layer_kinds(**keys) -> str:
        return "".join(
            "F" if layer.attention.indexer.heads else "S"
            for layer in parse_config(glm | keys).layers
        )

    assert layer_kinds() == "FFFFFF"
    assert (
        layer_kinds(index_topk_freq=3) == "FFSSFS"
        and layer_kinds(index_topk_freq=2, index_skip_topk_offset=3) == "FFFSFS"
    )
    assert layer_kinds(index_topk_pattern="FSSFSS") == "FSSFSS"
    assert layer_kinds(indexer_types=["full", "shared"] * 3) == "FSFSFS"
    for wrong in (["shared", *["full"] * 5], ["full"] * 5, ["full"] * 5 + ["none"]):
        with pytest.raises(ModelError, match="indexer_types must have 6 entries"):
            layer_kinds(indexer_types=wrong)


def test_gemma4_kv_sharing_and_layer_sizes():
    config = parse_config(PUBLISHED_MOE["gemma-4-E2B"].config)
    assert [layer.attention.kv_source for layer in config.layers] == [None] * 15 + [
        13,
        13,
        13,
        13,
        14,
    ] * 4
    assert [layer.mlp.dim for layer in config.layers] == [6144] * 15 + [12288] * 20
    assert {layer.attention.head_dim for layer in config.layers[4::5]} == {512}
    local = config.layers[0].attention.rope
    full = config.layers[4].attention.rope
    assert (len(local.inv_freq), len(full.inv_freq)) == (128, 256)
    assert np.count_nonzero(full.inv_freq) == 64
    assert full.inv_freq[32] == pytest.approx(1e6 ** (-32 / 256))
    tied = parse_config(PUBLISHED_MOE["gemma-4-26B-A4B"].config)
    assert [(x.attention.tied_kv, x.attention.kv_heads) for x in tied.layers[4:6]] == [
        (False, 8),
        (True, 2),
    ]


def test_gemma4_config_of_transformers_5():
    """transformers 5 writes per-layer configs; the text model may also come alone."""
    for name, layer_config in (
        ("gemma-4-E2B", {"head_dim": 512}),
        ("gemma-4-26B-A4B", {"head_dim": 512, "num_key_value_heads": 2}),
    ):
        published = PUBLISHED_MOE[name]
        text = dict(published.config["text_config"])
        del text["global_head_dim"], text["num_global_key_value_heads"]
        text["per_layer_config"] = {
            str(i): layer_config for i, window in enumerate(published.windows) if window is None
        }
        assert parse_config(published.config | {"text_config": text}) == parse_config(
            published.config
        )
        assert parse_config(text) == parse_config(published.config)
    minimal = {"model_type": "gemma4_text", "dtype": "bfloat16"}
    assert parse_config(minimal) == parse_config(
        minimal | {"rope_parameters": GEMMA4_ROPES, "sliding_window": 512, "global_head_dim": 512}
    )


def test_gemma4_unified_config():
    """The multimodal models without towers have the same text config."""
    published = PUBLISHED_MOE["gemma-4-31B"].config
    text = {key: value for key, value in published["text_config"].items() if "per_layer" not in key}
    for key in ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"):
        del text[key]
    text["model_type"] = "gemma4_unified_text"
    assert parse_config(
        published | {"model_type": "gemma4_unified", "text_config": text}
    ) == parse_config(published)
    assert parse_config(text) == parse_config(published)


def test_rope_parameters_of_transformers_5():
    for name in ("Mixtral-8x7B", "gpt-oss-20b", "DeepSeek-V2-Lite"):
        hf = dict(PUBLISHED_MOE[name].config)
        scaling = dict(hf.pop("rope_scaling", None) or {"rope_type": "default"})
        scaling["rope_type"] = scaling.pop("type", None) or scaling["rope_type"]
        scaling["rope_theta"] = hf.pop("rope_theta")
        assert parse_config(hf | {"rope_parameters": scaling}) == parse_config(
            PUBLISHED_MOE[name].config
        )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("Mixtral-8x7B", {"num_experts_per_tok": 9}, "9 experts a token cannot be chosen from 8"),
        ("Mixtral-8x7B", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (
            "Qwen3-30B-A3B",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "'mxfp4' is not supported",
        ),
        (
            "gpt-oss-20b",
            {"quantization_config": {"quant_method": "quark"}},
            "'quark' is not supported .* mxfp4",
        ),
        (
            "gpt-oss-20b",
            {"hidden_size": 2896},
            "hidden_size = 2896; MXFP4 weights need a multiple of 32",
        ),
        (
            "gpt-oss-20b",
            {"experts_per_token": 8},
            "experts_per_token = 8 is not supported; supported is 4",
        ),
        ("gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (
            "DeepSeek-V2",
            {"topk_method": "noaux_tc"},
            "'noaux_tc'; it can be greedy or group_limited_greedy",
        ),
        ("DeepSeek-V2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("DeepSeek-V3", {"n_group": 7}, "256 experts do not divide into 7 groups"),
        ("DeepSeek-V3", {"moe_layer_freq": 0}, "moe_layer_freq = 0; it must be a whole number"),
        (
            "DeepSeek-V3",
            {"rope_interleave": "yes"},
            "rope_interleave = 'yes'; it must be true or false",
        ),
        ("gemma-4-31B", {"use_bidirectional_attention": "all"}, "'all' is not supported"),
        ("gemma-4-31B", {"num_kv_shared_layers": 58}, "leaves a kind of layer without a cache"),
        ("gemma-4-31B", {"num_kv_shared_layers": 61}, "leaves a kind of layer without a cache"),
        ("gemma-4-31B", {"layer_types": ["sliding_attention"] * 60}, "must be full_attention"),
        (
            "gemma-4-31B",
            {"per_layer_config": {"5": {"num_attention_heads": 4}}},
            "num_attention_heads = 4",
        ),
        ("gemma-4-E2B", {"vocab_size_per_layer_input": 9}, "must cover vocab_size"),
        ("gemma-4-26B-A4B", {"top_k_experts": None}, "lacks 'top_k_experts'"),
    ],
)
def test_error_names_the_unsupported_option(name, change, message):
    with pytest.raises(ModelError, match=message):
        parse_config(change_text_config(PUBLISHED_MOE[name].config, change))
