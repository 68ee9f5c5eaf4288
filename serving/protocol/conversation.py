"""Builds the messages of a conversation, for chat templates, from a protocol's items and blocks."""

from collections.abc import Mapping
from typing import Any

from ..api.content import Content, parts_of
from ..api.errors import RequestError
from ..api.validation import shown, unicode_text


class Conversation:
    """The messages in order.

    An assistant's text, reasoning and calls of one turn are one message.
    """

    def __init__(self):
        self.messages: list[dict[str, Any]] = []
        self.called: dict[str, str] = {}  # function names by call id

    @property
    def role(self) -> str | None:
        """The role of the last message."""
        return self.messages[-1]["role"] if self.messages else None

    def add_message(self, role: str, content: Content) -> None:
        """Add a message.

        System messages at the start are joined, since some templates take only one.
        """
        if role == "system" and [message["role"] for message in self.messages] == ["system"]:
            self.messages[0]["content"] += f"\n\n{content}"
        else:
            self.messages.append({"role": role, "content": content})

    def add_user_part(self, part: dict[str, Any]) -> None:
        """Add a text or an image to the user's message at the end, or to a new one."""
        if self.role != "user":
            self.add_message("user", part["text"] if part["type"] == "text" else [part])
            return
        content = self.messages[-1]["content"]
        if isinstance(content, str) and part["type"] == "text":
            self.messages[-1]["content"] = f"{content}\n{part['text']}"
        else:
            self.messages[-1]["content"] = [*parts_of(content), part]

    def assistant_message(self) -> dict[str, Any]:
        """The assistant's message at the end, or a new one."""
        if self.role != "assistant":
            self.add_message("assistant", "")
        return self.messages[-1]

    def add_reasoning(self, text: str) -> None:
        if text:
            turn = self.assistant_message()
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def add_call(self, name: str, call_id: str, arguments: Mapping[str, Any]) -> None:
        function = {"name": name, "arguments": dict(arguments)}
        self.assistant_message().setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": function}
        )
        self.called[call_id] = name

    def add_result(self, param: str, call_id: Any, content: Content) -> None:
        """Add the result of a tool call; `param` is the field with its id."""
        name = self.called.get(unicode_text(param, call_id))
        if name is None:
            raise RequestError(
                param, f"must be the id of a call that stands before it, got {shown(call_id)}"
            )
        self.messages.append(
            {"role": "tool", "tool_call_id": call_id, "content": content, "name": name}
        )
