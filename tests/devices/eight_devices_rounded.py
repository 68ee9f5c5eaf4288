"""Rounded experts over several devices, which a CPU pretends to have: run by
test_eight_devices.py.
"""

from collections import Counter
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from quire import LLM, CompletionOutput, SamplingParams
from quire.model import decoder
from quire.model.config import Attention, Layer, ModelConfig, Moe
from quire.model.planning import cost
from quire.model.planning.meshes import Planner, Workload
from quire.model.weights import moe_spec
from quire.ops import native
from quire.ops.quant.stack import Stack
from quire.sharding import local_shards
from quire.sharding.device_axes import ONE_DEVICE
from quire.sharding.mesh import device_axes, make_mesh, sharding
from quire.sharding.spec import random_arrays
from quire.tests.support.cases import nightly_from
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden

pytestmark = pytest.mark.usefixtures("few_programs")
assert len(jax.devices()) == 8

CLOSE = 0.1  # two log-probabilities of a token
NAMED = {variant.name: variant for variant in VARIANTS}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(NAMED[name], tmp_path_factory.mktemp("g")))


def make(made: Golden, quantization: str, **options) -> LLM:
    return LLM(
        model=str(made.folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        quantization=quantization,
        **options,
    )


def asked(llm: LLM, made: Golden) -> list[CompletionOutput]:
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": ids} for ids in (*made.prompts, made.prompts[0][:20])]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    return [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]


def check_tokens(
    found: list[CompletionOutput], expected: list[CompletionOutput], tie: float = 0.0
) -> None:
    """The same tokens with nearly the same scores, up to one where another is as likely but for
    `tie`.
    """
    for ours, theirs in zip(found, expected, strict=True):
        places = zip(ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True)
        for token, other, scored, likely in places:
            assert abs(scored[token].logprob - likely[token].logprob) < CLOSE
            if token != other:
                assert likely[other].logprob - likely[token].logprob < tie
                break


@pytest.fixture(scope="module")
def alone(golden):
    """What one device answers with the products of a mesh, which are XLA's."""

    @lru_cache
    def answers(name: str, quantization: str) -> list[CompletionOutput]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "serves", lambda: False)
            return asked(make(golden(name), quantization), golden(name))

    return answers


MANY = [
    ("deepseek-v3", "int8-weights", {"tensor": 2, "expert": 2, "pipe": 2}),
    ("qwen3-moe", "int8", {"expert": 8}),
    ("qwen3-moe", "int4-32", {"data": 2, "expert": 4}),
    ("qwen3-moe", "fp8-weights", {"tensor": 2, "expert": 2}),
    ("mixtral", "int8-weights", {"expert": 4}),
    ("qwen3-moe", "int8-weights", {"tensor": 2, "expert": 2}),
    ("deepseek-v3", "int8", {"expert": 8}),
    ("gpt-oss-wide", "int8-weights", {"data": 2, "tensor": 2}),
    ("qwen3-moe", "int8-weights-16", {"tensor": 2, "expert": 2}),
    ("qwen3-moe", "fp8-weights-128", {"expert": 4}),
    ("qwen3-moe", "nf4", {"data": 2, "expert": 2}),
]


@pytest.mark.parametrize(("name", "quantization", "sizes"), nightly_from(2, MANY))
def test_greedy_tokens(name, quantization, sizes, golden, alone):
    """Those of one device; and each device holds as many bytes as planned."""
    made = golden(name)
    expected = alone(name, quantization)
    options = {
        f"{axis}_parallel_size".replace("pipe_", "pipeline_"): size for axis, size in sizes.items()
    }
    llm = make(made, quantization, **options)
    # its rows too are rounded
    check_tokens(asked(llm, made), expected, tie=CLOSE if quantization == "int8" else 0)
    runner = llm.engine.runner
    assert runner.compiles.recompiles == 0
    if "pipe" not in sizes:
        planner = Planner(runner.config, cost.DEVICES["cpu"], Workload(4, 64, 32))
        planned = planner.leaf_bytes(
            sizes.get("tensor", 1), sizes.get("expert", 1) * sizes.get("data", 1)
        )
        found = Counter()
        for leaf in jax.tree.leaves(runner.weights):
            for shard in leaf.addressable_shards:
                found[shard.device] += shard.data.nbytes
        assert (
            set(found.values()) == {sum(jax.tree.leaves(planned))}
            and len(found) == runner.mesh.size
        )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("int8", {"expert": 8}), ("int8-weights", {"expert": 8}), ("int4-32", {"expert": 4}),
        ("int8", {"tensor": 2, "expert": 4}), ("int8-weights", {"tensor": 4, "expert": 2}),
        ("fp8-weights", {"tensor": 4, "expert": 2}),
    ],
)  # fmt: skip
def test_experts_by_themselves(name, sizes):
    """What one device computes, but for the order of the last sum where each has whole experts."""
    rng = np.random.default_rng(0)
    moe = Moe(16, 3, 64)
    config = ModelConfig("x", 64, 32, (Layer(Attention(4, 2, 16, 1.0), None, moe),), 64, quant=name)
    specs = moe_spec(config, moe)
    mesh = make_mesh(**sizes)

    def vary(array):  # so that an expert or a column with another's scale shows
        return (
            array * rng.uniform(0.1, 1, array.shape).astype(array.dtype)
            if array.dtype.kind == "f"
            else array
        )

    weights = jax.tree.map(lambda array: vary(np.asarray(array)), random_arrays(specs))
    x_TD = jnp.asarray(rng.standard_normal((40, 32)), jnp.float32)

    def mixed(weights, x_TD, axes=ONE_DEVICE):
        return decoder.mix(moe, weights, x_TD, x_TD, jnp.arange(40) % 7 != 2, axes)[0]

    wanted = np.asarray(jax.jit(mixed)(weights, x_TD), np.float32)
    places = jax.tree.map(lambda spec: sharding(spec, mesh), specs)
    held = jax.tree.map(
        lambda spec, array, place: local_shards.shard(array, spec, mesh, place),
        specs,
        weights,
        places,
    )
    in_specs = (jax.tree.map(lambda place: place.spec, places), P())
    run = jax.shard_map(
        partial(mixed, axes=device_axes(mesh)),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=P(),
        check_vma=False,
    )
    found = np.asarray(jax.jit(run)(held, x_TD), np.float32)
    # With columns: of rows in bytes, each device finds the scale of its own part of what comes from
    # the activation.
    near = 1e-6 if "tensor" not in sizes else 0.03 if name == "int8" else 0.01
    assert np.abs(found - wanted).max() < near * np.abs(wanted).max()


