"""Speculative decoding over several devices leaves answers unchanged; run by test_eight_devices.py
in a process of its own.
"""

import random
from functools import partial
from itertools import product

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from quire import LLM, SamplingParams
from quire.model import draft_heads
from quire.model.checkpoint import hub, loader
from quire.model.config import ModelError
from quire.serving.engine.snapshot import take_snapshot
from quire.serving.speculative.on_device.drafting import fit_vocab
from quire.sharding.mesh import device_axes, make_mesh
from quire.tests.support.cases import cases, nightly_from, thinned
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden
from quire.tests.support.mixes import mix, serve
from quire.tests.support.recorded_drafts import Recorded

pytestmark = pytest.mark.usefixtures("few_programs")
assert len(jax.devices()) == 8

VARIANT_BY_NAME = {variant.name: variant for variant in VARIANTS}
SIZES = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "kv_cache_memory_bytes": 2 << 20,
}
NGRAM = {"method": "ngram"}
SUFFIX = {"method": "suffix"}
DRAFT_MODEL = {"method": "draft_model", "model": "quill-draft"}
SELF_LAYERS = {"method": "self", "num_layers": 4}
SELF_INT8 = {"method": "self", "num_layers": 6, "quantization": "int8-weights"}
EAGLE, MEDUSA = [{"method": kind, "model": f"quill-{kind}"} for kind in ("eagle", "medusa")]
MESHES = {
    "tensor": ({"tensor": 2}, [NGRAM, DRAFT_MODEL, SELF_INT8, MEDUSA]),
    "replicas": ({"data": 2}, [SUFFIX, DRAFT_MODEL, EAGLE]),
    "context": ({"context": 2}, [NGRAM, DRAFT_MODEL, SELF_LAYERS, MEDUSA]),
    "stages": ({"pipeline": 2}, [SUFFIX, DRAFT_MODEL]),
    "three axes": ({"tensor": 2, "data": 2, "context": 2}, [DRAFT_MODEL]),
    "stages of replicas": ({"tensor": 2, "data": 2, "pipeline": 2}, [DRAFT_MODEL]),
}


def parallel_sizes(mesh: dict[str, int]) -> dict[str, int]:
    return {f"{axis}_parallel_size": size for axis, size in mesh.items()}


@pytest.mark.parametrize("name", thinned(MESHES, ["three axes"]))
def test_drafting_keeps_answers_of_plain_decoding(name, tmp_path):
    """Random requests, run twice, with few pages and host offload: equal tokens, and bit-identical
    scores.

    Over `context` the rows of larger steps are split, and XLA's products give other last bits for
    fewer rows.
    """
    mesh, drafters = MESHES[name]
    rng = random.Random(4)
    options = SIZES | parallel_sizes(mesh) | {"max_model_len": 256}
    plain_llm = LLM(**options)
    mixes = [mix(rng, plain_llm.engine.config.vocab_size) for _ in range(cases(5, least=1))]
    repeated_prompt = plain_llm.engine.tokenizer.encode(
        "The lamp is in the sand. The boat is in the lake. " * 3
    )
    mixes[0][0]["again"] = (
        repeated_prompt,
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    )
    mixes[0][1]["again"] = 0
    expected = [serve(plain_llm.engine, *requests_and_arrivals) for requests_and_arrivals in mixes]
    plain_llm.close()
    for number, drafter in enumerate(drafters):
        cache_options = (
            {"kv_cache_host_bytes": 1 << 20, "kv_cache_memory_bytes": 1 << 20} if number % 2 else {}
        )
        llm = LLM(**options | cache_options, speculative_config=drafter | {"adapts": False})
        for (requests, arrivals), expected_answers in [*zip(mixes, expected, strict=True)] * 2:
            check_answers(
                serve(llm.engine, requests, arrivals), expected_answers, exact="context" not in mesh
            )
        assert llm.engine.speculator.counts.accepted[0] > 0
        assert llm.engine.runner.compiles.recompiles == 0
        llm.close()


