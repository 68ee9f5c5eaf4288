"""`quire serve` on a socket: responses, rejected requests, and clients that disconnect."""

import asyncio
import http.client
import json
import logging
import math
import socket
import threading
import time
from urllib.parse import quote

import pytest
from starlette.routing import Route

from quire.model.config import ModelError
from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.serving.http.models import Models
from quire.serving.http.server import serve
from quire.serving.http.service import Service
from quire.serving.http.settings import ServerSettings
from quire.tests.support.served import FORMATS, model_of, scripted, served
from quire.tests.support.talk import until

JSON_HEADERS = {"Content-Type": "application/json"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Z\\u00fcrich"}}\n</tool_call>'
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}


def scripted_answer(prompt: str) -> str:
    """The answer that the last turn of the prompt calls for."""
    if "weather" in prompt and "<tools>" in prompt:
        return f"<think>The user wants the weather.</think>I look. {CALL}"
    if "long" in prompt:
        return "word " * 400
    return "Grüße, 世界! 👩‍🚀"


@pytest.fixture(scope="module")
def server():
    engine, script = scripted(scripted_answer)
    with served(model_of(engine), formats=FORMATS, admin=True) as state:
        state.engine = engine
        state.script = script
        yield state


def send_request(server, method: str, path: str, body=None, headers=JSON_HEADERS):
    """Send one request; return (status, headers, body)."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        raw = response.read()
        kind = response.headers.get("Content-Type", "")
        return response.status, response.headers, json.loads(raw) if "json" in kind else raw
    finally:
        connection.close()


def post_chat(server, text: str = "hello", **fields):
    return send_request(
        server,
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": text}], **fields},
    )


def parse_events(raw: bytes) -> list:
    """Data of the server-sent events; the last event must be [DONE]."""
    data_lines = [
        line.removeprefix("data: ")
        for line in raw.decode().split("\n")
        if line.startswith("data: ")
    ]
    assert data_lines.pop() == "[DONE]"
    return [json.loads(event) for event in data_lines]


def wait_until_idle(server, seconds: float = 60.0) -> None:
    """Wait until no request runs; then check that every page is free or cached."""
    end = time.monotonic() + seconds
    while server.engine.busy and time.monotonic() < end:
        time.sleep(0.01)
    assert not server.engine.busy and not server.engine.requests
    server.engine.scheduler.check()
    assert server.engine.tables[0].used() == 0
    assert not server.service.models.models[0].llm.thread.outbox.listeners


def test_stream_matches_the_complete_response(server):
    status, headers, body = post_chat(server)
    assert status == 200 and body["choices"][0]["message"]["content"] == "Grüße, 世界! 👩‍🚀"
    status, headers, raw = post_chat(server, stream=True, stream_options={"include_usage": True})
    assert headers["Content-Type"].startswith("text/event-stream")
    *chunks, last = parse_events(raw)
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        == "Grüße, 世界! 👩‍🚀"
    )
    assert not any("\ufffd" in chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert [
        c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]
    ] == ["stop"]
    assert (
        last["usage"]["completion_tokens"] == body["usage"]["completion_tokens"]
        and not last["choices"]
    )
    assert all(chunk["usage"] is None for chunk in chunks)


def test_reasoning_and_tool_calls(server):
    fields = {"tools": [WEATHER_TOOL], "stream": False}
    message = post_chat(server, "the weather", **fields)[2]["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    assert message["message"]["reasoning"] == "The user wants the weather."
    assert message["message"]["content"] == "I look."
    call = message["message"]["tool_calls"][0]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "weather",
        {"city": "Zürich"},
    )
    chunks = [
        event["choices"][0]
        for event in parse_events(
            post_chat(server, "the weather", tools=[WEATHER_TOOL], stream=True)[2]
        )
    ]
    pieces = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {
        "city": "Zürich"
    }
    assert chunks[-1]["finish_reason"] == "tool_calls"
    # Without tools, or with tool_choice none, the answer is only text.
    assert (
        "<tools>" not in scripted_answer("")
        and post_chat(server, "the weather", tools=[WEATHER_TOOL], tool_choice="none")[0] == 200
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"n": 1000}, "n"),
        ({"messages": []}, "messages"),
        ({"model": 5}, "model"),
        (
            {
                "tools": [WEATHER_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "x"}},
            },
            "tool_choice.function.name",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"request_id": "a b"}, "request_id"),
        ({"chat_template": "{{ 'a' * 10**9 }}"}, "messages"),
    ],
)
def test_invalid_request_error_names_field(server, fields, param):
    status, _, body = post_chat(server, **fields)
    assert (status, body["error"]["param"]) == (400, param), body
    wait_until_idle(server)


def test_unknown_models_paths_and_methods(server):
    assert post_chat(server, model="gpt-4")[0] == 404
    assert post_chat(server, model="gpt-4")[2]["error"]["code"] == "model_not_found"
    status, _, body = send_request(server, "GET", "/nothing")
    assert (status, body["error"]["message"]) == (404, "GET /nothing: Not Found")
    for path, correct_path in {
        "/chat/completions": "/v1/chat/completions",  # a base URL without its /v1
        "/v1/v1/chat/completions": "/v1/chat/completions",
        "/v1/health": "/health",
        "/completion": "/v1/completions",  # llama-server's
    }.items():
        status, _, body = send_request(server, "POST", path, {})
        assert (status, body["error"]["message"]) == (
            404,
            f"POST {path}: Not Found; here it is {correct_path}",
        )
    assert send_request(server, "GET", "/v1/completions")[0] == 405
    assert send_request(server, "POST", "/v1/completions", b"{", JSON_HEADERS)[0] == 400
    assert (
        send_request(server, "POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"})[0]
        == 415
    )


def test_request_ids_are_returned(server):
    _, headers, body = post_chat(server, request_id="mine-1")
    assert body["id"] == "chatcmpl-mine-1"
    assert (
        send_request(server, "GET", "/ping", headers={"X-Request-Id": "abc"})[1]["X-Request-Id"]
        == "abc"
    )
    assert (
        send_request(server, "GET", "/ping", headers={"X-Request-Id": "a b\tc"})[1]["X-Request-Id"]
        != "a b\tc"
    )


def test_batch_of_conversations(server):
    """Each conversation is answered as in a request of its own; choice indices run over the whole
    batch.
    """
    turns = [{"role": "user", "content": text} for text in ("hello", "long")]
    single_bodies = [post_chat(server, turn["content"], n=2)[2] for turn in turns]
    path = "/v1/chat/completions/batch"
    body = {"messages": [[turn] for turn in turns], "n": 2, "return_token_ids": True}
    status, _, batch_body = send_request(server, "POST", path, body)
    assert status == 200 and batch_body["object"] == "chat.completion"
    assert [choice["index"] for choice in batch_body["choices"]] == [0, 1, 2, 3]
    messages = [
        choice["message"] for single_body in single_bodies for choice in single_body["choices"]
    ]
    assert [choice["message"] for choice in batch_body["choices"]] == messages
    assert batch_body["usage"]["prompt_tokens"] == sum(
        single_body["usage"]["prompt_tokens"] for single_body in single_bodies
    )
    assert (
        batch_body["choices"][0]["prompt_token_ids"] == batch_body["choices"][1]["prompt_token_ids"]
    )
    assert (
        batch_body["choices"][0]["prompt_token_ids"] != batch_body["choices"][2]["prompt_token_ids"]
    )
    prefix = [turns[0], {"role": "assistant", "content": "So "}]
    continue_fields = {"echo": True, "add_generation_prompt": False, "continue_final_message": True}
    _, _, batch_body = send_request(
        server, "POST", path, {"messages": [prefix, prefix], **continue_fields}
    )
    assert all(choice["message"]["content"].startswith("So ") for choice in batch_body["choices"])
    for fields, param in (
        ({"stream": True}, "stream"),
        ({"messages": turns}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [turns, [{"role": "x"}]]}, "messages[1][0].role"),
        ({"n": 65}, "n"),
    ):
        status, _, batch_body = send_request(server, "POST", path, body | fields)
        assert (status, batch_body["error"]["param"]) == (400, param), batch_body


def test_invocations_dispatch_by_fields(server):
    turn = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": turn}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v2/embed", {"texts": ["hello"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/score", {"queries": "a", "documents": ["b"]}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        answers = [
            send_request(server, "POST", url_path, body) for url_path in (path, "/invocations")
        ]
        assert [status for status, _, _ in answers] == [200, 200], answers
        direct, invoked = (
            {k: v for k, v in body.items() if k not in ("id", "created", "usage")}
            for _, _, body in answers
        )
        assert direct == invoked
    status, _, raw = send_request(
        server, "POST", "/invocations", {"messages": turn, "stream": True}
    )
    assert status == 200 and "".join(
        e["choices"][0]["delta"].get("content", "") for e in parse_events(raw)
    ) == scripted_answer("hello")
    for body, message in (
        ([], "body: must be a JSON object"),
        ({"model": "quill"}, "body: must have a field that says"),
    ):
        status, _, error_body = send_request(server, "POST", "/invocations", body)
        assert status == 400 and error_body["error"]["message"].startswith(message)
    status, _, error_body = send_request(
        server, "POST", "/invocations", {"prompt": "a", "temprature": 1}
    )
    assert (status, error_body["error"]["param"]) == (400, "temprature")


def test_ignored_message_fields_are_reported(server, caplog):
    messages = [{"role": "user", "content": "hello", "audio": 1, "mood\r\nX-Evil": "glad"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        for is_streaming in (False, True) if "chat" in path else (False,):
            body = {"messages": messages} | ({"stream": True} if is_streaming else {})
            status, headers, _ = send_request(server, "POST", path, body)
            assert (status, headers["X-Ignored-Fields"]) == (200, "messages[].?, messages[].audio")
            assert headers["X-Evil"] is None
    log_messages = [
        record.getMessage() for record in caplog.records if "ignored" in record.getMessage()
    ]
    assert len(log_messages) == 2 and log_messages[1].startswith(
        "messages[].audio is no field that this server knows"
    )
    assert post_chat(server)[1]["X-Ignored-Fields"] is None


def test_disconnected_client_frees_its_pages(server):
    server.script.step_seconds = 0.05
    try:
        for stream in (True, False):
            with raw_request(
                server, {"prompt": "long", "max_tokens": 400, "stream": stream}
            ) as connection:
                until = time.monotonic() + 60
                while not server.engine.scheduler.running and time.monotonic() < until:
                    time.sleep(0.005)
                assert server.engine.scheduler.running
                if stream:
                    assert connection.recv(10)
            steps = server.script.steps
            wait_until_idle(server)
            # of 400: steps until the server notices
            assert server.script.steps - steps < 100
    finally:
        server.script.step_seconds = 0.0


def raw_request(server, body, path: str = "/v1/completions") -> socket.socket:
    """Send a request on a new connection and return the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)), timeout=120)
    connection.sendall(head.encode() + data)
    return connection


