"""Malformed and unending HTTP requests: rejected or disconnected in time and in bounded memory,
without harm to later requests.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import uvicorn
from uvicorn.server import ServerState

from quire.serving.http.server import make_connection_class
from quire.serving.http.settings import ServerSettings
from quire.tests.support.canary import Canary, Client, connect, memory, settled
from quire.tests.support.served import FORMATS, model_of, scripted, served

RECEIVE_SECONDS = 0.6  # seconds
IDLE_SECONDS = 0.7
WRITE_SECONDS = 0.6
MARGIN_SECONDS = 15.0  # margin for busy machines
MIB = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "hello", "max_tokens": 2}'
FLAGS = (
    "--receive-seconds",
    RECEIVE_SECONDS,
    "--idle-seconds",
    IDLE_SECONDS,
    "--write-seconds",
    WRITE_SECONDS,
    "--max-body-bytes",
    "4M",
    "--max-model-len",
    256,
    "--max-num-seqs",
    4,
    "--max-num-batched-tokens",
    64,
    "--max-connections",
    64,
)


@pytest.fixture(scope="module")
def process() -> Iterator[Any]:
    """A separate `quire serve` process, so that its memory can be measured."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *map(str, FLAGS)]
    lines: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as running:
        assert running.stderr is not None
        for line in running.stderr:
            lines.append(line)
            if line.startswith("ready: "):
                break
        else:
            pytest.fail("".join(lines))
        url = line.removeprefix("ready: ").strip()
        threading.Thread(target=lambda: lines.extend(running.stderr or ()), daemon=True).start()
        canary = Canary(url)
        for _ in range(20):
            canary.check_answer()
        yield SimpleNamespace(url=url, pid=running.pid, canary=canary, lines=lines, running=running)
        assert running.poll() is None, "the server has ended"
        running.terminate()
        running.wait(120)


@pytest.fixture(autouse=True)
def check_server_is_unharmed(request):
    """After each test: same process, bounded memory growth, no leaked files, and the canary request
    succeeds.
    """
    if "process" not in request.fixturenames:
        yield
        return
    process = request.getfixturevalue("process")
    server = psutil.Process(process.pid)
    creation_time = server.create_time()
    memory_before = memory(process.pid)
    files = server.num_fds()
    yield
    canary_seconds = process.canary.check_answer()
    assert process.running.poll() is None and server.create_time() == creation_time
    end = time.monotonic() + RECEIVE_SECONDS + MARGIN_SECONDS
    while server.num_fds() > files and time.monotonic() < end:
        time.sleep(0.02)
    growth_mib = (memory(process.pid) - memory_before) / MIB
    print(
        f"    canary {canary_seconds:.3f} s, {growth_mib:+.1f} MiB, "
        f"{server.num_fds() - files:+d} files"
    )
    assert server.num_fds() <= files
    assert growth_mib < (160 if "flood" in request.node.name else 48)


def read_until_closed(connection: socket.socket, seconds: float) -> tuple[bytes, float | None]:
    """(data received until the server closes, seconds until then; None if it does not close in
    time).
    """
    data = b""
    start = time.monotonic()
    while (remaining := start + seconds - time.monotonic()) > 0:
        connection.settimeout(remaining)
        try:
            received = connection.recv(65536)
        except TimeoutError:
            break
        except ConnectionError:
            return data, time.monotonic() - start
        if not received:
            return data, time.monotonic() - start
        data += received
    return data, None


def try_send(connection: socket.socket, data: bytes) -> bool:
    """Send all of it; return whether the connection accepted it."""
    try:
        connection.sendall(data)
    except (ConnectionError, TimeoutError):
        return False
    return True


def count_responses(raw: bytes) -> int:
    """Number of status lines in the data."""
    return len(re.findall(rb"HTTP/1\.1 \d{3} ", raw))


