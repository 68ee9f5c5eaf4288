"""Hunyuan: head norms after the rotary embedding; larger models have routed and shared experts."""

from functools import partial
from typing import Any

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError, Moe
from .common import Keys, model_config, model_sources, sparse_layer_sources

# Keys of related models, of training and of image encoders: they do not affect these layers.
UNUSED_KEYS = (
    "add_classification_head",
    "class_num",
    "cla_share_factor",
    "dense_list",
    "mask_init_id",
    "norm_type",
    "pool_type",
    "org_vocab_size",
    "text_start_id",
    "text_end_id",
    "num_media_embeds",
    "anyres_pooling_size",
    "anyres_vit_max_image_size",
    "anyres_vit_two_views",
    "skip_cls_token",
    "moe_drop_tokens",
    "moe_random_routing_dropped_token",
    "capacity_factor",
    "group_limited_greedy",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "moe_layer_num_skipped",
    "pad_id",
)


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(fold_alpha_into_rope(hf))
    kind = hf["model_type"]
    keys.refuse("use_qk_norm", True)
    keys.refuse("use_cla", False)
    keys.refuse("use_mla", False)
    keys.refuse("use_rotary_pos_emb", True)
    keys.ignore(
        *UNUSED_KEYS,
        *(name for name in hf if name.startswith(("im_", "vit_", "video_", "position_embedding_"))),
    )
    context_length = keys.count("max_position_embeddings", 2048)
    heads = keys.heads(keys.count("attention_head_dim", None))
    bias = keys("attention_bias", False)
    attention = Attention(
        **heads,
        rope=keys.rope(heads["head_dim"], max_len or context_length),
        bias=bias,
        out_bias=bias,
        qk_norm="turned",
    )
    mlp = keys.mlp()
    L = keys.count("num_hidden_layers")
    layers = (Layer(attention, mlp),) * L
    if kind == "hunyuan_v1_moe":
        layers = tuple(expert_layer(keys, attention, mlp, index, L) for index in range(L))
    return model_config(
        keys, kind, layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5)
    )


def expert_layer(keys: Keys, attention: Attention, mlp: Mlp, index: int, count: int) -> Layer:
    """A layer with experts; each config value may be a list with an entry per layer."""

    def per_layer(name: str, default: int) -> Any:
        value = keys(name, default) if not isinstance(keys.hf.get(name), list) else keys(name)
        if isinstance(value, list) and len(value) != count:
            raise ModelError(f"config.json: {name} has {len(value)} entries for {count} layers")
        number = value[index] if isinstance(value, list) else value
        if type(number) is not int or number < 1:
            raise ModelError(
                f"config.json: {name} = {number!r}; it must be a whole number of at least 1"
            )
        return number

    if (shared := per_layer("num_shared_expert", 1)) != 1:
        raise ModelError(f"config.json: num_shared_expert = {shared}; supported is 1")
    if not keys("use_mixed_mlp_moe", True):
        raise ModelError(
            "config.json: use_mixed_mlp_moe = False is not supported; supported is True"
        )
    keys.refuse("norm_topk_prob", True)
    width = per_layer("moe_intermediate_size", mlp.dim)
    if width != mlp.dim:
        raise ModelError(
            f"config.json: moe_intermediate_size = {width}; supported is the value of "
            "intermediate_size"
        )
    moe = Moe(
        per_layer("num_experts", 1),
        per_layer("moe_topk", 1),
        width,
        mlp.activation,
        router_float32=True,
    )
    return Layer(attention, mlp, moe)


def fold_alpha_into_rope(hf: dict) -> dict:
    """Fold the RoPE scaling by `alpha` into the base of the rotary embedding.

    config.json declares it as dynamic scaling, but it is constant.
    """
    for name in ("rope_parameters", "rope_scaling"):
        params = hf.get(name)
        if not isinstance(params, dict) or not (alpha := params.get("alpha")):
            continue
        heads = Keys(hf)
        H = heads.heads(heads.count("attention_head_dim", None))["head_dim"]
        theta = Keys(params).positive("rope_theta", heads.positive("rope_theta", 10000.0))
        stretched = theta * Keys({"alpha": alpha}).positive("alpha", None) ** (H / (H - 2))
        return hf | {name: {"rope_type": "default", "rope_theta": stretched}}
    return hf


def canonical(name: str) -> str:
    """A tensor's name as in other families."""
    name = name.replace(".query_layernorm.", ".q_norm.").replace(".key_layernorm.", ".k_norm.")
    return name.replace(".mlp.gate.wg.", ".mlp.gate.")


sources = partial(model_sources, layer=sparse_layer_sources, shared="shared_mlp")
