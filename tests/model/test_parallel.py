"""Works on all cores: results in order, few bytes at a time, errors as one after the other would
give them.
"""

import threading
import time

import jax
import pytest

from quire.model.checkpoint import parallel
from quire.model.checkpoint.parallel import run_in_parallel


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.setattr(parallel, "THREADS", 4)


def test_results_in_order_and_bytes_bounded():
    lock = threading.Lock()
    sizes = [5, 1, 3, 2, 9, 1, 1, 4] * 5
    now = []
    seen = []

    def work(index: int) -> int:
        with lock:
            now.append(sizes[index])
            seen.append(tuple(now))
        time.sleep(0.001)
        with lock:
            now.remove(sizes[index])
        return index

    assert run_in_parallel([lambda i=i: work(i) for i in range(40)], sizes, 6) == [*range(40)]
    assert all(sum(each) <= 6 or each == (9,) for each in seen)
    assert max(map(len, seen)) > 1


def test_works_meet():
    """They do go on at the same time."""
    barrier = threading.Barrier(4, timeout=120)
    assert len(run_in_parallel([barrier.wait] * 4, [1] * 4)) == 4


def test_first_error_in_order():
    def fail(wait: float, error: Exception):
        time.sleep(wait)
        raise error

    begun = []
    works = [lambda: fail(0.1, KeyError("first")), lambda: fail(0, ValueError("second"))]
    with pytest.raises(KeyError, match="first"):
        run_in_parallel(works + [lambda: begun.append(time.sleep(0.05))] * 100, [1] * 102)
    assert len(begun) < 100


def test_nothing():
    assert run_in_parallel([], []) == []


def test_the_chosen_device():
    """What the caller has chosen holds in the threads."""
    with jax.default_device(jax.local_devices()[0]):
        chosen = run_in_parallel([lambda: jax.config.jax_default_device] * 3, [1] * 3)
    assert chosen == [jax.local_devices()[0]] * 3
