"""Quantise stacks of experts one expert at a time, so that no dense stack is ever in memory."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ...ops.quant.stack import Stack, matrix_spec
from ...sharding import local_shards
from ...sharding.spec import ArraySpec, empty
from .dense_leaf import read_leaf
from .published import matrix

THREADS = min(16, os.cpu_count() or 1)  # each holds one dense expert


def read_stack(
    dense: ArraySpec,
    stack: Stack,
    sources,
    tensors: dict[str, Any],
    experts: Iterable[int],
    progress: Callable[[int], None],
) -> Stack:
    """Read and quantise the given experts; other elements of the stack are uninitialised.

    `progress` is called with the bytes of each expert.
    """
    expert_spec = matrix_spec(dense)
    leaf = jax.tree.map(lambda spec: empty(spec.shape, spec.dtype), stack)
    expert_inputs = list(split_by_expert(dense.shape[0], sources, tensors))

    def read(e: int) -> int:
        node = read_expert(expert_spec, stack.each, *expert_inputs[e])
        jax.tree.map(lambda out, value: np.copyto(out[e], value), leaf.each, node)
        return expert_spec.nbytes

    with ThreadPoolExecutor(THREADS) as threads:  # numpy and file reads release the GIL
        for nbytes in threads.map(read, experts):
            progress(nbytes)
    return leaf


def split_by_expert(
    E: int, sources, tensors: dict[str, Any]
) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """For each expert, the sources of its matrix and the tensors that hold them."""
    (first, *other_sources) = sources
    sources_by_expert = [[] for _ in range(E)]
    if first.at == () and not other_sources:  # all experts in one tensor
        single = replace(first, transform=lambda x: first.transform(x)[0])
        yield from (((single,), {first.name: tensors[first.name].cut(e)}) for e in range(E))
        return
    for source in sources:
        e, *index_in_expert = source.at if isinstance(source.at, tuple) else (source.at,)
        sources_by_expert[e].append(replace(source, at=tuple(index_in_expert)))
    yield from ((tuple(expert_sources), tensors) for expert_sources in sources_by_expert)


def read_expert(spec: ArraySpec, node: Any, sources, tensors: dict[str, Any]) -> Any:
    """Read one expert's matrix: keep the stored codes if the format matches, else quantise it."""
    if matrix.can_hold_codes(node, [tensors[source.name] for source in sources]):
        return matrix.read_node(node, sources, tensors)
    return node.quantize(read_leaf(spec, sources, tensors))


def local_experts(dense: ArraySpec, mesh) -> Iterable[int]:
    """The experts of which this process holds a shard."""
    return (
        range(dense.shape[0])
        if mesh is None
        else np.flatnonzero(local_shards.local_elements(dense, mesh)[0]).tolist()
    )
