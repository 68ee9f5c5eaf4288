"""What ends other servers, over HTTP: bad requests in crowds, steps that raise or hang, and
requests that never fit.
"""

import json
import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM
from quire.ops.sampling import BROKEN
from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.serving.engine.runner import DeviceLost
from quire.tests.support.canary import BODIES, Canary, Client, settled, text_of
from quire.tests.support.cases import cases
from quire.tests.support.served import FORMATS, model_of, scripted, served

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def say(prompt: str) -> str:
    if "weather" in prompt:
        return '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    return (
        "".join(f"word{number} " for number in range(120)) if "long" in prompt else "a short answer"
    )


@pytest.fixture(scope="module")
def real():
    """The bundled model, served."""
    engine = make_engine(
        make_options(None, max_num_seqs=40, max_num_batched_tokens=128, max_model_len=256)
    )
    with served(model_of(engine), max_choices=128) as state:
        state.engine, state.canary = engine, Canary(state.url)
        yield state


@pytest.fixture
def server(request):
    """A device that follows a script; a test may say how long a step may take."""
    engine, script = scripted(say)
    with served(
        model_of(engine), formats=FORMATS, stall_seconds=getattr(request, "param", 30.0)
    ) as state:
        state.engine, state.script, state.canary = engine, script, Canary(state.url)
        yield state


hanging = pytest.mark.parametrize("server", [1.0], indirect=True)


def later(job: Any, *given: Any) -> SimpleNamespace:
    """What a call returns, when the thread that runs it is joined."""
    found = SimpleNamespace(value=None)
    found.thread = threading.Thread(target=lambda: setattr(found, "value", job(*given)))
    found.thread.start()
    return found


def ask(url: str, path: str, body: Any) -> Any:
    with Client(url, timeout=300) as client:
        return client.post(path, body)


def stream(
    url: str, body: dict[str, Any], path: str = "/v1/completions"
) -> list[tuple[float, Any]]:
    with Client(url, timeout=300) as client:
        return client.events(path, body)


def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


# Many bad ones among good ones
# -----------------------------------------------------------------------------------

WRONG: list[dict[str, Any]] = [
    {"temperature": -1},
    {"top_p": 0},
    {"n": 0},
    {"n": 129},
    {"max_tokens": 0},
    {"max_tokens": "many"},
    {"stop": [""]},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [10**6]},
    {"prompt": [[5], [-1]]},
    {"prompt": "word " * 300},
    {"prompt": "word " * 300, "truncate_prompt_tokens": 0},
    {"logit_bias": {"99999": 1}},
    {"logit_bias": {"x": 1}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [99999]},
    {"stop_token_ids": [99999]},
    {"bad_words": [""]},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"json": {"type": 5}}},
    {"no_such_field": True},
    {"structured_outputs": {"grammar": "start: start start"}},
    {"timeout": 0},
    {"priority": 10**6},
    {"echo": 1},
    {"logprobs": 21},
    {"prompt_logprobs": -1},
    {"min_tokens": 50, "max_tokens": 5},
    {"cache_salt": ""},
    {"seed": 2**64},
    {"stream_options": {"include_usage": True}},
    {"best_of": 2, "stream": True, "n": 1},
    {"prompt_embeds": "x"},
    {"n": 128, "prompt": ["a", "b"]},
]


@pytest.mark.random
def test_700_bad_requests_among_32_streams(real):
    """What the streams say is what each says alone, to the letter."""
    prompts = [
        f"Once upon a time there was {noun}"
        for noun in "a dog|a cat|a girl|a boy|a bear|a tree|a house|a king".split("|")
    ] * cases(4, least=1)
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": 100,
            "ignore_eos": True,
            "temperature": 0.8 * (number % 2),
            "seed": number,
        }
        for number, prompt in enumerate(prompts)
    ]
    alone = [text_of(stream(real.url, body)) for body in bodies]
    streams = [later(stream, real.url, body) for body in bodies]
    rng = random.Random(4)
    counts = dict.fromkeys((400, 200, 500), 0)
    lock = threading.Lock()
    overlapped = 0

    def crowd(number: int) -> None:
        nonlocal overlapped
        with Client(real.url, timeout=300) as client:
            for _ in range(cases(100)):
                with lock:
                    wrong = rng.choice(WRONG)
                    overlapped += any(found.thread.is_alive() for found in streams)
                status, _ = client.post(
                    "/v1/completions", {"prompt": "Once", "max_tokens": 5} | wrong
                )
                with lock:
                    counts[status] += 1

    crowds = [later(crowd, number) for number in range(7)]
    for found in (*crowds, *streams):
        found.thread.join()
    assert counts == {400: 7 * cases(100), 200: 0, 500: 0}
    together = [text_of(found.value) for found in streams]
    assert together == alone and all(found.value[-1][1] == "[DONE]" for found in streams)
    print(
        f"{counts[400]} bad requests, {overlapped} of them while {len(streams)} streams went "
        "on; all identical"
    )
    real.canary.check_answer()
    settled(real.engine)


