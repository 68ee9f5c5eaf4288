"""The listening server, from its start to its shutdown."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn

from .app import make_app
from .connection import bounded
from .service import Service
from .settings import ServerSettings

try:
    import uvloop
except ImportError:  # there is none for Windows
    uvloop = None

log = logging.getLogger("quire")

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


def address(settings: ServerSettings, server: UvicornServer) -> str:
    """Where it listens, as a client writes it."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    port = server.servers[0].sockets[0].getsockname()[1]
    return f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{port}"
