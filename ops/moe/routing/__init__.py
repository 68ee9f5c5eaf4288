"""Routing: each token's choice of experts, and the sorting of (token, expert) pairs into blocks."""

from typing import NamedTuple

from ...implementations import choose
from .blocks import Blocks

# Tried in order; one that does not support a case raises NotImplementedError with its reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".hopper", "xla": ".xla"}


class RoutingRule(NamedTuple):
    """How a token chooses: the best experts, or with groups the best experts of the best groups."""

    top_k: int
    # "softmax", "sigmoid", "softmax_top" (softmax over the chosen logits) or "mixer" (SparseMixer)
    score: str = "softmax"
    normalize: bool = True  # whether the weights of the chosen experts are scaled to sum to 1
    scaling: float = 1.0  # factor of the weights, applied last
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"  # the best score of a group; or "top2": the sum of the best two
    jitter: float = 0.0  # for the score "mixer", see `xla.mix_sparsely`


def route(
    logits_TE, live_T, rule: RoutingRule, choice_bias_E=None, implementation: str | None = None
):
    """Choose the experts of each token.

    Args:
        logits_TE: the router's logits.
        live_T: whether each token is not padding.
        rule: how experts are chosen and weighted. Of equal experts the first is chosen.
        choice_bias_E: added to the scores for the choice, but not for the weights.
        implementation: the name in IMPLEMENTATIONS of the only one to try.

    Returns:
        (weights, experts), both [T, X]. Padding tokens choose expert E, which does not exist.
    """

    def run(module):
        return module.route(logits_TE, live_T, rule, choice_bias_E)

    return choose(IMPLEMENTATIONS, __name__, run, implementation)


def align(
    experts_TX, weights_TX, experts: int, rows: int, implementation: str | None = None
) -> Blocks:
    """Sort the (token, expert) pairs into blocks of one expert each.

    Args:
        experts_TX: the experts; pairs with the expert `experts` are in no block.
        weights_TX: the weights of the pairs.
        experts: the number of experts.
        rows: the number of pairs in a block.
        implementation: the name in IMPLEMENTATIONS of the only one to try.
    """

    def run(module):
        return module.align(experts_TX, weights_TX, experts, rows)

    return choose(IMPLEMENTATIONS, __name__, run, implementation)
