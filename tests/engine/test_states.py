"""Models with recurrent states: answers are bit-identical alone, batched, chunked, preempted and
with drafts.
"""

import random

import pytest

from quire import LLM, SamplingParams
from quire.ops import native
from quire.serving.engine.snapshot import take_snapshot
from quire.tests.support import staggered_requests
from quire.tests.support.cases import cases, thinned
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden

MAX_LEN = 200


@pytest.fixture(
    scope="module", params=thinned(("qwen3-next", "falcon-h1", "mamba2"), ("qwen3-next",))
)
def folder(request, tmp_path_factory):
    if not native.serves():
        pytest.skip("XLA sums products in an order that depends on the number of tokens")
    variant = next(variant for variant in VARIANTS if variant.name == request.param)
    return Golden(variant, tmp_path_factory.mktemp("states")).folder


def make_llm(folder, **options) -> LLM:
    defaults = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
        "kv_cache_memory_bytes": 32 << 20,
    }
    return LLM(model=str(folder), skip_tokenizer_init=True, dtype="float32", **defaults | options)


def exact_answer(request) -> tuple:
    (answer,) = request.output().outputs
    logprobs = tuple(
        tuple(sorted((t, e.logprob) for t, e in entry.items())) for entry in answer.logprobs
    )
    return answer.finish_reason, tuple(answer.token_ids), logprobs


def serve_requests(llm: LLM, requests: dict, arrivals: dict) -> dict:
    return {
        name: exact_answer(request)
        for name, request in staggered_requests.serve(llm.engine, requests, arrivals).items()
    }


def random_mix(rng: random.Random) -> tuple[dict, dict]:
    requests = {}
    arrivals = {}
    prompts = []
    for index in range(rng.randint(2, 7)):
        prefix = (
            rng.choice(prompts)[: rng.randint(0, 100)] if prompts and rng.random() < 0.6 else []
        )
        suffix = [rng.randrange(160) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 70)))]
        prompts.append(prefix + suffix * rng.choice((1, 1, 2)))
        params = SamplingParams(
            temperature=rng.choice((0, 0, 0.8)),
            seed=index,
            repetition_penalty=rng.choice((1, 1.2)),
            max_tokens=rng.randint(1, 24),
            logprobs=1,
            ignore_eos=True,
        )
        requests[str(index)], arrivals[str(index)] = (prompts[-1][:170], params), rng.randint(0, 12)
    return requests, arrivals


@pytest.fixture(scope="module")
def reference_llm(folder):
    """The engine that computes the expected answers, one request at a time."""
    with make_llm(folder) as llm:
        yield llm


FEW_SNAPSHOTS = {"kv_cache_memory_bytes": 2 << 20, "max_num_batched_tokens": 24}
CACHE_OPTIONS = {
    "roomy": {},
    "small chunks": {"max_num_batched_tokens": 7, "block_size": 8},
    "tight": {"kv_cache_memory_bytes": 330 << 10},
    "few snapshots": FEW_SNAPSHOTS,
    "host and disk": FEW_SNAPSHOTS | {"kv_cache_host_bytes": 200 << 10},
}


@pytest.mark.random
@pytest.mark.parametrize("kind", thinned(CACHE_OPTIONS, ("tight", "host and disk")))
@pytest.mark.slow
def test_recurrent_states_are_batch_invariant_with_chunks_and_preemptions(
    folder, reference_llm, tmp_path, kind
):
    rng = random.Random(2)
    disk = {"kv_cache_disk": str(tmp_path)} if kind == "host and disk" else {}
    llm = make_llm(folder, **CACHE_OPTIONS[kind], **disk)
    if kind != "tight":  # whose cache has no room for snapshots
        llm.engine.tables[0].snapshots.distance = 32
    num_preemptions = 0
    num_cached_tokens = 0
    recompiles = take_snapshot(llm.engine).recompiles
    long_params = SamplingParams(temperature=0, max_tokens=90, logprobs=1, ignore_eos=True)
    long_requests = {
        str(index): ([rng.randrange(160) for _ in range(60)], long_params) for index in range(4)
    }
    mixes = [
        (long_requests, dict.fromkeys(long_requests, 0)),
        *(random_mix(rng) for _ in range(cases(20, least=2))),
    ]
    for number, (requests, arrivals) in enumerate(mixes):
        expected = {
            name: serve_requests(reference_llm, {name: request}, {name: 0})[name]
            for name, request in requests.items()
        }
        actual = staggered_requests.serve(llm.engine, requests, arrivals)
        assert {name: exact_answer(request) for name, request in actual.items()} == expected, (
            f"mix {number}"
        )
        num_preemptions += sum(
            request.output().metrics.num_preemptions for request in actual.values()
        )
        num_cached_tokens += sum(request.output().num_cached_tokens for request in actual.values())
    # only models with KV pages preempt sequences
    assert num_preemptions or kind != "tight" or not reference_llm.engine.config.windows
    assert num_cached_tokens or kind in ("tight", "host and disk")
    assert take_snapshot(llm.engine).recompiles == recompiles
    llm.close()


