"""How a model's layers access KV pages and recurrent states within a step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from ...model.config import ModelConfig
from ...ops import heads as head_ops
from ...ops.attention import KVPages, QueryRows, new_arrivals, paged_attention
from ...ops.attention.backend import AttentionParams
from ...ops.attention.picking import IndexQueries, sparse_attention
from ...ops.state_rows import StateRows
from ...sharding.device_axes import ONE_DEVICE, DeviceAxes
from .media_rows import bits_of
from .state import State


def attend_with(
    config: ModelConfig,
    rows_of: Callable[[int], QueryRows],
    first: int = 0,
    axes: DeviceAxes = ONE_DEVICE,
):
    """`prepare` and `attend` of `decoder.run_layers`, whose layers are those of `config` from
    `first` on.

    `rows_of(group)` are the rows, with where they write in a cache group.
    """

    def prepare(index, qkv_TGH, heads, state: State):
        owner = config.kv_owner[first + index]
        group = config.group(first + index)
        *qkv, filled = head_ops.prepare(qkv_TGH, heads, state.pages[owner], rows_of(group))
        return *qkv, state.replace(pages={**state.pages, owner: filled})

    picked: dict[int, Any] = {}  # the slots that a layer of a cache group has picked last

    def attend(
        index,
        q_TNH,
        k_TKH,
        v_TKH,
        state: State,
        params: AttentionParams,
        sinks_N=None,
        picks: IndexQueries | None = None,
    ):
        owner = config.kv_owner[first + index]
        rows = rows_of(config.group(first + index))
        q_TNH, k_TKH, v_TKH = (
            None if x is None else axes.rows.join(x) for x in (q_TNH, k_TKH, v_TKH)
        )
        if picks is not None:
            group = config.group(first + index)
            out_TNH, filled, picked[group] = sparse_attention(
                q_TNH, k_TKH, state.pages[owner], rows, picks, picked.get(group), params
            )
            return out_TNH, state.replace(pages={**state.pages, owner: filled})
        params = replace(params, context=axes.context, split_rows=axes.rows.size > 1)
        out_TNH, filled = paged_attention(
            q_TNH, k_TKH, v_TKH, state.pages[owner], rows, params, sinks_N
        )
        return out_TNH, state.replace(pages={**state.pages, owner: filled})

    # On several devices of `context` each has all rows, and not all positions of a page.
    return prepare if axes.context.size == 1 else None, attend


def attend_within(positions_T, starts_B1, longest: int):
    """`attend` of `decoder.run_layers` where nothing is kept: each row of a step is a page of one
    position.
    """
    T = positions_T.shape[0]
    tables_BM = tables_within(starts_B1, T, longest)
    rows = QueryRows(positions_T, starts_B1, tables_BM, jnp.zeros(T, jnp.int32), new_arrivals())

    def attend(index, q_TNH, k_TKH, v_TKH, state: State, params: AttentionParams, sinks_N=None):
        pages = KVPages(bits_of(k_TKH)[:, None], bits_of(v_TKH)[:, None])
        return paged_attention(q_TNH, None, None, pages, rows, params, sinks_N)[0], state

    return attend


def tables_within(starts_B1, T: int, longest: int):
    """The page table where each of the T rows of a step is a page."""
    offset_M = jnp.arange(min(T, longest))
    return jnp.minimum(starts_B1[:-1, None] + offset_M, T - 1).astype(jnp.int32)


def recur_with(rows: StateRows):
    """`LayerHooks.recur` of a step without draft tokens."""

    def recur(index, inputs, run, state: State):
        out_T, layer_state = run(inputs, state.recurrent[index], rows)
        return out_T, state.replace(recurrent={**state.recurrent, index: layer_state})

    return recur


def share_with(config: ModelConfig, call: Callable[[Callable], Callable]):
    """`LayerHooks.share_trace`: equal layers share one traced function, called with their own
    pages.

    `call` makes a function that is traced once. Tracing and lowering every layer would take most of
    a start from full caches.
    """

    def share(run):
        shared: dict[Any, tuple[int, Callable]] = {}

        def run_alike(index, w, rows, per_layer_TA, state: State):
            layer = config.layers[index]
            if (
                config.kv_owner[index] != index
                or layer.attention.state_shapes
                or getattr(layer.attention, "indexer", None)
            ):
                # it reaches more than its own pages
                return run(index, w, rows, per_layer_TA, state)
            key = layer, None if layer.attention.both_ways else config.group(index)
            if key not in shared:
                shared[key] = index, call(partial(run, index))
            first, traced = shared[key]
            layer_pages = {first: state.pages[index]} if index in state.pages else {}
            rows, experts_TX, layer_state = traced(w, rows, per_layer_TA, State(layer_pages))
            filled = {index: layer_state.pages[first]} if layer_pages else {}
            return rows, experts_TX, state.replace(pages={**state.pages, **filled})

        return run_alike

    return share
