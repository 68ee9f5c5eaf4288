"""Frozen dataclasses that are pytrees, like `flax.struct`, whose import takes half a second."""

import dataclasses
from functools import partial
from typing import Any, TypeVar, dataclass_transform, overload

import jax

T = TypeVar("T")


def field(pytree_node: bool = True, **options) -> Any:
    """A field; with `pytree_node=False` it is static: part of the tree's structure, and hashed with
    it.
    """
    return dataclasses.field(metadata={"pytree_node": pytree_node}, **options)


@overload
def dataclass(cls: type[T]) -> type[T]: ...
@overload
def dataclass(*, kw_only: bool = False) -> Any: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def dataclass(cls: Any = None, *, kw_only: bool = False) -> Any:
    """Make a frozen dataclass whose fields are the children of a pytree node, with a method
    `replace`.
    """
    if cls is None:
        return partial(dataclass, kw_only=kw_only)
    frozen = dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)
    frozen.replace = dataclasses.replace
    fields = dataclasses.fields(frozen)
    children = [item.name for item in fields if item.metadata.get("pytree_node", True)]
    jax.tree_util.register_dataclass(
        frozen, children, [item.name for item in fields if item.name not in children]
    )
    return frozen
