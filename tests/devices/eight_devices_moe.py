"""Expert parallelism over eight simulated CPU devices; run by test_eight_devices.py in a process of
its own.
"""

import re
from functools import cache, lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from quire import LLM, SamplingParams
from quire.model import decoder, expert_copies
from quire.model.checkpoint import loader
from quire.model.checkpoint.placement import Placement
from quire.model.config import ModelError, Moe
from quire.model.weights import MoeWeights
from quire.ops.moe.dispatch import capacity
from quire.serving.api.errors import RequestError
from quire.serving.device import expert_loads
from quire.serving.device.expert_placement import transfers
from quire.serving.device.updates import move_experts
from quire.sharding.device_axes import UNSPLIT, Axis, DeviceAxes
from quire.sharding.mesh import device_axes, make_mesh
from quire.tests.support import uncached
from quire.tests.support.cases import thinned
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.folder import POSITIONS
from quire.tests.support.golden.recorded import TOLERANCE, Golden, check_answers

pytestmark = pytest.mark.usefixtures("few_programs")
assert len(jax.devices()) == 8

D = 24
F = 16
E = 16
X = 3
MOE = Moe(E, X, F, score="softmax_top", router_bias=True, bias=True, clamp=2.0)
# Layout of the weights: whole experts over the expert axes, columns over tensor.
SPECS = MoeWeights(
    router_DE=P(),
    router_bias_E=P(),
    up_EDGF=P("all", None, None, "tensor"),
    down_EFD=P("all", "tensor"),
    up_bias_EGF=P("all", None, "tensor"),
    down_bias_ED=P("all"),
)
VARIANT_BY_NAME = {variant.name: variant for variant in VARIANTS}
MESHES = {
    "data": {"data": 8},
    "data and experts": {"data": 2, "expert": 4},
    "context": {"context": 4},
    "two kinds of rows": {"data": 2, "context": 2, "expert": 2},
    "columns too": {"data": 2, "expert": 2, "tensor": 2},
}


@cache
def random_inputs(skew: float = 0.0) -> tuple[MoeWeights, np.ndarray]:
    """Weights and 64 rows; with a skew nearly all rows route to the same experts."""
    rng = np.random.default_rng(3)

    def normal(*shape: int, scale: float = 0.25):
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    weights = MoeWeights(
        router_DE=normal(D, E),
        router_bias_E=skew * np.arange(E, dtype=np.float32),
        up_EDGF=normal(E, D, 2, F),
        down_EFD=normal(E, F, D),
        up_bias_EGF=normal(E, 2, F),
        down_bias_ED=normal(E, D),
    )
    return weights, normal(64, D, scale=1)


def cast_weights(weights: MoeWeights, dtype) -> MoeWeights:
    leaves = {name: jnp.asarray(leaf) for name, leaf in vars(weights).items() if leaf is not None}
    return MoeWeights(
        **{k: v if k.startswith("router") else v.astype(dtype) for k, v in leaves.items()}
    )


def mix_on_one_device(x, live, weights: MoeWeights):
    return np.asarray(
        jax.jit(lambda *args: decoder.mix(MOE, *args)[0])(weights, x, x, live), np.float32
    )


def joined_axis(sizes: dict[str, int], *names: str) -> Axis:
    axis = UNSPLIT
    for name in names:
        axis = axis * Axis(name, sizes.get(name, 1))
    return axis


def mix_on_mesh(sizes: dict[str, int], x, live, weights: MoeWeights):
    """The compiled expert mix with rows split over data and context, and its result."""
    rows = joined_axis(sizes, "data", "context")
    context = joined_axis(sizes, "context")
    axes = DeviceAxes(
        joined_axis(sizes, "tensor"),
        joined_axis(sizes, "expert"),
        context,
        context,
        joined_axis(sizes, "data"),
    )
    all_axes = axes.experts.name

    def resolve_spec(spec: P) -> P:
        return P(*[all_axes if name == "all" else name for name in spec])

    specs = jax.tree.map(resolve_spec, SPECS, is_leaf=lambda leaf: isinstance(leaf, P))
    run = jax.shard_map(
        lambda weights, x, live: decoder.mix(MOE, weights, x, x, live, axes)[0],
        mesh=make_mesh(**sizes),
        in_specs=(specs, P(rows.name), P(rows.name)),
        out_specs=P(rows.name),
        check_vma=False,
    )
    compiled = jax.jit(run).lower(weights, x, live).compile()
    inputs = jax.tree.map(jax.device_put, (weights, x, live), compiled.input_shardings[0])
    return compiled, np.asarray(compiled(*inputs), np.float32)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(("dtype", "skew"), [(jnp.float32, 0.0), (jnp.bfloat16, 9.0)])
