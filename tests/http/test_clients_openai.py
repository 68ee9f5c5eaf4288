"""OpenAI's unmodified Python client against a server on a socket."""

import asyncio
import base64
import json
import re
import threading
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
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


class weather(BaseModel):  # the tool has the name of the class
    """The weather of a city."""

    city: str


class Person(BaseModel):
    name: str
    job: Literal["painter", "baker"]
    city: str


WEATHER_TOOL: Any = openai.pydantic_function_tool(weather)
NOW_TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
RESPONSES_WEATHER_TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": WEATHER_TOOL["function"]["parameters"],
    "strict": True,
}
WITH_USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server():
    """A server whose model follows a script."""
    with scripted_server(FORMATS) as state:
        yield state


@pytest.fixture(scope="module")
def bundled():
    with bundled_server() as state:
        yield state


def make_client(server: Any, kind: type = OpenAI, **client_options: Any) -> Any:
    return kind(
        base_url=f"{server.url}/v1", **{"api_key": "none", "max_retries": 0, **client_options}
    )


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


def user_messages(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def complete_hello(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model="quill", messages=user_messages("hello"), **fields)


@shows("openai", "chat.completions.create")
def test_chat_completion(client):
    """A chat completion has its content, usage and finish reason."""
    completion = complete_hello(client)
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", said("hello"))
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert (
        completion.usage.total_tokens
        == completion.usage.prompt_tokens + completion.usage.completion_tokens
    )
    assert (completion.model, completion.object) == (
        "quill",
        "chat.completion",
    ) and completion.id.startswith("chatcmpl-")
    assert completion.system_fingerprint.startswith("quire-")
    assert complete_hello(client, max_completion_tokens=3).choices[0].finish_reason == "length"
    assert complete_hello(client, stop="hello").choices[0].message.content == "You said: "
    multipart_completion = client.chat.completions.create(
        model="quill",
        messages=[
            {"role": "developer", "content": "Be kind."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            },
        ],
    )
    assert multipart_completion.choices[0].message.content == said("one\ntwo")


@shows("openai", "chat.completions.create(stream=True)")
def test_chat_streamed(client):
    """The joined deltas are the content; the usage is in the last chunk on request."""
    chunks = list(complete_hello(client, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said("hello")
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    *chunks, last = complete_hello(client, stream=True, **WITH_USAGE)
    assert last.choices == [] and last.usage == complete_hello(client).usage
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete_hello(client, stream=True, stream_options=continuous)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens


@shows("openai", "chat.completions.stream")
def test_chat_helper_stream(client):
    """The stream helper's final completion equals the response of `create`."""
    with client.chat.completions.stream(
        model="quill", messages=user_messages("hello"), n=2, **WITH_USAGE
    ) as stream:
        contents = [event.content for event in stream if event.type == "content.done"]
    assert contents == [said("hello")] * 2
    completion = stream.get_final_completion()
    assert [choice.message.content for choice in completion.choices] == contents
    assert completion.usage.completion_tokens == 2 * complete_hello(client).usage.completion_tokens


@shows("openai", "chat.completions.create with tools, and the results sent back")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_chat_tool_loop(client, is_streaming):
    """The model calls one or several tools, then answers from their results."""
    for text, cities in (
        ("weather in Rome", ["Rome"]),
        ("weather in Rome and in Paris", ["Rome", "Paris"]),
    ):
        messages = user_messages(text)
        if is_streaming:
            with client.chat.completions.stream(
                model="quill", messages=messages, tools=[WEATHER_TOOL]
            ) as stream:
                events = list(stream)
            choice = stream.get_final_completion().choices[0]
            assert [e.name for e in events if e.type == "tool_calls.function.arguments.done"] == [
                "weather"
            ] * len(cities)
            assert [
                call.function.parsed_arguments.city for call in choice.message.tool_calls
            ] == cities
        else:
            choice = client.chat.completions.create(
                model="quill", messages=messages, tools=[WEATHER_TOOL]
            ).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
        calls = choice.message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == cities
        assert len({call.id for call in calls}) == len(calls) and all(
            call.type == "function" for call in calls
        )
        messages.append(choice.message)
        for number, call in enumerate(calls):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"sun {number}"})
        last = client.chat.completions.create(
            model="quill", messages=messages, tools=[WEATHER_TOOL]
        ).choices[0]
        assert (
            last.message.content == f"It is {' and '.join(f'sun {n}' for n in range(len(cities)))}."
        )
        assert (last.finish_reason, last.message.tool_calls) == ("stop", None)


@shows("openai", "chat.completions.create(tool_choice='none')")
def test_tool_choice_none_returns_no_calls(client):
    """The prompt has no tools, and the answer no calls."""
    completion = client.chat.completions.create(
        model="quill",
        messages=user_messages("weather in Rome"),
        tools=[WEATHER_TOOL],
        tool_choice="none",
    )
    assert completion.choices[0].message.tool_calls is None
    assert completion.choices[0].message.content == said("weather in Rome")


@shows("openai", "parallel_tool_calls=False, of chat and of responses")
def test_parallel_tool_calls_false_keeps_first_call(client):
    """Only the first of several calls is returned."""
    request_fields: dict[str, Any] = {
        "model": "quill",
        "tools": [WEATHER_TOOL],
        "parallel_tool_calls": False,
    }
    messages = user_messages("weather in Rome and in Paris")
    (call,) = (
        client.chat.completions.create(messages=messages, **request_fields)
        .choices[0]
        .message.tool_calls
    )
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    with client.chat.completions.stream(messages=messages, **request_fields) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments == weather(city="Rome")
    response = client.responses.create(
        input=messages, **request_fields | {"tools": [RESPONSES_WEATHER_TOOL]}
    )
    assert [item.type for item in response.output] == ["message", "function_call"]


@shows("openai", "chat.completions.create of a model that thinks")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_chat_reasoning(client, is_streaming):
    """Reasoning is `message.reasoning` (and `reasoning_content`), and usage counts its tokens."""
    completion = client.chat.completions.create(
        model="quill",
        messages=user_messages("think"),
        stream=is_streaming,
        **(WITH_USAGE if is_streaming else {}),
    )
    if is_streaming:
        *chunks, last = completion
        deltas = [chunk.choices[0].delta for chunk in chunks]
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        usage = last.usage
    else:
        message = completion.choices[0].message
        usage = completion.usage
        content = message.content
        reasoning = message.reasoning
        assert message.reasoning_content == reasoning
        conversation = [*user_messages("think"), message, *user_messages("hello")]
        assert client.chat.completions.create(model="quill", messages=conversation).choices[
            0
        ].message.content == said("hello")
    assert content.strip() == said("think") and reasoning.strip() == "I must look."
    assert 0 < usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens


@shows("openai", "completions.create")
def test_completion(client):
    """One choice for each of `n` and each prompt, ordered by prompt."""
    completion = client.completions.create(
        model="quill", prompt=["<user>a<assistant>", "<user>b<assistant>"], n=2, max_tokens=99
    )
    assert [(choice.index, choice.text) for choice in completion.choices] == list(
        enumerate([said("a")] * 2 + [said("b")] * 2)
    )
    assert {choice.finish_reason for choice in completion.choices} == {
        "stop"
    } and completion.id.startswith("cmpl-")
    # the default of 16 tokens
    assert (
        client.completions.create(model="quill", prompt="<user>a").choices[0].finish_reason
        == "length"
    )


@shows("openai", "completions.create(stream=True)")
def test_completion_streamed(client):
    """The texts joined by choice index are the choices' texts."""
    prompts = ["<user>a<assistant>", "<user>b<assistant>"]
    texts = dict.fromkeys(range(4), "")
    *chunks, last = client.completions.create(
        model="quill", prompt=prompts, n=2, max_tokens=99, stream=True, **WITH_USAGE
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [said("a")] * 2 + [said("b")] * 2
    assert last.usage.completion_tokens > 40


@shows("openai", "completions.create(echo=True)")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_completion_echo(client, is_streaming):
    """The prompt precedes the completion."""
    request_fields = {"prompt": "<user>a<assistant>", "echo": True, "max_tokens": 99}
    completion = client.completions.create(model="quill", stream=is_streaming, **request_fields)
    text = (
        "".join(chunk.choices[0].text for chunk in completion)
        if is_streaming
        else completion.choices[0].text
    )
    assert text == request_fields["prompt"] + said("a")


@shows("openai", "responses.create")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_response(client, is_streaming):
    """A response has output items; when streamed it is sent as events."""
    response = client.responses.create(
        model="quill", input="hello", instructions="Be kind.", stream=is_streaming
    )
    if is_streaming:
        events = list(response)
        assert "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        ) == said("hello")
        assert events[-1].type == "response.completed"
        response = events[-1].response
    assert (response.output_text, response.status, response.instructions) == (
        said("hello"),
        "completed",
        "Be kind.",
    )
    assert (
        response.usage.total_tokens
        == response.usage.input_tokens + response.usage.output_tokens
        > 0
    )


@shows("openai", "responses.create with tools, and the results sent back; responses.stream")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_response_tool_loop(client, is_streaming):
    """Reasoning, text and calls are items; the model answers when they are sent back with
    results.
    """
    request_fields: dict[str, Any] = {"model": "quill", "tools": [RESPONSES_WEATHER_TOOL]}
    conversation = user_messages("think of the weather in Rome and in Paris")
    if is_streaming:
        with client.responses.stream(input=conversation, **request_fields) as stream:
            events = list(stream)
        response = stream.get_final_response()
        assert [e.type for e in events].count("response.function_call_arguments.done") == 2
    else:
        response = client.responses.create(input=conversation, **request_fields)
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert (
        response.output[0].content[0].text.strip() == "I must look."
        and response.output_text.strip() == "I look."
    )
    conversation += response.output
    for item in response.output[2:]:
        city = json.loads(item.arguments)["city"]
        conversation.append(
            {"type": "function_call_output", "call_id": item.call_id, "output": f"sun in {city}"}
        )
    last = client.responses.create(input=conversation, **request_fields)
    assert last.output_text == "It is sun in Rome and sun in Paris."


@shows("openai", "models.list, models.retrieve")
def test_models(client):
    """The models listed are the names that requests may use."""
    assert [model.id for model in client.models.list()] == ["quill", "other-name"]
    assert client.models.retrieve("quill").max_model_len == 1024
    completion = client.chat.completions.create(model="other-name", messages=user_messages("hello"))
    assert completion.model == "other-name"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


@shows("openai", "AsyncOpenAI: many requests at once, streamed and whole")
def test_concurrent_async_requests(server):
    """Concurrent requests get their own answers."""

    async def answer_request(client: AsyncOpenAI, index: int) -> str:
        messages = user_messages(f"number {index}")
        if index % 3 == 0:
            async with client.chat.completions.stream(model="quill", messages=messages) as stream:
                return (await stream.get_final_completion()).choices[0].message.content or ""
        if index % 3 == 1:
            chunks = await client.chat.completions.create(
                model="quill", messages=messages, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        return (await client.responses.create(model="quill", input=messages)).output_text

    async def answer_all() -> list[str]:
        async with make_client(server, AsyncOpenAI) as client:
            return await asyncio.gather(*(answer_request(client, number) for number in range(24)))

    assert asyncio.run(answer_all()) == [said(f"number {number}") for number in range(24)]
    frees_all(server)


@shows("openai", "BadRequestError")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3000}, "temperature"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].image_url.url"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    ],
)  # fmt: skip
def test_bad_request_error_names_field(client, fields, param):
    """`.param` names the invalid field."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **{"model": "quill", "messages": user_messages("hello"), **fields}
        )
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert param in str(caught.value) and caught.value.request_id


@shows("openai", "NotFoundError")
def test_unknown_model_is_not_found(client):
    """An unknown model gives the code `model_not_found`."""
    for call in (
        lambda: client.chat.completions.create(model="gpt", messages=user_messages("x")),
        lambda: client.completions.create(model="gpt", prompt="x"),
        lambda: client.responses.create(model="gpt", input="x"),
        lambda: client.embeddings.create(model="gpt", input="x"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@shows("openai", "AuthenticationError")
def test_invalid_api_key_is_rejected():
    """Requests without a valid key fail; with a valid key they succeed."""
    with scripted_server(FORMATS, api_keys=("secret",)) as state:
        for key in ("wrong", "secre", "secret2"):
            with (
                make_client(state, api_key=key) as client,
                pytest.raises(openai.AuthenticationError) as caught,
            ):
                complete_hello(client)
            assert caught.value.code == "invalid_api_key"
        with make_client(state, api_key="secret") as client:
            assert complete_hello(client).choices[0].message.content == said("hello")


@shows("openai", "RateLimitError, and retries of it that succeed")
def test_client_retries_after_full_queue(server):
    """With `max_retries` the client retries after the server's `retry-after`, and succeeds."""
    engine_thread = server.service.models.models[0].llm.thread
    replies = []
    server.engine.max_queued = 1
    server.script.hold.clear()
    try:
        with make_client(server, max_retries=4) as client:
            create = client.chat.completions.with_raw_response.create

            def run() -> None:
                replies.append(create(model="quill", messages=user_messages("hello")))

            threads = [threading.Thread(target=run) for _ in range(3)]
            threads[0].start()
            # The step hangs; the queue has room for one of the next two requests.
            until(lambda: engine_thread.stalled() > 0.1)
            for thread in threads[1:]:
                thread.start()
            until(lambda: len(engine_thread.jobs) == 2)
            server.script.hold.set()
            for thread in threads:
                thread.join(120)
            with pytest.raises(openai.RateLimitError) as caught:
                complete_hello(client.with_options(max_retries=0), n=2)
    finally:
        server.script.hold.set()
        server.engine.max_queued = None
    assert sorted(reply.retries_taken for reply in replies) == [0, 0, 1]
    assert [reply.parse().choices[0].message.content for reply in replies] == [said("hello")] * 3
    assert (
        caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
    )


