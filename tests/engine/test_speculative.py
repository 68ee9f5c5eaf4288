"""Speculative decoding gives the same answers, bit for bit, as plain decoding, for all drafts and
sampling parameters.
"""

import random
import re
from importlib import import_module
from itertools import count as count_up
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from quire import LLM
from quire.model.checkpoint import hub, loader
from quire.model.config import ModelError
from quire.model.text.tokenizer import Tokenizer
from quire.serving.api.params import SamplingParams
from quire.serving.cache.disk_cache import DiskCache
from quire.serving.cache.host_cache import HostCache
from quire.serving.cache.page_table import PageTable
from quire.serving.device.state import page_bytes
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.engine import Engine
from quire.serving.engine.runner import Runner
from quire.serving.engine.snapshot import take_snapshot
from quire.serving.engine.step_record import Observer
from quire.serving.request.grammar import Grammars
from quire.serving.speculative.acceptance import AcceptanceRate, DraftRecord
from quire.serving.speculative.config import parse_speculative_config
from quire.serving.speculative.draft_state import DraftState
from quire.serving.speculative.methods import METHODS
from quire.serving.speculative.ngram import NgramDrafter
from quire.serving.speculative.speculator import Speculator
from quire.serving.speculative.suffix import SuffixDrafter
from quire.tests.support.cases import cases
from quire.tests.support.mixes import mix, serve
from quire.tests.support.recorded_drafts import Recorded

LENGTH = 256
DRAFTS = 4
PLAIN = StepShape.largest(4, 48, 16)
DRAFTED = StepShape.largest(4, 48, 16, max_drafts=DRAFTS)


@pytest.fixture(scope="module")
def compiled():
    """Warm runners of quill without and with drafts, the latter with plain sampling programs, as on
    a GPU; and the tokenizer.
    """
    folder = hub.resolve(None)
    config = loader.read_config(folder, "float32", LENGTH)
    weights = loader.load(folder, config)
    runners = {}
    for shape in (PLAIN, DRAFTED):
        runners[shape] = Runner(
            config, weights, shape, (400,) * len(config.windows), 16, LENGTH, True
        )
        runners[shape].remote = shape is DRAFTED
        runners[shape].warm_up()
    return runners, Tokenizer(folder)


def engine_of(
    compiled, shape=DRAFTED, num_pages=400, host_cache=None, method="ngram", **config
) -> Engine:
    """Makes an engine with a new device state and the compiled steps."""
    runners, tokenizer = compiled
    old = runners[shape]
    runner = Runner(old.config, old.weights, shape, old.num_pages, 16, LENGTH, True)
    runner.compiled = old.compiled
    runner.plain = old.plain
    runner.page_copier.programs = old.page_copier.programs
    table = PageTable(
        (num_pages,) * len(old.num_pages), 16, old.config.windows, host_cache=host_cache
    )
    chosen = None
    if shape.max_drafts:
        chosen = parse_speculative_config(
            {"method": method, "num_speculative_tokens": shape.max_drafts, **config}
        )
    return Engine(runner, tokenizer, [table], LENGTH, speculation=chosen)


class Oracle:
    """Proposes the tokens of plain decoding, some of them changed at random, so that any number of
    drafts is accepted.
    """

    def __init__(self, answers, rng: random.Random, vocab: int):
        self.answers = answers
        self.rng = rng
        self.vocab = vocab

    def propose(self, seq, max_drafts):
        expected_tokens = self.answers[seq.request.request_id][seq.index][0][seq.num_output :]
        error_rate = self.rng.choice((0, 0.1, 0.5))
        drafts = [
            self.rng.randrange(self.vocab) if self.rng.random() < error_rate else token
            for token in expected_tokens
        ]
        return (drafts + [self.rng.randrange(self.vocab)])[: self.rng.randint(0, max_drafts)]

    def end(self, seq):
        pass


