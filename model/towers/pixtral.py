"""The tower of Pixtral and Mistral Small 3, with the merger of Mistral 3."""

from typing import Any

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError, Rope
from ..families.common import attention_sources, linear, mlp_sources, scale, tensor
from ..families.config_keys import Keys
from ..weights import LayerWeights
from .config import Merger, Tower
from .weights import MergerWeights, TowerWeights

PREFIXES = ("model.vision_tower.", "vision_tower.")  # of transformers 5, and of older checkpoints
NORM_EPS = 1e-5
THETA = 10000.0


def config(vision_config: dict, hf: dict) -> Tower:
    keys = Keys(vision_config, "vision_config")
    keys.refuse("num_channels", 3)
    keys.ignore("initializer_range", "attention_dropout", "image_size", "vocab_size", "rope_theta")
    D = keys.count("hidden_size", 1024)
    N = keys.count("num_attention_heads", 16)
    H = keys.count("head_dim", D // N)
    if H * N != D or H % 4:
        raise ModelError(
            f"vision_config: hidden_size {D} with {N} heads of {H}; heads must fill the width, and "
            "half of their rotary pairs turn by the row and half by the column"
        )
    theta = rope_theta(keys, vision_config)
    frequencies = tuple(theta ** (-2 * n / H) for n in range(H // 2))
    # Even pairs turn by the row, odd ones by the column.
    rope = Rope(frequencies[::2] + frequencies[1::2], axes=(0,) * (H // 4) + (1,) * (H // 4))
    attention = Attention(heads=N, kv_heads=N, head_dim=H, scale=H**-0.5, rope=rope, both_ways=True)
    activation = Keys({"hidden_act": "gelu"} | vision_config).activation("hidden_act")
    keys.ignore("hidden_act")
    mlp = Mlp(keys.count("intermediate_size", 4096), activation)
    depth = keys.count("num_hidden_layers", 24)
    tower = Tower(
        model=ModelConfig(
            family="pixtral_tower",
            vocab_size=1,
            dim=D,
            layers=(Layer(attention, mlp),) * depth,
            max_len=1 << 16,
            norm_eps=NORM_EPS,
            dtype=keys.dtype(),
        ),
        patch=patch_size(keys("patch_size", 16)),
        merge=Keys(hf).count("spatial_merge_size", 2),
        merger=merger_config(hf, D, depth),
        patch_bias=False,
        entry_norm=True,
    )
    keys.done()
    return tower


def merger_config(hf: dict, D: int, depth: int) -> Merger:
    outer = Keys({"projector_hidden_act": "gelu"} | hf)
    layer = outer("vision_feature_layer", -1)
    if layer not in (-1, [-1], depth):
        raise ModelError(
            f"config.json: vision_feature_layer = {layer!r} is not supported; supported is -1, the "
            "tower's last layer"
        )
    text = Keys(hf["text_config"])
    out = text.count("hidden_size")
    return Merger(
        dim=out,
        out=out,
        activation=outer.activation("projector_hidden_act"),
        norm_eps=text.positive(
            "rms_norm_eps", 1e-5 if text("model_type", "mistral") == "ministral3" else 1e-6
        ),
        joined_dim=D,
        bias=outer("multimodal_projector_bias", False),
    )


def patch_size(value: Any) -> int:
    """The side of a patch, which may be given as two equal ones."""
    sides = set(value) if isinstance(value, list) else {value}
    if len(sides) > 1 or not all(type(side) is int and side > 0 for side in sides):
        raise ModelError(f"vision_config: patch_size = {value!r}; it must be a positive integer")
    return sides.pop()


def rope_theta(keys: Keys, vision_config: dict) -> float:
    """The base of the rotary embedding."""
    params = keys("rope_parameters", None) or {}
    kind = params.get("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise ModelError(
            f"vision_config: rope_parameters.rope_type = {kind!r} is not supported; supported is "
            "'axial'"
        )
    return params.get("rope_theta", vision_config.get("rope_theta") or THETA)


def layer_sources(tower: Tower, index: int, prefix: str) -> LayerWeights:
    layer = tower.model.layers[index]
    assert isinstance(layer.attention, Attention) and layer.mlp is not None
    D = tower.model.dim
    name = f"{prefix}transformer.layers.{index}"
    return LayerWeights(
        attention=attention_sources(layer.attention, D, f"{name}.attention"),
        mlp=mlp_sources(layer.mlp, D, f"{name}.feed_forward"),
        pre_attention_norm_D=scale(f"{name}.attention_norm.weight", D),
        pre_mlp_norm_D=scale(f"{name}.ffn_norm.weight", D),
    )


def merger_sources(tower: Tower, prefix: str) -> MergerWeights:
    D = tower.model.dim
    merger = tower.merger
    F = merger.dim
    group = tower.group

    def join(weight):
        """Torch unfolds a group channel by channel; here it is patch by patch."""
        return weight.reshape(D, D, group).transpose(2, 1, 0).reshape(group * D, D)

    return MergerWeights(
        norm=scale(f"{prefix}norm.weight", D),
        up_EF=tensor(f"{prefix}linear_1.weight", (F, D), linear((F,), (D,))),
        up_bias_F=tensor(f"{prefix}linear_1.bias", (F,)) if merger.bias else None,
        down_FD=tensor(f"{prefix}linear_2.weight", (merger.out, F), linear((merger.out,), (F,))),
        down_bias_D=tensor(f"{prefix}linear_2.bias", (merger.out,)) if merger.bias else None,
        join_JE=tensor(f"{prefix}patch_merger.merging_layer.weight", (D, group * D), join),
    )


def sources(tower: Tower, prefix: str = PREFIXES[0]) -> TowerWeights:
    """The checkpoint's tensors of each leaf of the weight tree."""
    D = tower.model.dim
    P = tower.patch
    return TowerWeights(
        patch_VD=tensor(
            f"{prefix}patch_conv.weight",
            (D, 3, P, P),
            lambda weight: weight.transpose(2, 3, 1, 0).reshape(-1, D),
        ),
        patch_bias_D=None,
        entry_norm=scale(f"{prefix}ln_pre.weight", D),
        layers=tuple(layer_sources(tower, i, prefix) for i in range(len(tower.model.layers))),
        merger=merger_sources(
            tower, f"{prefix.removesuffix('vision_tower.')}multi_modal_projector."
        ),
    )
