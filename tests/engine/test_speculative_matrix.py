"""Every drafter with the other features of an engine: tokens and log-probabilities equal those of
plain decoding.
"""

import random
from dataclasses import dataclass
from itertools import product

import pytest

from quire import LLM, SamplingParams
from quire.serving.engine.step_record import Observer

DRAFTERS = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": "quill-draft"},
    "layers": {"method": "self", "num_layers": 4},
    "bits": {"method": "self", "quantization": "int8-weights"},
    "medusa": {"method": "medusa", "model": "quill-medusa"},
    "eagle": {"method": "eagle", "model": "quill-eagle"},
}
ENGINE_KINDS = {
    "plain": {},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int4 weights": {"quantization": "int4-64"},
}
ROWS = 32
PAGE = 16
SHARED = list(range(300, 340))


class EventCounter(Observer):
    """Counts preemptions and prompt chunks while a case is served."""

    def __init__(self):
        self.preempted = self.chunks = 0

    def observe(self, record):
        self.preempted += sum(
            seq.num_preemptions for request in record.changed for seq in request.sequences
        )
        for item in record.launched.plan.items if record.launched else ():
            self.chunks += not item.num_samples


def random_tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, 1280) for _ in range(count)]


@dataclass(frozen=True)
class Case:
    """Batches of prompts, which are served one after the other, and the events that must occur."""

    batches: tuple[tuple[list[int], ...], ...]
    params: dict
    cached: bool = False  # the last batch has cached prefixes
    preempted: bool = False
    chunks: bool = False


LONG = tuple(SHARED[:8] + random_tokens(seed, 40) for seed in range(4))
CASES = {
    "prefix hit": Case(
        (((SHARED + [7, 8, 9]),), (SHARED + [9, 9], SHARED[:37] + [50])), {}, cached=True
    ),
    "chunks": Case(((random_tokens(1, 100), random_tokens(2, 70)),), {}, chunks=True),
    "preemption": Case((LONG,), {"max_tokens": 90, "ignore_eos": True}, preempted=True),
    "disk": Case(
        ((SHARED + [5],), LONG, (SHARED + [5],)),
        {"ignore_eos": True, "max_tokens": 40},
        cached=True,
    ),
    "logprobs": Case(
        ((random_tokens(3, 20), SHARED),), {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.8}
    ),
    "several choices": Case(((SHARED, random_tokens(4, 5)),), {"n": 2, "temperature": 1.0}),
    "windows": Case(((SHARED + random_tokens(5, 30),),), {"max_tokens": 120, "ignore_eos": True}),
    "grammar": Case(
        ((SHARED, random_tokens(6, 9)),),
        {"structured_outputs": {"regex": "[a-z ]{10,30}[.]"}, "logprobs": 1},
    ),
    "penalties": Case(
        ((SHARED, random_tokens(7, 9)),),
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 1},
    ),
}
DAILY_CELLS = {
    ("plain", drafter, case)
    for drafter, case in product(("ngram", "draft_model"), ("chunks", "preemption", "disk"))
}
DRAFTERS_BY_KIND = {  # all without quantisation, and each with at least one other kind
    "plain": DRAFTERS,
    "int8 KV": ("ngram", "draft_model", "layers", "medusa", "eagle"),
    "int4 weights": ("suffix", "draft_model", "bits", "medusa", "eagle"),
}
CELLS = [
    pytest.param(*cell, id="-".join(cell), marks=[] if cell in DAILY_CELLS else pytest.mark.nightly)
    for kind in ENGINE_KINDS
    for cell in product([kind], DRAFTERS_BY_KIND[kind], CASES)
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Serves a case once per engine, and keeps the answers; only engines of one kind are open at a
    time.
    """
    llms = {}
    answers = {}

    def serve(kind: str, drafter: str | None, name: str) -> tuple[list, EventCounter, int]:
        if (kind, drafter, name) in answers:
            return answers[kind, drafter, name]
        if (kind, drafter) not in llms:
            for key in [key for key in llms if key[0] != kind or key[1] is not None]:
                llms.pop(key).close()
            speculative_config = None if drafter is None else DRAFTERS[drafter] | {"adapts": False}
            llms[kind, drafter] = LLM(
                max_num_seqs=4,
                max_num_batched_tokens=ROWS,
                max_model_len=256,
                block_size=PAGE,
                kv_cache_memory_bytes=340_000 if kind != "int8 KV" else 230_000,
                kv_cache_host_bytes=1 << 20,
                kv_cache_disk=str(tmp_path_factory.mktemp("kv")),
                speculative_config=speculative_config,
                **ENGINE_KINDS[kind],
            )
        llm = llms[kind, drafter]
        events = EventCounter()
        llm.engine.observers[:] = [events]
        case = CASES[name]
        params = SamplingParams(**{"temperature": 0, "max_tokens": 48, "seed": 3} | case.params)
        outputs = [llm.generate(list(batch), params, use_tqdm=False) for batch in case.batches]
        actual = [
            [exact_answer(answer) for answer in output.outputs] + [scores(output.prompt_logprobs)]
            for batch in outputs
            for output in batch
        ]
        num_cached_tokens = min(output.num_cached_tokens for output in outputs[-1])
        llm.engine.scheduler.check()
        answers[kind, drafter, name] = actual, events, num_cached_tokens
        return actual, events, num_cached_tokens

    yield serve
    for llm in llms.values():
        llm.close()


def exact_answer(answer) -> tuple:
    return list(answer.token_ids), answer.finish_reason, answer.text, scores(answer.logprobs)


def scores(entries) -> list:
    return [
        entry and sorted((token, logprob.logprob, logprob.rank) for token, logprob in entry.items())
        for entry in entries or ()
    ]


@pytest.mark.parametrize(("kind", "drafter", "name"), CELLS)
@pytest.mark.slow
def test_drafters_match_plain_decoding_with_all_features(served, kind, drafter, name):
    expected, *_ = served(kind, None, name)
    actual, events, num_cached_tokens = served(kind, drafter, name)
    case = CASES[name]
    assert actual == expected
    assert not case.preempted or events.preempted
    assert not case.chunks or events.chunks
    assert not case.cached or num_cached_tokens >= PAGE
