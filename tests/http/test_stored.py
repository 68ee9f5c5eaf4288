"""Stored responses and conversations: access by API key, limits, and continuation from them."""

import httpx2
import msgspec
import openai
import pytest
from openai import OpenAI

from quire.serving.api.errors import RequestError
from quire.serving.http.errors import HttpError
from quire.serving.http.stored import KINDS, StoredResponse, StoredResponses
from quire.tests.support.conformance import shows
from quire.tests.support.served import FORMATS
from quire.tests.support.talk import frees_all, said, scripted_server, until

WEATHER_TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def server():
    with scripted_server(FORMATS, api_keys=("one", "two"), max_stored_responses=8) as state:
        yield state


def make_client(server, key: str = "one") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(server):
    with make_client(server) as client:
        yield client
    server.script.hold.set()
    frees_all(server)


def create_response(client, text: str = "hello", **fields):
    return client.responses.create(model="quill", input=text, **fields)


@shows("openai", "responses.retrieve, responses.delete, responses.input_items.list")
def test_stored_response_is_retrieved_and_deleted(client, server):
    """A response and its input are stored until deleted, and are visible only to the API key that
    created them.
    """
    stored_response = create_response(client, "hello", instructions="Be kind.")
    assert stored_response.output_text == said("hello") and stored_response.store
    assert client.responses.retrieve(stored_response.id) == stored_response
    (item,) = client.responses.input_items.list(stored_response.id).data
    assert (item.type, item.role, item.content[0].text) == ("message", "user", "hello")
    with (
        make_client(server, "two") as other_client,
        pytest.raises(openai.NotFoundError, match="Response with id .* not found"),
    ):
        other_client.responses.retrieve(stored_response.id)
    client.responses.delete(stored_response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(stored_response.id)
        assert (caught.value.param, caught.value.code) == ("id", "response_not_found")
    unstored_response = create_response(client, store=False)
    assert not unstored_response.store
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored_response.id)
    with pytest.raises(
        openai.BadRequestError, match="stream: was not asked for together with background"
    ):
        list(client.responses.retrieve(create_response(client).id, stream=True))


