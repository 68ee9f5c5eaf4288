"""The OpenAPI document against the server: Ollama's paths, and each field of its request bodies."""

import math
from typing import Any

import jsonschema
import pytest

from quire.serving.api.errors import RequestError
from quire.serving.http.endpoints import ollama, openapi
from quire.serving.http.settings import ServerSettings
from quire.serving.protocol.ollama import parse_chat
from quire.serving.protocol.ollama_fields import MESSAGE, OPTIONS
from quire.serving.protocol.schema import OLLAMA, body_schema

TEXTS = ("", "x", "json", "low", "5m", "1.5h", "-1", "-1m", "5 m", "m", "system", "END")
NUMBERS = (
    -3,
    -2,
    -1,
    0,
    1,
    1.5,
    20,
    21,
    65_536,
    65_537,
    2**31 - 1,
    2**31,
    2**63 - 1,
    2**63,
    1e308,
    0.01,
    math.inf,
)
VALUES = (
    True,
    False,
    *TEXTS,
    *NUMBERS,
    {},
    {"type": "object"},
    {"temperature": 0.5},
    {"temperature": -1},
    {"colour": 1},
    {"seed": None},
    {"stop": "x"},
    [],
    ["x"],
    ["", "x"],
    [5],
    [-1],
    ["x", 5],
    ["x"] * 65,
)

CALLS = (
    5,
    {},
    {"function": 5},
    {"function": {}},
    {"function": {"name": 5}},
    {"function": {"name": "f"}},
    {"function": {"name": "f", "arguments": 5}},
    {"function": {"name": "f", "arguments": {"a": 1}}},
    {"function": {"name": "f", "arguments": None, "index": 0}},
    {"function": {"name": "f"}, "id": 5},
    {"type": "custom", "custom": {"name": "f", "input": "x"}},
)
MESSAGES = (
    5,
    {},
    {"role": None},
    {"role": "user"},
    {"role": "robot"},
    {"role": "user", "colour": 1},
    *({"role": "assistant", "tool_calls": [call]} for call in CALLS),
    *(
        {"role": "tool", name: value}
        for name in MESSAGE
        if name != "role"
        for value in (None, "x", 5, [])
    ),
)
FUNCTIONS = (
    5,
    {},
    {"name": ""},
    {"name": "a b"},
    {"name": "f" * 129},
    {"name": "f"},
    {"name": "f", "colour": 1},
    *(
        {"name": "f", name: value}
        for name in ("description", "parameters", "strict")
        for value in (None, "x", True, {}, [])
    ),
)
TOOLS = (
    5,
    {},
    {"type": "function"},
    *({"function": function} for function in FUNCTIONS),
    *({"type": kind, "function": {"name": "f"}} for kind in (None, "function", "custom", 5)),
    {"function": {"name": "f"}, "colour": 1},
    {"type": "custom", "custom": {"name": "f"}},
)


def schema_accepts(schema: dict[str, Any], value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def rule_accepts(rule: Any, value: Any) -> bool:
    try:
        rule.check("field", value)
    except RequestError as error:
        assert error.param.startswith("field"), error
        return False
    return True


def test_every_ollama_path_is_documented():
    paths = openapi.document(ServerSettings(version="1"))["paths"]
    for method, path in ollama.ROUTES:
        operation = paths[path][method.lower()]
        assert ("requestBody" in operation) == (path in OLLAMA), path
        for status, answer in operation["responses"].items():
            if status != "200" and method != "HEAD":
                error = answer["content"]["application/json"]["schema"]
                assert schema_accepts(error, {"error": "x"}) and not schema_accepts(
                    error, {"error": {"message": "x", "type": "y"}}
                )
        kinds = list(operation["responses"].get("200", {}).get("content", {}))
        streams = path in ("/api/chat", "/api/generate", "/api/pull")
        assert kinds[:1] == (
            []
            if (method, path) in ollama.REFUSED
            else ["application/x-ndjson" if streams else "application/json"]
        )


@pytest.mark.parametrize("path", [*OLLAMA, "options", "messages[]"])
def test_ollama_field_schemas_match_their_checks(path):
    rules = {"options": OPTIONS, "messages[]": MESSAGE}.get(path) or OLLAMA[path]
    for name, rule in rules.items():
        for value in VALUES:
            # items are checked later
            items = (
                isinstance(value, list) and value and name in ("messages", "tools", "tool_calls")
            )
            if not items:
                assert rule_accepts(rule, value) == schema_accepts(rule.schema, value), (
                    name,
                    value,
                )


@pytest.mark.parametrize(("field", "values"), [("messages", MESSAGES), ("tools", TOOLS)])
def test_ollama_list_item_schemas_match_their_checks(field, values):
    for value in values:
        body = {"model": "quill", field: [value]}
        try:
            parse_chat(body)
            accepted = True
        except RequestError as error:
            assert error.param.startswith(f"{field}[0]"), error
            accepted = False
        assert accepted == schema_accepts(body_schema("/api/chat"), body), value
