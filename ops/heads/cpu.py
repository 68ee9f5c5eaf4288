"""Norm and rotation of heads by the C++ kernel, `ops/native/heads.cc`; attention appends the keys
and values.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ..native import target
from ..native.kernel_names import HEADS
from . import Heads

NORMS = {None: 0, "plain": 1, "head": 1, "all": 2, "turned": 3}


def prepare(qkv_TGH, heads: Heads, pages, rows):
    """See `quire.ops.heads.prepare`."""
    N = heads.queries
    K = heads.keys
    axis = heads.axis
    T, _, H = qkv_TGH.shape
    dtype = qkv_TGH.dtype
    if not T:
        raise NotImplementedError("there are no rows")
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"heads must be bfloat16 or float32, not {dtype}")
    if heads.norm == "all" and axis.size > 1:
        raise NotImplementedError("the norm is over the heads of several devices")
    norms_all_heads = heads.norm == "all"
    expected_shapes = {  # the kernel does not check shapes
        "qkv_TGH": (qkv_TGH, (T, N + (K if heads.tied else 2 * K), H)),
        "q_scale": (heads.q_scale, (N * H if norms_all_heads else H,)),
        "k_scale": (heads.k_scale, (K * H if norms_all_heads else H,)),
    }
    for name, (x, shape) in expected_shapes.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"heads: {name} has shape {x.shape}, and not {shape}")
    cos, sin = heads.cos_sin or (jnp.zeros((0, 0), jnp.float32),) * 2
    if heads.cos_sin is not None and not (
        cos.shape == sin.shape == (T, cos.shape[1]) and 2 * cos.shape[1] <= H
    ):
        raise ValueError(
            f"heads: cosines and sines have shapes {cos.shape} and {sin.shape} for {T} rows of {H}"
        )
    results = [jax.ShapeDtypeStruct((T, count, H), dtype) for count in ((N, K, K) if K else (N,))]
    q_TNH, *kv = jax.ffi.ffi_call(target(HEADS), results)(
        qkv_TGH,
        cos.astype(jnp.float32),
        sin.astype(jnp.float32),
        scale(heads.q_scale),
        scale(heads.k_scale),
        eps=np.float32(heads.eps),
        keys=np.int32(K),
        norm=np.int32(NORMS[heads.norm]),
        queries=np.int32(N),
        tied=np.int32(heads.tied),
        value_norm=np.int32(heads.v_norm),
    )
    return q_TNH, *(kv or (None, None)), pages


def scale(weights):
    """A norm's scale in a dtype that the kernel supports; empty if there is none."""
    if weights is None:
        return jnp.zeros(0, jnp.float32)
    return weights if weights.dtype in (jnp.bfloat16, jnp.float32) else weights.astype(jnp.float32)


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
