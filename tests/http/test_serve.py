"""`quire serve` over a socket: what is answered, what is refused, and what a server owes to those
who leave.
"""

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

JSON = {"Content-Type": "application/json"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Z\\u00fcrich"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def say(prompt: str) -> str:
    """The last turn says what to do."""
    if "weather" in prompt and "<tools>" in prompt:
        return f"<think>The user wants the weather.</think>I look. {CALL}"
    if "long" in prompt:
        return "word " * 400
    return "Grüße, 世界! 👩‍🚀"


@pytest.fixture(scope="module")
def server():
    engine, script = scripted(say)
    with served(model_of(engine), formats=FORMATS, admin=True) as state:
        state.engine = engine
        state.script = script
        yield state


def ask(server, method: str, path: str, body=None, headers=JSON):
    """(status, headers, body) of one exchange."""
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


def chat(server, text: str = "hello", **fields):
    return ask(
        server,
        "POST",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": text}], **fields},
    )


def events(raw: bytes) -> list:
    """The data of server-sent events; the last must be [DONE]."""
    found = [
        line.removeprefix("data: ")
        for line in raw.decode().split("\n")
        if line.startswith("data: ")
    ]
    assert found.pop() == "[DONE]"
    return [json.loads(event) for event in found]


def idle(server, seconds: float = 60.0) -> None:
    """Every page is free or kept, and no request is unaccounted for."""
    until = time.monotonic() + seconds
    while server.engine.busy and time.monotonic() < until:
        time.sleep(0.01)
    assert not server.engine.busy and not server.engine.requests
    server.engine.scheduler.check()
    assert server.engine.tables[0].used() == 0
    assert not server.service.models.models[0].llm.thread.outbox.listeners


def test_a_stream_says_what_the_whole_answer_says(server):
    status, headers, whole = chat(server)
    assert status == 200 and whole["choices"][0]["message"]["content"] == "Grüße, 世界! 👩‍🚀"
    status, headers, raw = chat(server, stream=True, stream_options={"include_usage": True})
    assert headers["Content-Type"].startswith("text/event-stream")
    *chunks, last = events(raw)
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        == "Grüße, 世界! 👩‍🚀"
    )
    assert not any("\ufffd" in chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert [
        c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]
    ] == ["stop"]
    assert (
        last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        and not last["choices"]
    )
    assert all(chunk["usage"] is None for chunk in chunks)


def test_reasoning_and_tool_calls(server):
    fields = {"tools": [TOOL], "stream": False}
    message = chat(server, "the weather", **fields)[2]["choices"][0]
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
        for event in events(chat(server, "the weather", tools=[TOOL], stream=True)[2])
    ]
    pieces = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert json.loads("".join(piece["function"]["arguments"] for piece in pieces)) == {
        "city": "Zürich"
    }
    assert chunks[-1]["finish_reason"] == "tool_calls"
    # Without tools, or with none wanted, it is all text.
    assert (
        "<tools>" not in say("")
        and chat(server, "the weather", tools=[TOOL], tool_choice="none")[0] == 200
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
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"request_id": "a b"}, "request_id"),
        ({"chat_template": "{{ 'a' * 10**9 }}"}, "messages"),
    ],
)
def test_wrong_requests_are_refused_by_name(server, fields, param):
    status, _, body = chat(server, **fields)
    assert (status, body["error"]["param"]) == (400, param), body
    idle(server)


def test_what_is_not_there(server):
    assert chat(server, model="gpt-4")[0] == 404
    assert chat(server, model="gpt-4")[2]["error"]["code"] == "model_not_found"
    status, _, body = ask(server, "GET", "/nothing")
    assert (status, body["error"]["message"]) == (404, "GET /nothing: Not Found")
    for path, here in {
        "/chat/completions": "/v1/chat/completions",  # a base URL without its /v1
        "/v1/v1/chat/completions": "/v1/chat/completions",
        "/v1/health": "/health",
        "/completion": "/v1/completions",  # llama-server's
    }.items():
        status, _, body = ask(server, "POST", path, {})
        assert (status, body["error"]["message"]) == (
            404,
            f"POST {path}: Not Found; here it is {here}",
        )
    assert ask(server, "GET", "/v1/completions")[0] == 405
    assert ask(server, "POST", "/v1/completions", b"{", JSON)[0] == 400
    assert ask(server, "POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"})[0] == 415


