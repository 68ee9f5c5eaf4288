"""The Hopper kernel that chooses experts. Each program computes one token.

Scores are compared as integers of the same order, in which NaN is the largest, so that a token with
NaN scores chooses valid experts too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.tile import Tiles
from . import RoutingRule
from .shape import LINE, THREADS

LOWEST = -(2**31)  # below every score as an integer


class RouteRefs(NamedTuple):
    """The kernel's references; None for those that a rule does not use. `smem_*` are in shared
    memory.
    """

    logits: Any
    live: Any
    weights: Any
    experts: Any
    smem_logits: Any
    copy_barrier: Any
    bias: Any = None
    smem_bias: Any = None


class RowScores(NamedTuple):
    """The layout of a token's scores in the registers of its threads."""

    tiles: Tiles
    shape: tuple[int, int]
    experts: int

    @property
    def layout(self):
        return plgpu.Layout.WG_STRIDED(self.shape, vec_size=1)

    @property
    def expert(self):
        """The expert of each score."""
        line, column = (self.tiles.index(self.shape, axis, self.layout) for axis in (0, 1))
        return line * LINE + column

    def load(self, ref, fill: float):
        """Load the numbers of all experts, with `fill` past the last one."""
        return jnp.where(
            self.expert < self.experts, self.tiles.load_as(ref, self.layout, True), fill
        )


def choose_experts(logits_TE, live_T, rule: RoutingRule, bias_E, interpret: Any = None):
    """(weights, experts), both [T, X]."""
    T, E = logits_TE.shape
    inputs = {"logits": pad_to_lines(logits_TE), "live": live_T.astype(jnp.int32)}
    num_lines = -(-E // THREADS) * THREADS // LINE
    scratch = {
        "smem_logits": plgpu.SMEM((num_lines, LINE), jnp.float32),
        "copy_barrier": plgpu.Barrier(num_arrivals=1),
    }
    if bias_E is not None:
        inputs["bias"] = pad_to_lines(bias_E)
        scratch |= {
            "smem_bias": plgpu.SMEM((num_lines, LINE), jnp.float32),
            "copy_barrier": plgpu.Barrier(num_arrivals=2),
        }
    ref_names = [*inputs, "weights", "experts"]

    def body(*refs) -> None:
        named = dict(zip(ref_names, refs, strict=True))
        scores = RowScores(Tiles(interpret is not None), (num_lines, LINE), E)
        pl.run_scoped(lambda **shared: run(rule, scores, RouteRefs(**named, **shared)), **scratch)

    outputs: Any = pl.kernel(
        body,
        tuple(jax.ShapeDtypeStruct((T, rule.top_k), dtype) for dtype in (jnp.float32, jnp.int32)),
        mesh=plgpu.Mesh(grid=(T,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="choose_experts",
    )(*inputs.values())
    return outputs


def pad_to_lines(x):
    """Pad the experts to whole lines."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % LINE)])
    return x.reshape(*x.shape[:-1], -1, LINE)


def run(rule: RoutingRule, scores: RowScores, refs: RouteRefs) -> None:
    """The program for one token."""
    t = lax.axis_index("row")
    lines = pl.ds(0, -(-scores.experts // LINE))
    plgpu.copy_gmem_to_smem(refs.logits.at[t], refs.smem_logits.at[lines], refs.copy_barrier)
    if refs.bias is not None:
        plgpu.copy_gmem_to_smem(refs.bias, refs.smem_bias.at[lines], refs.copy_barrier)
    plgpu.barrier_wait(refs.copy_barrier)
    index = scores.expert
    score = compute_scores(rule.score, scores.load(refs.smem_logits, -jnp.inf))
    choice = score if refs.bias is None else score + scores.load(refs.smem_bias, 0.0)
    choice = limit_groups(rule, scores.experts, choice, index)
    order = jnp.where(index < scores.experts, sortable_ints(choice), LOWEST)
    weights = []
    experts = []
    for _ in range(rule.top_k):
        expert = jnp.min(jnp.where(order == jnp.max(order), index, scores.experts))
        weights.append(jnp.sum(jnp.where(index == expert, score, 0.0)))
        experts.append(expert)
        order = jnp.where(index == expert, LOWEST, order)
    live = refs.live[t] != 0
    for x, (weight, expert) in enumerate(
        zip(normalise_weights(rule, weights), experts, strict=True)
    ):
        refs.weights[t, x] = weight
        refs.experts[t, x] = jnp.where(live, expert, scores.experts)


def compute_scores(score: str, logits):
    """The scores of logits; zero or minus infinity for the padding."""
    if score == "softmax_top":
        return logits
    if score == "sigmoid":
        return 1 / (1 + jnp.exp(-logits))
    weights = jnp.exp(logits - jnp.max(logits))
    return weights / jnp.sum(weights)


def limit_groups(rule: RoutingRule, experts: int, choice, index):
    """Set the scores outside the best groups to minus infinity."""
    if rule.groups in (1, rule.top_groups):
        return choice
    group = lax.div(index, jnp.int32(experts // rule.groups))
    group_scores = []
    for g in range(rule.groups):
        member_scores = jnp.where(group == g, choice, -jnp.inf)
        group_score = jnp.max(member_scores)
        if rule.group_score == "top2":
            best_expert = jnp.min(jnp.where(member_scores == group_score, index, experts))
            without_best = jnp.where(index == best_expert, -jnp.inf, member_scores)
            group_score = group_score + jnp.max(without_best)
        group_scores.append(group_score)
    limited = jnp.where(group < 0, choice, -jnp.inf)
    for g, group_score in enumerate(group_scores):
        better = sum(
            (
                (other_score >= group_score) if other_group < g else (other_score > group_score)
            ).astype(jnp.int32)
            for other_group, other_score in enumerate(group_scores)
            if other_group != g
        )
        group_mask = jnp.where(better < rule.top_groups, 0.0, -jnp.inf)
        limited = jnp.where(group == g, choice + group_mask, limited)
    return limited


def normalise_weights(rule: RoutingRule, weights: list) -> list:
    """The final weights of the chosen experts, best first."""
    if rule.score == "softmax_top":
        weights = [jnp.exp(weight - weights[0]) for weight in weights]
        total = sum(weights[1:], start=weights[0])
        weights = [weight / total for weight in weights]
    elif rule.normalize:
        total = sum(weights[1:], start=weights[0]) + 1e-20
        weights = [weight / total for weight in weights]
    return [weight * rule.scaling for weight in weights]


def sortable_ints(values):
    """Integers that have the order of these floats."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)
