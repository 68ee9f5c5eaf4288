"""An asyncio client of OpenAI-compatible servers: HTTP/1.1, and server-sent events with the time of
each event.

It uses no HTTP library to save CPU time, because it often shares the machine with the server.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from .metrics import RequestTimes

LINE = 1 << 20  # maximum bytes of a line in a header or an event
ERROR_BODY = 1 << 16  # maximum bytes to read of an error response


class Failure(Exception):
    """A failed request; the message is one line."""


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server, and the API key to send."""

    host: str
    port: int
    tls: ssl.SSLContext | None  # shared by all requests, because reading certificates is slow
    path: str
    key: str | None = None

    @classmethod
    def parse(cls, url: str, key: str | None = None) -> "ServerAddress":
        """Parse an http(s) URL, with or without a final /v1; raises ValueError if it is invalid."""
        split_url = urlsplit(url)
        if (
            split_url.scheme not in ("http", "https")
            or not split_url.hostname
            or split_url.query
            or split_url.fragment
        ):
            raise ValueError(f"{url!r} is not an address like http://127.0.0.1:8000")
        tls = ssl.create_default_context() if split_url.scheme == "https" else None
        port = split_url.port if split_url.port is not None else 443 if tls else 80
        return cls(
            split_url.hostname, port, tls, split_url.path.rstrip("/").removesuffix("/v1"), key
        )

    def head(self, method: str, path: str, length: int) -> bytes:
        name = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {name}:{self.port}",
            "Connection: close",
            "Accept: text/event-stream, application/json",
            "User-Agent: quire-bench",
        ]
        if length:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join((*lines, "", "")).encode()


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]

    async def read(self, limit: int) -> bytes:
        """The body, up to `limit` bytes."""
        data = b""
        async for chunk in self.chunks:
            data += chunk
            if len(data) >= limit:
                break
        return data[:limit]


