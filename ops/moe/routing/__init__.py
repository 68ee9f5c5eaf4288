"""From a router's logits to experts: which of them each row chooses, and where its pairs lie in
blocks.
"""

from typing import NamedTuple

from ...implementations import choose
from .blocks import Blocks

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with its
# reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".hopper", "xla": ".xla"}


class RoutingRule(NamedTuple):
    """How a row chooses: the best experts, of the best groups alone if there are groups."""

    top_k: int
    score: str = "softmax"  # or "sigmoid"; "softmax_top": over the chosen logits alone; or "mixer"
    normalize: bool = True  # the weights of the chosen add up to one
    scaling: float = 1.0  # of the weights, after that
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"  # of a group's scores; or "top2": the sum of the best two
    jitter: float = 0.0  # of the score "mixer", see `xla.mix_sparsely`


def route(
    logits_TE, live_T, rule: RoutingRule, choice_bias_E=None, implementation: str | None = None
):
    """(weights, experts) that each row chooses, both [T, X]; of equal experts the first. A row that
    is not live chooses `E`, which is none. The bias counts in the choice and not in the weights.
    `implementation` forces one of IMPLEMENTATIONS.
    """

    def run(module):
        return module.route(logits_TE, live_T, rule, choice_bias_E)

    return choose(IMPLEMENTATIONS, __name__, run, implementation)


def align(
    experts_TX, weights_TX, experts: int, rows: int, implementation: str | None = None
) -> Blocks:
    """The pairs of rows and experts in blocks of `rows` rows; a pair whose expert is `experts` is
    in none.
    """

    def run(module):
        return module.align(experts_TX, weights_TX, experts, rows)

    return choose(IMPLEMENTATIONS, __name__, run, implementation)