def test_request_ids_come_back(server):
    _, headers, body = chat(server, request_id="mine-1")
    assert body["id"] == "chatcmpl-mine-1"
    assert ask(server, "GET", "/ping", headers={"X-Request-Id": "abc"})[1]["X-Request-Id"] == "abc"
    assert (
        ask(server, "GET", "/ping", headers={"X-Request-Id": "a b\tc"})[1]["X-Request-Id"]
        != "a b\tc"
    )


def test_several_conversations(server):
    """Each is answered as alone; choices are numbered through."""
    turns = [{"role": "user", "content": text} for text in ("hello", "long")]
    alone = [chat(server, turn["content"], n=2)[2] for turn in turns]
    path = "/v1/chat/completions/batch"
    body = {"messages": [[turn] for turn in turns], "n": 2, "return_token_ids": True}
    status, _, found = ask(server, "POST", path, body)
    assert status == 200 and found["object"] == "chat.completion"
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    said = [choice["message"] for one in alone for choice in one["choices"]]
    assert [choice["message"] for choice in found["choices"]] == said
    assert found["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    assert found["choices"][0]["prompt_token_ids"] == found["choices"][1]["prompt_token_ids"]
    assert found["choices"][0]["prompt_token_ids"] != found["choices"][2]["prompt_token_ids"]
    prefix = [turns[0], {"role": "assistant", "content": "So "}]
    goes_on = {"echo": True, "add_generation_prompt": False, "continue_final_message": True}
    _, _, found = ask(server, "POST", path, {"messages": [prefix, prefix], **goes_on})
    assert all(choice["message"]["content"].startswith("So ") for choice in found["choices"])
    for fields, param in (
        ({"stream": True}, "stream"),
        ({"messages": turns}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [turns, [{"role": "x"}]]}, "messages[1][0].role"),
        ({"n": 65}, "n"),
    ):
        status, _, found = ask(server, "POST", path, body | fields)
        assert (status, found["error"]["param"]) == (400, param), found


def test_invocations_are_told_by_their_fields(server):
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
        answers = [ask(server, "POST", where, body) for where in (path, "/invocations")]
        assert [status for status, _, _ in answers] == [200, 200], answers
        own, meant = (
            {k: v for k, v in body.items() if k not in ("id", "created", "usage")}
            for _, _, body in answers
        )
        assert own == meant
    status, _, raw = ask(server, "POST", "/invocations", {"messages": turn, "stream": True})
    assert status == 200 and "".join(
        e["choices"][0]["delta"].get("content", "") for e in events(raw)
    ) == say("hello")
    for body, told in (
        ([], "body: must be a JSON object"),
        ({"model": "quill"}, "body: must have a field that says"),
    ):
        status, _, found = ask(server, "POST", "/invocations", body)
        assert status == 400 and found["error"]["message"].startswith(told)
    status, _, found = ask(server, "POST", "/invocations", {"prompt": "a", "temprature": 1})
    assert (status, found["error"]["param"]) == (400, "temprature")