@asynccontextmanager
async def exchange(
    server: ServerAddress, method: str, path: str, body: bytes = b""
) -> AsyncIterator[Response]:
    """Send one request over a new connection, which is closed at the end."""
    reader, writer = await asyncio.open_connection(
        server.host, server.port, ssl=server.tls, limit=LINE
    )
    try:
        writer.write(server.head(method, path, len(body)) + body)
        await writer.drain()
        status, headers = await read_head(reader)
        yield Response(status, headers, read_body(reader, headers))
    finally:
        writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Read (status, headers with lower-case names), skipping interim responses (1xx)."""
    while True:
        version, _, status_line = (
            (await reader.readuntil(b"\n")).decode("latin-1").strip().partition(" ")
        )
        code = status_line.split(" ")[0]
        if not version.startswith("HTTP/1.") or len(code) != 3 or not code.isdecimal():
            raise Failure("the answer is not HTTP/1.1")
        headers: dict[str, str] = {}
        while line := (await reader.readuntil(b"\n")).decode("latin-1").strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        if int(code) >= 200:
            return int(code), headers


async def read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; raises IncompleteReadError if it ends early."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := number((await reader.readuntil(b"\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            if (await reader.readuntil(b"\n")).strip():
                raise Failure("a chunk is longer than its size")
        return
    remaining = (
        number(headers["content-length"].encode(), 10) if "content-length" in headers else None
    )
    while remaining != 0:
        data = await reader.read(ERROR_BODY if remaining is None else min(remaining, ERROR_BODY))
        if not data:
            if remaining is None:
                return
            raise asyncio.IncompleteReadError(data, remaining)
        remaining = None if remaining is None else remaining - len(data)
        yield data


def number(text: bytes, base: int) -> int:
    text = text.strip().lower()
    if not text or len(text) > 16 or not set(text) <= set(b"0123456789abcdef"[:base]):
        raise Failure("the answer's length cannot be read")
    return int(text, base)


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the data of each server-sent event."""
    buffer = b""
    data = []
    async for chunk in chunks:
        *lines, buffer = (buffer + chunk).split(b"\n")
        if len(buffer) > LINE:
            raise Failure(f"a line is longer than {LINE} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data).decode()
                data = []


async def ask(
    server: ServerAddress,
    path: str,
    body: dict[str, Any],
    timeout: float,
    clock: Callable[[], float],
) -> RequestTimes:
    """Send one request and time the streamed response.

    Failures are reported in the result's `error`; only cancellation is raised.
    """
    sent = clock()
    times = []
    usage = {}
    ended = None
    limit = None
    try:
        data = json.dumps(body).encode()
        async with (
            asyncio.timeout(timeout) as limit,
            exchange(server, "POST", path, data) as response,
        ):
            if response.status != 200:
                text = error_text(await response.read(ERROR_BODY))
                raise Failure(
                    f"HTTP {response.status}: {text}" if text else f"HTTP {response.status}"
                )
            is_complete = False
            async for event in events(response.chunks):
                now = clock()
                if is_complete := event.strip() == "[DONE]":
                    break
                parsed = parse_event(event)
                usage = parsed.usage or usage
                if parsed.has_tokens:
                    times.append(now)
                if parsed.is_last:
                    ended = now
            if not is_complete:
                raise Failure("the stream ended without [DONE]")
            if not times and ended is None:
                raise Failure("the stream held no token")
    except TimeoutError:
        has_expired = limit is not None and limit.expired()
        return RequestTimes(
            sent,
            times,
            error=f"no end within {timeout:g} s" if has_expired else "cannot connect: timed out",
        )
    except asyncio.IncompleteReadError:
        return RequestTimes(
            sent,
            times,
            error="disconnected in the middle of the answer" if times else "disconnected",
        )
    except (Failure, OSError, ValueError, asyncio.LimitOverrunError) as error:
        return RequestTimes(sent, times, error=reason(error))
    written = usage.get("completion_tokens", len(times))
    return RequestTimes(
        sent, times, usage.get("prompt_tokens", 0), written, ended=None if times else ended
    )


class StreamEvent(NamedTuple):
    """A parsed event of a streamed response."""

    has_tokens: bool  # it carries generated tokens
    is_last: bool  # it has a finish reason
    usage: dict[str, int]


def parse_event(event: str) -> StreamEvent:
    try:
        data = json.loads(event)
    except ValueError:
        raise Failure("an event is not JSON") from None
    if not isinstance(data, dict):
        raise Failure("an event is not a JSON object")
    if "error" in data:
        raise Failure(error_text(event.encode()) or "an error in the stream")
    usage = data.get("usage")
    usage = (
        {k: v for k, v in usage.items() if isinstance(v, int)} if isinstance(usage, dict) else {}
    )
    choices = data.get("choices")
    choice = (
        choices[0]
        if isinstance(choices, list) and choices and isinstance(choices[0], dict)
        else None
    )
    if choice is None:
        return StreamEvent(False, False, usage)
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    written = (
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("tool_calls")
    )
    # An event with a token may have no text (special tokens, incomplete characters), but the first
    # event (with the role) and the last one (with the finish reason) carry no token.
    is_last = choice.get("finish_reason") is not None
    return StreamEvent(bool(written) or not ("role" in delta or is_last), is_last, usage)


def error_text(body: bytes) -> str:
    """The message of an OpenAI error object, or the first line of the body."""
    text = body.decode(errors="replace").strip()
    try:
        message = json.loads(text)
        message = message.get("error", message) if isinstance(message, dict) else message
        text = str(message.get("message", message) if isinstance(message, dict) else message)
    except ValueError:
        pass
    return text.strip().split("\n")[0][:200]


def reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().split("\n")[0][:200]


async def get(server: ServerAddress, path: str, timeout: float) -> str:
    """GET a path and return the text; raises OSError or Failure."""
    async with asyncio.timeout(timeout), exchange(server, "GET", path) as response:
        if response.status != 200:
            raise Failure(f"HTTP {response.status}")
        return (await response.read(LINE)).decode(errors="replace")


async def post(
    server: ServerAddress, path: str, body: dict[str, Any], timeout: float
) -> dict[str, Any]:
    """POST a JSON body and return the JSON object in the response; raises OSError or Failure."""
    async with (
        asyncio.timeout(timeout),
        exchange(server, "POST", path, json.dumps(body).encode()) as response,
    ):
        data = await response.read(LINE)
        if response.status != 200:
            raise Failure(f"HTTP {response.status}: {error_text(data[:ERROR_BODY])}")
        try:
            value = json.loads(data)
        except ValueError:
            raise Failure(f"{path} answers with no JSON") from None
        return value if isinstance(value, dict) else {}


async def models(server: ServerAddress, timeout: float) -> list[str]:
    """List the model names at /v1/models; raises OSError or Failure."""
    async with asyncio.timeout(timeout), exchange(server, "GET", "/v1/models") as response:
        data = await response.read(LINE)
        try:
            return [str(model["id"]) for model in json.loads(data)["data"]]
        except (ValueError, KeyError, TypeError):
            raise Failure(f"HTTP {response.status}: no list of models") from None
