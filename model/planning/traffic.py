"""What the devices of a mesh send each other in a step. A test compares it with the compiled programs."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from ...ops.moe.dispatch import capacity
from ..config import Layer, ModelConfig, Moe
from ..partition import Stage, whole_model


@dataclass(frozen=True)
class Collective:
    """A collective, and the bytes of its result on a device."""

    kind: str
    axes: tuple[str, ...]  # of the mesh
    nbytes: int


def traffic(
    config: ModelConfig, sizes: Mapping[str, int], rows: int, prompts: bool, stage: Stage | None = None
) -> list[Collective]:
    """The collectives of the embedding and of all layers, or of one stage's; those of sampling are too small to count.

    `sizes` are those of the mesh by axis. `rows` are those of each replica. `prompts`: the step has prompt tokens, so
    that rows are split over `context`.
    """
    tensor, expert, context, data = (sizes.get(axis, 1) for axis in ("tensor", "expert", "context", "data"))
    own = -(-rows // context) if prompts else rows  # rows of a device outside attention
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
            if getattr(layer.attention, "qk_norm", None) == "all":  # one number for each row
                for _ in range(1 if layer.attention.kv_source is not None else 2):
                    sum_up(own * 4, "tensor")
            sum_up(wide, "tensor")
            if layer.mlp is not None:
                sum_up(wide, "tensor")
        if layer.moe is not None and (data > 1 or layer.moe.spare or (prompts and context > 1)):
            same_rows = expert if prompts else context * expert
            found += dispatched(layer.moe, tensor, same_rows, data * context * expert, own, config.dim, width)
        elif layer.moe is not None and tensor * context * expert > 1:
            sum_up(wide, "tensor", "context", "expert")
    return found


def dispatched(moe: Moe, tensor: int, same_rows: int, n: int, rows: int, dim: int, width: int) -> list[Collective]:
    """What is sent when rows go to experts on n devices and back, in one round; `same_rows` of them have equal rows."""
    share, sharing = -(-rows // same_rows), ("data", "context", "expert")
    room = n * capacity(share, moe.top_k, n, moe.slots // n) * dim * width
    found = [Collective("all-gather", sharing, 4 * n * moe.slots)]
    found += [Collective("all-to-all", sharing, room)] * 2
    if tensor > 1:
        found.append(Collective("all-reduce", ("tensor",), share * dim * width))
    if same_rows > 1:
        found.append(Collective("all-gather", ("context", "expert"), same_rows * share * dim * width))
    return found


def gathered(layer: Layer, tensor: int, context: int, rows: int, prompts: bool, width: int) -> list[Collective]:
    """What attention sends where positions are split over `context`."""
    a = layer.attention.split(tensor)
    query, values = a.widths
    arrays = [a.heads * query] + [heads * width for heads, width in (a.cached if a.kv_source is None else ())]
    sums = 4 * rows * a.heads * (values + 2)
    if not prompts:
        return [Collective("all-gather", ("context",), context * sums)]
    return [Collective("all-gather", ("context",), rows * array * width) for array in arrays] + [
        Collective("all-to-all", ("context",), sums)
    ]
