"""The kernel that finds where pairs lie in blocks of one expert: by comparing tiles of pairs,
experts and places.

Each program counts the pairs of all experts for itself, since programs cannot wait for each other.
Then it puts some pairs into their places, and says of some places what they hold.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...gpu.tile import Tiles, along_columns, along_rows
from .blocks import Blocks, most_blocks
from .shape import TILE

PARTS = 4  # programs that share what is written of a tile, number by number


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


class Refs(NamedTuple):
    """References: of all pairs and results in the card's memory, and of what a program knows in
    shared memory.
    """

    experts: Any
    weights: Any
    place_Z: Any
    pair_P: Any
    weight_P: Any
    experts_B: Any
    count: Any
    whose: Any
    own_weights: Any
    counts: Any  # of each expert's pairs
    blocks: Any  # of each expert
    last: Any  # where its blocks end
    places: Any  # of this program's pairs
    holder: Any  # whose this program's places are
    empty: Any  # which of them are
    here: Any


def place(experts_TX, weights_TX, experts: int, rows: int, interpret: Any = None) -> Blocks:
    """See `quire.ops.moe.routing.align`."""
    Z = experts_TX.size
    shape = AlignShape(Z, experts, most_blocks(Z, experts, rows), rows)
    integers = {
        "whose": (shape.pair_tiles, TILE),
        "counts": (shape.expert_tiles, TILE),
        "blocks": (shape.expert_tiles, TILE),
        "last": (shape.expert_tiles, TILE),
        "places": (TILE,),
        "holder": (TILE,),
        "empty": (TILE,),
    }
    scratch: dict[str, Any] = {name: plgpu.SMEM(size, jnp.int32) for name, size in integers.items()}
    scratch |= {
        "own_weights": plgpu.SMEM((TILE,), jnp.float32),
        "here": plgpu.Barrier(num_arrivals=1),
    }
    names = "experts", "weights", "place_Z", "pair_P", "weight_P", "experts_B", "count"

    def body(*refs) -> None:
        named = dict(zip(names, refs, strict=True))
        tiles = Tiles(interpret is not None)
        pl.run_scoped(lambda **shared: run(shape, tiles, Refs(**named, **shared)), **scratch)

    def result(size: int, dtype: Any = jnp.int32):
        return jax.ShapeDtypeStruct((size,), dtype)

    found: Any = pl.kernel(
        body,
        (
            jax.ShapeDtypeStruct((shape.pair_tiles, TILE), jnp.int32),
            result(shape.places),
            result(shape.places, jnp.float32),
            result(shape.blocks),
            result(1),
        ),
        mesh=plgpu.Mesh(
            grid=(max(shape.pair_tiles, shape.place_tiles), PARTS), grid_names=("tile", "part")
        ),
        compiler_params=plgpu.CompilerParams(),
        interpret=False if interpret is None else interpret,
        name="align",
    )(tiled(experts_TX, experts), tiled(weights_TX.astype(jnp.float32), 0))
    return Blocks(found[0].reshape(-1)[:Z], *found[1:])


def tiled(x_TX, beyond: int):
    """The pairs in whole tiles, filled up with pairs of no expert."""
    x_Z = x_TX.reshape(-1)
    return jnp.pad(x_Z, (0, -x_Z.size % TILE), constant_values=beyond).reshape(-1, TILE)


def run(shape: AlignShape, tiles: Tiles, refs: Refs) -> None:
    """What one program does."""
    plgpu.copy_gmem_to_smem(refs.experts, refs.whose, refs.here)
    plgpu.barrier_wait(refs.here)
    for tile in range(shape.expert_tiles):
        count(shape, tiles, refs, tile)
    plgpu.commit_smem()
    for tile in range(shape.expert_tiles):
        refs.last[tile] = sum_over(
            tiles,
            shape.expert_tiles,
            refs.blocks,
            lambda e_MJ, mine_MJ, blocks_MJ: jnp.where(e_MJ <= mine_MJ, blocks_MJ, 0),
            tile * TILE + numbers(tiles),
        )
    plgpu.commit_smem()
    tile = lax.axis_index("tile")
    part = lax.axis_index("part")

    @pl.when((tile == 0) & (part == 0))
    def _():
        refs.count[0] = refs.last[shape.expert_tiles - 1, TILE - 1]

    @pl.when(tile < shape.pair_tiles)
    def _():
        put_pairs(shape, tiles, refs, tile, part)

    @pl.when(tile < shape.place_tiles)
    def _():
        describe_places(shape, tiles, refs, tile, part)


def count(shape: AlignShape, tiles: Tiles, refs: Refs, tile: int) -> None:
    """The pairs and blocks of a tile of experts."""
    mine_M = tile * TILE + numbers(tiles)

    def of_expert(_, mine_MJ, whose_MJ):
        return jnp.where(whose_MJ == mine_MJ, 1, 0)

    count_M = sum_over(tiles, shape.pair_tiles, refs.whose, of_expert, mine_M)
    # pairs without an expert have its number
    count_M = jnp.where(mine_M < shape.experts, count_M, 0)
    refs.counts[tile] = count_M
    refs.blocks[tile] = lax.div(count_M + (shape.rows - 1), jnp.int32(shape.rows))


def put_pairs(shape: AlignShape, tiles: Tiles, refs: Refs, tile, part) -> None:
    """The places of a tile of pairs, each of which says who is there."""
    plgpu.copy_gmem_to_smem(refs.weights.at[tile], refs.own_weights, refs.here)
    plgpu.barrier_wait(refs.here)
    whose_M = tiles.load_rows(refs.whose.at[tile])
    pair_M = tile * TILE + numbers(tiles)
    shown = pair_M.shape[0], TILE

    def earlier(z_MJ, mine_MJ, whose_MJ):
        return jnp.where((whose_MJ == mine_MJ) & (z_MJ < along_rows(pair_M, shown)), 1, 0)

    def before(e_MJ, mine_MJ, blocks_MJ):
        return jnp.where(e_MJ < mine_MJ, blocks_MJ, 0)

    rank_M = sum_over(tiles, tile + 1, refs.whose, earlier, whose_M)
    first_M = sum_over(tiles, shape.expert_tiles, refs.blocks, before, whose_M)
    place_M = jnp.where(
        whose_M < shape.experts, first_M * shape.rows + rank_M, shape.places + pair_M
    )
    refs.places[...] = place_M
    plgpu.commit_smem()

    @pl.when(part == 0)
    def _():
        plgpu.copy_smem_to_gmem(refs.places, refs.place_Z.at[tile])
        plgpu.wait_smem_to_gmem(0)

    def put(n, _):
        mine = part * (TILE // PARTS) + n
        place = refs.places[mine]

        @pl.when(place < shape.places)
        def _():
            refs.pair_P[place] = tile * TILE + mine
            refs.weight_P[place] = refs.own_weights[mine]

    lax.fori_loop(0, TILE // PARTS, put, None)


def describe_places(shape: AlignShape, tiles: Tiles, refs: Refs, tile, part) -> None:
    """Whose the blocks of a tile of places are, and which of these no pair has."""
    place_M = tile * TILE + numbers(tiles)
    block_M = lax.div(place_M, jnp.int32(shape.rows))

    def done(_, block_MJ, last_MJ):
        return jnp.where(last_MJ <= block_MJ, 1, 0)

    holder_M = sum_over(tiles, shape.expert_tiles, refs.last, done, block_M)

    def own(e_MJ, holder_MJ, counts_MJ):
        return jnp.where(e_MJ == holder_MJ, counts_MJ, 0)

    def before(e_MJ, holder_MJ, blocks_MJ):
        return jnp.where(e_MJ < holder_MJ, blocks_MJ, 0)

    count_M = sum_over(tiles, shape.expert_tiles, refs.counts, own, holder_M)
    first_M = sum_over(tiles, shape.expert_tiles, refs.blocks, before, holder_M)
    refs.holder[...] = jnp.minimum(holder_M, shape.experts - 1)
    refs.empty[...] = jnp.where(place_M - first_M * shape.rows < count_M, 0, 1)
    plgpu.commit_smem()

    def describe(n, _):
        mine = part * (TILE // PARTS) + n
        place = tile * TILE + mine

        @pl.when((place < shape.places) & (refs.empty[mine] != 0))
        def _():
            refs.pair_P[place] = jnp.int32(shape.pairs)
            refs.weight_P[place] = jnp.float32(0)

        @pl.when((place < shape.places) & (lax.rem(place, jnp.int32(shape.rows)) == 0))
        def _():
            refs.experts_B[lax.div(place, jnp.int32(shape.rows))] = refs.holder[mine]

    lax.fori_loop(0, TILE // PARTS, describe, None)


def numbers(tiles: Tiles):
    """0, 1, ... of a tile's rows."""
    return tiles.index((TILE,), 0, plgpu.Layout.WGMMA.reduce(1))


def sum_over(tiles: Tiles, count, ref, term, mine_M):
    """For each row the sum of `term(number, mine, value)` over the values of so many tiles of
    `ref`.
    """
    shape = TILE, TILE

    def add(tile, sum_M):
        number_MJ = tile * TILE + tiles.index(shape, 1)
        value_MJ = along_columns(tiles.load_columns(ref.at[tile]), shape)
        return sum_M + jnp.sum(term(number_MJ, along_rows(mine_M, shape), value_MJ), axis=1)

    return lax.fori_loop(0, count, add, numbers(tiles) * 0)
