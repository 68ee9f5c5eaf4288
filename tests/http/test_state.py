"""Server state: it persists in a folder across restarts, is bounded in bytes, and is shared fairly
by API keys.
"""

import gc
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.model.config import ModelError
from quire.serving.api.errors import RequestError
from quire.serving.http.batches import ENDED, Batch, BatchKind, Outcome, Result, split_lines
from quire.serving.http.errors import HttpError
from quire.serving.http.storage import FILE, EntryKey, Storage, StorageFailed
from quire.serving.http.stored import KINDS, StoredResponses
from quire.serving.protocol.answers.answer import ChatRequest
from quire.serving.protocol.batch_file import BatchLine
from quire.tests.support.served import FORMATS
from quire.tests.support.talk import said, scripted_server, until

CHAT_PATH = "/v1/chat/completions"
ENTRY_KEY = EntryKey(None, "file", "x")


def make_client(server: Any, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@contextmanager
def running_server(
    folder: Path | None, **server_settings: Any
) -> Iterator[tuple[Any, openai.OpenAI]]:
    """(a server that stores its state in a folder, a client of it); the server stops immediately at
    the end.
    """
    state_dir = None if folder is None else str(folder)
    server_settings = {
        "api_keys": ("one", "two"),
        "shutdown_grace": 0.0,
        "state_dir": state_dir,
        **server_settings,
    }
    with scripted_server(FORMATS, **server_settings) as server, make_client(server) as client:
        yield server, client


def upload_file(client: openai.OpenAI, texts: list[str]) -> str:
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": CHAT_PATH,
            "body": {"messages": [{"role": "user", "content": text}]},
        }
        for i, text in enumerate(texts)
    ]
    data = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    return client.files.create(file=("in.jsonl", data), purpose="batch").id


def create_batch(client: openai.OpenAI, texts: list[str]) -> Any:
    return client.batches.create(
        input_file_id=upload_file(client, texts), endpoint=CHAT_PATH, completion_window="24h"
    )


def wait_for_end(client: openai.OpenAI, name: str) -> Any:
    until(lambda: client.batches.retrieve(name).status in ENDED)
    return client.batches.retrieve(name)


def batch_texts(client: openai.OpenAI, batch: Any) -> dict[str, str]:
    """The texts of a batch's results by request id; each id occurs once."""
    lines = [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]
    texts = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }
    assert len(texts) == len(lines) and list(texts) == sorted(texts, key=int)
    return texts


def test_restart_restores_all_stored_objects(tmp_path):
    """Responses, conversations, files and batches, finished or not."""
    folder = tmp_path / "state"
    texts = [f"text {i}" for i in range(30)]
    with running_server(folder) as (server, client):
        first_response = client.responses.create(model="quill", input="hello")
        background_stream = client.responses.create(
            model="quill", input="hello", background=True, stream=True
        )
        events = list(background_stream)
        conversation = client.conversations.create(items=[{"role": "user", "content": "hello"}])
        client.responses.create(model="quill", input="more", conversation=conversation.id)
        items = client.conversations.items.list(conversation.id).data
        finished_batch = wait_for_end(client, create_batch(client, texts[:3]).id)
        files = list(client.files.list())
        server.script.step_seconds = 0.005
        running_batch = create_batch(client, texts)
        waiting_batch = create_batch(client, texts[:2])
        until(lambda: client.batches.retrieve(running_batch.id).request_counts.completed >= 3)
        assert client.batches.retrieve(running_batch.id).output_file_id is None  # unfinished
        interrupted = client.responses.create(model="quill", input="count", background=True)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes.pop(folder.name) == 0o700 and FILE in modes and set(modes.values()) == {0o600}

    with running_server(folder) as (server, client):
        assert client.responses.retrieve(first_response.id) == first_response
        assert client.responses.create(
            model="quill", input="again", previous_response_id=first_response.id
        ).output_text
        assert list(client.responses.retrieve(events[0].response.id, stream=True)) == events
        assert client.conversations.items.list(conversation.id).data == items
        failed = client.responses.retrieve(interrupted.id)
        assert failed.status == "failed" and "restarted" in failed.error.message
        assert client.batches.retrieve(finished_batch.id) == finished_batch and batch_texts(
            client, finished_batch
        )["2"] == said("text 2")
        assert {file.id for file in files} <= {file.id for file in client.files.list()}
        for batch, prompts in ((running_batch, texts), (waiting_batch, texts[:2])):
            resumed_batch = wait_for_end(client, batch.id)
            assert (
                resumed_batch.status == "completed"
                and resumed_batch.request_counts.completed == len(prompts)
            )
            assert batch_texts(client, resumed_batch) == {
                str(i): said(text) for i, text in enumerate(prompts)
            }
        with make_client(server, "two") as other_client, pytest.raises(openai.NotFoundError):
            other_client.responses.retrieve(first_response.id)
    storage = Storage(folder)
    usage = storage.usage(*KINDS)
    assert usage.entries > 2
    StoredResponses(2, usage.bytes, storage)  # a server with lower limits
    assert storage.usage(*KINDS).entries == 2
    storage.close()


