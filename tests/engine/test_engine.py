"""Compares the engine with a decoder without a KV cache, token for token, on random requests."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.model.families.quill import small_cache_config
from quire.model.weights import abstract
from quire.serving.api.errors import RequestError
from quire.serving.api.outputs import NO_TOKEN_ALLOWED
from quire.serving.api.params import RequestOptions, SamplingParams
from quire.serving.cache import disk_cache as disk_module
from quire.serving.cache.disk_cache import DiskCache
from quire.serving.cache.host_cache import HostCache
from quire.serving.cache.page_table import PageTable
from quire.serving.device import state as state_module
from quire.serving.device.state import page_bytes
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.engine import Engine
from quire.serving.engine.runner import Runner
from quire.serving.engine.scheduler import POINT
from quire.serving.observe.trace import Trace
from quire.sharding.spec import random_arrays
from quire.tests.support import uncached
from quire.tests.support.cases import thinned

LENGTH = 64
VOCAB = 96
CONFIG = small_cache_config(
    VOCAB,
    dim=32,
    num_layers=4,
    heads=4,
    head_dim=16,
    ffn=48,
    window=9,
    global_every=2,
    max_len=LENGTH,
    dtype="float32",
)


@pytest.fixture(scope="module")
def weights():
    return random_arrays(abstract(CONFIG), seed=1)


@pytest.fixture(scope="module")
def oracle(weights):
    """Computes log-probabilities [T, V] of one sequence with the decoder without a KV cache."""
    forward = jax.jit(partial(uncached.forward, config=CONFIG))

    def logprobs(tokens: list[int]) -> np.ndarray:
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = np.asarray(forward(weights, padded), np.float64)[0, : len(tokens)]
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    return logprobs


def make_engine(
    weights,
    num_pages=(40, 40),
    compiled_engine: Engine | None = None,
    config=CONFIG,
    host_cache=None,
) -> Engine:
    """Makes an engine for 4 sequences and 16 tokens per step.

    `compiled_engine` has the same shape, and its compiled steps are reused.
    """
    runner = Runner(
        config, weights, StepShape.largest(4, 16, 16), num_pages, 8, LENGTH, True, lambda: weights
    )
    if compiled_engine is not None:
        runner.compiled, runner.page_copier.programs = (
            compiled_engine.runner.compiled,
            compiled_engine.runner.page_copier.programs,
        )
    return Engine(
        runner, None, [PageTable(num_pages, 8, CONFIG.windows, host_cache=host_cache)], LENGTH
    )


@pytest.fixture(scope="module")
def engine(weights):
    engine = make_engine(weights)
    engine.runner.warm_up()
    return engine


def run_requests(
    engine: Engine, arrivals: dict[int, list], aborts: dict[int, list[str]] | None = None
) -> dict:
    """Drive the engine; `arrivals` maps a step to (id, tokens, params), `aborts` a step to ids."""
    requests = {}
    step = 0
    while engine.busy or step <= max(arrivals):
        for name, tokens, params in arrivals.get(step, ()):
            requests[name] = engine.add(name, tokens, params)
        for name in (aborts or {}).get(step, ()):
            engine.abort(name)
        engine.step()
        engine.scheduler.check()
        step += 1
        assert step < 5000, "the engine makes no progress"
    return {name: request.output() for name, request in requests.items()}


def check_greedy(oracle, output, params: SamplingParams) -> None:
    """Checks that every token is the oracle's likeliest one, and that the answer ends where it
    should.
    """
    answer = output.outputs[0]
    prompt = list(output.prompt_token_ids)
    tokens = prompt + list(answer.token_ids)
    scores = oracle(tokens)
    for position, token in enumerate(answer.token_ids):
        row = scores[len(prompt) + position - 1]
        assert token == row.argmax()
        if params.logprobs is not None:
            entry = answer.logprobs[position]
            assert entry[token].logprob == pytest.approx(row[token], abs=1e-4)
            assert entry[token].rank == 1
            best_ids = np.argsort(-row)[: params.logprobs]
            assert {t for t, e in entry.items() if e.rank <= params.logprobs} == set(
                best_ids.tolist()
            )
    stops = set(params.stop_token_ids or ())
    is_stop = [token in stops for token in answer.token_ids]
    assert not any(is_stop[:-1])
    limit = min(params.max_tokens, LENGTH - len(prompt))
    if answer.finish_reason == "stop":
        assert is_stop[-1]
        assert answer.stop_reason == answer.token_ids[-1]
    elif answer.finish_reason == "length":
        assert len(answer.token_ids) == limit
        assert not is_stop[-1]
    else:
        assert answer.finish_reason == "abort"
        assert len(answer.token_ids) <= limit


def random_mix(rng) -> tuple[dict, dict, dict]:
    arrivals = {}
    aborts = {}
    params = {}
    for index in range(int(rng.integers(1, 8))):
        name = str(index)
        params[name] = SamplingParams(
            temperature=0,
            max_tokens=int(rng.integers(1, 30)),
            stop_token_ids=rng.integers(0, VOCAB, int(rng.integers(0, 6))).tolist(),
            logprobs=int(rng.integers(0, 5)) if rng.random() < 0.5 else None,
            ignore_eos=True,
        )
        start = int(rng.integers(0, 12))
        length = (
            int(rng.integers(1, 50))
            if rng.random() < 0.7
            else int(rng.choice([1, 7, 8, 9, 16, 17, 62, 63]))
        )
        arrivals.setdefault(start, []).append(
            (name, rng.integers(0, VOCAB, length).tolist(), params[name])
        )
        if rng.random() < 0.2:
            aborts.setdefault(start + int(rng.integers(0, 15)), []).append(name)
    return arrivals, aborts, params


@pytest.mark.parametrize("block", thinned(range(10), [0, 1]))
def test_random_mixes_match_the_uncached_decoder(engine, oracle, block):
    """Each block runs 20 mixes of arrivals, lengths, stops and aborts, without recompiling."""
    rng = np.random.default_rng(block)
    oracle([1])  # its own compilation must not count
    recompiles = engine.runner.compiles.recompiles
    for _ in range(20):
        arrivals, aborts, params = random_mix(rng)
        for name, output in run_requests(engine, arrivals, aborts).items():
            check_greedy(oracle, output, params[name])
        assert all(group.num_free == group.num_pages - 1 for group in engine.tables[0].pools)
    assert engine.runner.compiles.recompiles == recompiles


class RecordedArray:
    """An output array of a step that records its transfers to the host."""

    def __init__(self, name: str, array: jax.Array, events: list):
        self.name = name
        self.array = array
        self.events = events

    def copy_to_host_async(self) -> None:
        self.events.append(("begin", self.name))
        self.array.copy_to_host_async()

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.events.append(("end", self.name))
        return np.asarray(self.array)


def test_decode_step_transfers_one_array_each_way(weights, engine):
    """While the same sequences decode, a step uploads its batch and downloads the sampled tokens;
    nothing else is transferred or waited for.
    """
    engine = make_engine(weights, compiled_engine=engine)
    runner = engine.runner
    events = []
    runner.remote = True

    def watch(compiled):
        def call(weights, state, buffer):
            arrays = jax.tree.leaves((weights, state))
            assert all(isinstance(leaf, jax.Array) for leaf in arrays)
            assert isinstance(buffer, np.ndarray) and buffer.dtype == np.int32
            events.append(("launch", buffer.nbytes))
            sampled, hidden_RD, state = compiled(weights, state, jax.device_put(buffer))
            names = {
                name: RecordedArray(name, leaf, events)
                for name, leaf in vars(sampled).items()
                if leaf is not None
            }
            return sampled.replace(**names), RecordedArray("hidden_RD", hidden_RD, events), state

        return call

    runner.compiled = {size: watch(compiled) for size, compiled in runner.compiled.items()}
    params = SamplingParams(temperature=1, max_tokens=30, ignore_eos=True)
    for index in range(3):
        engine.add(str(index), [index] * 5, params)
    for _ in range(4):
        engine.step()
    events.clear()
    pages = [len(seq.cache.pages[0]) for seq in engine.scheduler.running]
    with jax.transfer_guard("disallow"):  # explicit transfers, as in `call`, are still allowed
        for _ in range(20):
            engine.step()
    expected = [("launch", events[0][1]), ("begin", "tokens_R"), ("end", "tokens_R")]
    assert events == expected * 20
    assert all(
        len(seq.cache.pages[0]) > num_pages
        for seq, num_pages in zip(engine.scheduler.running, pages, strict=True)
    )
    while engine.busy:
        engine.step()


def test_advanced_decode_batch_equals_a_rebuilt_one(engine, monkeypatch):
    """They may differ only in tokens that the device has and the host has learnt meanwhile."""
    builder = engine.runner.batch_builder
    build = builder.build
    steps = builder.decode_steps[0]
    num_advanced = 0

    def build_twice(plan):
        nonlocal num_advanced
        steps_before = [*steps]
        size, buffer = build(plan)
        steps_after = [*steps]
        steps.clear()
        num_advanced += (
            bool(steps_before and steps_after) and steps_after[0].seqs is steps_before[0].seqs
        )
        rebuilt_size, rebuilt_buffer = build(plan)
        steps.clear()
        steps.extend(steps_after)
        advanced_batch, rebuilt_batch = (
            builder.layouts[size].views(x) for x in (buffer, rebuilt_buffer)
        )
        is_on_device = advanced_batch.tokens_T < 0
        np.testing.assert_array_equal(
            -1 - advanced_batch.tokens_T[is_on_device], advanced_batch.owners_T[is_on_device]
        )
        rebuilt_batch.tokens_T[is_on_device] = advanced_batch.tokens_T[is_on_device]
        assert size == rebuilt_size
        jax.tree.map(np.testing.assert_array_equal, advanced_batch, rebuilt_batch)
        return size, buffer

    monkeypatch.setattr(builder, "build", build_twice)
    rng = np.random.default_rng(21)
    for _ in range(20):
        arrivals, aborts, _ = random_mix(rng)
        run_requests(engine, arrivals, aborts)
    assert num_advanced > 100


@pytest.fixture(params=["", "off"], ids=["native", "xla"])
def kernels(request, monkeypatch):
    """Runs a test with the C++ kernels (if there is a compiler) and with XLA's operations."""
    monkeypatch.setenv("QUIRE_NATIVE", request.param)
    jax.clear_caches()  # the key of a cached trace does not contain the choice of kernels
    yield request.param
    jax.clear_caches()


