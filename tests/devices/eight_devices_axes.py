"""Every family through the engine over every axis that applies: run by test_eight_devices.py, in
its own process.

The golden files say what transformers computed from the same weights.
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

NAMED = {variant.name: variant for variant in VARIANTS}


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(NAMED[name], tmp_path_factory.mktemp("g")))


def make(folder, **options) -> LLM:
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        **{"max_num_seqs": 4, "max_num_batched_tokens": 33, **options},
    )


def check_scores(llm: LLM, made: Golden) -> None:
    """The log-probabilities of a prompt's tokens are those of the logits that transformers
    computed.
    """
    whole = made.prompts[0] + made.tokens[0]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    scores = llm.generate([{"prompt_token_ids": whole}], params, use_tqdm=False)[0].prompt_logprobs
    rows = [position for position in POSITIONS if position < len(whole)]
    for row, logits in zip(rows, made.logits.astype(np.float64), strict=True):
        if row + 1 < len(whole):
            wanted = (
                logits[whole[row + 1]] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            )
            assert scores[row + 1][whole[row + 1]].logprob == pytest.approx(
                wanted, abs=2 * TOLERANCE
            )


EVERY = [name for name in NAMED if NAMED[name].new_tokens]
CASES = (
    [(name, number, axis) for number, name in enumerate(EVERY) for axis in ("pipe", "data")]
    if FACTOR > 1  # QUIRE_CASES=10; it takes a while
    else nightly_from(
        1,
        [
            (name, number, ("pipe", "data")[number % 2])
            for number, name in enumerate(reversed(KINDS))
        ],
    )
)


def over(config, number: int, axis: str) -> dict[str, int]:
    """A mesh of at most eight devices over stages or replicas, the positions of pages, and heads or
    experts.
    """
    found = {"context_parallel_size": 2} if splits(config, context=2) else {}
    if axis == "pipe" and can_stage(config, 2):
        found["pipeline_parallel_size"] = 2
    if axis == "data" and splits(config, data=2, context=2):
        found["data_parallel_size"] = 2
    apart = {"context": 2, "data": found.get("data_parallel_size", 1)}
    names = [name for name in ("tensor", "expert") if splits(config, **apart, **{name: 2})]
    if names:
        found[f"{names[number // 2 % len(names)]}_parallel_size"] = 2
    return found


@pytest.mark.parametrize(("name", "number", "axis"), CASES)
def test_families(name, number, axis, golden):
    """The answers and scores of one device, from a mesh of all the axes that a family can be split
    over.
    """
    made = golden(name)
    variant = NAMED[name]
    config = loader.read_config(made.folder, "float32", variant.max_len)
    llm = make(made.folder, max_model_len=variant.max_len, **over(config, number, axis))
    check_answers(llm, made, tolerance=1e-4)
    check_scores(llm, made)
    assert llm.engine.runner.compiles.recompiles == 0


ALONE = [
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


@pytest.mark.parametrize(("name", "sizes"), nightly_from(1, ALONE))
def test_one_axis_more(name, sizes, golden):
    made = golden(name)
    llm = make(made.folder, max_model_len=NAMED[name].max_len, **sizes)
    check_answers(llm, made, tolerance=1e-4)
    check_scores(llm, made)


MESHES = [
    ("deepseek-v3", {"tensor": 2, "expert": 2, "context": 2}), ("llama", {"data": 4, "tensor": 2}),
    ("llama", {"tensor": 2, "context": 2}), ("olmo2", {"tensor": 2}),
    ("gemma4-shared", {"tensor": 2, "context": 2}), ("gpt-oss", {"context": 2}),
    ("qwen3-moe", {"data": 2, "expert": 2, "tensor": 2}),
    ("deepseek-v3", {"data": 4, "context": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), nightly_from(1, MESHES))
def test_what_is_sent(name, sizes, golden):
    """The collectives of the compiled programs are those of the formula, to the byte."""
    folder = golden(name).folder
    config = loader.read_config(folder, "float32", 64)
    mesh = make_mesh(**sizes)
    shape = StepShape.largest(4, 32, 16)
    weights = loader.load(folder, config, Placement(mesh))
    pipeline = Pipeline(config, mesh)
    state = pipeline.abstract_state((8,) * len(config.windows), 16, 4)
    builder = BatchBuilder(shape.with_cache(len(config.windows), 16, 64, mesh.shape["data"]))
    for size, layout in builder.layouts.items():
        (lowered,) = pipeline.lower(weights, state, layout)
        found, drawn = collectives(lowered.compile().as_text())
        prompts = size.rows > size.seqs
        wanted = Counter()
        for one in traffic(config, sizes, size.rows, prompts):
            wanted[one.kind] += one.nbytes
        if prompts and sizes.get("context", 1) > 1:  # the rows that are sampled
            wanted["all-reduce"] += 4 * size.samples * config.dim
        assert Counter({kind: sum(found[kind]) for kind in found}) == wanted
        most = max(sizes.get("tensor", 1) * CANDIDATES, 1 + MAX_WANTED)
        assert all(n <= 4 * size.samples * most for kind in drawn for n in drawn[kind])


def collectives(text: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Those of the model, and those of sampling, in a compiled program: bytes of their results by
    kind.
    """
    model = defaultdict(list)
    sampling = defaultdict(list)
    for line in text.splitlines():
        made = re.search(
            r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(", line
        )
        if made is not None:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", made[1])
            assert {dtype for dtype, _ in shapes} <= {"f32", "s32"}
            nbytes = sum(
                4 * math.prod(int(n) for n in shape.split(",") if n) for _, shape in shapes
            )
            (sampling if "/sample/" in line else model)[made[2]].append(nbytes)
    return model, sampling


APART = [
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


@pytest.mark.parametrize(("name", "options"), nightly_from(1, APART))
def test_weights_that_do_not_lie_ready(name, options, golden):
    """Parted over devices, or in the host's memory: brought layer by layer, they give the same."""
    made = golden(name)
    llm = make(made.folder, max_model_len=NAMED[name].max_len, **options)
    runner = llm.engine.runner
    layers = jax.tree.leaves(runner.weights.layers)
    if "weights_host_bytes" in options:
        held = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(runner.weights.layers[0])}
        assert held == {"pinned_host"}
    if "shard_weights" in options:
        context_sharded = [leaf.nbytes for leaf in layers if "context" in str(leaf.sharding.spec)]
        assert sum(context_sharded) > 0.95 * sum(leaf.nbytes for leaf in layers)
    if "quantization" not in options:
        check_answers(llm, made, tolerance=1e-4)
        check_scores(llm, made)
    else:
        whole = make(
            made.folder, max_model_len=NAMED[name].max_len, quantization=options["quantization"]
        )
        prompts = [{"prompt_token_ids": made.prompts[0]}]
        params = SamplingParams(temperature=0, max_tokens=12)
        found = [
            one.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids
            for one in (llm, whole)
        ]
        assert found[0] == found[1]


def test_one_layer_at_a_time(golden):
    """A step has room for two layers beside what it keeps: the one that it computes with, and the
    next.
    """
    folder = golden("llama").folder
    hf = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 12}
    config = replace(llama.config(hf, 64), dtype="float32")
    mesh = make_mesh(context=4)
    spent = []
    for context_sharded in (False, True):
        placement = Placement(mesh, context_sharded)

        def struct(location, spec):
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=location.sharding(spec))

        specs = abstract(config)
        weights = jax.tree.map(struct, placement.location_per_leaf(config, specs), specs)
        pipeline = Pipeline(config, mesh)
        layout = min(
            BatchBuilder(StepShape.largest(4, 32, 16).with_cache(1, 16, 64)).layouts.items()
        )[1]
        (lowered,) = pipeline.lower(weights, pipeline.abstract_state((8,), 16, 4), layout)
        spent.append(lowered.compile().memory_analysis())
    layer = nbytes(abstract(config).layers[0])
    kept, parts = (used.argument_size_in_bytes for used in spent)
    assert kept - parts == pytest.approx(12 * layer * 3 / 4, rel=0.01)
    assert spent[1].temp_size_in_bytes - spent[0].temp_size_in_bytes < 3 * layer


