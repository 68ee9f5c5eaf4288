"""From a form of answers as a request describes it to a grammar of llguidance. Runs in the worker process."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from llguidance import LLMatcher, StructTag

from ..api.errors import RequestError
from ..api.structured import FIELD
from .gbnf import GrammarError, is_gbnf
from .json_schema import rewritten
from .lark import to_lark
from .schema_document import Refused

STRICT = {"lenient": False}  # what is not understood is refused
# Between the parts of JSON, unless a request says otherwise: a weak model would fill its answer with what has no end.
JSON_RULE = "%json "  # how a rule begins that is a JSON schema, in grammars of the server
SPACES = r" |\n[ \t]{0,32}"


def body_of(structure: Mapping[str, Any], is_servers: bool = False) -> dict[str, Any]:
    """A checked `structured_outputs` as a grammar of the library.

    `is_servers`: its grammar is Lark that the server wrote itself.
    """
    if "regex" in structure:
        lark = json.loads(LLMatcher.grammar_from_regex(structure["regex"]))["grammars"][0]["lark_grammar"]
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
    if "choice" in structure:  # a terminal: one automaton for all
        return {"lark_grammar": "start: ANY\nANY: " + " | ".join(map(json.dumps, structure["choice"]))}
    schema = json.loads(structure["json"]) if "json" in structure else {"type": "object"}
    spacing = {"whitespace_pattern": structure["whitespace_pattern"]} if "whitespace_pattern" in structure else {}
    if "disable_any_whitespace" in structure:
        spacing = {"whitespace_flexible": False}
    return {"json_schema": strict(schema, spacing)}


def strict(schema: dict[str, Any], spacing: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """A schema for the compiler, with the spaces that were asked for, here or in the schema itself."""
    spacing = spacing or schema.get("x-guidance") or {"whitespace_pattern": SPACES}
    try:
        found = rewritten({name: value for name, value in schema.items() if name != "x-guidance"})
    except Refused as error:
        raise RequestError(FIELD, f"{error}") from None
    return found | {"x-guidance": {**STRICT, **spacing}}


def with_schema(line: str) -> str:
    """A line of a grammar that the server wrote, whose JSON schema, if it is one, is rewritten for the compiler."""
    name, _, rule = line.partition(": ")
    if not rule.startswith(JSON_RULE):
        return line
    return f"{name}: {JSON_RULE}{json.dumps(strict(json.loads(rule.removeprefix(JSON_RULE))), ensure_ascii=False)}"
