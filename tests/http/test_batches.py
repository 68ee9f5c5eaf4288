"""Files and batches, as the official clients use them: answers, errors, cancelling, bounds, and who
sees what.
"""

import io
import json
import time
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from quire.serving.api.errors import RequestError
from quire.serving.http import batches
from quire.serving.http.errors import HttpError
from quire.serving.http.files import BATCH, StoredFiles
from quire.serving.http.multipart import parse_form
from quire.tests.support.conformance import shows
from quire.tests.support.served import FORMATS
from quire.tests.support.talk import frees_all, said, scripted_server, until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    """Two tenants; little is kept."""
    with scripted_server(
        FORMATS, api_keys=("one", "two"), max_file_bytes=40_000, max_batches=3
    ) as state:
        yield state


@pytest.fixture
def ask(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as client:
        yield client
        for file in client.files.list():
            client.files.delete(file.id)
    frees_all(server)


@pytest.fixture
def ask_other(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="two", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="one", max_retries=0) as client:
        yield client
    frees_all(server)


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def upload(client: openai.OpenAI, *lines: Any, name: str = "in.jsonl", **more: Any) -> Any:
    data = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines).encode()
    return client.files.create(file=(name, io.BytesIO(data)), purpose="batch", **more)


def begin(client: openai.OpenAI, *lines: Any, endpoint: Any = CHAT, **more: Any) -> Any:
    file = upload(client, *lines)
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


def ended(client: Any, batch: Any) -> Any:
    """The batch when it is over."""
    found = []
    until(
        lambda: (
            found.append(client.retrieve(batch.id))
            or getattr(found[-1], "status", None) in batches.ENDED
            or getattr(found[-1], "processing_status", None) == "ended"
        ),
        20,
    )
    return found[-1]


def lines_of(client: openai.OpenAI, name: str | None) -> list[Any]:
    assert name is not None
    return [json.loads(one) for one in client.files.content(name).text.splitlines()]