@pytest.mark.nightly  # test_speculative.py tests the plain programs that verify drafts
@pytest.mark.parametrize("kernels", ["off"], indirect=True)
def test_plain_sampling_programs_match_the_general_ones(weights, kernels):
    """An accelerator runs plain programs while requests use only temperature and min-p."""
    engine = make_engine(weights)
    engine.runner.remote = True
    engine.runner.warm_up()
    called_sizes = []
    token_ids_by_run = []

    def record_calls(size, program):
        def recording_program(*arguments):
            called_sizes.append(size)
            return program(*arguments)

        return recording_program

    def generate(**params) -> list:
        requests = [
            (
                str(i),
                [i, 7] * 3,
                SamplingParams(
                    temperature=t, min_p=p, seed=i, max_tokens=9, ignore_eos=True, **params
                ),
            )
            for i, (t, p) in enumerate([(0, 0), (1.0, 0), (0.7, 0.1), (0, 0)])
        ]
        return [
            output.outputs[0].token_ids for output in run_requests(engine, {0: requests}).values()
        ]

    plain_programs = {
        size: record_calls(size, program) for size, program in engine.runner.plain.items()
    }
    assert set(plain_programs) == {
        size for size in engine.runner.compiled if size.samples >= size.rows
    }
    for engine.runner.plain in ({}, plain_programs):
        token_ids_by_run.append(generate())
    assert token_ids_by_run[0] == token_ids_by_run[1]
    assert len(called_sizes) == 8  # one per decode step
    called_sizes.clear()
    for params in (
        {"top_k": 3},
        {"top_p": 0.9},
        {"presence_penalty": 1.0},
        {"logit_bias": {3: 1.0}},
        {"logprobs": 1},
    ):
        generate(**params)
    generate(min_tokens=9)
    assert not called_sizes
    assert not engine.runner.compiles.recompiles


@pytest.mark.parametrize("kernels", ["off"], indirect=True)
@pytest.mark.slow
def test_random_mixes_without_native_kernels(weights, oracle, kernels):
    engine = make_engine(weights)
    rng = np.random.default_rng(77)
    engine.runner.warm_up()
    for _ in range(10):
        arrivals, aborts, params = random_mix(rng)
        for name, output in run_requests(engine, arrivals, aborts).items():
            check_greedy(oracle, output, params[name])


