"""Measure the machine's memory read bandwidth, which limits decoding on CPUs: `python -m
quire.scripts.bench.bandwidth`.
"""

import time
from concurrent.futures import ThreadPoolExecutor

from ..collect_env import cores


def read_bandwidth(mebibytes: int = 1024, passes: int = 8) -> float:
    """Measure the read bandwidth of all cores in bytes per second: the best of several passes over
    an array larger than the caches.

    Uses bitwise OR, NumPy's cheapest vectorised reduction, which releases the GIL.
    """
    import numpy as np

    array = np.ones(mebibytes << 17, np.uint64)  # ones, not empty: maps every memory page
    chunks = np.array_split(array, cores())
    best = float("inf")
    with ThreadPoolExecutor(len(chunks)) as pool:
        for _ in range(passes + 1):  # one more, because the first pass starts the threads
            started = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, chunks))
            best = min(best, time.perf_counter() - started)
    return array.nbytes / best


if __name__ == "__main__":
    print(f"{read_bandwidth() / 1e9:.1f} GB/s with {cores()} threads")
