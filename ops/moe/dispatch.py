"""Experts on several devices: rows are sent to them, and their results come back."""

import math

import jax
import jax.numpy as jnp

from ...sharding.device_axes import Axis, DeviceAxes
from .xla import add_pairs, by_expert, weighed


def mix_over(axes: DeviceAxes, x_TD, weights_TX, slots_TX, own: int, expert):
    """`mix_experts` where device d of `axes.experts` has the slots from d * own on: the same bits
    as on one device.

    Devices that have the same rows each take an equal share of them, and gather the results of all.
    A pair whose slot is past the last belongs to no expert.
    """
    same_rows = axes.same_rows
    T = len(x_TD)
    share = -(-T // same_rows.size)

    def cut(x, fill):
        spare = [(0, share * same_rows.size - T), *[(0, 0)] * (x.ndim - 1)]
        return jax.lax.dynamic_slice_in_dim(
            jnp.pad(x, spare, constant_values=fill), same_rows.index() * share, share
        )

    slots_QX = cut(slots_TX, own * axes.experts.size)
    out_QD = send_and_mix(axes.experts, cut(x_TD, 0), cut(weights_TX, 0), slots_QX, own, expert)
    return same_rows.gather(axes.tensor.sum(out_QD.astype(x_TD.dtype))).reshape(-1, x_TD.shape[1])[
        :T
    ]


def send_and_mix(axis: Axis, x_QD, weights_QX, slots_QX, own: int, expert):
    """The same, in float32, for rows that no other device has.

    Each (row, slot) pair is sent by itself, and its result comes back before it is weighted: each
    row is summed here, in the order of its experts, so its bits do not depend on where they lie. In
    a round two devices exchange `capacity` pairs, mostly all that there are; where many rows chose
    the same device there are more rounds. No pair is dropped.

        pairs    |d0 d0 d0 d0 d0|d2 d2|d3|          sorted by slot, and so by device
        round 0  [d0 d0 d0][. . .][d2 d2 .][d3 . .]
        round 1  [d0 d0 .] [. . .][. . .]  [. . .]
    """
    Q, X = slots_QX.shape
    D = x_QD.shape[1]
    n = axis.size
    room = capacity(Q, X, n, own)
    pairs = Q * X
    slots_Z = slots_QX.reshape(-1)
    order = jnp.argsort(slots_Z, stable=True)
    counts_S = jnp.zeros(n * own, jnp.int32).at[slots_Z].add(1, mode="drop")
    counts_nno = axis.gather(counts_S).reshape(n, n, own)  # from, to, slot
    sent_n = jnp.sum(counts_S.reshape(n, own), 1)
    first_n = jnp.cumsum(sent_n) - sent_n
    # of the pairs that come here, where each slot's end
    last_no = jnp.cumsum(counts_nno[:, axis.index()], 1)
    rounds = jnp.max(-(-jnp.sum(counts_nno, 2) // room))

    def run_round(turn, out_ZD):
        at_C = turn * room + jnp.arange(room)
        valid_nC = at_C < sent_n[:, None]
        pair_nC = order[jnp.minimum(first_n[:, None] + at_C, pairs - 1)]
        rows_nCD = axis.exchange(jnp.where(valid_nC[..., None], x_QD[pair_nC // X], 0))
        here_nC = jax.vmap(lambda last_o: jnp.searchsorted(last_o, at_C, side="right"))(last_no)
        rows_RD = rows_nCD.reshape(n * room, D)
        given_RD = by_expert(
            here_nC.reshape(-1), own, lambda e, at_B: expert(e, rows_RD[at_B]), D, x_QD.dtype
        )
        back_nCD = axis.exchange(given_RD.reshape(n, room, D))
        back_RD = weighed(
            back_nCD.reshape(n * room, D), weights_QX.reshape(-1)[pair_nC.reshape(-1)]
        )
        return out_ZD.at[jnp.where(valid_nC, pair_nC, pairs).reshape(-1)].set(back_RD, mode="drop")

    out_ZD = jax.lax.fori_loop(0, rounds, run_round, jnp.zeros((pairs, D), jnp.float32))
    return add_pairs(out_ZD, X)


def capacity(rows: int, top_k: int, devices: int, own: int) -> int:
    """Pairs that one device sends another in a round: the mean and four standard deviations, but no
    more than all.
    """
    mean = rows * top_k / devices
    return min(rows * min(top_k, own), math.ceil(mean + 4 * math.sqrt(mean)))
