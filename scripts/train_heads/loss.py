"""The training loss of draft heads: cross entropy with the target model's distribution at each
draft position; EAGLE heads also regress the target's features.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...model import decoder, draft_heads
from ...model.config import ModelConfig
from ...model.draft_heads import DraftHeads
from ...model.mixers import LayerHooks
from .answers import Rows
from .attention import attention, attention_for_pass, shift

FEATURES = 0.2  # loss weight of the features that an EAGLE layer predicts
LATER = 0.8  # weight of each draft position relative to the one before
LOGITS = 1 << 26  # maximum number of logits held at once; more are computed chunk by chunk


class DraftScore(NamedTuple):
    """Results for one draft position."""

    loss: Any  # mean loss
    num_accepted: Any  # drafts that are right at this position and all positions before
    num_drafted: Any


def score_drafts(
    heads: DraftHeads, head_weights, target_weights, config: ModelConfig, batch: Rows, places: int
) -> list[DraftScore]:
    """Score the heads at each of `places` draft positions, given that all drafts before are right.

    Args:
        heads: The draft heads.
        head_weights: Their weights.
        target_weights: Weights of the target model.
        config: Its config.
        batch: Packed rows.
        places: Number of draft positions to score.
    """
    tokens_BT = batch.tokens
    documents_BT = batch.documents
    positions_T = batch.positions.reshape(-1)
    attend = attention(config, documents_BT)
    features_by_layer: dict[int, Any] = {}
    x = decoder.embed(target_weights, tokens_BT.reshape(-1), positions_T, config)
    hooks = LayerHooks(attend, observe=features_by_layer.__setitem__ if heads.features else None)
    (x_TD, _), _ = decoder.run_layers(target_weights.layers, 0, x, {}, positions_T, config, hooks)
    hidden_TD = decoder.final_norm(target_weights, x_TD, config)
    raw_TF = (
        jnp.concatenate([features_by_layer[index] for index in heads.features], axis=-1)
        if heads.features
        else hidden_TD
    )
    hidden_TD, raw_TF = jax.lax.stop_gradient((hidden_TD, raw_TF))
    score = score_medusa if heads.kind == "medusa" else score_eagle
    return score(heads, head_weights, target_weights, config, batch, places, hidden_TD, raw_TF)


def draft_mask(batch: Rows, place: int):
    """Mask [B, T] of the positions t from which the token at t + `place` + 2 is drafted: the model
    generated that token and all tokens between.
    """
    mask_BT = jnp.ones(batch.tokens.shape, bool)
    for offset in range(1, place + 3):
        is_same_document_BT = shift(batch.documents, -offset) == batch.documents
        mask_BT &= is_same_document_BT & shift(batch.written, -offset)
    return mask_BT & (batch.documents > 0)


def score_medusa(
    heads, head_weights, target_weights, config, batch: Rows, places: int, hidden_TD, _
) -> list[DraftScore]:
    """Score Medusa heads: head c predicts the token at t + 2 + c from the hidden state at t."""
    B, T = batch.tokens.shape
    scores = []
    chain_BT = jnp.ones((B, T), bool)
    for c in range(min(places, heads.count)):
        head = replace(heads, count=1)
        weights = head_weights.replace(heads=head_weights.heads[c : c + 1])
        target_TD = flat(shift(hidden_TD.reshape(B, T, -1), -1 - c))
        drafted_BT = draft_mask(batch, c)
        labels_BT = shift(batch.tokens, -2 - c)

        def drafted(x_RD, head=head, weights=weights):
            return draft_heads.medusa_logits(head, weights, target_weights, x_RD)[0]

        loss_T, is_right_T = compare(
            drafted, hidden_TD, target_TD, labels_BT, target_weights, config, head_weights.tokens_U
        )
        chain_BT &= is_right_T.reshape(B, T)
        scores.append(draft_score(loss_T, chain_BT, drafted_BT))
    return scores


def score_eagle(
    heads, head_weights, target_weights, config, batch: Rows, places: int, hidden_TD, raw_TF
) -> list[DraftScore]:
    """Score EAGLE heads: the draft layers run once per draft position, each time over the features
    of the pass before.
    """
    B, T = batch.tokens.shape
    labels_BT = shift(batch.tokens, -2)
    target_TD = flat(shift(hidden_TD.reshape(B, T, -1), -1))
    scores = []
    chain_BT = jnp.ones((B, T), bool)
    for place, (features_TD, x_TD) in enumerate(
        passes(heads, head_weights, target_weights, batch, places, raw_TF)
    ):

        def drafted(x_RD):
            return draft_heads.logits(heads, head_weights, target_weights, x_RD)

        loss_T, is_right_T = compare(
            drafted, x_TD, target_TD, labels_BT, target_weights, config, head_weights.tokens_U
        )
        if heads.kind == "eagle":
            loss_T = loss_T + FEATURES * smooth(features_TD - target_TD).mean(axis=-1)
        # In pass `place`, position t continues a draft that started at t - `place`.
        drafted_BT = shift(draft_mask(batch, place), place)
        chain_BT = shift(chain_BT, min(place, 1)) & is_right_T.reshape(B, T)
        scores.append(draft_score(loss_T, chain_BT, drafted_BT))
    return scores


def passes(
    heads, head_weights, target_weights, batch: Rows, places: int, raw_TF
) -> Iterator[tuple[Any, Any]]:
    """Yield (features, hidden states) of each pass of the draft layers: the first pass runs over
    the target's features, each later one over the features of the pass before.

    The features at a position are inputs at the next position. Token inputs are the model's own
    answer; positions after a wrong draft do not count as accepted.
    """
    B, T = batch.tokens.shape
    next_T = shift(batch.tokens, -1).reshape(-1)
    positions_T = batch.positions.reshape(-1)
    features_TD = draft_heads.take_features(heads, head_weights, raw_TF)
    cache = {}
    for place in range(places):
        hooks = LayerHooks(attention_for_pass(place, batch.documents))
        new_features_TD, x_TD, cache = draft_heads.run(
            heads, head_weights, target_weights, next_T, features_TD, positions_T, cache, hooks
        )
        yield new_features_TD, x_TD
        features_TD = flat(shift(new_features_TD.reshape(B, T, -1), 1))


def draft_score(loss_T, chain_BT, drafted_BT) -> DraftScore:
    num_drafted = drafted_BT.sum()
    loss = jnp.where(drafted_BT.reshape(-1), loss_T, 0).sum() / jnp.maximum(num_drafted, 1)
    return DraftScore(loss, (chain_BT & drafted_BT).sum(), num_drafted)


def flat(x_BTD):
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def smooth(x):
    """The smooth L1 loss of each element."""
    size = jnp.abs(x)
    return jnp.where(size < 1, size * size / 2, size - 0.5)


def compare(
    draft_logits, x_TD, target_TD, labels_BT, target_weights, config: ModelConfig, tokens_U
):
    """(cross entropy with the target's distribution, whether the greedy draft is the label) by row.

    Args:
        draft_logits: Computes draft logits from hidden states.
        x_TD: The draft heads' hidden states.
        target_TD: Hidden states from which the target model predicts the labels.
        labels_BT: The labels: the tokens in the answers.
        target_weights: Weights of the target model.
        config: Its config.
        tokens_U: Token ids of the draft vocabulary, or None for the whole vocabulary.
    """

    def compare_chunk(rows):
        x_RD, target_RD, labels_R = rows
        draft_RV = draft_logits(x_RD)
        target_RV = decoder.logits(target_weights, target_RD, config)
        is_right_R = jnp.argmax(draft_RV, axis=-1) == labels_R
        if tokens_U is not None:  # only tokens in the draft vocabulary can be drafted
            draft_RV = draft_RV[:, tokens_U]
            target_RV = target_RV[:, tokens_U]
        target_probs_RV = jax.lax.stop_gradient(jax.nn.softmax(target_RV, axis=-1))
        return -(target_probs_RV * jax.nn.log_softmax(draft_RV, axis=-1)).sum(axis=-1), is_right_R

    rows = (x_TD, target_TD, labels_BT.reshape(-1))
    T = len(x_TD)
    size = max(1, LOGITS // config.vocab_size)
    if size >= T:
        return compare_chunk(rows)
    num_chunks = -(-T // size)
    padded = [jnp.pad(x, [(0, num_chunks * size - T)] + [(0, 0)] * (x.ndim - 1)) for x in rows]
    cut = tuple(x.reshape(num_chunks, size, *x.shape[1:]) for x in padded)
    return tuple(x.reshape(-1)[:T] for x in jax.lax.map(jax.checkpoint(compare_chunk), cut))


def mean_loss(scores: list[DraftScore]):
    """Weighted mean loss of the draft positions; later positions weigh less."""
    weights = [LATER**place for place in range(len(scores))]
    weighted = [weight * score.loss for weight, score in zip(weights, scores, strict=True)]
    return sum(weighted) / sum(weights)
