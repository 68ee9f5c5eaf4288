"""`quire run`: chat with a model, or answer one prompt."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as o
from .chat import MAX_TOKENS, ChatTemplate, converse


@o.takes_engine(excluded=("max_num_seqs", "max_num_batched_tokens"))
@o.takes_sampling(MAX_TOKENS, excluded=("presence_penalty", "frequency_penalty"))
def main(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model folder or Hugging Face model ID; quill is the bundled model.",
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Prompt to answer; without one, chat."),
    ] = None,
    system: Annotated[str | None, o.option("System message.", o.OUTPUT)] = None,
    image: o.Images = None,
    chat_template: ChatTemplate = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Chat with a model like `quire chat`. With a prompt as argument or on stdin, print one answer
    and exit.

    If both are given, the text from stdin comes before the prompt.
    """
    texts = [" ".join(prompt)] if prompt else []
    if not sys.stdin.isatty():
        texts.insert(0, o.read_text(Path("-")))
    question = "\n\n".join(text.strip() for text in texts if text.strip())
    if not question and (texts or not sys.stdin.isatty()):
        raise o.UsageError(
            "no prompt: give one after the model or pipe it in; at a terminal there is a "
            "conversation"
        )
    if image and not question:
        raise o.UsageError("--image needs a prompt; in a conversation there is /image FILE")
    converse(
        model,
        system,
        sampling,
        engine,
        question or None,
        chat_template=chat_template,
        image_files=image or (),
    )
