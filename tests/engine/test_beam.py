"""Beam search against a plain loop over the decoder without a cache, in float64."""

from functools import partial

import jax
import numpy as np
import pytest

from quire import LLM, BeamSearchParams, RequestError
from quire.model.families.quill import small_cache_config
from quire.model.weights import abstract
from quire.serving.api.params import Terms
from quire.serving.cache.page_table import PageTable
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.beam_search import search
from quire.serving.engine.engine import Engine
from quire.serving.engine.runner import Runner
from quire.sharding.spec import random_arrays
from quire.tests.support import uncached
from quire.tests.support.cases import thinned

LENGTH = 48
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
    max_len=LENGTH,
    dtype="float32",
)


class Tokens:
    """As much of a tokenizer as a search needs."""

    eos_token_ids = frozenset({3, 17})

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))

    def token_text(self, token):
        return str(token)


@pytest.fixture(scope="module")
def weights():
    weights = random_arrays(abstract(CONFIG), seed=4)
    return weights.replace(embed_VD=weights.embed_VD * 4)  # far from flat


@pytest.fixture(scope="module")
def engine(weights):
    runner = Runner(CONFIG, weights, StepShape.largest(8, 64, 16), (60, 60), 8, LENGTH)
    runner.warm_up()
    return Engine(runner, Tokens(), [PageTable((60, 60), 8, CONFIG.windows)], LENGTH)


@pytest.fixture(scope="module")
def oracle(weights):
    forward = jax.jit(partial(uncached.forward, config=CONFIG))

    def logprobs(tokens) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        row = np.asarray(forward(weights, padded), np.float64)[0, len(tokens) - 1]
        return row - np.logaddexp.reduce(row)

    return logprobs


def naive(oracle, prompt, width: int, steps: int, eos, penalty: float):
    """Every continuation of every beam, sorted; no early end."""
    live = [((), 0.0)]
    done = []
    for step in range(1, steps + 1):
        longer = [
            ((*tokens, token), total + row[token])
            for tokens, total in live
            for row in [oracle([*prompt, *tokens])]
            for token in range(VOCAB)
        ]
        best = sorted(longer, key=lambda beam: -beam[1])[: 2 * width]
        done += [beam for beam in best if beam[0][-1] in eos or step == steps]
        live = [beam for beam in best if beam[0][-1] not in eos][:width]
    return sorted(done, key=lambda beam: -beam[1] / len(beam[0]) ** penalty)[:width]


@pytest.mark.parametrize("seed", thinned(range(6), [0, 1]))
@pytest.mark.parametrize(
    ("width", "steps", "penalty"),
    [(1, 6, 1.0), (3, 8, 1.0), (5, 6, 0.0), (4, 7, -0.5), (10, 4, 2.0)],
)
@pytest.mark.slow
def test_beams_are_those_of_a_plain_loop(engine, oracle, seed, width, steps, penalty):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 30, 2)]
    ignore_eos = seed % 3 == 0
    params = BeamSearchParams(
        beam_width=width, max_tokens=steps, length_penalty=penalty, ignore_eos=ignore_eos
    )
    eos = () if ignore_eos else Tokens.eos_token_ids
    for prompt, output in zip(prompts, search(engine, prompts, params), strict=True):
        expected = naive(oracle, prompt, width, steps, eos, penalty)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        for beam, (tokens, total) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(total, abs=1e-4)
            assert beam.finish_reason == ("stop" if tokens[-1] in eos else "length")
            assert beam.text == " ".join(map(str, tokens))
    assert not engine.busy


def test_beams_share_the_pages_of_what_they_have_in_common(engine):
    engine.reset_prefix_cache()
    rows = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan, moves: rows.append(plan.num_tokens) or launch(plan, moves)
    try:
        search(engine, [list(range(32))], BeamSearchParams(beam_width=4, max_tokens=6))
    finally:
        engine.runner.launch = launch
    # after the first step a row a beam: its last page is a copy
    assert rows[0] == 32 and max(rows[1:]) <= 4


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 11}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, wrong):
    with pytest.raises(RequestError, match=wrong):
        BeamSearchParams(**fields)


def test_what_does_not_fit_is_refused_before_anything_is_computed(engine):
    with pytest.raises(RequestError, match="prompt"):
        search(engine, [[1], [1] * LENGTH], BeamSearchParams(beam_width=2))
    assert not engine.busy


def test_terms_are_kept_or_refused(engine):
    engine.reset_prefix_cache()
    params = BeamSearchParams(beam_width=2, max_tokens=2**30)
    prompt = [[1] * (LENGTH - 3)]
    (mine,) = search(engine, prompt, params, [Terms(cache_salt="a", priority=-1)])
    assert list(engine.tables[0].tree.roots) == ["a"]  # and it ended long before max_tokens
    (plain,) = search(engine, prompt, params)
    assert mine == plain
    with pytest.raises(RequestError, match="timeout"):
        search(engine, prompt, params, [Terms(timeout=1.0)])


def test_the_end_of_the_room_is_the_end(engine):
    (output,) = search(
        engine, [[1] * (LENGTH - 3)], BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True)
    )
    assert [(len(beam.tokens), beam.finish_reason) for beam in output.sequences] == [
        (3, "length")
    ] * 2
    assert not engine.busy


@pytest.mark.slow
def test_it_writes_text():
    llm = LLM(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256, kv_cache_memory_bytes=1 << 26
    )
    (output,) = llm.beam_search("Once upon a time", BeamSearchParams(beam_width=3, max_tokens=8))
    texts = [sequence.text for sequence in output.sequences]
    assert len(set(texts)) == 3 and all(texts)
    totals = [sequence.cum_logprob for sequence in output.sequences]
    assert totals == sorted(totals, reverse=True)