def test_failed_step_fails_only_its_requests(server, caplog):
    server.script.fail_next = 1
    status, _, body = post_chat(server)
    assert (status, body["error"]["code"]) == (500, "engine_error")
    assert post_chat(server)[0] == 200
    server.script.fail_next = 1
    *_, last = parse_events(post_chat(server, stream=True)[2])
    assert "failed" in last["error"]["message"]
    wait_until_idle(server)


def test_full_queue_answers_429_with_retry_after(server):
    server.engine.max_queued = 3
    server.script.hold.clear()
    replies = []
    threads = [
        threading.Thread(target=lambda: replies.append(post_chat(server, n=2))) for _ in range(12)
    ]
    try:
        for thread in threads:
            thread.start()
        until(lambda: send_request(server, "GET", "/load")[2]["server_load"] + len(replies) == 12)
    finally:
        server.script.hold.set()
        for thread in threads:
            thread.join(120)
        server.engine.max_queued = None
    statuses = sorted(status for status, _, _ in replies)
    assert set(statuses) == {200, 429}
    refused = next(reply for reply in replies if reply[0] == 429)
    assert int(refused[1]["Retry-After"]) >= 1 and refused[2]["error"]["param"] == "queue"
    wait_until_idle(server)


def test_timeout_ends_the_answer(server):
    server.script.step_seconds = 0.02
    try:
        choice = send_request(
            server,
            "POST",
            "/v1/completions",
            {"prompt": "long", "max_tokens": 400, "timeout": 0.3},
        )[2]
        assert choice["choices"][0]["finish_reason"] == "timeout"
    finally:
        server.script.step_seconds = 0.0