ASKED = [
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
def test_replicas_in_one_program(sizes, golden):
    """More requests than slots, of all kinds: the tokens of one device, and of each request without
    company.

    Scores may differ in their last bits, as XLA's products do for other numbers of rows, and the
    engine says so.
    """
    made = golden("qwen3-moe")
    options = {"max_model_len": NAMED["qwen3-moe"].max_len, "enable_prefix_caching": False}
    prompts = [
        {"prompt_token_ids": [(i // 2 * 11 + j) % 160 for j in range(12 + i)]} for i in range(20)
    ]
    params = [ASKED[i % len(ASKED)] for i in range(20)]
    llm = make(made.folder, **options, **sizes)
    engine = llm.engine
    used = Counter()
    launch = engine.runner.launch

    def watched(plan, moves):
        used.update({len({item.seq.replica for item in plan.items}): 1})
        return launch(plan, moves)

    engine.runner.launch = watched
    found = llm.generate(prompts, params, use_tqdm=False)
    assert used[sizes["data_parallel_size"]] > 10
    engine.scheduler.check()
    assert not take_snapshot(engine).invariant
    single = [llm.generate([prompts[i]], params[i], use_tqdm=False)[0] for i in range(0, 20, 3)]
    assert engine.runner.compiles.recompiles == 0
    for one, other in zip(single, found[::3], strict=True):
        for x, y in zip(one.outputs, other.outputs, strict=True):
            assert x.token_ids == y.token_ids
            np.testing.assert_allclose(scores(x), scores(y), rtol=0, atol=2e-5)
    wanted = make(made.folder, **options).generate(prompts, params, use_tqdm=False)
    for one, other in zip(found, wanted, strict=True):
        assert [x.token_ids for x in one.outputs] == [x.token_ids for x in other.outputs]
        for x, y in zip(one.outputs, other.outputs, strict=True):
            assert x.cumulative_logprob == pytest.approx(y.cumulative_logprob, abs=1e-4)


def scores(output) -> list[list[float]]:
    return [[entry.logprob for entry in step.values()] for step in output.logprobs]


def test_memory_of_replicas(golden):
    """Experts are shared by all, and slots and pages are nobody else's; what a device may use is
    for its own pages.
    """
    folder = golden("deepseek-v3").folder
    one, four = (
        make(folder, max_model_len=64, **sizes).engine.runner
        for sizes in ({}, {"data_parallel_size": 4, "tensor_parallel_size": 2})
    )
    for index in one.config.expert_layers:
        whole, part = (
            [getattr(weights.layers[index].moe, field) for field in ("up_EDGF", "down_EFD")]
            for weights in (abstract(one.config), four.weights)
        )
        part = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in part)
        assert part * 8 == sum(x.size for x in whole)
    assert four.num_pages == one.num_pages
    pages, whole_pages = (held_bytes(runner.state.pages) for runner in (four, one))
    assert pages == whole_pages
    text = four.compiled[max(four.compiled)].as_text()
    assert "all-to-all" in text
    assert text.count("may-alias") + text.count("must-alias") >= len(jax.tree.leaves(four.state))


def test_stages_are_kept_busy(golden):
    """As many steps are under way as there are stages, of sequences that are not the same."""
    made = golden("llama")
    llm = make(made.folder, max_model_len=64, pipeline_parallel_size=3, max_num_seqs=6)
    engine = llm.engine
    seen = []
    launch = engine.runner.launch

    def watched(plan, moves):
        seen.append(
            [{item.seq for item in plan.items}, [len(x.plan.items) for x in engine.in_flight]]
        )
        assert not any(
            item.seq in {one.seq for one in x.plan.items if one.draws}
            for x in engine.in_flight
            for item in plan.items
        )
        return launch(plan, moves)

    engine.runner.launch = watched
    prompts = [{"prompt_token_ids": [(i * 7 + j) % 160 for j in range(5)]} for i in range(6)]
    llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False
    )
    steady = seen[12:-12]
    assert len(steady) > 40
    assert all(len(own) == 2 and flying == [2, 2] for own, flying in steady)


def test_refused(golden):
    with pytest.raises(ModelError, match=r"pipeline_parallel_size is 4.*3 layers.*can be 1, 2, 3"):
        make(golden("llama").folder, pipeline_parallel_size=4)
    with pytest.raises(
        ModelError,
        match=r"data_parallel_size is 3, and with expert_parallel_size 2.* experts.*be 1, 2",
    ):
        make(golden("qwen3-moe").folder, data_parallel_size=3, expert_parallel_size=2)
    with pytest.raises(
        ModelError,
        match=r"context_parallel_size is 4, and with expert_parallel_size 1.* it can be 1, 2",
    ):
        make(golden("gpt-oss").folder, context_parallel_size=4)
    with pytest.raises(
        ModelError,
        match="shard_weights parts the weights over the devices of context_parallel_size",
    ):
        make(golden("llama").folder, shard_weights=True)
    with pytest.raises(
        ModelError, match=r"context_parallel_size is 3.*16 positions.*can be 1, 2, 4, 8, 16"
    ):
        make(golden("llama").folder, context_parallel_size=3)
    with pytest.raises(
        ModelError,
        match=r"context_parallel_size is 2, and this model selects the positions.* only be 1",
    ):
        make(golden("glm-moe-dsa").folder, context_parallel_size=2)
    with pytest.raises(
        ModelError, match=r"pipeline_parallel_size is 2.* cache or picks it reads.*; it can be 1$"
    ):
        make(golden("glm-moe-dsa").folder, pipeline_parallel_size=2)
