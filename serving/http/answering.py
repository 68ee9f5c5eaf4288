"""Turns the engine's output deltas into a protocol's events, or into one complete answer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ..api.errors import EngineError
from ..api.outputs import CompletionDelta, RequestOutput
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

KEEPALIVE_SECONDS = 10.0  # a stream that is silent for so long sends `KEEPALIVE_EVENT`
KEEPALIVE_EVENT = b": waiting\n\n"
UNCACHED = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), *UNCACHED)
LINES = ((b"content-type", b"application/x-ndjson"), *UNCACHED)


class Framing(NamedTuple):
    """How a stream is sent: its response headers, and the bytes that keep a silent one alive."""

    headers: Sequence[tuple[bytes, bytes]] = EVENTS
    keepalive: bytes = KEEPALIVE_EVENT


AS_EVENTS = Framing()
AS_LINES = Framing(LINES, b" ")  # a line of JSON may begin with spaces


class ClientLeft(Exception):
    """The client has disconnected."""


class AnswerReader:
    """Reads the engine's outputs for the prompts of one request, and counts their tokens."""

    def __init__(
        self, prepared: Prepared, answers: Answers, num_choices: int, journal: Journal | None = None
    ):
        self.answers = answers
        self.choices = Choices(prepared.parser, num_choices, prepared.max_calls)
        self.journal = journal  # what another replica needs to continue the answer
        self.prompt_tokens = sum(len(ask.tokens) for ask in prepared.engine_requests)
        self.alone = num_choices == len(prepared.engine_requests) == 1

    @property
    def usage(self) -> Usage:
        caches = [request.sequences[0].cache for request in self.answers.requests]
        table = self.answers.thread.engine.tables[0]
        stored = 0
        if table.keeps_prefixes:
            lengths = [request.sequences[0].num_prompt for request in self.answers.requests]
            full = (length // table.page_size * table.page_size for length in lengths)
            stored = sum(
                max(tokens - cache.num_cached, 0)
                for tokens, cache in zip(full, caches, strict=True)
            )
        first = self.answers.requests[0]
        now = self.answers.thread.engine.clock()
        start_time = now if first.first_scheduled is None else first.first_scheduled
        first_token_time = now if first.first_token is None else first.first_token
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.choices.num_tokens,
            cached_tokens=sum(cache.num_cached for cache in caches),
            stored_tokens=stored,
            reasoning_tokens=self.choices.num_reasoning_tokens,
            reading=first_token_time - start_time,
            writing=now - first_token_time,
            waiting=start_time - first.arrival if self.alone else None,
        )

    def facts(self) -> dict[str, Any]:
        """Numbers and names for the access log; never any text of the request."""
        usage = self.usage
        first = self.answers.requests[0]
        return {
            "tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "finish_reason": ",".join(sorted(self.choices.finish_reasons)),
            "queued": None
            if first.first_scheduled is None
            else first.first_scheduled - first.arrival,
            "first_token": None if first.first_token is None else first.first_token - first.arrival,
        }

    def parse_part(self, prompt: int, fresh: CompletionDelta) -> ChoicePart:
        if fresh.finish_reason == "abort" and self.answers.thread.failure is not None:
            raise EngineFailed("the engine has stopped")
        return self.choices.part(prompt, fresh)

    async def stream(
        self, stream: Any, with_usage: bool, keepalive: bytes = KEEPALIVE_EVENT
    ) -> AsyncIterator[bytes]:
        """Yield a protocol's events, joined per batch of updates; an error becomes the last.

        Args:
            stream: The protocol's event encoder.
            with_usage: Whether each event carries the usage so far.
            keepalive: The bytes to yield when the engine has been silent for long.
        """
        out: list[bytes] = []  # not yielded yet
        try:
            with self.answers.inbox.reminded(KEEPALIVE_SECONDS):
                num_unfinished = len(self.answers.names)
                has_begun = self.journal is not None and bool(self.journal.streamed)
                if has_begun:
                    # The client has these events. Encoding them again restores the encoder's state.
                    stream.begin(self.usage)
                for prompt, fresh in self.answers.resumed:
                    self.event(stream, prompt, fresh, with_usage)
                while num_unfinished:
                    updates = await self.answers.updates()
                    if not updates:
                        yield keepalive
                        continue
                    if not has_begun:
                        has_begun = True
                        out.append(stream.begin(self.usage))
                    for prompt, delta in updates:
                        num_unfinished -= delta.finished
                        for fresh in delta.completions:
                            out.append(self.event(stream, prompt, fresh, with_usage))
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
            # Another replica continues the answer.
            if self.journal is not None and as_http(error).status == 503:
                raise
            http_error = as_http(error)
            if not isinstance(error, HttpError | EngineFailed | EngineError):
                log.exception("a stream failed")
            yield b"".join(out) + stream.fail(
                http_error.status, http_error.message, http_error.param
            )
        finally:
            self.answers.close()

    def event(self, stream: Any, prompt: int, fresh: CompletionDelta, with_usage: bool) -> bytes:
        choice_part = self.parse_part(prompt, fresh)
        if self.journal is not None:
            choice_part = replace(
                choice_part,
                pieces=[
                    with_call_id(piece, choice_part.index, self.journal)
                    for piece in choice_part.pieces
                ],
            )
        if with_usage:
            stream.set_usage(self.usage)
        return stream.part(choice_part)

    async def collect(self) -> tuple[list[FinishedChoice], list[RequestOutput]]:
        """Wait for all choices of all prompts."""
        outputs = await self.answers.outputs()
        return self.choices.answers(outputs), outputs


def with_call_id(piece: Piece, choice: int, journal: Journal) -> Piece:
    """Give a tool call the id that the client knows; each replica's parser generates others."""
    if not isinstance(piece, CallStart):
        return piece
    return replace(piece, id=journal.call_ids.setdefault((choice, piece.index), piece.id))


async def wait_for_disconnect(receive: Callable) -> None:
    """Return when the client has disconnected; drop what it still sends."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def end_on_disconnect(receive: Callable, answers: Answers) -> AsyncIterator[None]:
    """End the wait for `answers` with `ClientLeft` if the client disconnects meanwhile."""
    watcher = asyncio.create_task(wait_for_disconnect(receive))
    watcher.add_done_callback(lambda _: answers.inbox.put(ClientLeft()))
    try:
        yield
    finally:
        watcher.cancel()


class EventStream:
    """A response of server-sent events, or of JSON lines.

    It holds `resources` (the model that must stay awake) until the last event. A client that
    disconnects, or reads nothing for too long, ends its request.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        reader: AnswerReader,
        resources: AsyncExitStack,
        metrics: HttpMetrics,
        framing: Framing = AS_EVENTS,
    ):
        self.events = events
        self.reader = reader
        self.resources = resources
        self.metrics = metrics
        self.framing = framing

    async def __call__(self, scope, receive, send) -> None:
        state = scope["state"]
        connection = state["connection"]
        self.metrics.streams += 1
        try:
            async with self.resources, end_on_disconnect(receive, self.reader.answers):
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [*self.framing.headers],
                    }
                )
                async for data in self.events:
                    await connection.write(data)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientLeft:
            state["facts"]["ended"] = "client did not read" if connection.unread else "client left"
        finally:
            self.metrics.streams -= 1
            state["facts"] |= self.reader.facts()

    async def copy(self, write: Callable[[bytes], None]) -> None:
        """Pass all events to `write`, without a client."""
        async with self.resources:
            async for data in self.events:
                write(data)
