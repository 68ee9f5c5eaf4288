"""Anthropic's `context_management`: what is left out of a long conversation before the model reads it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.validation import INT32_MAX, boolean, integer, strings
from .objects import listed, plain, typed

TOOLS, THOUGHTS = "clear_tool_uses_20250919", "clear_thinking_20251015"
EDITS = {TOOLS: ("trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs"), THOUGHTS: ("keep",)}
TRIGGERS = {"input_tokens": ("value",), "tool_uses": ("value",)}
MAX_EDITS = 16
CLEARED = "[This result was cleared to save context.]"
Messages = Sequence[dict[str, Any]]
Edited = tuple[list[dict[str, Any]], dict[str, Any]]  # the messages, and how many places changed


@dataclass(frozen=True)
class ClearTools:
    """The results of the oldest tool calls become a short text."""

    trigger: tuple[str, int] = ("input_tokens", 100_000)  # from where on
    keep: int = 3  # calls
    at_least: int = 0  # tokens, or nothing is cleared
    exclude: Sequence[str] = ()  # tools
    inputs: bool | Sequence[str] = False  # the arguments of the calls too, of all tools or of these

    def apply(self, messages: Messages, tokens: int) -> Edited:
        results = [i for i, message in enumerate(messages) if message["role"] == "tool"]
        kind, value = self.trigger
        if (tokens if kind == "input_tokens" else len(results)) < value:
            results = []
        old = [messages[i] for i in results[: max(len(results) - self.keep, 0)]]
        ids = {message["tool_call_id"] for message in old if message["name"] not in self.exclude}
        edited = [self.cleared(message, ids) for message in messages]
        return edited, {"type": TOOLS, "cleared_tool_uses": len(ids)}

    def cleared(self, message: dict[str, Any], ids: set[str]) -> dict[str, Any]:
        if message.get("tool_call_id") in ids:
            return message | {"content": CLEARED}
        if not self.inputs or "tool_calls" not in message:
            return message
        return message | {
            "tool_calls": [self.emptied(call) if call["id"] in ids else call for call in message["tool_calls"]]
        }

    def emptied(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self.inputs is not True and function["name"] not in self.inputs:  # type: ignore[operator]
            return call
        return call | {"function": function | {"arguments": {}}}


@dataclass(frozen=True)
class ClearThoughts:
    """Only the last turns keep what the model thought."""

    keep: int | None = 1  # turns; None: all

    def apply(self, messages: Messages, tokens: int) -> Edited:
        thought = [i for i, message in enumerate(messages) if message.get("reasoning_content")]
        old = set() if self.keep is None else set(thought[: max(len(thought) - self.keep, 0)])
        edited = [
            {name: value for name, value in message.items() if name != "reasoning_content"} if i in old else message
            for i, message in enumerate(messages)
        ]
        return edited, {"type": THOUGHTS, "cleared_thinking_turns": len(old)}


Edit = ClearTools | ClearThoughts


def parse_edits(value: Any) -> Sequence[Edit]:
    if value is None:
        return ()
    where = "context_management"
    given = plain(where, value, ("edits",))
    return tuple(
        parse_edit(f"{where}.edits[{i}]", edit)
        for i, edit in enumerate(listed(f"{where}.edits", given.get("edits", []), MAX_EDITS))
    )


def parse_edit(where: str, value: Any) -> Edit:
    given = typed(where, value, EDITS)
    if given["type"] == THOUGHTS:
        keep = given.get("keep", {"type": "thinking_turns", "value": 1})
        if keep == "all" or keep == {"type": "all"}:
            return ClearThoughts(None)
        return ClearThoughts(value_of(f"{where}.keep", keep, ("thinking_turns",), 1)[1])
    found: dict[str, Any] = {}
    if "trigger" in given:
        found["trigger"] = value_of(f"{where}.trigger", given["trigger"], tuple(TRIGGERS), 1)
    if "keep" in given:
        found["keep"] = value_of(f"{where}.keep", given["keep"], ("tool_uses",), 0)[1]
    if "clear_at_least" in given:
        found["at_least"] = value_of(f"{where}.clear_at_least", given["clear_at_least"], ("input_tokens",), 0)[1]
    if "exclude_tools" in given:
        found["exclude"] = strings(f"{where}.exclude_tools", given["exclude_tools"])
    if "clear_tool_inputs" in given:
        inputs, name = given["clear_tool_inputs"], f"{where}.clear_tool_inputs"
        found["inputs"] = strings(name, inputs) if isinstance(inputs, list) else boolean(name, inputs)
    return ClearTools(**found)


def value_of(where: str, value: Any, kinds: Sequence[str], least: int) -> tuple[str, int]:
    """{"type": ..., "value": ...}"""
    given = typed(where, value, dict.fromkeys(kinds, ("value",)))
    return given["type"], integer(f"{where}.value", given.get("value"), least, INT32_MAX)


def edited(
    messages: Messages, edits: Sequence[Edit], count: Callable[[Messages], int]
) -> tuple[Messages, list[dict[str, Any]]]:
    """The messages after all edits, and what each did that changed something."""
    applied, tokens = [], count(messages) if edits else 0
    for edit in edits:
        after, told = edit.apply(messages, tokens)
        if after == messages:
            continue
        left = count(after)
        if isinstance(edit, ClearTools) and tokens - left < edit.at_least:
            continue
        applied.append(told | {"cleared_input_tokens": tokens - left})
        messages, tokens = after, left
    return messages, applied


def newest(messages: Messages, fits: Callable[[Messages], bool]) -> Messages:
    """Without the oldest turns, so that the others fit; what the system says stays, and the last turn."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    turns = [i for i, message in enumerate(messages) if i > first and message["role"] == "user"]
    if fits(messages) or not turns:
        return messages
    low, high = 0, len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        if fits([*messages[:first], *messages[turns[middle] :]]):
            high = middle
        else:
            low = middle + 1
    return [*messages[:first], *messages[turns[low] :]]
