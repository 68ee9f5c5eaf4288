"""The programs of a vision tower: from patches to rows of the device's media store."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...model.mixers import LayerHooks
from ...model.towers.config import Merger, Tower
from ...model.towers.tower import Patches, enter, leave, merge, patches_of, run_layer
from ...model.towers.weights import MergerWeights, TowerWeights
from ...ops.attention import page_dtype
from ...sharding.struct import Leaf
from ..request.media import MediaItem
from .attend import attend_within
from .host_snapshot import to_device, to_host
from .media_rows import bits_of
from .programs import Call, Compiler

# Images are padded to one of these numbers of patches.
SIZES = {"cpu": (256, 512, 1024, 2048, 4096), "gpu": (1024, 4096, 16384)}
# Patches times layers between two steps of sequences that decode, or one layer.
LAYER_PATCHES = {"cpu": 2048, "gpu": 65536}


@partial(jax.jit, static_argnames="tower")
def enter_tower(weights: TowerWeights, values_IC, patches: Patches, tower: Tower):
    """The first layer's input, of weights without layers and mergers."""
    return enter(tower, weights, values_IC, patches)


@partial(jax.jit, static_argnames="tower", donate_argnames="x_TD")
def leave_tower(weights: TowerWeights, x_TD, tower: Tower):
    return leave(tower, weights, x_TD)


@partial(jax.jit, static_argnames="tower", donate_argnames="x_TD")
def encode_layer(weights: TowerWeights, x_TD, patches: Patches, tower: Tower):
    """One layer, of weights that hold no other; all layers are alike and share this program."""
    attend = attend_within(patches.positions_T, patches.starts_B1, len(x_TD))
    return run_layer(tower, weights, 0, x_TD, patches, LayerHooks(attend))


@partial(jax.jit, static_argnames=("tower", "merger"), donate_argnames="media_RED")
def write_rows(
    weights: MergerWeights, media_RED, x_TD, rows_R, column, tower: Tower, merger: Merger
):
    """Write merged patches to a column of the store; rows past its end are padding."""
    rows_RD = merge(tower, merger, weights, x_TD)
    return media_RED.at[rows_R, column].set(bits_of(rows_RD), mode="drop")


def backend() -> str:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


class EncoderPrograms(NamedTuple):
    """The programs for one number of patches: compiled, or their calls."""

    enter: Any
    layer: Any
    merge: Any
    merge_deepstack: Any  # None without a deepstack
    leave: Any  # None without a norm after the last layer


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
        has_one_size: All images have that many.
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
        self.num_rows = num_rows
        self.max_rows = max_rows
        max_patches = max_rows * tower.group
        smaller = () if has_one_size else SIZES[backend()]
        self.sizes = (*(size for size in smaller if size < max_patches), max_patches)
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

        return finish

    def calls(self, size: int, media_RED: Any) -> EncoderPrograms:
        """The calls that are compiled for a size."""
        tower = self.tower
        patches = patches_of(tower, [], size, 1)
        x_TD = jax.ShapeDtypeStruct((size, tower.model.dim), jnp.dtype(tower.model.dtype))
        rows_R = np.zeros(size // tower.group, np.int32)

        def merge_call(weights: MergerWeights, merger: Merger) -> Call:
            args = weights, media_RED, x_TD, rows_R, np.int32(0)
            return Call(write_rows, args, tower=tower, merger=merger)

        return EncoderPrograms(
            Call(enter_tower, (self.entry_weights(), self.values_IC, patches), tower=tower),
            Call(encode_layer, (self.layer_weights(0), x_TD, patches), tower=tower),
            merge_call(self.weights.merger, tower.merger),
            merge_call(self.weights.deepstack[0], tower.deepstack_merger)
            if tower.deepstack_merger is not None
            else None,
            Call(leave_tower, (self.entry_weights(), x_TD), tower=tower)
            if tower.exit_norm
            else None,
        )

    @property
    def num_layers(self) -> int:
        return len(self.tower.model.layers)

    def entry_weights(self) -> TowerWeights:
        return self.weights.replace(layers=(), merger=None, deepstack=())

    def layer_weights(self, index: int) -> TowerWeights:
        return TowerWeights(None, None, (self.weights.layers[index],), None)

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
    """An item on its way through the tower, in parts of some layers.

    Args:
        encoder: The encoder.
        item: The item.
        store_rows: Where its rows go.
    """

    def __init__(self, encoder: MediaEncoder, item: MediaItem, store_rows: list[int]):
        tower = encoder.tower
        self.encoder = encoder
        size = next(size for size in encoder.sizes if size >= item.rows * item.columns)
        self.programs = encoder.programs[size]
        self.patches = patches_of(tower, [(item.patches, item.rows, item.columns)], size, 1)
        self.rows_R = np.full(size // tower.group, encoder.num_rows, np.int32)
        self.rows_R[: len(store_rows)] = store_rows
        self.layers_per_part = max(1, LAYER_PATCHES[backend()] // size)
        self.next_layer = 0
        self.x_TD = self.programs.enter(encoder.entry_weights(), encoder.values_IC, self.patches)

    @property
    def is_done(self) -> bool:
        return self.next_layer == self.encoder.num_layers

    def advance(self, media_RED: Any) -> Any:
        """Run the next part; returns the store, which has the results of the layers so far."""
        encoder, tower, programs = self.encoder, self.encoder.tower, self.programs
        for _ in range(self.layers_per_part):
            index = self.next_layer
            self.x_TD = programs.layer(encoder.layer_weights(index), self.x_TD, self.patches)
            self.next_layer += 1
            if index in tower.deepstack:
                number = tower.deepstack.index(index)
                weights = encoder.weights.deepstack[number]
                # the part ends here, since the written store replaces the one that it was made of
                if not self.is_done:
                    return self.write(programs.merge_deepstack, weights, media_RED, 1 + number)
                media_RED = self.write(programs.merge_deepstack, weights, media_RED, 1 + number)
            if self.is_done:
                if programs.leave is not None:
                    self.x_TD = programs.leave(encoder.entry_weights(), self.x_TD)
                return self.write(programs.merge, encoder.weights.merger, media_RED, 0)
        return media_RED

    def write(self, merge: Any, weights: MergerWeights, media_RED: Any, column: int) -> Any:
        """Merge the patches into a column of the store."""
        self.wait()  # so that a failed layer does not destroy the store, which all steps read
        return merge(weights, media_RED, self.x_TD, self.rows_R, np.int32(column))

    def wait(self) -> None:
        """Wait for the layers."""
        jax.block_until_ready(self.x_TD)
