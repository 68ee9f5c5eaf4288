"""Every family through the engine over every mesh axis that applies; run by test_eight_devices.py
in a process of its own.

Golden files have what transformers computed from the same weights.
"""

import json
import math
import re
from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.model.checkpoint import loader
from quire.model.checkpoint.placement import Placement
from quire.model.config import ModelError
from quire.model.families import llama
from quire.model.partition import can_stage, splits
from quire.model.planning.traffic import traffic
from quire.model.weights import abstract
from quire.ops.sampling import MAX_WANTED
from quire.ops.sampling.xla import CANDIDATES
from quire.serving.device.pipeline import Pipeline
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.batch_builder import BatchBuilder
from quire.serving.engine.cache_size import held_bytes
from quire.serving.engine.snapshot import take_snapshot
from quire.sharding.mesh import make_mesh
from quire.sharding.spec import nbytes
from quire.tests.support.cases import FACTOR, nightly_from, thinned
from quire.tests.support.golden.families import KINDS, VARIANTS
from quire.tests.support.golden.folder import POSITIONS
from quire.tests.support.golden.recorded import TOLERANCE, Golden, check_answers

pytestmark = pytest.mark.usefixtures("few_programs")
assert len(jax.devices()) == 8

VARIANT_BY_NAME = {variant.name: variant for variant in VARIANTS}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(VARIANT_BY_NAME[name], tmp_path_factory.mktemp("g")))


def make_llm(folder, **options) -> LLM:
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        **{"max_num_seqs": 4, "max_num_batched_tokens": 33, **options},
    )


