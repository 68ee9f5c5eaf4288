"""Run calibration text through the layers: whole sequences at once, without a paged cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.activation import soft_cap as capped
from ...ops.attention.backend import AttentionParams
from ...ops.state_rows import StateRows
from .. import decoder
from ..config import LatentAttention, ModelConfig, ModelError
from ..mixers import LayerHooks
from ..weights import LayerWeights, ModelWeights

ROWS = 2048  # tokens of a batch, unless a sequence is longer
QUERIES = 512  # queries of a sequence whose scores are in memory together


@dataclass(frozen=True)
class Batch:
    """Hidden states of sequences [B, T] between two layers; padding has position -1."""

    shape: tuple[int, int]
    positions_T: Any
    x: Any  # as returned by `decoder.embed`
    cache: Any  # keys and values that later layers share, by layer

    def run_layer(self, index: int, w: LayerWeights, config: ModelConfig) -> "Batch":
        """Apply one layer."""
        hooks = LayerHooks(
            attention_hook(config, *self.shape), recur=recurrence_hook(config, *self.shape)
        )
        x, cache = decoder.run_layers(
            [w], index, self.x, self.cache, self.positions_T, config, hooks
        )
        later = set(config.kv_owner[index + 1 :])
        return replace(
            self, x=x, cache={owner: kv for owner, kv in cache.items() if owner in later}
        )


def check(config: ModelConfig) -> None:
    """Reject models that cannot be calibrated."""
    if config.encodes:
        raise ModelError(
            f"calibration runs models that write; this one, of the family {config.family}, reads "
            "both ways"
        )
    for index, layer in enumerate(config.layers):
        if isinstance(layer.attention, LatentAttention) and layer.attention.indexer is not None:
            raise ModelError(
                f"calibration has no sparse attention, which layer {index} of this model of the "
                f"family {config.family} has; --method rtn needs none"
            )


def pad_batches(
    samples: Sequence[Sequence[int]], rows: int = ROWS
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens, positions) [B, T] of all samples, grouped by length into few shapes."""
    ordered = sorted(samples, key=len)
    while ordered:
        T = 16
        while len(ordered[-1]) > T:
            T *= 2
        B = max(1, rows // T)
        batch_samples = ordered[-B:]
        ordered = ordered[:-B]
        tokens = np.zeros((B, T), np.int32)
        positions = np.full((B, T), -1, np.int32)
        for row, ids in enumerate(batch_samples):
            tokens[row, : len(ids)] = ids
            positions[row, : len(ids)] = np.arange(len(ids))
        yield tokens, positions


def embed_samples(
    weights: ModelWeights, samples: Sequence[Sequence[int]], config: ModelConfig, rows: int = ROWS
) -> list[Batch]:
    """The embedded samples, in batches of about `rows` tokens."""
    return [embed_batch(weights, *batch, config) for batch in pad_batches(samples, rows)]


def embed_batch(
    weights: ModelWeights, tokens_BT: np.ndarray, positions_BT: np.ndarray, config: ModelConfig
) -> Batch:
    """Embed sequences."""
    tokens_T = jnp.asarray(tokens_BT.reshape(-1))
    positions_T = jnp.asarray(positions_BT.reshape(-1))
    x = decoder.embed(weights, tokens_T, positions_T, config)
    return Batch(tokens_BT.shape, positions_T, x, {})


def attention_hook(config: ModelConfig, B: int, T: int):
    """The `attend` hook of `decoder.run_layers`, for whole sequences."""

    def attend(index, q_TNH, k_TKH, v_TKH, cache, params: AttentionParams, sinks_N=None):
        window = params.window
        if k_TKH is not None:
            cache = {
                **cache,
                index: (k_TKH, k_TKH[..., : params.value_dim] if v_TKH is None else v_TKH),
            }
        k_BJKH, v_BJKH = (
            x.reshape(B, T, *x.shape[1:]).astype(jnp.float32) for x in cache[config.kv_owner[index]]
        )
        K = k_BJKH.shape[2]
        q_BTKGH = q_TNH.reshape(B, T, K, -1, q_TNH.shape[-1]).astype(jnp.float32) * params.scale
        out = []
        for start in range(0, T, QUERIES):
            q_BQKGH = q_BTKGH[:, start : start + QUERIES]
            query_positions = jnp.arange(T)[start : start + QUERIES]
            key_positions = jnp.arange(T)
            score = capped(jnp.einsum("BQKGH,BJKH->BKGQJ", q_BQKGH, k_BJKH), params.soft_cap)
            visible_QJ = query_positions[:, None] >= key_positions
            if params.chunked and window is not None:
                visible_QJ &= query_positions[:, None] // window == key_positions // window
            elif window is not None:
                visible_QJ &= query_positions[:, None] - key_positions < window
            score = jnp.where(visible_QJ, score, -jnp.inf)
            if sinks_N is not None:
                sink = jnp.broadcast_to(sinks_N.reshape(K, -1, 1, 1), (*score.shape[:-1], 1))
                score = jnp.concatenate([score, sink], axis=-1)
            weight = jax.nn.softmax(score, axis=-1)[..., :T]
            out.append(jnp.einsum("BKGQJ,BJKH->BQKGH", weight, v_BJKH))
        out_TNH = jnp.concatenate(out, axis=1).reshape(B * T, q_TNH.shape[1], -1)
        return out_TNH.astype(q_TNH.dtype), cache

    return attend


def recurrence_hook(config: ModelConfig, B: int, T: int):
    """The `recur` hook of `decoder.run_layers`: every sequence starts from an empty state."""

    rows = StateRows(jnp.arange(B + 1) * T, jnp.arange(B), jnp.ones(B, bool), jnp.full(B, T))

    def recur(index, inputs, run, cache):
        state_shapes = config.layers[index].attention.state_shapes
        return run(
            inputs, {name: jnp.zeros((B, *shape)) for name, shape in state_shapes.items()}, rows
        )[0], cache

    return recur
