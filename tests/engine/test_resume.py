"""A stream started by one server is resumed by another: the client gets the same events."""

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
STORY_BODY = {"prompt": "Once upon a time", "max_tokens": 30}
CHAT_BODY = {
    "messages": [{"role": "user", "content": "Tell a story about a fox."}],
    "max_tokens": 30,
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "array", "items": {"type": "integer"}}},
}
REQUESTS = [
    ("/v1/completions", STORY_BODY | {"temperature": 0}),
    # without a seed in the request
    ("/v1/completions", STORY_BODY | {"temperature": 1, "n": 3, "logprobs": 2}),
    (
        "/v1/completions",
        {"prompt": ["Once", "Long ago, a"], "seed": 5, "n": 2, "echo": True, "stop": ["the", "."]},
    ),
    (
        "/v1/completions",
        STORY_BODY
        | {"repetition_penalty": 1.5, "presence_penalty": 1, "seed": -3, "min_tokens": 9},
    ),
    (
        "/v1/chat/completions",
        CHAT_BODY
        | {"temperature": 0.8, "logprobs": True, "stream_options": {"include_usage": True}},
    ),
    (
        "/v1/chat/completions",
        CHAT_BODY | {"temperature": 1, "response_format": SCHEMA, "max_tokens": 12},
    ),
    ("/v1/responses", {"input": "Tell a story about a fox.", "max_output_tokens": 20}),
    ("/v1/messages", CHAT_BODY),
]


DRAFTS = {"method": "self", "num_layers": 2, "adapts": False}


@pytest.fixture(scope="module")
def apps():
    """(asyncio runner, applications of two servers): the servers have different seeds, and the
    second one drafts.
    """
    models = []
    for seed, drafts in ((1, None), (2, DRAFTS)):
        options = make_options(
            str(FOLDER), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128, seed=seed,
            speculative_config=drafts,
        )  # fmt: skip
        models.append(Models([Model(("m",), lambda options=options: make_engine(options))]))
    with asyncio.Runner() as runner:
        yield runner, [make_app(Service(model_set, ServerSettings())) for model_set in models]
        for model_set in models:
            model_set.close()


def make_request(path: str, body: dict, journal: Journal | None = None) -> ForwardedRequest:
    content = json.dumps(body | {"stream": True}).encode()
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(content)),
    ]
    return ForwardedRequest("POST", path, b"", headers, content, journal=journal or Journal())


def parse_events(data: bytes) -> dict:
    """Collects from server-sent events what a client sees: the text, finish reason and logprobs of
    each choice, the ids and the usage.
    """
    fields = defaultdict(str)
    scores = defaultdict(list)
    for line in data.decode().splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event.get("choices", ()):
            index = choice["index"]
            fields["text", index] += (
                choice.get("text") or choice.get("delta", {}).get("content") or ""
            )
            fields["end", index] += choice["finish_reason"] or ""
            for kind, values in (choice["logprobs"] or {}).items():
                scores[index, kind] += values or []
        fields["text"] += (
            event.get("delta", {}).get("text", "") if isinstance(event.get("delta"), dict) else ""
        )
        fields["text"] += (
            event["delta"] if event.get("type") == "response.output_text.delta" else ""
        )
        fields["whole"] += (
            json.dumps(event["response"]["output"])
            if event.get("type") == "response.completed"
            else ""
        )
        if "id" in event:
            fields["ids"] = " ".join(
                sorted({*fields["ids"].split(), event["id"], str(event.get("created", ""))})
            )
        fields["count"] += str((event.get("usage") or {}).get("completion_tokens", ""))
    sequence_numbers = [
        json.loads(line[6:]).get("sequence_number")
        for line in data.decode().splitlines()
        if "sequence_" in line
    ]
    assert sequence_numbers == list(range(len(sequence_numbers)))
    return fields | scores


async def respond(app, call: ForwardedRequest) -> tuple[ResponseStart, list[ResponsePiece]]:
    start, *pieces = [message async for message in ReplicaConnection(call, b"").messages(app)]
    assert start.status == 200, pieces
    return start, pieces


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.slow
def test_second_engine_resumes_a_stream_after_any_piece(path, body, apps):
    """The second engine gets the streamed tokens, and continues after them."""
    rng = random.Random(path)
    (runner, (first_app, second_app)) = apps

    async def resume_at_pieces():
        start, pieces = await respond(first_app, make_request(path, body))
        assert start.name and start.created and start.seeds
        expected = parse_events(b"".join(piece.data for piece in pieces))
        piece_counts = {
            0,
            1,
            len(pieces) - 1,
            len(pieces),
            *(rng.randrange(len(pieces)) for _ in range(4)),
        }
        for num_pieces in sorted(piece_counts):
            streamed = [delta for piece in pieces[:num_pieces] for delta in piece.streamed]
            journal = Journal(start.name, start.created, list(start.seeds), streamed)
            _, rest_pieces = await respond(
                second_app, make_request(path, body, replace(journal, streamed=list(streamed)))
            )
            if num_pieces < len(pieces):  # otherwise the final events are streamed twice
                assert (
                    parse_events(
                        b"".join(piece.data for piece in pieces[:num_pieces] + rest_pieces)
                    )
                    == expected
                ), num_pieces

    runner.run(resume_at_pieces())


TOOL_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
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
def test_resumed_tool_calls_keep_their_ids(path):
    """Events and final response of the second engine use the ids that the client already got."""
    models = [
        Models([model_of(scripted(lambda prompt: f"I look. {TOOL_CALL}\n{TOOL_CALL}")[0])])
        for _ in range(2)
    ]
    settings = ServerSettings(formats=FORMATS)

    async def resume_at_pieces():
        services = [Service(model_set, settings) for model_set in models]
        first_app, second_app = (make_app(service) for service in services)
        start, pieces = await respond(first_app, make_request(path, TOOL_REQUESTS[path]))
        data = b"".join(piece.data for piece in pieces).decode()
        streamed_ids = list(dict.fromkeys(CALL_ID.findall(data)))
        assert len(streamed_ids) == 2
        for num_pieces in range(1, len(pieces)):
            streamed = [delta for piece in pieces[:num_pieces] for delta in piece.streamed]
            known_call_ids = pieces[num_pieces - 1].call_ids
            journal = Journal(
                start.name, start.created, list(start.seeds), streamed, dict(known_call_ids)
            )
            _, rest_pieces = await respond(
                second_app, make_request(path, TOOL_REQUESTS[path], journal)
            )
            call_ids = CALL_ID.findall(
                b"".join(piece.data for piece in pieces[:num_pieces] + rest_pieces).decode()
            )
            assert len(set(call_ids)) == 2 and {*known_call_ids.values()} <= set(call_ids)
        for service in services:
            service.close()

    asyncio.run(resume_at_pieces())