def check_answers(outputs: dict[str, list], expected: dict[str, list], exact: bool) -> None:
    """The answers of `mixes.serve` are equal, or with `exact` false have nearly equal scores."""
    if exact:
        assert outputs == expected
        return
    assert {name: [answer[:4] for answer in answers] for name, answers in outputs.items()} == {
        name: [answer[:4] for answer in answers] for name, answers in expected.items()
    }
    for name, answers in expected.items():
        for actual_answer, expected_answer in zip(outputs[name], answers, strict=True):
            for entry, entries in zip(
                actual_answer[4] + actual_answer[5],
                expected_answer[4] + expected_answer[5],
                strict=True,
            ):
                np.testing.assert_allclose(np.array(entry), np.array(entries), rtol=0, atol=5e-5)


EXPERTS = [
    ("qwen3-moe", {"expert": 2, "data": 2}, {"quantization": "int8-weights"}, {}),
    (
        "qwen3-moe",
        {"expert": 2, "tensor": 2},
        {"num_layers": 2},
        {"expert_redundancy": 2, "expert_rebalance_steps": 5},
    ),
    ("deepseek-v3", {"expert": 2, "context": 2}, {"quantization": "int8-weights"}, {}),
    ("llama", {"context": 2, "tensor": 2}, {"num_layers": 2}, {"shard_weights": True}),
    ("llama", {"tensor": 2}, {"num_layers": 2}, {"weights_host_bytes": 1 << 40}),
    ("gpt-oss", {}, {"num_layers": 2}, {"weights_host_bytes": 1 << 40}),
]


@pytest.mark.parametrize(("name", "mesh", "drafter", "extra_options"), nightly_from(0, EXPERTS))
def test_self_drafting_with_experts_and_streamed_weights(
    name, mesh, drafter, extra_options, tmp_path
):
    """A part of the model drafts, with experts over several devices, or with weights fetched layer
    by layer.
    """
    folder = Golden(VARIANT_BY_NAME[name], tmp_path).folder
    options = (
        SIZES
        | parallel_sizes(mesh)
        | extra_options
        | {"max_model_len": VARIANT_BY_NAME[name].max_len, "skip_tokenizer_init": True}
    )
    prompts = [
        {"prompt_token_ids": [(i * 11 + j * 3) % 160 for j in range(5 + i)]} for i in range(9)
    ]
    params = [
        SamplingParams(
            temperature=0.7 * (i % 2),
            seed=i,
            max_tokens=16,
            logprobs=2,
            ignore_eos=True,
            n=1 + (i == 4),
        )
        for i in range(9)
    ]
    expected = LLM(str(folder), **options).generate(prompts, params, use_tqdm=False)
    llm = LLM(
        str(folder), **options, speculative_config={"method": "self", "adapts": False} | drafter
    )
    for output, expected_output in zip(
        llm.generate(prompts, params, use_tqdm=False), expected, strict=True
    ):
        for completion, expected_completion in zip(
            output.outputs, expected_output.outputs, strict=True
        ):
            assert completion.token_ids == expected_completion.token_ids
            for entry, entries in zip(
                completion.logprobs, expected_completion.logprobs, strict=True
            ):
                assert [*entry] == [*entries]
                for token, value in entry.items():
                    assert value.logprob == pytest.approx(entries[token].logprob, abs=2e-5)
    engine = llm.engine
    engine.scheduler.check()
    assert engine.speculator.counts.accepted[0] > 0 and engine.runner.compiles.recompiles == 0
    if "expert_redundancy" in extra_options:
        assert take_snapshot(engine).experts.moved > 0


@pytest.mark.nightly
def test_drafter_weights_and_pages_are_sharded():
    """Each device has its shard of both, also after sleep; over `context`, bit-identical scores
    need steps of equally many rows.
    """
    drafter = DRAFT_MODEL | {"adapts": False}
    devices = parallel_sizes({"tensor": 2, "context": 2})
    llm = LLM(**SIZES, **devices, max_model_len=64, speculative_config=drafter)
    runner = llm.engine.runner
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, logprobs=1)

    def generate_scores():
        return [
            (x.token_ids, x.logprobs) for x in llm.generate(["Once upon a time"], params)[0].outputs
        ]

    def check_shards():
        leaves = jax.tree.leaves(runner.weights.drafter)
        local = sum(leaf.addressable_shards[0].data.size for leaf in leaves)
        assert local < 0.55 * sum(leaf.size for leaf in leaves)
        drafter_pages = runner.state.pages[len(runner.config.layers)]
        assert drafter_pages.k_PSKH.addressable_shards[0].data.shape[1] == runner.page_size // 2

    expected = generate_scores()
    for level, keep in product((1, 2), (True, False)):
        check_shards()
        llm.sleep(level, keep_pages=keep)
        llm.wake_up()
        assert generate_scores() == expected
    check_shards()
    assert llm.engine.speculator.counts.accepted[0] > 0 and runner.compiles.recompiles == 0