def test_status_endpoints(server):
    assert send_request(server, "GET", "/health")[::2] == (
        200,
        {"status": "ok", "models": {"quill": "ready"}},
    )
    assert send_request(server, "GET", "/ping")[0] == 200
    assert send_request(server, "GET", "/version")[2]["version"]
    assert send_request(server, "GET", "/load")[2] == {"server_load": 0}
    assert [model["id"] for model in send_request(server, "GET", "/v1/models")[2]["data"]] == [
        "quill"
    ]
    assert send_request(server, "GET", "/v1/models/quill")[2]["max_model_len"] == 1024
    assert b"vllm:num_requests_running" in send_request(server, "GET", "/metrics")[2]


def test_access_log_omits_polled_paths_and_page_files(server, caplog):
    caplog.set_level(logging.INFO, "quire.access")
    for path in (
        "/",
        "/page/app.js",
        "/page/vendor/purify.min.js",
        "/health",
        "/page/none.js",
        "/version",
    ):
        send_request(server, "GET", path)
    until = time.monotonic() + 60
    while (
        len(caplog.records) < 3 and time.monotonic() < until
    ):  # records are written after the response
        time.sleep(0.01)
    assert [record.path for record in caplog.records] == ["/", "/page/none.js", "/version"]


def test_failed_health_checks_are_not_logged(server, caplog):
    """Orchestrators poll every few seconds while a model loads, and the log reports the model's
    state anyway.
    """
    caplog.set_level(logging.INFO, "quire.access")
    state = {"facts": {}, "request_id": "x", "params": None}
    for path in ("/health", "/ping", "/metrics"):
        scope = {
            "route": Route(path, lambda request: None),
            "state": state,
            "method": "GET",
            "path": path,
        }
        server.service.record_request(scope, 503, 0.001)
    assert [record.path for record in caplog.records] == ["/metrics"]


