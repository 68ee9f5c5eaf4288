"""Trials of the kernels for a kind of routing: random rows, with experts that are equally good."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...gpu.self_test import Case, InLayers
from . import RoutingRule
from .blocks import Blocks, align

LARGEST_ERROR = 1e-5  # allowed of weights, in float32, against float64
EXACT = 1e-6  # places are whole numbers


@dataclass(frozen=True)
class RouteCase:
    """The weights that rows give to their experts; every other row has experts that are equally
    good.
    """

    kind: dict
    rows: int = 300  # more than twice the card's processors
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
        given = jnp.asarray(logits_TE, jnp.float32), jnp.asarray(live_T), bias_E
        weights_TX, experts_TX = in_float64(given[0], RoutingRule(*self.kind["rule"]), bias_E)
        wanted_TE = np.zeros((self.rows, E))
        np.put_along_axis(wanted_TE, experts_TX, weights_TX, axis=1)
        return (), given, wanted_TE * live_T[:, None]

    def run(self, held, given):
        logits_TE, live_T, bias_E = given
        weights_TX, experts_TX = choose_experts(
            logits_TE, live_T, RoutingRule(*self.kind["rule"]), bias_E, self.interpret
        )
        row_T1 = jnp.arange(self.rows)[:, None]
        return jnp.zeros_like(logits_TE).at[row_T1, experts_TX].set(weights_TX, mode="drop"), held


@dataclass(frozen=True)
class AlignCase:
    """All that is said of the blocks, number by number, beside what XLA finds."""

    kind: dict
    pairs: tuple[int, int] = (61, 8)  # which do not fill the last tile
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
        given = jnp.asarray(experts_TX, jnp.int32), jnp.asarray(rng.random((T, X)), jnp.float32)
        return (), given, np.asarray(self.said(align(*given, E, self.kind["rows"])), np.float64)

    def said(self, blocks: Blocks):
        """Each number on a row of its own; blocks that there are not may be anybody's."""
        there_B = jnp.arange(blocks.experts_B.size) < blocks.count_1
        parts = *blocks[:3], jnp.where(there_B, blocks.experts_B, -1), blocks.count_1
        return jnp.concatenate([part.astype(jnp.float32) for part in parts])[:, None]

    def run(self, held, given):
        return self.said(
            place(*given, self.kind["experts"], self.kind["rows"], self.interpret)
        ), held


def cases(kind: dict) -> list[Case]:
    """What the process that tries runs."""
    case = RouteCase(kind) if "rule" in kind else AlignCase(kind)
    return [case, InLayers(case)]


def choose_experts(logits_TE, live_T, rule: RoutingRule, bias_E, interpret: Any):
    from .route_kernel import choose_experts

    return choose_experts(logits_TE, live_T, rule, bias_E, interpret)


def place(experts_TX, weights_TX, experts: int, rows: int, interpret: Any) -> Blocks:
    from .align_kernel import place

    return place(experts_TX, weights_TX, experts, rows, interpret)


def in_float64(logits_TE, rule: RoutingRule, bias_E) -> tuple[np.ndarray, np.ndarray]:
    """(weights, experts) of each row, on the host."""
    logits_TE = np.asarray(logits_TE, np.float64)
    exp_TE = np.exp(logits_TE - logits_TE.max(1, keepdims=True))
    score_TE = exp_TE if rule.score == "softmax_top" else exp_TE / exp_TE.sum(1, keepdims=True)
    if rule.score == "sigmoid":
        score_TE = 1 / (1 + np.exp(-logits_TE))
    choice_TE = score_TE if bias_E is None else score_TE + np.asarray(bias_E, np.float64)
    if rule.groups != rule.top_groups:
        grouped = choice_TE.reshape(len(choice_TE), rule.groups, -1)
        best = np.sort(grouped, 2)[:, :, -(2 if rule.group_score == "top2" else 1) :].sum(2)
        rank = np.argsort(np.argsort(-best, 1, kind="stable"), 1)
        choice_TE = np.where(rank[:, :, None] < rule.top_groups, grouped, -np.inf).reshape(
            choice_TE.shape
        )
    experts_TX = np.argsort(-choice_TE, 1, kind="stable")[:, : rule.top_k]
    weights_TX = np.take_along_axis(score_TE, experts_TX, 1)
    if rule.normalize or rule.score == "softmax_top":
        weights_TX = weights_TX / weights_TX.sum(1, keepdims=True)
    return weights_TX * rule.scaling, experts_TX
