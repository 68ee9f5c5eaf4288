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


def decline(module: ModuleType) -> str:
    raise NotImplementedError(f"{module.__name__.rpartition('.')[2]} cannot")


def second(module: ModuleType) -> str:
    return decline(module) if module.__name__.endswith("linear") else module.__name__


def test_the_first_that_does_not_decline_serves():
    assert choose(TABLE, "quire.ops", lambda module: module.__name__) == "quire.ops.linear"
    assert choose(TABLE, "quire.ops", second) == "quire.ops.moe"
    assert choose(TABLE, "quire.ops", lambda module: module.__name__, "second") == "quire.ops.moe"


def test_the_error_lists_every_reason():
    with pytest.raises(
        NotImplementedError, match=r"first: linear cannot; second: moe cannot"
    ) as error:
        choose(TABLE, "quire.ops", decline)
    assert isinstance(error.value, NoImplementation)
    assert [str(reason) for reason in error.value.exceptions] == [
        "first: linear cannot",
        "second: moe cannot",
    ]


def test_a_forced_one_is_tried_alone():
    with pytest.raises(NoImplementation, match="serves this case: first: linear cannot") as error:
        choose(TABLE, "quire.ops", second, "first")
    assert len(error.value.exceptions) == 1
    with pytest.raises(ValueError, match="implementation is 'third'; it can be first, second"):
        choose(TABLE, "quire.ops", second, "third")


OPS = adapter, attention, delta_net, heads, linear, residual, rounding, routing, sampling
MODULES = [(op.__spec__.parent, module) for op in OPS for module in op.IMPLEMENTATIONS.values()]


@pytest.mark.parametrize(("package", "module"), MODULES)
def test_each_says_whether_company_changes_bits(package, module):
    found = importlib.import_module(module, package).varies()
    assert found is None or isinstance(found, str)


@pytest.mark.parametrize(("backend", "reasons"), [("cpu", 1), ("gpu", 2)])
def test_a_program_tells_what_may_change_its_bits(monkeypatch, backend, reasons):
    """A product and a norm by XLA, inside of a function and a loop: those that it has, and no
    others.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: backend)

    def run(x, w):
        step = jax.jit(
            lambda _, x: linear.einsum("TD,DE->TE", rms_norm(x), w, implementation="xla")
        )
        return jax.lax.fori_loop(0, 3, step, x)

    found = variance(jax.make_jaxpr(run)(jnp.ones((4, 8)), jnp.ones((8, 8))).jaxpr)
    assert len(found) == reasons and any("products by XLA" in reason for reason in found)
    assert not variance(jax.make_jaxpr(lambda x: jnp.sum(x * 2))(jnp.ones(3)).jaxpr)