@shows("openai", "InternalServerError (503 and 500), and retries of them that succeed")
def test_client_retries_while_draining_and_after_engine_error(server):
    """A draining server answers 503, a failed step 500; the client's retries succeed."""
    with make_client(server) as client:
        server.service.draining = True
        try:
            with pytest.raises(openai.InternalServerError) as caught:
                complete_hello(client)
        finally:
            server.service.draining = False
        assert (caught.value.status_code, caught.value.code) == (503, "draining")
        server.script.fail_next = 1
        with pytest.raises(openai.InternalServerError) as caught:
            complete_hello(client)
        assert (caught.value.status_code, caught.value.code) == (500, "engine_error")
        server.script.fail_next = 1
        with pytest.raises(openai.APIError, match="failed on this request"):
            list(complete_hello(client, stream=True))
        server.script.fail_next = 1
        raw_response = client.with_options(max_retries=2).chat.completions.with_raw_response.create(
            model="quill", messages=user_messages("hello")
        )
        assert raw_response.retries_taken == 1 and raw_response.parse().choices[
            0
        ].message.content == said("hello")
        server.service.draining = True
        threading.Timer(0.5, lambda: setattr(server.service, "draining", False)).start()
        assert complete_hello(client.with_options(max_retries=2)).choices[
            0
        ].message.content == said("hello")


