"""Ollama's own Python client, as it is, against a server over a socket."""

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

JSON = {"Content-Type": "application/json"}


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
    """Its model follows a script."""
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
def quill(bundled):
    with Client(host=bundled.url) as client:
        yield client
    frees_all(bundled)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def post(server, path: str, body: Any, method: str = "POST") -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), JSON)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def openai(server, path: str, **fields: Any) -> dict[str, Any]:
    status, _, raw = post(server, path, {"model": "quill", **fields})
    assert status == 200, raw
    return json.loads(raw)


def whole(parts: Any) -> tuple[str, str, list[Any], Any]:
    """The text, the thoughts and the calls of a stream, and its last part."""
    parts = list(parts)
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    messages = [part.message if hasattr(part, "message") else part for part in parts]
    text = "".join(
        (getattr(one, "content", None) or getattr(one, "response", None) or "") for one in messages
    )
    calls = [call for one in messages for call in getattr(one, "tool_calls", None) or ()]
    return text, "".join(one.thinking or "" for one in messages), calls, parts[-1]


def test_chat_and_what_it_took(client):
    found = client.chat("quill", user("hello"))
    assert (found.message.role, found.message.content, found.model) == (
        "assistant",
        said("hello"),
        "quill",
    )
    assert (found.done, found.done_reason) == (True, "stop") and found.created_at.endswith("Z")
    assert found.prompt_eval_count > 0 and found.eval_count > 5
    parts = found.load_duration + found.prompt_eval_duration + found.eval_duration
    assert found.eval_duration > 0 and found.prompt_eval_duration > 0
    assert abs(found.total_duration - parts) < 10  # each is rounded
    assert client.chat("quill", user("hello"), options={"num_predict": 3}).done_reason == "length"
    assert (
        client.chat("quill", user("hello"), options={"stop": ["hello"]}).message.content
        == "You said: "
    )
    system = [{"role": "system", "content": "Be kind."}, *user("hello")]
    assert client.chat("quill", system).prompt_eval_count > found.prompt_eval_count


