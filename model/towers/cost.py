"""Multiplications of a vision tower, counted from its shapes."""

from typing import Any

import jax

from ..planning.cost import score_width
from .config import Tower
from .weights import TowerWeights, abstract


def matrix_size(specs: Any) -> int:
    """The number of elements of all matrices."""
    return sum(spec.size for spec in jax.tree.leaves(specs) if spec.init == "normal")


def entry_products(tower: Tower) -> int:
    """Multiplications for a patch before the first layer."""
    return tower.patch_values * tower.model.dim


def layer_products(
    tower: Tower, specs: TowerWeights, index: int, num_patches: int
) -> tuple[int, int]:
    """Multiplications for one of an image's patches in a layer: up to its heads, and after that."""
    layer = specs.layers[index]
    heads = matrix_size(layer.attention.qkv_DGH)
    others = matrix_size(layer) - heads
    return heads, others + score_width(tower.model.layers[index]) * num_patches


def image_operations(tower: Tower, num_patches: int) -> int:
    """Multiplications and additions for an image."""
    specs = abstract(tower)
    layers = sum(
        sum(layer_products(tower, specs, index, num_patches))
        for index in range(len(tower.model.layers))
    )
    mergers = matrix_size((specs.merger, specs.deepstack))
    num_rows = num_patches // tower.group
    return 2 * (num_patches * (entry_products(tower) + layers) + num_rows * mergers)
