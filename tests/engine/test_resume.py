"""A stream that was begun by one server and is gone on with by another: the reader gets the answer
of one.
"""

import asyncio
import json
import random
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

import quire
from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.serving.http.app import make_app
from quire.serving.http.models import Model, Models
from quire.serving.http.service import Service
from quire.serving.http.settings import ServerSettings
from quire.serving.ray.message import (
    ForwardedRequest,
    ReplicaConnection,
    ResponsePiece,
    ResponseStart,
)
from quire.serving.resume import Journal
from quire.tests.support.served import FORMATS, model_of, scripted

FOLDER = Path(quire.__file__).parent / "model" / "quill_draft"
STORY = {"prompt": "Once upon a time", "max_tokens": 30}
TURNS = {"messages": [{"role": "user", "content": "Tell a story about a fox."}], "max_tokens": 30}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "array", "items": {"type": "integer"}}},
}
ASKED = [
    ("/v1/completions", STORY | {"temperature": 0}),
    # a seed that nobody chose
    ("/v1/completions", STORY | {"temperature": 1, "n": 3, "logprobs": 2}),
    (
        "/v1/completions",
        {"prompt": ["Once", "Long ago, a"], "seed": 5, "n": 2, "echo": True, "stop": ["the", "."]},
    ),
    (
        "/v1/completions",
        STORY | {"repetition_penalty": 1.5, "presence_penalty": 1, "seed": -3, "min_tokens": 9},
    ),
    (
        "/v1/chat/completions",
        TURNS | {"temperature": 0.8, "logprobs": True, "stream_options": {"include_usage": True}},
    ),
    (
        "/v1/chat/completions",
        TURNS | {"temperature": 1, "response_format": SCHEMA, "max_tokens": 12},
    ),
    ("/v1/responses", {"input": "Tell a story about a fox.", "max_output_tokens": 20}),
    ("/v1/messages", TURNS),
]


DRAFTS = {"method": "self", "num_layers": 2, "adapts": False}


@pytest.fixture(scope="module")
def two():
    """(what runs coroutines, the applications of two servers whose own seeds differ, of which the
    second drafts).
    """
    models = []
    for seed, drafts in ((1, None), (2, DRAFTS)):
        options = make_options(
            str(FOLDER), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, seed=seed,
            speculative_config=drafts,
        )  # fmt: skip
        models.append(Models([Model(("m",), lambda options=options: make_engine(options))]))
    with asyncio.Runner() as runner:
        yield runner, [make_app(Service(one, ServerSettings())) for one in models]
        for one in models:
            one.close()


def call_of(path: str, body: dict, journal: Journal | None = None) -> ForwardedRequest:
    raw = json.dumps(body | {"stream": True}).encode()
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(raw)),
    ]
    return ForwardedRequest("POST", path, b"", headers, raw, journal=journal or Journal())


def read(data: bytes) -> dict:
    """What a client makes of the events: of each choice its text, ends and scores, and the names
    that were told.
    """
    found = defaultdict(str)
    scores = defaultdict(list)
    for line in data.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event.get("choices", ()):
            at = choice["index"]
            found["text", at] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            found["end", at] += choice["finish_reason"] or ""
            for kind, values in (choice["logprobs"] or {}).items():
                scores[at, kind] += values or []
        found["text"] += (
            event.get("delta", {}).get("text", "") if isinstance(event.get("delta"), dict) else ""
        )
        found["text"] += event["delta"] if event.get("type") == "response.output_text.delta" else ""
        found["whole"] += (
            json.dumps(event["response"]["output"])
            if event.get("type") == "response.completed"
            else ""
        )
        if "id" in event:
            found["ids"] = " ".join(
                sorted({*found["ids"].split(), event["id"], str(event.get("created", ""))})
            )
        found["count"] += str((event.get("usage") or {}).get("completion_tokens", ""))
    numbers = [
        json.loads(line[6:]).get("sequence_number")
        for line in data.decode().splitlines()
        if "sequence_" in line
    ]
    assert numbers == list(range(len(numbers)))
    return found | scores


async def respond(app, call: ForwardedRequest) -> tuple[ResponseStart, list[ResponsePiece]]:
    start, *pieces = [message async for message in ReplicaConnection(call, b"").messages(app)]
    assert start.status == 200, pieces
    return start, pieces


@pytest.mark.parametrize(("path", "body"), ASKED)
@pytest.mark.slow
def test_another_engine_goes_on(path, body, two):
    """From after any of its pieces; what was told is not computed again one by one."""
    rng = random.Random(path)
    (runner, (first, second)) = two

    async def run():
        start, pieces = await respond(first, call_of(path, body))
        assert start.name and start.created and start.seeds
        whole = read(b"".join(piece.data for piece in pieces))
        cuts = {0, 1, len(pieces) - 1, len(pieces), *(rng.randrange(len(pieces)) for _ in range(4))}
        for cut in sorted(cuts):
            streamed = [one for piece in pieces[:cut] for one in piece.streamed]
            journal = Journal(start.name, start.created, list(start.seeds), streamed)
            _, rest = await respond(
                second, call_of(path, body, replace(journal, streamed=list(streamed)))
            )
            if cut < len(pieces):  # else all was told and the end is said twice
                assert read(b"".join(piece.data for piece in pieces[:cut] + rest)) == whole, cut

    runner.run(run())


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOL_REQUESTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}],
                             "tools": [{"type": "function", "function": TOOL}]},
    "/v1/responses": {"input": "x", "tools": [{"type": "function", **TOOL}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99,
                     "tools": [{"name": "weather", "input_schema": TOOL["parameters"]}]},
}  # fmt: skip
CALL_ID = re.compile(r"(?:call|toolu)_[0-9a-f]{24}")


@pytest.mark.parametrize("path", TOOL_REQUESTS)
def test_tool_calls_keep_their_ids(path):
    """The events of another engine, and its response in whole, name the calls as the client knows
    them.
    """
    models = [
        Models([model_of(scripted(lambda prompt: f"I look. {CALL}\n{CALL}")[0])]) for _ in range(2)
    ]
    settings = ServerSettings(formats=FORMATS)

    async def run():
        services = [Service(one, settings) for one in models]
        first, second = (make_app(service) for service in services)
        start, pieces = await respond(first, call_of(path, TOOL_REQUESTS[path]))
        data = b"".join(piece.data for piece in pieces).decode()
        ids = list(dict.fromkeys(CALL_ID.findall(data)))
        assert len(ids) == 2
        for cut in range(1, len(pieces)):
            streamed = [one for piece in pieces[:cut] for one in piece.streamed]
            known = pieces[cut - 1].call_ids
            journal = Journal(start.name, start.created, list(start.seeds), streamed, dict(known))
            _, rest = await respond(second, call_of(path, TOOL_REQUESTS[path], journal))
            told = CALL_ID.findall(b"".join(piece.data for piece in pieces[:cut] + rest).decode())
            assert len(set(told)) == 2 and {*known.values()} <= set(told)
        for service in services:
            service.close()

    asyncio.run(run())
