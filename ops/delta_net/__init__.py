"""The gated delta rule, by its recurrence: one token after the other, in float32.

Each head of a sequence keeps a memory, a matrix M from keys to values. A token lets it fade,
corrects what it says of the token's key, and reads it with the token's query:

    M = decay * M
    M = M + k (beta * (v - k M))
    out = q M

Without the correction, where the token's value is added as it is, it is Mamba 2's rule and that of
linear attention:

    M = M + k (beta * v)

A decay may be one number of a head, or one for each number of its keys, as in Kimi Delta Attention.

Done so the bits are the same however a prompt is cut, whoever else is in the step, and when a token
is computed again. Letters beside the package's: K key heads, N value heads, H key size, V value
size, B slots of memories.
"""

from ..implementations import choose
from ..state_rows import StateRows

# Tried in order; one that cannot serve a case declines by raising NotImplementedError with the
# reason.
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
    """(out_TNV, memories), all in float32; N / K value heads share a key head. Padding rows give
    zeros.

    `decay_TN` may be [T, N, H].
    """
    return choose(
        IMPLEMENTATIONS,
        __name__,
        lambda module: module.delta_rule(
            q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV, rows, corrects
        ),
        implementation,
    )
