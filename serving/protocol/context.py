"""Anthropic's `context_management`: shortens a long conversation before the model reads it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..api.validation import INT32_MAX, boolean, integer, strings
from .objects import parse_list, parse_object, parse_typed_object

TOOLS = "clear_tool_uses_20250919"
THOUGHTS = "clear_thinking_20251015"
EDITS = {
    TOOLS: ("trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs"),
    THOUGHTS: ("keep",),
}
TRIGGERS = {"input_tokens": ("value",), "tool_uses": ("value",)}
MAX_EDITS = 16
CLEARED = "[This result was cleared to save context.]"
Messages = Sequence[dict[str, Any]]
Edited = tuple[list[dict[str, Any]], dict[str, Any]]  # the messages, and a report of the changes


@dataclass(frozen=True)
class ClearTools:
    """Replaces the results of the oldest tool calls by a short text."""

    trigger: tuple[str, int] = ("input_tokens", 100_000)  # clears when the prompt is so long
    keep: int = 3  # newest results that stay
    at_least: int = 0  # tokens; if less can be cleared, nothing is
    exclude: Sequence[str] = ()  # tools whose results stay
    inputs: bool | Sequence[str] = False  # clear the calls' arguments too, of all or of these tools

    def apply(self, messages: Messages, tokens: int) -> Edited:
        results = [i for i, message in enumerate(messages) if message["role"] == "tool"]
        kind, value = self.trigger
        if (tokens if kind == "input_tokens" else len(results)) < value:
            results = []
        cleared_results = [messages[i] for i in results[: max(len(results) - self.keep, 0)]]
        ids = {
            message["tool_call_id"]
            for message in cleared_results
            if message["name"] not in self.exclude
        }
        edited_messages = [self.clear_result(message, ids) for message in messages]
        return edited_messages, {"type": TOOLS, "cleared_tool_uses": len(ids)}

    def clear_result(self, message: dict[str, Any], ids: set[str]) -> dict[str, Any]:
        if message.get("tool_call_id") in ids:
            return message | {"content": CLEARED}
        if not self.inputs or "tool_calls" not in message:
            return message
        return message | {
            "tool_calls": [
                self.without_arguments(call) if call["id"] in ids else call
                for call in message["tool_calls"]
            ]
        }

    def without_arguments(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self.inputs is not True and function["name"] not in self.inputs:  # type: ignore[operator]
            return call
        return call | {"function": function | {"arguments": {}}}


@dataclass(frozen=True)
class ClearThoughts:
    """Drops the model's reasoning except in the last turns."""

    keep: int | None = 1  # turns; None: all

    def apply(self, messages: Messages, tokens: int) -> Edited:
        thinking_indices = [
            i for i, message in enumerate(messages) if message.get("reasoning_content")
        ]
        cleared_indices = (
            set()
            if self.keep is None
            else set(thinking_indices[: max(len(thinking_indices) - self.keep, 0)])
        )
        edited_messages = [
            {name: value for name, value in message.items() if name != "reasoning_content"}
            if i in cleared_indices
            else message
            for i, message in enumerate(messages)
        ]
        return edited_messages, {"type": THOUGHTS, "cleared_thinking_turns": len(cleared_indices)}


Edit = ClearTools | ClearThoughts


def parse_edits(value: Any) -> Sequence[Edit]:
    if value is None:
        return ()
    param = "context_management"
    fields = parse_object(param, value, ("edits",))
    return tuple(
        parse_edit(f"{param}.edits[{i}]", edit)
        for i, edit in enumerate(parse_list(f"{param}.edits", fields.get("edits", []), MAX_EDITS))
    )


def parse_edit(param: str, value: Any) -> Edit:
    fields = parse_typed_object(param, value, EDITS)
    if fields["type"] == THOUGHTS:
        keep = fields.get("keep", {"type": "thinking_turns", "value": 1})
        if keep == "all" or keep == {"type": "all"}:
            return ClearThoughts(None)
        return ClearThoughts(parse_typed_value(f"{param}.keep", keep, ("thinking_turns",), 1)[1])
    options: dict[str, Any] = {}
    if "trigger" in fields:
        options["trigger"] = parse_typed_value(
            f"{param}.trigger", fields["trigger"], tuple(TRIGGERS), 1
        )
    if "keep" in fields:
        options["keep"] = parse_typed_value(f"{param}.keep", fields["keep"], ("tool_uses",), 0)[1]
    if "clear_at_least" in fields:
        options["at_least"] = parse_typed_value(
            f"{param}.clear_at_least", fields["clear_at_least"], ("input_tokens",), 0
        )[1]
    if "exclude_tools" in fields:
        options["exclude"] = strings(f"{param}.exclude_tools", fields["exclude_tools"])
    if "clear_tool_inputs" in fields:
        inputs = fields["clear_tool_inputs"]
        name = f"{param}.clear_tool_inputs"
        options["inputs"] = (
            strings(name, inputs) if isinstance(inputs, list) else boolean(name, inputs)
        )
    return ClearTools(**options)


def parse_typed_value(param: str, value: Any, kinds: Sequence[str], least: int) -> tuple[str, int]:
    """{"type": ..., "value": ...}"""
    fields = parse_typed_object(param, value, dict.fromkeys(kinds, ("value",)))
    return fields["type"], integer(f"{param}.value", fields.get("value"), least, INT32_MAX)


def edit_messages(
    messages: Messages, edits: Sequence[Edit], count: Callable[[Messages], int]
) -> tuple[Messages, list[dict[str, Any]]]:
    """Apply edits in order; returns the messages, and a report of each edit that changed them.

    `count` returns the number of prompt tokens of messages.
    """
    applied = []
    num_tokens = count(messages) if edits else 0
    for edit in edits:
        edited, report = edit.apply(messages, num_tokens)
        if edited == messages:
            continue
        num_left = count(edited)
        if isinstance(edit, ClearTools) and num_tokens - num_left < edit.at_least:
            continue
        applied.append(report | {"cleared_input_tokens": num_tokens - num_left})
        messages = edited
        num_tokens = num_left
    return messages, applied


def drop_oldest_turns(messages: Messages, fits: Callable[[Messages], bool]) -> Messages:
    """Drop as few of the oldest turns as possible so that the others fit.

    System messages at the start and the last turn always stay.
    """
    first = next(
        (i for i, message in enumerate(messages) if message["role"] != "system"), len(messages)
    )
    turns = [i for i, message in enumerate(messages) if i > first and message["role"] == "user"]
    if fits(messages) or not turns:
        return messages
    low = 0
    high = len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        if fits([*messages[:first], *messages[turns[middle] :]]):
            high = middle
        else:
            low = middle + 1
    return [*messages[:first], *messages[turns[low] :]]
