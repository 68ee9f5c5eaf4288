"""The indexer's queries and keys, by which latent attention selects tokens; see `Indexer`."""

from typing import Any

import jax.numpy as jnp

from ...ops.attention.picking import IndexQueries
from ...ops.linear import einsum, exact, project
from ...ops.linear.weight import plain
from ...ops.norm import LayerNorm
from ...ops.residual import norm_alone
from ...ops.rope import rotate
from ...sharding import struct
from ...sharding.spec import ArraySpec
from ..config import LatentAttention, ModelConfig
from ..indexer import Indexer
from ..matrix import matrix

Array = Any  # a jax.Array, an ArraySpec, or a quantised node in place of either
EPSILON = 1e-6


class IndexerWeights(struct.PyTreeNode):
    q_up_AIH: Array  # from the same input as attention's queries
    key_DH: Array
    key_norm_H: Array
    key_norm_bias_H: Array
    weigh_DI: Array


def indexer_spec(config: ModelConfig, a: LatentAttention) -> IndexerWeights | None:
    """None if there is no indexer, or the layer reuses another layer's selection."""
    indexer = a.indexer
    if indexer is None or not indexer.heads:
        return None
    D = config.dim
    norm = ArraySpec((indexer.dim,), jnp.dtype(jnp.float32), (None,), "ones")
    return IndexerWeights(
        q_up_AIH=matrix(config, (a.q_rank or D,), (indexer.heads, indexer.dim), (None, None, None)),
        key_DH=matrix(config, (D,), (indexer.dim,), ("embed", None)),
        key_norm_H=norm,
        key_norm_bias_H=ArraySpec((indexer.dim,), jnp.dtype(jnp.float32), (None,), "zeros"),
        weigh_DI=ArraySpec(
            (D, indexer.heads), jnp.dtype(jnp.float32), ("embed", None), fan_in=D, inputs=(0,)
        ),
    )


def picks_of(
    indexer: Indexer, w: IndexerWeights | None, x_TD, q_TA, rope
) -> tuple[IndexQueries, Any]:
    """(how tokens select, the key by which later tokens may select each; None if a selection is
    reused).
    """
    if w is None:
        return IndexQueries(count=indexer.count), None
    q_TIH = rotate(einsum("TA,AIH->TIH", q_TA, w.q_up_AIH), rope)
    key_TH = norm_alone(
        project("TD,DH->TH", x_TD, w.key_DH), LayerNorm(w.key_norm_H, w.key_norm_bias_H), EPSILON
    )
    weight_TI = exact("TD,DI->TI", plain(x_TD), w.weigh_DI)
    weight_TI = weight_TI * (indexer.heads * indexer.dim) ** -0.5
    return IndexQueries(q_TIH, weight_TI, indexer.count), rotate(key_TH[:, None], rope)
