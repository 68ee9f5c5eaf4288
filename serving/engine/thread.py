"""Runs the engine in a thread of its own, with jobs of other threads between steps."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..api.errors import NotServing
from .delivery import Outbox
from .engine import Engine

log = logging.getLogger("quire")


class EngineFailed(RuntimeError):
    """The engine has stopped or hangs; the request is not the cause."""


class EngineThread:
    """The only thread that uses the engine; other threads submit jobs."""

    def __init__(self, engine: Engine):
        self.engine, self.clock = engine, engine.clock
        self.outbox = Outbox(engine.clock)
        # without a future nobody waits for it
        self.jobs: deque[tuple[Callable[[], Any], Future | None]] = deque()
        self.wake = threading.Condition()
        self.closed = False
        self.failure: BaseException | None = None
        self.paused = False  # requests are accepted, and wait
        self.busy_since: float | None = None  # when the step or the job under way began
        if engine.runner.leader is not None:
            engine.runner.leader.on_loss.append(self.fail)
        self.thread = threading.Thread(target=self.run, name="quire-engine", daemon=True)
        self.thread.start()

    def submit(self, job: Callable[[], Any]) -> Future:
        """Run a job between two steps; returns its future."""
        future: Future = Future()
        self.post(job, future)
        return future

    def post(self, job: Callable[[], Any], future: Future | None = None) -> None:
        """Run a job between two steps; `future` may be left out."""
        self.engine.lifecycle.check_process()
        with self.wake:
            if self.closed:
                raise NotServing("engine", "is closed")
            self.jobs.append((job, future))
            self.wake.notify()

    def close(self) -> None:
        """Stop the thread; running requests end."""
        if self.engine.lifecycle.is_forked:
            return
        with self.wake:
            self.closed = True
            self.wake.notify()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def close_at_exit(self) -> None:
        """Close at process exit, without waiting for a step that may hang."""
        if self.failure is None:
            self.close()

    def stalled(self) -> float:
        """Seconds since the current step or job began."""
        since = self.busy_since
        return 0.0 if since is None else self.clock() - since

    def awaited(self) -> bool:
        """Whether a reader or a caller waits for this thread."""
        with self.wake:
            return bool(self.outbox.listeners) or any(future is not None for _, future in self.jobs)

    def give_up(self, error: Exception) -> None:
        """End everything that waits with an error, since the step may never return; from another
        thread.
        """
        with self.wake:
            waited = [future for _, future in self.jobs if future is not None]
            self.jobs = deque(entry for entry in self.jobs if entry[1] is None)
        for future in waited:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self.outbox.give_up(error)

    def fail(self, error: Exception) -> None:
        """Mark the engine as failed."""
        self.failure = error
        with self.wake:
            self.closed = True
            self.wake.notify()
        self.give_up(EngineFailed("the engine has stopped"))

    def run(self) -> None:
        """Serve until closed; everything that waits gets an answer in any case."""
        try:
            self.serve()
        except BaseException as error:
            if self.failure is None:  # else the reason is known already
                log.exception("the engine's loop failed; it serves no more")
                self.failure = error
        finally:
            with self.wake:
                self.closed = True
            aborted = [self.engine.abort(name) for name in list(self.engine.requests)]
            self.outbox.note([request for request in aborted if request is not None])
            self.outbox.send()
            self.outbox.give_up(EngineFailed("the engine has stopped"))
            for _, future in self.jobs:
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(NotServing("engine", "is closed"))
            try:
                self.engine.close()
            except Exception:
                log.exception("the engine could not be closed")

    def serve(self) -> None:
        """Run jobs, then a step, while there is either."""
        engine = self.engine
        outbox = self.outbox
        while True:
            self.busy_since = None
            with self.wake:
                while not (self.jobs or self.closed or (engine.busy and not self.paused)):
                    seconds_left = engine.deadlines.seconds_left(self.clock())
                    # of a request that waits while the engine sleeps or is paused
                    if seconds_left == 0:
                        break
                    self.wake.wait(seconds_left)
                if self.closed:
                    return
                jobs = list(self.jobs)
                self.jobs.clear()
            self.busy_since = self.clock()
            for job, future in jobs:
                run(job, future)
            can_step = not (self.paused or engine.lifecycle.is_asleep)
            outbox.note(engine.step() if can_step else engine.expire(self.clock()))
            if self.paused or not engine.busy:
                outbox.send()
            else:
                outbox.deliver_due()


def run(job: Callable[[], Any], future: Future | None) -> None:
    """Run a job and set its future; a cancelled job is skipped."""
    if future is None:
        job()
    elif future.set_running_or_notify_cancel():
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