def test_tokenize_and_detokenize(server):
    tokenized = send_request(
        server, "POST", "/tokenize", {"prompt": "Hello there", "return_token_strs": True}
    )[2]
    assert tokenized["count"] == len(tokenized["tokens"])
    names = {number: name for name, number in server.engine.tokenizer.get_vocab().items()}
    assert tokenized["token_strs"] == [names[token] for token in tokenized["tokens"]]
    tokens = tokenized["tokens"]
    assert send_request(
        server, "POST", "/detokenize", {"tokens": tokens, "skip_special_tokens": True}
    )[2] == {"prompt": "Hello there"}
    assert send_request(server, "POST", "/detokenize", {"tokens": [10**6]})[0] == 400
    turns = {"messages": [{"role": "user", "content": "Hello"}]}
    prompt = send_request(
        server, "POST", "/v1/chat/completions", {**turns, "max_tokens": 1, "return_token_ids": True}
    )[2]
    assert (
        send_request(server, "POST", "/tokenize", turns)[2]["tokens"] == prompt["prompt_token_ids"]
    )


def test_pause_and_resume(server):
    assert send_request(server, "POST", "/pause", b"")[2] == {"is_paused": True}
    replies = []
    thread = threading.Thread(target=lambda: replies.append(post_chat(server)))
    thread.start()
    time.sleep(0.2)
    assert not replies
    send_request(server, "POST", "/resume", b"")
    thread.join(120)
    assert replies[0][0] == 200


@pytest.mark.parametrize("path", ["/pause", "/sleep?level=2"])
@pytest.mark.parametrize("is_streaming", [False, True])
def test_timeout_applies_while_engine_is_paused_or_asleep(server, path, is_streaming):
    """A timed-out request ends with the tokens that it has, though the engine sleeps or is
    paused.
    """
    server.script.step_seconds = 0.02
    answers = []
    body = {"prompt": "long", "max_tokens": 400, "timeout": 0.5, "stream": is_streaming}
    thread = threading.Thread(
        target=lambda: answers.append(send_request(server, "POST", "/v1/completions", body)[2])
    )
    try:
        thread.start()
        until(lambda: server.engine.scheduler.running)
        assert send_request(server, "POST", path, b"")[0] == 200
        assert (
            server.engine.lifecycle.is_asleep or server.service.models.models[0].llm.thread.paused
        )
        thread.join(60)
        body_or_last_event = parse_events(answers[0])[-1] if is_streaming else answers[0]
        assert body_or_last_event["choices"][0]["finish_reason"] == "timeout"
    finally:
        server.script.step_seconds = 0.0
        send_request(server, "POST", "/wake_up", b"")
        send_request(server, "POST", "/resume", b"")
        thread.join(60)
    wait_until_idle(server)