def test_chat_in_pieces(client, server):
    text, _, _, last = whole(client.chat("quill", user("hello"), stream=True))
    assert text == said("hello") and last.done_reason == "stop" and last.eval_count > 5
    # Streaming is what is done where nothing is said of it.
    status, headers, raw = post(server, "/api/chat", {"model": "quill", "messages": user("hello")})
    assert (status, headers["Content-Type"]) == (200, "application/x-ndjson")
    lines = [json.loads(line) for line in raw.decode().splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == said("hello") and len(lines) > 3
    assert lines[-1]["done"] and isinstance(lines[-1]["total_duration"], int)


def test_generate(client):
    found = client.generate("quill", "hello", system="Be kind.")
    assert (
        found.response == said("hello") and found.done_reason == "stop" and len(found.context) > 5
    )
    text, _, _, last = whole(client.generate("quill", "hello", system="Be kind.", stream=True))
    assert text == said("hello") and last.context == found.context
    assert client.generate("quill", "<user>hello", raw=True).context is None
    assert found.context[: found.prompt_eval_count + found.eval_count] == found.context


@pytest.mark.parametrize("streams", [False, True])
def test_tools(client, streams):
    """The client makes the tool of a function; arguments are objects; results go back without
    ids.
    """
    messages = user("think of the weather in Rome and in Paris")
    answer = client.chat("quill", messages, tools=[weather], think=True, stream=streams)
    if streams:
        text, thought, calls, last = whole(answer)
    else:
        message = answer.message
        last = answer
        text = message.content
        thought = message.thinking
        calls = message.tool_calls
    assert (text.strip(), thought.strip(), last.done_reason) == ("I look.", "I must look.", "stop")
    assert [call.function.name for call in calls] == ["weather"] * 2
    assert [call.function.arguments for call in calls] == [{"city": "Rome"}, {"city": "Paris"}]
    messages.append(
        {"role": "assistant", "content": text, "thinking": thought, "tool_calls": calls}
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
    found = client.chat("quill", user("think"), think=True)
    assert (
        found.message.thinking.strip() == "I must look."
        and found.message.content.strip() == said("think")
    )
    assert client.generate("quill", "think", think="high").thinking.strip() == "I must look."
    _, thought, _, _ = whole(client.generate("quill", "think", think=True, stream=True))
    assert thought.strip() == "I must look."


@pytest.mark.parametrize("streams", [False, True])
def test_a_schema_of_pydantic(quill, streams):
    """As its documentation has it; the model is sure of the answer."""
    answer = quill.chat(
        "quill",
        user(PERSON),
        format=Person.model_json_schema(),
        options={"temperature": 0},
        stream=streams,
    )
    text = whole(answer)[0] if streams else answer.message.content
    assert Person.model_validate_json(text).model_dump() == FOUND
    loose = quill.generate("quill", PERSON, format="json", options={"temperature": 0})
    assert isinstance(json.loads(loose.response), dict)


def test_the_same_bits_as_openai(quill, bundled):
    """The same sampling gives the same tokens with the same log-probabilities, at once and in
    pieces.
    """
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
        messages = user("Tell a story.")
        theirs = openai(
            bundled,
            "/v1/chat/completions",
            messages=messages,
            logprobs=True,
            top_logprobs=3,
            **fields,
        )["choices"][0]
        wanted = theirs["logprobs"]["content"]
        ours = quill.chat("quill", messages, options=options, logprobs=True, top_logprobs=3)
        assert ours.message.content == theirs["message"]["content"]
        assert [(one.token, one.logprob) for one in ours.logprobs] == [
            (one["token"], one["logprob"]) for one in wanted
        ]
        assert [one.token for one in ours.logprobs[0].top_logprobs] == [
            one["token"] for one in wanted[0]["top_logprobs"]
        ]
        parts = list(quill.chat("quill", messages, options=options, logprobs=True, stream=True))
        assert "".join(part.message.content for part in parts) == theirs["message"]["content"]
        assert [one.logprob for part in parts for one in part.logprobs or ()] == [
            one["logprob"] for one in wanted
        ]
        assert (
            quill.generate("quill", "Tell a story.", options=options).response
            == theirs["message"]["content"]
        )


def test_raw_is_a_completion(quill, bundled):
    text = openai(bundled, "/v1/completions", prompt="Once upon", temperature=0, max_tokens=20)[
        "choices"
    ][0]["text"]
    assert (
        quill.generate(
            "quill", "Once upon", raw=True, options={"temperature": 0, "num_predict": 20}
        ).response
        == text
    )


def test_context_goes_on(quill, bundled):
    """The tokens of the turn before, and then the new turn: what a conversation of both has."""
    first = quill.generate("quill", SORT, options={"temperature": 0})
    assert first.response == SORTED
    talk = [*user(SORT), {"role": "assistant", "content": SORTED}, *user("Sort: 5 2")]
    whole_talk = quill.chat("quill", talk, options={"temperature": 0})
    second = quill.generate("quill", "Sort: 5 2", context=first.context, options={"temperature": 0})
    assert (second.response, second.prompt_eval_count) == (
        whole_talk.message.content,
        whole_talk.prompt_eval_count,
    )


def test_embeddings_are_those_of_openai(quill, bundled):
    texts = ["one small step", "a long walk"]
    wanted = [one["embedding"] for one in openai(bundled, "/v1/embeddings", input=texts)["data"]]
    found = quill.embed("quill", texts)
    assert [list(one) for one in found.embeddings] == wanted and found.prompt_eval_count > 3
    assert list(quill.embed("quill", texts[0]).embeddings[0]) == wanted[0]
    assert list(quill.embeddings("quill", texts[0]).embedding) == wanted[0]
    assert quill.embed("quill", []).embeddings == []
    assert quill.embeddings("quill", "").embedding == []
    long = "word " * 5000
    assert len(quill.embed("quill", long).embeddings) == 1  # its end is left out
    with pytest.raises(ResponseError) as caught:
        quill.embed("quill", long, truncate=False)
    assert caught.value.status_code == 400 and caught.value.error.startswith("input[0]: ")


def test_lists_and_versions(quill, bundled):
    assert [model.model for model in quill.list().models] == ["quill:latest"]
    (model,) = quill.list().models
    assert (
        model.size > 1000
        and len(model.digest) == 64
        and model.details.parameter_size
        and model.modified_at
    )
    (loaded,) = quill.ps().models
    assert (
        loaded.name == "quill:latest"
        and loaded.context_length > 100
        and loaded.size_vram == model.size
    )
    shown = quill.show("quill:latest")
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] == loaded.context_length
    assert (
        "completion" in shown.capabilities
        and "thinking" not in shown.capabilities
        and shown.template
    )
    assert tuple(
        map(int, json.loads(post(bundled, "/api/version", None, "GET")[2])["version"].split("."))
    ) >= (0, 6, 4)
    for method in ("HEAD", "GET"):
        assert post(bundled, "/", None, method)[0] == 200


def test_older_clients_ask_by_name(server):
    for path in ("/api/show", "/api/pull"):
        for body in (
            {"name": "quill"},
            {"model": "", "name": "quill"},
            {"model": "quill", "name": ""},
        ):
            assert post(server, path, body)[0] == 200, (path, body)


def test_names(client):
    for name in ("quill", "quill:latest", "other-name"):
        assert client.chat(name, user("hello")).model == name
    with pytest.raises(
        ResponseError, match="model 'llama3' not found; this server has quill"
    ) as caught:
        client.chat("llama3", user("hello"))
    assert caught.value.status_code == 404
    with pytest.raises(ResponseError) as caught:
        client.embed("quill:7b", "hello")
    assert caught.value.status_code == 404


def test_nothing_asked_loads(client):
    for found in (client.generate("quill"), client.chat("quill", [], keep_alive="5m")):
        assert (found.done, found.done_reason) == (True, "load")
    assert [part.done_reason for part in client.generate("quill", stream=True)] == ["load"]
    with pytest.raises(ResponseError, match="keep_alive: .*--admin") as caught:
        client.generate("quill", keep_alive=0)
    assert caught.value.status_code == 403
    assert client.chat("quill", user("hello"), keep_alive=0).message.content == said("hello")


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"colour": 1}, "colour"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "messages[0].images",
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
        ("/api/generate", {"images": ["aGk="]}, "images"),
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
def test_wrong_requests_are_refused_by_name(server, path, fields, named):
    base = (
        {"messages": user("hello")}
        if path == "/api/chat"
        else {"prompt": "x"}
        if "generate" in path
        else {}
    )
    status, _, raw = post(server, path, {"model": "quill", **base, **fields})
    body = json.loads(raw)
    assert status == 400 and list(body) == ["error"] and body["error"].startswith(named), body
    frees_all(server)


