"""OpenAI's own Python client, as it is, against a server over a socket."""

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


TOOL: Any = openai.pydantic_function_tool(weather)
OTHER = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
FLAT = {
    "type": "function",
    "name": "weather",
    "parameters": TOOL["function"]["parameters"],
    "strict": True,
}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def server():
    """Its model follows a script."""
    with scripted_server(FORMATS) as state:
        yield state


@pytest.fixture(scope="module")
def bundled():
    with bundled_server() as state:
        yield state


def client_of(server: Any, kind: type = OpenAI, **chosen: Any) -> Any:
    return kind(base_url=f"{server.url}/v1", **{"api_key": "none", "max_retries": 0, **chosen})


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


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def hello(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model="quill", messages=user("hello"), **fields)


@shows("openai", "chat.completions.create")
def test_chat(ask):
    """An answer with its usage and why it ended."""
    found = hello(ask)
    (choice,) = found.choices
    assert (choice.message.role, choice.message.content) == ("assistant", said("hello"))
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert (found.model, found.object) == ("quill", "chat.completion") and found.id.startswith(
        "chatcmpl-"
    )
    assert found.system_fingerprint.startswith("quire-")
    assert hello(ask, max_completion_tokens=3).choices[0].finish_reason == "length"
    assert hello(ask, stop="hello").choices[0].message.content == "You said: "
    told = ask.chat.completions.create(
        model="quill",
        messages=[
            {"role": "developer", "content": "Be kind."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
            },
        ],
    )
    assert told.choices[0].message.content == said("one\ntwo")


