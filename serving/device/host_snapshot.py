"""Weights and state in host memory while the engine sleeps."""

from typing import Any

import jax
import numpy as np


class HostArray:
    """The shards of an array that were on this process's devices."""

    def __init__(self, leaf: jax.Array):
        self.shape = leaf.shape
        self.parts = {str(shard.index): np.array(shard.data) for shard in leaf.addressable_shards}


def to_device(array: HostArray | jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Copy an array back to its devices; an array that is already there stays."""
    if isinstance(array, jax.Array):
        return array
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array.parts[str(index)]
    )


def to_host(tree: Any, keep: bool) -> Any:
    """Move a tree to host memory, or drop it (None), freeing device memory array by array."""

    def move(leaf: jax.Array) -> HostArray | None:
        host = HostArray(leaf) if keep else None
        leaf.delete()
        return host

    moved = jax.tree.map(move, tree)
    return moved if keep else None