@pytest.mark.random
@pytest.mark.slow
def test_random_requests_with_drafts_match_plain_decoding(compiled, tmp_path):
    """Engines have many or few pages, a host cache and a disk cache, or draft adaptively."""
    rng = random.Random(3)
    runners = compiled[0]
    plain_engine = engine_of(compiled, PLAIN)
    config = runners[DRAFTED].config
    recompiles = runners[DRAFTED].compiles.recompiles
    sizes = [page_bytes(config, group, 16) for group in range(len(config.windows))]
    host_cache = HostCache(sizes, 12 * max(sizes), DiskCache(tmp_path, 1 << 30), b"quill")
    engines = {
        "roomy": engine_of(compiled, adapts=False),
        "tight": engine_of(compiled, num_pages=17, adapts=False),
        "tiered": engine_of(compiled, num_pages=17, host_cache=host_cache, adapts=False),
        "adaptive": engine_of(compiled, adapts=True),
    }
    num_preemptions = 0
    for mix_index in range(cases(60, least=12)):
        requests, arrivals = mix(rng, config.vocab_size)
        expected = serve(plain_engine, requests, arrivals)
        for kind in ("roomy", rng.choice(("tight", "tiered", "adaptive"))):
            engine = engines[kind]
            engine.speculator.host_drafter = Oracle(expected, rng, config.vocab_size)
            preemptions = Preemptions(engine)
            assert serve(engine, requests, arrivals) == expected, f"mix {mix_index}, {kind}"
            num_preemptions += preemptions.count
        aborted_name = rng.choice(list(requests))
        aborted_answers = serve(
            engines["roomy"],
            requests,
            arrivals,
            [(aborted_name, arrivals[aborted_name] + rng.randint(0, 9))],
        )
        for name, answers in expected.items():
            if name != aborted_name:
                assert aborted_answers[name] == answers
            else:
                assert all(
                    aborted_answer[0] == answer[0][: len(aborted_answer[0])]
                    for aborted_answer, answer in zip(aborted_answers[name], answers, strict=True)
                )
    engines["tiered"].close()
    for engine in engines.values():
        accepted = engine.speculator.counts.accepted
        assert accepted[0] > accepted[-1] > 0, "drafts must be accepted at every depth"
    assert num_preemptions > 0 and runners[DRAFTED].compiles.recompiles == recompiles


def test_plain_sampling_programs_verify_drafts(compiled):
    """Plain sampling programs give the same answers, and are not used if a request has parameters
    that they do not support.
    """
    engine = engine_of(compiled, adapts=False)
    plain_engine = engine_of(compiled, PLAIN)
    sizes = compiled[0][DRAFTED].compiled
    called_sizes = []
    assert {*engine.runner.plain} == {size for size in sizes if size.samples >= size.rows}

    def record_calls(size, program):
        def recording_program(*arguments):
            called_sizes.append(size)
            return program(*arguments)

        return recording_program

    engine.runner.plain = {
        size: record_calls(size, program) for size, program in engine.runner.plain.items()
    }
    prompt = compiled[1].encode("Once upon a time")
    other_params = {"top_k": 3}, {"presence_penalty": 1.0}, {"logprobs": 1}, {"min_tokens": 19}
    for params in ({}, *other_params):
        requests = {
            str(seed): (prompt, SamplingParams(temperature=t, seed=seed, max_tokens=20, **params))
            for seed, t in enumerate((0, 0.8, 1.0))
        }
        arrivals = dict.fromkeys(requests, 0)
        expected = serve(plain_engine, requests, arrivals)
        engine.speculator.host_drafter = Oracle(expected, random.Random(5), engine.runner.vocab)
        called_sizes.clear()
        assert serve(engine, requests, arrivals) == expected
        assert any(size.rows > size.seqs for size in called_sizes) == (not params)
    assert engine.speculator.counts.accepted[-1] > 0


