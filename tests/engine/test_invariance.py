"""Batch invariance of quill with every attention implementation: tokens and log-probabilities are
bit-identical alone and in any batch.

They do not depend on other requests, prompt chunks, cached prefixes, preemptions or pages restored
from host memory or disk.
"""

import random

import jax
import pytest

from quire import LLM
from quire.model.checkpoint import hub, loader
from quire.model.config import ModelError
from quire.ops import attention, native
from quire.serving.api.params import SamplingParams
from quire.serving.cache.disk_cache import DiskCache
from quire.serving.cache.host_cache import HostCache
from quire.serving.cache.page_table import PageTable
from quire.serving.device.state import page_bytes
from quire.serving.device.step_shape import StepShape
from quire.serving.engine.engine import Engine
from quire.serving.engine.runner import Runner
from quire.tests.support import staggered_requests
from quire.tests.support.cases import cases

MAX_LEN = 256


QUANTIZED = [
    pytest.param("native int4", marks=pytest.mark.nightly),
    pytest.param("native auto int4-32-least", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=[*attention.IMPLEMENTATIONS, *QUANTIZED])
def runner(request):
    """A warm runner of quill with one attention implementation, cache dtype and quantisation."""
    name, cache_dtype, quantization = (*request.param.split(), None, None)[:3]
    implementations = attention.IMPLEMENTATIONS.copy()
    jax.clear_caches()  # the key of a cached trace does not contain the implementation
    attention.IMPLEMENTATIONS.clear()
    attention.IMPLEMENTATIONS[name] = implementations[name]
    folder = hub.resolve(None)
    config = loader.read_config(
        folder, "float32", MAX_LEN, quantization, kv_cache_dtype=cache_dtype or "auto"
    )
    shape = StepShape.largest(8, 48, 16)
    groups = len(config.windows)
    runner = Runner(config, loader.load(folder, config), shape, (400,) * groups, 16, MAX_LEN, True)
    try:
        runner.warm_up()
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    finally:
        attention.IMPLEMENTATIONS.clear()
        attention.IMPLEMENTATIONS.update(implementations)
    yield runner
    jax.clear_caches()


def make_engine(
    warm_runner: Runner,
    num_pages: int,
    host_cache: HostCache | None = None,
    keeps_prefixes: bool = True,
) -> Engine:
    """Makes an engine with a new device state and the compiled steps of `warm_runner`."""
    runner = Runner(
        warm_runner.config,
        warm_runner.weights,
        warm_runner.shape,
        warm_runner.num_pages,
        16,
        MAX_LEN,
        True,
    )
    runner.compiled, runner.page_copier.programs = (
        warm_runner.compiled,
        warm_runner.page_copier.programs,
    )
    pages = PageTable(
        (num_pages,) * len(runner.num_pages), 16, runner.config.windows, keeps_prefixes, host_cache
    )
    return Engine(runner, None, [pages], MAX_LEN)


def serve_requests(
    engine: Engine, requests: dict[str, tuple], arrivals: dict[str, int]
) -> dict[str, tuple]:
    """Returns the exact answer of each request."""
    return {
        name: exact_answer(request.output())
        for name, request in staggered_requests.serve(engine, requests, arrivals).items()
    }


def exact_answer(output) -> tuple:
    logprobs = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    return (
        output.outputs[0].finish_reason,
        tuple(output.outputs[0].token_ids),
        tuple(
            sorted((token, entry.logprob) for token, entry in entries.items())
            for entries in logprobs
        ),
    )


def random_mix(rng: random.Random, vocab: int) -> tuple[dict[str, tuple], dict[str, int]]:
    """Returns up to eight requests, some with shared prefixes, and their arrival steps."""
    requests = {}
    arrivals = {}
    prompts = []
    for index in range(rng.randint(2, 8)):
        prefix = (
            rng.choice(prompts)[: rng.randint(0, 120)] if prompts and rng.random() < 0.6 else []
        )
        prompts.append(
            prefix + [rng.randrange(vocab) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 90)))]
        )
        params = SamplingParams(
            temperature=rng.choice((0, 0, 0.8)),
            seed=index,
            top_p=rng.choice((1, 0.9)),
            repetition_penalty=rng.choice((1, 1, 1.2)),
            max_tokens=rng.randint(1, 24),
            logprobs=2,
            logprob_token_ids=rng.choice((None, None, [index, 5])),
            prompt_logprobs=1 if rng.random() < 0.1 else None,
            ignore_eos=True,
        )
        requests[str(index)] = (prompts[-1], params)
        arrivals[str(index)] = rng.randint(0, 12)
    return requests, arrivals


@pytest.mark.random
def test_all_attention_implementations_are_batch_invariant(runner, tmp_path):
    rng = random.Random(6)
    recompiles = runner.compiles.recompiles
    sizes = [
        page_bytes(runner.config, group, runner.page_size) for group in range(len(runner.num_pages))
    ]
    largest_page = max(sizes)
    reference_engine = make_engine(runner, 400, keeps_prefixes=False)
    large_engine = make_engine(runner, 400)
    small_engine = make_engine(runner, 17)
    host_cache = HostCache(sizes, 12 * largest_page, DiskCache(tmp_path, 1 << 30), b"quill")
    tiered_engine = make_engine(runner, 17, host_cache)
    totals = {"cached": 0, "preemptions": 0, "restored": 0}
    for mix_index in range(cases(20, least=3)):
        requests, arrivals = random_mix(rng, runner.config.vocab_size)
        expected = {
            name: serve_requests(reference_engine, {name: request}, {name: 0})[name]
            for name, request in requests.items()
        }
        for kind, engine in {
            "roomy": large_engine,
            "tight": small_engine,
            "tiered": tiered_engine,
        }.items():
            outputs = {}
            added = engine.add

            def add(name, *arguments, outputs=outputs, added=added):
                outputs[name] = added(name, *arguments)
                return outputs[name]

            engine.add = add
            assert serve_requests(engine, requests, arrivals) == expected, (
                f"mix {mix_index}, {kind}"
            )
            engine.add = added
            num_cached = sum(request.output().num_cached_tokens for request in outputs.values())
            totals["cached"] += num_cached
            totals["preemptions"] += sum(
                request.output().metrics.num_preemptions for request in outputs.values()
            )
            if engine is tiered_engine:
                totals["restored"] += num_cached
    tiered_engine.close()
    assert totals["cached"] > 0 and totals["preemptions"] > 0 and totals["restored"] > 0
    assert runner.compiles.recompiles == recompiles


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.slow
def test_require_invariance_holds_or_refuses_to_start(monkeypatch, kernels):
    if kernels and not native.serves():
        pytest.skip("no compiler")
    if not kernels:
        monkeypatch.setenv("QUIRE_NATIVE", "off")
    options = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 8,
        "max_model_len": 64,
        "require_invariance": True,
    }
    if kernels:
        with LLM(**options) as llm:
            assert llm.get_metrics()["quire:batch_invariant"] == 1
    else:
        with pytest.raises(
            ModelError, match="require_invariance is set, and here .*: products by XLA are summed"
        ):
            LLM(**options)
    with pytest.raises(ModelError, match="require_invariance is 1; it must be True or False"):
        LLM(require_invariance=1)
