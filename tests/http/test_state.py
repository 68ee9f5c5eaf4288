"""What a server stores: it outlives the server in a folder, its bytes are bounded, and keys take
turns.
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

CHAT = "/v1/chat/completions"
PLACE = EntryKey(None, "file", "x")


def client_of(server: Any, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@contextmanager
def started(folder: Path | None, **chosen: Any) -> Iterator[tuple[Any, openai.OpenAI]]:
    """(a server, a client of it) that stores in a folder; it ends at once."""
    state_dir = None if folder is None else str(folder)
    chosen = {"api_keys": ("one", "two"), "shutdown_grace": 0.0, "state_dir": state_dir, **chosen}
    with scripted_server(FORMATS, **chosen) as server, client_of(server) as client:
        yield server, client


def upload(client: openai.OpenAI, texts: list[str]) -> str:
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": CHAT,
            "body": {"messages": [{"role": "user", "content": text}]},
        }
        for i, text in enumerate(texts)
    ]
    data = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    return client.files.create(file=("in.jsonl", data), purpose="batch").id


def begin(client: openai.OpenAI, texts: list[str]) -> Any:
    return client.batches.create(
        input_file_id=upload(client, texts), endpoint=CHAT, completion_window="24h"
    )


def ended(client: openai.OpenAI, name: str) -> Any:
    until(lambda: client.batches.retrieve(name).status in ENDED)
    return client.batches.retrieve(name)


def answers(client: openai.OpenAI, batch: Any) -> dict[str, str]:
    """What the results of a batch say, by the ids of its requests; each is there once."""
    lines = [
        json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()
    ]
    found = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }
    assert len(found) == len(lines) and list(found) == sorted(found, key=int)
    return found


def test_a_restart_loses_nothing(tmp_path):
    """Responses, conversations, files and batches: those that were over and those that were not."""
    folder = tmp_path / "state"
    texts = [f"text {i}" for i in range(30)]
    with started(folder) as (server, client):
        first = client.responses.create(model="quill", input="hello")
        whole = client.responses.create(model="quill", input="hello", background=True, stream=True)
        events = list(whole)
        talk = client.conversations.create(items=[{"role": "user", "content": "hello"}])
        client.responses.create(model="quill", input="more", conversation=talk.id)
        items = client.conversations.items.list(talk.id).data
        done = ended(client, begin(client, texts[:3]).id)
        kept = list(client.files.list())
        server.script.step_seconds = 0.005
        half = begin(client, texts)
        waits = begin(client, texts[:2])
        until(lambda: client.batches.retrieve(half.id).request_counts.completed >= 3)
        assert client.batches.retrieve(half.id).output_file_id is None  # it is written
        cut = client.responses.create(model="quill", input="count", background=True)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes.pop(folder.name) == 0o700 and FILE in modes and set(modes.values()) == {0o600}

    with started(folder) as (server, client):
        assert client.responses.retrieve(first.id) == first
        assert client.responses.create(
            model="quill", input="again", previous_response_id=first.id
        ).output_text
        assert list(client.responses.retrieve(events[0].response.id, stream=True)) == events
        assert client.conversations.items.list(talk.id).data == items
        failed = client.responses.retrieve(cut.id)
        assert failed.status == "failed" and "restarted" in failed.error.message
        assert client.batches.retrieve(done.id) == done and answers(client, done)["2"] == said(
            "text 2"
        )
        assert {file.id for file in kept} <= {file.id for file in client.files.list()}
        for batch, wanted in ((half, texts), (waits, texts[:2])):
            found = ended(client, batch.id)
            assert found.status == "completed" and found.request_counts.completed == len(wanted)
            assert answers(client, found) == {str(i): said(text) for i, text in enumerate(wanted)}
        with client_of(server, "two") as other, pytest.raises(openai.NotFoundError):
            other.responses.retrieve(first.id)
    storage = Storage(folder)
    stored = storage.usage(*KINDS)
    assert stored.entries > 2
    StoredResponses(2, stored.bytes, storage)  # of a server that may store less
    assert storage.usage(*KINDS).entries == 2
    storage.close()


def test_background_response_of_a_busy_server_fails_after_a_restart(tmp_path):
    """Another request in flight at shutdown does not make it `incomplete`."""
    with ThreadPoolExecutor(1) as pool, started(tmp_path) as (server, client):
        server.script.step_seconds = 0.05
        cut = client.responses.create(model="quill", input="count", background=True)
        pool.submit(client.completions.create, model="quill", prompt="live")
        until(lambda: len(server.engine.requests) == 2)
    with started(tmp_path) as (server, client):
        assert client.responses.retrieve(cut.id).error.code == "server_error"


def test_failed_write_of_a_batch_keeps_the_counts_of_other_threads():
    """The last result does not fit; results that others wrote meanwhile stay counted."""
    with started(None, max_file_bytes=1000) as (server, _):
        batches = server.service.batches
        batch = Batch("batch_1", None, "kind", "file-1", total=4)
        batches.kinds["kind"] = BatchKind(
            None, iter, lambda batch, line, outcome: Result("output_file_id", outcome.body), "p", ()
        )
        error = RequestError("body", "is not read here")
        small = [(BatchLine(1, "a", error), Outcome("succeeded", b"x"))]
        large = [(BatchLine(2, "b", error), Outcome("succeeded", b"x" * 2000))]
        with ThreadPoolExecutor(1) as pool:
            with batches.storage.lock:
                failing = pool.submit(batches.write, batch, large)
                time.sleep(0.05)  # it waits for the lock
                batches.write(batch, small)
            with pytest.raises(HttpError, match="max-file-bytes"):
                failing.result()
        assert batch.counts == {"succeeded": 1} and len(batch.files) == 1


def test_a_cancelled_batch_ends_after_a_restart(tmp_path):
    with started(tmp_path) as (server, client):
        server.script.hold.clear()
        batch = begin(client, ["hello"] * 3)
        until(lambda: server.engine.requests)
        name = batch.id
        files = stored_files(server)
        stored = server.service.batches.storage
        entry = stored.get(
            place := EntryKey(server.service.batches.get(tenant(server), name).key, "batch", name)
        )
        stored.put(place, entry | {"status": "cancelling"})
        server.service.batches.save = lambda batch: None  # it is killed here
        server.script.hold.set()
    with started(tmp_path, api_keys=("two",)) as (server, client):
        # the key is not accepted now; nothing of it is lost
        assert not server.service.batches.running
        assert stored_files(server) == files
    with started(tmp_path) as (server, client):
        assert ended(client, name).status == "cancelled"


def stored_files(server: Any) -> set[str]:
    return {place.id for place, _ in server.service.storage.entries(["file"])}


def tenant(server: Any) -> str:
    return next(iter(server.service.batches.running)).tenant


def test_keys_take_turns(tmp_path):
    """A large batch of one key does not delay another key's; each has its share of the requests
    under way.
    """
    with started(None) as (server, client), client_of(server, "two") as other:
        server.script.step_seconds = 0.001
        large = begin(client, ["hello"] * 200)
        until(lambda: client.batches.retrieve(large.id).request_counts.completed >= 1)
        small = ended(other, begin(other, ["hello"] * 5).id)
        assert small.status == "completed" and small.request_counts.completed == 5
        assert client.batches.retrieve(large.id).request_counts.completed < 100
        client.batches.cancel(large.id)
        ended(client, large.id)


def test_batches_that_wait_hold_no_requests():
    """One file may be named by many batches; its requests are read one by one when their turn
    comes.
    """
    with started(None) as (server, client):
        server.script.hold.clear()
        name = upload(client, ["hello"] * 300)
        try:
            for _ in range(20):
                client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
            until(lambda: server.engine.requests)
            before = server.service.storage.usage("file", "batch")
            # the file, and twenty descriptions
            assert before.entries <= 22 and before.bytes < 600_000
            gc.collect()
            alive = sum(isinstance(one, ChatRequest) for one in gc.get_objects())
            assert alive <= 4 * 16, alive
            client.files.delete(name)  # the batches go on
            assert not list(client.files.list())
        finally:
            server.script.hold.set()
        batches = list(client.batches.list())
        for batch in batches:
            client.batches.cancel(batch.id)
        assert {ended(client, batch.id).status for batch in batches} == {"cancelled"}
        until(lambda: name not in stored_files(server))


def storage_failed(place: EntryKey) -> None:
    raise StorageFailed("the disk is full")


def test_a_full_disk_is_told(tmp_path):
    """An answer is not lost, only not stored; what must be stored is a 503, and later it works
    again.
    """
    with started(tmp_path) as (server, client):
        first = client.responses.create(model="quill", input="hello")
        storage = server.service.storage
        (pages,) = storage.db.execute("PRAGMA page_count").fetchone()
        storage.db.execute(f"PRAGMA max_page_count={pages}")
        text = "x" * 20_000
        metadata: Any = {"text": text}
        assert (
            client.responses.create(model="quill", input="hello", metadata=metadata).store is False
        )
        storage.touch = storage_failed
        assert client.responses.retrieve(first.id) == first
        del storage.touch
        with pytest.raises(openai.InternalServerError) as caught:
            client.conversations.create(items=[{"role": "user", "content": text}])
        assert caught.value.status_code == 503 and "cannot be written" in caught.value.message
        with pytest.raises(openai.InternalServerError) as caught:
            upload(client, [text])
        assert caught.value.status_code == 503
        storage.db.execute("PRAGMA max_page_count=1000000")
        assert client.conversations.create(items=[{"role": "user", "content": text}]).id


def test_folders_that_cannot_be_used(tmp_path):
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


def test_a_killed_server_loses_nothing_that_was_stored(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    stored = [int(next(process.stdout)) for _ in range(50)]
    os.kill(process.pid, signal.SIGKILL)
    stored += [int(line) for line in process.communicate()[0].splitlines()]
    storage = Storage(tmp_path)
    assert storage.db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    found = storage.bodies("k", "file")
    assert [one["number"] for one in found] == list(range(len(found))) and len(found) >= len(stored)
    for number in range(len(found)):
        assert (
            b"".join(storage.parts(EntryKey("k", "file", str(number))))
            == b"x" * 5000 + b"%d" % number
        )
    assert storage.usage("file").entries == len(found)
    storage.close()


def test_a_transaction_is_made_whole_or_not_at_all():
    storage = Storage()
    storage.put(PLACE, {"a": 1}, [(0, b"abc")])
    before = storage.usage("file")
    with pytest.raises(ZeroDivisionError), storage.transaction():
        storage.put(PLACE, {"a": 22}, [(0, b"more of it")])
        storage.put(EntryKey("k", "file", "y"), {})
        raise ZeroDivisionError
    with pytest.raises(StorageFailed), storage.transaction():
        storage.add_parts(PLACE, [(1, b"x"), (0, b"a number that is taken")])
    assert storage.usage("file") == before == (1, len('{"a":1}') + 3)
    assert storage.get(PLACE) == {"a": 1} and list(storage.parts(PLACE)) == [b"abc"]
    storage.delete(PLACE)
    assert storage.usage("file") == (0, 0) and PLACE not in storage


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_of_pieces(size):
    data = b"one\n\ntwo three\n" + b"x" * 20 + b"\nlast"
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert list(split_lines(pieces)) == data.split(b"\n")