class Preemptions(Observer):
    """Counts the preemptions of one mix of requests."""

    def __init__(self, engine: Engine):
        self.count = 0
        engine.observers[:] = [self]

    def observe(self, record):
        self.count += sum(
            seq.num_preemptions for request in record.changed for seq in request.sequences
        )


class Ahead(Observer):
    """Counts sequences with drafts whose step was planned before the accepted drafts of the last
    step were known.
    """

    def __init__(self):
        self.count = 0

    def observe(self, record):
        if record.launched is not None and record.result is not None:
            self.count += sum(
                item.assumes_all_accepted and len(item.draft_tokens) > 0
                for item in record.launched.plan.items
            )


CONFIGS = [
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "draft_model", "model": "quill-draft"},
    {"method": "self", "num_layers": 4},
    {"method": "self", "quantization": "int8-weights", "num_layers": 6},
    {"method": "medusa", "model": "quill-medusa"},
    {"method": "eagle", "model": "quill-eagle"},
]


@pytest.mark.nightly  # test_speculative_matrix.py covers a part of this
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: "-".join(map(str, config.values()))[-24:]
)
def test_all_drafters_leave_answers_unchanged(compiled, config, tmp_path):
    """With adaptive drafting, and with drafts in every step and few pages; requests repeat."""
    rng = random.Random(4)
    vocab = compiled[0][DRAFTED].config.vocab_size
    plain_engine = engine_of(compiled, PLAIN)
    options = {
        "dtype": "float32",
        "max_model_len": LENGTH,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
    }
    cache_options = {
        "kv_cache_memory_bytes": 2 << 20,
        "kv_cache_disk": str(tmp_path),
        "kv_cache_host_bytes": 1 << 20,
    }
    llms = [
        LLM(**options, speculative_config=config),
        LLM(**options, **cache_options, speculative_config=config | {"adapts": False}),
    ]
    recompiles = [take_snapshot(llm.engine).recompiles for llm in llms]
    llms[1].engine.observers.append(planned_ahead := Ahead())
    for _ in range(cases(20, least=3)):
        requests, arrivals = mix(rng, vocab)
        expected = serve(plain_engine, requests, arrivals)
        for llm, _ in product(llms, range(2)):
            assert serve(llm.engine, requests, arrivals) == expected
    assert llms[1].engine.speculator.counts.accepted[0] > 0
    assert (planned_ahead.count > 0) == llms[1].engine.speculator.on_device
    runner = llms[0].engine.runner
    for size, resting in runner.without_drafter.items():  # without the drafter's operations
        assert (
            "/draft/" in runner.compiled[size].as_text()
            and "/draft/" not in resting.program.as_text()
        )
    assert [take_snapshot(llm.engine).recompiles for llm in llms] == recompiles
    for llm in llms:
        llm.close()


@pytest.mark.slow
def test_sampling_with_drafts_follows_the_model_distribution(compiled):
    """A chi-square test of second tokens against the model's probabilities, with drafts."""
    prompt = compiled[1].encode("Once upon a time")
    num_requests = 2000
    one_token_params = SamplingParams(temperature=1.0, max_tokens=1, logprobs=20)
    engine = engine_of(compiled, PLAIN)
    (token,) = serve(
        engine, {"0": (prompt, SamplingParams(temperature=0, max_tokens=1))}, {"0": 0}
    )["0"][0][0]
    (answer,) = serve(engine, {"1": ([*prompt, token], one_token_params)}, {"1": 0})["1"]
    probabilities = {entry[0]: np.exp(entry[1]) for entry in answer[4][0]}
    drafting_engine = engine_of(compiled, adapts=False)
    drafting_engine.speculator.host_drafter = Always([token, answer[0][0], 7, 9])
    counts: dict[int, int] = {}
    requests = {
        str(seed): (
            prompt,
            SamplingParams(temperature=1.0, seed=seed, max_tokens=3, allowed_token_ids=None),
        )
        for seed in range(num_requests)
    }
    for start in range(0, num_requests, 400):
        requests_part = dict(list(requests.items())[start : start + 400])
        for ((ids, *_),) in serve(
            drafting_engine, requests_part, dict.fromkeys(requests_part, 0)
        ).values():
            if ids[0] == token and len(ids) > 1:
                counts[ids[1]] = counts.get(ids[1], 0) + 1
    total = sum(counts.values())
    expected = {t: p * total for t, p in probabilities.items() if p * total >= 5}
    observed = [counts.get(t, 0) for t in expected]
    other_observed = total - sum(observed)
    other_expected = total - sum(expected.values())
    assert (
        total > 300
        and stats.chisquare(
            [*observed, other_observed], [*expected.values(), other_expected]
        ).pvalue
        > 1e-4
    )


