"""Arrays in device order: equal slices of these are the shards of a mesh's devices."""

from quire.sharding.mesh import shard_layouts, take_elements


def in_device_order(leaf, spec, mesh):
    for at, order in enumerate(shard_layouts(spec, mesh)):
        leaf = leaf if order is None else take_elements(leaf, order, at)
    return leaf
