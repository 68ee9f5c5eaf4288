"""Drafts over several devices leave the answers as they are: run by test_eight_devices.py, in its
own process.
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

NAMED = {variant.name: variant for variant in VARIANTS}
SIZES = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "kv_cache_memory_bytes": 2 << 20,
}
NGRAM = {"method": "ngram"}
SUFFIX = {"method": "suffix"}
MODEL = {"method": "draft_model", "model": "quill-draft"}
LAYERS = {"method": "self", "num_layers": 4}
BITS = {"method": "self", "num_layers": 6, "quantization": "int8-weights"}
EAGLE, MEDUSA = [{"method": kind, "model": f"quill-{kind}"} for kind in ("eagle", "medusa")]
MESHES = {
    "tensor": ({"tensor": 2}, [NGRAM, MODEL, BITS, MEDUSA]),
    "replicas": ({"data": 2}, [SUFFIX, MODEL, EAGLE]),
    "context": ({"context": 2}, [NGRAM, MODEL, LAYERS, MEDUSA]),
    "stages": ({"pipeline": 2}, [SUFFIX, MODEL]),
    "three axes": ({"tensor": 2, "data": 2, "context": 2}, [MODEL]),
    "stages of replicas": ({"tensor": 2, "data": 2, "pipeline": 2}, [MODEL]),
}


def over(mesh: dict[str, int]) -> dict[str, int]:
    return {f"{axis}_parallel_size": size for axis, size in mesh.items()}


@pytest.mark.parametrize("name", thinned(MESHES, ["three axes"]))
def test_the_answers_of_plain_decoding(name, tmp_path):
    """Random requests, asked twice, where pages are short and go to host memory: tokens, and scores
    to the last bit.

    Over `context` the rows of larger steps are split, and XLA's products give other last bits for
    fewer rows.
    """
    mesh, drafters = MESHES[name]
    rng = random.Random(4)
    options = SIZES | over(mesh) | {"max_model_len": 256}
    plain = LLM(**options)
    mixes = [mix(rng, plain.engine.config.vocab_size) for _ in range(cases(5, least=1))]
    again = plain.engine.tokenizer.encode("The lamp is in the sand. The boat is in the lake. " * 3)
    mixes[0][0]["again"] = again, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    mixes[0][1]["again"] = 0
    expected = [serve(plain.engine, *each) for each in mixes]
    plain.close()
    for number, drafter in enumerate(drafters):
        room = (
            {"kv_cache_host_bytes": 1 << 20, "kv_cache_memory_bytes": 1 << 20} if number % 2 else {}
        )
        llm = LLM(**options | room, speculative_config=drafter | {"adapts": False})
        for (requests, arrivals), wanted in [*zip(mixes, expected, strict=True)] * 2:
            same(serve(llm.engine, requests, arrivals), wanted, exact="context" not in mesh)
        assert llm.engine.speculator.counts.accepted[0] > 0
        assert llm.engine.runner.compiles.recompiles == 0
        llm.close()


def same(found: dict[str, list], wanted: dict[str, list], exact: bool) -> None:
    """The answers of `mixes.serve`, with the same scores, or nearly."""
    if exact:
        assert found == wanted
        return
    assert {name: [answer[:4] for answer in answers] for name, answers in found.items()} == {
        name: [answer[:4] for answer in answers] for name, answers in wanted.items()
    }
    for name, answers in wanted.items():
        for one, other in zip(found[name], answers, strict=True):
            for entry, entries in zip(one[4] + one[5], other[4] + other[5], strict=True):
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


@pytest.mark.parametrize(("name", "mesh", "drafter", "more"), nightly_from(0, EXPERTS))
def test_experts_and_weights_that_do_not_lie_ready(name, mesh, drafter, more, tmp_path):
    """A part of the model drafts, with its experts on several devices, or with layers that are
    brought to it.
    """
    folder = Golden(NAMED[name], tmp_path).folder
    options = (
        SIZES
        | over(mesh)
        | more
        | {"max_model_len": NAMED[name].max_len, "skip_tokenizer_init": True}
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
    plain = LLM(str(folder), **options).generate(prompts, params, use_tqdm=False)
    llm = LLM(
        str(folder), **options, speculative_config={"method": "self", "adapts": False} | drafter
    )
    for output, wanted in zip(llm.generate(prompts, params, use_tqdm=False), plain, strict=True):
        for one, other in zip(output.outputs, wanted.outputs, strict=True):
            assert one.token_ids == other.token_ids
            for entry, entries in zip(one.logprobs, other.logprobs, strict=True):
                assert [*entry] == [*entries]
                for token, value in entry.items():
                    assert value.logprob == pytest.approx(entries[token].logprob, abs=2e-5)
    engine = llm.engine
    engine.scheduler.check()
    assert engine.speculator.counts.accepted[0] > 0 and engine.runner.compiles.recompiles == 0
    if "expert_redundancy" in more:
        assert take_snapshot(engine).experts.moved > 0


@pytest.mark.nightly
def test_weights_and_pages_of_the_drafter_are_split():
    """Each device has its part of both, and after sleep too; over `context`, bits ask for steps of
    the same rows.
    """
    drafter = MODEL | {"adapts": False}
    devices = over({"tensor": 2, "context": 2})
    llm = LLM(**SIZES, **devices, max_model_len=64, speculative_config=drafter)
    runner = llm.engine.runner
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, logprobs=1)

    def answer():
        return [
            (x.token_ids, x.logprobs) for x in llm.generate(["Once upon a time"], params)[0].outputs
        ]

    def check():
        leaves = jax.tree.leaves(runner.weights.drafter)
        local = sum(leaf.addressable_shards[0].data.size for leaf in leaves)
        assert local < 0.55 * sum(leaf.size for leaf in leaves)
        own = runner.state.pages[len(runner.config.layers)]
        assert own.k_PSKH.addressable_shards[0].data.shape[1] == runner.page_size // 2

    wanted = answer()
    for level, keep in product((1, 2), (True, False)):
        check()
        llm.sleep(level, keep_pages=keep)
        llm.wake_up()
        assert answer() == wanted
    check()
    assert llm.engine.speculator.counts.accepted[0] > 0 and runner.compiles.recompiles == 0


@pytest.mark.parametrize(("own", "target"), [(61, 64), (64, 57), (60, 60), (160, 130), (33, 97)])
def test_another_padding_of_the_vocabulary(own, target):
    """The drafter's logits are brought to the devices that have the target's tokens."""
    mesh = make_mesh(tensor=4)
    B = 3
    axis = device_axes(mesh).tensor
    logits_BV = np.random.default_rng(own).normal(size=(B, own)).astype(np.float32)
    given_BV = np.pad(logits_BV, ((0, 0), (0, -own % 4)), constant_values=-np.inf)
    run = partial(fit_vocab, V=-(-target // 4), axis=axis)
    places = P(None, "tensor")
    found_BV = np.asarray(
        jax.jit(jax.shard_map(run, mesh=mesh, in_specs=places, out_specs=places))(given_BV)
    )
    both = min(own, found_BV.shape[1])
    assert found_BV.shape[1] == target + -target % 4
    np.testing.assert_array_equal(found_BV[:, :both], logits_BV[:, :both])
    assert (found_BV[:, both:] == -np.inf).all()


@pytest.mark.parametrize(
    "mesh",
    thinned([{"tensor": 2}, {"tensor": 2, "data": 2, "context": 2}], [{"tensor": 2}]),
    ids=str,
)
def test_heads_that_are_split_propose_what_whole_ones_do(mesh, tmp_path):
    """Random EAGLE-3 heads, with an embedding and fewer tokens of their own, on quill."""
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
    found = []
    for devices in ({}, mesh):
        llm = LLM(**SIZES, **over(devices), max_model_len=256, speculative_config=config)
        recorded = Recorded.of(llm.engine)
        llm.generate(prompts, params, use_tqdm=False)
        found.append(recorded.proposed)
        llm.close()
    assert len(found[0]) > 20 and found[0].keys() == found[1].keys()
    equal = sum(found[1][text] == proposed for text, proposed in found[0].items())
    assert equal >= 0.95 * len(found[0])  # sums over devices have other last bits


REFUSED = [
    (
        {"tensor": 4},
        MODEL,
        ("draft_model: the drafter cannot be spread .* tensor_parallel_size is 4, .* can be 1, 2$"),
    ),
    (
        {"pipeline": 2},
        LAYERS,
        "method is 'self' with pipeline_parallel_size 2: .* draft_model, ngram or suffix",
    ),
    ({"tensor": 2}, EAGLE, "eagle: the drafter cannot be spread .* it can be 1$"),
    (
        {"pipeline": 2},
        EAGLE,
        "method is 'eagle' with pipeline_parallel_size 2: heads draft with tables of both ends",
    ),
]


@pytest.mark.parametrize(("mesh", "drafter", "message"), REFUSED)
def test_what_cannot_be_spread_is_refused(mesh, drafter, message):
    with pytest.raises(ModelError, match=message):
        LLM(**SIZES, **over(mesh), speculative_config=drafter)
