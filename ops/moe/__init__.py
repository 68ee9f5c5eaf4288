"""Mixture of experts: routing, and products that read only the chosen experts."""

from dataclasses import dataclass
from typing import Any

from ..activation import glu
from ..implementations import choose
from ..linear import gated, project, weight_of

# Tried in order; one that does not support a case raises NotImplementedError with its reasons.
IMPLEMENTATIONS = {"mosaic": ".gpu", "xla": ".xla"}


def pick(stack, e, row_Q=None, implementation: str | None = None):
    """The matrix of one expert.

    Args:
        stack: the matrices of all experts.
        e: the expert.
        row_Q: the indices of the tokens that it will be multiplied with; None if they are unknown.
        implementation: the only one of `ops.linear.IMPLEMENTATIONS` to try.
    """
    weight = weight_of(stack, implementation)
    return (weight if row_Q is None else weight.for_rows(row_Q)).pick(e)


@dataclass(frozen=True)
class Experts:
    """The weights of all experts, and the activation between their two products."""

    up_EDGF: Any
    down_EFD: Any
    activation: str
    up_bias_EGF: Any = None
    down_bias_ED: Any = None
    clamp: float | None = None
    alpha: float = 1.0

    def __call__(self, e, x_QD, row_Q=None):
        """Compute one expert for a block of tokens; `row_Q` are their indices, if known."""
        up_bias_GF, down_bias_D = (
            None if bias is None else bias[e] for bias in (self.up_bias_EGF, self.down_bias_ED)
        )
        up_DGF = pick(self.up_EDGF, e, row_Q)
        if up_bias_GF is None and self.clamp is None:
            inner_QF = gated("QD,DGF->QGF", x_QD, up_DGF, self.activation)
        else:
            up_QGF = project("QD,DGF->QGF", x_QD, up_DGF, up_bias_GF)
            inner_QF = glu(up_QGF, self.activation, self.clamp, self.alpha)
        return project("QF,FD->QD", inner_QF, pick(self.down_EFD, e, row_Q), down_bias_D)


def mix(
    x_TD,
    weights_TX,
    experts_TX,
    num_experts: int,
    experts: Experts,
    implementation: str | None = None,
):
    """The weighted sum of each token's experts, see `quire.ops.moe.xla.mix_experts`.

    `implementation` is the name in IMPLEMENTATIONS of the only one to try.
    """

    def run(module):
        return module.mix_experts(x_TD, weights_TX, experts_TX, num_experts, experts)

    return choose(IMPLEMENTATIONS, __name__, run, implementation)
