"""What heads are taught: the model's own distribution at each place that they draft, and its
features.
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
from .attention import attention, attention_of_pass, shifted

FEATURES = 0.2  # the weight in the loss of the features that EAGLE's layer foretells
LATER = 0.8  # the weight of each further place against the one before
LOGITS = 1 << 26  # at a time: of more rows than this allows, a part after another


class Judged(NamedTuple):
    """Of one place ahead: the mean loss, the drafts that were right up to there, and all."""

    loss: Any
    right: Any
    asked: Any


def judge(
    heads: DraftHeads, own, target_weights, config: ModelConfig, batch: Rows, places: int
) -> list[Judged]:
    """How well the heads draft at each of `places` places ahead, if all before them are right."""
    tokens_BT = batch.tokens
    documents_BT = batch.documents
    positions_T = batch.positions.reshape(-1)
    attend = attention(config, documents_BT)
    seen: dict[int, Any] = {}
    x = decoder.embed(target_weights, tokens_BT.reshape(-1), positions_T, config)
    hooks = LayerHooks(attend, observe=seen.__setitem__ if heads.features else None)
    (x_TD, _), _ = decoder.run_layers(target_weights.layers, 0, x, {}, positions_T, config, hooks)
    hidden_TD = decoder.final_norm(target_weights, x_TD, config)
    raw_TF = (
        jnp.concatenate([seen[index] for index in heads.features], axis=-1)
        if heads.features
        else hidden_TD
    )
    hidden_TD, raw_TF = jax.lax.stop_gradient((hidden_TD, raw_TF))
    lesson = of_medusa if heads.kind == "medusa" else of_layers
    return lesson(heads, own, target_weights, config, batch, places, hidden_TD, raw_TF)


def asked_from(batch: Rows, place: int):
    """The rows from which a token `place` + 2 places on is drafted, where the model wrote all from
    the next one on.
    """
    asked_BT = jnp.ones(batch.tokens.shape, bool)
    for ahead in range(1, place + 3):
        same_BT = shifted(batch.documents, -ahead) == batch.documents
        asked_BT &= same_BT & shifted(batch.written, -ahead)
    return asked_BT & (batch.documents > 0)


def of_medusa(
    heads, own, target_weights, config, batch: Rows, places: int, hidden_TD, _
) -> list[Judged]:
    """Each head is asked at every row; the token one place on is not its affair."""
    B, T = batch.tokens.shape
    found = []
    chain_BT = jnp.ones((B, T), bool)
    for c in range(min(places, heads.count)):
        one = replace(heads, count=1), own.replace(heads=own.heads[c : c + 1])
        taught_TD = flat(shifted(hidden_TD.reshape(B, T, -1), -1 - c))
        asked_BT = asked_from(batch, c)
        wanted_BT = shifted(batch.tokens, -2 - c)

        def drafted(x_RD, one=one):
            return draft_heads.medusa_logits(*one, target_weights, x_RD)[0]

        lost_T, right_T = compare(
            drafted, hidden_TD, taught_TD, wanted_BT, target_weights, config, own.tokens_U
        )
        chain_BT &= right_T.reshape(B, T)
        found.append(judged(lost_T, chain_BT, asked_BT))
    return found


def of_layers(
    heads, own, target_weights, config, batch: Rows, places: int, hidden_TD, raw_TF
) -> list[Judged]:
    """The layers run as often as tokens are drafted, each time over what they made the time
    before.
    """
    B, T = batch.tokens.shape
    wanted_BT = shifted(batch.tokens, -2)
    taught_TD = flat(shifted(hidden_TD.reshape(B, T, -1), -1))
    found = []
    chain_BT = jnp.ones((B, T), bool)
    for place, (made_TD, x_TD) in enumerate(
        passes(heads, own, target_weights, batch, places, raw_TF)
    ):

        def drafted(x_RD):
            return draft_heads.logits(heads, own, target_weights, x_RD)

        lost_T, right_T = compare(
            drafted, x_TD, taught_TD, wanted_BT, target_weights, config, own.tokens_U
        )
        if heads.kind == "eagle":
            lost_T = lost_T + FEATURES * smooth(made_TD - taught_TD).mean(axis=-1)
        # a row that has drafted so many tokens before
        asked_BT = shifted(asked_from(batch, place), place)
        chain_BT = shifted(chain_BT, min(place, 1)) & right_T.reshape(B, T)
        found.append(judged(lost_T, chain_BT, asked_BT))
    return found


def passes(
    heads, own, target_weights, batch: Rows, places: int, raw_TF
) -> Iterator[tuple[Any, Any]]:
    """(features, hidden states) that the layers make, first of the model's features and then of
    their own.

    What they make in a row is the next row's feature. The tokens are those that the model wrote:
    after a draft that is another one, none counts.
    """
    B, T = batch.tokens.shape
    next_T = shifted(batch.tokens, -1).reshape(-1)
    positions_T = batch.positions.reshape(-1)
    features_TD = draft_heads.take_features(heads, own, raw_TF)
    cache = {}
    for place in range(places):
        hooks = LayerHooks(attention_of_pass(place, batch.documents))
        made_TD, x_TD, cache = draft_heads.run(
            heads, own, target_weights, next_T, features_TD, positions_T, cache, hooks
        )
        yield made_TD, x_TD
        features_TD = flat(shifted(made_TD.reshape(B, T, -1), 1))


def judged(lost_T, chain_BT, asked_BT) -> Judged:
    asked = asked_BT.sum()
    lost = jnp.where(asked_BT.reshape(-1), lost_T, 0).sum() / jnp.maximum(asked, 1)
    return Judged(lost, (chain_BT & asked_BT).sum(), asked)


def flat(x_BTD):
    return x_BTD.reshape(-1, x_BTD.shape[-1])


def smooth(x):
    """Half its square, and beyond 1 its size."""
    size = jnp.abs(x)
    return jnp.where(size < 1, size * size / 2, size - 0.5)


def compare(drafted, x_TD, taught_TD, wanted_BT, target_weights, config: ModelConfig, tokens_U):
    """(cross entropy with the model's own distribution, whether the likeliest token is the wanted
    one), of each row.

    `taught_TD` are the hidden states from which the model draws the wanted tokens.
    """

    def some(rows):
        x_RD, taught_RD, wanted_R = rows
        own_RV = drafted(x_RD)
        taught_RV = decoder.logits(target_weights, taught_RD, config)
        right_R = jnp.argmax(own_RV, axis=-1) == wanted_R
        if tokens_U is not None:  # others cannot be drafted
            own_RV = own_RV[:, tokens_U]
            taught_RV = taught_RV[:, tokens_U]
        share_RV = jax.lax.stop_gradient(jax.nn.softmax(taught_RV, axis=-1))
        return -(share_RV * jax.nn.log_softmax(own_RV, axis=-1)).sum(axis=-1), right_R

    rows = (x_TD, taught_TD, wanted_BT.reshape(-1))
    T = len(x_TD)
    size = max(1, LOGITS // config.vocab_size)
    if size >= T:
        return some(rows)
    parts = -(-T // size)
    padded = [jnp.pad(x, [(0, parts * size - T)] + [(0, 0)] * (x.ndim - 1)) for x in rows]
    cut = tuple(x.reshape(parts, size, *x.shape[1:]) for x in padded)
    return tuple(x.reshape(-1)[:T] for x in jax.lax.map(jax.checkpoint(some), cut))


def loss_of(found: list[Judged]):
    """The mean over the places, the later ones counting less."""
    weights = [LATER**place for place in range(len(found))]
    return sum(weight * one.loss for weight, one in zip(weights, found, strict=True)) / sum(weights)
