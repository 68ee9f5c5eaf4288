"""One model over eight simulated CPU devices; run by test_eight_devices.py in a process of its own.

Golden files have what transformers computed from the same weights.
"""

import re
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy import stats

from quire import LLM, SamplingParams
from quire.model.checkpoint import loader
from quire.model.checkpoint.placement import Placement
from quire.model.config import ModelError
from quire.model.partition import local_config, splits
from quire.ops import sampling
from quire.ops.sampling import branchless, xla
from quire.serving.device.step_shape import choose
from quire.serving.engine.cache_size import held_bytes
from quire.sharding.mesh import device_axes, make_mesh
from quire.tests.support import uncached
from quire.tests.support.cases import nightly_from, thinned
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.folder import POSITIONS
from quire.tests.support.golden.recorded import TOLERANCE, Golden, check_answers

pytestmark = pytest.mark.usefixtures("few_programs")
assert len(jax.devices()) == 8

VARIANT_BY_NAME = {variant.name: variant for variant in VARIANTS}
MESHES = ((2, 2), (4, 1), (1, 3), (2, 4), (2, 1))  # (tensor, expert)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(VARIANT_BY_NAME[name], tmp_path_factory.mktemp("g")))


def supported_meshes(config) -> list[tuple[int, int]]:
    """The meshes over which the model can be split."""
    return [sizes for sizes in MESHES if splits(config, tensor=sizes[0], expert=sizes[1])]


QUICK_FAMILIES = ["gemma4-shared", "deepseek-v3", "mamba2"]


@pytest.mark.parametrize("name", thinned(VARIANT_BY_NAME, QUICK_FAMILIES))
def test_golden_logits_over_meshes(name, golden):
    golden_case = golden(name)
    config = loader.read_config(golden_case.folder, "float32", VARIANT_BY_NAME[name].max_len)
    tokens = golden_case.prompts[0] + golden_case.tokens[0]
    rows = np.array([position for position in POSITIONS if position < len(tokens)])
    num_meshes = 0
    for tensor, expert in supported_meshes(config):
        quantised = any(layer.moe is not None and layer.moe.quant for layer in config.layers)
        if quantised and tensor > 1:
            continue
        mesh = make_mesh(tensor=tensor, expert=expert)
        weights = loader.load(golden_case.folder, config, Placement(mesh))
        dummy = loader.load(golden_case.folder, config, Placement(mesh), load_format="dummy")
        assert [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(dummy)] == [
            (leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(weights)
        ]
        specs = jax.tree.map(lambda leaf: leaf.sharding.spec, weights)
        run = partial(uncached.forward, config=local_config(config, mesh), axes=device_axes(mesh))
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(specs, P()),
            out_specs=P(None, None, "tensor"),
            check_vma=False,
        )
        logits = np.asarray(jax.jit(run)(weights, jnp.array([tokens])))[0]
        np.testing.assert_allclose(
            logits[rows, : config.vocab_size], golden_case.logits, rtol=0, atol=TOLERANCE
        )
        assert (logits[:, config.vocab_size :] == -np.inf).all()
        num_meshes += 1
        if num_meshes == 2:
            break
    assert num_meshes


ENGINES = {
    "llama": {"tensor_parallel_size": 4},
    "gemma4-shared": {"tensor_parallel_size": 2},
    "qwen3-moe": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    "gpt-oss": {"expert_parallel_size": 3},
    "deepseek-v3": {"tensor_parallel_size": 2, "expert_parallel_size": 4},
    "granite-hybrid": {"tensor_parallel_size": 4},
    "nemotron-h": {"tensor_parallel_size": 2},
    "mamba2": {"tensor_parallel_size": 2},
    "phimoe": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
}


@pytest.mark.parametrize("name", thinned(ENGINES, ["gemma4-shared", "deepseek-v3"]))
def test_golden_greedy_tokens(name, golden):
    """Alone, and in chunked batches of unequal lengths."""
    golden_case = golden(name)
    llm = make_llm(golden_case.folder, max_model_len=VARIANT_BY_NAME[name].max_len, **ENGINES[name])
    check_answers(llm, golden_case, tolerance=1e-4)
    llm.engine.runner.reset()  # as after a failed step
    llm.reset_prefix_cache()
    check_answers(llm, golden_case, tolerance=1e-4)
    assert llm.engine.runner.compiles.recompiles == 0


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


