"""Ollama's unmodified Python client against a server on a socket."""

import asyncio
import http.client
import json
from typing import Any

import ollama
import pytest
from ollama import AsyncClient, Client, ResponseError
from pydantic import BaseModel

from quire.tests.support.served import FORMATS
from quire.tests.support.talk import (
    FOUND,
    PERSON,
    SORT,
    SORTED,
    bundled_server,
    frees_all,
    said,
    scripted_server,
)

JSON_HEADERS = {"Content-Type": "application/json"}


class Person(BaseModel):
    name: str
    job: str
    city: str


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"sun in {city}"


@pytest.fixture(scope="module")
def server():
    """A server whose model follows a script."""
    with scripted_server(FORMATS) as state:
        yield state


@pytest.fixture(scope="module")
def bundled():
    with bundled_server() as state:
        yield state


@pytest.fixture
def client(server):
    with Client(host=server.url) as client:
        yield client
    frees_all(server)


@pytest.fixture
def bundled_client(bundled):
    with Client(host=bundled.url) as client:
        yield client
    frees_all(bundled)


def user_messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def send_request(server, path: str, body: Any, method: str = "POST") -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), JSON_HEADERS)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def post_ok(server, path: str, **fields: Any) -> dict[str, Any]:
    status, _, raw = send_request(server, path, {"model": "quill", **fields})
    assert status == 200, raw
    return json.loads(raw)


def join_stream(stream: Any) -> tuple[str, str, list[Any], Any]:
    """Text, thinking and tool calls of a stream, and its last chunk."""
    stream = list(stream)
    assert [chunk.done for chunk in stream] == [False] * (len(stream) - 1) + [True]
    messages = [chunk.message if hasattr(chunk, "message") else chunk for chunk in stream]
    text = "".join(
        (getattr(message, "content", None) or getattr(message, "response", None) or "")
        for message in messages
    )
    calls = [call for message in messages for call in getattr(message, "tool_calls", None) or ()]
    return text, "".join(message.thinking or "" for message in messages), calls, stream[-1]


def test_chat_with_durations_and_counts(client):
    response = client.chat("quill", user_messages("hello"))
    assert (response.message.role, response.message.content, response.model) == (
        "assistant",
        said("hello"),
        "quill",
    )
    assert (response.done, response.done_reason) == (True, "stop") and response.created_at.endswith(
        "Z"
    )
    assert response.prompt_eval_count > 0 and response.eval_count > 5
    sum_of_durations = (
        response.load_duration + response.prompt_eval_duration + response.eval_duration
    )
    assert response.eval_duration > 0 and response.prompt_eval_duration > 0
    assert abs(response.total_duration - sum_of_durations) < 10  # each duration is rounded
    assert (
        client.chat("quill", user_messages("hello"), options={"num_predict": 3}).done_reason
        == "length"
    )
    assert (
        client.chat("quill", user_messages("hello"), options={"stop": ["hello"]}).message.content
        == "You said: "
    )
    system = [{"role": "system", "content": "Be kind."}, *user_messages("hello")]
    assert client.chat("quill", system).prompt_eval_count > response.prompt_eval_count