@pytest.mark.parametrize(
    "kernels", thinned(["", "off"], [""]), indirect=True, ids=["native", "xla"]
)
@pytest.mark.parametrize("dtype", thinned(["int8", "fp8", "bfloat16", "int4"], ["int8", "int4"]))
@pytest.mark.slow
def test_quantized_kv_cache_is_accurate_and_batch_invariant(weights, oracle, kernels, dtype):
    """Log-probabilities are near the oracle's, and the same bits alone and in a batch."""
    config = replace(CONFIG, kv_cache_dtype=dtype)
    engine = make_engine(weights, config=config)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.state.pages))
    assert num_bytes == sum(40 * page_bytes(config, group, 8) for group in range(2))
    engine.runner.warm_up()
    rng = np.random.default_rng(13)
    params = SamplingParams(
        temperature=0, max_tokens=12, logprobs=0, prompt_logprobs=0, ignore_eos=True
    )
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 50, 9)]
    batched_outputs = run_requests(
        engine, {0: [(str(i), p, params) for i, p in enumerate(prompts)]}
    )
    max_error = 0.0
    for index, prompt in enumerate(prompts):
        (alone,) = run_requests(engine, {0: [("x", prompt, params)]}).values()
        batched = batched_outputs[str(index)]
        assert alone.outputs[0].token_ids == batched.outputs[0].token_ids
        # XLA's products of such small heads are not batch invariant
        if kernels != "off" and dtype != "fp8":
            assert (
                alone.outputs == batched.outputs
                and alone.prompt_logprobs == batched.prompt_logprobs
            )
        tokens = prompt + list(alone.outputs[0].token_ids)
        scores = oracle(tokens)
        entries = [*alone.prompt_logprobs[1:], *alone.outputs[0].logprobs]
        for position, entry in enumerate(entries):
            max_error = max(
                max_error,
                abs(entry[tokens[position + 1]].logprob - scores[position, tokens[position + 1]]),
            )
    # the cache is quantised, so that there is an error, but a small one
    assert 1e-5 < max_error < {"fp8": 0.4, "int4": 0.8}.get(dtype, 0.15)


def test_kv_cache_skips_keep_layers_unquantized(weights, oracle):
    """Each layer's pages have their own type; with all layers skipped, none is quantised."""
    all_skipped = replace(CONFIG, kv_cache_dtype="int4", kv_cache_skips=CONFIG.kv_layers)
    default_leaves, all_skipped_leaves = (
        jax.tree.map(lambda x: (x.shape, x.dtype), make_engine(weights, config=c).runner.state)
        for c in (CONFIG, all_skipped)
    )
    assert default_leaves == all_skipped_leaves
    mixed = replace(CONFIG, kv_cache_dtype="int4", kv_cache_skips=CONFIG.kv_layers[:1])
    engine = make_engine(weights, config=mixed)
    skipped_pages, *quantized_pages = (
        engine.runner.state.pages[index] for index in CONFIG.kv_layers
    )
    assert skipped_pages.k_PSKH.dtype == jnp.float32 and skipped_pages.k_scale_PKS is None
    assert all(
        pages.k_PSKH.dtype == jnp.uint8 and pages.v_scale_PKS is not None
        for pages in quantized_pages
    )
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.state.pages))
    assert num_bytes == sum(40 * page_bytes(mixed, group, 8) for group in range(2))
    engine.runner.warm_up()
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, prompt_logprobs=0)
    prompt = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    (output,) = run_requests(engine, {0: [("x", prompt, params)]}).values()
    scores = oracle(prompt)
    logprobs = [
        entry[token].logprob
        for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]
    max_error = np.abs(logprobs - scores[np.arange(39), prompt[1:]]).max()
    assert 1e-5 < max_error < 0.8


def test_preemption_keeps_the_tokens(weights, oracle, engine):
    """The pool is too small for all sequences, so that some are preempted and recomputed."""
    engine = make_engine(weights, compiled_engine=engine)
    engine.tables[0] = engine.scheduler.replicas[0].table = PageTable((14, 40), 8, CONFIG.windows)
    rng = np.random.default_rng(5)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    arrivals = {0: [(str(i), rng.integers(0, VOCAB, 20).tolist(), params) for i in range(6)]}
    outputs = run_requests(engine, arrivals)
    assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0
    for output in outputs.values():
        check_greedy(oracle, output, params)


def test_nan_in_free_pages_reaches_no_output(weights, oracle, engine):
    """Every page starts as NaN, the dummy page too; no token may attend to unwritten slots."""
    engine = make_engine(weights, compiled_engine=engine)
    pages = jax.tree.map(lambda page: jnp.full_like(page, jnp.nan), engine.runner.state.pages)
    engine.runner.state = engine.runner.state.replace(pages=pages)
    rng = np.random.default_rng(9)
    for _ in range(10):
        arrivals, aborts, params = random_mix(rng)
        for name, output in run_requests(engine, arrivals, aborts).items():
            check_greedy(oracle, output, params[name])


def test_prompt_logprobs_match_the_uncached_decoder(engine, oracle):
    rng = np.random.default_rng(3)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 2, 17, 50)]
    outputs = run_requests(engine, {0: [(str(i), p, params) for i, p in enumerate(prompts)]})
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        scores = oracle(prompt)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            row = scores[position]
            token = prompt[position + 1]
            assert entry[token].logprob == pytest.approx(row[token], abs=1e-4)
            assert entry[token].rank == 1 + (row > row[token]).sum()
            assert set(np.argsort(-row)[:2].tolist()) <= set(entry)


