"""Makes the device mesh and weight placement that the options ask for."""

import math

import jax

from ...model import partition
from ...model.checkpoint.placement import Placement, choose_host_layers
from ...model.config import ModelConfig, ModelError
from ...sharding.mesh import Mesh, make_mesh
from ..api.options import PARALLEL, EngineOptions


def mesh_of(options: EngineOptions, config: ModelConfig) -> Mesh | None:
    """The device mesh; None for a single device."""
    sizes = {axis: getattr(options, name) for axis, name in PARALLEL.items()}
    count = math.prod(sizes.values())
    if count == options.num_processes == 1:
        return None
    partition.check(
        config, sizes["tensor"], sizes["expert"], sizes["pipe"], sizes["data"], sizes["context"]
    )
    if options.block_size % sizes["context"]:
        fitting = [f"{n}" for n in range(1, options.block_size + 1) if options.block_size % n == 0]
        raise ModelError(
            f"context_parallel_size is {sizes['context']}, which does not divide the "
            f"{options.block_size} positions of a page; it can be {', '.join(fitting)}, or "
            "block_size a multiple of it"
        )
    requested_axes = (
        " times ".join(f"{PARALLEL[axis]} {size}" for axis, size in sizes.items() if size > 1)
        or "one device"
    )
    if options.num_processes > 1 and count != jax.device_count():
        devices_per_process = jax.device_count() / options.num_processes
        raise ModelError(
            f"{requested_axes} is {count}; with num_processes {options.num_processes} it must be the number "
            f"of all their devices, {jax.device_count()} ({devices_per_process:g} each)"
        )
    try:
        return make_mesh(**sizes)
    except ValueError as error:
        raise ModelError(
            f"{requested_axes}: {error}; on a CPU XLA_FLAGS=--xla_force_host_platform_device_count=N makes "
            "N of it"
        ) from None


def placement_of(options: EngineOptions, config: ModelConfig, mesh: Mesh | None) -> Placement:
    """The placement of the weights."""
    if options.shard_weights and options.context_parallel_size == 1:
        raise ModelError(
            "shard_weights parts the weights over the devices of context_parallel_size, which is 1"
        )
    if options.expert_redundancy and (options.shard_weights or options.weights_host_bytes):
        raise ModelError(
            f"expert_redundancy is {options.expert_redundancy}: experts that move must lie ready, "
            "so leave out shard_weights and weights_host_bytes"
        )
    return Placement(
        mesh, options.shard_weights, choose_host_layers(config, options.weights_host_bytes or 0)
    )
