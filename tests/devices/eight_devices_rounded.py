"""Quantized experts over eight simulated CPU devices; run by test_eight_devices.py."""

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

LOGPROB_TOLERANCE = 0.1  # maximum difference of a token's two logprobs
VARIANT_BY_NAME = {variant.name: variant for variant in VARIANTS}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(VARIANT_BY_NAME[name], tmp_path_factory.mktemp("g")))


def make_llm(golden_case: Golden, quantization: str, **options) -> LLM:
    return LLM(
        model=str(golden_case.folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        quantization=quantization,
        **options,
    )


def generate(llm: LLM, golden_case: Golden) -> list[CompletionOutput]:
    llm.reset_prefix_cache()
    prompts = [
        {"prompt_token_ids": ids} for ids in (*golden_case.prompts, golden_case.prompts[0][:20])
    ]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    return [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]


def check_tokens(
    outputs: list[CompletionOutput], expected: list[CompletionOutput], tie: float = 0.0
) -> None:
    """Equal tokens with nearly equal scores, up to the first difference, where the scores of both
    tokens differ by less than `tie`.
    """
    for output, expected_output in zip(outputs, expected, strict=True):
        positions = zip(
            output.token_ids,
            expected_output.token_ids,
            output.logprobs,
            expected_output.logprobs,
            strict=True,
        )
        for token, expected_token, logprobs, expected_logprobs in positions:
            assert (
                abs(logprobs[token].logprob - expected_logprobs[token].logprob) < LOGPROB_TOLERANCE
            )
            if token != expected_token:
                assert (
                    expected_logprobs[expected_token].logprob - expected_logprobs[token].logprob
                    < tie
                )
                break


@pytest.fixture(scope="module")
def single_device_outputs(golden):
    """The outputs of one device that uses XLA's matrix products, as a mesh does."""

    @lru_cache
    def compute_outputs(name: str, quantization: str) -> list[CompletionOutput]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "serves", lambda: False)
            return generate(make_llm(golden(name), quantization), golden(name))

    return compute_outputs


MESHES = [
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


@pytest.mark.parametrize(("name", "quantization", "sizes"), nightly_from(2, MESHES))
def test_quantized_greedy_tokens_and_memory(
    name, quantization, sizes, golden, single_device_outputs
):
    """Tokens equal those of one device, and each device holds the planned number of bytes."""
    golden_case = golden(name)
    expected = single_device_outputs(name, quantization)
    options = {
        f"{axis}_parallel_size".replace("pipe_", "pipeline_"): size for axis, size in sizes.items()
    }
    llm = make_llm(golden_case, quantization, **options)
    # int8 quantizes the activations too
    check_tokens(
        generate(llm, golden_case), expected, tie=LOGPROB_TOLERANCE if quantization == "int8" else 0
    )
    runner = llm.engine.runner
    assert runner.compiles.recompiles == 0
    if "pipe" not in sizes:
        planner = Planner(runner.config, cost.DEVICES["cpu"], Workload(4, 64, 32))
        planned = planner.leaf_bytes(
            sizes.get("tensor", 1), sizes.get("expert", 1) * sizes.get("data", 1)
        )
        bytes_by_device = Counter()
        for leaf in jax.tree.leaves(runner.weights):
            for shard in leaf.addressable_shards:
                bytes_by_device[shard.device] += shard.data.nbytes
        assert (
            set(bytes_by_device.values()) == {sum(jax.tree.leaves(planned))}
            and len(bytes_by_device) == runner.mesh.size
        )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("int8", {"expert": 8}), ("int8-weights", {"expert": 8}), ("int4-32", {"expert": 4}),
        ("int8", {"tensor": 2, "expert": 4}), ("int8-weights", {"tensor": 4, "expert": 2}),
        ("fp8-weights", {"tensor": 4, "expert": 2}),
    ],
)  # fmt: skip
def test_quantized_expert_mix(name, sizes):
    """Equal to one device, except for the order of the final sum where each device has whole
    experts.
    """
    rng = np.random.default_rng(0)
    moe = Moe(16, 3, 64)
    config = ModelConfig("x", 64, 32, (Layer(Attention(4, 2, 16, 1.0), None, moe),), 64, quant=name)
    specs = moe_spec(config, moe)
    mesh = make_mesh(**sizes)

    def vary_scales(array):  # reveals an expert or column with another's scale
        return (
            array * rng.uniform(0.1, 1, array.shape).astype(array.dtype)
            if array.dtype.kind == "f"
            else array
        )

    weights = jax.tree.map(lambda array: vary_scales(np.asarray(array)), random_arrays(specs))
    x_TD = jnp.asarray(rng.standard_normal((40, 32)), jnp.float32)

    def mix_experts(weights, x_TD, axes=ONE_DEVICE):
        return decoder.mix(moe, weights, x_TD, x_TD, jnp.arange(40) % 7 != 2, axes)[0]

    expected = np.asarray(jax.jit(mix_experts)(weights, x_TD), np.float32)
    shardings = jax.tree.map(lambda spec: sharding(spec, mesh), specs)
    sharded_weights = jax.tree.map(
        lambda spec, array, sharding_: local_shards.shard(array, spec, mesh, sharding_),
        specs,
        weights,
        shardings,
    )
    in_specs = (jax.tree.map(lambda sharding_: sharding_.spec, shardings), P())
    run = jax.shard_map(
        partial(mix_experts, axes=device_axes(mesh)),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=P(),
        check_vma=False,
    )
    outputs = np.asarray(jax.jit(run)(sharded_weights, x_TD), np.float32)
    # With split columns and int8 activations, each device scales its own part of the activations.
    tolerance = 1e-6 if "tensor" not in sizes else 0.03 if name == "int8" else 0.01
    assert np.abs(outputs - expected).max() < tolerance * np.abs(expected).max()


