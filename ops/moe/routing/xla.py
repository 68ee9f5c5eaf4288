"""Routing by XLA: the choice by `top_k`, and the blocks by reductions and one scatter."""

import jax
import jax.numpy as jnp

from ...ordered_sum import softmax, sum_pairs
from . import RoutingRule
from .blocks import align as align  # part of the interface of implementations


def route(logits_TE, live_T, rule: RoutingRule, choice_bias_E=None):
    """See `quire.ops.moe.routing.route`."""
    weights_TX, experts_TX = choose_experts(logits_TE, rule, choice_bias_E)
    return weights_TX, jnp.where(live_T[:, None], experts_TX, logits_TE.shape[1])


def choose_experts(logits_TE, rule: RoutingRule, choice_bias_E):
    """(weights, experts) of all tokens, including padding."""
    if rule.score == "mixer":
        return mix_sparsely(logits_TE, rule)
    if rule.score == "softmax_top":  # the softmax runs over the chosen logits alone
        top, experts_TX = jax.lax.top_k(logits_TE, rule.top_k)
        return softmax(top) * rule.scaling, experts_TX
    scores_TE = softmax(logits_TE) if rule.score == "softmax" else jax.nn.sigmoid(logits_TE)
    choice_TE = scores_TE if choice_bias_E is None else scores_TE + choice_bias_E
    _, experts_TX = jax.lax.top_k(
        limit_groups(choice_TE, rule.groups, rule.top_groups, rule.group_score), rule.top_k
    )
    weights_TX = jnp.take_along_axis(scores_TE, experts_TX, axis=-1)
    if rule.normalize:
        weights_TX = weights_TX / (sum_pairs(weights_TX)[..., None] + 1e-20)
    return weights_TX * rule.scaling, experts_TX


def mix_sparsely(logits_TE, rule: RoutingRule):
    """SparseMixer: choose one expert after the other, the best of the remaining ones.

    Its weight is its softmax over the remaining experts whose logits are near the best one's, by
    the threshold `jitter`.
    """
    remaining_TE = logits_TE
    weights = []
    experts = []
    for _ in range(rule.top_k):
        best_T1 = jnp.max(remaining_TE, 1, keepdims=True)
        expert_T1 = jnp.argmax(remaining_TE, 1)[:, None]
        distance_TE = (best_T1 - logits_TE) / jnp.maximum(jnp.abs(logits_TE), best_T1)
        weights_TE = softmax(jnp.where(distance_TE > 2 * rule.jitter, -jnp.inf, remaining_TE))
        weights.append(jnp.take_along_axis(weights_TE, expert_T1, 1))
        experts.append(expert_T1)
        remaining_TE = jnp.where(
            jnp.arange(logits_TE.shape[1]) == expert_T1, -jnp.inf, remaining_TE
        )
    return jnp.concatenate(weights, 1), jnp.concatenate(experts, 1)


def limit_groups(choice_TE, groups: int, top_groups: int, group_score: str):
    """Set the scores outside the best groups to minus infinity."""
    if groups == 1 or groups == top_groups:
        return choice_TE
    T, E = choice_TE.shape
    grouped = choice_TE.reshape(T, groups, E // groups)
    group_scores = (
        jnp.max(grouped, -1) if group_score == "max" else jnp.sum(jax.lax.top_k(grouped, 2)[0], -1)
    )
    _, top_groups_TX = jax.lax.top_k(group_scores, top_groups)
    mask = jnp.any(top_groups_TX[:, :, None] == jnp.arange(groups), axis=1)
    return jnp.where(mask[:, :, None], grouped, -jnp.inf).reshape(T, E)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