def test_seeded_sampling_is_batch_invariant(engine):
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 40, 12)]
    params = [
        SamplingParams(
            temperature=1.0, top_p=0.9, top_k=20, seed=100 + i, max_tokens=12, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    alone = [
        run_requests(engine, {0: [("x", p, s)]})["x"].outputs[0].token_ids
        for p, s in zip(prompts, params, strict=True)
    ]
    for trial in range(3):
        starts = np.random.default_rng(trial).integers(0, 20, len(prompts))
        arrivals: dict[int, list] = {}
        for i, start in enumerate(starts):
            arrivals.setdefault(int(start), []).append((str(i), prompts[i], params[i]))
        outputs = run_requests(engine, arrivals)
        assert [outputs[str(i)].outputs[0].token_ids for i in range(len(prompts))] == alone


def test_n_samples_differ_and_repeat_with_a_seed(engine):
    params = SamplingParams(temperature=1.0, n=4, seed=7, max_tokens=10, ignore_eos=True)
    output = run_requests(engine, {0: [("a", [1, 2, 3], params)]})["a"]
    repeated_output = run_requests(engine, {0: [("a", [1, 2, 3], params)]})["a"]
    token_ids = [tuple(answer.token_ids) for answer in output.outputs]
    assert token_ids == [tuple(answer.token_ids) for answer in repeated_output.outputs]
    assert len(set(token_ids)) == 4
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]


def test_penalties_logit_bias_and_allowed_tokens_change_the_output(engine, oracle):
    prompt = [5, 6, 7]
    output = run_requests(
        engine, {0: [("a", prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))]}
    )["a"]
    tokens = output.outputs[0].token_ids

    def greedy(**settings):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **settings)
        return run_requests(engine, {0: [("a", prompt, params)]})["a"].outputs[0].token_ids

    assert set(greedy(allowed_token_ids=[3, 4])) <= {3, 4}
    assert greedy(logit_bias={9: 100.0}) == [9] * 12
    assert tokens[0] not in greedy(logit_bias={tokens[0]: -100.0})
    unrepeated = greedy(presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=50.0)
    assert len(set(unrepeated)) == 12
    assert not set(unrepeated) & set(prompt)
    # a naive loop with the same rule, token by token
    naive = list(prompt)
    for _ in range(12):
        row = oracle(naive)[-1].copy()
        for token in set(naive[3:]):
            row[token] -= 0.5 + 0.25 * naive[3:].count(token)
        naive.append(int(row.argmax()))
    assert greedy(presence_penalty=0.5, frequency_penalty=0.25) == naive[3:]


def test_min_tokens_delays_stop_tokens(engine):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    unstopped_ids = run_requests(engine, {0: [("a", [8, 9], params)]})["a"].outputs[0].token_ids
    stop = unstopped_ids[2]
    params_with_stop = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop], min_tokens=6
    )
    answer = run_requests(engine, {0: [("a", [8, 9], params_with_stop)]})["a"].outputs[0]
    assert stop not in answer.token_ids[:6]
    assert len(answer.token_ids) >= 6


@pytest.mark.parametrize(
    ("tokens", "settings", "message"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, f"0 to {VOCAB - 1}"),
        ([-1], {}, "-1"),
        ([1] * LENGTH, {}, f"at most {LENGTH - 1}"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([1], {"logit_bias": {VOCAB + 1: 1.0}}, "logit_bias"),
        ([1], {"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ([1], {"stop": "x"}, "tokenizer"),
    ],
)
def test_invalid_requests_are_refused_without_affecting_others(
    engine, oracle, tokens, settings, message
):
    good = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    healthy = engine.add("healthy", [1, 2, 3], good)
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.add("bad", tokens, SamplingParams(max_tokens=4, **settings))
    while engine.busy:
        engine.step()
    check_greedy(oracle, healthy.output(), good)


def test_request_larger_than_the_cache_is_refused(weights):
    engine = make_engine(weights, num_pages=(4, 4))
    with pytest.raises(RequestError, match="holds 24 at most"):
        engine.add("a", [1] * 20, SamplingParams(max_tokens=20))


def test_failed_launch_ends_only_the_requests_of_its_step(weights, oracle, engine, monkeypatch):
    engine = make_engine(weights, compiled_engine=engine)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    requests = [engine.add(str(i), [1 + i, 2, 3], params) for i in range(8)]
    engine.step()
    launch = engine.runner.launch

    def explode(plan, moves):
        monkeypatch.setattr(engine.runner, "launch", launch)
        raise RuntimeError("injected")

    monkeypatch.setattr(engine.runner, "launch", explode)
    while engine.busy:
        engine.step()
        engine.scheduler.check()
    reasons = [request.output().outputs[0].finish_reason for request in requests]
    assert reasons == ["error"] * 4 + ["length"] * 4
    for request in requests[4:]:
        check_greedy(oracle, request.output(), params)


def test_nan_logits_fail_only_their_own_request(oracle, weights):
    """A token's embedding is NaN: the request that uses it fails, and the others go on."""
    broken = weights.replace(
        embed_VD=weights.embed_VD.at[90].set(jnp.nan), head_VD=weights.embed_VD
    )
    engine = make_engine(broken)
    engine.runner.warm_up()
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, allowed_token_ids=list(range(90))
    )
    outputs = run_requests(
        engine,
        {0: [("good", [1, 2, 3], params), ("bad", [4, 90, 5], params), ("also", [7] * 20, params)]},
    )
    assert outputs["bad"].outputs[0].finish_reason == "error"
    for name in ("good", "also"):
        answer = outputs[name].outputs[0]
        assert answer.finish_reason == "length"
        tokens = list(outputs[name].prompt_token_ids) + list(answer.token_ids)
        rows = oracle(tokens)[:, :90].argmax(axis=-1)
        assert rows[len(tokens) - 9 : -1].tolist() == list(answer.token_ids)


@pytest.mark.parametrize("has_prompt_logprobs", [False, True])
def test_request_that_bans_every_token_keeps_the_cached_prompt(engine, has_prompt_logprobs):
    """The request ends with an error, but its pages are valid: only NaN logits discard pages."""
    prompt = list(range(50))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = exact_answers(run_requests(engine, {0: [("first", prompt, params)]})["first"])
    banned = SamplingParams(
        max_tokens=8, min_tokens=3, allowed_token_ids=[5], stop_token_ids=[5], ignore_eos=True,
        prompt_logprobs=0 if has_prompt_logprobs else None,
    )  # fmt: skip
    answer = run_requests(engine, {0: [("banned", prompt, banned)]})["banned"].outputs[0]
    assert (answer.finish_reason, answer.stop_reason, list(answer.token_ids)) == (
        "error",
        NO_TOKEN_ALLOWED,
        [],
    )
    repeated_output = run_requests(engine, {0: [("again", prompt, params)]})["again"]
    assert repeated_output.num_cached_tokens == 49 and exact_answers(repeated_output) == expected


# The prefix cache


def without_cache(weights, compiled_engine: Engine) -> Engine:
    engine = make_engine(weights, compiled_engine=compiled_engine)
    engine.tables[0].keeps_prefixes = False
    return engine


def exact_answers(output) -> list:
    """Returns token ids and log-probabilities of each answer, to be compared bit for bit."""
    return [
        (
            list(answer.token_ids),
            [{t: e.logprob for t, e in entry.items()} for entry in answer.logprobs or ()],
        )
        for answer in output.outputs
    ]


def overlapping_prompts(rng, count: int) -> list[list[int]]:
    """Makes prompts that share prefixes, like the turns of chats with one system prompt."""
    prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()]
    while len(prompts) < count:
        earlier_prompt = prompts[int(rng.integers(len(prompts)))]
        prefix_length = (
            int(rng.integers(0, len(earlier_prompt) + 1))
            if rng.random() < 0.5
            else len(earlier_prompt)
        )
        prompts.append(
            (
                earlier_prompt[:prefix_length]
                + rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist()
            )[: LENGTH - 1]
        )
    return prompts


