"""Keys of config.json that cannot change the result are accepted; the others are refused, with the
way round.
"""

import json
import re

import pytest

from quire.model.checkpoint import loader
from quire.model.config import ModelError
from quire.tests.support import tiny
from quire.tests.support.published import PUBLISHED
from quire.tests.support.published_moe import PUBLISHED_MOE

CONFIGS = {name: published.config for name, published in (PUBLISHED | PUBLISHED_MOE).items()}
# What transformers 4 writes beside a family's own keys where it writes all
# (`to_json_string(use_diff=False)`).
WRITTEN_BY_TRANSFORMERS = {
    "_attn_implementation_autoset": False,
    "add_cross_attention": False,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "is_decoder": False,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_scores": False,
    "prefix": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
}
SEEN = {  # in published files of several families
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"dtype": "q4"},
    "_name_or_path": "a/b",
    "_anything": {"x": 1},
    "use_mrope": False,
    "activation": "swiglu",
    "pretraining_tp": 2,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "neftune_noise_alpha": 5.0,
    "attn_pdrop": 0.1,
    "activation_dropout": 0.1,
    "embedding_initializer_range": 0.1,
    "image_token_id": 7,
    "model_max_length": 4096,
    "quantization_config": None,
    "head_dim_override": None,
    "qkv_clip": 0,
    "unused": [],
    "use_qk_norm": False,
}


def read(folder, config, **options):
    (folder / "config.json").write_text(json.dumps(config))
    return loader.read_config(folder, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_harmless_keys_change_nothing(name, tmp_path):
    published = CONFIGS[name]
    more = {
        key: value
        for key, value in (WRITTEN_BY_TRANSFORMERS | SEEN).items()
        if key not in published
    }
    if isinstance(text := published.get("text_config"), dict):
        more["text_config"] = text | {key: value for key, value in more.items() if key not in text}
    if "dtype" in published:
        more.pop("torch_dtype", None)
    assert read(tmp_path, published | more) == read(tmp_path, published)


def test_layers_that_all_see_everything(tmp_path):
    full = {"layer_types": ["full_attention"] * tiny.LLAMA["num_hidden_layers"]}
    assert read(tmp_path, tiny.LLAMA | full) == read(tmp_path, tiny.LLAMA)
    with pytest.raises(ModelError, match="layer_types"):
        read(tmp_path, tiny.LLAMA | {"layer_types": ["sliding_attention", "full_attention"]})


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B"])
def test_a_window_that_is_not_used_may_be_anything(name, tmp_path):
    plain = CONFIGS[name] | {"use_sliding_window": False}
    for window in (None, 0, 4096):
        assert read(tmp_path, plain | {"sliding_window": window}) == read(tmp_path, plain)


def test_a_window_where_the_family_has_none(tmp_path):
    window = {"sliding_window": 16, "max_window_layers": 1}
    assert read(tmp_path, tiny.LLAMA | window | {"use_sliding_window": False}) == read(
        tmp_path, tiny.LLAMA
    )
    with pytest.raises(ModelError, match="max_window_layers"):
        read(tmp_path, tiny.LLAMA | window)


def overrides_in(error: Exception) -> dict:
    found = re.search(r"--hf-overrides '(.*)'", str(error))
    assert found, error
    return json.loads(found[1])


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "gemma-3-4b"])
def test_the_way_round_is_the_one_that_the_error_names(name, tmp_path):
    published = CONFIGS[name]
    inner = {"logit_scale": 2.0, "mup_width": [1, 2]}
    config = published | inner
    if "text_config" in published:
        config = published | {"text_config": published["text_config"] | inner}
    with pytest.raises(ModelError, match=r"logit_scale = 2\.0 is not understood") as caught:
        read(tmp_path, config)
    assert read(tmp_path, config, hf_overrides=overrides_in(caught.value)) == read(
        tmp_path, published
    )


def test_another_quantisation_has_no_way_round(tmp_path):
    for method in ("aqlm", "quark"):
        with pytest.raises(
            ModelError, match=f"quant_method = '{method}' is not supported"
        ) as caught:
            read(
                tmp_path, tiny.LLAMA | {"quantization_config": {"quant_method": method, "bits": 4}}
            )
        assert "--hf-overrides" not in str(caught.value)


def test_overrides_are_merged_before_anything_is_read(tmp_path):
    scaled = tiny.LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    wanted = read(
        tmp_path,
        scaled | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "hidden_act": "gelu"},
    )
    assert (
        read(tmp_path, scaled, hf_overrides={"rope_scaling": {"factor": 4.0}, "hidden_act": "gelu"})
        == wanted
    )
    assert read(tmp_path, scaled, hf_overrides={"rope_scaling": None}) == read(tmp_path, tiny.LLAMA)
    with pytest.raises(ModelError, match="hidden_size"):
        read(tmp_path, scaled, hf_overrides={"hidden_size": "wide"})
