"""Compiles the `structured_outputs` of a request to a grammar of llguidance, in the worker
process.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher, StructTag

from ..api.errors import RequestError
from ..api.structured import FIELD
from .gbnf import GrammarError, is_gbnf
from .json_schema import rewrite_schema
from .lark import to_lark
from .schema_document import UnsupportedSchema

STRICT = {"lenient": False}  # unsupported keywords are refused
JSON_RULE = "%json "  # starts a rule that is a JSON schema, in grammars written by the server
# White space in JSON, unless a request sets its own: a weak model could fill its answer with it.
SPACES = r" |\n[ \t]{0,32}"


def build_body(structure: Mapping[str, Any], is_servers: bool = False) -> dict[str, Any]:
    """Compile a checked `structured_outputs`.

    Args:
        is_servers: The grammar is Lark that the server itself wrote.
    """
    if "regex" in structure:
        lark = json.loads(LLMatcher.grammar_from_regex(structure["regex"]))["grammars"][0][
            "lark_grammar"
        ]
        return {"lark_grammar": lark}
    if "grammar" in structure:
        text = structure["grammar"]
        try:
            if is_servers:
                return {"lark_grammar": "\n".join(map(with_schema, text.split("\n")))}
            return {"lark_grammar": to_lark(text) if is_gbnf(text) else text}
        except GrammarError as error:
            raise RequestError(f"{FIELD}.grammar", f"{error}") from None
    if "structural_tag" in structure:
        tags = [
            StructTag(trigger=trigger, begin=begin, grammar=strict(schema), end=end)
            for trigger, begin, schema, end in json.loads(structure["structural_tag"])
        ]
        return {"lark_grammar": StructTag.to_grammar(tags, assume_special=False)}
    if "choice" in structure:  # a terminal: one automaton for all choices
        return {
            "lark_grammar": "start: ANY\nANY: " + " | ".join(map(json.dumps, structure["choice"]))
        }
    schema = json.loads(structure["json"]) if "json" in structure else {"type": "object"}
    spacing = (
        {"whitespace_pattern": structure["whitespace_pattern"]}
        if "whitespace_pattern" in structure
        else {}
    )
    if "disable_any_whitespace" in structure:
        spacing = {"whitespace_flexible": False}
    return {"json_schema": strict(schema, spacing)}


def strict(
    schema: dict[str, Any], spacing: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Rewrite a schema for the compiler, with `spacing` or the white space set in the schema."""
    spacing = spacing or schema.get("x-guidance") or {"whitespace_pattern": SPACES}
    try:
        rewritten = rewrite_schema(
            {name: value for name, value in schema.items() if name != "x-guidance"}
        )
    except UnsupportedSchema as error:
        raise RequestError(FIELD, f"{error}") from None
    return rewritten | {"x-guidance": {**STRICT, **spacing}}


def with_schema(line: str) -> str:
    """Rewrite the JSON schema in a line of a grammar that the server wrote, if it is one."""
    name, _, rule = line.partition(": ")
    if not rule.startswith(JSON_RULE):
        return line
    return (
        f"{name}: "
        f"{JSON_RULE}{json.dumps(strict(json.loads(rule.removeprefix(JSON_RULE))), ensure_ascii=False)}"
    )