@pytest.mark.parametrize("block", thinned(range(5), [0]))
def test_prefix_cache_hits_are_bit_identical(weights, engine, block):
    """Requests share prefixes, are greedy or sampled, with or without penalties; in a small pool
    cached pages are soon evicted.
    """
    rng = np.random.default_rng(100 + block)
    uncached_engine = without_cache(weights, engine)
    small_engine = make_engine(weights, compiled_engine=engine)
    small_engine.tables[0] = small_engine.scheduler.replicas[0].table = PageTable(
        (16, 14), 8, CONFIG.windows
    )
    num_cached_tokens = {"roomy": 0, "small": 0}
    for _ in range(6):
        arrivals: dict[int, list] = {}
        for index, prompt in enumerate(overlapping_prompts(rng, 8)):
            params = SamplingParams(
                temperature=float(rng.choice([0, 1])),
                seed=index,
                max_tokens=int(rng.integers(1, 20)),
                repetition_penalty=float(rng.choice([1, 1.3])),
                frequency_penalty=float(rng.choice([0, 0.7])),
                logprobs=2,
                ignore_eos=True,
            )
            arrivals.setdefault(int(rng.integers(0, 20)), []).append((str(index), prompt, params))
        expected = {
            name: exact_answers(output)
            for name, output in run_requests(uncached_engine, arrivals).items()
        }
        for name, cached_engine in (("roomy", engine), ("small", small_engine)):
            outputs = run_requests(cached_engine, arrivals)
            assert {key: exact_answers(output) for key, output in outputs.items()} == expected
            num_cached_tokens[name] += sum(output.num_cached_tokens for output in outputs.values())
    assert num_cached_tokens["roomy"] > 100 and num_cached_tokens["small"] > 0


def test_repeated_prompt_computes_only_its_last_token(weights, engine):
    engine = make_engine(weights, compiled_engine=engine)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompt = list(range(41))
    tokens_per_step = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan, moves: (
        tokens_per_step.append(plan.num_tokens) or launch(plan, moves)
    )
    first_output = run_requests(engine, {0: [("a", prompt, params)]})["a"]
    tokens_per_step.clear()
    repeated_output = run_requests(engine, {0: [("b", prompt, params)]})["b"]
    assert (first_output.num_cached_tokens, repeated_output.num_cached_tokens) == (0, 40)
    assert tokens_per_step == [1, 1]
    assert exact_answers(first_output) == exact_answers(repeated_output)
    longer_output = run_requests(
        engine, {0: [("c", [*prompt, *repeated_output.outputs[0].token_ids, 5], params)]}
    )["c"]
    # the last page is a copy of the second request's partially filled page
    assert longer_output.num_cached_tokens == 42


def test_n_samples_share_prompt_pages(weights, engine):
    engine = make_engine(weights, compiled_engine=engine)
    max_used_pages = 0

    def record_used_pages(plan, moves, launch=engine.runner.launch):
        nonlocal max_used_pages
        max_used_pages = max(
            max_used_pages,
            sum(group.num_pages - 1 - group.num_free for group in engine.tables[0].pools[:1]),
        )
        return launch(plan, moves)

    engine.runner.launch = record_used_pages
    params = SamplingParams(temperature=1, n=4, seed=1, max_tokens=6, ignore_eos=True)
    run_requests(engine, {0: [("a", list(range(41)), params)]})
    assert max_used_pages == 5 + 4  # five pages of the prompt, and one of each answer


def test_cache_salt_separates_equal_prompts(weights, engine):
    engine = make_engine(weights, compiled_engine=engine)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    num_cached_tokens = []
    for name, salt in enumerate((None, "a", "b", "a", None)):
        request = engine.add(
            str(name), list(range(30)), params, request_options=RequestOptions(cache_salt=salt)
        )
        while engine.busy:
            engine.step()
        num_cached_tokens.append(request.output().num_cached_tokens)
    assert num_cached_tokens == [0, 0, 0, 29, 29]
    for invalid_salt in ("", 7):
        with pytest.raises(RequestError, match="cache_salt"):
            RequestOptions(cache_salt=invalid_salt)


def test_failed_steps_leave_nothing_in_the_prefix_cache(weights, engine):
    """Pages of a sequence with NaN logits are discarded, and a failed step empties the cache."""
    engine = make_engine(weights, compiled_engine=engine)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = list(range(30))
    engine.runner.weights = weights.replace(embed_VD=weights.embed_VD * jnp.nan)
    assert (
        run_requests(engine, {0: [("a", prompt, params)]})["a"].outputs[0].finish_reason == "error"
    )
    engine.runner.weights = weights
    assert run_requests(engine, {0: [("b", prompt, params)]})["b"].num_cached_tokens == 0
    assert run_requests(engine, {0: [("c", prompt, params)]})["c"].num_cached_tokens == 29
    list(engine.lifecycle.recover(RuntimeError("the device is gone")))
    assert run_requests(engine, {0: [("d", prompt, params)]})["d"].num_cached_tokens == 0


def test_prompt_logprobs_bypass_the_prefix_cache(weights, engine, oracle):
    engine = make_engine(weights, compiled_engine=engine)
    prompt = list(range(30))
    run_requests(
        engine, {0: [("a", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))]}
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    output = run_requests(engine, {0: [("b", prompt, params)]})["b"]
    assert output.num_cached_tokens == 0
    scores = oracle(prompt)
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry[prompt[position + 1]].logprob == pytest.approx(
            scores[position, prompt[position + 1]], abs=1e-4
        )


# Pages offloaded to host memory and disk


def host_cache_for(engine: Engine, host_pages: int, disk: DiskCache | None = None) -> HostCache:
    runner = engine.runner
    sizes = [
        page_bytes(runner.config, group, runner.page_size) for group in range(len(runner.num_pages))
    ]
    return HostCache(sizes, host_pages * max(sizes), disk, b"this model")


