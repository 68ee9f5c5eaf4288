"""One engine reads prompts and another writes the answers: the same tokens as from one, and only
the rest computed.
"""

import asyncio
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.model.config import ModelError
from quire.serving.api.params import PLAIN, SamplingParams, Terms
from quire.serving.async_llm import Ask, AsyncLLM
from quire.serving.ray import prefill
from quire.serving.ray.kv_transfer import export_pages, find_cached_prefix, import_pages
from quire.serving.ray.prefill import MIN_MISSING_PAGES, Apart, compute_prompt, fetch_missing_pages
from quire.tests.support.cases import thinned
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden

pytestmark = pytest.mark.usefixtures("few_programs")

PAGE = 8
# Model, format of the cache, and how far scores of one engine alone differ with what else runs
# (experts on XLA).
KINDS = [
    ("llama", "auto", 0),
    ("gemma3-text", "auto", 0),
    ("deepseek-v3", "auto", 1e-4),
    ("qwen3-window", "int8", 0),
    ("mistral", "fp8", 0),
    ("gemma3-text", "int4", 0),
    ("qwen3-5", "auto", 0),
]


def start(folder, **chosen) -> AsyncLLM:
    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 176,
        "block_size": PAGE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_bytes": 32 << 20,
        "kv_cache_host_bytes": 32 << 20,
    }
    return AsyncLLM(str(folder), **options | chosen)


def asks(rng: random.Random, count: int) -> list[Ask]:
    """Prompts that may begin alike, greedy and drawn."""
    found = []
    before = [rng.randrange(150) for _ in range(70)]
    for index in range(count):
        tokens = before[: rng.choice((0, 40, 70))] + [
            rng.randrange(150) for _ in range(rng.randrange(1, 90))
        ]
        params = SamplingParams(
            temperature=index % 2, seed=index, max_tokens=12, ignore_eos=True, logprobs=2
        )
        terms = Terms(cache_salt=rng.choice((None, "a tenant")))
        found.append(Ask(tokens, params, None, terms))
    return found


async def answers(llm, asked: list[Ask]) -> list:
    """Of all prompts at once."""

    async def last(ask: Ask):
        prompt = {"prompt_token_ids": ask.tokens, "cache_salt": ask.terms.cache_salt}
        return [output async for output in llm.generate(prompt, ask.params)][-1]

    return await asyncio.gather(*map(last, asked))


def same(one, other, tolerance: float = 0.0) -> None:
    [one], [other] = one.outputs, other.outputs
    assert (one.finish_reason, list(one.token_ids)) == (other.finish_reason, list(other.token_ids))
    for score, wanted in zip(one.logprobs, other.logprobs, strict=True):
        assert score.keys() == wanted.keys()
        assert all(
            abs(score[token].logprob - wanted[token].logprob) <= tolerance for token in score
        )


def check(llm: AsyncLLM) -> None:
    llm.engine.scheduler.check()
    assert llm.engine.runner.compiles.recompiles == 0


@pytest.mark.parametrize("kind", thinned(KINDS, KINDS[:1]), ids=str)
def test_the_same_as_one_engine(kind, tmp_path):
    """From device to device and through the host's memory."""
    name, dtype, tolerance = kind
    variant = next(variant for variant in VARIANTS if variant.name == name)
    folder = Golden(variant, tmp_path).folder
    reader, writer = (start(folder, kv_cache_dtype=dtype) for _ in range(2))
    asked = asks(random.Random(name), 8)
    both = Apart(reader, writer)
    direct = both.read

    async def sent(ask: Ask):
        return (await compute_prompt(reader, f"read-{next(both.ids)}", ask)).on_host()

    async def run():
        alone = await answers(reader, asked)
        for both.read in (direct, sent):
            await reader.reset_prefix_cache()
            for output, wanted in zip(await answers(both, asked), alone, strict=True):
                same(output, wanted, tolerance)
            for ask in asked[:4]:  # alone: what was handed over was not computed
                await writer.reset_prefix_cache()
                [output] = await answers(both, [ask])
                full = (len(ask.tokens) - 1) // PAGE * PAGE
                assert (
                    output.num_cached_tokens >= full
                    or len(ask.tokens) <= (MIN_MISSING_PAGES + 1) * PAGE
                )
            for output, wanted in zip(await answers(both, asked), alone, strict=True):
                same(output, wanted, tolerance)

    try:
        asyncio.run(run())
    finally:
        both.close()
    check(reader)
    check(writer)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    variant = next(variant for variant in VARIANTS if variant.name == "qwen3-window")
    folder = Golden(variant, tmp_path_factory.mktemp("two")).folder
    pair = [
        start(folder, kv_cache_memory_bytes=1 << 18, kv_cache_host_bytes=host)
        for host in (16 << 20, 1 << 19)
    ]
    yield pair
    for llm in pair:
        llm.close()


def job(llm: AsyncLLM, work):
    return llm.thread.submit(work).result()