def test_timeout_includes_waiting_for_a_model_to_wake():
    """A request ends at its timeout even if its model cannot be woken up yet."""
    first_engine, second_engine = (scripted(scripted_answer) for _ in range(2))
    models = [
        model_of(engine, name) for (engine, _), name in ((first_engine, "a"), (second_engine, "b"))
    ]
    with served(*models, max_loaded=1) as state:
        first_engine[1].hold.clear()
        holder = threading.Thread(
            target=send_request,
            args=(state, "POST", "/v1/completions", {"prompt": "x", "model": "a"}),
        )
        holder.start()
        try:
            until(lambda: first_engine[0].requests)
            status, _, body = send_request(
                state, "POST", "/v1/completions", {"prompt": "x", "model": "b", "timeout": 0.3}
            )
        finally:
            first_engine[1].hold.set()
            holder.join(60)
        assert (status, body["error"]["param"]) == (408, "timeout")
        assert (
            send_request(
                state, "POST", "/v1/completions", {"prompt": "x", "model": "b", "timeout": 60}
            )[0]
            == 200
        )


def test_failed_wake_up_can_be_retried(server, caplog):
    """Requests that wait for the failed attempt get an error; the next attempt may succeed."""
    runner = server.engine.runner
    load_weights, runner.load_weights = runner.load_weights, lambda: 1 / 0
    try:
        assert send_request(server, "POST", "/sleep?level=2", b"")[2] == {"is_sleeping": True}
        for method, path, body in (
            ("POST", "/wake_up", b""),
            ("POST", "/v1/completions", {"prompt": "hello"}),
        ):
            status, _, error_body = send_request(server, method, path, body)
            assert status == 503 and "could not be woken up" in error_body["error"]["message"]
        assert send_request(server, "GET", "/is_sleeping")[2] == {"is_sleeping": True}
    finally:
        runner.load_weights = load_weights
    assert send_request(server, "POST", "/wake_up", b"")[2] == {"is_sleeping": False}
    assert post_chat(server)[0] == 200
    assert any(
        record.exc_info and "could not be woken up" in record.getMessage()
        for record in caplog.records
    )


@pytest.mark.parametrize("text", ["²", "٣", "+1", "1_0", "", "-", "1" * 30])
def test_numbers_in_queries_are_ascii_digits(server, text):
    number = quote(text)
    for method, path, param in (
        ("GET", f"/v1/files?limit={number}", "limit"),
        ("GET", f"/v1/batches?limit={number}", "limit"),
        ("POST", f"/sleep?level={number}", "level"),
    ):
        status, _, body = send_request(server, method, path, b"" if method == "POST" else None)
        assert (status, body["error"]["param"]) == (400, param)


def test_unavailable_address_is_a_one_line_error(server):
    port = int(server.url.rpartition(":")[2])
    for settings, message_pattern in [
        (
            {"port": port},
            f"port is {port}, where another program listens on 127.0.0.1: .*--port {port + 1}",
        ),
        ({"host": "no such host"}, "cannot listen on host 'no such host', port 8000: "),
        ({"uds": "/no/such/folder/socket"}, "uds is '/no/such/folder/socket': "),
    ]:
        service = Service(Models([model_of(server.engine)]), ServerSettings(**settings))
        with pytest.raises(ModelError, match=message_pattern) as caught:
            asyncio.run(serve(service, lambda address: None))
        assert "\n" not in str(caught.value)


def test_prompt_is_truncated_before_its_length_check(server):
    """The last tokens of the long prompt equal those of its end alone, computed by hand."""
    text = "0123456789 " * 40_000
    short_request = {
        "prompt": "0123456789 " * 4,
        "max_tokens": 1,
        "temperature": 0,
        "truncate_prompt_tokens": 9,
    }
    status, _, body = send_request(
        server,
        "POST",
        "/v1/completions",
        short_request | {"prompt": text, "return_token_ids": True},
    )
    assert status == 200 and body["usage"]["prompt_tokens"] == 9
    tail_body = send_request(
        server, "POST", "/v1/completions", short_request | {"return_token_ids": True}
    )[2]
    assert body["choices"][0]["prompt_token_ids"] == tail_body["choices"][0]["prompt_token_ids"]
    messages = [{"role": "user", "content": text}]
    for side in ("left", "right"):
        request = {"messages": messages, "truncate_prompt_tokens": -1, "truncation_side": side}
        status, _, body = send_request(server, "POST", "/v1/chat/completions", request)
        assert status == 200, body
        request = {"input": text, "truncate_prompt_tokens": 5, "truncation_side": side}
        status, _, body = send_request(server, "POST", "/v1/embeddings", request)
        assert status == 200 and body["usage"]["prompt_tokens"] == 5
    for path, fields in [
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": messages}),
    ]:
        status, _, body = send_request(server, "POST", path, fields)
        assert (
            status == 400
            and "characters; this model's maximum context length" in body["error"]["message"]
        )


