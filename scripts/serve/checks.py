"""Checks of what `quire serve` is given: API keys and limits."""

import os
from pathlib import Path

from ...serving.http.settings import ServerSettings
from .. import options as o


def read_keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """The API keys of the command line, of QUIRE_API_KEY and of a file."""
    keys = [*given, *os.environ.get("QUIRE_API_KEY", "").split(",")]
    if file is not None:
        keys += o.read_text(file).splitlines()
    found = tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
    if file is not None and not found:
        raise o.UsageError(f"--api-key-file {file} holds no key")
    return found


def check_limits(settings: ServerSettings, max_queued_requests: int) -> None:
    limits = vars(settings) | {"max_queued_requests": max_queued_requests}
    for name in (
        "receive_seconds",
        "idle_seconds",
        "write_seconds",
        "request_seconds",
        "stall_seconds",
        "max_loaded",
        "max_body_bytes",
        "max_choices",
        "max_connections",
        "max_queued_requests",
    ):
        if limits[name] is not None and not limits[name] > 0:
            raise o.UsageError(f"--{name.replace('_', '-')} is {limits[name]}; it must be above 0")
    if not 0 <= settings.port < 65536:
        raise o.UsageError(f"--port is {settings.port}; it must be from 0 (a free one) to 65535")
    for name in ("shutdown_grace", "max_stored_responses", "max_stored_bytes"):
        if limits[name] < 0:
            raise o.UsageError(
                f"--{name.replace('_', '-')} is {limits[name]}; it must be 0 or more"
            )
