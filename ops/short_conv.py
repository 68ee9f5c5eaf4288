"""A causal convolution over the last few tokens of each sequence, one for each channel.

What a sequence keeps is its tail: the inputs of its last tokens, one fewer than the convolution
sees. Letters beside the package's: C channels, W the convolution's width, B slots of tails.
"""

import jax.numpy as jnp

from .state_rows import StateRows


def short_conv(x_TC, weight_CW, tail_BWC, rows: StateRows):
    """(out_TC in float32, tails): out[t] = the sum over w of weight[w] * x[t - W + 1 + w], added in
    this order.

    Tokens before the first are zeros.
    """
    wide_TC = x_TC.astype(jnp.float32)
    W = weight_CW.shape[-1]
    T = x_TC.shape[0]
    before_BWC = rows.states(tail_BWC)
    seq_T, place_T = rows.sequences(T)

    def back(count: int):
        """The input so many tokens before each row."""
        if not count:
            return wide_TC
        held_TC = before_BWC[seq_T, jnp.clip(place_T - count + W - 1, 0, W - 2)]
        near_TC = wide_TC[jnp.maximum(jnp.arange(T) - count, 0)]
        return jnp.where((place_T >= count)[:, None], near_TC, held_TC)

    out_TC = sum(back(W - 1 - w) * weight_CW[:, w] for w in range(W))
    # The tail's element i is the token i - (W - 1) after the last that is kept.
    place_BW = rows.kept_B[:, None] + jnp.arange(-(W - 1), 0)
    new_BWC = wide_TC[jnp.clip(rows.starts_B1[:-1, None] + place_BW, 0, T - 1)]
    old_BWC = jnp.take_along_axis(
        before_BWC, jnp.clip(place_BW + W - 1, 0, W - 2)[:, :, None], axis=1
    )
    after_BWC = jnp.where((place_BW >= 0)[:, :, None], new_BWC, old_BWC)
    return out_TC, tail_BWC.at[rows.slots_B].set(after_BWC, mode="drop")