def test_background_response_of_a_busy_server_fails_after_a_restart(tmp_path):
    """Another request in flight at shutdown does not make it `incomplete`."""
    with ThreadPoolExecutor(1) as pool, running_server(tmp_path) as (server, client):
        server.script.step_seconds = 0.1
        text = "word " * 300  # it is echoed, token by token
        interrupted = client.responses.create(model="quill", input=text, background=True)
        messages = [{"role": "user", "content": text}]
        pool.submit(client.chat.completions.create, model="quill", messages=messages)
        until(lambda: len(server.engine.requests) == 2)
    with running_server(tmp_path) as (server, client):
        assert client.responses.retrieve(interrupted.id).error.code == "server_error"


def test_failed_write_of_a_batch_keeps_the_counts_of_other_threads():
    """The last result does not fit; results written by other threads in the meantime stay
    counted.
    """
    with running_server(None, max_file_bytes=1000) as (server, _):
        batches = server.service.batches
        batch = Batch("batch_1", None, "kind", "file-1", total=4)
        batches.kinds["kind"] = BatchKind(
            None, iter, lambda batch, line, outcome: Result("output_file_id", outcome.body), "p", ()
        )
        error = RequestError("body", "is not read here")
        small_results = [(BatchLine(1, "a", error), Outcome("succeeded", b"x"))]
        large_results = [(BatchLine(2, "b", error), Outcome("succeeded", b"x" * 2000))]
        with ThreadPoolExecutor(1) as pool:
            with batches.storage.lock:
                failing = pool.submit(batches.write, batch, large_results)
                time.sleep(0.05)  # the other thread waits for the lock
                batches.write(batch, small_results)
            with pytest.raises(HttpError, match="max-file-bytes"):
                failing.result()
        assert batch.counts == {"succeeded": 1} and len(batch.files) == 1


def test_cancelled_batch_ends_after_restart(tmp_path):
    with running_server(tmp_path) as (server, client):
        server.script.hold.clear()
        batch = create_batch(client, ["hello"] * 3)
        until(lambda: server.engine.requests)
        name = batch.id
        files = stored_files(server)
        stored = server.service.batches.storage
        entry = stored.get(
            entry_key := EntryKey(
                server.service.batches.get(running_tenant(server), name).key, "batch", name
            )
        )
        stored.put(entry_key, entry | {"status": "cancelling"})
        server.service.batches.save = lambda batch: None  # simulates a kill at this point
        server.script.hold.set()
    with running_server(tmp_path, api_keys=("two",)) as (server, client):
        # The key is no longer accepted, but its data is kept.
        assert not server.service.batches.running
        assert stored_files(server) == files
    with running_server(tmp_path) as (server, client):
        assert wait_for_end(client, name).status == "cancelled"


def stored_files(server: Any) -> set[str]:
    return {entry_key.id for entry_key, _ in server.service.storage.entries(["file"])}


def running_tenant(server: Any) -> str:
    return next(iter(server.service.batches.running)).tenant


def test_batches_of_api_keys_share_capacity(tmp_path):
    """A large batch of one API key does not delay another key's batch; each key has its share of
    the running requests.
    """
    with running_server(None) as (server, client), make_client(server, "two") as other_client:
        server.script.step_seconds = 0.001
        large_batch = create_batch(client, ["hello"] * 200)
        until(lambda: client.batches.retrieve(large_batch.id).request_counts.completed >= 1)
        small_batch = wait_for_end(other_client, create_batch(other_client, ["hello"] * 5).id)
        assert small_batch.status == "completed" and small_batch.request_counts.completed == 5
        assert client.batches.retrieve(large_batch.id).request_counts.completed < 100
        client.batches.cancel(large_batch.id)
        wait_for_end(client, large_batch.id)


