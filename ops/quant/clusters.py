"""Weighted k-means in one dimension."""

import numpy as np

BINS = 128  # bins of sorted values for the first search, if there are more values
CHUNK = 32  # rows that are searched together, which limits the memory
MAX_ITERATIONS = 30  # of the refinement
MIN_MASS = 1e-6  # added to the mass of each value, relative to the row's mean mass


def means(values: np.ndarray, mass: np.ndarray, count: int) -> np.ndarray:
    """The `count` centres of each row [R, N], sorted, that minimise mass * (value - nearest)^2.

    The values of a centre are consecutive in sorted order, so the best cuts are found by dynamic
    programming over at most BINS bins. This is the global minimum for up to BINS values; for more
    it is the start of an iterative refinement.
    """
    order = np.argsort(values, axis=1, kind="stable")
    ordered, mass = (np.take_along_axis(x.astype(np.float64), order, 1) for x in (values, mass))
    total = mass.sum(1, keepdims=True)
    mass = np.where(total > 0, mass + MIN_MASS * total / mass.shape[1], 1)
    centres = np.concatenate(
        [
            best_cuts(values, value_mass, count)
            for values, value_mass in zip(chunks(ordered), chunks(mass), strict=True)
        ]
    )
    return centres if values.shape[1] <= BINS else refine(ordered, mass, centres)


def chunks(x: np.ndarray) -> list[np.ndarray]:
    return [x[start : start + CHUNK] for start in range(0, len(x), CHUNK)]


def best_cuts(values: np.ndarray, mass: np.ndarray, count: int) -> np.ndarray:
    """The means of the best `count` runs of sorted values; with fewer values some are repeated."""
    bounds = np.unique(np.linspace(0, values.shape[1], min(values.shape[1], BINS) + 1).astype(int))
    # centred, since sums of squares would be differences of large numbers
    middle = values.mean(1, keepdims=True)
    sums = [prefixes(mass * (values - middle) ** power)[:, bounds] for power in range(3)]
    M, S, Q = (x[:, None, :] - x[:, :, None] for x in sums)  # [R, from, to]
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = np.where(M > 0, Q - S**2 / M, np.inf)
    R = len(values)
    last = len(bounds) - 1
    min_cost = cost[:, 0]
    cuts = []
    for _ in range(min(count, last) - 1):
        total_cost = min_cost[:, :, None] + cost
        cuts.append(total_cost.argmin(1))
        min_cost = np.take_along_axis(total_cost, cuts[-1][:, None], 1)[:, 0]
    end = np.full(R, last)
    rows = np.arange(R)
    centres = []
    for cut in [*cuts[::-1], np.zeros((R, last + 1), int)]:
        start = cut[rows, end]
        centres.append(S[rows, start, end] / M[rows, start, end] + middle[:, 0])
        end = start
    centres += centres[:1] * (count - len(centres))
    return np.sort(np.stack(centres, 1), 1)


def refine(values: np.ndarray, mass: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Move each centre to the mean of its nearest values, until the assignment is stable."""
    M = prefixes(mass)
    S = prefixes(mass * values)
    bounds = np.zeros((len(values), centres.shape[1] + 1), int)
    bounds[:, -1] = values.shape[1]
    for _ in range(MAX_ITERATIONS):
        midpoints = (centres[:, 1:] + centres[:, :-1]) / 2
        old_bounds = bounds.copy()
        for row, bound, end in zip(values, midpoints, bounds, strict=True):
            end[1:-1] = np.searchsorted(row, bound)
        if (bounds == old_bounds).all():
            break
        mass_sum, value_sum = (np.diff(np.take_along_axis(x, bounds, 1)) for x in (M, S))
        centres = np.divide(value_sum, mass_sum, out=centres.copy(), where=np.diff(bounds) > 0)
    return centres


def prefixes(x: np.ndarray) -> np.ndarray:
    """Prefix sums of each row, from the empty sum on."""
    return np.pad(np.cumsum(x, 1), ((0, 0), (1, 0)))


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The index of the nearest entry of a row's sorted table [R, count] for each value [R, N]."""
    table = table.astype(np.float64)
    midpoints = (table[:, 1:] + table[:, :-1]) / 2
    rows = zip(values.astype(np.float64), midpoints, strict=True)
    return np.stack([np.searchsorted(bound, row) for row, bound in rows]).astype(np.uint8)
