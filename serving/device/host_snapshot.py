"""Weights and state in the host's memory while the device's is lent to others."""

from typing import Any

import jax
import numpy as np


class HostArray:
    """What the devices of this process held of an array, by place: the others' parts are theirs to keep."""

    def __init__(self, leaf: jax.Array):
        self.shape = leaf.shape
        self.parts = {str(shard.index): np.array(shard.data) for shard in leaf.addressable_shards}


def to_device(held: HostArray, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(held.shape, sharding, lambda index: held.parts[str(index)])


def to_host(tree: Any, keep: bool) -> Any:
    """The same in the host's memory, or None; its memory on the device is free, one array after the other."""

    def move(leaf: jax.Array) -> HostArray | None:
        host = HostArray(leaf) if keep else None
        leaf.delete()
        return host

    moved = jax.tree.map(move, tree)
    return moved if keep else None
