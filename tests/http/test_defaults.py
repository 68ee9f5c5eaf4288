"""A model's default sampling parameters apply to fields that a request omits, in every protocol;
/v1/models lists them.
"""

import json
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from quire.tests.support.served import model_of, scripted, served

DEFAULTS = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 9,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "max_tokens": 5,
}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
}


CHAT_DEFAULTS = {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "max_tokens": 5}


@pytest.fixture(scope="module")
def server():
    engine, _ = scripted(lambda prompt: "word " * 40)
    engine.defaults = DEFAULTS
    engine.chat_defaults = CHAT_DEFAULTS
    with served(model_of(engine)) as state:
        state.params = []
        add = engine.add

        def record_params(name, tokens, params, *arguments, **keyword_arguments):
            state.params.append(params)
            return add(name, tokens, params, *arguments, **keyword_arguments)

        engine.add = record_params
        yield state


def send_request(server, method: str, path: str, body=None):
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=300)
    connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response_body = json.loads(response.read())
    connection.close()
    assert response.status == 200, response_body
    return response_body


@pytest.mark.parametrize("path", BODIES)
def test_defaults_apply_to_absent_fields(server, path):
    body = BODIES[path]
    fields = {name: body[name] for name in DEFAULTS if name in body}
    answer = send_request(server, "POST", path, body | {"top_k": None})
    assert {name: getattr(server.params[-1], name) for name in DEFAULTS} == DEFAULTS | fields
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)
    send_request(server, "POST", path, body | {"temperature": 0.75, "top_k": 0, "min_p": 0})
    request_params = {"temperature": 0.75, "top_k": 0, "min_p": 0}
    assert {
        name: getattr(server.params[-1], name) for name in DEFAULTS
    } == DEFAULTS | fields | request_params


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "max_tokens"), ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"), ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)  # fmt: skip
def test_request_may_exceed_default_max_tokens(server, path, field):
    send_request(server, "POST", path, BODIES[path] | {field: 8})
    assert server.params[-1].max_tokens == 8


@pytest.mark.parametrize(
    ("path", "field"), [("/api/chat", {"messages": MESSAGES}), ("/api/generate", {"prompt": "Hi"})]
)
def test_ollama_requests_use_the_chat_defaults(server, path, field):
    body = {"model": "quill", "stream": False} | field
    send_request(server, "POST", path, body)
    assert {name: getattr(server.params[-1], name) for name in CHAT_DEFAULTS} == CHAT_DEFAULTS
    send_request(server, "POST", path, body | {"options": {"temperature": 1.5, "top_k": 0}})
    params = {name: getattr(server.params[-1], name) for name in CHAT_DEFAULTS}
    assert params == CHAT_DEFAULTS | {"temperature": 1.5, "top_k": 0}
    parameters_text = send_request(server, "POST", "/api/show", {"model": "quill"})["parameters"]
    assert parameters_text == "temperature 0.8\ntop_p 0.95\ntop_k 40\nmax_tokens 5"


def test_model_card_shows_defaults(server):
    (card,) = send_request(server, "GET", "/v1/models")["data"]
    assert card["default_sampling_params"] == DEFAULTS
