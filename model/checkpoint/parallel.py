"""Works on all cores, a bounded number of bytes at a time."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import TypeVar

import jax

Result = TypeVar("Result")
THREADS = min(16, os.cpu_count() or 1)
BYTES = 1 << 30  # of the works that go on together, unless one alone has more


def in_parallel(works: Sequence[Callable[[], Result]], sizes: Sequence[int], most: int = BYTES) -> list[Result]:
    """The results of all works, in order; their sizes in bytes say how many may go on together.

    The first work that fails, in their order, is whose error is raised; those that have not begun are left out.
    """
    room, taken = Condition(), 0
    device = jax.config.jax_default_device  # a choice of this thread alone

    def run(work: Callable[[], Result], size: int) -> Result:
        nonlocal taken
        with room:
            room.wait_for(lambda: not taken or taken + size <= most)
            taken += size
        try:
            with jax.default_device(device):
                return work()
        finally:
            with room:
                taken -= size
                room.notify_all()

    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="quire-load")
    try:
        return [future.result() for future in [*map(threads.submit, [run] * len(works), works, sizes)]]
    finally:
        threads.shutdown(cancel_futures=True)
