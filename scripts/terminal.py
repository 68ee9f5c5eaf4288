"""Terminal interface for conversations: message input, and answers rendered as Markdown."""

import sys
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

FENCE = '"""'
FRAME_SECONDS = 0.08  # minimum time between two renderings of a streamed answer
CODE_THEME = "ansi_dark"  # the terminal's own colours


class MessageReader:
    """Reads messages from the terminal; text pasted at once is one message, even with newlines."""

    def __init__(self):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.formatted_text import FormattedText
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()

        @keys.add("enter")
        @keys.add("c-j")  # Enter typed while an answer was being printed
        def send(event) -> None:
            text = event.current_buffer.text
            if has_open_fence(text):
                event.current_buffer.insert_text("\n")
            else:
                event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def begin_line(event) -> None:
            event.current_buffer.insert_text("\n")

        prompt = FormattedText([("ansigreen bold", "> ")])
        self.session: Any = PromptSession(
            prompt, multiline=True, key_bindings=keys, prompt_continuation="  "
        )

    def messages(self) -> Iterator[str]:
        """Yield messages until Ctrl-D. Ctrl-C clears the line and keeps the conversation."""
        while True:
            try:
                yield self.session.prompt()
            except KeyboardInterrupt:
                print("(Ctrl-D or /exit leaves)")
            except EOFError:
                return


def has_open_fence(text: str) -> bool:
    """Whether a message starts with a fence that is not closed yet."""
    stripped = text.strip()
    return stripped.startswith(FENCE) and (
        len(stripped) < 2 * len(FENCE) or not stripped.endswith(FENCE)
    )


class PlainAnswer:
    """Prints a streamed answer as plain text, for files and pipes."""

    def __init__(self):
        self.text = ""

    def update(self, text: str) -> None:
        sys.stdout.write(text[len(self.text) :])
        sys.stdout.flush()
        self.text = text

    def stop(self) -> None:
        """No-op: plain text needs no clearing."""

    def finish(self) -> None:
        print()


class RenderedAnswer:
    """Renders a streamed answer as Markdown.

    Complete blocks are printed once; the last block is redrawn as it grows.
    """

    def __init__(self, console: Any = None):
        from rich.console import Console
        from rich.live import Live

        self.console = console or Console()
        self.live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.live.start()
        self.text = ""
        self.num_printed = 0  # complete blocks printed so far
        self.next_frame = 0.0  # earliest time of the next redraw

    def update(self, text: str) -> None:
        self.text = text
        if (began := perf_counter()) < self.next_frame:
            return
        blocks = parse_blocks(text)
        self.print_blocks(blocks[:-1])
        if blocks:
            last_lines = self.lines(blocks[-1])[-max(1, self.console.height - 2) :]
            self.live.update(join_lines(last_lines), refresh=True)
        self.next_frame = perf_counter() + max(FRAME_SECONDS, 10 * (perf_counter() - began))

    def stop(self) -> None:
        """Clear the last block from the terminal."""
        self.live.stop()

    def finish(self) -> None:
        self.print_blocks(parse_blocks(self.text))

    def print_blocks(self, blocks: Sequence[Any]) -> None:
        """Print complete blocks that are not printed yet, above the last one."""
        for block in blocks[self.num_printed :]:
            if self.num_printed:
                self.console.print()
            self.console.print(join_lines([*self.lines(block), []]))
            self.num_printed += 1

    def lines(self, block: list[Any]) -> list[list[Any]]:
        """The rendered lines of a block, without rich's padding."""
        rendered = self.console.render_lines(markdown(block), pad=False)
        return [without_trailing_spaces(line) for line in rendered]


def join_lines(lines: list[list[Any]]) -> Any:
    """Join lines of rich segments with newlines, for printing."""
    from rich.segment import Segment, Segments

    segments = [segment for line in lines for segment in (Segment.line(), *line)]
    return Segments(segments[1:])


def without_trailing_spaces(line: list[Any]) -> list[Any]:
    segments = list(line)
    while segments and not segments[-1].text.strip():
        segments.pop()
    return (
        [*segments[:-1], segments[-1]._replace(text=segments[-1].text.rstrip())] if segments else []
    )


def parse_blocks(text: str) -> list[list[Any]]:
    """The parser tokens of each Markdown block; HTML is plain text, and line breaks are kept."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    blocks: list[list[Any]] = [[]]
    for token in parser.parse(text):
        blocks[-1].append(token)
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
        if token.level == 0 and token.nesting <= 0:
            blocks.append([])
    return [block for block in blocks if block]


def markdown(tokens: list[Any]) -> Any:
    """A rich renderable for the parser tokens of one block."""
    from rich.markdown import Markdown

    rendered = Markdown("", code_theme=CODE_THEME, hyperlinks=False)
    rendered.parsed = tokens
    return rendered
