"""QuIP# (arXiv 2402.04396): GPTQ of eight columns at a time, to points of a lattice, after a Hadamard transform."""

import numpy as np

from ...ops.quant import e8p
from ...ops.quant.hadamard import rotated
from .gptq import BLOCK, inverse_cholesky


def quip(W: np.ndarray, H: np.ndarray, bits: int, damp: float = 0.01) -> tuple[np.ndarray, np.ndarray]:
    """(codes [stages, O, I / 8], scales [O, 1]) such that (W - Q) H (W - Q)^T is small for W [O, I], as in `gptq`."""
    W, H = np.asfortranarray(rotated(W)), rotated(rotated(H.astype(np.float32)).T)
    exact, scale, codes = W.copy(), e8p.scales(W, bits), []
    step = np.where(scale > 0, scale, 1)
    U = inverse_cholesky(H, damp).astype(np.float32)
    for start in range(0, W.shape[1], BLOCK):
        stop = min(start + BLOCK, W.shape[1])
        E = np.empty((len(W), stop - start), np.float32)
        for i in range(start, stop, e8p.SIZE):
            part, own = np.s_[i : i + e8p.SIZE], np.s_[i - start : i - start + e8p.SIZE]
            code, Q = e8p.rounded(W[:, part] / step, bits)
            codes.append(code)
            e = (W[:, part] - Q * scale) @ np.linalg.inv(U[part, part])
            W[:, part] = Q
            W[:, i + e8p.SIZE : stop] -= e @ U[part, i + e8p.SIZE : stop]
            E[:, own] = e
        W[:, stop:] -= E @ U[start:stop, stop:]
    # The best scales of these points.
    WH = W @ H
    above, below = (exact * WH).sum(1, keepdims=True), (W * WH).sum(1, keepdims=True)
    scale = np.divide(above, below, out=scale.copy(), where=(below > 0) & (scale > 0))
    return np.concatenate(codes, axis=2), scale
