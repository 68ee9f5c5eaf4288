"""GPTQ (arXiv 2210.17323): columns are rounded one by one, and those to come take up what each one lost."""

import numpy as np

from ..config import ModelError
from .grid import Coded, Grid

BLOCK = 128  # columns that are finished before the others hear of their errors
TRIES = 4  # at making H positive definite, each with ten times the damping of the one before


def gptq(W: np.ndarray, H: np.ndarray, grid: Grid, act_order: bool = False, damp: float = 0.01) -> Coded:
    """W [O, I] in codes such that (W - Q) H (W - Q)^T is small, where H [I, I] is the sum of x x^T over the rows x.

    `act_order`: the columns with the largest inputs come first, when all others can still take up their errors. Scales
    are then those of W as it is given ("static groups"), and codes stay in the order of the columns.
    """
    O, I = W.shape  # noqa: E741 - the paper's letters have these sizes
    size = grid.group or I
    static = act_order or grid.group is None
    scales, zeros = grid.fit(W)
    order = np.argsort(-np.diag(H), kind="stable") if act_order else np.arange(I)
    U = inverse_cholesky(H[np.ix_(order, order)], damp).astype(np.float32)
    W = np.asfortranarray(W[:, order], np.float32)
    codes = np.empty((O, I), np.uint8)
    block = size * max(1, BLOCK // size) if not static else BLOCK  # whole groups
    for start in range(0, I, block):
        stop = min(start + block, I)
        E = np.empty((O, stop - start), np.float32)
        for i in range(start, stop):
            g = order[i] // size
            if not static and i % size == 0:  # of the columns as they are now
                scales[:, g : g + 1], zeros[:, g : g + 1] = grid.fit(W[:, i : i + size])
            scale, zero = scales[:, g].astype(np.float32), zeros[:, g]
            q = grid.codes(W[:, i], scale, zero)
            codes[:, order[i]] = q
            e = (W[:, i] - (q - zero) * scale) / U[i, i]
            W[:, i:stop] -= np.outer(e, U[i, i:stop])
            E[:, i - start] = e
        W[:, stop:] -= E @ U[start:stop, stop:]
    return Coded(codes, scales, zeros)


def inverse_cholesky(H: np.ndarray, damp: float) -> np.ndarray:
    """The upper triangular U with U^T U = (H + damping)^-1; an input that was always zero is no other's neighbour."""
    H = H.astype(np.float64)
    if not np.isfinite(H).all():
        raise ModelError("the calibration text makes inputs that are no finite numbers")
    dead = np.diag(H) == 0
    H[dead, dead] = 1
    mean = np.mean(np.diag(H)[~dead]) if not dead.all() else 0.0
    for _ in range(TRIES):
        try:
            # H turned end to end is L L^T, so H is R R^T with R = L turned, which is upper; and U is its inverse.
            L = np.linalg.cholesky((H + damp * mean * np.eye(len(H)))[::-1, ::-1])
            return np.triu(np.linalg.inv(L[::-1, ::-1]))
        except np.linalg.LinAlgError:
            damp = max(10 * damp, 1e-6)
    raise ModelError("inputs over the calibration text depend on each other too closely, even damped; give more text")
