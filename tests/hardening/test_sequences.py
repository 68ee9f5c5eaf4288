"""Random sequences of requests on stored objects, with ids of earlier answers, of other kinds and
of other API keys.

No request may fail with a 500, hang, or show one key's objects to another.
"""

import asyncio
import json
import logging
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from quire.serving.http.app import make_app
from quire.serving.http.models import Models
from quire.serving.http.service import Service
from quire.serving.http.settings import ServerSettings
from quire.serving.ray.message import ForwardedRequest, ReplicaConnection, ResponseStart
from quire.tests.support.cases import cases
from quire.tests.support.served import FORMATS, model_of, scripted
from quire.tests.support.talk import say

TIMEOUT_SECONDS = 60.0  # a request that takes longer counts as hanging
KEYS = ("one", "two")
KINDS = ("response", "conversation", "item", "file", "batch", "message_batch")
FOREIGN_ID_STATUSES = (400, 404, 413, 429)  # statuses for ids that the key does not own
NUMBERS = st.sampled_from(["0", "1", "2", "100", "²", "-1", "1e3", "x", ""])
TEXTS = st.sampled_from(["hello", "think", "count", "weather in Rome", "", "\x00", "\ud800"])
CALL = {
    "type": "function_call",
    "call_id": "call_1",
    "name": "weather",
    "arguments": '{"city": "Rome"}',
}
ITEMS = st.sampled_from(
    [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hi"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        CALL,
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "message", "id": 5, "role": "user", "content": "x"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "sums", "input": "1 + 1"},
        {"type": "compaction", "encrypted_content": "aGVsbG8="},
        {"type": None},
        None,
    ]
)
INPUTS = st.one_of(st.none(), TEXTS, st.lists(ITEMS, max_size=3))
LINES = st.lists(
    st.sampled_from(
        [
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": "hello"},
            },
            {
                "custom_id": "b",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": "x", "n": 2},
            },
            {
                "custom_id": "c",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": "x", "stream": True},
            },
            {
                "custom_id": "d",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"messages": []},
            },
            {
                "custom_id": "e",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": "hello"}]},
            },
            {"custom_id": None},
            [],
        ]
    ),
    max_size=4,
)
MESSAGES = st.sampled_from(
    [
        {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]},
        {"stream": True},
        {},
        None,
    ]
)
ENDPOINTS = ["/v1/completions", "/v1/chat/completions"]
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]


def scripted_answer(prompt: str) -> str:
    """The answer of `talk.say`, also for conversations without user turn."""
    return say(prompt if "<user>" in prompt else f"<user>hello{prompt}")


class SharedEngine:
    """An engine for all sequences, and a runner for their servers' coroutines."""

    def __init__(self):
        self.engine, self.script = scripted(scripted_answer)
        self.models = Models([model_of(self.engine)])
        self.runner = asyncio.Runner()
        self.requests = 0

    def server(self, folder: str | None) -> tuple[Service, Any]:
        """A server with low limits, so that sequences reach them."""
        server_settings = ServerSettings(
            state_dir=folder,
            formats=FORMATS,
            api_keys=KEYS,
            admin=True,
            max_stored_responses=6,
            max_stored_bytes=30_000,
            max_file_bytes=6_000,
            max_batches=3,
        )
        service = Service(self.models, server_settings)
        app = make_app(service)
        self.runner.run(service.load_first())
        return service, app


@pytest.fixture(scope="module")
def shared():
    logging.getLogger("quire.access").disabled = True
    resources = SharedEngine()
    yield resources
    logging.getLogger("quire.access").disabled = False
    resources.runner.close()
    resources.models.close()


