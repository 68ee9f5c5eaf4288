"""Anthropic's own Python client, as it is, against a server over a socket."""

import asyncio
import json
import threading
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from pydantic import BaseModel

from quire.tests.support.conformance import shows
from quire.tests.support.served import FORMATS
from quire.tests.support.talk import (
    FOUND,
    LIST,
    PERSON,
    SORT,
    SORTED,
    bundled_server,
    frees_all,
    said,
    scripted_server,
    until,
)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GREEDY = {"extra_body": {"temperature": 0}}  # newer versions of the client have no argument for it
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": CITY}


class Person(BaseModel):
    name: str
    job: Literal["painter", "baker"]
    city: str


@pytest.fixture(scope="module")
def server():
    """Its model follows a script."""
    with scripted_server(FORMATS) as state:
        yield state


@pytest.fixture(scope="module")
def bundled():
    with bundled_server() as state:
        yield state


def client_of(server: Any, kind: type = Anthropic, **chosen: Any) -> Any:
    return kind(base_url=server.url, **{"api_key": "none", "max_retries": 0, **chosen})


@pytest.fixture
def ask(server):
    with client_of(server) as client:
        yield client
    frees_all(server)


@pytest.fixture
def ask_bundled(bundled):
    with client_of(bundled) as client:
        yield client
    frees_all(bundled)


def asked(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "quill",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def answer(client: Any, request: dict[str, Any], streams: bool) -> Any:
    """As `create` gives it, or as the helper puts it together."""
    if not streams:
        return client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        return stream.get_final_message()


def error_of(caught: Any) -> dict[str, str]:
    return caught.value.body["error"]


@shows("anthropic", "messages.create")
def test_message(ask):
    """An answer with its usage and why it ended."""
    found = ask.messages.create(**asked("hello", system="Be kind."))
    assert (found.role, found.type, found.model, found.stop_reason) == (
        "assistant",
        "message",
        "quill",
        "end_turn",
    )
    assert text_of(found) == said("hello") and found.id.startswith("msg_")
    assert (
        found.usage.input_tokens + found.usage.cache_read_input_tokens > 0
        and found.usage.output_tokens > 5
    )
    assert ask.messages.create(**asked("hello", max_tokens=3)).stop_reason == "max_tokens"
    stopped = ask.messages.create(**asked("hello", stop_sequences=["hello"]))
    assert (stopped.stop_reason, stopped.stop_sequence, text_of(stopped)) == (
        "stop_sequence",
        "hello",
        "You said: ",
    )
    blocks = [
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "two"},
    ]
    messages = [{"role": "user", "content": blocks}]
    assert text_of(ask.messages.create(**asked("", messages=messages))) == said("one\ntwo")


@shows("anthropic", "messages.create(stream=True)")
def test_message_streamed(ask):
    """The events of an answer, in their order."""
    events = list(ask.messages.create(**asked("hello", stream=True)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(
        event.delta.text for event in events if event.type == "content_block_delta"
    ) == said("hello")
    assert events[-2].delta.stop_reason == "end_turn" and events[-2].usage.output_tokens > 5


@shows("anthropic", "messages.stream")
def test_message_helper_stream(ask):
    """The helper's final message is what `create` answers."""
    with ask.messages.stream(**asked("hello")) as stream:
        assert "".join(stream.text_stream) == said("hello")
        found = stream.get_final_message()
    assert text_of(found) == stream.get_final_text() == said("hello")
    assert found.usage.output_tokens == ask.messages.create(**asked("hello")).usage.output_tokens


@shows(
    "anthropic",
    "messages.create and messages.stream with tools and thinking, and the results sent back",
)
@pytest.mark.parametrize("streams", [False, True])
def test_tool_loop(ask, streams):
    """Thoughts, text and one or several calls are blocks; sent back with the results they give the
    answer.
    """
    for where, cities in (("in Rome", ["Rome"]), ("in Rome and in Paris", ["Rome", "Paris"])):
        request = asked(
            f"think of the weather {where}",
            tools=[TOOL],
            thinking={"type": "enabled", "budget_tokens": 50},
        )
        found = answer(ask, request, streams)
        thought, text, *calls = found.content
        assert (thought.type, thought.thinking.strip()) == ("thinking", "I must look.")
        assert (text.text.strip(), found.stop_reason) == ("I look.", "tool_use")
        assert [(call.name, call.input) for call in calls] == [
            ("weather", {"city": city}) for city in cities
        ]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": f"sun in {call.input['city']}",
            }
            for call in calls
        ]
        request["messages"] += [
            {"role": "assistant", "content": found.content},
            {"role": "user", "content": results},
        ]
        last = ask.messages.create(**request)
        assert text_of(last) == f"It is {' and '.join(f'sun in {city}' for city in cities)}."
        assert last.stop_reason == "end_turn"
    assert text_of(
        ask.messages.create(**asked("weather in Rome", tools=[TOOL], tool_choice={"type": "none"}))
    ) == said("weather in Rome")