@shows("openai", "chat.completions.create(stream=True)")
def test_chat_streamed(ask):
    """The deltas joined are the answer; the usage comes last where it is asked for."""
    chunks = list(hello(ask, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said("hello")
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    *chunks, last = hello(ask, stream=True, **USAGE)
    assert last.choices == [] and last.usage == hello(ask).usage
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = hello(ask, stream=True, stream_options=continuous)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last.usage.completion_tokens


@shows("openai", "chat.completions.stream")
def test_chat_helper_stream(ask):
    """The helper's final completion is what `create` answers."""
    with ask.chat.completions.stream(model="quill", messages=user("hello"), n=2, **USAGE) as stream:
        done = [event.content for event in stream if event.type == "content.done"]
    assert done == [said("hello")] * 2
    found = stream.get_final_completion()
    assert [choice.message.content for choice in found.choices] == done
    assert found.usage.completion_tokens == 2 * hello(ask).usage.completion_tokens


@shows("openai", "chat.completions.create with tools, and the results sent back")
@pytest.mark.parametrize("streams", [False, True])
def test_chat_tool_loop(ask, streams):
    """One or several calls, then an answer that has their results."""
    for text, cities in (
        ("weather in Rome", ["Rome"]),
        ("weather in Rome and in Paris", ["Rome", "Paris"]),
    ):
        messages = user(text)
        if streams:
            with ask.chat.completions.stream(
                model="quill", messages=messages, tools=[TOOL]
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
            choice = ask.chat.completions.create(
                model="quill", messages=messages, tools=[TOOL]
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
        last = ask.chat.completions.create(model="quill", messages=messages, tools=[TOOL]).choices[
            0
        ]
        assert (
            last.message.content == f"It is {' and '.join(f'sun {n}' for n in range(len(cities)))}."
        )
        assert (last.finish_reason, last.message.tool_calls) == ("stop", None)


@shows("openai", "chat.completions.create(tool_choice='none')")
def test_no_tool_is_wanted(ask):
    """No tool is told, and none called."""
    found = ask.chat.completions.create(
        model="quill", messages=user("weather in Rome"), tools=[TOOL], tool_choice="none"
    )
    assert found.choices[0].message.tool_calls is None
    assert found.choices[0].message.content == said("weather in Rome")


@shows("openai", "parallel_tool_calls=False, of chat and of responses")
def test_one_call_at_most(ask):
    """Of several calls the first is told."""
    asked: dict[str, Any] = {"model": "quill", "tools": [TOOL], "parallel_tool_calls": False}
    messages = user("weather in Rome and in Paris")
    (call,) = ask.chat.completions.create(messages=messages, **asked).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    with ask.chat.completions.stream(messages=messages, **asked) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments == weather(city="Rome")
    found = ask.responses.create(input=messages, **asked | {"tools": [FLAT]})
    assert [item.type for item in found.output] == ["message", "function_call"]


@shows("openai", "chat.completions.create of a model that thinks")
@pytest.mark.parametrize("streams", [False, True])
def test_chat_reasoning(ask, streams):
    """Thoughts are `message.reasoning` (and `reasoning_content`), and counted in the usage."""
    found = ask.chat.completions.create(
        model="quill", messages=user("think"), stream=streams, **(USAGE if streams else {})
    )
    if streams:
        *chunks, last = found
        deltas = [chunk.choices[0].delta for chunk in chunks]
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        usage = last.usage
    else:
        message = found.choices[0].message
        usage = found.usage
        content = message.content
        reasoning = message.reasoning
        assert message.reasoning_content == reasoning
        back = [*user("think"), message, *user("hello")]
        assert ask.chat.completions.create(model="quill", messages=back).choices[
            0
        ].message.content == said("hello")
    assert content.strip() == said("think") and reasoning.strip() == "I must look."
    assert 0 < usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens


@shows("openai", "completions.create")
def test_completion(ask):
    """An answer for each prompt and each of n, in order."""
    found = ask.completions.create(
        model="quill", prompt=["<user>a<assistant>", "<user>b<assistant>"], n=2, max_tokens=99
    )
    assert [(choice.index, choice.text) for choice in found.choices] == list(
        enumerate([said("a")] * 2 + [said("b")] * 2)
    )
    assert {choice.finish_reason for choice in found.choices} == {"stop"} and found.id.startswith(
        "cmpl-"
    )
    # 16 tokens
    assert (
        ask.completions.create(model="quill", prompt="<user>a").choices[0].finish_reason == "length"
    )


@shows("openai", "completions.create(stream=True)")
def test_completion_streamed(ask):
    """The texts joined, by index, are the answers."""
    prompts = ["<user>a<assistant>", "<user>b<assistant>"]
    texts = dict.fromkeys(range(4), "")
    *chunks, last = ask.completions.create(
        model="quill", prompt=prompts, n=2, max_tokens=99, stream=True, **USAGE
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [said("a")] * 2 + [said("b")] * 2
    assert last.usage.completion_tokens > 40


@shows("openai", "completions.create(echo=True)")
@pytest.mark.parametrize("streams", [False, True])
def test_completion_echo(ask, streams):
    """The prompt stands before the answer."""
    asked = {"prompt": "<user>a<assistant>", "echo": True, "max_tokens": 99}
    found = ask.completions.create(model="quill", stream=streams, **asked)
    text = "".join(chunk.choices[0].text for chunk in found) if streams else found.choices[0].text
    assert text == asked["prompt"] + said("a")


@shows("openai", "responses.create")
@pytest.mark.parametrize("streams", [False, True])
def test_response(ask, streams):
    """An answer as items, also as events."""
    found = ask.responses.create(
        model="quill", input="hello", instructions="Be kind.", stream=streams
    )
    if streams:
        events = list(found)
        assert "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        ) == said("hello")
        assert events[-1].type == "response.completed"
        found = events[-1].response
    assert (found.output_text, found.status, found.instructions) == (
        said("hello"),
        "completed",
        "Be kind.",
    )
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens > 0


@shows("openai", "responses.create with tools, and the results sent back; responses.stream")
@pytest.mark.parametrize("streams", [False, True])
def test_response_tool_loop(ask, streams):
    """Thoughts, text and calls are items; sent back with the results they give the answer."""
    asked: dict[str, Any] = {"model": "quill", "tools": [FLAT]}
    talk = user("think of the weather in Rome and in Paris")
    if streams:
        with ask.responses.stream(input=talk, **asked) as stream:
            events = list(stream)
        found = stream.get_final_response()
        assert [e.type for e in events].count("response.function_call_arguments.done") == 2
    else:
        found = ask.responses.create(input=talk, **asked)
    assert [item.type for item in found.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert (
        found.output[0].content[0].text.strip() == "I must look."
        and found.output_text.strip() == "I look."
    )
    talk += found.output
    for item in found.output[2:]:
        city = json.loads(item.arguments)["city"]
        talk.append(
            {"type": "function_call_output", "call_id": item.call_id, "output": f"sun in {city}"}
        )
    last = ask.responses.create(input=talk, **asked)
    assert last.output_text == "It is sun in Rome and sun in Paris."


@shows("openai", "models.list, models.retrieve")
def test_models(ask):
    """The names that requests may ask for."""
    assert [model.id for model in ask.models.list()] == ["quill", "other-name"]
    assert ask.models.retrieve("quill").max_model_len == 1024
    found = ask.chat.completions.create(model="other-name", messages=user("hello"))
    assert found.model == "other-name"
    with pytest.raises(openai.NotFoundError):
        ask.models.retrieve("gpt")


@shows("openai", "AsyncOpenAI: many requests at once, streamed and whole")
def test_async(server):
    """Each gets its own answer."""

    async def one(client: AsyncOpenAI, number: int) -> str:
        messages = user(f"number {number}")
        if number % 3 == 0:
            async with client.chat.completions.stream(model="quill", messages=messages) as stream:
                return (await stream.get_final_completion()).choices[0].message.content or ""
        if number % 3 == 1:
            chunks = await client.chat.completions.create(
                model="quill", messages=messages, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        return (await client.responses.create(model="quill", input=messages)).output_text

    async def all_of_them() -> list[str]:
        async with client_of(server, AsyncOpenAI) as client:
            return await asyncio.gather(*(one(client, number) for number in range(24)))

    assert asyncio.run(all_of_them()) == [said(f"number {number}") for number in range(24)]
    frees_all(server)


@shows("openai", "BadRequestError")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3000}, "temperature"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    ],
)  # fmt: skip
def test_bad_requests(ask, fields, param):
    """`.param` names the field."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask.chat.completions.create(**{"model": "quill", "messages": user("hello"), **fields})
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert param in str(caught.value) and caught.value.request_id


@shows("openai", "NotFoundError")
def test_an_unknown_model(ask):
    """A model that is not there has the code model_not_found."""
    for call in (
        lambda: ask.chat.completions.create(model="gpt", messages=user("x")),
        lambda: ask.completions.create(model="gpt", prompt="x"),
        lambda: ask.responses.create(model="gpt", input="x"),
        lambda: ask.embeddings.create(model="gpt", input="x"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@shows("openai", "AuthenticationError")
def test_keys():
    """Without a valid key; with one it is an answer."""
    with scripted_server(FORMATS, api_keys=("secret",)) as state:
        for key in ("wrong", "secre", "secret2"):
            with (
                client_of(state, api_key=key) as client,
                pytest.raises(openai.AuthenticationError) as caught,
            ):
                hello(client)
            assert caught.value.code == "invalid_api_key"
        with client_of(state, api_key="secret") as client:
            assert hello(client).choices[0].message.content == said("hello")


@shows("openai", "RateLimitError, and retries of it that succeed")
def test_a_full_queue(server):
    """With `max_retries` the client comes again when the server says, and is answered."""
    thread = server.service.models.models[0].llm.thread
    replies = []
    server.engine.max_queued = 1
    server.script.hold.clear()
    try:
        with client_of(server, max_retries=4) as client:
            create = client.chat.completions.with_raw_response.create

            def run() -> None:
                replies.append(create(model="quill", messages=user("hello")))

            threads = [threading.Thread(target=run) for _ in range(3)]
            threads[0].start()
            # its step hangs; of the two that come now the queue has room for one
            until(lambda: thread.stalled() > 0.1)
            for other in threads[1:]:
                other.start()
            until(lambda: len(thread.jobs) == 2)
            server.script.hold.set()
            for each in threads:
                each.join(120)
            with pytest.raises(openai.RateLimitError) as caught:
                hello(client.with_options(max_retries=0), n=2)
    finally:
        server.script.hold.set()
        server.engine.max_queued = None
    assert sorted(reply.retries_taken for reply in replies) == [0, 0, 1]
    assert [reply.parse().choices[0].message.content for reply in replies] == [said("hello")] * 3
    assert (
        caught.value.code == "queue_full" and int(caught.value.response.headers["retry-after"]) >= 1
    )


@shows("openai", "InternalServerError (503 and 500), and retries of them that succeed")
def test_a_server_that_cannot_answer(server):
    """A server that shuts down, and a step that failed."""
    with client_of(server) as client:
        server.service.draining = True
        try:
            with pytest.raises(openai.InternalServerError) as caught:
                hello(client)
        finally:
            server.service.draining = False
        assert (caught.value.status_code, caught.value.code) == (503, "draining")
        server.script.fail_next = 1
        with pytest.raises(openai.InternalServerError) as caught:
            hello(client)
        assert (caught.value.status_code, caught.value.code) == (500, "engine_error")
        server.script.fail_next = 1
        with pytest.raises(openai.APIError, match="failed on this request"):
            list(hello(client, stream=True))
        server.script.fail_next = 1
        retried = client.with_options(max_retries=2).chat.completions.with_raw_response.create(
            model="quill", messages=user("hello")
        )
        assert retried.retries_taken == 1 and retried.parse().choices[0].message.content == said(
            "hello"
        )
        server.service.draining = True
        threading.Timer(0.5, lambda: setattr(server.service, "draining", False)).start()
        assert hello(client.with_options(max_retries=2)).choices[0].message.content == said("hello")


@shows("openai", "APITimeoutError")
def test_a_client_that_waits_no_longer(server):
    """The server frees what the request held."""
    server.script.hold.clear()
    server.script.step_seconds = 0.05
    steps = server.script.steps
    try:
        with client_of(server, timeout=0.3) as client:
            for fields in ({}, {"stream": True}):
                with pytest.raises(openai.APITimeoutError):
                    list(
                        client.chat.completions.create(
                            model="quill", messages=user("count"), **fields
                        )
                    )
        server.script.hold.set()
        frees_all(server)
    finally:
        server.script.hold.set()
        server.script.step_seconds = 0.0
    assert server.script.steps - steps < 100  # of 600: those in which the server hears of it


@shows("openai", "a stream that is closed in the middle, or whose task is cancelled")
def test_cancelling(server):
    """Its pages are free long before it would have ended."""

    async def cancelled() -> None:
        async with client_of(server, AsyncOpenAI) as client:

            async def read() -> None:
                async for _ in await client.chat.completions.create(
                    model="quill", messages=user("count"), stream=True
                ):
                    begun.set()

            for call in (
                read(),
                client.chat.completions.create(model="quill", messages=user("count")),
            ):
                begun = asyncio.Event()
                task = asyncio.create_task(call)
                while not server.engine.scheduler.running or (
                    not begun.is_set() and call.__name__ == "read"
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
        with client_of(server) as client:
            stream = client.chat.completions.create(
                model="quill", messages=user("count"), stream=True
            )
            for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            assert server.engine.requests
            steps.append(server.script.steps)
            stream.close()
            until(lambda: not server.engine.requests)
            steps[-1] = server.script.steps - steps[-1]
        asyncio.run(cancelled())
    finally:
        server.script.step_seconds = 0.0
    assert len(steps) == 3 and max(steps) < 100  # of 300: those in which the server hears of it
    frees_all(server)


@shows("openai", "with_raw_response, with_streaming_response, extra_headers")
def test_headers(ask):
    """The request id of the client, or a new one, comes back as x-request-id and `_request_id`."""
    asked: dict[str, Any] = {"model": "quill", "messages": user("hello")}
    raw = ask.chat.completions.with_raw_response.create(
        **asked, extra_headers={"X-Request-Id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == raw.parse()._request_id == "mine-1"
    first, second = (hello(ask)._request_id for _ in range(2))
    assert first and second and first != second
    assert (
        ask.chat.completions.create(**asked, extra_body={"request_id": "mine-2"}).id
        == "chatcmpl-mine-2"
    )
    with ask.chat.completions.with_streaming_response.create(**asked, stream=True) as raw:
        assert (
            raw.headers["content-type"].startswith("text/event-stream")
            and raw.headers["x-request-id"]
        )
        assert list(raw.iter_lines())[-2] == "data: [DONE]"


def sort(client: Any, **fields: Any) -> Any:
    """The bundled model at work; it is sure of what it says."""
    return client.chat.completions.create(
        model="quill", messages=user(SORT), **{"temperature": 0, **fields}
    )


@shows("openai", "chat.completions.create(seed=...)")
def test_seeds(ask_bundled):
    """The same seed writes the same text, whatever runs beside it; others write others."""

    def story(**fields: Any) -> list[str]:
        found = ask_bundled.chat.completions.create(
            model="quill", messages=user("Tell me a story about a violin."), max_tokens=25, **fields
        )
        return [choice.message.content for choice in found.choices]

    first = story(seed=1)
    assert story(seed=1) == first and story(seed=1, n=3)[:1] == first
    assert len(set(story(seed=1, n=3))) == 3
    assert len({*first, *story(seed=2), *story(seed=3), *story(), *story()}) == 5


@shows("openai", "logprobs, top_logprobs; the same streamed")
def test_log_probabilities(ask_bundled):
    """Each token with the likeliest in its place; the texts of the tokens joined are the answer."""
    found = sort(ask_bundled, logprobs=True, top_logprobs=3)
    content = found.choices[0].logprobs.content
    assert (
        b"".join(bytes(entry.bytes) for entry in content).decode().removesuffix("<|end|>") == SORTED
    )
    for entry in content:
        best = [other.logprob for other in entry.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert entry.logprob == best[0] and entry.token == entry.top_logprobs[0].token  # greedy
    chunks = list(sort(ask_bundled, logprobs=True, top_logprobs=3, stream=True))
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
    with ask_bundled.chat.completions.stream(
        model="quill", messages=user(SORT), temperature=0, logprobs=True
    ) as stream:
        final = stream.get_final_completion().choices[0]
    assert len(final.logprobs.content) == len(content) and final.message.content == SORTED
    asked = {"model": "quill", "input": SORT, "temperature": 0, "top_logprobs": 3}
    response = ask_bundled.responses.create(**asked, include=["message.output_text.logprobs"])
    assert response.output_text == SORTED
    assert [e.token for e in response.output[0].content[0].logprobs] == [
        entry.token for entry in content
    ]


@shows("openai", "completions.create(logprobs=...); echo and prompt_logprobs by extra_body")
def test_log_probabilities_of_completions(ask_bundled):
    """Parallel lists whose offsets point into the text; with echo those of the prompt stand
    before.
    """
    prompt = "Once upon a time, there was a curious mouse"
    asked: dict[str, Any] = {
        "model": "quill",
        "prompt": prompt,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 2,
    }
    own = ask_bundled.completions.create(
        **asked, extra_body={"prompt_logprobs": 0, "return_token_ids": True}
    ).choices[0]
    echo = ask_bundled.completions.create(**asked, echo=True).choices[0]
    assert echo.text == prompt + own.text
    for choice, text in ((own, own.text), (echo, echo.text)):
        told = choice.logprobs
        ends = [*told.text_offset[1:], len(text)]
        for token, start, end in zip(told.tokens, told.text_offset, ends, strict=True):
            assert text[start:end] == token or token == "<|bos|>"
    count = len(own.logprobs.tokens)
    assert echo.logprobs.tokens[-count:] == own.logprobs.tokens and len(own.token_ids) == count
    before = [next(iter(entries.values()))["logprob"] for entries in own.prompt_logprobs[1:]]
    assert own.prompt_logprobs[0] is None and len(before) + 1 == len(own.prompt_token_ids)
    assert echo.logprobs.token_logprobs[1:-count] == pytest.approx(before, abs=1e-3)
    nothing = ask_bundled.completions.create(**asked | {"max_tokens": 0}, echo=True).choices[0]
    assert nothing.text == prompt and nothing.logprobs.tokens == echo.logprobs.tokens[:-count]
    ids = ask_bundled.completions.create(**asked | {"prompt": own.prompt_token_ids}).choices[0]
    assert ids.text == own.text


@shows("openai", "n, best_of")
def test_several_answers(ask_bundled):
    """n of them; with best_of the likeliest."""
    asked: dict[str, Any] = {
        "model": "quill",
        "prompt": "Once upon a time",
        "max_tokens": 8,
        "seed": 3,
    }
    many = ask_bundled.completions.create(**asked, n=4, logprobs=0).choices
    assert [choice.index for choice in many] == [0, 1, 2, 3] and len(
        {choice.text for choice in many}
    ) > 1
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in many]
    best = ask_bundled.completions.create(**asked, best_of=4).choices
    assert [choice.text for choice in best] == [many[means.index(max(means))].text]


@shows("openai", "stop, max_tokens; stop_token_ids, min_tokens, ignore_eos by extra_body")
def test_ends(ask_bundled):
    """Why an answer ended is told by finish_reason and stop_reason."""

    def end(**fields: Any) -> tuple[Any, ...]:
        choice = sort(ask_bundled, **fields).choices[0]
        return choice.message.content, choice.finish_reason, choice.stop_reason

    tokens = sort(ask_bundled, extra_body={"return_token_ids": True}).choices[0].token_ids
    assert end() == (SORTED, "stop", None)
    assert end(stop=["84"]) == ("36 39 ", "stop", "84")
    assert end(stop="84", extra_body={"include_stop_str_in_output": True}) == (
        "36 39 84",
        "stop",
        "84",
    )
    assert end(extra_body={"stop_token_ids": [tokens[2]]})[1:] == ("stop", tokens[2])
    assert end(max_tokens=2)[1] == end(max_completion_tokens=2)[1] == "length"
    assert end(max_tokens=30, extra_body={"ignore_eos": True})[1] == "length"
    assert len(end(max_tokens=40, extra_body={"min_tokens": 30})[0]) > len(SORTED)


@shows(
    "openai",
    "logit_bias; allowed_token_ids, bad_words, top_k, min_p, repetition_penalty by extra_body",
)
def test_sampling_fields(ask_bundled):
    """What may be written, and how it is drawn."""
    tokens = sort(ask_bundled, extra_body={"return_token_ids": True}).choices[0].token_ids
    assert (
        sort(ask_bundled, logit_bias={str(tokens[0]): -100}, max_tokens=8)
        .choices[0]
        .message.content[:2]
        != "36"
    )
    allowed = sort(
        ask_bundled,
        max_tokens=4,
        extra_body={"allowed_token_ids": tokens[:1], "return_token_ids": True},
    )
    assert allowed.choices[0].token_ids == tokens[:1] * 4
    nothing = {"allowed_token_ids": tokens[:1], "stop_token_ids": tokens[:1], "min_tokens": 3}
    with pytest.raises(
        openai.BadRequestError, match="leaves, with logit_bias.*, no token that may come next"
    ):
        sort(ask_bundled, max_tokens=4, extra_body=nothing)
    assert (
        "84"
        not in sort(ask_bundled, max_tokens=12, extra_body={"bad_words": ["84", " 84"]})
        .choices[0]
        .message.content
    )
    for one in ({"top_k": 1}, {"min_p": 1.0}):
        assert (
            sort(ask_bundled, temperature=1.0, extra_body=one).choices[0].message.content == SORTED
        )
    assert sort(ask_bundled, temperature=2.0, top_p=0.01).choices[0].message.content == SORTED
    asked: dict[str, Any] = {
        "model": "quill",
        "prompt": "Once upon a time",
        "max_tokens": 60,
        "temperature": 0,
    }
    plain = ask_bundled.completions.create(**asked).choices[0].text
    for fields in (
        {"presence_penalty": 2, "frequency_penalty": 2},
        {"extra_body": {"repetition_penalty": 50}},
    ):
        assert ask_bundled.completions.create(**asked, **fields).choices[0].text != plain


@shows("openai", "usage.prompt_tokens_details.cached_tokens; cache_salt by extra_body")
def test_cached_tokens(ask_bundled):
    """Whole pages of a prompt that came before are found again, but not under another salt."""

    def cached(**fields: Any) -> int:
        found = ask_bundled.chat.completions.create(
            model="quill", messages=user(LIST), max_tokens=2, **fields
        )
        return found.usage.prompt_tokens_details.cached_tokens

    cached(extra_body={"cache_salt": "a"})
    assert cached(extra_body={"cache_salt": "a"}) >= 16
    assert cached(extra_body={"cache_salt": "b"}) == 0
    response = ask_bundled.responses.create(
        model="quill", input=LIST, extra_body={"cache_salt": "a"}
    )
    assert response.usage.input_tokens_details.cached_tokens >= 16


@shows("openai", "return_token_ids, prompt_logprobs by extra_body")
def test_token_ids(ask_bundled):
    """The ids of the prompt and of the answer; streamed they come in parts."""
    found = sort(ask_bundled, extra_body={"return_token_ids": True, "prompt_logprobs": 1})
    assert len(found.prompt_token_ids) == found.usage.prompt_tokens == len(found.prompt_logprobs)
    assert len(found.choices[0].token_ids) == found.usage.completion_tokens
    chunks = list(sort(ask_bundled, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].prompt_token_ids == found.prompt_token_ids
    assert [token for chunk in chunks[1:] for token in chunk.choices[0].token_ids] == found.choices[
        0
    ].token_ids


@shows(
    "openai",
    "continue_final_message, echo, add_generation_prompt, truncate_prompt_tokens by extra_body",
)
def test_prompts(ask_bundled):
    """An answer that goes on from what the assistant is to have said; a prompt that keeps its
    end.
    """
    messages = [*user(SORT), {"role": "assistant", "content": SORTED[:5]}]
    asked: dict[str, Any] = {"model": "quill", "messages": messages, "temperature": 0}
    for echo, text in ((False, SORTED[5:]), (True, SORTED)):
        extra = {"continue_final_message": True, "echo": echo}
        assert (
            ask_bundled.chat.completions.create(**asked, extra_body=extra)
            .choices[0]
            .message.content
            == text
        )
        chunks = ask_bundled.chat.completions.create(**asked, extra_body=extra, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert (
        sort(
            ask_bundled, extra_body={"truncate_prompt_tokens": 7}, max_tokens=1
        ).usage.prompt_tokens
        == 7
    )
    whole, bare = (
        sort(ask_bundled, max_tokens=1, **f)
        for f in ({}, {"extra_body": {"add_generation_prompt": False}})
    )
    assert whole.usage.prompt_tokens > bare.usage.prompt_tokens


PERSONAL: dict[str, Any] = {"model": "quill", "messages": user(PERSON), "temperature": 0}


@shows("openai", "response_format json_object and json_schema; structured_outputs by extra_body")
@pytest.mark.parametrize("streams", [False, True])
def test_forms_of_answers(ask_bundled, streams):
    """What is written has the form, also where the model would rather write something else."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Lagos"]},
            "age": {"type": "integer", "minimum": 3, "maximum": 9},
        },
        "required": ["age", "city"],
        "additionalProperties": False,
    }

    def written(**fields: Any) -> str:
        found = ask_bundled.chat.completions.create(
            **PERSONAL | fields, stream=streams, max_tokens=100
        )
        if streams:
            return "".join(chunk.choices[0].delta.content or "" for chunk in found)
        return found.choices[0].message.content

    assert json.loads(written(response_format={"type": "json_object"})) == FOUND
    strict = {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": schema, "strict": True},
    }
    for messages in (user(PERSON), user(SORT)):
        found = json.loads(written(messages=messages, response_format=strict))
        assert (
            set(found) == {"age", "city"}
            and found["city"] in ("Rome", "Lagos")
            and found["age"] in range(3, 10)
        )
    assert written(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert written(extra_body={"structured_outputs": {"regex": "[a-c]{5}"}}).strip("abc") == ""
    assert json.loads(written(extra_body={"structured_outputs": {"json": schema}}))["city"]
    text = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}}
    assert json.loads(
        ask_bundled.responses.create(model="quill", input=PERSON, text=text).output_text
    )["city"]