@shows("openai", "APITimeoutError")
def test_client_timeout_aborts_request(server):
    """The server frees the resources of requests whose client timed out."""
    server.script.hold.clear()
    server.script.step_seconds = 0.05
    steps = server.script.steps
    try:
        with make_client(server, timeout=0.3) as client:
            for fields in ({}, {"stream": True}):
                with pytest.raises(openai.APITimeoutError):
                    list(
                        client.chat.completions.create(
                            model="quill", messages=user_messages("count"), **fields
                        )
                    )
        server.script.hold.set()
        frees_all(server)
    finally:
        server.script.hold.set()
        server.script.step_seconds = 0.0
    assert server.script.steps - steps < 100  # of 600: steps until the server notices


@shows("openai", "a stream that is closed in the middle, or whose task is cancelled")
def test_closed_stream_or_cancelled_task_aborts_request(server):
    """The request's pages are freed long before the answer would have ended."""

    async def cancel_requests() -> None:
        async with make_client(server, AsyncOpenAI) as client:

            async def read() -> None:
                async for _ in await client.chat.completions.create(
                    model="quill", messages=user_messages("count"), stream=True
                ):
                    first_chunk_read.set()

            for call in (
                read(),
                client.chat.completions.create(model="quill", messages=user_messages("count")),
            ):
                first_chunk_read = asyncio.Event()
                task = asyncio.create_task(call)
                while not server.engine.scheduler.running or (
                    not first_chunk_read.is_set() and call.__name__ == "read"
                ):
                    await asyncio.sleep(0.005)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                steps.append(server.script.steps)
                await asyncio.to_thread(until, lambda: not server.engine.requests)
                steps[-1] = server.script.steps - steps[-1]

    steps: list[int] = []
    server.script.step_seconds = 0.05
    try:
        with make_client(server) as client:
            stream = client.chat.completions.create(
                model="quill", messages=user_messages("count"), stream=True
            )
            for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            assert server.engine.requests
            steps.append(server.script.steps)
            stream.close()
            until(lambda: not server.engine.requests)
            steps[-1] = server.script.steps - steps[-1]
        asyncio.run(cancel_requests())
    finally:
        server.script.step_seconds = 0.0
    assert len(steps) == 3 and max(steps) < 100  # of 300: steps until the server notices
    frees_all(server)


