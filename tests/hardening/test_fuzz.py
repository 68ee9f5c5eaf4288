"""Schemathesis fuzzes the bundled model's server from its own OpenAPI document: thousands of valid
and invalid requests.
"""

import json
from collections import Counter
from typing import Any

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from quire.serving.api.options import make_options
from quire.serving.api.params import MAX_LOGPROBS
from quire.serving.build import make_engine
from quire.serving.http.endpoints.openapi import SUMMARIES
from quire.serving.protocol.schema import BODIES, OLLAMA
from quire.tests.support.canary import BODIES as MINIMAL_BODIES
from quire.tests.support.canary import FILE, Canary, settled, with_file
from quire.tests.support.canary import GOOD as MINIMAL_STATUS
from quire.tests.support.cases import cases
from quire.tests.support.served import model_of, served

NUM_REQUESTS = cases(3000, least=300)
MAX_TOKENS = 6
# generating their requests takes longer than answering them
SLOW_TO_GENERATE = ("/tokenize", "/v1/messages/count_tokens")
# random bodies are rarely valid
RARELY_VALID = ("/v1/responses/input_tokens", "/v1/responses/compact", "/generative_scoring")
GENERATING_PATHS = {  # generating endpoints and their length field
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    "/v1/chat/completions/batch": "max_tokens",
}
ROLES = ("user", "system", "assistant", "user")
FINAL_EVENTS = {
    "/v1/responses": ("response.completed", "response.incomplete"),
    "/v1/messages": ("message_stop",),
}
# generating endpoints with the length in `options`
OLLAMA_GENERATING_PATHS = ("/api/chat", "/api/generate")


@pytest.fixture(scope="module")
def server():
    engine = make_engine(
        make_options(None, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512)
    )
    with served(model_of(engine)) as state:
        state.engine = engine
        state.canary = Canary(state.url)
        state.counts = Counter()
        with_file(state.service)
        state.schema = schemathesis.openapi.from_url(f"{state.url}/openapi.json")
        yield state
        print(f"\n{state.counts.total()} requests: {dict(state.counts)}")


def make_answerable(body: dict[str, Any], path: str, vocab: int) -> dict[str, Any]:
    """A valid body with values that this model supports, so that more requests are answered."""
    body = dict(body)
    if body.get("model") is not None:
        body["model"] = "quill"
    for name in (
        "prompt",
        "input",
        "tokens",
        "stop_token_ids",
        "allowed_token_ids",
        "label_token_ids",
        "logprob_token_ids",
        "context",
    ):
        body |= {name: valid_token_ids(body[name], vocab)} if name in body else {}
    for name in ("logprobs", "prompt_logprobs", "top_logprobs"):
        if type(body.get(name)) is int:
            body[name] %= MAX_LOGPROBS + 1
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {
            str(int(token) % vocab): bias for token, bias in body["logit_bias"].items()
        }
    if isinstance(body.get("messages"), list):
        is_batch = path.endswith("/batch")
        conversations = [
            alternate_roles(messages)
            for messages in (body["messages"] if is_batch else [body["messages"]])
        ]
        body["messages"] = conversations if is_batch else conversations[0]
    for name in ("previous_response_id", "conversation"):  # no such id is stored
        if body.get(name) is not None:
            del body[name]
    if path in OLLAMA:
        body = make_ollama_answerable(body, path)
    if "input_file_id" in body:
        body |= {"input_file_id": FILE, "endpoint": "/v1/completions", "output_expires_after": None}
    if path in RARELY_VALID and len(body) % 2:
        body |= MINIMAL_BODIES[path]
    if path in GENERATING_PATHS and len(body) % 2 and not path.endswith("/batch"):
        body["stream"] = True
    return body


def make_ollama_answerable(body: dict[str, Any], path: str) -> dict[str, Any]:
    """For Ollama's endpoints: usually the right model name, and no reasoning, suffix or other
    unsupported fields.
    """
    dropped_fields = (
        ("think", "suffix", "name")
        if len(body) % 3
        else ("think", "suffix", "name", "format", "tools", "raw")
    )
    fields = {
        name: value
        for name, value in body.items()
        if name not in dropped_fields and value is not None
    }
    if not fields.get("logprobs"):
        fields.pop("top_logprobs", None)
    if isinstance(fields.get("options"), dict):
        fields["options"] = {
            name: value for name, value in fields["options"].items() if name != "repeat_last_n"
        }
    return (
        (MINIMAL_BODIES[path] if len(body) % 2 else {})
        | fields
        | {"model": "quill" if len(str(body)) % 5 else "x"}
    )


def alternate_roles(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"role": ROLES[i % 4], "content": message.get("content") or "x"}
        for i, message in enumerate(messages)
    ]


def valid_token_ids(value: Any, vocab: int) -> Any:
    """The same list with token ids of the vocabulary."""
    if isinstance(value, list):
        return [valid_token_ids(item, vocab) for item in value[:64]]
    return (
        int(value) % vocab
        if isinstance(value, int | float) and not isinstance(value, bool)
        else value
    )


