"""One model over several devices, which a CPU pretends to have: run by test_eight_devices.py, in
its own process.

The golden files say what transformers computed from the same weights.
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

NAMED = {variant.name: variant for variant in VARIANTS}
MESHES = ((2, 2), (4, 1), (1, 3), (2, 4), (2, 1))  # tensor, expert


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return lru_cache(lambda name: Golden(NAMED[name], tmp_path_factory.mktemp("g")))


def meshes(config) -> list[tuple[int, int]]:
    """Those over which a model can be split, one for each number of devices and the mixed ones."""
    return [sizes for sizes in MESHES if splits(config, tensor=sizes[0], expert=sizes[1])]


FEW = ["gemma4-shared", "deepseek-v3", "mamba2"]


@pytest.mark.parametrize("name", thinned(NAMED, FEW))
def test_logits(name, golden):
    made = golden(name)
    config = loader.read_config(made.folder, "float32", NAMED[name].max_len)
    whole = made.prompts[0] + made.tokens[0]
    rows = np.array([position for position in POSITIONS if position < len(whole)])
    tried = 0
    for tensor, expert in meshes(config):
        quantised = any(layer.moe is not None and layer.moe.quant for layer in config.layers)
        if quantised and tensor > 1:
            continue
        mesh = make_mesh(tensor=tensor, expert=expert)
        weights = loader.load(made.folder, config, Placement(mesh))
        dummy = loader.load(made.folder, config, Placement(mesh), load_format="dummy")
        assert [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(dummy)] == [
            (leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(weights)
        ]
        places = jax.tree.map(lambda leaf: leaf.sharding.spec, weights)
        run = partial(uncached.forward, config=local_config(config, mesh), axes=device_axes(mesh))
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(places, P()),
            out_specs=P(None, None, "tensor"),
            check_vma=False,
        )
        logits = np.asarray(jax.jit(run)(weights, jnp.array([whole])))[0]
        np.testing.assert_allclose(
            logits[rows, : config.vocab_size], made.logits, rtol=0, atol=TOLERANCE
        )
        assert (logits[:, config.vocab_size :] == -np.inf).all()
        tried += 1
        if tried == 2:
            break
    assert tried


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
def test_greedy_tokens(name, golden):
    """Alone and in a batch of unequal lengths, in chunks."""
    made = golden(name)
    llm = make(made.folder, max_model_len=NAMED[name].max_len, **ENGINES[name])
    check_answers(llm, made, tolerance=1e-4)
    llm.engine.runner.reset()  # as after a step that failed
    llm.reset_prefix_cache()
    check_answers(llm, made, tolerance=1e-4)
    assert llm.engine.runner.compiles.recompiles == 0


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


ASKED = [
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


MANY = {
    "tensor 2": {"tensor_parallel_size": 2}, "tensor 4": {"tensor_parallel_size": 4},
    "context": {"context_parallel_size": 2}, "stages": {"pipeline_parallel_size": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(MANY, ["tensor 4"]))
def test_every_parameter(name, golden):
    """Biases, bans, penalties and scores, whose rows are split by words, give what one device
    gives.
    """
    folder = golden("qwen3").folder
    prompts = [
        {"prompt_token_ids": [(i * 7 + j * 3) % 160 for j in range(9 + i)]}
        for i in range(len(ASKED))
    ]
    results = [
        make(folder, **options).generate(prompts, ASKED, use_tqdm=False)
        for options in ({}, MANY[name])
    ]
    for alone, together in zip(*results, strict=True):
        assert alone.outputs[0].token_ids == together.outputs[0].token_ids
        pairs = [(alone.outputs[0].logprobs or [], together.outputs[0].logprobs or [])]
        pairs.append(((alone.prompt_logprobs or [])[1:], (together.prompt_logprobs or [])[1:]))
        for entry, other in (both for pair in pairs for both in zip(*pair, strict=True)):
            assert {token: value.rank for token, value in entry.items()} == {
                token: value.rank for token, value in other.items()
            }
            for token, value in entry.items():
                assert value.logprob == pytest.approx(other[token].logprob, abs=2e-5)


SAMPLERS = {"xla": xla, "branchless": branchless}


@pytest.mark.parametrize("name", thinned(SAMPLERS, ["xla"]))
def test_draws_follow_the_distribution(name, monkeypatch):
    """Over a vocabulary that does not divide: chances of the words, cut by top-k and top-p, and of
    no others.
    """
    monkeypatch.setattr(branchless, "on_gpu", lambda: True)
    V = 61
    R = 6000
    mesh = make_mesh(tensor=4)
    logits_V = np.random.default_rng(0).normal(0, 1.5, V).astype(np.float32)
    padded_V = np.pad(logits_V, (0, -V % 4), constant_values=-np.inf)
    for top_k, top_p in ((0, 1.0), (9, 1.0), (0, 0.7), (30, 0.9)):
        inputs = inputs_of(R, top_k, top_p)
        state = sampling.empty_state(1, len(padded_V))
        places = jax.tree.map(lambda leaf: P(*[None] * (leaf.ndim - 1), "tensor"), state).replace(
            logprob_token_ids_BL=P()
        )
        run = jax.shard_map(
            partial(SAMPLERS[name].sample, axis=device_axes(mesh).tensor), mesh=mesh,
            in_specs=(P(None, "tensor"), places, P()), out_specs=P(), check_vma=False,
        )  # fmt: skip
        drawn = jax.jit(run)(jnp.tile(padded_V, (R, 1)), state, inputs)
        tokens = np.asarray(drawn.tokens_R)
        chances = np.exp(logits_V.astype(np.float64))
        chances /= chances.sum()
        order = np.argsort(-chances)
        kept = order[: top_k or V]
        if top_p < 1:
            within = np.cumsum(chances[kept] / chances[kept].sum())
            kept = kept[: int(np.searchsorted(within, top_p)) + 1]
        assert set(tokens) <= set(kept.tolist())
        expected = chances[kept] / chances[kept].sum() * R
        seen = np.bincount(tokens, minlength=V)[kept]
        few = expected < 5
        seen, expected = (
            np.append(x[~few], x[few].sum()) if few.any() else x for x in (seen, expected)
        )
        assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4


def inputs_of(R: int, top_k: int, top_p: float) -> sampling.SamplingInputs:
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


def test_what_a_step_sends(golden):
    """Two sums a layer and one for the words; nothing as large as a weight or the vocabulary is
    gathered.
    """
    llm = make(golden("llama").folder, tensor_parallel_size=4)
    runner = llm.engine.runner
    config = runner.config
    rows = 4
    size = choose(runner.batch_builder.layouts, rows, rows, rows, True)
    text = runner.compiled[size].as_text()
    sums = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-reduce\(", text)
    wide = [shape for _, shape in sums if shape == f"{rows},{config.dim}"]
    assert len(wide) == 2 * len(config.layers) + 1
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather\(", text)
    sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in gathered]
    assert max(sizes) <= 4 * rows * xla.CANDIDATES < rows * config.vocab_size * 4
    assert "all-to-all" not in text
    assert text.count("may-alias") + text.count("must-alias") >= len(jax.tree.leaves(runner.state))


def test_memory_is_divided(golden):
    folder = golden("llama").folder
    one, four = (make(folder, tensor_parallel_size=n).engine.runner for n in (1, 4))
    config = one.config
    whole = held_bytes(loader.load(folder, config, skip_packing=True))
    norms = 4 * config.dim * (2 * len(config.layers) + 1)
    assert {layer.attention.kv_heads for layer in config.layers} == {4}
    assert held_bytes(four.weights) == pytest.approx((whole - norms) / 4 + norms, rel=0.01)
    pages, whole_pages = (
        held_bytes(runner.state.pages) / runner.num_pages[0] for runner in (four, one)
    )
    assert pages == whole_pages / 4
    size = max(four.compiled)
    used = four.compiled[size].memory_analysis()
    assert used.argument_size_in_bytes == pytest.approx(
        held_bytes((four.weights, four.state)), rel=0.05
    )


PAGES = [
    ("mistral", {"tensor_parallel_size": 4}),  # several devices have the same head
    ("llama", {"context_parallel_size": 2, "kv_cache_dtype": "int8"}),
    ("llama", {"tensor_parallel_size": 2}),
    ("llama", {"tensor_parallel_size": 2, "kv_cache_dtype": "int4"}),
    ("llama", {"pipeline_parallel_size": 3}),
    ("llama", {"data_parallel_size": 2, "tensor_parallel_size": 2}),
]


@pytest.mark.parametrize(("name", "many"), nightly_from(1, PAGES))
def test_pages_come_back(name, many, golden):
    """HostCache and sleep move pages that are split, and give back the same."""
    folder = golden(name).folder
    prompts = [{"prompt_token_ids": [(i * 11 + j) % 160 for j in range(70)]} for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    options = {**many, "max_model_len": 96}
    wanted = make(folder, **options).generate(prompts, params, use_tqdm=False)
    small = make(folder, **options | {"kv_cache_host_bytes": 16 << 20})
    for _ in range(2):
        found = small.generate(prompts, params, use_tqdm=False)
        assert [x.outputs[0].token_ids for x in found] == [x.outputs[0].token_ids for x in wanted]
        small.sleep()
        small.wake_up()


def test_replicas_have_folders_of_their_own(golden, tmp_path):
    """What they leave on disk is there at the next start, and is what is computed without it."""
    folder = golden("llama").folder
    prompts = [{"prompt_token_ids": [(i * 11 + j) % 160 for j in range(70)]} for i in range(12)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    wanted = make(folder, max_model_len=96).generate(prompts, params, use_tqdm=False)
    for again in (False, True):
        with make(
            folder,
            data_parallel_size=2,
            max_model_len=96,
            kv_cache_host_bytes=1 << 20,
            kv_cache_disk=str(tmp_path),
        ) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
            assert [x.outputs[0].token_ids for x in found] == [
                x.outputs[0].token_ids for x in wanted
            ]
            assert (sum(x.num_cached_tokens for x in found) == 12 * 64) == again
    assert {path.name for path in tmp_path.iterdir()} == {"replica-0", "replica-1"}
    assert all(any(path.iterdir()) for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "said"),
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
def test_sizes_that_cannot_be(name, options, said, golden):
    with pytest.raises(ModelError, match=said):
        make(golden(name).folder, **options)


@pytest.mark.nightly
def test_rounded_weights(golden):
    """Int8 over two devices: near what one says, as each rounds its own columns of the rows."""
    folder = golden("llama").folder
    prompts = [{"prompt_token_ids": list(range(3, 40))}]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for quantization in ("int8", "int8-weights"):
        one, two = (
            make(folder, quantization=quantization, tensor_parallel_size=n).generate(
                prompts, params, use_tqdm=False
            )[0]
            for n in (1, 2)
        )
        scores = [
            [next(iter(entry.values())).logprob for entry in x.prompt_logprobs[1:]]
            for x in (one, two)
        ]
        assert 0 < np.abs(np.subtract(*scores)).mean() < 0.03 * np.std(scores[0])
