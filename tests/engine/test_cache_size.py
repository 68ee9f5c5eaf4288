"""Sizing of the KV cache: within the budget, for as many sequences as possible, of any length."""

import math
import os
from contextlib import nullcontext

import jax
import pytest

from quire import LLM
from quire.model.checkpoint import hub, loader
from quire.model.config import ModelError
from quire.serving.api.options import EngineOptions, make_options
from quire.serving.cache.page_pool import PagePool
from quire.serving.device.state import page_bytes
from quire.serving.device.step_shape import StepShape
from quire.serving.engine import cache_size
from quire.serving.engine.cache_size import (
    GAPS,
    cache_budget,
    check_memory,
    claim_memory,
    size_cache,
    usable_memory,
    working_bytes,
)
from quire.sharding.spec import nbytes


@pytest.fixture(scope="module")
def config():
    return loader.read_config(hub.resolve(None), "float32", None)


@pytest.mark.parametrize("seqs", [1, 7, 32, 256])
@pytest.mark.parametrize("share", [1.0, 1.3, 3.0, 20.0, 1000.0])
def test_pages_fit_as_many_sequences_as_the_budget_allows(config, seqs, share):
    groups = [PagePool(1, 16, window) for window in config.windows]
    costs = [page_bytes(config, group, 16) for group in range(len(groups))]

    def pages_needed(length: int) -> list[int]:
        return [group.max_pages(length, 512) for group in groups]

    def cost(length: int) -> int:
        return sum(
            num_pages * cost_per_page
            for num_pages, cost_per_page in zip(pages_needed(length), costs, strict=True)
        )

    budget = math.ceil(share * cost(config.max_len)) + sum(costs)
    options = EngineOptions(max_num_seqs=seqs, max_num_batched_tokens=512).on("cpu")
    length, pages = size_cache(config, options, budget)
    assert length == config.max_len
    assert (
        sum(count * cost_per_page for count, cost_per_page in zip(pages, costs, strict=True))
        <= budget
    )
    usable_pages = [count - 1 for count in pages]
    assert all(
        count >= num_needed
        for count, num_needed in zip(usable_pages, pages_needed(length), strict=True)
    )
    for length in (1, 16, 100, 500, config.max_len):
        num_fitting = min(
            count // num_needed
            for count, num_needed in zip(usable_pages, pages_needed(length), strict=True)
        )
        num_affordable = min(seqs, int(share * cost(config.max_len) / cost(length)))
        if seqs * cost(length) <= 0.9 * share * cost(config.max_len):
            assert num_fitting >= seqs, (
                "max_num_seqs sequences must fit if the budget is sufficient"
            )
        assert num_fitting >= num_affordable // 2


def test_too_little_memory_error_suggests_max_model_len(config):
    with pytest.raises(ModelError, match="--max-model-len .* or less"):
        size_cache(config, EngineOptions().on("cpu"), 100_000)
    length, _ = size_cache(config, EngineOptions(max_model_len=-1).on("cpu"), 300_000)
    assert 2 <= length < config.max_len


def test_working_bytes_grow_with_the_step_shape(config):
    """Working memory is measured by compiling; more tokens and logits need more."""
    weights = loader.load(hub.resolve(None), config)
    small = working_bytes(config, weights, StepShape.largest(4, 16, 16), 16)
    large = working_bytes(config, weights, StepShape.largest(64, 1024, 64), 16)
    assert 16 * config.vocab_size * 4 < small < large < 2**30


@pytest.mark.slow
def test_gpu_memory_utilization_bounds_all_memory(monkeypatch):
    """On a device of 64 MiB, weights, cache and working memory together stay below 80 %."""
    monkeypatch.setattr("quire.serving.engine.cache_size.device_memory", lambda: 64 << 20)
    llm = LLM(
        gpu_memory_utilization=0.8, max_num_seqs=256, max_num_batched_tokens=2048, dtype="float32"
    )
    runner = llm.engine.runner
    page_bytes_used = nbytes(runner.state.pages)
    step_bytes = working_bytes(runner.config, runner.weights, runner.shape, 16)
    total_bytes = page_bytes_used + nbytes(runner.weights) + step_bytes
    assert 0.7 * (64 << 20) < total_bytes <= 0.8 * (64 << 20)
    llm.close()
    jax.clear_caches()
    with pytest.raises(ModelError, match="gpu_memory_utilization"):
        EngineOptions(gpu_memory_utilization=1.5)


@pytest.mark.parametrize(
    ("environment", "utilization", "claimed", "usable"),
    [
        ({}, None, 0.9, 90),
        ({}, 0.5, 0.5, 50),
        ({"XLA_CLIENT_MEM_FRACTION": "0.6"}, 0.5, 0.6, 50),
        ({"XLA_CLIENT_MEM_FRACTION": "0.6"}, 0.8, 0.6, 60),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}, None, 0.4, 40),
    ],
)
def test_gpu_memory_utilization_is_a_fraction_of_the_device(
    monkeypatch, environment, utilization, claimed, usable
):
    """On a GPU of 1,000 MiB, of which JAX preallocates the fraction that the environment sets."""
    variable_names = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setattr(
        "os.environ", {k: v for k, v in os.environ.items() if k not in variable_names} | environment
    )
    options = EngineOptions(gpu_memory_utilization=utilization)
    claim_memory(options)
    fractions = [float(os.environ[name]) for name in variable_names if name in os.environ]
    assert fractions == [claimed] and not environment.keys() - os.environ.keys()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        "quire.serving.engine.cache_size.device_memory", lambda: int(fractions[0] * 1000) << 20
    )
    assert usable_memory(options) == pytest.approx(usable * (10 << 20) * (1 - GAPS), rel=1e-3)
    # a second engine, after JAX is initialised
    claim_memory(EngineOptions(gpu_memory_utilization=0.1))
    assert float(os.environ.get(variable_names[0], claimed)) == claimed
    assert usable_memory(EngineOptions(gpu_memory_utilization=0.1)) == pytest.approx(
        100 * 2**20 * (1 - GAPS), rel=1e-3
    )