def test_one_that_can_never_fit():
    """63 pages of prompt where there are fewer than 50: refused at once, and the others end as they
    would.
    """
    engine, script = scripted(say, num_seqs=4, longest=176)
    pages = engine.tables[0].pools[0].num_pages
    assert pages < 50
    script.step_seconds = 0.1  # for which nobody has to wait who is refused
    with served(model_of(engine), formats=FORMATS) as state:
        canary = Canary(state.url)
        others = [
            later(stream, state.url, {"prompt": f"long {i}", "max_tokens": 60}) for i in range(4)
        ]
        until(lambda: engine.scheduler.running)
        took = []
        with Client(state.url) as client:
            for tokens in ([5] * 1008, [5] * 1000, [5] * (pages * 16)):
                for fields in ({"max_tokens": 1}, {"max_tokens": 900}, {"n": 4}, {"stream": True}):
                    began = time.monotonic()
                    status, body = client.post("/v1/completions", {"prompt": tokens, **fields})
                    took.append(time.monotonic() - began)
                    assert status == 400 and body["error"]["param"] in ("prompt", "max_tokens"), (
                        body
                    )
        script.step_seconds = 0.0
        for other in others:
            other.thread.join()
            *_, last, done = other.value
            assert done[1] == "[DONE]" and last[1]["choices"][0]["finish_reason"] == "length"
            assert say("long").startswith(text_of(other.value))
        canary.check_answer()
        settled(engine)
    print(
        f"{pages} pages, a prompt of 63: 400 in {sum(took) / len(took) * 1e3:.1f} ms, "
        f"{max(took) * 1e3:.0f} at most"
    )
    assert sum(took) / len(took) < 0.5


# Steps that raise
# ------------------------------------------------------------------------------------------------


def fail_at(engine: Any, name: str, step: int) -> SimpleNamespace:
    """The n-th call from now on raises; when it did."""
    working = getattr(engine.runner, name)
    state = SimpleNamespace(calls=0, at=0.0)

    def call(*given: Any) -> Any:
        state.calls += 1
        if state.calls == step:
            state.at = time.monotonic()
            setattr(engine.runner, name, working)
            raise RuntimeError("the device is not well")
        return working(*given)

    setattr(engine.runner, name, call)
    return state


@pytest.mark.parametrize("name", ["launch", "collect"])
@pytest.mark.slow
def test_a_step_that_raises(server, name):
    """At each of the first 200: the stream hears of it within a second, and the next request is
    served.
    """
    late = 0.0
    slow = 0.0
    for step in range(1, 201):
        settled(server.engine)  # the step that was launched beyond an end, too
        state = fail_at(server.engine, name, step)
        events = stream(server.url, {"prompt": "long", "max_tokens": 250})
        assert state.calls == step, "the step was not reached"
        (_, last), (_, done) = events[-2:]
        assert done == "[DONE]" and "failed" in last["error"]["message"]
        assert not any(event["choices"][0]["finish_reason"] for _, event in events[:-2])
        late = max(late, events[-1][0] - state.at)
        slow = max(slow, server.canary.check_answer(10))
    print(
        f"{name} raised at steps 1 to 200: error event {late * 1e3:.0f} ms later at most, canary "
        f"{slow:.2f} s at most"
    )
    assert late < 1
    settled(server.engine)


# an answer of 250 tokens has at least 250 / 8 launches
@pytest.mark.parametrize("step", [1, 2, 3, 7, 14, 25])
@pytest.mark.parametrize("name", ["launch", "collect"])
def test_a_step_of_the_model_that_raises(real, name, step):
    """With the device's real state, which is lost with the step."""
    state = fail_at(real.engine, name, step)
    events = stream(real.url, {"prompt": "Once upon a time", "max_tokens": 250, "ignore_eos": True})
    assert state.calls == step, "the step was not reached"
    assert "failed" in events[-2][1]["error"]["message"] and events[-1][0] - state.at < 1
    took = real.canary.check_answer(10)
    print(
        f"{name} raised at step {step}: event {events[-1][0] - state.at:.3f} s later, canary "
        f"{took:.2f} s"
    )
    settled(real.engine)


