"""Properties of all weight types: checks of subscripts, and forced implementations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.ops import native, quant
from quire.ops.implementations import NoImplementation
from quire.ops.linear import einsum, gated, rows
from quire.ops.linear.cpu_layout import pack
from quire.ops.moe import pick
from quire.sharding.spec import ArraySpec, random_arrays

FORMATS = ["int8", "int8-weights", "int4-32-zero", "fp8"]
DENSE = ArraySpec((64, 2, 32), jnp.bfloat16, (None, None, None), fan_in=64, inputs=(0,))
HEAD = ArraySpec((48, 64), jnp.bfloat16, (None, None), fan_in=64, inputs=(1,))
STACK = ArraySpec(
    (3, 64, 32), jnp.bfloat16, (None, None, None), fan_in=64, inputs=(1,), stacked=True
)
INPUTS = jnp.ones((5, 64))
WRONG_SUBSCRIPTS = [
    "TD,DGF->TFG",
    "TD,GFD->TGF",
    "TD,DF->TF",
    "TD,DGF->GFT",
    "DT,DGF->TGF",
    "TD,TGF->TGF",
    "D,DGF->GF",
    "TD,DGF",
]


def make_weight(dense: ArraySpec, name: str | None, kernels: bool) -> Any:
    node = jax.tree.map(np.asarray, random_arrays(quant.packed(name, dense)))
    if not kernels:
        return jax.tree.map(jnp.asarray, node)
    if not native.serves():
        pytest.skip("no compiler")
    return pack(dense, node)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_subscripts_are_checked_while_tracing(name, kernels):
    node = make_weight(DENSE, name, kernels)
    run = jax.eval_shape
    assert run(lambda x: einsum("TD,DGF->TGF", x, node), INPUTS).shape == (5, 2, 32)
    assert run(lambda x: einsum("tsd,dgf->tsgf", x, node), INPUTS[None]).shape == (1, 5, 2, 32)
    for subscripts in WRONG_SUBSCRIPTS:
        with pytest.raises(ValueError, match="does not fit the weight: its axes"):
            run(lambda x, subscripts=subscripts: einsum(subscripts, x, node), INPUTS)
    for call in (einsum, lambda *arguments: gated(*arguments, "silu")):
        with pytest.raises(ValueError, match=r"of sizes \[64\]"):
            run(lambda x, call=call: call("TD,DGF->TGF", x, node), jnp.ones((5, 32)))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_head_has_its_inputs_last(name, kernels):
    node = make_weight(HEAD, name, kernels)
    assert einsum("RD,VD->RV", INPUTS, node).shape == (5, 48) and rows(node) == 48
    with pytest.raises(ValueError, match=r"its axes \[1\]"):
        einsum("RD,DV->RV", INPUTS, node)


def test_packed_stack_of_matrices():
    stack = make_weight(STACK, None, True)
    assert einsum("TED,EDF->TEF", jnp.ones((5, 3, 64)), stack).shape == (5, 3, 32)
    assert einsum("TD,DF->TF", INPUTS, pick(stack, 1)).shape == (5, 32)
    for subscripts in ("TED,EDF->TFE", "TED,DEF->TEF", "ETD,EDF->ETF"):
        with pytest.raises(ValueError, match="each matrix of the weight"):
            einsum(subscripts, jnp.ones((5, 3, 64)), stack)


def test_forced_implementation_must_support_the_weight():
    dense = make_weight(HEAD, None, False)
    tiled = make_weight(HEAD, None, True)
    for w, supported, unsupported, reason in (
        (dense, "xla", "native", "native: the weight is not laid out for the kernels"),
        (tiled, "native", "xla", "xla: the weight is laid out for the native kernels"),
    ):
        expected = einsum("RD,VD->RV", INPUTS, w)
        np.testing.assert_array_equal(
            einsum("RD,VD->RV", INPUTS, w, implementation=supported), expected
        )
        with pytest.raises(NoImplementation, match=reason) as error:
            einsum("RD,VD->RV", INPUTS, w, implementation=unsupported)
        assert len(error.value.exceptions) == 1
    with pytest.raises(NoImplementation, match="native: the weight is not laid out"):
        pick(make_weight(STACK, None, False), 0, implementation="native")


def test_codebook_is_neither_embedding_nor_stack():
    node = make_weight(DENSE, "codebook-4", False)
    with pytest.raises(TypeError, match="Codebook is no embedding"):
        rows(node)
    with pytest.raises(TypeError, match="Codebook is neither an embedding nor a stack"):
        node[jnp.array([0])]


@pytest.mark.parametrize("name", quant.FORMATS)
def test_format_modules_define_every_field(name):
    module, _ = quant.format_of(name)
    for field in quant.Format.__annotations__:
        assert hasattr(module, field), field
    assert callable(module.spec) and isinstance(module.kernels(), tuple)
    assert module.METHOD is None or not module.STORED
    assert module.CHOICES is not None or not module.STORED
    for full in module.STORED:
        assert quant.stored_name(full) == full == quant.check(full)
        head = quant.head_format(full)
        schemes = quant.stored_schemes()
        assert head in schemes
        has_rounded_activations = schemes[full].activations is not None
        assert (schemes[head].activations is not None) == has_rounded_activations, (
            "activations of the head are rounded only if those of the layers are"
        )


@pytest.mark.parametrize(
    ("backend", "dtype", "expected_precision"),
    [
        ("cpu", jnp.float32, None),
        ("gpu", jnp.float32, (jax.lax.Precision.HIGHEST,) * 2),
        ("gpu", jnp.bfloat16, None),
    ],
)
def test_float32_products_on_gpus_use_highest_precision(
    monkeypatch, backend, dtype, expected_precision
):
    """The default on GPUs is TF32, which would change a router's choice of experts."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    x = jnp.ones((4, 64), dtype)
    w = jnp.ones((64, 8), dtype)
    jaxpr = jax.make_jaxpr(
        lambda x, w: einsum("TD,DE->TE", x, w, jnp.float32, implementation="xla")
    )(x, w)
    [product] = [equation for equation in jaxpr.eqns if equation.primitive.name == "dot_general"]
    assert product.params["precision"] == expected_precision
