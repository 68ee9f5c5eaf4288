"""`quire chat`: chat with a model in a terminal, or through a pipe, one message a line."""

import signal
import sys
import threading
from contextlib import closing, contextmanager, suppress
from typing import Annotated, Any

from . import options as o
from .loading import load

HELP = "/reset forgets the conversation, /exit leaves (so does Ctrl-D); Ctrl-C stops an answer, twice leaves"


@o.takes_engine(without=("max_num_seqs", "max_num_batched_tokens"))
@o.takes_sampling(without=("presence_penalty", "frequency_penalty"), max_tokens=512)
def main(
    model: o.Model = None,
    system: Annotated[str | None, o.option("System message: how to answer.", o.OUTPUT)] = None,
    *,
    sampling: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Chat with a model. /reset forgets the conversation, /exit leaves, Ctrl-C stops an answer."""
    from .. import SamplingParams  # not at the top: `--help` must not wait for it

    params = SamplingParams(**sampling)
    with load(model, max_num_seqs=1, **engine) as llm:
        if sys.stdin.isatty():
            print(HELP)
        opening = () if system is None else ({"role": "system", "content": system},)
        messages = opening
        for line in lines():
            match line.split():
                case []:
                    continue
                case ["/exit"]:
                    break
                case ["/reset"]:
                    messages = opening
                case ["/help"]:
                    print(HELP)
                case [command] if command.startswith("/"):
                    print(f"error: no command {command}: {HELP}", file=sys.stderr)
                case _:
                    messages = turn(llm, params, messages, line)


def lines():
    """The lines of stdin; in a terminal with editing and history."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):  # a Python that was built without it still reads lines
        import readline  # noqa: F401  # imported for its effect on input()
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def turn(llm, params, messages: tuple[dict, ...], question: str) -> tuple[dict, ...]:
    """Print the answer as it is generated and return the longer conversation; the old one where it was refused."""
    from .. import RequestError

    asked = (*messages, {"role": "user", "content": question})
    text = ""
    try:
        with interruptible() as interrupted, closing(llm.stream(llm.chat_prompt(asked), params)) as results:
            for result in results:
                answer = result.outputs[0].text
                sys.stdout.write(answer[len(text) :])
                sys.stdout.flush()
                text = answer
                if interrupted.is_set():
                    break
                if result.outputs[0].finish_reason == "error":
                    print("error: the step failed; the log above says why", file=sys.stderr)
                    return messages
    except RequestError as error:
        print(f"error: {error}; /reset starts a new conversation", file=sys.stderr)
        return messages
    print()
    return (*asked, {"role": "assistant", "content": text})


@contextmanager
def interruptible():
    """Yields a flag that the first Ctrl-C sets, so that the step under way ends whole; the second interrupts."""
    flag = threading.Event()

    def note(signum, frame):
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
