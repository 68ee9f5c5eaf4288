"""The tower of Qwen3-VL and Qwen3.5, dense and with experts."""

import math

import numpy as np

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError, Rope
from ..families.common import layer_norm, linear, tensor, vector
from ..families.config_keys import Keys
from ..mixers.attention import AttentionWeights
from ..weights import LayerWeights, MlpWeights
from .config import Merger, Tower
from .weights import MergerWeights, TowerWeights

NORM_EPS = 1e-6
FRAMES = 2  # of a patch in the checkpoint; those of an image are equal
THETA = 10000.0


PREFIXES = ("model.visual.", "visual.")  # of transformers 5, and of older checkpoints


def config(vision_config: dict, hf: dict) -> Tower:
    keys = Keys(vision_config, "vision_config")
    keys.refuse("in_channels", 3)
    keys.ignore("initializer_range")
    keys.refuse("temporal_patch_size", FRAMES)
    D = keys.count("hidden_size", 1152)
    N = keys.count("num_heads", 16)
    H = D // N
    if H % 4:
        raise ModelError(
            f"vision_config: hidden_size {D} with {N} heads makes heads of {H}; half of their "
            "rotary pairs turn by the row and half by the column, so it must be a multiple of 4"
        )
    theta = rope_theta(keys)
    frequencies = tuple(theta ** (-2 * n / (H // 2)) for n in range(H // 4))
    rope = Rope(frequencies * 2, axes=(0,) * (H // 4) + (1,) * (H // 4))
    attention = Attention(
        heads=N, kv_heads=N, head_dim=H, scale=H**-0.5, rope=rope, bias=True, out_bias=True,
        both_ways=True,
    )  # fmt: skip
    mlp = Mlp(
        keys.count("intermediate_size", 4304),
        Keys({"hidden_act": "gelu_pytorch_tanh"} | vision_config).activation("hidden_act"),
        bias=True,
        gated=False,
    )
    keys.ignore("hidden_act")
    merge = keys.count("spatial_merge_size", 2)
    out = keys.count("out_hidden_size", 3584)
    table_size = keys.count("num_position_embeddings", 2304)
    side = math.isqrt(table_size)
    if side**2 != table_size:
        raise ModelError(
            f"vision_config: num_position_embeddings = {table_size}; it must be a square"
        )
    depth = keys.count("depth", 27)
    deepstack = tuple(keys("deepstack_visual_indexes", None) or ())
    if any(type(index) is not int or not 0 <= index < depth for index in deepstack):
        raise ModelError(
            f"vision_config: deepstack_visual_indexes = {list(deepstack)}; they must be layers "
            f"below depth = {depth}"
        )
    hidden = D * merge**2
    tower = Tower(
        model=ModelConfig(
            family="qwen3_tower",
            vocab_size=1,
            dim=D,
            layers=(Layer(attention, mlp),) * depth,
            max_len=1 << 16,
            norm_eps=NORM_EPS,
            dtype=keys.dtype(),
            norm="layer_bias",
        ),
        patch=keys.count("patch_size", 16),
        merge=merge,
        positions_side=side,
        merger=Merger(hidden, out, norm_eps=NORM_EPS),
        deepstack=deepstack,
        deepstack_merger=Merger(hidden, out, joins_first=True, norm_eps=NORM_EPS)
        if deepstack
        else None,
    )
    keys.done()
    return tower


def rope_theta(keys: Keys) -> float:
    """The base of the rotary embedding."""
    params = keys("rope_parameters", None) or {}
    kind = params.get("rope_type", "axial")
    if kind != "axial":
        raise ModelError(
            f"vision_config: rope_parameters.rope_type = {kind!r} is not supported; supported is "
            "'axial'"
        )
    return params.get("rope_theta", THETA)


def layer_sources(tower: Tower, index: int, prefix: str) -> LayerWeights:
    layer = tower.model.layers[index]
    attention = layer.attention
    assert isinstance(attention, Attention) and layer.mlp is not None
    D = tower.model.dim
    N = attention.heads
    H = attention.head_dim
    F = layer.mlp.dim
    block = f"{prefix}blocks.{index}"
    return LayerWeights(
        attention=AttentionWeights(
            qkv_DGH=tensor(f"{block}.attn.qkv.weight", (3 * D, D), linear((3 * N, H), (D,))),
            out_NHD=tensor(f"{block}.attn.proj.weight", (D, D), linear((D,), (N, H))),
            qkv_bias_GH=tensor(f"{block}.attn.qkv.bias", (3 * D,), lambda x: x.reshape(3 * N, H)),
            out_bias_D=tensor(f"{block}.attn.proj.bias", (D,)),
        ),
        mlp=MlpWeights(
            up_DGF=tensor(f"{block}.mlp.linear_fc1.weight", (F, D), linear((1, F), (D,))),
            down_FD=tensor(f"{block}.mlp.linear_fc2.weight", (D, F), linear((D,), (F,))),
            up_bias_GF=tensor(f"{block}.mlp.linear_fc1.bias", (F,), lambda x: x[None]),
            down_bias_D=tensor(f"{block}.mlp.linear_fc2.bias", (D,)),
        ),
        pre_attention_norm_D=layer_norm(f"{block}.norm1", D),
        pre_mlp_norm_D=layer_norm(f"{block}.norm2", D),
    )


def merger_sources(tower: Tower, merger: Merger, prefix: str) -> MergerWeights:
    E = tower.group * tower.model.dim
    F = merger.dim
    return MergerWeights(
        norm=layer_norm(f"{prefix}.norm", E if merger.joins_first else tower.model.dim),
        up_EF=tensor(f"{prefix}.linear_fc1.weight", (F, E), linear((F,), (E,))),
        up_bias_F=vector(f"{prefix}.linear_fc1.bias", F),
        down_FD=tensor(f"{prefix}.linear_fc2.weight", (merger.out, F), linear((merger.out,), (F,))),
        down_bias_D=vector(f"{prefix}.linear_fc2.bias", merger.out),
    )


def sources(tower: Tower, prefix: str = "model.visual.") -> TowerWeights:
    """The sources of all weights.

    Args:
        tower: The tower.
        prefix: Prefix of the tensors' names.
    """
    D = tower.model.dim
    P = tower.patch

    def sum_frames(weight: np.ndarray) -> np.ndarray:
        """[D, channels, FRAMES, P, P] to [P * P * channels, D]."""
        summed = weight.astype(np.float32).sum(axis=2)
        return summed.transpose(2, 3, 1, 0).reshape(-1, D)

    return TowerWeights(
        patch_VD=tensor(f"{prefix}patch_embed.proj.weight", (D, 3, FRAMES, P, P), sum_frames),
        patch_bias_D=vector(f"{prefix}patch_embed.proj.bias", D),
        position_embed_PD=tensor(f"{prefix}pos_embed.weight", (tower.positions_side**2, D)),
        layers=tuple(layer_sources(tower, i, prefix) for i in range(len(tower.model.layers))),
        merger=merger_sources(tower, tower.merger, f"{prefix}merger"),
        deepstack=tuple(
            merger_sources(tower, tower.deepstack_merger, f"{prefix}deepstack_merger_list.{n}")
            for n in range(len(tower.deepstack))
            if tower.deepstack_merger is not None
        ),
    )