def parse_status(raw: bytes) -> int | None:
    return int(raw.split(b" ", 2)[1]) if raw.startswith(b"HTTP/1.") else None


# Malformed requests in a single write
# --------------------------------------------------------------

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
MALFORMED_REQUESTS: dict[str, bytes] = {
    "nothing but a line": b"\r\n\r\n\r\n",
    "no request": b"hello\r\n\r\n",
    "bytes": bytes(range(256)) * 64,
    "zeros": b"\0" * 4096,
    "no version": b"GET /ping\r\n\r\n",
    "version 0.9": b"GET /ping HTTP/0.9\r\nHost: localhost\r\n\r\n",
    "version 3": b"GET /ping HTTP/3.0\r\nHost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + b"\0\0\0\4\0\0\0\0\0",
    "TLS hello": bytes.fromhex("1603010200010001fc0303") + bytes(506),
    "TLS in two parts": bytes.fromhex("1603010200"),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "redis": b"*1\r\n$4\r\nPING\r\n",
    "a method of 40,000 letters": b"G" * 40_000 + b" / HTTP/1.1\r\n\r\n",
    "a path of 40,000 letters": b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n",
    "a name of 40,000 letters": b"GET /ping HTTP/1.1\r\nHost: localhost\r\n" + b"a" * 40_000,
    "a value of 40,000 letters": b"GET /ping HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 40_000,
    "10,000 headers": b"GET /ping HTTP/1.1\r\nHost: localhost\r\n"
    + b"".join(b"X-%d: y\r\n" % i for i in range(10**4)),
    "a NUL in the path": b"GET /pi\0ng HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a NUL in a header": b"GET /ping HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
    "a NUL in a name": b"GET /ping HTTP/1.1\r\nHost: localhost\r\nX\0: a\r\n\r\n",
    "a folded header": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n X: a\r\n\r\n",
    "a space before the colon": b"GET /ping HTTP/1.1\r\nHost : localhost\r\n\r\n",
    "a header without a colon": b"GET /ping HTTP/1.1\r\nHost: localhost\r\nnothing\r\n\r\n",
    "a bare CR": b"GET /ping HTTP/1.1\r\nHost: localhost\r\nX: a\rX-Y: b\r\n\r\n",
    "no Host": b"GET /ping HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /ping HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    "a URL of another host": b"GET http://evil.example/metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "CONNECT": b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n",
    "HTTP/1.0 without Host": b"GET /metrics HTTP/1.0\r\n\r\n",
    "HTTP/1.0 in chunks": CHUNKED.replace(b"1.1", b"1.0")
    + b"\r\n"
    + b"24\r\n"
    + BODY
    + b"\r\n0\r\n\r\n",
    "length and chunks": CHUNKED + b"Content-Length: 4\r\n\r\n24\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunks and length": HEAD
    + b"Content-Length: 36\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + BODY,
    "two lengths": HEAD + b"Content-Length: 36\r\nContent-Length: 35\r\n\r\n" + BODY,
    "two lengths in one": HEAD + b"Content-Length: 36, 35\r\n\r\n" + BODY,
    "a length with a sign": HEAD + b"Content-Length: +36\r\n\r\n" + BODY,
    "a length below zero": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "a length that is none": HEAD + b"Content-Length: 0x24\r\n\r\n" + BODY,
    "a length of 20 digits": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n",
    "a length of 5,000 digits": HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "a length of 2**63": HEAD + b"Content-Length: 9223372036854775808\r\n\r\n" + BODY,
    "a length in other digits": HEAD + "Content-Length: ٣٦\r\n\r\n".encode() + BODY,
    "another coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + BODY,
    "chunked twice": HEAD
    + b"Transfer-Encoding: chunked, chunked\r\n\r\n24\r\n"
    + BODY
    + b"\r\n0\r\n\r\n",
    "chunked in disguise": HEAD
    + b"Transfer-Encoding: xchunked\r\n\r\n24\r\n"
    + BODY
    + b"\r\n0\r\n\r\n",
    "a chunk that is none": CHUNKED + b"\r\nhello\r\n",
    "a chunk below zero": CHUNKED + b"\r\n-1\r\n" + BODY,
    "a chunk of 2**64": CHUNKED + b"\r\n10000000000000000\r\n" + BODY,
    "a chunk of 100 digits": CHUNKED + b"\r\n" + b"f" * 100 + b"\r\n",
    "a chunk with a long extension": CHUNKED + b"\r\n1;" + b"a" * 40_000,
    "a chunk that is longer than it says": CHUNKED + b"\r\n1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "trailers without end": CHUNKED + b"\r\n0\r\n" + b"X: y\r\n" * 10_000,
    "a body of broken UTF-8": HEAD
    + b"Content-Length: 20\r\n\r\n"
    + b'{"prompt": "\xff\xfe\xed\xa0\x80\xc0"}',
    "UTF-16": HEAD + b"Content-Length: 74\r\n\r\n" + BODY.decode().encode("utf-16"),
    "a body that is half": HEAD + b"Content-Length: 20\r\n\r\n" + BODY[:20],
    "brackets": HEAD + b"Content-Length: 100000\r\n\r\n" + b"[" * 100_000,
    "braces": HEAD + b"Content-Length: 500000\r\n\r\n" + b'{"a":' * 100_000,
    "a number of a million digits": HEAD
    + b"Content-Length: 1000012\r\n\r\n"
    + b'{"prompt": '
    + b"9" * 10**6
    + b"}",
    "an exponent": HEAD + b"Content-Length: 33\r\n\r\n" + b'{"prompt": "a", "seed": 1e999999}',
    "a body too large": HEAD + b"Content-Length: %d\r\n\r\n" % (5 * MIB) + b" " * (5 * MIB),
    "chunks too large": CHUNKED
    + b"\r\n"
    + (b"100000\r\n" + b" " * MIB + b"\r\n") * 5
    + b"0\r\n\r\n",
    "a form": HEAD.replace(b"json", b"x-www-form-urlencoded") + b"Content-Length: 3\r\n\r\na=b",
    "compressed": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\0",
    "an expectation": HEAD + b"Expect: the-spanish-inquisition\r\nContent-Length: 1\r\n\r\nx",
    "a long query": b"GET /v1/models/x?" + b"a=b&" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED_REQUESTS)
