"""What the devices of a mesh send each other in a step; a test compares it with what the compiled programs send."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from ...ops.expert_dispatch import capacity
from ..config import LatentAttention, Layer, ModelConfig, Moe
from ..partition import Stage, whole_model


@dataclass(frozen=True)
class Collective:
    """A collective, and how many bytes its result has on a device."""

    kind: str
    axes: tuple[str, ...]  # of the mesh
    nbytes: int


def traffic(
    config: ModelConfig, sizes: Mapping[str, int], rows: int, prompts: bool, stage: Stage | None = None
) -> list[Collective]:
    """The collectives of all layers of a step, or of a stage, and of its words; those of sampling are small.

    `sizes` are those of the mesh by axis; `rows`: of each replica; `prompts`: the step carries prompts, so that rows
    are split over `context`.
    """
    tensor, expert, context, data = (sizes.get(axis, 1) for axis in ("tensor", "expert", "context", "data"))
    own = -(-rows // context) if prompts else rows  # rows that a device has outside of attention
    width = jnp.dtype(config.dtype).itemsize
    wide = own * config.dim * width
    found = []

    def sum_up(nbytes: int, *axes: str) -> None:
        found.append(Collective("all-reduce", axes, nbytes))

    stage = stage or whole_model(config)
    if tensor > 1 and stage.begins:
        sum_up(wide, "tensor")
        if config.per_layer_dim:
            sum_up(own * len(config.layers) * config.per_layer_dim * width, "tensor")
    for layer in config.layers[stage.layers.start : stage.layers.stop]:
        if context > 1:
            found += gathered(layer, tensor, context, own * context if prompts else rows, prompts, width)
        if tensor > 1:
            if getattr(layer.attention, "qk_norm", None) == "all":  # one number a row
                for _ in range(1 if layer.attention.kv_source is not None else 2):
                    sum_up(own * 4, "tensor")
            sum_up(wide, "tensor")
            if layer.mlp is not None:
                sum_up(wide, "tensor")
        if layer.moe is not None and (data > 1 or layer.moe.spare or (prompts and context > 1)):
            alike = expert if prompts else context * expert
            found += dispatched(layer.moe, tensor, alike, data * context * expert, own, config.dim, width)
        elif layer.moe is not None and tensor * context * expert > 1:
            sum_up(wide, "tensor", "context", "expert")
    return found


def dispatched(moe: Moe, tensor: int, alike: int, n: int, rows: int, dim: int, width: int) -> list[Collective]:
    """What rows send that go to their experts and come back, in one round, among n devices; so many have the same."""
    share, sharing = -(-rows // alike), ("data", "context", "expert")
    room = n * capacity(share, moe.top_k, n, moe.slots // n) * dim * width
    found = [Collective("all-gather", sharing, 4 * n * moe.slots)]
    found += [Collective("all-to-all", sharing, room)] * 2
    if tensor > 1:
        found.append(Collective("all-reduce", ("tensor",), share * dim * width))
    if alike > 1:
        found.append(Collective("all-gather", ("context", "expert"), alike * share * dim * width))
    return found


def gathered(layer: Layer, tensor: int, context: int, rows: int, prompts: bool, width: int) -> list[Collective]:
    """What attention sends where each device has some positions of every page."""
    a = layer.attention
    heads = a.heads // tensor
    if isinstance(a, LatentAttention):
        arrays, values = [heads * (a.kv_rank + a.rope_dim), a.kv_rank + a.rope_dim], a.kv_rank
    else:
        own = max(1, a.kv_heads // tensor) * a.head_dim
        arrays, values = [heads * a.head_dim] + ([own, own] if a.kv_source is None else []), a.head_dim
    sums = 4 * rows * heads * (values + 2)
    if not prompts:
        return [Collective("all-gather", ("context",), context * sums)]
    return [Collective("all-gather", ("context",), rows * array * width) for array in arrays] + [
        Collective("all-to-all", ("context",), sums)
    ]