def test_expert_parallel_mix_equals_one_device(name, dtype, skew):
    """Bit-identical to one device unless columns are split, however many rounds the dispatch
    takes.
    """
    weights, x = random_inputs(skew)
    weights = cast_weights(weights, dtype)
    x = jnp.asarray(x, dtype)
    live = jnp.arange(len(x)) % 7 != 2
    expected = mix_on_one_device(x, live, weights)
    _, outputs = mix_on_mesh(MESHES[name], x, live, weights)
    if "tensor" in MESHES[name]:
        np.testing.assert_allclose(
            outputs, expected, rtol=0, atol=2e-6 if dtype == jnp.float32 else 0.1
        )
    else:
        np.testing.assert_array_equal(outputs, expected)
    assert not outputs[2].any() and outputs[3].any()


def test_mix_is_batch_invariant():
    """A row's bits do not depend on other live rows, on its position or on the number of rows."""
    weights, x = random_inputs(1.0)
    weights = cast_weights(weights, jnp.bfloat16)
    x = jnp.asarray(x, jnp.bfloat16)
    full_batch = mix_on_mesh(MESHES["data and experts"], x, jnp.ones(64, bool), weights)[1]
    for at in (0, 37, 63):
        single = mix_on_mesh(MESHES["data and experts"], x, jnp.arange(64) == at, weights)[1]
        np.testing.assert_array_equal(single[at], full_batch[at])
    row_indices = np.random.default_rng(0).permutation(64)[:24]
    small_batch = mix_on_mesh(
        MESHES["data and experts"], x[row_indices], jnp.ones(24, bool), weights
    )[1]
    np.testing.assert_array_equal(small_batch, full_batch[row_indices])


def sent_bytes(text: str, devices: int) -> dict[str, int]:
    """Bytes that a device sends, by kind of collective; every instruction of the program counts
    once.
    """
    bytes_by_kind = dict.fromkeys(
        ("all-to-all", "all-gather", "all-reduce", "collective-permute", "reduce-scatter"), 0
    )
    for line in text.splitlines():
        if (
            match := re.search(
                r"= (\(?\w+\[.*?) (all-[a-z-]+|collective-permute|reduce-scatter)\(", line
            )
        ) is None:
            continue
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        size = sum(
            int(re.sub(r"\D", "", kind)) // 8 * int(np.prod([int(n) for n in shape.split(",")]))
            for kind, shape in shapes
        )
        sent_fraction = {"all-reduce": 2 * (devices - 1) / devices}.get(
            match[2], (devices - 1) / devices
        )
        bytes_by_kind[match[2]] += round(size * sent_fraction)
    return bytes_by_kind


@pytest.mark.parametrize("name", ["data", "context"])
def test_all_to_all_bytes_match_the_formula(name):
    """Expert counts of every device are gathered once, and a round's rows sent there and back: the
    formula of docs/sharding.md.
    """
    weights, x = random_inputs()
    sizes = MESHES[name]
    (n,) = sizes.values()
    compiled, _ = mix_on_mesh(
        sizes, jnp.asarray(x), jnp.ones(64, bool), cast_weights(weights, jnp.float32)
    )
    bytes_by_kind = sent_bytes(compiled.as_text(), n)
    C = capacity(64 // n, X, n, E // n)
    assert bytes_by_kind.pop("all-to-all") == 2 * (n - 1) * C * D * 4
    assert bytes_by_kind.pop("all-gather") == (n - 1) * E * 4
    assert not any(bytes_by_kind.values())


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(VARIANT_BY_NAME[name], tmp_path_factory.mktemp("g")))


