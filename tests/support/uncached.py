"""Reference decoder without a cache: whole sequences at once, differentiable."""

import jax
import jax.numpy as jnp

from quire.model import decoder
from quire.model.config import ModelConfig
from quire.model.mixers import LayerHooks
from quire.ops.state_rows import StateRows
from quire.sharding.device_axes import ONE_DEVICE, DeviceAxes


def forward(weights, tokens_BT, config: ModelConfig, axes: DeviceAxes = ONE_DEVICE):
    """Float32 logits [B, T, V]; on several devices those of this device's vocabulary shard."""
    hidden = hidden_states(weights, tokens_BT, config, axes)
    B, T = tokens_BT.shape
    return decoder.logits(weights, hidden.reshape(B * T, -1), config, axes).reshape(B, T, -1)


def hidden_states(weights, tokens_BT, config: ModelConfig, axes: DeviceAxes = ONE_DEVICE):
    """The final hidden states [B, T, D]."""
    B, T = tokens_BT.shape
    positions = jnp.tile(jnp.arange(T), B)
    hooks = LayerHooks(attention(config, B, T), recur=recurrence(config, B, T))
    hidden, _ = decoder.forward(weights, {}, tokens_BT.reshape(-1), positions, config, hooks, axes)
    return hidden.reshape(B, T, -1)


def recurrence(config: ModelConfig, B: int, T: int):
    """The hook `recur` over [B, T] whole sequences."""
    starts_B1 = jnp.arange(B + 1) * T
    seq_B = jnp.arange(B)
    rows = StateRows(starts_B1, seq_B, jnp.ones(B, bool), jnp.full(B, T))

    def recur(index, inputs, run, cache):
        state = {
            name: jnp.zeros((B, *shape))
            for name, shape in config.layers[index].attention.state_shapes.items()
        }
        return run(inputs, state, rows)[0], cache

    return recur


def best(picks, key_BJH, B: int, T: int):
    """Mask [B, T, T] of the positions that sparse attention picks for each query."""
    q = picks.q_TIH.reshape(B, T, *picks.q_TIH.shape[1:]).astype(jnp.float32)
    score = jax.nn.relu(jnp.einsum("BQIH,BJH->BQIJ", q, key_BJH))
    score = jnp.einsum("BQI,BQIJ->BQJ", picks.weight_TI.reshape(B, T, -1), score)
    score = jnp.where(jnp.tril(jnp.ones((T, T), bool)), score, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-score, axis=-1), axis=-1)
    return rank < picks.count


def attention(config: ModelConfig, B: int, T: int):
    """The hook `attend`, over [B, T]; the cache is a dict of each layer's keys and values."""

    picked = {}

    def attend(index, q_TNH, k_TKH, v_TKH, cache, params, sinks_N=None, picks=None):
        window = params.window
        soft_cap = params.soft_cap
        dim = q_TNH.shape[-1]
        if k_TKH is not None:
            cache = {
                **cache,
                index: (k_TKH, k_TKH[..., : params.value_dim] if v_TKH is None else v_TKH),
            }
        k, v = (
            x.reshape(B, T, *x.shape[1:]).astype(jnp.float32) for x in cache[config.kv_owner[index]]
        )
        K = k.shape[2]
        N = q_TNH.shape[1]
        q = q_TNH.reshape(B, T, K, N // K, -1).astype(jnp.float32) * params.scale
        score = jnp.einsum("BQKGH,BJKH->BKGQJ", q, k[..., :dim])
        if soft_cap is not None:
            score = soft_cap * jnp.tanh(score / soft_cap)
        distance = jnp.arange(T)[:, None] - jnp.arange(T)[None, :]
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if params.chunked and window is not None:
            chunk = jnp.arange(T) // window
            mask = (distance >= 0) & (chunk[:, None] == chunk[None, :])
        if picks is not None:
            if picks.q_TIH is not None:
                picked["among"] = best(picks, k[:, :, 0, dim:], B, T)
            mask = picked["among"][:, None, None] & mask
        score = jnp.where(mask, score, -jnp.inf)
        if sinks_N is not None:
            sink = jnp.broadcast_to(sinks_N.reshape(K, N // K, 1, 1), (*score.shape[:-1], 1))
            score = jnp.concatenate([score, sink], axis=-1)
        weight = jax.nn.softmax(score, axis=-1)[..., :T]
        out = jnp.einsum("BKGQJ,BJKH->BQKGH", weight, v)
        return out.reshape(B * T, N, -1).astype(q_TNH.dtype), cache

    return attend
