"""AWQ (arXiv 2306.00978): scales, folded into preceding layers, give large inputs finer steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .grid import Grid, nearest_columns

GRID = 20  # number of alphas, and of clipping factors
LEAST = 0.5  # the smallest clipping factor
SAMPLE = 128  # outputs, evenly spaced, on which alphas are compared


def scales(W: np.ndarray, H: np.ndarray, size: np.ndarray, grid: Grid) -> np.ndarray:
    """The scales s [I] for which Q(W s) / s loses least, for inputs whose sum of x x^T is H.

    s = size^alpha for the best of several alphas; alpha 0 leaves W unchanged.

    Args:
        W: [O, I], the outputs of all matrices that share the inputs.
        size: [I], the magnitude of each input.
    """
    W = W[:: -(-len(W) // SAMPLE)]
    best = np.ones(W.shape[1], np.float32)
    least_loss = np.inf
    for alpha in np.arange(GRID) / GRID:
        s = np.maximum(size**alpha, 1e-4).astype(np.float32)
        s /= np.sqrt(s.max() * s.min())
        if (candidate_loss := loss(grid.nearest(W * s) / s - W, H).sum()) < least_loss:
            best = s
            least_loss = candidate_loss
    return best


def loss(D: np.ndarray, H: np.ndarray) -> np.ndarray:
    """For each output, the sum over all inputs x of (D x)^2."""
    return ((D @ H) * D).sum(1)


def clip_weights(W: np.ndarray, H: np.ndarray, grid: Grid) -> np.ndarray:
    """Clip the largest weights of each group of W [O, I] where finer steps reduce the loss."""
    O, I = W.shape  # noqa: E741 - dimensions: outputs, inputs
    size = grid.group or W.shape[1]
    starts = range(0, I, size)
    padded = -(-I // size) * size
    values_GSO = np.pad(W.T.astype(np.float32), ((0, padded - I), (0, 0))).reshape(-1, size, O)
    H = np.pad(H.astype(np.float32), (0, padded - I))
    H_GSS = np.stack([H[start : start + size, start : start + size] for start in starts])
    return np.asarray(clip_groups(values_GSO, H_GSS, grid)).reshape(padded, O)[:I].T


@partial(jax.jit, static_argnames="grid")
def clip_groups(values_GSO, H_GSS, grid: Grid):
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
