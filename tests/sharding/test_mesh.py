"""Sharding of logical axes over mesh axes.

Most tests need no devices; one test starts a process with eight.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from quire.model.families import llama
from quire.model.weights import abstract
from quire.sharding.mesh import AXES, RULES, make_mesh, sharding, shardings
from quire.sharding.spec import ArraySpec, Interleaved
from quire.tests.support import tiny
from quire.tests.support.shards import in_device_order


def test_mesh_without_sizes_has_one_device():
    """Without sizes the mesh has all axes and one device, and nothing is split."""
    mesh = make_mesh()
    assert mesh.axis_names == AXES
    assert mesh.size == 1
    specs = abstract(llama.config(tiny.LLAMA))
    for spec, placement in zip(
        jax.tree.leaves(specs), jax.tree.leaves(shardings(specs, mesh)), strict=True
    ):
        assert placement.shard_shape(spec.shape) == spec.shape


@pytest.mark.parametrize(
    "sizes", [{"tensor": 2}, {"data": 0}, {"expert": -1}, {"pipe": 3, "context": 7}]
)
def test_mesh_larger_than_the_devices_is_refused(sizes):
    with pytest.raises(ValueError, match="devices; there"):
        make_mesh(jax.devices()[:1], **sizes)


def make_abstract_mesh(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.get(name, 1) for name in AXES), AXES)


def test_logical_axes_are_sharded_by_rules():
    mesh = make_abstract_mesh(tensor=4, expert=2)

    def split(axes, shape):
        return sharding(ArraySpec(shape, jnp.float32, axes), mesh)

    assert split(("vocab", "embed"), (32, 8)).spec == PartitionSpec("tensor", None)
    assert split(("heads", None, "embed"), (8, 3, 5)).shard_shape((8, 3, 5)) == (2, 3, 5)
    assert split(("embed", None, "ffn"), (5, 2, 12)).shard_shape((5, 2, 12)) == (5, 2, 3)
    assert split(("experts", "embed", None, "ffn"), (6, 5, 2, 4)).shard_shape((6, 5, 2, 4)) == (
        3,
        5,
        2,
        1,
    )
    assert split(("embed", Interleaved("heads", (8, 4, 4)), None), (5, 16, 3)).shard_shape(
        (5, 16, 3)
    ) == (5, 4, 3)
    assert split((), ()).spec == PartitionSpec()
    custom_sharding = sharding(
        ArraySpec((8, 6), jnp.float32, ("heads", "embed")), mesh, RULES | {"heads": "expert"}
    )
    assert custom_sharding.spec == PartitionSpec("expert", None)


def test_indivisible_axis_is_refused():
    with pytest.raises(
        ValueError, match=r"'heads' has size 12.*tensor=8; tensor could be 1, 2, 3, 4, 6, 12"
    ):
        sharding(ArraySpec((12, 4), jnp.float32, ("heads", None)), make_abstract_mesh(tensor=8))


def test_interleaved_axes_are_distributed_evenly():
    """Query heads go with their key heads, shared parts are copied, and axes are padded if they do
    not divide.
    """
    mesh = make_abstract_mesh(tensor=4)

    def shards(spec: ArraySpec):
        array = jnp.arange(spec.size).reshape(spec.shape)
        device_order = in_device_order(np.asarray(array), spec, mesh)
        assert device_order.size >= spec.size
        return np.split(device_order, 4, axis=[axis is not None for axis in spec.axes].index(True))

    heads = ArraySpec(
        (2, 8 + 2 + 2), jnp.float32, (None, Interleaved("heads", (8, 2, 2), shared=(1, 2)))
    )
    assert [shard[0].tolist() for shard in shards(heads)] == [
        [0, 1, 8, 10],
        [2, 3, 8, 10],
        [4, 5, 9, 11],
        [6, 7, 9, 11],
    ]
    scale = ArraySpec((2 * 3,), jnp.float32, (Interleaved("heads", (2,), shared=(0,)),))
    assert [shard.tolist() for shard in shards(scale)] == [
        [0, 1, 2],
        [0, 1, 2],
        [3, 4, 5],
        [3, 4, 5],
    ]
    uneven = ArraySpec(
        (4 * 2 + 2 * 3 + 4,),
        jnp.float32,
        (Interleaved("heads", (4, 2, 4), shared=(1,), widths=(2, 3, 1)),),
    )
    assert [shard.tolist() for shard in shards(uneven)] == [
        [0, 1, 8, 9, 10, 14], [2, 3, 8, 9, 10, 15], [4, 5, 11, 12, 13, 16], [6, 7, 11, 12, 13, 17]
    ]  # fmt: skip
    vocabulary = ArraySpec((6, 1), jnp.float32, ("vocab", None))
    assert [shard[:, 0].tolist() for shard in shards(vocabulary)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [0, 0],
    ]


def test_indivisible_interleaved_axis_is_refused():
    with pytest.raises(ValueError, match=r"'heads' has size 6.*tensor=4; tensor could be 1, 2, 6"):
        sharding(
            ArraySpec((6 + 2, 4), jnp.float32, (Interleaved("heads", (6, 2), shared=(1,)), None)),
            make_abstract_mesh(tensor=4),
        )


def test_axis_without_a_rule_is_refused():
    with pytest.raises(ValueError, match="'rank'"):
        sharding(ArraySpec((12, 4), jnp.float32, ("rank", None)), make_abstract_mesh())


EIGHT_DEVICES_SCRIPT = """
import sys
from pathlib import Path
import jax, numpy as np
from quire.tests.support.shards import in_device_order
from quire.model.checkpoint.loader import load, read_config
from quire.model.config import ModelError
from quire.model.checkpoint.placement import Placement
from quire.sharding.mesh import make_mesh, shardings
from quire.model.weights import abstract

