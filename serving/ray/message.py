"""Forwarded requests, and the pieces of their responses."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..resume import Journal, Streamed

Headers = list[tuple[bytes, bytes]]


@dataclass
class ForwardedRequest:
    """A complete HTTP request."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    prefix: tuple[bytes, ...] = ()  # digests of the prompt's prefixes, shortest first
    journal: Journal = field(default_factory=Journal)  # what other replicas have sent of the answer
    # Replicas that received it; written by the router.
    tried: list[str] = field(default_factory=list)

    @property
    def scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": None,
            "server": None,
        }


class ResponseStart(NamedTuple):
    """The start of a response. Only answers that another replica can continue have a name."""

    status: int
    headers: Headers
    # Digest of everything that determines the answer; only equal replicas may continue it.
    identity: bytes
    name: str = ""
    created: int = 0
    seeds: tuple[int, ...] = ()


class ResponsePiece(NamedTuple):
    """Bytes of a streamed response, and the tokens that they hold, to resume the answer elsewhere."""

    data: bytes
    streamed: list[Streamed]
    call_ids: dict[tuple[int, int], str] = {}  # ids of the tool calls so far, as in `Journal`


class ReplicaConnection:
    """Runs the application on a request. It is also the request's `connection`, to which streams
    write.
    """

    unread = False

    def __init__(self, call: ForwardedRequest, identity: bytes):
        self.call = call
        self.identity = identity
        self.journal = call.journal
        self.sent = len(call.journal.streamed)
        self.queue: asyncio.Queue[ResponseStart | ResponsePiece | BaseException | None] = (
            asyncio.Queue()
        )
        self.disconnected = asyncio.Event()
        self.has_sent_body = False

    async def messages(self, app: Any) -> AsyncIterator[ResponseStart | ResponsePiece]:
        """Yield the response; closing the generator tells the application that its client has
        gone.
        """
        task = asyncio.create_task(self.run(app))
        try:
            while (message := await self.queue.get()) is not None:
                if isinstance(message, BaseException):
                    raise message
                yield message
        finally:
            self.disconnected.set()
            await asyncio.wait([task])

    async def run(self, app: Any) -> None:
        scope = self.call.scope | {"state": {"connection": self, "journal": self.journal}}
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:
            self.queue.put_nowait(error)
        finally:
            self.queue.put_nowait(None)

    async def receive(self) -> dict[str, Any]:
        if not self.has_sent_body:
            self.has_sent_body = True
            return {"type": "http.request", "body": self.call.body, "more_body": False}
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            journal = self.journal
            start = ResponseStart(message["status"], [*message["headers"]], self.identity)
            self.queue.put_nowait(
                start._replace(
                    name=journal.name, created=journal.created, seeds=tuple(journal.seeds)
                )
            )
        elif data := message.get("body", b""):
            self.queue.put_nowait(ResponsePiece(data, []))

    async def write(self, data: bytes) -> None:
        """Send a part of an event stream."""
        streamed = self.journal.streamed[self.sent :]
        self.sent += len(streamed)
        self.queue.put_nowait(ResponsePiece(data, streamed, dict(self.journal.call_ids)))
