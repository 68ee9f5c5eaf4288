"""Norm and rotation of heads by XLA; attention appends the keys and values."""

from ..residual import norm_alone
from ..rope import rotate
from . import Heads


def prepare(qkv_TGH, heads: Heads, pages, rows):
    """See `quire.ops.heads.prepare`."""
    return *split_heads(qkv_TGH, heads), pages


def split_heads(qkv_TGH, heads: Heads):
    """(q_TNH, k_TKH, v_TKH), normalised and rotated; keys and values are None if there are none."""
    N = heads.queries
    K = heads.keys
    q_TNH = norm_and_rotate(qkv_TGH[:, :N], heads.q_scale, heads)
    if not K:
        return q_TNH, None, None
    k_TKH = qkv_TGH[:, N : N + K]
    v_TKH = k_TKH if heads.tied else qkv_TGH[:, N + K :]
    k_TKH = norm_and_rotate(k_TKH, heads.k_scale, heads)
    if heads.v_norm:
        v_TKH = norm_alone(v_TKH, None, heads.eps)
    return q_TNH, k_TKH, v_TKH


def norm_and_rotate(x_TNH, scale, heads: Heads):
    """Normalise and rotate queries or keys, in the layer's order."""
    if heads.norm != "turned":
        x_TNH = head_norm(x_TNH, scale, heads)
    if heads.cos_sin is not None:
        x_TNH = rotate(x_TNH, heads.cos_sin)
    return head_norm(x_TNH, scale, heads) if heads.norm == "turned" else x_TNH


def head_norm(x_TNH, scale, heads: Heads):
    """RMS norm of queries or keys over each head, or over all heads together."""
    if heads.norm is None:
        return x_TNH
    if heads.norm != "all":
        return norm_alone(x_TNH, scale, heads.eps)
    return norm_alone(x_TNH.reshape(x_TNH.shape[0], -1), scale, heads.eps, axis=heads.axis).reshape(
        x_TNH.shape
    )


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
