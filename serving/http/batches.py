"""Batches: requests of lower priority, for which no client waits; tenants take turns."""

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

DAY = 24 * 3600  # seconds after which an unfinished batch ends with the results that it has
PRIORITY = 100  # of a batch's requests; live ones have 0
PAUSE = 1.0  # seconds before a request is sent again for which the queue was full
WRITTEN = 256  # unanswered requests whose results are written in one transaction
ENDED = ("completed", "cancelled", "expired", "failed")
Serve = Callable[[Request, Any, Any, Any], Awaitable[Any]]
EXPIRED = HttpError(
    408, "the batch's time was over before this request was answered", code="batch_expired"
)


class Outcome(NamedTuple):
    """How a request ended; its `kind` is `succeeded`, `errored`, `canceled` or `expired`."""

    kind: str
    body: bytes = b""
    error: HttpError | None = None


CANCELLED = Outcome("canceled")
OVERDUE = Outcome("expired", error=EXPIRED)


class Result(NamedTuple):
    """A line of one of the result files of a batch."""

    field: str  # of the batch's body that holds the id of that file
    data: bytes


class BatchKind(NamedTuple):
    """How batches of one endpoint are parsed, answered and written."""

    protocol: Any
    parse: Callable[[Iterable[bytes]], Iterator[BatchLine]]  # of the lines of a batch's input
    result: Callable[["Batch", BatchLine, Outcome], Result | None]
    purpose: str  # of the result files
    unanswered: Collection[str]  # outcome kinds for which unanswered requests get a result line


@dataclass(eq=False)
class Batch:
    """A tenant's batch.

    The fields up to `errors` are stored; files hold the requests and results.
    """

    id: str
    key: str | None
    kind: str  # a name in `Batches.kinds`
    input_id: str  # the file of its requests
    total: int
    # Fields of the request that the body repeats.
    asked: dict[str, Any] = field(default_factory=dict)
    seconds: int | None = None  # for which the result files are kept
    times: dict[str, int] = field(default_factory=dict)  # when it entered each status
    status: str = "validating"
    counts: dict[str, int] = field(default_factory=dict)  # outcomes by kind
    # Ids of the result files, by `Result.field`.
    files: dict[str, str] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    # Only while the batch runs:
    lines: Iterator[BatchLine] | None = None  # the requests that are not started yet
    is_read: bool = False  # `lines` is exhausted
    answering: set[asyncio.Task] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None  # expires the batch
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
    def is_over(self) -> bool:
        return self.status in ENDED

    def enter(self, status: str) -> None:
        self.status = status
        self.times[status] = int(time.time())

    def fail(self, error: HttpError) -> None:
        self.errors.append(
            {"code": error.code, "message": error.message, "param": error.param, "line": None}
        )

    def count(self, kind: str, requests: int = 1) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + requests

    def entry(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STORED}


STORED = (
    "id",
    "key",
    "kind",
    "input_id",
    "total",
    "asked",
    "seconds",
    "times",
    "status",
    "counts",
    "files",
    "errors",
)