def check_scores(llm: LLM, golden_case: Golden) -> None:
    """Compare the logprobs of a prompt's tokens with the golden logits of transformers."""
    tokens = golden_case.prompts[0] + golden_case.tokens[0]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    completion_logprobs = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[
        0
    ].prompt_logprobs
    rows = [position for position in POSITIONS if position < len(tokens)]
    for row, logits in zip(rows, golden_case.logits.astype(np.float64), strict=True):
        if row + 1 < len(tokens):
            expected_logprob = (
                logits[tokens[row + 1]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            )
            assert completion_logprobs[row + 1][tokens[row + 1]].logprob == pytest.approx(
                expected_logprob, abs=2 * TOLERANCE
            )


GENERATIVE = [name for name in VARIANT_BY_NAME if VARIANT_BY_NAME[name].new_tokens]
CASES = (
    [(name, number, axis) for number, name in enumerate(GENERATIVE) for axis in ("pipe", "data")]
    if FACTOR > 1  # with QUIRE_CASES=10, which takes long
    else nightly_from(
        1,
        [
            (name, number, ("pipe", "data")[number % 2])
            for number, name in enumerate(reversed(KINDS))
        ],
    )
)


def mesh_sizes(config, number: int, axis: str) -> dict[str, int]:
    """Sizes of a mesh of at most eight devices: stages or replicas, page positions, and heads or
    experts.
    """
    sizes = {"context_parallel_size": 2} if splits(config, context=2) else {}
    if axis == "pipe" and can_stage(config, 2):
        sizes["pipeline_parallel_size"] = 2
    if axis == "data" and splits(config, data=2, context=2):
        sizes["data_parallel_size"] = 2
    other_axes = {"context": 2, "data": sizes.get("data_parallel_size", 1)}
    names = [name for name in ("tensor", "expert") if splits(config, **other_axes, **{name: 2})]
    if names:
        sizes[f"{names[number // 2 % len(names)]}_parallel_size"] = 2
    return sizes


@pytest.mark.parametrize(("name", "number", "axis"), CASES)
def test_family_over_all_axes(name, number, axis, golden):
    """Tokens and scores of one device, from a mesh of all axes that the family supports."""
    golden_case = golden(name)
    variant = VARIANT_BY_NAME[name]
    config = loader.read_config(golden_case.folder, "float32", variant.max_len)
    llm = make_llm(
        golden_case.folder, max_model_len=variant.max_len, **mesh_sizes(config, number, axis)
    )
    check_answers(llm, golden_case, tolerance=1e-4)
    check_scores(llm, golden_case)
    assert llm.engine.runner.compiles.recompiles == 0


EXTRA_MESHES = [
    ("gemma3-text", {"pipeline_parallel_size": 3, "tensor_parallel_size": 2}),
    ("llama", {"context_parallel_size": 8}),
    (
        "deepseek-v3",
        {"context_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel_size": 2},
    ),
    ("gemma4-shared", {"context_parallel_size": 4}),
    ("llama", {"data_parallel_size": 2, "pipeline_parallel_size": 3}),
    ("deepseek-v3", {"data_parallel_size": 4, "tensor_parallel_size": 2}),
    ("gpt-oss", {"data_parallel_size": 2, "expert_parallel_size": 3}),
]


@pytest.mark.parametrize(("name", "sizes"), nightly_from(1, EXTRA_MESHES))
def test_families_over_larger_meshes(name, sizes, golden):
    golden_case = golden(name)
    llm = make_llm(golden_case.folder, max_model_len=VARIANT_BY_NAME[name].max_len, **sizes)
    check_answers(llm, golden_case, tolerance=1e-4)
    check_scores(llm, golden_case)


MESHES = [
    ("deepseek-v3", {"tensor": 2, "expert": 2, "context": 2}), ("llama", {"data": 4, "tensor": 2}),
    ("llama", {"tensor": 2, "context": 2}), ("olmo2", {"tensor": 2}),
    ("gemma4-shared", {"tensor": 2, "context": 2}), ("gpt-oss", {"context": 2}),
    ("qwen3-moe", {"data": 2, "expert": 2, "tensor": 2}),
    ("deepseek-v3", {"data": 4, "context": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), nightly_from(1, MESHES))
def test_collective_bytes_match_the_formula(name, sizes, golden):
    """The compiled programs' collectives equal those of the traffic formula, to the byte."""
    folder = golden(name).folder
    config = loader.read_config(folder, "float32", 64)
    mesh = make_mesh(**sizes)
    shape = StepShape.largest(4, 32, 16)
    weights = loader.load(folder, config, Placement(mesh))
    pipeline = Pipeline(config, mesh)
    state = pipeline.abstract_state((8,) * len(config.windows), 16, 4)
    builder = BatchBuilder(shape.with_cache(len(config.windows), 16, 64, mesh.shape["data"]))
    for size, layout in builder.layouts.items():
        (lowered_step,) = pipeline.lower(weights, state, layout)
        collective_bytes, sampling_bytes = collectives_by_kind(lowered_step.compile().as_text())
        is_prefill = size.rows > size.seqs
        expected_bytes = Counter()
        for transfer in traffic(config, sizes, size.rows, is_prefill):
            expected_bytes[transfer.kind] += transfer.nbytes
        if is_prefill and sizes.get("context", 1) > 1:  # the sampled rows
            expected_bytes["all-reduce"] += 4 * size.samples * config.dim
        assert (
            Counter({kind: sum(collective_bytes[kind]) for kind in collective_bytes})
            == expected_bytes
        )
        max_candidates = max(sizes.get("tensor", 1) * CANDIDATES, 1 + MAX_WANTED)
        assert all(
            n <= 4 * size.samples * max_candidates
            for kind in sampling_bytes
            for n in sampling_bytes[kind]
        )


def collectives_by_kind(text: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Bytes of the collectives' results in a compiled program, by kind: (of the model, of
    sampling).
    """
    model = defaultdict(list)
    sampling = defaultdict(list)
    for line in text.splitlines():
        match = re.search(
            r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(", line
        )
        if match is not None:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            assert {dtype for dtype, _ in shapes} <= {"f32", "s32"}
            nbytes = sum(
                4 * math.prod(int(n) for n in shape.split(",") if n) for _, shape in shapes
            )
            (sampling if "/sample/" in line else model)[match[2]].append(nbytes)
    return model, sampling


SHARDED_OR_HOST_WEIGHTS = [
    ("llama", {"context_parallel_size": 4, "shard_weights": True}),
    ("gemma4-shared", {"weights_host_bytes": 1 << 40}),
    ("qwen3-moe", {"context_parallel_size": 2, "tensor_parallel_size": 2, "shard_weights": True}),
    ("gpt-oss", {"weights_host_bytes": 1, "context_parallel_size": 2, "shard_weights": True}),
    (
        "llama",
        {
            "weights_host_bytes": 1 << 40,
            "pipeline_parallel_size": 3,
            "quantization": "int8-weights",
        },
    ),
]


@pytest.mark.parametrize(("name", "options"), nightly_from(1, SHARDED_OR_HOST_WEIGHTS))
def test_context_sharded_and_host_weights(name, options, golden):
    """Weights sharded over the context axis or kept in host memory, fetched layer by layer, give
    the same outputs.
    """
    golden_case = golden(name)
    llm = make_llm(golden_case.folder, max_model_len=VARIANT_BY_NAME[name].max_len, **options)
    runner = llm.engine.runner
    layers = jax.tree.leaves(runner.weights.layers)
    if "weights_host_bytes" in options:
        memory_kinds = {
            leaf.sharding.memory_kind for leaf in jax.tree.leaves(runner.weights.layers[0])
        }
        assert memory_kinds == {"pinned_host"}
    if "shard_weights" in options:
        context_sharded = [leaf.nbytes for leaf in layers if "context" in str(leaf.sharding.spec)]
        assert sum(context_sharded) > 0.95 * sum(leaf.nbytes for leaf in layers)
    if "quantization" not in options:
        check_answers(llm, golden_case, tolerance=1e-4)
        check_scores(llm, golden_case)
    else:
        single_device_llm = make_llm(
            golden_case.folder,
            max_model_len=VARIANT_BY_NAME[name].max_len,
            quantization=options["quantization"],
        )
        prompts = [{"prompt_token_ids": golden_case.prompts[0]}]
        params = SamplingParams(temperature=0, max_tokens=12)
        token_ids = [
            engine.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids
            for engine in (llm, single_device_llm)
        ]
        assert token_ids[0] == token_ids[1]


def test_sharded_weights_need_memory_of_two_layers(golden):
    """Besides its arguments a step holds two layers of weights: the current one and the next."""
    folder = golden("llama").folder
    hf = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 12}
    config = replace(llama.config(hf, 64), dtype="float32")
    mesh = make_mesh(context=4)
    memory = []
    for context_sharded in (False, True):
        placement = Placement(mesh, context_sharded)

        def abstract_array(location, spec):
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=location.sharding(spec))

        specs = abstract(config)
        weights = jax.tree.map(abstract_array, placement.location_per_leaf(config, specs), specs)
        pipeline = Pipeline(config, mesh)
        layout = min(
            BatchBuilder(StepShape.largest(4, 32, 16).with_cache(1, 16, 64)).layouts.items()
        )[1]
        (lowered,) = pipeline.lower(weights, pipeline.abstract_state((8,), 16, 4), layout)
        memory.append(lowered.compile().memory_analysis())
    layer = nbytes(abstract(config).layers[0])
    replicated_bytes, sharded_bytes = (analysis.argument_size_in_bytes for analysis in memory)
    assert replicated_bytes - sharded_bytes == pytest.approx(12 * layer * 3 / 4, rel=0.01)
    assert memory[1].temp_size_in_bytes - memory[0].temp_size_in_bytes < 3 * layer


SAMPLING = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(
        temperature=0.8, seed=5, max_tokens=12, presence_penalty=0.5, logprobs=0, ignore_eos=True
    ),
    SamplingParams(
        temperature=0.9, seed=7, max_tokens=9, n=3, min_tokens=4, logit_bias={5: 2.0}, logprobs=0
    ),
    SamplingParams(
        temperature=0, max_tokens=10, allowed_token_ids=[3, 4, 5, 6], logprobs=0, ignore_eos=True
    ),
]


REPLICAS = [{"data_parallel_size": 2, "expert_parallel_size": 2}, {"data_parallel_size": 4}]


@pytest.mark.parametrize("sizes", thinned(REPLICAS, REPLICAS[:1]), ids=str)
def test_data_parallel_outputs(sizes, golden):
    """More requests than slots, of all kinds: tokens equal those of one device and of each request
    alone.

    Scores may differ in their last bits, since XLA's matrix products depend on the number of rows;
    the engine reports that.
    """
    golden_case = golden("qwen3-moe")
    options = {
        "max_model_len": VARIANT_BY_NAME["qwen3-moe"].max_len,
        "enable_prefix_caching": False,
    }
    prompts = [
        {"prompt_token_ids": [(i // 2 * 11 + j) % 160 for j in range(12 + i)]} for i in range(20)
    ]
    params = [SAMPLING[i % len(SAMPLING)] for i in range(20)]
    llm = make_llm(golden_case.folder, **options, **sizes)
    engine = llm.engine
    num_steps_by_replicas = Counter()
    launch = engine.runner.launch

    def record_launch(plan, moves):
        num_steps_by_replicas.update({len({item.seq.replica for item in plan.items}): 1})
        return launch(plan, moves)

    engine.runner.launch = record_launch
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert num_steps_by_replicas[sizes["data_parallel_size"]] > 10
    engine.scheduler.check()
    assert not take_snapshot(engine).invariant
    single_outputs = [
        llm.generate([prompts[i]], params[i], use_tqdm=False)[0] for i in range(0, 20, 3)
    ]
    assert engine.runner.compiles.recompiles == 0
    for output, expected_output in zip(single_outputs, outputs[::3], strict=True):
        for completion, expected_completion in zip(
            output.outputs, expected_output.outputs, strict=True
        ):
            assert completion.token_ids == expected_completion.token_ids
            np.testing.assert_allclose(
                completion_logprobs(completion),
                completion_logprobs(expected_completion),
                rtol=0,
                atol=2e-5,
            )
    expected = make_llm(golden_case.folder, **options).generate(prompts, params, use_tqdm=False)
    for output, expected_output in zip(outputs, expected, strict=True):
        assert [completion.token_ids for completion in output.outputs] == [
            completion.token_ids for completion in expected_output.outputs
        ]
        for completion, expected_completion in zip(
            output.outputs, expected_output.outputs, strict=True
        ):
            assert completion.cumulative_logprob == pytest.approx(
                expected_completion.cumulative_logprob, abs=1e-4
            )


def completion_logprobs(output) -> list[list[float]]:
    return [[entry.logprob for entry in step.values()] for step in output.logprobs]


def test_data_parallel_memory(golden):
    """Replicas share the experts, but have their own slots and pages; the page budget is per
    device.
    """
    folder = golden("deepseek-v3").folder
    single, replicas = (
        make_llm(folder, max_model_len=64, **sizes).engine.runner
        for sizes in ({}, {"data_parallel_size": 4, "tensor_parallel_size": 2})
    )
    for index in single.config.expert_layers:
        weights_of_all, weights_of_replicas = (
            [getattr(weights.layers[index].moe, field) for field in ("up_EDGF", "down_EFD")]
            for weights in (abstract(single.config), replicas.weights)
        )
        weights_of_replicas = sum(
            math.prod(x.sharding.shard_shape(x.shape)) for x in weights_of_replicas
        )
        assert weights_of_replicas * 8 == sum(x.size for x in weights_of_all)
    assert replicas.num_pages == single.num_pages
    pages, whole_pages = (held_bytes(runner.state.pages) for runner in (replicas, single))
    assert pages == whole_pages
    text = replicas.compiled[max(replicas.compiled)].as_text()
    assert "all-to-all" in text
    assert text.count("may-alias") + text.count("must-alias") >= len(
        jax.tree.leaves(replicas.state)
    )


def test_pipeline_stages_are_kept_busy(golden):
    """As many steps are in flight as there are stages, of disjoint sequences."""
    golden_case = golden("llama")
    llm = make_llm(golden_case.folder, max_model_len=64, pipeline_parallel_size=3, max_num_seqs=6)
    engine = llm.engine
    launches = []
    launch = engine.runner.launch

    def record_launch(plan, moves):
        launches.append(
            [{item.seq for item in plan.items}, [len(x.plan.items) for x in engine.in_flight]]
        )
        assert not any(
            item.seq in {scheduled.seq for scheduled in x.plan.items if scheduled.num_samples}
            for x in engine.in_flight
            for item in plan.items
        )
        return launch(plan, moves)

    engine.runner.launch = record_launch
    prompts = [{"prompt_token_ids": [(i * 7 + j) % 160 for j in range(5)]} for i in range(6)]
    llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False
    )
    steady_launches = launches[12:-12]
    assert len(steady_launches) > 40
    assert all(
        len(sequences) == 2 and in_flight_sizes == [2, 2]
        for sequences, in_flight_sizes in steady_launches
    )


def test_unsupported_mesh_sizes_are_rejected(golden):
    with pytest.raises(ModelError, match=r"pipeline_parallel_size is 4.*3 layers.*can be 1, 2, 3"):
        make_llm(golden("llama").folder, pipeline_parallel_size=4)
    with pytest.raises(
        ModelError,
        match=r"data_parallel_size is 3, and with expert_parallel_size 2.* experts.*be 1, 2",
    ):
        make_llm(golden("qwen3-moe").folder, data_parallel_size=3, expert_parallel_size=2)
    with pytest.raises(
        ModelError,
        match=r"context_parallel_size is 4, and with expert_parallel_size 1.* it can be 1, 2",
    ):
        make_llm(golden("gpt-oss").folder, context_parallel_size=4)
    with pytest.raises(
        ModelError,
        match="shard_weights parts the weights over the devices of context_parallel_size",
    ):
        make_llm(golden("llama").folder, shard_weights=True)
    with pytest.raises(
        ModelError, match=r"context_parallel_size is 3.*16 positions.*can be 1, 2, 4, 8, 16"
    ):
        make_llm(golden("llama").folder, context_parallel_size=3)
    with pytest.raises(
        ModelError,
        match=r"context_parallel_size is 2, and this model selects the positions.* only be 1",
    ):
        make_llm(golden("glm-moe-dsa").folder, context_parallel_size=2)
    with pytest.raises(
        ModelError, match=r"pipeline_parallel_size is 2.* cache or picks it reads.*; it can be 1$"
    ):
        make_llm(golden("glm-moe-dsa").folder, pipeline_parallel_size=2)