# of the client, where it sends back what it has parsed
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@shows(
    "openai",
    "chat.completions.parse, chat.completions.stream and responses.parse with a pydantic model",
)
def test_parsed_answers(ask_bundled):
    """The answer is an object of the class."""
    expected = Person(**FOUND)
    found = ask_bundled.chat.completions.parse(**PERSONAL, response_format=Person)
    assert found.choices[0].message.parsed == expected
    with ask_bundled.chat.completions.stream(**PERSONAL, response_format=Person) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == expected
    back = [*user(PERSON), found.choices[0].message, *user(SORT)]
    assert ask_bundled.chat.completions.create(model="quill", messages=back, max_tokens=5)
    response = ask_bundled.responses.parse(
        model="quill", input=PERSON, text_format=Person, temperature=0
    )
    assert response.output_parsed == expected
    with ask_bundled.responses.stream(
        model="quill", input=PERSON, text_format=Person, temperature=0
    ) as stream:
        assert stream.get_final_response().output_parsed == expected
    with pytest.raises(openai.LengthFinishReasonError):
        ask_bundled.chat.completions.parse(**PERSONAL, response_format=Person, max_tokens=3)


@shows("openai", "tool_choice required and named")
@pytest.mark.parametrize("streams", [False, True])
def test_calls_that_are_wanted(ask_bundled, streams):
    """The answer is a call whose arguments keep to the schema."""
    person = openai.pydantic_function_tool(Person, name="keep")
    named = {"type": "function", "function": {"name": "keep"}}
    for choice, tools in (
        (named, [OTHER, person]),
        ("required", [person]),
        ("required", [OTHER, person]),
    ):
        asked = PERSONAL | {"tools": tools, "tool_choice": choice, "max_tokens": 100}
        if streams:
            # the helper takes strict ones only
            asked["tools"] = [tool for tool in tools if tool is not OTHER]
            with ask_bundled.chat.completions.stream(**asked) as stream:
                found = stream.get_final_completion().choices[0]
        else:
            found = ask_bundled.chat.completions.create(**asked).choices[0]
        (call,) = found.message.tool_calls
        assert found.finish_reason == "tool_calls" and not found.message.content
        arguments = json.loads(call.function.arguments)
        if call.function.name == "now":
            assert choice == "required" and arguments == {}
        else:
            assert call.function.name == "keep"
            assert arguments == (FOUND if choice == named else Person(**arguments).model_dump())
    asked = {"model": "quill", "input": PERSON, "temperature": 0}
    flat = {"type": "function", **person["function"]}
    (item,) = ask_bundled.responses.create(
        **asked, tools=[flat], tool_choice={"type": "function", "name": "keep"}
    ).output
    assert (item.name, json.loads(item.arguments)) == ("keep", FOUND)