class Always:
    """Proposes the same tokens for every answer."""

    def __init__(self, drafts):
        self.drafts = drafts

    def propose(self, seq, max_drafts):
        return self.drafts[seq.num_output :][:max_drafts]

    def end(self, seq):
        pass


class Pretended(SimpleNamespace):
    """Has those attributes of a sequence that drafters use."""

    __hash__ = object.__hash__


def test_ngram_drafter_matches_a_naive_search():
    """Proposals for growing random texts over few tokens are compared with a naive search."""
    rng = random.Random(5)
    for _ in range(30):
        drafter = NgramDrafter(2, 4)
        seq = Pretended(tokens=[])
        while len(seq.tokens) < 80:
            seq.tokens.extend(rng.choices(range(4), k=rng.randint(1, 6)))
            tokens = seq.tokens
            expected = []
            for length in (4, 3, 2):
                match_ends = [
                    end
                    for end in range(length, len(tokens))
                    if tokens[end - length : end] == tokens[-length:]
                ]
                if match_ends and len(tokens) >= length:
                    following = list(tokens)
                    for index in range(5):
                        following.append(following[match_ends[-1] + index])
                    expected = following[len(tokens) :]
                    break
            assert drafter.propose(seq, 5) == expected


def sequence(tokens, salt=None, prompt=0):
    return Pretended(
        tokens=list(tokens),
        num_prompt=prompt,
        num_output=len(tokens) - prompt,
        cache=SimpleNamespace(salt=salt),
    )


def test_suffix_drafter_proposes_earlier_answers():
    drafter = SuffixDrafter(max_texts=2)
    first_sequence = sequence([1, 2, 3, 4, 5, 6], prompt=2)
    assert drafter.propose(first_sequence, 4) == []
    drafter.end(first_sequence)
    repeated = sequence([9, 2, 3])
    assert drafter.propose(repeated, 9) == [4, 5, 6]
    assert drafter.propose(repeated, 2) == [4, 5]
    assert drafter.propose(sequence([9, 2, 3], salt="somebody else"), 9) == []
    for tokens in ([7, 2, 3, 8], [8, 8, 8]):  # the drafter keeps two texts and drops the first
        text = sequence(tokens)
        drafter.propose(text, 1)
        drafter.end(text)
    assert drafter.propose(repeated, 9)[:1] == [8]
    assert (
        not drafter.places["somebody else"].ends.get((5, 6))
        and (5, 6) not in drafter.places[None].ends
    )


def test_suffix_drafter_counts_votes_of_the_longest_matches():
    drafter = SuffixDrafter(max_texts=10)
    for tail in ([3, 4], [3, 4], [3, 5]):
        text = sequence([1, 2, *tail])
        drafter.propose(text, 1)
        drafter.end(text)
    assert drafter.propose(sequence([1, 2]), 2) == [3, 4]
    longer_sequence = sequence([7, 1, 2, 6])
    drafter.propose(longer_sequence, 1)
    drafter.end(longer_sequence)
    assert drafter.propose(sequence([7, 1, 2]), 1) == [6], "a longer match must win"


