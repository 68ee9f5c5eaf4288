"""Failures over HTTP that break other servers: many bad requests, steps that raise or hang, and
prompts that cannot fit.
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

WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}


def scripted_answer(prompt: str) -> str:
    if "weather" in prompt:
        return '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    return (
        "".join(f"word{number} " for number in range(120)) if "long" in prompt else "a short answer"
    )


@pytest.fixture(scope="module")
def bundled():
    """A server of the bundled model."""
    engine = make_engine(
        make_options(None, max_num_seqs=40, max_num_batched_tokens=128, max_model_len=256)
    )
    with served(model_of(engine), max_choices=128) as state:
        state.engine = engine
        state.canary = Canary(state.url)
        yield state


@pytest.fixture
def server(request):
    """A server with a scripted device; tests may set the stall limit of a step, in seconds."""
    engine, script = scripted(scripted_answer)
    with served(
        model_of(engine), formats=FORMATS, stall_seconds=getattr(request, "param", 30.0)
    ) as state:
        state.engine = engine
        state.script = script
        state.canary = Canary(state.url)
        yield state


short_stall_limit = pytest.mark.parametrize("server", [1.0], indirect=True)


def run_in_thread(job: Any, *arguments: Any) -> SimpleNamespace:
    """Start the call in a thread; its result is `.value` once `.thread` is joined."""
    running = SimpleNamespace(value=None)
    running.thread = threading.Thread(target=lambda: setattr(running, "value", job(*arguments)))
    running.thread.start()
    return running


def post(url: str, path: str, body: Any) -> Any:
    with Client(url, timeout=300) as client:
        return client.post(path, body)


def stream(
    url: str, body: dict[str, Any], path: str = "/v1/completions"
) -> list[tuple[float, Any]]:
    with Client(url, timeout=300) as client:
        return client.events(path, body)


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.002)


# Bad requests among good ones
# -----------------------------------------------------------------------------------

INVALID_FIELDS: list[dict[str, Any]] = [
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
def test_many_bad_requests_do_not_disturb_streams(bundled):
    """The streams' texts equal those of the same requests alone."""
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
    expected_texts = [text_of(stream(bundled.url, body)) for body in bodies]
    streams = [run_in_thread(stream, bundled.url, body) for body in bodies]
    rng = random.Random(4)
    counts = dict.fromkeys((400, 200, 500), 0)
    lock = threading.Lock()
    num_overlapping = 0

    def send_bad_requests(number: int) -> None:
        nonlocal num_overlapping
        with Client(bundled.url, timeout=300) as client:
            for _ in range(cases(100)):
                with lock:
                    invalid_fields = rng.choice(INVALID_FIELDS)
                    num_overlapping += any(running.thread.is_alive() for running in streams)
                status, _ = client.post(
                    "/v1/completions", {"prompt": "Once", "max_tokens": 5} | invalid_fields
                )
                with lock:
                    counts[status] += 1

    bad_clients = [run_in_thread(send_bad_requests, number) for number in range(7)]
    for running in (*bad_clients, *streams):
        running.thread.join()
    assert counts == {400: 7 * cases(100), 200: 0, 500: 0}
    texts = [text_of(running.value) for running in streams]
    assert texts == expected_texts and all(running.value[-1][1] == "[DONE]" for running in streams)
    print(
        f"{counts[400]} bad requests, {num_overlapping} of them while {len(streams)} streams went "
        "on; all identical"
    )
    bundled.canary.check_answer()
    settled(bundled.engine)


