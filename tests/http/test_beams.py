"""`use_beam_search` over HTTP: what a search in Python finds, and what has no place beside it."""

import threading
import time

import pytest
import requests

from quire import BeamSearchParams
from quire.serving.api.options import make_options
from quire.serving.build import make_engine
from quire.serving.engine.beam_search import search
from quire.tests.support.served import model_of, served

PROMPTS = ["Once upon a time", "One day"]


@pytest.fixture(scope="module")
def server():
    """The bundled model; `found` is what a search in Python finds for each prompt, by its length
    penalty.
    """
    engine = make_engine(
        make_options(None, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)
    )
    tokens = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    found = {
        penalty: search(
            engine, tokens, BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=penalty)
        )
        for penalty in (1.0, -2.0)
    }
    with served(model_of(engine)) as state:
        state.engine = engine
        state.found = found
        yield state


def ask(server, path: str, **asked):
    return requests.post(
        f"{server.url}{path}", json={"use_beam_search": True, **asked}, timeout=300
    )


def idle(server) -> None:
    until = time.monotonic() + 60
    while server.engine.busy and time.monotonic() < until:
        time.sleep(0.01)
    assert not server.engine.busy and not server.engine.requests


@pytest.mark.parametrize("penalty", [1.0, -2.0])
def test_a_search_over_http_finds_what_one_in_python_finds(server, penalty):
    more = {} if penalty == 1.0 else {"length_penalty": penalty}
    asked = {"prompt": PROMPTS, "n": 3, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    body = ask(server, "/v1/completions", **asked, **more).json()
    beams = [beam for output in server.found[penalty] for beam in output.sequences]
    assert [choice["token_ids"] for choice in body["choices"]] == [
        list(beam.tokens) for beam in beams
    ]
    assert [choice["text"] for choice in body["choices"]] == [beam.text for beam in beams]
    assert [choice["finish_reason"] for choice in body["choices"]] == [
        beam.finish_reason for beam in beams
    ]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    prompts = sum(len(output.prompt_token_ids) for output in server.found[penalty])
    assert body["usage"]["prompt_tokens"] == prompts
    assert body["usage"]["completion_tokens"] == sum(len(beam.tokens) for beam in beams)
    idle(server)


def test_a_chat_is_searched_too(server):
    messages = [{"role": "user", "content": "Sort: 31 4 15"}]
    one = ask(server, "/v1/chat/completions", messages=messages, n=2, max_tokens=12).json()
    texts = [choice["message"]["content"] for choice in one["choices"]]
    assert len(set(texts)) == 2 and all(texts)
    assert "<|end|>" not in "".join(texts)
    batch = ask(
        server, "/v1/chat/completions/batch", messages=[messages] * 2, n=2, max_tokens=12
    ).json()
    assert [choice["message"]["content"] for choice in batch["choices"]] == texts * 2
    idle(server)


def test_two_searches_at_a_time_and_others(server):
    found: list = [None] * 6

    def run(place: int) -> None:
        beams = {"use_beam_search": True, "n": 3} if place % 2 else {"use_beam_search": False}
        asked = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, **beams}
        found[place] = [
            choice["text"] for choice in ask(server, "/v1/completions", **asked).json()["choices"]
        ]

    threads = [threading.Thread(target=run, args=[place]) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[2] == found[4] and found[1] == found[3] == found[5]
    assert found[1] == [beam.text for beam in server.found[1.0][0].sequences]
    assert server.engine.runner.compiles.recompiles == 0
    idle(server)


@pytest.mark.parametrize(
    ("asked", "param", "says"),
    [
        ({"stream": True}, "use_beam_search", "cannot be streamed"),
        ({"n": 11}, "n", "must be an integer from 1 to 10 (with use_beam_search), got 11"),
        ({"temperature": 0.7}, "temperature", "says nothing of a beam search"),
        ({"stop": "x"}, "stop", "says nothing of a beam search"),
        ({"logprobs": 1}, "logprobs", "says nothing of a beam search"),
        ({"length_penalty": 11}, "length_penalty", "must be a number from -10 to 10"),
        (
            {"use_beam_search": False, "length_penalty": 1.0},
            "length_penalty",
            "needs use_beam_search to be true",
        ),
        ({"use_beam_search": 1}, "use_beam_search", "must be true or false"),
    ],
)
def test_what_has_no_place_is_refused(server, asked, param, says):
    answer = ask(server, "/v1/completions", prompt="Once", **asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param and says in answer.json()["error"]["message"]


def test_tools_are_refused(server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = ask(
        server, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], tools=tools
    )
    assert (
        answer.status_code == 400
        and "has no place beside tools" in answer.json()["error"]["message"]
    )


def test_a_search_ends_with_its_time_and_with_its_client(server):
    long = {"prompt": PROMPTS[0], "n": 10, "max_tokens": 200, "ignore_eos": True}
    late = ask(server, "/v1/completions", **long, timeout=0.05)
    assert late.status_code == 408 and late.json()["error"]["param"] == "timeout"
    idle(server)
    with pytest.raises(requests.Timeout):
        requests.post(
            f"{server.url}/v1/completions", json={"use_beam_search": True, **long}, timeout=0.2
        )
    idle(server)