@pytest.mark.slow
def test_draft_model_catches_up_after_steps_without_drafts():
    """After steps without drafts, and with cached pages that it has not computed, it proposes the
    same tokens as if it had drafted in every step.
    """
    rng = random.Random(8)
    prompts = [list(range(300, 370)), list(range(300, 350)) + [20, 21]]
    config = {"method": "draft_model", "model": CONFIGS[2]["model"], "adapts": False}
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    results = {}
    llm = LLM(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=LENGTH, speculative_config=config
    )
    for mode in ("always", "at times"):
        assert llm.reset_prefix_cache()
        recorder = Recorded.of(llm.engine)
        plan_drafts = llm.engine.speculator.plan_drafts
        drafting = []

        def at_times(
            running, step=plan_drafts, speculator=llm.engine.speculator, drafting=drafting
        ):
            """Drafts in random steps only."""
            step(running)
            for seq in speculator.records:
                if rng.random() < (0.05 if drafting else 0.9):
                    seq.draft.num_requested = 0
                    seq.draft.clear()
                drafting[:] = [True] * (seq.draft.num_requested > 0)

        if mode == "at times":
            llm.engine.speculator.plan_drafts = at_times
        answers = []
        recompiles = take_snapshot(llm.engine).recompiles
        for prompt in prompts:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
        assert take_snapshot(llm.engine).recompiles == recompiles
        results[mode] = answers, recorder.proposed
        llm.engine.observers.remove(recorder)
    llm.close()
    expected, expected_drafts = results["always"]
    answers, drafts = results["at times"]
    common_texts = expected_drafts.keys() & drafts.keys()
    assert answers == expected and len(common_texts) > 15
    assert {text: expected_drafts[text] for text in common_texts} == {
        text: drafts[text] for text in common_texts
    }


def make_speculator(seconds, **config):
    return Speculator(parse_speculative_config({"method": "ngram", **config}), seconds)


