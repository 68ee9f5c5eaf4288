"""Routing by XLA: top-k is a sort on a GPU, and places are found by reductions and one scatter."""

import jax
import jax.numpy as jnp

from ...ordered_sum import softmax, sum_pairs
from . import RoutingRule
from .blocks import align as align  # as an implementation has it


def route(logits_TE, live_T, rule: RoutingRule, choice_bias_E=None):
    """See `quire.ops.moe.routing.route`."""
    weights_TX, experts_TX = best(logits_TE, rule, choice_bias_E)
    return weights_TX, jnp.where(live_T[:, None], experts_TX, logits_TE.shape[1])


def best(logits_TE, rule: RoutingRule, choice_bias_E):
    """The weights and experts of all rows."""
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
    """One expert after the other: the best that is left, weighed by its softmax among those left
    that come near it.
    """
    left_TE = logits_TE
    weights = []
    chosen = []
    for _ in range(rule.top_k):
        best_T1 = jnp.max(left_TE, 1, keepdims=True)
        expert_T1 = jnp.argmax(left_TE, 1)[:, None]
        away_TE = (best_T1 - logits_TE) / jnp.maximum(jnp.abs(logits_TE), best_T1)
        near_TE = softmax(jnp.where(away_TE > 2 * rule.jitter, -jnp.inf, left_TE))
        weights.append(jnp.take_along_axis(near_TE, expert_T1, 1))
        chosen.append(expert_T1)
        left_TE = jnp.where(jnp.arange(logits_TE.shape[1]) == expert_T1, -jnp.inf, left_TE)
    return jnp.concatenate(weights, 1), jnp.concatenate(chosen, 1)


def limit_groups(choice_TE, groups: int, top_groups: int, group_score: str):
    """Keep only the experts of the best groups; the others score minus infinity."""
    if groups == 1 or groups == top_groups:
        return choice_TE
    T, E = choice_TE.shape
    grouped = choice_TE.reshape(T, groups, E // groups)
    best = (
        jnp.max(grouped, -1) if group_score == "max" else jnp.sum(jax.lax.top_k(grouped, 2)[0], -1)
    )
    _, kept = jax.lax.top_k(best, top_groups)
    mask = jnp.any(kept[:, :, None] == jnp.arange(groups), axis=1)
    return jnp.where(mask[:, :, None], grouped, -jnp.inf).reshape(T, E)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