@pytest.mark.slow
def test_malformed_requests_are_rejected(process, name):
    """The response is a 4xx, a 501 or nothing, and the connection is closed in time."""
    start = time.monotonic()
    with connect(process.url) as connection:
        try_send(connection, MALFORMED_REQUESTS[name])
        raw, closed = read_until_closed(connection, RECEIVE_SECONDS + IDLE_SECONDS + MARGIN_SECONDS)
    status = parse_status(raw)
    print(f"{name}: {status}, closed after {closed if closed is None else round(closed, 2)} s")
    assert (
        closed is not None
        and time.monotonic() - start < RECEIVE_SECONDS + IDLE_SECONDS + MARGIN_SECONDS
    )
    assert status is None or 400 <= status < 500 or status == 501, raw[:300]
    assert count_responses(raw) <= 1, "one request, two responses"
    assert b"Traceback" not in raw


def test_protocol_upgrades_are_ignored(process):
    """WebSocket is not supported: the request is answered as a plain HTTP request."""
    upgrade = (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAA=\r\n"
    )
    for path, expected_status in ((b"/ping", 200), (b"/v1/realtime", 404), (b"/live/ws", 404)):
        with connect(process.url) as connection:
            connection.sendall(
                b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n"
            )
            raw, closed = read_until_closed(
                connection, RECEIVE_SECONDS + IDLE_SECONDS + MARGIN_SECONDS
            )
        assert parse_status(raw) == expected_status and closed is not None
    with connect(process.url) as connection:  # nor upgrades to HTTP/2
        connection.sendall(
            b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        )
        assert (
            parse_status(
                read_until_closed(connection, RECEIVE_SECONDS + IDLE_SECONDS + MARGIN_SECONDS)[0]
            )
            == 200
        )