def overlapping_requests(rng, count: int) -> dict[int, list]:
    """Makes requests whose prompts share prefixes and that arrive over 60 steps."""
    arrivals: dict[int, list] = {}
    for index, prompt in enumerate(overlapping_prompts(rng, count)):
        params = SamplingParams(
            temperature=float(rng.choice([0, 1])),
            seed=index,
            max_tokens=8,
            logprobs=1,
            ignore_eos=True,
        )
        arrivals.setdefault(int(rng.integers(0, 60)), []).append((str(index), prompt, params))
    return arrivals


@pytest.mark.parametrize("host_pages", [4, 400])
def test_pages_restored_from_host_and_disk_are_bit_identical(weights, engine, host_pages, tmp_path):
    """The device pool is too small, host memory has room for some or for all pages, and the disk
    for all.
    """
    rng = np.random.default_rng(host_pages)
    uncached_engine = without_cache(weights, engine)
    disk = DiskCache(tmp_path, 1 << 30)
    host_cache = host_cache_for(engine, host_pages, disk)
    offloading_engine = make_engine(weights, compiled_engine=engine)
    offloading_engine.tables[0] = offloading_engine.scheduler.replicas[0].table = PageTable(
        (16, 14), 8, CONFIG.windows, host_cache=host_cache
    )
    small_engine = make_engine(weights, compiled_engine=engine)
    small_engine.tables[0] = small_engine.scheduler.replicas[0].table = PageTable(
        (16, 14), 8, CONFIG.windows
    )
    num_cached_tokens = {"host_cache": 0, "none": 0}
    recompiles = engine.runner.compiles.recompiles
    for _ in range(6):
        arrivals = overlapping_requests(rng, 12)
        expected = {
            name: exact_answers(output)
            for name, output in run_requests(uncached_engine, arrivals).items()
        }
        for name, cached_engine in (("host_cache", offloading_engine), ("none", small_engine)):
            outputs = run_requests(cached_engine, arrivals)
            assert {key: exact_answers(output) for key, output in outputs.items()} == expected
            num_cached_tokens[name] += sum(output.num_cached_tokens for output in outputs.values())
    assert num_cached_tokens["host_cache"] > num_cached_tokens["none"]
    assert engine.runner.compiles.recompiles == recompiles
    offloading_engine.close()
    assert bool(disk.sizes)


def test_paired_kv_pages_match_and_survive_offloading(weights, oracle, tmp_path, monkeypatch):
    """With keys and values in one array, as on TPUs, pages can be offloaded and restored too."""
    monkeypatch.setattr(state_module, "uses_paired_pages", lambda dtype: True)
    engine = make_engine(weights)
    engine.runner.warm_up()
    assert all(
        pages.k_PSKH is None and pages.v_PSKH is None
        for pages in engine.runner.state.pages.values()
    )
    small_engine = make_engine(weights, compiled_engine=engine)
    host_cache = host_cache_for(engine, 4, DiskCache(tmp_path, 1 << 30))
    small_engine.tables[0] = small_engine.scheduler.replicas[0].table = PageTable(
        (16, 14), 8, CONFIG.windows, host_cache=host_cache
    )
    arrivals = overlapping_requests(np.random.default_rng(4), 16)
    expected = run_requests(without_cache(weights, engine), arrivals)
    outputs = run_requests(small_engine, arrivals)
    assert {name: exact_answers(output) for name, output in outputs.items()} == {
        n: exact_answers(output) for n, output in expected.items()
    }
    assert sum(output.num_cached_tokens for output in outputs.values())
    for name, _, params in sum(arrivals.values(), []):
        if params.temperature == 0:
            check_greedy(oracle, outputs[name], params)
    small_engine.close()


