"""Embeddings: the hidden states that the decoder gives without a cache, to the same bits in any
company.
"""

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

LENGTH = 256
TEXTS = [
    "Once upon a time",
    "A dog ran home.",
    "x",
    "The small fox lived by the river, and the river sang. " * 3,
]


@pytest.fixture(scope="module")
def compiled():
    """quill in float32, with steps of at most 48 rows, so that prompts come in chunks."""
    folder = hub.resolve(None)
    config = loader.read_config(folder, "float32", LENGTH)
    shape = StepShape.largest(8, 48, 16)
    weights = loader.load(folder, config)
    runner = Runner(config, weights, shape, (400,) * len(config.windows), 16, LENGTH)
    runner.warm_up()
    return runner


@pytest.fixture(scope="module")
def oracle(compiled):
    """The final hidden states [T, D] of a prompt, without a cache."""
    states = jax.jit(partial(uncached.hidden_states, config=compiled.config))

    def run(tokens: list[int]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(states(compiled.weights, padded), np.float64)[0, : len(tokens)]

    return run


def engine_of(old: Runner, num_pages: int = 400) -> Engine:
    runner = Runner(old.config, old.weights, old.shape, old.num_pages, 16, LENGTH)
    runner.compiled, runner.page_copier.programs = old.compiled, old.page_copier.programs
    return Engine(
        runner, None, [PageTable((num_pages,) * len(old.num_pages), 16, old.config.windows)], LENGTH
    )


def serve(
    engine: Engine, requests: dict[str, tuple], rng: random.Random | None = None
) -> dict[str, RequestOutput]:
    """Every result; with `rng` the requests arrive one after the other."""
    got = {}
    waiting = list(requests)
    while waiting or engine.busy:
        while waiting and (rng is None or rng.random() < 0.5):
            name = waiting.pop(0)
            tokens, params, pooling = requests[name]
            got[name] = engine.add(name, tokens, params, pooling=pooling)
        engine.step()
        engine.scheduler.check()
    return {name: request.output() for name, request in got.items()}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.slow
def test_embeddings_are_the_decoders(compiled, oracle, pooling):
    rng = random.Random(1)
    engine = engine_of(compiled)
    for length in (1, 2, 15, 16, 17, 47, 48, 49, 200, 255):
        tokens = [rng.randrange(1280) for _ in range(length)]
        output = serve(engine, {"a": (tokens, PARAMS, pooling)})["a"]
        states = oracle(tokens)
        expected = {"last": states[-1], "cls": states[0], "mean": states.mean(axis=0)}[pooling]
        np.testing.assert_allclose(
            output.pooled, expected, rtol=0, atol=2e-5 * np.abs(states).max()
        )
        vector = np.array(embedding(output).outputs.embedding)
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        short = np.array(embedding(output, 7).outputs.embedding)
        np.testing.assert_allclose(short, expected[:7] / np.linalg.norm(expected[:7]), atol=1e-4)
        answer = output.outputs[0]
        assert (list(answer.token_ids), answer.finish_reason, output.prompt_logprobs) == (
            [],
            "stop",
            None,
        )


@pytest.mark.random
@pytest.mark.slow
def test_company_changes_no_bit(compiled):
    """With answers being written, prompts that begin alike, and pages so short that some give way
    in the middle.
    """
    rng = random.Random(3)
    seen = {"cached": 0, "gave way": 0}
    recompiled = compiled.compiles.recompiles
    for turn in range(cases(12, 6)):
        requests = {}
        prompts = []
        for index in range(8):
            start = (
                rng.choice(prompts)[: rng.randint(0, 100)] if prompts and rng.random() < 0.5 else []
            )
            prompts.append(
                (start + [rng.randrange(1280) for _ in range(rng.choice((1, 17, 60, 190)))])[
                    : LENGTH - 60
                ]
            )
            written = SamplingParams(
                temperature=0, max_tokens=50, logprobs=1, ignore_eos=True, detokenize=False
            )
            pooling = rng.choice((None, "last", "mean", "cls"))
            requests[str(index)] = (prompts[-1], written if pooling is None else PARAMS, pooling)
        expected = {
            name: serve(engine_of(compiled), {name: own})[name] for name, own in requests.items()
        }
        for engine in (engine_of(compiled), engine_of(compiled, rng.randint(17, 20))):
            for name, output in serve(engine, requests, random.Random(turn)).items():
                assert output.outputs == expected[name].outputs
                if requests[name][2] is not None:
                    np.testing.assert_array_equal(output.pooled, expected[name].pooled)
                    seen["cached"] += output.num_cached_tokens
                    seen["gave way"] += output.metrics.num_preemptions
    assert seen["cached"] > 0 and seen["gave way"] > 0
    assert compiled.compiles.recompiles == recompiled


def test_rows_that_come_again_count_once():
    rows = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)
    whole = Pool("mean", range(9))
    again = Pool("mean", range(9))
    for position, row in enumerate(rows):
        assert whole.vector() is None
        whole.add(position, row)
    for position in (0, 1, 2, 0, 1, 2, 3, 4, 2, 3, 5, 6, 7, 8):
        again.add(position, rows[position])
    np.testing.assert_array_equal(whole.vector(), again.vector())
    np.testing.assert_allclose(whole.vector(), rows.mean(axis=0), atol=1e-6)


