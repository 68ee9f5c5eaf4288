"""Anthropic's unmodified Python client against a server on a socket."""

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
GREEDY = {"extra_body": {"temperature": 0}}  # newer versions of the client have no such argument
WEATHER_TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": CITY}


class Person(BaseModel):
    name: str
    job: Literal["painter", "baker"]
    city: str


@pytest.fixture(scope="module")
def server():
    """A server whose model follows a script."""
    with scripted_server(FORMATS) as state:
        yield state


@pytest.fixture(scope="module")
def bundled():
    with bundled_server() as state:
        yield state


def make_client(server: Any, kind: type = Anthropic, **client_options: Any) -> Any:
    return kind(base_url=server.url, **{"api_key": "none", "max_retries": 0, **client_options})


@pytest.fixture
def client(server):
    with make_client(server) as client:
        yield client
    frees_all(server)


@pytest.fixture
def bundled_client(bundled):
    with make_client(bundled) as client:
        yield client
    frees_all(bundled)


def message_request(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "quill",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": text}],
        **fields,
    }


def message_text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def create_message(client: Any, request: dict[str, Any], is_streaming: bool) -> Any:
    """The message of `create`, or the message that the stream helper accumulates."""
    if not is_streaming:
        return client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        return stream.get_final_message()


def error_body(caught: Any) -> dict[str, str]:
    return caught.value.body["error"]


@shows("anthropic", "messages.create")
def test_create_message(client):
    """A message has its content, usage and stop reason."""
    message = client.messages.create(**message_request("hello", system="Be kind."))
    assert (message.role, message.type, message.model, message.stop_reason) == (
        "assistant",
        "message",
        "quill",
        "end_turn",
    )
    assert message_text(message) == said("hello") and message.id.startswith("msg_")
    assert (
        message.usage.input_tokens + message.usage.cache_read_input_tokens > 0
        and message.usage.output_tokens > 5
    )
    assert (
        client.messages.create(**message_request("hello", max_tokens=3)).stop_reason == "max_tokens"
    )
    stopped = client.messages.create(**message_request("hello", stop_sequences=["hello"]))
    assert (stopped.stop_reason, stopped.stop_sequence, message_text(stopped)) == (
        "stop_sequence",
        "hello",
        "You said: ",
    )
    blocks = [
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "two"},
    ]
    messages = [{"role": "user", "content": blocks}]
    assert message_text(client.messages.create(**message_request("", messages=messages))) == said(
        "one\ntwo"
    )


