"""Fused decode steps (several per launch) give the same answers, bit for bit, as single steps."""

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

STEP_SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 16 << 20,
}
GENERATING_VARIANTS = [variant for variant in VARIANTS if variant.new_tokens]
PROMPTS = (
    "Once upon a time",
    "The fox and the bear",
    "2 + 3 =",
    "There was a ship on the lake. It",
)


class StepRecorder(Observer):
    """Records the number of steps of each decode launch, and the sampled tokens."""

    def __init__(self):
        self.counts: list[int] = []
        self.drawn: list[list[int]] = []

    def observe(self, record):
        if record.result is not None and record.result.plan.decodes:
            self.counts.append(record.result.plan.steps)
            self.drawn += [output.tokens for output in record.result.outputs]


@pytest.fixture(scope="module")
def single_step_llm():
    return LLM(max_steps_per_launch=1, **STEP_SIZES)


@pytest.fixture(scope="module")
def fused_llm():
    return LLM(**STEP_SIZES)


@pytest.fixture
def step_recorder(fused_llm, monkeypatch):
    """Records steps, which are always fused, even if the machine is slow."""
    monkeypatch.setattr(engine, "STREAMING_LATENCY", 1e9)
    monkeypatch.setattr(engine, "LATENCY", 1e9)
    recorder = StepRecorder()
    fused_llm.engine.observers.append(recorder)
    yield recorder
    fused_llm.engine.observers.remove(recorder)
    while fused_llm.engine.in_flight:
        fused_llm.engine.step()
    fused_llm.engine.scheduler.check()
    assert not fused_llm.engine.requests