def test_overlong_prompt_is_rejected_without_tokenizing_all_of_it(server, monkeypatch):
    """Only a few characters per token of the maximum length are tokenized; counting endpoints
    tokenize the whole prompt.
    """
    max_len = server.engine.max_len
    tokenizer = server.engine.tokenizer
    lengths: list[int] = []
    encode = tokenizer.encode

    def record_length(text: str, **options) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", record_length)
    text = "0123456789 " * max_len
    messages = [{"role": "user", "content": text}]
    for path, fields in [
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": messages}),
    ]:
        lengths.clear()
        status, _, body = send_request(server, "POST", path, fields)
        message = body["error"]["message"]
        assert status == 400 and f"maximum context length is {max_len} tokens" in message
        assert f"of which the first {8 * max_len} are " in message
        assert lengths == [8 * max_len]
    text_of_words = "word " * max_len  # more characters than tokens, but within the limit
    lengths.clear()
    assert send_request(server, "POST", "/v1/completions", {"prompt": text_of_words})[0] == 400
    assert lengths == [len(text_of_words)]
    lengths.clear()
    count = send_request(server, "POST", "/v1/messages/count_tokens", {"messages": messages})[2]
    assert count["input_tokens"] > 8 * max_len and lengths[0] > len(text)


@pytest.mark.parametrize("num_repeats", [1, 10_000])
def test_truncation_side(server, num_repeats):
    """The remaining tokens equal a slice of the prompt's tokens, also when the dropped end is too
    long to be tokenized.
    """
    text = "one two three " + "and more " * num_repeats + "four five six"
    request = {
        "prompt": text,
        "max_tokens": 1,
        "truncate_prompt_tokens": 4,
        "return_token_ids": True,
    }

    def prompt_token_ids(**fields) -> list[int]:
        status, _, body = send_request(server, "POST", "/v1/completions", request | fields)
        assert status == 200, body
        return body["choices"][0]["prompt_token_ids"]

    tokens = server.engine.tokenizer.encode(text)
    assert prompt_token_ids() == prompt_token_ids(truncation_side="left") == tokens[-4:]
    assert prompt_token_ids(truncation_side="right") == tokens[:4]
    assert prompt_token_ids(prompt=tokens, truncation_side="right") == tokens[:4]


