"""The communication between the devices of a mesh in a step; a test compares it with compiled
programs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from ...ops.moe.dispatch import capacity
from ..config import Layer, ModelConfig, Moe
from ..partition import Stage, whole_model
from ..recurrent import Recurrent


@dataclass(frozen=True)
class Collective:
    """A collective, and the bytes of its result on a device."""

    kind: str
    axes: tuple[str, ...]  # of the mesh
    nbytes: int


def traffic(
    config: ModelConfig,
    sizes: Mapping[str, int],
    num_tokens: int,
    prompts: bool,
    stage: Stage | None = None,
) -> list[Collective]:
    """The collectives of the embedding and of the layers, of all stages or one; those of sampling
    are negligible.

    Args:
        sizes: the mesh's size along each axis.
        num_tokens: tokens of each replica.
        prompts: the step has prompt tokens, which are split over `context`.
    """
    tensor, expert, context, data = (
        sizes.get(axis, 1) for axis in ("tensor", "expert", "context", "data")
    )
    tokens_per_device = -(-num_tokens // context) if prompts else num_tokens  # outside attention
    itemsize = jnp.dtype(config.dtype).itemsize
    hidden_bytes = tokens_per_device * config.dim * itemsize
    collectives = []

    def all_reduce(nbytes: int, *axes: str) -> None:
        collectives.append(Collective("all-reduce", axes, nbytes))

    stage = stage or whole_model(config)
    if tensor > 1 and stage.is_first:
        all_reduce(hidden_bytes, "tensor")
        if config.per_layer_dim:
            all_reduce(
                tokens_per_device * len(config.layers) * config.per_layer_dim * itemsize, "tensor"
            )
    for layer in config.layers[stage.layers.start : stage.layers.stop]:
        if context > 1:
            collectives += context_traffic(
                layer,
                tensor,
                context,
                tokens_per_device * context if prompts else num_tokens,
                prompts,
                itemsize,
            )
        if tensor > 1:
            if getattr(layer.attention, "qk_norm", None) == "all":  # one number for each token
                for _ in range(1 if layer.attention.kv_source is not None else 2):
                    all_reduce(tokens_per_device * 4, "tensor")
            all_reduce(hidden_bytes, "tensor")
            if layer.mlp is not None:
                all_reduce(hidden_bytes, "tensor")
        if layer.moe is not None and (data > 1 or layer.moe.spare or (prompts and context > 1)):
            same_rows = expert if prompts else context * expert
            collectives += expert_dispatch_traffic(
                layer.moe,
                tensor,
                same_rows,
                data * context * expert,
                tokens_per_device,
                config.dim,
                itemsize,
            )
        elif layer.moe is not None and tensor * context * expert > 1:
            all_reduce(hidden_bytes, "tensor", "context", "expert")
    return collectives


def expert_dispatch_traffic(
    moe: Moe,
    tensor: int,
    same_rows: int,
    num_devices: int,
    num_tokens: int,
    dim: int,
    itemsize: int,
) -> list[Collective]:
    """The collectives of sending tokens to experts on `num_devices` devices and back, in one round.

    Groups of `same_rows` devices have the same tokens.
    """
    tokens_per_device = -(-num_tokens // same_rows)
    axes = ("data", "context", "expert")
    buffer_bytes = (
        num_devices
        * capacity(tokens_per_device, moe.top_k, num_devices, moe.slots // num_devices)
        * dim
        * itemsize
    )
    collectives = [Collective("all-gather", axes, 4 * num_devices * moe.slots)]
    collectives += [Collective("all-to-all", axes, buffer_bytes)] * 2
    if tensor > 1:
        collectives.append(
            Collective("all-reduce", ("tensor",), tokens_per_device * dim * itemsize)
        )
    if same_rows > 1:
        collectives.append(
            Collective(
                "all-gather", ("context", "expert"), same_rows * tokens_per_device * dim * itemsize
            )
        )
    return collectives


def context_traffic(
    layer: Layer, tensor: int, context: int, num_tokens: int, prompts: bool, itemsize: int
) -> list[Collective]:
    """The collectives of attention whose positions are split over `context`."""
    attention = layer.attention.split(tensor)
    assert not isinstance(attention, Recurrent), "its tokens cannot be split"
    query, values = attention.widths
    arrays = [attention.heads * query] + [
        heads * width for heads, width in (attention.cached if attention.kv_source is None else ())
    ]
    sums = 4 * num_tokens * attention.heads * (values + 2)
    if not prompts:
        return [Collective("all-gather", ("context",), context * sums)]
    return [
        Collective("all-gather", ("context",), num_tokens * array * itemsize) for array in arrays
    ] + [Collective("all-to-all", ("context",), sums)]
