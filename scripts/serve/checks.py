"""API keys and checks of the limits of `quire serve`."""

import os
from pathlib import Path

from ...serving.http.settings import ServerSettings
from .. import options as o


def read_keys(flag_keys: list[str], file: Path | None) -> tuple[str, ...]:
    """Collect the API keys from the command line, QUIRE_API_KEY and a file."""
    keys = [*flag_keys, *os.environ.get("QUIRE_API_KEY", "").split(",")]
    if file is not None:
        keys += o.read_text(file).splitlines()
    unique_keys = tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
    if file is not None and not unique_keys:
        raise o.UsageError(f"--api-key-file {file} holds no key")
    return unique_keys


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