assert len(jax.devices()) == 8
plain_folder, converted_folder = (Path(name) for name in sys.argv[1:3])
config = read_config(plain_folder)
mesh = make_mesh(data=2, tensor=4)
placements = jax.tree.leaves(shardings(abstract(config), mesh))
full_arrays = jax.tree.leaves(
    jax.tree.map(lambda spec, leaf: in_device_order(np.asarray(leaf), spec, mesh),
                 abstract(config), load(plain_folder, config, skip_packing=True)))
for folder in (plain_folder, converted_folder):
    arrays = jax.tree.leaves(load(folder, config, Placement(mesh)))
    for array, placement, expected in zip(arrays, placements, full_arrays, strict=True):
        assert array.sharding.is_equivalent_to(placement, array.ndim), (array.sharding, placement)
        assert np.asarray(array).tobytes() == np.asarray(expected).tobytes()
    embed = arrays[0]
    assert embed.addressable_shards[0].data.shape == (config.vocab_size // 4, config.dim)
    assert len({shard.index[0].start for shard in embed.addressable_shards}) == 4
    try:
        load(folder, config, Placement(make_mesh(tensor=8)))
    except ModelError as error:
        assert "tensor=8" in str(error) and "heads" in str(error), error
    else:
        raise AssertionError("four heads were split over eight devices")
"""


def test_load_over_eight_devices(tmp_path):
    """Arrays of safetensors and of Orbax folders are loaded with the shardings of the mesh."""
    from quire.model.checkpoint import loader, orbax

    plain_folder = tmp_path / "plain"
    converted_folder = tmp_path / "converted"
    tiny.write(plain_folder)
    config = loader.read_config(plain_folder)
    orbax.save(
        plain_folder,
        converted_folder,
        loader.load(plain_folder, config, skip_packing=True),
        config.dtype,
    )
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    completed = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES_SCRIPT, str(plain_folder), str(converted_folder)],
        capture_output=True, text=True, timeout=900, env=os.environ | environment,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
