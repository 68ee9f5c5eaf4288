"""What adapters add, by the C++ kernel: see adapter.cc in `ops/native`."""

import jax
import jax.numpy as jnp
import numpy as np

from ..native import target
from ..native.kernel_names import ADAPTER
from . import Adapted


def adapt(weight: Adapted, x_TD, out_TO):
    """See `Adapted.adapt`."""
    held = {array.dtype.name for array in (weight.down, weight.up)}
    if (
        len(held) > 1
        or not held | {x_TD.dtype.name} <= {"bfloat16", "float32"}
        or out_TO.dtype != jnp.float32
    ):
        types = ", ".join(str(array.dtype) for array in (weight.down, weight.up, x_TD, out_TO))
        raise NotImplementedError(
            f"adapters and rows must be bfloat16 or float32, and sums float32, not {types}"
        )
    if not x_TD.size:
        raise NotImplementedError("there are no rows")
    name = target(ADAPTER)
    D = x_TD.shape[1]
    O = out_TO.shape[1]
    which = jnp.zeros(1, jnp.int32)
    stack = 1
    rank = weight.up.shape[1]
    if weight.which is not None:
        which = jnp.reshape(weight.which, 1).astype(jnp.int32)
        stack, rank = weight.up.shape[1:3]
    assert weight.rows_of is not None
    arrays = (  # with an axis of one matrix XLA would copy the stacks
        out_TO, x_TD, weight.rows_of.slots_T.astype(jnp.int32), which,
        weight.down.reshape(-1, D, rank * len(weight.parts)), weight.up.reshape(-1, rank, O),
        weight.longer.reshape(-1, O), np.array(weight.parts, np.int32),
    )  # fmt: skip
    result = jax.ShapeDtypeStruct(out_TO.shape, jnp.float32)
    return jax.ffi.ffi_call(name, result, input_output_aliases={0: 0})(
        *arrays, stack=np.int32(stack)
    )


def varies() -> None:
    """A row's bits are the same in any company."""