def test_an_engine_that_ends(server, monkeypatch):
    """What a step cannot recover from ends the engine: everybody hears of it, and so does who looks
    at /health.
    """
    server.script.step_seconds = 0.01
    going = [later(stream, server.url, {"prompt": "long", "max_tokens": 250}) for _ in range(4)]
    whole = later(ask, server.url, "/v1/completions", {"prompt": "long", "max_tokens": 250})
    until(lambda: len(server.engine.scheduler.running) == 5)
    began = time.monotonic()
    monkeypatch.setattr(server.engine.scheduler, "schedule", lambda: 1 / 0)
    for found in (*going, whole):
        found.thread.join()
    took = time.monotonic() - began
    for found in going:
        (_, last), (_, done) = found.value[-2:]
        assert done == "[DONE]" and last["error"]["type"] == "overloaded_error", last
        assert all(event["choices"][0]["finish_reason"] is None for _, event in found.value[:-2])
    assert whole.value[0] == 503 and took < 10
    with Client(server.url) as client:
        assert client.ask("GET", "/health")[0] == 503 and client.ask("GET", "/ping")[0] == 200
        assert client.complete("hello")[0] == 503
        assert client.ask("GET", "/metrics")[0] == 200
    print(f"an engine that ends: all five hear of it in {took:.2f} s")


