"""Initial draft heads: their config.json and weights before training."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...model.config import Attention, ModelConfig, ModelError
from ...model.draft_heads import DraftHeads, DraftHeadsWeights, abstract, parse_heads
from ...model.weights import ModelWeights
from ...sharding.spec import random_arrays
from .answers import Answers

KINDS = ("medusa", "eagle", "eagle3")  # the kinds that can be trained


def new_heads(
    kind: str, target: ModelConfig, count: int, depth: int, own_head: bool, vocab: int
) -> tuple[DraftHeads, dict[str, Any]]:
    """Describe new draft heads. Returns them and their config.json.

    Args:
        kind: One of `KINDS`.
        target: Config of the target model.
        count: medusa: number of heads.
        depth: medusa: residual blocks per head.
        own_head: medusa: whether each head has its own output matrix.
        vocab: eagle3: size of the draft vocabulary; 0 for the whole vocabulary.
    """
    check_kind(kind)
    names = ()
    common_keys = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.dim,
        "torch_dtype": target.dtype,
    }
    if kind == "medusa":
        names = ("blocks.0.layers.0.bias",)
        hf = common_keys | {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": count,
            "num_hidden_layers": depth,
            "truncated_vocab_size": target.vocab_size,
            "original_lm_head": not own_head,
            "medusa_fc_bias": True,
        }
    else:
        hf = common_keys | layer_like(target)
    if kind == "eagle3":
        count = min(vocab or target.vocab_size, target.vocab_size)
        L = len(target.layers)
        hf |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": count}
        if L < 5:  # too few for the default layers that EAGLE-3 takes its features from
            hf |= {"eagle_aux_hidden_state_layer_ids": [1, (L + 1) // 2, L]}
    return parse_heads(hf, names, target, kind), hf


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ModelError(
            f"heads of kind {kind!r} cannot be trained; those of kind {', '.join(KINDS)} can"
        )


def layer_like(target: ModelConfig) -> dict[str, Any]:
    """Config keys of a one-layer Llama about as large as a layer of the target model."""
    last_layer = target.layers[-1]
    attention = last_layer.attention
    D = target.dim
    H = attention.head_dim if isinstance(attention, Attention) else 128
    H = next(size for size in (H, 64, 32, 16, 8, 4, 2) if D % size == 0)
    N = D // H
    F = last_layer.mlp.dim if last_layer.mlp is not None and last_layer.moe is None else 4 * D
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": N,
        "num_key_value_heads": max(1, N // 4) if N % 4 == 0 else 1,
        "head_dim": H,
        "intermediate_size": F,
        "hidden_act": "silu",
        "rms_norm_eps": target.norm_eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": target.max_len,
        "tie_word_embeddings": False,
    }


def first_weights(
    heads: DraftHeads, target_weights: ModelWeights, answers: Answers, seed: int
) -> DraftHeadsWeights:
    """Initial weights: Medusa heads predict like the model's own head, draft layers are random."""
    head_weights = random_arrays(abstract(heads), seed)
    table_VD = target_weights.embed_VD if target_weights.head_VD is None else target_weights.head_VD
    if heads.kind == "medusa":

        def like_target(head):
            blocks = tuple(
                block.replace(weight_DE=jnp.zeros_like(block.weight_DE)) for block in head.blocks
            )
            return head.replace(
                blocks=blocks, head_VD=None if head.head_VD is None else jnp.array(table_VD)
            )

        return head_weights.replace(heads=tuple(map(like_target, head_weights.heads)))
    if not heads.own_head:
        return head_weights
    tokens_V = np.arange(heads.model.vocab_size)
    if heads.vocab:  # the most frequent tokens
        counts_V = np.bincount(answers.tokens, minlength=heads.model.vocab_size)
        tokens_V = np.sort(np.argsort(-counts_V, kind="stable")[: heads.vocab])
        head_weights = head_weights.replace(tokens_U=jnp.asarray(tokens_V, jnp.int32))
    return head_weights.replace(head_VD=jnp.asarray(table_VD)[tokens_V])


def with_dtype(heads: DraftHeads, dtype: str) -> DraftHeads:
    return replace(heads, model=replace(heads.model, dtype=dtype))