@pytest.mark.parametrize(
    ("vocab_size", "target_vocab_size"), [(61, 64), (64, 57), (60, 60), (160, 130), (33, 97)]
)
def test_drafter_logits_fit_target_vocabulary_shards(vocab_size, target_vocab_size):
    """The drafter's logits are moved to the devices that hold the target's tokens."""
    mesh = make_mesh(tensor=4)
    B = 3
    axis = device_axes(mesh).tensor
    logits_BV = np.random.default_rng(vocab_size).normal(size=(B, vocab_size)).astype(np.float32)
    padded_BV = np.pad(logits_BV, ((0, 0), (0, -vocab_size % 4)), constant_values=-np.inf)
    run = partial(fit_vocab, V=-(-target_vocab_size // 4), axis=axis)
    spec = P(None, "tensor")
    fitted_BV = np.asarray(
        jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(padded_BV)
    )
    num_common = min(vocab_size, fitted_BV.shape[1])
    assert fitted_BV.shape[1] == target_vocab_size + -target_vocab_size % 4
    np.testing.assert_array_equal(fitted_BV[:, :num_common], logits_BV[:, :num_common])
    assert (fitted_BV[:, num_common:] == -np.inf).all()


@pytest.mark.parametrize(
    "mesh",
    thinned([{"tensor": 2}, {"tensor": 2, "data": 2, "context": 2}], [{"tensor": 2}]),
    ids=str,
)
def test_sharded_draft_heads_propose_the_same_tokens(mesh, tmp_path):
    """Random EAGLE-3 heads, with their own embedding and a smaller vocabulary, on quill."""
    target = loader.read_config(hub.resolve(None), "float32", 256)
    hf = {
        "model_type": "llama",
        "hidden_size": target.dim,
        "vocab_size": target.vocab_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "draft_vocab_size": 601,
    }
    heads = draft_heads.parse_heads(hf, ["embed_tokens.weight"], target, "eagle3")
    weights = loader.random_weights(draft_heads.abstract(heads)).replace(
        tokens_U=np.arange(601) * 2
    )
    draft_heads.save(tmp_path, heads, weights, hf)
    config = {"method": "eagle3", "model": str(tmp_path), "adapts": False}
    prompts = ["Once upon a time", "The lamp is in the sand."]
    params = SamplingParams(temperature=0, max_tokens=24)
    proposals = []
    for devices in ({}, mesh):
        llm = LLM(**SIZES, **parallel_sizes(devices), max_model_len=256, speculative_config=config)
        recorded_drafts = Recorded.of(llm.engine)
        llm.generate(prompts, params, use_tqdm=False)
        proposals.append(recorded_drafts.proposed)
        llm.close()
    assert len(proposals[0]) > 20 and proposals[0].keys() == proposals[1].keys()
    num_equal = sum(proposals[1][text] == proposed for text, proposed in proposals[0].items())
    assert num_equal >= 0.95 * len(proposals[0])  # sums over devices differ in their last bits


UNSUPPORTED_MESHES = [
    (
        {"tensor": 4},
        DRAFT_MODEL,
        ("draft_model: the drafter cannot be spread .* tensor_parallel_size is 4, .* can be 1, 2$"),
    ),
    (
        {"pipeline": 2},
        SELF_LAYERS,
        "method is 'self' with pipeline_parallel_size 2: .* draft_model, ngram or suffix",
    ),
    ({"tensor": 2}, EAGLE, "eagle: the drafter cannot be spread .* it can be 1$"),
    (
        {"pipeline": 2},
        EAGLE,
        "method is 'eagle' with pipeline_parallel_size 2: heads draft with tables of both ends",
    ),
]


@pytest.mark.parametrize(("mesh", "drafter", "message"), UNSUPPORTED_MESHES)
def test_unsupported_drafter_meshes_are_rejected(mesh, drafter, message):
    with pytest.raises(ModelError, match=message):
        LLM(**SIZES, **parallel_sizes(mesh), speculative_config=drafter)