def test_logprob_token_ids(server):
    """Every position has logprobs of its own token and of the requested tokens, likely or not;
    complete and streamed.
    """
    token_ids = [1000, 3, 77]
    request = {
        "logprobs": True,
        "top_logprobs": 1,
        "logprob_token_ids": token_ids,
        "return_tokens_as_token_ids": True,
    }
    # the script's fixed logprobs
    requested_logprobs = {
        f"token_id:{token}": -1.0 - index for index, token in enumerate(token_ids)
    }
    content = post_chat(server, **request)[2]["choices"][0]["logprobs"]["content"]
    streamed = [
        event["choices"] for event in parse_events(post_chat(server, **request, stream=True)[2])
    ]
    assert [
        entry
        for [choice] in streamed
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ] == content
    for entry in content:
        logprobs_by_token = {
            alternative["token"]: alternative["logprob"] for alternative in entry["top_logprobs"]
        }
        assert list(logprobs_by_token) == [
            entry["token"],
            *requested_logprobs,
        ] and logprobs_by_token == requested_logprobs | {entry["token"]: -0.5}
    request = {
        "prompt": "hello",
        "logprobs": 2,
        "logprob_token_ids": token_ids,
        "return_tokens_as_token_ids": True,
    }
    status, _, body = send_request(server, "POST", "/v1/completions", request)
    top_logprobs = body["choices"][0]["logprobs"]["top_logprobs"]
    assert (
        status == 200
        and top_logprobs
        and all(requested_logprobs.items() <= top.items() and len(top) == 4 for top in top_logprobs)
    )


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/chat/completions",
            {"logprobs": True, "logprob_token_ids": [5, 10**6]},
            "id 1000000, which is out of vocabulary",
        ),
        (
            "/v1/chat/completions",
            {"logprobs": True, "logprob_token_ids": [5, -1]},
            "must be an integer of 0",
        ),
        (
            "/v1/chat/completions",
            {"logprobs": True, "logprob_token_ids": [5] * 129},
            "must hold at most 128 items",
        ),
        ("/v1/chat/completions", {"logprob_token_ids": [5]}, "needs logprobs to be true"),
        ("/v1/completions", {"logprob_token_ids": [5]}, "needs logprobs to be given"),
        (
            "/v1/completions",
            {"logprobs": 0, "logprob_token_ids": [5], "echo": True, "max_tokens": 0},
            "says something",
        ),
    ],
)
def test_invalid_logprob_token_ids_are_rejected(server, path, fields, message):
    prompt = (
        {"prompt": "hello"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "hello"}]}
    )
    status, _, body = send_request(server, "POST", path, prompt | fields)
    assert (
        status == 400
        and body["error"]["param"].startswith("logprob_token_ids")
        and message in body["error"]["message"]
    )


def test_tokenizer_info_endpoint_is_opt_in(server):
    """It returns the bundled model's tokenizer config with the server's chat template; without the
    option the path does not exist.
    """
    assert send_request(server, "GET", "/tokenizer_info")[0] == 404
    assert "/tokenizer_info" not in send_request(server, "GET", "/openapi.json")[2]["paths"]
    with served(
        model_of(scripted(scripted_answer)[0]), formats=FORMATS, enable_tokenizer_info_endpoint=True
    ) as state:
        status, _, tokenizer_info = send_request(state, "GET", "/tokenizer_info?model=quill")
        assert status == 200 and tokenizer_info == send_request(state, "GET", "/tokenizer_info")[2]
        assert (tokenizer_info["tokenizer_class"], tokenizer_info["eos_token"]) == (
            "PreTrainedTokenizerFast",
            "<|end|>",
        )
        assert tokenizer_info["chat_template"] == FORMATS.chat_template
        length = send_request(state, "POST", "/tokenize", {"prompt": "hello"})[2]["max_model_len"]
        assert tokenizer_info["model_max_length"] == length
        assert send_request(state, "GET", "/tokenizer_info?model=other")[0] == 404
        assert "get" in send_request(state, "GET", "/openapi.json")[2]["paths"]["/tokenizer_info"]


def test_logprobs_above_max_logprobs_are_rejected(server):
    for path, logprobs_fields, name in [
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        (
            "/v1/responses",
            {"include": ["message.output_text.logprobs"], "top_logprobs": 21},
            "top_logprobs",
        ),
    ]:
        text = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
        request = {text: "hello"} if text else {"messages": [{"role": "user", "content": "hello"}]}
        status, _, body = send_request(server, "POST", path, request | logprobs_fields)
        assert status == 400 and body["error"]["param"] == name
        assert "must be at most the engine's max_logprobs, 20" in body["error"]["message"]