# Slow, silent and endless requests
# -----------------------------------------------------------------------------------------------


def send_slowly(first: bytes, drop: bytes, pause: float = 0.05) -> Callable[[socket.socket], float]:
    """Send a little again and again; returns seconds until the server disconnects."""

    def run(connection: socket.socket) -> float:
        start = time.monotonic()
        connection.sendall(first)
        while time.monotonic() - start < 2 * RECEIVE_SECONDS + MARGIN_SECONDS:
            if not try_send(connection, drop):
                break
            connection.settimeout(pause)
            with contextlib.suppress(TimeoutError):
                try:
                    if not connection.recv(65536):
                        break
                except ConnectionError:
                    break
        return time.monotonic() - start

    return run


def send_and_wait(first: bytes, half_close: bool = False) -> Callable[[socket.socket], float]:
    """Send a prefix and wait; returns seconds until the server disconnects."""

    def run(connection: socket.socket) -> float:
        start = time.monotonic()
        if first:
            connection.sendall(first)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        raw, closed = read_until_closed(
            connection, 2 * RECEIVE_SECONDS + IDLE_SECONDS + MARGIN_SECONDS
        )
        assert closed is not None, raw
        return time.monotonic() - start

    return run


def send_flood(
    first: bytes, chunk: bytes, max_bytes: int = 64 * MIB
) -> Callable[[socket.socket], float]:
    """Send as fast as the server reads; returns seconds until it disconnects."""

    def run(connection: socket.socket) -> float:
        start = time.monotonic()
        num_sent = 0
        connection.sendall(first)
        while num_sent < max_bytes and try_send(connection, chunk):
            num_sent += len(chunk)
            assert time.monotonic() - start < 2 * RECEIVE_SECONDS + MARGIN_SECONDS, (
                "the server reads endlessly"
            )
        read_until_closed(connection, RECEIVE_SECONDS + IDLE_SECONDS + MARGIN_SECONDS)
        return time.monotonic() - start

    return run