@shows("openai", "with_raw_response, with_streaming_response, extra_headers")
def test_request_id_headers(client):
    """The client's request id, or a new one, is returned as `x-request-id` and `_request_id`."""
    request_fields: dict[str, Any] = {"model": "quill", "messages": user_messages("hello")}
    raw = client.chat.completions.with_raw_response.create(
        **request_fields, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == raw.parse()._request_id == "mine-1"
    first_id, second_id = (complete_hello(client)._request_id for _ in range(2))
    assert first_id and second_id and first_id != second_id
    assert (
        client.chat.completions.create(**request_fields, extra_body={"request_id": "mine-2"}).id
        == "chatcmpl-mine-2"
    )
    with client.chat.completions.with_streaming_response.create(
        **request_fields, stream=True
    ) as raw:
        assert (
            raw.headers["content-type"].startswith("text/event-stream")
            and raw.headers["x-request-id"]
        )
        assert list(raw.iter_lines())[-2] == "data: [DONE]"


def complete_sort(client: Any, **fields: Any) -> Any:
    """Complete a prompt that the bundled model answers with near certainty."""
    return client.chat.completions.create(
        model="quill", messages=user_messages(SORT), **{"temperature": 0, **fields}
    )


@shows("openai", "chat.completions.create(seed=...)")
def test_seed_is_reproducible(bundled_client):
    """The same seed gives the same text in any batch; other seeds give other texts."""

    def write_stories(**fields: Any) -> list[str]:
        completion = bundled_client.chat.completions.create(
            model="quill",
            messages=user_messages("Tell me a story about a violin."),
            max_tokens=25,
            **fields,
        )
        return [choice.message.content for choice in completion.choices]

    reference = write_stories(seed=1)
    assert write_stories(seed=1) == reference and write_stories(seed=1, n=3)[:1] == reference
    assert len(set(write_stories(seed=1, n=3))) == 3
    assert (
        len(
            {
                *reference,
                *write_stories(seed=2),
                *write_stories(seed=3),
                *write_stories(),
                *write_stories(),
            }
        )
        == 5
    )


@shows("openai", "logprobs, top_logprobs; the same streamed")
def test_chat_logprobs(bundled_client):
    """Each token has its likeliest alternatives; the joined tokens are the answer."""
    completion = complete_sort(bundled_client, logprobs=True, top_logprobs=3)
    content = completion.choices[0].logprobs.content
    assert (
        b"".join(bytes(entry.bytes) for entry in content).decode().removesuffix("<|end|>") == SORTED
    )
    for entry in content:
        top_logprobs = [candidate.logprob for candidate in entry.top_logprobs]
        assert len(top_logprobs) == 3 and top_logprobs == sorted(top_logprobs, reverse=True)
        assert (
            entry.logprob == top_logprobs[0] and entry.token == entry.top_logprobs[0].token
        )  # greedy
    chunks = list(complete_sort(bundled_client, logprobs=True, top_logprobs=3, stream=True))
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in content], abs=1e-3
    )
    with bundled_client.chat.completions.stream(
        model="quill", messages=user_messages(SORT), temperature=0, logprobs=True
    ) as stream:
        final = stream.get_final_completion().choices[0]
    assert len(final.logprobs.content) == len(content) and final.message.content == SORTED
    request_fields = {"model": "quill", "input": SORT, "temperature": 0, "top_logprobs": 3}
    response = bundled_client.responses.create(
        **request_fields, include=["message.output_text.logprobs"]
    )
    assert response.output_text == SORTED
    assert [e.token for e in response.output[0].content[0].logprobs] == [
        entry.token for entry in content
    ]


@shows("openai", "completions.create(logprobs=...); echo and prompt_logprobs by extra_body")
def test_completion_logprobs_with_echo(bundled_client):
    """Parallel lists with text offsets; `echo` puts those of the prompt first."""
    prompt = "Once upon a time, there was a curious mouse"
    request_fields: dict[str, Any] = {
        "model": "quill",
        "prompt": prompt,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 2,
    }
    choice_without_echo = bundled_client.completions.create(
        **request_fields, extra_body={"prompt_logprobs": 0, "return_token_ids": True}
    ).choices[0]
    echo = bundled_client.completions.create(**request_fields, echo=True).choices[0]
    assert echo.text == prompt + choice_without_echo.text
    for choice, text in ((choice_without_echo, choice_without_echo.text), (echo, echo.text)):
        logprobs = choice.logprobs
        end_offsets = [*logprobs.text_offset[1:], len(text)]
        for token, start, end in zip(
            logprobs.tokens, logprobs.text_offset, end_offsets, strict=True
        ):
            assert text[start:end] == token or token == "<|bos|>"
    count = len(choice_without_echo.logprobs.tokens)
    assert (
        echo.logprobs.tokens[-count:] == choice_without_echo.logprobs.tokens
        and len(choice_without_echo.token_ids) == count
    )
    prompt_logprobs = [
        next(iter(entries.values()))["logprob"]
        for entries in choice_without_echo.prompt_logprobs[1:]
    ]
    assert choice_without_echo.prompt_logprobs[0] is None and len(prompt_logprobs) + 1 == len(
        choice_without_echo.prompt_token_ids
    )
    assert echo.logprobs.token_logprobs[1:-count] == pytest.approx(prompt_logprobs, abs=1e-3)
    prompt_only = bundled_client.completions.create(
        **request_fields | {"max_tokens": 0}, echo=True
    ).choices[0]
    assert (
        prompt_only.text == prompt and prompt_only.logprobs.tokens == echo.logprobs.tokens[:-count]
    )
    choice_from_ids = bundled_client.completions.create(
        **request_fields | {"prompt": choice_without_echo.prompt_token_ids}
    ).choices[0]
    assert choice_from_ids.text == choice_without_echo.text


