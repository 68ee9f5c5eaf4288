"""Several drafts for the same place: the answers are those of plain decoding, whichever path they
take.
"""

import random
from dataclasses import replace

import pytest

from quire import LLM, SamplingParams
from quire.model.checkpoint import hub, loader
from quire.model.config import ModelError
from quire.model.text.tokenizer import Tokenizer
from quire.serving.api.speculation import parse_speculative_config
from quire.serving.cache.disk_cache import DiskCache
from quire.serving.cache.host_cache import HostCache
from quire.serving.cache.page_table import PageTable
from quire.serving.device.state import page_bytes
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.engine import Engine
from quire.serving.engine.runner import Runner
from quire.serving.engine.snapshot import take_snapshot
from quire.serving.engine.step_record import Observer
from quire.serving.speculative.speculator import Rate, Record, Speculator
from quire.tests.support.cases import cases, thinned
from quire.tests.support.mixes import mix, serve
from quire.tests.support.recorded_drafts import Recorded

LENGTH = 256
TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0)]"
CONFIG = {"method": "medusa", "model": "quill-medusa", "speculative_token_tree": TREE}
PATHS = parse_speculative_config(CONFIG).paths
PLAIN = StepShape.largest(4, 48, 16)
DRAFTED = replace(
    PLAIN, max_drafts=4, num_branches=len(PATHS), tree_tokens=sum(1 + len(path) for path in PATHS)
)


def test_a_tree_is_its_paths():
    assert PATHS == ((0, 0, 0, 0), (0, 1), (1, 0, 0), (1, 1), (2,))
    given = [[0], [0, 0], [1]], "[(0,), (0, 0), (1,)]", ((0,), (0, 0), (1,))
    trees = [parse_speculative_config(CONFIG | {"speculative_token_tree": tree}) for tree in given]
    assert {
        (tree.paths, tree.depth, tree.num_rows, tree.num_speculative_tokens) for tree in trees
    } == {(((0, 0), (1,)), 2, 5, 3)}
    chain = parse_speculative_config({"method": "ngram", "num_speculative_tokens": 3})
    assert (chain.paths, chain.depth, chain.num_rows) == (((0, 0, 0),), 3, 4)


@pytest.fixture(scope="module")
def compiled():
    """quill's steps, without drafts, and for those of several paths that the host makes."""
    folder = hub.resolve(None)
    config = loader.read_config(folder, "float32", LENGTH)
    weights = loader.load(folder, config)
    runners = {}
    for shape in (PLAIN, DRAFTED):
        runners[shape] = Runner(
            config, weights, shape, (400,) * len(config.windows), 16, LENGTH, True
        )
        runners[shape].warm_up()
    return runners, Tokenizer(folder)


def engine_of(compiled, shape=DRAFTED, num_pages=400, host_cache=None, **config) -> Engine:
    """With a device state of its own, and the steps that are compiled."""
    runners, tokenizer = compiled
    old = runners[shape]
    runner = Runner(old.config, old.weights, shape, old.num_pages, 16, LENGTH, True)
    runner.compiled, runner.page_copier.programs = old.compiled, old.page_copier.programs
    table = PageTable(
        (num_pages,) * len(old.num_pages), 16, old.config.windows, host_cache=host_cache
    )
    chosen = parse_speculative_config(CONFIG | config) if shape.num_branches > 1 else None
    return Engine(runner, tokenizer, [table], LENGTH, speculation=chosen)


class Oracle:
    """Knows the answer of plain decoding, and says it on one of the paths, with mistakes; the
    others are made up.
    """

    def __init__(self, answers, rng: random.Random, vocab: int):
        self.answers = answers
        self.rng = rng
        self.vocab = vocab

    def propose(self, seq, most):
        rng = self.rng
        truth = self.answers[seq.request.request_id][seq.index][0][seq.num_output :]
        paths = []
        chosen = rng.randrange(len(PATHS))
        for number in range(len(PATHS)):
            wrong = rng.choice((0, 0, 0.2)) if number == chosen else rng.choice((0.3, 0.9, 1))
            drafts = [
                rng.randrange(self.vocab) if rng.random() < wrong else token for token in truth
            ]
            paths.append((drafts + [rng.randrange(self.vocab)])[: rng.randint(0, most)])
        first, *seq.branches = paths
        return first

    def end(self, seq):
        pass


class Watch(Observer):
    """Which paths were taken, and how far; and who was preempted."""

    def __init__(self, engine: Engine):
        self.taken: dict[int, set[int]] = {}
        self.preempted = self.verified = 0
        engine.observers[:] = [self]

    def observe(self, record):
        self.preempted += sum(
            seq.num_preemptions for request in record.changed for seq in request.sequences
        )
        for output in record.result.outputs if record.result else ():
            self.taken.setdefault(output.branch, set()).add(len(output.tokens) - 1)
            self.verified += output.item.num_drafts * (output.item.seq.pool is None)


