"""The engine in a thread of its own, which runs other threads' jobs between two steps."""

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
    """The engine has stopped or hangs; the request is not at fault."""


class EngineThread:
    """Only this thread touches the engine; other threads leave it jobs."""

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
        """Run a job between two steps."""
        future: Future = Future()
        self.post(job, future)
        return future

    def post(self, job: Callable[[], Any], future: Future | None = None) -> None:
        """Run a job between two steps; whoever does not need its result gives no future."""
        self.engine.lifecycle.check_process()
        with self.wake:
            if self.closed:
                raise NotServing("engine", "is closed")
            self.jobs.append((job, future))
            self.wake.notify()

    def close(self) -> None:
        """Stop the thread; requests under way end."""
        if self.engine.lifecycle.is_forked:
            return
        with self.wake:
            self.closed = True
            self.wake.notify()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def close_at_exit(self) -> None:
        """The same where nobody may wait for a step that never ends."""
        if self.failure is None:
            self.close()

    def stalled(self) -> float:
        """Seconds since the step or the job under way began."""
        since = self.busy_since
        return 0.0 if since is None else self.clock() - since

    def awaited(self) -> bool:
        """Whether a reader or a caller waits for this thread."""
        with self.wake:
            return bool(self.outbox.listeners) or any(future is not None for _, future in self.jobs)

    def give_up(self, error: Exception) -> None:
        """Answer everybody who waits with an error: the step under way may never end.

        From any thread but this one.
        """
        with self.wake:
            waited = [future for _, future in self.jobs if future is not None]
            self.jobs = deque(entry for entry in self.jobs if entry[1] is None)
        for future in waited:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self.outbox.give_up(error)

    def fail(self, error: Exception) -> None:
        """The engine has failed, and its thread may hang in a step."""
        self.failure = error
        with self.wake:
            self.closed = True
            self.wake.notify()
        self.give_up(EngineFailed("the engine has stopped"))

    def run(self) -> None:
        """Serve until closed. Whatever ends it, everybody who waits gets an answer."""
        try:
            self.serve()
        except BaseException as error:
            if self.failure is None:  # else the reason is known already
                log.exception("the engine's loop failed; it serves no more")
                self.failure = error
        finally:
            with self.wake:
                self.closed = True
            self.outbox.note([self.engine.abort(name) for name in list(self.engine.requests)])
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
        """Run the jobs, then a step, while there is either."""
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
    """Run a job and hand over its result; a job whose caller has cancelled it is not begun."""
    if future is None:
        job()
    elif future.set_running_or_notify_cancel():
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
