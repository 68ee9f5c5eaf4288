"""Unknown config.json keys: harmless ones are ignored, others suggest overrides in an error."""

import json
import re

import pytest

from quire.model.checkpoint import loader
from quire.model.config import ModelError
from quire.tests.support import tiny
from quire.tests.support.published import PUBLISHED
from quire.tests.support.published_moe import PUBLISHED_MOE

CONFIGS = {name: published.config for name, published in (PUBLISHED | PUBLISHED_MOE).items()}
# Keys that transformers 4 adds with `to_json_string(use_diff=False)`.
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
SEEN_IN_PUBLISHED_CONFIGS = {  # keys in published files of several families
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


def write_and_read_config(folder, config, **options):
    (folder / "config.json").write_text(json.dumps(config))
    return loader.read_config(folder, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_harmless_keys_do_not_change_the_config(name, tmp_path):
    published = CONFIGS[name]
    extra_keys = {
        key: value
        for key, value in (WRITTEN_BY_TRANSFORMERS | SEEN_IN_PUBLISHED_CONFIGS).items()
        if key not in published
    }
    if isinstance(text := published.get("text_config"), dict):
        extra_keys["text_config"] = text | {
            key: value for key, value in extra_keys.items() if key not in text
        }
    if "dtype" in published:
        extra_keys.pop("torch_dtype", None)
    assert write_and_read_config(tmp_path, published | extra_keys) == write_and_read_config(
        tmp_path, published
    )


def test_layer_types_without_sliding_windows(tmp_path):
    full = {"layer_types": ["full_attention"] * tiny.LLAMA["num_hidden_layers"]}
    assert write_and_read_config(tmp_path, tiny.LLAMA | full) == write_and_read_config(
        tmp_path, tiny.LLAMA
    )
    with pytest.raises(ModelError, match="layer_types"):
        write_and_read_config(
            tmp_path, tiny.LLAMA | {"layer_types": ["sliding_attention", "full_attention"]}
        )


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-8B", "Qwen3-30B-A3B"])
def test_unused_sliding_window_may_have_any_value(name, tmp_path):
    without_window = CONFIGS[name] | {"use_sliding_window": False}
    for window in (None, 0, 4096):
        assert write_and_read_config(
            tmp_path, without_window | {"sliding_window": window}
        ) == write_and_read_config(tmp_path, without_window)


def test_window_keys_in_a_family_without_windows(tmp_path):
    window = {"sliding_window": 16, "max_window_layers": 1}
    assert write_and_read_config(
        tmp_path, tiny.LLAMA | window | {"use_sliding_window": False}
    ) == write_and_read_config(tmp_path, tiny.LLAMA)
    with pytest.raises(ModelError, match="max_window_layers"):
        write_and_read_config(tmp_path, tiny.LLAMA | window)


def overrides_in(error: Exception) -> dict:
    match = re.search(r"--hf-overrides '(.*)'", str(error))
    assert match, error
    return json.loads(match[1])


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "gemma-3-4b"])
def test_error_suggests_working_hf_overrides(name, tmp_path):
    published = CONFIGS[name]
    inner = {"logit_scale": 2.0, "mup_width": [1, 2]}
    config = published | inner
    if "text_config" in published:
        config = published | {"text_config": published["text_config"] | inner}
    with pytest.raises(ModelError, match=r"logit_scale = 2\.0 is not understood") as caught:
        write_and_read_config(tmp_path, config)
    assert write_and_read_config(
        tmp_path, config, hf_overrides=overrides_in(caught.value)
    ) == write_and_read_config(tmp_path, published)


def test_unsupported_quantization_suggests_no_overrides(tmp_path):
    for method in ("aqlm", "quark"):
        with pytest.raises(
            ModelError, match=f"quant_method = '{method}' is not supported"
        ) as caught:
            write_and_read_config(
                tmp_path, tiny.LLAMA | {"quantization_config": {"quant_method": method, "bits": 4}}
            )
        assert "--hf-overrides" not in str(caught.value)


def test_hf_overrides_are_merged_into_nested_keys(tmp_path):
    scaled = tiny.LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    expected = write_and_read_config(
        tmp_path,
        scaled | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "hidden_act": "gelu"},
    )
    assert (
        write_and_read_config(
            tmp_path, scaled, hf_overrides={"rope_scaling": {"factor": 4.0}, "hidden_act": "gelu"}
        )
        == expected
    )
    assert write_and_read_config(
        tmp_path, scaled, hf_overrides={"rope_scaling": None}
    ) == write_and_read_config(tmp_path, tiny.LLAMA)
    with pytest.raises(ModelError, match="hidden_size"):
        write_and_read_config(tmp_path, scaled, hf_overrides={"hidden_size": "wide"})
