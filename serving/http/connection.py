"""A client's connection: limited in time and size, and read in turns with the others."""

from collections import deque

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from .settings import ServerSettings

HEAD_BYTES = 32 << 10  # the request line and all headers
SMALL_CHUNK = 256  # a chunk of a body with fewer bytes counts as small
MAX_SMALL_CHUNKS = 512  # in one body
READS_PER_TURN = 8  # connections read in one iteration of the event loop


class BoundedReader(h11.Connection):
    """Refuses bodies in many small chunks, each of which costs as much as a large one."""

    small_chunks = 0

    def next_event(self):
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.small_chunks = 0
        elif isinstance(event, h11.Data) and event.chunk_start and len(event.data) < SMALL_CHUNK:
            self.small_chunks += 1
            if self.small_chunks > MAX_SMALL_CHUNKS:
                raise h11.RemoteProtocolError("too many small chunks")
        return event


class ReadTurns:
    """Limits how many connections one iteration of the event loop reads."""

    def __init__(self):
        self.waiting: deque[tuple[Connection, bytes]] = deque()
        # Connections in this turn; READS_PER_TURN while any wait, so that new data is queued.
        self.read = 0

    def enter(self, connection: "Connection", data: bytes) -> None:
        if not self.read:
            connection.loop.call_soon(self.turn, connection.loop)
        if self.read < READS_PER_TURN:
            self.read += 1
            connection.read(data)
        else:
            connection.flow.pause_reading()
            self.waiting.append((connection, data))

    def turn(self, loop) -> None:
        self.read = min(len(self.waiting), READS_PER_TURN)
        if self.read:
            loop.call_soon(self.turn, loop)
        for _ in range(self.read):
            connection, data = self.waiting.popleft()
            if not connection.lost:
                connection.flow.resume_reading()
                connection.read(data)


class Connection(H11Protocol):
    """Disconnects a client that sends its request, or reads its response, too slowly."""

    settings: ServerSettings
    turns: ReadTurns
    receive_timer = write_timer = None
    lost = unread = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.conn = BoundedReader(h11.SERVER, HEAD_BYTES)
        self.app_state = {**self.app_state, "connection": self}

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.start_receive_timer()

    def data_received(self, data: bytes) -> None:
        self.turns.enter(self, data)

    def read(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self.start_receive_timer()
        else:
            self.stop_receive_timer()

    async def write(self, data: bytes) -> None:
        """Write a chunk of an event stream to the transport directly, without ASGI messages."""
        if self.flow.write_paused:
            await self.flow.drain()
        if not self.lost:
            chunked = self.cycle.scope["http_version"] == "1.1"
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body:  # answered before the whole body arrived
            self.start_receive_timer()
        if self.transport.is_closing():
            self.start_write_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_write_timer()

    def timeout_keep_alive_handler(self) -> None:
        # A graceful close would wait for the client to read.
        if self.transport.get_write_buffer_size():
            self.hang_up()
        super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.stop_receive_timer()
        self.stop_write_timer()
        super().connection_lost(exc)
        self.app_state = {}  # breaks a reference cycle: both objects are freed at once

    def _should_upgrade(self) -> bool:
        return False  # keeps uvicorn from advising to install websockets

    def start_receive_timer(self) -> None:
        if self.receive_timer is None:
            self.receive_timer = self.loop.call_later(self.settings.receive_seconds, self.hang_up)

    def stop_receive_timer(self) -> None:
        if self.receive_timer is not None:
            self.receive_timer.cancel()
            self.receive_timer = None

    def start_write_timer(self) -> None:
        """Abort unless the client reads HIGH_WATER_LIMIT bytes, or all, in each period."""
        self.stop_write_timer()
        num_unsent = self.transport.get_write_buffer_size()

        def check_progress() -> None:
            if self.transport.get_write_buffer_size() > num_unsent - HIGH_WATER_LIMIT:
                self.unread = True
                self.hang_up()
            else:
                self.start_write_timer()

        if num_unsent:
            self.write_timer = self.loop.call_later(self.settings.write_seconds, check_progress)

    def stop_write_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def hang_up(self) -> None:
        """Close now, and drop unsent data."""
        self.transport.abort()


def make_connection_class(server_settings: ServerSettings) -> type[Connection]:
    """The connection class for one server: uvicorn instantiates it without arguments of ours."""

    class Bounded(Connection):
        settings = server_settings
        turns = ReadTurns()

    return Bounded
