"""Responses that are kept: who may ask for them, how many there are, and that a conversation goes
on from them.
"""

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

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def server():
    with scripted_server(FORMATS, api_keys=("one", "two"), max_stored_responses=8) as state:
        yield state


def client_of(server, key: str = "one") -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def ask(server):
    with client_of(server) as client:
        yield client
    server.script.hold.set()
    frees_all(server)


def response(ask, text: str = "hello", **fields):
    return ask.responses.create(model="quill", input=text, **fields)


@shows("openai", "responses.retrieve, responses.delete, responses.input_items.list")
def test_a_response_is_kept(ask, server):
    """What was answered, and what was asked, until it is deleted; only with the key that asked."""
    found = response(ask, "hello", instructions="Be kind.")
    assert found.output_text == said("hello") and found.store
    assert ask.responses.retrieve(found.id) == found
    (item,) = ask.responses.input_items.list(found.id).data
    assert (item.type, item.role, item.content[0].text) == ("message", "user", "hello")
    with (
        client_of(server, "two") as other,
        pytest.raises(openai.NotFoundError, match="Response with id .* not found"),
    ):
        other.responses.retrieve(found.id)
    ask.responses.delete(found.id)
    for call in (ask.responses.retrieve, ask.responses.delete, ask.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(found.id)
        assert (caught.value.param, caught.value.code) == ("id", "response_not_found")
    unkept = response(ask, store=False)
    assert not unkept.store
    with pytest.raises(openai.NotFoundError):
        ask.responses.retrieve(unkept.id)
    with pytest.raises(
        openai.BadRequestError, match="stream: was not asked for together with background"
    ):
        list(ask.responses.retrieve(response(ask).id, stream=True))


@shows("openai", "responses.create(previous_response_id=...)")
@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_goes_on(ask, streams):
    """All that was said before is in the prompt, calls and their results too; instructions are
    not.
    """

    def turn(given, previous=None, **fields):
        asked = {
            "model": "quill",
            "input": given,
            "tools": [TOOL],
            "previous_response_id": previous,
            **fields,
        }
        if not streams:
            return ask.responses.create(**asked)
        with ask.responses.stream(
            **{name: value for name, value in asked.items() if value is not None}
        ) as stream:
            return stream.get_final_response()

    first = turn("weather in Rome", instructions="Be kind.")
    call = next(item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = turn([result], first.id)
    assert second.previous_response_id == first.id and second.output_text == "It is sunny."
    third = turn("hello", second.id)
    other = turn("hello", first.id)
    whole = [{"role": "user", "content": "weather in Rome"}, *first.output, result, *second.output]
    told = turn(
        [
            *(
                item if isinstance(item, dict) else item.model_dump(exclude_none=True)
                for item in whole
            ),
            {"role": "user", "content": "hello"},
        ]
    )
    assert third.usage.input_tokens == told.usage.input_tokens > other.usage.input_tokens
    assert third.output_text == told.output_text
    assert [item.type for item in ask.responses.input_items.list(second.id).data] == [
        "function_call_output"
    ]
    with pytest.raises(openai.BadRequestError) as caught:
        turn("hello", "resp_none")
    assert (caught.value.param, caught.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )


def test_the_id_of_a_stored_response_is_refused(ask):
    """A response that names itself as the previous one would be read for ever."""
    chosen = {"extra_body": {"request_id": "mine"}}
    first = response(ask, **chosen)
    assert first.id == "resp_mine"
    for fields in ({}, {"previous_response_id": first.id}, {"store": False}, {"background": True}):
        with pytest.raises(
            openai.BadRequestError, match="request_id: makes the id resp_mine"
        ) as caught:
            response(ask, **chosen, **fields)
        assert caught.value.param == "request_id"
    assert response(ask, previous_response_id=first.id).output_text == said("hello")
    ask.responses.delete(first.id)
    assert response(ask, **chosen).id == first.id


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_goes_on_without_input(ask, streams):
    first = response(ask, "hello")
    asked = {"model": "quill", "previous_response_id": first.id, "stream": streams}
    found = ask.responses.create(**asked)
    second = [*found][-1].response if streams else found
    assert second.output_text and not ask.responses.input_items.list(second.id).data
    background = ask.responses.create(
        model="quill", previous_response_id=second.id, background=True
    )
    until(lambda: ask.responses.retrieve(background.id).status == "completed")


def test_ids_of_conversations_and_of_responses_are_told_apart(ask):
    found = response(ask)
    talk = ask.conversations.create(items=[{"role": "user", "content": "hello"}])
    for call in (
        ask.responses.retrieve,
        ask.responses.cancel,
        ask.responses.delete,
        ask.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call(talk.id)
        assert caught.value.code == "response_not_found"
    for call in (
        ask.conversations.retrieve,
        ask.conversations.delete,
        ask.conversations.items.list,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call(found.id)
        assert caught.value.code == "conversation_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        response(ask, conversation=found.id)
    assert (caught.value.param, caught.value.code) == ("conversation", "conversation_not_found")
    with pytest.raises(openai.BadRequestError) as caught:
        response(ask, previous_response_id=talk.id)
    assert (caught.value.param, caught.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )
    assert ask.conversations.retrieve(talk.id) == talk and ask.responses.retrieve(found.id) == found


def test_keys_do_not_see_the_ids_of_each_others_requests(ask, server):
    """Neither on the live page nor in the refusal of an id that is in use."""

    def live_ids(key: str) -> list[str]:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.stream("GET", f"{server.url}/live", headers=headers, timeout=60) as found:
            frame = next(line for line in found.iter_lines() if line.startswith("data: "))
        shown = msgspec.json.decode(frame.removeprefix("data: "))
        return [one["id"] for one in (*shown["running"], *shown["waiting"])]

    server.script.step_seconds = 0.01
    chosen = {
        "model": "quill",
        "prompt": "<user>count<assistant>",
        "max_tokens": 300,
        "extra_body": {"request_id": "mine"},
    }
    with client_of(server, "two") as other, ask.completions.create(**chosen, stream=True) as reader:
        try:
            next(iter(reader))
            assert live_ids("one") == ["cmpl-mine"] and live_ids("two") == [""]
            with pytest.raises(
                openai.BadRequestError, match="request_id: 'cmpl-mine' is being served already"
            ):
                ask.completions.create(**chosen)
            assert other.completions.create(**(chosen | {"max_tokens": 2})).id == "cmpl-mine"
        finally:
            server.script.step_seconds = 0.0


@pytest.mark.parametrize("cycle", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_chain_that_cycles_is_not_read_for_ever(cycle):
    kept = StoredResponses(10, 1 << 20)
    for name, previous in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        body = {"id": name, "object": "response", "status": "completed", "output": []}
        assert kept.put(None, name, StoredResponse(body, [], previous))
    assert not kept.put(None, "a", stored(), is_new=True)
    with pytest.raises(RequestError, match="previous_response_id: leads to 'a' twice"):
        kept.history(None, "a", "previous_response_id")


@shows("openai", "enable_response_messages by extra_body")
@pytest.mark.parametrize(
    "how", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}]
)
def test_what_the_model_read_and_wrote(ask, server, how):
    """With the template and the tags of thoughts and calls, as text and as tokens, whichever way
    the answer comes.
    """
    raw = {"enable_response_messages": True}
    asked = {"instructions": "Be kind.", "tools": [TOOL], "extra_body": raw, **how}
    found = response(ask, "think of the weather in Rome", **asked)
    if "stream" in how:
        *_, last = found
        found = last.response
    until(lambda: ask.responses.retrieve(found.id).status == "completed")
    done = ask.responses.retrieve(found.id)
    (read,) = done.input_messages
    (wrote,) = done.output_messages
    assert {read["type"], wrote["type"]} == {"raw_message_tokens"}
    assert "Be kind." in read["message"] and "weather in Rome" in read["message"]
    assert (
        wrote["message"].startswith("<think>\nI must look.\n</think>")
        and '"weather"' in wrote["message"]
    )
    decode = server.engine.tokenizer.decode
    assert decode(read["tokens"], skip_special_tokens=False) == read["message"]
    assert decode(wrote["tokens"], skip_special_tokens=False).startswith(wrote["message"])
    assert not hasattr(response(ask), "input_messages")


@shows("openai", "responses.create(background=True), responses.cancel")
def test_in_the_background(ask, server):
    """It is queued at once and answered later; one that is cancelled computes no more, and
    stays so.
    """
    found = response(ask, background=True)
    assert (found.status, found.background, found.output) == ("queued", True, [])
    until(lambda: ask.responses.retrieve(found.id).status == "completed")
    done = ask.responses.retrieve(found.id)
    assert done.output_text == said("hello") and done.usage is not None and done.id == found.id
    assert ask.responses.cancel(found.id).status == "completed"  # it is over
    server.script.hold.clear()
    long = response(ask, "count", background=True)
    until(lambda: ask.responses.retrieve(long.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="is not answered yet"):
        response(ask, previous_response_id=long.id)
    assert ask.responses.cancel(long.id).status == "cancelled"
    server.script.hold.set()
    frees_all(server)
    assert ask.responses.retrieve(long.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        ask.responses.cancel(response(ask).id)
    with pytest.raises(
        openai.BadRequestError, match="background: can only be used when store is true"
    ):
        response(ask, background=True, store=False)
    with pytest.raises(openai.NotFoundError):
        ask.responses.create(model="nothing", input="x", background=True)


@shows(
    "openai",
    "responses.create(background=True, stream=True), responses.retrieve(stream=True, "
    "starting_after=...)",
)
def test_in_the_background_and_read_along(ask, server):
    """A reader may leave and come back; what it missed is there, whether the answer is over or
    not.
    """
    server.script.hold.clear()
    with response(ask, "count", background=True, stream=True) as reader:
        first = next(iter(reader))
    assert (first.type, first.response.status, first.response.background) == (
        "response.created",
        "queued",
        True,
    )
    name = first.response.id
    with ask.responses.retrieve(name, stream=True) as again:
        assert next(iter(again)) == first
        assert ask.responses.retrieve(name).status == "in_progress"
        server.script.hold.set()
        rest = [first, *again]
    whole = list(ask.responses.retrieve(name, stream=True))
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert rest == whole
    assert list(ask.responses.retrieve(name, stream=True, starting_after=3)) == whole[4:]
    done = ask.responses.retrieve(name)
    assert whole[-1].type == f"response.{done.status}" and whole[-1].response.output == done.output
    assert (
        "".join(event.delta for event in whole if event.type == "response.output_text.delta")
        == done.output_text
    )
    with pytest.raises(openai.BadRequestError, match="starting_after: must be an integer"):
        ask.responses.retrieve(name, stream=True, starting_after="x")
    server.script.hold.clear()
    with response(ask, "count", background=True, stream=True) as reader:
        left = next(iter(reader)).response.id
        assert ask.responses.cancel(left).status == "cancelled"
        # and it ends
        assert {event.type for event in reader} <= {"response.queued", "response.in_progress"}


@pytest.mark.parametrize("streams", [False, True])
def test_a_failure_in_the_background(ask, server, streams):
    server.script.fail_next = 1
    found = response(ask, background=True, stream=streams)
    if streams:
        events = list(found)
        assert [event.type.removeprefix("response.") for event in events] == [
            "created",
            "queued",
            "in_progress",
            "failed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        found = events[0].response
    until(lambda: ask.responses.retrieve(found.id).status == "failed")
    error = ask.responses.retrieve(found.id).error
    assert error.code == "server_error" and "engine failed" in error.message


def test_a_stream_that_fails_has_begun(ask, server):
    server.script.fail_next = 1
    events = list(response(ask, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]


def test_so_many_are_kept(ask, server):
    names = [response(ask).id for _ in range(10)]
    assert server.service.stored.storage.usage(*KINDS).entries == 8
    assert ask.responses.retrieve(names[-1]) and ask.responses.retrieve(names[2])
    with pytest.raises(openai.NotFoundError):
        ask.responses.retrieve(names[1])
    response(ask)  # the one that was used longest ago goes
    assert ask.responses.retrieve(names[2])
    server.script.hold.clear()
    running = [response(ask, background=True) for _ in range(8)]
    with pytest.raises(openai.RateLimitError, match="as many responses are kept as may be"):
        response(ask, background=True)
    server.script.hold.set()
    until(lambda: all(ask.responses.retrieve(one.id).status == "completed" for one in running))


def test_a_server_that_keeps_none():
    chosen = {"max_stored_responses": 0, "enable_prompt_tokens_details": True}
    with scripted_server(FORMATS, **chosen) as server, client_of(server) as ask:
        found = response(ask)
        assert not found.store and found.output_text == said("hello")
        with pytest.raises(openai.NotFoundError):
            ask.responses.retrieve(found.id)
        with pytest.raises(openai.BadRequestError, match="background: needs stored responses"):
            response(ask, background=True)
        usage = ask.embeddings.create(model="quill", input="<user>hello").usage
        assert usage.prompt_tokens_details["cached_tokens"] == 0


def test_items_of_what_was_asked(ask):
    found = response(ask, [{"role": "user", "content": str(i)} for i in range(5)])
    page = ask.responses.input_items.list(found.id, limit=2, order="asc")
    assert [item.content for item in page.data] == ["0", "1"] and page.has_more
    assert [item.content for item in ask.responses.input_items.list(found.id, limit=2)] == [
        "4",
        "3",
        "2",
        "1",
        "0",
    ]
    for asked, param in (
        ({"limit": 0}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "x"}, "after"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask.responses.input_items.list(found.id, **asked)
        assert caught.value.param == param


def stored(size: int = 10) -> StoredResponse:
    body = {
        "id": "a",
        "object": "response",
        "status": "completed",
        "output": [],
        "text": "x" * size,
    }
    return StoredResponse(body, [], None)


def test_the_bytes_are_bounded():
    one = len(msgspec.json.encode(stored(100).entry()))
    kept = StoredResponses(100, 3 * one)

    def names() -> list[str]:
        return [place.id for place in kept.storage.least_recently_used(KINDS)]

    for i in range(5):
        assert kept.put(None, str(i), stored(100))
        assert kept.storage.usage(*KINDS).bytes == one * len(names()) <= 3 * one
    assert names() == ["2", "3", "4"]
    assert not kept.put(None, "large", stored(1000)) and len(names()) == 3
    assert kept.put(None, "4", stored(10))  # in its own place
    kept.get(None, "2")
    assert names() == ["3", "4", "2"]
    for name in names():
        kept.delete(None, name)
    assert kept.storage.usage(*KINDS) == (0, 0)
    with pytest.raises(HttpError, match="not found"):
        kept.get("tenant", "4")
    assert not StoredResponses(0, 1 << 20).put(None, "a", stored())


@shows(
    "openai", "conversations.create, retrieve, update, delete, items.create, list, retrieve, delete"
)
def test_conversations(ask, server):
    """What is in one, in its order, for the key that made it."""
    asked = {"role": "user", "content": "hello"}
    found = ask.conversations.create(items=[asked], metadata={"who": "me"})
    assert found.object == "conversation" and found.metadata == {"who": "me"}
    assert ask.conversations.retrieve(found.id) == found
    assert ask.conversations.update(found.id, metadata={}).metadata == {}
    more = ask.conversations.items.create(found.id, items=[{**asked, "content": "bye"}])
    items = ask.conversations.items.list(found.id, order="asc").data
    assert [item.content for item in items] == ["hello", "bye"] and items[1].id == more.data[0].id
    assert (
        ask.conversations.items.retrieve(items[0].id, conversation_id=found.id).content == "hello"
    )
    ask.conversations.items.delete(items[0].id, conversation_id=found.id)
    assert [item.id for item in ask.conversations.items.list(found.id)] == [items[1].id]
    with (
        client_of(server, "two") as other,
        pytest.raises(openai.NotFoundError, match="Conversation with id"),
    ):
        other.conversations.retrieve(found.id)
    assert ask.conversations.delete(found.id).deleted
    with pytest.raises(openai.NotFoundError):
        ask.conversations.items.list(found.id)
    for fields, words in (
        ({"items": [{"type": "web_search_call"}]}, r"items\[0\]"),
        ({"metadata": {"a": 5}}, "metadata: must be at most 16 names"),
        ({"items": [asked] * 21}, "items: must be a list of 0 to 20"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            ask.conversations.create(**fields)
    with pytest.raises(openai.NotFoundError):
        ask.conversations.retrieve(response(ask).id)


@shows("openai", "responses.create(conversation=...)")
def test_a_response_of_a_conversation(ask):
    """It goes on from what is there, and what was asked and answered is there after it."""
    begun = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi"}]
    talk = ask.conversations.create(items=begun)
    asked = {
        "conversation": talk.id,
        "extra_body": {"chat_template": "<user>{{ messages | length }}<assistant>"},
    }
    first = response(ask, "weather in Rome", conversation=talk.id, tools=[TOOL])
    assert first.conversation.id == talk.id
    (call,) = [item for item in first.output if item.type == "function_call"]
    kinds = [item.type for item in ask.conversations.items.list(talk.id, order="asc")]
    assert kinds == ["message"] * 4 + ["function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    with ask.responses.stream(
        model="quill", input=[result], tools=[TOOL], conversation=talk.id, store=False
    ) as stream:
        last = stream.get_final_response()
    assert last.output_text == "It is sun."
    assert response(ask, "again", **asked).output_text == said("7")
    assert len(ask.conversations.items.list(talk.id, order="asc").data) == 9
    with pytest.raises(openai.NotFoundError) as caught:
        response(ask, conversation="conv_0")
    assert (caught.value.param, caught.value.code) == ("conversation", "conversation_not_found")
    with pytest.raises(openai.BadRequestError, match="both say what was before"):
        response(ask, conversation=talk.id, previous_response_id=first.id)
