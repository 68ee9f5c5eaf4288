"""Clients for tests that attack a server, and checks of its state afterwards."""

import http.client
import json
import socket
import time
from typing import Any

import psutil

from quire.serving.http.files import StoredFile

JSON = {"Content-Type": "application/json"}
TURN = [{"role": "user", "content": "hello"}]
FILE = "file-0"  # the ID of the file of `with_file`
BODIES: dict[str, dict[str, Any]] = {  # a minimal body of each endpoint
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": TURN, "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [TURN], "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/responses/compact": {"input": "hello"},
    "/v1/conversations": {"items": TURN},
    "/v1/messages": {"messages": TURN, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": TURN},
    "/v1/messages/batches": {
        "requests": [{"custom_id": "a", "params": {"messages": TURN, "max_tokens": 2}}]
    },
    "/v1/batches": {"input_file_id": FILE, "endpoint": "/v1/completions"},
    "/v1/embeddings": {"input": "hello"},
    "/v2/embed": {"texts": ["hello"]},
    "/classify": {"input": "hello"},
    "/pooling": {"input": "hello"},
    "/generative_scoring": {"query": "hello", "items": ["hello"], "label_token_ids": [5]},
    "/score": {"text_1": "hello", "text_2": "hello"},
    "/rerank": {"query": "hello", "documents": ["hello"]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
    "/api/chat": {"model": "quill", "messages": TURN, "options": {"num_predict": 2}},
    "/api/generate": {"model": "quill", "prompt": "hello", "options": {"num_predict": 2}},
    "/api/embed": {"model": "quill", "input": "hello"},
    "/api/embeddings": {"model": "quill", "prompt": "hello"},
    "/api/show": {"model": "quill"},
    "/api/pull": {"model": "quill"},
}
# their statuses: a generative model has no classes
GOOD = dict.fromkeys(BODIES, 200) | {"/classify": 400}


def minimal_body(path: str, text: str) -> dict[str, Any]:
    """The minimal body of an endpoint with another text."""
    return json.loads(json.dumps(BODIES[path]).replace('"hello"', json.dumps(text)))


def with_file(service: Any, *keys: str | None) -> None:
    """Store a batch file of one request for each tenant."""
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "x", "max_tokens": 1},
    }
    for key in keys or (None,):
        data = json.dumps(line).encode()
        service.files.write(
            key, StoredFile(FILE, "a", "batch", len(data), int(time.time())), [(0, data)]
        )


class Client:
    """One connection, reopened if the server has closed it."""

    def __init__(self, url: str, headers: dict[str, str] | None = None, timeout: float = 300.0):
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)
        self.headers = headers or {}
        self.connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None):
        """Send a request; returns (status, headers, body). Without `headers` the body is JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        request_headers = (JSON if data is not None else {}) if headers is None else headers
        for last in (False, True):
            try:
                self.connection.request(method, path, data, self.headers | request_headers)
                response = self.connection.getresponse()
                return response.status, response.headers, response.read()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self.connection.close()
                if last:
                    raise
        raise AssertionError

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """(status, parsed JSON body)."""
        status, _, raw = self.ask("POST", path, body, JSON | headers)
        return status, json.loads(raw)

    def complete(self, prompt: str, **fields: Any) -> tuple[int, Any]:
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    def events(self, path: str, body: dict[str, Any]) -> list[tuple[float, Any]]:
        """(arrival time, data) of every event of a stream; [DONE] as a string."""
        self.connection.request(
            "POST", path, json.dumps(body | {"stream": True}), self.headers | JSON
        )
        response = self.connection.getresponse()
        events = []
        while line := response.readline():
            if line.startswith(b"data: "):
                text = line[6:].decode().strip()
                events.append((time.monotonic(), text if text == "[DONE]" else json.loads(text)))
        return events

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Canary:
    """Repeats a request whose answer from the healthy server is known."""

    def __init__(self, url: str, headers: dict[str, str] | None = None):
        self.url = url
        self.headers = headers
        self.answer = self.ask()
        assert self.answer[0] == 200

    def ask(self) -> tuple[int, str]:
        with Client(self.url, self.headers) as client:
            status, body = client.complete("Once upon a time", max_tokens=16)
        return status, body["choices"][0]["text"] if status == 200 else str(body)

    def check_answer(self, seconds: float = 10.0) -> float:
        """Check that the known answer comes in time; returns the seconds that it took."""
        start = time.monotonic()
        assert self.ask() == self.answer
        seconds_taken = time.monotonic() - start
        assert seconds_taken < seconds, f"the canary took {seconds_taken:.1f} s"
        return seconds_taken


def text_of(events: list[tuple[float, Any]]) -> str:
    """The text of a stream of /v1/completions."""
    return "".join(
        event["choices"][0]["text"] for _, event in events if event != "[DONE]" and event["choices"]
    )


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    """A connection for raw bytes."""
    host, port = url.removeprefix("http://").split(":")
    connections = socket.socket()
    if receive_buffer is not None:
        connections.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connections.settimeout(120)
    connections.connect((host, int(port)))
    return connections


def memory(pid: int | None = None) -> int:
    """Resident memory of a process in bytes."""
    return psutil.Process(pid).memory_info().rss


def settled(engine: Any, seconds: float = 60.0) -> None:
    """Wait until nothing runs; every page must be free or cached."""
    deadline = time.monotonic() + seconds
    while (engine.busy or engine.requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.busy and not engine.requests
    engine.scheduler.check()
    assert engine.tables[0].used() == 0
