"""ERNIE 4.5: Llama with interleaved rotary pairs; larger models select experts with a bias."""

from functools import partial

from ..config import Attention, Layer, Mlp, ModelConfig, Moe
from ..weights import LayerWeights
from .common import Keys, model_config, model_sources, sparse_layer_sources, tensor


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    kind = hf["model_type"]
    keys = Keys({"num_key_value_heads": {"ernie4_5": 2, "ernie4_5_moe": 4}[kind]} | hf)
    context_length = keys.count("max_position_embeddings", 131072)
    bias = keys("use_bias", False)
    heads = keys.heads(128 if kind == "ernie4_5" else None)
    rope = keys.rope(heads["head_dim"], max_len or context_length, theta=500000.0)
    attention = Attention(**heads, rope=rope, bias=bias, out_bias=bias)
    dense = Layer(attention, keys.mlp(bias=bias))
    layers = (dense,) * keys.count("num_hidden_layers")
    if kind == "ernie4_5_moe":
        layers = expert_layers(keys, dense)
    keys.ignore("compression_ratio")
    tied = keys("tie_word_embeddings", True)
    return model_config(
        keys, kind, layers, context_length, norm_eps=keys.positive("rms_norm_eps", 1e-5), tied=tied
    )


def expert_layers(keys: Keys, dense: Layer) -> tuple[Layer, ...]:
    """All layers; config.json has the interval and range of the layers with experts."""
    keys.refuse("moe_gate", "topk")
    keys.refuse("moe_use_aux_free", True)
    keys.ignore("moe_capacity", "moe_norm_min", "moe_num_experts_per_device")  # training only
    mlp = dense.mlp
    L = keys.count("num_hidden_layers")
    assert mlp is not None
    moe = Moe(
        experts=keys.count("moe_num_experts", 64),
        top_k=keys.count("moe_k", 6),
        dim=keys.count("moe_intermediate_size", 1536),
        activation=mlp.activation,
        router_float32=True,
        choice_bias=True,
    )
    num_shared = keys("moe_num_shared_experts", 2)
    shared_mlp = Mlp(num_shared * moe.dim, mlp.activation, mlp.bias) if num_shared else None
    first_sparse = keys("moe_layer_start_index", 1)
    period = keys.count("moe_layer_interval", 1)
    last_sparse = keys("moe_layer_end_index", -1)
    last_sparse = L - 1 if last_sparse == -1 else last_sparse
    sparse = Layer(dense.attention, shared_mlp, moe)
    return tuple(
        sparse if (i + 1) % period == 0 and first_sparse <= i <= last_sparse else dense
        for i in range(L)
    )


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not loaded: the MTP layers."""
    return name.startswith("model.mtp_")


def layer(config: ModelConfig, index: int, prefix: str) -> LayerWeights:
    weights = sparse_layer_sources(config, index, prefix, interleaved=True)
    moe = config.layers[index].moe
    if moe is None:
        return weights
    name = f"{prefix}layers.{index}.mlp.moe_statics.e_score_correction_bias"
    bias = tensor(name, (1, moe.experts), lambda x: x.reshape(-1))
    return weights.replace(moe=weights.moe.replace(choice_bias_E=bias))


def canonical(name: str) -> str:
    """A tensor's name as in published files; Transformers 5 stores the bias with the router."""
    return name.replace(".gate.moe_statics.", ".moe_statics.")


sources = partial(model_sources, layer=layer)
