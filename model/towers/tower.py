"""A vision tower's forward functions."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...ops.activation import ACTIVATIONS
from ...ops.linear import project
from ...ops.residual import norm_alone
from ...sharding import struct
from .. import decoder
from ..mixers import LayerHooks
from .config import Merger, Tower
from .weights import MergerWeights, TowerWeights


class Patches(struct.PyTreeNode):
    """The patches of some images, one image after the other, with padding at the end."""

    pixels_TV: Any  # uint8 [T, patch * patch * 3]
    positions_T: Any  # within the image; -1 for padding
    sees_T: Any  # the last position of the image; -1 for padding
    starts_B1: Any  # image b has the patches starts[b] to starts[b + 1]
    axis_positions_AT: Any  # row and column
    table_rows_TN: Any  # rows of the table of learned positions, which are added up
    table_weights_TN: Any


def patches_of(
    tower: Tower, images: Sequence[tuple[np.ndarray, int, int]], size: int, max_images: int
) -> Patches:
    """Lay out images for the tower.

    Args:
        tower: The tower.
        images: For each its patches (uint8 [rows * columns, ...]), rows and columns.
        size: Number of patches with padding.
        max_images: Length of the batch of images with padding.
    """
    patches = Patches(
        np.zeros((size, tower.patch_values), np.uint8),
        np.full(size, -1, np.int32),
        np.full(size, -1, np.int32),
        np.zeros(max_images + 1, np.int32),
        np.zeros((2, size), np.int32),
        np.zeros((size, 4), np.int32),
        np.zeros((size, 4), np.float32),
    )
    start = 0
    for number, (pixels, rows, columns) in enumerate(images):
        stop = start + rows * columns
        row_T, column_T = grid_positions(rows, columns, tower.merge)
        patches.pixels_TV[start:stop] = pixels.reshape(rows * columns, -1)
        patches.positions_T[start:stop] = np.arange(rows * columns)
        patches.sees_T[start:stop] = rows * columns - 1
        patches.axis_positions_AT[:, start:stop] = row_T, column_T
        if tower.positions_side:
            table_rows_TN, table_weights_TN = interpolation(
                row_T, column_T, rows, columns, tower.positions_side
            )
            patches.table_rows_TN[start:stop] = table_rows_TN
            patches.table_weights_TN[start:stop] = table_weights_TN
        if tower.positions_per_axis:
            patches.table_rows_TN[start:stop, 0] = row_T
            patches.table_rows_TN[start:stop, 1] = tower.positions_per_axis + column_T
            patches.table_weights_TN[start:stop, :2] = 1
        patches.starts_B1[number + 1 :] = stop
        start = stop
    return patches


def grid_positions(rows: int, columns: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """The row and the column of each patch, in the order in which the merger joins patches."""
    grouped = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    order = grouped.swapaxes(1, 2).reshape(-1)
    return order // columns, order % columns


def interpolation(
    row_T: np.ndarray, column_T: np.ndarray, rows: int, columns: int, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bilinear interpolation of a square table, corners on corners: rows of the table [T, 4] and
    their weights, float32 [T, 4].
    """
    row_taps, row_weights = axis_interpolation(row_T, rows, side)
    column_taps, column_weights = axis_interpolation(column_T, columns, side)
    taps = row_taps[:, :, None] * side + column_taps[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return taps.reshape(-1, 4), weights.reshape(-1, 4)


def axis_interpolation(index_T: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The two neighbours of each position along one axis, and their weights in float32."""
    position_T = index_T.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor_T = np.floor(position_T)
    taps = np.minimum(floor_T.astype(np.int32)[:, None] + np.arange(2), side - 1)
    distance = np.abs(position_T[:, None] - floor_T[:, None] - np.arange(2, dtype=np.float32))
    return taps, np.maximum(1 - distance, 0)


def enter(tower: Tower, weights: TowerWeights, values_IC, patches: Patches):
    """The first layer's input x_TD. `values_IC` is the float of each byte, for each channel."""
    dtype = jnp.dtype(tower.model.dtype)
    with jax.named_scope("patches"):
        bytes_TPC = patches.pixels_TV.astype(jnp.int32).reshape(len(patches.pixels_TV), -1, 3)
        pixels_TV = jnp.asarray(values_IC)[bytes_TPC, jnp.arange(3)].reshape(
            patches.pixels_TV.shape
        )
        if tower.centres_pixels:
            pixels_TV = 2 * (pixels_TV - 0.5)
        x_TD = project("TV,VD->TD", pixels_TV.astype(dtype), weights.patch_VD, weights.patch_bias_D)
        if tower.positions_side or tower.positions_per_axis:
            entries_TND = weights.position_embed_PD[patches.table_rows_TN].astype(jnp.float32)
            position_TD = jnp.zeros_like(entries_TND[:, 0])
            for n in range(entries_TND.shape[1]):
                position_TD += entries_TND[:, n] * patches.table_weights_TN[:, n, None]
            x_TD = x_TD + position_TD.astype(dtype)
        if tower.entry_norm:
            x_TD = norm_alone(x_TD, weights.entry_norm, tower.model.norm_eps)
        return jnp.where(patches.positions_T[:, None] >= 0, x_TD, 0)


def run_layer(
    tower: Tower,
    weights: TowerWeights,
    index: int,
    x_TD,
    patches: Patches,
    hooks: LayerHooks,
    cache: Any = None,
):
    """The output of a layer, and the cache of the hooks."""
    (x_TD, _), cache = decoder.run_layers(
        weights.layers[index : index + 1],
        index,
        (x_TD, None),
        cache,
        patches.positions_T,
        tower.model,
        hooks,
        axis_positions_AT=patches.axis_positions_AT,
    )
    return x_TD, cache


def leave(tower: Tower, weights: TowerWeights, x_TD):
    """The output of the last layer as the merger reads it."""
    return norm_alone(x_TD, weights.exit_norm, tower.model.norm_eps) if tower.exit_norm else x_TD


def merge(tower: Tower, merger: Merger, w: MergerWeights, x_TD):
    """Join the patches of each group: [T, D] to [T / group, out]."""
    eps = merger.norm_eps
    with jax.named_scope("merger"):
        if not merger.joins_first:
            x_TD = norm_alone(x_TD, w.norm, eps)
        joined_RE = (
            pool_patches(x_TD, tower.group, merger, w)
            if merger.pools
            else x_TD.reshape(-1, tower.group * x_TD.shape[1])
        )
        if merger.joins_first:
            joined_RE = norm_alone(joined_RE, w.norm, eps)
        if merger.joined_dim:
            joined_RE = project("RJ,JE->RE", joined_RE, w.join_JE)
        hidden_RF = joined_RE
        if merger.dim:
            hidden_RF = project("RE,EF->RF", joined_RE, w.up_EF, w.up_bias_F)
            hidden_RF = ACTIVATIONS[merger.activation](hidden_RF)
        return project("RF,FD->RD", hidden_RF, w.down_FD, w.down_bias_D)


def pool_patches(x_TD, group: int, merger: Merger, w: MergerWeights):
    """The mean of the patches of each group, scaled and standardised."""
    # added one after the other, so that the order does not depend on the number of rows
    x_RGD = x_TD.reshape(-1, group, x_TD.shape[1]).astype(jnp.float32)
    sum_RD = x_RGD[:, 0]
    for index in range(1, group):
        sum_RD = sum_RD + x_RGD[:, index]
    mean_RD = (sum_RD / group).astype(x_TD.dtype)
    scaled_RD = mean_RD.astype(jnp.float32) * merger.pool_scale
    if merger.standardizes:
        scaled_RD = (scaled_RD - w.bias_D) * w.scale_D
    return scaled_RD.astype(x_TD.dtype)


def encode(tower: Tower, weights: TowerWeights, values_IC, patches: Patches, hooks: LayerHooks):
    """The rows of all groups of patches, [T / group, 1 + len(tower.deepstack), out]: the embedding
    first, then what is added after the decoder's first layers.
    """
    x_TD = enter(tower, weights, values_IC, patches)
    features = []
    for index in range(len(tower.model.layers)):
        x_TD, _ = run_layer(tower, weights, index, x_TD, patches, hooks)
        if index in tower.deepstack:
            merger_weights = weights.deepstack[tower.deepstack.index(index)]
            assert tower.deepstack_merger is not None
            features.append(merge(tower, tower.deepstack_merger, merger_weights, x_TD))
    x_TD = leave(tower, weights, x_TD)
    return jnp.stack([merge(tower, tower.merger, weights.merger, x_TD), *features], axis=1)