def test_an_embedding_that_failed_is_none(compiled):
    engine = engine_of(compiled)
    request = engine.add("a", [1] * 100, PARAMS, pooling="mean")
    engine.step()
    engine.abort("a")
    while engine.busy:
        engine.step()
    assert request.output().pooled is None
    with pytest.raises(RuntimeError, match="no embedding"):
        embedding(request.output())
    assert all(group.num_free == group.num_pages - 1 for group in engine.tables[0].pools)


def test_nobody_else_fetches_hidden_states(compiled, monkeypatch):
    engine = engine_of(compiled)
    fetched = []
    collect = engine.runner.collect

    def watch(step):
        result = collect(step)
        fetched.append(result.hidden_RD is not None)
        return result

    monkeypatch.setattr(engine.runner, "collect", watch)
    serve(
        engine,
        {"a": ([1, 2, 3], SamplingParams(max_tokens=4, logprobs=1, prompt_logprobs=1), None)},
    )
    assert fetched and not any(fetched)
    serve(engine, {"b": ([1, 2, 3], PARAMS, "last")})
    assert fetched[-1]


def test_embed_takes_what_generate_takes():
    llm = LLM(max_num_seqs=4, max_num_batched_tokens=32, dtype="float32")
    found = llm.embed(TEXTS, use_tqdm=False)
    tokens = [llm.get_tokenizer().encode(text) for text in TEXTS]
    assert [list(output.prompt_token_ids) for output in found] == tokens
    assert llm.encode(tokens, use_tqdm=False)[1].outputs == found[1].outputs
    assert (
        llm.embed({"prompt": TEXTS[1], "cache_salt": "a"}, use_tqdm=False)[0].outputs
        == found[1].outputs
    )
    short = llm.embed(TEXTS, use_tqdm=False, dimensions=8)
    for whole, part in zip(found, short, strict=True):
        expected = np.array(whole.outputs.embedding[:8])
        np.testing.assert_allclose(
            part.outputs.embedding, expected / np.linalg.norm(expected), atol=1e-5
        )
    for wrong in (0, 193, -1, 2.0, True, "8"):
        with pytest.raises(RequestError, match="dimensions"):
            llm.embed(TEXTS, dimensions=wrong)
    with pytest.raises(RequestError, match="prompt"):
        llm.embed(["", "x"])
    assert not llm.engine.busy
    mean = LLM(max_num_seqs=4, max_num_batched_tokens=32, dtype="float32", pooling="mean")
    for tokens, alike in (([7], True), ([7, 8], False)):
        one, other = (
            each.embed([tokens], use_tqdm=False)[0].outputs.embedding for each in (llm, mean)
        )
        assert np.allclose(one, other, atol=1e-5) == alike
    with pytest.raises(ModelError, match="pooling is 'max'"):
        LLM(pooling="max")
