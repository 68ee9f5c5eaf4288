"""Chat templates: from a conversation to the prompt that the model was trained on, in bounded time and memory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .worker import WorkerProcess

SCRIPT = Path(__file__).with_name("template_worker.py")
# Processor time. The model's own template is bounded by its steps, which are the same on a busy machine; the time only
# ends one that hangs in a step. A template that a request brings is a stranger's program.
OWN_SECONDS, REQUEST_SECONDS = 60, 1
REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's fields for it; templates read the first two


class PromptError(ValueError):
    """A text or a conversation that cannot become a prompt; the message is one line."""


class ChatTemplate:
    """A Jinja template, and the variables that all conversations share (the special tokens).

    It is rendered in a process of its own: template_worker.py says why.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        worker: WorkerProcess | None = None,
        seconds: int = OWN_SECONDS,
    ):
        self.source, self.seconds = source, seconds
        self.variables = dict(variables or {})
        self.worker = worker or WorkerProcess(SCRIPT)

    def render(self, messages: Sequence[Any], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt of a conversation; `variables` (tools, enable_thinking, ...) are the template's own."""
        read = [_as_templates_read(message) for message in messages]
        answer = self._rendered(read, add_generation_prompt, variables)
        if "error" in answer:
            # Some templates add to the content of every message, and some put the arguments of calls into
            # a text as they are, and so take no objects.
            filled = _with_contents(read)
            tried = [read]
            for attempt in (filled, _with_written_arguments(read), _with_written_arguments(filled)):
                if "error" in answer and attempt not in tried:
                    tried.append(attempt)
                    other = self._rendered(attempt, add_generation_prompt, variables)
                    answer = answer if "error" in other else other
        if "error" in answer:
            raise PromptError(f"chat template: {answer['error']}")
        return answer["text"]

    def _rendered(
        self, messages: list[Any], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The text of the prompt, or why there is none."""
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
            raise PromptError(f"chat template: the conversation must be plain JSON: {error}") from None
        answer = self.worker.ask(request)
        return {"error": "the template was stopped: it used too much time or memory"} if answer is None else answer


def _as_templates_read(message: Any) -> Any:
    """A message as transformers gives it to templates.

    Fields that are None are left out, and the reasoning has each name that templates read.
    """
    if not isinstance(message, Mapping):
        return message
    given = {name: value for name, value in message.items() if value is not None}
    thought = next((given[name] for name in REASONING if name in given), None)
    return given if thought is None else {"thinking": thought, **given, "reasoning_content": thought}


def _with_contents(messages: list[Any]) -> list[Any]:
    """The messages with an empty content where an assistant said nothing beside its calls."""
    return [
        {"content": "", **message} if isinstance(message, Mapping) and message.get("role") == "assistant" else message
        for message in messages
    ]


def _with_written_arguments(messages: list[Any]) -> list[Any]:
    """The messages with the arguments of calls as JSON text."""

    def written(call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), Mapping):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
        if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]
