"""`quire chat`: chat with a model in a terminal, or through a pipe with one message per line."""

import base64
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from . import options as o
from .command import paint
from .generate import Timing
from .loading import load
from .terminal import FENCE, MessageReader, PlainAnswer, RenderedAnswer

MAX_TOKENS = 512
HELP = """\
/reset starts a new conversation, /save FILE saves it for --resume FILE, /exit or Ctrl-D quits
/image FILE puts an image before the next message
Ctrl-C stops an answer; pressed twice, it quits
Alt-Enter inserts a newline; pasted text is one message, as is everything between two \"\"\""""
TAUGHT = """\
It is a very small model for trying things out: stories, sums, sorted lists, small JSON.
It cannot hold a conversation: /reset before the next question."""  # about the bundled model


ChatTemplate = Annotated[
    Path | None,
    o.option("Chat template file (Jinja) that replaces the model's own.", o.OUTPUT, "FILE"),
]


@o.takes_engine(excluded=("max_num_seqs", "max_num_batched_tokens"))
@o.takes_sampling(MAX_TOKENS, excluded=("presence_penalty", "frequency_penalty"))
def main(
    model: o.Model = None,
    system: Annotated[str | None, o.option("System message.", o.OUTPUT)] = None,
    resume: Annotated[
        Path | None, o.option("Continue a conversation that /save wrote.", o.OUTPUT, "FILE")
    ] = None,
    chat_template: ChatTemplate = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Chat with a model. /reset starts a new conversation, /save FILE saves it, /exit quits, Ctrl-C
    stops an answer.

    Pasted text is one message, as is everything between two \"\"\".
    """
    converse(model, system, sampling, engine, None, resume, chat_template)


def converse(
    model: str | None,
    system: str | None,
    sampling: dict[str, Any],
    engine: dict[str, Any],
    question: str | None = None,
    resume: Path | None = None,
    chat_template: Path | None = None,
    image_files: Sequence[Path] = (),
) -> None:
    """Run a conversation, or answer one question."""
    opening = () if system is None else ({"role": "system", "content": system},)
    template = None if chat_template is None else o.read_text(chat_template)
    messages = opening if resume is None else read_conversation(resume, system)
    images = [image_part(o.read_bytes(path)) for path in image_files]
    from .. import SamplingParams  # not at the top: `--help` must not wait for it

    defaults: dict[str, Any] = {"max_tokens": MAX_TOKENS}
    params = SamplingParams(**defaults | sampling)
    name = model or "quill"
    with load(model, max_num_seqs=1, seed=fresh_seed(), **engine) as llm:
        # Imports JAX, so it waits for `load`, where Ctrl-C works.
        from ..serving.defaults import with_defaults

        if template is not None:
            llm.get_tokenizer().adopt(template)
        if llm.get_tokenizer().chat_template is None:
            raise o.UsageError(
                f"{name} has no chat template, so it was not made for conversations: `quire "
                "generate` continues a text; --chat-template FILE gives it a template"
            )
        params = with_defaults(params, sampling, llm.engine.chat_defaults)
        if images and not llm.reads_images:
            raise o.UsageError("--image is given, and the model reads text only")
        if question is not None:
            if answer_message(llm, params, opening, question, images) == opening:
                raise typer.Exit(1)
            return
        if sys.stdin.isatty():
            greeting = f"{TAUGHT}\n{HELP}" if name == "quill" else HELP
            if llm.engine.chat_defaults != llm.engine.defaults:
                greeting += (
                    f"\nthe model recommends no sampling: {describe_sampling(params)}, as "
                    "llama.cpp has it"
                )
            if resume is not None:
                greeting += f"\ngoing on with the {len(messages)} messages of {resume}"
            print(f"{paint(name, sys.stdout, bold=True)}\n{paint(greeting, sys.stdout, dim=True)}")
        saved_as = resume
        for message in join_fenced_lines(read_lines()):
            match message.split():
                case []:
                    continue
                case ["/exit"]:
                    break
                case ["/reset"]:
                    messages = opening
                    images = []
                case ["/image", _, *_] if "\n" not in message:
                    path = Path(message.split(maxsplit=1)[1].strip()).expanduser()
                    if part := read_image(llm, path):
                        images.append(part)
                case ["/save", *words] if "\n" not in message and (words or saved_as):
                    path = Path(" ".join(words)).expanduser() if words else saved_as
                    assert path is not None
                    saved_as = save(path, name, messages, overwrite=path == saved_as) or saved_as
                case ["/help"]:
                    print(HELP)
                case [command] if command.startswith("/"):
                    print_error(
                        f"no command {command}; there is /reset, /save FILE, /image FILE, /exit "
                        "and /help"
                    )
                case _:
                    answered = answer_message(llm, params, messages, message, images)
                    if answered != messages:
                        images = []
                    elif images:
                        print_error("the images stay attached; /reset drops them")
                    messages = answered


def image_part(file: bytes) -> dict[str, Any]:
    """The content part of an image, as JSON that /save can write."""
    url = f"data:application/octet-stream;base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def read_image(llm, path: Path) -> dict[str, Any] | None:
    """The content part of an image file; None, after printing the error, if that fails."""
    if not llm.reads_images:
        print_error("the model reads text only")
        return None
    try:
        part = image_part(path.read_bytes())
    except OSError as error:
        print_error(f"{path} cannot be read: {error.strerror}")
        return None
    print(paint(f"{path} goes before the next message", sys.stdout, dim=True))
    return part


def fresh_seed() -> int:
    """A random default seed: answers differ from run to run unless `--seed` is set."""
    return int.from_bytes(os.urandom(7))


def describe_sampling(params) -> str:
    """The sampling parameters in words."""
    return f"temperature {params.temperature:g}, top-k {params.top_k}, top-p {params.top_p:g}"


def print_error(text: str) -> None:
    print(paint(f"error: {text}", sys.stderr, fg="red"), file=sys.stderr)


def join_fenced_lines(lines: Iterable[str]) -> Iterator[str]:
    """Group lines into messages: one line each, or all lines between two fences."""
    fenced_lines: list[str] | None = None  # the lines after an opening fence
    for line in lines:
        if fenced_lines is None:
            if not line.lstrip().startswith(FENCE):
                yield line
                continue
            fenced_lines = []
            line = line.lstrip().removeprefix(FENCE)
        fenced_lines.append(
            line.rstrip().removesuffix(FENCE) if (closed := line.rstrip().endswith(FENCE)) else line
        )
        if closed:
            yield "\n".join(fenced_lines).strip("\n")
            fenced_lines = None
    if fenced_lines is not None:
        yield "\n".join(fenced_lines).strip("\n")


def read_lines() -> Iterator[str]:
    """Lines from stdin, or messages typed at a terminal."""
    if sys.stdin.isatty():
        yield from MessageReader().messages()
    else:
        yield from (line.rstrip("\n") for line in sys.stdin)


def save(path: Path, model: str, messages: Sequence[dict], overwrite: bool) -> Path | None:
    """Save the conversation for `--resume`. Returns the path; None, after printing the error, if
    that fails.
    """
    try:
        with path.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(
                json.dumps({"model": model, "messages": messages}, ensure_ascii=False, indent=1)
                + "\n"
            )
    except FileExistsError:
        print_error(f"{path} is there already; /save another file")
    except OSError as error:
        print_error(f"{path} cannot be written: {error.strerror}; /save another file")
    else:
        print(paint(f"{len(messages)} messages are in {path}", sys.stdout, dim=True))
        return path
    return None


def read_conversation(path: Path, system: str | None) -> tuple[dict, ...]:
    """Read and check a conversation that `save` wrote."""
    try:
        content = json.loads(o.read_text(path))
    except ValueError as error:
        raise o.UsageError(f"--resume: {path} is not JSON: {error}") from None
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list) or not all(map(is_message, messages)):
        raise o.UsageError(
            f"--resume: {path} has no conversation; it must be a file that /save has written"
        )
    has_system = bool(messages) and messages[0]["role"] == "system"
    if system is not None and has_system:
        raise o.UsageError(
            f"--system and --resume are both given, and {path} has a system message: leave "
            "--system out"
        )
    return (*(() if system is None else ({"role": "system", "content": system},)), *messages)


def is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {*value} == {"role", "content"}
        and isinstance(value["role"], str)
        and isinstance(value["content"], str | list)
    )


def answer_message(
    llm,
    params,
    messages: tuple[dict, ...],
    question: str,
    images: Sequence[dict[str, Any]] = (),
) -> tuple[dict, ...]:
    """Stream an answer. Returns the extended conversation, or the old one if the request failed."""
    from .. import RequestError

    content = [*images, {"type": "text", "text": question}] if images else question
    conversation = (*messages, {"role": "user", "content": content})
    text = ""
    began = perf_counter()
    first = 0.0
    first_tokens = 0
    result = None
    view = RenderedAnswer() if sys.stdout.isatty() else PlainAnswer()
    try:
        with (
            interruptible() as interrupted,
            closing(llm.stream(llm.chat_prompt(conversation), params)) as results,
        ):
            for result in results:
                answer = result.outputs[0].text
                written = len(result.outputs[0].token_ids)
                if written and not first_tokens:
                    first = perf_counter()
                    first_tokens = written
                view.update(answer)
                text = answer
                if interrupted.is_set():
                    break
                if result.outputs[0].finish_reason == "error":
                    view.stop()
                    print_error("the step failed; the log above says why")
                    return messages
    except RequestError as error:
        view.stop()
        print_error(f"{error}; /reset starts a new conversation")
        return messages
    finally:
        view.stop()
    view.finish()
    if sys.stdout.isatty() and result is not None:
        read = len(result.prompt_token_ids)
        written = len(result.outputs[0].token_ids)
        finished = perf_counter()
        timing = Timing(
            began,
            first or finished,
            finished,
            read,
            first_tokens,
            written,
            result.num_cached_tokens,
        )
        print(paint(timing_text(timing), sys.stdout, dim=True))
    return (*conversation, {"role": "assistant", "content": text})


def timing_text(timing: Timing) -> str:
    """One line with an answer's tokens, decode rate and time to first token."""
    rate = "" if timing.tokens_per_second is None else f", {timing.tokens_per_second:.1f} tokens/s"
    cached = f", {timing.cached_tokens} cached" if timing.cached_tokens else ""
    first = timing.first - timing.loaded
    return (
        f"[{timing.tokens} tokens{rate}; first after {first:.2f} s; {timing.prompt_tokens} "
        f"prompt tokens{cached}]"
    )


@contextmanager
def interruptible():
    """Context manager yielding an event that the first Ctrl-C sets, so that the running step can
    complete. A second Ctrl-C raises KeyboardInterrupt.
    """
    interrupted = threading.Event()

    def handle_signal(signum, frame):
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    previous_handler = signal.signal(signal.SIGINT, handle_signal)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous_handler)
