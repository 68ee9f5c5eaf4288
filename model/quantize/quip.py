"""QuIP# (arXiv 2402.04396): GPTQ of eight columns at a time, to points of a lattice, after a Hadamard transform."""

import numpy as np

from ...ops.quant import e8p
from ...ops.quant.hadamard import rotated
from .gptq import BLOCK, inverse_cholesky

WIDER = 1.1  # what columns take up from those before makes them larger than the weights that scales are made for
PASSES = 3  # after the first, in which each eight columns are chosen anew beside all others


def quip(
    W: np.ndarray, H: np.ndarray, bits: int, damp: float = 0.01, passes: int = PASSES
) -> tuple[np.ndarray, np.ndarray]:
    """(codes [stages, O, I / 8], scales [O, 1]) such that (W - Q) H (W - Q)^T is small for W [O, I], as in `gptq`."""
    W, H = np.asfortranarray(rotated(W)), rotated(rotated(H.astype(np.float32)).T)
    exact, scale = W.copy(), e8p.scales(W, bits) * np.float32(WIDER if bits == 2 else 1)
    step = np.where(scale > 0, scale, 1)
    codes = np.empty((bits // 2, len(W), W.shape[1] // e8p.SIZE), np.uint16)
    U = inverse_cholesky(H, damp).astype(np.float32)
    for start in range(0, W.shape[1], BLOCK):
        stop = min(start + BLOCK, W.shape[1])
        E = np.empty((len(W), stop - start), np.float32)
        for i in range(start, stop, e8p.SIZE):
            part, own = np.s_[i : i + e8p.SIZE], np.s_[i - start : i - start + e8p.SIZE]
            code, Q = e8p.rounded(W[:, part] / step, bits)
            codes[:, :, i // e8p.SIZE] = code[..., 0]
            e = (W[:, part] - Q * scale) @ np.linalg.inv(U[part, part])
            W[:, part] = Q
            W[:, i + e8p.SIZE : stop] -= e @ U[part, i + e8p.SIZE : stop]
            E[:, own] = e
        W[:, stop:] -= E @ U[start:stop, stop:]
    scale = best_scales(exact, W, H, scale)
    for _ in range(passes):
        again(exact, H, codes, W, scale, bits)
        scale = best_scales(exact, W, H, scale)
    return codes, scale


def best_scales(W: np.ndarray, Q: np.ndarray, H: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Those of each output's points Q that lose least; outputs of zeros keep theirs."""
    QH = Q @ H
    above, below = (W * QH).sum(1, keepdims=True), (Q * QH).sum(1, keepdims=True)
    return np.divide(above, below, out=scale.copy(), where=(below > 0) & (scale > 0))


def again(W: np.ndarray, H: np.ndarray, codes: np.ndarray, Q: np.ndarray, scale: np.ndarray, bits: int) -> None:
    """Choose each eight columns of the points Q anew, in place, where (W - Q) H (W - Q)^T falls by it."""
    step = np.where(scale > 0, scale, 1)
    G = (W - Q * scale) @ H
    for i in range(0, W.shape[1], e8p.SIZE):
        part = np.s_[i : i + e8p.SIZE]
        # Where the derivative by these eight is zero; inputs that are always zero have none.
        moved = G[:, part] @ np.linalg.pinv(H[part, part], hermitian=True)
        code, found = e8p.rounded(Q[:, part] + moved / step, bits)
        d = (found - Q[:, part]) * scale
        worse = ((d @ H[part, part] - 2 * G[:, part]) * d).sum(1) >= 0
        d[worse] = 0
        Q[~worse, part], codes[:, ~worse, i // e8p.SIZE] = found[~worse], code[:, ~worse, 0]
        G -= d @ H[part]
