"""Random lives of engines: every answer equals a cold engine's, bit for bit.

`tests/support/lives.py` describes the events of a life.
"""

import logging
import random

import pytest

from quire import LLM
from quire.serving.engine.scheduler import Scheduler
from quire.tests.support import lives
from quire.tests.support.cases import cases, thinned
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden

QUILL = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 192, "dtype": "float32"}
TINY = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 96,
}
PROMPTS = (
    "Once upon a time there was a fox who",
    "Sort: 52 31 90 17 4",
    "There was a ship on the lake. It",
    "2 + 3 =",
)
DRAFTERS = [
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "draft_model", "model": "quill-draft"},
    {"method": "self", "num_layers": 4},
    {"method": "medusa", "model": "quill-medusa"},
    {"method": "eagle", "model": "quill-eagle"},
]
FAMILIES = [
    "qwen3-next",
    "falcon-h1",
    "gemma3-text",
    "gemma4-shared",
    "lfm2",
    "deepseek-v3",
    "mamba2",
    "gpt-oss",
]


@pytest.fixture(autouse=True)
def silenced_logger():
    """Hides the log, as failed steps are logged with tracebacks."""
    logging.getLogger("quire").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("quire").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def cold_llm():
    return LLM(**QUILL, max_steps_per_launch=1, enable_prefix_caching=False)


def quill_life(llm: LLM, seed: int, reopen=None) -> lives.Life:
    tokenizer = llm.engine.tokenizer
    common_tokens = tokenizer.encode(
        " the and was to. , a it they fox time 1 2 5 said he she", add_special_tokens=False
    )
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    stop_strings = (" and", ".", "the", "time", " a ", "1")
    return lives.Life(
        llm, random.Random(seed), prompts, sorted({*common_tokens}), 120, reopen, stop_strings
    )


@pytest.mark.random
@pytest.mark.parametrize("tier", ["fused", "host", "disk"])
def test_lives_with_fused_steps_and_every_cache_tier(cold_llm, tier, tmp_path):
    few_pages = {"kv_cache_memory_bytes": 1 << 20, "kv_cache_host_bytes": 2 << 20}
    options = (
        QUILL
        | {"fused": {}, "host": few_pages, "disk": few_pages | {"kv_cache_disk": str(tmp_path)}}[
            tier
        ]
    )
    reopen = (lambda: LLM(**options)) if tier == "disk" else None
    life = quill_life(LLM(**options), seed=1, reopen=reopen)
    for _ in range(cases(20, least=2)):
        life.turns.clear()
        life.live(50)
        lives.check(cold_llm, life.turns)
    assert all(life.events.get(event) for event in ("abort", "launch", "collect", "sleep")), (
        life.events
    )
    life.llm.close()


@pytest.mark.random
@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter["method"])
def test_lives_with_each_drafter(cold_llm, drafter):
    few_pages = {"kv_cache_memory_bytes": 3 << 20, "kv_cache_host_bytes": 2 << 20}
    llm = LLM(**QUILL, **few_pages, speculative_config=drafter | {"adapts": False})
    life = quill_life(llm, seed=2)
    life.live(cases(400, least=40))
    lives.check(cold_llm, life.turns)
    assert llm.engine.speculator.counts.accepted[0] > 0
    llm.close()


@pytest.mark.random
@pytest.mark.slow
@pytest.mark.parametrize("name", thinned(FAMILIES, FAMILIES[:4]))
def test_lives_of_families_with_state_windows_and_shared_pages(name, tmp_path):
    golden = Golden(next(variant for variant in VARIANTS if variant.name == name), tmp_path)
    llm = LLM(
        str(golden.folder), **TINY, kv_cache_memory_bytes=1 << 18, kv_cache_host_bytes=1 << 20
    )
    cold_llm = LLM(str(golden.folder), **TINY, max_steps_per_launch=1, enable_prefix_caching=False)
    common_tokens = sorted({token for tokens in golden.tokens for token in tokens})[:20]
    life = lives.Life(llm, random.Random(3), golden.prompts, common_tokens, 60)
    life.live(cases(300, least=40))
    lives.check(cold_llm, life.turns)
    llm.close()
    cold_llm.close()


def skip_last_count(self, item, num_steps):
    """A fixed defect: steps that did not run were counted as computed."""


def finish_as_written(self, seq, reason):
    """A fixed defect: the last token was counted as written before its fused steps had run."""
    pending, seq.pending = seq.pending, min(seq.pending, 1)
    real_finish(self, seq, reason)
    seq.pending = pending


real_finish = Scheduler.finish


@pytest.mark.parametrize(
    ("name", "defect"),
    [("shorten", skip_last_count), ("finish", finish_as_written)],
    ids=["shorten", "finish"],
)
def test_lives_find_planted_defects(cold_llm, monkeypatch, name, defect):
    monkeypatch.setattr(Scheduler, name, defect)
    life = quill_life(LLM(**QUILL), seed=4)
    with pytest.raises(AssertionError, match="tokens were cached"):
        for _ in range(10):
            life.turns.clear()
            life.live(50)
            lives.check(cold_llm, life.turns)
    life.llm.close()
