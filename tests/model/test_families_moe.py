"""Published config.json files of models with experts: they load, and say what is known of their
models.
"""

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

BY_NAME = pytest.mark.parametrize("name", PUBLISHED_MOE)


def read(hf: dict, max_len: int | None = None):
    return loader.family_for(hf).config(split_quantization(hf)[0], max_len)


def changed(hf: dict, change: dict) -> dict:
    """`hf` with other values where its text model's keys are."""
    return hf | {"text_config": hf["text_config"] | change} if "text_config" in hf else hf | change


def is_packed(leaf) -> bool:
    return isinstance(leaf, Mxfp4)


def parameters(tree) -> int:
    """The weights of a tree; a packed byte holds two."""
    leaves = jax.tree.leaves(tree, is_leaf=is_packed)
    return sum(32 * leaf.scales.size if is_packed(leaf) else leaf.size for leaf in leaves)


@BY_NAME
def test_published_config(name):
    published = PUBLISHED_MOE[name]
    config = read(published.config)
    assert [layer.attention.window for layer in config.layers] == published.windows
    assert parameters(abstract(config)) == pytest.approx(published.parameters, rel=0.005)


@pytest.mark.parametrize("variant", MOE_VARIANTS, ids=lambda variant: variant.name)
def test_sources_fill_every_leaf_once(variant):
    """The parts cover each leaf exactly, a layer's experts also as one tensor; only MLA's `kv_b` is
    used twice.
    """
    config = read(variant.config)
    names = []

    def check(spec, source):
        for parts in filter(None, (source.parts, source.whole)):
            filled = np.zeros(spec.shape, np.int8)
            one = 1
            for part in parts:
                if part.name.endswith("_blocks"):
                    one = 0x11  # two codes a byte, which loading parts
                filled[part.at] += part.transform(np.full(part.shape, one, np.uint8)).astype(
                    np.int8
                )
            assert (filled == one).all()
        names.extend(
            part.name for part in source.parts if not part.name.endswith(".kv_b_proj.weight")
        )

    jax.tree.map(check, abstract(config), loader.family_for(variant.config).sources(config))
    assert len(names) == len(set(names))


@BY_NAME
def test_an_unread_key_is_refused(name):
    with pytest.raises(ModelError, match="attention_chunk_size = 8192"):
        read(PUBLISHED_MOE[name].config | {"attention_chunk_size": 8192})


@pytest.mark.parametrize(
    "name", sorted({*PUBLISHED_MOE} - {"gpt-oss-120b", "DeepSeek-V2-Lite", "gemma-4-31B"})
)
@pytest.mark.slow
def test_a_value_of_the_wrong_kind_is_a_model_error(name, tmp_path):
    """Whatever a key holds, reading ends well or in one line that says what is wrong."""
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
            (tmp_path / "config.json").write_text(json.dumps(changed(published, {key: value})))
            try:
                loader.read_config(tmp_path)
            except ModelError as error:
                assert "\n" not in str(error)


def test_mxfp4_stays_packed():
    """13.8 and 65.3 GB in files take two hundredths more here: the last block of 2,880 inputs is
    filled up.
    """
    for name, size in {"gpt-oss-20b": 13.98e9, "gpt-oss-120b": 66.55e9}.items():
        assert nbytes(abstract(read(PUBLISHED_MOE[name].config))) == pytest.approx(size, rel=0.002)
    wide = dict(PUBLISHED_MOE["gpt-oss-20b"].config)
    del wide["quantization_config"]
    assert nbytes(abstract(read(wide))) == pytest.approx(2 * 20.915e9, rel=0.001)


def test_gpt_oss_defaults():
    """What its config leaves out is what it was trained with."""
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
    assert read(hf) == read(PUBLISHED_MOE["gpt-oss-20b"].config)
    moe = read(hf).layers[0].moe
    assert (moe.alpha, moe.clamp, moe.score, read(hf).dtype) == (
        1.702,
        7.0,
        "softmax_top",
        "bfloat16",
    )


def test_deepseek_layers():
    config = read(PUBLISHED_MOE["DeepSeek-V3"].config)
    assert [layer.moe is None for layer in config.layers] == [True] * 3 + [False] * 58
    assert (config.layers[0].mlp.dim, config.layers[3].mlp.dim) == (18432, 2048)
    sparse = read(PUBLISHED_MOE["DeepSeek-V2-Lite"].config | {"moe_layer_freq": 2})
    assert [layer.moe is None for layer in sparse.layers[:5]] == [True, True, False, True, False]
    attention = config.layers[0].attention
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert attention.rope.factor == 1.0