def test_waiting_batches_hold_no_requests_in_memory():
    """Many batches may use one file; its requests are read one by one when they are scheduled."""
    with running_server(None) as (server, client):
        server.script.hold.clear()
        file_id = upload_file(client, ["hello"] * 300)
        try:
            for _ in range(20):
                client.batches.create(
                    input_file_id=file_id, endpoint=CHAT_PATH, completion_window="24h"
                )
            until(lambda: server.engine.requests)
            usage = server.service.storage.usage("file", "batch")
            # the file and twenty batch entries
            assert usage.entries <= 22 and usage.bytes < 600_000
            gc.collect()
            num_requests = sum(isinstance(item, ChatRequest) for item in gc.get_objects())
            assert num_requests <= 4 * 16, num_requests
            client.files.delete(file_id)  # the batches keep it
            assert not list(client.files.list())
        finally:
            server.script.hold.set()
        batches = list(client.batches.list())
        for batch in batches:
            client.batches.cancel(batch.id)
        assert {wait_for_end(client, batch.id).status for batch in batches} == {"cancelled"}
        until(lambda: file_id not in stored_files(server))


def storage_failed(entry_key: EntryKey) -> None:
    raise StorageFailed("the disk is full")


def test_full_disk_errors(tmp_path):
    """An answer that cannot be stored is still returned; requests that must store get 503, until
    there is space again.
    """
    with running_server(tmp_path) as (server, client):
        first_response = client.responses.create(model="quill", input="hello")
        storage = server.service.storage
        (pages,) = storage.db.execute("PRAGMA page_count").fetchone()
        storage.db.execute(f"PRAGMA max_page_count={pages}")
        text = "x" * 20_000
        metadata: Any = {"text": text}
        assert (
            client.responses.create(model="quill", input="hello", metadata=metadata).store is False
        )
        storage.touch = storage_failed
        assert client.responses.retrieve(first_response.id) == first_response
        del storage.touch
        with pytest.raises(openai.InternalServerError) as caught:
            client.conversations.create(items=[{"role": "user", "content": text}])
        assert caught.value.status_code == 503 and "cannot be written" in caught.value.message
        with pytest.raises(openai.InternalServerError) as caught:
            upload_file(client, [text])
        assert caught.value.status_code == 503
        storage.db.execute("PRAGMA max_page_count=1000000")
        assert client.conversations.create(items=[{"role": "user", "content": text}]).id


def test_unusable_state_dirs_are_rejected(tmp_path):
    storage = Storage(tmp_path / "a")
    with pytest.raises(
        ModelError, match="state_dir is .* is used by another server; use another folder"
    ):
        Storage(tmp_path / "a")
    storage.db.execute("PRAGMA user_version=99")
    storage.close()
    with pytest.raises(ModelError, match="has version 99"):
        Storage(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(ModelError, match="cannot be read: file is not a database"):
        Storage(tmp_path / "b")
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(ModelError, match="nothing can be written"):
        Storage(tmp_path / "c")


WRITER = """
import sys
from pathlib import Path
from quire.serving.http.storage import EntryKey, Storage

storage = Storage(Path(sys.argv[1]))
number = 0
while True:
    storage.put(EntryKey("k", "file", str(number)), {"number": number}, [(0, b"x" * 5000), (1, b"%d" % number)])
    print(number, flush=True)
    number += 1
"""


def test_killed_process_keeps_committed_entries(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    written_numbers = [int(next(process.stdout)) for _ in range(50)]
    os.kill(process.pid, signal.SIGKILL)
    written_numbers += [int(line) for line in process.communicate()[0].splitlines()]
    storage = Storage(tmp_path)
    assert storage.db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    entries = storage.bodies("k", "file")
    assert [entry["number"] for entry in entries] == list(range(len(entries))) and len(
        entries
    ) >= len(written_numbers)
    for number in range(len(entries)):
        assert (
            b"".join(storage.parts(EntryKey("k", "file", str(number))))
            == b"x" * 5000 + b"%d" % number
        )
    assert storage.usage("file").entries == len(entries)
    storage.close()


def test_storage_transactions_are_atomic():
    storage = Storage()
    storage.put(ENTRY_KEY, {"a": 1}, [(0, b"abc")])
    usage_before = storage.usage("file")
    with pytest.raises(ZeroDivisionError), storage.transaction():
        storage.put(ENTRY_KEY, {"a": 22}, [(0, b"more of it")])
        storage.put(EntryKey("k", "file", "y"), {})
        raise ZeroDivisionError
    with pytest.raises(StorageFailed), storage.transaction():
        storage.add_parts(ENTRY_KEY, [(1, b"x"), (0, b"a number that is taken")])
    assert storage.usage("file") == usage_before == (1, len('{"a":1}') + 3)
    assert storage.get(ENTRY_KEY) == {"a": 1} and list(storage.parts(ENTRY_KEY)) == [b"abc"]
    storage.delete(ENTRY_KEY)
    assert storage.usage("file") == (0, 0) and ENTRY_KEY not in storage


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_split_lines_across_pieces(size):
    data = b"one\n\ntwo three\n" + b"x" * 20 + b"\nlast"
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert list(split_lines(pieces)) == data.split(b"\n")
