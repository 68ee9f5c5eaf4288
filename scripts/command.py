"""Command-line parsing and `--help`; accepts options of other inference engines."""

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from ..serving.api.other_engines import MEANING, NO_EFFECT, SHORT, VALUES, is_switch
from ..serving.api.vllm_names import ENGINE, UnsupportedArgument

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
METAVARS = {"int": "N", "float": "NUMBER", "str": "TEXT"}  # by type, for options without a metavar
NAME_COLUMNS = 30  # width for option names in `--help`; longer names get a line of their own
# Commands with one of these parameters have a counterpart in vLLM and accept its no-op options.
VLLM_PARAMETERS = {"max_model_len", "num_prompts"}
MODEL_PARAMETERS = ("model", "models")  # positional here, an option in other engines
MODEL_OPTIONS = ("--model", "-m")
MIN_SIMILARITY = 0.6  # of a mistyped word to the suggested one


class UsageError(typer.TyperException):
    """An invalid command line."""

    exit_code = 2


def paint(text: str, stream: TextIO, **style: Any) -> str:
    """Style text if the stream is a terminal and NO_COLOR is not set."""
    return (
        typer.style(text, **style) if stream.isatty() and not os.environ.get("NO_COLOR") else text
    )


class Command(TyperCommand):
    """A command that never truncates names in `--help` and accepts options of other engines."""

    def __init__(self, *arguments, context_settings: dict[str, Any] | None = None, **attributes):
        super().__init__(
            *arguments, context_settings=SETTINGS | (context_settings or {}), **attributes
        )

    def format_help(self, ctx, formatter) -> None:
        write_help(self, ctx, formatter)

    def parse_args(self, ctx, args):
        names = {
            name: option
            for option in self.get_params(ctx)
            for name in (*option.opts, *option.secondary_opts)
        }
        takes_model = any(
            param.param_type_name == "argument" and param.name in MODEL_PARAMETERS
            for param in self.params
        )
        arguments = []
        ignored = []
        words = iter(args)
        for word in words:
            if word == "--" or not re.match(r"--?[A-Za-z]", word):
                arguments += [word, *(words if word == "--" else ())]
                continue
            name, values, value = word.partition("=")
            name = name.replace("_", "-") if name.startswith("--") else name
            option = names.get(name, names.get(name[:2]) if not name.startswith("--") else None)
            if option is not None:
                arguments.append(name + values + value)
                takes_value = (
                    isinstance(option, TyperOption) and not option.is_flag and not option.count
                )
                if name in names and not values and takes_value:
                    arguments += take(words)
            elif takes_model and name in MODEL_OPTIONS:
                arguments += [value] if values else take(words)
            elif (key := no_effect(name)) and VLLM_PARAMETERS & {
                param.name for param in self.params
            }:
                if not is_switch(key) and not name.startswith("--no-"):
                    check_value(name, value if values else "".join(take(words)))
                ignored.append(name)
            else:
                raise UsageError(f"No such option: {name}{advice(name, names)}")
        note_without_effect(ignored)
        return super().parse_args(ctx, arguments)


class CommandGroup(TyperGroup):
    """A group of commands that lists them in `--help` with their summaries."""

    def format_help(self, ctx, formatter) -> None:
        write_help(self, ctx, formatter)

    def summary(self, ctx, name: str) -> str:
        """The first sentence of a command's help."""
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(1000)


def take(words: Iterator[str]) -> list[str]:
    """The next word as a list, which is empty at the end."""
    return [word for word in (next(words, None),) if word is not None]


def no_effect(name: str) -> str | None:
    """The key in `NO_EFFECT` of another engine's option that is a no-op here, or None."""
    key = name.lstrip("-").replace("-", "_")
    key = SHORT.get(key, key)
    return next((option for option in (key, key.removeprefix("no_")) if option in NO_EFFECT), None)


def check_value(name: str, value: str) -> None:
    """Raise UsageError if the value of a no-op option asks for something that Quire lacks."""
    key = no_effect(name) or ""
    if (allowed := VALUES.get(key, ())) and value not in allowed:
        raise UsageError(
            f"{name} is {value!r}; here it can only be {', '.join(allowed)}: {NO_EFFECT[key]}"
        )


