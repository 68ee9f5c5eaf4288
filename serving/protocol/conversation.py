"""A conversation as chat templates take it, put together from the items and blocks of a protocol."""

from collections.abc import Mapping
from typing import Any

from ..api.errors import RequestError
from ..api.validation import shown, unicode_text


class Conversation:
    """Messages in their order. What an assistant says, thinks and calls in one turn is one message."""

    def __init__(self):
        self.messages: list[dict[str, Any]] = []
        self.called: dict[str, str] = {}  # the function that was called, by the id of the call

    @property
    def role(self) -> str | None:
        """Who spoke last."""
        return self.messages[-1]["role"] if self.messages else None

    def say(self, role: str, text: str) -> None:
        """A message of its own. System messages at the start become one: there are templates that take no second."""
        if role == "system" and [message["role"] for message in self.messages] == ["system"]:
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def turn(self) -> dict[str, Any]:
        """The assistant's message that goes on, or a new one."""
        if self.role != "assistant":
            self.say("assistant", "")
        return self.messages[-1]

    def think(self, text: str) -> None:
        if text:
            turn = self.turn()
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, name: str, call_id: str, arguments: Mapping[str, Any]) -> None:
        function = {"name": name, "arguments": dict(arguments)}
        self.turn().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self.called[call_id] = name

    def result(self, where: str, call_id: Any, text: str) -> None:
        """What a call came to; `where` is the field that names the call."""
        name = self.called.get(unicode_text(where, call_id))
        if name is None:
            raise RequestError(where, f"must be the id of a call that stands before it, got {shown(call_id)}")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text, "name": name})
