"""Disaggregated prefill: one engine computes prompts and another decodes, with the tokens of a
single engine.
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
from quire.serving.api.params import PLAIN, RequestOptions, SamplingParams
from quire.serving.async_llm import AsyncLLM, EngineRequest
from quire.serving.ray import prefill
from quire.serving.ray.kv_transfer import export_pages, find_cached_prefix, import_pages
from quire.serving.ray.prefill import MIN_MISSING_PAGES, Apart, compute_prompt, fetch_missing_pages
from quire.tests.support.cases import thinned
from quire.tests.support.golden.families import VARIANTS
from quire.tests.support.golden.recorded import Golden

pytestmark = pytest.mark.usefixtures("few_programs")

PAGE = 8
# (model, KV cache dtype, tolerance of scores: XLA's expert products depend on the batch)
KINDS = [
    ("llama", "auto", 0),
    ("gemma3-text", "auto", 0),
    ("deepseek-v3", "auto", 1e-4),
    ("qwen3-window", "int8", 0),
    ("mistral", "fp8", 0),
    ("gemma3-text", "int4", 0),
    ("qwen3-5", "auto", 0),
]


def start_llm(folder, **overrides) -> AsyncLLM:
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
    return AsyncLLM(str(folder), **options | overrides)


def random_requests(rng: random.Random, count: int) -> list[EngineRequest]:
    """Prompts, some with a common prefix, sampled greedily or with a temperature."""
    requests = []
    common_prefix = [rng.randrange(150) for _ in range(70)]
    for index in range(count):
        tokens = common_prefix[: rng.choice((0, 40, 70))] + [
            rng.randrange(150) for _ in range(rng.randrange(1, 90))
        ]
        params = SamplingParams(
            temperature=index % 2, seed=index, max_tokens=12, ignore_eos=True, logprobs=2
        )
        request_options = RequestOptions(cache_salt=rng.choice((None, "a tenant")))
        requests.append(EngineRequest(tokens, params, None, request_options))
    return requests


async def generate_outputs(llm, requests: list[EngineRequest]) -> list:
    """Final outputs of all requests, run concurrently."""

    async def last(request: EngineRequest):
        prompt = {
            "prompt_token_ids": request.tokens,
            "cache_salt": request.request_options.cache_salt,
        }
        return [output async for output in llm.generate(prompt, request.params)][-1]

    return await asyncio.gather(*map(last, requests))


def check_output(actual, expected, tolerance: float = 0.0) -> None:
    [actual] = actual.outputs
    [expected] = expected.outputs
    assert (actual.finish_reason, list(actual.token_ids)) == (
        expected.finish_reason,
        list(expected.token_ids),
    )
    for score, expected_score in zip(actual.logprobs, expected.logprobs, strict=True):
        assert score.keys() == expected_score.keys()
        assert all(
            abs(score[token].logprob - expected_score[token].logprob) <= tolerance
            for token in score
        )


def check_engine(llm: AsyncLLM) -> None:
    llm.engine.scheduler.check()
    assert llm.engine.runner.compiles.recompiles == 0


@pytest.mark.parametrize("kind", thinned(KINDS, KINDS[:1]), ids=str)
def test_disaggregated_prefill_equals_one_engine(kind, tmp_path):
    """Handover from device to device, and through host memory."""
    name, dtype, tolerance = kind
    variant = next(variant for variant in VARIANTS if variant.name == name)
    folder = Golden(variant, tmp_path).folder
    reader, writer = (start_llm(folder, kv_cache_dtype=dtype) for _ in range(2))
    requests = random_requests(random.Random(name), 8)
    disaggregated = Apart(reader, writer)
    read_directly = disaggregated.read

    async def read_through_host(ask: EngineRequest):
        return (await compute_prompt(reader, f"read-{next(disaggregated.ids)}", ask)).on_host()

    async def run():
        expected = await generate_outputs(reader, requests)
        for disaggregated.read in (read_directly, read_through_host):
            await reader.reset_prefix_cache()
            for output, expected_output in zip(
                await generate_outputs(disaggregated, requests), expected, strict=True
            ):
                check_output(output, expected_output, tolerance)
            for ask in requests[:4]:  # one at a time: pages that were handed over count as cached
                await writer.reset_prefix_cache()
                [output] = await generate_outputs(disaggregated, [ask])
                num_full_page_tokens = (len(ask.tokens) - 1) // PAGE * PAGE
                assert (
                    output.num_cached_tokens >= num_full_page_tokens
                    or len(ask.tokens) <= (MIN_MISSING_PAGES + 1) * PAGE
                )
            for output, expected_output in zip(
                await generate_outputs(disaggregated, requests), expected, strict=True
            ):
                check_output(output, expected_output, tolerance)

    try:
        asyncio.run(run())
    finally:
        disaggregated.close()
    check_engine(reader)
    check_engine(writer)


@pytest.fixture(scope="module")
def llm_pair(tmp_path_factory):
    variant = next(variant for variant in VARIANTS if variant.name == "qwen3-window")
    folder = Golden(variant, tmp_path_factory.mktemp("llm_pair")).folder
    pair = [
        start_llm(folder, kv_cache_memory_bytes=1 << 18, kv_cache_host_bytes=host)
        for host in (16 << 20, 1 << 19)
    ]
    yield pair
    for llm in pair:
        llm.close()


def run_on_engine(llm: AsyncLLM, work):
    return llm.thread.submit(work).result()


PROMPT = [(7 * i) % 150 for i in range(100)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_pages_in_host_memory_are_handed_over(llm_pair):
    """Pages that were evicted from the reader's device are handed over from host memory."""
    reader, writer = llm_pair

    async def run():
        [expected] = await generate_outputs(
            reader, [EngineRequest(PROMPT, replace(GREEDY, logprobs=0))]
        )
        for number in range(12):  # other prompts, until the device has none of its pages
            await generate_outputs(
                reader, [EngineRequest([(number + 3 * i) % 150 for i in range(130)], GREEDY)]
            )
        engine = reader.engine
        _, path = run_on_engine(reader, lambda: find_cached_prefix(engine, PROMPT, None))
        assert len(path) == 12 and any(not node.pages[0] for node in path)
        handover = run_on_engine(reader, lambda: export_pages(engine, PROMPT, None))
        run_on_engine(writer, lambda: import_pages(writer.engine, handover))
        [output] = await generate_outputs(
            writer, [EngineRequest(PROMPT, replace(GREEDY, logprobs=0))]
        )
        assert output.num_cached_tokens == 96
        check_output(output, expected)

    asyncio.run(run())


