"""What a KV cache in few bits takes, which layers have it, and what has no such codes."""

import json
from dataclasses import replace

import pytest
import tiny_deepseek

from quire.model.checkpoint import hub, loader
from quire.model.config import Attention, Layer, Mlp, ModelConfig, ModelError
from quire.model.planning import cost

QUILL = hub.resolve(None)  # layers 0 and 4 have a window, 2 and 6 none; the others read these


def read(**options) -> ModelConfig:
    return loader.read_config(QUILL, **options)


@pytest.mark.parametrize(
    ("dtype", "skips", "window", "full"),
    [
        ("auto", (), 2 * 256, 2 * 256),
        ("int8", (), 2 * 2 * (64 + 4), 2 * 2 * (64 + 4)),
        ("int4", (), 2 * 2 * (32 + 4), 2 * 2 * (32 + 4)),
        ("int4", ("sliding_window",), 2 * 256, 2 * 2 * (32 + 4)),
        ("int4", ("0", "2"), 256 + 2 * (32 + 4), 256 + 2 * (32 + 4)),
        ("int4", ("0, 2,4", 6), 2 * 256, 2 * 256),
    ],
)
def test_bytes_of_a_token(dtype, skips, window, full):
    config = read(kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=skips)
    found: dict[bool, int] = {True: 0, False: 0}
    for kind in cost.kinds(config):
        if kind.name != "shared":
            found[kind.window is not None] += kind.token_bytes
    assert found == {True: window, False: full}
    reads = sum(
        cost.layer_token_bytes(layer.attention, config.layer_kv_dtype(i)) for i, layer in enumerate(config.layers)
    )
    assert cost.kv_read_bytes(config, 1) == reads == 2 * (window + full)  # two layers read each


@pytest.mark.parametrize("name", ["1", "8", "-1", "all", ""])
def test_layers_that_have_no_cache_of_their_own(name):
    with pytest.raises(ModelError, match=f"skip_layers names '{name}'; it can be 'sliding_window' and .*, 0, 2, 4, 6"):
        read(kv_cache_dtype="int4", kv_cache_dtype_skip_layers=[name])


@pytest.mark.parametrize("value", ["0", 0])
def test_skipped_layers_are_a_list(value):
    with pytest.raises(ModelError, match=f"skip_layers is {value!r}; it must be a list"):
        read(kv_cache_dtype="int4", kv_cache_dtype_skip_layers=value)


def test_latent_attention_has_no_four_bits(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_deepseek.CONFIG))
    with pytest.raises(ModelError, match="kv_cache_dtype is 'int4', and layer 0 has latent attention.*it can be int8"):
        loader.read_config(tmp_path, kv_cache_dtype="int4")
    assert loader.read_config(tmp_path, kv_cache_dtype="int8").kv_dtype == "int8"


def test_heads_of_an_odd_width_have_none():
    layer = Layer(Attention(heads=2, kv_heads=1, head_dim=33, scale=1.0), Mlp(8, "silu"))
    config = ModelConfig("test", vocab_size=8, dim=8, layers=(layer,) * 2, max_len=8)
    with pytest.raises(ModelError, match="layer 1 has heads of an odd width, 33"):
        replace(config, kv_cache_dtype="int4", kv_cache_skips=(0,))