def make_llm(folder, **options) -> LLM:
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        **options,
    )


REDUNDANCY_OPTIONS = {
    "qwen3-moe": {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_redundancy": 4},
    # MXFP4; 6 experts on 4 devices, which are two replicas
    "gpt-oss": {"expert_parallel_size": 2, "data_parallel_size": 2, "expert_redundancy": 2},
    "deepseek-v3": {"expert_parallel_size": 8, "expert_redundancy": 8},
}


@pytest.mark.parametrize("name", thinned(REDUNDANCY_OPTIONS, ["gpt-oss"]))
def test_redundant_experts_keep_outputs_bit_identical(name, golden):
    """Transformers' answers, bit-identical before, during and after experts move, without
    recompilation.
    """
    golden_case = golden(name)
    llm = make_llm(
        golden_case.folder, max_model_len=VARIANT_BY_NAME[name].max_len, **REDUNDANCY_OPTIONS[name]
    )
    check_answers(llm, golden_case, tolerance=1e-4)
    prompts = [
        {"prompt_token_ids": [(i * 7 + j * 3) % 160 for j in range(9 + i)]} for i in range(4)
    ]
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=12, logprobs=0, ignore_eos=True)

    def generate() -> list:
        llm.reset_prefix_cache()
        outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        return [
            (
                out.token_ids,
                [entry[t].logprob for t, entry in zip(out.token_ids, out.logprobs, strict=True)],
            )
            for out in outputs
        ]

    expected = generate()
    initial_devices = {
        layer: layer_loads["devices"] for layer, layer_loads in llm.expert_loads().items()
    }
    report = llm.rebalance_experts()
    runner = llm.engine.runner
    assert report["layers"] > 0 and 1 <= report["after"] < report["before"]
    assert generate() == expected  # one layer moves in each of the first steps
    assert {
        layer: layer_loads["devices"] for layer, layer_loads in llm.expert_loads().items()
    } != initial_devices
    assert not runner.rebalancer.queue and llm.get_metrics()["quire:expert_moves_total"] > 0
    assert generate() == expected
    assert runner.compiles.recompiles == 0
    check_expert_slots(runner)
    llm.sleep(2)  # reloads the weights in the initial placement
    llm.wake_up()
    assert {
        layer: layer_loads["devices"] for layer, layer_loads in llm.expert_loads().items()
    } == initial_devices
    assert generate() == expected


def test_golden_logits_with_redundant_experts(golden):
    """Gemma's experts beside a dense block give the golden logits, with all rows on all devices."""
    golden_case = golden("gemma4-moe")
    config = expert_copies.with_redundancy(
        loader.read_config(golden_case.folder, "float32", VARIANT_BY_NAME["gemma4-moe"].max_len), 4
    )
    mesh = make_mesh(expert=4)
    tokens = golden_case.prompts[0] + golden_case.tokens[0]
    weights = expert_copies.with_first_placement(
        loader.load(golden_case.folder, config, Placement(mesh)), config, mesh
    )
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, weights)
    run = partial(uncached.forward, config=config, axes=device_axes(mesh))
    run = jax.shard_map(run, mesh=mesh, in_specs=(specs, P()), out_specs=P(), check_vma=False)
    logits = np.asarray(jax.jit(run)(weights, jnp.array([tokens])))[0]
    rows = np.array([position for position in POSITIONS if position < len(tokens)])
    np.testing.assert_allclose(logits[rows], golden_case.logits, rtol=0, atol=TOLERANCE)


def check_expert_slots(runner) -> None:
    """All copies of an expert have equal weights and are in the slots that the tables list."""
    for index, experts_S in zip(
        runner.config.expert_layers, runner.expert_loads.held_LS, strict=True
    ):
        moe = jax.device_get(runner.weights.layers[index].moe)
        for stacked in jax.tree.leaves((moe.up_EDGF, moe.down_EFD)):
            for e in range(runner.config.experts):
                slots = np.flatnonzero(experts_S == e)
                assert (stacked[slots] == stacked[slots[0]]).all() and len(slots) == moe.copies_E[e]
                assert set(moe.slots_EC[e, : len(slots)].tolist()) == set(slots.tolist())