@shows("openai", "responses.create(previous_response_id=...)")
@pytest.mark.parametrize("is_streaming", [False, True])
def test_previous_response_id_continues_conversation(client, is_streaming):
    """The prompt has the earlier turns with their calls and results, but not the earlier
    instructions.
    """

    def create_turn(input_, previous=None, **fields):
        request_fields = {
            "model": "quill",
            "input": input_,
            "tools": [WEATHER_TOOL],
            "previous_response_id": previous,
            **fields,
        }
        if not is_streaming:
            return client.responses.create(**request_fields)
        with client.responses.stream(
            **{name: value for name, value in request_fields.items() if value is not None}
        ) as stream:
            return stream.get_final_response()

    first_response = create_turn("weather in Rome", instructions="Be kind.")
    call = next(item for item in first_response.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second_response = create_turn([result], first_response.id)
    assert (
        second_response.previous_response_id == first_response.id
        and second_response.output_text == "It is sunny."
    )
    third_response = create_turn("hello", second_response.id)
    response_after_first = create_turn("hello", first_response.id)
    conversation = [
        {"role": "user", "content": "weather in Rome"},
        *first_response.output,
        result,
        *second_response.output,
    ]
    response_to_conversation = create_turn(
        [
            *(
                item if isinstance(item, dict) else item.model_dump(exclude_none=True)
                for item in conversation
            ),
            {"role": "user", "content": "hello"},
        ]
    )
    assert (
        third_response.usage.input_tokens
        == response_to_conversation.usage.input_tokens
        > response_after_first.usage.input_tokens
    )
    assert third_response.output_text == response_to_conversation.output_text
    assert [item.type for item in client.responses.input_items.list(second_response.id).data] == [
        "function_call_output"
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        create_turn("hello", "resp_none")
    assert (caught.value.param, caught.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )


def test_request_id_of_stored_response_is_rejected(client):
    """Otherwise a response could name itself as its predecessor and be read in an endless loop."""
    request_fields = {"extra_body": {"request_id": "mine"}}
    first_response = create_response(client, **request_fields)
    assert first_response.id == "resp_mine"
    for fields in (
        {},
        {"previous_response_id": first_response.id},
        {"store": False},
        {"background": True},
    ):
        with pytest.raises(
            openai.BadRequestError, match="request_id: makes the id resp_mine"
        ) as caught:
            create_response(client, **request_fields, **fields)
        assert caught.value.param == "request_id"
    assert create_response(client, previous_response_id=first_response.id).output_text == said(
        "hello"
    )
    client.responses.delete(first_response.id)
    assert create_response(client, **request_fields).id == first_response.id


@pytest.mark.parametrize("is_streaming", [False, True])
def test_previous_response_id_without_input(client, is_streaming):
    first_response = create_response(client, "hello")
    request_fields = {
        "model": "quill",
        "previous_response_id": first_response.id,
        "stream": is_streaming,
    }
    answer = client.responses.create(**request_fields)
    second_response = [*answer][-1].response if is_streaming else answer
    assert (
        second_response.output_text
        and not client.responses.input_items.list(second_response.id).data
    )
    background = client.responses.create(
        model="quill", previous_response_id=second_response.id, background=True
    )
    until(lambda: client.responses.retrieve(background.id).status == "completed")


def test_conversation_and_response_ids_are_not_interchangeable(client):
    stored_response = create_response(client)
    conversation = client.conversations.create(items=[{"role": "user", "content": "hello"}])
    for call in (
        client.responses.retrieve,
        client.responses.cancel,
        client.responses.delete,
        client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call(conversation.id)
        assert caught.value.code == "response_not_found"
    for call in (
        client.conversations.retrieve,
        client.conversations.delete,
        client.conversations.items.list,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call(stored_response.id)
        assert caught.value.code == "conversation_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        create_response(client, conversation=stored_response.id)
    assert (caught.value.param, caught.value.code) == ("conversation", "conversation_not_found")
    with pytest.raises(openai.BadRequestError) as caught:
        create_response(client, previous_response_id=conversation.id)
    assert (caught.value.param, caught.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )
    assert (
        client.conversations.retrieve(conversation.id) == conversation
        and client.responses.retrieve(stored_response.id) == stored_response
    )


def test_request_ids_are_private_to_their_api_key(client, server):
    """Neither the live page nor the error for an id in use shows another key's request ids."""

    def live_ids(key: str) -> list[str]:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.stream("GET", f"{server.url}/live", headers=headers, timeout=60) as http_stream:
            frame = next(line for line in http_stream.iter_lines() if line.startswith("data: "))
        live_data = msgspec.json.decode(frame.removeprefix("data: "))
        return [request["id"] for request in (*live_data["running"], *live_data["waiting"])]

    server.script.step_seconds = 0.01
    request_fields = {
        "model": "quill",
        "prompt": "<user>count<assistant>",
        "max_tokens": 300,
        "extra_body": {"request_id": "mine"},
    }
    with (
        make_client(server, "two") as other_client,
        client.completions.create(**request_fields, stream=True) as reader,
    ):
        try:
            next(iter(reader))
            assert live_ids("one") == ["cmpl-mine"] and live_ids("two") == [""]
            with pytest.raises(
                openai.BadRequestError, match="request_id: 'cmpl-mine' is being served already"
            ):
                client.completions.create(**request_fields)
            assert (
                other_client.completions.create(**(request_fields | {"max_tokens": 2})).id
                == "cmpl-mine"
            )
        finally:
            server.script.step_seconds = 0.0


@pytest.mark.parametrize("cycle", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_cyclic_response_chain_is_rejected(cycle):
    responses = StoredResponses(10, 1 << 20)
    for name, previous in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        body = {"id": name, "object": "response", "status": "completed", "output": []}
        assert responses.put(None, name, StoredResponse(body, [], previous))
    assert not responses.put(None, "a", make_stored_response(), is_new=True)
    with pytest.raises(RequestError, match="previous_response_id: leads to 'a' twice"):
        responses.history(None, "a", "previous_response_id")


@shows("openai", "enable_response_messages by extra_body")
@pytest.mark.parametrize(
    "delivery", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}]
)
def test_enable_response_messages_returns_raw_prompt_and_output(client, server, delivery):
    """Raw prompt and output, with template markers and reasoning and call tags, as text and token
    ids; for every way of delivery.
    """
    extra_body = {"enable_response_messages": True}
    request_fields = {
        "instructions": "Be kind.",
        "tools": [WEATHER_TOOL],
        "extra_body": extra_body,
        **delivery,
    }
    answer = create_response(client, "think of the weather in Rome", **request_fields)
    if "stream" in delivery:
        *_, last = answer
        answer = last.response
    until(lambda: client.responses.retrieve(answer.id).status == "completed")
    completed = client.responses.retrieve(answer.id)
    (prompt,) = completed.input_messages
    (output,) = completed.output_messages
    assert {prompt["type"], output["type"]} == {"raw_message_tokens"}
    assert "Be kind." in prompt["message"] and "weather in Rome" in prompt["message"]
    assert (
        output["message"].startswith("<think>\nI must look.\n</think>")
        and '"weather"' in output["message"]
    )
    decode = server.engine.tokenizer.decode
    assert decode(prompt["tokens"], skip_special_tokens=False) == prompt["message"]
    assert decode(output["tokens"], skip_special_tokens=False).startswith(output["message"])
    assert not hasattr(create_response(client), "input_messages")


@shows("openai", "responses.create(background=True), responses.cancel")
def test_background_response_and_cancellation(client, server):
    """A background response is queued immediately and answered later; a cancelled one stops
    computing and stays cancelled.
    """
    queued = create_response(client, background=True)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    until(lambda: client.responses.retrieve(queued.id).status == "completed")
    completed = client.responses.retrieve(queued.id)
    assert (
        completed.output_text == said("hello")
        and completed.usage is not None
        and completed.id == queued.id
    )
    assert client.responses.cancel(queued.id).status == "completed"  # already completed
    server.script.hold.clear()
    long_response = create_response(client, "count", background=True)
    until(lambda: client.responses.retrieve(long_response.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="is not answered yet"):
        create_response(client, previous_response_id=long_response.id)
    assert client.responses.cancel(long_response.id).status == "cancelled"
    server.script.hold.set()
    frees_all(server)
    assert client.responses.retrieve(long_response.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(create_response(client).id)
    with pytest.raises(
        openai.BadRequestError, match="background: can only be used when store is true"
    ):
        create_response(client, background=True, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nothing", input="x", background=True)


@shows(
    "openai",
    "responses.create(background=True, stream=True), responses.retrieve(stream=True, "
    "starting_after=...)",
)
def test_background_response_stream_is_resumable(client, server):
    """A reader may disconnect and resume, during the answer or after it, without losing events."""
    server.script.hold.clear()
    with create_response(client, "count", background=True, stream=True) as reader:
        first_event = next(iter(reader))
    assert (first_event.type, first_event.response.status, first_event.response.background) == (
        "response.created",
        "queued",
        True,
    )
    response_id = first_event.response.id
    with client.responses.retrieve(response_id, stream=True) as second_reader:
        assert next(iter(second_reader)) == first_event
        assert client.responses.retrieve(response_id).status == "in_progress"
        server.script.hold.set()
        resumed_events = [first_event, *second_reader]
    all_events = list(client.responses.retrieve(response_id, stream=True))
    assert [event.sequence_number for event in all_events] == list(range(len(all_events)))
    assert resumed_events == all_events
    assert (
        list(client.responses.retrieve(response_id, stream=True, starting_after=3))
        == all_events[4:]
    )
    completed = client.responses.retrieve(response_id)
    assert (
        all_events[-1].type == f"response.{completed.status}"
        and all_events[-1].response.output == completed.output
    )
    assert (
        "".join(event.delta for event in all_events if event.type == "response.output_text.delta")
        == completed.output_text
    )
    with pytest.raises(openai.BadRequestError, match="starting_after: must be an integer"):
        client.responses.retrieve(response_id, stream=True, starting_after="x")
    server.script.hold.clear()
    with create_response(client, "count", background=True, stream=True) as reader:
        cancelled_id = next(iter(reader)).response.id
        assert client.responses.cancel(cancelled_id).status == "cancelled"
        # the reader's stream ends
        assert {event.type for event in reader} <= {"response.queued", "response.in_progress"}


@pytest.mark.parametrize("is_streaming", [False, True])
def test_failed_background_response(client, server, is_streaming):
    server.script.fail_next = 1
    answer = create_response(client, background=True, stream=is_streaming)
    if is_streaming:
        events = list(answer)
        assert [event.type.removeprefix("response.") for event in events] == [
            "created",
            "queued",
            "in_progress",
            "failed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        answer = events[0].response
    until(lambda: client.responses.retrieve(answer.id).status == "failed")
    error = client.responses.retrieve(answer.id).error
    assert error.code == "server_error" and "engine failed" in error.message


def test_failed_stream_sends_created_event_first(client, server):
    server.script.fail_next = 1
    events = list(create_response(client, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]


def test_max_stored_responses_evicts_least_recently_used(client, server):
    response_ids = [create_response(client).id for _ in range(10)]
    assert server.service.stored.storage.usage(*KINDS).entries == 8
    assert client.responses.retrieve(response_ids[-1]) and client.responses.retrieve(
        response_ids[2]
    )
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_ids[1])
    create_response(client)  # evicts the least recently used
    assert client.responses.retrieve(response_ids[2])
    server.script.hold.clear()
    running = [create_response(client, background=True) for _ in range(8)]
    with pytest.raises(openai.RateLimitError, match="as many responses are kept as may be"):
        create_response(client, background=True)
    server.script.hold.set()
    until(
        lambda: all(
            client.responses.retrieve(running_response.id).status == "completed"
            for running_response in running
        )
    )


def test_server_without_stored_responses():
    server_settings = {"max_stored_responses": 0, "enable_prompt_tokens_details": True}
    with scripted_server(FORMATS, **server_settings) as server, make_client(server) as client:
        unstored_response = create_response(client)
        assert not unstored_response.store and unstored_response.output_text == said("hello")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unstored_response.id)
        with pytest.raises(openai.BadRequestError, match="background: needs stored responses"):
            create_response(client, background=True)
        usage = client.embeddings.create(model="quill", input="<user>hello").usage
        assert usage.prompt_tokens_details["cached_tokens"] == 0


def test_input_items_pagination(client):
    stored_response = create_response(
        client, [{"role": "user", "content": str(i)} for i in range(5)]
    )
    page = client.responses.input_items.list(stored_response.id, limit=2, order="asc")
    assert [item.content for item in page.data] == ["0", "1"] and page.has_more
    assert [
        item.content for item in client.responses.input_items.list(stored_response.id, limit=2)
    ] == [
        "4",
        "3",
        "2",
        "1",
        "0",
    ]
    for query, param in (
        ({"limit": 0}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "x"}, "after"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_items.list(stored_response.id, **query)
        assert caught.value.param == param


def make_stored_response(size: int = 10) -> StoredResponse:
    body = {
        "id": "a",
        "object": "response",
        "status": "completed",
        "output": [],
        "text": "x" * size,
    }
    return StoredResponse(body, [], None)


def test_max_stored_bytes_evicts_least_recently_used():
    entry_bytes = len(msgspec.json.encode(make_stored_response(100).entry()))
    responses = StoredResponses(100, 3 * entry_bytes)

    def names() -> list[str]:
        return [key.id for key in responses.storage.least_recently_used(KINDS)]

    for i in range(5):
        assert responses.put(None, str(i), make_stored_response(100))
        assert (
            responses.storage.usage(*KINDS).bytes == entry_bytes * len(names()) <= 3 * entry_bytes
        )
    assert names() == ["2", "3", "4"]
    assert not responses.put(None, "large", make_stored_response(1000)) and len(names()) == 3
    assert responses.put(None, "4", make_stored_response(10))  # replaces the entry
    responses.get(None, "2")
    assert names() == ["3", "4", "2"]
    for name in names():
        responses.delete(None, name)
    assert responses.storage.usage(*KINDS) == (0, 0)
    with pytest.raises(HttpError, match="not found"):
        responses.get("tenant", "4")
    assert not StoredResponses(0, 1 << 20).put(None, "a", make_stored_response())


@shows(
    "openai", "conversations.create, retrieve, update, delete, items.create, list, retrieve, delete"
)
def test_conversations(client, server):
    """A conversation keeps its items in order, and belongs to the API key that created it."""
    message = {"role": "user", "content": "hello"}
    conversation = client.conversations.create(items=[message], metadata={"who": "me"})
    assert conversation.object == "conversation" and conversation.metadata == {"who": "me"}
    assert client.conversations.retrieve(conversation.id) == conversation
    assert client.conversations.update(conversation.id, metadata={}).metadata == {}
    added_items = client.conversations.items.create(
        conversation.id, items=[{**message, "content": "bye"}]
    )
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.content for item in items] == ["hello", "bye"] and items[1].id == added_items.data[
        0
    ].id
    assert (
        client.conversations.items.retrieve(items[0].id, conversation_id=conversation.id).content
        == "hello"
    )
    client.conversations.items.delete(items[0].id, conversation_id=conversation.id)
    assert [item.id for item in client.conversations.items.list(conversation.id)] == [items[1].id]
    with (
        make_client(server, "two") as other_client,
        pytest.raises(openai.NotFoundError, match="Conversation with id"),
    ):
        other_client.conversations.retrieve(conversation.id)
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.list(conversation.id)
    for fields, message_pattern in (
        ({"items": [{"type": "web_search_call"}]}, r"items\[0\]"),
        ({"metadata": {"a": 5}}, "metadata: must be at most 16 names"),
        ({"items": [message] * 21}, "items: must be a list of 0 to 20"),
    ):
        with pytest.raises(openai.BadRequestError, match=message_pattern):
            client.conversations.create(**fields)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(create_response(client).id)


@shows("openai", "responses.create(conversation=...)")
def test_response_in_conversation_appends_its_items(client):
    """A response continues the conversation; its input and output become items of the
    conversation.
    """
    initial_items = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi"}]
    conversation = client.conversations.create(items=initial_items)
    request_fields = {
        "conversation": conversation.id,
        "extra_body": {"chat_template": "<user>{{ messages | length }}<assistant>"},
    }
    first_response = create_response(
        client, "weather in Rome", conversation=conversation.id, tools=[WEATHER_TOOL]
    )
    assert first_response.conversation.id == conversation.id
    (call,) = [item for item in first_response.output if item.type == "function_call"]
    kinds = [item.type for item in client.conversations.items.list(conversation.id, order="asc")]
    assert kinds == ["message"] * 4 + ["function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    with client.responses.stream(
        model="quill",
        input=[result],
        tools=[WEATHER_TOOL],
        conversation=conversation.id,
        store=False,
    ) as stream:
        final_response = stream.get_final_response()
    assert final_response.output_text == "It is sun."
    assert create_response(client, "again", **request_fields).output_text == said("7")
    assert len(client.conversations.items.list(conversation.id, order="asc").data) == 9
    with pytest.raises(openai.NotFoundError) as caught:
        create_response(client, conversation="conv_0")
    assert (caught.value.param, caught.value.code) == ("conversation", "conversation_not_found")
    with pytest.raises(openai.BadRequestError, match="both say what was before"):
        create_response(
            client, conversation=conversation.id, previous_response_id=first_response.id
        )
