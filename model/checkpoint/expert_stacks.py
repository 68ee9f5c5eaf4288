"""Stacks of experts that are rounded as they are read, one expert at a time: no dense stack is ever in memory."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ...ops.quant.stack import Stack, one_of
from ...sharding import local_shards
from ...sharding.spec import ArraySpec, empty
from .dense_leaf import read_leaf
from .published import matrix

THREADS = min(16, os.cpu_count() or 1)  # each holds one expert, dense


def read_stack(
    dense: ArraySpec, stack: Stack, parts, tensors: dict[str, Any], wanted: Iterable[int], done: Callable[[int], None]
) -> Stack:
    """The stack with the codes of the experts `wanted`; the others may hold anything. `done` gets the bytes of each."""
    one, leaf = one_of(dense), jax.tree.map(lambda spec: empty(spec.shape, spec.dtype), stack)
    sources = list(of_each(dense.shape[0], parts, tensors))

    def read(e: int) -> int:
        node = read_node(one, stack.each, *sources[e])
        jax.tree.map(lambda out, value: np.copyto(out[e], value), leaf.each, node)
        return one.nbytes

    with ThreadPoolExecutor(THREADS) as threads:  # numpy and the disk leave Python's lock to others
        for nbytes in threads.map(read, wanted):
            done(nbytes)
    return leaf


def of_each(E: int, parts, tensors: dict[str, Any]) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """For each expert the parts of its matrix, and the tensors that these name."""
    (first, *others), found = parts, [[] for _ in range(E)]
    if first.at == () and not others:  # all in one tensor, which a turn takes any number of
        single = replace(first, turn=lambda x: first.turn(x)[0])
        yield from (((single,), {first.name: tensors[first.name].cut(e)}) for e in range(E))
        return
    for part in parts:
        e, *rest = part.at if isinstance(part.at, tuple) else (part.at,)
        found[e].append(replace(part, at=tuple(rest)))
    yield from ((tuple(mine), tensors) for mine in found)


def read_node(one: ArraySpec, node: Any, parts, tensors: dict[str, Any]) -> Any:
    """One expert's matrix: its codes as they are stored, or rounded here."""
    if matrix.fits(node, [tensors[part.name] for part in parts]):
        return matrix.read_node(one, node, parts, tensors)
    return node.quantize(read_leaf(one, parts, tensors))


def wanted(dense: ArraySpec, mesh) -> Iterable[int]:
    """The experts of which this process has a part."""
    return (
        range(dense.shape[0]) if mesh is None else np.flatnonzero(local_shards.local_elements(dense, mesh)[0]).tolist()
    )