@shows("openai", "n, best_of")
def test_n_and_best_of(bundled_client):
    """`n` gives so many choices; `best_of` gives the likeliest of its samples."""
    request_fields: dict[str, Any] = {
        "model": "quill",
        "prompt": "Once upon a time",
        "max_tokens": 8,
        "seed": 3,
    }
    choices = bundled_client.completions.create(**request_fields, n=4, logprobs=0).choices
    assert [choice.index for choice in choices] == [0, 1, 2, 3] and len(
        {choice.text for choice in choices}
    ) > 1
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in choices]
    best = bundled_client.completions.create(**request_fields, best_of=4).choices
    assert [choice.text for choice in best] == [choices[means.index(max(means))].text]


@shows("openai", "stop, max_tokens; stop_token_ids, min_tokens, ignore_eos by extra_body")
def test_finish_and_stop_reasons(bundled_client):
    """`finish_reason` and `stop_reason` say how an answer ended."""

    def finish(**fields: Any) -> tuple[Any, ...]:
        choice = complete_sort(bundled_client, **fields).choices[0]
        return choice.message.content, choice.finish_reason, choice.stop_reason

    tokens = (
        complete_sort(bundled_client, extra_body={"return_token_ids": True}).choices[0].token_ids
    )
    assert finish() == (SORTED, "stop", None)
    assert finish(stop=["84"]) == ("36 39 ", "stop", "84")
    assert finish(stop="84", extra_body={"include_stop_str_in_output": True}) == (
        "36 39 84",
        "stop",
        "84",
    )
    assert finish(extra_body={"stop_token_ids": [tokens[2]]})[1:] == ("stop", tokens[2])
    assert finish(max_tokens=2)[1] == finish(max_completion_tokens=2)[1] == "length"
    assert finish(max_tokens=30, extra_body={"ignore_eos": True})[1] == "length"
    assert len(finish(max_tokens=40, extra_body={"min_tokens": 30})[0]) > len(SORTED)


@shows(
    "openai",
    "logit_bias; allowed_token_ids, bad_words, top_k, min_p, repetition_penalty by extra_body",
)
def test_sampling_fields(bundled_client):
    """Fields that restrict the allowed tokens or change how they are sampled."""
    tokens = (
        complete_sort(bundled_client, extra_body={"return_token_ids": True}).choices[0].token_ids
    )
    assert (
        complete_sort(bundled_client, logit_bias={str(tokens[0]): -100}, max_tokens=8)
        .choices[0]
        .message.content[:2]
        != "36"
    )
    restricted = complete_sort(
        bundled_client,
        max_tokens=4,
        extra_body={"allowed_token_ids": tokens[:1], "return_token_ids": True},
    )
    assert restricted.choices[0].token_ids == tokens[:1] * 4
    contradictory = {"allowed_token_ids": tokens[:1], "stop_token_ids": tokens[:1], "min_tokens": 3}
    with pytest.raises(
        openai.BadRequestError, match="leaves, with logit_bias.*, no token that may come next"
    ):
        complete_sort(bundled_client, max_tokens=4, extra_body=contradictory)
    assert (
        "84"
        not in complete_sort(bundled_client, max_tokens=12, extra_body={"bad_words": ["84", " 84"]})
        .choices[0]
        .message.content
    )
    for extra_body in ({"top_k": 1}, {"min_p": 1.0}):
        assert (
            complete_sort(bundled_client, temperature=1.0, extra_body=extra_body)
            .choices[0]
            .message.content
            == SORTED
        )
    assert (
        complete_sort(bundled_client, temperature=2.0, top_p=0.01).choices[0].message.content
        == SORTED
    )
    request_fields: dict[str, Any] = {
        "model": "quill",
        "prompt": "Once upon a time",
        "max_tokens": 60,
        "temperature": 0,
    }
    text_without_penalty = bundled_client.completions.create(**request_fields).choices[0].text
    for fields in (
        {"presence_penalty": 2, "frequency_penalty": 2},
        {"extra_body": {"repetition_penalty": 50}},
    ):
        assert (
            bundled_client.completions.create(**request_fields, **fields).choices[0].text
            != text_without_penalty
        )


@shows("openai", "usage.prompt_tokens_details.cached_tokens; cache_salt by extra_body")
def test_cached_tokens_depend_on_cache_salt(bundled_client):
    """Full pages of an earlier prompt are reused, but not under another salt."""

    def count_cached_tokens(**fields: Any) -> int:
        completion = bundled_client.chat.completions.create(
            model="quill", messages=user_messages(LIST), max_tokens=2, **fields
        )
        return completion.usage.prompt_tokens_details.cached_tokens

    count_cached_tokens(extra_body={"cache_salt": "a"})
    assert count_cached_tokens(extra_body={"cache_salt": "a"}) >= 16
    assert count_cached_tokens(extra_body={"cache_salt": "b"}) == 0
    response = bundled_client.responses.create(
        model="quill", input=LIST, extra_body={"cache_salt": "a"}
    )
    assert response.usage.input_tokens_details.cached_tokens >= 16


