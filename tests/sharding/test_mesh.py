"""Which mesh axis each logical axis goes over.

The shapes need no devices; one child process has eight.
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


def test_one_device():
    """Without sizes the mesh has all axes and one device, and nothing is split."""
    mesh = make_mesh()
    assert mesh.axis_names == AXES
    assert mesh.size == 1
    specs = abstract(llama.config(tiny.LLAMA))
    for spec, place in zip(
        jax.tree.leaves(specs), jax.tree.leaves(shardings(specs, mesh)), strict=True
    ):
        assert place.shard_shape(spec.shape) == spec.shape


@pytest.mark.parametrize(
    "sizes", [{"tensor": 2}, {"data": 0}, {"expert": -1}, {"pipe": 3, "context": 7}]
)
def test_meshes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match="devices; there"):
        make_mesh(jax.devices()[:1], **sizes)


def fake(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.get(name, 1) for name in AXES), AXES)


def test_rules():
    mesh = fake(tensor=4, expert=2)

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
    other = sharding(
        ArraySpec((8, 6), jnp.float32, ("heads", "embed")), mesh, RULES | {"heads": "expert"}
    )
    assert other.spec == PartitionSpec("expert", None)


def test_sizes_that_do_not_divide():
    with pytest.raises(
        ValueError, match=r"'heads' has size 12.*tensor=8; tensor could be 1, 2, 3, 4, 6, 12"
    ):
        sharding(ArraySpec((12, 4), jnp.float32, ("heads", None)), fake(tensor=8))


def test_runs_are_dealt_out_one_by_one():
    """Queries with the keys that they meet; what several devices need, each has; what does not
    divide is longer.
    """
    mesh = fake(tensor=4)

    def parts(spec: ArraySpec):
        wide = jnp.arange(spec.size).reshape(spec.shape)
        own = in_device_order(np.asarray(wide), spec, mesh)
        assert own.size >= spec.size
        return np.split(own, 4, axis=[axis is not None for axis in spec.axes].index(True))

    heads = ArraySpec(
        (2, 8 + 2 + 2), jnp.float32, (None, Interleaved("heads", (8, 2, 2), shared=(1, 2)))
    )
    assert [part[0].tolist() for part in parts(heads)] == [
        [0, 1, 8, 10],
        [2, 3, 8, 10],
        [4, 5, 9, 11],
        [6, 7, 9, 11],
    ]
    scale = ArraySpec((2 * 3,), jnp.float32, (Interleaved("heads", (2,), shared=(0,)),))
    assert [part.tolist() for part in parts(scale)] == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    uneven = ArraySpec(
        (4 * 2 + 2 * 3 + 4,),
        jnp.float32,
        (Interleaved("heads", (4, 2, 4), shared=(1,), widths=(2, 3, 1)),),
    )
    assert [part.tolist() for part in parts(uneven)] == [
        [0, 1, 8, 9, 10, 14], [2, 3, 8, 9, 10, 15], [4, 5, 11, 12, 13, 16], [6, 7, 11, 12, 13, 17]
    ]  # fmt: skip
    words = ArraySpec((6, 1), jnp.float32, ("vocab", None))
    assert [part[:, 0].tolist() for part in parts(words)] == [[0, 1], [2, 3], [4, 5], [0, 0]]


def test_runs_that_cannot_be_shared():
    with pytest.raises(ValueError, match=r"'heads' has size 6.*tensor=4; tensor could be 1, 2, 6"):
        sharding(
            ArraySpec((6 + 2, 4), jnp.float32, (Interleaved("heads", (6, 2), shared=(1,)), None)),
            fake(tensor=4),
        )


def test_an_axis_without_a_rule():
    with pytest.raises(ValueError, match="'rank'"):
        sharding(ArraySpec((12, 4), jnp.float32, ("rank", None)), fake())


EIGHT = """
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
plain, converted = (Path(name) for name in sys.argv[1:3])
config = read_config(plain)
mesh = make_mesh(data=2, tensor=4)
wanted = jax.tree.leaves(shardings(abstract(config), mesh))
whole = jax.tree.leaves(jax.tree.map(lambda spec, leaf: in_device_order(np.asarray(leaf), spec, mesh),
                                     abstract(config), load(plain, config, skip_packing=True)))
for folder in (plain, converted):
    arrays = jax.tree.leaves(load(folder, config, Placement(mesh)))
    for array, place, expected in zip(arrays, wanted, whole, strict=True):
        assert array.sharding.is_equivalent_to(place, array.ndim), (array.sharding, place)
        assert np.asarray(array).tobytes() == np.asarray(expected).tobytes()
    embed = arrays[0]
    assert embed.addressable_shards[0].data.shape == (config.vocab_size // 4, config.dim)
    assert len({shard.index[0].start for shard in embed.addressable_shards}) == 4
    try:
        load(folder, config, Placement(make_mesh(tensor=8)))
    except ModelError as error:
        assert "tensor=8" in str(error) and "heads" in str(error), error
    else:
        raise AssertionError("four heads went over eight devices")
"""


def test_load_over_eight_devices(tmp_path):
    """Both kinds of folder put each array where the mesh wants it."""
    from quire.model.checkpoint import loader, orbax

    plain = tmp_path / "plain"
    out = tmp_path / "converted"
    tiny.write(plain)
    config = loader.read_config(plain)
    orbax.save(plain, out, loader.load(plain, config, skip_packing=True), config.dtype)
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", EIGHT, str(plain), str(out)],
        capture_output=True, text=True, timeout=900, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
