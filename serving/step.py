"""The one jitted step: append, attend, and draw, over a state that stays on the device."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from ..model import decoder
from ..model.config import LatentAttention, ModelConfig
from ..model.plan import layer_token_bytes
from ..ops import sampling
from ..ops.attention import KVPages, Rows, page_dtype, paged_attention
from .batch import Layout


@struct.dataclass
class State:
    """What lives on the device between steps; donated to each and returned by it."""

    pages: dict[int, KVPages]  # by the layer that owns them
    slots: sampling.SlotState
    last_tokens_B: jax.Array  # the token each slot drew last: the next step reads it without asking the host


@partial(jax.jit, static_argnames=("layout", "config"), donate_argnames="state")
def step(
    weights, state: State, buffer, layout: Layout, config: ModelConfig
) -> tuple[sampling.Sampled, jax.Array, State]:
    """One step of every sequence in the batch that the buffer holds; also the hidden states of the rows sampled."""
    batch = layout.read(buffer)
    held_T = jnp.maximum(-1 - batch.tokens_T, 0)
    tokens_T = jnp.where(batch.tokens_T < 0, state.last_tokens_B[held_T], batch.tokens_T)

    def attend(index, q_TNH, k_TKH, v_TKH, pages, **options):
        owner, group = config.kv_owner[index], config.group(index)
        rows = Rows(batch.positions_T, batch.starts_B1, batch.tables_GBM[group], batch.slots_GT[group])
        out_TNH, filled = paged_attention(q_TNH, k_TKH, v_TKH, pages[owner], rows, **options)
        return out_TNH, {**pages, owner: filled}

    hidden_TD, pages = decoder.forward(weights, state.pages, tokens_T, batch.positions_T, config, attend)
    hidden_RD = hidden_TD.at[batch.sample_rows_R].get(mode="fill", fill_value=0)
    logits_RV = decoder.logits(weights, hidden_RD, config)
    with jax.named_scope("sample"):
        slots = sampling.count_tokens(state.slots, batch.owners_T, tokens_T, batch.is_prompt_T, batch.tracked_T)
        sampled = sampling.sample(logits_RV, slots, batch.sampling)
        last_tokens_B = state.last_tokens_B.at[batch.store_R].set(sampled.tokens_R, mode="drop")
    return sampled, hidden_RD, State(pages, slots, last_tokens_B)


@jax.jit
def read_pages(layers: list[KVPages], pages_N) -> jax.Array:
    """What these pages hold in all the layers, as bytes: [N, bytes of a page]."""
    N = pages_N.shape[0]
    parts = [jax.lax.bitcast_convert_type(leaf[pages_N], jnp.uint8) for leaf in jax.tree.leaves(layers)]
    return jnp.concatenate([part.reshape(N, -1) for part in parts], axis=1)


@partial(jax.jit, donate_argnames="layers")
def copy_pages(layers: list[KVPages], from_N, to_N) -> list[KVPages]:
    """These pages hold, in all the layers, what those do."""
    return jax.tree.map(lambda leaf: leaf.at[to_N].set(leaf[from_N]), layers)


@partial(jax.jit, donate_argnames="layers")
def write_pages(layers: list[KVPages], pages_N, bytes_NX) -> list[KVPages]:
    """The inverse: these pages hold what the bytes say."""
    N, at = pages_N.shape[0], 0

    def write(leaf):
        nonlocal at
        size = leaf.dtype.itemsize
        width = math.prod(leaf.shape[1:]) * size
        own = bytes_NX[:, at : at + width].reshape(N, *leaf.shape[1:], *([size] if size > 1 else []))
        at += width
        return leaf.at[pages_N].set(jax.lax.bitcast_convert_type(own, leaf.dtype))

    return jax.tree.map(write, layers)


@partial(jax.jit, donate_argnames="slots")
def reset_slot(slots: sampling.SlotState, slot, row: sampling.SlotState) -> sampling.SlotState:
    """Make a slot ready for a new request."""
    return sampling.reset_slot(slots, slot, row)


@partial(jax.jit, donate_argnames="bias_BV")
def set_bias(bias_BV, slot, bias_V) -> jax.Array:
    """What a slot's next token may be."""
    return sampling.set_bias(bias_BV, slot, bias_V)


def page_shapes(config: ModelConfig, index: int, page_size: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of one page of a layer: keys, then values unless they are a part of the keys."""
    a = config.layers[index].attention
    if isinstance(a, LatentAttention):
        return ((page_size, 1, a.kv_rank + a.rope_dim),)
    return ((page_size, a.kv_heads, a.head_dim),) * 2


def page_bytes(config: ModelConfig, group: int, page_size: int) -> int:
    """Bytes of one page number of a cache group, over all its layers."""
    layers = [config.layers[index] for index in config.kv_layers if config.group(index) == group]
    return page_size * sum(layer_token_bytes(layer.attention, config.kv_dtype) for layer in layers)


def empty_state(config: ModelConfig, num_pages: tuple[int, ...], page_size: int, max_seqs: int) -> State:
    """A state with no request in it."""
    dtype = page_dtype(jnp.dtype(config.kv_dtype))

    def empty(index: int) -> KVPages:
        count, shapes = num_pages[config.group(index)], page_shapes(config, index, page_size)
        pages = [jnp.zeros((count, *shape), dtype) for shape in shapes]
        scales = [jnp.zeros((count, *shape[:-1]), jnp.float32) for shape in shapes] if dtype == jnp.int8 else []
        return KVPages(
            **dict(zip(("k_PSKH", "v_PSKH"), pages, strict=False)),
            **dict(zip(("k_scale_PSK", "v_scale_PSK"), scales, strict=False)),
        )

    pages = {index: empty(index) for index in config.kv_layers}
    return State(pages, sampling.empty_state(max_seqs, config.vocab_size), jnp.zeros(max_seqs, jnp.int32))
