"""Embeddings of decoders: they match a decoder without a KV cache, and are batch invariant."""

import random
from functools import partial

import jax
import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.model.checkpoint import hub, loader
from quire.model.config import ModelError
from quire.serving.api.errors import RequestError
from quire.serving.api.options import POOLINGS
from quire.serving.api.outputs import RequestOutput
from quire.serving.cache.page_table import PageTable
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.engine import Engine
from quire.serving.engine.runner import Runner
from quire.serving.request.pooling import PARAMS, Pool, embedding
from quire.tests.support import uncached
from quire.tests.support.cases import cases

MAX_LEN = 256
TEXTS = [
    "Once upon a time",
    "A dog ran home.",
    "x",
    "The small fox lived by the river, and the river sang. " * 3,
]


@pytest.fixture(scope="module")
def warm_runner():
    """The runner of quill in float32; steps have at most 48 tokens, so that prompts are chunked."""
    folder = hub.resolve(None)
    config = loader.read_config(folder, "float32", MAX_LEN)
    shape = StepShape.largest(8, 48, 16)
    weights = loader.load(folder, config)
    runner = Runner(config, weights, shape, (400,) * len(config.windows), 16, MAX_LEN)
    runner.warm_up()
    return runner


@pytest.fixture(scope="module")
def oracle(warm_runner):
    """Computes the final hidden states [T, D] of a prompt without a KV cache."""
    hidden_states = jax.jit(partial(uncached.hidden_states, config=warm_runner.config))

    def final_hidden_states(tokens: list[int]) -> np.ndarray:
        padded = np.zeros((1, MAX_LEN), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(hidden_states(warm_runner.weights, padded), np.float64)[0, : len(tokens)]

    return final_hidden_states


def make_engine(warm_runner: Runner, num_pages: int = 400) -> Engine:
    runner = Runner(
        warm_runner.config,
        warm_runner.weights,
        warm_runner.shape,
        warm_runner.num_pages,
        16,
        MAX_LEN,
    )
    runner.compiled, runner.page_copier.programs = (
        warm_runner.compiled,
        warm_runner.page_copier.programs,
    )
    return Engine(
        runner,
        None,
        [PageTable((num_pages,) * len(warm_runner.num_pages), 16, warm_runner.config.windows)],
        MAX_LEN,
    )


def serve_requests(
    engine: Engine, requests: dict[str, tuple], rng: random.Random | None = None
) -> dict[str, RequestOutput]:
    """Returns all outputs; with `rng`, requests arrive over several steps."""
    added_requests = {}
    waiting = list(requests)
    while waiting or engine.busy:
        while waiting and (rng is None or rng.random() < 0.5):
            name = waiting.pop(0)
            tokens, params, pooling = requests[name]
            added_requests[name] = engine.add(name, tokens, params, pooling=pooling)
        engine.step()
        engine.scheduler.check()
    return {name: request.output() for name, request in added_requests.items()}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.slow
def test_embeddings_match_the_uncached_decoder(warm_runner, oracle, pooling):
    rng = random.Random(1)
    engine = make_engine(warm_runner)
    for length in (1, 2, 15, 16, 17, 47, 48, 49, 200, 255):
        tokens = [rng.randrange(1280) for _ in range(length)]
        output = serve_requests(engine, {"a": (tokens, PARAMS, pooling)})["a"]
        hidden_states = oracle(tokens)
        expected = {
            "last": hidden_states[-1],
            "cls": hidden_states[0],
            "mean": hidden_states.mean(axis=0),
        }[pooling]
        np.testing.assert_allclose(
            output.pooled, expected, rtol=0, atol=2e-5 * np.abs(hidden_states).max()
        )
        vector = np.array(embedding(output).outputs.embedding)
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        shortened = np.array(embedding(output, 7).outputs.embedding)
        np.testing.assert_allclose(
            shortened, expected[:7] / np.linalg.norm(expected[:7]), atol=1e-4
        )
        answer = output.outputs[0]
        assert (list(answer.token_ids), answer.finish_reason, output.prompt_logprobs) == (
            [],
            "stop",
            None,
        )


@pytest.mark.random
@pytest.mark.slow
def test_embeddings_are_batch_invariant(warm_runner):
    """With generation in the same batch, shared prefixes, and preemptions as pages are short."""
    rng = random.Random(3)
    counts = {"cached": 0, "preemptions": 0}
    recompiles = warm_runner.compiles.recompiles
    for seed in range(cases(12, 6)):
        requests = {}
        prompts = []
        for index in range(8):
            prefix = (
                rng.choice(prompts)[: rng.randint(0, 100)] if prompts and rng.random() < 0.5 else []
            )
            prompts.append(
                (prefix + [rng.randrange(1280) for _ in range(rng.choice((1, 17, 60, 190)))])[
                    : MAX_LEN - 60
                ]
            )
            sampling_params = SamplingParams(
                temperature=0, max_tokens=50, logprobs=1, ignore_eos=True, detokenize=False
            )
            pooling = rng.choice((None, "last", "mean", "cls"))
            requests[str(index)] = (
                prompts[-1],
                sampling_params if pooling is None else PARAMS,
                pooling,
            )
        expected = {
            name: serve_requests(make_engine(warm_runner), {name: request})[name]
            for name, request in requests.items()
        }
        for engine in (make_engine(warm_runner), make_engine(warm_runner, rng.randint(17, 20))):
            for name, output in serve_requests(engine, requests, random.Random(seed)).items():
                assert output.outputs == expected[name].outputs
                if requests[name][2] is not None:
                    np.testing.assert_array_equal(output.pooled, expected[name].pooled)
                    counts["cached"] += output.num_cached_tokens
                    counts["preemptions"] += output.metrics.num_preemptions
    assert counts["cached"] > 0 and counts["preemptions"] > 0
    assert warm_runner.compiles.recompiles == recompiles


def test_recomputed_positions_are_pooled_once():
    rows = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    pool = Pool("mean", range(9))
    repeating_pool = Pool("mean", range(9))
    for position, row in enumerate(rows):
        assert pool.vector() is None
        pool.add(position, row)
    for position in (0, 1, 2, 0, 1, 2, 3, 4, 2, 3, 5, 6, 7, 8):
        repeating_pool.add(position, rows[position])
    np.testing.assert_array_equal(pool.vector(), repeating_pool.vector())
    np.testing.assert_allclose(pool.vector(), rows.mean(axis=0), atol=1e-6)


def test_aborted_request_has_no_embedding(warm_runner):
    engine = make_engine(warm_runner)
    request = engine.add("a", [1] * 100, PARAMS, pooling="mean")
    engine.step()
    engine.abort("a")
    while engine.busy:
        engine.step()
    assert request.output().pooled is None
    with pytest.raises(RuntimeError, match="no embedding"):
        embedding(request.output())
    assert all(group.num_free == group.num_pages - 1 for group in engine.tables[0].pools)


def test_hidden_states_are_fetched_for_embeddings_only(warm_runner, monkeypatch):
    engine = make_engine(warm_runner)
    has_hidden_states = []
    collect = engine.runner.collect

    def record_collect(step):
        result = collect(step)
        has_hidden_states.append(result.hidden_RD is not None)
        return result

    monkeypatch.setattr(engine.runner, "collect", record_collect)
    serve_requests(
        engine,
        {"a": ([1, 2, 3], SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1), None)},
    )
    assert has_hidden_states and not any(has_hidden_states)
    serve_requests(engine, {"b": ([1, 2, 3], PARAMS, "last")})
    assert has_hidden_states[-1]


