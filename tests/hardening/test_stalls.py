"""Requests that once stalled the whole server, sent to a running `quire serve` whose health checks
and streams are timed.
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
# limit in seconds on a busy machine; docs/hardening.md has the measured values
MAX_SECONDS = 10.0
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


def function_tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def chat_body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "quill",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        **fields,
    }


def completion_body(**fields: Any) -> dict[str, Any]:
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


def recursive_tool_schema(client: Client) -> Iterator[int]:
    alternatives = [{"$ref": "#/$defs/a"}] * 32
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"anyOf": alternatives}},
    }
    for choice in ("required", "auto"):
        yield client.ask(
            "POST",
            "/v1/chat/completions",
            chat_body(tools=[function_tool(schema)], tool_choice=choice),
        )[0]


def backtracking_grammar(client: Client) -> Iterator[int]:
    grammars = [
        'root ::= "a"{' + " " * 1000,
        "root ::= " + "(" * 5000,
        'root ::= "a"{1,' + "9" * 500 + "}",
    ]
    for grammar in grammars:
        yield client.ask(
            "POST", "/v1/completions", completion_body(structured_outputs={"grammar": grammar})
        )[0]
    for pattern in ("[" * 20_000, "\\" * 20_001, "(a*)*" * 2000):
        schema = {
            "type": "object",
            "properties": {"x": {"type": "string", "pattern": pattern}},
            "required": ["x"],
        }
        yield client.ask(
            "POST",
            "/v1/chat/completions",
            chat_body(tools=[function_tool(schema)], tool_choice="required"),
        )[0]


def long_prompts(client: Client) -> Iterator[int]:
    for text in ("word " * (3 * MIB // 5), "a" * 3 * MIB, "é" * MIB):
        for path, field in (
            ("/v1/completions", "prompt"),
            ("/tokenize", "prompt"),
            ("/v1/embeddings", "input"),
        ):
            yield client.ask("POST", path, {"model": "quill", field: text})[0]


def expensive_stop_strings(client: Client) -> Iterator[int]:
    stops = [f"{'a' * 1000}{number:03d}" for number in range(64)]
    yield client.ask(
        "POST", "/v1/completions", completion_body(stop=stops[:4], max_tokens=200, ignore_eos=True)
    )[0]
    yield client.ask(
        "POST", "/v1/completions", completion_body(stop=stops, max_tokens=200, ignore_eos=True)
    )[0]
    tokens = [5] * 1000
    yield client.ask(
        "POST", "/v1/completions", completion_body(prompt=tokens, prompt_logprobs=20, max_tokens=1)
    )[0]


def batches_of_one_file(client: Client) -> Iterator[int]:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": completion_body(max_tokens=1),
    }
    lines = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(20_000))
    head = 'Content-Disposition: form-data; name="'
    form_data = f'--x\r\n{head}purpose"\r\n\r\nbatch\r\n--x\r\n{head}file"; filename="a"\r\n\r\n{lines}\r\n--x--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    status, _, raw = client.ask("POST", "/v1/files", form_data.encode(), headers)
    yield status
    body = {
        "input_file_id": json.loads(raw)["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch_ids = []
    for _ in range(20):
        status, _, raw = client.ask("POST", "/v1/batches", body)
        batch_ids += [json.loads(raw)["id"]] if status == 200 else []
        yield status
    for name in batch_ids:
        yield client.ask("POST", f"/v1/batches/{name}/cancel", {})[0]


HOSTILE_REQUESTS = {
    "a response that follows itself": cyclic_response,
    "a tool whose schema refers to itself": recursive_tool_schema,
    "grammars and patterns that backtrack": backtracking_grammar,
    "prompts of 3 MiB": long_prompts,
    "64 long stop strings, 20 prompt log-probabilities": expensive_stop_strings,
    "20 batches of one file": batches_of_one_file,
}


class HealthMonitor:
    """Polls /health and reads streams in the background; keeps the longest health response and
    stream gap.
    """

    def __init__(self, url: str):
        self.url = url
        self.is_over = threading.Event()
        self.slowest_health = self.longest_gap = 0.0
        self.threads = [
            threading.Thread(target=run) for run in (self.ask_health, self.read_streams)
        ]

    def ask_health(self) -> None:
        with Client(self.url) as client:
            while not self.is_over.wait(0.02):
                start = time.monotonic()
                assert client.ask("GET", "/health")[0] == 200
                self.slowest_health = max(self.slowest_health, time.monotonic() - start)

    def read_streams(self) -> None:
        with Client(self.url) as client:
            while not self.is_over.is_set():
                body = completion_body(prompt="Once upon a time", max_tokens=100, ignore_eos=True)
                times = [timestamp for timestamp, _ in client.events("/v1/completions", body)]
                gaps = [
                    current - previous for previous, current in zip(times, times[1:], strict=False)
                ]
                self.longest_gap = max(self.longest_gap, *gaps)

    def __enter__(self) -> "HealthMonitor":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for thread in self.threads:
            thread.join()


@pytest.mark.parametrize("name", HOSTILE_REQUESTS)
def test_hostile_requests_do_not_stall_health_or_streams(process, name):
    server = psutil.Process(process.pid)
    start_time = server.create_time()
    memory_before = memory(process.pid)
    with Client(process.url) as client, HealthMonitor(process.url) as health:
        time.sleep(1.0)  # a stream runs before the first hostile request
        statuses = list(HOSTILE_REQUESTS[name](client))
    growth_mib = (memory(process.pid) - memory_before) >> 20
    print(
        f"{name}: health after {health.slowest_health * 1e3:.0f} ms at most, a stream's longest "
        f"gap {health.longest_gap * 1e3:.0f} ms, {growth_mib} MiB more memory"
    )
    assert not [status for status in statuses if status >= 500], statuses
    assert health.slowest_health < MAX_SECONDS and health.longest_gap < MAX_SECONDS
    assert growth_mib < 400
    process.canary.check_answer(60.0)
    assert process.running.poll() is None and server.create_time() == start_time