def test_new_engine_reuses_pages_on_disk_unless_damaged(weights, engine, tmp_path):
    prompt = list(range(41))
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)

    def serve(folder) -> tuple[int, list]:
        new_engine = make_engine(
            weights,
            compiled_engine=engine,
            host_cache=host_cache_for(engine, 50, DiskCache(folder, 1 << 30)),
        )
        output = run_requests(new_engine, {0: [("a", prompt, params)]})["a"]
        new_engine.close()
        new_engine.close()  # closing again does nothing
        with pytest.raises(RequestError, match="closed"):
            new_engine.add("late", [1], params)
        return output.num_cached_tokens, exact_answers(output)

    first_answer = serve(tmp_path)
    assert first_answer[0] == 0
    assert serve(tmp_path) == (40, first_answer[1])
    for path in tmp_path.iterdir():  # flip one bit of each file, and truncate some
        data = bytearray(path.read_bytes())
        data[len(path.name) * 7919 % len(data)] ^= 1
        path.write_bytes(data if path.name[0] < "8" else data[: len(data) // 2])
    assert serve(tmp_path) == first_answer
    assert serve(tmp_path) == (40, first_answer[1])


def test_colliding_page_names_never_return_another_prompt(weights, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(HostCache, "name", lambda self, node, group: f"all.{group}.page")
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    uncached_engine = without_cache(weights, engine)
    for start in (0, 1, 2):
        prompt = list(range(start, start + 41))
        new_engine = make_engine(
            weights,
            compiled_engine=engine,
            host_cache=host_cache_for(engine, 50, DiskCache(tmp_path, 1 << 30)),
        )
        output = run_requests(new_engine, {0: [("a", prompt, params)]})["a"]
        new_engine.close()
        assert exact_answers(output) == exact_answers(
            run_requests(uncached_engine, {0: [("a", prompt, params)]})["a"]
        )


def test_full_disk_changes_no_answer(weights, engine, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(
        disk_module, "open_private", lambda path, flags: os.open("/dev/full", os.O_WRONLY)
    )
    rng = np.random.default_rng(3)
    uncached_engine = without_cache(weights, engine)
    small_engine = make_engine(weights, compiled_engine=engine)
    host_cache = host_cache_for(engine, 2, DiskCache(tmp_path, 1 << 30))
    small_engine.tables[0] = small_engine.scheduler.replicas[0].table = PageTable(
        (16, 14), 8, CONFIG.windows, host_cache=host_cache
    )
    arrivals = overlapping_requests(rng, 12)
    expected = {
        name: exact_answers(output)
        for name, output in run_requests(uncached_engine, arrivals).items()
    }
    assert {
        name: exact_answers(output) for name, output in run_requests(small_engine, arrivals).items()
    } == expected
    small_engine.close()
    assert "cannot write KV pages" in caplog.text and not list(tmp_path.iterdir())


def test_host_cache_survives_a_failed_step(weights, engine, tmp_path, monkeypatch):
    small_engine = make_engine(
        weights, compiled_engine=engine, host_cache=host_cache_for(engine, 400)
    )
    for group in small_engine.tables[0].pools:
        group.free_pages = group.free_pages[:8]  # the second prompt evicts the first
    monkeypatch.setattr(small_engine.scheduler, "check", lambda: None)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1, ignore_eos=True)
    first_output = run_requests(small_engine, {0: [("a", list(range(60)), params)]})["a"]
    run_requests(small_engine, {0: [("b", list(range(30, 90)), params)]})
    list(small_engine.lifecycle.recover(RuntimeError("the device is gone")))
    repeated_output = run_requests(small_engine, {0: [("c", list(range(60)), params)]})["c"]
    assert exact_answers(repeated_output) == exact_answers(first_output)
    assert repeated_output.num_cached_tokens > 0


# Sleep


@pytest.mark.parametrize(("level", "keep"), [(1, False), (1, True), (2, False), (2, True)])
def test_sleep_frees_device_memory_and_keeps_requests(weights, engine, level, keep):
    copies = jax.tree.map(jnp.array, weights)
    sleeping_engine = make_engine(copies, compiled_engine=engine)
    sleeping_engine.runner.load_weights = lambda: jax.tree.map(jnp.array, weights)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1, ignore_eos=True)
    prompts = [list(range(start, start + 20)) for start in range(6)]
    expected = [
        exact_answers(run_requests(engine, {0: [("x", prompt, params)]})["x"]) for prompt in prompts
    ]
    requests = [
        sleeping_engine.add(str(index), prompt, params) for index, prompt in enumerate(prompts)
    ]
    for _ in range(8):
        sleeping_engine.step()
    device_arrays = jax.tree.leaves((sleeping_engine.runner.weights, sleeping_engine.runner.state))
    recompiles = engine.runner.compiles.recompiles
    sleeping_engine.sleep(level, keep)
    assert all(leaf.is_deleted() for leaf in device_arrays)
    assert not sleeping_engine.busy and not sleeping_engine.step()
    with pytest.raises(RequestError, match="asleep"):
        sleeping_engine.add("more", [1], params)
    sleeping_engine.scheduler.check()
    sleeping_engine.lifecycle.wake_up()
    while sleeping_engine.busy:
        sleeping_engine.step()
        sleeping_engine.scheduler.check()
    assert [exact_answers(request.output()) for request in requests] == expected
    assert engine.runner.compiles.recompiles == recompiles
    repeated_output = run_requests(sleeping_engine, {0: [("again", prompts[0], params)]})["again"]
    assert repeated_output.num_cached_tokens == 19 and exact_answers(repeated_output) == expected[0]
    with pytest.raises(RequestError, match="level"):
        sleeping_engine.sleep(3)


@pytest.mark.parametrize("level", [1, 2])
def test_failed_wake_up_can_be_retried(weights, engine, level):
    """What was loaded on the device before the failure stays there."""
    sleeping_engine = make_engine(jax.tree.map(jnp.array, weights), compiled_engine=engine)
    sleeping_engine.runner.load_weights = lambda: jax.tree.map(jnp.array, weights)
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1, ignore_eos=True)
    expected = exact_answers(run_requests(engine, {0: [("x", list(range(20)), params)]})["x"])
    request = sleeping_engine.add("waits", list(range(20)), params)
    sleeping_engine.sleep(level)
    make_state = sleeping_engine.runner.make_state

    def fail_to_allocate():
        raise MemoryError("the device is full")

    sleeping_engine.runner.make_state = fail_to_allocate
    with pytest.raises(MemoryError):
        sleeping_engine.lifecycle.wake_up()
    assert sleeping_engine.lifecycle.is_asleep
    sleeping_engine.runner.make_state = make_state
    sleeping_engine.lifecycle.wake_up()
    while sleeping_engine.busy:
        sleeping_engine.step()
    assert exact_answers(request.output()) == expected


def test_sleep_ends_requests_of_a_failed_step(weights, engine):
    copies = jax.tree.map(jnp.array, weights)
    sleeping_engine = make_engine(copies, compiled_engine=engine)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    request = sleeping_engine.add("hit", list(range(20)), params)
    sleeping_engine.step()
    collect = sleeping_engine.runner.collect

    def fail_to_collect(launched):
        raise RuntimeError("the device is not well")

    sleeping_engine.runner.collect = fail_to_collect
    assert (
        sleeping_engine.sleep() == [request]
        and request.output().outputs[0].finish_reason == "error"
    )
    sleeping_engine.runner.collect = collect
    sleeping_engine.lifecycle.wake_up()
    sleeping_engine.scheduler.check()
    assert (
        len(
            run_requests(sleeping_engine, {0: [("canary", list(range(20)), params)]})["canary"]
            .outputs[0]
            .token_ids
        )
        == 20
    )


# The trace file
def test_trace_records_every_step_and_request(weights, engine, tmp_path):
    traced_engine = make_engine(weights, compiled_engine=engine)
    traced_engine.observers.append(Trace(tmp_path / "trace.json"))
    rng = np.random.default_rng(0)
    arrivals, _, _ = random_mix(rng)
    plans = []
    launch = traced_engine.runner.launch
    traced_engine.runner.launch = lambda plan, moves: plans.append(plan) or launch(plan, moves)
    outputs = run_requests(traced_engine, arrivals)
    traced_engine.close()
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    steps = [event for event in spans if names[event["tid"]] == "device"]
    assert [event["name"] for event in steps] == [f"step {number}" for number in range(len(plans))]
    assert [event["args"]["rows"] for event in steps] == [plan.num_tokens for plan in plans]
    for lane in names:
        lane_spans = [event for event in spans if event["tid"] == lane]
        assert all(event["dur"] >= 0 for event in lane_spans)
        assert all(
            a["ts"] + a["dur"] <= b["ts"] for a, b in zip(lane_spans, lane_spans[1:], strict=False)
        )
    host_events = [event["name"] for event in spans if names[event["tid"]] == "host"]
    assert {"schedule", "launch", "collect", "update"} == set(host_events)
    requests = [event for event in events if event.get("cat") == "request"]
    for name, output in outputs.items():
        request_events = [event for event in requests if event["id"] == name]
        assert [(event["name"], event["ph"]) for event in request_events] == [
            (stage, phase) for stage in ("wait", "read", "write") for phase in "be"
        ]
        assert request_events[-2]["args"]["tokens"] == len(output.outputs[0].token_ids)
        assert request_events[0]["args"]["prompt_tokens"] == len(output.prompt_token_ids)
        times = [event["ts"] for event in request_events]
        assert times == sorted(times)


def test_unwritable_trace_affects_no_request(weights, engine, caplog):
    traced_engine = make_engine(weights, compiled_engine=engine)
    traced_engine.observers.append(Trace(Path("/dev/full")))
    output = run_requests(
        traced_engine, {0: [("a", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))]}
    )["a"]
    traced_engine.close()
    assert output.outputs[0].finish_reason == "length"
    assert caplog.text.count("the trace /dev/full ends here") == 1


