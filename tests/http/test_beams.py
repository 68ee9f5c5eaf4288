"""`use_beam_search` over HTTP: beams equal to the Python API, and fields that it does not
support.
"""

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
    """The bundled model; `expected_beams` has the Python API's beams for each length penalty."""
    engine = make_engine(
        make_options(None, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)
    )
    tokens = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    expected_beams = {
        penalty: search(
            engine, tokens, BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=penalty)
        )
        for penalty in (1.0, -2.0)
    }
    with served(model_of(engine)) as state:
        state.engine = engine
        state.expected_beams = expected_beams
        yield state


def post_beam_search(server, path: str, **fields):
    return requests.post(
        f"{server.url}{path}", json={"use_beam_search": True, **fields}, timeout=300
    )


def wait_until_idle(server) -> None:
    until = time.monotonic() + 60
    while server.engine.busy and time.monotonic() < until:
        time.sleep(0.01)
    assert not server.engine.busy and not server.engine.requests


@pytest.mark.parametrize("penalty", [1.0, -2.0])
def test_beams_over_http_equal_python_beam_search(server, penalty):
    penalty_fields = {} if penalty == 1.0 else {"length_penalty": penalty}
    request = {
        "prompt": PROMPTS,
        "n": 3,
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    body = post_beam_search(server, "/v1/completions", **request, **penalty_fields).json()
    beams = [beam for output in server.expected_beams[penalty] for beam in output.sequences]
    assert [choice["token_ids"] for choice in body["choices"]] == [
        list(beam.tokens) for beam in beams
    ]
    assert [choice["text"] for choice in body["choices"]] == [beam.text for beam in beams]
    assert [choice["finish_reason"] for choice in body["choices"]] == [
        beam.finish_reason for beam in beams
    ]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    num_prompt_tokens = sum(
        len(output.prompt_token_ids) for output in server.expected_beams[penalty]
    )
    assert body["usage"]["prompt_tokens"] == num_prompt_tokens
    assert body["usage"]["completion_tokens"] == sum(len(beam.tokens) for beam in beams)
    wait_until_idle(server)


def test_beam_search_of_chat_and_batch(server):
    messages = [{"role": "user", "content": "Sort: 31 4 15"}]
    body = post_beam_search(
        server, "/v1/chat/completions", messages=messages, n=2, max_tokens=12
    ).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(texts)) == 2 and all(texts)
    assert "<|end|>" not in "".join(texts)
    batch = post_beam_search(
        server, "/v1/chat/completions/batch", messages=[messages] * 2, n=2, max_tokens=12
    ).json()
    assert [choice["message"]["content"] for choice in batch["choices"]] == texts * 2
    wait_until_idle(server)


def test_concurrent_beam_searches_and_other_requests(server):
    texts: list = [None] * 6

    def run(index: int) -> None:
        beams = {"use_beam_search": True, "n": 3} if index % 2 else {"use_beam_search": False}
        request = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, **beams}
        texts[index] = [
            choice["text"]
            for choice in post_beam_search(server, "/v1/completions", **request).json()["choices"]
        ]

    threads = [threading.Thread(target=run, args=[index]) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts[0] == texts[2] == texts[4] and texts[1] == texts[3] == texts[5]
    assert texts[1] == [beam.text for beam in server.expected_beams[1.0][0].sequences]
    assert server.engine.runner.compiles.recompiles == 0
    wait_until_idle(server)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
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
def test_fields_unsupported_with_beam_search_are_rejected(server, fields, param, message):
    answer = post_beam_search(server, "/v1/completions", prompt="Once", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param and message in answer.json()["error"]["message"]


def test_tools_are_rejected_with_beam_search(server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = post_beam_search(
        server, "/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], tools=tools
    )
    assert (
        answer.status_code == 400
        and "has no place beside tools" in answer.json()["error"]["message"]
    )


def test_beam_search_ends_on_timeout_and_disconnection(server):
    long_request = {"prompt": PROMPTS[0], "n": 10, "max_tokens": 200, "ignore_eos": True}
    timed_out = post_beam_search(server, "/v1/completions", **long_request, timeout=0.05)
    assert timed_out.status_code == 408 and timed_out.json()["error"]["param"] == "timeout"
    wait_until_idle(server)
    with pytest.raises(requests.Timeout):
        requests.post(
            f"{server.url}/v1/completions",
            json={"use_beam_search": True, **long_request},
            timeout=0.2,
        )
    wait_until_idle(server)
