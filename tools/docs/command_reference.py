"""The reference of the command line: what `--help` says, as a page for each command."""

from typing import Any

import typer

from quire.__main__ import COMMANDS, app
from quire.scripts.command import panels_of

from .tables import cell, table


def command_pages() -> dict[str, str]:
    """By command, in the order of the command table."""
    group = typer.main.get_command(app)
    return {
        name: f"# quire {name}\n\n{described(group.get_command(None, name), f'quire {name}', 2)}"
        for name in COMMANDS
    }


def described(command: Any, name: str, level: int) -> str:
    """A command's usage, help and options; one of several is followed by these."""
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"```\n{usage}\n```", *(paragraph for paragraph in (command.help or "").split("\n\n"))]
    for panel, rows in panels_of(command, context).items():
        if panel != "Commands":
            rows = [(f"`{names}`", cell(about)) for names, about in rows if names != "-h, --help"]
            parts += [f"**{panel}**", table(("", ""), rows)] if rows else []
    for inner in getattr(command, "commands", ()):
        parts += [
            f"{'#' * level} {name} {inner}",
            described(command.get_command(context, inner), f"{name} {inner}", level + 1),
        ]
    return "\n\n".join(parts) + "\n"
