"""The gated delta rule as a recurrence over tokens, in float32.

The recurrent state of each head is its memory, a matrix M from keys to values. A token decays the
memory, corrects the value that it stores for the token's key, and reads it with the token's query:

    M = decay * M
    M = M + k (beta * (v - k M))
    out = q M

Without the correction it is the rule of Mamba 2 and linear attention, which adds the value itself:

    M = M + k (beta * v)

The decay is one number per head, or one per key element, as in Kimi Delta Attention.

Because tokens are computed one after the other, the results do not depend on how a prompt is cut
into chunks, on the rest of the batch, or on whether a token is recomputed. Additional dimension
letters: K key heads, N value heads, H key size, V value size, B slots of memories.
"""

from ..implementations import choose
from ..state_rows import StateRows

# Tried in order; one that does not support a case raises NotImplementedError with its reasons.
IMPLEMENTATIONS = {"mosaic_gpu": ".hopper", "native": ".cpu", "xla": ".xla"}


def delta_rule(
    q_TKH,
    k_TKH,
    v_TNV,
    decay_TN,
    beta_TN,
    memory_BNHV,
    rows: StateRows,
    corrects: bool = True,
    implementation: str | None = None,
):
    """Apply the delta rule to the tokens of a step. All arrays are float32.

    Args:
        q_TKH: queries; N / K value heads share a query head and a key head.
        k_TKH: keys.
        v_TNV: values.
        decay_TN: decays, one per head, or [T, N, H] with one per key element.
        beta_TN: strengths of the update.
        memory_BNHV: the memories by slot.
        rows: the sequences of the step.
        corrects: whether the value that is stored for the key is subtracted.
        implementation: the name in IMPLEMENTATIONS of the only one to try.

    Returns:
        (out_TNV, memories). The output of padding tokens is zero.
    """
    return choose(
        IMPLEMENTATIONS,
        __name__,
        lambda module: module.delta_rule(
            q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV, rows, corrects
        ),
        implementation,
    )