def test_chat_streamed(client, server):
    text, _, _, last = join_stream(client.chat("quill", user_messages("hello"), stream=True))
    assert text == said("hello") and last.done_reason == "stop" and last.eval_count > 5
    # Streaming is the default.
    status, headers, raw = send_request(
        server, "/api/chat", {"model": "quill", "messages": user_messages("hello")}
    )
    assert (status, headers["Content-Type"]) == (200, "application/x-ndjson")
    lines = [json.loads(line) for line in raw.decode().splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == said("hello") and len(lines) > 3
    assert lines[-1]["done"] and isinstance(lines[-1]["total_duration"], int)


def test_generate_with_context(client):
    response = client.generate("quill", "hello", system="Be kind.")
    assert (
        response.response == said("hello")
        and response.done_reason == "stop"
        and len(response.context) > 5
    )
    text, _, _, last = join_stream(
        client.generate("quill", "hello", system="Be kind.", stream=True)
    )
    assert text == said("hello") and last.context == response.context
    assert client.generate("quill", "<user>hello", raw=True).context is None
    assert response.context[: response.prompt_eval_count + response.eval_count] == response.context


@pytest.mark.parametrize("is_streaming", [False, True])
def test_tool_loop(client, is_streaming):
    """The client builds the tool from a function; arguments are objects, and results have no call
    ids.
    """
    messages = user_messages("think of the weather in Rome and in Paris")
    answer = client.chat("quill", messages, tools=[weather], think=True, stream=is_streaming)
    if is_streaming:
        text, thinking, calls, last = join_stream(answer)
    else:
        message = answer.message
        last = answer
        text = message.content
        thinking = message.thinking
        calls = message.tool_calls
    assert (text.strip(), thinking.strip(), last.done_reason) == ("I look.", "I must look.", "stop")
    assert [call.function.name for call in calls] == ["weather"] * 2
    assert [call.function.arguments for call in calls] == [{"city": "Rome"}, {"city": "Paris"}]
    messages.append(
        {"role": "assistant", "content": text, "thinking": thinking, "tool_calls": calls}
    )
    for call in calls:
        messages.append(
            {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
        )
    assert (
        client.chat("quill", messages, tools=[weather]).message.content
        == "It is sun in Rome and sun in Paris."
    )


def test_thinking(client):
    response = client.chat("quill", user_messages("think"), think=True)
    assert (
        response.message.thinking.strip() == "I must look."
        and response.message.content.strip() == said("think")
    )
    assert client.generate("quill", "think", think="high").thinking.strip() == "I must look."
    _, thinking, _, _ = join_stream(client.generate("quill", "think", think=True, stream=True))
    assert thinking.strip() == "I must look."


@pytest.mark.parametrize("is_streaming", [False, True])
def test_format_with_pydantic_schema(bundled_client, is_streaming):
    """As in Ollama's documentation; the model is certain of the answer."""
    answer = bundled_client.chat(
        "quill",
        user_messages(PERSON),
        format=Person.model_json_schema(),
        options={"temperature": 0},
        stream=is_streaming,
    )
    text = join_stream(answer)[0] if is_streaming else answer.message.content
    assert Person.model_validate_json(text).model_dump() == FOUND
    json_response = bundled_client.generate(
        "quill", PERSON, format="json", options={"temperature": 0}
    )
    assert isinstance(json.loads(json_response.response), dict)


def test_logprobs_are_bit_identical_to_openai_endpoint(bundled_client, bundled):
    """The same sampling options give the same tokens and logprobs, streamed or not."""
    for options, fields in (
        ({"temperature": 0}, {"temperature": 0}),
        (
            {
                "temperature": 0.9,
                "top_k": 40.0,
                "top_p": 0.9,
                "min_p": 0.01,
                "seed": 7,
                "repeat_penalty": 1.1,
                "presence_penalty": 0.2,
                "frequency_penalty": 0.1,
                "num_predict": 30,
            },
            {
                "temperature": 0.9,
                "top_k": 40,
                "top_p": 0.9,
                "min_p": 0.01,
                "seed": 7,
                "repetition_penalty": 1.1,
                "presence_penalty": 0.2,
                "frequency_penalty": 0.1,
                "max_tokens": 30,
            },
        ),
    ):
        messages = user_messages("Tell a story.")
        openai_choice = post_ok(
            bundled,
            "/v1/chat/completions",
            messages=messages,
            logprobs=True,
            top_logprobs=3,
            **fields,
        )["choices"][0]
        expected_logprobs = openai_choice["logprobs"]["content"]
        response = bundled_client.chat(
            "quill", messages, options=options, logprobs=True, top_logprobs=3
        )
        assert response.message.content == openai_choice["message"]["content"]
        assert [(entry.token, entry.logprob) for entry in response.logprobs] == [
            (entry["token"], entry["logprob"]) for entry in expected_logprobs
        ]
        assert [entry.token for entry in response.logprobs[0].top_logprobs] == [
            entry["token"] for entry in expected_logprobs[0]["top_logprobs"]
        ]
        chunks = list(
            bundled_client.chat("quill", messages, options=options, logprobs=True, stream=True)
        )
        assert (
            "".join(chunk.message.content for chunk in chunks)
            == openai_choice["message"]["content"]
        )
        assert [entry.logprob for chunk in chunks for entry in chunk.logprobs or ()] == [
            entry["logprob"] for entry in expected_logprobs
        ]
        assert (
            bundled_client.generate("quill", "Tell a story.", options=options).response
            == openai_choice["message"]["content"]
        )


def test_raw_generate_equals_completion(bundled_client, bundled):
    text = post_ok(bundled, "/v1/completions", prompt="Once upon", temperature=0, max_tokens=20)[
        "choices"
    ][0]["text"]
    assert (
        bundled_client.generate(
            "quill", "Once upon", raw=True, options={"temperature": 0, "num_predict": 20}
        ).response
        == text
    )


def test_generate_context_continues_conversation(bundled_client, bundled):
    """The context has the tokens of the previous turn, as in a chat of both turns."""
    first_response = bundled_client.generate("quill", SORT, options={"temperature": 0})
    assert first_response.response == SORTED
    conversation = [
        *user_messages(SORT),
        {"role": "assistant", "content": SORTED},
        *user_messages("Sort: 5 2"),
    ]
    chat_response = bundled_client.chat("quill", conversation, options={"temperature": 0})
    second_response = bundled_client.generate(
        "quill", "Sort: 5 2", context=first_response.context, options={"temperature": 0}
    )
    assert (second_response.response, second_response.prompt_eval_count) == (
        chat_response.message.content,
        chat_response.prompt_eval_count,
    )


def test_embeddings_equal_openai_endpoint(bundled_client, bundled):
    texts = ["one small step", "a long walk"]
    expected = [
        embedding["embedding"]
        for embedding in post_ok(bundled, "/v1/embeddings", input=texts)["data"]
    ]
    response = bundled_client.embed("quill", texts)
    assert [
        list(embedding) for embedding in response.embeddings
    ] == expected and response.prompt_eval_count > 3
    assert list(bundled_client.embed("quill", texts[0]).embeddings[0]) == expected[0]
    assert list(bundled_client.embeddings("quill", texts[0]).embedding) == expected[0]
    assert bundled_client.embed("quill", []).embeddings == []
    assert bundled_client.embeddings("quill", "").embedding == []
    long_text = "word " * 5000
    assert len(bundled_client.embed("quill", long_text).embeddings) == 1  # truncated at the end
    with pytest.raises(ResponseError) as caught:
        bundled_client.embed("quill", long_text, truncate=False)
    assert caught.value.status_code == 400 and caught.value.error.startswith("input[0]: ")


def test_list_ps_show_and_version(bundled_client, bundled):
    assert [model.model for model in bundled_client.list().models] == ["quill:latest"]
    (model,) = bundled_client.list().models
    assert (
        model.size > 1000
        and len(model.digest) == 64
        and model.details.parameter_size
        and model.modified_at
    )
    (loaded,) = bundled_client.ps().models
    assert (
        loaded.name == "quill:latest"
        and loaded.context_length > 100
        and loaded.size_vram == model.size
    )
    model_info = bundled_client.show("quill:latest")
    family = model_info.modelinfo["general.architecture"]
    assert model_info.modelinfo[f"{family}.context_length"] == loaded.context_length
    assert (
        "completion" in model_info.capabilities
        and "thinking" not in model_info.capabilities
        and model_info.template
    )
    assert tuple(
        map(
            int,
            json.loads(send_request(bundled, "/api/version", None, "GET")[2])["version"].split("."),
        )
    ) >= (0, 6, 4)
    for method in ("HEAD", "GET"):
        assert send_request(bundled, "/", None, method)[0] == 200


def test_show_and_pull_accept_name_field(server):
    for path in ("/api/show", "/api/pull"):
        for body in (
            {"name": "quill"},
            {"model": "", "name": "quill"},
            {"model": "quill", "name": ""},
        ):
            assert send_request(server, path, body)[0] == 200, (path, body)


def test_model_names_with_tags(client):
    for name in ("quill", "quill:latest", "other-name"):
        assert client.chat(name, user_messages("hello")).model == name
    with pytest.raises(
        ResponseError, match="model 'llama3' not found; this server has quill"
    ) as caught:
        client.chat("llama3", user_messages("hello"))
    assert caught.value.status_code == 404
    with pytest.raises(ResponseError) as caught:
        client.embed("quill:7b", "hello")
    assert caught.value.status_code == 404


def test_empty_request_loads_the_model(client):
    for response in (
        client.generate("quill"),
        client.chat("quill", [], keep_alive="5m"),
    ):
        assert (response.done, response.done_reason) == (True, "load")
    assert [chunk.done_reason for chunk in client.generate("quill", stream=True)] == ["load"]
    with pytest.raises(ResponseError, match="keep_alive: .*--admin") as caught:
        client.generate("quill", keep_alive=0)
    assert caught.value.status_code == 403
    assert client.chat("quill", user_messages("hello"), keep_alive=0).message.content == said(
        "hello"
    )


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/api/chat", {"colour": 1}, "colour"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "messages[0].images[0]",
        ),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ("/api/chat", {"messages": 5}, "messages"),
        ("/api/chat", {"options": {"temprature": 1}}, "options.temprature"),
        ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {"options": {"num_predict": -3}}, "options.num_predict"),
        ("/api/chat", {"options": {"mirostat": 1}}, "options.mirostat"),
        (
            "/api/chat",
            {"options": {"repeat_penalty": 1.2, "repeat_last_n": 64}},
            "options.repeat_last_n",
        ),
        ("/api/chat", {"options": 5}, "options"),
        ("/api/chat", {"options": {"num_ctx": "4k"}}, "options.num_ctx"),
        ("/api/chat", {"options": {"mirostat": False}}, "options.mirostat"),
        ("/api/chat", {"options": {"seed": 2**63}}, "options.seed"),
        ("/api/chat", {"format": "yaml"}, "format"),
        ("/api/chat", {"format": {"type": 5}}, "format"),
        ("/api/chat", {"format": {"type": "string", "pattern": "("}}, "format"),
        ("/api/chat", {"think": "much"}, "think"),
        ("/api/chat", {"keep_alive": "long"}, "keep_alive"),
        ("/api/chat", {"keep_alive": "\u0663m"}, "keep_alive"),
        ("/api/chat", {"stream": "yes"}, "stream"),
        ("/api/chat", {"top_logprobs": 3}, "top_logprobs"),
        ("/api/chat", {"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ("/api/chat", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ("/api/chat", {"tools": [5]}, "tools[0]"),
        ("/api/chat", {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        (
            "/api/chat",
            {"messages": [{"role": "assistant", "tool_calls": [5]}]},
            "messages[0].tool_calls[0]",
        ),
        ("/api/generate", {"images": ["aGk="]}, "images[0]"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"raw": True, "system": "x"}, "system"),
        ("/api/generate", {"context": [-1]}, "context[0]"),
        ("/api/generate", {"context": [10**6]}, "context"),
        ("/api/generate", {"suffix": "x"}, "suffix"),
        ("/api/generate", {"model": ""}, "model"),
        ("/api/embed", {"input": 5}, "input"),
        ("/api/embed", {"dimensions": -1, "input": "x"}, "dimensions"),
        ("/api/embed", {"dimensions": False, "input": "x"}, "dimensions"),
        ("/api/embeddings", {"prompt": ["x"]}, "prompt"),
        ("/api/show", {"verbose": 1}, "verbose"),
        ("/api/show", {"name": "other"}, "name"),
        ("/api/pull", {"stream": "no"}, "stream"),
        ("/api/pull", {"colour": 1}, "colour"),
    ],
)
def test_invalid_request_error_names_field(server, path, fields, field):
    base = (
        {"messages": user_messages("hello")}
        if path == "/api/chat"
        else {"prompt": "x"}
        if "generate" in path
        else {}
    )
    status, _, raw = send_request(server, path, {"model": "quill", **base, **fields})
    body = json.loads(raw)
    assert status == 400 and list(body) == ["error"] and body["error"].startswith(field), body
    frees_all(server)


def test_options_without_effect_are_accepted(client):
    options = {
        "num_ctx": 4096,
        "num_gpu": 1,
        "num_thread": 4,
        "use_mmap": True,
        "repeat_last_n": 64,
        "mirostat": 0,
        "tfs_z": 1.0,
        "typical_p": 1.0,
        "num_predict": -1,
        "seed": -1,
        "penalize_newline": False,
    }
    assert client.chat("quill", user_messages("hello"), options=options).message.content == said(
        "hello"
    )
    penalties = {"repeat_last_n": 0, "repeat_penalty": 1.5}
    assert client.chat("quill", user_messages("hello"), options=penalties).message.content == said(
        "hello"
    )


def test_think_is_rejected_for_models_without_reasoning(bundled_client):
    with pytest.raises(ResponseError, match="think: is not understood") as caught:
        bundled_client.chat("quill", user_messages("hello"), think=True)
    assert caught.value.status_code == 400
    assert (
        bundled_client.chat(
            "quill", user_messages(SORT), think=False, options={"temperature": 0}
        ).message.content
        == SORTED
    )


def test_model_management_is_rejected(client, server):
    assert client.pull("quill").status == "success"
    assert [chunk.status for chunk in client.pull("quill", stream=True)] == ["success"]
    for status, call in (
        (403, lambda: client.pull("llama3")),
        (403, lambda: client.delete("quill")),
        (501, lambda: client.create("mine", from_="quill")),
        (501, lambda: client.copy("quill", "mine")),
        (501, lambda: client.push("quill")),
    ):
        with pytest.raises(ResponseError) as caught:
            call()
        assert (
            caught.value.status_code == status
            and "quire" in caught.value.error
            or "hf upload" in caught.value.error
        )
    assert send_request(server, "/api/blobs/sha256:00", None, "HEAD")[0] == 404
    assert json.loads(send_request(server, "/api/nothing", {})[2]) == {
        "error": "POST /api/nothing: Not Found"
    }


def test_long_chat_drops_oldest_turns(client):
    """As in Ollama; with `truncate` false the request is rejected."""
    conversation = [
        turn
        for _ in range(30)
        for turn in (*user_messages("word " * 20), {"role": "assistant", "content": "yes"})
    ]
    conversation += user_messages("hello")
    assert client.chat("quill", conversation).message.content == said("hello")
    with pytest.raises(ResponseError) as caught:
        client._request(
            ollama.ChatResponse, "POST", "/api/chat",
            json={"model": "quill", "messages": conversation, "truncate": False, "stream": False},
        )  # fmt: skip
    assert caught.value.status_code == 400


def test_concurrent_async_requests(server):
    async def run() -> list[str]:
        async def stream_answer(client: AsyncClient, text: str) -> str:
            return "".join(
                [
                    chunk.message.content
                    async for chunk in await client.chat("quill", user_messages(text), stream=True)
                ]
            )

        async with AsyncClient(host=server.url) as client:
            return await asyncio.gather(*[stream_answer(client, f"hello {i}") for i in range(8)])

    assert asyncio.run(run()) == [said(f"hello {i}") for i in range(8)]
    frees_all(server)
