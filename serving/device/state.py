"""The device state between steps: KV pages, recurrent states and sampling state by slot."""

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ...model.config import ModelConfig
from ...model.partition import Stage
from ...model.planning.cost import layer_token_bytes
from ...ops import sampling
from ...ops.attention import KVPages, page_dtype, uses_paired_pages
from ...ops.native.blank import blank
from ...sharding import struct
from ...sharding.struct import Leaf

OF_ROWS = ("data", "context")  # the axes of a mesh along which each device may have rows of its own
# the axis of heads
HEADS = {"k_PSKH": 2, "v_PSKH": 2, "kv_PSYH": 2, "k_scale_PKS": 1, "v_scale_PKS": 1}


class State(struct.PyTreeNode):
    """Donated to each step, which returns it.

    Each pipeline stage has its own pages; the last one has the rest.
    """

    pages: dict[int, KVPages]  # by the layer that owns them
    # Only the last stage has the other arrays.
    slots: Any = None  # SlotState
    last_tokens_B: Leaf = None  # the token each slot drew last: the next step need not ask the host
    drafts_KB: Leaf = None  # the draft tokens after it
    rejected_B: Leaf = None  # how many of the drafts before it were rejected
    loads_nLE: Leaf = None  # tokens of each expert, by layer with experts; the counters wrap
    # by layer with a state: arrays by slot
    recurrent: dict[int, dict[str, Any]] = struct.field(default_factory=dict)
    snapshots: dict[int, dict[str, Any]] = struct.field(default_factory=dict)  # and by page
    media_RED: Leaf = None  # the media store: an item's rows, and what deeper layers add

    @property
    def by_page(self) -> dict[int, Any]:
        """All arrays whose first axis is pages: KV pages by layer, snapshots by `~layer`."""
        return {
            **self.pages,
            **{~index: layer_arrays for index, layer_arrays in self.snapshots.items()},
        }

    def with_pages(self, by_page: dict[int, Any]) -> "State":
        """The state with these arrays in place of `by_page`."""
        pages = {index: by_page[index] for index in self.pages}
        return self.replace(
            pages=pages, snapshots={index: by_page[~index] for index in self.snapshots}
        )


def state_places(state: State) -> State:
    """The sharding of a state: pages by heads and positions, recurrent states by heads, sampling
    state by vocabulary.

    Replicas have pages and slots of their own.
    """

    def of(pages: KVPages) -> KVPages:
        def place(name: str, array) -> P | None:
            if array is None:
                return None
            # What holds keys and values in one is read by all heads.
            heads = None if pages.v_PSKH is None and pages.kv_PSYH is None else "tensor"
            return P("data", heads, "context") if HEADS[name] == 1 else P("data", "context", heads)

        return KVPages(
            **{field.name: place(field.name, getattr(pages, field.name)) for field in fields(pages)}
        )

    pages = {index: of(held) for index, held in state.pages.items()}
    slots = jax.tree.map(lambda leaf: P("data", *[None] * (leaf.ndim - 2), "tensor"), state.slots)
    if slots is not None:
        slots = slots.replace(logprob_token_ids_BL=P("data"))
    loads = None if state.loads_nLE is None else P(OF_ROWS)
    last_tokens, drafts, rejected = (
        None if leaf is None else P(*[None] * (leaf.ndim - 1), "data") for leaf in held_of(state)
    )
    recurrent, snapshots = jax.tree.map(
        lambda leaf: P("data", "tensor") if leaf.ndim > 1 else P("data"),
        (state.recurrent, state.snapshots),
    )
    return State(pages, slots, last_tokens, drafts, rejected, loads, recurrent, snapshots)


def held_of(state: State) -> tuple[Leaf, Leaf, Leaf]:
    """The state of each slot beside its sampling state."""
    return state.last_tokens_B, state.drafts_KB, state.rejected_B


