"""Sum and norm by the C++ kernel, `ops/native/residual.cc`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ..native import target
from ..native.kernel_names import RESIDUAL
from ..norm import LayerNorm, scale_and_bias
from . import Residual, xla


def add_and_norm(rows: Residual, scale_D, eps: float, rounds: str | None = None):
    """See `quire.ops.residual.add_and_norm`. The products round their inputs themselves."""
    x_TD = rows.x_TD
    y_TD = rows.y_TD
    if x_TD.ndim != 2 or not x_TD.size:
        raise NotImplementedError(f"there must be rows in one list, not an array of {x_TD.shape}")
    dtypes = {x.dtype.name for x in (x_TD, y_TD) if x is not None}
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float32"}:
        raise NotImplementedError(
            f"rows must all be bfloat16 or all float32, not {' and '.join(sorted(dtypes))}"
        )
    target(RESIDUAL)  # raises NotImplementedError if there is no kernel
    return sum_and_norm(eps, rows, scale_D)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def sum_and_norm(eps: float, rows: Residual, scale_D):
    x_TD = rows.x_TD
    y_TD = rows.y_TD
    adds = y_TD is not None
    weights = [*norm_arrays(rows.scale_D if adds else None), *norm_arrays(scale_D)]
    for array in (x_TD if y_TD is None else y_TD, *weights):  # the kernel does not check shapes
        if array.size and array.shape not in (x_TD.shape, x_TD.shape[-1:]):
            raise ValueError(
                f"residual: an array has shape {array.shape} beside rows of {x_TD.shape}"
            )
    results = [jax.ShapeDtypeStruct(x_TD.shape, x_TD.dtype)] * (1 + adds)
    *sums, normed_TD = jax.ffi.ffi_call(target(RESIDUAL), results)(
        x_TD,
        jnp.zeros((0, 0), x_TD.dtype) if y_TD is None else y_TD,
        *weights,
        added_centred=np.int32(isinstance(rows.scale_D, LayerNorm)),
        centred=np.int32(isinstance(scale_D, LayerNorm)),
        eps=np.float32(eps),
    )
    return (sums[0] if adds else x_TD), normed_TD


@sum_and_norm.defjvp
def tangents_of(eps: float, primals, tangents):
    return jax.jvp(partial(xla.add_and_norm, eps=eps), primals, tangents)


def norm_arrays(weights) -> tuple:
    """The scale and the bias of a norm; empty arrays for missing ones."""
    return tuple(jnp.zeros(0, jnp.float32) if x is None else x for x in scale_and_bias(weights))


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
