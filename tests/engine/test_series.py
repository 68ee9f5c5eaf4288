"""Several decode steps sent to the device at once: the answers, bits and ends of steps sent one by
one.
"""

import random
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.model.errors import ModelError
from quire.serving.engine import engine
from quire.serving.engine.step_record import Observer
from quire.tests.support.cases import thinned
from quire.tests.support.golden.families import KINDS, VARIANTS
from quire.tests.support.golden.recorded import Golden

SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 16 << 20,
}
DECODED = [variant for variant in VARIANTS if variant.new_tokens]
PROMPTS = (
    "Once upon a time",
    "The fox and the bear",
    "2 + 3 =",
    "There was a ship on the lake. It",
)


class Steps(Observer):
    """How many steps each launch made, and what was drawn."""

    def __init__(self):
        self.counts: list[int] = []
        self.drawn: list[list[int]] = []

    def observe(self, record):
        if record.result is not None and record.result.plan.decodes:
            self.counts.append(record.result.plan.steps)
            self.drawn += [output.tokens for output in record.result.outputs]


@pytest.fixture(scope="module")
def single():
    return LLM(max_steps_per_launch=1, **SIZES)


@pytest.fixture(scope="module")
def several():
    return LLM(**SIZES)


@pytest.fixture
def steps(several, monkeypatch):
    """Steps are short enough for series, however busy the machine is."""
    monkeypatch.setattr(engine, "STREAMING_LATENCY", 1e9)
    monkeypatch.setattr(engine, "LATENCY", 1e9)
    watch = Steps()
    several.engine.observers.append(watch)
    yield watch
    several.engine.observers.remove(watch)
    while several.engine.in_flight:
        several.engine.step()
    several.engine.scheduler.check()
    assert not several.engine.requests


def drawn_params(rng: random.Random) -> SamplingParams:
    """Of all kinds that rows carry, and some that the host alone knows."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": rng.randrange(1000)},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 7, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.0, "stop": [" and", "."], "logprobs": 1},
        {"temperature": 0.0, "stop_token_ids": [rng.randrange(600) for _ in range(20)]},
        {"temperature": 0.0, "min_tokens": 9, "logit_bias": {5: 2.0}},
        {"temperature": 0.0, "bad_words": ["the fox"]},
        {"temperature": 0.9, "seed": 3, "n": 2},
    ]
    return SamplingParams(max_tokens=rng.randrange(10, 70), **rng.choice(ways))


def same(mine, other) -> bool:
    return [
        (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in mine.outputs
    ] == [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in other.outputs]


def test_every_bit_is_that_of_single_steps(single, several, steps):
    rng = random.Random(0)
    for _ in range(12):
        count = rng.choice((1, 1, 2, 3))
        prompts = rng.choices(PROMPTS, k=count)
        params = [drawn_params(rng) for _ in range(count)]
        pairs = zip(
            *(llm.generate(prompts, params, use_tqdm=False) for llm in (several, single)),
            strict=True,
        )
        assert all(same(*pair) for pair in pairs)
    assert max(steps.counts) == 8 and sum(count > 1 for count in steps.counts) > 30


def test_a_series_ends_with_the_answer(several, steps):
    """The device computes nothing after the token that ends every sequence."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (whole,) = several.generate([PROMPTS[0]], params, use_tqdm=False)
    tokens = whole.outputs[0].token_ids
    ends = [at for at in range(20, 36) if tokens.index(tokens[at]) == at]
    assert len(ends) > 3
    for at in ends:
        steps.drawn.clear()
        ended = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[tokens[at]])
        (cut,) = several.generate([PROMPTS[0]], ended, use_tqdm=False)
        assert cut.outputs[0].token_ids == tokens[: at + 1]
        computed = [token for drawn in steps.drawn for token in drawn]
        place = len(computed) - 1 - computed[::-1].index(tokens[at])
        assert not any(computed[place + 1 :])  # zeros: steps that were not made


def test_who_waits_is_not_kept_waiting(several, steps, monkeypatch):
    """With more requests than slots each step is sent by itself, and so it is where steps are
    long.
    """
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    requests = [several.add(PROMPTS[0], params) for _ in range(6)]
    while any(not request.finished for request in requests[:4]):
        several.engine.step()
    assert set(steps.counts) == {1}
    monkeypatch.setattr(engine, "STREAMING_LATENCY", 0.02)
    while not all(request.finished for request in requests):
        several.engine.step_seconds = 0.015
        several.engine.step()
    assert set(steps.counts) == {1}


