"""A connection to a client: bounded in time and size, and read in turn with the others."""

from collections import deque

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from .settings import ServerSettings

HEAD_BYTES = 32 << 10  # the request line and all headers
SMALL_CHUNK, MOST_SMALL = 256, 512  # bytes of a small chunk of a body, and how many of them there may be
TURN = 8  # connections that are read in one turn of the event loop


class BoundedReader(h11.Connection):
    """Refuses bodies in many small chunks: each takes as much work as a large one, and a packet holds thousands."""

    small_chunks = 0

    def next_event(self):
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.small_chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start and len(event.data) < SMALL_CHUNK:
            self.small_chunks += 1
            if self.small_chunks > MOST_SMALL:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class ReadTurns:
    """When many connections send at once, a few are read in each turn of the event loop, so that other work goes on."""

    def __init__(self):
        self.waiting: deque[tuple[Connection, bytes]] = deque()
        self.read = 0  # connections in this turn; TURN while any wait, so that none is read before those

    def enter(self, connection: "Connection", data: bytes) -> None:
        if not self.read:
            connection.loop.call_soon(self.turn, connection.loop)
        if self.read < TURN:
            self.read += 1
            connection.read(data)
        else:
            connection.flow.pause_reading()
            self.waiting.append((connection, data))

    def turn(self, loop) -> None:
        self.read = min(len(self.waiting), TURN)
        if self.read:
            loop.call_soon(self.turn, loop)
        for _ in range(self.read):
            connection, data = self.waiting.popleft()
            if not connection.lost:
                connection.flow.resume_reading()
                connection.read(data)


class Connection(H11Protocol):
    """A client must send its request in time and take its response in time, or it is disconnected."""

    settings: ServerSettings
    turns: ReadTurns
    receiving = sending = None  # timers
    lost = unread = False

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.conn = BoundedReader(h11.SERVER, HEAD_BYTES)
        self.app_state = {**self.app_state, "connection": self}

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.expect()

    def data_received(self, data: bytes) -> None:
        self.turns.enter(self, data)

    def read(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self.expect()
        else:
            self.relax()

    async def write(self, data: bytes) -> None:
        """Write a part of an event stream straight to the transport, past the layers of ASGI."""
        if self.flow.write_paused:
            await self.flow.drain()
        if not self.lost:
            chunked = self.cycle.scope["http_version"] == "1.1"
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body:  # it was answered before all of it came
            self.expect()
        if self.transport.is_closing():
            self.watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unwatch()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # a graceful close would wait for the client to read
            self.hang_up()
        super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.relax()
        self.unwatch()
        super().connection_lost(exc)
        self.app_state = {}  # it refers back to this connection; without the cycle both are freed at once

    def _should_upgrade(self) -> bool:
        return False  # and uvicorn logs no advice to install websockets

    def expect(self) -> None:
        if self.receiving is None:
            self.receiving = self.loop.call_later(self.settings.receive_seconds, self.hang_up)

    def relax(self) -> None:
        if self.receiving is not None:
            self.receiving.cancel()
            self.receiving = None

    def watch(self) -> None:
        """In each period the client must read as much as may be in flight."""
        self.unwatch()
        left = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() > left - HIGH_WATER_LIMIT:
                self.unread = True
                self.hang_up()
            else:
                self.watch()

        if left:
            self.sending = self.loop.call_later(self.settings.write_seconds, look)

    def unwatch(self) -> None:
        if self.sending is not None:
            self.sending.cancel()
            self.sending = None

    def hang_up(self) -> None:
        """Close now, and drop what is not sent yet."""
        self.transport.abort()


def bounded(of: ServerSettings) -> type[Connection]:
    """The connections of one server."""

    class Bounded(Connection):
        settings, turns = of, ReadTurns()

    return Bounded
