"""The command-line reference: a page for each command, generated from its `--help`."""

from typing import Any

import typer

from quire.__main__ import COMMANDS, Commands, app
from quire.scripts.command import panels_of

from .tables import cell, table


def command_pages() -> dict[str, str]:
    """The Markdown page of each command by its name, in the order of `COMMANDS`."""
    group = typer.main.get_command(app)
    assert isinstance(group, Commands)
    context = typer.Context(group)
    page_by_command = {}
    for name in COMMANDS:
        description = describe_command(group.get_command(context, name), f"quire {name}", 2)
        page_by_command[name] = f"# quire {name}\n\n{description}"
    return page_by_command


def describe_command(command: Any, name: str, level: int) -> str:
    """A command's usage, help and options in Markdown, followed by its subcommands.

    `level` is the heading level of the subcommands.
    """
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    paragraphs = [
        f"```\n{usage}\n```",
        *(paragraph for paragraph in (command.help or "").split("\n\n")),
    ]
    for panel, rows in panels_of(command, context).items():
        if panel != "Commands":
            rows = [
                (f"`{names}`", cell(description))
                for names, description in rows
                if names != "-h, --help"
            ]
            paragraphs += [f"**{panel}**", table(("", ""), rows)] if rows else []
    for inner in getattr(command, "commands", ()):
        paragraphs += [
            f"{'#' * level} {name} {inner}",
            describe_command(command.get_command(context, inner), f"{name} {inner}", level + 1),
        ]
    return "\n\n".join(paragraphs) + "\n"