@shows("openai", "return_token_ids, prompt_logprobs by extra_body")
def test_token_ids_and_prompt_logprobs(bundled_client):
    """Token ids of the prompt and the answer; streamed chunks have those of their own text."""
    completion = complete_sort(
        bundled_client, extra_body={"return_token_ids": True, "prompt_logprobs": 1}
    )
    assert (
        len(completion.prompt_token_ids)
        == completion.usage.prompt_tokens
        == len(completion.prompt_logprobs)
    )
    assert len(completion.choices[0].token_ids) == completion.usage.completion_tokens
    chunks = list(complete_sort(bundled_client, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].prompt_token_ids == completion.prompt_token_ids
    assert [
        token for chunk in chunks[1:] for token in chunk.choices[0].token_ids
    ] == completion.choices[0].token_ids


@shows(
    "openai",
    "continue_final_message, echo, add_generation_prompt, truncate_prompt_tokens by extra_body",
)
def test_continue_final_message_and_truncated_prompts(bundled_client):
    """The answer continues a given assistant message; truncation keeps the end of the prompt."""
    messages = [*user_messages(SORT), {"role": "assistant", "content": SORTED[:5]}]
    request_fields: dict[str, Any] = {"model": "quill", "messages": messages, "temperature": 0}
    for echo, text in ((False, SORTED[5:]), (True, SORTED)):
        extra = {"continue_final_message": True, "echo": echo}
        assert (
            bundled_client.chat.completions.create(**request_fields, extra_body=extra)
            .choices[0]
            .message.content
            == text
        )
        chunks = bundled_client.chat.completions.create(
            **request_fields, extra_body=extra, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert (
        complete_sort(
            bundled_client, extra_body={"truncate_prompt_tokens": 7}, max_tokens=1
        ).usage.prompt_tokens
        == 7
    )
    with_generation_prompt, without_generation_prompt = (
        complete_sort(bundled_client, max_tokens=1, **f)
        for f in ({}, {"extra_body": {"add_generation_prompt": False}})
    )
    assert (
        with_generation_prompt.usage.prompt_tokens > without_generation_prompt.usage.prompt_tokens
    )


PERSON_REQUEST: dict[str, Any] = {
    "model": "quill",
    "messages": user_messages(PERSON),
    "temperature": 0,
}


@shows("openai", "response_format json_object and json_schema; structured_outputs by extra_body")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_structured_outputs(bundled_client, is_streaming):
    """The answer has the requested format even where the model prefers another text."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Lagos"]},
            "age": {"type": "integer", "minimum": 3, "maximum": 9},
        },
        "required": ["age", "city"],
        "additionalProperties": False,
    }

    def complete_person(**fields: Any) -> str:
        completion = bundled_client.chat.completions.create(
            **PERSON_REQUEST | fields, stream=is_streaming, max_tokens=100
        )
        if is_streaming:
            return "".join(chunk.choices[0].delta.content or "" for chunk in completion)
        return completion.choices[0].message.content

    assert json.loads(complete_person(response_format={"type": "json_object"})) == FOUND
    strict = {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": schema, "strict": True},
    }
    for messages in (user_messages(PERSON), user_messages(SORT)):
        place = json.loads(complete_person(messages=messages, response_format=strict))
        assert (
            set(place) == {"age", "city"}
            and place["city"] in ("Rome", "Lagos")
            and place["age"] in range(3, 10)
        )
    assert complete_person(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}) in (
        "yes",
        "no",
    )
    assert (
        complete_person(extra_body={"structured_outputs": {"regex": "[a-c]{5}"}}).strip("abc") == ""
    )
    assert json.loads(complete_person(extra_body={"structured_outputs": {"json": schema}}))["city"]
    text = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}}
    assert json.loads(
        bundled_client.responses.create(model="quill", input=PERSON, text=text).output_text
    )["city"]


# The client warns when it sends back a parsed message.
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@shows(
    "openai",
    "chat.completions.parse, chat.completions.stream and responses.parse with a pydantic model",
)
def test_parse_returns_pydantic_object(bundled_client):
    """The parsed answer is an instance of the pydantic class."""
    expected = Person(**FOUND)
    completion = bundled_client.chat.completions.parse(**PERSON_REQUEST, response_format=Person)
    assert completion.choices[0].message.parsed == expected
    with bundled_client.chat.completions.stream(**PERSON_REQUEST, response_format=Person) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == expected
    conversation = [*user_messages(PERSON), completion.choices[0].message, *user_messages(SORT)]
    assert bundled_client.chat.completions.create(
        model="quill", messages=conversation, max_tokens=5
    )
    response = bundled_client.responses.parse(
        model="quill", input=PERSON, text_format=Person, temperature=0
    )
    assert response.output_parsed == expected
    with bundled_client.responses.stream(
        model="quill", input=PERSON, text_format=Person, temperature=0
    ) as stream:
        assert stream.get_final_response().output_parsed == expected
    with pytest.raises(openai.LengthFinishReasonError):
        bundled_client.chat.completions.parse(
            **PERSON_REQUEST, response_format=Person, max_tokens=3
        )


@shows("openai", "tool_choice required and named")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_required_and_named_tool_choice(bundled_client, is_streaming):
    """The answer is a call whose arguments match the tool's schema."""
    person = openai.pydantic_function_tool(Person, name="keep")
    named_choice = {"type": "function", "function": {"name": "keep"}}
    for tool_choice, tools in (
        (named_choice, [NOW_TOOL, person]),
        ("required", [person]),
        ("required", [NOW_TOOL, person]),
    ):
        request_fields = PERSON_REQUEST | {
            "tools": tools,
            "tool_choice": tool_choice,
            "max_tokens": 100,
        }
        if is_streaming:
            # the helper accepts only strict tools
            request_fields["tools"] = [tool for tool in tools if tool is not NOW_TOOL]
            with bundled_client.chat.completions.stream(**request_fields) as stream:
                choice = stream.get_final_completion().choices[0]
        else:
            choice = bundled_client.chat.completions.create(**request_fields).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        arguments = json.loads(call.function.arguments)
        if call.function.name == "now":
            assert tool_choice == "required" and arguments == {}
        else:
            assert call.function.name == "keep"
            assert arguments == (
                FOUND if tool_choice == named_choice else Person(**arguments).model_dump()
            )
    request_fields = {"model": "quill", "input": PERSON, "temperature": 0}
    flat = {"type": "function", **person["function"]}
    (item,) = bundled_client.responses.create(
        **request_fields, tools=[flat], tool_choice={"type": "function", "name": "keep"}
    ).output
    assert (item.name, json.loads(item.arguments)) == ("keep", FOUND)


class Home(BaseModel):
    kind: Literal["house", "boat"]


class Household(BaseModel):
    home: Home


@shows(
    "openai", "tool_choice required, with tools whose parameters have $defs, beside response_format"
)
def test_tool_schema_references_resolve_per_tool(bundled_client):
    """`$ref` resolves in its own tool's schema; `response_format` does not constrain calls."""
    household: Any = openai.pydantic_function_tool(Household, name="keep")
    assert "$defs" in household["function"]["parameters"]
    clashing_schema = {
        "type": "object",
        "properties": {"home": {"$ref": "#/$defs/Home"}},
        "required": ["home"],
        "additionalProperties": False,
        "$defs": {"Home": {"enum": [1, 2]}},
    }
    count_tool: Any = {
        "type": "function",
        "function": {"name": "count", "parameters": clashing_schema},
    }
    request_fields = {
        "tools": [count_tool, household],
        "tool_choice": "required",
        "max_tokens": 120,
        "response_format": {"type": "json_object"},
    }
    response = bundled_client.chat.completions.create(**PERSON_REQUEST, **request_fields).choices[0]
    (call,) = response.message.tool_calls
    assert response.finish_reason == "tool_calls" and not response.message.content
    arguments = json.loads(call.function.arguments)
    if call.function.name == "keep":
        assert Household(**arguments).model_dump() == arguments
    else:
        assert arguments["home"] in (1, 2)


@shows("openai", "embeddings.create")
def test_embeddings(bundled_client):
    """Unit-length vectors of texts or token ids, as floats or as base64 (the client's default)."""
    request_fields: dict[str, Any] = {"model": "quill", "input": ["a mouse", "a cat", "36 39 84"]}
    response = bundled_client.embeddings.create(**request_fields)
    float_response = bundled_client.embeddings.create(**request_fields, encoding_format="float")
    assert [item.embedding for item in response.data] == [
        pytest.approx(item.embedding, abs=1e-6) for item in float_response.data
    ]
    assert [item.index for item in response.data] == [0, 1, 2] and len(
        response.data[0].embedding
    ) == 192
    assert sum(x * x for x in response.data[0].embedding) == pytest.approx(1, abs=1e-3)
    shortened = bundled_client.embeddings.create(**request_fields, dimensions=8).data[0].embedding
    assert len(shortened) == 8 and sum(x * x for x in shortened) == pytest.approx(1, abs=1e-3)
    assert response.usage.prompt_tokens == response.usage.total_tokens > 8
    embedding_alone = (
        bundled_client.embeddings.create(model="quill", input="a mouse").data[0].embedding
    )
    assert embedding_alone == pytest.approx(response.data[0].embedding, abs=1e-3)
    assert len(bundled_client.embeddings.create(model="quill", input=[[5, 6], [7]]).data) == 2
    with pytest.raises(openai.BadRequestError) as caught:
        bundled_client.embeddings.create(**request_fields, dimensions=193)
    assert caught.value.param == "dimensions"


SUMS_TOOL = {
    "name": "sums",
    "description": "Adds.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[1-9]\\+[1-9]"},
}
NESTED_FORMAT = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[1-9]\\+[1-9]"}}
CHAT_SUMS_TOOL: Any = {"type": "custom", "custom": SUMS_TOOL | {"format": NESTED_FORMAT}}


@shows("openai", "tools of type custom, with a text or a grammar; of chat and of responses")
def test_custom_tools(client):
    """A custom tool's call has a text input; a text that violates the grammar stays content.
    Results of calls are sent back.
    """
    for is_streaming in (False, True):
        request_fields: dict[str, Any] = {"model": "quill", "tools": [CHAT_SUMS_TOOL]}
        response = client.chat.completions.create(
            messages=user_messages("sum of 1+2"), stream=is_streaming, **request_fields
        )
        if is_streaming:
            calls = [call for chunk in response for call in chunk.choices[0].delta.tool_calls or ()]
            assert [(call.type, call.custom) for call in calls] == [
                ("custom", {"name": "sums", "input": "1+2"})
            ]
            continue
        (choice,) = response.choices
        (call,) = choice.message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "sums", "1+2")
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
        conversation = [
            *user_messages("sum of 1+2"),
            choice.message,
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ]
        assert (
            client.chat.completions.create(messages=conversation, **request_fields)
            .choices[0]
            .message.content
            == "It is 3."
        )
        (choice,) = client.chat.completions.create(
            messages=user_messages("sum of one"), **request_fields
        ).choices
        assert choice.message.tool_calls is None and choice.message.content == "I add.one"
    request_fields = {"model": "quill", "tools": [{"type": "custom", **SUMS_TOOL}]}
    response = client.responses.create(input="sum of 1+2", **request_fields)
    (call,) = [item for item in response.output if item.type == "custom_tool_call"]
    assert (call.name, call.input) == ("sums", "1+2")
    with client.responses.stream(input="sum of 1+2", **request_fields) as stream:
        events = [event for event in stream if "custom_tool_call" in event.type]
    assert events[-1].type == "response.custom_tool_call_input.done" and events[-1].input == "1+2"
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "3"}
    conversation = [*user_messages("sum of 1+2"), *response.output, result]
    assert client.responses.create(input=conversation, **request_fields).output_text == "It is 3."


