"""Frozen dataclasses that are pytrees, like `flax.struct`, whose import takes half a second."""

import dataclasses
from typing import Any, Self, dataclass_transform

import jax

# A leaf of a pytree: a JAX or NumPy array, or its spec, shape or sharding in an abstract tree.
Leaf = Any


def field(pytree_node: bool = True, **options) -> Any:
    """A field; with `pytree_node=False` it is static: part of the tree's structure, and hashed with
    it.
    """
    return dataclasses.field(metadata={"pytree_node": pytree_node}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class PyTreeNode:
    """Base class: a subclass is a frozen dataclass whose fields are the children of a pytree."""

    def __init_subclass__(cls, kw_only: bool = False) -> None:
        dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)
        fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        children = [item.name for item in fields if item.metadata.get("pytree_node", True)]
        jax.tree_util.register_dataclass(
            cls, children, [item.name for item in fields if item.name not in children]
        )

    def replace(self, **values) -> Self:
        return dataclasses.replace(self, **values)  # pyright: ignore[reportArgumentType]
