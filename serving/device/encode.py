"""The programs of a vision tower: from patches to rows of the device's media store."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...model.config import Attention
from ...model.mixers import LayerHooks
from ...model.towers import cost
from ...model.towers.config import Merger, Tower
from ...model.towers.tower import Patches, enter, leave, merge, patches_of, run_layer
from ...model.towers.weights import TowerWeights, abstract
from ...ops.attention import KVPages, QueryRows, new_arrivals, page_dtype, paged_attention
from ...ops.attention.backend import AttentionParams
from ...sharding import struct
from ...sharding.struct import Leaf
from ..request.media import MediaItem
from .attend import tables_within
from .host_snapshot import to_device, to_host
from .media_rows import bits_of, from_bits
from .programs import Call, Compiler

# Images are padded to one of these numbers of patches.
SIZES = {"cpu": (256, 512, 1024, 2048, 4096), "gpu": (1024, 4096, 16384)}
# Patches whose rows of a layer one program computes.
BLOCK = {"cpu": 64, "gpu": 16384}
# A part of an encoding takes at most this share of a decode step's time, or is one block.
PART_OF_STEP = 0.75


class Heads(struct.PyTreeNode):
    """The queries, keys and values of a layer for all patches, as their bits."""

    q_TNH: Any
    k_TKH: Any
    v_TKH: Any


class Buffers(struct.PyTreeNode):
    """What an encoding has computed: of all patches, as bits, see `bits_of`."""

    x_TD: Any  # the input of a layer
    out_TD: Any  # its output
    heads: Heads
    merged_RED: Any  # rows of the store


@partial(jax.jit, static_argnames=("tower", "size"))
def empty_buffers(tower: Tower, size: int) -> Buffers:
    dtype = page_dtype(jnp.dtype(tower.model.dtype))
    attention = tower.model.layers[0].attention
    assert isinstance(attention, Attention)
    N, K, H = attention.heads, attention.kv_heads, attention.head_dim
    heads = [jnp.zeros((size, count, H), dtype) for count in (N, K, K)]
    x_TD = jnp.zeros((size, tower.model.dim), dtype)
    rows_shape = size // tower.group, 1 + len(tower.deepstack), tower.merger.out
    return Buffers(x_TD, x_TD, Heads(*heads), jnp.zeros(rows_shape, dtype))


@partial(jax.jit, static_argnames=("tower", "block"), donate_argnames="x_TD")
def enter_block(weights: TowerWeights, x_TD, values_IC, patches, start, tower: Tower, block: int):
    """Write the first layer's input for `block` patches from `start` on.

    `weights` have no layers and mergers.
    """
    entered_RD = enter(tower, weights, values_IC, block_of(patches, start, block))
    return put_rows(x_TD, bits_of(entered_RD), start)


@partial(jax.jit, static_argnames=("tower", "block"), donate_argnames="heads")
def project_block(
    weights: TowerWeights, x_TD, heads: Heads, patches, start, tower: Tower, block: int
):
    """The first half of a layer for a block: queries, keys and values.

    `weights` hold one layer; as all are alike they share this program.
    """

    def attend(index, q_RNH, k_RKH, v_RKH, heads: Heads, params: AttentionParams, sinks_N=None):
        new = Heads(bits_of(q_RNH), bits_of(k_RKH), bits_of(v_RKH))
        return q_RNH, jax.tree.map(partial(put_rows, start=start), heads, new)

    # nothing reads the layer's output, so that the compiler drops what comes after `attend`
    _, heads = layer_of_block(
        weights, x_TD, patches, start, tower, block, LayerHooks(attend), heads
    )
    return heads


@partial(jax.jit, static_argnames=("tower", "block"), donate_argnames="out_TD")
def finish_block(
    weights: TowerWeights, x_TD, out_TD, heads: Heads, patches, start, tower: Tower, block: int
):
    """The second half of a layer for a block: all that follows its queries, keys and values."""
    rows = block_of(patches, start, block)
    query_rows = QueryRows(
        rows.positions_T,
        rows.starts_B1,
        tables_within(patches.starts_B1, len(x_TD), len(x_TD)),
        jnp.zeros(block, jnp.int32),
        new_arrivals(),
        rows.sees_T,
    )

    def attend(index, q_RNH, k_RKH, v_RKH, cache, params: AttentionParams, sinks_N=None):
        pages = KVPages(heads.k_TKH[:, None], heads.v_TKH[:, None])
        params = replace(params, lookahead=0, spans=True)
        q_RNH = from_bits(rows_from(heads.q_TNH, start, block), q_RNH.dtype)
        return paged_attention(q_RNH, None, None, pages, query_rows, params, sinks_N)[0], cache

    x_RD, _ = layer_of_block(weights, x_TD, patches, start, tower, block, LayerHooks(attend))
    return put_rows(out_TD, bits_of(x_RD), start)


@partial(jax.jit, static_argnames=("tower", "merger", "block"), donate_argnames="merged_RED")
def merge_block(
    weights: TowerWeights, merged_RED, x_TD, start, column, tower: Tower, merger: Merger, block: int
):
    """Merge the patches of `block` rows from `start` on into a column.

    `weights` have this merger alone, and the norm after the last layer if the merger follows it.
    """
    group = tower.group
    x_TD = from_bits(rows_from(x_TD, start * group, block * group), jnp.dtype(tower.model.dtype))
    if weights.exit_norm is not None:
        x_TD = leave(tower, weights, x_TD)
    rows_RD = bits_of(merge(tower, merger, weights.merger, x_TD))
    return jax.lax.dynamic_update_slice(merged_RED, rows_RD[:, None], (start, column, 0))


@partial(jax.jit, donate_argnames="media_RED")
def write_rows(media_RED, merged_RED, rows_R):
    """Write merged rows to the store; rows past its end are padding."""
    return media_RED.at[rows_R].set(merged_RED, mode="drop")


def layer_of_block(weights, x_TD, patches: Patches, start, tower, block: int, hooks, cache=None):
    """`run_layer` for `block` patches from `start` on."""
    x_RD = from_bits(rows_from(x_TD, start, block), jnp.dtype(tower.model.dtype))
    return run_layer(tower, weights, 0, x_RD, block_of(patches, start, block), hooks, cache)


def block_of(patches: Patches, start, block: int) -> Patches:
    """`block` patches from `start` on."""
    take = partial(rows_from, start=start, block=block)
    return Patches(
        take(patches.pixels_TV),
        take(patches.positions_T),
        take(patches.sees_T),
        jnp.clip(patches.starts_B1 - start, 0, block),
        jax.vmap(take)(patches.axis_positions_AT),
        take(patches.table_rows_TN),
        take(patches.table_weights_TN),
    )


def rows_from(x_T, start, block: int):
    return jax.lax.dynamic_slice_in_dim(x_T, start, block)


def put_rows(x_T, new_R, start):
    return jax.lax.dynamic_update_slice_in_dim(x_T, new_R, start, 0)


def backend() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


class EncoderPrograms(NamedTuple):
    """The programs for one number of patches: compiled, or their calls."""

    empty: Any
    enter: Any
    project: Any
    finish: Any
    merge: Any
    merge_deepstack: Any  # None without a deepstack
    write: Any


class Block(NamedTuple):
    """What one program computes."""

    products: int  # multiplications
    run: Callable[[], None]


class MediaEncoder:
    """Owns a tower's weights and programs.

    An image is encoded alone, at the smallest size that holds it, so that its rows depend on its
    patches alone.

    Args:
        tower: The tower.
        values_IC: The float of each byte, for each channel.
        load_weights: Reads the weights.
        num_rows: Rows of the device's media store.
        max_rows: Rows of an image at most.
        has_one_size: All images have `max_rows`.
    """

    def __init__(
        self,
        tower: Tower,
        values_IC: np.ndarray,
        load_weights: Callable[[], TowerWeights],
        num_rows: int,
        max_rows: int,
        has_one_size: bool = False,
    ):
        self.tower = tower
        self.values_IC = values_IC
        self.load_weights = load_weights
        self.weights: Any = load_weights()
        self.specs = abstract(tower)
        self.num_rows = num_rows
        self.max_rows = max_rows
        max_patches = max_rows * tower.group
        smaller = () if has_one_size else SIZES[backend()]
        self.sizes = (*(size for size in smaller if size < max_patches), max_patches)
        self.products_per_second = 0.0  # measured when the programs are compiled
        self.programs: dict[int, EncoderPrograms] = {}
        self.shardings: Any = None  # of the weights, while the engine sleeps

    def empty_store(self) -> Leaf:
        """The store [rows, 1 + deepstack, D]."""
        shape = self.num_rows, 1 + len(self.tower.deepstack), self.tower.merger.out
        return jnp.zeros(shape, page_dtype(jnp.dtype(self.tower.model.dtype)))

    def warm_up(self, compiler: Compiler, media_RED: Any) -> Callable[[], None]:
        """Start compiling all programs; the result waits for them."""
        programs_by_size = {
            size: [call and compiler.make(call) for call in self.calls(size, media_RED)]
            for size in self.sizes
        }

        def finish() -> None:
            self.programs = {
                size: EncoderPrograms(*(program and program.result() for program in programs))
                for size, programs in programs_by_size.items()
            }
            self.products_per_second = self.measure()

        return finish

    def measure(self) -> float:
        """Encode some patches; returns the multiplications in a second."""
        merge = self.tower.merge
        columns = merge * self.merged_rows(self.sizes[0])
        grey = np.full((merge * columns, self.tower.patch_values), 99, np.uint8)
        fastest = 0.0
        for _ in range(5):
            encoding = Encoding(self, MediaItem(0, grey, merge, columns, 0), [])
            encoding.run_block()
            encoding.wait()
            began = perf_counter()
            products = encoding.run_block() + encoding.run_block()  # a layer
            encoding.wait()
            fastest = max(fastest, products / (perf_counter() - began))
        return fastest

    def calls(self, size: int, media_RED: Any) -> EncoderPrograms:
        """The calls that are compiled for a size."""
        tower = self.tower
        patches = patches_of(tower, [], size, 1)
        buffers = jax.eval_shape(partial(empty_buffers, tower, size))
        start = np.int32(0)
        block = {"tower": tower, "block": self.block(size)}
        layer = self.layer_weights(0)

        def merge_call(merger: Merger, column: int) -> Call:
            args = self.merger_weights(column), buffers.merged_RED, buffers.x_TD, start, start
            rows = self.merged_rows(size)
            return Call(merge_block, args, tower=tower, merger=merger, block=rows)

        return EncoderPrograms(
            Call(empty_buffers, (), tower=tower, size=size),
            Call(
                enter_block,
                (self.entry_weights(), buffers.x_TD, self.values_IC, patches, start),
                **block,
            ),
            Call(project_block, (layer, buffers.x_TD, buffers.heads, patches, start), **block),
            Call(
                finish_block,
                (layer, buffers.x_TD, buffers.out_TD, buffers.heads, patches, start),
                **block,
            ),
            merge_call(tower.merger, 0),
            merge_call(tower.deepstack_merger, 1) if tower.deepstack_merger is not None else None,
            Call(
                write_rows,
                (media_RED, buffers.merged_RED, np.zeros(len(buffers.merged_RED), np.int32)),
            ),
        )

    def block(self, size: int) -> int:
        """Patches of a block."""
        return min(size, BLOCK[backend()])

    def merged_rows(self, size: int) -> int:
        """Rows of a block of the merger."""
        return max(1, self.block(size) // self.tower.group)

    @property
    def num_layers(self) -> int:
        return len(self.tower.model.layers)

    def entry_weights(self) -> TowerWeights:
        return self.weights.replace(layers=(), merger=None, deepstack=())

    def layer_weights(self, index: int) -> TowerWeights:
        return TowerWeights(None, None, (self.weights.layers[index],), None)

    def merger_weights(self, column: int) -> TowerWeights:
        """Of the merger that writes to a column of the store."""
        weights = self.weights
        if column:
            return TowerWeights(None, None, (), weights.deepstack[column - 1])
        return TowerWeights(None, None, (), weights.merger, exit_norm=weights.exit_norm)

    def merge_products(self, column: int) -> int:
        """Multiplications for a row of the merger that writes to a column."""
        return cost.matrix_size(self.specs.deepstack[column - 1] if column else self.specs.merger)

    def sleep(self, keep_weights: bool) -> None:
        """Free the device's memory; kept weights go to host memory."""
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, self.weights)
        self.weights = to_host(self.weights, keep_weights)

    def wake_up(self) -> None:
        """Restore the weights, or load them again."""
        if self.weights is None:
            self.weights = self.load_weights()
        else:
            self.weights = jax.tree.map(to_device, self.weights, self.shardings)


