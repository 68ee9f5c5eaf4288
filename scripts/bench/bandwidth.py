"""The machine's memory read bandwidth, which limits decoding on CPUs: `python -m
quire.scripts.bench.bandwidth`.
"""

import time
from concurrent.futures import ThreadPoolExecutor

from ..collect_env import cores


def read_bandwidth(mebibytes: int = 1024, passes: int = 8) -> float:
    """Bytes per second that all cores read together, in the best of a few passes over an array
    beyond any cache.

    OR is NumPy's cheapest vectorised reduction; it releases the GIL.
    """
    import numpy as np

    array = np.ones(mebibytes << 17, np.uint64)  # ones, to map every page
    chunks = np.array_split(array, cores())
    best = float("inf")
    with ThreadPoolExecutor(len(chunks)) as pool:
        for _ in range(passes + 1):  # the first pass starts threads
            started = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, chunks))
            best = min(best, time.perf_counter() - started)
    return array.nbytes / best


if __name__ == "__main__":
    print(f"{read_bandwidth() / 1e9:.1f} GB/s with {cores()} threads")
