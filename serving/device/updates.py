"""Small programs that read or change the state and the weights between steps."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ...ops import adapter, sampling
from ...ops.attention import KVPages
from ...sharding.mesh import device_axes


@jax.jit
def read_loads(loads_nLE) -> jax.Array:
    """A copy that the next step does not take, of all devices together."""
    return jnp.sum(loads_nLE, axis=0)


@jax.jit
def read_pages(layers: list[KVPages], pages_N) -> jax.Array:
    """What these pages hold in all the layers, as bytes: [N, bytes of a page]."""
    N = pages_N.shape[0]
    layer_bytes = [
        jax.lax.bitcast_convert_type(leaf[pages_N], jnp.uint8) for leaf in jax.tree.leaves(layers)
    ]
    return jnp.concatenate([layer_bytes.reshape(N, -1) for layer_bytes in layer_bytes], axis=1)


@partial(jax.jit, static_argnames=("mesh", "places"), donate_argnames="stack_SX")
def move_experts(stack_SX, sent_nnM, kept_nnM, turns, mesh: Mesh, places: P) -> jax.Array:
    """A stack of experts over devices, of which each takes over some of the others', as
    `placement.transfers` says.
    """
    axis = device_axes(mesh).experts

    def part(stack_SX, sent_nnM, kept_nnM, turns):
        me = axis.index()

        def take(turn, filled_SX):  # all are sent as they lay before the first turn
            came_nX = axis.exchange(stack_SX[sent_nnM[:, me, turn]])
            return filled_SX.at[kept_nnM[me, :, turn]].set(came_nX, mode="drop")

        return jax.lax.fori_loop(0, turns, take, stack_SX)

    in_specs = (places, P(), P(), P())
    run = jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=places, check_vma=False)
    return run(stack_SX, sent_nnM, kept_nnM, turns)


@partial(jax.jit, donate_argnames="stacks")
def write_adapter(stacks, slot, matrices):
    """An adapter in a slot of the stacks."""
    return adapter.write_slot(stacks, slot, matrices)


@partial(jax.jit, donate_argnames="layers")
def copy_pages(layers: list[KVPages], from_N, to_N) -> list[KVPages]:
    """These pages hold, in all the layers, what those do."""
    return jax.tree.map(lambda leaf: leaf.at[to_N].set(leaf[from_N]), layers)


@partial(jax.jit, donate_argnames="layers")
def write_pages(layers: list[KVPages], pages_N, bytes_NX) -> list[KVPages]:
    """The inverse: these pages hold what the bytes say."""
    N = pages_N.shape[0]
    at = 0

    def write(leaf):
        nonlocal at
        size = leaf.dtype.itemsize
        width = math.prod(leaf.shape[1:]) * size
        leaf_bytes = bytes_NX[:, at : at + width].reshape(
            N, *leaf.shape[1:], *([size] if size > 1 else [])
        )
        at += width
        return leaf.at[pages_N].set(jax.lax.bitcast_convert_type(leaf_bytes, leaf.dtype))

    return jax.tree.map(write, layers)


@partial(jax.jit, donate_argnames="snapshots")
def save_states(snapshots, recurrent, slots_N, pages_N):
    """These pages hold what layers keep of the sequences in those slots."""
    return {
        index: {
            name: snapshot_array.at[pages_N].set(recurrent[index][name][slots_N])
            for name, snapshot_array in layer_snapshots.items()
        }
        for index, layer_snapshots in snapshots.items()
    }


@partial(jax.jit, donate_argnames="recurrent")
def load_states(recurrent, snapshots, pages_N, slots_N, lengths_N):
    """The inverse: these slots go on from what those pages hold, after so many tokens."""

    def loaded(name: str, array, snapshot):
        if name == "length":
            return array.at[slots_N].set(lengths_N, mode="drop")
        return (
            array.at[slots_N].set(snapshot[name][pages_N], mode="drop")
            if name in snapshot
            else array
        )

    return {
        index: {name: loaded(name, array, snapshots[index]) for name, array in layer_state.items()}
        for index, layer_state in recurrent.items()
    }


@partial(jax.jit, donate_argnames="slots")
def reset_slot(slots: sampling.SlotState, slot, row: sampling.SlotState) -> sampling.SlotState:
    """Make a slot ready for a new request."""
    return sampling.replace_row(slots, slot, row)


@partial(jax.jit, donate_argnames="bias_BJV")
def set_bias(bias_BJV, slot, bias_row, bias_V) -> jax.Array:
    """What the token may be that one of a slot's rows draws."""
    return sampling.set_bias(bias_BJV, slot, bias_row, bias_V)
