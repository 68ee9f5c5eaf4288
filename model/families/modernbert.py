"""ModernBERT: an encoder with rotary embeddings, windows in two of three layers, and gated MLPs."""

from dataclasses import replace
from functools import partial

from ...ops.norm import LayerNorm
from ..config import Attention, Dense, Layer, Mlp, ModelConfig, ModelError
from ..weights import LayerWeights, MlpWeights, ModelWeights
from .common import Keys, attention_sources, linear, model_config, scale, tensor, vector

KINDS = ("sliding_attention", "full_attention")


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys({"rms_norm_eps": hf.get("norm_eps", 1e-5), "tie_word_embeddings": True} | hf)
    keys.refuse("attention_bias", False)
    keys.refuse("mlp_bias", False)
    keys.ignore(
        "norm_eps", "reference_compile", "repad_logits_with_grad", "initializer_cutoff_factor"
    )
    keys.ignore(
        "deterministic_flash_attn",
        "embedding_dropout",
        "mlp_dropout",
        "classifier_dropout",
        "cls_token_id",
    )
    keys.ignore(
        "decoder_bias",
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "sep_token_id",
        "rope_parameters",
    )
    keys.ignore("classifier_activation", "classifier_bias", "classifier_pooling")
    keys.ignore("position_embedding_type", "layer_norm_eps")
    context_length = keys.count("max_position_embeddings", 8192)
    L = keys.count("num_hidden_layers", 22)
    heads = keys.heads()
    served_len = max_len or context_length
    H = heads["head_dim"]
    global_period = keys.count("global_attn_every_n_layers", 3)
    theta = {
        kind: keys(f"{name}_rope_theta", None)
        for kind, name in zip(KINDS, ("local", "global"), strict=True)
    }
    default_theta = {"sliding_attention": 10000.0, "full_attention": 160000.0}
    full, local = (
        Attention(
            **heads,
            rope=keys.rope(
                H, served_len, kind, theta[kind] or default_theta[kind], ignores_old_keys=True
            ),
            both_ways=True,
        )
        for kind in reversed(KINDS)
    )
    local = replace(local, window=keys.count("local_attention", 128) // 2 + 1)
    kinds = keys("layer_types", None) or [KINDS[index % global_period == 0] for index in range(L)]
    mlp = Mlp(keys.count("intermediate_size", 1152), keys.activation("hidden_activation"))
    layers = tuple(
        Layer(full if kind == "full_attention" else local, mlp, reads_rows=index == 0)
        for index, kind in enumerate(kinds)
    )
    norm = "layer_bias" if keys("norm_bias", False) else "layer"
    return model_config(keys, "modernbert", layers, context_length, norm=norm, embed_norm=True)


def layer_norm(config: ModelConfig, name: str) -> LayerNorm:
    D = config.dim
    return LayerNorm(
        scale(f"{name}.weight", D),
        vector(f"{name}.bias", D) if config.norm == "layer_bias" else None,
    )


def layer(config: ModelConfig, index: int) -> LayerWeights:
    layer = config.layers[index]
    D = config.dim
    layer_prefix = f"model.layers.{index}"
    attention = layer.attention
    assert isinstance(attention, Attention) and layer.mlp is not None
    F = layer.mlp.dim
    return LayerWeights(
        attention=attention_sources(attention, D, f"{layer_prefix}.attn", fused=True),
        mlp=MlpWeights(
            up_DGF=tensor(f"{layer_prefix}.mlp.Wi.weight", (2 * F, D), linear((2, F), (D,))),
            down_FD=tensor(f"{layer_prefix}.mlp.Wo.weight", (D, F), linear((D,), (F,))),
        ),
        pre_attention_norm_D=None
        if layer.reads_rows
        else layer_norm(config, f"{layer_prefix}.attn_norm"),
        pre_mlp_norm_D=layer_norm(config, f"{layer_prefix}.mlp_norm"),
    )


def sources(config: ModelConfig) -> ModelWeights:
    V = config.vocab_size
    D = config.dim
    return ModelWeights(
        embed_VD=tensor("embeddings.tok_embeddings.weight", (V, D)),
        layers=tuple(map(partial(layer, config), range(len(config.layers)))),
        final_norm_D=layer_norm(config, "final_norm"),
        embed_norm_D=layer_norm(config, "embeddings.norm"),
    )


def class_head(hf: dict, config: ModelConfig):
    """(pooling, dense layers before the classifier, name of the classifier's tensor)."""
    keys = Keys({"classifier_activation": "gelu"} | hf)
    D = config.dim
    pooling = keys("classifier_pooling", "cls")
    activation = keys.activation("classifier_activation")
    if pooling not in ("cls", "mean"):
        raise ModelError(
            f"config.json: classifier_pooling = {pooling!r:.80}; it can be cls or mean"
        )
    dense = Dense("head.dense", D, D, activation, keys("classifier_bias", False), "head.norm")
    return pooling, (dense,), "classifier"


def canonical(name: str) -> str:
    return (
        name.removeprefix("model.")
        .replace(".attn.Wqkv.", ".attn.qkv_proj.")
        .replace(".attn.Wo.", ".attn.o_proj.")
    )


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not loaded: the language-model head, unless a classifier uses it."""
    return name.startswith("decoder.") or (name.startswith("head.") and not config.head)