# (time limit in seconds, action)
SLOW_CLIENTS: dict[str, tuple[float, Callable[[socket.socket], float]]] = {
    "silent": (RECEIVE_SECONDS, send_and_wait(b"")),
    "half a line": (RECEIVE_SECONDS, send_and_wait(b"POST /v1/comp")),
    "a head without end": (RECEIVE_SECONDS, send_and_wait(HEAD)),
    "a body that does not come": (
        RECEIVE_SECONDS,
        send_and_wait(HEAD + b"Content-Length: 36\r\n\r\n"),
    ),
    "half a body": (
        RECEIVE_SECONDS,
        send_and_wait(HEAD + b"Content-Length: 36\r\n\r\n" + BODY[:10]),
    ),
    "a huge length": (
        RECEIVE_SECONDS,
        send_and_wait(HEAD + b"Content-Length: 4000000\r\n\r\n" + BODY),
    ),
    "chunks without end": (
        RECEIVE_SECONDS,
        send_and_wait(CHUNKED + b"\r\n24\r\n" + BODY + b"\r\n"),
    ),
    "half a chunk": (RECEIVE_SECONDS, send_and_wait(CHUNKED + b"\r\n24\r\n" + BODY[:5])),
    "half of a request, and the end": (
        RECEIVE_SECONDS,
        send_and_wait(HEAD + b"Content-Length: 36\r\n\r\n" + BODY[:10], True),
    ),
    "half of a head, and the end": (RECEIVE_SECONDS, send_and_wait(HEAD[:20], True)),
    "the end at once": (RECEIVE_SECONDS, send_and_wait(b"", True)),
    "an expectation, and nothing": (
        RECEIVE_SECONDS,
        send_and_wait(HEAD + b"Expect: 100-continue\r\nContent-Length: 36\r\n\r\n"),
    ),
    "silent after an answer": (
        IDLE_SECONDS,
        send_and_wait(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    ),
    "half a second request": (
        IDLE_SECONDS,
        send_and_wait(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\nGET /pi"),
    ),
    "a dripping head": (RECEIVE_SECONDS, send_slowly(HEAD + b"X: ", b"y")),
    "dripping lines": (RECEIVE_SECONDS, send_slowly(b"", b"\r\n")),
    "dripping headers": (RECEIVE_SECONDS, send_slowly(HEAD, b"X: y\r\n")),
    "a dripping body": (
        RECEIVE_SECONDS,
        send_slowly(HEAD + b"Content-Length: 3000000\r\n\r\n", b" "),
    ),
    "dripping chunks": (RECEIVE_SECONDS, send_slowly(CHUNKED + b"\r\n", b"1\r\n \r\n")),
    "a body for a GET": (
        RECEIVE_SECONDS,
        send_slowly(
            HEAD.replace(b"POST /v1/completions", b"GET /ping")
            + b"Content-Length: 3000000\r\n\r\n",
            b" ",
        ),
    ),
    "a body for what is not there": (
        RECEIVE_SECONDS,
        send_slowly(HEAD.replace(b"/v1", b"/v9") + b"Content-Length: 3000000\r\n\r\n", b" "),
    ),
    "64 MiB of a header": (RECEIVE_SECONDS, send_flood(HEAD + b"X: ", b"y" * MIB)),
    "64 MiB of headers": (RECEIVE_SECONDS, send_flood(HEAD, b"X: yyyyyyyyyyyyy\r\n" * (MIB // 16))),
    "64 MiB of a line": (RECEIVE_SECONDS, send_flood(b"GET /", b"a" * MIB)),
    "64 MiB of empty lines": (RECEIVE_SECONDS, send_flood(b"", b"\r\n" * (MIB // 2))),
    "64 MiB of zeros": (RECEIVE_SECONDS, send_flood(b"", b"\0" * MIB)),
    "64 MiB in chunks": (
        RECEIVE_SECONDS,
        send_flood(CHUNKED + b"\r\n", b"100000\r\n" + b" " * MIB + b"\r\n"),
    ),
    "64 MiB in small chunks": (
        RECEIVE_SECONDS,
        send_flood(CHUNKED + b"\r\n", b"1\r\n \r\n" * 10_000),
    ),
    "64 MiB of a length of a terabyte": (
        RECEIVE_SECONDS,
        send_flood(HEAD + b"Content-Length: 99999999999\r\n\r\n", b" " * MIB),
    ),
    "64 MiB after a refusal": (
        RECEIVE_SECONDS,
        send_flood(
            HEAD.replace(b"json", b"xml") + b"Content-Length: 4000000000\r\n\r\n", b" " * MIB
        ),
    ),
    "64 MiB after a request": (
        RECEIVE_SECONDS,
        send_flood(HEAD + b"Content-Length: 36\r\n\r\n" + BODY, b"G" * MIB),
    ),
}


@pytest.mark.parametrize("name", SLOW_CLIENTS)
@pytest.mark.slow
def test_slow_clients_are_disconnected(process, name):
    deadline, run = SLOW_CLIENTS[name]
    with connect(process.url) as connection:
        elapsed = run(connection)
    print(f"{name}: over after {elapsed:.2f} s")
    assert elapsed < deadline + RECEIVE_SECONDS + MARGIN_SECONDS


def test_connection_limit_with_silent_clients(process):
    """Above the connection limit requests get 503, and are served once silent connections are
    closed.
    """
    connections = [connect(process.url) for _ in range(100)]
    try:
        time.sleep(0.1)
        with Client(process.url) as client:
            status, _, raw = client.ask("GET", "/ping")
            assert (status, raw) in ((503, b"Service Unavailable"), (200, b"{}"))
        for connection in connections:
            _, closed = read_until_closed(connection, RECEIVE_SECONDS + MARGIN_SECONDS)
            assert closed is not None
    finally:
        for connection in connections:
            connection.close()


def test_incomplete_bodies_are_freed(process):
    """Buffers of incomplete requests are freed with their connections."""
    connections = [connect(process.url) for _ in range(20)]
    for connection in connections:
        try_send(connection, HEAD + b"Content-Length: 3000000\r\n\r\n" + b" " * 1_000_000)
    peak = memory(process.pid)
    for connection in connections:
        read_until_closed(connection, RECEIVE_SECONDS + MARGIN_SECONDS)
        connection.close()
    print(f"20 half bodies: {memory(process.pid) / MIB:.0f} MiB, {peak / MIB:.0f} at the peak")


@pytest.mark.slow
def test_floods_do_not_block_other_clients(process):
    """Ten connections send data that is expensive to parse; other requests are answered
    meanwhile.
    """
    stop = threading.Event()

    def flood(first: bytes, chunk: bytes) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), connect(process.url) as connection:
                connection.settimeout(0.5)
                connection.sendall(first)
                while not stop.is_set():
                    connection.sendall(chunk)

    ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for name, first, chunk in (
        ("small chunks", CHUNKED + b"\r\n", b"1\r\n \r\n" * 40_000),
        ("larger chunks", CHUNKED + b"\r\n", (b"100\r\n" + b" " * 256 + b"\r\n") * 1000),
        ("pipelined requests", b"", ping * 2000),
        ("pipelined bodies", b"", (HEAD + b"Content-Length: 36\r\n\r\n" + BODY) * 500),
        ("many headers", HEAD, b"a:b\r\n" * 40_000),
        ("rubbish", b"", b"\r\n" * 1000 + b"\0" * 1000),
    ):
        stop.clear()
        threads = [threading.Thread(target=flood, args=(first, chunk)) for _ in range(10)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.3)
            canary_seconds = max(process.canary.check_answer(300) for _ in range(3))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        print(f"ten connections of {name}: canary {canary_seconds:.2f} s at most")


def test_chunked_bodies_of_any_chunk_size(process):
    """A small body in chunks of any size, and a large body in larger chunks."""
    large_body = json.dumps({"prompt": "hello", "max_tokens": 2, "user": "x" * 3_000_000}).encode()
    for body, size in (
        (BODY, 1),
        (BODY, 7),
        (BODY, 36),
        (large_body, 1400),
        (large_body, 16_384),
        (large_body, 1_000_000),
    ):
        chunks = [body[at : at + size] for at in range(0, len(body), size)]
        with connect(process.url) as connection:
            data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
            connection.sendall(CHUNKED + b"Connection: close\r\n\r\n" + data + b"0\r\n\r\n")
            assert parse_status(read_until_closed(connection, 10)[0]) == 200, (len(body), size)


# Pipelining and smuggling
# -----------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(process):
    """All requests are answered in order."""
    requests = [
        HEAD + b"X-Request-Id: a%d\r\nContent-Length: 36\r\n\r\n" % i + BODY for i in range(50)
    ]
    with connect(process.url) as connection:
        connection.sendall(b"".join(requests))
        raw, closed = read_until_closed(connection, 30)
    assert closed is not None and raw.count(b"HTTP/1.1 200 OK") == 50
    positions = [raw.lower().find(b"x-request-id: a%d\r\n" % i) for i in range(50)]
    assert positions == sorted(positions) and positions[0] > 0


def test_request_smuggling_is_rejected(process):
    """A request inside another's body, for parsers that disagree on the body's length."""
    inner_request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for outer_request in (
        CHUNKED + b"Content-Length: %d\r\n\r\n0\r\n\r\n" % (5 + len(inner_request)),
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 0\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 0\r\nTransfer-Encoding: identity\r\n\r\n",
        HEAD + b"Content-Length: 0\r\nContent-Length: 99\r\n\r\n",
        HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: cow\r\n\r\n0\r\n\r\n",
        HEAD + b"X: a\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    ):
        with connect(process.url) as connection:
            try_send(connection, outer_request + inner_request)
            raw, closed = read_until_closed(
                connection, RECEIVE_SECONDS + IDLE_SECONDS + MARGIN_SECONDS
            )
        assert closed is not None and b"vllm:" not in raw and count_responses(raw) <= 1, (
            outer_request,
            raw[:300],
        )


def test_garbage_during_a_response_closes_the_connection(process):
    """Garbage ends its own connection and no other."""
    body = json.dumps(
        {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    ).encode()
    for garbage in (
        b"\0" * 100,
        b"GET /ping HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 1000,
        b"\r\n" * 1000,
    ):
        with connect(process.url) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            try_send(connection, garbage)
            raw, closed = read_until_closed(connection, 20)
            assert closed is not None
    chunked = CHUNKED + b"\r\n%x\r\n" % len(body) + body + b"\r\n"
    with connect(process.url) as connection:
        connection.sendall(chunked + b"rubbish\r\n")
        assert parse_status(
            read_until_closed(connection, RECEIVE_SECONDS + IDLE_SECONDS + MARGIN_SECONDS)[0]
        ) in (None, 400)


def test_reset_connections_abort_their_requests(process):
    """200 clients send a request and reset the connection."""
    body = json.dumps(
        {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    ).encode()
    for number in range(200):
        connection = connect(process.url)
        # close() sends a reset
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        try_send(connection, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if number % 3 == 0:
            connection.recv(10)
        connection.close()
    with Client(process.url) as client:
        end = time.monotonic() + 60
        while client.ask("GET", "/load")[2] != b'{"server_load":0}':
            assert time.monotonic() < end, "a request of a disconnected client is still running"
            time.sleep(0.02)


# Clients that do not read
# -------------------------------------------------------------------------------------------


@pytest.fixture
def long_answer_server():
    """A server with long answers."""
    engine, script = scripted(
        lambda prompt: "word " * 900 if "long" in prompt else "short", num_seqs=20
    )
    with served(
        model_of(engine), formats=FORMATS, write_seconds=WRITE_SECONDS, idle_seconds=IDLE_SECONDS
    ) as state:
        state.engine = engine
        state.script = script
        state.canary = Canary(state.url)
        yield state


LONG_REQUEST = {"prompt": "long", "max_tokens": 900, "n": 16, "logprobs": 20, "temperature": 0}


def http_request(body: dict[str, Any], headers: bytes = b"") -> bytes:
    data = json.dumps(body).encode()
    return HEAD + headers + b"Content-Length: %d\r\n\r\n" % len(data) + data


def wait_for(condition: Callable[[], Any], seconds: float) -> float:
    """Wait for the condition; return the seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "the condition was not met in time"
        time.sleep(0.01)
    return time.monotonic() - start


def test_unread_stream_is_dropped(long_answer_server):
    """It is dropped after the write timeout, its pages are freed, and other streams continue."""
    memory_before = memory()
    num_used_pages = long_answer_server.engine.tables[0].used()
    with (
        connect(long_answer_server.url, receive_buffer=1024) as connection,
        Client(long_answer_server.url) as client,
    ):
        connection.sendall(http_request(LONG_REQUEST | {"stream": True}))
        wait_for(lambda: long_answer_server.engine.tables[0].used() > num_used_pages, 60)
        events = client.events("/v1/completions", {"prompt": "long", "max_tokens": 300})
        assert (
            events[-1][1] == "[DONE]" and events[-2][1]["choices"][0]["finish_reason"] == "length"
        )
        elapsed = wait_for(
            lambda: not long_answer_server.engine.requests and not long_answer_server.service.open,
            120,
        )
        settled(long_answer_server.engine)
        growth_mib = (memory() - memory_before) / MIB
        _, closed = read_until_closed(connection, 120)
        assert closed is not None, "the connection is still open"
    long_answer_server.canary.check_answer()
    print(f"an unread stream: dropped {elapsed:.1f} s after the other's end, {growth_mib:+.0f} MiB")
    assert growth_mib < 400


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.slow
def test_unread_response_is_dropped(long_answer_server, count, close):
    """A non-streamed response: the connection and its unsent data are dropped."""
    port = int(long_answer_server.url.rpartition(":")[2])

    def num_connections() -> int:
        """Connections that the server holds."""
        connections = [
            connection
            for connection in psutil.Process().net_connections("tcp")
            if connection.laddr.port == port
        ]
        return sum(connection.status != psutil.CONN_LISTEN for connection in connections)

    with connect(long_answer_server.url, receive_buffer=1024) as connection:
        connection.sendall(http_request(LONG_REQUEST | {"n": count}, close))
        wait_for(lambda: long_answer_server.engine.requests, 60)
        wait_for(lambda: not long_answer_server.engine.requests, 60)
        elapsed = wait_for(
            lambda: not num_connections(), 2 * WRITE_SECONDS + IDLE_SECONDS + MARGIN_SECONDS
        )
    print(f"an unread response: dropped after {elapsed:.1f} s")
    long_answer_server.canary.check_answer()


class StuckTransport(asyncio.Transport):
    """A transport whose peer reads nothing."""

    num_unsent = 5000
    ended = ""

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def is_closing(self) -> bool:
        return bool(self.ended)

    def get_extra_info(self, name: str, default: Any = None) -> None:
        return None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.num_unsent += len(data)

    def close(self) -> None:
        self.ended = self.ended or "when all is sent, which is never"

    def abort(self) -> None:
        self.ended = self.ended or "now"


def test_unread_last_bytes_abort_the_idle_connection():
    """Fewer bytes than the transport's high-water mark would keep a gracefully closed connection
    open forever.
    """

    async def close_idle_connection() -> str:
        config = uvicorn.Config(lambda *_: None, ws="none", log_config=None)
        transport = StuckTransport()
        connection_class = make_connection_class(ServerSettings())
        connection = connection_class(config, ServerState(), {})
        connection.connection_made(transport)
        connection.timeout_keep_alive_handler()
        return transport.ended

    assert asyncio.run(close_idle_connection()) == "now"


def test_slow_reader_gets_the_complete_response(long_answer_server):
    """A client that reads at intervals below the write timeout gets all data."""
    with connect(long_answer_server.url, receive_buffer=4096) as connection:
        connection.sendall(
            http_request({"prompt": "long", "max_tokens": 300, "logprobs": 5, "stream": True})
        )
        response = b""
        while not response.endswith(b"0\r\n\r\n"):
            time.sleep(0.005)
            response += connection.recv(4096)
    assert b"[DONE]" in response and response.count(b'finish_reason":"length') == 1
    with connect(long_answer_server.url, receive_buffer=4096) as connection:
        connection.sendall(http_request(LONG_REQUEST | {"n": 2}, b"Connection: close\r\n"))
        response = b""
        while data := connection.recv(65536):
            time.sleep(0.002)
            response += data
    assert len(json.loads(response.partition(b"\r\n\r\n")[2])["choices"]) == 2


@pytest.mark.nightly
def test_unread_live_events_are_dropped(long_answer_server):
    with connect(long_answer_server.url, receive_buffer=1024) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    with connect(long_answer_server.url) as connection:  # HEAD of an endless response
        connection.sendall(b"HEAD /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    long_answer_server.canary.check_answer()
