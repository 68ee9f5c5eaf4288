"""The same tokens and log-probabilities, to the last bit, alone and in any company: on quill, by
every attention.

What may not matter: who else runs, how prompts are cut into chunks, what was found computed, who
gave way, what came back from host memory or disk.
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

LENGTH = 256


OTHERS = [
    pytest.param("native int4", marks=pytest.mark.nightly),
    pytest.param("native auto int4-32-least", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=[*attention.IMPLEMENTATIONS, *OTHERS])
def runner(request):
    """quill's float32 steps, with one implementation of attention alone, by dtypes of the cache and
    of the weights.
    """
    name, cache, quantization = (*request.param.split(), None, None)[:3]
    every = attention.IMPLEMENTATIONS.copy()
    jax.clear_caches()  # which one serves is no part of a trace's key
    attention.IMPLEMENTATIONS.clear()
    attention.IMPLEMENTATIONS[name] = every[name]
    folder = hub.resolve(None)
    config = loader.read_config(
        folder, "float32", LENGTH, quantization, kv_cache_dtype=cache or "auto"
    )
    shape = StepShape.largest(8, 48, 16)
    groups = len(config.windows)
    runner = Runner(config, loader.load(folder, config), shape, (400,) * groups, 16, LENGTH, True)
    try:
        runner.warm_up()
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    finally:
        attention.IMPLEMENTATIONS.clear()
        attention.IMPLEMENTATIONS.update(every)
    yield runner
    jax.clear_caches()


def engine_of(
    compiled: Runner, num_pages: int, host_cache: HostCache | None = None, keeps: bool = True
) -> Engine:
    """With a device state of its own, and the steps of the other."""
    runner = Runner(
        compiled.config, compiled.weights, compiled.shape, compiled.num_pages, 16, LENGTH, True
    )
    runner.compiled, runner.page_copier.programs = compiled.compiled, compiled.page_copier.programs
    pages = PageTable(
        (num_pages,) * len(runner.num_pages), 16, runner.config.windows, keeps, host_cache
    )
    return Engine(runner, None, [pages], LENGTH)


def serve(engine: Engine, requests: dict[str, tuple], arrivals: dict[str, int]) -> dict[str, tuple]:
    """What each request got: tokens, and the bits of their scores."""
    return {
        name: bits(request.output())
        for name, request in staggered_requests.serve(engine, requests, arrivals).items()
    }


def bits(output) -> tuple:
    scores = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    return (
        output.outputs[0].finish_reason,
        tuple(output.outputs[0].token_ids),
        tuple(sorted((token, entry.logprob) for token, entry in score.items()) for score in scores),
    )


def mix(rng: random.Random, vocab: int) -> tuple[dict[str, tuple], dict[str, int]]:
    """Up to eight requests that may begin alike, and the steps at which they arrive."""
    requests = {}
    arrivals = {}
    prompts = []
    for index in range(rng.randint(2, 8)):
        start = rng.choice(prompts)[: rng.randint(0, 120)] if prompts and rng.random() < 0.6 else []
        prompts.append(
            start + [rng.randrange(vocab) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 90)))]
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
def test_company_changes_no_bit(runner, tmp_path):
    rng = random.Random(6)
    compiled = runner.compiles.recompiles
    sizes = [
        page_bytes(runner.config, group, runner.page_size) for group in range(len(runner.num_pages))
    ]
    size = max(sizes)
    alone = engine_of(runner, 400, keeps=False)
    roomy = engine_of(runner, 400)
    tight = engine_of(runner, 17)
    host_cache = HostCache(sizes, 12 * size, DiskCache(tmp_path, 1 << 30), b"quill")
    tiered = engine_of(runner, 17, host_cache)
    seen = {"cached": 0, "gave way": 0, "came back": 0}
    for number in range(cases(20, least=3)):
        requests, arrivals = mix(rng, runner.config.vocab_size)
        expected = {
            name: serve(alone, {name: own}, {name: 0})[name] for name, own in requests.items()
        }
        for kind, engine in {"roomy": roomy, "tight": tight, "tiered": tiered}.items():
            outputs = {}
            added = engine.add

            def add(name, *given, outputs=outputs, added=added):
                outputs[name] = added(name, *given)
                return outputs[name]

            engine.add = add
            assert serve(engine, requests, arrivals) == expected, f"mix {number}, {kind}"
            engine.add = added
            cached = sum(request.output().num_cached_tokens for request in outputs.values())
            seen["cached"] += cached
            seen["gave way"] += sum(
                request.output().metrics.num_preemptions for request in outputs.values()
            )
            if engine is tiered:
                seen["came back"] += cached
    tiered.close()
    assert seen["cached"] > 0 and seen["gave way"] > 0 and seen["came back"] > 0
    assert runner.compiles.recompiles == compiled


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.slow
def test_where_invariance_is_required_it_holds_or_nothing_starts(monkeypatch, kernels):
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
