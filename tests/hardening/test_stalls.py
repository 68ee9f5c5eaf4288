"""Requests that once stopped the whole server, against a running `quire serve` whose health and
streams are timed.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from quire.tests.support.canary import Canary, Client, memory

pytestmark = pytest.mark.slow

FLAGS = (
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "64",
    "--max-body-bytes",
    "32M",
    "--max-file-bytes",
    "64M",
)
# seconds that health may take on a machine with other work; docs/hardening.md has what was measured
ENOUGH = 10.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def process() -> Iterator[SimpleNamespace]:
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *FLAGS]
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
        yield SimpleNamespace(url=url, pid=running.pid, canary=Canary(url), running=running)
        assert running.poll() is None, "the server has ended"
        running.terminate()
        running.wait(120)


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def chat(**fields: Any) -> dict[str, Any]:
    return {
        "model": "quill",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        **fields,
    }


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "quill", "prompt": "hello", "max_tokens": 4, **fields}


def cyclic_response(client: Client) -> Iterator[int]:
    for body in (
        {"input": "a", "request_id": "one", "max_output_tokens": 2},
        {
            "input": "b",
            "request_id": "one",
            "previous_response_id": "resp_one",
            "max_output_tokens": 2,
        },
        {"input": "c", "previous_response_id": "resp_one", "max_output_tokens": 2},
    ):
        yield client.ask("POST", "/v1/responses", body)[0]


def self_referring_tool(client: Client) -> Iterator[int]:
    alternatives = [{"$ref": "#/$defs/a"}] * 32
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"anyOf": alternatives}},
    }
    for choice in ("required", "auto"):
        yield client.ask(
            "POST", "/v1/chat/completions", chat(tools=[tool(schema)], tool_choice=choice)
        )[0]


def backtracking_grammar(client: Client) -> Iterator[int]:
    grammars = [
        'root ::= "a"{' + " " * 1000,
        "root ::= " + "(" * 5000,
        'root ::= "a"{1,' + "9" * 500 + "}",
    ]
    for grammar in grammars:
        yield client.ask(
            "POST", "/v1/completions", completion(structured_outputs={"grammar": grammar})
        )[0]
    for pattern in ("[" * 20_000, "\\" * 20_001, "(a*)*" * 2000):
        schema = {
            "type": "object",
            "properties": {"x": {"type": "string", "pattern": pattern}},
            "required": ["x"],
        }
        yield client.ask(
            "POST", "/v1/chat/completions", chat(tools=[tool(schema)], tool_choice="required")
        )[0]


def long_prompts(client: Client) -> Iterator[int]:
    for text in ("word " * (3 * MIB // 5), "a" * 3 * MIB, "é" * MIB):
        for path, field in (
            ("/v1/completions", "prompt"),
            ("/tokenize", "prompt"),
            ("/v1/embeddings", "input"),
        ):
            yield client.ask("POST", path, {"model": "quill", field: text})[0]


def costly_stops(client: Client) -> Iterator[int]:
    stops = [f"{'a' * 1000}{number:03d}" for number in range(64)]
    yield client.ask(
        "POST", "/v1/completions", completion(stop=stops[:4], max_tokens=200, ignore_eos=True)
    )[0]
    yield client.ask(
        "POST", "/v1/completions", completion(stop=stops, max_tokens=200, ignore_eos=True)
    )[0]
    tokens = [5] * 1000
    yield client.ask(
        "POST", "/v1/completions", completion(prompt=tokens, prompt_logprobs=20, max_tokens=1)
    )[0]


def batches_of_one_file(client: Client) -> Iterator[int]:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": completion(max_tokens=1),
    }
    lines = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(20_000))
    head = 'Content-Disposition: form-data; name="'
    form = f'--x\r\n{head}purpose"\r\n\r\nbatch\r\n--x\r\n{head}file"; filename="a"\r\n\r\n{lines}\r\n--x--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    status, _, raw = client.ask("POST", "/v1/files", form.encode(), kind)
    yield status
    body = {
        "input_file_id": json.loads(raw)["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    created = []
    for _ in range(20):
        status, _, raw = client.ask("POST", "/v1/batches", body)
        created += [json.loads(raw)["id"]] if status == 200 else []
        yield status
    for name in created:
        yield client.ask("POST", f"/v1/batches/{name}/cancel", {})[0]


HOSTILE = {
    "a response that follows itself": cyclic_response,
    "a tool whose schema refers to itself": self_referring_tool,
    "grammars and patterns that backtrack": backtracking_grammar,
    "prompts of 3 MiB": long_prompts,
    "64 long stop strings, 20 prompt log-probabilities": costly_stops,
    "20 batches of one file": batches_of_one_file,
}


class Health:
    """Asks for health and reads a stream, again and again, and keeps the longest that either
    waited.
    """

    def __init__(self, url: str):
        self.url, self.is_over = url, threading.Event()
        self.slowest_health = self.longest_gap = 0.0
        self.threads = [
            threading.Thread(target=run) for run in (self.ask_health, self.read_streams)
        ]

    def ask_health(self) -> None:
        with Client(self.url) as client:
            while not self.is_over.wait(0.02):
                began = time.monotonic()
                assert client.ask("GET", "/health")[0] == 200
                self.slowest_health = max(self.slowest_health, time.monotonic() - began)

    def read_streams(self) -> None:
        with Client(self.url) as client:
            while not self.is_over.is_set():
                body = completion(prompt="Once upon a time", max_tokens=100, ignore_eos=True)
                times = [when for when, _ in client.events("/v1/completions", body)]
                gaps = [late - early for early, late in zip(times, times[1:], strict=False)]
                self.longest_gap = max(self.longest_gap, *gaps)

    def __enter__(self) -> "Health":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("name", HOSTILE)
def test_health_and_streams_go_on_beside(process, name):
    server = psutil.Process(process.pid)
    began = server.create_time()
    before = memory(process.pid)
    with Client(process.url) as client, Health(process.url) as health:
        time.sleep(1.0)  # something runs before the first hostile request
        statuses = list(HOSTILE[name](client))
    grown = (memory(process.pid) - before) >> 20
    print(
        f"{name}: health after {health.slowest_health * 1e3:.0f} ms at most, a stream's longest "
        f"gap {health.longest_gap * 1e3:.0f} ms, {grown} MiB more memory"
    )
    assert not [status for status in statuses if status >= 500], statuses
    assert health.slowest_health < ENOUGH and health.longest_gap < ENOUGH
    assert grown < 400
    process.canary.check_answer(60.0)
    assert process.running.poll() is None and server.create_time() == began
