"""Self-test cases of the routing kernels: random tokens, some with experts of equal scores."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...gpu.self_test import Case, InLayers
from . import RoutingRule
from .blocks import Blocks, align

LARGEST_ERROR = 1e-5  # of weights, relative to float64
EXACT = 1e-6  # for integers


@dataclass(frozen=True)
class RouteCase:
    """Compares the weights by expert; every other token has experts of equal scores."""

    kind: dict
    rows: int = 300  # more than twice the number of multiprocessors
    interpret: Any = None
    allowed: float = LARGEST_ERROR
    name: str = "choices"

    def build(self, seed: int):
        rng = np.random.default_rng(seed)
        E = self.kind["experts"]
        logits_TE = 2 * rng.standard_normal((self.rows, E))
        logits_TE[::2] = np.round(4 * logits_TE[::2]) / 4
        live_T = np.arange(self.rows) % 7 != 3
        bias_E = jnp.asarray(rng.standard_normal(E), jnp.float32) if self.kind["bias"] else None
        inputs = jnp.asarray(logits_TE, jnp.float32), jnp.asarray(live_T), bias_E
        weights_TX, experts_TX = in_float64(inputs[0], RoutingRule(*self.kind["rule"]), bias_E)
        expected_TE = np.zeros((self.rows, E))
        np.put_along_axis(expected_TE, experts_TX, weights_TX, axis=1)
        return (), inputs, expected_TE * live_T[:, None]

    def run(self, donated, inputs):
        logits_TE, live_T, bias_E = inputs
        weights_TX, experts_TX = choose_experts(
            logits_TE, live_T, RoutingRule(*self.kind["rule"]), bias_E, self.interpret
        )
        row_T1 = jnp.arange(self.rows)[:, None]
        return jnp.zeros_like(logits_TE).at[row_T1, experts_TX].set(
            weights_TX, mode="drop"
        ), donated


@dataclass(frozen=True)
class AlignCase:
    """Compares all fields of `Blocks` with the XLA implementation."""

    kind: dict
    pairs: tuple[int, int] = (61, 8)  # tokens, experts of each; they do not fill the last tile
    interpret: Any = None
    allowed: float = EXACT
    name: str = "places"

    def build(self, seed: int):
        rng = np.random.default_rng(seed)
        T, X = self.pairs
        E = self.kind["experts"]
        # A few experts have most of the pairs, and some pairs have none.
        experts_TX = np.where(
            rng.random((T, X)) < 0.5, rng.integers(0, 3, (T, X)), rng.integers(0, E + 1, (T, X))
        )
        experts_TX = np.where(rng.random((T, X)) < 0.1, E, np.minimum(experts_TX, E))
        inputs = jnp.asarray(experts_TX, jnp.int32), jnp.asarray(rng.random((T, X)), jnp.float32)
        return (
            (),
            inputs,
            np.asarray(self.flatten(align(*inputs, E, self.kind["rows"])), np.float64),
        )

    def flatten(self, blocks: Blocks):
        """The fields of `blocks` as one column, with -1 for the experts of unused blocks."""
        is_used_B = jnp.arange(blocks.experts_B.size) < blocks.count_1
        arrays = *blocks[:3], jnp.where(is_used_B, blocks.experts_B, -1), blocks.count_1
        return jnp.concatenate([array.astype(jnp.float32) for array in arrays])[:, None]

    def run(self, donated, inputs):
        experts_TX, weights_TX = inputs
        blocks = place_pairs(
            experts_TX, weights_TX, self.kind["experts"], self.kind["rows"], self.interpret
        )
        return self.flatten(blocks), donated


def cases(kind: dict) -> list[Case]:
    """The cases of the self-test."""
    case = RouteCase(kind) if "rule" in kind else AlignCase(kind)
    return [case, InLayers(case)]


def choose_experts(logits_TE, live_T, rule: RoutingRule, bias_E, interpret: Any):
    from .route_kernel import choose_experts

    return choose_experts(logits_TE, live_T, rule, bias_E, interpret)


def place_pairs(experts_TX, weights_TX, experts: int, rows: int, interpret: Any) -> Blocks:
    from .align_kernel import place_pairs

    return place_pairs(experts_TX, weights_TX, experts, rows, interpret)


def in_float64(logits_TE, rule: RoutingRule, bias_E) -> tuple[np.ndarray, np.ndarray]:
    """(weights, experts) of each token, computed on the host."""
    logits_TE = np.asarray(logits_TE, np.float64)
    exp_TE = np.exp(logits_TE - logits_TE.max(1, keepdims=True))
    score_TE = exp_TE if rule.score == "softmax_top" else exp_TE / exp_TE.sum(1, keepdims=True)
    if rule.score == "sigmoid":
        score_TE = 1 / (1 + np.exp(-logits_TE))
    choice_TE = score_TE if bias_E is None else score_TE + np.asarray(bias_E, np.float64)
    if rule.groups != rule.top_groups:
        grouped = choice_TE.reshape(len(choice_TE), rule.groups, -1)
        group_score = np.sort(grouped, 2)[:, :, -(2 if rule.group_score == "top2" else 1) :].sum(2)
        rank = np.argsort(np.argsort(-group_score, 1, kind="stable"), 1)
        choice_TE = np.where(rank[:, :, None] < rule.top_groups, grouped, -np.inf).reshape(
            choice_TE.shape
        )
    experts_TX = np.argsort(-choice_TE, 1, kind="stable")[:, : rule.top_k]
    weights_TX = np.take_along_axis(score_TE, experts_TX, 1)
    if rule.normalize or rule.score == "softmax_top":
        weights_TX = weights_TX / weights_TX.sum(1, keepdims=True)
    return weights_TX * rule.scaling, experts_TX