def test_int8_scores_are_near_one_device(golden):
    """Each device quantizes its own columns of the activations, so scores are near those of one
    device.
    """
    golden_case = golden("deepseek-v3")
    prompts = [{"prompt_token_ids": golden_case.prompts[0]}]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    single, sharded = (
        make_llm(golden_case, "int8", tensor_parallel_size=n, expert_parallel_size=n).generate(
            prompts, params, use_tqdm=False
        )[0]
        for n in (1, 2)
    )
    scores = [
        [next(iter(entry.values())).logprob for entry in x.prompt_logprobs[1:]]
        for x in (single, sharded)
    ]
    assert 0 < np.median(np.abs(np.subtract(*scores))) < 0.05 * np.std(scores[0])


@pytest.mark.parametrize(("name", "options"), [
    ("qwen3-moe", {"tensor_parallel_size": 2, "expert_parallel_size": 2, "expert_redundancy": 4}),
    ("deepseek-v3", {"expert_parallel_size": 4, "expert_redundancy": 4}),
])  # fmt: skip
@pytest.mark.parametrize("quantization", ["int8"])
def test_quantized_experts_move_with_their_scales(name, options, quantization, golden):
    """Tokens and scores are bit-identical before and after experts move, and all copies are
    equal.
    """
    golden_case = golden(name)
    llm = make_llm(golden_case, quantization, **options)
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=12, logprobs=0, ignore_eos=True)
    prompts = [
        {"prompt_token_ids": [(i * 7 + j * 3) % 160 for j in range(9 + i)]} for i in range(4)
    ]

    def generate_scores() -> list:
        llm.reset_prefix_cache()
        outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        return [
            (
                out.token_ids,
                [entry[t].logprob for t, entry in zip(out.token_ids, out.logprobs, strict=True)],
            )
            for out in outputs
        ]

    expected = generate_scores()
    runner = llm.engine.runner
    assert llm.rebalance_experts()["layers"] > 0
    assert generate_scores() == expected and generate_scores() == expected
    assert llm.get_metrics()["quire:expert_moves_total"] > 0 and runner.compiles.recompiles == 0
    for index, experts_S in zip(
        runner.config.expert_layers, runner.expert_loads.held_LS, strict=True
    ):
        moe = jax.device_get(runner.weights.layers[index].moe)
        assert isinstance(moe.up_EDGF, Stack)
        for leaf in jax.tree.leaves((moe.up_EDGF, moe.down_EFD)):
            for e in range(runner.config.experts):
                slots = np.flatnonzero(experts_S == e)
                assert (leaf[slots] == leaf[slots[0]]).all()


@pytest.mark.parametrize("options", [
    {"context_parallel_size": 2, "tensor_parallel_size": 2, "shard_weights": True}, {"weights_host_bytes": 1 << 40},
])  # fmt: skip
def test_context_sharded_and_host_weights(options, golden, single_device_outputs):
    expected = single_device_outputs("qwen3-moe", "int8-weights")
    llm = make_llm(golden("qwen3-moe"), "int8-weights", **options)
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
    check_tokens(generate(llm, golden("qwen3-moe")), expected)
