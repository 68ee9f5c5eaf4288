"""Dataclasses that are pytrees, against those of flax."""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.sharding import struct

flax_struct = pytest.importorskip("flax.struct")


def classes(module):
    """The same classes, decorated by one of the two."""

    @module.dataclass
    class Point:
        x: Any
        name: str = module.field(pytree_node=False)
        y: Any = None
        tags: dict = module.field(default_factory=dict)

        def moved(self):
            return self.replace(x=self.x + 1)

    @module.dataclass(kw_only=True)
    class Base:
        size: int = module.field(pytree_node=False)
        which: Any = None

    @module.dataclass
    class Inherits(Base):
        tiles: Any

    return Point, Inherits


BOTH = pytest.mark.parametrize("module", [struct, flax_struct], ids=["ours", "flax"])


def paths(tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def test_alike():
    """The same leaves in the same order under the same paths, and the same text."""
    Point, Inherits = classes(struct)
    FlaxPoint, FlaxInherits = classes(flax_struct)
    for ours, theirs in [
        (Point(1, "a", [2, 3], {"k": 4}), FlaxPoint(1, "a", [2, 3], {"k": 4})),
        (Inherits(np.ones(2), size=3), FlaxInherits(np.ones(2), size=3)),
        (Inherits(5, size=3, which=6), FlaxInherits(5, size=3, which=6)),
    ]:
        assert paths(ours) == paths(theirs) != []
        for leaf, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(leaf, other)
        assert repr(ours) == repr(theirs)
        fields = [
            [
                (field.name, field.metadata.get("pytree_node", True), field.kw_only)
                for field in dataclasses.fields(one)
            ]
            for one in (ours, theirs)
        ]
        assert fields[0] == fields[1]


@BOTH
def test_structure(module):
    """What is no node is a part of the structure: programs are compiled for it, and trees of others
    do not match.
    """
    Point, _ = classes(module)
    traced = []

    @jax.jit
    def run(point):
        traced.append(point.name)
        return point.replace(x=point.x * 2)

    assert run(Point(jnp.ones(2), "a")).x.tolist() == [2, 2]
    run(Point(jnp.zeros(2), "a"))
    run(Point(jnp.zeros(2), "b"))
    assert traced == ["a", "b"]
    with pytest.raises(ValueError):
        jax.tree.map(lambda a, b: a, Point(1, "a"), Point(1, "b"))


@BOTH
def test_frozen(module):
    """Values are replaced and never set; an unknown field is refused."""
    Point, Inherits = classes(module)
    point = Point(1, "a")
    assert point.moved() == Point(2, "a") != point
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2
    with pytest.raises(TypeError):
        point.replace(z=1)
    with pytest.raises(TypeError):
        Inherits(1, 2)  # `size` is a keyword
    assert Point(1, "a").tags is not Point(1, "a").tags


def test_real_tree():
    """The weights' own classes go through pickle and `eval_shape`."""
    from quire.model.weights import MlpWeights

    mlp = MlpWeights(np.ones((2, 2, 3)), np.ones((3, 2)))
    again = pickle.loads(pickle.dumps(mlp))
    assert jax.tree.structure(again) == jax.tree.structure(mlp)
    assert jax.eval_shape(lambda w: w.replace(down_FD=w.down_FD.T), mlp).down_FD.shape == (2, 3)
