"""One request on its way through the engine: its deltas as parts of a protocol's answer, or the whole of it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from ..api.errors import EngineError
from ..api.outputs import Fresh, RequestOutput
from ..async_llm import Answers
from ..engine.thread import EngineFailed
from ..protocol.answers.answer import Answer, Part, Usage
from ..protocol.answers.choices import Choices
from ..resume import Journal
from .errors import HttpError, as_http
from .prompting import Prepared

log = logging.getLogger("quire")

QUIET = 10.0  # seconds; a stream without news for so long says that it is alive
ALIVE = b": waiting\n\n"
EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)  # fmt: skip


class Gone(Exception):
    """The client has left."""


class Answering:
    """Reads what the engine says of the prompts of one request, and counts it."""

    def __init__(self, prepared: Prepared, answers: Answers, each: int, journal: Journal | None = None):
        self.answers, self.choices = answers, Choices(prepared.parser, each, prepared.most_calls)
        self.journal = journal  # where somebody can go on elsewhere
        self.prompt_tokens = sum(len(ask.tokens) for ask in prepared.asks)

    @property
    def usage(self) -> Usage:
        cached = sum(request.sequences[0].cache.num_cached for request in self.answers.requests)
        return Usage(self.prompt_tokens, self.choices.written, cached, self.choices.thought)

    def part(self, prompt: int, fresh: Fresh) -> Part:
        if fresh.finish_reason == "abort" and self.answers.thread.failure is not None:
            raise EngineFailed("the engine has stopped")
        return self.choices.part(prompt, fresh)

    async def stream(self, stream: Any, counted: bool) -> AsyncIterator[bytes]:
        """The events of a protocol, one write a delivery; an error on the way is the last of them."""
        try:
            with self.answers.inbox.reminded(QUIET):
                left = len(self.answers.names)
                began = self.journal is not None and bool(self.journal.told)
                if began:  # the same events again, for what they leave behind: the reader has had them
                    stream.begin(self.usage)
                for prompt, fresh in self.answers.retold:
                    self.event(stream, prompt, fresh, counted)
                while left:
                    news = await self.answers.news()
                    if not news:
                        yield ALIVE
                        continue
                    out = []
                    if not began:
                        began = True
                        out.append(stream.begin(self.usage))
                    for prompt, delta in news:
                        left -= delta.finished
                        for fresh in delta.parts:
                            out.append(self.event(stream, prompt, fresh, counted))
                            if self.journal is not None:
                                self.journal.tell(prompt, fresh)
                    if data := b"".join(out):
                        yield data
            yield stream.end(self.usage)
        except Gone:
            raise
        except Exception as error:
            if self.journal is not None and as_http(error).status == 503:  # somebody else can go on
                raise
            found = as_http(error)
            if not isinstance(error, HttpError | EngineFailed | EngineError):
                log.exception("a stream failed")
            yield stream.fail(found.status, found.message, found.param)
        finally:
            self.answers.close()

    def event(self, stream: Any, prompt: int, fresh: Fresh, counted: bool) -> bytes:
        part = self.part(prompt, fresh)
        if counted:
            stream.counted(self.usage)
        return stream.part(part)

    async def whole(self) -> tuple[list[Answer], list[RequestOutput]]:
        """All choices of all prompts, when they are done."""
        outputs = await self.answers.outputs()
        return self.choices.answers(outputs), outputs


async def until_gone(receive: Callable) -> None:
    """Until the client has hung up; what it still sends is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of server-sent events. A reader that leaves, or takes nothing for too long, ends its request."""

    def __init__(self, events: AsyncIterator[bytes], answers: Answers):
        self.events, self.answers = events, answers

    async def __call__(self, scope, receive, send) -> None:
        state = scope["state"]
        connection = state["connection"]
        watcher = asyncio.create_task(until_gone(receive))
        watcher.add_done_callback(lambda _: self.answers.inbox.put(Gone()))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [*EVENTS]})
            async for data in self.events:
                await connection.write(data)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Gone:
            state["facts"]["ended"] = "client did not read" if connection.unread else "client left"
        finally:
            watcher.cancel()
            self.answers.close()
