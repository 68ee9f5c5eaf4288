"""The listening server: connections that are bounded in time and size, and an end in good order."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable

import h11
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import make_app
from .service import Service
from .settings import Settings

log = logging.getLogger("quire")

SWITCH = 0.0005  # seconds that the engine's thread may keep the event loop's waiting for Python's lock, at each write
HEAD_BYTES = 32 << 10  # the request line and all headers
CRUMB, CRUMBS = 256, 512  # bytes of a small chunk of a body, and how many there may be
PATIENCE = 1.5  # a stream, which has a deadline of its own for each write, is to be the first to know


class Reading(h11.Connection):
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


def bounded(settings: Settings) -> type[H11Protocol]:
    """A connection that must bring its next request in time: silent, dripping and half-sent ones are closed."""

    class Connection(H11Protocol):
        receiving: asyncio.TimerHandle | None = None
        sending: asyncio.TimerHandle | None = None

        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.conn = Reading(h11.SERVER, HEAD_BYTES)

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self.app_state = {**self.app_state, "hang_up": self.hang_up}
            self.expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self.expect()
            else:
                self.relax()

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
            self.relax()
            self.unwatch()
            super().connection_lost(exc)

        def _should_upgrade(self) -> bool:
            return False  # and no advice to install what would

        def expect(self) -> None:
            if self.receiving is None:
                self.receiving = self.loop.call_later(settings.receive_seconds, self.hang_up)

        def relax(self) -> None:
            if self.receiving is not None:
                self.receiving.cancel()
                self.receiving = None

        def watch(self) -> None:
            """Answers that are written at once must be read, too: as much in a while as may be on its way."""
            self.unwatch()
            left = self.transport.get_write_buffer_size()

            def look() -> None:
                if self.transport.get_write_buffer_size() > left - HIGH_WATER_LIMIT:
                    self.hang_up()
                else:
                    self.watch()

            if left:
                self.sending = self.loop.call_later(PATIENCE * settings.write_seconds, look)

        def unwatch(self) -> None:
            if self.sending is not None:
                self.sending.cancel()
                self.sending = None

        def hang_up(self) -> None:
            """Close now, with what is not sent yet."""
            self.transport.abort()

    return Connection


class Server(uvicorn.Server):
    """Without uvicorn's way with signals: what they mean is ours to say."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


async def serve(service: Service, ready: Callable[[str], None]) -> None:
    """Listen, load the first model, and serve until a signal has drained it."""
    settings = service.settings
    sys.setswitchinterval(SWITCH)
    server = Server(
        uvicorn.Config(
            make_app(service),
            host=settings.host,
            port=settings.port,
            uds=settings.uds,
            http=bounded(settings),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=settings.max_connections,
            timeout_keep_alive=settings.idle_seconds,  # type: ignore[arg-type] - seconds, whole or not
            timeout_graceful_shutdown=1,
        )
    )
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task] = []

    async def end() -> None:
        log.info("shutting down; requests under way: %d", service.open)
        await service.drain(settings.shutdown_grace)
        server.should_exit = True

    def stop() -> None:
        if ending:  # asked twice: at once
            server.should_exit = server.force_exit = True
        ending.append(loop.create_task(end()))

    service.stop = stop
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # only a main thread hears signals
            loop.add_signal_handler(number, stop)
    running = asyncio.create_task(server.serve())
    try:
        while not server.started:
            if running.done():
                raise running.exception() or RuntimeError("the server ended before it began")
            await asyncio.sleep(0.01)
        service.address = address(settings, server)
        loading = asyncio.create_task(service.load_first())
        await asyncio.wait([loading, running], return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            ready(service.address)
        await running
    finally:
        server.should_exit = True
        await asyncio.wait([running], timeout=5)
        service.close()


def address(settings: Settings, server: Server) -> str:
    """Where it listens, as a client writes it."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{port}"