@pytest.mark.nightly
def test_second_chat_turn_starts_from_a_snapshot(folder):
    """It computes its new tokens, and fewer than the distance between two snapshots."""
    rng = random.Random(6)
    options = {
        "max_model_len": 6000,
        "hf_overrides": {"max_position_embeddings": 8192},
        "max_num_batched_tokens": 256,
    }
    llm, uncached_llm = (
        make_llm(folder, **options, enable_prefix_caching=caching) for caching in (True, False)
    )
    assert llm.engine.tables[0].snapshots.distance == 512
    for length, num_answer_tokens in ((4000, 40), (3500, 500)):
        first_prompt = [rng.randrange(160) for _ in range(length)]
        greedy = SamplingParams(
            temperature=0, max_tokens=num_answer_tokens, logprobs=1, ignore_eos=True
        )
        (answer,) = serve_requests(llm, {"1": (first_prompt, greedy)}, {"1": 0}).values()
        second_request = {
            "2": (first_prompt + list(answer[1]) + [rng.randrange(160) for _ in range(50)], greedy)
        }
        actual = staggered_requests.serve(llm.engine, second_request, {"2": 0})["2"]
        num_computed = length + num_answer_tokens + 50 - actual.output().num_cached_tokens
        assert 50 <= num_computed < 50 + 512
        assert {"2": exact_answer(actual)} == serve_requests(uncached_llm, second_request, {"2": 0})


@pytest.mark.parametrize(
    ("length", "distance", "cache_bytes"),
    [(1000, 128, 2 << 20), pytest.param(4000, 512, 3 << 20, marks=pytest.mark.nightly)],
)
@pytest.mark.slow
def test_second_chat_turn_restores_snapshots_from_device_host_and_disk(
    folder, tmp_path, length, distance, cache_bytes
):
    """Before the second turn, another chat evicts the device's snapshots, or the engine restarts.

    docs/performance.md quotes the printed numbers.
    """
    if "falcon" in (folder / "config.json").read_text() and length > 1000:
        pytest.skip("its keys fill a cache that is small enough to evict its snapshots")
    rng = random.Random(7)
    max_model_len = length * 9 // 8
    options = {
        "max_model_len": max_model_len,
        "hf_overrides": {"max_position_embeddings": 8192},
        "max_num_batched_tokens": 256,
    }
    options["max_num_seqs"] = 1
    cache_options = {
        "kv_cache_memory_bytes": cache_bytes,
        "kv_cache_host_bytes": 16 << 20,
        "kv_cache_disk": str(tmp_path),
    }
    greedy = SamplingParams(temperature=0, max_tokens=20, logprobs=1, ignore_eos=True)
    uncached_llm = make_llm(folder, **options, enable_prefix_caching=False)
    llm = make_llm(folder, **options, **cache_options)
    for tier in ("device", "host", "disk"):
        table = llm.engine.tables[0]
        table.snapshots.distance = distance
        first_prompts = [
            [rng.randrange(160) for _ in range(length)] for _ in range(1 if tier == "device" else 2)
        ]
        answer, *_ = [
            serve_requests(llm, {"1": (first, greedy)}, {"1": 0})["1"] for first in first_prompts
        ]
        second_prompt = first_prompts[0] + list(answer[1]) + [rng.randrange(160) for _ in range(50)]
        nodes = list(table.tree.walk(None, second_prompt, length))
        group = table.snapshots.group
        assert any(node.pages[group] for node in nodes) == (tier == "device")
        assert any(group in node.copies for node in nodes) or tier == "device"
        if tier == "device":
            llm.engine.sleep(keep_pages=True)
            llm.engine.lifecycle.wake_up()
        if tier == "disk":
            llm.close()
            llm = make_llm(folder, **options, **cache_options)
        actual = staggered_requests.serve(llm.engine, {"2": (second_prompt, greedy)}, {"2": 0})["2"]
        num_computed = len(second_prompt) - actual.output().num_cached_tokens
        print(f"snapshot on the {tier}: {num_computed} of {len(second_prompt)} tokens computed")
        assert 50 <= num_computed < 50 + distance
        assert {"2": exact_answer(actual)} == serve_requests(
            uncached_llm, {"2": (second_prompt, greedy)}, {"2": 0}
        )
        assert take_snapshot(llm.engine).recompiles == 0


class KnownAnswersDrafter:
    """A drafter that knows the answers, and changes some tokens at random."""

    def __init__(self, answers, rng):
        self.answers = answers
        self.rng = rng

    def propose(self, seq, max_drafts):
        answer = self.answers.get(tuple(seq.tokens[: seq.num_prompt]), ())
        drafts = list(answer[len(seq.tokens) - seq.num_prompt :][:max_drafts])
        if drafts and self.rng.random() < 0.6:
            drafts[self.rng.randrange(len(drafts))] = self.rng.randrange(160)
        return drafts

    def end(self, seq):
        pass


@pytest.mark.random
@pytest.mark.parametrize("cache_bytes", thinned((32 << 20, 380 << 10), (380 << 10,)))
@pytest.mark.slow
def test_drafts_leave_recurrent_state_answers_unchanged(folder, reference_llm, cache_bytes):
    rng = random.Random(3)
    config = {"method": "ngram", "num_speculative_tokens": 4, "adapts": False}
    llm = make_llm(
        folder,
        speculative_config=config,
        kv_cache_memory_bytes=cache_bytes,
        max_num_batched_tokens=8,
    )
    recompiles = take_snapshot(llm.engine).recompiles
    for index in range(cases(20, least=3)):
        requests, arrivals = random_mix(rng)
        expected = serve_requests(reference_llm, requests, arrivals)
        answers = {tuple(prompt): expected[name][1] for name, (prompt, _) in requests.items()}
        llm.engine.speculator.host_drafter = KnownAnswersDrafter(answers, rng)
        assert serve_requests(llm, requests, arrivals) == expected, f"mix {index}"
    counts = llm.engine.speculator.counts
    assert counts.accepted[0] > 0 and counts.accepted[0] < counts.drafts
    assert take_snapshot(llm.engine).recompiles == recompiles
    llm.close()
