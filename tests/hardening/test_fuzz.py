"""What schemathesis makes of the server's own description, sent to the bundled model: thousands of
requests that fit the schema and that do not."""

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
from quire.tests.support.canary import BODIES as LEAST
from quire.tests.support.canary import FILE, Canary, settled, with_file
from quire.tests.support.canary import GOOD as LEAST_STATUS
from quire.tests.support.cases import cases
from quire.tests.support.served import model_of, served

TOTAL = cases(3000, least=300)
MOST_TOKENS = 6
# to make requests for: it takes longer than to answer them
SLOW = ("/tokenize", "/v1/messages/count_tokens")
# right by chance
SELDOM = ("/v1/responses/input_tokens", "/v1/responses/compact", "/generative_scoring")
WRITES = {  # endpoints that write, and the field that says how much
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    "/v1/chat/completions/batch": "max_tokens",
}
ROLES = ("user", "system", "assistant", "user")
ENDS = {
    "/v1/responses": ("response.completed", "response.incomplete"),
    "/v1/messages": ("message_stop",),
}
# endpoints that write, and take how much among their options
OPTIONS = ("/api/chat", "/api/generate")


@pytest.fixture(scope="module")
def server():
    engine = make_engine(
        make_options(None, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512)
    )
    with served(model_of(engine)) as state:
        state.engine, state.canary, state.counts = engine, Canary(state.url), Counter()
        with_file(state.service)
        state.schema = schemathesis.openapi.from_url(f"{state.url}/openapi.json")
        yield state
        print(f"\n{state.counts.total()} requests: {dict(state.counts)}")


def likelier(body: dict[str, Any], path: str, vocab: int) -> dict[str, Any]:
    """A body that fits the schema with values that this model knows, so that more of them come to
    be answered.
    """
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
        body |= {name: known(body[name], vocab)} if name in body else {}
    for name in ("logprobs", "prompt_logprobs", "top_logprobs"):
        if type(body.get(name)) is int:
            body[name] %= MAX_LOGPROBS + 1
    if isinstance(body.get("logit_bias"), dict):
        body["logit_bias"] = {
            str(int(token) % vocab): bias for token, bias in body["logit_bias"].items()
        }
    if isinstance(body.get("messages"), list):
        batch = path.endswith("/batch")
        found = [turns(one) for one in (body["messages"] if batch else [body["messages"]])]
        body["messages"] = found if batch else found[0]
    for name in ("previous_response_id", "conversation"):  # nothing is stored by that name
        if body.get(name) is not None:
            del body[name]
    if path in OLLAMA:
        body = likelier_of_ollama(body, path)
    if "input_file_id" in body:
        body |= {"input_file_id": FILE, "endpoint": "/v1/completions", "output_expires_after": None}
    if path in SELDOM and len(body) % 2:
        body |= LEAST[path]
    if path in WRITES and len(body) % 2 and not path.endswith("/batch"):
        body["stream"] = True
    return body


def likelier_of_ollama(body: dict[str, Any], path: str) -> dict[str, Any]:
    """The same at Ollama's endpoints: the model mostly has its name, no thoughts, and no tokens to
    fill gaps with.
    """
    never = (
        ("think", "suffix", "name")
        if len(body) % 3
        else ("think", "suffix", "name", "format", "tools", "raw")
    )
    asked = {name: value for name, value in body.items() if name not in never and value is not None}
    if not asked.get("logprobs"):
        asked.pop("top_logprobs", None)
    if isinstance(asked.get("options"), dict):
        asked["options"] = {
            name: value for name, value in asked["options"].items() if name != "repeat_last_n"
        }
    return (
        (LEAST[path] if len(body) % 2 else {})
        | asked
        | {"model": "quill" if len(str(body)) % 5 else "x"}
    )


def turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"role": ROLES[i % 4], "content": one.get("content") or "x"}
        for i, one in enumerate(messages)
    ]


def known(value: Any, vocab: int) -> Any:
    """The same list with token ids that there are."""
    if isinstance(value, list):
        return [known(one, vocab) for one in value[:64]]
    return (
        int(value) % vocab
        if isinstance(value, int | float) and not isinstance(value, bool)
        else value
    )


