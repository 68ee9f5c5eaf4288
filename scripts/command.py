"""How a command reads its line and explains itself."""

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from ..serving.api.other_engines import MEANING, NO_EFFECT, SHORT, VALUES, is_switch
from ..serving.api.vllm_names import ENGINE, UnsupportedArgument

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
KINDS = {"int": "N", "float": "NUMBER", "str": "TEXT"}  # what stands for a value that has no name
NAMES = 30  # columns for names in a list; a longer one has a line of its own
LIKE_VLLM = {"max_model_len", "num_prompts"}  # a command with one of these has what vLLM's commands have
MODEL = ("model", "models")  # the argument, which other engines also take as an option
AS_OPTION = ("--model", "-m")
ALIKE = 0.6  # of two words, one of which is mistyped


class UsageError(typer.TyperException):
    """A command line that cannot be carried out."""

    exit_code = 2


def paint(text: str, stream: TextIO, **style: Any) -> str:
    """Text in a style, where the stream is a terminal and NO_COLOR is not set."""
    return typer.style(text, **style) if stream.isatty() and not os.environ.get("NO_COLOR") else text


class Command(TyperCommand):
    """A command whose help shows every name whole, and that knows the options of other engines."""

    def __init__(self, *arguments, context_settings: dict[str, Any] | None = None, **attributes):
        super().__init__(*arguments, context_settings=SETTINGS | (context_settings or {}), **attributes)

    def format_help(self, ctx, formatter) -> None:
        write_help(self, ctx, formatter)

    def parse_args(self, ctx, args):
        names = {name: option for option in self.get_params(ctx) for name in (*option.opts, *option.secondary_opts)}
        takes_model = any(own.param_type_name == "argument" and own.name in MODEL for own in self.params)
        kept, without = [], []
        words = iter(args)
        for word in words:
            if word == "--" or not re.match(r"--?[A-Za-z]", word):
                kept += [word, *(words if word == "--" else ())]
                continue
            name, given, value = word.partition("=")
            name = name.replace("_", "-") if name.startswith("--") else name
            option = names.get(name, names.get(name[:2]) if not name.startswith("--") else None)
            if option is not None:
                kept.append(name + given + value)
                if name in names and not given and not option.is_flag and not option.count:
                    kept += take(words)
            elif takes_model and name in AS_OPTION:
                kept += [value] if given else take(words)
            elif (key := no_effect(name)) and LIKE_VLLM & {own.name for own in self.params}:
                if not is_switch(key) and not name.startswith("--no-"):
                    check_value(name, value if given else "".join(take(words)))
                without.append(name)
            else:
                raise UsageError(f"No such option: {name}{advice(name, names)}")
        note_without_effect(without)
        return super().parse_args(ctx, kept)


def take(words: Iterator[str]) -> list[str]:
    """The next word, if there is one."""
    return [word for word in (next(words, None),) if word is not None]


def no_effect(name: str) -> str | None:
    """The name in `NO_EFFECT` of an option of another engine."""
    key = name.lstrip("-").replace("-", "_")
    key = SHORT.get(key, key)
    return next((each for each in (key, key.removeprefix("no_")) if each in NO_EFFECT), None)


def check_value(name: str, value: str) -> None:
    """Refuse a value that would have an effect if Quire could do it."""
    key = no_effect(name) or ""
    if (can := VALUES.get(key, ())) and value not in can:
        raise UsageError(f"{name} is {value!r}; here it can only be {', '.join(can)}: {NO_EFFECT[key]}")


def note_without_effect(names: list[str]) -> None:
    """One warning for all options that change nothing."""
    if names:
        said = ", ".join(f"{name} ({NO_EFFECT[no_effect(name) or '']})" for name in names)
        print(f"note: without effect here: {said}", file=sys.stderr)


def advice(name: str, names: Iterable[str]) -> str:
    """What means the same as an option that there is not, if anything does."""
    key = name.lstrip("-").replace("-", "_")
    entry = ENGINE.get(key)
    meaning = MEANING.get(key, entry.reason if isinstance(entry, UnsupportedArgument) else None)
    if meaning is not None and not meaning.startswith("--"):
        return f" ({meaning})"
    if meaning is not None:
        return f". Here it is {meaning}." if meaning in names else ""
    near = [known for known in names if known.startswith("--") and alike(name.split("-"), known.split("-"))]
    if len(near) > 1:  # not of one length, or of several equally good
        near = difflib.get_close_matches(name, near, n=1) if all(len(near[0]) == len(one) for one in near) else []
    return f". Did you mean {near[0]}?" if near else ""


def alike(given: list[str], known: list[str]) -> bool:
    """Whether each word is the other's, but for slips of the finger; the last words may be left out."""
    if len(given) < 3 or len(given) > len(known):
        return False
    return all(map(same_word, given, known)) and (len(given) == len(known) or len(given) > 3)


def same_word(given: str, known: str) -> bool:
    if min(len(given), len(known)) > 2 and (given.startswith(known) or known.startswith(given)):
        return True
    if given == known or len(known) < 4:
        return given == known
    close = difflib.SequenceMatcher(None, given, known).ratio() >= ALIKE and given[:1] == known[:1]
    return close or sorted(given) == sorted(known)


def write_help(command: TyperCommand | TyperGroup, ctx, formatter) -> None:
    """Usage, what the command does, and lists of arguments, options by panel, and commands."""
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    for panel, rows in panels_of(command, ctx).items():
        with formatter.section(panel):
            for line in listed(rows, formatter.width - formatter.current_indent):
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def panels_of(command: TyperCommand | TyperGroup, ctx) -> dict[str, list[tuple[str, str]]]:
    """By panel (name, what is said of it) of arguments, options and commands; those of every command come last."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if (record := param.get_help_record(ctx)) is None:
            continue
        argument = param.param_type_name == "argument"
        panel = "Arguments" if argument else getattr(param, "rich_help_panel", None) or "Options"
        about = re.sub(r"\[default: \((.*?)\)(;.*)?\]$", r"[default: \1\2]", " ".join(record[1].split()))
        panels.setdefault(panel, []).append((names_of(param), about))
    if isinstance(command, TyperGroup):
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            about = "" if found is None else found.get_short_help_str(1000)
            panels.setdefault("Commands", []).append((name, about))
    return {panel: panels[panel] for panel in sorted(panels, key=lambda name: name == "Options")}


def listed(rows: list[tuple[str, str]], width: int) -> Iterator[str]:
    """Names and what is said of each, in two columns; no name is cut, neither there nor in what is said."""
    room = max((len(name) for name, _ in rows if len(name) <= NAMES), default=NAMES) + 2
    for name, about in rows:
        lines = textwrap.wrap(about, max(width - room, 20), break_on_hyphens=False, break_long_words=False)
        shown = paint(name, sys.stdout, bold=True)
        if len(name) + 2 > room:
            yield shown
        else:
            yield (shown + " " * (room - len(name)) + "".join(lines[:1])).rstrip()
            lines = lines[1:]
        yield from (" " * room + line for line in lines)


def names_of(param) -> str:
    """All names of an option, and what stands for its value."""
    if param.param_type_name == "argument":
        return param.metavar or param.name.upper()
    names = ", ".join(sorted(param.opts, key=len))
    if param.secondary_opts:
        names += f" / {param.secondary_opts[0]}"
    if param.is_flag:
        return names
    kind = re.sub(r"list\[(.*)\]|<(.*)>", r"\1", param.bare_type())
    return f"{names} {param.metavar or KINDS.get(kind, kind.upper())}"