SAMPLING = [
    SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(
        temperature=0, max_tokens=12, repetition_penalty=1.7, frequency_penalty=0.5, ignore_eos=True
    ),
    SamplingParams(
        temperature=0,
        max_tokens=12,
        logit_bias={3: 50.0, 130: 49.0},
        presence_penalty=1.5,
        logprobs=0,
    ),
    SamplingParams(
        temperature=0, max_tokens=12, allowed_token_ids=[5, 85, 159], bad_words=[], min_tokens=12
    ),
    SamplingParams(temperature=1.3, top_k=1, max_tokens=8, seed=3, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=1e-4, min_p=0.01, max_tokens=8, seed=4, ignore_eos=True),
    SamplingParams(
        temperature=0, max_tokens=4, logprob_token_ids=[0, 79, 80, 159], ignore_eos=True
    ),
]


MESH_OPTIONS = {
    "tensor 2": {"tensor_parallel_size": 2}, "tensor 4": {"tensor_parallel_size": 4},
    "context": {"context_parallel_size": 2}, "stages": {"pipeline_parallel_size": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(MESH_OPTIONS, ["tensor 4"]))
def test_sampling_parameters_equal_one_device(name, golden):
    """Biases, bans, penalties and logprobs, whose rows are split over the vocabulary, equal those
    of one device.
    """
    folder = golden("qwen3").folder
    prompts = [
        {"prompt_token_ids": [(i * 7 + j * 3) % 160 for j in range(9 + i)]}
        for i in range(len(SAMPLING))
    ]
    results = [
        make_llm(folder, **options).generate(prompts, SAMPLING, use_tqdm=False)
        for options in ({}, MESH_OPTIONS[name])
    ]
    for single_device, sharded in zip(*results, strict=True):
        assert single_device.outputs[0].token_ids == sharded.outputs[0].token_ids
        pairs = [(single_device.outputs[0].logprobs or [], sharded.outputs[0].logprobs or [])]
        pairs.append(
            ((single_device.prompt_logprobs or [])[1:], (sharded.prompt_logprobs or [])[1:])
        )
        for entry, expected_entry in (
            entries for pair in pairs for entries in zip(*pair, strict=True)
        ):
            assert {token: value.rank for token, value in entry.items()} == {
                token: value.rank for token, value in expected_entry.items()
            }
            for token, value in entry.items():
                assert value.logprob == pytest.approx(expected_entry[token].logprob, abs=2e-5)


SAMPLERS = {"xla": xla, "branchless": branchless}


@pytest.mark.parametrize("name", thinned(SAMPLERS, ["xla"]))
def test_sampled_tokens_follow_the_distribution(name, monkeypatch):
    """Over an indivisible vocabulary: frequencies match the probabilities after top-k and top-p,
    and no other token is sampled.
    """
    monkeypatch.setattr(branchless, "on_gpu", lambda: True)
    V = 61
    R = 6000
    mesh = make_mesh(tensor=4)
    logits_V = np.random.default_rng(0).normal(0, 1.5, V).astype(np.float32)
    padded_V = np.pad(logits_V, (0, -V % 4), constant_values=-np.inf)
    for top_k, top_p in ((0, 1.0), (9, 1.0), (0, 0.7), (30, 0.9)):
        inputs = sampling_inputs(R, top_k, top_p)
        state = sampling.empty_state(1, len(padded_V))
        specs = jax.tree.map(lambda leaf: P(*[None] * (leaf.ndim - 1), "tensor"), state).replace(
            logprob_token_ids_BL=P()
        )
        run = jax.shard_map(
            partial(SAMPLERS[name].sample, axis=device_axes(mesh).tensor), mesh=mesh,
            in_specs=(P(None, "tensor"), specs, P()), out_specs=P(), check_vma=False,
        )  # fmt: skip
        sampled = jax.jit(run)(jnp.tile(padded_V, (R, 1)), state, inputs)
        tokens = np.asarray(sampled.tokens_R)
        probabilities = np.exp(logits_V.astype(np.float64))
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities)
        candidates = order[: top_k or V]
        if top_p < 1:
            cumulative = np.cumsum(probabilities[candidates] / probabilities[candidates].sum())
            candidates = candidates[: int(np.searchsorted(cumulative, top_p)) + 1]
        assert set(tokens) <= set(candidates.tolist())
        expected = probabilities[candidates] / probabilities[candidates].sum() * R
        observed = np.bincount(tokens, minlength=V)[candidates]
        is_rare = expected < 5
        observed, expected = (
            np.append(x[~is_rare], x[is_rare].sum()) if is_rare.any() else x
            for x in (observed, expected)
        )
        assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-4