def test_fields_of_messages_that_are_ignored_are_named(server, caplog):
    messages = [{"role": "user", "content": "hello", "audio": 1, "mood\r\nX-Evil": "glad"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        for streams in (False, True) if "chat" in path else (False,):
            body = {"messages": messages} | ({"stream": True} if streams else {})
            status, headers, _ = ask(server, "POST", path, body)
            assert (status, headers["X-Ignored-Fields"]) == (200, "messages[].?, messages[].audio")
            assert headers["X-Evil"] is None
    said = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert len(said) == 2 and said[1].startswith(
        "messages[].audio is no field that this server knows"
    )
    assert chat(server)[1]["X-Ignored-Fields"] is None


def test_a_client_that_leaves_frees_its_pages(server):
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
            idle(server)
            # of 400: those in which the server hears of it
            assert server.script.steps - steps < 100
    finally:
        server.script.step_seconds = 0.0


def raw_request(server, body, path: str = "/v1/completions") -> socket.socket:
    """A connection with a request sent."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: "
        f"application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)), timeout=120)
    connection.sendall(head.encode() + data)
    return connection


def test_a_step_that_raises_fails_its_requests_and_no_others(server, caplog):
    server.script.fail_next = 1
    status, _, body = chat(server)
    assert (status, body["error"]["code"]) == (500, "engine_error")
    assert chat(server)[0] == 200
    server.script.fail_next = 1
    *_, last = events(chat(server, stream=True)[2])
    assert "failed" in last["error"]["message"]
    idle(server)


def test_a_full_queue_says_when_to_come_again(server):
    server.engine.max_queued = 3
    server.script.hold.clear()
    replies = []
    threads = [
        threading.Thread(target=lambda: replies.append(chat(server, n=2))) for _ in range(12)
    ]
    try:
        for thread in threads:
            thread.start()
        until = time.monotonic() + 60
        while (
            ask(server, "GET", "/load")[2]["server_load"] + len(replies) < 12
            and time.monotonic() < until
        ):
            time.sleep(0.01)
    finally:
        server.script.hold.set()
        for thread in threads:
            thread.join(120)
        server.engine.max_queued = None
    statuses = sorted(status for status, _, _ in replies)
    assert set(statuses) == {200, 429}
    refused = next(reply for reply in replies if reply[0] == 429)
    assert int(refused[1]["Retry-After"]) >= 1 and refused[2]["error"]["param"] == "queue"
    idle(server)


def test_deadline(server):
    server.script.step_seconds = 0.02
    try:
        choice = ask(
            server, "POST", "/v1/completions", {"prompt": "long", "max_tokens": 400, "timeout": 0.3}
        )[2]
        assert choice["choices"][0]["finish_reason"] == "timeout"
    finally:
        server.script.step_seconds = 0.0


def test_status(server):
    assert ask(server, "GET", "/health")[::2] == (
        200,
        {"status": "ok", "models": {"quill": "ready"}},
    )
    assert ask(server, "GET", "/ping")[0] == 200
    assert ask(server, "GET", "/version")[2]["version"]
    assert ask(server, "GET", "/load")[2] == {"server_load": 0}
    assert [model["id"] for model in ask(server, "GET", "/v1/models")[2]["data"]] == ["quill"]
    assert ask(server, "GET", "/v1/models/quill")[2]["max_model_len"] == 1024
    assert b"vllm:num_requests_running" in ask(server, "GET", "/metrics")[2]


def test_what_is_polled_and_parts_of_the_page_are_logged_when_they_fail(server, caplog):
    caplog.set_level(logging.INFO, "quire.access")
    for path in (
        "/",
        "/page/app.js",
        "/page/vendor/purify.min.js",
        "/health",
        "/page/none.js",
        "/version",
    ):
        ask(server, "GET", path)
    until = time.monotonic() + 60
    while len(caplog.records) < 3 and time.monotonic() < until:  # a record follows the answer
        time.sleep(0.01)
    assert [record.path for record in caplog.records] == ["/", "/page/none.js", "/version"]


def test_health_that_fails_is_not_logged(server, caplog):
    """An orchestrator asks every few seconds while a model loads; the log says what the models
    do.
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


def test_tokens(server):
    found = ask(server, "POST", "/tokenize", {"prompt": "Hello there", "return_token_strs": True})[
        2
    ]
    assert found["count"] == len(found["tokens"])
    names = {number: name for name, number in server.engine.tokenizer.get_vocab().items()}
    assert found["token_strs"] == [names[token] for token in found["tokens"]]
    tokens = found["tokens"]
    assert ask(server, "POST", "/detokenize", {"tokens": tokens, "skip_special_tokens": True})[
        2
    ] == {"prompt": "Hello there"}
    assert ask(server, "POST", "/detokenize", {"tokens": [10**6]})[0] == 400
    turns = {"messages": [{"role": "user", "content": "Hello"}]}
    prompt = ask(
        server, "POST", "/v1/chat/completions", {**turns, "max_tokens": 1, "return_token_ids": True}
    )[2]
    assert ask(server, "POST", "/tokenize", turns)[2]["tokens"] == prompt["prompt_token_ids"]


def test_pause_and_resume(server):
    assert ask(server, "POST", "/pause", b"")[2] == {"is_paused": True}
    replies = []
    thread = threading.Thread(target=lambda: replies.append(chat(server)))
    thread.start()
    time.sleep(0.2)
    assert not replies
    ask(server, "POST", "/resume", b"")
    thread.join(120)
    assert replies[0][0] == 200


@pytest.mark.parametrize("path", ["/pause", "/sleep?level=2"])
@pytest.mark.parametrize("streams", [False, True])
def test_timeout_is_kept_while_no_step_runs(server, path, streams):
    """A request whose time is up ends with what it has, though the engine sleeps or is paused."""
    server.script.step_seconds = 0.02
    answers = []
    body = {"prompt": "long", "max_tokens": 400, "timeout": 0.5, "stream": streams}
    thread = threading.Thread(
        target=lambda: answers.append(ask(server, "POST", "/v1/completions", body)[2])
    )
    try:
        thread.start()
        until = time.monotonic() + 60
        while not server.engine.scheduler.running and time.monotonic() < until:
            time.sleep(0.005)
        assert ask(server, "POST", path, b"")[0] == 200
        assert (
            server.engine.lifecycle.is_asleep or server.service.models.models[0].llm.thread.paused
        )
        thread.join(60)
        found = events(answers[0])[-1] if streams else answers[0]
        assert found["choices"][0]["finish_reason"] == "timeout"
    finally:
        server.script.step_seconds = 0.0
        ask(server, "POST", "/wake_up", b"")
        ask(server, "POST", "/resume", b"")
        thread.join(60)
    idle(server)


def test_timeout_includes_the_wait_for_a_model():
    """A model that cannot be awake yet does not hold a request beyond its time."""
    first, second = (scripted(say) for _ in range(2))
    models = [model_of(engine, name) for (engine, _), name in ((first, "a"), (second, "b"))]
    with served(*models, max_loaded=1) as state:
        first[1].hold.clear()
        holder = threading.Thread(
            target=ask, args=(state, "POST", "/v1/completions", {"prompt": "x", "model": "a"})
        )
        holder.start()
        try:
            status, _, body = ask(
                state, "POST", "/v1/completions", {"prompt": "x", "model": "b", "timeout": 0.3}
            )
        finally:
            first[1].hold.set()
            holder.join(60)
        assert (status, body["error"]["param"]) == (408, "timeout")
        assert (
            ask(state, "POST", "/v1/completions", {"prompt": "x", "model": "b", "timeout": 60})[0]
            == 200
        )


def test_wake_up_that_failed_can_be_repeated(server, caplog):
    """Whoever waits for the attempt learns that it failed; the next attempt may succeed."""
    runner = server.engine.runner
    load_weights, runner.load_weights = runner.load_weights, lambda: 1 / 0
    try:
        assert ask(server, "POST", "/sleep?level=2", b"")[2] == {"is_sleeping": True}
        for method, path, body in (
            ("POST", "/wake_up", b""),
            ("POST", "/v1/completions", {"prompt": "hello"}),
        ):
            status, _, found = ask(server, method, path, body)
            assert status == 503 and "could not be woken up" in found["error"]["message"]
        assert ask(server, "GET", "/is_sleeping")[2] == {"is_sleeping": True}
    finally:
        runner.load_weights = load_weights
    assert ask(server, "POST", "/wake_up", b"")[2] == {"is_sleeping": False}
    assert chat(server)[0] == 200
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
        status, _, body = ask(server, method, path, b"" if method == "POST" else None)
        assert (status, body["error"]["param"]) == (400, param)


def test_an_address_that_cannot_be_had_is_one_line(server):
    port = int(server.url.rpartition(":")[2])
    for settings, says in [
        (
            {"port": port},
            f"port is {port}, where another program listens on 127.0.0.1: .*--port {port + 1}",
        ),
        ({"host": "no such host"}, "cannot listen on host 'no such host', port 8000: "),
        ({"uds": "/no/such/folder/socket"}, "uds is '/no/such/folder/socket': "),
    ]:
        service = Service(Models([model_of(server.engine)]), ServerSettings(**settings))
        with pytest.raises(ModelError, match=says) as caught:
            asyncio.run(serve(service, lambda address: None))
        assert "\n" not in str(caught.value)


def test_a_prompt_is_cut_before_its_length_is_judged(server):
    """By hand: what the whole prompt's last tokens are, its end alone has too."""
    text = "0123456789 " * 40_000
    short = {
        "prompt": "0123456789 " * 4,
        "max_tokens": 1,
        "temperature": 0,
        "truncate_prompt_tokens": 9,
    }
    status, _, body = ask(
        server, "POST", "/v1/completions", short | {"prompt": text, "return_token_ids": True}
    )
    assert status == 200 and body["usage"]["prompt_tokens"] == 9
    end = ask(server, "POST", "/v1/completions", short | {"return_token_ids": True})[2]
    assert body["choices"][0]["prompt_token_ids"] == end["choices"][0]["prompt_token_ids"]
    messages = [{"role": "user", "content": text}]
    for side in ("left", "right"):
        given = {"messages": messages, "truncate_prompt_tokens": -1, "truncation_side": side}
        status, _, body = ask(server, "POST", "/v1/chat/completions", given)
        assert status == 200, body
        given = {"input": text, "truncate_prompt_tokens": 5, "truncation_side": side}
        status, _, body = ask(server, "POST", "/v1/embeddings", given)
        assert status == 200 and body["usage"]["prompt_tokens"] == 5
    for path, fields in [
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": messages}),
    ]:
        status, _, body = ask(server, "POST", path, fields)
        assert (
            status == 400
            and "characters; this model's maximum context length" in body["error"]["message"]
        )


def test_a_prompt_that_cannot_fit_is_refused_before_all_of_it_is_tokenised(server, monkeypatch):
    """Of ordinary text a few characters for each token of the model's length are tokenised;
    counting reads all.
    """
    max_len = server.engine.max_len
    tokenizer = server.engine.tokenizer
    lengths: list[int] = []
    encode = tokenizer.encode

    def recorded(text: str, **options) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", recorded)
    text = "0123456789 " * max_len
    messages = [{"role": "user", "content": text}]
    for path, fields in [
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": messages}),
    ]:
        lengths.clear()
        status, _, body = ask(server, "POST", path, fields)
        message = body["error"]["message"]
        assert status == 400 and f"maximum context length is {max_len} tokens" in message
        assert f"of which the first {8 * max_len} are " in message
        assert lengths == [8 * max_len]
    short = "word " * max_len  # more characters than tokens, and yet all of it is tokenised
    lengths.clear()
    assert ask(server, "POST", "/v1/completions", {"prompt": short})[0] == 400
    assert lengths == [len(short)]
    lengths.clear()
    counted = ask(server, "POST", "/v1/messages/count_tokens", {"messages": messages})[2]
    assert counted["input_tokens"] > 8 * max_len and lengths[0] > len(text)


@pytest.mark.parametrize("long", [1, 10_000])
def test_the_side_on_which_a_prompt_is_cut(server, long):
    """By hand: the tokens of what stays; also where the other end is not made tokens at all."""
    text = "one two three " + "and more " * long + "four five six"
    asked = {"prompt": text, "max_tokens": 1, "truncate_prompt_tokens": 4, "return_token_ids": True}

    def read(**chosen) -> list[int]:
        status, _, body = ask(server, "POST", "/v1/completions", asked | chosen)
        assert status == 200, body
        return body["choices"][0]["prompt_token_ids"]

    tokens = server.engine.tokenizer.encode(text)
    assert read() == read(truncation_side="left") == tokens[-4:]
    assert read(truncation_side="right") == tokens[:4]
    assert read(prompt=tokens, truncation_side="right") == tokens[:4]


def test_log_probabilities_of_chosen_tokens(server):
    """At every position the token itself and those that were asked for, whatever is likely; whole
    and streamed.
    """
    ids = [1000, 3, 77]
    asked = {
        "logprobs": True,
        "top_logprobs": 1,
        "logprob_token_ids": ids,
        "return_tokens_as_token_ids": True,
    }
    # as the script has it
    told = {f"token_id:{token}": -1.0 - place for place, token in enumerate(ids)}
    content = chat(server, **asked)[2]["choices"][0]["logprobs"]["content"]
    streamed = [event["choices"] for event in events(chat(server, **asked, stream=True)[2])]
    assert [
        entry for [part] in streamed if part["logprobs"] for entry in part["logprobs"]["content"]
    ] == content
    for entry in content:
        found = {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
        assert list(found) == [entry["token"], *told] and found == told | {entry["token"]: -0.5}
    asked = {
        "prompt": "hello",
        "logprobs": 2,
        "logprob_token_ids": ids,
        "return_tokens_as_token_ids": True,
    }
    status, _, body = ask(server, "POST", "/v1/completions", asked)
    tops = body["choices"][0]["logprobs"]["top_logprobs"]
    assert (
        status == 200
        and tops
        and all(told.items() <= top.items() and len(top) == 4 for top in tops)
    )


@pytest.mark.parametrize(
    ("path", "given", "says"),
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
def test_chosen_tokens_that_are_refused(server, path, given, says):
    prompt = (
        {"prompt": "hello"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "hello"}]}
    )
    status, _, body = ask(server, "POST", path, prompt | given)
    assert (
        status == 400
        and body["error"]["param"].startswith("logprob_token_ids")
        and says in body["error"]["message"]
    )


def test_what_the_tokenizer_is_is_told_where_it_is_wanted(server):
    """The file of the bundled model, with the template of this server; without the option there is
    no such path.
    """
    assert ask(server, "GET", "/tokenizer_info")[0] == 404
    assert "/tokenizer_info" not in ask(server, "GET", "/openapi.json")[2]["paths"]
    with served(
        model_of(scripted(say)[0]), formats=FORMATS, enable_tokenizer_info_endpoint=True
    ) as state:
        status, _, found = ask(state, "GET", "/tokenizer_info?model=quill")
        assert status == 200 and found == ask(state, "GET", "/tokenizer_info")[2]
        assert (found["tokenizer_class"], found["eos_token"]) == (
            "PreTrainedTokenizerFast",
            "<|end|>",
        )
        assert found["chat_template"] == FORMATS.chat_template
        length = ask(state, "POST", "/tokenize", {"prompt": "hello"})[2]["max_model_len"]
        assert found["model_max_length"] == length
        assert ask(state, "GET", "/tokenizer_info?model=other")[0] == 404
        assert "get" in ask(state, "GET", "/openapi.json")[2]["paths"]["/tokenizer_info"]


def test_more_log_probabilities_than_the_server_lists_are_refused(server):
    for path, given, name in [
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
        asked = {text: "hello"} if text else {"messages": [{"role": "user", "content": "hello"}]}
        status, _, body = ask(server, "POST", path, asked | given)
        assert status == 400 and body["error"]["param"] == name
        assert "must be at most the engine's max_logprobs, 20" in body["error"]["message"]


def test_the_whole_vocabulary_over_http():
    """Of a server that lists it, -1 is all of it, as a distribution, in every form."""
    options = make_options(
        None, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=128, max_logprobs=-1
    )
    engine = make_engine(options)
    vocabulary = engine.config.vocab_size

    def check(logprobs: list[float]) -> None:
        assert math.fsum(map(math.exp, logprobs)) == pytest.approx(1, abs=1e-4)

    with served(model_of(engine)) as state:
        named = {"max_tokens": 2, "temperature": 0, "return_tokens_as_token_ids": True}
        asked = named | {
            "messages": [{"role": "user", "content": "hello"}],
            "logprobs": True,
            "top_logprobs": -1,
        }
        status, _, body = ask(state, "POST", "/v1/chat/completions", asked)
        assert status == 200, body
        for entry in body["choices"][0]["logprobs"]["content"]:
            found = {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            assert len(found) == vocabulary and found[entry["token"]] == entry["logprob"]
            check(list(found.values()))
        asked = named | {"prompt": "hello", "logprobs": -1, "prompt_logprobs": -1}
        status, _, body = ask(state, "POST", "/v1/completions", asked)
        assert status == 200, body
        for found in body["choices"][0]["logprobs"]["top_logprobs"]:
            assert len(found) == vocabulary
            check(list(found.values()))
        for entries in body["choices"][0]["prompt_logprobs"][1:]:
            check([entry["logprob"] for entry in entries.values()])
        asked = {"input": "hello", "max_output_tokens": 1, "top_logprobs": -1}
        asked |= {"include": ["message.output_text.logprobs"], "temperature": 0}
        status, _, body = ask(state, "POST", "/v1/responses", asked)
        assert status == 200, body
        [entry] = body["output"][0]["content"][0]["logprobs"]
        assert len(entry["top_logprobs"]) == vocabulary


def test_the_times_of_one_answer():
    """Whole and in the last chunk of a stream, where the server tells them; of several answers
    there are none.
    """
    with served(
        model_of(scripted(say)[0]), formats=FORMATS, enable_per_request_metrics=True
    ) as state:
        messages = {"messages": [{"role": "user", "content": "long"}], "max_tokens": 9}
        for path, asked in [
            ("/v1/chat/completions", messages),
            ("/v1/completions", {"prompt": "long", "max_tokens": 9}),
        ]:
            began = time.monotonic()
            whole = ask(state, "POST", path, asked)[2]["metrics"]
            streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
            *chunks, last = events(ask(state, "POST", path, streamed)[2])
            took = (time.monotonic() - began) * 1000
            assert not any("metrics" in chunk for chunk in chunks)
            for found in (whole, last["metrics"]):
                reading = found["time_to_first_token_ms"]
                writing = found["generation_time_ms"]
                assert reading > 0 and writing >= 0 <= found["queue_time_ms"]
                assert found["queue_time_ms"] + reading + writing < took
                assert math.isclose(found["mean_itl_ms"] * 8, writing)
                assert math.isclose(found["tokens_per_second"] * (reading + writing), 9000)
            assert (
                "mean_itl_ms"
                not in ask(state, "POST", path, asked | {"max_tokens": 1})[2]["metrics"]
            )
            two = ask(state, "POST", path, asked | {"n": 2})[2]
            assert isinstance(two, dict) and "metrics" not in two


def test_the_usage_that_nobody_asked_for():
    """Each chunk has that so far, and the last one all; what has other words for it is as
    before.
    """
    with served(
        model_of(scripted(say)[0]), formats=FORMATS, enable_force_include_usage=True
    ) as state:
        messages = {"messages": [{"role": "user", "content": "hello"}]}
        for path, asked in [
            ("/v1/chat/completions", messages),
            ("/v1/completions", {"prompt": "hello"}),
        ]:
            for more in ({}, {"stream_options": {"include_usage": False}}):
                chunks = events(
                    ask(state, "POST", path, {**asked, **more, "stream": True, "max_tokens": 5})[2]
                )
                counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
                assert (
                    counts == sorted(counts) and counts[-2:] == [5, 5] and not chunks[-1]["choices"]
                )
                assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
            whole = ask(state, "POST", path, {**asked, "max_tokens": 5})[2]
            assert whole["usage"] == chunks[-1]["usage"]
        for path, asked in [
            ("/v1/messages", messages | {"max_tokens": 5}),
            ("/v1/responses", {"input": "hello"}),
        ]:
            assert ask(state, "POST", path, asked | {"stream": True})[0] == 200