def test_prompt_larger_than_the_cache_is_rejected():
    """63 pages of prompt in a cache of fewer than 50: rejected at once, and other streams end
    normally.
    """
    engine, script = scripted(scripted_answer, num_seqs=4, longest=176)
    pages = engine.tables[0].pools[0].num_pages
    assert pages < 50
    script.step_seconds = 0.1  # a rejection does not wait for steps
    with served(model_of(engine), formats=FORMATS) as state:
        canary = Canary(state.url)
        streams = [
            run_in_thread(stream, state.url, {"prompt": f"long {i}", "max_tokens": 60})
            for i in range(4)
        ]
        wait_until(lambda: engine.scheduler.running)
        rejection_seconds = []
        with Client(state.url) as client:
            for tokens in ([5] * 1008, [5] * 1000, [5] * (pages * 16)):
                for fields in ({"max_tokens": 1}, {"max_tokens": 900}, {"n": 4}, {"stream": True}):
                    start = time.monotonic()
                    status, body = client.post("/v1/completions", {"prompt": tokens, **fields})
                    rejection_seconds.append(time.monotonic() - start)
                    assert status == 400 and body["error"]["param"] in ("prompt", "max_tokens"), (
                        body
                    )
        script.step_seconds = 0.0
        for running in streams:
            running.thread.join()
            *_, last, done_event = running.value
            assert done_event[1] == "[DONE]" and last[1]["choices"][0]["finish_reason"] == "length"
            assert scripted_answer("long").startswith(text_of(running.value))
        canary.check_answer()
        settled(engine)
    mean_seconds = sum(rejection_seconds) / len(rejection_seconds)
    print(
        f"{pages} pages, a prompt of 63: 400 in {mean_seconds * 1e3:.1f} ms, "
        f"{max(rejection_seconds) * 1e3:.0f} at most"
    )
    assert mean_seconds < 0.5


# Steps that raise
# ------------------------------------------------------------------------------------------------


def fail_at_call(engine: Any, name: str, step: int) -> SimpleNamespace:
    """Let the `step`-th call of a runner method raise; the result counts calls and has the time of
    the failure.
    """
    original = getattr(engine.runner, name)
    state = SimpleNamespace(calls=0, at=0.0)

    def call_or_fail(*arguments: Any) -> Any:
        state.calls += 1
        if state.calls == step:
            state.at = time.monotonic()
            setattr(engine.runner, name, original)
            raise RuntimeError("the device is not well")
        return original(*arguments)

    setattr(engine.runner, name, call_or_fail)
    return state


@pytest.mark.parametrize("name", ["launch", "collect"])
@pytest.mark.slow
def test_failed_step_ends_stream_with_error(server, name):
    """At each of the first 200 steps: the stream gets an error within a second, and the next
    request succeeds.
    """
    longest_error_delay = 0.0
    longest_canary = 0.0
    for step in range(1, 201):
        settled(server.engine)  # including the step launched past the end
        state = fail_at_call(server.engine, name, step)
        events = stream(server.url, {"prompt": "long", "max_tokens": 250})
        assert state.calls == step, "the step was not reached"
        (_, last), (_, done_event) = events[-2:]
        assert done_event == "[DONE]" and "failed" in last["error"]["message"]
        assert not any(event["choices"][0]["finish_reason"] for _, event in events[:-2])
        longest_error_delay = max(longest_error_delay, events[-1][0] - state.at)
        longest_canary = max(longest_canary, server.canary.check_answer(10))
    print(
        f"{name} raised at steps 1 to 200: error event {longest_error_delay * 1e3:.0f} ms later "
        f"at most, canary {longest_canary:.2f} s at most"
    )
    assert longest_error_delay < 1
    settled(server.engine)


# an answer of 250 tokens has at least 250 / 8 launches
@pytest.mark.parametrize("step", [1, 2, 3, 7, 14, 25])
@pytest.mark.parametrize("name", ["launch", "collect"])
def test_failed_step_of_real_model_ends_stream_with_error(bundled, name, step):
    """With the real device state, which is lost with the step."""
    state = fail_at_call(bundled.engine, name, step)
    events = stream(
        bundled.url, {"prompt": "Once upon a time", "max_tokens": 250, "ignore_eos": True}
    )
    assert state.calls == step, "the step was not reached"
    assert "failed" in events[-2][1]["error"]["message"] and events[-1][0] - state.at < 1
    canary_seconds = bundled.canary.check_answer(10)
    print(
        f"{name} raised at step {step}: event {events[-1][0] - state.at:.3f} s later, canary "
        f"{canary_seconds:.2f} s"
    )
    settled(bundled.engine)