class Encoding:
    """An item on its way through the tower, in parts that steps of other requests come between.

    Args:
        encoder: The encoder.
        item: The item.
        store_rows: Where its rows go.
    """

    def __init__(self, encoder: MediaEncoder, item: MediaItem, store_rows: list[int]):
        tower = encoder.tower
        self.encoder = encoder
        self.num_patches = item.rows * item.columns
        self.size = next(size for size in encoder.sizes if size >= self.num_patches)
        self.programs = encoder.programs[self.size]
        image = item.patches, item.rows, item.columns
        self.patches = jax.device_put(patches_of(tower, [image], self.size, 1))
        self.rows_R = np.full(self.size // tower.group, encoder.num_rows, np.int32)
        self.rows_R[: len(store_rows)] = store_rows
        self.buffers: Buffers = self.programs.empty()
        self.blocks = self.all_blocks()
        self.next_block = next(self.blocks, None)

    @property
    def is_done(self) -> bool:
        return self.next_block is None

    def advance(self, media_RED: Any, step_seconds: float) -> Any:
        """Run the next part; returns the store, which has the rows once all is done.

        Args:
            media_RED: The store.
            step_seconds: The time of a decode step.
        """
        max_products = PART_OF_STEP * step_seconds * self.encoder.products_per_second
        products = self.run_block()
        while self.next_block and products + self.next_block.products <= max_products:
            products += self.run_block()
        if not self.is_done:
            return media_RED
        self.wait()  # so that a failed block does not destroy the store, which all steps read
        return self.programs.write(media_RED, self.buffers.merged_RED, self.rows_R)

    def run_block(self) -> int:
        """Run the next block; returns its multiplications."""
        block = self.next_block
        assert block is not None
        block.run()
        self.next_block = next(self.blocks, None)
        return block.products

    def wait(self) -> None:
        """Wait for the blocks that run."""
        jax.block_until_ready(self.buffers)

    def all_blocks(self) -> Iterator[Block]:
        """The blocks in their order; each is run before the next is asked for."""
        encoder, deepstack = self.encoder, self.encoder.tower.deepstack
        yield from self.patch_blocks(self.enter, cost.entry_products(encoder.tower))
        for index in range(encoder.num_layers):
            head_products, other_products = cost.layer_products(
                encoder.tower, encoder.specs, index, self.num_patches
            )
            yield from self.patch_blocks(partial(self.project, index), head_products)
            yield from self.patch_blocks(partial(self.finish, index), other_products)
            buffers = self.buffers
            self.buffers = buffers.replace(x_TD=buffers.out_TD, out_TD=buffers.x_TD)
            if index in deepstack:
                yield from self.row_blocks(1 + deepstack.index(index))
        yield from self.row_blocks(0)

    def patch_blocks(self, compute: Callable[[Any], None], products: int) -> Iterator[Block]:
        """Blocks of patches, each of which costs so many multiplications."""
        block = self.encoder.block(self.size)
        for start in range(0, self.num_patches, block):
            start = np.int32(min(start, self.size - block))
            yield Block(block * products, partial(compute, start))

    def row_blocks(self, column: int) -> Iterator[Block]:
        """Blocks of merged rows for a column of the store."""
        encoder = self.encoder
        num_rows = self.num_patches // encoder.tower.group
        block = encoder.merged_rows(self.size)
        for start in range(0, num_rows, block):
            start = np.int32(min(start, len(self.rows_R) - block))
            products = block * encoder.merge_products(column)
            yield Block(products, partial(self.merge, column, start))

    def enter(self, start: np.int32) -> None:
        encoder, b = self.encoder, self.buffers
        weights = encoder.entry_weights()
        x_TD = self.programs.enter(weights, b.x_TD, encoder.values_IC, self.patches, start)
        self.buffers = b.replace(x_TD=x_TD)

    def project(self, index: int, start: np.int32) -> None:
        weights, b = self.encoder.layer_weights(index), self.buffers
        heads = self.programs.project(weights, b.x_TD, b.heads, self.patches, start)
        self.buffers = b.replace(heads=heads)

    def finish(self, index: int, start: np.int32) -> None:
        weights, b = self.encoder.layer_weights(index), self.buffers
        out_TD = self.programs.finish(weights, b.x_TD, b.out_TD, b.heads, self.patches, start)
        self.buffers = b.replace(out_TD=out_TD)

    def merge(self, column: int, start: np.int32) -> None:
        program = self.programs.merge_deepstack if column else self.programs.merge
        weights, b = self.encoder.merger_weights(column), self.buffers
        merged_RED = program(weights, b.merged_RED, b.x_TD, start, np.int32(column))
        self.buffers = b.replace(merged_RED=merged_RED)