def test_a_device_that_is_lost_ends_the_process(server, monkeypatch, caplog):
    """Every later call fails, as after an illegal access on a GPU: all are told, and then the
    process ends.
    """
    ended = threading.Event()
    monkeypatch.setattr("os._exit", lambda code: ended.set() if code == 75 else None)
    going = [later(stream, server.url, {"prompt": "long", "max_tokens": 250}) for _ in range(2)]
    until(lambda: len(server.engine.scheduler.running) == 2)

    def lost() -> None:
        raise DeviceLost("the device is lost: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(server.engine.runner, "reset", lost)
    state = fail_at(server.engine, "collect", 1)
    for found in going:
        found.thread.join()
        (_, last), (_, done) = found.value[-2:]
        assert done == "[DONE]" and "error" in last
    assert ended.wait(60) and state.calls == 1
    assert "CUDA_ERROR_ILLEGAL_ADDRESS; this process ends" in caplog.text


def test_a_state_that_cannot_be_made_is_a_lost_device():
    """A fault of the device that stays: the error says so, and nothing is tried again."""
    llm = LLM(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    runner = llm.engine.runner
    tried = []

    def fails(*given: Any) -> Any:
        tried.append(given)
        raise RuntimeError(
            "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered\nmore"
        )

    runner.collect = runner.pipeline.make_state = fails
    with pytest.raises(
        DeviceLost, match="the device is lost: .*illegal memory access was encountered$"
    ):
        llm.generate("hello")
    assert len(tried) == 2


# Steps that hang
# -------------------------------------------------------------------------------------------------


def health(url: str) -> int:
    with Client(url) as client:
        return client.ask("GET", "/health")[0]


@hanging
def test_a_step_that_hangs(server):
    """Nobody waits for it, /health says so, and when it returns all is well again."""
    going = [later(stream, server.url, {"prompt": "long", "max_tokens": 250}) for _ in range(4)]
    whole = later(ask, server.url, "/v1/completions", {"prompt": "long", "max_tokens": 250})
    until(lambda: len(server.engine.scheduler.running) == 5)
    server.script.hold.clear()
    began = time.monotonic()
    try:
        assert health(server.url) == 200
        for found in (*going, whole):
            found.thread.join()
        took = time.monotonic() - began
        for found in going:
            (_, last), (_, done) = found.value[-2:]
            assert done == "[DONE]" and last["error"]["message"] == "the engine does not answer"
            assert all(
                event["choices"][0]["finish_reason"] is None for _, event in found.value[:-2]
            )
        assert whole.value[0] == 503 and 0.9 < took < 20
        assert health(server.url) == 503
        before = time.monotonic()
        assert ask(server.url, "/v1/completions", BODIES["/v1/completions"])[0] == 503
        # who comes now does not wait another second for each that came before
        assert time.monotonic() - before < 4
        with Client(server.url) as client:
            for path in ("/ping", "/metrics", "/v1/models", "/load", "/version"):
                assert client.ask("GET", path)[0] == 200
    finally:
        server.script.hold.set()
    back = time.monotonic()
    steps = server.script.steps
    until(lambda: health(server.url) == 200)
    took_back = time.monotonic() - back
    server.canary.check_answer()
    settled(server.engine)
    assert server.script.steps - steps < 100, "what nobody waits for is written to its end"
    print(f"a step that hangs: events after {took:.2f} s, well {took_back:.3f} s after it returned")


@hanging
def test_being_busy_is_not_hanging(server):
    """Steps that take a third of what they may, one after the other, with more to do than there is
    room for.
    """
    server.script.step_seconds = 0.33
    going = [
        later(stream, server.url, {"prompt": f"long {i}", "max_tokens": 10}) for i in range(40)
    ]
    seen = set()
    try:
        end = time.monotonic() + 4
        while time.monotonic() < end:
            seen.add(health(server.url))
            time.sleep(0.05)
    finally:
        server.script.step_seconds = 0.0
        for found in going:
            found.thread.join()
    assert seen == {200}
    time.sleep(1.3)
    assert health(server.url) == 200  # nor is having nothing to do
    assert all(
        found.value[-1][1] == "[DONE]" and "error" not in found.value[-2][1] for found in going
    )


# Every end
# -------------------------------------------------------------------------------------------------------


def nan(server) -> None:
    """The next row that is drawn is not a number."""
    working = server.engine.runner.collect

    def collect(step: Any) -> Any:
        server.engine.runner.collect = working
        result = working(step)
        return result._replace(
            outputs=[output._replace(failure=BROKEN) for output in result.outputs]
        )

    server.engine.runner.collect = collect


def raises(server) -> None:
    server.script.fail_next = 1


def hangs(server) -> None:
    server.script.hold.clear()
    threading.Timer(1.5, server.script.hold.set).start()


def drains(server) -> None:
    """The server ends while it writes."""
    server.loop.call_soon_threadsafe(lambda: server.loop.create_task(server.service.drain(0.05)))


# (why, fields, finish reason or error, what happens)
ENDS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("the end", {}, "stop", None),
    ("a stop string", {"stop": ["short"]}, "stop", None),
    ("a stop token", {"stop_token_ids": [0]}, "stop", None),
    ("the length", {"max_tokens": 3}, "length", None),
    ("the model's length", {"max_tokens": None, "ignore_eos": True, "long": True}, "length", None),
    ("its deadline", {"timeout": 0.2, "long": True, "slow": True}, "timeout", None),
    ("a tool call", {"tools": [TOOL], "weather": True}, "tool_calls", None),
    ("no number", {"long": True, "slow": True}, "error", nan),
    ("a step that raises", {"long": True, "slow": True}, "error", raises),
    ("a step that hangs", {"long": True, "slow": True}, "error", hangs),
    ("the server's end", {"long": True, "slow": True}, "abort", drains),
]


@hanging
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
@pytest.mark.parametrize(("why", "fields", "wanted", "happens"), ENDS, ids=[end[0] for end in ENDS])
@pytest.mark.slow
def test_every_stream_ends_once(server, path, n, why, fields, wanted, happens):
    """One finish reason for each answer, or one error; then the last event; and nothing after
    it.
    """
    fields = dict(fields)
    long, slow, weather = (fields.pop(name, False) for name in ("long", "slow", "weather"))
    text = "weather" if weather else "long" if long else "hello"
    own_name = path in ("/v1/responses", "/v1/messages")
    if n > 1 and own_name:
        pytest.skip("there is one answer")
    if weather and path == "/v1/completions":
        pytest.skip("it has no tools")
    body = fields_for(path, text, fields) | ({} if n == 1 else {"n": n})
    if why == "a stop token":
        with Client(server.url) as client:
            tokens = client.post("/tokenize", {"prompt": " answer", "add_special_tokens": False})[
                1
            ]["tokens"]
        body["stop_token_ids"] = tokens[:1]
    server.script.step_seconds = 0.02 if slow else 0.0
    going = later(stream, server.url, body, path)
    happened = 0.0
    if happens is not None:
        until(lambda: server.engine.scheduler.running)
        happened = time.monotonic()
        happens(server)
    going.thread.join()
    server.script.hold.set()
    server.script.step_seconds = 0.0
    events = [event for _, event in going.value]
    if happens is not None:
        allowed = 1 + (1 if happens is hangs else 0)
        assert going.value[-1][0] - happened < allowed + 10, "it ended late"
    reasons, errors = CHECKS[path](events, wanted)
    if wanted == "error":
        assert (reasons, errors) == (0, 1), events[-3:]
    else:
        assert (reasons, errors) == (n, 0), events[-3:]
    settled(server.engine)


def fields_for(path: str, text: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A request for an endpoint, with the same fields by its own names."""
    fields = {"max_tokens": 200, **fields}
    turn = [{"role": "user", "content": text}]
    if path == "/v1/completions":
        return {"prompt": text, **fields}
    if path == "/v1/chat/completions":
        return {"messages": turn, **fields}
    if path == "/v1/responses":
        most = fields.pop("max_tokens")
        stop = fields.pop("stop", None)
        if tools := fields.pop("tools", None):
            fields["tools"] = [{"type": "function", **tool["function"]} for tool in tools]
        return {
            "input": text,
            "max_output_tokens": most,
            **({"stop": stop} if stop else {}),
            **fields,
        }
    if fields["max_tokens"] is None:
        fields["max_tokens"] = 10**6
    if stop := fields.pop("stop", None):
        fields["stop_sequences"] = stop
    if tools := fields.pop("tools", None):
        fields["tools"] = [
            {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
            for tool in tools
        ]
    return {"messages": turn, **fields}


def check_openai(events: list[Any], wanted: str) -> tuple[int, int]:
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    chunks = events[:-1]
    errors = sum("error" in chunk for chunk in chunks)
    assert errors == 0 or "error" in chunks[-1]
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            assert choice["index"] not in found, "something came after its end"
            if choice["finish_reason"] is not None:
                found[choice["index"]] = choice["finish_reason"]
    assert set(found.values()) <= {wanted}, found
    return len(found), errors


def check_responses(events: list[Any], wanted: str) -> tuple[int, int]:
    ends = [event["type"] for event in events if event["type"] in ENDINGS]
    assert len(ends) == 1 and events[-1]["type"] == ends[0]
    if ends[0] != "response.failed":
        assert ends[0] == (
            "response.completed" if wanted in ("stop", "tool_calls") else "response.incomplete"
        ), ends
    return int(ends[0] != "response.failed"), int(ends[0] == "response.failed")


ENDINGS = ("response.completed", "response.incomplete", "response.failed")


def check_messages(events: list[Any], wanted: str) -> tuple[int, int]:
    kinds = [event["type"] for event in events]
    errors = kinds.count("error")
    assert kinds[-1] == ("error" if errors else "message_stop"), kinds
    deltas = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
    assert len(deltas) == kinds.count("message_stop") == 1 - errors
    return len(deltas), errors


CHECKS = {
    "/v1/completions": check_openai,
    "/v1/chat/completions": check_openai,
    "/v1/responses": check_responses,
    "/v1/messages": check_messages,
}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/rerank"])
def test_prompts_that_are_not_read_to_their_end(server, path):
    """There is no half of a vector: an error says what was in the way."""
    status, body = ask(server.url, path, BODIES[path] | {"timeout": 1e-9})
    assert (status, body["error"]["param"]) == (408, "timeout")
    for happens in (raises, nan):
        happens(server)
        status, body = ask(server.url, path, BODIES[path])
        assert (status, body["error"]["code"]) == (500, "engine_error")
    assert ask(server.url, path, BODIES[path])[0] == 200
    settled(server.engine)


def test_names_are_not_taken_twice_and_come_free(server):
    """A request id that is in use is refused, and can be used again afterwards, however the first
    one ended.
    """
    server.script.step_seconds = 0.02
    body = {"prompt": "long", "max_tokens": 100, "request_id": "mine"}
    for happens in (None, raises, nan):
        going = later(stream, server.url, body)
        until(lambda: server.engine.scheduler.running)
        status, refusal = ask(server.url, "/v1/completions", body)
        assert status == 400 and refusal["error"]["param"] == "request_id"
        if happens is not None:
            happens(server)
        going.thread.join()
    server.script.step_seconds = 0.0
    assert ask(server.url, "/v1/completions", body | {"prompt": "hello"})[0] == 200
    settled(server.engine)


def test_json_is_what_is_said(server):
    """Two values for a field: the last one counts, as in every JSON parser a client may have in
    front of it.
    """
    with Client(server.url) as client:
        raw = client.ask(
            "POST", "/v1/completions", b'{"prompt": "long", "max_tokens": 9, "max_tokens": 2}'
        )[2]
    assert json.loads(raw)["usage"]["completion_tokens"] == 2
