"""Experts over several devices, which a CPU pretends to have: run by test_eight_devices.py, in its
own process.
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
# What the weights lie like: whole experts over all that share them, columns over tensor.
PLACES = MoeWeights(
    router_DE=P(),
    router_bias_E=P(),
    up_EDGF=P("all", None, None, "tensor"),
    down_EFD=P("all", "tensor"),
    up_bias_EGF=P("all", None, "tensor"),
    down_bias_ED=P("all"),
)
NAMED = {variant.name: variant for variant in VARIANTS}
MESHES = {
    "data": {"data": 8},
    "data and experts": {"data": 2, "expert": 4},
    "context": {"context": 4},
    "two kinds of rows": {"data": 2, "context": 2, "expert": 2},
    "columns too": {"data": 2, "expert": 2, "tensor": 2},
}


@cache
def drawn(skew: float = 0.0) -> tuple[MoeWeights, np.ndarray]:
    """Weights and 64 rows; with a skew nearly all rows want the same experts."""
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


def cast(weights: MoeWeights, dtype) -> MoeWeights:
    small = {name: jnp.asarray(leaf) for name, leaf in vars(weights).items() if leaf is not None}
    return MoeWeights(
        **{k: v if k.startswith("router") else v.astype(dtype) for k, v in small.items()}
    )


def alone(x, live, weights: MoeWeights):
    return np.asarray(
        jax.jit(lambda *args: decoder.mix(MOE, *args)[0])(weights, x, x, live), np.float32
    )


def joined(sizes: dict[str, int], *names: str) -> Axis:
    found = UNSPLIT
    for name in names:
        found = found * Axis(name, sizes.get(name, 1))
    return found


def together(sizes: dict[str, int], x, live, weights: MoeWeights):
    """A compiled mix whose rows are split over data and context, and its result."""
    rows = joined(sizes, "data", "context")
    context = joined(sizes, "context")
    axes = DeviceAxes(
        joined(sizes, "tensor"), joined(sizes, "expert"), context, context, joined(sizes, "data")
    )
    every = axes.experts.name

    def own(place: P) -> P:
        return P(*[every if name == "all" else name for name in place])

    places = jax.tree.map(own, PLACES, is_leaf=lambda leaf: isinstance(leaf, P))
    run = jax.shard_map(
        lambda weights, x, live: decoder.mix(MOE, weights, x, x, live, axes)[0],
        mesh=make_mesh(**sizes),
        in_specs=(places, P(rows.name), P(rows.name)),
        out_specs=P(rows.name),
        check_vma=False,
    )
    compiled = jax.jit(run).lower(weights, x, live).compile()
    put = jax.tree.map(jax.device_put, (weights, x, live), compiled.input_shardings[0])
    return compiled, np.asarray(compiled(*put), np.float32)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(("dtype", "skew"), [(jnp.float32, 0.0), (jnp.bfloat16, 9.0)])
def test_rows_of_their_own(name, dtype, skew):
    """What one device computes, to the bit where each has whole experts: however many rounds it
    takes.
    """
    weights, x = drawn(skew)
    weights = cast(weights, dtype)
    x = jnp.asarray(x, dtype)
    live = jnp.arange(len(x)) % 7 != 2
    wanted = alone(x, live, weights)
    _, found = together(MESHES[name], x, live, weights)
    if "tensor" in MESHES[name]:
        np.testing.assert_allclose(
            found, wanted, rtol=0, atol=2e-6 if dtype == jnp.float32 else 0.1
        )
    else:
        np.testing.assert_array_equal(found, wanted)
    assert not found[2].any() and found[3].any()


def test_a_row_alone_and_in_company():
    """The same bits with no other live row, at another place and another number of rows."""
    weights, x = drawn(1.0)
    weights = cast(weights, jnp.bfloat16)
    x = jnp.asarray(x, jnp.bfloat16)
    whole = together(MESHES["data and experts"], x, jnp.ones(64, bool), weights)[1]
    for at in (0, 37, 63):
        single = together(MESHES["data and experts"], x, jnp.arange(64) == at, weights)[1]
        np.testing.assert_array_equal(single[at], whole[at])
    order = np.random.default_rng(0).permutation(64)[:24]
    few = together(MESHES["data and experts"], x[order], jnp.ones(24, bool), weights)[1]
    np.testing.assert_array_equal(few, whole[order])


def sent(text: str, devices: int) -> dict[str, int]:
    """Bytes that a device sends to others, by kind of collective and by how the program is written:
    once each.
    """
    found = dict.fromkeys(
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
        share = {"all-reduce": 2 * (devices - 1) / devices}.get(match[2], (devices - 1) / devices)
        found[match[2]] += round(size * share)
    return found


@pytest.mark.parametrize("name", ["data", "context"])
def test_what_is_sent(name):
    """The counts of every device once, and the rows of a round there and back: the formula of
    docs/sharding.md.
    """
    weights, x = drawn()
    sizes = MESHES[name]
    (n,) = sizes.values()
    compiled, _ = together(sizes, jnp.asarray(x), jnp.ones(64, bool), cast(weights, jnp.float32))
    found = sent(compiled.as_text(), n)
    C = capacity(64 // n, X, n, E // n)
    assert found.pop("all-to-all") == 2 * (n - 1) * C * D * 4
    assert found.pop("all-gather") == (n - 1) * E * 4
    assert not any(found.values())


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(NAMED[name], tmp_path_factory.mktemp("g")))


def make(folder, **options) -> LLM:
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        **options,
    )


SPARE = {
    "qwen3-moe": {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_redundancy": 4},
    # MXFP4, and 6 experts on 4 devices, which are two replicas
    "gpt-oss": {"expert_parallel_size": 2, "data_parallel_size": 2, "expert_redundancy": 2},
    "deepseek-v3": {"expert_parallel_size": 8, "expert_redundancy": 8},
}


@pytest.mark.parametrize("name", thinned(SPARE, ["gpt-oss"]))
def test_copies_of_experts(name, golden):
    """What transformers answered, to the bit before, while and after experts move; nothing is
    compiled for it.
    """
    made = golden(name)
    llm = make(made.folder, max_model_len=NAMED[name].max_len, **SPARE[name])
    check_answers(llm, made, tolerance=1e-4)
    prompts = [
        {"prompt_token_ids": [(i * 7 + j * 3) % 160 for j in range(9 + i)]} for i in range(4)
    ]
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=12, logprobs=0, ignore_eos=True)

    def asked() -> list:
        llm.reset_prefix_cache()
        outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        return [
            (
                out.token_ids,
                [entry[t].logprob for t, entry in zip(out.token_ids, out.logprobs, strict=True)],
            )
            for out in outputs
        ]

    before = asked()
    held = {layer: own["devices"] for layer, own in llm.expert_loads().items()}
    said = llm.rebalance_experts()
    runner = llm.engine.runner
    assert said["layers"] > 0 and 1 <= said["after"] < said["before"]
    assert asked() == before  # a layer moved in each of the first steps
    assert {layer: own["devices"] for layer, own in llm.expert_loads().items()} != held
    assert not runner.rebalancer.queue and llm.get_metrics()["quire:expert_moves_total"] > 0
    assert asked() == before
    assert runner.compiles.recompiles == 0
    check_places(runner)
    llm.sleep(2)  # the weights are read again, and lie as at first
    llm.wake_up()
    assert {layer: own["devices"] for layer, own in llm.expert_loads().items()} == held
    assert asked() == before


def test_logits_with_copies(golden):
    """Gemma's experts beside a dense block: the golden file's logits, with all rows on all
    devices.
    """
    made = golden("gemma4-moe")
    config = expert_copies.with_redundancy(
        loader.read_config(made.folder, "float32", NAMED["gemma4-moe"].max_len), 4
    )
    mesh = make_mesh(expert=4)
    whole = made.prompts[0] + made.tokens[0]
    weights = expert_copies.with_first_placement(
        loader.load(made.folder, config, Placement(mesh)), config, mesh
    )
    places = jax.tree.map(lambda leaf: leaf.sharding.spec, weights)
    run = partial(uncached.forward, config=config, axes=device_axes(mesh))
    run = jax.shard_map(run, mesh=mesh, in_specs=(places, P()), out_specs=P(), check_vma=False)
    logits = np.asarray(jax.jit(run)(weights, jnp.array([whole])))[0]
    rows = np.array([position for position in POSITIONS if position < len(whole)])
    np.testing.assert_allclose(logits[rows], made.logits, rtol=0, atol=TOLERANCE)


def check_places(runner) -> None:
    """Copies are the same weights, and are where the tables say."""
    for index, held_S in zip(runner.config.expert_layers, runner.expert_loads.held_LS, strict=True):
        moe = jax.device_get(runner.weights.layers[index].moe)
        for whole in jax.tree.leaves((moe.up_EDGF, moe.down_EFD)):
            for e in range(runner.config.experts):
                places = np.flatnonzero(held_S == e)
                assert (whole[places] == whole[places[0]]).all() and len(places) == moe.copies_E[e]
                assert set(moe.slots_EC[e, : len(places)].tolist()) == set(places.tolist())


def test_every_move_at_once():
    """Places that change all together, some in turns, though each overwrites what another still
    wants.
    """
    S = 32
    rng = np.random.default_rng(0)
    mesh = make_mesh(expert=4, tensor=2)
    spec = P("expert", None, "tensor")
    stack = rng.standard_normal((S, 3, 4)).astype(np.float32)
    leaf = jax.device_put(stack, NamedSharding(mesh, spec))
    held = np.arange(S)
    most = 0
    for _ in range(4):
        wanted = rng.permutation(S)
        sent, kept, turns = transfers(wanted, held, 4)
        leaf = move_experts(leaf, sent, kept, np.int32(turns), mesh=mesh, places=spec)
        held = wanted
        most = max(most, turns)
        np.testing.assert_array_equal(leaf, stack[held])
    assert 3 <= most < S // 4


def test_balance_comes_by_itself(golden, monkeypatch):
    """Every so many steps, where it is worth it; the busiest device then has less to do."""
    made = golden("deepseek-v3")
    monkeypatch.setattr(expert_loads, "EVERY", 4)
    options = SPARE["deepseek-v3"]
    llm = make(made.folder, **options, expert_rebalance_steps=20)
    prompt = {"prompt_token_ids": made.prompts[0]}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    first = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    then = llm.get_metrics()["quire:expert_device_skew"]
    assert llm.get_metrics()["quire:expert_moves_total"] > 0
    assert llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids == first
    llm.engine.runner.expert_loads.held_LS = expert_loads.first_placements(llm.engine.runner.config)
    as_first = llm.get_metrics()["quire:expert_device_skew"]
    assert sum(then.values()) < sum(as_first.values())
    assert llm.engine.runner.compiles.recompiles == 0


def test_all_to_alls_are_round_the_experts_only(golden):
    """And of the whole step's bytes each is in a formula of docs/sharding.md."""
    made = golden("deepseek-v3")
    llm = make(made.folder, **SPARE["deepseek-v3"])
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
    found = sent(text, n)
    count = len(config.expert_layers)
    assert found["all-to-all"] == count * 2 * (n - 1) * C * config.dim * 4
    assert found["all-gather"] == count * (n - 1) * (layer.slots * 4 + Q * config.dim * 4)
    assert (
        not found["all-reduce"] and not found["collective-permute"] and not found["reduce-scatter"]
    )


def test_experts_that_stay(golden):
    llm = make(golden("qwen3-moe").folder, expert_parallel_size=2)
    with pytest.raises(RequestError, match="expert_redundancy: is 0, so every expert stays"):
        llm.rebalance_experts()
    with pytest.raises(ModelError, match="expert_redundancy is 1;.*could be 2, 4, 6, 8"):
        make(golden("qwen3-moe").folder, expert_parallel_size=2, expert_redundancy=1)