def test_incompatible_engines_are_rejected(llm_pair, tmp_path):
    reader, writer = llm_pair
    variant = next(variant for variant in VARIANTS if variant.name == "qwen3-window")
    folder = Golden(variant, tmp_path).folder
    other_block_size = start_llm(folder, block_size=16)
    without_host_cache = start_llm(folder, kv_cache_host_bytes=0)
    same_options = start_llm(folder)  # the same model in another folder with other file times
    try:
        with pytest.raises(ModelError, match="block_size"):
            Apart(reader, other_block_size)
        handover = run_on_engine(reader, lambda: export_pages(reader.engine, PROMPT, None))
        with pytest.raises(ModelError, match="same options"):
            run_on_engine(other_block_size, lambda: import_pages(other_block_size.engine, handover))
        with pytest.raises(ModelError, match="kv_cache_host_bytes is 0"):
            Apart(reader, without_host_cache)
        Apart(reader, same_options)
    finally:
        for llm in (other_block_size, without_host_cache, same_options):
            llm.close()


def test_failed_prefill_falls_back_to_the_writer(llm_pair, caplog):
    _, writer = llm_pair

    async def failing_read(ask: EngineRequest):
        raise RuntimeError("it is away")

    async def run():
        await writer.reset_prefix_cache()
        await fetch_missing_pages(writer, EngineRequest(PROMPT, GREEDY), failing_read)
        [output] = await generate_outputs(
            writer, [EngineRequest(PROMPT, replace(GREEDY, logprobs=0))]
        )
        assert output.num_cached_tokens == 0 and output.finished

    asyncio.run(run())
    assert "is read here: it is away" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "params", "pooling"),
    [
        (PROMPT[: MIN_MISSING_PAGES * PAGE], GREEDY, None),  # too short to be worth a handover
        (PROMPT, replace(GREEDY, prompt_logprobs=0), None),  # needs the logits of every position
        (PROMPT, GREEDY, "mean"),
    ],
)
def test_unsuitable_prompts_are_computed_locally(llm_pair, tokens, params, pooling):
    async def unexpected_read(ask: EngineRequest):
        raise AssertionError("the prompt was sent to the reader")

    async def run():
        await llm_pair[1].reset_prefix_cache()
        await fetch_missing_pages(
            llm_pair[1], EngineRequest(tokens, params, None, PLAIN, pooling), unexpected_read
        )

    asyncio.run(run())


def test_handover_larger_than_the_host_cache(llm_pair):
    """The start of the prompt is kept, and the output is the same."""
    reader, writer = llm_pair
    blocks = prefill.export_pages(reader.engine, [], None)  # an empty handover is valid
    assert blocks.tokens == [] and not any(blocks.groups)
    size = max(writer.engine.tables[0].host_cache.page_bytes)
    capacity = writer.engine.tables[0].host_cache.capacity
    writer.engine.tables[0].host_cache.capacity = 5 * size

    async def run():
        await writer.reset_prefix_cache()
        disaggregated = Apart(reader, writer)
        [expected] = await generate_outputs(
            reader, [EngineRequest(PROMPT, replace(GREEDY, logprobs=0))]
        )
        [output] = await generate_outputs(
            disaggregated, [EngineRequest(PROMPT, replace(GREEDY, logprobs=0))]
        )
        check_output(output, expected)

    try:
        asyncio.run(run())
    finally:
        writer.engine.tables[0].host_cache.capacity = capacity
    assert np.shape(blocks.groups) == (len(writer.engine.tables[0].pools), 0)


TWO_DEVICES_SCRIPT = """
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
def test_handover_between_two_devices():
    """On two simulated CPU devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    code = TWO_DEVICES_SCRIPT.replace(
        "MODEL", str(Path(quire.__file__).parent / "model" / "quill_draft")
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"XLA_FLAGS": flags})
