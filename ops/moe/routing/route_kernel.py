"""The kernel that chooses a row's experts: one program a row, whose threads have the experts'
scores.

Scores are compared as whole numbers of the same order, in which NaN is above all others, so that a
row of them chooses experts too.
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

LEAST = -(2**31)  # below the number of every score


class Refs(NamedTuple):
    """References; None where a rule does not use one."""

    logits: Any
    live: Any
    weights: Any
    experts: Any
    own: Any  # in shared memory, as what follows
    here: Any
    bias: Any = None
    own_bias: Any = None


class Scores(NamedTuple):
    """A row's, as its threads have them."""

    tiles: Tiles
    shape: tuple[int, int]
    experts: int

    @property
    def layout(self):
        return plgpu.Layout.WG_STRIDED(self.shape, vec_size=1)

    @property
    def expert(self):
        """Whose each is."""
        line, column = (self.tiles.index(self.shape, axis, self.layout) for axis in (0, 1))
        return line * LINE + column

    def load(self, ref, beyond: float):
        """Those of all experts, and `beyond` past the last."""
        return jnp.where(
            self.expert < self.experts, self.tiles.load_as(ref, self.layout, True), beyond
        )


def choose_experts(logits_TE, live_T, rule: RoutingRule, bias_E, interpret: Any = None):
    """(weights, experts), both [T, X]."""
    T, E = logits_TE.shape
    given = {"logits": lined(logits_TE), "live": live_T.astype(jnp.int32)}
    lines = -(-E // THREADS) * THREADS // LINE
    scratch = {"own": plgpu.SMEM((lines, LINE), jnp.float32), "here": plgpu.Barrier(num_arrivals=1)}
    if bias_E is not None:
        given["bias"] = lined(bias_E)
        scratch |= {
            "own_bias": plgpu.SMEM((lines, LINE), jnp.float32),
            "here": plgpu.Barrier(num_arrivals=2),
        }
    names = [*given, "weights", "experts"]

    def body(*refs) -> None:
        named = dict(zip(names, refs, strict=True))
        scores = Scores(Tiles(interpret is not None), (lines, LINE), E)
        pl.run_scoped(lambda **shared: run(rule, scores, Refs(**named, **shared)), **scratch)

    found: Any = pl.kernel(
        body,
        tuple(jax.ShapeDtypeStruct((T, rule.top_k), dtype) for dtype in (jnp.float32, jnp.int32)),
        mesh=plgpu.Mesh(grid=(T,), grid_names=("row",)),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="choose_experts",
    )(*given.values())
    return found


def lined(x):
    """The experts in whole lines."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % LINE)])
    return x.reshape(*x.shape[:-1], -1, LINE)


def run(rule: RoutingRule, scores: Scores, refs: Refs) -> None:
    """What is done with one row."""
    t = lax.axis_index("row")
    some = pl.ds(0, -(-scores.experts // LINE))
    plgpu.copy_gmem_to_smem(refs.logits.at[t], refs.own.at[some], refs.here)
    if refs.bias is not None:
        plgpu.copy_gmem_to_smem(refs.bias, refs.own_bias.at[some], refs.here)
    plgpu.barrier_wait(refs.here)
    index = scores.expert
    score = of_logits(rule.score, scores.load(refs.own, -jnp.inf))
    choice = score if refs.bias is None else score + scores.load(refs.own_bias, 0.0)
    choice = limit_groups(rule, scores.experts, choice, index)
    order = jnp.where(index < scores.experts, ordered(choice), LEAST)
    weights = []
    chosen = []
    for _ in range(rule.top_k):
        expert = jnp.min(jnp.where(order == jnp.max(order), index, scores.experts))
        weights.append(jnp.sum(jnp.where(index == expert, score, 0.0)))
        chosen.append(expert)
        order = jnp.where(index == expert, LEAST, order)
    live = refs.live[t] != 0
    for x, (weight, expert) in enumerate(zip(weighed(rule, weights), chosen, strict=True)):
        refs.weights[t, x] = weight
        refs.experts[t, x] = jnp.where(live, expert, scores.experts)


def of_logits(score: str, logits):
    """Scores; of an expert that there is not, zero or minus infinity."""
    if score == "softmax_top":
        return logits
    if score == "sigmoid":
        return 1 / (1 + jnp.exp(-logits))
    weights = jnp.exp(logits - jnp.max(logits))
    return weights / jnp.sum(weights)


def limit_groups(rule: RoutingRule, experts: int, choice, index):
    """The experts of the best groups; the others score minus infinity."""
    if rule.groups in (1, rule.top_groups):
        return choice
    group = lax.div(index, jnp.int32(experts // rule.groups))
    best = []
    for g in range(rule.groups):
        mine = jnp.where(group == g, choice, -jnp.inf)
        most = jnp.max(mine)
        if rule.group_score == "top2":
            first = jnp.min(jnp.where(mine == most, index, experts))
            most = most + jnp.max(jnp.where(index == first, -jnp.inf, mine))
        best.append(most)
    limited = jnp.where(group < 0, choice, -jnp.inf)
    for g, mine in enumerate(best):
        better = sum(
            ((other >= mine) if n < g else (other > mine)).astype(jnp.int32)
            for n, other in enumerate(best)
            if n != g
        )
        kept = jnp.where(better < rule.top_groups, 0.0, -jnp.inf)
        limited = jnp.where(group == g, choice + kept, limited)
    return limited


def weighed(rule: RoutingRule, weights: list) -> list:
    """The weights of the chosen, the best first."""
    if rule.score == "softmax_top":
        weights = [jnp.exp(weight - weights[0]) for weight in weights]
        total = sum(weights[1:], start=weights[0])
        weights = [weight / total for weight in weights]
    elif rule.normalize:
        total = sum(weights[1:], start=weights[0]) + 1e-20
        weights = [weight / total for weight in weights]
    return [weight * rule.scaling for weight in weights]


def ordered(numbers):
    """Whole numbers in the order of these, equal where they are."""
    bits = lax.bitcast_convert_type(numbers, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)
