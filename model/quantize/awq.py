"""AWQ (arXiv 2306.00978): inputs that are large get finer steps, by scales that are taken off again before them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .grid import Grid, nearest_columns

GRID = 20  # values of alpha, and of how far weights are clipped
LEAST = 0.5  # of a group's largest weight that is left by clipping
SAMPLE = 128  # outputs, spread over all of them, on which values of alpha are compared


def scales(W: np.ndarray, H: np.ndarray, size: np.ndarray, grid: Grid) -> np.ndarray:
    """s [I] such that Q(W s) / s serves best the rows whose sum of x x^T is H; `size` [I] is how large inputs are.

    W [O, I] has the outputs of all matrices that share the inputs. s = size^alpha, by the best of some alphas, of which
    0 leaves W as it is.
    """
    W = W[:: -(-len(W) // SAMPLE)]
    best, least = np.ones(W.shape[1], np.float32), np.inf
    for alpha in np.arange(GRID) / GRID:
        s = np.maximum(size**alpha, 1e-4).astype(np.float32)
        s /= np.sqrt(s.max() * s.min())
        if (lost := loss(grid.nearest(W * s) / s - W, H).sum()) < least:
            best, least = s, lost
    return best


def loss(D: np.ndarray, H: np.ndarray) -> np.ndarray:
    """By output, the sum over all rows x of (D x)^2."""
    return ((D @ H) * D).sum(1)


def clipped(W: np.ndarray, H: np.ndarray, grid: Grid) -> np.ndarray:
    """W [O, I] with the largest weights of a group cut off where its rounded others gain more than they lose."""
    (O, I), size = W.shape, grid.group or W.shape[1]  # noqa: E741
    starts = range(0, I, size)
    padded = -(-I // size) * size
    values_GSO = np.pad(W.T.astype(np.float32), ((0, padded - I), (0, 0))).reshape(-1, size, O)
    H = np.pad(H.astype(np.float32), (0, padded - I))
    H_GSS = np.stack([H[start : start + size, start : start + size] for start in starts])
    return np.asarray(clipped_groups(values_GSO, H_GSS, grid)).reshape(padded, O)[:I].T


@partial(jax.jit, static_argnames="grid")
def clipped_groups(values_GSO, H_GSS, grid: Grid):
    def clip(group):
        values_SO, H_SS = group
        top_O = jnp.abs(values_SO).max(0)

        def better(best, factor):
            cut_SO = jnp.clip(values_SO, -factor * top_O, factor * top_O)
            D_SO = nearest_columns(cut_SO, grid) - values_SO
            lost_O = (D_SO * jnp.matmul(H_SS, D_SO, precision="highest")).sum(0)
            return jax.tree.map(partial(jnp.where, lost_O < best[0]), (lost_O, cut_SO), best), None

        factors = 1 - jnp.arange(int(GRID * LEAST) + 1, dtype=jnp.float32) / GRID
        untouched = jnp.full(top_O.shape, jnp.inf), values_SO
        return jax.lax.scan(better, untouched, factors)[0][1]

    return jax.lax.map(clip, (values_GSO, H_GSS))
