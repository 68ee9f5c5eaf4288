"""Speculative decoding gives the bits of plain decoding, whatever the drafts, and whatever else is
asked for.
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
    """quill's steps, without drafts and with them; with them also those that draw plainly, as on a
    GPU.
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
    """With a device state of its own, and the steps that are compiled."""
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
    """Drafts what plain decoding said, each token wrong with some chance: so drafts are accepted to
    any depth.
    """

    def __init__(self, answers, rng: random.Random, vocab: int):
        self.answers = answers
        self.rng = rng
        self.vocab = vocab

    def propose(self, seq, most):
        truth = self.answers[seq.request.request_id][seq.index][0][seq.num_output :]
        wrong = self.rng.choice((0, 0.1, 0.5))
        drafts = [
            self.rng.randrange(self.vocab) if self.rng.random() < wrong else token
            for token in truth
        ]
        return (drafts + [self.rng.randrange(self.vocab)])[: self.rng.randint(0, most)]

    def end(self, seq):
        pass


@pytest.mark.random
@pytest.mark.slow
def test_the_very_tokens_of_plain_decoding(compiled, tmp_path):
    """Random requests with drafts that are right to any depth, also where pages are short, and from
    disk.
    """
    rng = random.Random(3)
    runners = compiled[0]
    plain = engine_of(compiled, PLAIN)
    config = runners[DRAFTED].config
    recompiled = runners[DRAFTED].compiles.recompiles
    sizes = [page_bytes(config, group, 16) for group in range(len(config.windows))]
    host_cache = HostCache(sizes, 12 * max(sizes), DiskCache(tmp_path, 1 << 30), b"quill")
    engines = {
        "roomy": engine_of(compiled, adapts=False),
        "tight": engine_of(compiled, num_pages=17, adapts=False),
        "tiered": engine_of(compiled, num_pages=17, host_cache=host_cache, adapts=False),
        "adaptive": engine_of(compiled, adapts=True),
    }
    gave_way = 0
    for number in range(cases(60, least=12)):
        requests, arrivals = mix(rng, config.vocab_size)
        expected = serve(plain, requests, arrivals)
        for kind in ("roomy", rng.choice(("tight", "tiered", "adaptive"))):
            engine = engines[kind]
            engine.speculator.host_drafter = Oracle(expected, rng, config.vocab_size)
            watch = Preemptions(engine)
            assert serve(engine, requests, arrivals) == expected, f"mix {number}, {kind}"
            gave_way += watch.count
        victim = rng.choice(list(requests))
        left = serve(
            engines["roomy"], requests, arrivals, [(victim, arrivals[victim] + rng.randint(0, 9))]
        )
        for name, answers in expected.items():
            if name != victim:
                assert left[name] == answers
            else:
                assert all(
                    cut[0] == own[0][: len(cut[0])]
                    for cut, own in zip(left[name], answers, strict=True)
                )
    engines["tiered"].close()
    for engine in engines.values():
        accepted = engine.speculator.counts.accepted
        assert accepted[0] > accepted[-1] > 0, "drafts were accepted to every depth"
    assert gave_way > 0 and runners[DRAFTED].compiles.recompiles == recompiled


def test_steps_that_verify_draw_plainly_where_all_do(compiled):
    """Those programs that lack what nobody asks for give the same, and a step in which somebody
    asks is another's.
    """
    engine = engine_of(compiled, adapts=False)
    plain = engine_of(compiled, PLAIN)
    sizes = compiled[0][DRAFTED].compiled
    used = []
    assert {*engine.runner.plain} == {size for size in sizes if size.samples >= size.rows}

    def told(size, program):
        def call(*given):
            used.append(size)
            return program(*given)

        return call

    engine.runner.plain = {
        size: told(size, program) for size, program in engine.runner.plain.items()
    }
    prompt = compiled[1].encode("Once upon a time")
    asked = {"top_k": 3}, {"presence_penalty": 1.0}, {"logprobs": 1}, {"min_tokens": 19}
    for more in ({}, *asked):
        requests = {
            str(seed): (prompt, SamplingParams(temperature=t, seed=seed, max_tokens=20, **more))
            for seed, t in enumerate((0, 0.8, 1.0))
        }
        arrivals = dict.fromkeys(requests, 0)
        expected = serve(plain, requests, arrivals)
        engine.speculator.host_drafter = Oracle(expected, random.Random(5), engine.runner.vocab)
        used.clear()
        assert serve(engine, requests, arrivals) == expected
        assert any(size.rows > size.seqs for size in used) == (not more)
    assert engine.speculator.counts.accepted[-1] > 0