# best_of
def test_best_of_returns_the_likeliest_answers(weights, engine):
    prompt = [5, 6, 7]
    all_params = SamplingParams(
        temperature=1, seed=3, n=6, max_tokens=7, logprobs=0, ignore_eos=True
    )
    answers = run_requests(engine, {0: [("all", prompt, all_params)]})["all"].outputs
    best = sorted(answers, key=lambda answer: answer.cumulative_logprob, reverse=True)[:2]
    params = SamplingParams(temperature=1, seed=3, n=2, best_of=6, max_tokens=7, ignore_eos=True)
    chosen = run_requests(engine, {0: [("best", prompt, params)]})["best"].outputs
    assert [answer.token_ids for answer in chosen] == [answer.token_ids for answer in best]
    assert [answer.index for answer in chosen] == [0, 1]
    assert [answer.cumulative_logprob for answer in chosen] == [
        answer.cumulative_logprob for answer in best
    ]
    assert all(answer.logprobs is None for answer in chosen)
    for best_of in (1, 0, "x", 1000):
        with pytest.raises(RequestError, match="best_of"):
            SamplingParams(n=2, best_of=best_of)


# The queue: its order, timeouts and limits
class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_queue_orders_by_priority_and_waiting_time(weights, engine):
    engine = make_engine(weights, compiled_engine=engine)
    clock = Clock()
    engine.clock = clock
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    running = [engine.add(f"busy {i}", [i + 1], params) for i in range(4)]  # they take all slots
    engine.step()
    waiting = [engine.add("calm", [5], params)]
    clock.now += 1
    waiting.append(engine.add("urgent", [6], params, request_options=RequestOptions(priority=-1)))
    waiting.append(engine.add("late", [7], params, request_options=RequestOptions(priority=1)))
    clock.now += 1.5 * POINT
    waiting.append(
        engine.add("urgent but new", [8], params, request_options=RequestOptions(priority=-1))
    )
    assert [seq.request.request_id for seq in engine.scheduler.waiting] == [
        "urgent", "calm", "urgent but new", "late",
    ]  # fmt: skip
    while engine.busy:
        engine.step()
    assert all(request.finished for request in running + waiting)


def test_lowest_priority_sequence_is_preempted(weights, engine):
    engine = make_engine(weights, compiled_engine=engine)
    engine.tables[0] = engine.scheduler.replicas[0].table = PageTable((14, 40), 8, CONFIG.windows)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests = [
        engine.add(str(i), [i] * 20, params, request_options=RequestOptions(priority=priority))
        for i, priority in enumerate((3, -3, 2, -2))
    ]
    while engine.busy:
        engine.step()
    preemptions = [request.output().metrics.num_preemptions for request in requests]
    assert preemptions[0] > 0 and preemptions[1] == preemptions[3] == 0


def test_timeout_ends_a_request_with_its_partial_answer(weights, oracle, engine):
    engine = make_engine(weights, compiled_engine=engine)
    clock = Clock()
    engine.clock = clock
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    slow = engine.add("slow", [1, 2, 3], params, request_options=RequestOptions(timeout=5))
    patient = engine.add("patient", [4, 5, 6], params, request_options=RequestOptions(timeout=500))
    short_requests = [engine.add(str(i), [i], params) for i in range(2)]
    queued = engine.add("queued", [9], params, request_options=RequestOptions(timeout=2))
    for _ in range(8):
        engine.step()
    clock.now += 3
    assert queued in engine.step() and queued.output().outputs[0].finish_reason == "timeout"
    assert not queued.output().outputs[0].token_ids
    clock.now += 3
    assert slow in engine.step()
    answer = slow.output().outputs[0]
    assert answer.finish_reason == "timeout" and 5 < len(answer.token_ids) < 20
    engine.scheduler.check()
    while engine.busy:
        engine.step()
    for request in (patient, *short_requests):
        check_greedy(oracle, request.output(), params)
    assert len(engine.deadlines.heap) <= 1  # the deadline of a request that finished in time stays


def test_share_keys_get_equal_shares_of_the_queue(weights, engine):
    """Four requests of one key take turns with a hundred earlier requests of another key."""
    engine = make_engine(weights, compiled_engine=engine)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for index in range(100):
        engine.add(
            f"many {index}",
            [index % VOCAB] * 10,
            params,
            request_options=RequestOptions(share_key="many"),
        )
    finished_ids: list[str] = []

    def step() -> None:
        finished_ids.extend(request.request_id for request in engine.step() if request.finished)
        engine.scheduler.check()

    for _ in range(5):
        step()
    few_requests = [
        engine.add(f"few {i}", [i] * 10, params, request_options=RequestOptions(share_key="few"))
        for i in range(4)
    ]
    num_finished = len(finished_ids)
    while engine.busy:
        step()
    assert all(request.finished for request in few_requests) and len(finished_ids) == 104
    last_index = max(finished_ids.index(request.request_id) for request in few_requests)
    assert 4 <= last_index - num_finished < 16  # about every second finished request has their key
    assert not engine.scheduler.waiting.present and not engine.scheduler.waiting.served
    with pytest.raises(RequestError, match="share_key"):
        RequestOptions(share_key="")


def test_full_queue_refuses_requests(weights, engine):
    engine = make_engine(weights, compiled_engine=engine)
    engine.max_queued = 2
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add("a", [1], params)
    engine.add("b", [1], params)
    with pytest.raises(RequestError, match=r"queue.*full.*try again"):
        engine.add("c", [1], params)
    engine.step()
    engine.add("c", [1], params)
    while engine.busy:
        engine.step()


@pytest.mark.parametrize(
    ("request_options", "field"),
    [
        ({"priority": 1.5}, "priority"),
        ({"priority": 10**6}, "priority"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "1"}, "timeout"),
    ],
)
def test_invalid_request_options_are_refused(request_options, field):
    with pytest.raises(RequestError, match=field):
        RequestOptions(**request_options)
