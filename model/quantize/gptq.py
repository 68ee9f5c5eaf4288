"""GPTQ (arXiv 2210.17323): round columns in turn; later columns compensate earlier errors."""

import math

import numpy as np

from ..config import ModelError
from .grid import CodedMatrix, Grid, reciprocals

BLOCK = 128  # columns whose errors are propagated past the block by one matrix product
STRIP = 8  # columns whose errors are propagated within the block by one product
DAMP = 0.1  # more than the paper's 0.01, to overfit the calibration text less
TRIES = 4  # attempts to make H positive definite, each with ten times the damping


def gptq(
    W: np.ndarray,
    H: np.ndarray,
    grid: Grid,
    act_order: bool = False,
    damp: float = DAMP,
    search: bool = True,
) -> CodedMatrix:
    """Codes Q of W [O, I] with a small (W - Q) H (W - Q)^T, where H [I, I] is the sum of x x^T.

    With H = M D M^T, M unit upper triangular and D diagonal, that loss is the sum over columns k of
    D_k |(W - Q) M_k|^2, and (W - Q) M_k depends on columns up to k alone. So column k is rounded
    after the errors of the columns before it, weighted by M_k, have been added. This is the rule of
    the paper (arXiv 2307.13304 proves it), without an inverse of H.

    Args:
        act_order: Round the columns with the largest inputs first. Scales are then those of the
            original W ("static groups"), and codes stay in the order of the columns.
        search: Choose scales by `Grid.best_fit`, in which D_k weighs the errors of column k.
        damp: Share of the mean of H's diagonal that is added to the diagonal.
    """
    O, I = W.shape  # noqa: E741 - the paper's letters have these sizes
    size = grid.group or I
    static = act_order or grid.group is None
    order = np.argsort(-np.diag(H), kind="stable") if act_order else np.arange(I)
    R = upper_cholesky(H[np.ix_(order, order)], damp)
    M = (R / np.diag(R)).astype(np.float32)
    weight = np.empty(I, np.float32)
    weight[order] = np.square(np.diag(R))
    fit = grid.best_fit if search else lambda values, _: grid.fit(values)
    exact_IO = np.ascontiguousarray(W[:, order].T, np.float32)
    target_IO = exact_IO.copy()  # columns with the propagated errors added
    codes_IO = np.empty((I, O), np.uint8)
    scales, zeros = fit(W, weight)
    scales_GO, zeros_GO = (np.ascontiguousarray(shared.T, np.float32) for shared in (scales, zeros))
    inverse_GO = reciprocals(scales_GO)
    least, largest = grid.limits
    block = BLOCK if static else size * max(1, BLOCK // size)  # whole groups
    strip = STRIP if static else math.gcd(size, STRIP)
    for start in range(0, I, block):
        stop = min(start + block, I)
        error_IO = np.empty((stop - start, O), np.float32)
        for first in range(start, stop, strip):
            last = min(first + strip, stop)
            for i in range(first, last):
                g = order[i] // size
                if not static and i % size == 0:
                    # The group with the errors so far compensated best.
                    group = np.s_[i : i + size]
                    moved_IO = np.linalg.solve(
                        M[group, group].T, target_IO[group] - exact_IO[group]
                    )
                    scales[:, g : g + 1], zeros[:, g : g + 1] = fit(
                        (exact_IO[group] + moved_IO).T, weight[group]
                    )
                    scales_GO[g] = scales[:, g]
                    zeros_GO[g] = zeros[:, g]
                    inverse_GO[g] = reciprocals(scales_GO[g])
                code = np.rint(target_IO[i] * inverse_GO[g]) + zeros_GO[g]
                code = np.minimum(np.maximum(code, least), largest)
                codes_IO[order[i]] = code
                error_IO[i - start] = exact_IO[i] - (code - zeros_GO[g]) * scales_GO[g]
                target_IO[i + 1 : last] += M[i, i + 1 : last, None] * error_IO[i - start]
            target_IO[last:stop] += (
                M[first:last, last:stop].T @ error_IO[first - start : last - start]
            )
        target_IO[stop:] += M[start:stop, stop:].T @ error_IO
    return CodedMatrix(np.ascontiguousarray(codes_IO.T), scales, zeros)


def upper_cholesky(H: np.ndarray, damp: float) -> np.ndarray:
    """The upper triangular R with R R^T = H + damping, in float64.

    Inputs that are always zero get a diagonal of 1.
    """
    H = H.astype(np.float64)
    if not np.isfinite(H).all():
        raise ModelError("the calibration text makes inputs that are not finite")
    diagonal = np.einsum("ii->i", H)
    dead = diagonal == 0
    diagonal[dead] = 1
    mean = np.mean(diagonal[~dead]) if not dead.all() else 0.0
    exact = diagonal.copy()
    for _ in range(TRIES):
        diagonal[:] = exact + damp * mean
        try:
            # The reversed H is L L^T, so H is R R^T with R the reversed L.
            return np.linalg.cholesky(H[::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError:
            damp = max(10 * damp, 1e-6)
    raise ModelError(
        "inputs over the calibration text depend on each other too closely, even damped; give "
        "more text"
    )


def inverse_cholesky(H: np.ndarray, damp: float) -> np.ndarray:
    """The upper triangular U with U^T U = (H + damping)^-1."""
    return np.triu(np.linalg.inv(upper_cholesky(H, damp)))
