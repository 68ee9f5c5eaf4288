"""Expert mixtures and routing in XLA against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.model import decoder
from quire.model.config import ModelError, Moe, check_moe
from quire.model.weights import MoeWeights
from quire.ops.moe.routing import RoutingRule, route
from quire.ops.moe.routing.xla import limit_groups
from quire.ops.moe.xla import BLOCK, mix_experts

D = 24
F = 20
E = 6
X = 3


def silu(x):
    return x / (1 + np.exp(-x))


def random_experts(seed: int, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((E, D, 2, F)).astype(dtype) / 4, rng.standard_normal(
        (E, F, D)
    ).astype(dtype) / 4


def reference_mixture(x_TD, weights_TX, experts_TX, up_EDGF, down_EFD):
    out = np.zeros(x_TD.shape)
    up_EDGF = up_EDGF.astype(np.float64)
    down_EFD = down_EFD.astype(np.float64)
    for t, row in enumerate(x_TD.astype(np.float64)):
        for weight, e in zip(weights_TX[t], experts_TX[t], strict=True):
            gate = row @ up_EDGF[e, :, 0]
            up = row @ up_EDGF[e, :, 1]
            out[t] += float(weight) * (silu(gate) * up @ down_EFD[e])
    return out


@jax.jit
def mix_in_xla(x_TD, weights_TX, experts_TX, up_EDGF, down_EFD):
    def expert(e, x_QD, _):
        up_QGF = jnp.einsum("QD,DGF->QGF", x_QD, up_EDGF[e], preferred_element_type=jnp.float32)
        inner = (jax.nn.silu(up_QGF[:, 0]) * up_QGF[:, 1]).astype(x_QD.dtype)
        return jnp.einsum("QF,FD->QD", inner, down_EFD[e], preferred_element_type=jnp.float32)

    return mix_experts(x_TD, weights_TX, experts_TX, E, expert)


def draw_expert_ids(rng, T: int, kind: str) -> np.ndarray:
    """Expert ids per row."""
    if kind == "one":  # every row on one expert and its neighbours
        return np.tile(np.arange(3, 3 + X), (T, 1))
    if kind == "few":  # experts 1, 3 and 5 are never selected
        return np.stack([rng.permutation([0, 2, 4]) for _ in range(T)])
    return np.stack([rng.permutation(E)[:X] for _ in range(T)])


@pytest.mark.parametrize("kind", ["any", "one", "few"])
@pytest.mark.parametrize("T", [1, 2, 15, BLOCK, BLOCK + 1, 32, 33, 70])
def test_mixture_matches_float64(T, kind):
    rng = np.random.default_rng(T)
    x = rng.standard_normal((T, D)).astype(np.float32)
    experts = draw_expert_ids(rng, T, kind).astype(np.int32)
    weights = rng.random((T, X)).astype(np.float32)
    up, down = random_experts(T)
    expected = reference_mixture(x, weights, experts, up, down)
    np.testing.assert_allclose(mix_in_xla(x, weights, experts, up, down), expected, atol=2e-6)


def test_unselected_experts_are_never_read():
    rng = np.random.default_rng(0)
    up, down = random_experts(0)
    up[[1, 3, 5]] = np.nan
    x = rng.standard_normal((9, D)).astype(np.float32)
    weights = np.ones((9, X), np.float32)
    out = mix_in_xla(x, weights, draw_expert_ids(rng, 9, "few").astype(np.int32), up, down)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.slow
def test_mixture_is_batch_invariant(dtype):
    """With other rows, in another order, and alone."""
    rng = np.random.default_rng(5)
    up, down = (jnp.asarray(w, dtype) for w in random_experts(5))
    x = jnp.asarray(rng.standard_normal((70, D)), dtype)
    experts = draw_expert_ids(rng, 70, "any").astype(np.int32)
    weights = rng.random((70, X)).astype(np.float32)
    expected = np.asarray(mix_in_xla(x, weights, experts, up, down), np.float32)
    for T in (1, 3, 16, 40, 70):
        for _ in range(3):
            rows = rng.permutation(70)[:T]
            actual = np.asarray(
                mix_in_xla(x[rows], weights[rows], experts[rows], up, down), np.float32
            )
            np.testing.assert_array_equal(actual, expected[rows])


def reference_route(logits, moe: Moe, bias):
    """{expert: weight} of one row, best first."""
    logits = logits.astype(np.float64)
    if moe.score == "softmax_top":
        chosen = np.argsort(-logits)[: moe.top_k]
        weights = np.exp(logits[chosen] - logits.max())
        return dict(zip(chosen, moe.scaling * weights / weights.sum(), strict=True))
    scores = (
        1 / (1 + np.exp(-logits))
        if moe.score == "sigmoid"
        else np.exp(logits) / np.exp(logits).sum()
    )
    choice = scores if bias is None else scores + bias
    groups = choice.reshape(moe.groups, -1)
    best = groups.max(1) if moe.group_score == "max" else np.sort(groups, 1)[:, -2:].sum(1)
    allowed_groups = np.argsort(-best)[: moe.top_groups]
    size = moe.experts // moe.groups
    allowed = [e for e in np.argsort(-choice) if e // size in allowed_groups]
    chosen = allowed[: moe.top_k]
    total = scores[chosen].sum() if moe.normalize else 1
    return {e: moe.scaling * scores[e] / total for e in chosen}


RULES = {
    "mixtral": Moe(8, 2, F),
    "qwen3": Moe(12, 4, F, normalize=False),
    "gpt-oss": Moe(8, 4, F, score="softmax_top"),
    "deepseek-v2": Moe(16, 3, F, normalize=False, groups=8, top_groups=3, scaling=16.0),
    "deepseek-v3": Moe(
        16,
        4,
        F,
        score="sigmoid",
        groups=4,
        top_groups=2,
        group_score="top2",
        choice_bias=True,
        scaling=2.5,
    ),
    "all groups": Moe(12, 3, F, groups=3, top_groups=3),
    "one": Moe(5, 1, F),
    "all": Moe(5, 5, F, score="sigmoid"),
}


@pytest.mark.parametrize("name", RULES)
def test_route_matches_float64(name):
    moe = RULES[name]
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((50, moe.experts)).astype(np.float32) * 2
    bias = rng.standard_normal(moe.experts).astype(np.float32) if moe.choice_bias else None
    rule = RoutingRule(
        moe.top_k,
        moe.score,
        moe.normalize,
        moe.scaling,
        moe.groups,
        moe.top_groups,
        moe.group_score,
    )
    weights, experts = route(jnp.asarray(logits), jnp.ones(50, bool), rule, bias)
    for t in range(50):
        expected = reference_route(logits[t], moe, bias)
        weight_by_expert = dict(
            zip(np.asarray(experts[t]).tolist(), np.asarray(weights[t]).tolist(), strict=True)
        )
        assert set(weight_by_expert) == set(expected)
        for e, weight in expected.items():
            assert weight_by_expert[e] == pytest.approx(weight, rel=2e-6)


def test_excluded_groups_lose_to_negative_scores():
    """A bias may make every score negative."""
    choice = jnp.asarray([[-1.0, -2.0, -9.0, -9.5, -5.0, -6.0, -3.0, -3.5]])
    limited = np.asarray(limit_groups(choice, 4, 2, "top2"))[0]
    assert np.isneginf(limited).tolist() == [False, False, True, True, True, True, False, False]


def test_routing_is_batch_invariant():
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.standard_normal((40, 16)), jnp.float32)
    options = (
        RoutingRule(4, "sigmoid", True, 2.5, 4, 2, "top2"),
        jnp.asarray(rng.standard_normal(16), jnp.float32),
    )
    live = jnp.arange(40) != 3
    batch_outputs = jax.jit(lambda x, live: route(x, live, *options))(logits, live)
    row_outputs = jax.jit(lambda x, live: route(x, live, *options))(logits[17:18], live[17:18])
    for a, b in zip(batch_outputs, row_outputs, strict=True):
        np.testing.assert_array_equal(a[17], b[0])
    assert batch_outputs[1][3].tolist() == [16] * 4, "a row that is not live chose"


def test_decoder_mixture_with_biases_clamp_and_expert_scales():
    """Combines gpt-oss' experts with Gemma's scale per expert."""
    rng = np.random.default_rng(11)
    T, up, down = 9, *random_experts(11)
    up = up * 4
    down = down * 4
    weights = MoeWeights(
        router_DE=rng.standard_normal((D, E)).astype(np.float32),
        up_EDGF=up,
        down_EFD=down,
        router_bias_E=rng.standard_normal(E).astype(np.float32),
        up_bias_EGF=rng.standard_normal((E, 2, F)).astype(np.float32),
        down_bias_ED=rng.standard_normal((E, D)).astype(np.float32),
        expert_scale_E=rng.random(E).astype(np.float32) + 0.5,
    )
    moe = Moe(E, X, F, score="softmax_top", router_bias=True, bias=True, clamp=2.0, alpha=1.702)
    x = rng.standard_normal((T, D)).astype(np.float32)
    live = np.arange(T) != 4
    out, chosen = decoder.mix(
        moe, jax.tree.map(jnp.asarray, weights), jnp.asarray(x), jnp.asarray(x), jnp.asarray(live)
    )
    assert not out[4].any() and (chosen[4] == E).all(), "padding selects no expert"
    clamped = 0
    for t in np.flatnonzero(live):
        row = x[t].astype(np.float64)
        total = np.zeros(D)
        for e, weight in reference_route(
            row @ weights.router_DE + weights.router_bias_E, moe, None
        ).items():
            gate, linear = (row @ up[e, :, g] + weights.up_bias_EGF[e, g] for g in range(2))
            clamped += (gate > 2).sum() + (abs(linear) > 2).sum()
            gate = np.minimum(gate, 2)
            linear = np.clip(linear, -2, 2)
            inner = gate / (1 + np.exp(-1.702 * gate)) * (linear + 1)
            total += (
                weight * weights.expert_scale_E[e] * (inner @ down[e] + weights.down_bias_ED[e])
            )
        np.testing.assert_allclose(out[t], total, atol=5e-5)
    assert clamped > 100


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        (Moe(10, 2, F, groups=4), "10 experts do not divide into 4 groups"),
        (Moe(8, 2, F, groups=4, top_groups=5), "5 groups are to be selected of 4"),
        (Moe(8, 9, F), "9 experts a token cannot be chosen from 8"),
        (Moe(8, 5, F, groups=4, top_groups=2), "5 experts a token cannot be chosen from 4"),
        (Moe(4, 2, F, groups=4, top_groups=2, group_score="top2"), "groups have 1"),
    ],
)
def test_impossible_expert_counts_are_rejected(moe, message):
    with pytest.raises(ModelError, match=message):
        check_moe(3, moe)
