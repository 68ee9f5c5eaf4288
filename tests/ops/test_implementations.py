"""Choosing one of an op's implementations."""

import importlib
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

from quire.ops import adapter, attention, delta_net, heads, linear, residual, rounding, sampling
from quire.ops.implementations import NoImplementation, choose, variance
from quire.ops.moe import routing
from quire.ops.norm import rms_norm

TABLE = {"first": ".linear", "second": ".moe"}


def raise_unsupported(module: ModuleType) -> str:
    raise NotImplementedError(f"{module.__name__.rpartition('.')[2]} cannot")


def support_second_only(module: ModuleType) -> str:
    return raise_unsupported(module) if module.__name__.endswith("linear") else module.__name__


def test_first_supported_implementation_is_chosen():
    assert choose(TABLE, "quire.ops", lambda module: module.__name__) == "quire.ops.linear"
    assert choose(TABLE, "quire.ops", support_second_only) == "quire.ops.moe"
    assert choose(TABLE, "quire.ops", lambda module: module.__name__, "second") == "quire.ops.moe"


def test_error_lists_every_reason():
    with pytest.raises(
        NotImplementedError, match=r"first: linear cannot; second: moe cannot"
    ) as error:
        choose(TABLE, "quire.ops", raise_unsupported)
    assert isinstance(error.value, NoImplementation)
    assert [str(reason) for reason in error.value.exceptions] == [
        "first: linear cannot",
        "second: moe cannot",
    ]


def test_forced_implementation_has_no_fallback():
    with pytest.raises(NoImplementation, match="serves this case: first: linear cannot") as error:
        choose(TABLE, "quire.ops", support_second_only, "first")
    assert len(error.value.exceptions) == 1
    with pytest.raises(ValueError, match="implementation is 'third'; it can be first, second"):
        choose(TABLE, "quire.ops", support_second_only, "third")


OPS = adapter, attention, delta_net, heads, linear, residual, rounding, routing, sampling
MODULES = [(op.__spec__.parent, module) for op in OPS for module in op.IMPLEMENTATIONS.values()]


@pytest.mark.parametrize(("package", "module"), MODULES)
def test_implementations_declare_batch_variance(package, module):
    reason = importlib.import_module(module, package).varies()
    assert reason is None or isinstance(reason, str)


@pytest.mark.parametrize(("backend", "num_reasons"), [("cpu", 1), ("gpu", 2)])
def test_variance_lists_the_batch_variant_ops_of_a_program(monkeypatch, backend, num_reasons):
    """Also of ops inside a nested function and a loop."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)

    def run(x, w):
        step = jax.jit(
            lambda _, x: linear.einsum("TD,DE->TE", rms_norm(x), w, implementation="xla")
        )
        return jax.lax.fori_loop(0, 3, step, x)

    reasons_found = variance(jax.make_jaxpr(run)(jnp.ones((4, 8)), jnp.ones((8, 8))).jaxpr)
    assert len(reasons_found) == num_reasons and any(
        "products by XLA" in reason for reason in reasons_found
    )
    assert not variance(jax.make_jaxpr(lambda x: jnp.sum(x * 2))(jnp.ones(3)).jaxpr)
