"""Compares beam search with a naive search by the decoder without a KV cache, in float64."""

from functools import partial

import jax
import numpy as np
import pytest

from quire import LLM, BeamSearchParams, RequestError
from quire.model.families.quill import small_cache_config
from quire.model.weights import abstract
from quire.serving.api.params import RequestOptions
from quire.serving.cache.page_table import PageTable
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.beam_search import search
from quire.serving.engine.engine import Engine
from quire.serving.engine.runner import Runner
from quire.sharding.spec import random_arrays
from quire.tests.support import uncached
from quire.tests.support.cases import thinned

MAX_LEN = 48
VOCAB = 40
CONFIG = small_cache_config(
    VOCAB,
    dim=32,
    num_layers=4,
    heads=4,
    head_dim=8,
    ffn=48,
    window=9,
    global_every=2,
    max_len=MAX_LEN,
    dtype="float32",
)


class FakeTokenizer:
    """Has those methods of a tokenizer that the search uses."""

    eos_token_ids = frozenset({3, 17})

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))

    def token_text(self, token):
        return str(token)


@pytest.fixture(scope="module")
def weights():
    weights = random_arrays(abstract(CONFIG), seed=4)
    return weights.replace(embed_VD=weights.embed_VD * 4)  # so that logits differ clearly


@pytest.fixture(scope="module")
def engine(weights):
    runner = Runner(CONFIG, weights, StepShape.largest(8, 64, 16), (60, 60), 8, MAX_LEN)
    runner.warm_up()
    return Engine(runner, FakeTokenizer(), [PageTable((60, 60), 8, CONFIG.windows)], MAX_LEN)


@pytest.fixture(scope="module")
def oracle(weights):
    forward = jax.jit(partial(uncached.forward, config=CONFIG))

    def logprobs(tokens) -> np.ndarray:
        padded = np.zeros((1, MAX_LEN), np.int32)
        padded[0, : len(tokens)] = tokens
        row = np.asarray(forward(weights, padded), np.float64)[0, len(tokens) - 1]
        return row - np.logaddexp.reduce(row)

    return logprobs


def naive_beam_search(oracle, prompt, width: int, steps: int, eos, penalty: float):
    """Sorts all continuations of all beams at each step, without stopping early."""
    running = [((), 0.0)]
    finished = []
    for step in range(1, steps + 1):
        extended = [
            ((*tokens, token), total + row[token])
            for tokens, total in running
            for row in [oracle([*prompt, *tokens])]
            for token in range(VOCAB)
        ]
        best_beams = sorted(extended, key=lambda beam: -beam[1])[: 2 * width]
        finished += [beam for beam in best_beams if beam[0][-1] in eos or step == steps]
        running = [beam for beam in best_beams if beam[0][-1] not in eos][:width]
    return sorted(finished, key=lambda beam: -beam[1] / len(beam[0]) ** penalty)[:width]


@pytest.mark.parametrize("seed", thinned(range(6), [0, 1]))
@pytest.mark.parametrize(
    ("width", "steps", "penalty"),
    [(1, 6, 1.0), (3, 8, 1.0), (5, 6, 0.0), (4, 7, -0.5), (10, 4, 2.0)],
)
@pytest.mark.slow
def test_beams_match_a_naive_search(engine, oracle, seed, width, steps, penalty):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 30, 2)]
    ignore_eos = seed % 3 == 0
    params = BeamSearchParams(
        beam_width=width, max_tokens=steps, length_penalty=penalty, ignore_eos=ignore_eos
    )
    eos = () if ignore_eos else FakeTokenizer.eos_token_ids
    for prompt, output in zip(prompts, search(engine, prompts, params), strict=True):
        expected = naive_beam_search(oracle, prompt, width, steps, eos, penalty)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        for beam, (tokens, total) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(total, abs=1e-4)
            assert beam.finish_reason == ("stop" if tokens[-1] in eos else "length")
            assert beam.text == " ".join(map(str, tokens))
    assert not engine.busy


def test_beams_share_the_pages_of_common_prefixes(engine):
    engine.reset_prefix_cache()
    tokens_per_step = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan, moves: (
        tokens_per_step.append(plan.num_tokens) or launch(plan, moves)
    )
    try:
        search(engine, [list(range(32))], BeamSearchParams(beam_width=4, max_tokens=6))
    finally:
        engine.runner.launch = launch
    # after the prompt each beam computes one token: its last page is a copy
    assert tokens_per_step[0] == 32 and max(tokens_per_step[1:]) <= 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 11}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max"),
    ],
)
def test_invalid_beam_search_params_are_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**fields)


def test_too_long_prompt_is_refused_before_computing(engine):
    with pytest.raises(RequestError, match="prompt"):
        search(engine, [[1], [1] * MAX_LEN], BeamSearchParams(beam_width=2))
    assert not engine.busy


def test_beam_search_terms(engine):
    engine.reset_prefix_cache()
    params = BeamSearchParams(beam_width=2, max_tokens=2**30)
    prompt = [[1] * (MAX_LEN - 3)]
    (output_with_terms,) = search(
        engine, prompt, params, [RequestOptions(cache_salt="a", priority=-1)]
    )
    assert list(engine.tables[0].tree.roots) == ["a"]  # the answer ends long before max_tokens
    (output,) = search(engine, prompt, params)
    assert output_with_terms == output
    with pytest.raises(RequestError, match="timeout"):
        search(engine, prompt, params, [RequestOptions(timeout=1.0)])


def test_beams_end_at_max_model_len(engine):
    (output,) = search(
        engine,
        [[1] * (MAX_LEN - 3)],
        BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True),
    )
    assert [(len(beam.tokens), beam.finish_reason) for beam in output.sequences] == [
        (3, "length")
    ] * 2
    assert not engine.busy


@pytest.mark.slow
def test_beam_search_returns_distinct_texts():
    llm = LLM(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256, kv_cache_memory_bytes=1 << 26
    )
    (output,) = llm.beam_search("Once upon a time", BeamSearchParams(beam_width=3, max_tokens=8))
    texts = [sequence.text for sequence in output.sequences]
    assert len(set(texts)) == 3 and all(texts)
    totals = [sequence.cum_logprob for sequence in output.sequences]
    assert totals == sorted(totals, reverse=True)
