"""Routing by two kernels for Hopper GPUs: one chooses the experts, one sorts pairs into blocks.

They are used for the kinds of routing for which they passed their self-tests on this GPU. They are
batch-invariant: each token's choice is computed separately.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ...gpu import TILE_SOURCE, device
from ...gpu.self_test import SelfTestedKernel, require_pass
from . import RoutingRule
from .blocks import Blocks

MAX_EXPERTS = 1024  # the scores are held in the registers of 128 threads
MAX_TOP_K = 16  # experts of a token are chosen one after the other
MAX_PAIRS = 2048  # every program counts all pairs; with more the XLA implementation is faster
SOURCES = *Path(__file__).parent.glob("*.py"), TILE_SOURCE
KERNEL = SelfTestedKernel(f"{__package__}.accuracy", "routing", SOURCES)


def route(logits_TE, live_T, rule: RoutingRule, choice_bias_E=None, *, interpret: Any = None):
    """See `quire.ops.moe.routing.route`.

    With `interpret` the kernel runs in Pallas' interpreter.
    """
    E = logits_TE.shape[1]
    reasons = []
    if logits_TE.dtype != jnp.float32:
        reasons.append(f"logits must be float32, not {logits_TE.dtype}")
    if E > MAX_EXPERTS:
        reasons.append(f"experts must be at most {MAX_EXPERTS}, not {E}")
    if rule.score == "mixer":
        reasons.append("the rule 'mixer' has no kernel")
    if rule.top_k > MAX_TOP_K:
        reasons.append(f"a row must choose at most {MAX_TOP_K} experts, not {rule.top_k}")
    kind = {"experts": E, "bias": choice_bias_E is not None, "rule": [*rule]}
    require(reasons, kind, interpret)
    from .route_kernel import choose_experts  # imported late, since it imports a compiler

    return choose_experts(logits_TE, live_T, rule, choice_bias_E, interpret)


def align(experts_TX, weights_TX, experts: int, rows: int, *, interpret: Any = None) -> Blocks:
    """See `quire.ops.moe.routing.align`.

    With `interpret` the kernel runs in Pallas' interpreter.
    """
    pairs = experts_TX.size
    reasons = []
    if pairs > MAX_PAIRS:
        reasons.append(f"pairs must be at most {MAX_PAIRS}, not {pairs}")
    require(reasons, {"experts": experts, "rows": rows}, interpret)
    from .align_kernel import place_pairs  # imported late, since it imports a compiler

    return place_pairs(experts_TX, weights_TX, experts, rows, interpret)


def require(reasons: list[str], kind: dict, interpret: Any) -> None:
    """Raise NotImplementedError with all reasons, or if the kind has not passed its self-test."""
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    if reasons:
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, kind)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
