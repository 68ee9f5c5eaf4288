"""Expert parallelism: tokens are sent to the devices of their experts, and results come back."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ...sharding.device_axes import Axis, DeviceAxes
from .xla import add_pairs, by_expert, weight_results


def mix_over(axes: DeviceAxes, x_TD, weights_TX, slots_TX, slots_per_device: int, expert):
    """`mix_experts` over several devices; the results have the same bits as on one device.

    Devices that have the same tokens compute an equal share of them each, and gather the results.

    Args:
        axes: the device axes. Device d of `axes.experts` has the expert slots from
            d * slots_per_device on.
        x_TD: the tokens.
        weights_TX: the weight of each (token, expert) pair.
        slots_TX: the expert slot of each pair; past the last slot for pairs without an expert.
        slots_per_device: the number of expert slots of a device.
        expert: computes an expert, as in `mix_experts`.
    """
    same_rows = axes.same_rows
    T = len(x_TD)
    tokens_per_device = -(-T // same_rows.size)

    def local_slice(x, fill):
        padding = [(0, tokens_per_device * same_rows.size - T), *[(0, 0)] * (x.ndim - 1)]
        return jax.lax.dynamic_slice_in_dim(
            jnp.pad(x, padding, constant_values=fill),
            same_rows.index() * tokens_per_device,
            tokens_per_device,
        )

    slots_QX = local_slice(slots_TX, slots_per_device * axes.experts.size)
    out_QD = send_and_mix(
        axes.experts,
        local_slice(x_TD, 0),
        local_slice(weights_TX, 0),
        slots_QX,
        slots_per_device,
        expert,
    )
    out_QD = axes.tensor.sum(out_QD.astype(x_TD.dtype))
    return same_rows.gather(out_QD).reshape(-1, x_TD.shape[1])[:T]


def send_and_mix(axis: Axis, x_QD, weights_QX, slots_QX, slots_per_device: int, expert) -> Any:
    """`mix_over` in float32 for tokens that only this device has.

    Each (token, slot) pair is sent separately, and its result is weighted and summed on the sending
    device, in the order of the token's experts. So the bits do not depend on the experts' devices.

    In a round, every two devices exchange up to `capacity` pairs, which is usually all of them. If
    many tokens chose the same device, there are more rounds. No pair is dropped.

        pairs    |d0 d0 d0 d0 d0|d2 d2|d3|          sorted by slot, and so by device
        round 0  [d0 d0 d0][. . .][d2 d2 .][d3 . .]
        round 1  [d0 d0 .] [. . .][. . .]  [. . .]
    """
    Q, X = slots_QX.shape
    D = x_QD.shape[1]
    n = axis.size
    pairs_per_round = capacity(Q, X, n, slots_per_device)
    num_pairs = Q * X
    slots_Z = slots_QX.reshape(-1)
    order_Z = jnp.argsort(slots_Z, stable=True)
    counts_S = jnp.zeros(n * slots_per_device, jnp.int32).at[slots_Z].add(1, mode="drop")
    # [sender, receiver, slot of the receiver]
    counts_nno = axis.gather(counts_S).reshape(n, n, slots_per_device)
    sent_n = jnp.sum(counts_S.reshape(n, slots_per_device), 1)
    first_n = jnp.cumsum(sent_n) - sent_n
    # the ends of each slot's pairs among the received ones, by sender
    end_no = jnp.cumsum(counts_nno[:, axis.index()], 1)
    num_rounds = jnp.max(-(-jnp.sum(counts_nno, 2) // pairs_per_round))

    def exchange_round(round_index, out_ZD):
        index_C = round_index * pairs_per_round + jnp.arange(pairs_per_round)
        valid_nC = index_C < sent_n[:, None]
        pair_nC = order_Z[jnp.minimum(first_n[:, None] + index_C, num_pairs - 1)]
        received_nCD = axis.exchange(jnp.where(valid_nC[..., None], x_QD[pair_nC // X], 0))
        local_slot_nC = jax.vmap(lambda end_o: jnp.searchsorted(end_o, index_C, side="right"))(
            end_no
        )
        received_RD = received_nCD.reshape(n * pairs_per_round, D)
        out_RD = by_expert(
            local_slot_nC.reshape(-1),
            slots_per_device,
            lambda e, at_B: expert(e, received_RD[at_B]),
            D,
            x_QD.dtype,
        )
        returned_nCD = axis.exchange(out_RD.reshape(n, pairs_per_round, D))
        weighted_RD = weight_results(
            returned_nCD.reshape(n * pairs_per_round, D),
            weights_QX.reshape(-1)[pair_nC.reshape(-1)],
        )
        return out_ZD.at[jnp.where(valid_nC, pair_nC, num_pairs).reshape(-1)].set(
            weighted_RD, mode="drop"
        )

    out_ZD = jax.lax.fori_loop(
        0, num_rounds, exchange_round, jnp.zeros((num_pairs, D), jnp.float32)
    )
    return add_pairs(out_ZD, X)


def capacity(num_tokens: int, top_k: int, devices: int, slots_per_device: int) -> int:
    """Pairs that a device sends to another one per round: the mean plus four standard deviations,
    but not more than can exist.
    """
    mean = num_tokens * top_k / devices
    return min(num_tokens * min(top_k, slots_per_device), math.ceil(mean + 4 * math.sqrt(mean)))
