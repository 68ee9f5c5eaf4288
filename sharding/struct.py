"""Frozen dataclasses that are pytrees, as `flax.struct` has them. To import flax takes half a second of a start."""

import dataclasses
from functools import partial
from typing import Any, TypeVar, dataclass_transform, overload

import jax

T = TypeVar("T")


def field(pytree_node: bool = True, **options) -> Any:
    """A field; with `pytree_node=False` it is a part of the tree's structure, and hashed with it."""
    return dataclasses.field(metadata={"pytree_node": pytree_node}, **options)


@overload
def dataclass(cls: type[T]) -> type[T]: ...
@overload
def dataclass(*, kw_only: bool = False) -> Any: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def dataclass(cls: Any = None, *, kw_only: bool = False) -> Any:
    """A class whose fields are the children of a pytree node; `replace` gives one with others."""
    if cls is None:
        return partial(dataclass, kw_only=kw_only)
    made = dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)
    made.replace = dataclasses.replace
    every = dataclasses.fields(made)
    children = [each.name for each in every if each.metadata.get("pytree_node", True)]
    jax.tree_util.register_dataclass(made, children, [each.name for each in every if each.name not in children])
    return made
