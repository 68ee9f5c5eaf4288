"""AWQ (arXiv 2306.00978): inputs that are large get finer steps, by scales that are taken off again before them."""

import numpy as np

from .grid import Grid

GRID = 20  # values of alpha, and of how far weights are clipped
LEAST = 0.5  # of a group's largest weight that is left by clipping


def scales(W: np.ndarray, H: np.ndarray, size: np.ndarray, grid: Grid) -> np.ndarray:
    """s [I] such that Q(W s) / s serves best the rows whose sum of x x^T is H; `size` [I] is how large inputs are.

    W [O, I] has the outputs of all matrices that share the inputs. s = size^alpha, by the best of some alphas, of which
    0 leaves W as it is.
    """
    best, least = np.ones(W.shape[1], np.float32), np.inf
    for alpha in np.arange(GRID) / GRID:
        s = np.maximum(size**alpha, 1e-4).astype(np.float32)
        s /= np.sqrt(s.max() * s.min())
        if (lost := loss(grid.nearest(W * s) / s - W, H).sum()) < least:
            best, least = s, lost
    return best


def clipped(W: np.ndarray, H: np.ndarray, grid: Grid) -> np.ndarray:
    """W [O, I] with the largest weights of a group cut off where its rounded others gain more than they lose."""
    size, out = grid.group or W.shape[1], W.astype(np.float32)
    for start in range(0, W.shape[1], size):
        part = np.s_[start : start + size]
        own, own_H = W[:, part].astype(np.float32), H[part, part]
        top, least = np.abs(own).max(1, keepdims=True), np.full(len(W), np.inf)
        for step in range(int(GRID * LEAST) + 1):
            bound = top * (1 - step / GRID)
            cut = np.clip(own, -bound, bound)
            lost = loss(grid.nearest(cut) - own, own_H)
            better = lost < least
            out[better, part], least[better] = cut[better], lost[better]
    return out


def loss(D: np.ndarray, H: np.ndarray) -> np.ndarray:
    """By output, the sum over all rows x of (D x)^2."""
    return ((D @ H) * D).sum(1)