def test_an_indexer_that_picks_every_token_is_none():
    """DeepSeek-V3.2 is DeepSeek-V3, as far as its indexer leaves nothing out."""
    like, change, _ = RELATIVES_MOE["DeepSeek-V3.2"]
    sparse = PUBLISHED_MOE[like].config | change
    dense = PUBLISHED_MOE[like].config
    assert read(sparse, 2048).layers == read(dense, 2048).layers
    assert read(sparse | {"index_topk": 1 << 20}).layers == read(dense).layers
    longer = read(sparse, 2049).layers
    assert {layer.attention.indexer for layer in longer} == {Indexer(2048, 64, 128)}


def test_which_layers_pick():
    """GLM-5's config.json says it in one of three ways."""
    like, change, _ = RELATIVES_MOE["DeepSeek-V3.2"]
    glm = (
        PUBLISHED_MOE[like].config | change | {"model_type": "glm_moe_dsa", "num_hidden_layers": 6}
    )

    def picks(**keys) -> str:
        return "".join(
            "F" if layer.attention.indexer.heads else "S" for layer in read(glm | keys).layers
        )

    assert picks() == "FFFFFF"
    assert (
        picks(index_topk_freq=3) == "FFSSFS"
        and picks(index_topk_freq=2, index_skip_topk_offset=3) == "FFFSFS"
    )
    assert picks(index_topk_pattern="FSSFSS") == "FSSFSS"
    assert picks(indexer_types=["full", "shared"] * 3) == "FSFSFS"
    for wrong in (["shared", *["full"] * 5], ["full"] * 5, ["full"] * 5 + ["none"]):
        with pytest.raises(ModelError, match="indexer_types must have 6 entries"):
            picks(indexer_types=wrong)


def test_gemma4_layers():
    config = read(PUBLISHED_MOE["gemma-4-E2B"].config)
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
    tied = read(PUBLISHED_MOE["gemma-4-26B-A4B"].config)
    assert [(x.attention.tied_kv, x.attention.kv_heads) for x in tied.layers[4:6]] == [
        (False, 8),
        (True, 2),
    ]


def test_gemma4_as_it_is_rewritten():
    """transformers 5 spells out what each layer has of its own; the text model also comes alone."""
    for name, own in (
        ("gemma-4-E2B", {"head_dim": 512}),
        ("gemma-4-26B-A4B", {"head_dim": 512, "num_key_value_heads": 2}),
    ):
        published = PUBLISHED_MOE[name]
        text = dict(published.config["text_config"])
        del text["global_head_dim"], text["num_global_key_value_heads"]
        text["per_layer_config"] = {
            str(i): own for i, window in enumerate(published.windows) if window is None
        }
        assert read(published.config | {"text_config": text}) == read(published.config)
        assert read(text) == read(published.config)
    bare = {"model_type": "gemma4_text", "dtype": "bfloat16"}
    assert read(bare) == read(
        bare | {"rope_parameters": GEMMA4_ROPES, "sliding_window": 512, "global_head_dim": 512}
    )


def test_gemma4_unified():
    """The models that see and hear without towers write as the others do."""
    published = PUBLISHED_MOE["gemma-4-31B"].config
    text = {key: value for key, value in published["text_config"].items() if "per_layer" not in key}
    for key in ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"):
        del text[key]
    text["model_type"] = "gemma4_unified_text"
    assert read(published | {"model_type": "gemma4_unified", "text_config": text}) == read(
        published
    )
    assert read(text) == read(published)


def test_new_rope_parameters_mean_the_same():
    for name in ("Mixtral-8x7B", "gpt-oss-20b", "DeepSeek-V2-Lite"):
        hf = dict(PUBLISHED_MOE[name].config)
        scaling = dict(hf.pop("rope_scaling", None) or {"rope_type": "default"})
        scaling["rope_type"] = scaling.pop("type", None) or scaling["rope_type"]
        scaling["rope_theta"] = hf.pop("rope_theta")
        assert read(hf | {"rope_parameters": scaling}) == read(PUBLISHED_MOE[name].config)


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
def test_what_is_not_supported_is_named(name, change, message):
    with pytest.raises(ModelError, match=message):
        read(changed(PUBLISHED_MOE[name].config, change))