class Home(BaseModel):
    kind: Literal["house", "boat"]


class Household(BaseModel):
    home: Home


@shows(
    "openai", "tool_choice required, with tools whose parameters have $defs, beside response_format"
)
def test_references_of_a_tool(ask_bundled):
    """References resolve against their own tool's schema; the form of the text says nothing of
    a call.
    """
    household: Any = openai.pydantic_function_tool(Household, name="keep")
    assert "$defs" in household["function"]["parameters"]
    clash = {
        "type": "object",
        "properties": {"home": {"$ref": "#/$defs/Home"}},
        "required": ["home"],
        "additionalProperties": False,
        "$defs": {"Home": {"enum": [1, 2]}},
    }
    other: Any = {"type": "function", "function": {"name": "count", "parameters": clash}}
    asked = {
        "tools": [other, household],
        "tool_choice": "required",
        "max_tokens": 120,
        "response_format": {"type": "json_object"},
    }
    found = ask_bundled.chat.completions.create(**PERSONAL, **asked).choices[0]
    (call,) = found.message.tool_calls
    assert found.finish_reason == "tool_calls" and not found.message.content
    arguments = json.loads(call.function.arguments)
    if call.function.name == "keep":
        assert Household(**arguments).model_dump() == arguments
    else:
        assert arguments["home"] in (1, 2)


