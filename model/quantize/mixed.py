"""A format for each matrix, such that all together are of some size and the loss hears little of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..checkpoint.published import described_as, split, writer_for
from ..checkpoint.safetensors import Tensor, read_header
from ..config import ModelError
from ..stored_format import StoredFormat
from . import sensitivity
from .grid import grid_of
from .source import Leaf, Source

FORMATS = (
    "int3-32",
    "int4-64",
    "int4-32",
    "int8-weights-64",
    "int8-weights",
)  # that a matrix may have, besides its own
ANY = "int4-32"  # to tell which matrices are to be rounded
SHARES = 1 << 16  # of the budget


class Way(NamedTuple):
    """A format for a weight; None: it is left as it is."""

    quant: str | None
    bits: float  # of all of it, scales included
    loss: float  # what the loss is expected to grow by, over all samples


def choose(
    source: Source, samples: Sequence[Sequence[int]], folder: Path, bits: float, progress: Callable[[int], None]
) -> dict[str, str | None]:
    """The format of each matrix, by the name of its tensor in files, at most `bits` a weight in all.

    A weight that is made of several matrices has one format. What a rounded weight costs is half of its change squared,
    times the square of the gradient: the loss near where it is flat, each number by itself.
    """
    sensitivity.write(source, samples, folder)
    leaves: list[tuple[Leaf, list[Way]]] = []
    for index in range(len(source.config.layers)):
        stored = read_header(sensitivity.file_of(folder, index))
        for leaf in source.leaves(index).values():
            if leaf.rounded:
                leaves.append((leaf, ways(source, leaf, stored)))
        progress(index + 1)
    count = sum(np.prod(source.tensors[part.name].shape) for leaf, _ in leaves for part in leaf.parts)
    found = within(bits * float(count), [each for _, each in leaves])
    if found is None:
        least = sum(min(way.bits for way in each) for _, each in leaves) / count
        raise ModelError(f"bits is {bits:g}; the matrices of this model can be {least:.3g} bits a weight at the least")
    return {
        source.tensors[part.name].name: way.quant
        for (leaf, _), way in zip(leaves, found, strict=True)
        for part in leaf.parts
    }


def ways(source: Source, leaf: Leaf, gradients: Mapping[str, Tensor]) -> list[Way]:
    """What a weight could be, and what each costs."""
    dtype = jnp.dtype(source.config.dtype)
    tensors = [source.tensors[part.name] for part in leaf.parts]
    values = [tensor.read().astype(dtype).astype(np.float32) for tensor in tensors]
    squares = [gradients[part.name].read() for part in leaf.parts]
    size = sum(value.size for value in values)
    found = [Way(None, 8.0 * dtype.itemsize * size, 0.0)]
    for name in FORMATS:
        stored = stored_as(name)
        (group,) = stored.groups
        try:
            layouts = [writer_for(stored).layout(tensor.name, group, tensor.shape) for tensor in tensors]
        except ModelError:  # its inputs do not divide by the group
            continue
        bits = sum(
            8.0 * np.dtype(dtypes[0]).itemsize * float(np.prod(shapes[0]))
            for layout in layouts
            for ending, (dtypes, shapes) in layout.items()
            if not ending.endswith("_shape")
        )
        changes = (grid_of(name).nearest(value) - value for value in values)
        loss = sum(float((square * np.square(change)).sum()) for square, change in zip(squares, changes, strict=True))
        found.append(Way(name, bits, loss / 2))
    return found


def stored_as(name: str) -> StoredFormat:
    """How matrices in one format are kept."""
    found = split({"quantization_config": described_as("compressed-tensors", name, ())})[1]
    assert found is not None
    return found


def within(budget: float, each: Sequence[Sequence[Way]]) -> list[Way] | None:
    """One way for each weight, of at most so many bits together, with the least loss; None where nothing fits.

    A knapsack by dynamic programming: bits are counted in shares of the budget, rounded up.
    """
    best_S, chosen_WS = np.zeros(SHARES + 1), np.zeros((len(each), SHARES + 1), np.int8)  # with at most s shares
    for number, ways in enumerate(each):
        before_S, best_S = best_S, np.full(SHARES + 1, np.inf)
        for place, way in enumerate(ways):
            if (cost := math.ceil(way.bits / budget * SHARES)) > SHARES:
                continue
            found_S = before_S[: SHARES + 1 - cost] + way.loss
            better_S = found_S < best_S[cost:]
            best_S[cost:][better_S], chosen_WS[number, cost:][better_S] = found_S[better_S], place
    if not np.isfinite(best_S[-1]):
        return None
    left, found = SHARES, []
    for ways, chosen_S in zip(reversed(each), chosen_WS[::-1], strict=True):
        found.append(ways[chosen_S[left]])
        left -= math.ceil(found[-1].bits / budget * SHARES)
    return found[::-1]
