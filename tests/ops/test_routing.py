"""The GPU routing kernels against float64, a loop and XLA: in Pallas' interpreter, and lowered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from quire.ops.gpu import self_test
from quire.ops.moe import routing
from quire.ops.moe.routing import RoutingRule, accuracy, hopper, xla
from quire.tests.support.cases import cases, thinned

pytestmark = pytest.mark.usefixtures("interpreted_once")
RULES = {
    "Qwen3-30B-A3B": (128, False, RoutingRule(8)),
    "gpt-oss-20b": (32, False, RoutingRule(4, "softmax_top")),
    "DeepSeek-V2": (160, False, RoutingRule(6, "softmax", False, 16.0, 8, 3)),
    "DeepSeek-V3": (256, True, RoutingRule(8, "sigmoid", True, 2.5, 8, 4, "top2")),
    "GLM-4.5": (128, True, RoutingRule(8, "sigmoid", scaling=2.5)),
    "all of a few": (32, False, RoutingRule(16, "sigmoid", groups=2, top_groups=2)),
    "one of many": (512, False, RoutingRule(1)),
    "Mixtral": (8, False, RoutingRule(2)),
    "Granite 4": (72, False, RoutingRule(10, "softmax_top")),
    "with a bias, in groups": (60, True, RoutingRule(4, "sigmoid", True, 1.5, 6, 2, "top2")),
}
# rows, experts per row, experts, rows of a block
SIZES = (
    (16, 4, 32, 16),
    (32, 2, 72, 16),
    (64, 2, 8, 32),
    (64, 1, 5, 64),
    (5, 2, 8, 16),
    (11, 10, 72, 16),
)


def route_experts(logits_TE, live_T, rule: RoutingRule, bias_E):
    def step(logits_TE, live_T, bias_E):
        interpret = InterpretGPUParams(detect_races=True)
        return hopper.route(logits_TE, live_T, rule, bias_E, interpret=interpret)

    outputs = jax.jit(step)(logits_TE, live_T, bias_E)
    assert not gpu_callbacks.get_races().races_found
    return tuple(np.asarray(array) for array in outputs)


def random_inputs(name: str, rows: int, seed: int = 0):
    """(logits, live, rule, bias); every other row has ties between experts."""
    E, biased, rule = RULES[name]
    kind = {"experts": E, "bias": biased, "rule": [*rule]}
    (logits_TE, live_T, bias_E), _ = accuracy.RouteCase(kind, rows).build(seed)[1:]
    return logits_TE, live_T, rule, bias_E


@pytest.mark.parametrize("name", thinned(RULES, ["gpt-oss-20b", "DeepSeek-V3"]))
def test_chosen_experts_match_float64_and_xla(name):
    """The first of tied experts are chosen; rows that are not live choose none."""
    logits_TE, live_T, rule, bias_E = random_inputs(name, 12)
    weights_TX, experts_TX = route_experts(logits_TE, live_T, rule, bias_E)
    expected_TX, best_TX = accuracy.in_float64(logits_TE, rule, bias_E)
    assert not np.all(live_T)
    assert experts_TX.tolist() == np.where(live_T[:, None], best_TX, logits_TE.shape[1]).tolist()
    np.testing.assert_allclose(weights_TX, expected_TX, rtol=1e-5)
    xla_outputs = xla.route(logits_TE, live_T, rule, bias_E)
    assert experts_TX.tolist() == xla_outputs[1].tolist()
    np.testing.assert_allclose(weights_TX, xla_outputs[0], rtol=2e-6)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "DeepSeek-V3"])
def test_routing_is_batch_invariant(name):
    logits_TE, _, rule, bias_E = random_inputs(name, 5)
    live_T = jnp.ones(5, bool)
    outputs = route_experts(logits_TE, live_T, rule, bias_E)
    order = np.array([3, 0, 4])
    other_outputs = route_experts(logits_TE[order].at[1].set(jnp.nan), live_T[:3], rule, bias_E)
    for array, other_array in zip(outputs, other_outputs, strict=True):
        for row in (0, 2):
            assert array[order[row]].tobytes() == other_array[row].tobytes()
    assert np.all((other_outputs[1] >= 0) & (other_outputs[1] < logits_TE.shape[1])), (
        "a row of NaN has valid experts"
    )
    assert np.all(np.isnan(other_outputs[0][1])), "and its weights are NaN"


def test_routing_with_negative_scores():
    """Experts of excluded groups are never chosen, and no expert is chosen twice."""
    bias_E = jnp.asarray(np.repeat([-1.0, -9.0, -5.0, -3.0], 8), jnp.float32)
    rule = RoutingRule(16, "sigmoid", groups=4, top_groups=2, group_score="top2")
    _, experts_TX = route_experts(jnp.zeros((1, 32), jnp.float32), jnp.ones(1, bool), rule, bias_E)
    assert experts_TX[0].tolist() == [*range(8), *range(24, 32)]


def draw_expert_ids(rng, T: int, X: int, E: int, kind: str) -> np.ndarray:
    """Expert ids per row; E stands for no expert."""
    if kind == "one":
        return np.where(np.arange(X) == 0, E // 2, E) + np.zeros((T, 1), int)
    if kind == "none":
        return np.full((T, X), E)
    return np.stack([rng.permutation(E + 1)[:X] for _ in range(T)])


@pytest.mark.parametrize("kind", thinned(["any", "one", "none"], ["any"]))
@pytest.mark.parametrize("sizes", thinned(SIZES, [(16, 4, 32, 16)]))
@pytest.mark.slow
def test_align_matches_xla(sizes, kind):
    """All fields are equal, and no accesses race."""
    T, X, E, rows = sizes
    rng = np.random.default_rng(T + E)
    experts_TX = jnp.asarray(draw_expert_ids(rng, T, X, E, kind), jnp.int32)
    weights_TX = jnp.asarray(rng.random((T, X)), jnp.float32)

    def step(experts_TX, weights_TX):
        interpret = InterpretGPUParams(detect_races=True)
        return hopper.align(experts_TX, weights_TX, E, rows, interpret=interpret)

    actual = jax.jit(step)(experts_TX, weights_TX)
    assert not gpu_callbacks.get_races().races_found
    expected = xla.align(experts_TX, weights_TX, E, rows)
    for name in actual._fields:
        assert getattr(actual, name).tolist() == getattr(expected, name).tolist(), name


def test_error_lists_every_unsupported_property():
    logits_TE = jnp.zeros((4, 1032), jnp.bfloat16)
    live_T = jnp.ones(4, bool)
    with pytest.raises(
        NotImplementedError,
        match=r"float32, not bfloat16, and .* at most 1024, not 1032, and .* 16 .* 20",
    ):
        hopper.route(logits_TE, live_T, RoutingRule(20), interpret=True)
    with pytest.raises(NotImplementedError, match="at most 2048, not 4096"):
        hopper.align(jnp.zeros((1024, 4), jnp.int32), jnp.zeros((1024, 4)), 8, 16, interpret=True)
    with pytest.raises(NotImplementedError, match="mosaic_gpu: there is no NVIDIA GPU"):
        routing.route(logits_TE, live_T, RoutingRule(2), None, "mosaic_gpu")
    with pytest.raises(NotImplementedError, match="mosaic_gpu: there is no NVIDIA GPU"):
        routing.align(jnp.zeros((16, 4), jnp.int32), jnp.zeros((16, 4)), 8, 16, "mosaic_gpu")


def spoil_a_choice(weights_TX, experts_TX):
    return weights_TX, experts_TX.at[1].set(experts_TX[1, ::-1])


def spoil_a_weight(weights_TX, experts_TX):
    return weights_TX.at[2, 1].multiply(1.0005), experts_TX


@pytest.mark.parametrize("spoil", [None, spoil_a_choice, spoil_a_weight])
def test_self_test_rejects_wrong_expert_choices(spoil, monkeypatch):
    """The GPU self-test, with few rows in the interpreter, accepts only a correct kernel."""
    real = accuracy.choose_experts

    def kernel(*arguments):
        outputs = real(*arguments)
        return outputs if spoil is None else spoil(*outputs)

    monkeypatch.setattr(accuracy, "choose_experts", kernel)
    E, biased, rule = RULES["gpt-oss-20b"]
    kind = {"experts": E, "bias": biased, "rule": [*rule]}
    case, _ = accuracy.cases(kind)
    result = self_test.measure(accuracy.RouteCase(kind, 8, InterpretGPUParams()), 0, repeats=2)
    assert case.name == "choices" and (result.wrong is not None) == (spoil is not None)


@pytest.mark.parametrize("spoiled", [None, "place_Z", "pair_P", "weight_P", "experts_B", "count_1"])
def test_self_test_rejects_wrong_places(spoiled, monkeypatch):
    def kernel(experts_TX, weights_TX, experts, rows, interpret):
        blocks = xla.align(experts_TX, weights_TX, experts, rows)
        return (
            blocks
            if spoiled is None
            else blocks._replace(**{spoiled: getattr(blocks, spoiled).at[0].add(1)})
        )

    monkeypatch.setattr(accuracy, "place_pairs", kernel)
    case, _ = accuracy.cases({"experts": 32, "rows": 16})
    assert (self_test.measure(case, 0, repeats=2).wrong is not None) == (spoiled is not None)


def test_self_test_accepts_the_align_kernel():
    case = accuracy.AlignCase({"experts": 8, "rows": 16}, (16, 4), InterpretGPUParams())
    assert self_test.measure(case, 0, repeats=2).wrong is None


def test_float64_reference_matches_a_loop():
    """The self-test's reference, row by row; the first of tied experts are chosen."""
    for seed in range(cases(40)):
        rng = np.random.default_rng(seed)
        rule = RoutingRule(
            int(rng.integers(1, 9)),
            rng.choice(["softmax", "softmax_top", "sigmoid"]),
            bool(rng.integers(2)),
            2.0,
        )
        logits_TE = np.round(rng.standard_normal((3, 12)) * 2) / 2
        weights_TX, experts_TX = accuracy.in_float64(logits_TE, rule, None)
        for row, weights, experts in zip(logits_TE, weights_TX, experts_TX, strict=True):
            assert experts.tolist() == sorted(range(12), key=lambda e: (-row[e], e))[: rule.top_k]
            scores = (
                1 / (1 + np.exp(-row))
                if rule.score == "sigmoid"
                else np.exp(row) / np.exp(row).sum()
            )
            total = scores[experts].sum() if rule.normalize or rule.score == "softmax_top" else 1
            np.testing.assert_allclose(weights, 2 * scores[experts] / total, rtol=1e-12)


