"""The Hopper kernel that sorts (token, expert) pairs into blocks of one expert, by comparing tiles
of pairs, experts and places.

Each program counts the pairs of all experts, because programs cannot wait for each other. Then it
writes some pairs to their places, and marks some places as empty. A place is an index among the
rows of all blocks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.tile import Tiles, along_columns, along_rows
from .blocks import Blocks, max_blocks
from .shape import TILE

PROGRAMS_PER_TILE = 4  # programs that share the scalar writes of a tile


class AlignShape(NamedTuple):
    """The sizes that the kernel is compiled for."""

    pairs: int
    experts: int
    blocks: int
    rows: int  # of a block

    @property
    def places(self) -> int:
        return self.blocks * self.rows

    @property
    def pair_tiles(self) -> int:
        return -(-self.pairs // TILE)

    @property
    def expert_tiles(self) -> int:
        return -(-self.experts // TILE)

    @property
    def place_tiles(self) -> int:
        return -(-self.places // TILE)


class AlignRefs(NamedTuple):
    """The kernel's references. Inputs and results are in global memory, the rest is in shared
    memory.
    """

    experts: Any
    weights: Any
    place_Z: Any
    pair_P: Any
    weight_P: Any
    experts_B: Any
    count: Any
    pair_experts: Any
    smem_weights: Any
    counts: Any  # number of pairs of each expert
    blocks: Any  # number of blocks of each expert
    block_ends: Any  # end of each expert's blocks
    places: Any  # the places of this tile's pairs
    place_experts: Any  # the experts of this tile's places
    is_empty: Any  # whether this tile's places hold no pair
    copy_barrier: Any


def place_pairs(experts_TX, weights_TX, experts: int, rows: int, interpret: Any = None) -> Blocks:
    """See `quire.ops.moe.routing.align`."""
    Z = experts_TX.size
    shape = AlignShape(Z, experts, max_blocks(Z, experts, rows), rows)
    smem_sizes = {
        "pair_experts": (shape.pair_tiles, TILE),
        "counts": (shape.expert_tiles, TILE),
        "blocks": (shape.expert_tiles, TILE),
        "block_ends": (shape.expert_tiles, TILE),
        "places": (TILE,),
        "place_experts": (TILE,),
        "is_empty": (TILE,),
    }
    scratch: dict[str, Any] = {
        name: plgpu.SMEM(size, jnp.int32) for name, size in smem_sizes.items()
    }
    scratch |= {
        "smem_weights": plgpu.SMEM((TILE,), jnp.float32),
        "copy_barrier": plgpu.Barrier(num_arrivals=1),
    }
    ref_names = "experts", "weights", "place_Z", "pair_P", "weight_P", "experts_B", "count"

    def body(*refs) -> None:
        named = dict(zip(ref_names, refs, strict=True))
        tiles = Tiles(interpret is not None)
        pl.run_scoped(lambda **shared: run(shape, tiles, AlignRefs(**named, **shared)), **scratch)

    def result(size: int, dtype: Any = jnp.int32):
        return jax.ShapeDtypeStruct((size,), dtype)

    kernel: Any = pl.kernel(
        body,
        (
            jax.ShapeDtypeStruct((shape.pair_tiles, TILE), jnp.int32),
            result(shape.places),
            result(shape.places, jnp.float32),
            result(shape.blocks),
            result(1),
        ),
        mesh=plgpu.Mesh(
            grid=(max(shape.pair_tiles, shape.place_tiles), PROGRAMS_PER_TILE),
            grid_names=("tile", "part"),
        ),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="align",
    )
    outputs = kernel(
        pad_to_tiles(experts_TX, experts), pad_to_tiles(weights_TX.astype(jnp.float32), 0)
    )
    return Blocks(outputs[0].reshape(-1)[:Z], *outputs[1:])


def pad_to_tiles(x_TX, fill: int):
    """Flatten the pairs and pad them with `fill` to whole tiles."""
    x_Z = x_TX.reshape(-1)
    return jnp.pad(x_Z, (0, -x_Z.size % TILE), constant_values=fill).reshape(-1, TILE)


def run(shape: AlignShape, tiles: Tiles, refs: AlignRefs) -> None:
    """One program."""
    plgpu.copy_gmem_to_smem(refs.experts, refs.pair_experts, refs.copy_barrier)
    plgpu.barrier_wait(refs.copy_barrier)
    for tile in range(shape.expert_tiles):
        count_pairs(shape, tiles, refs, tile)
    plgpu.commit_smem()
    for tile in range(shape.expert_tiles):
        refs.block_ends[tile] = sum_over(
            tiles,
            shape.expert_tiles,
            refs.blocks,
            lambda e_MJ, expert_MJ, blocks_MJ: jnp.where(e_MJ <= expert_MJ, blocks_MJ, 0),
            tile * TILE + tile_range(tiles),
        )
    plgpu.commit_smem()
    tile = lax.axis_index("tile")
    program = lax.axis_index("part")

    @pl.when((tile == 0) & (program == 0))
    def _():
        refs.count[0] = refs.block_ends[shape.expert_tiles - 1, TILE - 1]

    @pl.when(tile < shape.pair_tiles)
    def _():
        place_tile_pairs(shape, tiles, refs, tile, program)

    @pl.when(tile < shape.place_tiles)
    def _():
        describe_tile_places(shape, tiles, refs, tile, program)


def count_pairs(shape: AlignShape, tiles: Tiles, refs: AlignRefs, tile: int) -> None:
    """Count the pairs and blocks of a tile of experts."""
    expert_M = tile * TILE + tile_range(tiles)

    def is_of_expert(_, expert_MJ, pair_expert_MJ):
        return jnp.where(pair_expert_MJ == expert_MJ, 1, 0)

    count_M = sum_over(tiles, shape.pair_tiles, refs.pair_experts, is_of_expert, expert_M)
    # the number past the last expert marks pairs without an expert
    count_M = jnp.where(expert_M < shape.experts, count_M, 0)
    refs.counts[tile] = count_M
    refs.blocks[tile] = lax.div(count_M + (shape.rows - 1), jnp.int32(shape.rows))


def place_tile_pairs(shape: AlignShape, tiles: Tiles, refs: AlignRefs, tile, program) -> None:
    """Compute the places of a tile of pairs, and write these pairs to their places."""
    plgpu.copy_gmem_to_smem(refs.weights.at[tile], refs.smem_weights, refs.copy_barrier)
    plgpu.barrier_wait(refs.copy_barrier)
    expert_M = tiles.load_rows(refs.pair_experts.at[tile])
    pair_M = tile * TILE + tile_range(tiles)
    tile_shape = pair_M.shape[0], TILE

    def earlier(z_MJ, expert_MJ, other_expert_MJ):
        return jnp.where(
            (other_expert_MJ == expert_MJ) & (z_MJ < along_rows(pair_M, tile_shape)), 1, 0
        )

    def before(e_MJ, expert_MJ, blocks_MJ):
        return jnp.where(e_MJ < expert_MJ, blocks_MJ, 0)

    rank_M = sum_over(tiles, tile + 1, refs.pair_experts, earlier, expert_M)
    first_M = sum_over(tiles, shape.expert_tiles, refs.blocks, before, expert_M)
    place_M = jnp.where(
        expert_M < shape.experts, first_M * shape.rows + rank_M, shape.places + pair_M
    )
    refs.places[...] = place_M
    plgpu.commit_smem()

    @pl.when(program == 0)
    def _():
        plgpu.copy_smem_to_gmem(refs.places, refs.place_Z.at[tile])
        plgpu.wait_smem_to_gmem(0)

    def write_pair(step, _):
        index = program * (TILE // PROGRAMS_PER_TILE) + step
        place = refs.places[index]

        @pl.when(place < shape.places)
        def _():
            refs.pair_P[place] = tile * TILE + index
            refs.weight_P[place] = refs.smem_weights[index]

    lax.fori_loop(0, TILE // PROGRAMS_PER_TILE, write_pair, None)


def describe_tile_places(shape: AlignShape, tiles: Tiles, refs: AlignRefs, tile, program) -> None:
    """Write the experts of the blocks in a tile of places, and mark its empty places."""
    place_M = tile * TILE + tile_range(tiles)
    block_M = lax.div(place_M, jnp.int32(shape.rows))

    def has_ended(_, block_MJ, end_MJ):
        return jnp.where(end_MJ <= block_MJ, 1, 0)

    expert_M = sum_over(tiles, shape.expert_tiles, refs.block_ends, has_ended, block_M)

    def count_of_expert(e_MJ, expert_MJ, counts_MJ):
        return jnp.where(e_MJ == expert_MJ, counts_MJ, 0)

    def before(e_MJ, expert_MJ, blocks_MJ):
        return jnp.where(e_MJ < expert_MJ, blocks_MJ, 0)

    count_M = sum_over(tiles, shape.expert_tiles, refs.counts, count_of_expert, expert_M)
    first_M = sum_over(tiles, shape.expert_tiles, refs.blocks, before, expert_M)
    refs.place_experts[...] = jnp.minimum(expert_M, shape.experts - 1)
    refs.is_empty[...] = jnp.where(place_M - first_M * shape.rows < count_M, 0, 1)
    plgpu.commit_smem()

    def write_place(step, _):
        index = program * (TILE // PROGRAMS_PER_TILE) + step
        place = tile * TILE + index

        @pl.when((place < shape.places) & (refs.is_empty[index] != 0))
        def _():
            refs.pair_P[place] = jnp.int32(shape.pairs)
            refs.weight_P[place] = jnp.float32(0)

        @pl.when((place < shape.places) & (lax.rem(place, jnp.int32(shape.rows)) == 0))
        def _():
            refs.experts_B[lax.div(place, jnp.int32(shape.rows))] = refs.place_experts[index]

    lax.fori_loop(0, TILE // PROGRAMS_PER_TILE, write_place, None)


def tile_range(tiles: Tiles):
    """0, 1, ... for the rows of a tile."""
    return tiles.index((TILE,), 0, plgpu.Layout.WGMMA.reduce(1))


def sum_over(tiles: Tiles, count, ref, term, row_value_M):
    """For each row, the sum of `term(index, row_value, value)` over the values in the first `count`
    tiles of `ref`.
    """
    shape = TILE, TILE

    def add(tile, sum_M):
        index_MJ = tile * TILE + tiles.index(shape, 1)
        value_MJ = along_columns(tiles.load_columns(ref.at[tile]), shape)
        return sum_M + jnp.sum(term(index_MJ, along_rows(row_value_M, shape), value_MJ), axis=1)

    return lax.fori_loop(0, count, add, tile_range(tiles) * 0)
