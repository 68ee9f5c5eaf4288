"""Batches: many requests that no client waits for, answered behind live ones; keys take turns."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from starlette.requests import Request

from ..api.errors import QueueFull, RequestError
from ..api.validation import shown
from ..protocol.batch_file import BatchLine
from .errors import HttpError, as_http
from .files import BATCH, StoredFiles
from .storage import EntryKey

log = logging.getLogger("quire")

DAY = 24 * 3600  # seconds in which a batch is done, or ends with what it has
PRIORITY = 100  # of a batch's requests, where live ones have 0
PAUSE = 1.0  # seconds before a request is sent again that the queue had no place for
WRITTEN = 256  # results that are written at once, of requests that were not answered
ENDED = ("completed", "cancelled", "expired", "failed")
Serve = Callable[[Request, Any, Any, Any], Awaitable[Any]]
EXPIRED = HttpError(408, "the batch's time was over before this request was answered", code="batch_expired")


class Outcome(NamedTuple):
    """What became of a request: `succeeded`, `errored`, `canceled` or `expired`."""

    kind: str
    body: bytes = b""
    error: HttpError | None = None


CANCELLED, OVERDUE = Outcome("canceled"), Outcome("expired", error=EXPIRED)


class Result(NamedTuple):
    """A line of one of the files that a batch makes."""

    field: str  # of the batch, with the id of the file
    data: bytes


class BatchKind(NamedTuple):
    """How batches of one endpoint are read, answered and written down."""

    protocol: Any
    parse: Callable[[Iterable[bytes]], Iterator[BatchLine]]  # of the lines of a batch's input
    result: Callable[["Batch", BatchLine, Outcome], Result | None]
    purpose: str  # of the files with results
    unanswered: Collection[str]  # kinds of outcomes with results for requests without an answer


@dataclass(eq=False)
class Batch:
    """Requests of one tenant. The fields up to `errors` are stored; files have requests and results."""

    id: str
    key: str | None
    kind: str  # a name in `Batches.kinds`
    input_id: str  # the file of its requests
    total: int
    asked: dict[str, Any] = field(default_factory=dict)
    seconds: int | None = None  # for which its results are kept
    times: dict[str, int] = field(default_factory=dict)  # when it came to each status
    status: str = "validating"
    counts: dict[str, int] = field(default_factory=dict)  # of outcomes, by kind
    files: dict[str, str] = field(default_factory=dict)  # ids of those with results
    errors: list[dict[str, Any]] = field(default_factory=list)
    # While it is not over:
    lines: Iterator[BatchLine] | None = None  # that were not read yet
    is_read: bool = False  # all of them were
    answering: set[asyncio.Task] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None  # of its end
    ending: asyncio.Task | None = None

    def __post_init__(self):
        self.times = self.times or {self.status: int(time.time())}

    @property
    def created(self) -> int:
        return self.times["validating"]

    @property
    def expires(self) -> int:
        return int(self.created + DAY)

    @property
    def over(self) -> bool:
        return self.status in ENDED

    def enter(self, status: str) -> None:
        self.status = status
        self.times[status] = int(time.time())

    def fail(self, error: HttpError) -> None:
        self.errors.append({"code": error.code, "message": error.message, "param": error.param, "line": None})

    def count(self, kind: str, requests: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + requests

    def entry(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STORED}


STORED = (
    "id", "key", "kind", "input_id", "total", "asked", "seconds", "times", "status", "counts", "files", "errors",
)  # fmt: skip


class Batches:
    """All batches, at most `most`: of those that are over the oldest goes first. One event loop uses it.

    Requests are read, and results written, one by one: a batch takes memory only for those under
    way. The next request is of the key that has the fewest under way, from its oldest batch.
    """

    def __init__(
        self,
        most: int,
        files: StoredFiles,
        serve: Serve,
        trace: Callable[..., None],
        width: Callable[[], Awaitable[int]],
        beside: Callable[..., Awaitable[Any]],
    ):
        """`width`: how many requests one model answers together; `beside` runs a function in a thread."""
        self.most, self.files, self.storage = most, files, files.storage
        self.serve, self.trace, self.width, self.beside = serve, trace, width, beside
        self.kinds: dict[str, BatchKind] = {}  # by endpoint
        self.running: dict[EntryKey, Batch] = {}  # those that are not over
        self.queues: dict[str | None, deque[Batch]] = {}  # those with requests to read, by tenant
        self.last_turns: dict[str | None, int] = {}  # of the tenants in `queues`
        self.turn = 0
        self.dispatcher: asyncio.Task | None = None
        self.free: asyncio.Semaphore | None = None  # for requests that may start
        self.is_closed = False

    def add(self, batch: Batch) -> None:
        """Answer a batch, whose input is a stored file, in its turn."""
        with self.storage.transaction():
            self.make_room()
            self.save(batch)
        self.start(batch)

    def make_room(self) -> None:
        for place, entry in self.storage.entries([BATCH]):
            if self.storage.usage(BATCH).entries < self.most:
                return
            if entry["status"] in ENDED:
                self.storage.delete(place)
        kept = self.storage.usage(BATCH).entries
        if kept >= self.most:
            why = f"{kept} batches are kept that are not over, as many as may be (--max-batches)"
            raise HttpError(429, why, code="store_full", headers={"Retry-After": "60"})

    def save(self, batch: Batch) -> None:
        self.storage.put(place_of(batch), batch.entry())

    def start(self, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        self.running[place_of(batch)] = batch
        self.hold_files(batch)
        seconds_left = max(0.0, batch.created + DAY - time.time())
        batch.timer = loop.call_later(seconds_left, self.end, batch, "expired", OVERDUE)
        self.queues.setdefault(batch.key, deque()).append(batch)
        self.last_turns.setdefault(batch.key, 0)
        if self.dispatcher is None or self.dispatcher.done():
            self.dispatcher = asyncio.create_task(self.dispatch())

    def hold_files(self, batch: Batch) -> None:
        """The files of a batch stay until it is over."""
        for name in (batch.input_id, *batch.files.values()):
            self.files.use(batch.key, name)

    def resume(self, is_known: Callable[[str | None], bool]) -> None:
        """Continue the batches of the server before this one; those of unknown keys wait."""
        for _, entry in self.storage.entries([BATCH]):
            batch = Batch(**entry)
            if batch.over:
                continue
            if not is_known(batch.key):
                self.hold_files(batch)
                continue
            self.start(batch)
            if batch.status == "cancelling":
                self.end(batch, "cancelled", CANCELLED)
            elif batch.errors:
                self.end(batch, "failed")
        self.files.forget_unused()

    def get(self, key: str | None, name: str) -> Batch:
        place = EntryKey(key, BATCH, name)
        if (batch := self.running.get(place)) is not None:
            return batch
        if (entry := self.storage.get(place)) is None:
            raise HttpError(404, f"id: there is no batch {shown(name)}", "id", "batch_not_found")
        return Batch(**entry)

    def of(self, key: str | None) -> list[Batch]:
        """The batches of a tenant, the newest first."""
        batches = [Batch(**entry) for entry in reversed(self.storage.bodies(key, BATCH))]
        return [self.running.get(place_of(batch), batch) for batch in batches]

    def cancel(self, batch: Batch) -> None:
        """What is answered is kept, the rest ends now."""
        if not batch.over:
            self.end(batch, "cancelled", CANCELLED)

    def forget(self, batch: Batch) -> None:
        self.storage.delete(place_of(batch))

    def close(self) -> None:
        """Answer no more; a server that finds the stored batches continues them."""
        self.is_closed = True
        for batch in self.running.values():
            if batch.timer is not None:
                batch.timer.cancel()
            for task in batch.answering:
                task.cancel()
        self.queues.clear()
        if self.dispatcher is not None:
            self.dispatcher.cancel()

    async def dispatch(self) -> None:
        """Start requests while there are any, as many as the model answers together."""
        try:
            self.free = free = self.free or asyncio.Semaphore(await self.width())
        except Exception as error:
            for batch in list(self.running.values()):
                self.fail(batch, error)
            return
        while self.queues:
            await free.acquire()
            batch = self.next_batch()
            line = None if batch is None else await self.next_line(batch)
            if batch is None or line is None:
                free.release()
                continue
            task = asyncio.create_task(self.run_line(batch, line))
            batch.answering.add(task)
            task.add_done_callback(lambda _: free.release())

    def next_batch(self) -> Batch | None:
        """The oldest batch of the tenant with the fewest requests under way, or of these the longest ago."""
        under_way = dict.fromkeys(self.queues, 0)
        for batch in self.running.values():
            if batch.key in under_way:
                under_way[batch.key] += len(batch.answering)
        if not under_way:
            return None
        tenant = min(under_way, key=lambda tenant: (under_way[tenant], self.last_turns[tenant]))
        self.turn += 1
        self.last_turns[tenant] = self.turn
        return self.queues[tenant][0]

    async def next_line(self, batch: Batch) -> BatchLine | None:
        """The next request without a result; None where there is none, or the batch has ended."""
        try:
            if batch.lines is None:
                if "in_progress" not in batch.times:
                    batch.enter("in_progress")
                batch.lines = await self.beside(self.unanswered, batch)
            line = await self.beside(next, batch.lines, None)
        except Exception as error:
            self.fail(batch, error)
            return None
        if batch.ending is not None:
            return None
        if line is None:
            batch.is_read = True
            self.remove(batch)
            if not batch.answering:
                self.end(batch, "completed")
        return line

    def unanswered(self, batch: Batch) -> Iterator[BatchLine]:
        """The requests of a batch that have no result."""
        self.save(batch)
        answered = set[int]()
        for name in batch.files.values():
            answered.update(self.files.part_numbers(batch.key, name))
        lines = self.kinds[batch.kind].parse(lines_in(self.files.pieces(batch.key, batch.input_id)))
        return (line for line in lines if line.number not in answered)

    def remove(self, batch: Batch) -> None:
        """A batch has no more requests to start."""
        queue = self.queues.get(batch.key)
        if queue is not None and batch in queue:
            queue.remove(batch)
            if not queue:
                del self.queues[batch.key], self.last_turns[batch.key]

    async def run_line(self, batch: Batch, line: BatchLine) -> None:
        """Answer a request and write its result."""
        task = asyncio.current_task()
        try:
            outcome = await self.answer(alone(batch, line), batch, line)
            writing = asyncio.ensure_future(self.beside(self.write, batch, [(line, outcome)]))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # the end of the batch reads what is written
                raise
        except Exception as error:
            self.fail(batch, error)
        finally:
            batch.answering.discard(task)
            if batch.is_read and not batch.answering:
                self.end(batch, "completed")

    async def answer(self, request: Request, batch: Batch, line: BatchLine) -> Outcome:
        if isinstance(line.request, RequestError):
            return Outcome("errored", error=as_http(line.request))
        terms = line.request.terms
        asked = replace(line.request, terms=replace(terms, priority=max(terms.priority, PRIORITY)))
        began, failed = time.monotonic(), None
        try:
            while True:
                try:
                    found = await self.serve(request, self.kinds[batch.kind].protocol, asked, None)
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

    def write(self, batch: Batch, settled: Iterable[tuple[BatchLine, Outcome]]) -> None:
        """Write results, and count them; all of them or none."""
        kind = self.kinds[batch.kind]
        counts, files = dict(batch.counts), dict(batch.files)
        with self.storage.transaction():
            try:
                for line, outcome in settled:
                    batch.count(outcome.kind)
                    result = kind.result(batch, line, outcome)
                    if result is not None:
                        name = batch.files.get(result.field) or self.new_file(batch, result.field, kind.purpose)
                        self.files.append(batch.key, name, [(line.number, result.data)])
                self.save(batch)
            except BaseException:
                batch.counts, batch.files = counts, files
                raise

    def new_file(self, batch: Batch, field: str, purpose: str) -> str:
        """The id of a file for results, which nobody sees before the batch is over."""
        name = f"{batch.id}_{field.removesuffix('_file_id')}.jsonl"
        file = self.files.put(batch.key, name, purpose, [], batch.seconds, is_hidden=True)
        self.files.use(batch.key, file.id)
        batch.files[field] = file.id
        return file.id

    def fail(self, batch: Batch, error: Exception) -> None:
        """End a batch early: what it needs failed, or its results do not fit."""
        http_error = as_http(error)
        if http_error.status == 500:
            log.error("batch %s failed", batch.id, exc_info=error)
        self.end(batch, "failed", error=http_error)

    def end(self, batch: Batch, status: str, unanswered: Outcome | None = None, error: HttpError | None = None) -> None:
        """End a batch with what it has; `unanswered` is the outcome of requests without a result."""
        if batch.ending is not None or self.is_closed:
            return
        if error is not None:
            batch.fail(error)
        if batch.timer is not None:
            batch.timer.cancel()
        self.remove(batch)
        batch.enter("cancelling" if status == "cancelled" else "finalizing")
        for task in batch.answering:
            task.cancel()
        batch.ending = asyncio.create_task(self.finish(batch, status, unanswered))

    async def finish(self, batch: Batch, status: str, unanswered: Outcome | None) -> None:
        try:
            if batch.answering:
                await asyncio.wait(batch.answering)
            await self.beside(self.write_end, batch, status, unanswered)
        except Exception:
            log.exception("batch %s: its end cannot be written; a restarted server ends it", batch.id)
        finally:
            del self.running[place_of(batch)]

    def write_end(self, batch: Batch, status: str, unanswered: Outcome | None) -> None:
        """Write the results of requests without an answer, and let the client see all files."""
        self.save(batch)
        try:
            if unanswered is not None and unanswered.kind in self.kinds[batch.kind].unanswered:
                lines = self.unanswered(batch)
                while next_lines := list(islice(lines, WRITTEN)):
                    self.write(batch, [(line, unanswered) for line in next_lines])
        except HttpError as error:  # the results do not fit
            batch.fail(error)
        with self.storage.transaction():
            left_over = batch.total - sum(batch.counts.values())
            if left_over > 0:
                batch.count("errored" if unanswered is None else unanswered.kind, left_over)
            for name in batch.files.values():
                self.files.publish(batch.key, name)
            batch.enter(status)
            self.save(batch)
        for name in (batch.input_id, *batch.files.values()):
            self.files.release(batch.key, name)


def place_of(batch: Batch) -> EntryKey:
    return EntryKey(batch.key, BATCH, batch.id)


def lines_in(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a file that is read in pieces."""
    begun: list[bytes] = []
    for piece in pieces:
        first, *lines = piece.split(b"\n")
        begun.append(first)
        for line in lines:
            yield b"".join(begun)
            begun = [line]
    yield b"".join(begun)


def alone(batch: Batch, line: BatchLine) -> Request:
    """A request without a client."""
    state = {"facts": {}, "tenant": batch.key, "request_id": f"{batch.id}-{line.number}"}
    scope = {"type": "http", "method": "POST", "path": batch.kind, "query_string": b"", "headers": []}
    scope["state"] = state
    return Request(scope, asyncio.Event().wait)


def new_name(prefix: str) -> str:
    """Whoever knows the name may ask for the results, so it cannot be guessed."""
    return f"{prefix}{secrets.token_hex(12)}"
