"""Gemma 4: wide global heads between local ones, caches shared by the upper layers, an embedding for every layer."""

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError, Moe
from ..weights import LayerWeights, ModelWeights, MoeWeights, PerLayerWeights
from .common import (
    SANDWICH_NORMS,
    Keys,
    expert_sources,
    layer_sources,
    layer_types,
    linear,
    model_sources,
    narrower,
    router_source,
    scale,
    tensor,
)
from .gemma2 import gemma_config

MISSING = {  # what a config.json without these keys means
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "max_position_embeddings": 131072,
    "sliding_window": 512,
}  # fmt: skip
MISSING_UNIFIED = MISSING | {
    "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024,
}  # fmt: skip
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    missing = MISSING_UNIFIED if hf["model_type"].startswith("gemma4_unified") else MISSING
    if not hf.get("rope_parameters"):
        hf = hf | {"rope_parameters": ROPES}
    keys = Keys(missing | hf)
    keys.refuse("use_bidirectional_attention", "vision")  # it concerns the tokens of images alone
    longest, L = keys.count("max_position_embeddings"), keys.count("num_hidden_layers")
    local = ["sliding_attention" if (i + 1) % 6 and i + 1 < L else "full_attention" for i in range(L)]
    kinds = layer_types(keys, L, local)
    if kinds[-1] != "full_attention":
        raise ModelError(f"config.json: the last of layer_types is {kinds[-1]!r}; it must be full_attention")
    activation, owners = keys.activation("hidden_activation"), cache_sources(keys, kinds)
    attentions = attention_layers(keys, kinds, owners, max_len or longest)
    moe = experts(keys, activation)
    F, wider = keys.count("intermediate_size"), 2 if keys("use_double_wide_mlp", False) else 1
    layers = tuple(
        Layer(attention, Mlp(F if owner is None else F * wider, activation), moe, post_norm=True)
        for attention, owner in zip(attentions, owners, strict=True)
    )
    A, V = keys("hidden_size_per_layer_input", 0), keys.count("vocab_size_per_layer_input")
    if A < 0:
        raise ModelError(f"config.json: hidden_size_per_layer_input = {A}; it must be 0 or more")
    if A and keys.count("vocab_size") > V:
        raise ModelError(f"config.json: vocab_size_per_layer_input = {V}; it must cover vocab_size")
    extra = {"per_layer_dim": A, "per_layer_vocab": V if A else 0, "layer_scale": True}
    return gemma_config(keys, "gemma4_text", layers, longest, **extra)


def cache_sources(keys: Keys, kinds: list[str]) -> list[int | None]:
    """The layer whose cache each reads: the last `num_kv_shared_layers` read that of their kind's last owner."""
    shared = keys("num_kv_shared_layers", 0)
    own = kinds[: max(0, len(kinds) - shared)]
    if shared < 0 or set(own) != set(kinds):
        raise ModelError(f"config.json: num_kv_shared_layers = {shared} leaves a kind of layer without a cache")
    last = {kind: i for i, kind in enumerate(own)}
    return [None] * len(own) + [last[kind] for kind in kinds[len(own) :]]


def head_sizes(keys: Keys, kinds: list[str]) -> list[tuple[int, int]]:
    """(head size, key-value heads) of each layer: global layers have their own."""
    H, K = keys.count("head_dim", 256), keys.count("num_key_value_heads")
    wide, few = {"head_dim": keys.count("global_head_dim", 512)}, keys.count("num_global_key_value_heads", None)
    if few and keys("attention_k_eq_v", False):
        wide["num_key_value_heads"] = few
    own = {str(index): wide for index, kind in enumerate(kinds) if kind == "full_attention"}
    own, sizes = keys("per_layer_config", own), []  # newer files spell this out
    for index in range(len(kinds)):
        layer = Keys(own.get(str(index), {}))
        sizes.append((layer.count("head_dim", H), layer.count("num_key_value_heads", K)))
        layer.done()
    return sizes


def attention_layers(keys: Keys, kinds: list[str], owners: list[int | None], max_len: int) -> list[Attention]:
    """The attention of each layer."""
    N, bias, tied = keys.count("num_attention_heads"), keys("attention_bias", False), keys("attention_k_eq_v", False)
    window = narrower(keys.count("sliding_window"), keys.count("max_position_embeddings"))
    return [
        Attention(
            heads=N,
            kv_heads=K,
            head_dim=H,
            scale=1.0,
            rope=keys.rope(H, max_len, kind),
            window=None if kind == "full_attention" else window,
            qk_norm="head",
            v_norm=True,
            bias=bias,
            out_bias=bias,
            tied_kv=tied and kind == "full_attention",
            kv_source=owner,
        )
        for kind, owner, (H, K) in zip(kinds, owners, head_sizes(keys, kinds), strict=True)
    ]


def experts(keys: Keys, activation: str) -> Moe | None:
    """The experts beside each dense block, if there are any."""
    if not keys("enable_moe_block", False):
        keys.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    return Moe(
        experts=keys.count("num_experts"),
        top_k=keys.count("top_k_experts"),
        dim=keys.count("moe_intermediate_size"),
        activation=activation,
        own_norms=True,
    )


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    moe, D, A, here = config.layers[index].moe, config.dim, config.per_layer_dim, f"{prefix}layers.{index}"
    weights = layer_sources(config, index, prefix, SANDWICH_NORMS).replace(
        scale=tensor(f"{here}.layer_scalar", (1,), lambda x: x.reshape(()))
    )
    if A:
        gate = tensor(f"{here}.per_layer_input_gate.weight", (A, D), linear((A,), (D,)))
        up = tensor(f"{here}.per_layer_projection.weight", (D, A), linear((D,), (A,)))
        norm = scale(f"{here}.post_per_layer_input_norm.weight", D)
        weights = weights.replace(per_layer=PerLayerWeights(gate, up, norm))
    if moe:
        weights = weights.replace(
            moe=MoeWeights(
                router_DE=router_source(moe, D, f"{here}.router.proj.weight"),
                router_scale_D=scale(f"{here}.router.scale", D),
                expert_scale_E=scale(f"{here}.router.per_expert_scale", moe.experts),
                pre_norm_D=scale(f"{here}.pre_feedforward_layernorm_2.weight", D),
                post_norm_D=scale(f"{here}.post_feedforward_layernorm_2.weight", D),
                mlp_post_norm_D=scale(f"{here}.post_feedforward_layernorm_1.weight", D),
                **expert_sources(moe, D, f"{here}.experts"),
            )
        )
    return weights


def sources(config: ModelConfig) -> ModelWeights:
    weights = model_sources(config, layer=layer)
    L, D, A, V = len(config.layers), config.dim, config.per_layer_dim, config.per_layer_vocab
    if not A:
        return weights
    return weights.replace(
        per_layer_embed_VLA=tensor("model.embed_tokens_per_layer.weight", (V, L * A), lambda x: x.reshape(V, L, A)),
        per_layer_proj_DLA=tensor("model.per_layer_model_projection.weight", (L * A, D), linear((L, A), (D,))),
        per_layer_norm_A=scale("model.per_layer_projection_norm.weight", A),
    )


def ignored(name: str, config: ModelConfig) -> bool:
    """Keys and values of layers that read another layer's cache."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"] and parts[3] == "self_attn":
        shares = config.layers[int(parts[2])].attention.kv_source is not None
        return shares and parts[4] in ("k_proj", "v_proj", "k_norm", "v_norm")
    return False
