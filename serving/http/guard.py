"""Middleware that checks the host, key, framing and size of every request, and logs its end."""

import hashlib
import hmac
import random
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from ..api.validation import parse_digits
from ..protocol.fields import MAX_REQUEST_ID, is_plain
from .errors import HttpError, error_response
from .settings import LOOPBACK, ServerSettings

PUBLIC_PATHS = ("/health", "/ping")  # need no key: their answers may be public
FORM_UPLOAD = "multipart/form-data", "/v1/files"  # the one path whose body is a form
HOST = re.compile(r"\[([^\[\]]*)\](?::\d*)?|([^:\[\]]*)(?::\d*)?")


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def new_id() -> str:
    """A unique id, but one that can be guessed: `os.urandom` would release and retake the GIL."""
    return f"{random.getrandbits(128):032x}"


class Guard:
    """ASGI middleware around the application.

    `shutdown_error` returns the error with which new work is refused during a shutdown, else None;
    `record_request` is called with the scope, status and seconds of each finished request.
    """

    def __init__(
        self,
        app: Any,
        settings: ServerSettings,
        shutdown_error: Callable[[], HttpError | None],
        record_request: Callable,
    ):
        self.app = app
        self.settings = settings
        self.shutdown_error = shutdown_error
        self.record_request = record_request
        self.keys = {digest(key): key for key in settings.api_keys}
        local_names = (*LOOPBACK, settings.host) if settings.loopback else ()
        self.hosts = frozenset(name.lower() for name in settings.allowed_hosts or local_names)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        path = scope["path"]
        request_id = headers.get("x-request-id", "")
        if not request_id or len(request_id) > MAX_REQUEST_ID or not is_plain(request_id):
            request_id = new_id()
        state = scope["state"]
        state["request_id"] = request_id
        state["facts"] = {}
        status = 499  # the client left before a response started

        async def send_with_headers(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(raw=message.setdefault("headers", []))
                out["X-Request-Id"] = request_id
                out["X-Content-Type-Options"] = "nosniff"
                if "ignored" in state:
                    out["X-Ignored-Fields"] = state["ignored"]
            await send(message)

        try:
            self.check_form(scope["http_version"], headers)
            self.check(scope["method"], path, headers, state)
        except HttpError as error:
            await error_response(path, error)(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send_with_headers)
        finally:
            self.record_request(scope, status, time.monotonic() - began)
            del state["connection"]  # breaks a reference cycle: all of it is freed at once

    def check_form(self, version: str, headers: Headers) -> None:
        """Refuse a body with two lengths: a proxy may use the other one (request smuggling)."""
        if version not in ("1.0", "1.1"):
            raise HttpError(
                400, "HTTP/1.0 and HTTP/1.1 are spoken here", headers={"Connection": "close"}
            )
        if "transfer-encoding" in headers and ("content-length" in headers or version == "1.0"):
            reason = (
                "the body's length must be told once: by Content-Length, or by chunks in HTTP/1.1"
            )
            raise HttpError(400, reason, headers={"Connection": "close"})

    def check(self, method: str, path: str, headers: Headers, state: dict[str, Any]) -> None:
        if (
            self.hosts
            and path not in PUBLIC_PATHS
            and parse_host(headers.get("host", "")) not in self.hosts
        ):
            raise HttpError(
                403, "this server does not answer to that Host; --allowed-host adds a name"
            )
        state["key"] = self.key(headers)
        needs_no_key = (
            path in PUBLIC_PATHS or path == "/" or path.startswith("/page/") or method == "OPTIONS"
        )
        if (
            self.keys
            and not needs_no_key
            and state["key"] is None
            and not (path == "/metrics" and self.settings.open_metrics)
        ):
            raise HttpError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if method == "POST":
            if (error := self.shutdown_error()) is not None:
                raise error
            # Pages of other sites can send forms and plain text without a CORS preflight, but not
            # JSON.
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            has_no_body = (
                headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
            )
            is_same_site = (
                "origin" not in headers or headers["origin"] in self.settings.allowed_origins
            )
            if kind != "application/json" and not (
                is_same_site and (has_no_body or (kind, path) == FORM_UPLOAD)
            ):
                raise HttpError(415, "the body must be JSON: Content-Type: application/json")
            length = parse_digits(headers.get("content-length", "0"))
            if not isinstance(length, int) or not 0 <= length <= self.settings.max_body_bytes:
                raise too_large(self.settings)

    def key(self, headers: Headers) -> str | None:
        """The valid API key that a request has, compared in constant time; None: no valid one."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = headers.get("x-api-key", "")
        token_digest = digest(token.strip())
        matching_key = None
        for key_digest, key in self.keys.items():
            if hmac.compare_digest(key_digest, token_digest):
                matching_key = key
        return matching_key


def too_large(settings: ServerSettings) -> HttpError:
    max_bytes = settings.max_body_bytes
    return HttpError(413, f"the body must be at most {max_bytes} bytes (--max-body-bytes)")


def parse_host(value: str) -> str:
    """The name in a Host header: localhost for `localhost:8000`, "" if it is malformed."""
    match = HOST.fullmatch(value)
    return "" if match is None else (match[1] or match[2]).lower()