def test_columns_of_rows_in_bytes(golden):
    """Each device rounds its own columns of the rows, so that the scores are near, as those of
    dense weights.
    """
    made = golden("deepseek-v3")
    prompts = [{"prompt_token_ids": made.prompts[0]}]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    one, many = (
        make(made, "int8", tensor_parallel_size=n, expert_parallel_size=n).generate(
            prompts, params, use_tqdm=False
        )[0]
        for n in (1, 2)
    )
    scores = [
        [next(iter(entry.values())).logprob for entry in x.prompt_logprobs[1:]] for x in (one, many)
    ]
    assert 0 < np.median(np.abs(np.subtract(*scores))) < 0.05 * np.std(scores[0])


@pytest.mark.parametrize(("name", "options"), [
    ("qwen3-moe", {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_redundancy": 4}),
    ("deepseek-v3", {"expert_parallel_size": 4, "expert_redundancy": 4}),
])  # fmt: skip
@pytest.mark.parametrize("quantization", ["int8"])
def test_codes_and_scales_move_together(name, options, quantization, golden):
    """Tokens and their scores are the same to the bit before and after experts moved, and every
    copy is one.
    """
    made = golden(name)
    llm = make(made, quantization, **options)
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=12, logprobs=0, ignore_eos=True)
    prompts = [
        {"prompt_token_ids": [(i * 7 + j * 3) % 160 for j in range(9 + i)]} for i in range(4)
    ]

    def scored() -> list:
        llm.reset_prefix_cache()
        outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        return [
            (
                out.token_ids,
                [entry[t].logprob for t, entry in zip(out.token_ids, out.logprobs, strict=True)],
            )
            for out in outputs
        ]

    before = scored()
    runner = llm.engine.runner
    assert llm.rebalance_experts()["layers"] > 0
    assert scored() == before and scored() == before
    assert llm.get_metrics()["quire:expert_moves_total"] > 0 and runner.compiles.recompiles == 0
    for index, held_S in zip(runner.config.expert_layers, runner.expert_loads.held_LS, strict=True):
        moe = jax.device_get(runner.weights.layers[index].moe)
        assert isinstance(moe.up_EDGF, Stack)
        for leaf in jax.tree.leaves((moe.up_EDGF, moe.down_EFD)):
            for e in range(runner.config.experts):
                places = np.flatnonzero(held_S == e)
                assert (leaf[places] == leaf[places[0]]).all()


@pytest.mark.parametrize("options", [
    {"context_parallel_size": 2, "tensor_parallel_size": 2, "shard_weights": True}, {"weights_host_bytes": 1 << 40},
])  # fmt: skip
def test_weights_that_do_not_lie_ready(options, golden, alone):
    expected = alone("qwen3-moe", "int8-weights")
    llm = make(golden("qwen3-moe"), "int8-weights", **options)
    layers = llm.engine.runner.weights.layers
    stacks = [
        leaf
        for layer in layers
        if layer.moe is not None
        for leaf in jax.tree.leaves((layer.moe.up_EDGF, layer.moe.down_EFD))
    ]
    if "shard_weights" in options:
        assert stacks and all("context" in str(leaf.sharding.spec) for leaf in stacks)
    else:
        assert {leaf.sharding.memory_kind for leaf in stacks} == {"pinned_host"}
    check_tokens(asked(llm, golden("qwen3-moe")), expected)