PROMPT = [(7 * i) % 150 for i in range(100)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_what_only_the_host_has_is_given_too(two):
    """The reader's device has lost the prompt's pages to others; their copies in host memory go on
    the way.
    """
    reader, writer = two

    async def run():
        [alone] = await answers(reader, [Ask(PROMPT, replace(GREEDY, logprobs=0))])
        for number in range(12):  # others, until nothing of it is left on the device
            await answers(reader, [Ask([(number + 3 * i) % 150 for i in range(130)], GREEDY)])
        engine = reader.engine
        _, path = job(reader, lambda: find_cached_prefix(engine, PROMPT, None))
        assert len(path) == 12 and any(not node.pages[0] for node in path)
        handover = job(reader, lambda: export_pages(engine, PROMPT, None))
        job(writer, lambda: import_pages(writer.engine, handover))
        [output] = await answers(writer, [Ask(PROMPT, replace(GREEDY, logprobs=0))])
        assert output.num_cached_tokens == 96
        same(output, alone)

    asyncio.run(run())


def test_pages_of_another_kind_are_refused(two, tmp_path):
    reader, writer = two
    variant = next(variant for variant in VARIANTS if variant.name == "qwen3-window")
    folder = Golden(variant, tmp_path).folder
    other = start(folder, block_size=16)
    none = start(folder, kv_cache_host_bytes=0)
    alike = start(folder)  # a copy elsewhere, with times of its own
    try:
        with pytest.raises(ModelError, match="block_size"):
            Apart(reader, other)
        handover = job(reader, lambda: export_pages(reader.engine, PROMPT, None))
        with pytest.raises(ModelError, match="same options"):
            job(other, lambda: import_pages(other.engine, handover))
        with pytest.raises(ModelError, match="kv_cache_host_bytes is 0"):
            Apart(reader, none)
        Apart(reader, alike)
    finally:
        for llm in (other, none, alike):
            llm.close()


def test_a_reader_that_fails_costs_no_request(two, caplog):
    _, writer = two

    async def broken(ask: Ask):
        raise RuntimeError("it is away")

    async def run():
        await writer.reset_prefix_cache()
        await fetch_missing_pages(writer, Ask(PROMPT, GREEDY), broken)
        [output] = await answers(writer, [Ask(PROMPT, replace(GREEDY, logprobs=0))])
        assert output.num_cached_tokens == 0 and output.finished

    asyncio.run(run())
    assert "is read here: it is away" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "params", "pooling"),
    [
        (PROMPT[: MIN_MISSING_PAGES * PAGE], GREEDY, None),  # too short
        (PROMPT, replace(GREEDY, prompt_logprobs=0), None),  # every row is needed
        (PROMPT, GREEDY, "mean"),
    ],
)
def test_what_is_not_worth_it_stays(two, tokens, params, pooling):
    async def never(ask: Ask):
        raise AssertionError("it was sent away")

    async def run():
        await two[1].reset_prefix_cache()
        await fetch_missing_pages(two[1], Ask(tokens, params, None, PLAIN, pooling), never)

    asyncio.run(run())


def test_more_than_the_host_may_hold(two):
    """The beginning of a prompt stays, and the answer is the same."""
    reader, writer = two
    blocks = prefill.export_pages(reader.engine, [], None)  # nothing is something that can be given
    assert blocks.tokens == [] and not any(blocks.groups)
    size = max(writer.engine.tables[0].host_cache.page_bytes)
    small = writer.engine.tables[0].host_cache.capacity
    writer.engine.tables[0].host_cache.capacity = 5 * size

    async def run():
        await writer.reset_prefix_cache()
        both = Apart(reader, writer)
        [alone] = await answers(reader, [Ask(PROMPT, replace(GREEDY, logprobs=0))])
        [output] = await answers(both, [Ask(PROMPT, replace(GREEDY, logprobs=0))])
        same(output, alone)

    try:
        asyncio.run(run())
    finally:
        writer.engine.tables[0].host_cache.capacity = small
    assert np.shape(blocks.groups) == (len(writer.engine.tables[0].pools), 0)


TWO = """
import asyncio, jax
from quire import SamplingParams
from quire.serving.ray.prefill import Apart
from quire.serving.async_llm import AsyncLLM
chosen = {"kv_cache_host_bytes": 1 << 24, "kv_cache_memory_bytes": 1 << 24, "max_model_len": 128, "max_num_seqs": 2,
          "max_num_batched_tokens": 32}
first, second = jax.devices()
reader = AsyncLLM("MODEL", **chosen)
with jax.default_device(second):
    writer = AsyncLLM("MODEL", **chosen)
both, params = Apart(reader, writer), SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True)
async def last(llm):
    return [output async for output in llm.generate("Once upon a time there was a fox. " * 8, params)][-1]
async def run():
    alone = await last(reader)
    for _ in range(2):
        found = await last(both)
        assert found.outputs[0].token_ids == alone.outputs[0].token_ids and found.num_cached_tokens >= 64, found
        # As after a failure.
        await writer.call(lambda: (writer.engine.lifecycle.forget_pages(), writer.engine.runner.reset()))
        await writer.reset_prefix_cache()
    assert jax.tree.leaves(writer.engine.runner.state)[0].devices() == {second}
    assert writer.engine.runner.compiles.recompiles == 0
asyncio.run(run())
both.close()
"""


@pytest.mark.slow
def test_from_one_device_to_another():
    """Which a CPU pretends to have."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    code = TWO.replace("MODEL", str(Path(quire.__file__).parent / "model" / "quill_draft"))
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"XLA_FLAGS": flags})