@pytest.mark.random
@pytest.mark.slow
def test_the_very_tokens_of_plain_decoding(compiled, tmp_path):
    """Random requests with answers on any of the paths, also where pages are short, and from
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
        "adaptive": engine_of(compiled),
    }
    seen = {kind: Watch(engine) for kind, engine in engines.items()}
    for number in range(cases(60, least=12)):
        requests, arrivals = mix(rng, config.vocab_size)
        expected = serve(plain, requests, arrivals)
        for kind in ("roomy", rng.choice(("tight", "tiered", "adaptive"))):
            engine = engines[kind]
            engine.speculator.drafter = Oracle(expected, rng, config.vocab_size)
            assert serve(engine, requests, arrivals) == expected, f"mix {number}, {kind}"
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
    assert seen["roomy"].taken.keys() == set(range(len(PATHS))) and max(seen["roomy"].taken[2]) > 2
    assert all(watch.taken.keys() - {0} for watch in seen.values())
    assert seen["tight"].preempted + seen["tiered"].preempted > 0
    assert runners[DRAFTED].compiles.recompiles == recompiled
    for engine in engines.values():
        (table,) = engine.tables
        assert all(pool.num_free == pool.num_pages - 1 for pool in table.pools), (
            "a path keeps its pages"
        )


HEADS = [CONFIG, {"method": "eagle", "model": "quill-eagle", "speculative_token_tree": TREE}]
COMMON = {
    "dtype": "float32",
    "max_model_len": LENGTH,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
}


@pytest.mark.nightly
@pytest.mark.parametrize("config", HEADS, ids=lambda config: config["method"])
def test_heads_leave_the_answers_as_they_are(compiled, config, tmp_path):
    """Their own drafts, taken always and only where they pay, where pages are short; all is asked a
    second time.
    """
    rng = random.Random(4)
    vocab = compiled[0][DRAFTED].config.vocab_size
    plain = engine_of(compiled, PLAIN)
    memory = {
        "kv_cache_memory_bytes": 2 << 20,
        "kv_cache_disk": str(tmp_path),
        "kv_cache_host_bytes": 1 << 20,
    }
    llms = [
        LLM(**COMMON, speculative_config=config),
        LLM(**COMMON, **memory, speculative_config=config | {"adapts": False}),
    ]
    compiles = [take_snapshot(llm.engine).recompiles for llm in llms]
    watches = [Watch(llm.engine) for llm in llms]
    for _ in range(cases(30, least=3)):
        requests, arrivals = mix(rng, vocab)
        expected = serve(plain, requests, arrivals)
        for llm in llms * 2:
            assert serve(llm.engine, requests, arrivals) == expected
    assert watches[1].taken.keys() - {0}
    assert watches[1].verified == llms[1].engine.speculator.counts.drafts
    assert [take_snapshot(llm.engine).recompiles for llm in llms] == compiles
    for llm in llms:
        llm.close()


def prefix(drafts: list[int], answer: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(drafts, answer, strict=False)) if a != b), len(drafts)
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", thinned(HEADS, HEADS[1:]), ids=lambda config: config["method"])
def test_every_step_takes_the_best_path(config):
    """And the first one is the chain of the same depth, so that a step never gives fewer tokens
    than that.
    """
    prompts = ["The lamp is in the sand. The boat is in the lake. " * 3, "Sort 8 3 5 1 9 2."]
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=70, ignore_eos=True) for t in (0, 1.0)
    ]
    chain = {name: value for name, value in config.items() if name != "speculative_token_tree"}
    found = {}
    for name, own in (("tree", config), ("chain", chain | {"num_speculative_tokens": 4})):
        llm = LLM(**COMMON, speculative_config=own | {"adapts": False})
        steps = Steps()  # alone
        watch = Watch(llm.engine)
        recorded = Recorded.of(llm.engine)
        llm.engine.observers.append(steps)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        found[name] = texts, recorded.proposed, steps.tokens, watch.taken
        llm.close()
    texts, tree, tokens, taken = found["tree"]
    same, chained, _, _ = found["chain"]
    assert texts == same and taken.keys() - {0}
    better = common = 0
    for text, proposed in tree.items():
        (whole,) = [whole for whole in texts if tuple(whole[: len(text)]) == text]
        rest = whole[len(text) :]
        if text in chained and len(rest) > 5:
            assert proposed[:4] == chained[text]
            common += 1
        paths = [proposed[4 * number : 4 * number + len(path)] for number, path in enumerate(PATHS)]
        assert paths[0][0] == paths[1][0] and paths[2][0] == paths[3][0], "they begin alike"
        assert paths[2][1] != paths[3][1], "and then part"
        right = [prefix(path, rest) for path in paths]
        if len(rest) > 5:
            assert tokens[text] == 1 + max(right)
            better += max(right) > right[0]
    assert better > 3 and common > 15


class Steps(Observer):
    """How many tokens each step with drafts gave, by the text before it."""

    def __init__(self):
        self.tokens: dict[tuple[int, ...], int] = {}

    def observe(self, record):
        for output in record.result.outputs if record.result else ():
            if output.item.drafts:
                known = tuple(output.item.seq.tokens[: output.item.num_known])
                self.tokens[known] = len(output.tokens)


@pytest.mark.parametrize(
    ("more", "slope", "expected"), [(0.6, 0.001, True), (0.05, 0.01, False), (0.6, 0.5, False)]
)
def test_further_paths_are_verified_where_they_pay(more, slope, expected):
    """By what they gave of late beyond the first, and what their rows cost."""
    own = Speculator(
        parse_speculative_config(CONFIG),
        lambda rows, seqs, drafts, paths=1: 1 + slope * (rows - seqs),
    )
    (seq,) = [Running(drafts=[1, 2, 3, 4], branches=[[1, 5], [7]])]
    own.records = {seq: Record(Rate(24, 7e5, 1e6), Rate(24, more * 1e6, 1e6), ideas=4)}
    own.drafting = True
    own.trim([seq])
    assert seq.branching == bool(seq.branches) == expected
    own.take_in(seq, 4, 1, 2 if expected else None)
    assert (
        own.more.accepted / own.more.tried > 0.3 if expected else own.records[seq].more.tried < 1e6
    )


class Running:
    """What a speculator sees of a sequence that decodes."""

    def __init__(self, **given):
        self.missing = 1
        self.pending = 1
        self.awaits_drafts = True
        self.num_output = 50
        self.asks = 0
        self.max_tokens = 99
        self.branching = False
        self.held = 0
        self.proposed = []
        self.__dict__.update(given)


MEDUSA = {"method": "medusa", "model": "quill-medusa"}
BAD = [
    (
        {"method": "ngram", "speculative_token_tree": "[(0,)]"},
        "the method ngram, which has one draft .* medusa, eagle",
    ),
    (
        {"method": "self", "num_layers": 2, "speculative_token_tree": "[(0,)]"},
        "the method self, which has one",
    ),
    (
        MEDUSA | {"speculative_token_tree": "(0"},
        r"speculative_token_tree is '\(0'; it must be a list of tuples",
    ),
    (
        MEDUSA | {"speculative_token_tree": "[]"},
        "speculative_token_tree is .*; it must be a list of tuples",
    ),
    (
        MEDUSA | {"speculative_token_tree": "[(0), (1)]"},
        "speculative_token_tree is .*; it must be a list of tuples",
    ),
    (
        MEDUSA | {"speculative_token_tree": [(0,), (-1,)]},
        "speculative_token_tree is .*; it must be a list of tuples",
    ),
    (MEDUSA | {"speculative_token_tree": [(0,), (0,)]}, r"has the node \(0,\) twice"),
    (
        MEDUSA | {"speculative_token_tree": [(0,), (1, 0)]},
        r"has the node \(1, 0\) without its parent \(1,\)",
    ),
    (
        MEDUSA | {"speculative_token_tree": [(0,), (2,)]},
        r"has the node \(2,\) without the likelier \(1,\)",
    ),
    (MEDUSA | {"speculative_token_tree": [(rank,) for rank in range(33)]}, "ranks go from 0 to 31"),
    (
        MEDUSA | {"speculative_token_tree": [(0,), (1,)], "num_speculative_tokens": 1},
        (
            "num_speculative_tokens is 1, and speculative_token_tree has 2 nodes, .* use 2, or "
            "leave it out"
        ),
    ),
    (
        MEDUSA | {"speculative_token_tree": TREE},
        "has 5 paths, which with the token before them are 17 rows .*, 16",
    ),
    (
        MEDUSA | {"speculative_token_tree": [(0,) * depth for depth in range(1, 7)] + [(1,)]},
        "speculative_token_tree has the depth 6, and speculative_config.model has [345] heads",
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD)
def test_what_is_no_tree_is_refused(config, message):
    with pytest.raises(ModelError, match=message):
        LLM(speculative_config=config, max_num_batched_tokens=16, max_num_seqs=4)
