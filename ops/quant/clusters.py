"""A few numbers that stand for many: k-means in one dimension, each value counting for as much as
its mass.
"""

import numpy as np

# neighbours in order that are taken together first, where there are more values than that
BINS = 128
CHUNK = 32  # rows whose tables are in memory together
ROUNDS = 30  # at most, of moving means to the middle of their values
LEAST = 1e-6  # of a row's mean mass, that each value has


def means(values: np.ndarray, mass: np.ndarray, count: int) -> np.ndarray:
    """The `count` numbers of each row [R, N], in order, such that the sum of mass * (value -
    nearest)^2 is least.

    The very least where a row has at most BINS values: of values in order, each number stands for
    neighbours, and the best way to cut them is found by trying all, a number at a time. Else the
    least that moving them from there finds.
    """
    order = np.argsort(values, axis=1, kind="stable")
    ordered, mass = (np.take_along_axis(x.astype(np.float64), order, 1) for x in (values, mass))
    total = mass.sum(1, keepdims=True)
    mass = np.where(total > 0, mass + LEAST * total / mass.shape[1], 1)
    found = np.concatenate(
        [best_cuts(*pair, count) for pair in zip(*map(chunks, (ordered, mass)), strict=True)]
    )
    return found if values.shape[1] <= BINS else moved(ordered, mass, found)


def chunks(x: np.ndarray) -> list[np.ndarray]:
    return [x[at : at + CHUNK] for at in range(0, len(x), CHUNK)]


def best_cuts(values: np.ndarray, mass: np.ndarray, count: int) -> np.ndarray:
    """The means of the best `count` runs of neighbours; rows with fewer values have some of them
    again.
    """
    ends = np.unique(np.linspace(0, values.shape[1], min(values.shape[1], BINS) + 1).astype(int))
    # sums of squares are differences of large numbers without
    middle = values.mean(1, keepdims=True)
    sums = [prefixes(mass * (values - middle) ** power)[:, ends] for power in range(3)]
    M, S, Q = (x[:, None, :] - x[:, :, None] for x in sums)  # [R, from, to]
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = np.where(M > 0, Q - S**2 / M, np.inf)
    R = len(values)
    last = len(ends) - 1
    least = cost[:, 0]
    cuts = []
    for _ in range(min(count, last) - 1):
        both = least[:, :, None] + cost
        cuts.append(both.argmin(1))
        least = np.take_along_axis(both, cuts[-1][:, None], 1)[:, 0]
    at = np.full(R, last)
    rows = np.arange(R)
    found = []
    for cut in [*cuts[::-1], np.zeros((R, last + 1), int)]:
        start = cut[rows, at]
        found.append(S[rows, start, at] / M[rows, start, at] + middle[:, 0])
        at = start
    found += found[:1] * (count - len(found))
    return np.sort(np.stack(found, 1), 1)


def moved(values: np.ndarray, mass: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Each number moved to the mean of the values that are nearest to it, until none moves."""
    M = prefixes(mass)
    S = prefixes(mass * values)
    ends = np.zeros((len(values), centres.shape[1] + 1), int)
    ends[:, -1] = values.shape[1]
    for _ in range(ROUNDS):
        bounds = (centres[:, 1:] + centres[:, :-1]) / 2
        before = ends.copy()
        for row, bound, end in zip(values, bounds, ends, strict=True):
            end[1:-1] = np.searchsorted(row, bound)
        if (ends == before).all():
            break
        within, total = (np.diff(np.take_along_axis(x, ends, 1)) for x in (M, S))
        centres = np.divide(total, within, out=centres.copy(), where=np.diff(ends) > 0)
    return centres


def prefixes(x: np.ndarray) -> np.ndarray:
    """The sums of the first 0, 1, ... of each row."""
    return np.pad(np.cumsum(x, 1), ((0, 0), (1, 0)))


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The place in a row's table [R, count], which is in order, of the number nearest to each value
    [R, N].
    """
    table = table.astype(np.float64)
    bounds = (table[:, 1:] + table[:, :-1]) / 2
    each = zip(values.astype(np.float64), bounds, strict=True)
    return np.stack([np.searchsorted(bound, row) for row, bound in each]).astype(np.uint8)