def running(count, drafts, tokens=50):
    return [
        Pretended(
            missing=1,
            pending=0,
            draft=DraftState(tokens=list(range(drafts)), waits_for_host=True),
            num_output=tokens,
            tokens=[0] * (1 + tokens),
            num_prompt=1,
            index=index,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("rate", "slope", "expected"), [(0.9, 0.01, 4), (0.7, 0.5, 1), (0.3, 0.01, 3), (0.05, 0.2, 0)]
)
def test_number_of_drafts_maximizes_speed(rate, slope, expected):
    """The best depth k maximises (1 - a^(k+1)) / (1 - a), divided by the time of a step."""
    speculator = make_speculator(lambda rows, seqs, drafts: 1 + slope * (rows - seqs))
    (seq,) = running(1, 4)
    speculator.records = {seq: DraftRecord(AcceptanceRate(24, rate * 1e6, 1e6))}
    speculator.is_drafting = True
    speculator.plan_drafts([seq])
    speeds = [sum(rate**i for i in range(k + 1)) / (1 + slope * k) for k in range(5)]
    assert speeds.index(max(speeds)) == len(seq.draft.tokens) == expected
    assert seq.draft.waits_for_host == (expected > 0)


class Chance:
    """Proposes drafts with probability `ideas`; each is 0, i.e. right, with probability `rate`."""

    def __init__(self, rng, rate, ideas):
        self.rng = rng
        self.rate = rate
        self.ideas = ideas

    def propose(self, seq, max_drafts):
        return drawn(self.rng, self.rate, max_drafts if self.rng.random() < self.ideas else 0)

    def end(self, seq):
        pass


def drawn(rng, rate, count):
    return [int(rng.random() >= rate) for _ in range(count)]


def gain(
    config,
    count,
    rate,
    proposal_rate=1.0,
    draft_seconds=0.0,
    steps=1500,
    slowness=lambda step: 1.0,
    verify_slowdown=1.0,
    has_turns=False,
    drafted_counts: list[int] | None = None,
) -> float:
    """Simulates drafting; returns the number of tokens over that of plain decoding in equal time.

    The time of a step is that of the speculator's table, plus 0.1 ms if the host waits for tokens,
    times `slowness(step)`, and times `verify_slowdown` if the step verifies drafts. A draft is
    right if it is 0. With `has_turns`, answers have different lengths, and new sequences start when
    all have ended. The number of tokens that each step drafts is appended to `drafted_counts`.
    """

    def seconds(rows, seqs, drafts):
        return 8e-4 + 2.5e-5 * rows + drafts * draft_seconds

    def make_sequence():
        seq = Pretended(
            tokens=[0, 0],
            num_prompt=1,
            num_output=1,
            max_tokens=rng.choice(lengths),
            missing=1,
            pending=0,
            draft=DraftState(),
            constraint=None,
            pool=None,
        )
        speculator.add(seq)
        return seq

    rng = random.Random(1)
    lengths = range(10, 200, 10) if has_turns else [200]
    # a proposal takes 10 µs
    speculator = Speculator(parse_speculative_config(config), seconds, count_up(step=1e-5).__next__)
    if not speculator.on_device:
        speculator.host_drafter = Chance(rng, rate, proposal_rate)
    seqs = [make_sequence() for _ in range(count)]
    plain_tokens = 0.0
    tokens = 0
    for step in range(steps):
        speculator.plan_drafts(seqs)
        is_waiting = any(seq.draft.waits_for_host for seq in seqs)
        num_requested = max(seq.draft.num_requested for seq in seqs)
        verified = [
            seq.draft.proposals[: seq.draft.num_on_device]
            if speculator.on_device
            else seq.draft.tokens
            for seq in seqs
        ]
        drafts = sum(map(len, verified))
        num_seqs = len(seqs)
        if drafted_counts is not None:
            drafted_counts.append(drafts + num_requested)
        seconds_taken = (
            seconds(num_seqs + drafts, num_seqs, num_requested) + 1e-4 * is_waiting
        ) * (verify_slowdown if drafts else 1)
        if speculator.records_timing:
            speculator.record_step_time(
                num_seqs,
                drafts,
                num_requested,
                is_waiting or drafts > 0,
                seconds_taken * slowness(step),
            )
        plain_tokens += num_seqs * seconds_taken / seconds(num_seqs, num_seqs, 0)
        for index, seq in enumerate(seqs):
            length = len(verified[index])
            num_accepted = next((at for at, token in enumerate(verified[index]) if token), length)
            seq.tokens += [0] * (1 + num_accepted)
            seq.num_output += 1 + num_accepted
            tokens += 1 + num_accepted
            seq.draft.proposals = drawn(rng, rate, seq.draft.num_requested)
            seq.draft.num_on_device = seq.draft.num_requested
            seq.pending = int(not is_waiting)
            if seq.num_output < seq.max_tokens:
                speculator.draft_next(seq, length, num_accepted)
            else:
                speculator.remove(seq)
                seqs[index] = None if has_turns else make_sequence()
            seq.pending = 0
        seqs = [seq for seq in seqs if seq is not None] or [make_sequence() for _ in range(count)]
    return tokens / plain_tokens


LAYERS = {"method": "self", "num_layers": 4}


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize(
    ("config", "draft_seconds", "proposal_rate"),
    [
        ({"method": "ngram"}, 0, 1),
        ({"method": "ngram"}, 0, 0.3),
        (LAYERS, 1.5e-4, 1),
        (LAYERS, 5e-4, 1),
    ],
)
@pytest.mark.slow
def test_adaptive_drafting_is_near_optimal(config, draft_seconds, proposal_rate, count):
    """Compares the speed with plain decoding and with the best fixed depth."""
    wait_seconds = 1e-4 if config["method"] == "ngram" else 0
    for acceptance_rate in (0, 0.3, 0.7, 0.95, 1):
        plain_seconds = 8e-4 + 2.5e-5 * count
        best_possible = max(
            sum(acceptance_rate**i for i in range(k + 1))
            / (
                (plain_seconds + 2.5e-5 * count * k + k * draft_seconds + wait_seconds)
                / plain_seconds
            )
            for k in range(1, 5)
        )
        actual = gain(config, count, acceptance_rate, proposal_rate, draft_seconds)
        assert actual > 0.97
        assert proposal_rate < 1 or actual > 0.93 * best_possible


@pytest.mark.parametrize("config", [{"method": "ngram"}, LAYERS])
@pytest.mark.parametrize("period", [60, 400])
def test_adaptive_drafting_tolerates_varying_step_times(config, period):
    """The machine is 2.5 times slower in every second period, and steps vary by 20 %."""
    rng = random.Random(2)
    noise = [rng.uniform(0.8, 1.2) for _ in range(3000)]

    def slowness(step):
        return (2.5 if step // period % 2 else 1.0) * noise[step]

    steady_gain = gain(config, 1, 0.9, draft_seconds=1e-4, steps=3000)
    assert (
        gain(config, 1, 0.9, draft_seconds=1e-4, steps=3000, slowness=slowness) > 0.93 * steady_gain
    )
    assert gain(config, 1, 0.0, draft_seconds=1e-4, steps=3000, slowness=slowness) > 0.96


@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_measured_draft_cost_applies_to_all_batch_sizes(rate):
    """Verifying takes twice the time of the table, while the number of sequences varies from 16
    to 1.
    """
    assert (
        gain(LAYERS, 16, rate, draft_seconds=1e-4, steps=600, verify_slowdown=2.0, has_turns=True)
        > 0.964
    )


@pytest.mark.parametrize(
    ("config", "rate", "draft_seconds", "share"),
    [
        (LAYERS, 0.0, 1e-4, "0%"), (LAYERS, 0.3, 4e-4, "[234][0-9]%"), (LAYERS, 1.0, 1e-2, None),
        ({"method": "ngram"}, 0.0, 0.0, "0%"),
    ],
)  # fmt: skip
def test_useless_drafting_is_reported_once_and_stops(caplog, config, rate, draft_seconds, share):
    caplog.set_level("INFO", "quire")
    drafted_counts: list[int] = []
    assert (
        gain(
            config, 1, rate, draft_seconds=draft_seconds, steps=4000, drafted_counts=drafted_counts
        )
        > 0.985
    )
    assert sum(drafted_counts[-2000:]) <= 4
    (message,) = [record.getMessage() for record in caplog.records]
    pattern = (
        rf"speculative decoding \({config['method']}\) does not pay with 1 running sequences: "
        + (
            "not even drafts that are all right would"
            if share is None
            else (f"{share} of the drafts are right")
        )
    )
    assert re.match(pattern, message), message


@pytest.mark.parametrize("config", [LAYERS, {"method": "ngram"}])
def test_useful_drafting_is_not_reported(caplog, config):
    caplog.set_level("INFO", "quire")
    assert gain(config, 1, 0.9, draft_seconds=1e-4, steps=4000) > 1.3
    assert not caplog.records


def test_too_expensive_drafting_is_never_tried():
    """If a draft takes a thousand times as long as a step, not even a trial draft is made."""
    speculator = Speculator(
        parse_speculative_config(LAYERS), lambda rows, seqs, drafts: seqs * 1e-3 + drafts
    )
    seqs = running(16, 0)
    for seq in seqs:
        seq.pool = None
        seq.max_tokens = 100
        seq.draft.waits_for_host = False
        speculator.add(seq)
    for _ in range(200):
        speculator.plan_drafts(seqs)
        assert not any(seq.draft.num_requested or seq.draft.waits_for_host for seq in seqs)


BAD = [
    ({}, "method is missing"),
    ({"method": "oracle"}, "method is 'oracle'; it must be one of ngram"),
    (
        {"method": "ngram", "num_speculative_tokens": 0},
        "num_speculative_tokens is 0; it must be an integer",
    ),
    ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens is True"),
    (
        {"method": "ngram", "num_speculative_tokens": 8},
        "8; with the token before them they must fit into .*, 8",
    ),
    (
        {"method": "ngram", "prompt_lookup_min": 6},
        "prompt_lookup_max is 5; .* prompt_lookup_min, 6",
    ),
    ({"method": "draft_model"}, "model is missing; it goes with the methods draft_model"),
    (
        {"method": "ngram", "model": "x"},
        "model is 'x'; it goes with the methods draft_model, .*, and only",
    ),
    ({"method": "draft_model", "model": "/nowhere"}, "/nowhere"),
    ({"method": "self"}, "num_layers and quantization are missing"),
    ({"method": "self", "num_layers": 8}, "num_layers is 8; the model has 8 layers, and fewer"),
    ({"method": "ngram", "num_layers": 2}, "num_layers is 2; .* with the method self"),
    (
        {"method": "ngram", "temperature": 1},
        "speculative_config.temperature is not known; the fields are method",
    ),
    ("ngram", "must be an object such as"),
    (
        {"method": "medusa", "model": "quill-medusa", "speculative_token_tree": "[(0,)]"},
        "speculative_token_tree is not supported: .* use num_speculative_tokens",
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD)
def test_invalid_speculative_config_is_refused(config, message):
    with pytest.raises(ModelError, match=message):
        LLM(speculative_config=config, max_num_batched_tokens=8, max_num_seqs=4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_drafter(method):
    row = METHODS[method]
    module = import_module(row.module, "quire.serving.speculative")
    assert hasattr(module, "load_drafter" if row.on_device else "make_drafter")


def test_allowed_after_drafts_leaves_the_grammar_state_unchanged(compiled):
    """The masks equal those of a constraint without lookahead; the first case once failed after a
    rollback.
    """
    tokenizer = compiled[1]
    rng = random.Random(9)
    stops = frozenset({2})
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    recorded_steps = [
        (334, []),
        (299, [841, 539, 87]),
        (287, [334, 658, 701, 266]),
        (87, [1207, 701, 643]),
        (701, [701, 315]),
    ]
    for case in range(cases(60)):
        structure = (
            rng.choice(({"json_object": True}, {"regex": "[a-z ]{20,60}"}))
            if case
            else {"json_object": True}
        )
        reference, constraint = grammars.constraints(structure, 2)
        for step in range(20):
            allowed = reference.allowed(stops)
            if case == 0 and step == len(recorded_steps):
                break
            token, drafts = (
                recorded_steps[step]
                if case == 0
                else (None, rng.choices(np.flatnonzero(allowed).tolist(), k=4))
            )
            rows = list(constraint.allowed_after(constraint.longest_allowed_prefix(drafts), stops))
            np.testing.assert_array_equal(rows[0], allowed)
            token = (
                rng.choice([t for t in np.flatnonzero(allowed).tolist() if t not in stops] or [2])
                if case
                else token
            )
            if reference.advance(token) or constraint.advance(token):
                break
            if len(rows) > 1 and drafts[0] == token:
                np.testing.assert_array_equal(rows[1], reference.allowed(stops))


def test_idle_time_is_not_recorded_as_step_time(compiled):
    """The last step of an answer may be in flight when the answer ends, and is collected only when
    the next request arrives.
    """
    engine = engine_of(compiled)
    now = [0.0]
    recorded_seconds = []
    engine.clock = lambda: now[0]
    engine.speculator.record_step_time = lambda *arguments: recorded_seconds.append(arguments[-1])
    prompt = compiled[1].encode("Once upon a time")
    for number in range(3):
        request = engine.add(str(number), prompt, SamplingParams(temperature=0, max_tokens=20))
        while request.sequences[0].finish_reason is None:
            now[0] += 1
            engine.step()
        now[0] += 1000
    assert recorded_seconds and max(recorded_seconds) == 1
