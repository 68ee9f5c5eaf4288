"""The delta rule by one kernel for Hopper GPUs, `quire.ops.delta_net.hopper_kernel`.

The kernel is used for the kinds of heads for which it passed its self-test on this GPU. It is
batch-invariant: each head of a sequence is computed separately, and its sums have a fixed order.
"""

from pathlib import Path
from typing import Any

from ..gpu import TILE_SOURCE, device
from ..gpu.self_test import SelfTestedKernel, require_pass
from .shape import LINE, MAX_KEYS, THREADS, VALUES

SOURCES = *Path(__file__).parent.glob("*.py"), TILE_SOURCE
KERNEL = SelfTestedKernel(f"{__package__}.accuracy", "the delta rule", SOURCES)


def delta_rule(
    q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV, rows, corrects, *, interpret: Any = None
):
    """See `quire.ops.delta_net.delta_rule`.

    With `interpret` the kernel runs in Pallas' interpreter.
    """
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    arrays = q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV
    if reasons := unsupported_reasons(arrays):
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, kind(arrays, corrects))
    from .hopper_kernel import delta_rule  # imported late, since it imports a compiler

    return delta_rule(*arrays, rows, corrects, interpret)


def unsupported_reasons(arrays) -> list[str]:
    """All reasons why the kernel does not support a case."""
    _, K, H = arrays[0].shape
    _, N, V = arrays[2].shape
    reasons = []
    if dtypes := {str(x.dtype) for x in arrays} - {"float32"}:
        reasons.append(f"all arrays must be float32, not {' and '.join(sorted(dtypes))}")
    if V not in VALUES:
        reasons.append(f"a value must have {' or '.join(map(str, VALUES))} numbers, not {V}")
    elif N // K % (THREADS // V):
        reasons.append(f"{THREADS // V} heads of {V} numbers side by side must share a key")
    if H % LINE or H > MAX_KEYS:
        reasons.append(f"a key must have a multiple of {LINE} numbers, at most {MAX_KEYS}, not {H}")
    return reasons


def kind(arrays, corrects: bool) -> dict:
    """The key of the case's self-test: all that the kernel is specialised for."""
    _, K, H = arrays[0].shape
    _, N, V = arrays[2].shape
    return {
        "keys": H,
        "values": V,
        "shared": N // K,
        "by_key": arrays[3].ndim == 3,
        "corrects": bool(corrects),
    }


def varies() -> None:
    """Batch-invariant; see `quire.ops.implementations`."""
