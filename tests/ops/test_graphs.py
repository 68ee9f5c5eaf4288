"""CUDA graphs: compiler options, and graphs of self-test steps compiled for an H200."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from quire.ops.attention import hopper
from quire.ops.delta_net import accuracy as delta_net
from quire.ops.gpu import graphs
from quire.ops.heads import accuracy as heads
from quire.ops.linear.gpu_kernel import accuracy as product
from quire.ops.moe.routing import accuracy as routing
from quire.ops.residual import accuracy as residual
from quire.ops.rounding import accuracy as rounding
from quire.tests.support import kernels_ahead
from quire.tests.support.cases import thinned


@pytest.fixture
def fake_gpu(monkeypatch):
    """A function (platform version, newest CUDA version of the driver) that pretends such a GPU."""
    graphs.warn_once.cache_clear()
    for name in ("QUIRE_GRAPHS", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)

    def pretend(platform: str, driver: int) -> None:
        device = SimpleNamespace(client=SimpleNamespace(platform_version=platform))
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        monkeypatch.setattr(graphs, "driver_version", lambda: driver)

    return pretend


def test_graphs_capture_loops_branches_and_collectives(fake_gpu, monkeypatch):
    fake_gpu("PJRT C API\ncuda 12090", 12030)
    recorded = graphs.compiler_options()[graphs.OPTION].split(",")
    assert {"FUSION", "CUSTOM_CALL", "CONDITIONAL", "WHILE", "COLLECTIVES"} <= set(recorded)
    monkeypatch.setenv("QUIRE_GRAPHS", "off")
    assert graphs.compiler_options() == {graphs.OPTION: ""}


@pytest.mark.parametrize(("driver", "message"), [(12020, "knows CUDA 12.2"), (0, "does not say")])
def test_old_driver_disables_graphs_with_one_warning(fake_gpu, caplog, driver, message):
    fake_gpu("cuda 12090", driver)
    with caplog.at_level(logging.WARNING, "quire"):
        assert graphs.compiler_options() is None and graphs.compiler_options() is None
    assert len(caplog.records) == 1 and message in caplog.text and "12.3" in caplog.text


def test_xla_flags_have_precedence(fake_gpu, monkeypatch):
    fake_gpu("cuda 12090", 12090)
    monkeypatch.setenv("XLA_FLAGS", f"--{graphs.OPTION}=FUSION")
    assert graphs.compiler_options() is None


def test_cpus_and_rocm_have_no_graph_options(fake_gpu, monkeypatch):
    assert graphs.compiler_options() is None  # the CPU
    monkeypatch.setenv("QUIRE_GRAPHS", "off")
    assert graphs.compiler_options() is None
    assert graphs.compile_step(jax.jit(lambda x: x + 1).lower(jnp.zeros(2)))(
        jnp.zeros(2)
    ).tolist() == [1, 1]
    monkeypatch.delenv("QUIRE_GRAPHS")
    fake_gpu("PJRT C API\nrocm 60300", 12090)
    assert graphs.compiler_options() is None


def test_invalid_quire_graphs_is_rejected(monkeypatch):
    monkeypatch.setenv("QUIRE_GRAPHS", "on")
    with pytest.raises(ValueError, match="QUIRE_GRAPHS is 'on', and can be off"):
        graphs.compiler_options()


NORM = {
    "width": 4096,
    "dtype": "bfloat16",
    "adds": True,
    "rounds": None,
    "norm": "scale",
    "added_norm": None,
}
HEADS = {
    "queries": 32,
    "keys": 8,
    "width": 128,
    "pairs": 64,
    "norm": True,
    "page": 16,
    "codes": "int8",
    "dtype": "bfloat16",
}
EXPERTS = {
    "grouped": True,
    "projections": 2,
    "transposed": False,
    "activation": "silu",
    "clamp": None,
    "alpha": 1.0,
    "bias": False,
    "weighted": False,
    "out_dtype": "bfloat16",
    "codes": None,
    "group": 0,
    "zeros": False,
    "rounded": False,
    "summands": 1,
    "kernel": "mosaic",
}
SELF_TESTS = {
    "attention": (
        hopper,
        {"heads": 32, "kv_heads": 8, "width": 128, "page": 16, "dtype": "bfloat16"},
    ),
    "product": (product, EXPERTS),
    "heads": (heads, HEADS),
    "residual": (residual, NORM),
    "residual, with codes and a bias": (
        residual,
        NORM | {"width": 2880, "rounds": "float8", "norm": "centred, bias", "added_norm": "scale"},
    ),
    "rounding": (rounding, {"width": 14336, "codes": "int8"}),
    "rounding to float8": (rounding, {"width": 2880, "codes": "float8"}),
    "choices": (routing, {"experts": 256, "bias": True, "rule": [8, "sigmoid", True, 2.5, 8, 4]}),
    "choices of a softmax": (
        routing,
        {"experts": 128, "bias": False, "rule": [8, "softmax", True, 1.0]},
    ),
    "places": (routing, {"experts": 128, "rows": 16}),
    "delta rule": (
        delta_net,
        {"keys": 128, "values": 128, "shared": 2, "by_key": False, "corrects": True},
    ),
}
ALWAYS_COMPILED = ["residual", "choices", "places"]


def step_of(name: str):
    """(a self-test's step of several layers, its arguments)."""
    module, kind = SELF_TESTS[name]
    (case,) = [case for case in module.cases(kind) if "layers" in case.name]
    state, inputs, _ = case.build(0)
    return jax.jit(case.run, donate_argnums=0), (state, inputs)


@pytest.fixture(scope="module")
def hopper_steps():
    return kernels_ahead.compile_some(__file__, SELF_TESTS, ALWAYS_COMPILED)


@pytest.mark.slow
@kernels_ahead.needs_compiler
@pytest.mark.parametrize("name", thinned(SELF_TESTS, ALWAYS_COMPILED))
def test_self_test_step_of_layers_is_one_graph(name, hopper_steps):
    """As an engine step; the kernels spill no registers."""
    step = hopper_steps[name]
    print("|", name, "|", len(step.kernels), "|", step.graphs, "|", step.outside, "|")
    assert step.graphs == 1 and not step.outside
    assert step.kernels and not any(kernel.stored for kernel in step.kernels)


@pytest.mark.slow
@kernels_ahead.needs_compiler
def test_quire_graphs_off_compiles_no_graph(monkeypatch):
    monkeypatch.setenv("QUIRE_GRAPHS", "off")
    (step,) = kernels_ahead.compile_some(__file__, ALWAYS_COMPILED[:1], ALWAYS_COMPILED).values()
    assert step.graphs == 0 and step.outside
