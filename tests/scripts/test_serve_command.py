"""`quire serve` as a process: its flags, its models, its signals."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import quire
from quire.__main__ import app
from quire.scripts.options import UsageError
from quire.scripts.serve.command import names_by_model, read_keys
from quire.tests.support.served import model_of, scripted, served

FOLDER = Path(quire.__file__).parent / "model"


@contextmanager
def serve_process(*flags: str, **environment: str):
    """A running `quire serve`; yields (process, address) once it is ready."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
    process_environment = {**os.environ, **environment}
    running = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=process_environment
    )
    lines: list[str] = []
    drain = threading.Thread(target=lambda: lines.extend(running.stderr), daemon=True)
    assert running.stderr is not None and running.stdout is not None
    try:
        for line in running.stderr:
            lines.append(line)
            if line.startswith("ready: "):
                break
        else:
            raise AssertionError("".join(lines))
        drain.start()
        running.lines = lines
        yield running, line.removeprefix("ready: ").strip()
    finally:
        if running.poll() is None:
            running.kill()
        running.wait()
        running.stdout.close()
        if drain.ident is not None:
            drain.join()
        running.stderr.close()


def post(address: str, path: str, body: dict, headers: dict | None = None) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=300)
    try:
        connection.request(
            "POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})}
        )
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


