"""Run tasks on all cores within a memory budget."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import TypeVar

import jax

Result = TypeVar("Result")
THREADS = min(16, os.cpu_count() or 1)
BYTES = 1 << 30  # default budget; a larger task runs alone


def run_in_parallel(
    tasks: Sequence[Callable[[], Result]], sizes: Sequence[int], max_bytes: int = BYTES
) -> list[Result]:
    """Run all tasks and return their results in order; `sizes` are their bytes against the budget.

    The error of the first failing task is raised; tasks that have not started are cancelled.
    """
    memory_freed = Condition()
    bytes_in_use = 0
    # Thread-local: passed on to the workers.
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]

    def run(task: Callable[[], Result], size: int) -> Result:
        nonlocal bytes_in_use
        with memory_freed:
            memory_freed.wait_for(lambda: not bytes_in_use or bytes_in_use + size <= max_bytes)
            bytes_in_use += size
        try:
            with jax.default_device(device):
                return task()
        finally:
            with memory_freed:
                bytes_in_use -= size
                memory_freed.notify_all()

    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="quire-load")
    try:
        futures = [threads.submit(run, task, size) for task, size in zip(tasks, sizes, strict=True)]
        return [future.result() for future in futures]
    finally:
        threads.shutdown(cancel_futures=True)