class Preemptions(Observer):
    """Counts them, in one mix."""

    def __init__(self, engine: Engine):
        self.count = 0
        engine.observers[:] = [self]

    def observe(self, record):
        self.count += sum(
            seq.num_preemptions for request in record.changed for seq in request.sequences
        )


class Ahead(Observer):
    """Counts sequences with drafts whose step was planned before it was known which of the last
    were right.
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


@pytest.mark.nightly  # test_speculative_matrix.py has some of it
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: "-".join(map(str, config.values()))[-24:]
)
def test_each_drafter_leaves_the_answers_as_they_are(compiled, config, tmp_path):
    """Its own drafts, taken always and only where they pay, where pages are short; all is asked a
    second time.
    """
    rng = random.Random(4)
    vocab = compiled[0][DRAFTED].config.vocab_size
    plain = engine_of(compiled, PLAIN)
    common = {
        "dtype": "float32",
        "max_model_len": LENGTH,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
    }
    memory = {
        "kv_cache_memory_bytes": 2 << 20,
        "kv_cache_disk": str(tmp_path),
        "kv_cache_host_bytes": 1 << 20,
    }
    llms = [
        LLM(**common, speculative_config=config),
        LLM(**common, **memory, speculative_config=config | {"adapts": False}),
    ]
    compiles = [take_snapshot(llm.engine).recompiles for llm in llms]  # those of the other
    llms[1].engine.observers.append(ahead := Ahead())
    for _ in range(cases(20, least=3)):
        requests, arrivals = mix(rng, vocab)
        expected = serve(plain, requests, arrivals)
        for llm, _ in product(llms, range(2)):
            assert serve(llm.engine, requests, arrivals) == expected
    assert llms[1].engine.speculator.counts.accepted[0] > 0
    assert (ahead.count > 0) == llms[1].engine.speculator.on_device
    runner = llms[0].engine.runner
    for (
        size,
        resting,
    ) in runner.without_drafter.items():  # the drafter's products and loops are not in it
        assert (
            "/draft/" in runner.compiled[size].as_text()
            and "/draft/" not in resting.program.as_text()
        )
    assert [take_snapshot(llm.engine).recompiles for llm in llms] == compiles
    for llm in llms:
        llm.close()


@pytest.mark.slow
def test_draws_follow_the_models_distribution(compiled):
    """With drafts and without, second tokens are drawn as the model's own probabilities say
    (chi-square).
    """
    prompt = compiled[1].encode("Once upon a time")
    tokens = 2000
    one = SamplingParams(temperature=1.0, max_tokens=1, logprobs=20)
    engine = engine_of(compiled, PLAIN)
    (token,) = serve(
        engine, {"0": (prompt, SamplingParams(temperature=0, max_tokens=1))}, {"0": 0}
    )["0"][0][0]
    (answer,) = serve(engine, {"1": ([*prompt, token], one)}, {"1": 0})["1"]
    listed = {entry[0]: np.exp(entry[1]) for entry in answer[4][0]}
    drafted = engine_of(compiled, adapts=False)
    drafted.speculator.host_drafter = Always([token, answer[0][0], 7, 9])
    seen: dict[int, int] = {}
    requests = {
        str(seed): (
            prompt,
            SamplingParams(temperature=1.0, seed=seed, max_tokens=3, allowed_token_ids=None),
        )
        for seed in range(tokens)
    }
    for start in range(0, tokens, 400):
        part = dict(list(requests.items())[start : start + 400])
        for ((ids, *_),) in serve(drafted, part, dict.fromkeys(part, 0)).values():
            if ids[0] == token and len(ids) > 1:
                seen[ids[1]] = seen.get(ids[1], 0) + 1
    total = sum(seen.values())
    expected = {t: p * total for t, p in listed.items() if p * total >= 5}
    observed = [seen.get(t, 0) for t in expected]
    rest = total - sum(observed)
    rest_expected = total - sum(expected.values())
    assert (
        total > 300
        and stats.chisquare([*observed, rest], [*expected.values(), rest_expected]).pvalue > 1e-4
    )


class Always:
    """Drafts the same tokens again and again."""

    def __init__(self, drafts):
        self.drafts = drafts

    def propose(self, seq, most):
        return self.drafts[seq.num_output :][:most]

    def end(self, seq):
        pass


class Pretended(SimpleNamespace):
    """What drafters see of a sequence."""

    __hash__ = object.__hash__


def test_an_ngram_is_followed_by_what_followed_it_last():
    """Random texts of few tokens beside a naive search, drafted from as they grow."""
    rng = random.Random(5)
    for _ in range(30):
        drafter = NgramDrafter(2, 4)
        seq = Pretended(tokens=[])
        while len(seq.tokens) < 80:
            seq.tokens.extend(rng.choices(range(4), k=rng.randint(1, 6)))
            tokens = seq.tokens
            expected = []
            for length in (4, 3, 2):
                ends = [
                    end
                    for end in range(length, len(tokens))
                    if tokens[end - length : end] == tokens[-length:]
                ]
                if ends and len(tokens) >= length:
                    following = list(tokens)
                    for index in range(5):
                        following.append(following[ends[-1] + index])
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


def test_answers_that_were_given_are_drafted_again():
    drafter = SuffixDrafter(max_texts=2)
    first = sequence([1, 2, 3, 4, 5, 6], prompt=2)
    assert drafter.propose(first, 4) == []
    drafter.end(first)
    again = sequence([9, 2, 3])
    assert drafter.propose(again, 9) == [4, 5, 6]
    assert drafter.propose(again, 2) == [4, 5]
    assert drafter.propose(sequence([9, 2, 3], salt="somebody else"), 9) == []
    for other in ([7, 2, 3, 8], [8, 8, 8]):  # two texts are remembered, and the first goes
        text = sequence(other)
        drafter.propose(text, 1)
        drafter.end(text)
    assert drafter.propose(again, 9)[:1] == [8]
    assert (
        not drafter.places["somebody else"].ends.get((5, 6))
        and (5, 6) not in drafter.places[None].ends
    )


def test_most_votes_win_among_the_longest_matches():
    drafter = SuffixDrafter(max_texts=10)
    for tail in ([3, 4], [3, 4], [3, 5]):
        text = sequence([1, 2, *tail])
        drafter.propose(text, 1)
        drafter.end(text)
    assert drafter.propose(sequence([1, 2]), 2) == [3, 4]
    longer = sequence([7, 1, 2, 6])
    drafter.propose(longer, 1)
    drafter.end(longer)
    assert drafter.propose(sequence([7, 1, 2]), 1) == [6], (
        "what agrees further back is more like it"
    )


@pytest.mark.slow
def test_a_drafter_catches_up_on_what_it_has_not_followed():
    """After steps without drafts it says what it would have said; so it does where it finds pages
    that it never saw.
    """
    rng = random.Random(8)
    asked = [list(range(300, 370)), list(range(300, 350)) + [20, 21]]
    config = {"method": "draft_model", "model": CONFIGS[2]["model"], "adapts": False}
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    found = {}
    llm = LLM(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=LENGTH, speculative_config=config
    )
    for kind in ("always", "at times"):
        assert llm.reset_prefix_cache()
        seen = Recorded.of(llm.engine)
        plan_drafts = llm.engine.speculator.plan_drafts
        drafting = []

        def at_times(
            running, step=plan_drafts, speculator=llm.engine.speculator, drafting=drafting
        ):
            """Rests for some steps, begins again for some."""
            step(running)
            for seq in speculator.records:
                if rng.random() < (0.05 if drafting else 0.9):
                    seq.draft.num_requested = 0
                    seq.draft.clear()
                drafting[:] = [True] * (seq.draft.num_requested > 0)

        if kind == "at times":
            llm.engine.speculator.plan_drafts = at_times
        answers = []
        compiles = take_snapshot(llm.engine).recompiles
        for prompt in asked:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
        assert take_snapshot(llm.engine).recompiles == compiles
        found[kind] = answers, seen.proposed
        llm.engine.observers.remove(seen)
    llm.close()
    expected, always = found["always"]
    answers, times = found["at times"]
    both = always.keys() & times.keys()
    assert answers == expected and len(both) > 15
    assert {known: always[known] for known in both} == {known: times[known] for known in both}


def speculator(seconds, **config):
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
def test_as_many_drafts_as_pay(rate, slope, expected):
    """Beside the best depth by the formula (1 - a^(k+1)) / (1 - a) over the time of a step."""
    own = speculator(lambda rows, seqs, drafts: 1 + slope * (rows - seqs))
    (seq,) = running(1, 4)
    own.records = {seq: DraftRecord(AcceptanceRate(24, rate * 1e6, 1e6))}
    own.is_drafting = True
    own.plan_drafts([seq])
    speeds = [sum(rate**i for i in range(k + 1)) / (1 + slope * k) for k in range(5)]
    assert speeds.index(max(speeds)) == len(seq.draft.tokens) == expected
    assert seq.draft.waits_for_host == (expected > 0)


class Chance:
    """Drafts zeros, which are right, each with a chance; and has an idea at all with another."""

    def __init__(self, rng, rate, ideas):
        self.rng = rng
        self.rate = rate
        self.ideas = ideas

    def propose(self, seq, most):
        return drawn(self.rng, self.rate, most if self.rng.random() < self.ideas else 0)

    def end(self, seq):
        pass


def drawn(rng, rate, count):
    return [int(rng.random() >= rate) for _ in range(count)]


def gain(config, count, rate, ideas=1.0, draft=0.0, steps=1500, slowness=lambda step: 1.0, dear=1.0,
         turns=False, drafted: list[int] | None = None) -> float:  # fmt: skip
    """Tokens over those of plain decoding in the same time, by a clock that goes as the table of
    step times says.

    Where tokens are waited for, the host's tenth of a millisecond comes on top. All is slower by
    `slowness(step)`, and steps that verify take `dear` times as long as the table says. A draft is
    0 where it is right. With `turns` answers have many lengths, and others come when all are there.
    `drafted` gets the tokens that each step drafts.
    """

    def seconds(rows, seqs, drafts):
        return 8e-4 + 2.5e-5 * rows + drafts * draft

    def new():
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
        own.add(seq)
        return seq

    rng = random.Random(1)
    lengths = range(10, 200, 10) if turns else [200]
    # to propose takes 10 µs
    own = Speculator(parse_speculative_config(config), seconds, count_up(step=1e-5).__next__)
    if not own.on_device:
        own.host_drafter = Chance(rng, rate, ideas)
    seqs = [new() for _ in range(count)]
    plain = 0.0
    tokens = 0
    for step in range(steps):
        own.plan_drafts(seqs)
        waited = any(seq.draft.waits_for_host for seq in seqs)
        asks = max(seq.draft.num_requested for seq in seqs)
        verified = [
            seq.draft.proposals[: seq.draft.num_on_device] if own.on_device else seq.draft.tokens
            for seq in seqs
        ]
        drafts = sum(map(len, verified))
        n = len(seqs)
        if drafted is not None:
            drafted.append(drafts + asks)
        took = (seconds(n + drafts, n, asks) + 1e-4 * waited) * (dear if drafts else 1)
        if own.records_timing:
            own.record_step_time(n, drafts, asks, waited or drafts > 0, took * slowness(step))
        plain += n * took / seconds(n, n, 0)
        for index, seq in enumerate(seqs):
            length = len(verified[index])
            right = next((at for at, token in enumerate(verified[index]) if token), length)
            seq.tokens += [0] * (1 + right)
            seq.num_output += 1 + right
            tokens += 1 + right
            seq.draft.proposals = drawn(rng, rate, seq.draft.num_requested)
            seq.draft.num_on_device = seq.draft.num_requested
            seq.pending = int(not waited)
            if seq.num_output < seq.max_tokens:
                own.draft_next(seq, length, right)
            else:
                own.remove(seq)
                seqs[index] = None if turns else new()
            seq.pending = 0
        seqs = [seq for seq in seqs if seq is not None] or [new() for _ in range(count)]
    return tokens / plain


LAYERS = {"method": "self", "num_layers": 4}


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize(
    ("config", "draft", "ideas"),
    [
        ({"method": "ngram"}, 0, 1),
        ({"method": "ngram"}, 0, 0.3),
        (LAYERS, 1.5e-4, 1),
        (LAYERS, 5e-4, 1),
    ],
)
@pytest.mark.slow
def test_drafts_gain_what_they_can_and_cost_next_to_nothing(config, draft, ideas, count):
    """Beside plain decoding, and beside the best depth for drafts that are right so often, by the
    formula.
    """
    waiting = 1e-4 if config["method"] == "ngram" else 0
    for rate in (0, 0.3, 0.7, 0.95, 1):
        own = 8e-4 + 2.5e-5 * count
        best = max(
            sum(rate**i for i in range(k + 1))
            / ((own + 2.5e-5 * count * k + k * draft + waiting) / own)
            for k in range(1, 5)
        )
        found = gain(config, count, rate, ideas, draft)
        assert found > 0.97
        assert ideas < 1 or found > 0.93 * best


@pytest.mark.parametrize("config", [{"method": "ngram"}, LAYERS])
@pytest.mark.parametrize("every", [60, 400])
def test_drafts_go_on_where_the_machine_changes_its_pace(config, every):
    """Others make it two and a half times slower for a while, and each step takes a fifth more or
    less by chance.
    """
    rng = random.Random(2)
    noise = [rng.uniform(0.8, 1.2) for _ in range(3000)]

    def slowness(step):
        return (2.5 if step // every % 2 else 1.0) * noise[step]

    steady = gain(config, 1, 0.9, draft=1e-4, steps=3000)
    assert gain(config, 1, 0.9, draft=1e-4, steps=3000, slowness=slowness) > 0.93 * steady
    assert gain(config, 1, 0.0, draft=1e-4, steps=3000, slowness=slowness) > 0.96


@pytest.mark.parametrize("rate", [0.3, 0.6])
def test_what_drafts_cost_in_service_is_learnt_for_all_sizes_at_once(rate):
    """Steps that verify take twice what they took alone, and the number of sequences falls from 16
    to 1 and rises.
    """
    assert gain(LAYERS, 16, rate, draft=1e-4, steps=600, dear=2.0, turns=True) > 0.964


@pytest.mark.parametrize(
    ("config", "rate", "draft", "share"),
    [
        (LAYERS, 0.0, 1e-4, "0%"), (LAYERS, 0.3, 4e-4, "[234][0-9]%"), (LAYERS, 1.0, 1e-2, None),
        ({"method": "ngram"}, 0.0, 0.0, "0%"),
    ],
)  # fmt: skip
def test_drafts_that_gain_nothing_are_reported_once_and_stop(caplog, config, rate, draft, share):
    caplog.set_level("INFO", "quire")
    drafted: list[int] = []
    assert gain(config, 1, rate, draft=draft, steps=4000, drafted=drafted) > 0.985
    assert sum(drafted[-2000:]) <= 4
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
def test_drafts_that_pay_are_not_reported(caplog, config):
    caplog.set_level("INFO", "quire")
    assert gain(config, 1, 0.9, draft=1e-4, steps=4000) > 1.3
    assert not caplog.records


def test_drafts_that_cannot_pay_are_not_even_tried():
    """A step that takes as much longer as it drafts tokens: no draft, and no look, whatever would
    be accepted.
    """
    own = Speculator(
        parse_speculative_config(LAYERS), lambda rows, seqs, drafts: seqs * 1e-3 + drafts
    )
    seqs = running(16, 0)
    for seq in seqs:
        seq.pool = None
        seq.max_tokens = 100
        seq.draft.waits_for_host = False
        own.add(seq)
    for _ in range(200):
        own.plan_drafts(seqs)
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
def test_what_cannot_be_drafted_is_refused(config, message):
    with pytest.raises(ModelError, match=message):
        LLM(speculative_config=config, max_num_batched_tokens=8, max_num_seqs=4)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_its_drafter(method):
    row = METHODS[method]
    module = import_module(row.module, "quire.serving.speculative")
    assert hasattr(module, "load_drafter" if row.on_device else "make_drafter")


def test_a_grammar_that_looks_ahead_stays_where_it_is(compiled):
    """What may come is what a grammar says that never looked ahead; the first case broke one that
    was rolled back.
    """
    tokenizer = compiled[1]
    rng = random.Random(9)
    stops = frozenset({2})
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    known = [
        (334, []),
        (299, [841, 539, 87]),
        (287, [334, 658, 701, 266]),
        (87, [1207, 701, 643]),
        (701, [701, 315]),
    ]
    for case in range(cases(60)):
        form = (
            rng.choice(({"json_object": True}, {"regex": "[a-z ]{20,60}"}))
            if case
            else {"json_object": True}
        )
        steady, looking = grammars.constraints(form, 2)
        for step in range(20):
            allowed = steady.allowed(stops)
            if case == 0 and step == len(known):
                break
            token, drafts = (
                known[step]
                if case == 0
                else (None, rng.choices(np.flatnonzero(allowed).tolist(), k=4))
            )
            rows = list(looking.allowed_after(looking.longest_allowed_prefix(drafts), stops))
            np.testing.assert_array_equal(rows[0], allowed)
            token = (
                rng.choice([t for t in np.flatnonzero(allowed).tolist() if t not in stops] or [2])
                if case
                else token
            )
            if steady.advance(token) or looking.advance(token):
                break
            if len(rows) > 1 and drafts[0] == token:
                np.testing.assert_array_equal(rows[1], steady.allowed(stops))


def test_a_step_that_nobody_waited_for_tells_no_pace(compiled):
    """The last step of an answer may have been under way when it ended, and is taken in when the
    next request comes.
    """
    engine = engine_of(compiled)
    now = [0.0]
    told = []
    engine.clock = lambda: now[0]
    engine.speculator.record_step_time = lambda *arguments: told.append(arguments[-1])
    prompt = compiled[1].encode("Once upon a time")
    for number in range(3):
        request = engine.add(str(number), prompt, SamplingParams(temperature=0, max_tokens=20))
        while request.sequences[0].finish_reason is None:
            now[0] += 1
            engine.step()
        now[0] += 1000
    assert told and max(told) == 1