@shows("openai", "embeddings.create")
def test_embeddings(ask_bundled):
    """Vectors of length 1, of texts or of token ids, as numbers or base64 (the client's own
    choice).
    """
    asked: dict[str, Any] = {"model": "quill", "input": ["a mouse", "a cat", "36 39 84"]}
    found = ask_bundled.embeddings.create(**asked)
    plain = ask_bundled.embeddings.create(**asked, encoding_format="float")
    assert [one.embedding for one in found.data] == [
        pytest.approx(one.embedding, abs=1e-6) for one in plain.data
    ]
    assert [one.index for one in found.data] == [0, 1, 2] and len(found.data[0].embedding) == 192
    assert sum(x * x for x in found.data[0].embedding) == pytest.approx(1, abs=1e-3)
    short = ask_bundled.embeddings.create(**asked, dimensions=8).data[0].embedding
    assert len(short) == 8 and sum(x * x for x in short) == pytest.approx(1, abs=1e-3)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 8
    alone = ask_bundled.embeddings.create(model="quill", input="a mouse").data[0].embedding
    assert alone == pytest.approx(found.data[0].embedding, abs=1e-3)
    assert len(ask_bundled.embeddings.create(model="quill", input=[[5, 6], [7]]).data) == 2
    with pytest.raises(openai.BadRequestError) as caught:
        ask_bundled.embeddings.create(**asked, dimensions=193)
    assert caught.value.param == "dimensions"