@shows("anthropic", "tool_choice with disable_parallel_tool_use")
def test_one_call_at_most(ask):
    """Of several calls the first is told."""
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    request = asked("weather in Rome and in Paris", tools=[TOOL], tool_choice=alone)
    for streams in (False, True):
        found = answer(ask, request, streams)
        assert [block.type for block in found.content] == ["text", "tool_use"]
        assert found.content[1].input == {"city": "Rome"}


@shows("anthropic", "beta.messages.tool_runner")
@pytest.mark.parametrize("streams", [False, True])
def test_tool_runner(ask, streams):
    """The client's own loop calls a function and ends with the answer; no conversation is kept by
    the server.
    """

    @beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        return f"sun in {city}"

    runner = ask.beta.messages.tool_runner(
        **asked("weather in Rome and in Paris"), tools=[weather], stream=streams
    )
    assert text_of(runner.until_done()) == "It is sun in Rome and sun in Paris."


@shows("anthropic", "messages.create with thinking")
@pytest.mark.parametrize("streams", [False, True])
def test_thinking(ask, streams):
    """Thoughts are a block of their own, and can be sent back."""
    request = asked("think", thinking={"type": "adaptive"})
    if streams:
        with ask.messages.stream(**request) as stream:
            thoughts = "".join(event.thinking for event in stream if event.type == "thinking")
            found = stream.get_final_message()
        assert thoughts == found.content[0].thinking
    else:
        found = ask.messages.create(**request)
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found.content[0].thinking.strip() == "I must look." and text_of(found).strip() == said(
        "think"
    )
    back = [
        *request["messages"],
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": "hello"},
    ]
    assert text_of(ask.messages.create(**asked("", messages=back))) == said("hello")


@shows("anthropic", "models.list, models.retrieve")
def test_models(ask):
    """The names that requests may ask for."""
    assert [model.id for model in ask.models.list()] == ["quill", "other-name"]
    assert ask.models.retrieve("quill").id == "quill"
    assert ask.messages.create(**asked("hello", model="other-name")).model == "other-name"


@shows("anthropic", "AsyncAnthropic: many requests at once, streamed and whole")
def test_async(server):
    """Each gets its own answer."""

    async def one(client: AsyncAnthropic, number: int) -> str:
        request = asked(f"number {number}")
        if number % 2:
            return text_of(await client.messages.create(**request))
        async with client.messages.stream(**request) as stream:
            return await stream.get_final_text()

    async def all_of_them() -> list[str]:
        async with client_of(server, AsyncAnthropic) as client:
            return await asyncio.gather(*(one(client, number) for number in range(24)))

    assert asyncio.run(all_of_them()) == [said(f"number {number}") for number in range(24)]
    frees_all(server)


