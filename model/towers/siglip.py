"""SigLIP, with the merger of Gemma 3: the mean of each group, a norm and a matrix."""

import math

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError
from ..families.common import attention_sources, layer_norm, linear, scale, tensor, vector
from ..families.config_keys import Keys
from ..weights import LayerWeights, MlpWeights
from .config import Merger, Tower
from .weights import MergerWeights, TowerWeights

# of transformers 5, and of older checkpoints
PREFIXES = ("model.vision_tower.", "vision_tower.vision_model.", "model.vision_tower.vision_model.")


def config(vision_config: dict, hf: dict) -> Tower:
    keys = Keys(vision_config, "vision_config")
    keys.refuse("num_channels", 3)
    keys.ignore("attention_dropout", "vision_use_head", "projection_size", "initializer_range")
    D = keys.count("hidden_size", 768)
    N = keys.count("num_attention_heads", 12)
    attention = Attention(
        heads=N, kv_heads=N, head_dim=D // N, scale=(D // N) ** -0.5, rope=None, bias=True,
        out_bias=True, both_ways=True,
    )  # fmt: skip
    activation = Keys({"hidden_act": "gelu_pytorch_tanh"} | vision_config).activation("hidden_act")
    keys.ignore("hidden_act")
    mlp = Mlp(keys.count("intermediate_size", 3072), activation, bias=True, gated=False)
    norm_eps = keys.positive("layer_norm_eps", 1e-6)
    image = keys.count("image_size", 224)
    patch = keys.count("patch_size", 16)
    side = image // patch
    outer = Keys(hf)
    num_tokens = outer.count("mm_tokens_per_image", 256)
    tokens_per_side = math.isqrt(num_tokens)
    if tokens_per_side**2 != num_tokens or side * patch != image or side % tokens_per_side:
        raise ModelError(
            f"config.json: mm_tokens_per_image = {num_tokens}; an image of {image} pixels has "
            f"{side} x {side} patches of {patch}, which do not divide into that square"
        )
    tower = Tower(
        model=ModelConfig(
            family="siglip_tower",
            vocab_size=1,
            dim=D,
            layers=(Layer(attention, mlp),) * keys.count("num_hidden_layers", 12),
            max_len=1 << 16,
            norm_eps=norm_eps,
            dtype=keys.dtype(),
            norm="layer_bias",
        ),
        patch=patch,
        merge=side // tokens_per_side,
        positions_side=side,
        merger=Merger(
            dim=0,
            out=Keys(hf["text_config"]).count("hidden_size", 2304),
            norm_eps=norm_eps,
            rms_norm=True,
            pools=True,
            joins_first=True,
            bias=False,
        ),
        exit_norm=True,
    )
    keys.done()
    return tower


def layer_sources(tower: Tower, index: int, prefix: str) -> LayerWeights:
    layer = tower.model.layers[index]
    a = layer.attention
    assert isinstance(a, Attention) and layer.mlp is not None
    D = tower.model.dim
    F = layer.mlp.dim
    name = f"{prefix}encoder.layers.{index}"
    out = f"{name}.self_attn.out_proj"
    return LayerWeights(
        attention=attention_sources(a, D, f"{name}.self_attn").replace(
            out_NHD=tensor(f"{out}.weight", (D, D), linear((D,), (a.heads, a.head_dim))),
            out_bias_D=tensor(f"{out}.bias", (D,)),
        ),
        mlp=MlpWeights(
            up_DGF=tensor(f"{name}.mlp.fc1.weight", (F, D), linear((1, F), (D,))),
            down_FD=tensor(f"{name}.mlp.fc2.weight", (D, F), linear((D,), (F,))),
            up_bias_GF=tensor(f"{name}.mlp.fc1.bias", (F,), lambda x: x[None]),
            down_bias_D=tensor(f"{name}.mlp.fc2.bias", (D,)),
        ),
        pre_attention_norm_D=layer_norm(f"{name}.layer_norm1", D),
        pre_mlp_norm_D=layer_norm(f"{name}.layer_norm2", D),
    )


def sources(tower: Tower, prefix: str = PREFIXES[0]) -> TowerWeights:
    """The checkpoint's tensors of each leaf of the weight tree."""
    D = tower.model.dim
    P = tower.patch
    embeddings = f"{prefix}embeddings"
    projector = f"{prefix.partition('vision_tower.')[0]}multi_modal_projector"
    return TowerWeights(
        patch_VD=tensor(
            f"{embeddings}.patch_embedding.weight",
            (D, 3, P, P),
            lambda weight: weight.transpose(2, 3, 1, 0).reshape(-1, D),
        ),
        patch_bias_D=vector(f"{embeddings}.patch_embedding.bias", D),
        position_embed_PD=tensor(
            f"{embeddings}.position_embedding.weight", (tower.positions_side**2, D)
        ),
        layers=tuple(layer_sources(tower, i, prefix) for i in range(len(tower.model.layers))),
        exit_norm=layer_norm(f"{prefix}post_layernorm", D),
        merger=MergerWeights(
            norm=scale(f"{projector}.mm_soft_emb_norm.weight", D, offset=1),
            down_FD=tensor(f"{projector}.mm_input_projection_weight", (D, tower.merger.out)),
        ),
    )