SUMS = {
    "name": "sums",
    "description": "Adds.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[1-9]\\+[1-9]"},
}
NESTED = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[1-9]\\+[1-9]"}}
CUSTOM: Any = {"type": "custom", "custom": SUMS | {"format": NESTED}}


@shows("openai", "tools of type custom, with a text or a grammar; of chat and of responses")
def test_custom_tools(ask):
    """A call has the text; one that breaks its grammar is told as text.

    The results are sent back.
    """
    for streams in (False, True):
        asked: dict[str, Any] = {"model": "quill", "tools": [CUSTOM]}
        found = ask.chat.completions.create(messages=user("sum of 1+2"), stream=streams, **asked)
        if streams:
            calls = [call for chunk in found for call in chunk.choices[0].delta.tool_calls or ()]
            assert [(call.type, call.custom) for call in calls] == [
                ("custom", {"name": "sums", "input": "1+2"})
            ]
            continue
        (choice,) = found.choices
        (call,) = choice.message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "sums", "1+2")
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
        back = [
            *user("sum of 1+2"),
            choice.message,
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ]
        assert (
            ask.chat.completions.create(messages=back, **asked).choices[0].message.content
            == "It is 3."
        )
        (choice,) = ask.chat.completions.create(messages=user("sum of one"), **asked).choices
        assert choice.message.tool_calls is None and choice.message.content == "I add.one"
    asked = {"model": "quill", "tools": [{"type": "custom", **SUMS}]}
    found = ask.responses.create(input="sum of 1+2", **asked)
    (call,) = [item for item in found.output if item.type == "custom_tool_call"]
    assert (call.name, call.input) == ("sums", "1+2")
    with ask.responses.stream(input="sum of 1+2", **asked) as stream:
        events = [event for event in stream if "custom_tool_call" in event.type]
    assert events[-1].type == "response.custom_tool_call_input.done" and events[-1].input == "1+2"
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "3"}
    back = [*user("sum of 1+2"), *found.output, result]
    assert ask.responses.create(input=back, **asked).output_text == "It is 3."