def random_params(rng: random.Random) -> SamplingParams:
    """Returns random sampling parameters, some of which only the host evaluates."""
    options: list[dict[str, Any]] = [
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
    return SamplingParams(max_tokens=rng.randrange(10, 70), **rng.choice(options))


def are_equal(output, other_output) -> bool:
    def fields(answer):
        return (
            answer.token_ids,
            answer.text,
            answer.finish_reason,
            answer.stop_reason,
            answer.logprobs,
        )

    return [*map(fields, output.outputs)] == [*map(fields, other_output.outputs)]


def test_fused_steps_are_bit_identical_to_single_steps(single_step_llm, fused_llm, step_recorder):
    rng = random.Random(0)
    for _ in range(12):
        count = rng.choice((1, 1, 2, 3))
        prompts = rng.choices(PROMPTS, k=count)
        params = [random_params(rng) for _ in range(count)]
        pairs = zip(
            *(
                llm.generate(prompts, params, use_tqdm=False)
                for llm in (fused_llm, single_step_llm)
            ),
            strict=True,
        )
        assert all(are_equal(*pair) for pair in pairs)
    assert max(step_recorder.counts) == 8 and sum(count > 1 for count in step_recorder.counts) > 30


def test_fused_steps_stop_at_the_stop_token(fused_llm, step_recorder):
    """The device computes nothing after the token that ends every sequence."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (full_output,) = fused_llm.generate([PROMPTS[0]], params, use_tqdm=False)
    tokens = full_output.outputs[0].token_ids
    stop_positions = [
        position for position in range(20, 36) if tokens.index(tokens[position]) == position
    ]
    assert len(stop_positions) > 3
    for position in stop_positions:
        step_recorder.drawn.clear()
        params_with_stop = SamplingParams(
            temperature=0.0, max_tokens=40, stop_token_ids=[tokens[position]]
        )
        (stopped_output,) = fused_llm.generate([PROMPTS[0]], params_with_stop, use_tqdm=False)
        assert stopped_output.outputs[0].token_ids == tokens[: position + 1]
        computed = [token for tokens_of_step in step_recorder.drawn for token in tokens_of_step]
        last_position = len(computed) - 1 - computed[::-1].index(tokens[position])
        assert not any(computed[last_position + 1 :])  # zeros: steps that the device skipped


def test_steps_are_not_fused_while_requests_wait_or_steps_are_slow(
    fused_llm, step_recorder, monkeypatch
):
    """Requests wait for a slot at first; then steps take too long for the latency limit."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    requests = [fused_llm.add(PROMPTS[0], params) for _ in range(6)]
    while any(not request.finished for request in requests[:4]):
        fused_llm.engine.step()
    assert set(step_recorder.counts) == {1}
    monkeypatch.setattr(engine, "STREAMING_LATENCY", 0.02)
    while not all(request.finished for request in requests):
        fused_llm.engine.step_seconds = 0.015
        fused_llm.engine.step()
    assert set(step_recorder.counts) == {1}


def test_steps_are_not_fused_while_streaming(fused_llm, step_recorder, monkeypatch):
    """Without streams steps are fused; while any request streams, each step is a launch."""
    monkeypatch.setattr(engine, "STREAMING_LATENCY", 0.0)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (full_output,) = fused_llm.generate([PROMPTS[0]], params, use_tqdm=False)
    assert max(step_recorder.counts) == 8
    step_recorder.counts.clear()
    *_, last_output = fused_llm.stream(PROMPTS[0], params)
    assert (
        set(step_recorder.counts) == {1}
        and last_output.outputs[0].token_ids == full_output.outputs[0].token_ids
    )
    step_recorder.counts.clear()
    stream = fused_llm.stream(
        PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    )
    next(stream)
    fused_llm.generate([PROMPTS[1]], params, use_tqdm=False)
    assert set(step_recorder.counts) == {1}
    stream.close()


def test_abort_during_fused_steps_leaves_other_requests_unchanged(
    single_step_llm, fused_llm, step_recorder
):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (expected,) = single_step_llm.generate([PROMPTS[1]], params, use_tqdm=False)
    aborted = fused_llm.add(PROMPTS[0], params)
    remaining = fused_llm.add(PROMPTS[1], params)
    while len(remaining.sequences[0].tokens) < 30:
        fused_llm.engine.step()
    fused_llm.engine.abort(aborted.request_id)
    while not remaining.finished:
        fused_llm.engine.step()
    assert remaining.sequences[0].tokens[remaining.sequences[0].num_prompt :] == list(
        expected.outputs[0].token_ids
    )
    assert max(step_recorder.counts) == 8


def test_pages_filled_by_fused_steps_are_reused(single_step_llm, fused_llm, step_recorder):
    """The next turn of a chat reuses pages that fused steps have filled."""
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    results = []
    for llm in (fused_llm, single_step_llm):
        (first_output,) = llm.generate([PROMPTS[3]], params, use_tqdm=False)
        second_prompt = {
            "prompt_token_ids": [
                *first_output.prompt_token_ids,
                *first_output.outputs[0].token_ids,
                20,
                30,
            ]
        }
        (second_output,) = llm.generate([second_prompt], params, use_tqdm=False)
        results.append((second_output.outputs[0].token_ids, second_output.num_cached_tokens))
    assert results[0] == results[1] and results[0][1] > 40


def test_turn_after_a_stop_token_within_fused_steps_equals_a_cold_engine(fused_llm, step_recorder):
    """Fused steps end at the last stop token, whose keys and values are not written yet."""
    cold_llm = LLM(max_steps_per_launch=1, enable_prefix_caching=False, **STEP_SIZES)
    greedy = {"temperature": 0.0, "logprobs": 2}
    for prompt in PROMPTS:
        (full_output,) = cold_llm.generate(
            [prompt], SamplingParams(**greedy, max_tokens=40, ignore_eos=True), use_tqdm=False
        )
        tokens = list(full_output.outputs[0].token_ids)
        for stop_position in [
            position for position in range(4, 24) if tokens.index(tokens[position]) == position
        ][:8]:
            params = SamplingParams(
                **greedy, max_tokens=40, stop_token_ids=[tokens[stop_position]], ignore_eos=True
            )
            (first_output,) = fused_llm.generate([prompt], params, use_tqdm=False)
            assert list(first_output.outputs[0].token_ids) == tokens[: stop_position + 1]
            second_prompt = {
                "prompt_token_ids": [
                    *first_output.prompt_token_ids,
                    *first_output.outputs[0].token_ids,
                    20,
                    30,
                    40,
                ]
            }
            outputs = [
                llm.generate([second_prompt], params, use_tqdm=False)[0]
                for llm in (fused_llm, cold_llm)
            ]
            assert are_equal(*outputs), f"{prompt!r} stopped at {stop_position}"
            assert (
                outputs[0].num_cached_tokens >= len(first_output.prompt_token_ids) + stop_position
            )
    assert max(step_recorder.counts) == 8


def test_fused_steps_are_never_recompiled(fused_llm, step_recorder):
    fused_llm.generate(
        list(PROMPTS), SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False
    )
    assert fused_llm.engine.runner.compiles.recompiles == 0


def test_invalid_max_steps_per_launch_is_refused():
    with pytest.raises(
        ModelError, match=r"max_steps_per_launch is 0; it must be an integer of at least 1"
    ):
        LLM(max_steps_per_launch=0)


@pytest.mark.parametrize(
    "variant",
    thinned(GENERATING_VARIANTS, [v for v in GENERATING_VARIANTS if v.name in KINDS]),
    ids=lambda v: v.name,
)
@pytest.mark.slow
def test_fused_steps_match_single_batched_steps_for_each_family(variant, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "LATENCY", 1e9)
    golden = Golden(variant, tmp_path)
    llm = LLM(
        str(golden.folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        kv_cache_memory_bytes=16 << 20,
    )
    step_recorder = StepRecorder()
    llm.engine.observers.append(step_recorder)
    params = SamplingParams(
        temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2, detokenize=False
    )
    prompts = [{"prompt_token_ids": tokens[:20]} for tokens in golden.prompts[:2]]
    fused_answers = [
        llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts
    ]
    max_fused_steps = max(step_recorder.counts)
    step_recorder.counts.clear()
    other_prompts = [{"prompt_token_ids": prompt["prompt_token_ids"][1:]} for prompt in prompts] * 3
    batched_outputs = llm.generate(prompts + other_prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in batched_outputs[:2]] == [
        output.token_ids for output in fused_answers
    ]
    assert [output.outputs[0].logprobs for output in batched_outputs[:2]] == [
        output.logprobs for output in fused_answers
    ]
    assert max_fused_steps == (1 if llm.engine.config.state_layers else 8)