@shows("openai", "tool_choice of type custom and allowed_tools")
def test_custom_and_allowed_tool_choice(bundled_client):
    """A named tool's input matches its grammar; only tools of `allowed_tools` are called."""
    request_fields: dict[str, Any] = {
        "model": "quill",
        "max_tokens": 60,
        "temperature": 1,
        "seed": 1,
    }
    named_choice = {"type": "custom", "custom": {"name": "sums"}}
    (call,) = (
        bundled_client.chat.completions.create(
            messages=user_messages("Add"),
            tools=[WEATHER_TOOL, CHAT_SUMS_TOOL],
            tool_choice=named_choice,
            **request_fields,
        )
        .choices[0]
        .message.tool_calls
    )
    assert re.fullmatch("[1-9][+][1-9]", call.custom.input)
    lark = {"syntax": "lark", "definition": 'start: "yes" | "no"'}
    tool = {
        "type": "custom",
        "custom": {"name": "say", "format": {"type": "grammar", "grammar": lark}},
    }
    response = bundled_client.chat.completions.create(
        messages=user_messages("?"), tools=[tool], tool_choice="required", **request_fields
    )
    assert response.choices[0].message.tool_calls[0].custom.input in ("yes", "no")
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "custom", "name": "sums"}],
    }
    request_fields = {"model": "quill", "temperature": 1}
    response = bundled_client.responses.create(
        input="Add",
        tools=[RESPONSES_WEATHER_TOOL, {"type": "custom", **SUMS_TOOL}],
        tool_choice=choice,
        max_output_tokens=60,
        **request_fields,
    )
    assert [(item.type, item.name) for item in response.output] == [("custom_tool_call", "sums")]
    with pytest.raises(openai.BadRequestError) as caught:
        bundled_client.responses.create(input="?", tools=[{"type": "web_search"}], **request_fields)
    assert caught.value.param == "tools[0].type"


