"""Compares dataclasses that are pytrees with those of flax."""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quire.sharding import struct

flax_struct = pytest.importorskip("flax.struct")


def define_classes(module):
    """Defines the same classes with the base class of `module`."""

    class Point(module.PyTreeNode):
        x: Any
        name: str = module.field(pytree_node=False)
        y: Any = None
        tags: dict = module.field(default_factory=dict)

        def moved(self):
            return self.replace(x=self.x + 1)

    class Base(module.PyTreeNode, kw_only=True):  # pyright: ignore[reportGeneralTypeIssues]
        size: int = module.field(pytree_node=False)
        extra: Any = None

    class Inherits(Base):
        tiles: Any

    return Point, Inherits


BOTH_MODULES = pytest.mark.parametrize("module", [struct, flax_struct], ids=["quire", "flax"])


def paths(tree) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def test_dataclasses_match_those_of_flax():
    """They have the same leaves, order of leaves, paths, repr and fields."""
    Point, Inherits = define_classes(struct)
    FlaxPoint, FlaxInherits = define_classes(flax_struct)
    for tree, flax_tree in [
        (Point(1, "a", [2, 3], {"k": 4}), FlaxPoint(1, "a", [2, 3], {"k": 4})),
        (Inherits(np.ones(2), size=3), FlaxInherits(np.ones(2), size=3)),
        (Inherits(5, size=3, extra=6), FlaxInherits(5, size=3, extra=6)),
    ]:
        assert paths(tree) == paths(flax_tree) != []
        for leaf, flax_leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(flax_tree), strict=True):
            np.testing.assert_array_equal(leaf, flax_leaf)
        assert repr(tree) == repr(flax_tree)
        field_lists = [
            [
                (field.name, field.metadata.get("pytree_node", True), field.kw_only)
                for field in dataclasses.fields(any_tree)
            ]
            for any_tree in (tree, flax_tree)
        ]
        assert field_lists[0] == field_lists[1]


@BOTH_MODULES
def test_static_fields_are_part_of_the_tree_structure(module):
    """A static field is part of the tree structure: jitted functions are traced for each value, and
    trees with different values do not match.
    """
    Point, _ = define_classes(module)
    traced_names = []

    @jax.jit
    def double_x(point):
        traced_names.append(point.name)
        return point.replace(x=point.x * 2)

    assert double_x(Point(jnp.ones(2), "a")).x.tolist() == [2, 2]
    double_x(Point(jnp.zeros(2), "a"))
    double_x(Point(jnp.zeros(2), "b"))
    assert traced_names == ["a", "b"]
    with pytest.raises(ValueError):
        jax.tree.map(lambda a, b: a, Point(1, "a"), Point(1, "b"))


@BOTH_MODULES
def test_dataclasses_are_frozen(module):
    """Fields cannot be set, only replaced, and unknown fields are refused."""
    Point, Inherits = define_classes(module)
    point = Point(1, "a")
    assert point.moved() == Point(2, "a") != point
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2
    with pytest.raises(TypeError):
        point.replace(z=1)
    with pytest.raises(TypeError):
        Inherits(1, 2)  # `size` is keyword-only
    assert Point(1, "a").tags is not Point(1, "a").tags


def test_weights_can_be_pickled_and_shape_evaluated():
    """Weights classes work with pickle and `jax.eval_shape`."""
    from quire.model.weights import MlpWeights

    mlp = MlpWeights(np.ones((2, 2, 3)), np.ones((3, 2)))
    unpickled = pickle.loads(pickle.dumps(mlp))
    assert jax.tree.structure(unpickled) == jax.tree.structure(mlp)
    assert jax.eval_shape(lambda w: w.replace(down_FD=w.down_FD.T), mlp).down_FD.shape == (2, 3)
