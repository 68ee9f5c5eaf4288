"""Differentiable attention over training rows, each of which holds several packed documents."""

import jax
import jax.numpy as jnp

from ...model.config import ModelConfig
from ...ops.attention.backend import AttentionParams

BLOCK = 128  # queries per block, so that a sliding-window layer reads only keys near the window
MASKED = -1e30  # score of a masked key


def attention(config: ModelConfig, documents_BT):
    """The hook `attend` for causal attention in each document, computed by blocks of queries."""
    B, T = documents_BT.shape

    def attend(index, q_TNH, k_TKH, v_TKH, cache, params: AttentionParams, sinks_N=None):
        window = params.window
        soft_cap = params.soft_cap
        if k_TKH is not None:
            v_TKH = k_TKH[..., : params.value_dim] if v_TKH is None else v_TKH
            cache = {**cache, index: tuple(x.reshape(B, T, *x.shape[1:]) for x in (k_TKH, v_TKH))}
        k_BJKH, v_BJKH = cache[config.kv_owner[index]]
        q_BTKGH = group_heads(q_TNH * params.scale, B, k_BJKH.shape[2])
        out = []
        for start in range(0, T, BLOCK):
            stop = min(start + BLOCK, T)
            first = 0 if window is None else max(0, start - window + 1)
            distance = jnp.arange(start, stop)[:, None] - jnp.arange(first, stop)[None]
            is_visible = (distance >= 0) & (distance < (window or T))
            is_visible = is_visible & (
                documents_BT[:, start:stop, None] == documents_BT[:, None, first:stop]
            )
            score = jnp.einsum(
                "BQKGH,BJKH->BKQGJ",
                q_BTKGH[:, start:stop],
                k_BJKH[:, first:stop],
                preferred_element_type=jnp.float32,
            )
            if soft_cap is not None:
                score = soft_cap * jnp.tanh(score / soft_cap)
            score = jnp.where(is_visible[:, None, :, None], score, MASKED)
            if sinks_N is not None:
                sink = sinks_N.reshape(score.shape[1], 1, -1, 1)
                score = jnp.concatenate(
                    [score, jnp.broadcast_to(sink, (*score.shape[:-1], 1))], axis=-1
                )
            weight = jax.nn.softmax(score, axis=-1)[..., : stop - first].astype(v_BJKH.dtype)
            out.append(jnp.einsum("BKQGJ,BJKH->BQKGH", weight, v_BJKH[:, first:stop]))
        return jnp.concatenate(out, axis=1).reshape(*q_TNH.shape[:2], -1), cache

    return attend


def attention_for_pass(number: int, documents_BT):
    """The hook `attend` for draft layers that run autoregressively over their own features.

    In pass `number` (from 0), the features of position t stand for a draft of `number` tokens that
    ends at t. Position t therefore attends to the positions up to t - `number` of pass 0, which
    hold the target model's features, and to one position of each later pass: its own draft prefix.
    """
    B, T = documents_BT.shape

    def attend(index, q_TNH, k_TKH, v_TKH, cache, params: AttentionParams, sinks_N=None):
        kv = tuple(x.reshape(B, T, *x.shape[1:]) for x in (k_TKH, v_TKH))
        passes = [*cache.get(index, ()), kv]
        cache = {**cache, index: passes}
        (k_BJKH, v_BJKH), *drafted = passes
        q_BTKGH = group_heads(q_TNH * params.scale, B, k_BJKH.shape[2])
        distance = jnp.arange(T)[:, None] - jnp.arange(T)[None]
        is_visible = (distance >= number) & (documents_BT[:, :, None] == documents_BT[:, None])
        score = jnp.einsum("BQKGH,BJKH->BKQGJ", q_BTKGH, k_BJKH, preferred_element_type=jnp.float32)
        scores = [jnp.where(is_visible[:, None, :, None], score, MASKED)]
        values = []
        for place, (k, v) in enumerate(drafted, 1):
            k, v = (shift(x, number - place) for x in (k, v))
            score = jnp.einsum("BQKGH,BQKH->BKQG", q_BTKGH, k, preferred_element_type=jnp.float32)
            scores.append(score[..., None])
            values.append(v)
        weight = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(v_BJKH.dtype)
        out = jnp.einsum("BKQGJ,BJKH->BQKGH", weight[..., :T], v_BJKH)
        for place, v in enumerate(values):
            out = out + jnp.einsum("BKQG,BQKH->BQKGH", weight[..., T + place], v)
        return out.reshape(q_TNH.shape), cache

    return attend


def group_heads(q_TNH, B: int, K: int):
    return q_TNH.reshape(B, -1, K, q_TNH.shape[1] // K, q_TNH.shape[2])


def shift(x_BT, count: int):
    """Shift along T by `count` positions to the right (to the left if negative), filling with 0."""
    if count == 0:
        return x_BT
    gap = jnp.zeros_like(x_BT[:, : abs(count)])
    return jnp.concatenate(
        [gap, x_BT[:, :-count]] if count > 0 else [x_BT[:, -count:], gap], axis=1
    )
