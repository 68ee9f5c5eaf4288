"""Checks every request before the application sees it: host, key, form and size; and reports it when it is over."""

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

OPEN = ("/health", "/ping")  # say nothing that must not be public
FORM = "multipart/form-data", "/v1/files"  # where a body is a form
HOST = re.compile(r"\[([^\[\]]*)\](?::\d*)?|([^:\[\]]*)(?::\d*)?")


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def new_id() -> str:
    """A unique id. It can be guessed: `os.urandom` would release and retake Python's lock."""
    return f"{random.getrandbits(128):032x}"


class Guard:
    """Wraps the application. `refuses` returns the error with which all work is refused, if it is."""

    def __init__(self, app: Any, settings: ServerSettings, refuses: Callable[[], HttpError | None], note: Callable):
        self.app, self.settings, self.refuses, self.note = app, settings, refuses, note
        self.keys = {digest(key): key for key in settings.api_keys}
        own = (*LOOPBACK, settings.host) if settings.loopback else ()
        self.hosts = frozenset(name.lower() for name in settings.allowed_hosts or own)

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, headers, path = time.monotonic(), Headers(scope=scope), scope["path"]
        name = headers.get("x-request-id", "")
        if not name or len(name) > MAX_REQUEST_ID or not is_plain(name):
            name = new_id()
        state = scope["state"]
        state["request_id"], state["facts"], status = name, {}, 499  # unless there is a response

        async def answer(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(raw=message.setdefault("headers", []))
                out["X-Request-Id"] = name
                out["X-Content-Type-Options"] = "nosniff"
                if "ignored" in state:
                    out["X-Ignored-Fields"] = state["ignored"]
            await send(message)

        try:
            self.check_form(scope["http_version"], headers)
            self.check(scope["method"], path, headers, state)
        except HttpError as error:
            await error_response(path, error)(scope, receive, answer)
        else:
            await self.app(scope, receive, answer)
        finally:
            self.note(scope, status, time.monotonic() - began)
            del state["connection"]  # it refers back here; without the cycle all of it is freed at once

    def check_form(self, version: str, headers: Headers) -> None:
        """Refuse two lengths: a proxy may go by the other one, and see other requests than this server."""
        if version not in ("1.0", "1.1"):
            raise HttpError(400, "HTTP/1.0 and HTTP/1.1 are spoken here", headers={"Connection": "close"})
        if "transfer-encoding" in headers and ("content-length" in headers or version == "1.0"):
            why = "the body's length must be told once: by Content-Length, or by chunks in HTTP/1.1"
            raise HttpError(400, why, headers={"Connection": "close"})

    def check(self, method: str, path: str, headers: Headers, state: dict[str, Any]) -> None:
        if self.hosts and path not in OPEN and host_of(headers.get("host", "")) not in self.hosts:
            raise HttpError(403, "this server does not answer to that Host; --allowed-host adds a name")
        state["key"] = self.key(headers)
        free = path in OPEN or path == "/" or path.startswith("/page/") or method == "OPTIONS"
        if self.keys and not free and state["key"] is None and not (path == "/metrics" and self.settings.open_metrics):
            raise HttpError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if method == "POST":
            if (error := self.refuses()) is not None:
                raise error
            # Other sites' pages can send forms and plain text unasked, but no JSON.
            kind = headers.get("content-type", "").split(";")[0].strip().lower()
            empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
            own = "origin" not in headers or headers["origin"] in self.settings.allowed_origins
            if kind != "application/json" and not (own and (empty or (kind, path) == FORM)):
                raise HttpError(415, "the body must be JSON: Content-Type: application/json")
            length = parse_digits(headers.get("content-length", "0"))
            if not isinstance(length, int) or not 0 <= length <= self.settings.max_body_bytes:
                raise too_large(self.settings)

    def key(self, headers: Headers) -> str | None:
        """Which of the keys a request has; finding it takes as long for each."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        wanted, found = digest(given.strip()), None
        for known, key in self.keys.items():
            if hmac.compare_digest(known, wanted):
                found = key
        return found


def too_large(settings: ServerSettings) -> HttpError:
    most = settings.max_body_bytes
    return HttpError(413, f"the body must be at most {most} bytes (--max-body-bytes)")


def host_of(value: str) -> str:
    """`localhost:8000` is localhost, `[::1]:8000` is ::1; what has another form is no name at all."""
    found = HOST.fullmatch(value)
    return "" if found is None else (found[1] or found[2]).lower()
