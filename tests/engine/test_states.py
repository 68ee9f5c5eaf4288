"""Models whose layers keep a state for each sequence: the same bits alone, in company, chunked,
preempted, drafted.
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

LENGTH = 200


@pytest.fixture(
    scope="module", params=thinned(("qwen3-next", "falcon-h1", "mamba2"), ("qwen3-next",))
)
def folder(request, tmp_path_factory):
    if not native.serves():
        pytest.skip("XLA sums products in an order that depends on the number of rows")
    variant = next(variant for variant in VARIANTS if variant.name == request.param)
    return Golden(variant, tmp_path_factory.mktemp("states")).folder


def llm_of(folder, **options) -> LLM:
    common = {
        "max_model_len": LENGTH,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 40,
        "kv_cache_memory_bytes": 32 << 20,
    }
    return LLM(model=str(folder), skip_tokenizer_init=True, dtype="float32", **common | options)


def bits(request) -> tuple:
    (answer,) = request.output().outputs
    scores = tuple(
        tuple(sorted((t, e.logprob) for t, e in entry.items())) for entry in answer.logprobs
    )
    return answer.finish_reason, tuple(answer.token_ids), scores


def serve(llm: LLM, requests: dict, arrivals: dict) -> dict:
    return {
        name: bits(request)
        for name, request in staggered_requests.serve(llm.engine, requests, arrivals).items()
    }


def mix(rng: random.Random) -> tuple[dict, dict]:
    requests = {}
    arrivals = {}
    prompts = []
    for index in range(rng.randint(2, 7)):
        start = rng.choice(prompts)[: rng.randint(0, 100)] if prompts and rng.random() < 0.6 else []
        some = [rng.randrange(160) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 70)))]
        prompts.append(start + some * rng.choice((1, 1, 2)))
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
def alone(folder):
    """What gives the answers that are expected."""
    with llm_of(folder) as llm:
        yield llm


FEW = {"kv_cache_memory_bytes": 2 << 20, "max_num_batched_tokens": 24}
KINDS = {
    "roomy": {},
    "small chunks": {"max_num_batched_tokens": 7, "block_size": 8},
    "tight": {"kv_cache_memory_bytes": 330 << 10},
    "few snapshots": FEW,
    "host and disk": FEW | {"kv_cache_host_bytes": 200 << 10},
}


@pytest.mark.random
@pytest.mark.parametrize("kind", thinned(KINDS, ("tight", "host and disk")))
@pytest.mark.slow
def test_company_chunks_and_preemption_change_no_bit(folder, alone, tmp_path, kind):
    rng = random.Random(2)
    disk = {"kv_cache_disk": str(tmp_path)} if kind == "host and disk" else {}
    llm = llm_of(folder, **KINDS[kind], **disk)
    if kind != "tight":  # which has no room for any
        llm.engine.tables[0].snapshots.distance = 32
    preempted = 0  # those of the other
    cached = 0
    compiles = take_snapshot(llm.engine).recompiles
    long = SamplingParams(temperature=0, max_tokens=90, logprobs=1, ignore_eos=True)
    crowd = {str(index): ([rng.randrange(160) for _ in range(60)], long) for index in range(4)}
    mixes = [(crowd, dict.fromkeys(crowd, 0)), *(mix(rng) for _ in range(cases(20, least=2)))]
    for number, (requests, arrivals) in enumerate(mixes):
        expected = {
            name: serve(alone, {name: own}, {name: 0})[name] for name, own in requests.items()
        }
        got = staggered_requests.serve(llm.engine, requests, arrivals)
        assert {name: bits(request) for name, request in got.items()} == expected, f"mix {number}"
        preempted += sum(request.output().metrics.num_preemptions for request in got.values())
        cached += sum(request.output().num_cached_tokens for request in got.values())
    # without pages nobody gives way
    assert preempted or kind != "tight" or not alone.engine.config.windows
    assert cached or kind in ("tight", "host and disk")
    assert take_snapshot(llm.engine).recompiles == compiles
    llm.close()


@pytest.mark.nightly
def test_the_second_turn_of_a_chat_computes_what_is_new(folder):
    """And less than the distance between two snapshots, which the answer has passed or not."""
    rng = random.Random(6)
    wide = {
        "max_model_len": 6000,
        "hf_overrides": {"max_position_embeddings": 8192},
        "max_num_batched_tokens": 256,
    }
    llm, plain = (
        llm_of(folder, **wide, enable_prefix_caching=caching) for caching in (True, False)
    )
    assert llm.engine.tables[0].snapshots.distance == 512
    for length, answered in ((4000, 40), (3500, 500)):
        first = [rng.randrange(160) for _ in range(length)]
        greedy = SamplingParams(temperature=0, max_tokens=answered, logprobs=1, ignore_eos=True)
        (answer,) = serve(llm, {"1": (first, greedy)}, {"1": 0}).values()
        second = {"2": (first + list(answer[1]) + [rng.randrange(160) for _ in range(50)], greedy)}
        got = staggered_requests.serve(llm.engine, second, {"2": 0})["2"]
        computed = length + answered + 50 - got.output().num_cached_tokens
        assert 50 <= computed < 50 + 512
        assert {"2": bits(got)} == serve(plain, second, {"2": 0})


@pytest.mark.parametrize(
    ("length", "distance", "room"),
    [(1000, 128, 2 << 20), pytest.param(4000, 512, 3 << 20, marks=pytest.mark.nightly)],
)
@pytest.mark.slow
def test_a_second_turn_goes_on_from_wherever_the_snapshot_is(
    folder, tmp_path, length, distance, room
):
    """Another chat takes the device's snapshots and pages in between, or the engine ends and
    another begins.

    docs/performance.md has what this prints.
    """
    if "falcon" in (folder / "config.json").read_text() and length > 1000:
        pytest.skip("its keys fill a cache that is small enough to evict its snapshots")
    rng = random.Random(7)
    most = length * 9 // 8
    wide = {
        "max_model_len": most,
        "hf_overrides": {"max_position_embeddings": 8192},
        "max_num_batched_tokens": 256,
    }
    wide["max_num_seqs"] = 1
    small = {
        "kv_cache_memory_bytes": room,
        "kv_cache_host_bytes": 16 << 20,
        "kv_cache_disk": str(tmp_path),
    }
    greedy = SamplingParams(temperature=0, max_tokens=20, logprobs=1, ignore_eos=True)
    plain = llm_of(folder, **wide, enable_prefix_caching=False)
    llm = llm_of(folder, **wide, **small)
    for place in ("device", "host", "disk"):
        table = llm.engine.tables[0]
        table.snapshots.distance = distance
        firsts = [
            [rng.randrange(160) for _ in range(length)]
            for _ in range(1 if place == "device" else 2)
        ]
        answer, *_ = [serve(llm, {"1": (first, greedy)}, {"1": 0})["1"] for first in firsts]
        second = firsts[0] + list(answer[1]) + [rng.randrange(160) for _ in range(50)]
        nodes = list(table.tree.walk(None, second, length))
        group = table.snapshots.group
        assert any(node.pages[group] for node in nodes) == (place == "device")
        assert any(group in node.copies for node in nodes) or place == "device"
        if place == "device":
            llm.engine.sleep(keep_pages=True)
            llm.engine.lifecycle.wake_up()
        if place == "disk":
            llm.close()
            llm = llm_of(folder, **wide, **small)
        got = staggered_requests.serve(llm.engine, {"2": (second, greedy)}, {"2": 0})["2"]
        computed = len(second) - got.output().num_cached_tokens
        print(f"snapshot on the {place}: {computed} of {len(second)} tokens computed")
        assert 50 <= computed < 50 + distance
        assert {"2": bits(got)} == serve(plain, {"2": (second, greedy)}, {"2": 0})
        assert take_snapshot(llm.engine).recompiles == 0


class Guesses:
    """A drafter that knows the answers, and is wrong now and then."""

    def __init__(self, answers, rng):
        self.answers = answers
        self.rng = rng

    def propose(self, seq, most):
        whole = self.answers.get(tuple(seq.tokens[: seq.num_prompt]), ())
        next_ones = list(whole[len(seq.tokens) - seq.num_prompt :][:most])
        if next_ones and self.rng.random() < 0.6:
            next_ones[self.rng.randrange(len(next_ones))] = self.rng.randrange(160)
        return next_ones

    def end(self, seq):
        pass


@pytest.mark.random
@pytest.mark.parametrize("room", thinned((32 << 20, 380 << 10), (380 << 10,)))
@pytest.mark.slow
def test_drafts_change_no_bit(folder, alone, room):
    rng = random.Random(3)
    config = {"method": "ngram", "num_speculative_tokens": 4, "adapts": False}
    llm = llm_of(
        folder, speculative_config=config, kv_cache_memory_bytes=room, max_num_batched_tokens=8
    )
    compiles = take_snapshot(llm.engine).recompiles
    for number in range(cases(20, least=3)):
        requests, arrivals = mix(rng)
        expected = serve(alone, requests, arrivals)
        answers = {tuple(prompt): expected[name][1] for name, (prompt, _) in requests.items()}
        llm.engine.speculator.host_drafter = Guesses(answers, rng)
        assert serve(llm, requests, arrivals) == expected, f"mix {number}"
    counts = llm.engine.speculator.counts
    assert counts.accepted[0] > 0 and counts.accepted[0] < counts.drafts
    assert take_snapshot(llm.engine).recompiles == compiles
    llm.close()