@shows("anthropic", "BadRequestError")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"temperature": 3000}}, "temperature"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_requests(ask, fields, param):
    """The message names the field."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask.messages.create(**asked("hello", **fields))
    assert error_of(caught)["type"] == "invalid_request_error"
    assert error_of(caught)["message"].startswith(f"{param}: ")


@shows("anthropic", "NotFoundError, AuthenticationError")
def test_names_and_keys(ask):
    """A model that is not there, and a key that is not valid."""
    with pytest.raises(anthropic.NotFoundError):
        ask.messages.create(**asked("hello", model="claude"))
    with scripted_server(FORMATS, api_keys=("secret",)) as state:
        with (
            client_of(state, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.create(**asked("hello"))
        assert error_of(caught)["type"] == "authentication_error"
        with client_of(state, api_key="secret") as client:
            assert text_of(client.messages.create(**asked("hello"))) == said("hello")


@shows(
    "anthropic",
    "RateLimitError, ServiceUnavailableError, InternalServerError, and retries of them that "
    "succeed",
)
def test_errors_of_the_server(server):
    """A full queue, a server that shuts down, and a step that failed."""
    with client_of(server) as client:
        server.engine.max_queued = 0
        with pytest.raises(anthropic.RateLimitError) as limited:
            client.messages.create(**asked("hello"))
        assert error_of(limited)["type"] == "rate_limit_error"
        threading.Timer(0.3, lambda: setattr(server.engine, "max_queued", None)).start()
        assert text_of(
            client.with_options(max_retries=4).messages.create(**asked("hello"))
        ) == said("hello")
        server.service.draining = True
        try:
            with pytest.raises(anthropic.ServiceUnavailableError) as refused:
                client.messages.create(**asked("hello"))
        finally:
            server.service.draining = False
        assert error_of(refused)["type"] == "overloaded_error"
        server.script.fail_next = 1
        with pytest.raises(anthropic.InternalServerError) as failed:
            client.messages.create(**asked("hello"))
        assert error_of(failed)["type"] == "api_error"
        server.script.fail_next = 1
        with pytest.raises(anthropic.APIStatusError, match="failed on this request"):
            list(client.messages.create(**asked("hello", stream=True)))
        server.script.fail_next = 1
        retried = client.with_options(max_retries=2).messages.with_raw_response.create(
            **asked("hello")
        )
        assert retried.retries_taken == 1 and text_of(retried.parse()) == said("hello")
    frees_all(server)


@shows(
    "anthropic",
    "APITimeoutError; a stream that is closed in the middle, or whose task is cancelled",
)
def test_leaving(server):
    """The server frees what the request held, long before it would have ended."""

    async def cancelled() -> None:
        async with client_of(server, AsyncAnthropic) as client:
            task = asyncio.create_task(client.messages.create(**asked("count", max_tokens=900)))
            while not server.engine.scheduler.running:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    steps = server.script.steps
    server.script.hold.clear()
    server.script.step_seconds = 0.05
    try:
        with client_of(server, timeout=0.3) as client, pytest.raises(anthropic.APITimeoutError):
            client.messages.create(**asked("count", max_tokens=900))
        server.script.hold.set()
        frees_all(server)
        assert server.script.steps - steps < 100  # of 300: those in which the server hears of it
        with (
            client_of(server) as client,
            client.messages.stream(**asked("count", max_tokens=900)) as stream,
        ):
            assert next(iter(stream.text_stream))
            steps = server.script.steps
            stream.close()
            until(lambda: not server.engine.requests)
            assert server.script.steps - steps < 100
        asyncio.run(cancelled())
        steps = server.script.steps
        until(lambda: not server.engine.requests)
        assert server.script.steps - steps < 100
    finally:
        server.script.hold.set()
        server.script.step_seconds = 0.0
    frees_all(server)


@shows("anthropic", "with_raw_response, extra_headers")
def test_headers(ask):
    """The request id of the client, or a new one, comes back as x-request-id."""
    raw = ask.messages.with_raw_response.create(
        **asked("hello"), extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1" and text_of(raw.parse()) == said("hello")
    assert ask.messages.with_raw_response.create(**asked("hello")).headers["x-request-id"]
    assert (
        ask.messages.create(**asked("hello"), extra_body={"request_id": "mine-2"}).id
        == "msg_mine-2"
    )


@shows("anthropic", "messages.count_tokens")
def test_counting(ask, ask_bundled):
    """As many as the usage of an answer says, tools and system prompt included."""
    for client, extra in (
        (ask, {"tools": [TOOL], "system": "Be kind."}),
        (ask_bundled, {"system": "Be kind."}),
    ):
        request = asked(LIST, **extra)
        found = client.messages.create(**request | {"max_tokens": 1}).usage
        del request["max_tokens"]
        count = client.messages.count_tokens(**request).input_tokens
        assert (
            count
            == found.input_tokens
            + found.cache_read_input_tokens
            + found.cache_creation_input_tokens
        )
        assert (
            count
            > client.messages.count_tokens(model="quill", messages=request["messages"]).input_tokens
        )


@shows("anthropic", "usage.cache_read_input_tokens, cache_creation_input_tokens")
def test_cached_tokens(ask_bundled):
    """What was computed for the same beginning is found again; cache_control is not needed for
    it.
    """
    request = asked(f"{LIST} and 7 and 8", max_tokens=1)
    first, second = (ask_bundled.messages.create(**request).usage for _ in range(2))
    assert second.cache_read_input_tokens >= 16 and second.input_tokens > 0
    assert first.cache_creation_input_tokens > 0 and not second.cache_creation_input_tokens
    assert (
        second.cache_read_input_tokens
        >= first.cache_read_input_tokens + first.cache_creation_input_tokens
    )


@shows("anthropic", "stop_sequences; temperature, top_k, top_p, seed by extra_body")
def test_sampling_fields(ask_bundled):
    """What the bundled model is sure of, and what a seed draws."""

    def text(wanted: str, fields: dict[str, Any], **others: Any) -> str:
        return text_of(
            ask_bundled.messages.create(**asked(wanted, max_tokens=25, extra_body=fields, **others))
        )

    for fields in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0.01}):
        assert text(SORT, fields) == SORTED
    assert text(SORT, {"temperature": 0}, stop_sequences=["84"]) == "36 39 "
    drawn = [text("Tell me a story.", {"seed": seed}) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@shows("anthropic", "messages.create that goes on from what the assistant is to have said")
def test_prefilled_answers(ask_bundled):
    """The answer is what comes after it."""
    messages = [{"role": "user", "content": SORT}, {"role": "assistant", "content": SORTED[:5]}]
    assert (
        text_of(ask_bundled.messages.create(**asked("", messages=messages, **GREEDY))) == SORTED[5:]
    )


@shows("anthropic", "messages.parse, messages.stream with a pydantic model; output_config.format")
def test_parsed_answers(ask_bundled):
    """The answer is an object of the class."""
    request = asked(PERSON, **GREEDY)
    assert ask_bundled.messages.parse(**request, output_format=Person).parsed_output == Person(
        **FOUND
    )
    with ask_bundled.messages.stream(**request, output_format=Person) as stream:
        assert stream.get_final_message().parsed_output == Person(**FOUND)
    schema = {**Person.model_json_schema(), "additionalProperties": False}
    found = ask_bundled.messages.create(
        **request, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert json.loads(text_of(found)) == FOUND


@shows("anthropic", "tool_choice any and tool")
@pytest.mark.parametrize("streams", [False, True])
def test_calls_that_are_wanted(ask_bundled, streams):
    """The answer is a call whose input keeps to the schema."""
    keep = {
        "name": "keep",
        "input_schema": {**Person.model_json_schema(), "additionalProperties": False},
    }
    now = {"name": "now", "input_schema": {"type": "object", "additionalProperties": False}}
    for choice, tools in (
        ({"type": "tool", "name": "keep"}, [keep, now]),
        ({"type": "any"}, [keep]),
        ({"type": "any"}, [keep, now]),
    ):
        request = asked(PERSON, **GREEDY, tools=tools, tool_choice=choice)
        found = answer(ask_bundled, request, streams)
        (call,) = found.content
        assert (call.type, found.stop_reason) == ("tool_use", "tool_use")
        if choice["type"] == "tool":
            assert (call.name, call.input) == ("keep", FOUND)
        elif call.name == "keep":
            Person(**call.input)
        else:
            assert tools == [keep, now] and (call.name, call.input) == ("now", {})


@shows("anthropic", "beta.messages.create, stream and count_tokens with context_management")
def test_context_management(ask):
    """What old tools gave is left out of a long conversation, and the answer says how much."""
    calls = [
        {"type": "tool_use", "id": f"t{i}", "name": "weather", "input": {"city": "Rome"}}
        for i in range(5)
    ]
    talk: list[Any] = [{"role": "user", "content": "hello"}]
    for call in calls:
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sun " * 20}
        talk += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}
    asked: dict[str, Any] = {
        "model": "quill",
        "messages": talk,
        "context_management": {"edits": [edit]},
    }
    found = ask.beta.messages.create(max_tokens=9, **asked)
    (applied,) = found.context_management.applied_edits
    assert (applied.type, applied.cleared_tool_uses) == (edit["type"], 2)
    with ask.beta.messages.stream(max_tokens=9, **asked) as stream:
        assert stream.get_final_message().context_management == found.context_management
    count = ask.beta.messages.count_tokens(**asked)
    whole = ask.messages.count_tokens(model="quill", messages=talk)
    assert count.context_management.original_input_tokens == whole.input_tokens
    assert count.input_tokens == whole.input_tokens - applied.cleared_input_tokens
    asked["context_management"] = {"edits": [{"type": "compact_20260112"}]}
    with pytest.raises(anthropic.BadRequestError, match=r"context_management.edits\[0\].type"):
        ask.beta.messages.create(max_tokens=9, **asked)
