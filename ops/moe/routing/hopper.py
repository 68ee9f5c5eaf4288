"""Routing by two kernels on NVIDIA GPUs: one for each row's choice, and one where the pairs of all
rows meet.

They serve the kinds of routing in which they passed their trials on this card. A row's choice is
the same in any batch: each row is computed by itself.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ...gpu import TILE_SOURCE, device
from ...gpu.self_test import SelfTestedKernel, require_pass
from . import Rule
from .blocks import Blocks

MOST_EXPERTS = 1024  # whose scores lie in the registers of 128 threads
MOST_CHOSEN = 16  # of a row, one after the other
# each program counts all of them: with more, the launches of XLA's way are cheaper
MOST_PAIRS = 2048
SOURCES = *Path(__file__).parent.glob("*.py"), TILE_SOURCE
KERNEL = SelfTestedKernel(f"{__package__}.accuracy", "routing", SOURCES)


def route(logits_TE, live_T, rule: Rule, choice_bias_E=None, *, interpret: Any = None):
    """See `quire.ops.moe.routing.route`.

    With `interpret` it runs in Pallas' interpreter, on a CPU.
    """
    E = logits_TE.shape[1]
    reasons = []
    if logits_TE.dtype != jnp.float32:
        reasons.append(f"logits must be float32, not {logits_TE.dtype}")
    if E > MOST_EXPERTS:
        reasons.append(f"experts must be at most {MOST_EXPERTS}, not {E}")
    if rule.score == "mixer":
        reasons.append("the rule 'mixer' has no kernel")
    if rule.top_k > MOST_CHOSEN:
        reasons.append(f"a row must choose at most {MOST_CHOSEN} experts, not {rule.top_k}")
    kind = {"experts": E, "bias": choice_bias_E is not None, "rule": [*rule]}
    require(reasons, kind, interpret)
    from .route_kernel import choose_experts  # only now: it imports a compiler

    return choose_experts(logits_TE, live_T, rule, choice_bias_E, interpret)


def align(experts_TX, weights_TX, experts: int, rows: int, *, interpret: Any = None) -> Blocks:
    """See `quire.ops.moe.routing.align`.

    With `interpret` it runs in Pallas' interpreter, on a CPU.
    """
    pairs = experts_TX.size
    reasons = []
    if pairs > MOST_PAIRS:
        reasons.append(f"pairs must be at most {MOST_PAIRS}, not {pairs}")
    require(reasons, {"experts": experts, "rows": rows}, interpret)
    from .align_kernel import place  # only now: it imports a compiler

    return place(experts_TX, weights_TX, experts, rows, interpret)


def require(reasons: list[str], kind: dict, interpret: Any) -> None:
    """Declines with all reasons, or where a kind has not passed its trial."""
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    if reasons:
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, kind)


def varies() -> None:
    """A row's bits are the same in any company."""
