"""Those who watch an engine, all of them at once."""

from collections.abc import Iterable

from ..engine.engine import Engine
from ..engine.scheduler import StepPlan
from ..request.request import Request
from .live_view import Live
from .metrics import Metrics
from .trace import NoTrace


class Watchers(NoTrace):
    """Passes on what the engine tells; metrics and the live view are always there."""

    def __init__(self, metrics: Metrics, live: Live, *others: NoTrace):
        self.metrics, self.live = metrics, live
        self.all = (metrics, live, *others)

    def begin(self) -> None:
        for watcher in self.all:
            watcher.begin()

    def lap(self, name: str) -> None:
        for watcher in self.all:
            watcher.lap(name)

    def launched(self, plan: StepPlan) -> None:
        for watcher in self.all:
            watcher.launched(plan)

    def collected(self) -> None:
        for watcher in self.all:
            watcher.collected()

    def end(self, requests: Iterable[Request], **counts: float) -> None:
        for watcher in self.all:
            watcher.end(requests, **counts)

    def failed(self) -> None:
        for watcher in self.all:
            watcher.failed()

    def close(self) -> None:
        for watcher in self.all:
            watcher.close()


def watch(engine: Engine, trace: NoTrace | None = None) -> Watchers:
    """Let metrics, a live view and a trace, if there is one, hear of every step from now on."""
    metrics = Metrics(engine)
    watchers = Watchers(metrics, Live(metrics), *([] if trace is None else [trace]))
    engine.trace = watchers
    return watchers
