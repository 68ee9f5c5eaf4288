"""A request as it is sent to a replica, and its response as it comes back, piece by piece."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..resume import Journal, Streamed

Headers = list[tuple[bytes, bytes]]


@dataclass
class ForwardedRequest:
    """A request to a server, whole."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    prefix: tuple[bytes, ...] = ()  # digests of its prompt's beginnings, the shortest first
    journal: Journal = field(default_factory=Journal)  # what other replicas have sent of its answer
    tried: list[str] = field(default_factory=list)  # replicas that it was sent to; the router writes it

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
    """How a response begins. An answer that can be gone on with elsewhere has a name."""

    status: int
    headers: Headers
    identity: bytes  # of what computes it: only a replica with the same one goes on with it
    name: str = ""
    created: int = 0
    seeds: tuple[int, ...] = ()


class ResponsePiece(NamedTuple):
    """Bytes of a response, and the parts of the answer in them."""

    data: bytes
    streamed: list[Streamed]
    call_ids: dict[tuple[int, int], str] = {}  # of the tool calls so far, as in `Journal`


class ReplicaConnection:
    """Runs the application on a request. It is the request's `connection` too, to which streams are written."""

    unread = False

    def __init__(self, call: ForwardedRequest, identity: bytes):
        self.call, self.identity, self.journal = call, identity, call.journal
        self.sent = len(call.journal.streamed)
        self.queue: asyncio.Queue[ResponseStart | ResponsePiece | BaseException | None] = asyncio.Queue()
        self.gone, self.asked = asyncio.Event(), False

    async def messages(self, app: Any) -> AsyncIterator[ResponseStart | ResponsePiece]:
        """The response as it comes; leaving early tells the application that its client has gone."""
        task = asyncio.create_task(self.run(app))
        try:
            while (message := await self.queue.get()) is not None:
                if isinstance(message, BaseException):
                    raise message
                yield message
        finally:
            self.gone.set()
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
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": self.call.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            known = self.journal
            start = ResponseStart(message["status"], [*message["headers"]], self.identity)
            self.queue.put_nowait(start._replace(name=known.name, created=known.created, seeds=tuple(known.seeds)))
        elif data := message.get("body", b""):
            self.queue.put_nowait(ResponsePiece(data, []))

    async def write(self, data: bytes) -> None:
        """A part of an event stream."""
        streamed = self.journal.streamed[self.sent :]
        self.sent += len(streamed)
        self.queue.put_nowait(ResponsePiece(data, streamed, dict(self.journal.call_ids)))
