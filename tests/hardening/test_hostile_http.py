"""Bytes that are no request, or one that never ends: refused or closed in time, within bounded
memory, by a server that answers the next one as if nothing had been."""

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

RECEIVE = 0.6  # seconds
IDLE = 0.7
WRITE = 0.6
LATE = 15.0  # more, on a machine that has other things to do
MIB = 1 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "hello", "max_tokens": 2}'
FLAGS = (
    "--receive-seconds",
    RECEIVE,
    "--idle-seconds",
    IDLE,
    "--write-seconds",
    WRITE,
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
    """A `quire serve` of its own, so that what it needs can be measured."""
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
def unharmed(request):
    """Afterwards: the same process, no more memory, no open file, and the canary sings."""
    if "process" not in request.fixturenames:
        yield
        return
    process = request.getfixturevalue("process")
    one = psutil.Process(process.pid)
    began = one.create_time()
    before = memory(process.pid)
    files = one.num_fds()
    yield
    took = process.canary.check_answer()
    assert process.running.poll() is None and one.create_time() == began
    end = time.monotonic() + RECEIVE + LATE
    while one.num_fds() > files and time.monotonic() < end:
        time.sleep(0.02)
    grown = (memory(process.pid) - before) / MIB
    print(f"    canary {took:.3f} s, {grown:+.1f} MiB, {one.num_fds() - files:+d} files")
    assert one.num_fds() <= files
    assert grown < (160 if "flood" in request.node.name else 48)


def drain(connection: socket.socket, seconds: float) -> tuple[bytes, float | None]:
    """What came until the server closed, and when it did; None: it has not in this time."""
    found = b""
    began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            data = connection.recv(65536)
        except TimeoutError:
            break
        except ConnectionError:
            return found, time.monotonic() - began
        if not data:
            return found, time.monotonic() - began
        found += data
    return found, None


def send(connection: socket.socket, data: bytes) -> bool:
    """Whether all of it was taken."""
    try:
        connection.sendall(data)
    except (ConnectionError, TimeoutError):
        return False
    return True


def answers(raw: bytes) -> int:
    """How many there are, bodies left aside."""
    return len(re.findall(rb"HTTP/1\.1 \d{3} ", raw))


def status_of(raw: bytes) -> int | None:
    return int(raw.split(b" ", 2)[1]) if raw.startswith(b"HTTP/1.") else None


# Broken from the start: what a single write may bring
# --------------------------------------------------------------

CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
BROKEN: dict[str, bytes] = {
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


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.slow
def test_broken(process, name):
    """A 4xx or 5xx of HTTP, or none; and no more of it is read than a moment's."""
    began = time.monotonic()
    with connect(process.url) as connection:
        send(connection, BROKEN[name])
        raw, closed = drain(connection, RECEIVE + IDLE + LATE)
    status = status_of(raw)
    print(f"{name}: {status}, closed after {closed if closed is None else round(closed, 2)} s")
    assert closed is not None and time.monotonic() - began < RECEIVE + IDLE + LATE
    assert status is None or 400 <= status < 500 or status == 501, raw[:300]
    assert answers(raw) <= 1, "one write, two answers"
    assert b"Traceback" not in raw


def test_websocket(process):
    """There is none: the path is answered as if nobody had asked for another protocol."""
    upgrade = (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAA=\r\n"
    )
    for path, wanted in ((b"/ping", 200), (b"/v1/realtime", 404), (b"/live/ws", 404)):
        with connect(process.url) as connection:
            connection.sendall(
                b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n"
            )
            raw, closed = drain(connection, RECEIVE + IDLE + LATE)
        assert status_of(raw) == wanted and closed is not None
    with connect(process.url) as connection:  # nor HTTP/2 by upgrade
        connection.sendall(
            b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        )
        assert status_of(drain(connection, RECEIVE + IDLE + LATE)[0]) == 200


# Slow, silent, endless
# -----------------------------------------------------------------------------------------------


def dripping(first: bytes, drop: bytes, pause: float = 0.05) -> Callable[[socket.socket], float]:
    """Sends a little again and again; how long the server bore it."""

    def run(connection: socket.socket) -> float:
        began = time.monotonic()
        connection.sendall(first)
        while time.monotonic() - began < 2 * RECEIVE + LATE:
            if not send(connection, drop):
                break
            connection.settimeout(pause)
            with contextlib.suppress(TimeoutError):
                try:
                    if not connection.recv(65536):
                        break
                except ConnectionError:
                    break
        return time.monotonic() - began

    return run


def waiting(first: bytes, half_close: bool = False) -> Callable[[socket.socket], float]:
    """Sends something and is silent then."""

    def run(connection: socket.socket) -> float:
        began = time.monotonic()
        if first:
            connection.sendall(first)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        raw, closed = drain(connection, 2 * RECEIVE + IDLE + LATE)
        assert closed is not None, raw
        return time.monotonic() - began

    return run


def flooding(first: bytes, more: bytes, most: int = 64 * MIB) -> Callable[[socket.socket], float]:
    """Sends as much as is taken."""

    def run(connection: socket.socket) -> float:
        began = time.monotonic()
        sent = 0
        connection.sendall(first)
        while sent < most and send(connection, more):
            sent += len(more)
            assert time.monotonic() - began < 2 * RECEIVE + LATE, "it is read for ever"
        drain(connection, RECEIVE + IDLE + LATE)
        return time.monotonic() - began

    return run


# (seconds that it may take, what is done)
SLOW: dict[str, tuple[float, Callable[[socket.socket], float]]] = {
    "silent": (RECEIVE, waiting(b"")),
    "half a line": (RECEIVE, waiting(b"POST /v1/comp")),
    "a head without end": (RECEIVE, waiting(HEAD)),
    "a body that does not come": (RECEIVE, waiting(HEAD + b"Content-Length: 36\r\n\r\n")),
    "half a body": (RECEIVE, waiting(HEAD + b"Content-Length: 36\r\n\r\n" + BODY[:10])),
    "a huge length": (RECEIVE, waiting(HEAD + b"Content-Length: 4000000\r\n\r\n" + BODY)),
    "chunks without end": (RECEIVE, waiting(CHUNKED + b"\r\n24\r\n" + BODY + b"\r\n")),
    "half a chunk": (RECEIVE, waiting(CHUNKED + b"\r\n24\r\n" + BODY[:5])),
    "half of a request, and the end": (
        RECEIVE,
        waiting(HEAD + b"Content-Length: 36\r\n\r\n" + BODY[:10], True),
    ),
    "half of a head, and the end": (RECEIVE, waiting(HEAD[:20], True)),
    "the end at once": (RECEIVE, waiting(b"", True)),
    "an expectation, and nothing": (
        RECEIVE,
        waiting(HEAD + b"Expect: 100-continue\r\nContent-Length: 36\r\n\r\n"),
    ),
    "silent after an answer": (IDLE, waiting(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")),
    "half a second request": (
        IDLE,
        waiting(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\nGET /pi"),
    ),
    "a dripping head": (RECEIVE, dripping(HEAD + b"X: ", b"y")),
    "dripping lines": (RECEIVE, dripping(b"", b"\r\n")),
    "dripping headers": (RECEIVE, dripping(HEAD, b"X: y\r\n")),
    "a dripping body": (RECEIVE, dripping(HEAD + b"Content-Length: 3000000\r\n\r\n", b" ")),
    "dripping chunks": (RECEIVE, dripping(CHUNKED + b"\r\n", b"1\r\n \r\n")),
    "a body for a GET": (
        RECEIVE,
        dripping(
            HEAD.replace(b"POST /v1/completions", b"GET /ping")
            + b"Content-Length: 3000000\r\n\r\n",
            b" ",
        ),
    ),
    "a body for what is not there": (
        RECEIVE,
        dripping(HEAD.replace(b"/v1", b"/v9") + b"Content-Length: 3000000\r\n\r\n", b" "),
    ),
    "64 MiB of a header": (RECEIVE, flooding(HEAD + b"X: ", b"y" * MIB)),
    "64 MiB of headers": (RECEIVE, flooding(HEAD, b"X: yyyyyyyyyyyyy\r\n" * (MIB // 16))),
    "64 MiB of a line": (RECEIVE, flooding(b"GET /", b"a" * MIB)),
    "64 MiB of empty lines": (RECEIVE, flooding(b"", b"\r\n" * (MIB // 2))),
    "64 MiB of zeros": (RECEIVE, flooding(b"", b"\0" * MIB)),
    "64 MiB in chunks": (
        RECEIVE,
        flooding(CHUNKED + b"\r\n", b"100000\r\n" + b" " * MIB + b"\r\n"),
    ),
    "64 MiB in small chunks": (RECEIVE, flooding(CHUNKED + b"\r\n", b"1\r\n \r\n" * 10_000)),
    "64 MiB of a length of a terabyte": (
        RECEIVE,
        flooding(HEAD + b"Content-Length: 99999999999\r\n\r\n", b" " * MIB),
    ),
    "64 MiB after a refusal": (
        RECEIVE,
        flooding(HEAD.replace(b"json", b"xml") + b"Content-Length: 4000000000\r\n\r\n", b" " * MIB),
    ),
    "64 MiB after a request": (
        RECEIVE,
        flooding(HEAD + b"Content-Length: 36\r\n\r\n" + BODY, b"G" * MIB),
    ),
}


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.slow
def test_slow(process, name):
    deadline, run = SLOW[name]
    with connect(process.url) as connection:
        took = run(connection)
    print(f"{name}: over after {took:.2f} s")
    assert took < deadline + RECEIVE + LATE


def test_many_that_are_silent(process):
    """More than there may be connections: others are told so, and served when those are closed."""
    connections = [connect(process.url) for _ in range(100)]
    try:
        time.sleep(0.1)
        with Client(process.url) as client:
            status, _, raw = client.ask("GET", "/ping")
            assert (status, raw) in ((503, b"Service Unavailable"), (200, b"{}"))
        for connection in connections:
            _, closed = drain(connection, RECEIVE + LATE)
            assert closed is not None
    finally:
        for connection in connections:
            connection.close()


def test_many_bodies_that_stay_half(process):
    """What is held for those that are not complete goes with them."""
    connections = [connect(process.url) for _ in range(20)]
    for connection in connections:
        send(connection, HEAD + b"Content-Length: 3000000\r\n\r\n" + b" " * 1_000_000)
    peak = memory(process.pid)
    for connection in connections:
        drain(connection, RECEIVE + LATE)
        connection.close()
    print(f"20 half bodies: {memory(process.pid) / MIB:.0f} MiB, {peak / MIB:.0f} at the peak")


@pytest.mark.slow
def test_floods(process):
    """Ten connections that send as fast as they can what takes work to read: others are served
    meanwhile.
    """
    stop = threading.Event()

    def flood(first: bytes, more: bytes) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), connect(process.url) as connection:
                connection.settimeout(0.5)
                connection.sendall(first)
                while not stop.is_set():
                    connection.sendall(more)

    ping = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for name, first, more in (
        ("small chunks", CHUNKED + b"\r\n", b"1\r\n \r\n" * 40_000),
        ("larger chunks", CHUNKED + b"\r\n", (b"100\r\n" + b" " * 256 + b"\r\n") * 1000),
        ("pipelined requests", b"", ping * 2000),
        ("pipelined bodies", b"", (HEAD + b"Content-Length: 36\r\n\r\n" + BODY) * 500),
        ("many headers", HEAD, b"a:b\r\n" * 40_000),
        ("rubbish", b"", b"\r\n" * 1000 + b"\0" * 1000),
    ):
        stop.clear()
        threads = [threading.Thread(target=flood, args=(first, more)) for _ in range(10)]
        for thread in threads:
            thread.start()
        try:
            time.sleep(0.3)
            took = max(process.canary.check_answer(300) for _ in range(3))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        print(f"ten connections of {name}: canary {took:.2f} s at most")


def test_chunks_as_clients_send_them(process):
    """A small body in pieces of any size, and a large one in larger pieces."""
    large = json.dumps({"prompt": "hello", "max_tokens": 2, "user": "x" * 3_000_000}).encode()
    for body, size in (
        (BODY, 1),
        (BODY, 7),
        (BODY, 36),
        (large, 1400),
        (large, 16_384),
        (large, 1_000_000),
    ):
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        with connect(process.url) as connection:
            data = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
            connection.sendall(CHUNKED + b"Connection: close\r\n\r\n" + data + b"0\r\n\r\n")
            assert status_of(drain(connection, 10)[0]) == 200, (len(body), size)


# Several at once on a connection
# -----------------------------------------------------------------------------------


def test_pipelining(process):
    """Each is answered, in its order."""
    asks = [HEAD + b"X-Request-Id: a%d\r\nContent-Length: 36\r\n\r\n" % i + BODY for i in range(50)]
    with connect(process.url) as connection:
        connection.sendall(b"".join(asks))
        raw, closed = drain(connection, 30)
    assert closed is not None and raw.count(b"HTTP/1.1 200 OK") == 50
    places = [raw.lower().find(b"x-request-id: a%d\r\n" % i) for i in range(50)]
    assert places == sorted(places) and places[0] > 0


def test_what_is_smuggled_is_never_a_request(process):
    """A request in the body of another, for those who count its length otherwise."""
    inner = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for outer in (
        CHUNKED + b"Content-Length: %d\r\n\r\n0\r\n\r\n" % (5 + len(inner)),
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 0\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 0\r\nTransfer-Encoding: identity\r\n\r\n",
        HEAD + b"Content-Length: 0\r\nContent-Length: 99\r\n\r\n",
        HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: cow\r\n\r\n0\r\n\r\n",
        HEAD + b"X: a\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    ):
        with connect(process.url) as connection:
            send(connection, outer + inner)
            raw, closed = drain(connection, RECEIVE + IDLE + LATE)
        assert closed is not None and b"vllm:" not in raw and answers(raw) <= 1, (outer, raw[:300])


def test_rubbish_while_an_answer_is_written(process):
    """It ends this connection and no other."""
    body = json.dumps(
        {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    ).encode()
    for rubbish in (
        b"\0" * 100,
        b"GET /ping HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 1000,
        b"\r\n" * 1000,
    ):
        with connect(process.url) as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            send(connection, rubbish)
            raw, closed = drain(connection, 20)
            assert closed is not None
    chunked = CHUNKED + b"\r\n%x\r\n" % len(body) + body + b"\r\n"
    with connect(process.url) as connection:
        connection.sendall(chunked + b"rubbish\r\n")
        assert status_of(drain(connection, RECEIVE + IDLE + LATE)[0]) in (None, 400)


def test_clients_that_reset(process):
    """Two hundred that send a request and are gone at once."""
    body = json.dumps(
        {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    ).encode()
    for number in range(200):
        connection = connect(process.url)
        # close() resets
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        send(connection, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        if number % 3 == 0:
            connection.recv(10)
        connection.close()
    with Client(process.url) as client:
        end = time.monotonic() + 60
        while client.ask("GET", "/load")[2] != b'{"server_load":0}':
            assert time.monotonic() < end, "a request goes on whose client has left"
            time.sleep(0.02)


# Readers that do not read
# -------------------------------------------------------------------------------------------


@pytest.fixture
def talkative():
    """A server whose answers are long."""
    engine, script = scripted(
        lambda prompt: "word " * 900 if "long" in prompt else "short", num_seqs=20
    )
    with served(model_of(engine), formats=FORMATS, write_seconds=WRITE, idle_seconds=IDLE) as state:
        state.engine, state.script, state.canary = engine, script, Canary(state.url)
        yield state


LONG = {"prompt": "long", "max_tokens": 900, "n": 16, "logprobs": 20, "temperature": 0}


def request(body: dict[str, Any], more: bytes = b"") -> bytes:
    data = json.dumps(body).encode()
    return HEAD + more + b"Content-Length: %d\r\n\r\n" % len(data) + data


def wait(condition: Callable[[], Any], seconds: float) -> float:
    """How long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not come to that"
        time.sleep(0.01)
    return time.monotonic() - began


def test_a_stream_that_nobody_reads(talkative):
    """It is dropped after its time, its pages are free, and the others go on."""
    before = memory()
    used = talkative.engine.tables[0].used()
    with connect(talkative.url, receive_buffer=1024) as connection, Client(talkative.url) as client:
        connection.sendall(request(LONG | {"stream": True}))
        wait(lambda: talkative.engine.tables[0].used() > used, 60)
        events = client.events("/v1/completions", {"prompt": "long", "max_tokens": 300})
        assert (
            events[-1][1] == "[DONE]" and events[-2][1]["choices"][0]["finish_reason"] == "length"
        )
        took = wait(lambda: not talkative.engine.requests and not talkative.service.open, 120)
        settled(talkative.engine)
        grown = (memory() - before) / MIB
        _, closed = drain(connection, 120)
        assert closed is not None, "the connection is still open"
    talkative.canary.check_answer()
    print(
        f"a stream that nobody reads: dropped {took:.1f} s after the other's end, {grown:+.0f} MiB"
    )
    assert grown < 400


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.slow
def test_an_answer_that_nobody_reads(talkative, count, close):
    """One that was written at once: its connection is dropped, and what was to be sent with it."""
    port = int(talkative.url.rpartition(":")[2])

    def ends() -> int:
        """Of connections, the server's."""
        found = [one for one in psutil.Process().net_connections("tcp") if one.laddr.port == port]
        return sum(one.status != psutil.CONN_LISTEN for one in found)

    with connect(talkative.url, receive_buffer=1024) as connection:
        connection.sendall(request(LONG | {"n": count}, close))
        wait(lambda: talkative.engine.requests, 60)
        wait(lambda: not talkative.engine.requests, 60)
        took = wait(lambda: not ends(), 2 * WRITE + IDLE + LATE)
    print(f"an answer that nobody reads: dropped after {took:.1f} s")
    talkative.canary.check_answer()


class Stuck(asyncio.Transport):
    """A transport whose peer takes nothing more."""

    left = 5000
    ended = ""

    def get_write_buffer_size(self) -> int:
        return self.left

    def is_closing(self) -> bool:
        return bool(self.ended)

    def get_extra_info(self, name: str, default: Any = None) -> None:
        return None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.left += len(data)

    def close(self) -> None:
        self.ended = self.ended or "when all is sent, which is never"

    def abort(self) -> None:
        self.ended = self.ended or "now"


def test_the_last_bytes_that_nobody_reads():
    """Too few for the transport to complain of: they would keep a connection that is closed in good
    order open.
    """

    async def idle() -> str:
        config = uvicorn.Config(lambda *_: None, ws="none", log_config=None)
        stuck = Stuck()
        kind = make_connection_class(ServerSettings())
        connection = kind(config, ServerState(), {})
        connection.connection_made(stuck)
        connection.timeout_keep_alive_handler()
        return stuck.ended

    assert asyncio.run(idle()) == "now"


def test_a_reader_that_is_slow_and_reads(talkative):
    """Who takes what it is sent, in steps shorter than the deadline, gets all of it."""
    with connect(talkative.url, receive_buffer=4096) as connection:
        connection.sendall(
            request({"prompt": "long", "max_tokens": 300, "logprobs": 5, "stream": True})
        )
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            time.sleep(0.005)
            found += connection.recv(4096)
    assert b"[DONE]" in found and found.count(b'finish_reason":"length') == 1
    with connect(talkative.url, receive_buffer=4096) as connection:
        connection.sendall(request(LONG | {"n": 2}, b"Connection: close\r\n"))
        found = b""
        while data := connection.recv(65536):
            time.sleep(0.002)
            found += data
    assert len(json.loads(found.partition(b"\r\n\r\n")[2])["choices"]) == 2


@pytest.mark.nightly
def test_live_view_that_nobody_reads(talkative):
    with connect(talkative.url, receive_buffer=1024) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    with connect(talkative.url) as connection:  # a HEAD of what never ends
        connection.sendall(b"HEAD /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(20).startswith(b"HTTP/1.1 200")
    talkative.canary.check_answer()
