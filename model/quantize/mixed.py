"""Choose a format for each matrix so that the model has a given size with the least loss."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..checkpoint.published import make_quantization_config, split_quantization, writer_for_format
from ..checkpoint.safetensors import Tensor, read_header
from ..config import ModelError
from ..stored_format import StoredFormat
from . import sensitivity
from .grid import grid_for_format
from .source import CheckpointSource, Leaf

# Candidates for every matrix, besides leaving it unquantised.
FORMATS = (
    "int3-32",
    "int4-64",
    "int4-32",
    "int8-weights-64",
    "int8-weights",
)
ANY = "int4-32"  # a format to determine which matrices are quantised
SHARES = 1 << 16  # units that the budget is divided into


class FormatChoice(NamedTuple):
    """A candidate format for a weight; None: unquantised."""

    quant: str | None
    bits: float  # of the whole weight, with scales
    loss: float  # estimated increase of the loss, over all samples


def choose(
    source: CheckpointSource,
    samples: Sequence[Sequence[int]],
    folder: Path,
    bits: float,
    progress: Callable[[int], None],
) -> dict[str, str | None]:
    """The format of each matrix, by tensor name in files, with at most `bits` a weight on average.

    The matrices of a fused weight have the same format. The loss of quantising a weight is
    estimated as half of its squared change times its squared gradient: the diagonal Fisher
    approximation.
    """
    sensitivity.write(source, samples, folder)
    leaves: list[tuple[Leaf, list[FormatChoice]]] = []
    for index in range(len(source.config.layers)):
        stored = read_header(sensitivity.gradients_file(folder, index))
        for leaf in source.leaves(index).values():
            if leaf.rounded:
                leaves.append((leaf, format_choices(source, leaf, stored)))
        progress(index + 1)
    count = sum(
        np.prod(source.tensors[source_tensor.name].shape)
        for leaf, _ in leaves
        for source_tensor in leaf.sources
    )
    chosen = best_choices(bits * float(count), [candidates for _, candidates in leaves])
    if chosen is None:
        least_bits = (
            sum(min(candidate.bits for candidate in candidates) for _, candidates in leaves) / count
        )
        raise ModelError(
            f"bits is {bits:g}; the matrices of this model can be {least_bits:.3g} bits a weight "
            "at the least"
        )
    return {
        source.tensors[source_tensor.name].name: candidate.quant
        for (leaf, _), candidate in zip(leaves, chosen, strict=True)
        for source_tensor in leaf.sources
    }


def format_choices(
    source: CheckpointSource, leaf: Leaf, gradients: Mapping[str, Tensor]
) -> list[FormatChoice]:
    """The candidate formats of a weight, with their sizes and losses."""
    dtype = jnp.dtype(source.config.dtype)
    tensors = [source.tensors[source_tensor.name] for source_tensor in leaf.sources]
    values = [tensor.read().astype(dtype).astype(np.float32) for tensor in tensors]
    squares = [gradients[source_tensor.name].read() for source_tensor in leaf.sources]
    size = sum(value.size for value in values)
    candidates = [FormatChoice(None, 8.0 * dtype.itemsize * size, 0.0)]
    for name in FORMATS:
        stored = stored_format(name)
        (group,) = stored.groups
        try:
            layouts = [
                writer_for_format(stored).layout(tensor.name, group, tensor.shape)
                for tensor in tensors
            ]
        except ModelError:  # its group does not divide the inputs
            continue
        bits = sum(
            8.0 * np.dtype(dtypes[0]).itemsize * float(np.prod(shapes[0]))
            for layout in layouts
            for ending, (dtypes, shapes) in layout.items()
            if not ending.endswith("_shape")
        )
        changes = (grid_for_format(name).nearest(value) - value for value in values)
        loss = sum(
            float((square * np.square(change)).sum())
            for square, change in zip(squares, changes, strict=True)
        )
        candidates.append(FormatChoice(name, bits, loss / 2))
    return candidates


def stored_format(name: str) -> StoredFormat:
    """The stored format for matrices in one format."""
    stored = split_quantization(
        {"quantization_config": make_quantization_config("compressed-tensors", name, ())}
    )[1]
    assert stored is not None
    return stored


def best_choices(
    budget: float, candidates_by_weight: Sequence[Sequence[FormatChoice]]
) -> list[FormatChoice] | None:
    """The format choice for each weight with the least total loss within a budget of bits; None if
    none fits.

    A knapsack by dynamic programming: bits are counted in shares of the budget, rounded up.
    """
    best_S = np.zeros(SHARES + 1)  # the least loss with at most s shares
    chosen_WS = np.zeros((len(candidates_by_weight), SHARES + 1), np.int8)
    for number, candidates in enumerate(candidates_by_weight):
        previous_S = best_S
        best_S = np.full(SHARES + 1, np.inf)
        for place, candidate in enumerate(candidates):
            if (cost := math.ceil(candidate.bits / budget * SHARES)) > SHARES:
                continue
            loss_S = previous_S[: SHARES + 1 - cost] + candidate.loss
            better_S = loss_S < best_S[cost:]
            best_S[cost:][better_S] = loss_S[better_S]
            chosen_WS[number, cost:][better_S] = place
    if not np.isfinite(best_S[-1]):
        return None
    remaining = SHARES
    chosen = []
    for candidates, chosen_S in zip(reversed(candidates_by_weight), chosen_WS[::-1], strict=True):
        chosen.append(candidates[chosen_S[remaining]])
        remaining -= math.ceil(chosen[-1].bits / budget * SHARES)
    return chosen[::-1]
