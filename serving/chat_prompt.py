"""From a conversation to the text that the model goes on from: one way for the server and for Python."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..model.text.chat_template import PromptError
from ..model.text.tokenizer import Tokenizer
from .api.errors import RequestError

# Where the last message ends: characters of no text, and a space that is gone where the template trims messages.
MARK, SPACE = "\ue000\ue001", " "


def template_source(tokenizer: Tokenizer, tools: Sequence[Any], options: Mapping[str, Any]) -> str:
    """The template of a conversation: the request's own, or the model's."""
    return options.get("chat_template") or tokenizer.template_for(tools) or ""


def render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], options: Mapping[str, Any]
) -> str:
    """The prompt of messages, tools and options that `protocol` has checked."""
    variables = dict(options)
    goes_on = variables.pop("continue_final_message", False)
    if tools:
        if "tools" not in template_source(tokenizer, tools, options):
            raise RequestError("tools", "cannot be told to this model: its chat template has no place for them")
        variables["tools"] = tools
    last = messages[-1]
    said = last.get("content", "")
    if goes_on:
        messages = [*messages[:-1], {**last, "content": said + MARK + SPACE}]
    try:
        text = tokenizer.apply_chat_template(messages, **variables)
    except PromptError as error:
        raise RequestError("messages", str(error)) from None
    return up_to_mark(text, said.strip()) if goes_on else text


def up_to_mark(text: str, last: str) -> str:
    """The prompt up to the end of what its last message says, so that the answer goes on from there."""
    prompt, mark, rest = text.rpartition(MARK)
    if not mark or not last or last not in prompt:
        raise RequestError("continue_final_message", "cannot be done: the chat template does not show the last message")
    return prompt if rest.startswith(SPACE) else prompt.rstrip()