def test_move_experts_permutes_overlapping_slots():
    """All slots change at once; moves that overwrite slots which others still read take several
    turns.
    """
    S = 32
    rng = np.random.default_rng(0)
    mesh = make_mesh(expert=4, tensor=2)
    spec = P("expert", None, "tensor")
    stack = rng.standard_normal((S, 3, 4)).astype(np.float32)
    leaf = jax.device_put(stack, NamedSharding(mesh, spec))
    experts_S = np.arange(S)
    max_turns = 0
    for _ in range(4):
        target_S = rng.permutation(S)
        sent_slots, kept_slots, turns = transfers(target_S, experts_S, 4)
        leaf = move_experts(leaf, sent_slots, kept_slots, np.int32(turns), mesh=mesh, places=spec)
        experts_S = target_S
        max_turns = max(max_turns, turns)
        np.testing.assert_array_equal(leaf, stack[experts_S])
    assert 3 <= max_turns < S // 4


def test_periodic_rebalancing_lowers_device_skew(golden, monkeypatch):
    """Rebalancing runs every so many steps if it pays off, and lowers the busiest device's load."""
    golden_case = golden("deepseek-v3")
    monkeypatch.setattr(expert_loads, "EVERY", 4)
    options = REDUNDANCY_OPTIONS["deepseek-v3"]
    llm = make_llm(golden_case.folder, **options, expert_rebalance_steps=20)
    prompt = {"prompt_token_ids": golden_case.prompts[0]}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    balanced_skew = llm.get_metrics()["quire:expert_device_skew"]
    assert llm.get_metrics()["quire:expert_moves_total"] > 0
    assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == expected
    llm.engine.runner.expert_loads.held_LS = expert_loads.first_placements(llm.engine.runner.config)
    initial_skew = llm.get_metrics()["quire:expert_device_skew"]
    assert sum(balanced_skew.values()) < sum(initial_skew.values())
    assert llm.engine.runner.compiles.recompiles == 0


def test_step_has_only_the_expert_collectives(golden):
    """All-to-alls occur only around the experts, and all bytes of a step follow the formulas of
    docs/sharding.md.
    """
    golden_case = golden("deepseek-v3")
    llm = make_llm(golden_case.folder, **REDUNDANCY_OPTIONS["deepseek-v3"])
    runner = llm.engine.runner
    n = 8
    rows = 16
    config = runner.config
    size = next(size for size in runner.compiled if size.rows >= rows)
    text = runner.compiled[size].as_text()
    lines = [line for line in text.splitlines() if re.search(r" all-to-all\(", line)]
    assert len(lines) == 2 * len(config.expert_layers)
    assert all(re.search(r"layer(\d+)/mlp", line) for line in lines)
    layer = config.layers[-1].moe
    Q = -(-size.rows // n)
    C = capacity(Q, layer.top_k, n, layer.slots // n)
    bytes_by_kind = sent_bytes(text, n)
    count = len(config.expert_layers)
    assert bytes_by_kind["all-to-all"] == count * 2 * (n - 1) * C * config.dim * 4
    assert bytes_by_kind["all-gather"] == count * (n - 1) * (layer.slots * 4 + Q * config.dim * 4)
    assert (
        not bytes_by_kind["all-reduce"]
        and not bytes_by_kind["collective-permute"]
        and not bytes_by_kind["reduce-scatter"]
    )


def test_rebalancing_needs_redundant_experts(golden):
    llm = make_llm(golden("qwen3-moe").folder, expert_parallel_size=2)
    with pytest.raises(RequestError, match="expert_redundancy: is 0, so every expert stays"):
        llm.rebalance_experts()
    with pytest.raises(ModelError, match="expert_redundancy is 1;.*could be 2, 4, 6, 8"):
        make_llm(golden("qwen3-moe").folder, expert_parallel_size=2, expert_redundancy=1)