def test_options_that_ask_for_nothing(client):
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
    assert client.chat("quill", user("hello"), options=options).message.content == said("hello")
    penalties = {"repeat_last_n": 0, "repeat_penalty": 1.5}
    assert client.chat("quill", user("hello"), options=penalties).message.content == said("hello")


def test_thoughts_of_a_model_that_has_none(quill):
    with pytest.raises(ResponseError, match="think: is not understood") as caught:
        quill.chat("quill", user("hello"), think=True)
    assert caught.value.status_code == 400
    assert (
        quill.chat("quill", user(SORT), think=False, options={"temperature": 0}).message.content
        == SORTED
    )


def test_what_a_client_cannot_do(client, server):
    assert client.pull("quill").status == "success"
    assert [part.status for part in client.pull("quill", stream=True)] == ["success"]
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
    assert post(server, "/api/blobs/sha256:00", None, "HEAD")[0] == 404
    assert json.loads(post(server, "/api/nothing", {})[2]) == {
        "error": "POST /api/nothing: Not Found"
    }


def test_the_oldest_turns_make_room(client):
    """As Ollama does it; with `truncate` false the request is refused."""
    talk = [
        one
        for _ in range(30)
        for one in (*user("word " * 20), {"role": "assistant", "content": "yes"})
    ]
    talk += user("hello")
    assert client.chat("quill", talk).message.content == said("hello")
    with pytest.raises(ResponseError) as caught:
        client._request(
            ollama.ChatResponse, "POST", "/api/chat",
            json={"model": "quill", "messages": talk, "truncate": False, "stream": False},
        )  # fmt: skip
    assert caught.value.status_code == 400


def test_several_at_once(server):
    async def run() -> list[str]:
        async def one(client: AsyncClient, text: str) -> str:
            return "".join(
                [
                    part.message.content
                    async for part in await client.chat("quill", user(text), stream=True)
                ]
            )

        async with AsyncClient(host=server.url) as client:
            return await asyncio.gather(*[one(client, f"hello {i}") for i in range(8)])

    assert asyncio.run(run()) == [said(f"hello {i}") for i in range(8)]
    frees_all(server)