def test_engine_failure_ends_all_requests(server, monkeypatch):
    """A failure outside of steps ends the engine: all requests get errors, and /health answers
    503.
    """
    server.script.step_seconds = 0.01
    streams = [
        run_in_thread(stream, server.url, {"prompt": "long", "max_tokens": 250}) for _ in range(4)
    ]
    complete_request = run_in_thread(
        post, server.url, "/v1/completions", {"prompt": "long", "max_tokens": 250}
    )
    wait_until(lambda: len(server.engine.scheduler.running) == 5)
    start = time.monotonic()
    monkeypatch.setattr(server.engine.scheduler, "schedule", lambda: 1 / 0)
    for running in (*streams, complete_request):
        running.thread.join()
    elapsed = time.monotonic() - start
    for running in streams:
        (_, last), (_, done_event) = running.value[-2:]
        assert done_event == "[DONE]" and last["error"]["type"] == "overloaded_error", last
        assert all(event["choices"][0]["finish_reason"] is None for _, event in running.value[:-2])
    assert complete_request.value[0] == 503 and elapsed < 10
    with Client(server.url) as client:
        assert client.ask("GET", "/health")[0] == 503 and client.ask("GET", "/ping")[0] == 200
        assert client.complete("hello")[0] == 503
        assert client.ask("GET", "/metrics")[0] == 200
    print(f"engine failure: all five requests end in {elapsed:.2f} s")


