"""A fair lock for threads that share an engine."""

from collections import deque
from threading import Lock


class Turns:
    """A first-in-first-out lock: `with turns: engine.step()`.

    A plain lock is mostly reacquired by the thread that has just released it, so another thread
    would wait until the first has no more steps.
    """

    def __init__(self):
        self.lock = Lock()
        self.taken = False
        self.waiting: deque[Lock] = deque()  # held by those who wait, until it is their turn

    def __enter__(self) -> None:
        with self.lock:
            if not self.taken:
                self.taken = True
                return
            turn = Lock()
            turn.acquire()
            self.waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C
            with self.lock:
                is_waiting = turn in self.waiting
                if is_waiting:
                    self.waiting.remove(turn)
            if not is_waiting:  # it has come to its turn meanwhile
                self.__exit__()
            raise

    def __exit__(self, *exception: object) -> None:
        with self.lock:
            if self.waiting:
                self.waiting.popleft().release()
            else:
                self.taken = False