def test_embed_options_and_prompt_types():
    llm = LLM(max_num_seqs=4, max_num_batched_tokens=32, dtype="float32")
    outputs = llm.embed(TEXTS, use_tqdm=False)
    tokens = [llm.get_tokenizer().encode(text) for text in TEXTS]
    assert [list(output.prompt_token_ids) for output in outputs] == tokens
    assert llm.encode(tokens, use_tqdm=False)[1].outputs == outputs[1].outputs
    assert (
        llm.embed({"prompt": TEXTS[1], "cache_salt": "a"}, use_tqdm=False)[0].outputs
        == outputs[1].outputs
    )
    shortened_outputs = llm.embed(TEXTS, use_tqdm=False, dimensions=8)
    for full_output, shortened in zip(outputs, shortened_outputs, strict=True):
        expected = np.array(full_output.outputs.embedding[:8])
        np.testing.assert_allclose(
            shortened.outputs.embedding, expected / np.linalg.norm(expected), atol=1e-5
        )
    for dimensions in (0, 193, -1, 2.0, True, "8"):
        with pytest.raises(RequestError, match="dimensions"):
            llm.embed(TEXTS, dimensions=dimensions)
    with pytest.raises(RequestError, match="prompt"):
        llm.embed(["", "x"])
    assert not llm.engine.busy
    mean_llm = LLM(max_num_seqs=4, max_num_batched_tokens=32, dtype="float32", pooling="mean")
    for tokens, is_equal in (([7], True), ([7, 8], False)):
        last_embedding, mean_embedding = (
            pooling_llm.embed([tokens], use_tqdm=False)[0].outputs.embedding
            for pooling_llm in (llm, mean_llm)
        )
        assert np.allclose(last_embedding, mean_embedding, atol=1e-5) == is_equal
    with pytest.raises(ModelError, match="pooling is 'max'"):
        LLM(pooling="max")