def test_lost_device_ends_the_process(server, monkeypatch, caplog):
    """Every later device call fails, as after an illegal access on a GPU: requests get errors, then
    the process exits.
    """
    process_exit = threading.Event()
    monkeypatch.setattr("os._exit", lambda code: process_exit.set() if code == 75 else None)
    streams = [
        run_in_thread(stream, server.url, {"prompt": "long", "max_tokens": 250}) for _ in range(2)
    ]
    wait_until(lambda: len(server.engine.scheduler.running) == 2)

    def raise_device_lost() -> None:
        raise DeviceLost("the device is lost: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(server.engine.runner, "reset", raise_device_lost)
    state = fail_at_call(server.engine, "collect", 1)
    for running in streams:
        running.thread.join()
        (_, last), (_, done_event) = running.value[-2:]
        assert done_event == "[DONE]" and "error" in last
    assert process_exit.wait(60) and state.calls == 1
    assert "CUDA_ERROR_ILLEGAL_ADDRESS; this process ends" in caplog.text


def test_failed_state_reset_raises_device_lost():
    """A permanent device fault: the error names it, and nothing is retried."""
    llm = LLM(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    runner = llm.engine.runner
    calls = []

    def raise_error(*arguments: Any) -> Any:
        calls.append(arguments)
        raise RuntimeError(
            "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered\nmore"
        )

    runner.collect = runner.pipeline.make_state = raise_error
    with pytest.raises(
        DeviceLost, match="the device is lost: .*illegal memory access was encountered$"
    ):
        llm.generate("hello")
    assert len(calls) == 2


# Steps that hang
# -------------------------------------------------------------------------------------------------


def health_status(url: str) -> int:
    with Client(url) as client:
        return client.ask("GET", "/health")[0]


@short_stall_limit
def test_hanging_step_fails_requests_and_recovers(server):
    """Requests fail after the stall limit, /health answers 503, and the server recovers when the
    step returns.
    """
    streams = [
        run_in_thread(stream, server.url, {"prompt": "long", "max_tokens": 250}) for _ in range(4)
    ]
    complete_request = run_in_thread(
        post, server.url, "/v1/completions", {"prompt": "long", "max_tokens": 250}
    )
    wait_until(lambda: len(server.engine.scheduler.running) == 5)
    server.script.hold.clear()
    start = time.monotonic()
    try:
        assert health_status(server.url) == 200
        for running in (*streams, complete_request):
            running.thread.join()
        stall_seconds = time.monotonic() - start
        for running in streams:
            (_, last), (_, done_event) = running.value[-2:]
            assert (
                done_event == "[DONE]" and last["error"]["message"] == "the engine does not answer"
            )
            assert all(
                event["choices"][0]["finish_reason"] is None for _, event in running.value[:-2]
            )
        assert complete_request.value[0] == 503 and 0.9 < stall_seconds < 20
        assert health_status(server.url) == 503
        request_start = time.monotonic()
        assert post(server.url, "/v1/completions", BODIES["/v1/completions"])[0] == 503
        # requests during the stall fail without waiting one by one
        assert time.monotonic() - request_start < 4
        with Client(server.url) as client:
            for path in ("/ping", "/metrics", "/v1/models", "/load", "/version"):
                assert client.ask("GET", path)[0] == 200
    finally:
        server.script.hold.set()
    resumed_at = time.monotonic()
    steps = server.script.steps
    wait_until(lambda: health_status(server.url) == 200)
    recovery_seconds = time.monotonic() - resumed_at
    server.canary.check_answer()
    settled(server.engine)
    assert server.script.steps - steps < 100, "aborted requests are decoded to their end"
    print(
        f"a hanging step: events after {stall_seconds:.2f} s, "
        f"recovery {recovery_seconds:.3f} s after it returned"
    )


@short_stall_limit
def test_slow_steps_do_not_count_as_hanging(server):
    """Steps of a third of the stall limit, with more requests than fit."""
    server.script.step_seconds = 0.33
    streams = [
        run_in_thread(stream, server.url, {"prompt": f"long {i}", "max_tokens": 10})
        for i in range(40)
    ]
    health_statuses = set()
    try:
        end = time.monotonic() + 4
        while time.monotonic() < end:
            health_statuses.add(health_status(server.url))
            time.sleep(0.05)
    finally:
        server.script.step_seconds = 0.0
        for running in streams:
            running.thread.join()
    assert health_statuses == {200}
    time.sleep(1.3)
    assert health_status(server.url) == 200  # idle is not hanging either
    assert all(
        running.value[-1][1] == "[DONE]" and "error" not in running.value[-2][1]
        for running in streams
    )


# Every way to end
# -------------------------------------------------------------------------------------------------------


def produce_nan(server) -> None:
    """Mark the next sampled row as not a number."""
    original = server.engine.runner.collect

    def collect_nan(step: Any) -> Any:
        server.engine.runner.collect = original
        result = original(step)
        return result._replace(
            outputs=[output._replace(failure=BROKEN) for output in result.outputs]
        )

    server.engine.runner.collect = collect_nan


def raise_in_next_step(server) -> None:
    server.script.fail_next = 1


def hang_step(server) -> None:
    server.script.hold.clear()
    threading.Timer(1.5, server.script.hold.set).start()


def drain_server(server) -> None:
    """Shut the server down during the answer."""
    server.loop.call_soon_threadsafe(lambda: server.loop.create_task(server.service.drain(0.05)))


# (cause, fields, expected finish reason or "error", function that causes the failure)
STREAM_ENDS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("the end", {}, "stop", None),
    ("a stop string", {"stop": ["short"]}, "stop", None),
    ("a stop token", {"stop_token_ids": [0]}, "stop", None),
    ("the length", {"max_tokens": 3}, "length", None),
    ("the model's length", {"max_tokens": None, "ignore_eos": True, "long": True}, "length", None),
    ("its deadline", {"timeout": 0.2, "long": True, "slow": True}, "timeout", None),
    ("a tool call", {"tools": [WEATHER_TOOL], "weather": True}, "tool_calls", None),
    ("no number", {"long": True, "slow": True}, "error", produce_nan),
    ("a step that raises", {"long": True, "slow": True}, "error", raise_in_next_step),
    ("a step that hangs", {"long": True, "slow": True}, "error", hang_step),
    ("the server's end", {"long": True, "slow": True}, "abort", drain_server),
]


@short_stall_limit
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
@pytest.mark.parametrize(
    ("cause", "fields", "expected_reason", "cause_failure"),
    STREAM_ENDS,
    ids=[end[0] for end in STREAM_ENDS],
)
@pytest.mark.slow
def test_every_stream_has_one_final_event(
    server, path, n, cause, fields, expected_reason, cause_failure
):
    """One finish reason per choice or one error, then the final event, and no event after it."""
    fields = dict(fields)
    is_long, is_slow, calls_tool = (fields.pop(name, False) for name in ("long", "slow", "weather"))
    text = "weather" if calls_tool else "long" if is_long else "hello"
    has_single_answer = path in ("/v1/responses", "/v1/messages")
    if n > 1 and has_single_answer:
        pytest.skip("the endpoint has single answers")
    if calls_tool and path == "/v1/completions":
        pytest.skip("completions have no tools")
    body = request_body(path, text, fields) | ({} if n == 1 else {"n": n})
    if cause == "a stop token":
        with Client(server.url) as client:
            tokens = client.post("/tokenize", {"prompt": " answer", "add_special_tokens": False})[
                1
            ]["tokens"]
        body["stop_token_ids"] = tokens[:1]
    server.script.step_seconds = 0.02 if is_slow else 0.0
    running = run_in_thread(stream, server.url, body, path)
    cause_time = 0.0
    if cause_failure is not None:
        wait_until(lambda: server.engine.scheduler.running)
        cause_time = time.monotonic()
        cause_failure(server)
    running.thread.join()
    server.script.hold.set()
    server.script.step_seconds = 0.0
    events = [event for _, event in running.value]
    if cause_failure is not None:
        allowed_seconds = 1 + (1 if cause_failure is hang_step else 0)
        assert running.value[-1][0] - cause_time < allowed_seconds + 10, "the stream ended late"
    reasons, errors = CHECKS[path](events, expected_reason)
    if expected_reason == "error":
        assert (reasons, errors) == (0, 1), events[-3:]
    else:
        assert (reasons, errors) == (n, 0), events[-3:]
    settled(server.engine)


def request_body(path: str, text: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A request for the endpoint, with the fields under the endpoint's names."""
    fields = {"max_tokens": 200, **fields}
    turn = [{"role": "user", "content": text}]
    if path == "/v1/completions":
        return {"prompt": text, **fields}
    if path == "/v1/chat/completions":
        return {"messages": turn, **fields}
    if path == "/v1/responses":
        max_tokens = fields.pop("max_tokens")
        stop = fields.pop("stop", None)
        if tools := fields.pop("tools", None):
            fields["tools"] = [{"type": "function", **tool["function"]} for tool in tools]
        return {
            "input": text,
            "max_output_tokens": max_tokens,
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


def check_openai(events: list[Any], expected_reason: str) -> tuple[int, int]:
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    chunks = events[:-1]
    errors = sum("error" in chunk for chunk in chunks)
    assert errors == 0 or "error" in chunks[-1]
    finish_reasons: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            assert choice["index"] not in finish_reasons, "a chunk after the finish reason"
            if choice["finish_reason"] is not None:
                finish_reasons[choice["index"]] = choice["finish_reason"]
    assert set(finish_reasons.values()) <= {expected_reason}, finish_reasons
    return len(finish_reasons), errors


def check_responses(events: list[Any], expected_reason: str) -> tuple[int, int]:
    final_types = [event["type"] for event in events if event["type"] in FINAL_EVENT_TYPES]
    assert len(final_types) == 1 and events[-1]["type"] == final_types[0]
    if final_types[0] != "response.failed":
        assert final_types[0] == (
            "response.completed"
            if expected_reason in ("stop", "tool_calls")
            else "response.incomplete"
        ), final_types
    return int(final_types[0] != "response.failed"), int(final_types[0] == "response.failed")


FINAL_EVENT_TYPES = ("response.completed", "response.incomplete", "response.failed")


def check_messages(events: list[Any], expected_reason: str) -> tuple[int, int]:
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
def test_interrupted_pooling_requests_return_errors(server, path):
    """A vector cannot be partial, so an interruption is an error that names its cause."""
    status, body = post(server.url, path, BODIES[path] | {"timeout": 1e-9})
    assert (status, body["error"]["param"]) == (408, "timeout")
    for cause_failure in (raise_in_next_step, produce_nan):
        cause_failure(server)
        status, body = post(server.url, path, BODIES[path])
        assert (status, body["error"]["code"]) == (500, "engine_error")
    assert post(server.url, path, BODIES[path])[0] == 200
    settled(server.engine)


def test_request_ids_in_use_are_rejected_and_freed_at_the_end(server):
    """A request id is rejected while in use and reusable afterwards, however the first request
    ended.
    """
    server.script.step_seconds = 0.02
    body = {"prompt": "long", "max_tokens": 100, "request_id": "mine"}
    for cause_failure in (None, raise_in_next_step, produce_nan):
        running = run_in_thread(stream, server.url, body)
        wait_until(lambda: server.engine.scheduler.running)
        status, refusal = post(server.url, "/v1/completions", body)
        assert status == 400 and refusal["error"]["param"] == "request_id"
        if cause_failure is not None:
            cause_failure(server)
        running.thread.join()
    server.script.step_seconds = 0.0
    assert post(server.url, "/v1/completions", body | {"prompt": "hello"})[0] == 200
    settled(server.engine)


def test_last_of_duplicate_json_keys_counts(server):
    """Like other JSON parsers, such as those of proxies, the server takes the last value."""
    with Client(server.url) as client:
        raw = client.ask(
            "POST", "/v1/completions", b'{"prompt": "long", "max_tokens": 9, "max_tokens": 2}'
        )[2]
    assert json.loads(raw)["usage"]["completion_tokens"] == 2
