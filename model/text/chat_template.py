"""Render chat templates: from a conversation to a prompt, in bounded time and memory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .worker import WorkerProcess

SCRIPT = Path(__file__).with_name("template_worker.py")
# Limits of processor time. The model's own template is limited by its steps, which do not depend on
# the machine's load; the time limit only ends one that hangs. Templates in requests are untrusted.
OWN_SECONDS = 60
REQUEST_SECONDS = 1
REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message for its reasoning


class PromptError(ValueError):
    """A text or conversation that cannot become a prompt; the message is one line."""


class ChatTemplate:
    """A Jinja template, and the variables (special tokens) that all conversations share.

    It is rendered in a separate process, for the reasons in template_worker.py.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        worker: WorkerProcess | None = None,
        seconds: int = OWN_SECONDS,
    ):
        self.source = source
        self.seconds = seconds
        self.variables = dict(variables or {})
        self.worker = worker or WorkerProcess(SCRIPT)

    def render(
        self, messages: Sequence[Any], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Render a conversation; `variables` (tools, enable_thinking, ...) go to the template."""
        normalised = [_normalise_message(message) for message in messages]
        answer = self._rendered(normalised, add_generation_prompt, variables)
        if "error" in answer:
            # Some templates concatenate the content of every message, and some concatenate the
            # arguments of calls: retry with empty contents and with arguments as text.
            filled = _add_empty_contents(normalised)
            tried = [normalised]
            for attempt in (filled, _serialise_arguments(normalised), _serialise_arguments(filled)):
                if "error" in answer and attempt not in tried:
                    tried.append(attempt)
                    retried = self._rendered(attempt, add_generation_prompt, variables)
                    answer = answer if "error" in retried else retried
        if "error" in answer:
            raise PromptError(f"chat template: {answer['error']}")
        return answer["text"]

    def _rendered(
        self, messages: list[Any], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> dict[str, Any]:
        """{"text": prompt} or {"error": reason}."""
        context = {
            "tools": None,
            "documents": None,
            **self.variables,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps([self.source, context, self.seconds], ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(
                f"chat template: the conversation must be plain JSON: {error}"
            ) from None
        answer = self.worker.ask(request)
        return (
            {"error": "the template was stopped: it used too much time or memory"}
            if answer is None
            else answer
        )


def _normalise_message(message: Any) -> Any:
    """A message as transformers passes it to templates.

    None fields are removed, and the reasoning is copied to each name that templates use.
    """
    if not isinstance(message, Mapping):
        return message
    fields = {name: value for name, value in message.items() if value is not None}
    thought = next((fields[name] for name in REASONING if name in fields), None)
    return (
        fields if thought is None else {"thinking": thought, **fields, "reasoning_content": thought}
    )


def _add_empty_contents(messages: list[Any]) -> list[Any]:
    """Add an empty content to assistant messages that only have calls."""
    return [
        {"content": "", **message}
        if isinstance(message, Mapping) and message.get("role") == "assistant"
        else message
        for message in messages
    ]


def _serialise_arguments(messages: list[Any]) -> list[Any]:
    """Serialise the arguments of calls as JSON text."""

    def written(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
            return call
        return {
            **call,
            "function": {
                **function,
                "arguments": json.dumps(function["arguments"], ensure_ascii=False),
            },
        }

    return [
        {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
        if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]
