"""From the engine's deltas to the events of a protocol, or to one whole answer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ..api.errors import EngineError
from ..api.outputs import Fresh, RequestOutput
from ..async_llm import Answers
from ..engine.thread import EngineFailed
from ..observe.metrics import HttpMetrics
from ..parsing.pieces import CallStart, Piece
from ..protocol.answers.answer import ChoicePart, FinishedChoice, Usage
from ..protocol.answers.choices import Choices
from ..resume import Journal
from .errors import HttpError, as_http
from .prompting import Prepared

log = logging.getLogger("quire")

QUIET = 10.0  # seconds; a stream with nothing new for so long sends a comment
ALIVE = b": waiting\n\n"
UNCACHED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), *UNCACHED)
LINES = ((b"content-type", b"application/x-ndjson"), *UNCACHED)


class Framing(NamedTuple):
    """How a stream is sent: its headers, and what a long wait sends."""

    headers: Sequence[tuple[bytes, bytes]] = EVENTS
    alive: bytes = ALIVE


AS_EVENTS, AS_LINES = Framing(), Framing(LINES, b" ")  # a line of JSON may begin with spaces


class ClientLeft(Exception):
    """The client has left."""


class Answering:
    """Reads the engine's outputs for the prompts of one request, and counts their tokens."""

    def __init__(self, prepared: Prepared, answers: Answers, each: int, journal: Journal | None = None):
        self.answers, self.choices = answers, Choices(prepared.parser, each, prepared.most_calls)
        self.journal = journal  # where another replica can go on with the answer
        self.prompt_tokens = sum(len(ask.tokens) for ask in prepared.asks)
        self.alone = each == len(prepared.asks) == 1

    @property
    def usage(self) -> Usage:
        caches = [request.sequences[0].cache for request in self.answers.requests]
        table = self.answers.thread.engine.tables[0]
        stored = 0
        if table.keeps_prefixes:
            lengths = [request.sequences[0].num_prompt for request in self.answers.requests]
            full = (length // table.page_size * table.page_size for length in lengths)
            stored = sum(max(tokens - cache.num_cached, 0) for tokens, cache in zip(full, caches, strict=True))
        first = self.answers.requests[0]
        now = self.answers.thread.engine.clock()
        taken = now if first.first_scheduled is None else first.first_scheduled
        begun = now if first.first_token is None else first.first_token
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.choices.written,
            cached_tokens=sum(cache.num_cached for cache in caches),
            stored_tokens=stored,
            reasoning_tokens=self.choices.thought,
            reading=begun - taken,
            writing=now - begun,
            waiting=taken - first.arrival if self.alone else None,
        )

    def facts(self) -> dict[str, Any]:
        """What the log may know of it: numbers and names."""
        usage, first = self.usage, self.answers.requests[0]
        return {
            "tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "finish_reason": ",".join(sorted(self.choices.reasons)),
            "queued": None if first.first_scheduled is None else first.first_scheduled - first.arrival,
            "first_token": None if first.first_token is None else first.first_token - first.arrival,
        }

    def part(self, prompt: int, fresh: Fresh) -> ChoicePart:
        if fresh.finish_reason == "abort" and self.answers.thread.failure is not None:
            raise EngineFailed("the engine has stopped")
        return self.choices.part(prompt, fresh)

    async def stream(self, stream: Any, counted: bool, alive: bytes = ALIVE) -> AsyncIterator[bytes]:
        """The events of a protocol, one write a delivery; an error on the way is the last of them."""
        out: list[bytes] = []  # not yet written
        try:
            with self.answers.inbox.reminded(QUIET):
                left = len(self.answers.names)
                began = self.journal is not None and bool(self.journal.streamed)
                if began:  # the client has had these events; they are made again for the state they leave in the stream
                    stream.begin(self.usage)
                for prompt, fresh in self.answers.resumed:
                    self.event(stream, prompt, fresh, counted)
                while left:
                    news = await self.answers.news()
                    if not news:
                        yield alive
                        continue
                    if not began:
                        began = True
                        out.append(stream.begin(self.usage))
                    for prompt, delta in news:
                        left -= delta.finished
                        for fresh in delta.parts:
                            out.append(self.event(stream, prompt, fresh, counted))
                            if self.journal is not None:
                                self.journal.add(prompt, fresh)
                    data = b"".join(out)
                    out.clear()
                    if data:
                        yield data
            yield stream.end(self.usage)
        except ClientLeft:
            raise
        except Exception as error:
            if self.journal is not None and as_http(error).status == 503:  # another replica can go on
                raise
            found = as_http(error)
            if not isinstance(error, HttpError | EngineFailed | EngineError):
                log.exception("a stream failed")
            yield b"".join(out) + stream.fail(found.status, found.message, found.param)
        finally:
            self.answers.close()

    def event(self, stream: Any, prompt: int, fresh: Fresh, counted: bool) -> bytes:
        part = self.part(prompt, fresh)
        if self.journal is not None:
            part = replace(part, pieces=[with_call_id(piece, part.index, self.journal) for piece in part.pieces])
        if counted:
            stream.counted(self.usage)
        return stream.part(part)

    async def whole(self) -> tuple[list[FinishedChoice], list[RequestOutput]]:
        """All choices of all prompts, when they are done."""
        outputs = await self.answers.outputs()
        return self.choices.answers(outputs), outputs


def with_call_id(piece: Piece, choice: int, journal: Journal) -> Piece:
    """A piece whose tool call keeps the id that its client knows: each replica's parser would make up another."""
    if not isinstance(piece, CallStart):
        return piece
    return replace(piece, id=journal.call_ids.setdefault((choice, piece.index), piece.id))


async def until_gone(receive: Callable) -> None:
    """Until the client has hung up; what it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def watched(receive: Callable, answers: Answers) -> AsyncIterator[None]:
    """Tells those who wait for answers when the client leaves."""
    watcher = asyncio.create_task(until_gone(receive))
    watcher.add_done_callback(lambda _: answers.inbox.put(ClientLeft()))
    try:
        yield
    finally:
        watcher.cancel()


class EventStream:
    """A response of server-sent events, or of lines, which holds what is in `keep` until it is over.

    A reader that leaves, or takes nothing for too long, ends its request.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        answering: Answering,
        keep: AsyncExitStack,
        metrics: HttpMetrics,
        framing: Framing = AS_EVENTS,
    ):
        self.events, self.answering, self.keep, self.metrics = events, answering, keep, metrics
        self.framing = framing

    async def __call__(self, scope, receive, send) -> None:
        state = scope["state"]
        connection = state["connection"]
        self.metrics.streams += 1
        try:
            async with self.keep, watched(receive, self.answering.answers):
                await send({"type": "http.response.start", "status": 200, "headers": [*self.framing.headers]})
                async for data in self.events:
                    await connection.write(data)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientLeft:
            state["facts"]["ended"] = "client did not read" if connection.unread else "client left"
        finally:
            self.metrics.streams -= 1
            state["facts"] |= self.answering.facts()

    async def copy(self, take: Callable[[bytes], None]) -> None:
        """The events for one who takes them all."""
        async with self.keep:
            async for data in self.events:
                take(data)