@shows("openai", "chat.completions.create(functions=..., function_call=...)")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_deprecated_functions_and_function_call(client, is_streaming):
    """A call is returned as `function_call`; its result is sent back in a message of role
    `function`.
    """
    request_fields: dict[str, Any] = {
        "model": "quill",
        "functions": [WEATHER_TOOL["function"]],
        "stream": is_streaming,
    }
    request_fields["functions"][0].pop("strict", None)
    response = client.chat.completions.create(
        messages=user_messages("weather in Rome"), **request_fields
    )
    if is_streaming:
        chunks = list(response)
        deltas = [
            chunk.choices[0].delta.function_call
            for chunk in chunks
            if chunk.choices[0].delta.function_call
        ]
        assert "".join(delta.name or "" for delta in deltas) == "weather"
        assert json.loads("".join(delta.arguments or "" for delta in deltas)) == {"city": "Rome"}
        assert chunks[-1].choices[0].finish_reason == "function_call"
        return
    (choice,) = response.choices
    assert (
        choice.finish_reason == "function_call" and choice.message.function_call.name == "weather"
    )
    assert json.loads(choice.message.function_call.arguments) == {"city": "Rome"}
    conversation = [
        *user_messages("weather in Rome"),
        choice.message,
        {"role": "function", "name": "weather", "content": "sun"},
    ]
    assert (
        client.chat.completions.create(messages=conversation, **request_fields)
        .choices[0]
        .message.content
        == "It is sun."
    )


@shows("openai", "verbosity, text.verbosity; prediction; responses.create(truncation='auto')")
def test_verbosity_prediction_and_truncation(client):
    """`verbosity` is a variable of the chat template, `prediction` has no effect, and truncation
    drops the oldest turns of a long input.
    """
    template = {"extra_body": {"chat_template": "<user>{{ verbosity }}<assistant>"}}
    response = complete_hello(
        client, verbosity="low", prediction={"type": "content", "content": "x"}, **template
    )
    assert response.choices[0].message.content == said("low")
    request_fields: dict[str, Any] = {
        "model": "quill",
        "text": {"verbosity": "low"},
        "max_output_tokens": 9,
    }
    long_conversation = [
        *user_messages("word " * 400),
        {"role": "assistant", "content": "ok"},
        *user_messages("word " * 400),
        *user_messages("hello"),
    ]
    response = client.responses.create(input=long_conversation, truncation="auto", **request_fields)
    assert response.truncation == "auto" and response.output_text.startswith("You said: hello")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(input=long_conversation, **request_fields)


@shows("openai", "completions.create(suffix=...)")
def test_suffix_needs_fill_in_the_middle_tokens(bundled_client):
    """`suffix` is rejected if the tokenizer, as the bundled model's, has no fill-in-the-middle
    tokens.
    """
    with pytest.raises(openai.BadRequestError) as caught:
        bundled_client.completions.create(model="quill", prompt="a", suffix="b")
    assert caught.value.param == "suffix" and "fill-in-the-middle" in caught.value.message


@shows("openai", "responses.input_tokens.count")
def test_input_token_count_matches_usage(client):
    """The count equals `usage.input_tokens`, also with instructions, tools or a previous
    response.
    """
    first = client.responses.create(model="quill", input="hello")
    for fields in (
        {},
        {"instructions": "Be kind."},
        {"tools": [RESPONSES_WEATHER_TOOL]},
        {"previous_response_id": first.id},
    ):
        request_fields: Any = {"model": "quill", "input": "hello", **fields}
        response = client.responses.create(**request_fields)
        assert (
            client.responses.input_tokens.count(**request_fields).input_tokens
            == response.usage.input_tokens
        )


@shows("openai", "responses.compact, and what it gives sent back")
def test_compacted_conversation_continues(client):
    """Compaction keeps the user messages and a summary by the model; the conversation continues
    from them.
    """
    conversation: Any = [
        *user_messages("hello"),
        {"role": "assistant", "content": "Hi."},
        *user_messages("think"),
    ]
    compacted = client.responses.compact(model="quill", input=conversation)
    assert compacted.object == "response.compaction" and compacted.usage.output_tokens
    *kept_messages, summary = compacted.output
    assert [item.content[0].text for item in kept_messages] == ["hello", "think"]
    assert (summary.type, base64.b64decode(summary.encrypted_content)) == (
        "compaction",
        b"They greeted.",
    )
    items = [item.to_dict(warnings=False) for item in compacted.output]
    template = {"chat_template": "<user>{{ messages | tojson }}<assistant>"}
    answer = client.responses.create(
        model="quill", input=[*items, *user_messages("bye")], extra_body=template
    ).output_text
    assert "hello" in answer and "They greeted." in answer and "bye" in answer
    stored_response = client.responses.create(model="quill", input="hello")
    compacted_again = client.responses.compact(
        model="quill", previous_response_id=stored_response.id
    )
    assert [item.type for item in compacted_again.output] == ["message", "compaction"]
    with pytest.raises(openai.BadRequestError, match="must be what /v1/responses/compact gave"):
        client.responses.create(
            model="quill", input=[{"type": "compaction", "encrypted_content": "?"}]
        )