def test_logprobs_of_the_full_vocabulary():
    """With `max_logprobs=-1`, -1 requests the full vocabulary, whose probabilities sum to 1, in
    every protocol.
    """
    options = make_options(
        None, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128, max_logprobs=-1
    )
    engine = make_engine(options)
    vocabulary = engine.config.vocab_size

    def check_sums_to_one(logprobs: list[float]) -> None:
        assert math.fsum(map(math.exp, logprobs)) == pytest.approx(1, abs=1e-4)

    with served(model_of(engine)) as state:
        common_fields = {"max_tokens": 2, "temperature": 0, "return_tokens_as_token_ids": True}
        request = common_fields | {
            "messages": [{"role": "user", "content": "hello"}],
            "logprobs": True,
            "top_logprobs": -1,
        }
        status, _, body = send_request(state, "POST", "/v1/chat/completions", request)
        assert status == 200, body
        for entry in body["choices"][0]["logprobs"]["content"]:
            logprobs_by_token = {
                alternative["token"]: alternative["logprob"]
                for alternative in entry["top_logprobs"]
            }
            assert (
                len(logprobs_by_token) == vocabulary
                and logprobs_by_token[entry["token"]] == entry["logprob"]
            )
            check_sums_to_one(list(logprobs_by_token.values()))
        request = common_fields | {"prompt": "hello", "logprobs": -1, "prompt_logprobs": -1}
        status, _, body = send_request(state, "POST", "/v1/completions", request)
        assert status == 200, body
        for logprobs_by_token in body["choices"][0]["logprobs"]["top_logprobs"]:
            assert len(logprobs_by_token) == vocabulary
            check_sums_to_one(list(logprobs_by_token.values()))
        for entries in body["choices"][0]["prompt_logprobs"][1:]:
            check_sums_to_one([entry["logprob"] for entry in entries.values()])
        request = {"input": "hello", "max_output_tokens": 1, "top_logprobs": -1}
        request |= {"include": ["message.output_text.logprobs"], "temperature": 0}
        status, _, body = send_request(state, "POST", "/v1/responses", request)
        assert status == 200, body
        [entry] = body["output"][0]["content"][0]["logprobs"]
        assert len(entry["top_logprobs"]) == vocabulary


def test_per_request_metrics():
    """Metrics are in the body or in the stream's last chunk, if enabled; requests with several
    choices have none.
    """
    with served(
        model_of(scripted(scripted_answer)[0]), formats=FORMATS, enable_per_request_metrics=True
    ) as state:
        messages = {"messages": [{"role": "user", "content": "long"}], "max_tokens": 9}
        for path, request in [
            ("/v1/chat/completions", messages),
            ("/v1/completions", {"prompt": "long", "max_tokens": 9}),
        ]:
            start = time.monotonic()
            metrics = send_request(state, "POST", path, request)[2]["metrics"]
            streamed = {**request, "stream": True, "stream_options": {"include_usage": True}}
            *chunks, last = parse_events(send_request(state, "POST", path, streamed)[2])
            elapsed_ms = (time.monotonic() - start) * 1000
            assert not any("metrics" in chunk for chunk in chunks)
            for answer_metrics in (metrics, last["metrics"]):
                prefill_ms = answer_metrics["time_to_first_token_ms"]
                decode_ms = answer_metrics["generation_time_ms"]
                assert prefill_ms > 0 and decode_ms >= 0 <= answer_metrics["queue_time_ms"]
                assert answer_metrics["queue_time_ms"] + prefill_ms + decode_ms < elapsed_ms
                assert math.isclose(answer_metrics["mean_itl_ms"] * 8, decode_ms)
                assert math.isclose(
                    answer_metrics["tokens_per_second"] * (prefill_ms + decode_ms), 9000
                )
            assert (
                "mean_itl_ms"
                not in send_request(state, "POST", path, request | {"max_tokens": 1})[2]["metrics"]
            )
            body_of_two_choices = send_request(state, "POST", path, request | {"n": 2})[2]
            assert isinstance(body_of_two_choices, dict) and "metrics" not in body_of_two_choices


def test_force_include_usage():
    """Each chunk has the usage so far and the last chunk the total; protocols with other usage
    fields are unchanged.
    """
    with served(
        model_of(scripted(scripted_answer)[0]), formats=FORMATS, enable_force_include_usage=True
    ) as state:
        messages = {"messages": [{"role": "user", "content": "hello"}]}
        for path, request in [
            ("/v1/chat/completions", messages),
            ("/v1/completions", {"prompt": "hello"}),
        ]:
            for stream_fields in ({}, {"stream_options": {"include_usage": False}}):
                chunks = parse_events(
                    send_request(
                        state,
                        "POST",
                        path,
                        {**request, **stream_fields, "stream": True, "max_tokens": 5},
                    )[2]
                )
                counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
                assert (
                    counts == sorted(counts) and counts[-2:] == [5, 5] and not chunks[-1]["choices"]
                )
                assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
            body = send_request(state, "POST", path, {**request, "max_tokens": 5})[2]
            assert body["usage"] == chunks[-1]["usage"]
        for path, request in [
            ("/v1/messages", messages | {"max_tokens": 5}),
            ("/v1/responses", {"input": "hello"}),
        ]:
            assert send_request(state, "POST", path, request | {"stream": True})[0] == 200
