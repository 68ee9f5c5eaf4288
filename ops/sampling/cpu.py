"""Sampling by the C++ kernel, `ops/native/sampling.h`.

The results depend neither on the other rows nor on the number of threads. Random choices run over
the tokens in the order of their ids. So the same seed may give other tokens than XLA, from the same
distribution.
"""

import jax
import jax.numpy as jnp

from ...sharding.device_axes import UNSPLIT, Axis
from ..native import kernel_names, target
from . import MAX_LOGPROBS, Sampled, SamplingInputs, SlotState


def sample(
    logits_RV,
    state: SlotState,
    inputs: SamplingInputs,
    temperature_only: bool = False,
    axis: Axis = UNSPLIT,
    listed: int = MAX_LOGPROBS,
) -> Sampled:
    """See `quire.ops.sampling.sample`. `temperature_only` is ignored."""
    if axis.size > 1:
        raise NotImplementedError("the vocabulary is split over devices")
    kernel = target(kernel_names.SAMPLING)
    check_shapes(logits_RV, state, inputs)
    R, V = logits_RV.shape
    K = min(listed, V)
    results = Sampled(
        tokens_R=jax.ShapeDtypeStruct((R,), jnp.int32),
        logprobs_R=jax.ShapeDtypeStruct((R,), jnp.float32),
        ranks_R=jax.ShapeDtypeStruct((R,), jnp.int32),
        top_ids_RK=jax.ShapeDtypeStruct((R, K), jnp.int32),
        top_logprobs_RK=jax.ShapeDtypeStruct((R, K), jnp.float32),
        token_id_logprobs_RL=jax.ShapeDtypeStruct(
            (R, state.logprob_token_ids_BL.shape[1]), jnp.float32
        ),
        ok_R=jax.ShapeDtypeStruct((R,), jnp.bool_),
    )
    leaves, tree = jax.tree.flatten(results)
    return tree.unflatten(
        jax.ffi.ffi_call(kernel, leaves)(
            logits_RV.astype(jnp.float32), *jax.tree.leaves((state, inputs))
        )
    )


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""


def check_shapes(logits_RV, state: SlotState, inputs: SamplingInputs) -> None:
    """Check that each array has the shape that its name implies; the kernel does not."""
    R, V = logits_RV.shape
    if not R or not V:
        raise NotImplementedError(f"there must be logits, not an array of {R} by {V}")
    B, J, _ = state.bias_BJV.shape
    sizes = {
        "R": R,
        "V": V,
        "B": B,
        "J": J,
        "X": inputs.ban_RX.shape[1],
        "L": state.logprob_token_ids_BL.shape[1],
        "2": 2,
    }
    for name, array in {**vars(state), **vars(inputs)}.items():
        expected = tuple(sizes[letter] for letter in name.rsplit("_", 1)[1])
        if array.shape != expected:
            raise ValueError(
                f"sampling: {name} has shape {array.shape}, but the other arrays say {expected}"
            )
