"""How fast this machine reads memory, which limits decoding on a CPU: `python -m quire.scripts.bench.bandwidth`."""

import time
from concurrent.futures import ThreadPoolExecutor

from ..collect_env import cores


def read_bandwidth(mebibytes: int = 1024, passes: int = 8) -> float:
    """Bytes a second that all cores together read, in the best of a few passes over an array beyond any cache.

    OR is the cheapest reduction that numpy runs in wide registers; it releases the GIL.
    """
    import numpy as np

    array = np.ones(mebibytes << 17, np.uint64)  # ones, so that every page is mapped
    parts = np.array_split(array, cores())
    best = float("inf")
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(passes + 1):  # the first is slow: threads start
            started = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best = min(best, time.perf_counter() - started)
    return array.nbytes / best


if __name__ == "__main__":
    print(f"{read_bandwidth() / 1e9:.1f} GB/s with {cores()} threads")
