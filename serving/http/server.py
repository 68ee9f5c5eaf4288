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
from .connection import make_connection_class
from .service import Service
from .settings import ServerSettings

try:
    import uvloop
except ImportError:  # there is none for Windows
    uvloop = None

log = logging.getLogger("quire")

BACKLOG = 2048  # connections that wait to be accepted
# Seconds that the engine's thread may hold the GIL while the event loop waits.
SWITCH_INTERVAL = 0.0005


def run(main: Coroutine[Any, Any, None]) -> None:
    """As `asyncio.run`, on uvloop if it is installed."""
    if uvloop is None:
        asyncio.run(main)
    else:
        uvloop.run(main)


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers: `serve` installs others."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


async def serve(service: Service, ready: Callable[[str], None]) -> None:
    """Listen, load the first model, call `ready` with the URL, and serve until a signal."""
    settings = service.settings
    sockets = None if settings.uds is not None else open_sockets(settings.host, settings.port)
    sys.setswitchinterval(SWITCH_INTERVAL)
    server = UvicornServer(
        uvicorn.Config(
            make_app(service),
            host=settings.host,
            port=settings.port,
            uds=settings.uds,
            http=make_connection_class(settings),
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
    drain_tasks: list[asyncio.Task] = []

    async def drain_and_exit() -> None:
        log.info("shutting down; requests under way: %d", service.open)
        await service.drain(settings.shutdown_grace)
        server.should_exit = True

    def stop() -> None:
        if drain_tasks:  # the second signal ends it at once
            server.should_exit = server.force_exit = True
        drain_tasks.append(loop.create_task(drain_and_exit()))

    def handle_signal(number: int) -> None:
        if service.models.is_any_moving() and (drain_tasks or not service.started):
            # Loading cannot be interrupted, and the process would wait for it.
            os._exit(128 + number)
        stop()

    service.stop = stop
    for number in (signal.SIGINT, signal.SIGTERM):
        # Only the main thread can handle signals.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, handle_signal, number)
    server_task = asyncio.create_task(server.serve(sockets))
    try:
        while not server.started:
            if server_task.done():
                error = server_task.exception() or RuntimeError("the server ended before it began")
                raise (
                    ModelError(f"uds is {settings.uds!r}: {error}")
                    if isinstance(error, OSError)
                    else error
                )
            await asyncio.sleep(0.01)
        service.address = server_url(settings, server)
        load_task = asyncio.create_task(service.load_first())
        await asyncio.wait([load_task, server_task], return_when=asyncio.FIRST_COMPLETED)
        if load_task.done():
            load_task.result()
            ready(service.address)
        await server_task
    finally:
        server.should_exit = True
        await asyncio.wait([server_task], timeout=5)
        service.close()


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of the host."""
    sockets: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, *_, socket_address in dict.fromkeys(addresses):
            sockets.append(socket.create_server(socket_address, family=family, backlog=BACKLOG))
    except OSError as error:
        for open_socket in sockets:
            open_socket.close()
        if error.errno == errno.EADDRINUSE:
            raise ModelError(
                f"port is {port}, where another program listens on {host}: end that one, or choose "
                f"another port (--port {port + 1}; --port 0 takes a free one)"
            ) from None
        raise ModelError(
            f"cannot listen on host {host!r}, port {port}: {error.strerror or error}"
        ) from None
    return sockets


def server_url(settings: ServerSettings, server: UvicornServer) -> str:
    """The server's URL, as a client writes it."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{port}"
