"""Adapter products by the C++ kernel, `ops/native/adapter.cc`."""

import jax
import jax.numpy as jnp
import numpy as np

from ..native import target
from ..native.kernel_names import ADAPTER
from . import Adapted


def adapt(weight: Adapted, x_TD, out_TO):
    """See `Adapted.adapt`."""
    weight_dtypes = {array.dtype.name for array in (weight.down, weight.up)}
    if (
        len(weight_dtypes) > 1
        or not weight_dtypes | {x_TD.dtype.name} <= {"bfloat16", "float32"}
        or out_TO.dtype != jnp.float32
    ):
        dtypes = ", ".join(str(array.dtype) for array in (weight.down, weight.up, x_TD, out_TO))
        raise NotImplementedError(
            f"adapters and rows must be bfloat16 or float32, and sums float32, not {dtypes}"
        )
    if not x_TD.size:
        raise NotImplementedError("there are no rows")
    name = target(ADAPTER)
    D = x_TD.shape[1]
    O = out_TO.shape[1]
    matrix = jnp.zeros(1, jnp.int32)
    stack = 1
    rank = weight.up.shape[1]
    if weight.matrix is not None:
        matrix = jnp.reshape(weight.matrix, 1).astype(jnp.int32)
        stack, rank = weight.up.shape[1:3]
    assert weight.adapter_rows is not None
    arrays = (  # reshaped here because XLA would copy stacks that have an axis of size 1
        out_TO, x_TD, weight.adapter_rows.slots_T.astype(jnp.int32), matrix,
        weight.down.reshape(-1, D, rank * len(weight.output_ranges)),
        weight.up.reshape(-1, rank, O), weight.dora_gain.reshape(-1, O),
        np.array(weight.output_ranges, np.int32),
    )  # fmt: skip
    result = jax.ShapeDtypeStruct(out_TO.shape, jnp.float32)
    return jax.ffi.ffi_call(name, result, input_output_aliases={0: 0})(
        *arrays, stack=np.int32(stack)
    )


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