def page_shapes(config: ModelConfig, index: int, page_size: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's page by field of `KVPages`; values that are a part of the keys have none."""
    a = config.layers[index].attention
    dtype = jnp.dtype(config.layer_kv_dtype(index))
    if len(a.cached) == 2 and uses_paired_pages(dtype):
        (heads, width), _ = a.cached
        return {"kv_PSYH": (page_size, 2 * heads, width)}
    codes_per_byte = 2 if dtype == jnp.int4 else 1  # codes of a byte
    shapes = ((page_size, heads, width // codes_per_byte) for heads, width in a.cached)
    return dict(zip(("k_PSKH", "v_PSKH"), shapes, strict=False))


def owners(config: ModelConfig, layers: Iterable[int], group: int) -> list[int]:
    """The layers among these that own the pages of a cache group."""
    return [index for index in layers if index in config.kv_layers and config.group(index) == group]


def paged_layers(config: ModelConfig, paged: ModelConfig, stage: Stage) -> list[int]:
    """The layers whose pages a stage has; the last stage also has the drafter's, after the
    target's.
    """
    return [*stage.layers, *(range(len(config.layers), len(paged.layers)) if stage.is_last else ())]


def page_bytes(
    config: ModelConfig, group: int, page_size: int, owned: Iterable[int] | None = None
) -> int:
    """Bytes of a page of a cache group, over all layers that own it, or over `owned`."""
    owned = owners(config, range(len(config.layers)), group) if owned is None else owned
    return page_size * sum(
        layer_token_bytes(config.layers[index].attention, config.layer_kv_dtype(index))
        for index in owned
    )


def stored_page_bytes(layers: Iterable[Any]) -> int:
    """Bytes of a page in these arrays, over all devices."""
    return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))


def empty_state(
    config: ModelConfig,
    paged: ModelConfig,
    stage: Stage,
    num_pages: tuple[int, ...],
    page_size: int,
    max_seqs: int,
    max_drafts: int,
    words: int,
) -> State:
    """One device's part of an empty state; `paged` has the target's layers, then the drafter's."""
    pages = empty_pages(paged, paged_layers(config, paged, stage), num_pages, page_size)
    state_layers = [index for index in config.state_layers if index in stage.layers]
    recurrent = {
        index: empty_recurrent_state(config.layers[index].attention, max_seqs, max_drafts)
        for index in state_layers
    }
    if recurrent and max_drafts:
        recurrent[state_layers[0]]["length"] = jnp.zeros(
            max_seqs, jnp.int32
        )  # of all layers of the stage
    count = num_pages[-1] if len(num_pages) > len(paged.windows) else 0
    snapshots = {
        index: empty_recurrent_state(config.layers[index].attention, count, 0)
        for index in state_layers
        if count
    }
    if not stage.is_last:
        return State(pages, recurrent=recurrent, snapshots=snapshots)
    loads_nLE = None
    if stage.is_first and config.experts:
        loads_nLE = jnp.zeros((1, len(config.expert_layers), config.experts), jnp.uint32)
    slots = sampling.empty_state(max_seqs, words, 1 + max_drafts)
    shapes = [(max_seqs,), *([(max_drafts, max_seqs), (max_seqs,)] if max_drafts else [])]
    last_tokens_B, *drafted = [jnp.zeros(shape, jnp.int32) for shape in shapes]
    drafts_KB, rejected_B = drafted or (None, None)
    return State(
        pages, slots, last_tokens_B, drafts_KB, rejected_B, loads_nLE, recurrent, snapshots
    )


def empty_recurrent_state(mixer, max_seqs: int, max_drafts: int) -> dict[str, Any]:
    """A layer's recurrent state for each slot; with drafts, also the inputs of the draft tokens."""
    arrays: dict[str, Any] = {
        name: blank((max_seqs, *shape)) for name, shape in mixer.state_shapes.items()
    }
    if max_drafts:
        arrays["drafted"] = tuple(blank((max_seqs, max_drafts, *shape)) for shape in mixer.inputs)
    return arrays


def empty_pages(
    config: ModelConfig, layers: Iterable[int], num_pages: tuple[int, ...], page_size: int
) -> dict[int, KVPages]:
    """The pages of the layers that own any."""

    def empty(index: int) -> KVPages:
        dtype = page_dtype(jnp.dtype(config.layer_kv_dtype(index)))
        count = num_pages[config.group(index)]
        shapes = page_shapes(config, index, page_size)
        arrays = {name: blank((count, *shape), dtype) for name, shape in shapes.items()}
        if dtype.itemsize == 1:
            scales = {
                name.replace("PSKH", "scale_PKS"): (heads, slots)
                for name, (slots, heads, _) in shapes.items()
            }
            arrays |= {name: blank((count, *shape)) for name, shape in scales.items()}
        return KVPages(**arrays)

    return {index: empty(index) for index in layers if index in config.kv_layers}
