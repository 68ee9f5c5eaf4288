"""`run_in_parallel`: order of results, bounded bytes in flight, and errors."""

import threading
import time

import jax
import pytest

from quire.model.checkpoint import parallel
from quire.model.checkpoint.parallel import run_in_parallel


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.setattr(parallel, "THREADS", 4)


def test_results_are_in_order_and_bytes_in_flight_are_bounded():
    lock = threading.Lock()
    sizes = [5, 1, 3, 2, 9, 1, 1, 4] * 5
    current = []
    running_sets = []

    def work(index: int) -> int:
        with lock:
            current.append(sizes[index])
            running_sets.append(tuple(current))
        time.sleep(0.001)
        with lock:
            current.remove(sizes[index])
        return index

    assert run_in_parallel([lambda i=i: work(i) for i in range(40)], sizes, 6) == [*range(40)]
    assert all(sum(running) <= 6 or running == (9,) for running in running_sets)
    assert max(map(len, running_sets)) > 1


def test_functions_run_concurrently():
    """All threads reach a barrier."""
    barrier = threading.Barrier(4, timeout=120)
    assert len(run_in_parallel([barrier.wait] * 4, [1] * 4)) == 4


def test_first_error_in_order_is_raised():
    def fail(wait: float, error: Exception):
        time.sleep(wait)
        raise error

    started = []
    failing = [lambda: fail(0.1, KeyError("first")), lambda: fail(0, ValueError("second"))]
    with pytest.raises(KeyError, match="first"):
        run_in_parallel(failing + [lambda: started.append(time.sleep(0.05))] * 100, [1] * 102)
    assert len(started) < 100


def test_no_functions():
    assert run_in_parallel([], []) == []


def test_threads_use_the_callers_default_device():
    """`jax.default_device` of the caller holds in the threads."""
    with jax.default_device(jax.local_devices()[0]):
        chosen = run_in_parallel([lambda: jax.config.jax_default_device] * 3, [1] * 3)
    assert chosen == [jax.local_devices()[0]] * 3