class Batches:
    """All batches, at most `max_batches`; the oldest finished one is deleted for a new one.

    Only one event loop uses this class. Requests are read and results written one by one, so a
    batch takes memory only for its running requests. The next request comes from the tenant with
    the fewest running requests, and from that tenant's oldest batch.
    """

    def __init__(
        self,
        max_batches: int,
        files: StoredFiles,
        serve: Serve,
        trace: Callable[..., None],
        max_running_sequences: Callable[[], Awaitable[int]],
        run_in_thread: Callable[..., Awaitable[Any]],
    ):
        """Make the store.

        Args:
            max_batches: Stored batches, the finished ones included.
            files: Holds the requests and the results.
            serve: Answers one request.
            trace: Ends the tracing span of one request.
            max_running_sequences: How many requests are started at once.
            run_in_thread: Runs a blocking function in a thread.
        """
        self.max_batches = max_batches
        self.files = files
        self.storage = files.storage
        self.serve = serve
        self.trace = trace
        self.max_running_sequences = max_running_sequences
        self.run_in_thread = run_in_thread
        self.kinds: dict[str, BatchKind] = {}  # by endpoint
        self.running: dict[EntryKey, Batch] = {}
        # Batches with unstarted requests, by tenant.
        self.queues: dict[str | None, deque[Batch]] = {}
        # `turn` of the last request of each tenant in `queues`
        self.last_turns: dict[str | None, int] = {}
        self.turn = 0
        self.dispatcher: asyncio.Task | None = None
        self.free: asyncio.Semaphore | None = None  # counts the requests that may start now
        self.is_closed = False

    def add(self, batch: Batch) -> None:
        """Store and start a batch whose requests are in a stored file."""
        with self.storage.transaction():
            self.make_room()
            self.save(batch)
        self.start(batch)

    def make_room(self) -> None:
        for entry_key, entry in self.storage.entries([BATCH]):
            if self.storage.usage(BATCH).entries < self.max_batches:
                return
            if entry["status"] in ENDED:
                self.storage.delete(entry_key)
        num_batches = self.storage.usage(BATCH).entries
        if num_batches >= self.max_batches:
            reason = (
                f"{num_batches} batches are kept that are not over, as many as may be "
                "(--max-batches)"
            )
            raise HttpError(429, reason, code="store_full", headers={"Retry-After": "60"})

    def save(self, batch: Batch) -> None:
        self.storage.put(batch_key(batch), batch.entry())

    def start(self, batch: Batch) -> None:
        loop = asyncio.get_running_loop()
        self.running[batch_key(batch)] = batch
        self.hold_files(batch)
        seconds_left = max(0.0, batch.created + DAY - time.time())
        batch.timer = loop.call_later(seconds_left, self.end, batch, "expired", OVERDUE)
        self.queues.setdefault(batch.key, deque()).append(batch)
        self.last_turns.setdefault(batch.key, 0)
        if self.dispatcher is None or self.dispatcher.done():
            self.dispatcher = asyncio.create_task(self.dispatch())

    def hold_files(self, batch: Batch) -> None:
        """Keep the files of a batch from being deleted until it has ended."""
        for name in (batch.input_id, *batch.files.values()):
            self.files.use(batch.key, name)

    def resume(self, is_known: Callable[[str | None], bool]) -> None:
        """Continue the batches of an earlier server, except those of unknown tenants."""
        for _, entry in self.storage.entries([BATCH]):
            batch = Batch(**entry)
            if batch.is_over:
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
        entry_key = EntryKey(key, BATCH, name)
        if (batch := self.running.get(entry_key)) is not None:
            return batch
        if (entry := self.storage.get(entry_key)) is None:
            raise HttpError(404, f"id: there is no batch {shown(name)}", "id", "batch_not_found")
        return Batch(**entry)

    def of(self, key: str | None) -> list[Batch]:
        """A tenant's batches, newest first."""
        batches = [Batch(**entry) for entry in reversed(self.storage.bodies(key, BATCH))]
        return [self.running.get(batch_key(batch), batch) for batch in batches]

    def cancel(self, batch: Batch) -> None:
        """End a batch now; its answered requests keep their results."""
        if not batch.is_over:
            self.end(batch, "cancelled", CANCELLED)

    def forget(self, batch: Batch) -> None:
        self.storage.delete(batch_key(batch))

    def close(self) -> None:
        """Stop without ending the batches: a later server with the same storage continues them."""
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
        """Start requests while there are any, limited by `free`."""
        try:
            self.free = free = self.free or asyncio.Semaphore(await self.max_running_sequences())
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
        """The oldest batch of the tenant with the fewest running requests.

        Ties go to the least recent one.
        """
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
        """The next request without a result; None if there is none, or if the batch has ended."""
        try:
            if batch.lines is None:
                if "in_progress" not in batch.times:
                    batch.enter("in_progress")
                batch.lines = await self.run_in_thread(self.unanswered, batch)
            line = await self.run_in_thread(next, batch.lines, None)
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
        """The requests of a batch that have no result yet."""
        self.save(batch)
        answered = set[int]()
        for name in batch.files.values():
            answered.update(self.files.part_numbers(batch.key, name))
        lines = self.kinds[batch.kind].parse(
            split_lines(self.files.pieces(batch.key, batch.input_id))
        )
        return (line for line in lines if line.number not in answered)

    def remove(self, batch: Batch) -> None:
        """Take a batch that has no more requests to start out of its tenant's queue."""
        queue = self.queues.get(batch.key)
        if queue is not None and batch in queue:
            queue.remove(batch)
            if not queue:
                del self.queues[batch.key], self.last_turns[batch.key]

    async def run_line(self, batch: Batch, line: BatchLine) -> None:
        """Answer a request and write its result."""
        task = asyncio.current_task()
        try:
            outcome = await self.answer(detached_request(batch, line), batch, line)
            writing = asyncio.ensure_future(
                self.run_in_thread(self.write, batch, [(line, outcome)])
            )
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # `finish` reads the results
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
        request_options = line.request.request_options
        parsed = replace(
            line.request,
            request_options=replace(
                request_options, priority=max(request_options.priority, PRIORITY)
            ),
        )
        start_time = time.monotonic()
        failure = None
        try:
            while True:
                try:
                    response = await self.serve(
                        request, self.kinds[batch.kind].protocol, parsed, None
                    )
                    return Outcome("succeeded", response.body)
                except QueueFull:
                    await asyncio.sleep(PAUSE)
        except Exception as error:
            http_error = as_http(error)
            failure = f"HTTP {http_error.status}"
            if http_error.status == 500:
                log.exception("a request of a batch failed")
            return Outcome("errored", error=http_error)
        finally:
            self.trace(request.scope["state"], time.monotonic() - start_time, failure)

    def write(self, batch: Batch, settled: Iterable[tuple[BatchLine, Outcome]]) -> None:
        """Write and count results, all of them or none."""
        kind = self.kinds[batch.kind]
        with self.storage.transaction():
            # Read here: until now another thread may have been writing results of this batch.
            counts = dict(batch.counts)
            files = dict(batch.files)
            try:
                for line, outcome in settled:
                    batch.count(outcome.kind)
                    result = kind.result(batch, line, outcome)
                    if result is not None:
                        name = batch.files.get(result.field) or self.new_file(
                            batch, result.field, kind.purpose
                        )
                        self.files.append(batch.key, name, [(line.number, result.data)])
                self.save(batch)
            except BaseException:
                batch.counts = counts
                batch.files = files
                raise

    def new_file(self, batch: Batch, field: str, purpose: str) -> str:
        """Make a result file, hidden from clients until the batch ends; return its id."""
        name = f"{batch.id}_{field.removesuffix('_file_id')}.jsonl"
        file = self.files.put(batch.key, name, purpose, [], batch.seconds, is_hidden=True)
        self.files.use(batch.key, file.id)
        batch.files[field] = file.id
        return file.id

    def fail(self, batch: Batch, error: Exception) -> None:
        """End a batch because of an error of the server, or because its results do not fit."""
        http_error = as_http(error)
        if http_error.status == 500:
            log.error("batch %s failed", batch.id, exc_info=error)
        self.end(batch, "failed", error=http_error)

    def end(
        self,
        batch: Batch,
        status: str,
        unanswered: Outcome | None = None,
        error: HttpError | None = None,
    ) -> None:
        """End a batch with the results that it has.

        `unanswered` is the outcome of its other requests.
        """
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
            await self.run_in_thread(self.write_end, batch, status, unanswered)
        except Exception:
            log.exception(
                "batch %s: its end cannot be written; a restarted server ends it", batch.id
            )
        finally:
            del self.running[batch_key(batch)]

    def write_end(self, batch: Batch, status: str, unanswered: Outcome | None) -> None:
        """Write the results of unanswered requests, and show the result files to the client."""
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


def batch_key(batch: Batch) -> EntryKey:
    return EntryKey(batch.key, BATCH, batch.id)


def split_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Split a file that is read in pieces into lines."""
    line_parts: list[bytes] = []
    for piece in pieces:
        first, *lines = piece.split(b"\n")
        line_parts.append(first)
        for line in lines:
            yield b"".join(line_parts)
            line_parts = [line]
    yield b"".join(line_parts)


def detached_request(batch: Batch, line: BatchLine) -> Request:
    """An HTTP request for one line of a batch, without a client."""
    state = {"facts": {}, "tenant": batch.key, "request_id": f"{batch.id}-{line.number}"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": batch.kind,
        "query_string": b"",
        "headers": [],
    }
    scope["state"] = state
    never: Any = asyncio.Event().wait
    return Request(scope, never)


def new_batch_id(prefix: str) -> str:
    """A random id: without API keys, knowing it is all that is needed to read the results."""
    return f"{prefix}{secrets.token_hex(12)}"