def cap_lengths(body: Any, path: str) -> Any:
    """The same request with short outputs: large or missing lengths become small; invalid values
    stay.
    """
    if path in OLLAMA_GENERATING_PATHS and isinstance(body, dict):
        return body | {"options": cap_options(body.get("options"))}
    if path not in GENERATING_PATHS or not isinstance(body, dict):
        return body
    body = dict(body)
    names = [
        name
        for name in (GENERATING_PATHS[path], "max_completion_tokens")
        if body.get(name) is not None
    ]
    for name in names or [GENERATING_PATHS[path]]:
        value = body.get(name)
        if value is None or (isinstance(value, int | float) and value > MAX_TOKENS):
            body[name] = MAX_TOKENS
    for name in ("n", "best_of"):
        if isinstance(body.get(name), int | float) and body[name] > 4:
            body[name] = 4
    return body


def cap_options(options: Any) -> Any:
    if not isinstance(options, dict | None):
        return options
    options = dict(options or {})
    value = options.get("num_predict")
    if value is None or (
        type(value) in (int, float) and (value in (-2, -1, 0) or value > MAX_TOKENS)
    ):
        options["num_predict"] = MAX_TOKENS
    return options


def check_response(path: str, responses: dict[str, Any], response: requests.Response) -> str:
    """Check that the response matches the OpenAPI document; return its kind."""
    status = response.status_code
    content_type = response.headers["Content-Type"]
    assert status < 500, (status, response.text[:500])
    response_schema = (
        responses[str(status)]
        if path.startswith("/api/")
        else responses.get(str(status), responses["default"])
    )
    assert content_type in response_schema.get("content", (content_type,)), (
        status,
        content_type,
        response.text[:500],
    )
    if status >= 400:
        jsonschema.validate(
            response.json(), response_schema["content"]["application/json"]["schema"]
        )
        return "refused"
    assert status == 200
    if "ndjson" in content_type:
        lines = [json.loads(line) for line in response.text.strip().split("\n")]
        assert not any("error" in line for line in lines), lines[-3:]
        assert path == "/api/pull" or [line["done"] for line in lines] == [False] * (
            len(lines) - 1
        ) + [True]
        return "streamed"
    if "event-stream" not in content_type:
        if path != "/metrics":
            response.json()
        return "answered"
    event_data = [
        line.removeprefix("data: ")
        for line in response.text.split("\n")
        if line.startswith("data: ")
    ]
    if path in FINAL_EVENTS:
        assert json.loads(event_data[-1])["type"] in FINAL_EVENTS[path], event_data[-3:]
    else:
        assert event_data[-1] == "[DONE]" and not any(
            "error" in json.loads(event) for event in event_data[:-1]
        ), event_data[-3:]
    return "streamed"


def fuzz_endpoint(server: Any, path: str, mode: GenerationMode, count: int) -> Counter[str]:
    """Send `count` reproducible requests to one endpoint; count their outcomes."""
    operation = server.schema[path]["POST" if path in BODIES else "GET"]
    responses = operation.definition.raw["responses"]
    vocab = server.engine.runner.config.vocab_size
    outcomes: Counter[str] = Counter()

    with requests.Session() as session:

        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case: schemathesis.Case) -> None:
            if mode.is_positive and isinstance(case.body, dict):
                case.body = make_answerable(case.body, path, vocab)
            case.body = cap_lengths(case.body, path)
            response = session.request(**case.as_transport_kwargs(base_url=server.url), timeout=60)
            outcomes[check_response(path, responses, response)] += 1

        send()
    server.counts.update(outcomes)
    return outcomes


@pytest.mark.random
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.slow
def test_fuzzed_bodies(server, path, mode):
    share = (NUM_REQUESTS - 100) / (2 * len(BODIES) - 4 * len(SLOW_TO_GENERATE) / 3)
    outcomes = fuzz_endpoint(
        server, path, mode, max(60, round(share / 3 if path in SLOW_TO_GENERATE else share))
    )
    print(f"{path}, {mode.value}: {dict(outcomes)}")
    num_answered = outcomes["answered"] + outcomes["streamed"]
    is_unsupported = MINIMAL_STATUS[path] != 200  # quill is no classifier
    assert num_answered > 0 or mode.is_negative or is_unsupported, (
        "nothing that fits the schema is answered"
    )
    assert mode.is_positive or outcomes["refused"] > num_answered
    server.canary.check_answer()
    settled(server.engine)


def test_fuzzed_paths_without_body(server):
    """All other endpoints, with fuzzed path parameters."""
    paths = [path for path in SUMMARIES if path not in BODIES]
    for path in paths:
        count = 100 - len(paths) + 1 if "{" in path else 1
        outcomes = fuzz_endpoint(server, path, GenerationMode.POSITIVE, count)
        assert (outcomes["answered"] == 1 and outcomes.total() == 1) or "{" in path, (
            path,
            outcomes,
        )
    server.canary.check_answer()
    settled(server.engine)