@shows("openai", "tool_choice of type custom and allowed_tools")
def test_tools_that_are_chosen(ask_bundled):
    """The text keeps its grammar; of several tools only the allowed ones are called."""
    asked: dict[str, Any] = {"model": "quill", "max_tokens": 60, "temperature": 1, "seed": 1}
    named = {"type": "custom", "custom": {"name": "sums"}}
    (call,) = (
        ask_bundled.chat.completions.create(
            messages=user("Add"), tools=[TOOL, CUSTOM], tool_choice=named, **asked
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
    found = ask_bundled.chat.completions.create(
        messages=user("?"), tools=[tool], tool_choice="required", **asked
    )
    assert found.choices[0].message.tool_calls[0].custom.input in ("yes", "no")
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "custom", "name": "sums"}],
    }
    asked = {"model": "quill", "temperature": 1}
    found = ask_bundled.responses.create(
        input="Add",
        tools=[FLAT, {"type": "custom", **SUMS}],
        tool_choice=choice,
        max_output_tokens=60,
        **asked,
    )
    assert [(item.type, item.name) for item in found.output] == [("custom_tool_call", "sums")]
    with pytest.raises(openai.BadRequestError) as caught:
        ask_bundled.responses.create(input="?", tools=[{"type": "web_search"}], **asked)
    assert caught.value.param == "tools[0].type"


