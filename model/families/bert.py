"""BERT, RoBERTa and XLM-RoBERTa: encoders with position and token-type embeddings and
post-norms.
"""

import re
from functools import partial

import numpy as np

from ..config import Attention, Dense, Layer, Mlp, ModelConfig
from ..weights import LayerWeights, ModelWeights
from .common import (
    Keys,
    attention_sources,
    layer_norm,
    mlp_sources,
    model_config,
    tensor,
)

NAMES = {  # tensor names of a layer
    "attention.self.query": "self_attn.q_proj", "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj", "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm", "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj", "output.LayerNorm": "post_feedforward_layernorm",
}  # fmt: skip
EMBEDDINGS = {
    "word_embeddings": "embed_tokens",
    "position_embeddings": "positions",
    "token_type_embeddings": "types",
    "LayerNorm": "embed_norm",
}


def config(hf: dict, max_len: int | None = None) -> ModelConfig:
    keys = Keys(
        {
            "rms_norm_eps": hf.get("layer_norm_eps", 1e-12),
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        }
        | hf
    )
    keys.refuse("position_embedding_type", "absolute")
    keys.refuse("is_decoder", False)
    keys.refuse("add_cross_attention", False)
    keys.ignore(
        "layer_norm_eps",
        "classifier_dropout",
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
    )
    keys.ignore(
        "gradient_checkpointing",
        "use_cache",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "directionality",
    )
    keys.ignore(
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
        "output_past",
        "chunk_size_feed_forward",
    )
    num_rows = keys.count("max_position_embeddings", 512)
    num_skipped_rows = 0 if hf["model_type"] == "bert" else (keys("pad_token_id", 1) or 0) + 1
    attention = Attention(**keys.heads(), rope=None, bias=True, out_bias=True, both_ways=True)
    mlp = Mlp(
        keys.count("intermediate_size", 3072), keys.activation("hidden_act"), bias=True, gated=False
    )
    layer = Layer(attention, mlp, pre_norm=False, post_norm=True, sum_norm=True)
    return model_config(
        keys,
        "bert" if not num_skipped_rows else "roberta",
        (layer,) * keys.count("num_hidden_layers", 12),
        num_rows - num_skipped_rows,
        norm="layer_bias",
        embed_norm=True,
        final_norm=False,
        positions=num_rows,
        types=keys.count("type_vocab_size", 2),
        pairs=not num_skipped_rows,
    )


def layer(config: ModelConfig, index: int) -> LayerWeights:
    layer = config.layers[index]
    D = config.dim
    prefix = f"model.layers.{index}"
    assert isinstance(layer.attention, Attention) and layer.mlp is not None
    return LayerWeights(
        attention=attention_sources(layer.attention, D, f"{prefix}.self_attn"),
        mlp=mlp_sources(layer.mlp, D, f"{prefix}.mlp"),
        post_attention_norm_D=layer_norm(f"{prefix}.post_attention_layernorm", D),
        post_mlp_norm_D=layer_norm(f"{prefix}.post_feedforward_layernorm", D),
    )


def sources(config: ModelConfig) -> ModelWeights:
    # RoBERTa does not use the first rows of the position embeddings: they are rolled to the end.
    V = config.vocab_size
    D = config.dim
    num_rows = config.positions
    return ModelWeights(
        embed_VD=tensor("model.embed_tokens.weight", (V, D)),
        layers=tuple(map(partial(layer, config), range(len(config.layers)))),
        final_norm_D=None,
        embed_norm_D=layer_norm("model.embed_norm", D),
        position_embed_PD=tensor(
            "model.positions.weight",
            (num_rows, D),
            lambda x: np.roll(x, config.max_len - num_rows, axis=0),
        ),
        type_embed_ID=tensor("model.types.weight", (config.types, D)),
    )


def class_head(hf: dict, config: ModelConfig):
    """(pooling, dense layers before the classifier, name of the classifier's tensor)."""
    D = config.dim
    is_bert = config.family == "bert"
    dense = Dense("pooler.dense" if is_bert else "classifier.dense", D, D, "tanh", True)
    return "cls", (dense,), "classifier" if is_bert else "classifier.out_proj"


def canonical(name: str) -> str:
    name = re.sub(r"^(bert|roberta)\.", "", name)
    if match := re.match(r"encoder\.layer\.(\d+)\.(.*)\.(weight|bias)$", name):
        return f"model.layers.{match[1]}.{NAMES.get(match[2], match[2])}.{match[3]}"
    if match := re.match(r"embeddings\.(\w+)\.(weight|bias|gamma|beta)$", name):
        return f"model.{EMBEDDINGS.get(match[1], match[1])}.{match[2]}"
    return name


def ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is not loaded: the LM head, and a pooler without a classifier."""
    return (
        name.startswith(("cls.", "lm_head."))
        or name.endswith("position_ids")
        or (name.startswith("pooler.") and not config.head)
    )