def sampling_inputs(R: int, top_k: int, top_p: float) -> sampling.SamplingInputs:
    def full(value, dtype=jnp.float32):
        return jnp.full(R, value, dtype)

    seeds = np.random.default_rng(1).integers(0, 1 << 32, (R, 2), np.uint32)
    return sampling.SamplingInputs(
        slots_R=full(0, jnp.int32),
        bias_rows_R=full(0, jnp.int32),
        drafted_RJ=jnp.full((R, 1), -1),
        positions_R=full(5, jnp.int32),
        seeds_R2=jnp.asarray(seeds),
        temperature_R=full(1),
        top_k_R=full(top_k, jnp.int32),
        top_p_R=full(top_p),
        min_p_R=full(0),
        repetition_penalty_R=full(1),
        presence_penalty_R=full(0),
        frequency_penalty_R=full(0),
        ban_stop_R=full(0, bool),
        ban_RX=jnp.full((R, 2), -1),
        targets_R=full(-1, jnp.int32),
        biased_R=full(0, bool),
        wants_logprobs_R=full(1, bool),
    )


def test_collectives_of_a_decode_step(golden):
    """Two all-reduces per layer and one for the embedding; nothing as large as a weight or the
    logits is gathered.
    """
    llm = make_llm(golden("llama").folder, tensor_parallel_size=4)
    runner = llm.engine.runner
    config = runner.config
    rows = 4
    size = choose(runner.batch_builder.layouts, rows, rows, rows, True)
    text = runner.compiled[size].as_text()
    all_reduces = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-reduce\(", text)
    row_sums = [shape for _, shape in all_reduces if shape == f"{rows},{config.dim}"]
    assert len(row_sums) == 2 * len(config.layers) + 1
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)
    sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in gathered]
    assert max(sizes) <= 4 * rows * xla.CANDIDATES < rows * config.vocab_size * 4
    assert "all-to-all" not in text
    assert text.count("may-alias") + text.count("must-alias") >= len(jax.tree.leaves(runner.state))


def test_weights_and_pages_are_sharded(golden):
    folder = golden("llama").folder
    single, sharded = (make_llm(folder, tensor_parallel_size=n).engine.runner for n in (1, 4))
    config = single.config
    single_device_bytes = held_bytes(loader.load(folder, config, skip_packing=True))
    norms = 4 * config.dim * (2 * len(config.layers) + 1)
    assert {layer.attention.kv_heads for layer in config.layers} == {4}
    assert held_bytes(sharded.weights) == pytest.approx(
        (single_device_bytes - norms) / 4 + norms, rel=0.01
    )
    pages, whole_pages = (
        held_bytes(runner.state.pages) / runner.num_pages[0] for runner in (sharded, single)
    )
    assert pages == whole_pages / 4
    size = max(sharded.compiled)
    memory = sharded.compiled[size].memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(
        held_bytes((sharded.weights, sharded.state)), rel=0.05
    )