def note_without_effect(names: list[str]) -> None:
    """Print one note that lists all ignored options with the reasons."""
    if names:
        notes = ", ".join(f"{name} ({NO_EFFECT[no_effect(name) or '']})" for name in names)
        print(f"note: without effect here: {notes}", file=sys.stderr)


def advice(name: str, names: Iterable[str]) -> str:
    """A hint for an unknown option: its equivalent in Quire, or a similarly spelled option."""
    key = name.lstrip("-").replace("-", "_")
    entry = ENGINE.get(key)
    meaning = MEANING.get(key, entry.reason if isinstance(entry, UnsupportedArgument) else None)
    if meaning is not None and not meaning.startswith("--"):
        return f" ({meaning})"
    if meaning is not None:
        return f". Here it is {meaning}." if meaning in names else ""
    options = [option for option in names if option.startswith("--")]
    suggestions = [option for option in options if alike(name.split("-"), option.split("-"))]
    if len(suggestions) > 1:  # ambiguous unless all have the same length
        same_length = all(len(suggestions[0]) == len(option) for option in suggestions)
        suggestions = difflib.get_close_matches(name, suggestions, n=1) if same_length else []
    return f". Did you mean {suggestions[0]}?" if suggestions else ""


def alike(word: list[str], candidate: list[str]) -> bool:
    """Whether two names, split into words, match up to typing errors; `word` may be a prefix."""
    if len(word) < 3 or len(word) > len(candidate):
        return False
    return all(map(same_word, word, candidate)) and (len(word) == len(candidate) or len(word) > 3)


def same_word(word: str, candidate: str) -> bool:
    if min(len(word), len(candidate)) > 2 and (
        word.startswith(candidate) or candidate.startswith(word)
    ):
        return True
    if word == candidate or len(candidate) < 4:
        return word == candidate
    close = (
        difflib.SequenceMatcher(None, word, candidate).ratio() >= MIN_SIMILARITY
        and word[:1] == candidate[:1]
    )
    return close or sorted(word) == sorted(candidate)


def write_help(command: Command | CommandGroup, ctx, formatter) -> None:
    """Write a command's usage, description, arguments, options by panel, and subcommands."""
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    for panel, rows in panels_of(command, ctx).items():
        with formatter.section(panel):
            for line in two_columns(rows, formatter.width - formatter.current_indent):
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def panels_of(command: Command | CommandGroup, ctx) -> dict[str, list[tuple[str, str]]]:
    """(names, description) of arguments, options and subcommands by panel; "Options" comes last."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if (record := param.get_help_record(ctx)) is None:
            continue
        is_argument = param.param_type_name == "argument"
        panel = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
        description = re.sub(
            r"\[default: \((.*?)\)(;.*)?\]$", r"[default: \1\2]", " ".join(record[1].split())
        )
        panels.setdefault(panel, []).append((option_names(param), description))
    if isinstance(command, CommandGroup):
        panels["Commands"] = [
            (name, command.summary(ctx, name)) for name in command.list_commands(ctx)
        ]
    return {panel: panels[panel] for panel in sorted(panels, key=lambda name: name == "Options")}


def two_columns(rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    """Lines with names and wrapped descriptions in two columns; names are never truncated."""
    name_width = (
        max((len(name) for name, _ in rows if len(name) <= NAME_COLUMNS), default=NAME_COLUMNS) + 2
    )
    for name, description in rows:
        lines = textwrap.wrap(
            description, max(width - name_width, 20), break_on_hyphens=False, break_long_words=False
        )
        label = paint(name, sys.stdout, bold=True)
        if len(name) + 2 > name_width:
            yield label
        else:
            yield (label + " " * (name_width - len(name)) + "".join(lines[:1])).rstrip()
            lines = lines[1:]
        yield from (" " * name_width + line for line in lines)


def option_names(param) -> str:
    """All names of an option and its metavar."""
    if param.param_type_name == "argument":
        return param.metavar or param.name.upper()
    names = ", ".join(sorted(param.opts, key=len))
    if param.secondary_opts:
        names += f" / {param.secondary_opts[0]}"
    if param.is_flag:
        return names
    kind = re.sub(r"list\[(.*)\]|<(.*)>", r"\1", param.bare_type())
    return f"{names} {param.metavar or METAVARS.get(kind, kind.upper())}"
