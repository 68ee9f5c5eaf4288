"""Batches: many requests that nobody waits for, one batch after another, behind those of clients that wait.

They are in memory, as the files are: a server that ends keeps none of them.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from starlette.requests import Request

from ..api.errors import QueueFull, RequestError
from ..api.validation import shown
from ..protocol.batch_file import BatchLine
from .errors import HttpError, as_http

log = logging.getLogger("quire")

DAY = 24 * 3600  # seconds in which a batch is done, or ends with what it has
PRIORITY = 100  # of a batch's requests, where live ones have 0
PAUSE = 1.0  # seconds before a request is sent again that the queue had no place for
ENDED = ("completed", "cancelled", "expired", "failed")
Serve = Callable[[Request, Any, Any, Any], Awaitable[Any]]
EXPIRED = HttpError(408, "the batch's time was over before this request was answered", code="batch_expired")


class Outcome(NamedTuple):
    """What became of a request: `succeeded`, `errored`, `canceled` or `expired`."""

    kind: str
    body: bytes = b""
    error: HttpError | None = None


@dataclass(eq=False)
class Batch:
    """Requests of one tenant; `lines` is emptied when all are over, and only what `keep` kept of them is left."""

    id: str
    key: str | None
    lines: Sequence[BatchLine]
    protocol: Any  # how its requests are answered
    keep: Callable[["Batch"], None]  # the outcomes, when all are over
    asked: dict[str, Any] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)  # when it came to each status
    status: str = "validating"
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # by the index of the line
    counts: dict[str, int] = field(default_factory=dict)
    total: int = 0
    files: dict[str, str] = field(default_factory=dict)  # ids of what was kept
    errors: list[dict[str, Any]] = field(default_factory=list)
    task: asyncio.Task | None = None

    def __post_init__(self):
        self.total = len(self.lines)
        self.times[self.status] = int(time.time())

    @property
    def created(self) -> int:
        return self.times["validating"]

    @property
    def expires(self) -> int:
        return self.created + DAY

    @property
    def over(self) -> bool:
        return self.status in ENDED

    def enter(self, status: str) -> None:
        self.status = status
        self.times[status] = int(time.time())

    def fail(self, error: HttpError) -> None:
        self.errors.append({"code": error.code, "message": error.message, "param": error.param, "line": None})

    def settle(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.counts[outcome.kind] = self.counts.get(outcome.kind, 0) + 1


class Batches:
    """All batches, so many at most: of those that are over the oldest goes first. One event loop uses it."""

    def __init__(self, most: int, serve: Serve, trace: Callable[..., None], width: Callable[[], Awaitable[int]]):
        """`width`: how many requests one model answers together; the others are the service's."""
        self.most, self.serve, self.trace, self.width = most, serve, trace, width
        self.kept: dict[tuple[str | None, str], Batch] = {}  # by tenant and id
        self.turn = asyncio.Lock()

    def add(self, request: Request, batch: Batch) -> None:
        """Answer a batch when those before it are done."""
        over = [place for place, one in self.kept.items() if one.over]
        while len(self.kept) >= self.most and over:
            del self.kept[over.pop(0)]
        if len(self.kept) >= self.most:
            why = f"{len(self.kept)} batches are kept that are not over, as many as may be (--max-batches)"
            raise HttpError(429, why, code="store_full", headers={"Retry-After": "60"})
        self.kept[batch.key, batch.id] = batch
        batch.task = asyncio.create_task(self.run(request, batch))

    def get(self, key: str | None, name: str) -> Batch:
        if (found := self.kept.get((key, name))) is None:
            raise HttpError(404, f"id: there is no batch {shown(name)}", "id", "batch_not_found")
        return found

    def of(self, key: str | None) -> list[Batch]:
        """The batches of a tenant, the newest first."""
        return [batch for (owner, _), batch in reversed(self.kept.items()) if owner == key]

    def cancel(self, batch: Batch) -> None:
        """What is answered is kept, the rest ends now."""
        if not batch.over and batch.status != "cancelling" and batch.task is not None:
            batch.enter("cancelling")
            batch.task.cancel()

    def forget(self, batch: Batch) -> None:
        self.kept.pop((batch.key, batch.id), None)

    def close(self) -> None:
        for batch in self.kept.values():
            self.cancel(batch)

    async def run(self, request: Request, batch: Batch) -> None:
        status, left = "completed", Outcome("canceled")
        try:
            async with asyncio.timeout(DAY), self.turn:
                batch.enter("in_progress")
                await self.work(request, batch)
                batch.enter("finalizing")
        except asyncio.CancelledError:
            status = "cancelled"
        except TimeoutError:
            status, left = "expired", Outcome("expired", error=EXPIRED)
        except Exception as error:
            status, left = "failed", Outcome("errored", error=as_http(error))
            batch.fail(as_http(error))
        for index in range(batch.total):
            if index not in batch.outcomes:
                batch.settle(index, left)
        try:
            batch.keep(batch)
        except Exception as error:
            status = "failed"
            batch.fail(as_http(error))
            if as_http(error).status == 500:
                log.exception("a batch's results cannot be kept")
        batch.lines, batch.outcomes, batch.task = (), {}, None
        batch.enter(status)

    async def work(self, request: Request, batch: Batch) -> None:
        lines = iter(enumerate(batch.lines))

        async def worker() -> None:
            for index, line in lines:
                own = alone(request, f"{batch.id}-{index}")
                batch.settle(index, await self.answer(own, batch, line))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(await self.width(), batch.total)):
                group.create_task(worker())

    async def answer(self, request: Request, batch: Batch, line: BatchLine) -> Outcome:
        if isinstance(line.request, RequestError):
            return Outcome("errored", error=as_http(line.request))
        terms = line.request.terms
        asked = replace(line.request, terms=replace(terms, priority=max(terms.priority, PRIORITY)))
        began, failed = time.monotonic(), None
        try:
            while True:
                try:
                    found = await self.serve(request, batch.protocol, asked, None)
                    return Outcome("succeeded", found.body)
                except QueueFull:
                    await asyncio.sleep(PAUSE)
        except Exception as error:
            found = as_http(error)
            failed = f"HTTP {found.status}"
            if found.status == 500:
                log.exception("a request of a batch failed")
            return Outcome("errored", error=found)
        finally:
            self.trace(request.scope["state"], time.monotonic() - began, failed)


def alone(request: Request, name: str) -> Request:
    """A request that outlives its client."""
    state = {"facts": {}, "key": request.state.key, "request_id": name}
    return Request({**request.scope, "state": state}, asyncio.Event().wait)


def new_name(prefix: str) -> str:
    """Whoever knows the name may ask for the results, so it cannot be guessed."""
    return f"{prefix}{secrets.token_hex(12)}"
