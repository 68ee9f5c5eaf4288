"""Files and batches, as used by the official clients: results, errors, cancellation, limits and
tenant isolation.
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

CHAT_PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    """A server with two tenants and small storage limits."""
    with scripted_server(
        FORMATS, api_keys=("one", "two"), max_file_bytes=40_000, max_batches=3
    ) as state:
        yield state


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as client:
        yield client
        for file in client.files.list():
            client.files.delete(file.id)
    frees_all(server)


@pytest.fixture
def other_client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="two", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="one", max_retries=0) as client:
        yield client
    frees_all(server)


def batch_line(name: str, url: str = CHAT_PATH, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def user_messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def upload_file(client: openai.OpenAI, *lines: Any, name: str = "in.jsonl", **fields: Any) -> Any:
    data = "\n".join(
        request_line if isinstance(request_line, str) else json.dumps(request_line)
        for request_line in lines
    ).encode()
    return client.files.create(file=(name, io.BytesIO(data)), purpose="batch", **fields)


def create_batch(
    client: openai.OpenAI, *lines: Any, endpoint: Any = CHAT_PATH, **fields: Any
) -> Any:
    file = upload_file(client, *lines)
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


def wait_for_end(client: Any, batch: Any) -> Any:
    """Wait until the batch has ended; return its last state."""
    batches_seen = []
    until(
        lambda: (
            batches_seen.append(client.retrieve(batch.id))
            or getattr(batches_seen[-1], "status", None) in batches.ENDED
            or getattr(batches_seen[-1], "processing_status", None) == "ended"
        ),
        20,
    )
    return batches_seen[-1]


def read_lines(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [
        json.loads(result_line) for result_line in client.files.content(file_id).text.splitlines()
    ]


@shows("openai", "files.create, list, retrieve, content, delete")
def test_file_upload_and_download(client):
    """A file's content is unchanged; it may have an expiry time."""
    data = bytes(range(256)) + b"\r\n--x\r\n\r\n"
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("ä ö.jsonl", data), purpose="batch", expires_after=expires)
    assert (file.filename, file.bytes, file.purpose, file.object) == (
        "ä ö.jsonl",
        len(data),
        "batch",
        "file",
    )
    assert file.expires_at == file.created_at + 3600
    assert client.files.content(file.id).content == data
    second_file = upload_file(client, "{}", name="b")
    assert [uploaded.id for uploaded in client.files.list()] == [second_file.id, file.id]
    # the client fetches all pages
    assert [uploaded.id for uploaded in client.files.list(order="asc", limit=1)] == [
        file.id,
        second_file.id,
    ]
    assert not list(client.files.list(purpose="batch_output"))
    assert client.files.retrieve(file.id) == file
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    for fields, message in (
        ({"purpose": "assistants"}, "purpose: must be 'batch'"),
        (
            {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 5}},
            "expires_after.seconds: must be",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.files.create(file=b"x", **fields)


@shows("openai", "batches.create, retrieve, list; the files of results and of errors")
def test_batch_results_and_errors(client):
    """Each line has a result or an error, in the order of the input."""
    batch = create_batch(
        client,
        batch_line("a", messages=user_messages("hello")),
        batch_line("wrong", messages=user_messages("hello"), temperature=-1),
        "{",
        batch_line("elsewhere", url="/v1/completions", prompt="x"),
        batch_line("long", messages=user_messages("word " * 2000)),
        batch_line("unknown", model="gpt", messages=user_messages("hello")),
        batch_line("b", messages=user_messages("bye"), n=2),
        metadata={"who": "me"},
    )
    assert batch.status in ("validating", "in_progress") and batch.metadata == {"who": "me"}
    finished = wait_for_end(client.batches, batch)
    assert finished.status == "completed" and finished.errors is None
    assert (
        finished.request_counts.total,
        finished.request_counts.completed,
        finished.request_counts.failed,
    ) == (7, 2, 5)
    assert (
        finished.created_at
        <= finished.in_progress_at
        <= finished.finalizing_at
        <= finished.completed_at
        < finished.expires_at
    )
    first, last = read_lines(client, finished.output_file_id)
    assert (first["custom_id"], last["custom_id"]) == ("a", "b") and first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["choices"][0]["message"]["content"] == said("hello")
    assert len(last["response"]["body"]["choices"]) == 2
    errors = {
        result_line["error"]["line"]: result_line["error"]
        for result_line in read_lines(client, finished.error_file_id)
    }
    assert [*errors] == [2, 3, 4, 5, 6]
    assert errors[2]["param"] == "body.temperature" and errors[3]["message"].startswith(
        "line 3: must be JSON"
    )
    assert "must be /v1/chat/completions" in errors[4]["message"]
    assert errors[5]["code"] == "context_length_exceeded" and errors[6]["code"] == "model_not_found"
    assert [batch.id for batch in client.batches.list(limit=1)][0] == batch.id
    assert {file.purpose for file in client.files.list()} == {"batch", "batch_output"}
    completions_batch = wait_for_end(
        client.batches,
        create_batch(
            client,
            batch_line("c", "/v1/completions", prompt="<user>hi<assistant>"),
            endpoint="/v1/completions",
        ),
    )
    (completion_line,) = read_lines(client, completions_batch.output_file_id)
    assert (
        completion_line["response"]["body"]["choices"][0]["text"].startswith("You")
        and completions_batch.error_file_id is None
    )


@shows("openai", "batches.cancel")
def test_cancelled_batch_keeps_finished_results(server, client):
    """Finished results are kept, other requests end; a batch that is still waiting is cancelled
    too.
    """
    server.script.step_seconds = 0.02
    try:
        batch = create_batch(
            client,
            batch_line("short", messages=user_messages("hi")),
            *(batch_line(str(i), messages=user_messages("count")) for i in range(40)),
        )
        waiting_batch = create_batch(client, batch_line("x", messages=user_messages("hi")))
        until(lambda: client.batches.retrieve(batch.id).request_counts.completed)
        assert client.batches.cancel(waiting_batch.id).status in ("cancelling", "cancelled")
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        cancelled = wait_for_end(client.batches, batch)
        assert cancelled.status == "cancelled" and 1 <= cancelled.request_counts.completed < 41
        assert [
            result_line["custom_id"] for result_line in read_lines(client, cancelled.output_file_id)
        ][0] == "short"
        assert cancelled.error_file_id is None and cancelled.cancelled_at >= cancelled.cancelling_at
        assert wait_for_end(client.batches, waiting_batch).output_file_id is None
    finally:
        server.script.step_seconds = 0.0


def test_live_requests_precede_batch_requests(server, client):
    """A batch that fills the model does not delay other requests."""
    server.script.step_seconds = 0.01
    try:
        batch = create_batch(
            client, *(batch_line(str(i), messages=user_messages("count")) for i in range(40))
        )
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        live = client.chat.completions.create(model="quill", messages=user_messages("hello"))
        assert live.choices[0].message.content == said("hello")
        assert client.batches.retrieve(batch.id).status == "in_progress"
        client.batches.cancel(batch.id)
        wait_for_end(client.batches, batch)
    finally:
        server.script.step_seconds = 0.0


def test_expired_batch(client, monkeypatch):
    monkeypatch.setattr(batches, "DAY", 0.0)
    expired = wait_for_end(
        client.batches, create_batch(client, batch_line("a", messages=user_messages("hello")))
    )
    assert expired.status == "expired" and expired.output_file_id is None
    (error_line,) = read_lines(client, expired.error_file_id)
    assert error_line["error"]["code"] == "batch_expired"


def test_invalid_batch_requests_and_foreign_ids_are_rejected(client, other_client):
    file = upload_file(client, batch_line("a", messages=user_messages("hello")))
    for tenant_client in (other_client, client):
        name = (
            file.id if tenant_client is other_client else "file-0"
        )  # a tenant sees only its own files
        with pytest.raises(openai.NotFoundError) as caught:
            tenant_client.batches.create(
                input_file_id=name, endpoint=CHAT_PATH, completion_window="24h"
            )
        assert caught.value.param == "input_file_id"
    with pytest.raises(openai.BadRequestError, match="endpoint: must be /v1/chat/completions"):
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
        )
    with pytest.raises(openai.BadRequestError, match="a file of 1 to 50000 requests, got 0"):
        create_batch(client, "")
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_0")
    finished = wait_for_end(
        client.batches,
        client.batches.create(input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h"),
    )
    with pytest.raises(
        openai.BadRequestError, match="id: cannot be cancelled: the batch is completed"
    ):
        client.batches.cancel(finished.id)
    with pytest.raises(openai.NotFoundError):
        other_client.batches.retrieve(finished.id)
    assert not list(other_client.batches.list()) and not list(other_client.files.list())


def test_file_and_batch_storage_limits(server, client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=b"x" * 50_000, purpose="batch")
    assert caught.value.status_code == 413 and "--max-file-bytes" in caught.value.message
    stored_batches = server.service.batches
    file = upload_file(client, batch_line("a", messages=user_messages("hello")))
    large_file = upload_file(
        client, *(batch_line(str(i), messages=user_messages("hello")) for i in range(60))
    )
    for _ in range(5):  # finished batches are evicted
        wait_for_end(
            client.batches,
            client.batches.create(
                input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h"
            ),
        )
        assert stored_batches.storage.usage(BATCH).entries <= 3
    overflowing_batch = wait_for_end(
        client.batches,
        client.batches.create(
            input_file_id=large_file.id, endpoint=CHAT_PATH, completion_window="24h"
        ),
    )
    assert (
        overflowing_batch.status == "failed"
        and overflowing_batch.errors.data[0].code == "store_full"
    )
    result_lines = read_lines(
        client, overflowing_batch.output_file_id
    )  # results finished before are kept
    assert (
        1 <= len(result_lines) == overflowing_batch.request_counts.completed < 60
        and overflowing_batch.request_counts.failed == 60 - len(result_lines)
    )
    client.files.delete(overflowing_batch.output_file_id)
    server.script.hold.clear()
    try:
        running_batches = [
            client.batches.create(
                input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h"
            )
            for _ in range(3)
        ]
        with pytest.raises(openai.RateLimitError, match="--max-batches"):
            client.batches.create(
                input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h"
            )
    finally:
        server.script.hold.set()
    assert {wait_for_end(client.batches, batch).status for batch in running_batches} == {
        "completed"
    }


@shows("anthropic", "messages.batches.create, retrieve, list, results, cancel, delete")
def test_message_batches(server, anthropic_client):
    """Each request's result is a message, an error or a cancellation."""
    params: Any = {"model": "quill", "max_tokens": 99, "messages": user_messages("hello")}
    batch = anthropic_client.messages.batches.create(
        requests=[
            {"custom_id": "a", "params": params},
            {"custom_id": "b", "params": params | {"temperature": -1}},
            {"custom_id": "c", "params": params | {"system": "Be kind."}},
        ]
    )
    assert batch.processing_status == "in_progress" and batch.request_counts.processing == 3
    finished = wait_for_end(anthropic_client.messages.batches, batch)
    counts = finished.request_counts
    assert (counts.succeeded, counts.errored, counts.processing, counts.canceled) == (2, 1, 0, 0)
    assert finished.created_at <= finished.ended_at < finished.expires_at
    first_result, error_result, last_result = anthropic_client.messages.batches.results(batch.id)
    assert (
        first_result.result.message.content[0].text
        == last_result.result.message.content[0].text
        == said("hello")
    )
    assert (
        error_result.result.error.error.type == "invalid_request_error"
        and "temperature" in error_result.result.error.error.message
    )
    assert [item.id for item in anthropic_client.messages.batches.list(limit=1)][0] == batch.id
    server.script.hold.clear()
    try:
        held_batch = anthropic_client.messages.batches.create(
            requests=[{"custom_id": "x", "params": params}]
        )
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            anthropic_client.messages.batches.delete(held_batch.id)
        with pytest.raises(anthropic.AnthropicError, match="results_url"):
            anthropic_client.messages.batches.results(held_batch.id)
        assert (
            anthropic_client.messages.batches.cancel(held_batch.id).cancel_initiated_at is not None
        )
    finally:
        server.script.hold.set()
    finished = wait_for_end(anthropic_client.messages.batches, held_batch)
    assert [
        item.result.type for item in anthropic_client.messages.batches.results(held_batch.id)
    ] == ["canceled"]
    assert anthropic_client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.batches.retrieve(batch.id)
    request = {"custom_id": "a", "params": params}
    with pytest.raises(anthropic.BadRequestError, match=r"requests\[1\].custom_id: must differ"):
        anthropic_client.messages.batches.create(requests=[request, request])


def test_cross_origin_form_is_rejected(server):
    """Browsers send forms cross-origin without preflight, so a server without API keys must reject
    them.
    """
    for headers, status in (({}, 200), ({"Origin": "http://other.example"}, 415)):
        response = httpx2.post(
            f"{server.url}/v1/files",
            headers={"Authorization": "Bearer one", **headers},
            files={"file": ("a", b"x")},
            data={"purpose": "batch"},
        )
        assert response.status_code == status
    chat_response = httpx2.post(
        f"{server.url}{CHAT_PATH}",
        headers={"Authorization": "Bearer one"},
        files={"file": ("a", b"x")},
    )
    assert chat_response.status_code == 415


MULTIPART = "multipart/form-data; boundary=x"


def form_body(*fields: str) -> bytes:
    return "".join(f"--x\r\n{field}\r\n" for field in fields).encode() + b"--x--\r\n"


def test_multipart_form_fields():
    fields = parse_form(
        MULTIPART,
        form_body(
            'Content-Disposition: form-data; name="a"\r\n\r\n1\r\n2',
            'content-disposition: form-data; name=b; filename="f"\r\nX: y\r\n\r\n',
        ),
    )
    assert {name: tuple(field) for name, field in fields.items()} == {
        "a": (b"1\r\n2", None),
        "b": (b"", "f"),
    }
    assert parse_form(MULTIPART, b"before\r\n" + form_body()) == {}


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", form_body()),
        ("multipart/form-data; boundary=" + "x" * 71, form_body()),
        (MULTIPART, b""),
        (MULTIPART, b"--y--"),
        (MULTIPART, form_body("name=a")),
        (MULTIPART, form_body('Content-Disposition: form-data; name="a"')),
        (MULTIPART, form_body("Content-Disposition: form-data\r\n\r\nx")),
        (MULTIPART, form_body('Content-Disposition: form-data; name="a"\r\n\r\nx')[:-6]),
        (
            MULTIPART,
            form_body(f'X: {"y" * 5000}\r\nContent-Disposition: form-data; name="a"\r\n\r\nx'),
        ),
        (MULTIPART, form_body(*['Content-Disposition: form-data; name="a"\r\n\r\nx'] * 2)),
        (
            MULTIPART,
            form_body(*(f'Content-Disposition: form-data; name="{i}"\r\n\r\nx' for i in range(17))),
        ),
        (MULTIPART, b"--x\r\n" * 100_000),
        ("multipart/form-data; boundary*=\0''x", form_body()),
        (MULTIPART, form_body("Content-Disposition: form-data; name*=\0''a\r\n\r\nx")),
        (MULTIPART, form_body("Content-Disposition: form-data; name=a; filename*=\0''a\r\n\r\nx")),
        (
            MULTIPART,
            form_body("Content-Disposition: form-data; name=a; filename*=idna''%ff\r\n\r\nx"),
        ),
    ],
)
def test_malformed_multipart_forms_are_rejected(content_type, body):
    with pytest.raises(RequestError):
        parse_form(content_type, body)


def test_file_expiry_and_storage_limit(monkeypatch):
    files = StoredFiles(1000)
    now = time.time()
    file = files.put("k", "a", "batch", [b"x" * 400, b"y" * 300], seconds=60)
    with pytest.raises(HttpError, match=r"has 500 bytes, and \d+ of 1000 bytes"):
        files.put("other", "b", "batch", [b"x" * 500])
    assert b"".join(files.pieces("k", file.id)) == b"x" * 400 + b"y" * 300
    files.use("k", file.id)
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert files.get("k", file.id) == file  # kept while a batch reads it
    files.release("k", file.id)
    files.put("other", "b", "batch", [b"x" * 500])
    assert files.of("k") == []
    with pytest.raises(HttpError, match="there is no file"):
        files.get("k", file.id)