class StoredObjectsMachine(RuleBasedStateMachine):
    """Two API keys store objects and use each other's ids."""

    shared: SharedEngine

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.service, self.app = self.shared.server(self.folder.name)
        self.ids: dict[tuple[str, str], list[str]] = {
            (key, kind): [] for key in KEYS for kind in KINDS
        }
        self.num_chosen_ids = 0

    def send(
        self,
        key: str,
        method: str,
        path: str,
        body: Any = None,
        raw: bytes | None = None,
        kind: str = "",
    ) -> Any:
        """Send one request; return (status, JSON or bytes of the answer)."""
        data = json.dumps(body).encode() if raw is None else raw
        data = b"" if method != "POST" else data
        headers = [(b"host", b"localhost"), (b"authorization", f"Bearer {key}".encode())]
        headers += [
            (b"content-type", (kind or "application/json").encode()),
            (b"content-length", b"%d" % len(data)),
        ]
        path, _, query = path.partition("?")
        call = ForwardedRequest(method, path, query.encode(), headers, data)
        self.shared.requests += 1

        async def run() -> tuple[int, bytes]:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                start, *pieces = [
                    message async for message in ReplicaConnection(call, b"").messages(self.app)
                ]
                assert isinstance(start, ResponseStart)
                return start.status, b"".join(piece.data for piece in pieces)

        status, answer_data = self.shared.runner.run(run())
        assert status < 500, (method, path, body, answer_data[:300])
        if status >= 400:
            error = json.loads(answer_data)
            assert error.get("error", error)["message"], answer_data[:300]
        try:
            return status, json.loads(answer_data)
        except ValueError:
            return status, answer_data

    def keep(self, key: str, kind: str, answer: tuple[int, Any]) -> None:
        if (
            answer[0] == 200
            and isinstance(answer[1], dict)
            and isinstance(answer[1].get("id"), str)
        ):
            self.ids[key, kind].append(answer[1]["id"])

    def some_id(self, data: st.DataObject, key: str, expected_kind: str) -> tuple[str, bool]:
        """An id for a request, mostly of the expected kind, and whether the key may use it.

        What is drawn does not depend on the ids that exist, since these depend on the timing.
        """
        picks_expected_kind = data.draw(st.integers(0, 3)) > 0
        picks_existing = data.draw(st.booleans())
        owner = data.draw(st.sampled_from(KEYS))
        kind = data.draw(st.sampled_from(KINDS))
        number = data.draw(st.integers(0, 1000))
        unknown = data.draw(
            st.sampled_from(["none", "resp_", "conv_0", "file-0", "batch_0", "a%00b", "²"])
        )
        own_ids = self.ids[key, expected_kind]
        if picks_expected_kind and own_ids:
            return own_ids[number % len(own_ids)], True
        if picks_existing and (ids := self.ids[owner, kind]):
            name = ids[number % len(ids)]
            return name, (owner, kind) == (key, expected_kind) or name in own_ids
        return unknown, False

    def page(self, data: st.DataObject, key: str, kind: str) -> str:
        """The query of a list request."""
        names = data.draw(
            st.lists(
                st.sampled_from(["limit", "order", "after", "after_id", "before_id", "purpose"])
            )
        )
        values = {
            name: data.draw(NUMBERS)
            if name == "limit"
            else data.draw(st.sampled_from(["asc", "desc", "batch"]))
            if name in ("order", "purpose")
            else self.some_id(data, key, kind)[0]
            for name in names
        }
        return "?" + "&".join(f"{name}={value}" for name, value in values.items())

    @rule(data=st.data(), key=st.sampled_from(KEYS), input_=INPUTS)
    def respond(self, data, key, input_):
        body: dict[str, Any] = {} if input_ is None else {"input": input_}
        foreign = False
        for name, kind in (("previous_response_id", "response"), ("conversation", "conversation")):
            if data.draw(st.integers(0, 2)) == 0:
                body[name], is_own = self.some_id(data, key, kind)
                foreign |= not is_own
        for name in ("store", "background", "stream", "enable_response_messages"):
            if data.draw(st.integers(0, 3)) == 0:
                body[name] = data.draw(st.booleans())
        if data.draw(st.integers(0, 3)) == 0:
            self.num_chosen_ids += 1
            body["request_id"] = data.draw(
                st.sampled_from(
                    [f"x{self.num_chosen_ids}", f"x{max(self.num_chosen_ids - 1, 0)}", "x1"]
                )
            )
        if data.draw(st.booleans()):
            body["tools"] = TOOLS
        answer = self.send(key, "POST", "/v1/responses", body | {"max_output_tokens": 8})
        assert not foreign or answer[0] in FOREIGN_ID_STATUSES, (body, answer)
        if isinstance(answer[1], bytes) and answer[0] == 200:
            events = [
                json.loads(line[6:])
                for line in answer[1].decode().splitlines()
                if line.startswith("data: ")
            ]
            assert events[-1]["response"]["status"] in ("completed", "incomplete", "failed"), (
                events[-1]
            )
            answer = answer[0], events[0]["response"]
        self.keep(key, "response", answer)

    @rule(
        data=st.data(), key=st.sampled_from(KEYS), path=st.sampled_from(["compact", "input_tokens"])
    )
    def count_or_compact(self, data, key, path):
        name, is_own = self.some_id(data, key, "response")
        status, _ = self.send(key, "POST", f"/v1/responses/{path}", {"previous_response_id": name})
        assert is_own or status in FOREIGN_ID_STATUSES

    @rule(data=st.data(), key=st.sampled_from(KEYS), method=st.sampled_from(["GET", "GET", "DELETE"]),
          end=st.sampled_from(["", "", "/input_items", "?stream=true", "?stream=true&starting_after=²"]))  # fmt: skip
    def read_response(self, data, key, method, end):
        name, is_own = self.some_id(data, key, "response")
        if end == "/input_items":
            method = "GET"
            end = end + self.page(data, key, "item")
        status, body = self.send(key, method, f"/v1/responses/{name}{end}")
        assert is_own or status in FOREIGN_ID_STATUSES
        for item in body.get("data", []) if isinstance(body, dict) and status == 200 else []:
            self.ids[key, "item"].append(item["id"])

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def cancel_response(self, data, key):
        name, is_own = self.some_id(data, key, "response")
        status, _ = self.send(key, "POST", f"/v1/responses/{name}/cancel", raw=b"")
        assert is_own or status in FOREIGN_ID_STATUSES

    @rule(
        key=st.sampled_from(KEYS),
        items=st.lists(ITEMS, max_size=3),
        metadata=st.sampled_from([{}, {"a": "b"}, 5]),
    )
    def converse(self, key, items, metadata):
        self.keep(
            key,
            "conversation",
            self.send(key, "POST", "/v1/conversations", {"items": items, "metadata": metadata}),
        )

    @rule(data=st.data(), key=st.sampled_from(KEYS), items=st.lists(ITEMS, max_size=2))
    def add_items(self, data, key, items):
        name, is_own = self.some_id(data, key, "conversation")
        status, body = self.send(key, "POST", f"/v1/conversations/{name}/items", {"items": items})
        assert is_own or status in FOREIGN_ID_STATUSES
        self.ids[key, "item"] += [item["id"] for item in body.get("data", ())]

    @rule(
        data=st.data(), key=st.sampled_from(KEYS), method=st.sampled_from(["GET", "POST", "DELETE"])
    )
    def use_conversation(self, data, key, method):
        name, is_own = self.some_id(data, key, "conversation")
        status, _ = self.send(key, method, f"/v1/conversations/{name}", {"metadata": {"c": "d"}})
        assert is_own or status in FOREIGN_ID_STATUSES

    @rule(
        data=st.data(), key=st.sampled_from(KEYS), method=st.sampled_from(["GET", "DELETE", "LIST"])
    )
    def use_items(self, data, key, method):
        name, is_own = self.some_id(data, key, "conversation")
        path = f"/v1/conversations/{name}/items"
        if method == "LIST":
            status, body = self.send(key, "GET", path + self.page(data, key, "item"))
            self.ids[key, "item"] += [item["id"] for item in body["data"]] if status == 200 else []
        else:
            status, _ = self.send(key, method, f"{path}/{self.some_id(data, key, 'item')[0]}")
        assert is_own or status in FOREIGN_ID_STATUSES

    @rule(
        data=st.data(),
        key=st.sampled_from(KEYS),
        lines=LINES,
        expires=st.sampled_from([None, "3600", "²", "5"]),
    )
    def upload(self, data, key, lines, expires):
        text = "\n".join(map(json.dumps, lines)) + data.draw(
            st.sampled_from(["", "\n", "\n{", "\n" + "x" * 4000])
        )
        head = 'Content-Disposition: form-data; name="{}"\r\n\r\n{}'
        name = data.draw(st.sampled_from(['filename="a"', "filename*=\0''a", "filename=\xff", ""]))
        fields = [head.format("purpose", "batch"), head.format(f'file"; {name}; x="', text)]
        if expires is not None:
            fields += [
                head.format("expires_after[anchor]", "created_at"),
                head.format("expires_after[seconds]", expires),
            ]
        body = "".join(f"--x\r\n{field}\r\n" for field in fields).encode() + b"--x--\r\n"
        kind = "multipart/form-data; boundary=x"
        self.keep(key, "file", self.send(key, "POST", "/v1/files", raw=body, kind=kind))

    @rule(data=st.data(), key=st.sampled_from(KEYS), method=st.sampled_from(["GET", "DELETE"]),
          end=st.sampled_from(["", "/content"]))  # fmt: skip
    def use_file(self, data, key, method, end):
        name, is_own = self.some_id(data, key, "file")
        status, _ = self.send(key, "GET" if end else method, f"/v1/files/{name}{end}")
        assert is_own or status in FOREIGN_ID_STATUSES

    @rule(
        data=st.data(),
        key=st.sampled_from(KEYS),
        path=st.sampled_from(["files", "batches", "messages/batches"]),
    )
    def list_all(self, data, key, path):
        kind = {"files": "file", "batches": "batch"}.get(path, "message_batch")
        status, body = self.send(key, "GET", f"/v1/{path}{self.page(data, key, kind)}")
        other_key = KEYS[1 - KEYS.index(key)]
        for item in body["data"] if status == 200 else ():
            assert item["id"] not in self.ids[other_key, kind]
            for name in ("output_file_id", "error_file_id"):
                if item.get(name) is not None:
                    self.ids[key, "file"].append(item[name])
            if kind == "file" and item["id"] not in self.ids[key, "file"]:
                self.ids[key, "file"].append(item["id"])

    @rule(
        data=st.data(),
        key=st.sampled_from(KEYS),
        endpoint=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    )
    def start_batch(self, data, key, endpoint):
        name, is_own = self.some_id(data, key, "file")
        answer = self.send(
            key, "POST", "/v1/batches", {"input_file_id": name, "endpoint": endpoint}
        )
        assert is_own or answer[0] in FOREIGN_ID_STATUSES
        self.keep(key, "batch", answer)

    @rule(
        key=st.sampled_from(KEYS),
        params=st.lists(
            st.sampled_from(
                [
                    {"max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]},
                    {"stream": True},
                    {},
                    None,
                ]
            ),
            max_size=3,
        ),
    )
    def start_message_batch(self, key, params):
        requests = [
            {"custom_id": str(i), "params": request_params}
            for i, request_params in enumerate(params)
        ]
        self.keep(
            key,
            "message_batch",
            self.send(key, "POST", "/v1/messages/batches", {"requests": requests}),
        )

    @rule(data=st.data(), key=st.sampled_from(KEYS), path=st.sampled_from(["batches", "messages/batches"]),
          end=st.sampled_from(["", "/cancel", "/results", "DELETE"]))  # fmt: skip
    def use_batch(self, data, key, path, end):
        name, is_own = self.some_id(data, key, "batch" if path == "batches" else "message_batch")
        method = {"/cancel": "POST", "DELETE": "DELETE"}.get(end, "GET")
        if path == "batches" and end in ("/results", "DELETE"):
            return  # these paths do not exist
        status, _ = self.send(
            key, method, f"/v1/{path}/{name}{end.removeprefix('DELETE')}", raw=b""
        )
        assert is_own or status in FOREIGN_ID_STATUSES

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.03]))
    def wait(self, seconds):
        """Let batches and background responses progress."""
        self.shared.runner.run(asyncio.sleep(seconds))

    @precondition(lambda self: self.shared.script.step_seconds == 0.0)
    @rule()
    def slow_down(self):
        self.shared.script.step_seconds = 0.005

    @rule()
    def speed_up(self):
        self.shared.script.step_seconds = 0.0

    @rule()
    def fail_once(self):
        """A failed step is a 500 for its requests, so only background responses may run then."""
        for key in KEYS:
            self.shared.script.fail_next = 1
            body = {"input": "hello", "background": True, "max_output_tokens": 8}
            self.keep(key, "response", self.send(key, "POST", "/v1/responses", body))
            self.shared.runner.run(self.settle())
            self.shared.script.fail_next = 0

    @rule()
    def restart(self):
        """A new server finds the stored objects; running batches continue."""
        paths = [f"/v1/{kind}?limit=100" for kind in ("files", "batches", "messages/batches")]
        self.shared.runner.run(self.end())
        lists_before = [self.send(key, "GET", path)[1]["data"] for key in KEYS for path in paths]
        usage = self.service.storage.usage("response", "conversation")
        self.stop()
        self.service, self.app = self.shared.server(self.folder.name)
        lists_after = [self.send(key, "GET", path)[1]["data"] for key in KEYS for path in paths]
        for items_before, items_after in zip(lists_before, lists_after, strict=True):
            assert {item["id"] for item in items_before} <= {item["id"] for item in items_after}
        assert self.service.storage.usage("response", "conversation").entries == usage.entries

    def stop(self) -> None:
        self.service.pool.shutdown()
        self.service.storage.close()

    async def settle(self) -> None:
        """Wait until nothing is computed."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while self.shared.engine.requests or self.service.open:
                await asyncio.sleep(0.002)

    async def end(self) -> None:
        self.shared.script.step_seconds = 0.0
        self.service.batches.close()
        await self.settle()

    def teardown(self):
        self.shared.runner.run(self.end())
        self.shared.engine.scheduler.check()
        assert self.shared.engine.tables[0].used() == 0
        self.stop()
        self.folder.cleanup()


@pytest.mark.random
def test_random_sequences_of_stored_object_requests(shared):
    StoredObjectsMachine.shared = shared
    hypothesis_settings = settings(
        max_examples=cases(300, least=4),
        stateful_step_count=40,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(StoredObjectsMachine, settings=hypothesis_settings)
    print(f"\n{shared.requests} requests")