@shows("openai", "chat.completions.create(functions=..., function_call=...)")
@pytest.mark.parametrize("streams", [False, True])
def test_the_old_names_of_tools(ask, streams):
    """A call is told as `function_call`; the result comes back as a message of the role
    function.
    """
    asked: dict[str, Any] = {"model": "quill", "functions": [TOOL["function"]], "stream": streams}
    asked["functions"][0].pop("strict", None)
    found = ask.chat.completions.create(messages=user("weather in Rome"), **asked)
    if streams:
        chunks = list(found)
        deltas = [
            chunk.choices[0].delta.function_call
            for chunk in chunks
            if chunk.choices[0].delta.function_call
        ]
        assert "".join(delta.name or "" for delta in deltas) == "weather"
        assert json.loads("".join(delta.arguments or "" for delta in deltas)) == {"city": "Rome"}
        assert chunks[-1].choices[0].finish_reason == "function_call"
        return
    (choice,) = found.choices
    assert (
        choice.finish_reason == "function_call" and choice.message.function_call.name == "weather"
    )
    assert json.loads(choice.message.function_call.arguments) == {"city": "Rome"}
    back = [
        *user("weather in Rome"),
        choice.message,
        {"role": "function", "name": "weather", "content": "sun"},
    ]
    assert (
        ask.chat.completions.create(messages=back, **asked).choices[0].message.content
        == "It is sun."
    )


@shows("openai", "verbosity, text.verbosity; prediction; responses.create(truncation='auto')")
def test_fields_for_other_models(ask):
    """Verbosity is a variable of the chat template; a prediction is a label; the oldest turns go
    where not all fit.
    """
    template = {"extra_body": {"chat_template": "<user>{{ verbosity }}<assistant>"}}
    found = hello(ask, verbosity="low", prediction={"type": "content", "content": "x"}, **template)
    assert found.choices[0].message.content == said("low")
    asked: dict[str, Any] = {"model": "quill", "text": {"verbosity": "low"}, "max_output_tokens": 9}
    long = [
        *user("word " * 400),
        {"role": "assistant", "content": "ok"},
        *user("word " * 400),
        *user("hello"),
    ]
    found = ask.responses.create(input=long, truncation="auto", **asked)
    assert found.truncation == "auto" and found.output_text.startswith("You said: hello")
    with pytest.raises(openai.BadRequestError):
        ask.responses.create(input=long, **asked)


@shows("openai", "completions.create(suffix=...)")
def test_suffix(ask_bundled):
    """Refused by name where the tokenizer has no fill-in-the-middle tokens, as the bundled
    model's.
    """
    with pytest.raises(openai.BadRequestError) as caught:
        ask_bundled.completions.create(model="quill", prompt="a", suffix="b")
    assert caught.value.param == "suffix" and "fill-in-the-middle" in caught.value.message


@shows("openai", "responses.input_tokens.count")
def test_counting(ask):
    """As many as the usage of an answer says, with tools, instructions and the responses before."""
    first = ask.responses.create(model="quill", input="hello")
    for fields in (
        {},
        {"instructions": "Be kind."},
        {"tools": [FLAT]},
        {"previous_response_id": first.id},
    ):
        asked: Any = {"model": "quill", "input": "hello", **fields}
        found = ask.responses.create(**asked)
        assert ask.responses.input_tokens.count(**asked).input_tokens == found.usage.input_tokens


@shows("openai", "responses.compact, and what it gives sent back")
def test_compacting(ask):
    """What users said, and a summary by the model, from which the conversation goes on."""
    said_so_far: Any = [*user("hello"), {"role": "assistant", "content": "Hi."}, *user("think")]
    found = ask.responses.compact(model="quill", input=said_so_far)
    assert found.object == "response.compaction" and found.usage.output_tokens
    *before, last = found.output
    assert [item.content[0].text for item in before] == ["hello", "think"]
    assert (last.type, base64.b64decode(last.encrypted_content)) == ("compaction", b"They greeted.")
    items = [item.to_dict(warnings=False) for item in found.output]
    template = {"chat_template": "<user>{{ messages | tojson }}<assistant>"}
    told = ask.responses.create(
        model="quill", input=[*items, *user("bye")], extra_body=template
    ).output_text
    assert "hello" in told and "They greeted." in told and "bye" in told
    kept = ask.responses.create(model="quill", input="hello")
    again = ask.responses.compact(model="quill", previous_response_id=kept.id)
    assert [item.type for item in again.output] == ["message", "compaction"]
    with pytest.raises(openai.BadRequestError, match="must be what /v1/responses/compact gave"):
        ask.responses.create(
            model="quill", input=[{"type": "compaction", "encrypted_content": "?"}]
        )