PAGE_CASES = [
    ("mistral", {"tensor_parallel_size": 4}),  # several devices share a head
    ("llama", {"context_parallel_size": 2, "kv_cache_dtype": "int8"}),
    ("llama", {"tensor_parallel_size": 2}),
    ("llama", {"tensor_parallel_size": 2, "kv_cache_dtype": "int4"}),
    ("llama", {"pipeline_parallel_size": 3}),
    ("llama", {"data_parallel_size": 2, "tensor_parallel_size": 2}),
]


@pytest.mark.parametrize(("name", "mesh_options"), nightly_from(1, PAGE_CASES))
def test_sharded_pages_survive_offload_and_sleep(name, mesh_options, golden):
    """The host cache and sleep move sharded pages and restore the same contents."""
    folder = golden(name).folder
    prompts = [{"prompt_token_ids": [(i * 11 + j) % 160 for j in range(70)]} for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    options = {**mesh_options, "max_model_len": 96}
    expected = make_llm(folder, **options).generate(prompts, params, use_tqdm=False)
    offloading_llm = make_llm(folder, **options | {"kv_cache_host_bytes": 16 << 20})
    for _ in range(2):
        outputs = offloading_llm.generate(prompts, params, use_tqdm=False)
        assert [x.outputs[0].token_ids for x in outputs] == [
            x.outputs[0].token_ids for x in expected
        ]
        offloading_llm.sleep()
        offloading_llm.wake_up()


def test_replicas_have_separate_disk_caches(golden, tmp_path):
    """Pages on disk are found after a restart and give the outputs computed without them."""
    folder = golden("llama").folder
    prompts = [{"prompt_token_ids": [(i * 11 + j) % 160 for j in range(70)]} for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = make_llm(folder, max_model_len=96).generate(prompts, params, use_tqdm=False)
    for is_restarted in (False, True):
        with make_llm(
            folder,
            data_parallel_size=2,
            max_model_len=96,
            kv_cache_host_bytes=1 << 20,
            kv_cache_disk=str(tmp_path),
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [x.outputs[0].token_ids for x in outputs] == [
                x.outputs[0].token_ids for x in expected
            ]
            assert (sum(x.num_cached_tokens for x in outputs) == 12 * 64) == is_restarted
    assert {path.name for path in tmp_path.iterdir()} == {"replica-0", "replica-1"}
    assert all(any(path.iterdir()) for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"tensor_parallel_size": 3}, "tensor_parallel_size is 3.*it can be 1, 2, 4"),
        ("llama", {"expert_parallel_size": 2}, "expert_parallel_size is 2.*it can be 1"),
        ("qwen3-moe", {"expert_parallel_size": 3}, "expert_parallel_size is 3.*it can be 1, 2"),
        (
            "qwen3-moe",
            {"expert_parallel_size": 8, "tensor_parallel_size": 4},
            "32 devices; there are 8",
        ),
        ("llama", {"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be"),
        ("llama", {"tensor_parallel_size": 2, "quantization": "int4"}, "use int8"),
        (
            "llama",
            {"tensor_parallel_size": 2, "quantization": "fp8-weights-128"},
            "groups of 128 it would cut",
        ),
        ("gpt-oss", {"tensor_parallel_size": 2}, "use expert_parallel_size"),
    ],
)
def test_unsupported_mesh_sizes_are_rejected(name, options, message, golden):
    with pytest.raises(ModelError, match=message):
        make_llm(golden(name).folder, **options)


@pytest.mark.nightly
def test_int8_scores_are_near_one_device(golden):
    """Scores are near, not equal, since each device quantizes its own columns of the
    activations.
    """
    folder = golden("llama").folder
    prompts = [{"prompt_token_ids": list(range(3, 40))}]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for quantization in ("int8", "int8-weights"):
        single, sharded = (
            make_llm(folder, quantization=quantization, tensor_parallel_size=n).generate(
                prompts, params, use_tqdm=False
            )[0]
            for n in (1, 2)
        )
        scores = [
            [next(iter(entry.values())).logprob for entry in x.prompt_logprobs[1:]]
            for x in (single, sharded)
        ]
        assert 0 < np.abs(np.subtract(*scores)).mean() < 0.03 * np.std(scores[0])
