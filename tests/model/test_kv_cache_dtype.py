"""Quantised KV caches: sizes, skipped layers, unsupported models and precision."""

import json
import math
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.model.checkpoint import hub, loader
from quire.model.config import Attention, Layer, Mlp, ModelConfig, ModelError, Rope
from quire.model.mixers import LayerHooks
from quire.model.mixers.attention import AttentionWeights, mix
from quire.model.planning import cost
from quire.ops import native
from quire.ops.attention import KVPages, QueryRows, page_dtype, paged_attention
from quire.ops.heads import prepare
from quire.ops.rope import angles
from quire.serving.api.options import EngineOptions
from quire.serving.build import config_of
from quire.sharding.device_axes import ONE_DEVICE
from quire.tests.support import tiny_deepseek
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden

QUILL = hub.resolve(None)  # layers 0 and 4 have a window, 2 and 6 none; the others read these


def read_quill_config(**options) -> ModelConfig:
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
def test_kv_bytes_per_token_and_skipped_layers(dtype, skips, window, full):
    config = read_quill_config(kv_cache_dtype=dtype, kv_cache_dtype_skip_layers=skips)
    bytes_by_window: dict[bool, int] = {True: 0, False: 0}
    for kind in cost.cache_kinds(config):
        if kind.name != "shared":
            bytes_by_window[kind.window is not None] += kind.token_bytes
    assert bytes_by_window == {True: window, False: full}
    read_bytes = sum(
        cost.layer_token_bytes(layer.attention, config.layer_kv_dtype(i))
        for i, layer in enumerate(config.layers)
    )
    assert (
        cost.kv_read_bytes(config, 1) == read_bytes == 2 * (window + full)
    )  # two layers read each cache


@pytest.mark.parametrize("name", ["1", "8", "-1", "all", ""])
def test_skipped_layers_must_have_their_own_cache(name):
    with pytest.raises(
        ModelError,
        match=f"skip_layers names '{name}'; it can be 'sliding_window' and .*, 0, 2, 4, 6",
    ):
        read_quill_config(kv_cache_dtype="int4", kv_cache_dtype_skip_layers=[name])


@pytest.mark.parametrize("value", ["0", 0])
def test_skipped_layers_must_be_a_list(value):
    with pytest.raises(ModelError, match=f"skip_layers is {value!r}; it must be a list"):
        read_quill_config(kv_cache_dtype="int4", kv_cache_dtype_skip_layers=value)


def test_latent_attention_rejects_int4(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_deepseek.CONFIG))
    with pytest.raises(
        ModelError,
        match="kv_cache_dtype is 'int4', and layer 0 has latent attention.*it can be int8",
    ):
        loader.read_config(tmp_path, kv_cache_dtype="int4")
    assert loader.read_config(tmp_path, kv_cache_dtype="int8").kv_dtype == "int8"


def test_heads_of_odd_width_reject_int4():
    layer = Layer(Attention(heads=2, kv_heads=1, head_dim=33, scale=1.0), Mlp(8, "silu"))
    config = ModelConfig("test", vocab_size=8, dim=8, layers=(layer,) * 2, max_len=8)
    with pytest.raises(ModelError, match="layer 1 has heads of an odd width, 33"):
        replace(config, kv_cache_dtype="int4", kv_cache_skips=(0,))


@cache
def single_layer_attention(implementation: str, dtype: str, offset: float):
    """Attention of 96 rows over quantised pages; slow rotary pairs have key biases of `offset`."""
    T = 96
    S = 32
    D = 128
    N = 4
    K = 2
    H = 64
    rng = np.random.default_rng(7)
    frequencies = 1e6 ** (-np.arange(H // 2) / (H // 2))
    layer = Attention(N, K, H, H**-0.5, Rope(tuple(frequencies.tolist())), bias=True)
    bias_GH = rng.standard_normal((N + 2 * K, H))
    for pair in (H // 2 - 1, H - 1, H // 2 - 3):
        bias_GH[N : N + K, pair] = offset * rng.choice([-1, 1], K)
    qkv_DGH = rng.standard_normal((D, N + 2 * K, H)) / math.sqrt(D)
    x_TD = rng.standard_normal((T, D))
    weights = AttentionWeights(
        *map(as_float32, (qkv_DGH, np.eye(N * H).reshape(N, H, -1), bias_GH))
    )
    dtype_of_pages = page_dtype(jnp.dtype(dtype))
    shape = (T // S + 1, S, K, H // (2 if dtype == "int4" else 1))
    has_scales = dtype_of_pages.itemsize == 1
    pages = KVPages(*(jnp.zeros(shape, dtype_of_pages) for _ in range(2)))
    if has_scales:
        pages = KVPages(
            pages.k_PSKH, pages.v_PSKH, *(jnp.zeros((shape[0], K, S)) for _ in range(2))
        )
    tables_BM = jnp.arange(1, T // S + 1)[None]
    slots_T = jnp.arange(S, S + T)
    rows = QueryRows(jnp.arange(T), jnp.array([0, T]), tables_BM, slots_T)
    hooks = LayerHooks(
        lambda q, k, v, pages, *arguments: paged_attention(
            q, k, v, pages, rows, *arguments, implementation=implementation
        ),
        lambda qkv, heads, pages: prepare(qkv, heads, pages, rows, implementation),
    )
    cos_sin = angles(rows.positions_T, layer.rope.inv_freq)
    return np.asarray(
        mix(layer, weights, as_float32(x_TD), cos_sin, pages, hooks, 1e-6, ONE_DEVICE)[0]
    )


def as_float32(array):
    return jnp.asarray(array, jnp.float32)


@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [
        ("native", "int8", 0.01),
        ("native", "int4", 0.15),
        pytest.param("xla", "int4", 0.15, marks=pytest.mark.slow),
        pytest.param("xla", "float8_e4m3fn", 0.05, marks=pytest.mark.slow),
    ],
)
def test_large_key_biases_do_not_lower_the_precision_of_quantized_keys(
    implementation, dtype, tolerance
):
    """As in Qwen2.5's first layers; the error against float32 pages is as without biases."""
    if implementation == "native" and not native.serves():
        pytest.skip("no compiler")
    for offset in (0, 150):
        expected, actual = (
            single_layer_attention(implementation, kind, offset) for kind in ("float32", dtype)
        )
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert 1e-4 < error < tolerance


def test_layer_with_large_rotated_key_bias_is_not_quantized(tmp_path, caplog):
    """Such layers are found in the weights and logged, unless the user lists skipped layers."""
    folder = Golden(
        next(variant for variant in VARIANTS if variant.name == "qwen2"), tmp_path
    ).folder
    name = "model.layers.0.self_attn.k_proj.bias"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    tensors[name][1] += 150  # of a fast rotary pair
    save_file(tensors, file, metadata={"format": "pt"})

    def skips(**options) -> tuple[int, ...]:
        return config_of(folder, EngineOptions(model=str(folder), **options)).kv_cache_skips

    assert skips(kv_cache_dtype="int4") == skips(kv_cache_dtype="fp8") == (0,)
    assert (
        "kv_cache_dtype is int4, but keys and values stay in bfloat16 in these layers"
        in caplog.text
    )
    assert skips(kv_cache_dtype="int8", kv_cache_dtype_skip_layers=["1"]) == (1,)
    assert skips() == skips(kv_cache_dtype="int8", load_format="dummy") == ()