def capped(body: Any, path: str) -> Any:
    """The same request for less: what it does not say, or says of too much, is small; what is wrong
    stays wrong.
    """
    if path in OPTIONS and isinstance(body, dict):
        return body | {"options": capped_options(body.get("options"))}
    if path not in WRITES or not isinstance(body, dict):
        return body
    body = dict(body)
    names = [name for name in (WRITES[path], "max_completion_tokens") if body.get(name) is not None]
    for name in names or [WRITES[path]]:
        value = body.get(name)
        if value is None or (isinstance(value, int | float) and value > MOST_TOKENS):
            body[name] = MOST_TOKENS
    for name in ("n", "best_of"):
        if isinstance(body.get(name), int | float) and body[name] > 4:
            body[name] = 4
    return body


def capped_options(options: Any) -> Any:
    if not isinstance(options, dict | None):
        return options
    options = dict(options or {})
    value = options.get("num_predict")
    if value is None or (
        type(value) in (int, float) and (value in (-2, -1, 0) or value > MOST_TOKENS)
    ):
        options["num_predict"] = MOST_TOKENS
    return options


def check(path: str, responses: dict[str, Any], response: requests.Response) -> str:
    """Whether an answer is one that the description has, and in what way."""
    status = response.status_code
    kind = response.headers["Content-Type"]
    assert status < 500, (status, response.text[:500])
    described = (
        responses[str(status)]
        if path.startswith("/api/")
        else responses.get(str(status), responses["default"])
    )
    assert kind in described.get("content", (kind,)), (status, kind, response.text[:500])
    if status >= 400:
        jsonschema.validate(response.json(), described["content"]["application/json"]["schema"])
        return "refused"
    assert status == 200
    if "ndjson" in kind:
        lines = [json.loads(line) for line in response.text.strip().split("\n")]
        assert not any("error" in line for line in lines), lines[-3:]
        assert path == "/api/pull" or [line["done"] for line in lines] == [False] * (
            len(lines) - 1
        ) + [True]
        return "streamed"
    if "event-stream" not in kind:
        if path != "/metrics":
            response.json()
        return "answered"
    data = [
        line.removeprefix("data: ")
        for line in response.text.split("\n")
        if line.startswith("data: ")
    ]
    if path in ENDS:
        assert json.loads(data[-1])["type"] in ENDS[path], data[-3:]
    else:
        assert data[-1] == "[DONE]" and not any(
            "error" in json.loads(event) for event in data[:-1]
        ), data[-3:]
    return "streamed"


def fuzz(server: Any, path: str, mode: GenerationMode, count: int) -> Counter[str]:
    """So many requests to one endpoint, the same ones each time."""
    operation = server.schema[path]["POST" if path in BODIES else "GET"]
    responses = operation.definition.raw["responses"]
    vocab = server.engine.runner.config.vocab_size
    found: Counter[str] = Counter()

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
                case.body = likelier(case.body, path, vocab)
            case.body = capped(case.body, path)
            response = session.request(**case.as_transport_kwargs(base_url=server.url), timeout=60)
            found[check(path, responses, response)] += 1

        send()
    server.counts.update(found)
    return found


@pytest.mark.random
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.slow
def test_bodies(server, path, mode):
    share = (TOTAL - 100) / (2 * len(BODIES) - 4 * len(SLOW) / 3)
    found = fuzz(server, path, mode, max(60, round(share / 3 if path in SLOW else share)))
    print(f"{path}, {mode.value}: {dict(found)}")
    answered = found["answered"] + found["streamed"]
    none = LEAST_STATUS[path] != 200  # quill has no classes
    assert answered > 0 or mode.is_negative or none, "nothing that fits the schema is answered"
    assert mode.is_positive or found["refused"] > answered
    server.canary.check_answer()
    settled(server.engine)


def test_names_and_what_has_no_body(server):
    """The other endpoints, and what is asked of them by a path."""
    others = [path for path in SUMMARIES if path not in BODIES]
    for path in others:
        count = 100 - len(others) + 1 if "{" in path else 1
        found = fuzz(server, path, GenerationMode.POSITIVE, count)
        assert (found["answered"] == 1 and found.total() == 1) or "{" in path, (path, found)
    server.canary.check_answer()
    settled(server.engine)
