"""The delta rule by one kernel on NVIDIA GPUs, which is in `quire.ops.delta_net.hopper_kernel`.

It serves the kinds of heads in which it passed its trial on this card. A row's bits are the same in
any company: each head of a sequence is computed by itself, and its sums are in one order.
"""

from pathlib import Path
from typing import Any

from ..gpu import TILE_SOURCE, device
from ..gpu.self_test import SelfTestedKernel, require_pass
from .shape import LINE, MOST_KEYS, THREADS, VALUES

SOURCES = *Path(__file__).parent.glob("*.py"), TILE_SOURCE
KERNEL = SelfTestedKernel(f"{__package__}.accuracy", "the delta rule", SOURCES)


def delta_rule(
    q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV, rows, corrects, *, interpret: Any = None
):
    """See `quire.ops.delta_net.delta_rule`.

    With `interpret` it runs in Pallas' interpreter, on a CPU.
    """
    if interpret is None and (declined := device.no_hopper_reason()):
        raise NotImplementedError(declined)
    arrays = q_TKH, k_TKH, v_TNV, decay_TN, beta_TN, memory_BNHV
    if reasons := refusals(arrays):
        raise NotImplementedError(", and ".join(reasons))
    if interpret is None:
        require_pass(KERNEL, kind(arrays, corrects))
    from .hopper_kernel import delta_rule  # only now: it imports a compiler

    return delta_rule(*arrays, rows, corrects, interpret)


def refusals(arrays) -> list[str]:
    """All reasons for which the kernel cannot serve a case."""
    _, K, H = arrays[0].shape
    _, N, V = arrays[2].shape
    found = []
    if dtypes := {str(x.dtype) for x in arrays} - {"float32"}:
        found.append(f"all arrays must be float32, not {' and '.join(sorted(dtypes))}")
    if V not in VALUES:
        found.append(f"a value must have {' or '.join(map(str, VALUES))} numbers, not {V}")
    elif N // K % (THREADS // V):
        found.append(f"{THREADS // V} heads of {V} numbers side by side must share a key")
    if H % LINE or H > MOST_KEYS:
        found.append(f"a key must have a multiple of {LINE} numbers, at most {MOST_KEYS}, not {H}")
    return found


def kind(arrays, corrects: bool) -> dict:
    """What the kernel is compiled for."""
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
    """A row's bits are the same in any company."""
