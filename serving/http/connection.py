"""A connection to a client: bounded in time and size, taking turns with the others, and quick to write."""

from collections import deque

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from .settings import ServerSettings

HEAD_BYTES = 32 << 10  # the request line and all headers
CRUMB, CRUMBS = 256, 512  # bytes of a small chunk of a body, and how many there may be
TURN = 8  # connections that are heard between two looks of the event loop at everything else


class BoundedReader(h11.Connection):
    """Refuses bodies in crumbs: each takes as much work as a large piece, and a packet holds thousands."""

    crumbs = 0

    def next_event(self):
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.crumbs = 0
        elif isinstance(event, h11.Data) and event.chunk_start and len(event.data) < CRUMB:
            self.crumbs += 1
            if self.crumbs > CRUMBS:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class ReadTurns:
    """When all speak at once, a few are heard at a time: nothing else waits for the whole crowd."""

    def __init__(self):
        self.waiting: deque[tuple[Connection, bytes]] = deque()
        self.heard = 0  # since the last turn: TURN while anybody waits, so that nobody is heard before those

    def enter(self, connection: "Connection", data: bytes) -> None:
        if not self.heard:
            connection.loop.call_soon(self.turn, connection.loop)
        if self.heard < TURN:
            self.heard += 1
            connection.hear(data)
        else:
            connection.flow.pause_reading()
            self.waiting.append((connection, data))

    def turn(self, loop) -> None:
        self.heard = min(len(self.waiting), TURN)
        if self.heard:
            loop.call_soon(self.turn, loop)
        for _ in range(self.heard):
            connection, data = self.waiting.popleft()
            if not connection.lost:
                connection.flow.resume_reading()
                connection.hear(data)


class Connection(H11Protocol):
    """What a client sends must come in time, and what it is sent it must take in time: others are hung up on."""

    settings: ServerSettings
    turnstile: ReadTurns
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
        self.turnstile.enter(self, data)

    def hear(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self.expect()
        else:
            self.relax()

    async def write(self, data: bytes) -> None:
        """A part of an event stream: what sending it would come to, without asking all that stand between."""
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
        if self.transport.get_write_buffer_size():  # closed in good order it would wait for its reader
            self.hang_up()
        super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.relax()
        self.unwatch()
        super().connection_lost(exc)
        self.app_state = {}  # which leads here again, and would keep all of it until the collector comes

    def _should_upgrade(self) -> bool:
        return False  # and no advice to install what would

    def expect(self) -> None:
        if self.receiving is None:
            self.receiving = self.loop.call_later(self.settings.receive_seconds, self.hang_up)

    def relax(self) -> None:
        if self.receiving is not None:
            self.receiving.cancel()
            self.receiving = None

    def watch(self) -> None:
        """As much must be read in a while as may be on its way."""
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
        """Close now, with what is not sent yet."""
        self.transport.abort()


def bounded(of: ServerSettings) -> type[Connection]:
    """The connections of one server."""

    class Bounded(Connection):
        settings, turnstile = of, ReadTurns()

    return Bounded
