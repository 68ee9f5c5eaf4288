"""Gemma 4: larger global heads, KV caches shared by the upper layers, per-layer embeddings."""

from ..config import Attention, Layer, Mlp, ModelConfig, ModelError, Moe
from ..weights import LayerWeights, ModelWeights, MoeWeights, PerLayerWeights
from .common import (
    SANDWICH_NORMS,
    Keys,
    effective_window,
    expert_sources,
    layer_sources,
    layer_types,
    linear,
    model_sources,
    router_source,
    scale,
    tensor,
)
from .gemma2 import gemma_config

MISSING = {  # defaults
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
}
MISSING_UNIFIED = MISSING | {
    "hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024,
}  # fmt: skip
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
    },
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    missing = MISSING_UNIFIED if hf["model_type"].startswith("gemma4_unified") else MISSING
    if not hf.get("rope_parameters"):
        hf = hf | {"rope_parameters": ROPES}
    keys = Keys(missing | hf)
    keys.refuse("use_bidirectional_attention", "vision")  # affects image tokens only
    context_length = keys.count("max_position_embeddings")
    L = keys.count("num_hidden_layers")
    default_kinds = [
        "sliding_attention" if (i + 1) % 6 and i + 1 < L else "full_attention" for i in range(L)
    ]
    kinds = layer_types(keys, L, default_kinds)
    if kinds[-1] != "full_attention":
        raise ModelError(
            f"config.json: the last of layer_types is {kinds[-1]!r}; it must be full_attention"
        )
    activation = keys.activation("hidden_activation")
    owners = cache_sources(keys, kinds)
    attentions = attention_layers(keys, kinds, owners, max_len or context_length)
    moe = routed_experts(keys, activation)
    F = keys.count("intermediate_size")
    width_factor = 2 if keys("use_double_wide_mlp", False) else 1
    layers = tuple(
        Layer(
            attention,
            Mlp(F if owner is None else F * width_factor, activation),
            moe,
            post_norm=True,
        )
        for attention, owner in zip(attentions, owners, strict=True)
    )
    A = keys("hidden_size_per_layer_input", 0)
    V = keys.count("vocab_size_per_layer_input")
    if A < 0:
        raise ModelError(f"config.json: hidden_size_per_layer_input = {A}; it must be 0 or more")
    if A and keys.count("vocab_size") > V:
        raise ModelError(f"config.json: vocab_size_per_layer_input = {V}; it must cover vocab_size")
    extra = {"per_layer_dim": A, "per_layer_vocab": V if A else 0, "layer_scale": True}
    return gemma_config(keys, "gemma4_text", layers, context_length, **extra)


def cache_sources(keys: Keys, kinds: list[str]) -> list[int | None]:
    """The layer whose KV cache each layer reads, or None for its own.

    The last `num_kv_shared_layers` layers share the cache of the last layer of their kind before.
    """
    num_shared = keys("num_kv_shared_layers", 0)
    owner_kinds = kinds[: max(0, len(kinds) - num_shared)]
    if num_shared < 0 or set(owner_kinds) != set(kinds):
        raise ModelError(
            f"config.json: num_kv_shared_layers = {num_shared} leaves a kind of layer without "
            "a cache"
        )
    last_owner = {kind: i for i, kind in enumerate(owner_kinds)}
    return [None] * len(owner_kinds) + [last_owner[kind] for kind in kinds[len(owner_kinds) :]]


def head_sizes(keys: Keys, kinds: list[str]) -> list[tuple[int, int]]:
    """The head size and number of KV heads of each layer: global layers have their own."""
    H = keys.count("head_dim", 256)
    K = keys.count("num_key_value_heads")
    global_sizes = {"head_dim": keys.count("global_head_dim", 512)}
    global_kv_heads = keys.count("num_global_key_value_heads", None)
    if global_kv_heads and keys("attention_k_eq_v", False):
        global_sizes["num_key_value_heads"] = global_kv_heads
    sizes_by_layer = {
        str(index): global_sizes for index, kind in enumerate(kinds) if kind == "full_attention"
    }
    sizes_by_layer = keys("per_layer_config", sizes_by_layer)  # explicit in newer files
    sizes = []
    for index in range(len(kinds)):
        layer = Keys(sizes_by_layer.get(str(index), {}))
        sizes.append((layer.count("head_dim", H), layer.count("num_key_value_heads", K)))
        layer.done()
    return sizes


def attention_layers(
    keys: Keys, kinds: list[str], owners: list[int | None], max_len: int
) -> list[Attention]:
    """The attention of each layer."""
    N = keys.count("num_attention_heads")
    bias = keys("attention_bias", False)
    tied = keys("attention_k_eq_v", False)
    window = effective_window(keys.count("sliding_window"), keys.count("max_position_embeddings"))
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


def routed_experts(keys: Keys, activation: str) -> Moe | None:
    """The experts beside each dense block, if the model has any."""
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
    moe = config.layers[index].moe
    D = config.dim
    A = config.per_layer_dim
    layer_prefix = f"{prefix}layers.{index}"
    weights = layer_sources(config, index, prefix, SANDWICH_NORMS).replace(
        scale=tensor(f"{layer_prefix}.layer_scalar", (1,), lambda x: x.reshape(()))
    )
    if A:
        gate = tensor(f"{layer_prefix}.per_layer_input_gate.weight", (A, D), linear((A,), (D,)))
        up = tensor(f"{layer_prefix}.per_layer_projection.weight", (D, A), linear((D,), (A,)))
        norm = scale(f"{layer_prefix}.post_per_layer_input_norm.weight", D)
        weights = weights.replace(per_layer=PerLayerWeights(gate, up, norm))
    if moe:
        weights = weights.replace(
            moe=MoeWeights(
                router_DE=router_source(moe, D, f"{layer_prefix}.router.proj.weight"),
                router_scale_D=scale(f"{layer_prefix}.router.scale", D),
                expert_scale_E=scale(f"{layer_prefix}.router.per_expert_scale", moe.experts),
                pre_norm_D=scale(f"{layer_prefix}.pre_feedforward_layernorm_2.weight", D),
                post_norm_D=scale(f"{layer_prefix}.post_feedforward_layernorm_2.weight", D),
                mlp_post_norm_D=scale(f"{layer_prefix}.post_feedforward_layernorm_1.weight", D),
                **expert_sources(moe, D, f"{layer_prefix}.experts"),
            )
        )
    return weights


def sources(config: ModelConfig) -> ModelWeights:
    weights = model_sources(config, layer=layer)
    L = len(config.layers)
    D = config.dim
    A = config.per_layer_dim
    V = config.per_layer_vocab
    if not A:
        return weights
    return weights.replace(
        per_layer_embed_VLA=tensor(
            "model.embed_tokens_per_layer.weight", (V, L * A), lambda x: x.reshape(V, L, A)
        ),
        per_layer_proj_DLA=tensor(
            "model.per_layer_model_projection.weight", (L * A, D), linear((L, A), (D,))
        ),
        per_layer_norm_A=scale("model.per_layer_projection_norm.weight", A),
    )


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not loaded: key and value projections of layers that share a KV cache."""
    components = name.split(".")
    if components[:2] == ["model", "layers"] and components[3] == "self_attn":
        shares = config.layers[int(components[2])].attention.kv_source is not None
        return shares and components[4] in ("k_proj", "v_proj", "k_norm", "v_norm")
    return False