@shows("openai", "files.create, list, retrieve, content, delete")
def test_files(ask):
    """A file comes back as it was; it can have an end."""
    data = bytes(range(256)) + b"\r\n--x\r\n\r\n"
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    file = ask.files.create(file=("ä ö.jsonl", data), purpose="batch", expires_after=expires)
    assert (file.filename, file.bytes, file.purpose, file.object) == (
        "ä ö.jsonl",
        len(data),
        "batch",
        "file",
    )
    assert file.expires_at == file.created_at + 3600
    assert ask.files.content(file.id).content == data
    other = upload(ask, "{}", name="b")
    assert [one.id for one in ask.files.list()] == [other.id, file.id]
    # the client asks for both
    assert [one.id for one in ask.files.list(order="asc", limit=1)] == [file.id, other.id]
    assert not list(ask.files.list(purpose="batch_output"))
    assert ask.files.retrieve(file.id) == file
    assert ask.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        ask.files.retrieve(file.id)
    for fields, message in (
        ({"purpose": "assistants"}, "purpose: must be 'batch'"),
        (
            {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 5}},
            "expires_after.seconds: must be",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            ask.files.create(file=b"x", **fields)


@shows("openai", "batches.create, retrieve, list; the files of results and of errors")
def test_a_batch(ask):
    """Each line is answered or has an error, in their order; live requests go first."""
    batch = begin(
        ask,
        line("a", messages=turn("hello")),
        line("wrong", messages=turn("hello"), temperature=-1),
        "{",
        line("elsewhere", url="/v1/completions", prompt="x"),
        line("long", messages=turn("word " * 2000)),
        line("unknown", model="gpt", messages=turn("hello")),
        line("b", messages=turn("bye"), n=2),
        metadata={"who": "me"},
    )
    assert batch.status in ("validating", "in_progress") and batch.metadata == {"who": "me"}
    found = ended(ask.batches, batch)
    assert found.status == "completed" and found.errors is None
    assert (
        found.request_counts.total,
        found.request_counts.completed,
        found.request_counts.failed,
    ) == (7, 2, 5)
    assert (
        found.created_at
        <= found.in_progress_at
        <= found.finalizing_at
        <= found.completed_at
        < found.expires_at
    )
    first, last = lines_of(ask, found.output_file_id)
    assert (first["custom_id"], last["custom_id"]) == ("a", "b") and first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"] == said("hello")
    assert len(last["response"]["body"]["choices"]) == 2
    errors = {one["error"]["line"]: one["error"] for one in lines_of(ask, found.error_file_id)}
    assert [*errors] == [2, 3, 4, 5, 6]
    assert errors[2]["param"] == "body.temperature" and errors[3]["message"].startswith(
        "line 3: must be JSON"
    )
    assert "must be /v1/chat/completions" in errors[4]["message"]
    assert errors[5]["code"] == "context_length_exceeded" and errors[6]["code"] == "model_not_found"
    assert [one.id for one in ask.batches.list(limit=1)][0] == batch.id
    assert {one.purpose for one in ask.files.list()} == {"batch", "batch_output"}
    done = ended(
        ask.batches,
        begin(
            ask,
            line("c", "/v1/completions", prompt="<user>hi<assistant>"),
            endpoint="/v1/completions",
        ),
    )
    (only,) = lines_of(ask, done.output_file_id)
    assert (
        only["response"]["body"]["choices"][0]["text"].startswith("You")
        and done.error_file_id is None
    )


@shows("openai", "batches.cancel")
def test_cancelling(server, ask):
    """What is answered is kept, the rest ends; a batch that waits for another ends too."""
    server.script.step_seconds = 0.02
    try:
        batch = begin(
            ask,
            line("short", messages=turn("hi")),
            *(line(str(i), messages=turn("count")) for i in range(40)),
        )
        waits = begin(ask, line("x", messages=turn("hi")))
        until(lambda: ask.batches.retrieve(batch.id).request_counts.completed)
        assert ask.batches.cancel(waits.id).status in ("cancelling", "cancelled")
        assert ask.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        found = ended(ask.batches, batch)
        assert found.status == "cancelled" and 1 <= found.request_counts.completed < 41
        assert [one["custom_id"] for one in lines_of(ask, found.output_file_id)][0] == "short"
        assert found.error_file_id is None and found.cancelled_at >= found.cancelling_at
        assert ended(ask.batches, waits).output_file_id is None
    finally:
        server.script.step_seconds = 0.0


def test_live_requests_go_first(server, ask):
    """A batch that fills the model leaves room for who waits."""
    server.script.step_seconds = 0.01
    try:
        batch = begin(ask, *(line(str(i), messages=turn("count")) for i in range(40)))
        until(lambda: ask.batches.retrieve(batch.id).status == "in_progress")
        live = ask.chat.completions.create(model="quill", messages=turn("hello"))
        assert live.choices[0].message.content == said("hello")
        assert ask.batches.retrieve(batch.id).status == "in_progress"
        ask.batches.cancel(batch.id)
        ended(ask.batches, batch)
    finally:
        server.script.step_seconds = 0.0


def test_time_that_is_over(ask, monkeypatch):
    monkeypatch.setattr(batches, "DAY", 0.0)
    found = ended(ask.batches, begin(ask, line("a", messages=turn("hello"))))
    assert found.status == "expired" and found.output_file_id is None
    (only,) = lines_of(ask, found.error_file_id)
    assert only["error"]["code"] == "batch_expired"


def test_what_is_refused(ask, ask_other):
    file = upload(ask, line("a", messages=turn("hello")))
    for client in (ask_other, ask):
        name = file.id if client is ask_other else "file-0"  # a tenant sees only its own
        with pytest.raises(openai.NotFoundError) as caught:
            client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
        assert caught.value.param == "input_file_id"
    with pytest.raises(openai.BadRequestError, match="endpoint: must be /v1/chat/completions"):
        ask.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
    with pytest.raises(openai.BadRequestError, match="a file of 1 to 50000 requests, got 0"):
        begin(ask, "")
    with pytest.raises(openai.NotFoundError):
        ask.batches.retrieve("batch_0")
    done = ended(
        ask.batches,
        ask.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
    )
    with pytest.raises(
        openai.BadRequestError, match="id: cannot be cancelled: the batch is completed"
    ):
        ask.batches.cancel(done.id)
    with pytest.raises(openai.NotFoundError):
        ask_other.batches.retrieve(done.id)
    assert not list(ask_other.batches.list()) and not list(ask_other.files.list())


def test_bounds(server, ask):
    with pytest.raises(openai.APIStatusError) as caught:
        ask.files.create(file=b"x" * 50_000, purpose="batch")
    assert caught.value.status_code == 413 and "--max-file-bytes" in caught.value.message
    kept = server.service.batches
    file = upload(ask, line("a", messages=turn("hello")))
    wide = upload(ask, *(line(str(i), messages=turn("hello")) for i in range(60)))
    for _ in range(5):  # those that are over make room
        ended(
            ask.batches,
            ask.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
        )
        assert kept.storage.usage(BATCH).entries <= 3
    full = ended(
        ask.batches,
        ask.batches.create(input_file_id=wide.id, endpoint=CHAT, completion_window="24h"),
    )
    assert full.status == "failed" and full.errors.data[0].code == "store_full"
    answered = lines_of(ask, full.output_file_id)  # what was answered before is there
    assert 1 <= len(
        answered
    ) == full.request_counts.completed < 60 and full.request_counts.failed == 60 - len(answered)
    ask.files.delete(full.output_file_id)
    server.script.hold.clear()
    try:
        begun = [
            ask.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            for _ in range(3)
        ]
        with pytest.raises(openai.RateLimitError, match="--max-batches"):
            ask.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    finally:
        server.script.hold.set()
    assert {ended(ask.batches, one).status for one in begun} == {"completed"}


@shows("anthropic", "messages.batches.create, retrieve, list, results, cancel, delete")
def test_message_batches(server, claude):
    """Each request has its result: a message, an error, or that it was cancelled."""
    asked: Any = {"model": "quill", "max_tokens": 99, "messages": turn("hello")}
    batch = claude.messages.batches.create(
        requests=[
            {"custom_id": "a", "params": asked},
            {"custom_id": "b", "params": asked | {"temperature": -1}},
            {"custom_id": "c", "params": asked | {"system": "Be kind."}},
        ]
    )
    assert batch.processing_status == "in_progress" and batch.request_counts.processing == 3
    found = ended(claude.messages.batches, batch)
    counts = found.request_counts
    assert (counts.succeeded, counts.errored, counts.processing, counts.canceled) == (2, 1, 0, 0)
    assert found.created_at <= found.ended_at < found.expires_at
    first, wrong, last = claude.messages.batches.results(batch.id)
    assert (
        first.result.message.content[0].text == last.result.message.content[0].text == said("hello")
    )
    assert (
        wrong.result.error.error.type == "invalid_request_error"
        and "temperature" in wrong.result.error.error.message
    )
    assert [one.id for one in claude.messages.batches.list(limit=1)][0] == batch.id
    server.script.hold.clear()
    try:
        other = claude.messages.batches.create(requests=[{"custom_id": "x", "params": asked}])
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            claude.messages.batches.delete(other.id)
        with pytest.raises(anthropic.AnthropicError, match="results_url"):
            claude.messages.batches.results(other.id)
        assert claude.messages.batches.cancel(other.id).cancel_initiated_at is not None
    finally:
        server.script.hold.set()
    found = ended(claude.messages.batches, other)
    assert [one.result.type for one in claude.messages.batches.results(other.id)] == ["canceled"]
    assert claude.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(batch.id)
    same = {"custom_id": "a", "params": asked}
    with pytest.raises(anthropic.BadRequestError, match=r"requests\[1\].custom_id: must differ"):
        claude.messages.batches.create(requests=[same, same])


def test_a_form_from_another_site_is_refused(server):
    """A page can send forms unasked; it has no key here, but a server without keys must refuse
    it too.
    """
    for headers, status in (({}, 200), ({"Origin": "http://other.example"}, 415)):
        found = httpx2.post(
            f"{server.url}/v1/files",
            headers={"Authorization": "Bearer one", **headers},
            files={"file": ("a", b"x")},
            data={"purpose": "batch"},
        )
        assert found.status_code == status
    elsewhere = httpx2.post(
        f"{server.url}{CHAT}", headers={"Authorization": "Bearer one"}, files={"file": ("a", b"x")}
    )
    assert elsewhere.status_code == 415


KIND = "multipart/form-data; boundary=x"


def form(*parts: str) -> bytes:
    return "".join(f"--x\r\n{part}\r\n" for part in parts).encode() + b"--x--\r\n"


def test_forms():
    found = parse_form(
        KIND,
        form(
            'Content-Disposition: form-data; name="a"\r\n\r\n1\r\n2',
            'content-disposition: form-data; name=b; filename="f"\r\nX: y\r\n\r\n',
        ),
    )
    assert {name: tuple(part) for name, part in found.items()} == {
        "a": (b"1\r\n2", None),
        "b": (b"", "f"),
    }
    assert parse_form(KIND, b"before\r\n" + form()) == {}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", form()),
        ("multipart/form-data; boundary=" + "x" * 71, form()),
        (KIND, b""),
        (KIND, b"--y--"),
        (KIND, form("name=a")),
        (KIND, form('Content-Disposition: form-data; name="a"')),
        (KIND, form("Content-Disposition: form-data\r\n\r\nx")),
        (KIND, form('Content-Disposition: form-data; name="a"\r\n\r\nx')[:-6]),
        (KIND, form(f'X: {"y" * 5000}\r\nContent-Disposition: form-data; name="a"\r\n\r\nx')),
        (KIND, form(*['Content-Disposition: form-data; name="a"\r\n\r\nx'] * 2)),
        (KIND, form(*(f'Content-Disposition: form-data; name="{i}"\r\n\r\nx' for i in range(17)))),
        (KIND, b"--x\r\n" * 100_000),
        ("multipart/form-data; boundary*=\0''x", form()),
        (KIND, form("Content-Disposition: form-data; name*=\0''a\r\n\r\nx")),
        (KIND, form("Content-Disposition: form-data; name=a; filename*=\0''a\r\n\r\nx")),
        (KIND, form("Content-Disposition: form-data; name=a; filename*=idna''%ff\r\n\r\nx")),
    ],
)
def test_wrong_forms(kind, body):
    with pytest.raises(RequestError):
        parse_form(kind, body)


def test_files_that_expire(monkeypatch):
    files = StoredFiles(1000)
    now = time.time()
    first = files.put("k", "a", "batch", [b"x" * 400, b"y" * 300], seconds=60)
    with pytest.raises(HttpError, match=r"has 500 bytes, and \d+ of 1000 bytes"):
        files.put("other", "b", "batch", [b"x" * 500])
    assert b"".join(files.pieces("k", first.id)) == b"x" * 400 + b"y" * 300
    files.use("k", first.id)
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert files.get("k", first.id) == first  # a batch reads it
    files.release("k", first.id)
    files.put("other", "b", "batch", [b"x" * 500])
    assert files.of("k") == []
    with pytest.raises(HttpError, match="there is no file"):
        files.get("k", first.id)
