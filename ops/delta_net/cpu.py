"""The gated delta rule by the C++ kernel, `ops/native/delta_net.cc`."""

import jax
import jax.numpy as jnp
import numpy as np

from ..native import target
from ..native.kernel_names import DELTA_NET


def delta_rule(q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV, rows, corrects):
    """See `quire.ops.delta_net.delta_rule`."""
    T, N, V = v_TNV.shape
    _, K, H = q_TKH.shape
    B = rows.slots_B.shape[0]
    num_slots = memory_BNHV.shape[0]
    by_key = decay_TN.ndim == 3
    expected = {  # the kernel does not check shapes
        "q_TKH": (q_TKH, (T, K, H)),
        "k_TKH": (k_TKH, (T, K, H)),
        "decay_TN": (decay_TN, (T, N, H)[: 2 + by_key]),
        "beta_TN": (beta_TN, (T, N)),
        "memory_BNHV": (memory_BNHV, (num_slots, N, H, V)),
        "starts_B1": (rows.starts_B1, (B + 1,)),
        "num_kept_B": (rows.num_kept_B, (B,)),
        "is_first_step_B": (rows.is_first_step_B, (B,)),
    }
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(
                f"delta rule: {name} has shape {x.shape}, but the other arrays say {shape}"
            )
    if N % K:
        raise ValueError(f"delta rule: {N} value heads do not share {K} key heads evenly")
    arrays = q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV
    if any(x.dtype != jnp.float32 for x in arrays):
        raise NotImplementedError("all arrays must be float32")
    indices = [
        x.astype(jnp.int32)
        for x in (rows.starts_B1, rows.slots_B, rows.is_first_step_B, rows.num_kept_B)
    ]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v_TNV, memory_BNHV)]
    call = jax.ffi.ffi_call(target(DELTA_NET), results, input_output_aliases={5: 1})
    return tuple(call(*arrays, *indices, corrects=np.int32(corrects), by_key=np.int32(by_key)))


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
