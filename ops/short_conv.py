"""A causal depthwise convolution over the last few tokens of each sequence.

The recurrent state of a sequence is its tail: the inputs of its last W - 1 tokens. Additional
dimension letters: C channels, W the convolution's width, B slots of tails.
"""

import jax.numpy as jnp

from .state_rows import StateRows


def short_conv(x_TC, weight_CW, tail_BWC, rows: StateRows):
    """Convolve the tokens of a step and update the tails.

    out[t] is the sum over w of weight[w] * x[t - W + 1 + w], added in this order. Inputs before
    the first token of a sequence are zeros.

    Returns:
        (out_TC in float32, tails).
    """
    x_f32_TC = x_TC.astype(jnp.float32)
    W = weight_CW.shape[-1]
    T = x_TC.shape[0]
    old_tail_BWC = rows.states(tail_BWC)
    seq_T, index_T = rows.sequences(T)

    def input_before(offset: int):
        """The input `offset` tokens before each token."""
        if not offset:
            return x_f32_TC
        from_tail_TC = old_tail_BWC[seq_T, jnp.clip(index_T - offset + W - 1, 0, W - 2)]
        from_step_TC = x_f32_TC[jnp.maximum(jnp.arange(T) - offset, 0)]
        return jnp.where((index_T >= offset)[:, None], from_step_TC, from_tail_TC)

    out_TC = sum(input_before(W - 1 - w) * weight_CW[:, w] for w in range(W))
    # Element i of the new tail is the token at i - (W - 1) relative to the end of the kept tokens.
    index_BW = rows.num_kept_B[:, None] + jnp.arange(-(W - 1), 0)
    from_step_BWC = x_f32_TC[jnp.clip(rows.starts_B1[:-1, None] + index_BW, 0, T - 1)]
    from_tail_BWC = jnp.take_along_axis(
        old_tail_BWC, jnp.clip(index_BW + W - 1, 0, W - 2)[:, :, None], axis=1
    )
    new_tail_BWC = jnp.where((index_BW >= 0)[:, :, None], from_step_BWC, from_tail_BWC)
    return out_TC, tail_BWC.at[rows.slots_B].set(new_tail_BWC, mode="drop")
