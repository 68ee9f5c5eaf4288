"""The listening server, from its start to its shutdown."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn

from ...model.config import ModelError
from .app import make_app
from .connection import bounded
from .service import Service
from .settings import ServerSettings

try:
    import uvloop
except ImportError:  # there is none for Windows
    uvloop = None

log = logging.getLogger("quire")

BACKLOG = 2048  # connections that wait to be accepted
SWITCH = 0.0005  # seconds for which the engine's thread may hold Python's lock while the event loop waits for it


def run(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`, on the faster loop where there is one."""
    if uvloop is None:
        asyncio.run(main)
    else:
        uvloop.run(main)


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers: `serve` has its own."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


async def serve(service: Service, ready: Callable[[str], None]) -> None:
    """Listen, load the first model, and serve until a signal has drained it."""
    settings = service.settings
    sockets = None if settings.uds is not None else listening(settings.host, settings.port)
    sys.setswitchinterval(SWITCH)
    server = UvicornServer(
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

    def hear(number: int) -> None:
        if service.models.moving() and (ending or not service.started):
            os._exit(128 + number)  # what loads a model cannot be interrupted, and the process would wait for it
        stop()

    service.stop = stop
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # only a main thread hears signals
            loop.add_signal_handler(number, hear, number)
    running = asyncio.create_task(server.serve(sockets))
    try:
        while not server.started:
            if running.done():
                error = running.exception() or RuntimeError("the server ended before it began")
                raise ModelError(f"uds is {settings.uds!r}: {error}") if isinstance(error, OSError) else error
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


def listening(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of the host."""
    found: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, where in dict.fromkeys(addresses):
            found.append(socket.create_server(where, family=family, backlog=BACKLOG))
    except OSError as error:
        for each in found:
            each.close()
        if error.errno == errno.EADDRINUSE:
            raise ModelError(
                f"port is {port}, where another program listens on {host}: end that one, or choose another port "
                f"(--port {port + 1}; --port 0 takes a free one)"
            ) from None
        raise ModelError(f"cannot listen on host {host!r}, port {port}: {error.strerror or error}") from None
    return found


def address(settings: ServerSettings, server: UvicornServer) -> str:
    """Where it listens, as a client writes it."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{port}"