@shows("anthropic", "messages.create(stream=True)")
def test_message_streamed(client):
    """The events of a message arrive in order."""
    events = list(client.messages.create(**message_request("hello", stream=True)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(
        event.delta.text for event in events if event.type == "content_block_delta"
    ) == said("hello")
    assert events[-2].delta.stop_reason == "end_turn" and events[-2].usage.output_tokens > 5


@shows("anthropic", "messages.stream")
def test_message_helper_stream(client):
    """The stream helper's final message equals the response of `create`."""
    with client.messages.stream(**message_request("hello")) as stream:
        assert "".join(stream.text_stream) == said("hello")
        message = stream.get_final_message()
    assert message_text(message) == stream.get_final_text() == said("hello")
    assert (
        message.usage.output_tokens
        == client.messages.create(**message_request("hello")).usage.output_tokens
    )


@shows(
    "anthropic",
    "messages.create and messages.stream with tools and thinking, and the results sent back",
)
@pytest.mark.parametrize("is_streaming", [False, True])
def test_tool_loop(client, is_streaming):
    """Thinking, text and one or several calls are blocks; the model answers when they are sent back
    with results.
    """
    for places, cities in (("in Rome", ["Rome"]), ("in Rome and in Paris", ["Rome", "Paris"])):
        request = message_request(
            f"think of the weather {places}",
            tools=[WEATHER_TOOL],
            thinking={"type": "enabled", "budget_tokens": 50},
        )
        message = create_message(client, request, is_streaming)
        thinking, text, *calls = message.content
        assert (thinking.type, thinking.thinking.strip()) == ("thinking", "I must look.")
        assert (text.text.strip(), message.stop_reason) == ("I look.", "tool_use")
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
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": results},
        ]
        last = client.messages.create(**request)
        assert message_text(last) == f"It is {' and '.join(f'sun in {city}' for city in cities)}."
        assert last.stop_reason == "end_turn"
    assert message_text(
        client.messages.create(
            **message_request("weather in Rome", tools=[WEATHER_TOOL], tool_choice={"type": "none"})
        )
    ) == said("weather in Rome")


@shows("anthropic", "tool_choice with disable_parallel_tool_use")
def test_disable_parallel_tool_use_keeps_first_call(client):
    """Only the first of several calls is returned."""
    tool_choice = {"type": "auto", "disable_parallel_tool_use": True}
    request = message_request(
        "weather in Rome and in Paris", tools=[WEATHER_TOOL], tool_choice=tool_choice
    )
    for is_streaming in (False, True):
        message = create_message(client, request, is_streaming)
        assert [block.type for block in message.content] == ["text", "tool_use"]
        assert message.content[1].input == {"city": "Rome"}


@shows("anthropic", "beta.messages.tool_runner")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_tool_runner(client, is_streaming):
    """The client's own loop calls a function and ends with the answer; the server stores no
    conversation.
    """

    @beta_tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        return f"sun in {city}"

    runner = client.beta.messages.tool_runner(
        **message_request("weather in Rome and in Paris"), tools=[weather], stream=is_streaming
    )
    assert message_text(runner.until_done()) == "It is sun in Rome and sun in Paris."


@shows("anthropic", "messages.create with thinking")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_thinking(client, is_streaming):
    """Thinking is a separate block, and can be sent back."""
    request = message_request("think", thinking={"type": "adaptive"})
    if is_streaming:
        with client.messages.stream(**request) as stream:
            thinking_text = "".join(event.thinking for event in stream if event.type == "thinking")
            message = stream.get_final_message()
        assert thinking_text == message.content[0].thinking
    else:
        message = client.messages.create(**request)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking.strip() == "I must look." and message_text(
        message
    ).strip() == said("think")
    conversation = [
        *request["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": "hello"},
    ]
    assert message_text(
        client.messages.create(**message_request("", messages=conversation))
    ) == said("hello")


@shows("anthropic", "models.list, models.retrieve")
def test_models(client):
    """The models listed are the names that requests may use."""
    assert [model.id for model in client.models.list()] == ["quill", "other-name"]
    assert client.models.retrieve("quill").id == "quill"
    assert (
        client.messages.create(**message_request("hello", model="other-name")).model == "other-name"
    )


@shows("anthropic", "AsyncAnthropic: many requests at once, streamed and whole")
def test_concurrent_async_requests(server):
    """Concurrent requests get their own answers."""

    async def answer_request(client: AsyncAnthropic, index: int) -> str:
        request = message_request(f"number {index}")
        if index % 2:
            return message_text(await client.messages.create(**request))
        async with client.messages.stream(**request) as stream:
            return await stream.get_final_text()

    async def answer_all() -> list[str]:
        async with make_client(server, AsyncAnthropic) as client:
            return await asyncio.gather(*(answer_request(client, number) for number in range(24)))

    assert asyncio.run(answer_all()) == [said(f"number {number}") for number in range(24)]
    frees_all(server)


@shows("anthropic", "BadRequestError")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"temperature": 3000}}, "temperature"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_request_error_names_field(client, fields, param):
    """The message names the invalid field."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**message_request("hello", **fields))
    assert error_body(caught)["type"] == "invalid_request_error"
    assert error_body(caught)["message"].startswith(f"{param}: ")


@shows("anthropic", "NotFoundError, AuthenticationError")
def test_unknown_model_and_invalid_api_key(client):
    """An unknown model and an invalid key raise the client's exceptions."""
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**message_request("hello", model="claude"))
    with scripted_server(FORMATS, api_keys=("secret",)) as state:
        with (
            make_client(state, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.create(**message_request("hello"))
        assert error_body(caught)["type"] == "authentication_error"
        with make_client(state, api_key="secret") as client:
            assert message_text(client.messages.create(**message_request("hello"))) == said("hello")


@shows(
    "anthropic",
    "RateLimitError, ServiceUnavailableError, InternalServerError, and retries of them that "
    "succeed",
)
def test_client_retries_server_errors(server):
    """A full queue, a draining server and a failed step raise errors; the client's retries
    succeed.
    """
    with make_client(server) as client:
        server.engine.max_queued = 0
        with pytest.raises(anthropic.RateLimitError) as limited:
            client.messages.create(**message_request("hello"))
        assert error_body(limited)["type"] == "rate_limit_error"
        threading.Timer(0.3, lambda: setattr(server.engine, "max_queued", None)).start()
        assert message_text(
            client.with_options(max_retries=4).messages.create(**message_request("hello"))
        ) == said("hello")
        server.service.draining = True
        try:
            with pytest.raises(anthropic.ServiceUnavailableError) as refused:
                client.messages.create(**message_request("hello"))
        finally:
            server.service.draining = False
        assert error_body(refused)["type"] == "overloaded_error"
        server.script.fail_next = 1
        with pytest.raises(anthropic.InternalServerError) as failed:
            client.messages.create(**message_request("hello"))
        assert error_body(failed)["type"] == "api_error"
        server.script.fail_next = 1
        with pytest.raises(anthropic.APIStatusError, match="failed on this request"):
            list(client.messages.create(**message_request("hello", stream=True)))
        server.script.fail_next = 1
        raw_response = client.with_options(max_retries=2).messages.with_raw_response.create(
            **message_request("hello")
        )
        assert raw_response.retries_taken == 1 and message_text(raw_response.parse()) == said(
            "hello"
        )
    frees_all(server)


@shows(
    "anthropic",
    "APITimeoutError; a stream that is closed in the middle, or whose task is cancelled",
)
def test_disconnected_clients_abort_their_requests(server):
    """The server frees a request's resources long before its answer would have ended."""

    async def cancel_request() -> None:
        async with make_client(server, AsyncAnthropic) as client:
            task = asyncio.create_task(
                client.messages.create(**message_request("count", max_tokens=900))
            )
            while not server.engine.scheduler.running:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    steps = server.script.steps
    server.script.hold.clear()
    server.script.step_seconds = 0.05
    try:
        with make_client(server, timeout=0.3) as client, pytest.raises(anthropic.APITimeoutError):
            client.messages.create(**message_request("count", max_tokens=900))
        server.script.hold.set()
        frees_all(server)
        assert server.script.steps - steps < 100  # of 300: steps until the server notices
        with (
            make_client(server) as client,
            client.messages.stream(**message_request("count", max_tokens=900)) as stream,
        ):
            assert next(iter(stream.text_stream))
            steps = server.script.steps
            stream.close()
            until(lambda: not server.engine.requests)
            assert server.script.steps - steps < 100
        asyncio.run(cancel_request())
        steps = server.script.steps
        until(lambda: not server.engine.requests)
        assert server.script.steps - steps < 100
    finally:
        server.script.hold.set()
        server.script.step_seconds = 0.0
    frees_all(server)


@shows("anthropic", "with_raw_response, extra_headers")
def test_request_id_headers(client):
    """The client's request id, or a new one, is returned as x-request-id."""
    raw = client.messages.with_raw_response.create(
        **message_request("hello"), extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1" and message_text(raw.parse()) == said("hello")
    assert client.messages.with_raw_response.create(**message_request("hello")).headers[
        "x-request-id"
    ]
    assert (
        client.messages.create(**message_request("hello"), extra_body={"request_id": "mine-2"}).id
        == "msg_mine-2"
    )


@shows("anthropic", "messages.count_tokens")
def test_token_count_matches_usage(client, bundled_client):
    """The count equals the input tokens of the usage, including tools and system prompt."""
    for model_client, extra in (
        (client, {"tools": [WEATHER_TOOL], "system": "Be kind."}),
        (bundled_client, {"system": "Be kind."}),
    ):
        request = message_request(LIST, **extra)
        usage = model_client.messages.create(**request | {"max_tokens": 1}).usage
        del request["max_tokens"]
        count = model_client.messages.count_tokens(**request).input_tokens
        assert (
            count
            == usage.input_tokens
            + usage.cache_read_input_tokens
            + usage.cache_creation_input_tokens
        )
        assert (
            count
            > model_client.messages.count_tokens(
                model="quill", messages=request["messages"]
            ).input_tokens
        )


@shows("anthropic", "usage.cache_read_input_tokens, cache_creation_input_tokens")
def test_cache_usage_of_a_repeated_prompt(bundled_client):
    """A repeated prompt is read from the cache, without `cache_control`."""
    request = message_request(f"{LIST} and 7 and 8", max_tokens=1)
    first_usage, second_usage = (bundled_client.messages.create(**request).usage for _ in range(2))
    assert second_usage.cache_read_input_tokens >= 16 and second_usage.input_tokens > 0
    assert (
        first_usage.cache_creation_input_tokens > 0 and not second_usage.cache_creation_input_tokens
    )
    assert (
        second_usage.cache_read_input_tokens
        >= first_usage.cache_read_input_tokens + first_usage.cache_creation_input_tokens
    )


@shows("anthropic", "stop_sequences; temperature, top_k, top_p, seed by extra_body")
def test_sampling_fields(bundled_client):
    """Fields that make the bundled model deterministic, and seeds."""

    def answer_text(prompt: str, fields: dict[str, Any], **request_fields: Any) -> str:
        return message_text(
            bundled_client.messages.create(
                **message_request(prompt, max_tokens=25, extra_body=fields, **request_fields)
            )
        )

    for fields in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0.01}):
        assert answer_text(SORT, fields) == SORTED
    assert answer_text(SORT, {"temperature": 0}, stop_sequences=["84"]) == "36 39 "
    stories = [answer_text("Tell me a story.", {"seed": seed}) for seed in (1, 1, 2)]
    assert stories[0] == stories[1] != stories[2]


@shows("anthropic", "messages.create that goes on from what the assistant is to have said")
def test_prefilled_assistant_message(bundled_client):
    """The answer continues the given assistant message."""
    messages = [{"role": "user", "content": SORT}, {"role": "assistant", "content": SORTED[:5]}]
    assert (
        message_text(
            bundled_client.messages.create(**message_request("", messages=messages, **GREEDY))
        )
        == SORTED[5:]
    )


@shows("anthropic", "messages.parse, messages.stream with a pydantic model; output_config.format")
def test_parse_returns_pydantic_object(bundled_client):
    """The parsed answer is an instance of the pydantic class."""
    request = message_request(PERSON, **GREEDY)
    assert bundled_client.messages.parse(**request, output_format=Person).parsed_output == Person(
        **FOUND
    )
    with bundled_client.messages.stream(**request, output_format=Person) as stream:
        assert stream.get_final_message().parsed_output == Person(**FOUND)
    schema = {**Person.model_json_schema(), "additionalProperties": False}
    message = bundled_client.messages.create(
        **request, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert json.loads(message_text(message)) == FOUND


@shows("anthropic", "tool_choice any and tool")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_tool_choice_any_and_tool(bundled_client, is_streaming):
    """The answer is a call whose input matches the tool's schema."""
    keep_tool = {
        "name": "keep",
        "input_schema": {**Person.model_json_schema(), "additionalProperties": False},
    }
    now_tool = {"name": "now", "input_schema": {"type": "object", "additionalProperties": False}}
    for choice, tools in (
        ({"type": "tool", "name": "keep"}, [keep_tool, now_tool]),
        ({"type": "any"}, [keep_tool]),
        ({"type": "any"}, [keep_tool, now_tool]),
    ):
        request = message_request(PERSON, **GREEDY, tools=tools, tool_choice=choice)
        message = create_message(bundled_client, request, is_streaming)
        (call,) = message.content
        assert (call.type, message.stop_reason) == ("tool_use", "tool_use")
        if choice["type"] == "tool":
            assert (call.name, call.input) == ("keep", FOUND)
        elif call.name == "keep":
            Person(**call.input)
        else:
            assert tools == [keep_tool, now_tool] and (call.name, call.input) == ("now", {})


@shows("anthropic", "beta.messages.create, stream and count_tokens with context_management")
def test_context_management(client):
    """Old tool results are removed from a long conversation, and the response reports how much was
    removed.
    """
    calls = [
        {"type": "tool_use", "id": f"t{i}", "name": "weather", "input": {"city": "Rome"}}
        for i in range(5)
    ]
    conversation: list[Any] = [{"role": "user", "content": "hello"}]
    for call in calls:
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sun " * 20}
        conversation += [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    edit = {"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}
    request: dict[str, Any] = {
        "model": "quill",
        "messages": conversation,
        "context_management": {"edits": [edit]},
    }
    message = client.beta.messages.create(max_tokens=9, **request)
    (applied_edit,) = message.context_management.applied_edits
    assert (applied_edit.type, applied_edit.cleared_tool_uses) == (edit["type"], 2)
    with client.beta.messages.stream(max_tokens=9, **request) as stream:
        assert stream.get_final_message().context_management == message.context_management
    count = client.beta.messages.count_tokens(**request)
    full_count = client.messages.count_tokens(model="quill", messages=conversation)
    assert count.context_management.original_input_tokens == full_count.input_tokens
    assert count.input_tokens == full_count.input_tokens - applied_edit.cleared_input_tokens
    request["context_management"] = {"edits": [{"type": "compact_20260112"}]}
    with pytest.raises(anthropic.BadRequestError, match=r"context_management.edits\[0\].type"):
        client.beta.messages.create(max_tokens=9, **request)