def test_tokens_that_nobody_watches_may_be_later(several, steps, monkeypatch):
    """A whole answer is the same in longer series; a stream beside it is not kept waiting."""
    monkeypatch.setattr(engine, "STREAMING_LATENCY", 0.0)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (whole,) = several.generate([PROMPTS[0]], params, use_tqdm=False)
    assert max(steps.counts) == 8
    steps.counts.clear()
    *_, last = several.stream(PROMPTS[0], params)
    assert set(steps.counts) == {1} and last.outputs[0].token_ids == whole.outputs[0].token_ids
    steps.counts.clear()
    stream = several.stream(
        PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    )
    next(stream)
    several.generate([PROMPTS[1]], params, use_tqdm=False)
    assert set(steps.counts) == {1}
    stream.close()


def test_an_abort_amid_a_series_leaves_the_others(single, several, steps):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (expected,) = single.generate([PROMPTS[1]], params, use_tqdm=False)
    gone = several.add(PROMPTS[0], params)
    stays = several.add(PROMPTS[1], params)
    while len(stays.sequences[0].tokens) < 30:
        several.engine.step()
    several.engine.abort(gone.request_id)
    while not stays.finished:
        several.engine.step()
    assert stays.sequences[0].tokens[stays.sequences[0].num_prompt :] == list(
        expected.outputs[0].token_ids
    )
    assert max(steps.counts) == 8


def test_what_a_series_computed_is_found_again(single, several, steps):
    """Pages that were filled within series serve the next turn."""
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    found = []
    for llm in (several, single):
        (first,) = llm.generate([PROMPTS[3]], params, use_tqdm=False)
        turn = {"prompt_token_ids": [*first.prompt_token_ids, *first.outputs[0].token_ids, 20, 30]}
        (second,) = llm.generate([turn], params, use_tqdm=False)
        found.append((second.outputs[0].token_ids, second.num_cached_tokens))
    assert found[0] == found[1] and found[0][1] > 40


def test_turn_after_a_stop_token_within_a_fused_series_equals_a_cold_engine(several, steps):
    """The device ends a series at the last stop token, whose own keys and values no step has
    written.
    """
    cold = LLM(max_steps_per_launch=1, enable_prefix_caching=False, **SIZES)
    greedy = {"temperature": 0.0, "logprobs": 2}
    for prompt in PROMPTS:
        (whole,) = cold.generate(
            [prompt], SamplingParams(**greedy, max_tokens=40, ignore_eos=True), use_tqdm=False
        )
        tokens = list(whole.outputs[0].token_ids)
        for end in [at for at in range(4, 24) if tokens.index(tokens[at]) == at][:8]:
            params = SamplingParams(
                **greedy, max_tokens=40, stop_token_ids=[tokens[end]], ignore_eos=True
            )
            (first,) = several.generate([prompt], params, use_tqdm=False)
            assert list(first.outputs[0].token_ids) == tokens[: end + 1]
            turn = {
                "prompt_token_ids": [
                    *first.prompt_token_ids,
                    *first.outputs[0].token_ids,
                    20,
                    30,
                    40,
                ]
            }
            pair = [llm.generate([turn], params, use_tqdm=False)[0] for llm in (several, cold)]
            assert same(*pair), f"{prompt!r} stopped at {end}"
            assert pair[0].num_cached_tokens >= len(first.prompt_token_ids) + end
    assert max(steps.counts) == 8


def test_nothing_is_compiled_in_service(several, steps):
    several.generate(list(PROMPTS), SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
    assert several.engine.runner.compiles.recompiles == 0


def test_a_number_that_makes_no_sense_is_refused():
    with pytest.raises(
        ModelError, match=r"max_steps_per_launch is 0; it must be an integer of at least 1"
    ):
        LLM(max_steps_per_launch=0)


@pytest.mark.parametrize(
    "variant", thinned(DECODED, [v for v in DECODED if v.name in KINDS]), ids=lambda v: v.name
)
@pytest.mark.slow
def test_bits_of_a_family_alone_in_series_and_in_company_in_single_steps(
    variant, tmp_path, monkeypatch
):
    monkeypatch.setattr(engine, "LATENCY", 1e9)
    made = Golden(variant, tmp_path)
    llm = LLM(
        str(made.folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=16 << 20,
    )
    watch = Steps()
    llm.engine.observers.append(watch)
    params = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2, detokenize=False
    )
    prompts = [{"prompt_token_ids": tokens[:20]} for tokens in made.prompts[:2]]
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    several = max(watch.counts)
    watch.counts.clear()
    others = [{"prompt_token_ids": prompt["prompt_token_ids"][1:]} for prompt in prompts] * 3
    company = llm.generate(prompts + others, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in company[:2]] == [
        output.token_ids for output in alone
    ]
    assert [output.outputs[0].logprobs for output in company[:2]] == [
        output.logprobs for output in alone
    ]
    assert several == (1 if llm.engine.config.state_layers else 8)
