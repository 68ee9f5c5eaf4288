"""QuIP# (arXiv 2402.04396): GPTQ on lattice points of eight columns, after a Hadamard transform."""

import numpy as np

from ...ops.quant import e8p
from ...ops.quant.hadamard import rotated
from .gptq import BLOCK, inverse_cholesky


def quip(
    W: np.ndarray, H: np.ndarray, bits: int, damp: float = 0.01
) -> tuple[np.ndarray, np.ndarray]:
    """(codes [stages, O, I / 8], scales [O, 1]) with a small (W - Q) H (W - Q)^T, as in `gptq`."""
    W = np.asfortranarray(rotated(W))
    H = rotated(rotated(H.astype(np.float32)).T)
    exact = W.copy()
    scale = e8p.output_scales(W, bits)
    codes = []
    step = np.where(scale > 0, scale, 1)
    U = inverse_cholesky(H, damp).astype(np.float32)
    for start in range(0, W.shape[1], BLOCK):
        stop = min(start + BLOCK, W.shape[1])
        E = np.empty((len(W), stop - start), np.float32)
        for i in range(start, stop, e8p.SIZE):
            columns = np.s_[i : i + e8p.SIZE]
            block_columns = np.s_[i - start : i - start + e8p.SIZE]
            code, Q = e8p.quantize_points(W[:, columns] / step, bits)
            codes.append(code)
            e = (W[:, columns] - Q * scale) @ np.linalg.inv(U[columns, columns])
            W[:, columns] = Q
            W[:, i + e8p.SIZE : stop] -= e @ U[columns, i + e8p.SIZE : stop]
            E[:, block_columns] = e
        W[:, stop:] -= E @ U[start:stop, stop:]
    # The least-squares scales for these lattice points.
    WH = W @ H
    numerator = (exact * WH).sum(1, keepdims=True)
    denominator = (W * WH).sum(1, keepdims=True)
    scale = np.divide(
        numerator, denominator, out=scale.copy(), where=(denominator > 0) & (scale > 0)
    )
    return np.concatenate(codes, axis=2), scale