def test_memory_preallocated_by_jax_bounds_the_engine(monkeypatch):
    monkeypatch.setattr("os.environ", {"PATH": ""})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("quire.serving.engine.cache_size.device_memory", lambda: 750)
    claim_memory(EngineOptions())
    assert usable_memory(EngineOptions()) == int(750 * (1 - GAPS))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_disk_bytes": 1 << 20},
        {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1 << 20},
        {"kv_cache_disk": "kv", "enable_prefix_caching": False},
        {"kv_cache_host_bytes": -1},
    ],
)
def test_options_without_effect_are_refused(options):
    with pytest.raises(ModelError, match="|".join(options)):
        EngineOptions(**options)


@pytest.mark.parametrize("value", ["1Q", "", True, 1.5, 0, "0", "-1"])
def test_invalid_kv_cache_memory_bytes_is_refused(value):
    with pytest.raises(
        ModelError,
        match=f"kv_cache_memory_bytes is {value!r}; it must be|kv_cache_memory_bytes is -?[01];",
    ):
        LLM(kv_cache_memory_bytes=value)


def test_sizes_may_have_unit_suffixes():
    options = make_options(
        None,
        kv_cache_memory_bytes="1.5G",
        kv_cache_host_bytes="2m",
        max_model_len="4K",
        dtype="auto",
    )
    assert (options.kv_cache_memory_bytes, options.kv_cache_host_bytes) == (3 << 29, 2_000_000)
    assert (options.max_model_len, options.dtype) == (4096, "auto")
    assert make_options(None, kv_cache_memory_bytes=7).kv_cache_memory_bytes == 7


@pytest.mark.parametrize(
    ("options", "free", "message"),
    [
        ({"kv_cache_memory_bytes": "3G"}, 4, None),
        (
            {"kv_cache_memory_bytes": "3G"},
            3,
            r"kv_cache_memory_bytes is 3221225472 \(3 GiB\), and 3 GiB .* at most 2048M",
        ),
        (
            {"kv_cache_host_bytes": "500G"},
            24,
            r"kv_cache_host_bytes is 536870912000 \(500 GiB\), and 24 GiB .* are free",
        ),
        (
            {"kv_cache_memory_bytes": "2G", "kv_cache_host_bytes": "2G"},
            4,
            "kv_cache_memory_bytes is .* and kv_cache_host_b",
        ),
        (
            {"kv_cache_memory_bytes": "1G", "tensor_parallel_size": 4},
            4,
            r"\(4 GiB\) for 4 devices, and 4 GiB",
        ),
        ({"kv_cache_memory_bytes": "1G", "tensor_parallel_size": 2}, 4, None),
        ({}, 0, None),
    ],
)
def test_cache_larger_than_free_memory_is_refused(monkeypatch, options, free, message):
    monkeypatch.setattr(cache_size, "free_memory", lambda: free << 30)
    weights = 1 << 30 if options else 0
    with nullcontext() if message is None else pytest.raises(ModelError, match=message):
        check_memory(make_options(None, **options), weights)


def test_cache_larger_than_the_device_is_refused(monkeypatch):
    monkeypatch.setattr(cache_size, "device_memory", lambda: 80 << 30)
    # free host memory does not matter for a cache on a device
    monkeypatch.setattr(cache_size, "free_memory", lambda: 1 << 30)
    check_memory(make_options(None, kv_cache_memory_bytes="60G"), 70 << 30)
    with pytest.raises(
        ModelError,
        match=r"kv_cache_memory_bytes is .* \(100 GiB\), and a device has 80 GiB; give less",
    ):
        check_memory(make_options(None, kv_cache_memory_bytes="100G"), 0)


def test_engine_that_cannot_fit_is_refused_before_it_loads(monkeypatch):
    stages: list[str] = []
    with pytest.raises(ModelError, match="kv_cache_memory_bytes is .* leave it out"):
        LLM(kv_cache_memory_bytes="500T", progress=stages.append)
    assert stages == ["reading config"]


def test_cpu_cache_budget_is_stable_while_free_memory_varies(monkeypatch):
    """A new number of pages would need new programs; the budget is between 7/8 of a quarter of the
    free memory and a quarter.
    """
    budgets = set()
    for free in (23_100, 23_900, 22_800, 22_600):  # MiB
        monkeypatch.setattr(cache_size, "free_memory", lambda free=free: free << 20)
        budgets.add(cache_budget(EngineOptions()))
    assert budgets == {5632 << 20}
    for free in (1, 1000, 3 << 30, 17 << 30, 30 << 30, 33 << 30, 1 << 40):
        monkeypatch.setattr(cache_size, "free_memory", lambda free=free: free)
        quarter = min(free // 4, 8 << 30)
        budget = cache_budget(EngineOptions())
        assert budget is not None and quarter * 7 / 8 <= budget <= quarter


def test_free_memory_includes_the_page_cache():
    with open("/proc/meminfo") as file:
        fields = dict(line.split()[:2] for line in file)
    assert cache_size.free_memory() == pytest.approx(int(fields["MemAvailable:"]) << 10, rel=0.1)
