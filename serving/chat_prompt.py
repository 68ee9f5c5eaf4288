"""Rendering of conversations to prompts, for the server and for Python."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..model.text.chat_template import PromptError
from ..model.text.tokenizer import Tokenizer
from .api.errors import RequestError

# Marks the end of the last message: private-use characters, and a space that templates trim.
MARK = "\ue000\ue001"
SPACE = " "


def template_source(tokenizer: Tokenizer, tools: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return the template of a conversation: the request's, or the model's."""
    return options.get("chat_template") or tokenizer.template_for(tools) or ""


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    options: Mapping[str, Any],
) -> str:
    """Return the prompt of messages, tools and options that `protocol` has checked."""
    variables = dict(options)
    continues = variables.pop("continue_final_message", False)
    if tools:
        if "tools" not in template_source(tokenizer, tools, options):
            raise RequestError(
                "tools", "cannot be told to this model: its chat template has no place for them"
            )
        variables["tools"] = tools
    last = messages[-1]
    final_text = last.get("content", "")
    if continues and not isinstance(final_text, str):
        raise RequestError("continue_final_message", "cannot continue a message with images")
    if continues:
        messages = [*messages[:-1], {**last, "content": final_text + MARK + SPACE}]
    try:
        text = tokenizer.apply_chat_template(messages, **variables)
    except PromptError as error:
        raise RequestError("messages", str(error)) from None
    return cut_at_mark(text, final_text.strip()) if continues else text


def cut_at_mark(text: str, last: str) -> str:
    """Return the prompt up to the end of its last message, which the answer continues."""
    prompt, mark, after_mark = text.rpartition(MARK)
    if not mark or not last or last not in prompt:
        raise RequestError(
            "continue_final_message",
            "cannot be done: the chat template does not show the last message",
        )
    return prompt if after_mark.startswith(SPACE) else prompt.rstrip()
