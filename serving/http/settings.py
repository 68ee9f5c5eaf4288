"""The options of a server, beside those of its engines."""

from dataclasses import dataclass

from ..api.params import MAX_CHOICES
from .prompting import Formats

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The names are those of the flags."""

    version: str = "0"  # as /version has it
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    # The Host names it answers to; empty: its own on loopback, else any.
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # other sites whose pages may send requests (CORS)
    open_metrics: bool = False  # /metrics needs no key
    admin: bool = False  # serve the paths of `endpoints/admin.py`
    max_body_bytes: int = 16 << 20
    max_choices: int = MAX_CHOICES  # n times the prompts of a request
    max_connections: int = 4096
    receive_seconds: float = 30.0  # for the head of a request, and again for its body
    idle_seconds: float = 60.0  # between two requests on a connection
    write_seconds: float = 30.0  # for a client to take what it was sent
    request_seconds: float | None = None  # the longest that a request may take
    stall_seconds: float = 30.0  # a step that takes longer has failed
    shutdown_grace: float = 30.0
    max_loaded: int | None = None  # engines that are awake at once
    formats: Formats = Formats()
    otlp_traces_endpoint: str | None = None

    @property
    def loopback(self) -> bool:
        return self.uds is not None or self.host in LOOPBACK