def test_kernel_that_fails_its_self_test_is_replaced_by_xla(monkeypatch, caplog, tmp_path):
    tested_modules = []

    def test(module, kind):
        tested_modules.append(module)
        return {"choices": self_test.CaseResult(0.5, 0.5, 0, 1e-5)}

    monkeypatch.setattr(hopper.device, "is_hopper", lambda: True)
    monkeypatch.setattr(self_test, "results_folder", lambda: tmp_path)
    monkeypatch.setattr(self_test, "run_self_test", test)
    monkeypatch.delenv("QUIRE_MOSAIC", raising=False)
    self_test.verdict.cache_clear()
    self_test.warn_once.cache_clear()
    logits_TE, live_T, rule, bias_E = random_inputs("gpt-oss-20b", 4)
    for _ in range(2):
        _, experts_TX = routing.route(logits_TE, live_T, rule, bias_E)
        assert experts_TX.tolist() == xla.route(logits_TE, live_T, rule, bias_E)[1].tolist()
    assert tested_modules == ["quire.ops.moe.routing.accuracy"]
    assert (
        caplog.text.count("it is wrong on this GPU: choices by 5.0e-01, where 1e-05 is allowed")
        == 1
    )
    self_test.verdict.cache_clear()


def test_lowers_for_cuda_as_two_kernels_without_a_sort(monkeypatch):
    monkeypatch.setattr(hopper.device, "is_hopper", lambda: True)
    monkeypatch.setenv("QUIRE_MOSAIC", "trusted")
    logits_TE, live_T, rule, bias_E = random_inputs("DeepSeek-V3", 64)

    def step(logits_TE, live_T, bias_E):
        weights_TX, experts_TX = routing.route(logits_TE, live_T, rule, bias_E)
        return routing.align(experts_TX, weights_TX, 256, 16)

    text = (
        jax.jit(step).trace(logits_TE, live_T, bias_E).lower(lowering_platforms=("cuda",)).as_text()
    )
    assert text.count("@mosaic_gpu_v2") == 2
    assert not re.findall(r"(?:stablehlo|chlo)\.(?:sort|top_k|scatter|reduce|gather)\b", text)