async def stream_completion(address: str, max_tokens: int) -> bytes:
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps(
        {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return answer


def test_sigterm_lets_streams_finish():
    with serve_process() as (running, address):

        async def run() -> list[bytes]:
            streams = [asyncio.create_task(stream_completion(address, 200)) for _ in range(8)]
            await asyncio.sleep(0.3)
            running.send_signal(signal.SIGTERM)
            return await asyncio.gather(*streams)

        for answer in asyncio.run(run()):
            assert b'"finish_reason":"length"' in answer and b"[DONE]" in answer
        assert running.wait(120) == 0
        assert "Once" not in "".join(running.lines)  # prompts are not logged


@pytest.mark.slow
def test_sigterm_aborts_streams_after_the_grace():
    with serve_process("--shutdown-grace", "0.2", "--max-model-len", "1000") as (running, address):

        async def run() -> list[bytes]:
            streams = [asyncio.create_task(stream_completion(address, 900)) for _ in range(4)]
            await asyncio.sleep(0.3)
            running.send_signal(signal.SIGTERM)
            return await asyncio.gather(*streams)

        answers = asyncio.run(run())
        assert running.wait(120) == 0
        for answer in answers:
            assert b'"finish_reason":"abort"' in answer and b"[DONE]" in answer


@pytest.mark.slow
def test_config_file_and_api_key_file(tmp_path):
    (tmp_path / "keys").write_text("first\nsecond\n")
    config = {
        "served-model-name": "tale",
        "max_model_len": "128",
        "api-key-file": str(tmp_path / "keys"),
    }
    (tmp_path / "serve.yaml").write_text(json.dumps(config))
    with serve_process("--config", str(tmp_path / "serve.yaml"), QUIRE_API_KEY="third") as (
        _,
        address,
    ):
        request = {"prompt": "Once", "max_tokens": 1, "model": "tale"}
        assert post(address, "/v1/completions", request)[0] == 401
        for key in ("first", "second", "third"):
            assert (
                post(address, "/v1/completions", request, {"Authorization": f"Bearer {key}"})[0]
                == 200
            )
        long_request = request | {"max_tokens": 500, "ignore_eos": True}
        status, body = post(address, "/v1/completions", long_request, {"x-api-key": "first"})
        assert status == 200 and body["usage"]["total_tokens"] == 128


def test_serve_on_a_unix_socket(tmp_path):
    path = str(tmp_path / "quire.sock")
    with serve_process("--uds", path) as (_, address):
        assert address == f"unix:{path}"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()


@pytest.mark.slow
def test_models_are_swapped_within_max_loaded():
    """One of two models may be loaded at a time; swapping them does not change their answers."""
    folders = [str(FOLDER / "quill"), str(FOLDER / "quill_draft")]
    with serve_process(*folders, "--max-loaded", "1", "--max-num-seqs", "4") as (_, address):

        def complete(model: str) -> str:
            request = {
                "prompt": "Once upon a time",
                "max_tokens": 12,
                "temperature": 0,
                "model": model,
            }
            status, body = post(address, "/v1/completions", request)
            assert (status, body["model"]) == (200, model), body
            return body["choices"][0]["text"]

        quill_text = complete("quill")
        draft_text = complete("quill_draft")
        assert quill_text != draft_text
        for _ in range(3):
            assert (complete("quill"), complete("quill_draft")) == (quill_text, draft_text)
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=300)
        connection.request("GET", "/v1/models")
        states = {
            model["id"]: model["state"]
            for model in json.loads(connection.getresponse().read())["data"]
        }
        connection.close()
        assert states["quill_draft"] == "ready" and states["quill"] == "asleep"


def test_concurrent_requests_for_more_models_than_fit():
    """Three models are requested at once; one of them may be loaded at a time."""
    engines = {
        name: scripted(lambda prompt, name=name: f"I am {name}.")[0] for name in ("a", "b", "c")
    }
    with served(
        *(model_of(engine, name) for name, engine in engines.items()), max_loaded=1
    ) as server:
        replies: list[tuple[str, int, str]] = []

        def complete(name: str) -> None:
            status, body = post(
                server.url, "/v1/completions", {"prompt": "Who?", "model": name, "max_tokens": 20}
            )
            replies.append(
                (name, status, body["choices"][0]["text"] if status == 200 else str(body))
            )

        threads = [threading.Thread(target=complete, args=(name,)) for name in "abcbacbacabc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert len(replies) == 12
        for name, status, text in replies:
            assert (status, text) == (200, f"I am {name}.")
        assert sum(model.state == "ready" for model in server.service.models.models) == 1


def test_a_model_that_cannot_be_loaded_ends_serve(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    command = [sys.executable, "-m", "quire", "serve", str(tmp_path), "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 2 and "error: " in run.stderr and "Traceback" not in run.stderr, (
        run.stderr
    )
    assert run.stderr.count("model type None is not supported") == 1  # reported once


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "65536"], "--port is 65536; it must be from 0 (a free one) to 65535"),
        (["--max-loaded", "0"], "--max-loaded is 0; it must be above 0"),
        (["--tool-call-parser", "herms"], "tool_call_parser is 'herms'"),
        (["--shutdown-grace", "-1"], "--shutdown-grace is -1"),
        (["--max-model-len", "1"], "max_model_len is 1"),
        (["--config", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (
            ["a", "b", "--served-model-name", "one"],
            "--served-model-name is given 1 times for 2 models",
        ),
    ],
)
def test_invalid_serve_flags_are_rejected(flags, message):
    result = CliRunner().invoke(app, ["serve", *flags], standalone_mode=False)
    assert message in str(result.exception), result.exception


def test_unknown_config_keys_are_rejected(tmp_path):
    (tmp_path / "c.yaml").write_text("max-model-length: 5")
    result = CliRunner().invoke(
        app, ["serve", "--config", str(tmp_path / "c.yaml")], standalone_mode=False
    )
    assert str(result.exception).endswith(
        "has 'max-model-length', which is no option. Did you mean max-model-len?"
    )


def test_config_files_may_have_vllm_options(tmp_path):
    (tmp_path / "c.yaml").write_text(
        "trust-remote-code: true\nenforce_eager: true\ntokenizer-mode: auto\nctx-size: 5"
    )
    result = CliRunner().invoke(
        app, ["serve", "--config", str(tmp_path / "c.yaml")], standalone_mode=False
    )
    assert str(result.exception).endswith(
        "has 'ctx-size', which is no option. Here it is max-model-len."
    )
    (tmp_path / "c.yaml").write_text(
        "trust-remote-code: true\nenforce_eager: true\ntokenizer-mode: mistral"
    )
    result = CliRunner().invoke(
        app, ["serve", "--config", str(tmp_path / "c.yaml")], standalone_mode=False
    )
    assert str(result.exception).startswith(
        "tokenizer-mode is 'mistral'; here it can only be auto, hf"
    )
    (tmp_path / "c.yaml").write_text("trust-remote-code: true\nenforce_eager: true\nport: 1x")
    result = CliRunner().invoke(
        app, ["serve", "--config", str(tmp_path / "c.yaml")], standalone_mode=False
    )
    assert "note: without effect here: trust-remote-code (" in result.stderr and "integer" in str(
        result.exception
    )


def test_served_model_names_and_api_keys(monkeypatch, tmp_path):
    assert names_by_model([], []) == [("quill",)]
    assert names_by_model(["org/model"], []) == [("org/model", "model")]
    assert names_by_model(["x"], ["a", "b"]) == [("a", "b")]
    assert names_by_model(["x", "y"], ["a", "b"]) == [("a",), ("b",)]
    with pytest.raises(UsageError, match="same name"):
        names_by_model(["x/m", "y/m"], [])
    monkeypatch.setenv("QUIRE_API_KEY", "b, c,")
    assert read_keys(["a"], None) == ("a", "b", "c")
    (tmp_path / "empty").write_text("\n")
    monkeypatch.delenv("QUIRE_API_KEY")
    with pytest.raises(UsageError, match="holds no key"):
        read_keys([], tmp_path / "empty")
