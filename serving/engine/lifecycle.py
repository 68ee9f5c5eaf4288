"""Sleep, wake-up, weight replacement, recovery and shutdown of an engine."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator

from ..api.errors import NotServing, RequestError
from ..api.validation import shown
from ..cache.page_table import PageTable
from ..request.request import Request
from .results import ResultProcessor
from .runner import Runner
from .scheduler import Scheduler, StepPlan

log = logging.getLogger("quire")

PageIdentity = Callable[[], tuple[bytes, bytes]]  # of the weights that lie on disk now


class Lifecycle:
    """Frees and restores an engine's device memory; no step may be in flight."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tables: list[PageTable],
        results: ResultProcessor,
        page_identity: PageIdentity,
    ):
        self.runner = runner
        self.scheduler = scheduler
        self.tables = tables
        self.results = results
        self.page_identity = page_identity
        self.loaded_identity = page_identity()
        self.is_asleep = False
        self.is_closed = False
        self.process = os.getpid()

    def check_serving(self) -> None:
        """Refuse requests while the engine sleeps, has closed or was forked."""
        self.check_process()
        if self.is_asleep or self.is_closed:
            message = "is closed" if self.is_closed else "is asleep; wake_up() makes it serve again"
            raise NotServing("engine", message)

    def check_process(self) -> None:
        """Refuse to serve in a forked process, which has none of the engine's threads."""
        if self.is_forked:
            raise NotServing(
                "engine",
                f"belongs to process {self.process}, and process {os.getpid()} is a fork of it: "
                "fork before the engine is made, or start processes by "
                "multiprocessing.get_context('spawn')",
            )

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self.process

    def recover(self, error: Exception, lost_plans: Iterable[StepPlan] = ()) -> Iterator[Request]:
        """Allocate a new device state after a failed step; requests of the lost plans end, others
        start over.
        """
        lost = dict.fromkeys(item.seq for plan in lost_plans for item in plan.items)
        self.runner.fail(error)
        log.error("a step failed; its requests end, the others are computed again", exc_info=error)
        for seq in lost:
            if seq.finish_reason is None:
                yield seq.request
                self.results.end(seq, "error")
        self.preempt_all()
        for seq in self.scheduler.waiting:
            seq.pending = 0
        self.runner.reset()
        self.scheduler.forget_device()
        self.forget_pages()

    def preempt_all(self) -> None:
        for seq in list(self.scheduler.running):
            self.scheduler.preempt(seq)

    def forget_pages(self) -> None:
        """Forget all pages on the device."""
        for table in self.tables:
            table.forget_device()

    def check_level(self, level: int) -> None:
        if level not in (1, 2):
            message = (
                f"must be 1 (weights to host memory) or 2 (weights dropped), got {shown(level)}"
            )
            raise RequestError("level", message)

    def sleep(self, level: int, keep_pages: bool) -> None:
        """Free the device's memory.

        Weights go to host memory (level 1) or are loaded again later (level 2). Requests wait;
        their tokens are recomputed unless the pages are kept.
        """
        if self.is_asleep:
            return
        self.preempt_all()
        if not keep_pages:
            self.forget_pages()
        self.runner.sleep(level == 1, keep_pages)
        self.is_asleep = True

    def wake_up(self) -> None:
        """Restore weights and state; the compiled programs are still valid."""
        if not self.is_asleep:
            return
        reads_weights = self.runner.weights is None
        # before they are read
        identity = self.page_identity() if reads_weights else self.loaded_identity
        self.runner.wake_up()
        if identity != self.loaded_identity:
            self.replace_weights(identity)
        self.scheduler.forget_device()
        self.is_asleep = False

    def replace_weights(self, identity: tuple[bytes, bytes]) -> None:
        """Drop all KV pages of the old weights, in every tier."""
        self.loaded_identity = identity
        for seq in self.scheduler.waiting:
            seq.cache.load, seq.cache.prefetched = None, False
        for table in self.tables:
            table.replace_weights(*identity)

    def close(self) -> None:
        """Save the cached pages to disk, if there is one, and let the other processes end."""
        self.is_closed = True
        if self.is_asleep:
            self.forget_pages()  # copies can be saved, and what is not on the device cannot
        for table in self.tables:
            for moves in table.save():
                for pages in self.runner.move(moves) if moves else ():
                    pages.arrive()
        self.runner.close()
