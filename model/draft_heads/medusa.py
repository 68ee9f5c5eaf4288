"""Medusa heads: each predicts the token at one position ahead from the hidden state."""

import jax.numpy as jnp

from ...ops.activation import ACTIVATIONS
from ...ops.linear import project
from ...sharding.device_axes import ONE_DEVICE, DeviceAxes
from ..weights import ModelWeights
from .draft_layers import table_logits
from .heads import DraftHeads
from .weights import DraftHeadsWeights


def medusa_logits(
    heads: DraftHeads,
    weights: DraftHeadsWeights,
    target_weights: ModelWeights,
    hidden_RD,
    axes: DeviceAxes = ONE_DEVICE,
):
    """Float32 logits [C, R, V]: head c predicts the token c + 2 positions after the row's.

    The target itself samples the token one position after. `hidden_RD` is after its final norm.
    """
    logits = []
    for head in weights.heads:
        x_RD = hidden_RD
        for block in head.blocks:
            x_RD = x_RD + ACTIVATIONS["silu"](
                project("RD,DE->RE", x_RD, block.weight_DE, block.bias_E)
            )
        logits.append(
            table_logits(heads, head.head_VD, weights.tokens_U, target_weights, x_RD, axes)
        )
    return jnp.stack(logits)
